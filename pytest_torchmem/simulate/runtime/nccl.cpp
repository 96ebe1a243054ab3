// NCCL: communicators, and collectives that have left their result when they return.
//
// Ranks that run beside each other exchange their values, and a rank that is run alone
// (torchmem_world) is taken to be like all others. So there the sum of a value is as many times the value
// as there are ranks, what is gathered is this rank's part in every place, and a broadcast leaves what
// is there. That keeps exact what decides shapes and branches (sizes that ranks tell each other,
// pickled objects, flags), where it was exact before; of a large tensor nothing is known afterwards.
//
// The buffers that NCCL takes for itself are not torch's memory, and are not counted.

#include <sys/random.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "ranks.h"
#include "shared.h"

using namespace simulated;

namespace {

struct Communicator {
  int count;  // 0 where it is not known
  int rank, device;
  std::shared_ptr<Ranks> ranks;  // none where this rank is run alone
  int splits;
};

constexpr size_t kMostComputed = size_t{4} << 20, kMostOfObjects = size_t{256} << 20;
constexpr int kBytes = 1;  // of unknown use
constexpr int kSum = 0, kProduct = 1, kLargest = 2, kSmallest = 3, kFirstOwnOperation = 5;
constexpr int kFailed = 5;  // ncclInvalidUsage
constexpr int kNoColor = -1;
constexpr int kNamedBytes = 16;

struct UniqueId {
  char bytes[128];
};

size_t element_bytes(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? bytes[type] : 1;
}

Communicator& communicator(const void* handle) {
  return *static_cast<Communicator*>(const_cast<void*>(handle));
}

int give_communicator(void** out, int count, int rank, std::shared_ptr<Ranks> ranks = nullptr) {
  *out = new Communicator{count, rank, current_device(), std::move(ranks), 0};
  return 0;
}

int join(void** out, const std::string& name, int count, int rank) {
  auto ranks = Ranks::join(name, count, rank);
  return ranks ? give_communicator(out, count, rank, ranks) : kFailed;
}

// --- numbers of NCCL's types; eight bits of a float are not read ------------------------------------

using Number = long double;  // holds each integer of 64 bits

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float float_of_half(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  const float small = std::ldexp(static_cast<float>(rest & 0x3ffu), -24);
  if (rest < 0x400u) return sign ? -small : small;
  return float_of_bits(sign | ((rest << 13) + 0x38000000u));
}

uint16_t half_of_float(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000u : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00u;
  if (size >= 65520) return sign | 0x7c00u;
  int exponent = size ? std::max(std::ilogb(size), -14) : -14;
  // Ten bits behind the point; a carry out of them is the next exponent.
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign + ((exponent + 14) << 10) + steps);
}

uint16_t brain_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

