// The driver's own pools of memory: `PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync`.
//
// A pool keeps what was freed until it is trimmed, which torch has it do. How the driver cuts what
// it keeps is not known: here a pool holds what was used at most.

#include "shared.h"

#include <algorithm>
#include <unordered_map>

namespace simulated {
namespace {

struct Pool {
  size_t used = 0, most_used = 0, held = 0, most_held = 0;

  void take(size_t bytes) {
    used += bytes;
    held = std::max(held, used);
    most_used = std::max(most_used, used);
    most_held = std::max(most_held, held);
  }
};

struct Allocation {
  Pool* pool;
  size_t bytes;
};

auto& guard = forever<std::mutex>();
using Lock = std::lock_guard<std::mutex>;
auto& allocations = forever<std::unordered_map<void*, Allocation>>();

Pool* pool_of(int device) {
  static auto& pools = forever<std::unordered_map<int, Pool>>();
  return &pools[device];
}

Pool& as_pool(cudaMemPool_t pool) { return *reinterpret_cast<Pool*>(pool); }

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int device) {
  Lock lock(guard);
  *out = reinterpret_cast<cudaMemPool_t>(pool_of(device));
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
  const cudaError_t error = cudaMalloc(out, bytes);
  if (error != cudaSuccess || !*out) return error;
  Lock lock(guard);
  Pool* pool = pool_of(current_device());
  pool->take(bytes);
  allocations[*out] = {pool, bytes};
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  {
    Lock lock(guard);
    const auto found = allocations.find(pointer);
    if (found != allocations.end()) {
      found->second.pool->used -= found->second.bytes;
      allocations.erase(found);
    }
  }
  return cudaFree(pointer);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t least) {
  Lock lock(guard);
  Pool& trimmed = as_pool(pool);
  trimmed.held = std::max(trimmed.used, std::min(trimmed.held, least));
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* out) {
  Lock lock(guard);
  const Pool& asked = as_pool(pool);
  auto& value = *static_cast<uint64_t*>(out);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent: value = asked.held; break;
    case cudaMemPoolAttrReservedMemHigh: value = asked.most_held; break;
    case cudaMemPoolAttrUsedMemCurrent: value = asked.used; break;
    case cudaMemPoolAttrUsedMemHigh: value = asked.most_used; break;
    default: break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void*) {
  Lock lock(guard);
  Pool& changed = as_pool(pool);
  if (attribute == cudaMemPoolAttrReservedMemHigh) changed.most_held = changed.held;
  if (attribute == cudaMemPoolAttrUsedMemHigh) changed.most_used = changed.used;
  return cudaSuccess;
}

}  // extern "C"
