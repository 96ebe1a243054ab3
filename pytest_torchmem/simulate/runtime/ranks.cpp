#include "ranks.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

namespace simulated {
namespace {

using Clock = std::chrono::steady_clock;
// torch's own limit for NCCL.
constexpr std::chrono::minutes kLongestWait{10};

thread_local std::string why;

bool fail_because(const std::string& text) {
  why = text;
  return false;
}

std::string numbered(int rank, int count) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(count);
}

std::string described(const Call& call) {
  static const char* names[] = {"a reduction", "a gathering", "a broadcast",
                                "an exchange", "a transfer",  "a split"};
  return std::string(names[call.kind]) + " of " + std::to_string(call.bytes) + " bytes";
}

// An address that needs no file, and is gone with the process.
socklen_t address_of(const std::string& name, int rank, sockaddr_un& out) {
  out = {};
  out.sun_family = AF_UNIX;
  const std::string text = "torchmem-" + name + "-" + std::to_string(rank);
  const size_t length = std::min(text.size(), sizeof out.sun_path - 1);
  std::memcpy(out.sun_path + 1, text.data() + text.size() - length, length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

bool send_all(int socket, const void* bytes, size_t count) {
  auto* next = static_cast<const char*>(bytes);
  while (count) {
    const ssize_t sent = ::send(socket, next, count, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    next += sent;
    count -= sent;
  }
  return true;
}

bool receive_all(int socket, void* bytes, size_t count) {
  auto* next = static_cast<char*>(bytes);
  while (count) {
    const ssize_t got = ::recv(socket, next, count, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    next += got;
    count -= got;
  }
  return true;
}

struct Header {
  Call call;
  uint64_t bytes;
  int32_t present, exact;
};

}  // namespace

const std::string& why_ranks_failed() { return why; }

std::shared_ptr<Ranks> Ranks::join(const std::string& name, int count, int rank) {
  std::shared_ptr<Ranks> own(new Ranks(name, count, rank));
  bool joined = own->listen();
  for (int other = 0; joined && other < rank; ++other) joined = own->connect_to(other);
  if (joined) return own;
  own->leave();
  return nullptr;
}

bool Ranks::listen() {
  sockaddr_un address;
  const socklen_t length = address_of(name, rank, address);
  listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(listening_, reinterpret_cast<sockaddr*>(&address), length) ||
      ::listen(listening_, count)) {
    return fail_because(numbered(rank, count) + " is there twice");
  }
  std::thread([own = shared_from_this()] { own->accept_others(); }).detach();
  return true;
}

bool Ranks::connect_to(int other) {
  sockaddr_un address;
  const socklen_t length = address_of(name, other, address);
  const auto end = Clock::now() + kLongestWait;
  while (Clock::now() < end) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!::connect(socket, reinterpret_cast<sockaddr*>(&address), length) &&
        send_all(socket, &rank, sizeof rank)) {
      meet(other, socket);
      return true;
    }
    ::close(socket);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return fail_because(
      numbered(rank, count) + " has waited 10 minutes for rank " + std::to_string(other) +
      ", which is not on this machine; -o torchmem_world=N simulates one rank of many by itself");
}

void Ranks::accept_others() {
  for (int missing = count - 1 - rank; missing > 0; --missing) {
    const int socket = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    int other = -1;
    if (socket < 0 || !receive_all(socket, &other, sizeof other)) break;
    if (other > rank && other < count) meet(other, socket);
  }
}

void Ranks::meet(int other, int socket) {
  const std::lock_guard<std::mutex> lock(guard_);
  peers_[other].socket = socket;
  std::thread([own = shared_from_this(), other, socket] { own->listen_to(other, socket); }).detach();
  changed_.notify_all();
}

void Ranks::listen_to(int other, int socket) {
  Header header;
  while (receive_all(socket, &header, sizeof header)) {
    Message message{header.call, {std::vector<char>(header.bytes), header.present != 0,
                                  header.exact != 0}};
    if (!receive_all(socket, message.part.values.data(), header.bytes)) break;
    const std::lock_guard<std::mutex> lock(guard_);
    peers_[other].come.push_back(std::move(message));
    changed_.notify_all();
  }
  const std::lock_guard<std::mutex> lock(guard_);
  peers_[other].ended = true;
  changed_.notify_all();
}

bool Ranks::wait_for(std::unique_lock<std::mutex>& lock, int other, bool (*ready)(const Peer&)) {
  const Peer& peer = peers_[other];
  const bool came = changed_.wait_until(lock, Clock::now() + kLongestWait, [&] {
    return left_ || peer.ended || ready(peer);
  });
  if (ready(peer)) return true;
  const std::string pair = numbered(rank, count) + " waits for rank " + std::to_string(other);
  if (left_) return fail_because(pair + " after its own communicator was given up");
  if (came) return fail_because(pair + ", which has ended or has left the group");
  return fail_because(
      pair + " for 10 minutes; -o torchmem_world=N simulates one rank of many by itself");
}

bool Ranks::give(int to, const Call& call, const Part& part) {
  std::unique_lock<std::mutex> lock(guard_);
  if (to == rank) {
    peers_[to].come.push_back({call, part});
    return true;
  }
  if (!wait_for(lock, to, [](const Peer& peer) { return peer.socket >= 0; })) return false;
  const Header header{call, part.values.size(), part.present, part.exact};
  const int socket = peers_[to].ended ? -1 : peers_[to].socket;
  lock.unlock();
  return (send_all(socket, &header, sizeof header) &&
          send_all(socket, part.values.data(), part.values.size())) ||
         fail_because(numbered(rank, count) + " sends to rank " + std::to_string(to) +
                      ", which has ended or has left the group");
}

bool Ranks::take(int from, const Call& call, Part& part) {
  std::unique_lock<std::mutex> lock(guard_);
  if (!wait_for(lock, from, [](const Peer& peer) { return !peer.come.empty(); })) return false;
  Message message = std::move(peers_[from].come.front());
  peers_[from].come.pop_front();
  part = std::move(message.part);
  return message.call == call ||
         fail_because(numbered(rank, count) + " takes part in " + described(call) + ", rank " +
                      std::to_string(from) + " in " + described(message.call) +
                      "; GPUs would wait for each other without end");
}

void Ranks::leave() {
  const std::lock_guard<std::mutex> lock(guard_);
  left_ = true;
  if (listening_ >= 0) ::shutdown(listening_, SHUT_RDWR);
  for (const Peer& peer : peers_) {
    if (peer.socket >= 0 && !peer.ended) ::shutdown(peer.socket, SHUT_RDWR);
  }
  changed_.notify_all();
}

Ranks::~Ranks() {
  if (listening_ >= 0) ::close(listening_);
  for (const Peer& peer : peers_) {
    if (peer.socket >= 0) ::close(peer.socket);
  }
}

}  // namespace simulated
