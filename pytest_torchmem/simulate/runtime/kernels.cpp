// Kernels: they are registered, chosen and launched by torch, and do not run, but for one: what fills
// a tensor with one value (`zeros`, `ones`, `full`, `fill_`) is done here, as GradScaler's scale,
// counters and masks begin that way. A value other than zero is written to 64 MiB and no more, so that
// a large tensor takes no memory of the host.
//
// A kernel that waits (`torch.cuda._sleep`) keeps its stream busy for that long. One of another library
// than torch's leaves what it may write not exact.

#include "shared.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simulated {
namespace {

constexpr double kKernelMicroseconds = 5;
constexpr double kCyclesPerMicrosecond = 2000;

constexpr size_t kMostFilled = size_t{64} << 20;

auto& waiting_kernels = forever<std::unordered_set<const void*>>();
auto& filling_kernels = forever<std::unordered_map<const void*, size_t>>();  // and the bytes of an element

// The bytes of an element that a kernel fills a tensor with; 0 for any other kernel. Its parameters
// are the number of elements, the value, and where they are.
size_t filled_element_bytes(const std::string& name) {
  static const std::string kernel = "vectorized_elementwise_kernelILi", functor = "FillFunctorI";
  static const std::string parameters = "ESt5arrayIPcLm1EEEEviT0_T1_";
  const size_t start = name.find(functor);
  if (name.find(kernel) == std::string::npos || start == std::string::npos ||
      name.size() < parameters.size() ||
      name.compare(name.size() - parameters.size(), std::string::npos, parameters)) {
    return 0;
  }
  const size_t first = start + functor.size();
  const std::string type = name.substr(first, name.size() - parameters.size() - first);
  static const std::unordered_map<std::string, size_t> bytes = {
      {"aE", 1}, {"hE", 1}, {"bE", 1}, {"sE", 2}, {"tE", 2}, {"iE", 4},
      {"jE", 4}, {"fE", 4}, {"lE", 8}, {"mE", 8}, {"dE", 8},
      {"N3c104HalfEE", 2}, {"N3c108BFloat16EE", 2},
  };
  const auto found = bytes.find(type);
  return found == bytes.end() ? 0 : found->second;
}

void fill(char* target, const std::string& value, size_t bytes) {
  const size_t element_bytes = value.size();
  if (std::all_of(value.begin(), value.end(), [](char byte) { return byte == 0; })) {
    set_bytes(target, 0, bytes);
  } else if (bytes <= kMostFilled) {
    std::vector<char> values(bytes);
    std::memcpy(values.data(), value.data(), std::min(element_bytes, bytes));
    for (size_t done = element_bytes; done < bytes; done *= 2) {
      std::memcpy(&values[done], values.data(), std::min(done, bytes - done));
    }
    copy_bytes(target, values.data(), bytes);
  } else {
    forget_bytes(target, bytes);
  }
}

// --- kernels of other libraries -----------------------------------------------------------------------

auto& libraries_of_others = forever<std::unordered_set<void**>>();
// And which of their parameters lead to what they may write.
auto& kernels_of_others = forever<std::unordered_map<const void*, std::vector<size_t>>>();
thread_local long launches_of_others = 0;

bool is_of_torch(const void* binary) {
  Dl_info found{};
  return dladdr(binary, &found) && std::strstr(found.dli_fname, "/libtorch_");
}

// The types of a function's parameters, by the name that the compiler gave it; none for one of C.
std::vector<std::string> parameters_of(const char* name) {
  const std::unique_ptr<char, void (*)(void*)> readable(
      abi::__cxa_demangle(name, nullptr, nullptr, nullptr), std::free);
  const std::string text = readable ? readable.get() : "";
  std::vector<std::string> types(1);
  int depth = 0;
  // From behind: the first closed bracket holds the parameters.
  for (auto at = text.rbegin(); at != text.rend(); ++at) {
    const bool opens = *at == '(' || *at == '<', closes = *at == ')' || *at == '>';
    depth += closes - opens;
    if (opens && !depth) break;
    if (*at == ',' && depth == 1) {
      types.emplace_back();
    } else if (!closes || depth > 1) {
      types.back().insert(types.back().begin(), *at);
    }
  }
  std::reverse(types.begin(), types.end());
  return types;
}

// Pointers to what is not constant, and objects such as torch's accessors, which begin with a pointer.
std::vector<size_t> written_parameters(const char* name) {
  const std::vector<std::string> types = parameters_of(name);
  std::vector<size_t> written;
  for (size_t place = 0; place < types.size(); ++place) {
    const std::string& type = types[place];
    const bool constant = type.find("const*") != std::string::npos;
    if (!type.empty() && !constant && (type.back() == '*' || type.back() == '>')) written.push_back(place);
  }
  return written;
}

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  double microseconds = kKernelMicroseconds;
  if (waiting_kernels.count(kernel)) {
    microseconds = *static_cast<int64_t*>(arguments[0]) / kCyclesPerMicrosecond;
  }
  const auto filling = filling_kernels.find(kernel);
  if (filling != filling_kernels.end()) {
    const size_t element_bytes = filling->second;
    const std::string value(static_cast<char*>(arguments[1]), element_bytes);
    char* target = *static_cast<char**>(arguments[2]);
    const size_t bytes = *static_cast<int*>(arguments[0]) * element_bytes;
    write_on(stream, [=] { fill(target, value, bytes); });
  }
  const auto of_others = kernels_of_others.find(kernel);
  if (of_others != kernels_of_others.end()) {
    ++launches_of_others;
    for (const size_t place : of_others->second) {
      const void* target = *static_cast<void**>(arguments[place]);
      do_or_capture(stream, [=] { doubt_block(target); });
    }
  }
  enqueue(stream, microseconds);
  return cudaSuccess;
}

