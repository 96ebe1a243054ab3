// Values that are not exact and that the host has read: how often, and in which lines of the program; and
// those of them that nobody computed and that decide, or may: a shape, a count, a branch. For these the
// frames are kept, from the innermost on: what is done with a number there is seen in the program's text.
//
// A line is looked up in Python's own frames. They are read, and nothing of Python is run, so that a
// profiler sees nothing of it. torch's files, what its compiler made, and those of this package are passed over.

#include "shared.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated {
namespace {

constexpr size_t kMostKept = size_t{1} << 16;

// How often something happened, and where it did so the first times.
struct Noted {
  std::mutex guard;
  std::deque<std::string> lines;  // none moves when one is added
  std::atomic<long> count{0};
};
auto& reads = forever<Noted>();

template <typename Function>
Function of_python(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

using Object = void*;

struct Python {
  int (*ensure)() = of_python<int (*)()>("PyGILState_Ensure");
  void (*release)(int) = of_python<void (*)(int)>("PyGILState_Release");
  Object (*thread)() = of_python<Object (*)()>("PyGILState_GetThisThreadState");
  Object (*interpreter)() = of_python<Object (*)()>("PyInterpreterState_Get");
  Object (*first_thread)(Object) = of_python<Object (*)(Object)>("PyInterpreterState_ThreadHead");
  Object (*next_thread)(Object) = of_python<Object (*)(Object)>("PyThreadState_Next");
  Object (*frame_of)(Object) = of_python<Object (*)(Object)>("PyThreadState_GetFrame");
  Object (*caller_of)(Object) = of_python<Object (*)(Object)>("PyFrame_GetBack");
  Object (*code_of)(Object) = of_python<Object (*)(Object)>("PyFrame_GetCode");
  int (*line_of)(Object) = of_python<int (*)(Object)>("PyFrame_GetLineNumber");
  int (*instruction_of)(Object) = of_python<int (*)(Object)>("PyFrame_GetLasti");
  Object (*attribute)(Object, const char*) =
      of_python<Object (*)(Object, const char*)>("PyObject_GetAttrString");
  const char* (*text_of)(Object) = of_python<const char* (*)(Object)>("PyUnicode_AsUTF8");
  void (*keep)(Object) = of_python<void (*)(Object)>("Py_IncRef");
  void (*drop)(Object) = of_python<void (*)(Object)>("Py_DecRef");

  bool is_there() const { return ensure && thread && frame_of && thread(); }
};

const std::string& folder_of_torch() {
  static const std::string& folder = forever<std::string>([] {
    Dl_info found{};
    void* torch = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = torch ? dlsym(torch, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE") : nullptr;
    if (!symbol || !dladdr(symbol, &found)) return std::string("/torch/lib/");
    const std::string path = found.dli_fname;
    return path.substr(0, path.rfind("lib/libc10.so"));
  }());
  return folder;
}

// inductor writes the programs that it makes into a folder of its own.
bool is_compiled(const std::string& file) {
  const char* folder = std::getenv("TORCHINDUCTOR_CACHE_DIR");
  return folder && !file.compare(0, std::strlen(folder), folder);
}

bool is_of_this_package(const std::string& file) {
  return file.find("/pytest_torchmem/") != std::string::npos;
}

bool is_of_the_program(const std::string& file) {
  return !file.empty() && !is_compiled(file) && file[0] != '<' && file.compare(0, folder_of_torch().size(), folder_of_torch()) &&
         !is_of_this_package(file);
}

std::string file_of(const Python& python, Object frame) {
  Object code = python.code_of(frame);
  Object name = python.attribute(code, "co_filename");
  const char* text = name ? python.text_of(name) : nullptr;
  const std::string file = text ? text : "";
  if (name) python.drop(name);
  python.drop(code);
  return file;
}

// Calls `keep` for a frame and those that called it, innermost first, until it says to keep that one:
// returns it, or nullptr. Drops the others.
template <typename Keep>
Object first_kept(const Python& python, Object frame, Keep keep) {
  while (frame && !keep(file_of(python, frame))) {
    Object caller = python.caller_of(frame);
    python.drop(frame);
    frame = caller;
  }
  return frame;
}

// The engine's threads run what C++ has of a backward pass, and no call of Python's: who waits for
// the engine meanwhile has called it. Returns its innermost frame, or nullptr.
Object frame_of_who_waits(const Python& python) {
  const std::string engine = folder_of_torch() + "autograd/";
  Object thread = python.first_thread(python.interpreter());
  for (; thread; thread = python.next_thread(thread)) {
    Object frame = first_kept(python, python.frame_of(thread), [](const std::string& file) {
      return !is_of_this_package(file);
    });
    if (frame && !file_of(python, frame).compare(0, engine.size(), engine)) return frame;
    if (frame) python.drop(frame);
  }
  return nullptr;
}

std::string current_line() {
  static const Python& python = forever<Python>();
  if (!python.is_there()) return "";
  const int state = python.ensure();
  Object frame = python.frame_of(python.thread());
  if (!frame) frame = frame_of_who_waits(python);
  std::string found;
  frame = first_kept(python, frame, is_of_the_program);
  if (frame) {
    found = file_of(python, frame) + ":" + std::to_string(python.line_of(frame));
    python.drop(frame);
  }
  python.release(state);
  return found;
}

// Where what nobody computed was read: the code that runs and the instruction in it, innermost first.
using Frames = std::vector<std::pair<Object, int>>;
struct Place {
  int kind;
  Frames frames;
  std::string line;
};
constexpr size_t kMostFrames = 16;
constexpr size_t kMostPlaces = 4096;  // more are one without frames

struct Decisions {
  std::mutex guard;
  std::map<std::pair<int, Frames>, long> numbers;
  std::deque<Place> places;
  std::vector<long> each;  // the number of its place
  std::atomic<long> count{0};
};
auto& decisions = forever<Decisions>();

// The codes belong to the frames, which run while this thread is here.
Frames current_frames(const Python& python) {
  Frames frames;
  Object frame = python.frame_of(python.thread());
  if (!frame) frame = frame_of_who_waits(python);
  while (frame && frames.size() < kMostFrames) {
    Object code = python.code_of(frame), caller = python.caller_of(frame);
    frames.emplace_back(code, python.instruction_of(frame));
    python.drop(code);
    python.drop(frame);
    frame = caller;
  }
  if (frame) python.drop(frame);
  return frames;
}

void note(Noted& noted) {
  if (static_cast<size_t>(noted.count) >= kMostKept) {
    ++noted.count;
    return;
  }
  const std::string line = current_line();  // before the lock: it waits for Python's own
  const std::lock_guard<std::mutex> lock(noted.guard);
  noted.lines.push_back(line);
  ++noted.count;
}

void note(int kind) {
  static const Python& python = forever<Python>();
  const bool is_there = python.is_there();
  const int state = is_there ? python.ensure() : 0;
  Frames frames = is_there ? current_frames(python) : Frames();
  const std::string line = current_line();
  {
    const std::lock_guard<std::mutex> lock(decisions.guard);
    if (decisions.places.size() >= kMostPlaces && !decisions.numbers.count({kind, frames})) frames.clear();
    const auto [found, is_new] = decisions.numbers.try_emplace({kind, frames}, decisions.places.size());
    if (is_new) {
      for (const auto& [code, instruction] : frames) python.keep(code);  // nothing else gets its address
      decisions.places.push_back({kind, std::move(frames), line});
    }
    decisions.each.push_back(found->second);
    ++decisions.count;
  }
  if (is_there) python.release(state);
}

}  // namespace

void note_unknown_read() { note(reads); }
void note_decision_on_missing(int kind) { note(kind); }

}  // namespace simulated

using namespace simulated;

extern "C" {

// How often the host read what is not exact, and how often what nobody computed decided, or may have.
long torchmem_unknown_reads() { return reads.count; }
long torchmem_decisions() { return decisions.count; }

// The line of the program in which it did so for the n-th time; empty where none was running.
const char* torchmem_unknown_read_line(long number) {
  const std::lock_guard<std::mutex> lock(reads.guard);
  const bool is_kept = number >= 0 && static_cast<size_t>(number) < reads.lines.size();
  return is_kept ? reads.lines[number].c_str() : "";
}

// The place of the n-th decision. Of a place: its kind, its line, and its frames, the innermost one as 0;
// a code is a borrowed object, which stays.
long torchmem_decision_place(long number) {
  const std::lock_guard<std::mutex> lock(decisions.guard);
  return decisions.each.at(number);
}
int torchmem_place_kind(long place) {
  const std::lock_guard<std::mutex> lock(decisions.guard);
  return decisions.places.at(place).kind;
}
const char* torchmem_place_line(long place) {
  const std::lock_guard<std::mutex> lock(decisions.guard);
  return decisions.places.at(place).line.c_str();
}
int torchmem_place_frame(long place, size_t frame, void** code, int* instruction) {
  const std::lock_guard<std::mutex> lock(decisions.guard);
  const Frames& frames = decisions.places.at(place).frames;
  if (frame >= frames.size()) return 0;
  std::tie(*code, *instruction) = frames[frame];
  return 1;
}

}  // extern "C"
