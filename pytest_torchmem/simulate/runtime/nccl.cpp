// NCCL: communicators that are ready, and collectives that return at once.
//
// The other ranks are not asked, even where they run beside this one: each is taken to have what this
// one has. So the sum of a value is as many times the value as there are ranks, what is gathered is
// this rank's part in every place, and a broadcast leaves what is there. That keeps exact what
// decides shapes and branches (sizes that ranks tell each other, pickled objects, flags), where it was
// exact before; of a large tensor nothing is known afterwards.
//
// The buffers that NCCL takes for itself are not torch's memory, and are not counted.

#include "shared.h"

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

using namespace simulated;

namespace {

struct Communicator {
  int count;  // 0 where it is not known
  int rank, device;
};

constexpr size_t kMostComputed = size_t{4} << 20;
constexpr int kSum = 0, kProduct = 1, kFirstOwnOperation = 5;

size_t element_bytes(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? bytes[type] : 1;
}

const Communicator& communicator(const void* handle) {
  return *static_cast<const Communicator*>(handle);
}

int give_communicator(void** out, int count, int rank) {
  *out = new Communicator{count, rank, current_device()};
  return 0;
}

template <typename T>
void reduce_as(char* bytes, size_t count, int operation, int ranks) {
  for (size_t at = 0; at < count; ++at) {
    T value;
    std::memcpy(&value, bytes + at * sizeof(T), sizeof(T));
    value = operation == kSum ? T(value * ranks) : T(std::pow(value, ranks));
    std::memcpy(bytes + at * sizeof(T), &value, sizeof(T));
  }
}

// What all ranks together make of elements that each of them has; false if it is not computed here.
bool reduce_in_place(std::vector<char>& bytes, int type, int operation, int ranks) {
  const size_t count = bytes.size() / element_bytes(type);
  if (operation != kSum && operation != kProduct && operation < kFirstOwnOperation) return true;
  bool zero = true;
  for (char byte : bytes) zero = zero && byte == 0;
  if (zero) return true;
  if (operation >= kFirstOwnOperation || !ranks) return false;
  switch (type) {
    case 0: reduce_as<int8_t>(bytes.data(), count, operation, ranks); return true;
    case 1: reduce_as<uint8_t>(bytes.data(), count, operation, ranks); return true;
    case 2: reduce_as<int32_t>(bytes.data(), count, operation, ranks); return true;
    case 3: reduce_as<uint32_t>(bytes.data(), count, operation, ranks); return true;
    case 4: reduce_as<int64_t>(bytes.data(), count, operation, ranks); return true;
    case 5: reduce_as<uint64_t>(bytes.data(), count, operation, ranks); return true;
    case 7: reduce_as<float>(bytes.data(), count, operation, ranks); return true;
    case 8: reduce_as<double>(bytes.data(), count, operation, ranks); return true;
    default: return false;
  }
}

void reduce(const char* send, void* receive, size_t count, int type, int operation, int ranks) {
  const size_t bytes = count * element_bytes(type);
  if (bytes > kMostComputed || !is_known(send, bytes)) return forget_bytes(receive, bytes);
  std::vector<char> values(send, send + bytes);
  if (!reduce_in_place(values, type, operation, ranks)) return forget_bytes(receive, bytes);
  copy_bytes(receive, values.data(), bytes);
}

// Puts the same part into the place of each rank.
void spread(const void* part, void* receive, size_t bytes, int ranks) {
  if (!bytes || !ranks) return;
  auto* start = static_cast<char*>(receive);
  if (bytes * ranks > kMostComputed || !is_known(part, bytes)) {
    return forget_bytes(receive, bytes * ranks);
  }
  const std::vector<char> values(static_cast<const char*>(part),
                                 static_cast<const char*>(part) + bytes);
  for (int rank = 0; rank < ranks; ++rank) copy_bytes(start + rank * bytes, values.data(), bytes);
}

// --- sends and receives --------------------------------------------------------------------------
//
// Where all exchange with all, a partner sends what this rank sends to itself. Between two, a partner
// answers with what it was sent, as in a vote that passes from stage to stage and back.

struct Transfer {
  const Communicator* among;
  void* start;
  size_t bytes;
  int partner;
};

using Values = std::vector<char>;
using Exchange = std::tuple<const Communicator*, int, size_t>;  // with whom, and how many bytes

thread_local int open_groups = 0;
thread_local std::vector<Transfer> sent, received;
auto& guard = forever<std::mutex>();
auto& to_answer = forever<std::map<Exchange, Values>>();

// What is in a small tensor, if that is known, and nothing otherwise.
Values known_values(const Transfer& transfer) {
  if (transfer.bytes > kMostComputed || !is_known(transfer.start, transfer.bytes)) return {};
  const auto* start = static_cast<const char*>(transfer.start);
  return Values(start, start + transfer.bytes);
}

Values answer(const Transfer& transfer) {
  const int own = transfer.among->rank;
  const auto found = to_answer.find({transfer.among, own, transfer.bytes});
  if (found != to_answer.end()) return found->second;
  const auto echo = to_answer.find({transfer.among, transfer.partner, transfer.bytes});
  return echo == to_answer.end() ? Values() : echo->second;
}

void finish_group() {
  const std::lock_guard<std::mutex> lock(guard);
  for (const Transfer& own : sent) {
    to_answer[{own.among, own.partner, own.bytes}] = known_values(own);
  }
  for (const Transfer& transfer : received) {
    const Values values = answer(transfer);
    if (values.empty()) {
      forget_bytes(transfer.start, transfer.bytes);
    } else {
      copy_bytes(transfer.start, values.data(), transfer.bytes);
    }
  }
  for (const Transfer& own : sent) to_answer.erase({own.among, own.among->rank, own.bytes});
  for (const Transfer& got : received) to_answer.erase({got.among, got.partner, got.bytes});
  sent.clear();
  received.clear();
}

constexpr double kCollectiveMicroseconds = 20;

int done(cudaStream_t stream) {
  enqueue(stream, kCollectiveMicroseconds);
  return 0;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* out) {
  *out = 22907;
  return 0;
}

struct UniqueId {
  char bytes[128];
};
int ncclGetUniqueId(UniqueId* out) {
  *out = {};
  return 0;
}
int ncclCommInitRank(void** out, int count, UniqueId, int rank) {
  return give_communicator(out, count, rank);
}
int ncclCommInitRankConfig(void** out, int count, UniqueId, int rank, void*) {
  return give_communicator(out, count, rank);
}
int ncclCommInitRankScalable(void** out, int count, int rank, int, UniqueId*, void*) {
  return give_communicator(out, count, rank);
}
// The size of the part is known to those who split, and is not told.
int ncclCommSplit(void*, int, int rank, void** out, void*) { return give_communicator(out, 0, rank); }
int ncclCommInitAll(void** out, int count, const int*) {
  for (int rank = 0; rank < count; ++rank) give_communicator(out + rank, count, rank);
  return 0;
}
int ncclCommDestroy(void* handle) {
  delete static_cast<Communicator*>(handle);
  return 0;
}
int ncclCommAbort(void* handle) { return ncclCommDestroy(handle); }
int ncclCommCount(const void* handle, int* out) {
  *out = communicator(handle).count;
  return 0;
}
int ncclCommUserRank(const void* handle, int* out) {
  *out = communicator(handle).rank;
  return 0;
}
int ncclCommCuDevice(const void* handle, int* out) {
  *out = communicator(handle).device;
  return 0;
}
int ncclCommGetAsyncError(void*, int* out) {
  *out = 0;
  return 0;
}
int ncclMemAlloc(void** out, size_t bytes) { return cudaMalloc(out, bytes); }
int ncclMemFree(void* pointer) { return cudaFree(pointer); }
const char* ncclGetErrorString(int) { return "error of the simulated NCCL"; }
const char* ncclGetLastError(void*) { return ""; }

int ncclRedOpCreatePreMulSum(int* out, void*, int, int, void*) {
  *out = kFirstOwnOperation;
  return 0;
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation,
                  void* handle, cudaStream_t stream) {
  reduce(static_cast<const char*>(send), receive, count, type, operation,
         communicator(handle).count);
  return done(stream);
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int operation, int root,
               void* handle, cudaStream_t stream) {
  const Communicator& among = communicator(handle);
  if (among.rank == root) {
    reduce(static_cast<const char*>(send), receive, count, type, operation, among.count);
  }
  return done(stream);
}

int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation,
                      void* handle, cudaStream_t stream) {
  const Communicator& among = communicator(handle);
  const char* own = static_cast<const char*>(send) + among.rank * count * element_bytes(type);
  reduce(own, receive, count, type, operation, among.count);
  return done(stream);
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int /*root*/, void*,
                  cudaStream_t stream) {
  if (send != receive) copy_bytes(receive, send, count * element_bytes(type));
  return done(stream);
}
int ncclBcast(void*, size_t, int, int, void*, cudaStream_t stream) { return done(stream); }

int ncclAllGather(const void* send, void* receive, size_t count, int type, void* handle,
                  cudaStream_t stream) {
  spread(send, receive, count * element_bytes(type), communicator(handle).count);
  return done(stream);
}

int ncclAlltoAll(const void* send, void* receive, size_t count, int type, void* handle,
                 cudaStream_t stream) {
  const Communicator& among = communicator(handle);
  const size_t bytes = count * element_bytes(type);
  spread(static_cast<const char*>(send) + among.rank * bytes, receive, bytes, among.count);
  return done(stream);
}

int ncclGroupStart() {
  ++open_groups;
  return 0;
}
int ncclGroupEnd() {
  if (open_groups && !--open_groups) finish_group();
  return 0;
}
int ncclSend(const void* send, size_t count, int type, int partner, void* handle,
             cudaStream_t stream) {
  sent.push_back({&communicator(handle), const_cast<void*>(send), count * element_bytes(type), partner});
  if (!open_groups) finish_group();
  return done(stream);
}
int ncclRecv(void* receive, size_t count, int type, int partner, void* handle,
             cudaStream_t stream) {
  received.push_back({&communicator(handle), receive, count * element_bytes(type), partner});
  if (!open_groups) finish_group();
  return done(stream);
}

}  // extern "C"
