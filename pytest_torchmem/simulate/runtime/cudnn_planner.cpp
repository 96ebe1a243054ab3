#include "cudnn_planner.h"

#include <dlfcn.h>

#include <cstdio>

#include "shared.h"

namespace simulated {
namespace {

// Numbers of cudnn_graph.h.
constexpr int kDeviceProperties = 38;
constexpr int kDevicePropertiesJson = 2702;
constexpr int kTypeChar = 24;

// Each looks for the next ones by their names, and finds those that are open. Their functions have
// the names of ours: they have to find each other's first.
constexpr const char* kParts[] = {"graph",   "ops",       "engines_precompiled", "engines_runtime_compiled",
                                  "heuristic", "cnn"};

void* open_library(const std::string& folder) {
  void* first = nullptr;
  for (const char* part : kParts) {
    const std::string path = folder + "/libcudnn_" + part + ".so.9";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) {
      if (std::getenv("SIMULATED_CUDA_DEBUG")) std::fprintf(stderr, "%s\n", dlerror());
      return nullptr;
    }
    if (!first) first = library;
  }
  return first;
}

// What cuDNN asks a device for. Clocks change none of its plans.
std::string described() {
  cudaDeviceProp found;
  cudaGetDeviceProperties(&found, 0);
  const auto number = [](const char* name, size_t value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  return "{\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64]"
         ", \"deviceName\": \"simulated GPU\"" +
         number("deviceVer", found.major * 100 + found.minor * 10) +
         number("multiProcessorCount", found.multiProcessorCount) +
         number("totalGlobalMem", found.totalGlobalMem) +
         number("regsPerBlock", found.regsPerBlock) +
         number("maxRegistersPerSM", found.regsPerMultiprocessor) +
         number("maxSharedMemoryPerBlock", found.sharedMemPerBlock) +
         number("maxSharedMemoryPerBlockOptin", found.sharedMemPerBlockOptin) +
         number("reservedSharedMemoryPerBlock", found.major < 8 ? 0 : 1024) +
         number("maxThreadsPerBlock", found.maxThreadsPerBlock) +
         number("maxThreadsPerSM", found.maxThreadsPerMultiProcessor) +
         number("maxCtasPerSM", found.maxBlocksPerMultiProcessor) +
         number("warpSize", found.warpSize) + number("l2CacheSize", found.l2CacheSize) +
         number("driverVer", CUDART_VERSION) + number("smClockRateKHz", 1700000) +
         number("memClockRateKHz", 2600000) + number("supportCoopLaunch", 1) +
         number("isTccDriver", 0) + number("pciDeviceId", 0) + number("cudaDeviceId", 0) + "}";
}

const CudnnPlanner* load() {
  const char* folder = std::getenv(kCudnnFolder);
  void* library = folder ? open_library(folder) : nullptr;
  if (!library) return nullptr;
  const auto function = [&](auto& out, const char* name) {
    out = reinterpret_cast<std::decay_t<decltype(out)>>(dlsym(library, name));
  };
  auto& planner = forever<CudnnPlanner>();
  function(planner.create, "cudnnBackendCreateDescriptor");
  function(planner.destroy, "cudnnBackendDestroyDescriptor");
  function(planner.finalize, "cudnnBackendFinalize");
  function(planner.set, "cudnnBackendSetAttribute");
  function(planner.get, "cudnnBackendGetAttribute");
  const std::string text = described();
  const bool is_known =
      !planner.create(kDeviceProperties, &planner.device) &&
      !planner.set(planner.device, kDevicePropertiesJson, kTypeChar, text.size() + 1, text.c_str()) &&
      !planner.finalize(planner.device);
  return is_known ? &planner : nullptr;
}

}  // namespace

const CudnnPlanner* cudnn_planner() {
  static const CudnnPlanner* planner = load();
  return planner;
}

}  // namespace simulated