// --- the machine code of a kernel: there is some for each GPU that torch was built for ----------------

struct FatBinary {  // fatbinary_section.h
  int magic, version;
  const char* data;
};
struct FatBinaryHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatBinaryEntry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, option_bytes;
  uint16_t minor, major;
  uint32_t capability;  // 86 for 8.6
};
constexpr uint32_t kFatBinaryMagic = 0xBA55ED50;
constexpr uint16_t kPtx = 1;

// The capability that the code was compiled for which this GPU runs: that of the GPU itself or, of the
// same generation, the next one below it; otherwise PTX of the nearest one. CUB looks for its own
// parameters by it.
int capability_of_code(const FatBinary& binary) {
  const int wanted = 10 * gpu().major + gpu().minor;
  const auto& header = *reinterpret_cast<const FatBinaryHeader*>(binary.data);
  if (header.magic != kFatBinaryMagic) return wanted;
  int code = 0, ptx = 0;
  const char* at = binary.data + header.header_bytes;
  const char* end = at + header.bytes;
  while (at + sizeof(FatBinaryEntry) <= end) {
    const auto& entry = *reinterpret_cast<const FatBinaryEntry*>(at);
    const int found = static_cast<int>(entry.capability);
    if (found <= wanted && entry.kind == kPtx) ptx = std::max(ptx, found);
    if (found <= wanted && entry.kind != kPtx && found / 10 == gpu().major) {
      code = std::max(code, found);
    }
    at += entry.header_bytes + entry.bytes;
  }
  return code ? code : ptx ? ptx : wanted;
}

// CUB asks for these, one in each part of torch that uses it.
auto& empty_kernels = forever<std::unordered_map<const void*, const FatBinary*>>();

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

void** __cudaRegisterFatBinary(void* binary) {
  void** library = new void*(binary);
  if (!is_of_torch(binary)) libraries_of_others.insert(library);
  return library;
}

void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
  if (libraries_of_others.count(binary)) kernels_of_others[host] = written_parameters(name);
  if (std::strstr(name, "spin_kernel")) waiting_kernels.insert(host);
  if (std::strstr(name, "EmptyKernel")) empty_kernels[host] = static_cast<FatBinary*>(*binary);
  if (const size_t bytes = filled_element_bytes(name)) filling_kernels[host] = bytes;
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

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* kernel) {
  std::memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  const auto found = empty_kernels.find(kernel);
  out->ptxVersion = out->binaryVersion = found == empty_kernels.end()
                                             ? 10 * gpu().major + gpu().minor
                                             : capability_of_code(*found->second);
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

// How many kernels of other libraries than torch's this thread has launched.
long torchmem_launches_of_others() { return launches_of_others; }

}  // extern "C"
