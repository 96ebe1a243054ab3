// cuDNN's own planning. Since release 9.8 it plans for a device that is described and not there.
#pragma once

namespace simulated {

// The functions of NVIDIA's library, and the description of the simulated GPU.
struct CudnnPlanner {
  int (*create)(int kind, void** out);
  int (*destroy)(void* descriptor);
  int (*finalize)(void* descriptor);
  int (*set)(void* descriptor, int attribute, int type, long count, const void* values);
  int (*get)(const void* descriptor, int attribute, int type, long asked, long* count, void* out);
  void* device;
};

// The variable that names the folder of NVIDIA's library.
constexpr const char* kCudnnFolder = "SIMULATED_CUDA_CUDNN";

// Null where the library is not there, or is too old to plan without a device.
const CudnnPlanner* cudnn_planner();

// How often cuBLASLt was asked for the algorithm of a product, on this thread.
long products_asked_for();

}  // namespace simulated
