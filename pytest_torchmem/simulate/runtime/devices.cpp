// The devices: how many, and the properties by which torch and Triton choose.

#include "shared.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

namespace simulated {
namespace {

constexpr int kDriverVersion = 13000;

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

size_t setting(const char* name, size_t fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

int installed_devices() { return static_cast<int>(setting("SIMULATED_CUDA_DEVICES", 1)); }

// CUDA_VISIBLE_DEVICES as a program has set it before it looks: what stands before the first number that
// is no device.
std::vector<int> visible_devices(int installed) {
  std::vector<int> found;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  for (int number = 0; !text && number < installed; ++number) found.push_back(number);
  while (text && *text) {
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    if (end == text || number < 0 || number >= installed) break;
    found.push_back(static_cast<int>(number));
    text = *end == ',' ? end + 1 : "";
  }
  return found;
}

// Shared memory of a multiprocessor in KiB; a block can have one less where it opts in.
int shared_kib() {
  switch (gpu().major * 10 + gpu().minor) {
    case 70: return 96;
    case 75: return 64;
    case 80: case 87: return 164;
    case 86: case 89: case 120: case 121: return 100;
    default: return 228;
  }
}

int threads_of_multiprocessor() {
  switch (gpu().major * 10 + gpu().minor) {
    case 75: return 1024;
    case 86: case 87: case 89: case 120: case 121: return 1536;
    default: return 2048;
  }
}

int opt_in_bytes() {
  const bool before_ampere = gpu().major < 8;
  return (before_ampere ? shared_kib() : shared_kib() - 1) << 10;
}

// Loads what computes small values, if it was built for this torch. The first who looks for devices
// has loaded torch, and has run no operator on one.
void load_operators() {
  Dl_info found{};
  dladdr(reinterpret_cast<void*>(cudaGetDeviceCount), &found);
  const std::string own = found.dli_fname;
  const std::string path = own.substr(0, own.rfind('/') + 1) + "libsimulated_operators.so";
  void* library = dlopen(path.c_str(), RTLD_NOW);
  if (!library) {
    if (std::getenv("SIMULATED_CUDA_DEBUG")) std::fprintf(stderr, "%s\n", dlerror());
    return;
  }
  reinterpret_cast<void (*)()>(dlsym(library, "torchmem_compute_small_values"))();
}

}  // namespace

const Gpu& gpu() {
  static const Gpu& found = forever<const Gpu>([] {
    const char* name = std::getenv("SIMULATED_CUDA_NAME");
    const size_t capability = setting("SIMULATED_CUDA_CAPABILITY", 90);
    return Gpu{name ? name : "simulated GPU",
               setting("SIMULATED_CUDA_BYTES", size_t{80} << 30),
               static_cast<int>(capability / 10),
               static_cast<int>(capability % 10),
               static_cast<int>(setting("SIMULATED_CUDA_PROCESSORS", 132)),
               static_cast<int>(setting("SIMULATED_CUDA_CACHE", 50 << 20)),
               installed_devices(),
               visible_devices(installed_devices()),
               setting("SIMULATED_CUDA_ALONE", 0) != 0};
  }());
  return found;
}

static std::atomic<bool> contexts[kMostDevices];

int current_device() {
  contexts[device_of_thread] = true;
  return device_of_thread;
}
int chosen_device() { return device_of_thread; }
bool has_context(int device) { return contexts[device]; }

static std::atomic<bool> begun{false};
void begin() { begun = true; }
bool has_begun() { return begun; }

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

}  // namespace simulated

using namespace simulated;

extern "C" {

cudaError_t cudaGetDeviceCount(int* out) {
  static std::once_flag looked_for;
  std::call_once(looked_for, load_operators);
  begin();
  *out = device_count();
  return *out ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* out) {
  *out = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  device_of_thread = device;
  current_device();
  begin();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  std::memset(out, 0, sizeof *out);
  std::snprintf(out->name, sizeof out->name, "%s", gpu().name.c_str());
  out->uuid.bytes[0] = static_cast<char>(device + 1);
  out->totalGlobalMem = gpu().bytes;
  out->major = gpu().major;
  out->minor = gpu().minor;
  out->multiProcessorCount = gpu().processors;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = threads_of_multiprocessor();
  out->maxBlocksPerMultiProcessor = 32;
  for (int axis = 0; axis < 3; ++axis) {
    out->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
    out->maxGridSize[axis] = axis == 0 ? 2147483647 : 65535;
  }
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = opt_in_bytes();
  out->sharedMemPerMultiprocessor = shared_kib() << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = gpu().cache_bytes;
  out->textureAlignment = 512;
  out->unifiedAddressing = 1;
  out->concurrentKernels = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = gpu().major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = gpu().minor; break;
    case cudaDevAttrMultiProcessorCount: *out = gpu().processors; break;
    case cudaDevAttrL2CacheSize: *out = gpu().cache_bytes; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *out = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *out = 64; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = threads_of_multiprocessor(); break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = opt_in_bytes(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = shared_kib() << 10; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *out = 65536; break;
    case cudaDevAttrClockRate: *out = 1700000; break;
    case cudaDevAttrMemoryClockRate: *out = 2600000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *out = 5120; break;
    case cudaDevAttrUnifiedAddressing: *out = 1; break;
    default: *out = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) {
  std::snprintf(out, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* out) {
  *out = kDriverVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

// CUDA's names and words for what this runtime answers.
static const struct {
  cudaError_t error;
  const char *name, *words;
} kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

const char* cudaGetErrorString(cudaError_t error) {
  for (const auto& known : kErrors) {
    if (known.error == error) return known.words;
  }
  return "unrecognized error code";
}

const char* cudaGetErrorName(cudaError_t error) {
  for (const auto& known : kErrors) {
    if (known.error == error) return known.name;
  }
  return "unrecognized error code";
}

// --- for those who compute values, see ../operators ---------------------------------------------

long torchmem_threads() { return static_cast<long>(gpu().processors) * threads_of_multiprocessor(); }

}  // extern "C"
