// The ranks of a job that run beside each other on this machine, and the messages between them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

// What a rank does in a collective; where two ranks meet, both have to do the same.
struct Call {
  enum Kind : int32_t { kReduce, kGather, kBroadcast, kExchange, kTransfer, kSplit };
  Kind kind;
  int32_t how;  // the operation, or the root
  uint64_t bytes;

  bool operator==(const Call& other) const {
    return kind == other.kind && how == other.how && bytes == other.bytes;
  }
};

// The bytes that a rank gives to another.
struct Part {
  std::vector<char> values;
  bool present = false;  // false where there are too many of them to be told
  bool exact = false;
};

// One rank's connections to the others of a communicator.
//
// Each pair has a socket. A thread for each socket takes in what comes, so that nobody who sends
// waits for one who does something else.
class Ranks : public std::enable_shared_from_this<Ranks> {
 public:
  // Waits until each rank below this one is there. Returns nullptr, and says why, if one does not come.
  static std::shared_ptr<Ranks> join(const std::string& name, int count, int rank);

  // Both return false, and say why, if the other rank has ended, does something else or is not there.
  bool give(int to, const Call& call, const Part& part);
  bool take(int from, const Call& call, Part& part);

  void leave();
  ~Ranks();

  const std::string name;
  const int count, rank;

 private:
  struct Message {
    Call call;
    Part part;
  };
  struct Peer {
    int socket = -1;
    bool ended = false;
    std::deque<Message> come;
  };

  Ranks(const std::string& name, int count, int rank)
      : name(name), count(count), rank(rank), peers_(count) {}

  bool listen();
  bool connect_to(int other);
  void accept_others();
  void meet(int other, int socket);
  void listen_to(int other, int socket);
  bool wait_for(std::unique_lock<std::mutex>& lock, int other, bool (*ready)(const Peer&));

  std::mutex guard_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  int listening_ = -1;
  bool left_ = false;
};

// Why the last call of this thread failed.
const std::string& why_ranks_failed();

}  // namespace simulated