template <typename T>
T at(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

Number read_number(int type, const char* bytes) {
  switch (type) {
    case 0: return at<int8_t>(bytes);
    case 1: return at<uint8_t>(bytes);
    case 2: return at<int32_t>(bytes);
    case 3: return at<uint32_t>(bytes);
    case 4: return at<int64_t>(bytes);
    case 5: return at<uint64_t>(bytes);
    case 6: return float_of_half(at<uint16_t>(bytes));
    case 7: return at<float>(bytes);
    case 8: return at<double>(bytes);
    default: return float_of_bits(uint32_t{at<uint16_t>(bytes)} << 16);
  }
}

template <typename T>
void put(char* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
}

void write_number(int type, char* bytes, Number value) {
  switch (type) {
    case 0: return put(bytes, static_cast<int8_t>(static_cast<int64_t>(value)));
    case 1: return put(bytes, static_cast<uint8_t>(static_cast<int64_t>(value)));
    case 2: return put(bytes, static_cast<int32_t>(static_cast<int64_t>(value)));
    case 3: return put(bytes, static_cast<uint32_t>(static_cast<int64_t>(value)));
    case 4: return put(bytes, static_cast<int64_t>(value));
    case 5: return put(bytes, static_cast<uint64_t>(value));
    case 6: return put(bytes, half_of_float(static_cast<float>(value)));
    case 7: return put(bytes, static_cast<float>(value));
    case 8: return put(bytes, static_cast<double>(value));
    default: return put(bytes, brain_of_float(static_cast<float>(value)));
  }
}

bool has_numbers(int type) { return type >= 0 && type <= 9; }

// --- reductions ---------------------------------------------------------------------------------

auto& guard = forever<std::mutex>();
auto& factors = forever<std::vector<Number>>();  // of the operations that a program has made

Number factor_of(int operation) {
  const std::lock_guard<std::mutex> lock(guard);
  const size_t number = operation - kFirstOwnOperation;
  return operation < kFirstOwnOperation || number >= factors.size() ? 1 : factors[number];
}

Number combined(int operation, Number one, Number other) {
  switch (operation) {
    case kProduct: return one * other;
    case kLargest: return std::max(one, other);
    case kSmallest: return std::min(one, other);
    default: return one + other;
  }
}

// What `count` ranks make of the numbers that the given parts hold; a single part is that of each rank.
Number reduced(int operation, const std::vector<Part>& parts, int type, size_t offset, int count) {
  const Number factor = factor_of(operation);
  Number value = read_number(type, parts[0].values.data() + offset) * factor;
  const bool is_sum = operation == kSum || operation >= kFirstOwnOperation;
  if (parts.size() == 1) {
    return is_sum ? value * count : operation == kProduct ? std::pow(value, Number(count)) : value;
  }
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    const char* next = parts[rank].values.data() + offset;
    value = combined(operation, value, read_number(type, next) * factor);
  }
  return is_sum || operation == kProduct || operation == kLargest || operation == kSmallest
             ? value
             : value / count;
}

Part reduce(const std::vector<Part>& parts, int type, int operation, int count) {
  Part made{{}, count && has_numbers(type), true};
  for (const Part& part : parts) {
    made.present = made.present && part.present;
    made.exact = made.exact && part.exact;
  }
  if (!made.present) return made;
  made.values.resize(parts[0].values.size());
  for (size_t offset = 0; offset < made.values.size(); offset += element_bytes(type)) {
    write_number(type, made.values.data() + offset,
                 reduced(operation, parts, type, offset, count));
  }
  return made;
}

// --- memory ---------------------------------------------------------------------------------------

// Objects are sent as their bytes, and an object in which some are missing is none.
size_t most_bytes(int type) { return element_bytes(type) == 1 ? kMostOfObjects : kMostComputed; }

Part read_part(const void* start, size_t bytes, int type) {
  if (bytes > most_bytes(type) || (bytes > kMostComputed && !is_known(start, bytes))) return {};
  const auto* first = static_cast<const char*>(start);
  return {std::vector<char>(first, first + bytes), true, is_known(start, bytes)};
}

void write_part(void* start, size_t bytes, const Part& part) {
  if (!bytes) return;
  if (!part.present) return forget_bytes(start, bytes);
  copy_bytes(start, part.values.data(), bytes);
  if (!part.exact) note_values(start, bytes, false);
}

// --- what is asked for, up to the end of a group ----------------------------------------------------

constexpr int kEachRank = -1;

struct Operation {
  const void* handle;
  Communicator among;
  Call call;
  int type;
  const char* send;  // nullptr where this rank only receives
  char* receive;     // nullptr where it only sends
  int giver, taker;  // a rank, or each
  bool in_parts;     // to each rank its own part of what is sent

  bool gives() const { return send && (giver == kEachRank || giver == among.rank); }
  bool takes() const { return receive && (taker == kEachRank || taker == among.rank); }
  const char* sent_to(int rank) const { return send + (in_parts ? rank * call.bytes : 0); }
  // What a rank gives to itself needs no message, but for a transfer, whose end is a call of its own.
  bool keeps(int rank) const { return rank == among.rank && call.kind != Call::kTransfer; }
};

thread_local int open_groups = 0;
int ranks_of_next_split = 0;
thread_local std::vector<Operation> asked;

bool give(const Operation& own) {
  if (!own.gives()) return true;
  for (int to = 0; to < own.among.count; ++to) {
    if (own.keeps(to) || (own.taker != kEachRank && to != own.taker)) continue;
    const Part part = read_part(own.sent_to(to), own.call.bytes, own.type);
    if (!own.among.ranks->give(to, own.call, part)) return false;
  }
  return true;
}

