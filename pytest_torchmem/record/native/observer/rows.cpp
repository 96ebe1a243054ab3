#include "rows.h"
#include <ATen/record_function.h>
#include <ctime>

namespace torchmem {

// None of these is ever destroyed: threads and storages outlive the interpreter.
Texts& NAMES = *new Texts;
Texts& CODES = *new Texts;
std::atomic<bool> is_under_way{false}, is_on{false};
std::atomic<int32_t> recording{0};

namespace {
auto& lock = *new std::mutex;
auto& all = *new std::vector<Thread*>;
struct Mine {
  Thread* thread = nullptr;
  ~Mine() {
    if (thread) thread->is_over = true;
    thread = nullptr;
  }
};
thread_local Mine mine;
}  // namespace

Thread& thread() {
  int32_t now = recording.load(std::memory_order_relaxed);
  Thread* t = mine.thread;
  if (t && t->recording == now) return *t;
  std::lock_guard<std::mutex> hold(lock);
  if (!t) {
    t = mine.thread = new Thread;
    t->number = at::RecordFunction::currentThreadId();
    all.push_back(t);
  }
  t->rows.clear(), t->mentions.clear(), t->open.clear(), t->frames.clear();
  // What code stood at an address may be another one by now; stamps tell, and this bounds what is kept.
  if (t->lines.size() > 100000) t->lines.clear();
  if (t->codes.size() > 20000) t->codes.clear();
  t->recording = now;
  return *t;
}

std::vector<Thread*> threads_of_recording() {
  std::lock_guard<std::mutex> hold(lock);
  // Those of earlier recordings whose threads have ended are nobody's.
  std::vector<Thread*> found;
  for (size_t n = 0; n < all.size();) {
    Thread* t = all[n];
    if (t->recording == recording) found.push_back(t);
    else if (t->is_over) {
      delete t;
      all.erase(all.begin() + n);
      continue;
    }
    n++;
  }
  return found;
}

namespace {
int64_t read_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
int64_t since_epoch = 0;
}  // namespace

// The time of day when a recording begins, and from then on a clock that nobody sets.
void set_clock() { since_epoch = read_ns(CLOCK_REALTIME) - read_ns(CLOCK_MONOTONIC); }
int64_t now_ns() { return read_ns(CLOCK_MONOTONIC) + since_epoch; }

}  // namespace torchmem
