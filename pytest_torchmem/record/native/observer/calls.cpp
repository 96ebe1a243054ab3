// The functions of Python that run on the calling thread, without the GIL.
//
// A thread that is in C++ has released the GIL or holds it; in both cases nobody else pushes or pops ITS frames, a frame owns its
// code object, and what is read of that (file, name, table of lines) never changes. No reference is counted and no lock of Python's
// is taken, so this may run below any lock of torch's. faulthandler reads the same fields the same way, from a signal handler.
// What is kept are copies. A code object's address may be used again after its death: a stamp tells the two apart.
//
// No header of Python is used: offsets stand in a table, and one library serves all its releases.
#include "rows.h"
#include <cstring>
#include <dlfcn.h>

namespace torchmem {
namespace {

struct Layout {  // offsets: PyThreadState to frame (3.11, 3.12: through a _PyCFrame); _PyInterpreterFrame; PyCodeObject; str
  int minor, state, cframe, code, previous, instruction, owner, locals;
  int filename, qualname, first_line, line_table, bytecode, ascii, version;
};
// `offsets.c` prints a row.
const Layout LAYOUTS[] = {
    {11, 56, 8, 32, 48, 56, 69, 72, 112, 128, 72, 136, 184, 48, -1},
    {12, 56, 0, 0, 8, 56, 70, 72, 112, 128, 68, 136, 192, 40, 92},
    {13, 72, -1, 0, 8, 56, 70, 72, 112, 128, 68, 136, 200, 40, 92},
    {14, 72, -1, 0, 8, 56, 74, 80, 112, 128, 68, 136, 208, 40, 92},
};
Layout L;
void* (*this_thread)() = nullptr;     // PyGILState_GetThisThreadState: right also while the GIL is released
int (*line_of)(void*, int) = nullptr;  // PyCode_Addr2Line: only reads
void* module_call = nullptr;           // Module._wrapped_call_impl.__code__: its first local is the module
constexpr char OF_INTERPRETER = 3;

template <class T>
T at(const void* p, int offset) {
  T value;
  memcpy(&value, static_cast<const char*>(p) + offset, sizeof value);
  return value;
}

// An object that a frame refers to. From 3.14 on the lowest bits say how it is counted.
void* object_at(const void* frame, int offset) {
  return reinterpret_cast<void*>(at<uintptr_t>(frame, offset) & ~static_cast<uintptr_t>(3));
}

// A compact str, whatever its kind, as UTF-8.
std::string copied(const void* text) {
  auto state = at<uint32_t>(text, 32);
  int64_t length = at<int64_t>(text, 16);
  unsigned kind = state >> 2 & 7, ascii = state >> 6 & 1;
  auto* d = static_cast<const char*>(text) + (ascii ? L.ascii : L.ascii + (L.minor < 12 ? 24 : 16));
  if (ascii) return std::string(d, length);
  std::string out;
  for (int64_t i = 0; i < length; i++) {
    uint32_t c = kind == 1 ? static_cast<uint8_t>(d[i]) : kind == 2 ? at<uint16_t>(d, 2 * i) : at<uint32_t>(d, 4 * i);
    auto rest = [&](int shift) { out += static_cast<char>(0x80 | (c >> shift & 63)); };
    if (c < 0x80) out += static_cast<char>(c);
    else if (c < 0x800) out += static_cast<char>(0xC0 | c >> 6), rest(0);
    else if (c < 0x10000) out += static_cast<char>(0xE0 | c >> 12), rest(6), rest(0);
    else out += static_cast<char>(0xF0 | c >> 18), rest(12), rest(6), rest(0);
  }
  return out;
}

// Tells a code object from an earlier one at its address: from 3.12 on by its version, a number that is given once; in 3.11 by
// what is written in it.
uint64_t stamp_of(const void* code) {
  uint64_t stamp = at<uint64_t>(code, L.filename) ^ at<uint64_t>(code, L.qualname) << 7 ^
                   static_cast<uint64_t>(at<int32_t>(code, L.first_line)) << 40;
  if (L.version >= 0) return stamp ^ static_cast<uint64_t>(at<uint32_t>(code, L.version)) << 20;
  const void* file = at<void*>(code, L.filename);
  int64_t length = at<int64_t>(file, 16);
  int start = at<uint32_t>(file, 32) >> 6 & 1 ? 48 : 72;
  if (length >= 8) stamp ^= (at<uint64_t>(file, start + static_cast<int>(length) - 8) ^ static_cast<uint64_t>(length) << 48) * 0x9E3779B97F4A7C15ull;
  else for (int64_t i = 0; i < length; i++) stamp = stamp * 31 + at<uint8_t>(file, start + static_cast<int>(i));
  const void* lines = at<void*>(code, L.line_table);
  int64_t n = at<int64_t>(lines, 16);
  if (n >= 16) {
    int last = 32 + static_cast<int>(n);
    stamp ^= at<uint64_t>(lines, 32) * 31 ^ at<uint64_t>(lines, 40) * 37 ^ at<uint64_t>(lines, last - 16) * 41 ^ at<uint64_t>(lines, last - 8) * 43;
  } else for (int64_t i = 0; i < n; i++) stamp = stamp * 31 + at<uint8_t>(lines, 32 + static_cast<int>(i));
  return stamp ^ static_cast<uint64_t>(n) << 13;
}

int32_t line_at(Thread& t, const Frame& f) {
  uint64_t key = reinterpret_cast<uint64_t>(f.code) << 16 ^ static_cast<uint64_t>(f.at);
  auto [known, is_new] = t.lines.try_emplace(key, f.stamp, 0);
  if (is_new || known->second.first != f.stamp) known->second = {f.stamp, line_of(f.code, f.at)};
  return known->second.second;
}

int32_t code_number(Thread& t, const Frame& f) {
  if (f.self) {
    auto* type = at<const char*>(at<void*>(f.self, 8), 24);  // ob_type, tp_name
    return CODES.number(std::string("\n\n") + type);
  }
  auto [known, is_new] = t.codes.try_emplace(f.code, KnownCode{f.stamp, 0});
  if (is_new || known->second.stamp != f.stamp)
    known->second = {f.stamp, CODES.number(copied(at<void*>(f.code, L.filename)) + "\n" + copied(at<void*>(f.code, L.qualname)) + "\n" +
                                         std::to_string(at<int32_t>(f.code, L.first_line)))};
  return known->second.number;
}

void* innermost(void* state) {
  void* f = L.cframe >= 0 ? at<void*>(at<void*>(state, L.state), L.cframe) : at<void*>(state, L.state);
  return f;
}

bool same_call(const Frame& a, const Frame& b) {
  return a.frame == b.frame && a.code == b.code && a.self == b.self && a.stamp == b.stamp;
}

}  // namespace

void* frame_now() {
  if (!this_thread) return nullptr;
  void* state = this_thread();
  return state ? innermost(state) : nullptr;
}

int32_t follow_calls(Thread& t, int64_t now) {
  void* state = this_thread ? this_thread() : nullptr;
  if (!state) return 0;  // a thread of C++'s alone
  void* current = innermost(state);
  // Below an operator that is not over nothing has changed: its function waits for it.
  size_t above = t.open.size();
  while (above > 0 && (t.open[above - 1].is_call || t.open[above - 1].is_range)) above--;
  void* waiting = above > 0 ? t.open[above - 1].frame : nullptr;
  if (above > 0 && current == waiting) {
    bool has_calls = false;
    for (size_t n = above; n < t.open.size(); n++) has_calls |= t.open[n].is_call;
    if (has_calls) t.close(above, now);
    return t.open[above - 1].line;
  }
  auto& walked = t.walked;
  walked.clear();
  void* f = current;
  for (; f && f != waiting; f = at<void*>(f, L.previous)) {
    if (L.minor >= 12 && at<char>(f, L.owner) >= OF_INTERPRETER) continue;
    void* code = object_at(f, L.code);
    if (!code) continue;
    auto place = static_cast<int32_t>(at<char*>(f, L.instruction) - (static_cast<char*>(code) + L.bytecode));
    if (place < 0) continue;
    walked.push_back({f, code, code == module_call ? object_at(f, L.locals) : nullptr, stamp_of(code), place});
  }
  if (waiting && !f) return 0;  // another stack of the same thread, as greenlets have
  std::reverse(walked.begin(), walked.end());
  size_t below = 0;  // calls below the operator
  for (size_t n = 0; n < above; n++) below += t.open[n].is_call;
  size_t same = 0;
  while (same < walked.size() && below + same < t.frames.size()) {
    Frame& known = t.frames[below + same];
    if (!same_call(known, walked[same])) break;
    bool goes_on = known.at == walked[same].at;
    known.at = walked[same].at;
    same++;
    if (!goes_on) break;  // it runs on: all that it called then is over
  }
  // Close the calls that are over, with all that is within them.
  size_t calls = below + same;
  if (t.frames.size() > calls) {
    size_t place = 0, seen = 0;
    while (seen < calls || !t.open[place].is_call) seen += t.open[place++].is_call;
    t.close(place, now);
  }
  int32_t line = 0;
  if (same > 0) line = line_at(t, walked[same - 1]);
  else if (below > 0) line = t.open[above - 1].line;
  for (; same < walked.size(); same++) {
    Frame& frame = walked[same];
    Row row{now, 0, reinterpret_cast<int64_t>(frame.self), -1, 0, code_number(t, frame), line, -1, CALL, 0};
    t.open.push_back({t.begin(row), true, false, nullptr, 0, 0});
    t.frames.push_back(frame);
    line = line_at(t, frame);
  }
  return line;
}

extern "C" __attribute__((visibility("default"))) int torchmem_follow_python(int minor, void* code_of_module_call) {
  this_thread = nullptr;
  for (auto& layout : LAYOUTS) if (layout.minor == minor) L = layout;
  if (L.minor != minor) return 1;
  auto* state = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  line_of = reinterpret_cast<int (*)(void*, int)>(dlsym(RTLD_DEFAULT, "PyCode_Addr2Line"));
  module_call = code_of_module_call;
  if (!state || !line_of) return 2;
  this_thread = state;
  return 0;
}

}  // namespace torchmem