bool take(const Operation& own) {
  if (!own.takes()) return true;
  const size_t bytes = own.call.bytes;
  const bool reduces = own.call.kind == Call::kReduce;
  const char* kept = own.sent_to(own.among.rank);
  char* next = own.receive;
  std::vector<Part> parts;
  for (int from = 0; from < own.among.count; ++from) {
    if (own.giver != kEachRank && from != own.giver) continue;
    Part part;
    if (!own.keeps(from)) {
      if (!own.among.ranks->take(from, own.call, part)) return false;
    } else if (reduces) {
      part = read_part(kept, bytes, own.type);
    }
    if (reduces) {
      parts.push_back(std::move(part));
    } else if (!own.keeps(from)) {
      write_part(next, bytes, part);
    } else if (next != kept) {
      copy_bytes(next, kept, bytes);
    }
    next += bytes;
  }
  if (reduces) write_part(own.receive, bytes, reduce(parts, own.type, own.call.how, own.among.count));
  return true;
}

// --- a rank that is run alone ------------------------------------------------------------------------
//
// Where all exchange with all, a partner sends what this rank sends to itself. Between two, a partner
// answers with what it was sent, as in a vote that passes from stage to stage and back. One who
// speaks first sends what this rank sends another at that time, or keeps for itself; and where there
// is nothing it agrees: a single number of 32 bits is 1.

using Exchange = std::tuple<const void*, int, size_t>;  // with whom, and how many bytes

auto& to_answer = forever<std::map<Exchange, Part>>();
thread_local Part kept_in_group;  // what was last copied on the device since a group was opened

// What the last group has received from all others and nobody told. From torch 2.15 on a rank that gathers
// copies what it keeps for itself right behind the group.
struct Untold {
  std::vector<Operation> operations;
  uint64_t work = 0;  // that was given up to its end
};
thread_local Untold untold;

Part said_first(const Operation& own, const std::vector<Operation>& transfers) {
  for (const Operation& other : transfers) {
    if (other.send && other.call.bytes == own.call.bytes) return read_part(other.send, own.call.bytes, own.type);
  }
  if (kept_in_group.values.size() == own.call.bytes) return kept_in_group;
  untold.operations.push_back(own);
  if (own.call.bytes != 4 || element_bytes(own.type) != 4 || own.type > 3) return {};
  Part yes{std::vector<char>(4), true, false};
  write_number(own.type, yes.values.data(), 1);
  return yes;
}

}  // namespace

void simulated::note_copy(const void* from, size_t bytes) {
  if (!gpu().alone || !is_device(from)) return;
  if (open_groups) kept_in_group = read_part(from, bytes, kBytes);
  for (const Operation& own : std::exchange(untold.operations, {})) {
    if (untold.work != work_so_far() || own.call.bytes != bytes) continue;
    if (is_device_range(own.receive, bytes)) write_part(own.receive, bytes, read_part(from, bytes, own.type));
  }
}

