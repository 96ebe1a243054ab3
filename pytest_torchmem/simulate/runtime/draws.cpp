// Where a kernel that draws random numbers begins: torch asks its generator right before the launch.

#include "shared.h"

#include <dlfcn.h>

namespace simulated {
namespace {

// at::PhiloxCudaState. While a graph is captured, seed and offset are addresses of device memory, which
// torch fills in before each launch, and the draw begins that far behind the offset.
struct Draw {
  uint64_t seed, offset, further;
  bool is_captured;
};

thread_local Draw first{};

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

// at::CUDAGeneratorImpl::philox_cuda_state(uint64_t). This library is loaded before torch's own.
Draw _ZN2at17CUDAGeneratorImpl17philox_cuda_stateEm(void* generator, uint64_t increment) {
  using State = Draw (*)(void*, uint64_t);
  static const auto state_of = reinterpret_cast<State>(
      dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD),
            "_ZN2at17CUDAGeneratorImpl17philox_cuda_stateEm"));
  const Draw draw = state_of(generator, increment);
  if (!first.is_captured) first = draw;
  return draw;
}

// --- for those who compute values, see ../operators ---------------------------------------------

void torchmem_forget_draw() { first = {}; }

int torchmem_captured_draw(const uint64_t** seed, const uint64_t** offset, uint64_t* further) {
  *seed = reinterpret_cast<const uint64_t*>(first.seed);
  *offset = reinterpret_cast<const uint64_t*>(first.offset);
  *further = first.further;
  return first.is_captured;
}

}  // extern "C"
