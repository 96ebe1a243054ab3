// What torch's watchdog of NCCL's collectives does to memory, in an order that does not depend on the
// machine's speed.
//
// A collective that is not waited for keeps its tensors until the watchdog, a thread that wakes each
// 100 ms, has seen that it is over, and the group is given its next one. A step of a real job takes
// longer; a simulated one may be over before. So here each one has been seen by then: the group's next
// collective lets go of what the one before it keeps. torch calls these functions of its own through
// their names, and this library is loaded before the one that has them.

#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

#include "shared.h"

using namespace simulated;

namespace {

// torch's own copy of a collective: it shares what that one keeps, and neither its results nor its
// future. Its size is torch's affair; 500 to 700 bytes in releases from 2.11 to 2.15.
constexpr size_t kRoom = 16 << 10;

auto& guard = forever<std::mutex>();
auto& last_of_group = forever<std::unordered_map<const void*, void*>>();

template <typename Function>
Function torchs(const char* name) {
  static void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(library, name));
}

void* copied(const void* work) {
  static const auto copy = torchs<void (*)(void*, const void*)>(
      "_ZN4c10d16ProcessGroupNCCL8WorkNCCLC1ERKS1_");
  if (!copy) return nullptr;
  void* made = std::calloc(1, kRoom);
  copy(made, work);
  return made;
}

void* taken(const void* group) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = last_of_group.find(group);
  if (found == last_of_group.end()) return nullptr;
  void* work = found->second;
  last_of_group.erase(found);
  return work;
}

void let_go(void* work) {
  // Makes the current stream wait for the collective, which has no reason to here, and lets go.
  static const auto wait =
      torchs<void (*)(void*)>("_ZN4c10d16ProcessGroupNCCL8WorkNCCL17synchronizeStreamEv");
  if (!work) return;
  ignore_waits(true);
  wait(work);
  ignore_waits(false);
  using Destructor = void (*)(void*);
  (**static_cast<Destructor**>(work))(work);  // the first of its virtual functions
  std::free(work);
}

}  // namespace

extern "C" {

// void ProcessGroupNCCL::workEnqueue(const intrusive_ptr<WorkNCCL>&)
void _ZN4c10d16ProcessGroupNCCL11workEnqueueERKN3c1013intrusive_ptrINS0_8WorkNCCLENS1_6detail34intrusive_target_default_null_typeIS3_EEEE(
    void* group, void* const* work) {
  static const auto enqueue = torchs<void (*)(void*, void* const*)>(
      "_ZN4c10d16ProcessGroupNCCL11workEnqueueERKN3c1013intrusive_ptrINS0_8WorkNCCLENS1_6detail"
      "34intrusive_target_default_null_typeIS3_EEEE");
  let_go(taken(group));
  enqueue(group, work);
  if (void* last = copied(*work)) {
    const std::lock_guard<std::mutex> lock(guard);
    last_of_group[group] = last;
  }
}

// ProcessGroupNCCL::~ProcessGroupNCCL()
void _ZN4c10d16ProcessGroupNCCLD1Ev(void* group) {
  static const auto destroy = torchs<void (*)(void*)>("_ZN4c10d16ProcessGroupNCCLD1Ev");
  let_go(taken(group));
  destroy(group);
}

}  // extern "C"