namespace {

void transfer_alone(const std::vector<Operation>& transfers) {
  const std::lock_guard<std::mutex> lock(guard);
  untold = {{}, work_so_far()};
  for (const Operation& own : transfers) {
    if (own.send) {
      to_answer[{own.handle, own.taker, own.call.bytes}] = read_part(own.send, own.call.bytes, own.type);
    }
  }
  for (const Operation& own : transfers) {
    if (own.send) continue;
    auto found = to_answer.find({own.handle, own.among.rank, own.call.bytes});
    if (found == to_answer.end()) found = to_answer.find({own.handle, own.giver, own.call.bytes});
    write_part(own.receive, own.call.bytes,
               found == to_answer.end() ? said_first(own, transfers) : found->second);
  }
  for (const Operation& own : transfers) {
    const int partner = own.send ? own.among.rank : own.giver;
    to_answer.erase({own.handle, partner, own.call.bytes});
  }
  if (!transfers.empty() && untold.operations.size() + 1 != static_cast<size_t>(transfers[0].among.count)) {
    untold.operations.clear();
  }
}

void broadcast_alone(const Operation& own, const std::vector<Operation>& group) {
  const auto given = std::find_if(group.begin(), group.end(), [&](const Operation& other) {
    return other.handle == own.handle && other.call.kind == Call::kBroadcast &&
           other.giver == own.among.rank;
  });
  if (given == group.end()) return;
  if (given->call.bytes != own.call.bytes) return forget_bytes(own.receive, own.call.bytes);
  if (own.receive != given->send) copy_bytes(own.receive, given->send, own.call.bytes);
}

void do_alone(const Operation& own, const std::vector<Operation>& group) {
  const size_t bytes = own.call.bytes;
  if (!own.takes()) return;
  if (own.call.kind == Call::kBroadcast) return broadcast_alone(own, group);
  const Part part = read_part(own.sent_to(own.among.rank), bytes, own.type);
  if (own.call.kind == Call::kReduce) {
    return write_part(own.receive, bytes, reduce({part}, own.type, own.call.how, own.among.count));
  }
  if (!own.among.count) return doubt_block(own.receive);
  const bool is_small = bytes * own.among.count <= most_bytes(own.type);
  for (int rank = 0; rank < own.among.count; ++rank) {
    write_part(own.receive + rank * bytes, bytes, is_small ? part : Part());
  }
}

// --- calls --------------------------------------------------------------------------------------------

constexpr double kCollectiveMicroseconds = 20;

// Does what was asked for. What one rank waits for is sent before any waits.
int finish() {
  std::vector<Operation> operations, transfers_alone;
  operations.swap(asked);
  for (const Operation& own : operations) {
    if (own.among.ranks && !give(own)) return kFailed;
  }
  for (const Operation& own : operations) {
    if (own.among.ranks) {
      if (!take(own)) return kFailed;
    } else if (own.call.kind == Call::kTransfer) {
      transfers_alone.push_back(own);
    } else {
      do_alone(own, operations);
    }
  }
  transfer_alone(transfers_alone);
  return 0;
}

struct Roles {
  int giver = kEachRank, taker = kEachRank;
  bool in_parts = false;
};

int ask(Call::Kind kind, int how, const void* send, void* receive, size_t count, int type, Roles roles,
        void* handle, cudaStream_t stream) {
  enqueue(stream, kCollectiveMicroseconds);
  asked.push_back({handle, communicator(handle), Call{kind, how, count * element_bytes(type)}, type,
                   static_cast<const char*>(send), static_cast<char*>(receive), roles.giver,
                   roles.taker, roles.in_parts});
  return open_groups ? 0 : finish();
}

std::string name_of(const UniqueId& id) {
  static const char* digits = "0123456789abcdef";
  std::string name;
  for (int at = 0; at < kNamedBytes; ++at) {
    const auto byte = static_cast<unsigned char>(id.bytes[at]);
    name += {digits[byte >> 4], digits[byte & 15]};
  }
  return name;
}

bool is_of_one_alone(const UniqueId& id) {
  return std::all_of(id.bytes, id.bytes + kNamedBytes, [](char byte) { return byte == 0; });
}

}  // namespace

