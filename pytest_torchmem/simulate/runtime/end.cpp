// The end of a Python program.
//
// A thread of autograd drops what a backward pass has kept, while the program already goes on. To
// drop an object of Python it waits for Python's lock. If Python ends meanwhile, it ends each thread
// that waits, and a destructor of torch's that is ended so ends the process (`terminate called
// without an active exception`). So Python lets the threads go on for a moment before it ends.

#include <dlfcn.h>

namespace {

constexpr const char* kWait = "import atexit, time\natexit.register(time.sleep, 0.02)\n";

// Python loads torch, and then holds its own lock. What it is told first, it does last.
__attribute__((constructor)) void wait_at_the_end() {
  const auto holds_lock = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  const auto run = reinterpret_cast<int (*)(const char*, void*)>(
      dlsym(RTLD_DEFAULT, "PyRun_SimpleStringFlags"));
  const auto is_there = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (holds_lock && run && is_there && is_there() && holds_lock()) run(kWait, nullptr);
}

}  // namespace
