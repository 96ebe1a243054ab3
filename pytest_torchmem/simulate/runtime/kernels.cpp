// Kernels: they are registered, chosen and launched by torch, and do not run.
//
// A kernel that waits (`torch.cuda._sleep`) keeps its stream busy for that long.

#include "shared.h"

#include <cstring>
#include <unordered_set>
#include <vector>

namespace simulated {
namespace {

constexpr double kKernelMicroseconds = 5;
constexpr double kCyclesPerMicrosecond = 2000;

std::unordered_set<const void*> waiting_kernels;

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  double microseconds = kKernelMicroseconds;
  if (waiting_kernels.count(kernel)) {
    microseconds = *static_cast<int64_t*>(arguments[0]) / kCyclesPerMicrosecond;
  }
  enqueue(stream, microseconds);
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = &handle;
  return &handle;
}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  if (std::strstr(name, "spin_kernel")) waiting_kernels.insert(host);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(host, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launched, const void* host,
                                void** arguments) {
  return launch(host, arguments, launched->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(host, arguments, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  std::memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 10 * gpu().major + gpu().minor;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int,
                                                                   size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* out, const void*, const cudaLaunchConfig_t*) {
  *out = gpu().processors;
  return cudaSuccess;
}

}  // extern "C"
