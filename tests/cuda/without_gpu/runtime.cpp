// A CUDA runtime with memory and without kernels, for machines that have no GPU.
//
// torch's own CUDA build runs on it: the real caching allocator, dispatcher, autograd and profiler
// ask this library for memory, streams and events. Device memory is host memory that is counted
// and limited; copies are made; kernels are not run, so results are zeros and only memory is true.
// A kernel that waits (`torch.cuda._sleep`) keeps its stream busy for that long.
//
// Environment: SIMULATED_CUDA_DEVICES (1), SIMULATED_CUDA_GIB (80, of each device).

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kGiB = size_t{1} << 30;
constexpr size_t kPage = size_t{2} << 20;
constexpr int kComputeMajor = 9;
constexpr int kMultiprocessors = 132;
constexpr int kDriverVersion = 13000;

size_t setting(const char* name, size_t fallback) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

int device_count() {
  static const int count = static_cast<int>(setting("SIMULATED_CUDA_DEVICES", 1));
  return count;
}

size_t capacity_bytes() {
  static const size_t bytes = setting("SIMULATED_CUDA_GIB", 80) * kGiB;
  return bytes;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct Range {
  size_t bytes;
  int device;
};

struct Stream {
  int device = 0;
  int priority = 0;
  Clock::time_point busy_until;
  bool capturing = false;
};

struct Event {
  Clock::time_point done;
};

struct Physical {
  size_t bytes;
  int device;
};

std::mutex guard;
std::map<uintptr_t, Range> ranges;
std::vector<size_t> used_bytes(64, 0);
// torch makes its streams once and keeps them.
std::vector<Stream*> streams;
std::unordered_map<const void*, bool> waiting_kernels;
std::atomic<unsigned long long> capture_count{0};
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// Counts memory of a device as used, if it has that much.
bool take(int device, size_t bytes) {
  if (used_bytes[device] + bytes > capacity_bytes()) return false;
  used_bytes[device] += bytes;
  return true;
}

void* address_space(size_t bytes, int protection) {
  // Aligned as CUDA's are, so that addresses compare as they would on a device.
  const size_t whole = whole_pages(bytes) + kPage;
  void* start = mmap(nullptr, whole, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const uintptr_t first = whole_pages(reinterpret_cast<uintptr_t>(start));
  return reinterpret_cast<void*>(first);
}

Stream* stream_of(cudaStream_t stream) {
  static std::vector<Stream> defaults(64);
  const auto value = reinterpret_cast<uintptr_t>(stream);
  // The legacy and the per-thread default stream are written as 0, 1 and 2.
  if (value <= 2) return &defaults[current_device];
  return reinterpret_cast<Stream*>(stream);
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

bool is_done(Clock::time_point when) { return Clock::now() >= when; }

void keep_busy(cudaStream_t stream, std::chrono::nanoseconds time) {
  Stream* busy = stream_of(stream);
  busy->busy_until = std::max(busy->busy_until, Clock::now()) + time;
}

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(guard);
  if (waiting_kernels.count(kernel)) {
    // One cycle is half a nanosecond.
    keep_busy(stream, std::chrono::nanoseconds(*static_cast<int64_t*>(arguments[0]) / 2));
  }
  return cudaSuccess;
}

cudaError_t give_stream(cudaStream_t* out, int priority) {
  auto* stream = new Stream;
  stream->device = current_device;
  stream->priority = priority;
  std::lock_guard<std::mutex> lock(guard);
  streams.push_back(stream);
  *out = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t give_event(cudaEvent_t* out) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

template <typename Handle>
cudaError_t give_handle(Handle* out) {
  *out = reinterpret_cast<Handle>(std::calloc(1, 256));
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

extern "C" {

// --- memory ---------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** out, size_t bytes) {
  std::lock_guard<std::mutex> lock(guard);
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  if (!take(current_device, bytes)) return fail(cudaErrorMemoryAllocation);
  *out = address_space(bytes, PROT_READ | PROT_WRITE);
  if (!*out) {
    used_bytes[current_device] -= bytes;
    return fail(cudaErrorMemoryAllocation);
  }
  ranges[reinterpret_cast<uintptr_t>(*out)] = {bytes, current_device};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> lock(guard);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  used_bytes[found->second.device] -= found->second.bytes;
  munmap(pointer, whole_pages(found->second.bytes));
  ranges.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(guard);
  *total = capacity_bytes();
  *free = capacity_bytes() - used_bytes[current_device];
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  std::memset(out, 0, sizeof *out);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(address);
  if (after != ranges.begin() && address < std::prev(after)->first + std::prev(after)->second.bytes) {
    out->type = cudaMemoryTypeDevice;
    out->device = std::prev(after)->second.device;
    out->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char memory[1 << 16];
  *out = memory;
  return cudaSuccess;
}

// --- devices --------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* out) {
  *out = device_count();
  return *out ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* out) {
  *out = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  std::memset(out, 0, sizeof *out);
  std::strcpy(out->name, "simulated CUDA device");
  out->uuid.bytes[0] = static_cast<char>(device + 1);
  out->totalGlobalMem = capacity_bytes();
  out->major = kComputeMajor;
  out->multiProcessorCount = kMultiprocessors;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  for (int axis = 0; axis < 3; ++axis) {
    out->maxThreadsDim[axis] = axis == 2 ? 64 : 1024;
    out->maxGridSize[axis] = axis == 0 ? 2147483647 : 65535;
  }
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 227 << 10;
  out->sharedMemPerMultiprocessor = 228 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 50 << 20;
  out->textureAlignment = 512;
  out->unifiedAddressing = 1;
  out->concurrentKernels = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = kComputeMajor; break;
    case cudaDevAttrMultiProcessorCount: *out = kMultiprocessors; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: *out = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = 228 << 10; break;
    case cudaDevAttrMaxRegistersPerBlock: *out = 65536; break;
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

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the simulated device";
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

cudaError_t cudaDeviceSynchronize() {
  cudaStreamSynchronize(nullptr);
  std::vector<cudaStream_t> mine;
  {
    std::lock_guard<std::mutex> lock(guard);
    for (Stream* stream : streams) {
      if (stream->device == current_device) mine.push_back(reinterpret_cast<cudaStream_t>(stream));
    }
  }
  for (cudaStream_t stream : mine) cudaStreamSynchronize(stream);
  return cudaSuccess;
}

// --- streams, events, graphs ----------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* out) { return give_stream(out, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) { return give_stream(out, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  return give_stream(out, priority);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) {
  *out = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return is_done(stream_of(stream)->busy_until) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::this_thread::sleep_until(stream_of(stream)->busy_until);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Stream* waiting = stream_of(stream);
  waiting->busy_until = std::max(waiting->busy_until, event_of(event)->done);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) { return give_event(out); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { return give_event(out); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event_of(event)->done = std::max(stream_of(stream)->busy_until, Clock::now());
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return is_done(event_of(event)->done) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::this_thread::sleep_until(event_of(event)->done);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t from, cudaEvent_t to) {
  *out = std::chrono::duration<float, std::milli>(event_of(to)->done - event_of(from)->done).count();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  const bool capturing = stream_of(stream)->capturing;
  *out = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                unsigned long long* id, cudaGraph_t* graph) {
  if (id) *id = capture_count;
  if (graph) *graph = nullptr;
  return cudaStreamIsCapturing(stream, status);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return capture_info(stream, status, id, graph);
}

#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t**, size_t*) {
  return capture_info(stream, status, id, graph);
}
#endif

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream_of(stream)->capturing = true;
  ++capture_count;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  stream_of(stream)->capturing = false;
  return give_handle(out);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  return give_handle(out);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

// --- kernels --------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle = &handle;
  return &handle;
}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  if (std::strstr(name, "spin_kernel")) waiting_kernels[host] = true;
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

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  std::memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 10 * kComputeMajor;
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

// --- the driver's virtual memory, which expandable segments stand on -------------------------

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                                unsigned long long) {
  *out = reinterpret_cast<CUdeviceptr>(address_space(bytes, PROT_NONE));
  return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  munmap(reinterpret_cast<void*>(start), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                              const CUmemAllocationProp* properties, unsigned long long) {
  std::lock_guard<std::mutex> lock(guard);
  const int device = properties->location.id;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{bytes, device});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(guard);
  auto* physical = reinterpret_cast<Physical*>(handle);
  used_bytes[physical->device] -= physical->bytes;
  delete physical;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t,
                           CUmemGenericAllocationHandle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(guard);
  mprotect(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE);
  ranges[start] = {bytes, reinterpret_cast<Physical*>(handle)->device};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  std::lock_guard<std::mutex> lock(guard);
  madvise(reinterpret_cast<void*>(start), bytes, MADV_DONTNEED);
  mprotect(reinterpret_cast<void*>(start), bytes, PROT_NONE);
  ranges.erase(start);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                            CUmemAllocationGranularity_flags) {
  *out = kPage;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

static CUresult any_other(void) { return CUDA_SUCCESS; }

static cudaError_t driver_entry(const char* name, void** out,
                                cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
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

// --- libraries: handles that are not null, versions, and one algorithm for a product ---------

int cublasCreate_v2(void** out) { return give_handle(out); }
int cublasLtMatmulDescCreate(void** out) { return give_handle(out); }
int cublasLtMatrixLayoutCreate(void** out) { return give_handle(out); }
int cublasLtMatmulPreferenceCreate(void** out) { return give_handle(out); }
int cusparseCreate(void** out) { return give_handle(out); }
int cusolverDnCreate(void** out) { return give_handle(out); }
int cudnnCreate(void** out) { return give_handle(out); }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* /*results, zeroed by the caller*/, int* count) {
  *count = 1;
  return 0;
}

size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
size_t cublasLtGetVersion() { return 130000; }

int ncclGetVersion(int* out) {
  *out = 22907;
  return 0;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  static char context;
  *out = reinterpret_cast<CUcontext>(&context);
  return CUDA_SUCCESS;
}

// The management library: there is no fabric, and no other process.
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) { return give_handle(out); }
int nvmlDeviceGetGpuFabricInfoV(void*, void* out) {
  // The version comes first and is the caller's; a state of 0 says that there is no fabric.
  std::memset(static_cast<char*>(out) + 4, 0, 28);
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* out) { return cudaDriverGetVersion(out); }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

const char* cudnnGetErrorString(int) { return "cuDNN is not there"; }
const char* ncclGetErrorString(int) { return "NCCL is not there"; }
const char* nvrtcGetErrorString(int) { return "NVRTC is not there"; }

// CUPTI says that it cannot record kernels; torch's profiler then goes on without them.
int cuptiActivityRegisterCallbacks(void*, void*) { return 15; }
int cuptiSubscribe(void*, void*, void*) { return 15; }
int cuptiGetResultString(int, const char** out) {
  *out = "CUPTI is not there";
  return 0;
}

}  // extern "C"
