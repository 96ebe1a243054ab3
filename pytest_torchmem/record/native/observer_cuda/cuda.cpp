// A GPU's memory: a tracker of torch's caching allocator. It is called on each thread, below the allocator's lock, in the order in
// which the allocator worked, with the bytes that were asked for. It cannot be taken out again; idle it is one load and one call.
#include <c10/cuda/CUDACachingAllocator.h>
#include <cstdint>

namespace {
using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
void (*note)(void* address, int64_t bytes, int16_t device) = nullptr;
void (*note_refusal)(int64_t bytes, int16_t device) = nullptr;

void watch(const Entry& entry) {
  auto device = static_cast<int16_t>(static_cast<int>(c10::DeviceType::CUDA) << 8 | entry.device_);
  auto* address = reinterpret_cast<void*>(entry.addr_);
  auto bytes = static_cast<int64_t>(entry.size_);
  if (entry.action_ == Entry::ALLOC) note(address, bytes, device);
  // A block that another stream uses is completed later: the program is done with it now.
  else if (entry.action_ == Entry::FREE_REQUESTED) note(address, -bytes, device);
  else if (entry.action_ == Entry::OOM) note_refusal(bytes, device);
}
}  // namespace

// 0, or why not: some allocators raise.
extern "C" __attribute__((visibility("default"))) int torchmem_watch_gpu(
    void (*memory)(void*, int64_t, int16_t), void (*refusal)(int64_t, int16_t)) {
  if (note) return 0;
  note = memory, note_refusal = refusal;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(watch);
  } catch (...) {
    note = nullptr;
    return 1;
  }
  return 0;
}
