// Kernels that Triton compiled while the program runs. They are loaded and launched, and do not run.
//
// Nobody knows which of the tensors that such a kernel is given it writes. So their values stay as
// they are, and count as not exact from then on. Where its arguments lie, a kernel's file says:
// section .nv.info.KERNEL has a record for each parameter.

#include "shared.h"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

using namespace simulated;

namespace {

using Sizes = std::map<uint16_t, uint32_t>;  // in bytes, by the number of the parameter
using Module = std::map<std::string, Sizes>;

constexpr char kOneParameter = 0x17, kWithBytes = 4;

Sizes sizes_in(const char* at, const char* end) {
  Sizes sizes;
  while (at + 4 <= end) {
    const char format = at[0], attribute = at[1];
    uint16_t bytes, number;
    std::memcpy(&bytes, at + 2, sizeof bytes);
    at += 4;
    if (format != kWithBytes) continue;
    if (attribute == kOneParameter && bytes >= 12 && at + 12 <= end) {
      uint32_t described;
      std::memcpy(&number, at + 4, sizeof number);
      std::memcpy(&described, at + 8, sizeof described);
      sizes[number] = described >> 18;
    }
    at += bytes;
  }
  return sizes;
}

Module* module_in(const char* image) {
  auto* found = new Module;
  if (std::memcmp(image, ELFMAG, SELFMAG)) return found;
  static const std::string prefix = ".nv.info.";
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header.e_shoff);
  const char* names = image + sections[header.e_shstrndx].sh_offset;
  for (int at = 0; at < header.e_shnum; ++at) {
    const std::string name = names + sections[at].sh_name;
    if (name.compare(0, prefix.size(), prefix)) continue;
    const char* start = image + sections[at].sh_offset;
    (*found)[name.substr(prefix.size())] = sizes_in(start, start + sections[at].sh_size);
  }
  return found;
}

CUresult give(CUmodule* out, const void* image) {
  *out = reinterpret_cast<CUmodule>(module_in(static_cast<const char*>(image)));
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction kernel, CUstream on, void** arguments) {
  const auto stream = reinterpret_cast<cudaStream_t>(on);
  for (const auto& [number, bytes] : *reinterpret_cast<const Sizes*>(kernel)) {
    if (!arguments || bytes != sizeof(void*)) continue;
    void* pointer = *static_cast<void**>(arguments[number]);
    if (is_device(pointer)) do_or_capture(stream, [pointer] { doubt_block(pointer); });
  }
  enqueue(stream, 5);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* out, const void* image) { return give(out, image); }

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return give(out, image);
}

CUresult cuModuleLoad(CUmodule* out, const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  return image.size() < sizeof(Elf64_Ehdr) ? CUDA_ERROR_FILE_NOT_FOUND : give(out, image.data());
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  *out = reinterpret_cast<CUfunction>(&(*reinterpret_cast<Module*>(module))[name]);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** arguments, void**) {
  return launch(kernel, stream, arguments);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* launched, CUfunction kernel, void** arguments,
                          void**) {
  return launch(kernel, launched->hStream, arguments);
}

CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, unsigned, CUstream stream,
                                   void** arguments) {
  return launch(kernel, stream, arguments);
}

}  // extern "C"