extern "C" {

int ncclGetVersion(int* out) {
  *out = 22907;
  return 0;
}

int ncclGetUniqueId(UniqueId* out) {
  *out = {};
  if (!gpu().alone) getrandom(out->bytes, kNamedBytes, 0);
  return 0;
}
int ncclCommInitRank(void** out, int count, UniqueId id, int rank) {
  if (is_of_one_alone(id)) return give_communicator(out, count, rank);
  return join(out, name_of(id), count, rank);
}
int ncclCommInitRankConfig(void** out, int count, UniqueId id, int rank, void*) {
  return ncclCommInitRank(out, count, id, rank);
}
int ncclCommInitRankScalable(void** out, int count, int rank, int, UniqueId* ids, void*) {
  return ncclCommInitRank(out, count, ids[0], rank);
}
int ncclCommInitAll(void** out, int count, const int*) {
  UniqueId id{};
  getrandom(id.bytes, kNamedBytes, 0);
  for (int rank = 0; rank < count; ++rank) {
    if (const int failed = join(out + rank, name_of(id), count, rank)) return failed;
  }
  return 0;
}
// How many ranks a part has is told by the others; a rank that is run alone hears it of torch.
void torchmem_next_split(int count) { ranks_of_next_split = count; }
int ncclCommSplit(void* handle, int color, int key, void** out, void*) {
  Communicator& among = communicator(handle);
  if (!among.ranks) return give_communicator(out, std::exchange(ranks_of_next_split, 0), key);
  const int32_t own[] = {color, key};
  Part part{std::vector<char>(sizeof own), true, true};
  std::memcpy(part.values.data(), own, sizeof own);
  const Call call{Call::kSplit, among.splits++, sizeof own};
  for (int to = 0; to < among.count; ++to) {
    if (!among.ranks->give(to, call, part)) return kFailed;
  }
  int count = 0, rank = 0;
  for (int from = 0; from < among.count; ++from) {
    if (!among.ranks->take(from, call, part)) return kFailed;
    int32_t other[2];
    std::memcpy(other, part.values.data(), sizeof other);
    if (other[0] != color) continue;
    ++count;
    rank += std::make_pair(other[1], from) < std::make_pair(key, among.rank);
  }
  *out = nullptr;
  if (color == kNoColor) return 0;
  const std::string path = "/" + std::to_string(call.how) + "/" + std::to_string(color);
  return join(out, among.ranks->name + path, count, rank);
}
int ncclCommDestroy(void* handle) {
  if (communicator(handle).ranks) communicator(handle).ranks->leave();
  delete &communicator(handle);
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
const char* ncclGetLastError(void*) { return why_ranks_failed().c_str(); }

int ncclRedOpCreatePreMulSum(int* out, void* factor, int type, int, void*) {
  const std::lock_guard<std::mutex> lock(guard);
  *out = kFirstOwnOperation + static_cast<int>(factors.size());
  factors.push_back(has_numbers(type) ? read_number(type, static_cast<char*>(factor)) : 1);
  return 0;
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation,
                  void* handle, cudaStream_t stream) {
  return ask(Call::kReduce, operation, send, receive, count, type, {}, handle, stream);
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int operation, int root,
               void* handle, cudaStream_t stream) {
  const Roles roles{kEachRank, root};
  return ask(Call::kReduce, operation, send, receive, count, type, roles, handle, stream);
}

int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation,
                      void* handle, cudaStream_t stream) {
  const Roles roles{kEachRank, kEachRank, true};
  return ask(Call::kReduce, operation, send, receive, count, type, roles, handle, stream);
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* handle,
                  cudaStream_t stream) {
  const Roles roles{root, kEachRank};
  return ask(Call::kBroadcast, root, send, receive, count, type, roles, handle, stream);
}
int ncclBcast(void* values, size_t count, int type, int root, void* handle, cudaStream_t stream) {
  return ncclBroadcast(values, values, count, type, root, handle, stream);
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, void* handle,
                  cudaStream_t stream) {
  return ask(Call::kGather, 0, send, receive, count, type, {}, handle, stream);
}

int ncclAlltoAll(const void* send, void* receive, size_t count, int type, void* handle,
                 cudaStream_t stream) {
  const Roles roles{kEachRank, kEachRank, true};
  return ask(Call::kExchange, 0, send, receive, count, type, roles, handle, stream);
}

int ncclGroupStart() {
  if (!open_groups++) kept_in_group = {};
  return 0;
}
int ncclGroupEnd() { return open_groups && !--open_groups ? finish() : 0; }
int ncclSend(const void* send, size_t count, int type, int partner, void* handle,
             cudaStream_t stream) {
  const Roles roles{communicator(handle).rank, partner};
  return ask(Call::kTransfer, 0, send, nullptr, count, type, roles, handle, stream);
}
int ncclRecv(void* receive, size_t count, int type, int partner, void* handle,
             cudaStream_t stream) {
  const Roles roles{partner, communicator(handle).rank};
  return ask(Call::kTransfer, 0, nullptr, receive, count, type, roles, handle, stream);
}

}  // extern "C"
