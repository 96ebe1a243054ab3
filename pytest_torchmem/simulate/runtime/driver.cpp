// The driver's interface, as torch, NVRTC's users and Triton call it.

#include "shared.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using namespace simulated;

extern "C" {

static CUresult any_other(void) { return CUDA_SUCCESS; }

static cudaError_t driver_entry(const char* name, void** out,
                                cudaDriverEntryPointQueryResult* result) {
  static void* self = [] {
    Dl_info found{};
    dladdr(reinterpret_cast<void*>(any_other), &found);
    return dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  // The newest form of a function is the one that is asked for by its plain name.
  for (const char* ending : {"", "_v2", "_v3"}) {
    if ((*out = dlsym(self, (std::string(name) + ending).c_str()))) break;
  }
  if (!*out) *out = reinterpret_cast<void*>(any_other);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return driver_entry(name, out, result);
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return driver_entry(name, out, result);
}
#endif

CUresult cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* result) {
  driver_entry(name, out, nullptr);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned) {
  begin();
  return CUDA_SUCCESS;
}

// A CUDA runtime that is linked into a library asks for the tables, and gives up without them.
CUresult cuGetExportTable(const void** out, const CUuuid*) {
  *out = nullptr;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDriverGetVersion(int* out) {
  cudaDriverGetVersion(out);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** out) {
  *out = "error of the simulated driver";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult, const char** out) {
  *out = "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

// --- devices and contexts -----------------------------------------------------------------------

CUresult cuDeviceGet(CUdevice* out, int number) {
  *out = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* out) {
  if (!has_begun()) return CUDA_ERROR_NOT_INITIALIZED;
  *out = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* out, int length, CUdevice) {
  std::snprintf(out, length, "%s", gpu().name.c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* out, CUdevice) {
  *out = gpu().bytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice device) {
  // The runtime and the driver number these alike.
  cudaDeviceGetAttribute(out, static_cast<cudaDeviceAttr>(attribute), device);
  return CUDA_SUCCESS;
}

static char context;

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
  *out = reinterpret_cast<CUcontext>(&context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = reinterpret_cast<CUcontext>(&context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* out) {
  *out = chosen_device();
  return CUDA_SUCCESS;
}

// --- kernels that were compiled while the program runs; modules.cpp launches them ----------------

CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = 32; break;
    default: *out = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) {
  *out = 2;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* out, CUlimit) {
  *out = size_t{1} << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) {
  *out = gpu().processors;
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  wait_for(reinterpret_cast<cudaStream_t>(stream));
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* out) {
  *out = is_capturing(reinterpret_cast<cudaStream_t>(stream)) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                               : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  copy_bytes(to, reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  copy_bytes(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  return cuMemcpyHtoD_v2(to, from, bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  write_on(reinterpret_cast<cudaStream_t>(stream),
           [=] { set_bytes(reinterpret_cast<void*>(to), value, count); });
  return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  write_on(reinterpret_cast<cudaStream_t>(stream), [=] {
    if (!value) set_bytes(reinterpret_cast<void*>(to), 0, 4 * count);
    for (size_t at = 0; value && at < count; ++at) {
      copy_bytes(reinterpret_cast<char*>(to) + 4 * at, &value, 4);
    }
  });
  return CUDA_SUCCESS;
}

// --- NVRTC: the source of a kernel is taken, and nothing is made of it ----------------------------

int nvrtcVersion(int* major, int* minor) {
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return 0;
}

int nvrtcCreateProgram(void** out, const char*, const char*, int, const char* const*,
                       const char* const*) {
  return give_handle(out);
}

static int one_byte(size_t* out) {
  *out = 1;
  return 0;
}
static int empty_text(char* out) {
  *out = '\0';
  return 0;
}

int nvrtcGetPTXSize(void*, size_t* out) { return one_byte(out); }
int nvrtcGetCUBINSize(void*, size_t* out) { return one_byte(out); }
int nvrtcGetProgramLogSize(void*, size_t* out) { return one_byte(out); }
int nvrtcGetPTX(void*, char* out) { return empty_text(out); }
int nvrtcGetCUBIN(void*, char* out) { return empty_text(out); }
int nvrtcGetProgramLog(void*, char* out) { return empty_text(out); }

int nvrtcGetLoweredName(void*, const char*, const char** out) {
  *out = "kernel";
  return 0;
}

const char* nvrtcGetErrorString(int) { return "error of the simulated NVRTC"; }

// --- the management library: there is no fabric, no other process, and no work that takes power ---

// A handle is the number of its device on the machine, counted from 1: NVML has those, too, that are
// hidden from CUDA.
static size_t used_bytes_of_handle(void* handle) {
  const int number = static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1;
  const std::vector<int>& visible = gpu().visible;
  const auto found = std::find(visible.begin(), visible.end(), number);
  return found == visible.end() ? 0 : used_bytes_of(static_cast<int>(found - visible.begin()));
}

static int nvml_number(unsigned* out, unsigned number) {
  *out = number;
  return 0;
}

// Lists this process, with what it has allocated, where the caller has room for it. From the second
// version on an entry ends with the numbers of a part of the GPU: it is in none.
static int this_process(void* handle, unsigned* count, void* out, size_t entry_bytes) {
  constexpr int kTooSmall = 7;
  const unsigned long long used = used_bytes_of_handle(handle);
  const unsigned room = std::exchange(*count, used ? 1 : 0);
  if (!*count) return 0;
  if (!room || !out) return kTooSmall;
  const unsigned long long written[3] = {static_cast<unsigned>(getpid()), used, ~0ull};
  std::memcpy(out, written, entry_bytes);
  return 0;
}

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int) { return "error of the simulated NVML"; }
int nvmlDeviceGetCount_v2(unsigned* out) { return nvml_number(out, gpu().installed); }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** out) {
  if (number >= static_cast<unsigned>(gpu().installed)) return 2;  // an invalid argument
  *out = reinterpret_cast<void*>(uintptr_t{number} + 1);
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** out) {
  const char* behind_domain = std::strchr(bus, ':');
  return nvmlDeviceGetHandleByIndex_v2(behind_domain ? std::strtoul(behind_domain + 1, nullptr, 16) : 0, out);
}
int nvmlDeviceGetName(void*, char* out, unsigned length) {
  std::snprintf(out, length, "%s", gpu().name.c_str());
  return 0;
}
// Both rates: of time in which a kernel ran, and in which memory was read or written.
int nvmlDeviceGetUtilizationRates(void*, unsigned* out) {
  out[0] = out[1] = 0;
  return 0;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* out) { return nvml_number(out, 35); }
int nvmlDeviceGetPowerUsage(void*, unsigned* out) { return nvml_number(out, 70000); }  // milliwatts
int nvmlDeviceGetClockInfo(void*, int kind, unsigned* out) {
  constexpr int kMemory = 2;
  int kilohertz = 0;
  cudaDeviceGetAttribute(&kilohertz, kind == kMemory ? cudaDevAttrMemoryClockRate : cudaDevAttrClockRate, 0);
  return nvml_number(out, kilohertz / 1000);
}
int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* out) {
  out[0] = gpu().bytes;
  out[2] = used_bytes_of_handle(handle);
  out[1] = out[0] - out[2];
  return 0;
}
// The version comes first and is the caller's; the driver reserves nothing.
int nvmlDeviceGetMemoryInfo_v2(void* handle, unsigned long long* out) {
  nvmlDeviceGetMemoryInfo(handle, out + 2);
  out[1] = std::exchange(out[2], 0);
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void* out) {
  // The version comes first and is the caller's; a state of 0 says that there is no fabric.
  std::memset(static_cast<char*>(out) + 4, 0, 28);
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlSystemGetDriverVersion(char* out, unsigned length) {
  std::snprintf(out, length, "simulated");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* out) { return cudaDriverGetVersion(out); }
int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, void* out) {
  return this_process(handle, count, out, 16);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void* handle, unsigned* count, void* out) {
  return this_process(handle, count, out, 24);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, void* out) {
  return this_process(handle, count, out, 24);
}

// CUPTI says that it cannot record kernels; torch's profiler then goes on without them.
int cuptiActivityRegisterCallbacks(void*, void*) { return 15; }
int cuptiSubscribe(void*, void*, void*) { return 15; }
int cuptiGetResultString(int, const char** out) {
  *out = "CUPTI is not there";
  return 0;
}

}  // extern "C"
