// Where a kernel that draws random numbers begins: torch asks its generator right before the launch.

#include "shared.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

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

// Takes a draw in place of the one that was made, which is not captured if its last word is zero.
void torchmem_exchange_draw(uint64_t* words) {
  const uint64_t made[] = {first.seed, first.offset, first.further, first.is_captured};
  first = {words[0], words[1], words[2], words[3] != 0};
  std::copy(std::begin(made), std::end(made), words);
}

int torchmem_captured_draw(const uint64_t** seed, const uint64_t** offset, uint64_t* further) {
  *seed = reinterpret_cast<const uint64_t*>(first.seed);
  *offset = reinterpret_cast<const uint64_t*>(first.offset);
  *further = first.further;
  return first.is_captured;
}

}  // extern "C"
