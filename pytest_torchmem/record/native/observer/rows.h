// What one thread did, as rows in the order in which they began: operators, allocations, frees, calls of Python and marks.
// Each thread writes rows of its own; nothing is shared on the way of an operator.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torchmem {

enum Kind : uint8_t { OPERATOR = 0, ALLOCATION = 1, CALL = 2, OUT_OF_MEMORY = 4, MARK = 5 };  // as `EventKind`

#pragma pack(push, 4)
// `value`: an operator's sequence number with its thread above bit 40, the address of memory, the module that is called, or a
// mark's number. `stop`: of memory the bytes, below zero where it is freed. `name`: a number of `NAMES` or of `CODES`.
// The `scope` of a row of memory: seen when it was made; met by an operator, and allocated by others, such as numpy, or a mapped
// file; or met, and torch's own: it was there, or came not through the allocator that we stand before.
enum Origin : uint8_t { SEEN = 0, OTHERS = 1, UNSEEN = 2 };
struct Row {
  int64_t start_ns, stop, value;
  int32_t parent, end, name, line;
  int16_t device;
  uint8_t kind, scope;
};
// A tensor among the inputs of the operator at `row`.
struct Mention {
  uint64_t address;
  int64_t bytes;
  int32_t row;
  int16_t argument, device;
};
#pragma pack(pop)

// Rows that never move, in pieces of which each is as large as all before it: a reader takes those up to `size` while the owner
// goes on.
template <class T>
class Growing {
 public:
  static constexpr int64_t FIRST = 1024;
  T& add(const T& value) {
    int64_t n = size_.load(std::memory_order_relaxed);
    auto [piece, place] = where(n);
    if (!pieces_[piece]) pieces_[piece] = static_cast<T*>(::operator new(room(piece) * sizeof(T)));
    T* at = pieces_[piece] + place;
    *at = value;
    size_.store(n + 1, std::memory_order_release);
    return *at;
  }
  T& operator[](int64_t n) {
    auto [piece, place] = where(n);
    return pieces_[piece][place];
  }
  int64_t size() const { return size_.load(std::memory_order_acquire); }
  // The rows of a piece; null after the last one that has any.
  const T* piece(int number) const { return number < MOST ? pieces_[number] : nullptr; }
  static int64_t room(int piece) { return piece ? FIRST << (piece - 1) : FIRST; }
  // The first piece is kept: the next recording of a small test takes no new memory.
  void clear() {
    size_.store(0, std::memory_order_relaxed);
    for (int piece = 1; piece < MOST && pieces_[piece]; piece++) {
      ::operator delete(pieces_[piece]);
      pieces_[piece] = nullptr;
    }
  }

 private:
  static constexpr int MOST = 24;  // rows have numbers of 31 bits
  static std::pair<int, int64_t> where(int64_t n) {
    if (n < FIRST) return {0, n};
    int piece = 64 - __builtin_clzll(n / FIRST);
    return {piece, n - room(piece)};
  }
  T* pieces_[MOST] = {};
  std::atomic<int64_t> size_{0};
};

// Texts that have numbers, for the life of the process. The lock is taken for what a thread meets for the first time.
class Texts {
 public:
  int32_t number(const std::string& text) {
    std::lock_guard<std::mutex> hold(lock_);
    auto [found, is_new] = numbers_.try_emplace(text, static_cast<int32_t>(texts_.size()));
    if (is_new) texts_.push_back(&found->first);
    return found->second;
  }
  int32_t size() {
    std::lock_guard<std::mutex> hold(lock_);
    return static_cast<int32_t>(texts_.size());
  }
  const char* text(int32_t number) {
    std::lock_guard<std::mutex> hold(lock_);
    return texts_[number]->c_str();
  }

 private:
  std::mutex lock_;
  std::unordered_map<std::string, int32_t> numbers_;
  std::vector<const std::string*> texts_;
};

extern Texts& NAMES;  // "name \n overload \n letters of its arguments", or a name alone where there is no schema
extern Texts& CODES;  // "file \n qualified name \n first line", or "\n \n class of the module that is called"

struct Frame {
  void *frame, *code, *self;
  uint64_t stamp;
  int32_t at;
};
// A row that is not over. Of an operator `frame` is the function of Python that called it, and `depth` its number.
struct Open {
  int32_t row;
  bool is_call, is_range;
  void* frame;
  int32_t line, depth;
};
struct KnownCode {
  uint64_t stamp;
  int32_t number;
};
struct KnownName {
  int32_t number;
  const char* text;
};

struct Thread {
  Growing<Row> rows;
  Growing<Mention> mentions;
  std::vector<Open> open;
  std::vector<Frame> frames, walked;  // the calls among `open`, outermost first
  std::unordered_map<void*, KnownCode> codes;
  std::unordered_map<uint64_t, std::pair<uint64_t, int32_t>> lines;
  std::unordered_map<const char*, KnownName> names;
  int32_t depth = 0, recording = 0;
  uint64_t number = 0;  // as torch numbers its threads
  std::atomic<bool> is_over{false};

  int32_t begin(const Row& row) {
    int32_t number = static_cast<int32_t>(rows.size());
    Row& added = rows.add(row);
    added.parent = open.empty() ? -1 : open.back().row;
    added.end = 0;
    return number;
  }
  // End all that is open from a place on.
  void close(size_t place, int64_t now) {
    int32_t end = static_cast<int32_t>(rows.size());
    while (open.size() > place) {
      Open& last = open.back();
      Row& row = rows[last.row];
      row.end = end;
      if (!last.is_range) row.stop = now;
      if (last.is_call) frames.pop_back();
      open.pop_back();
    }
  }
};

// A recording is under way in this process, and notes what happens now.
extern std::atomic<bool> is_under_way, is_on;
extern std::atomic<int32_t> recording;

Thread& thread();
std::vector<Thread*> threads_of_recording();
void set_clock();
int64_t now_ns();
// Bring the open calls in line with what Python runs; return the line on which the innermost function is.
int32_t follow_calls(Thread& t, int64_t now);
void* frame_now();
void note_memory(void* address, int64_t bytes, int16_t device, Origin origin = SEEN);

}  // namespace torchmem
