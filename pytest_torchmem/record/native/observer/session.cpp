// What Python calls: a recording begins, gets marks, and hands its rows over.
#include "rows.h"

namespace torchmem {

void forget_outside();
void look_for_ends();

namespace {
std::vector<Thread*>& read = *new std::vector<Thread*>;
}

extern "C" {
#pragma GCC visibility push(default)
void torchmem_observe_operators(int on);

// The first mark of a recording comes after this, and `torchmem_begin` after all that must not be seen.
void torchmem_prepare() { set_clock(); }
void torchmem_begin() {
  recording++;
  thread();
  threads_of_recording();
  torchmem_observe_operators(1);
  is_under_way = is_on = true;
}
// Leave out what comes next, up to `torchmem_go_on`.
void torchmem_pause() { is_on = false; }
void torchmem_go_on() { is_on = is_under_way.load(); }
void torchmem_end() {
  is_under_way = is_on = false;
  forget_outside();
  torchmem_observe_operators(0);
}
int64_t torchmem_mark(int64_t number) {
  if (!is_on) return -1;
  look_for_ends();
  Thread& t = thread();
  int64_t now = now_ns();
  int32_t line = follow_calls(t, now);
  int32_t row = t.begin({now, now, number, -1, 0, -1, line, -1, MARK, 0});
  t.rows[row].end = row + 1;
  return row;
}
int64_t torchmem_now_ns() { return now_ns(); }

// The threads that did anything, the calling one first.
int torchmem_threads() {
  read = threads_of_recording();
  Thread* mine = &thread();
  std::stable_partition(read.begin(), read.end(), [&](Thread* t) { return t == mine; });
  return static_cast<int>(read.size());
}
int64_t torchmem_row_count(int n) { return read[n]->rows.size(); }
int64_t torchmem_mention_count(int n) { return read[n]->mentions.size(); }
// The rows and mentions of a thread lie in pieces, each as large as all before it; the first has `Growing::FIRST`.
const void* torchmem_rows(int n, int piece) { return read[n]->rows.piece(piece); }
const void* torchmem_mentions(int n, int piece) { return read[n]->mentions.piece(piece); }
// Give back what a recording that is over took, but for the little that the next one begins with.
void torchmem_let_go() {
  if (is_on) return;
  recording++;
  thread();
}
int torchmem_name_count() { return NAMES.size(); }
int torchmem_code_count() { return CODES.size(); }
const char* torchmem_name(int n) { return NAMES.text(n); }
const char* torchmem_code(int n) { return CODES.text(n); }
#pragma GCC visibility pop
}

}  // namespace torchmem
