// Kernels that Triton compiled while the program runs. Its cache has each in its own language, too,
// beside the machine code; so they run there, where that does not take too long.
//
// Nobody knows which of the tensors that another one is given it writes. So their values stay as
// they are, and count as not exact from then on. Where its arguments lie, a kernel's file says:
// section .nv.info.KERNEL has a record for each parameter.

#include "shared.h"
#include "triton_ir.h"

#include <dirent.h>
#include <elf.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace simulated;

namespace {

using Sizes = std::map<uint16_t, uint32_t>;  // in bytes, by the number of the parameter

struct Function {
  Sizes sizes;
  std::shared_ptr<const triton_ir::Kernel> source;  // null if it is not there, or cannot be run
};

using Module = std::map<std::string, Function>;

// Whoever times a kernel launches it over and over; it is run that often. Then what it has written
// the last time counts as not exact, and what it reads stays as it is.
constexpr int kMostAlike = 64;

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

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

size_t bytes_of(const char* image) {
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(image);
  const size_t sections = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
  const size_t segments = header.e_phoff + size_t{header.e_phnum} * header.e_phentsize;
  return std::max(sections, segments);
}

// Triton's cache has a folder for each kernel.
std::shared_ptr<const triton_ir::Kernel> source_of(const char* image, const std::string& kernel) {
  const char* cache = std::getenv("TRITON_CACHE_DIR");
  DIR* folders = cache ? opendir(cache) : nullptr;
  if (!folders) return nullptr;
  const std::string code(image, bytes_of(image));
  std::shared_ptr<const triton_ir::Kernel> found;
  while (const dirent* folder = found ? nullptr : readdir(folders)) {
    const std::string path = std::string(cache) + "/" + folder->d_name + "/" + kernel;
    struct stat file;
    if (stat((path + ".cubin").c_str(), &file) || static_cast<size_t>(file.st_size) < code.size()) continue;
    if (content_of(path + ".cubin").compare(0, code.size(), code)) continue;
    try {
      found = std::make_shared<triton_ir::Kernel>(triton_ir::parse(content_of(path + ".ttir")));
    } catch (const std::exception&) {  // it says something that is not understood
      break;
    }
  }
  closedir(folders);
  return found;
}

// Whether a kernel takes the parameters of its source, and those that Triton adds behind them.
bool takes(const Sizes& sizes, const std::vector<triton_ir::Type>& parameters) {
  for (size_t at = 0; at < parameters.size(); ++at) {
    const auto found = sizes.find(static_cast<uint16_t>(at));
    if (found == sizes.end() || found->second != parameters[at].bytes()) return false;
  }
  return true;
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
    Function function{sizes_in(start, start + sections[at].sh_size), nullptr};
    const std::string kernel = name.substr(prefix.size());
    const auto source = source_of(image, kernel);
    if (source && takes(function.sizes, source->parameters)) function.source = source;
    (*found)[kernel] = function;
  }
  return found;
}

CUresult give(CUmodule* out, const void* image) {
  *out = reinterpret_cast<CUmodule>(module_in(static_cast<const char*>(image)));
  return CUDA_SUCCESS;
}

// A launch, with copies of its arguments: a graph repeats it later.
struct Launch {
  Function* function;
  uint32_t grid[3];
  std::vector<std::string> arguments;

  bool is_like(const Launch& other) const {
    return function == other.function && std::equal(grid, grid + 3, other.grid) &&
           arguments == other.arguments;
  }

  void run() {
    static std::mutex& guard = forever<std::mutex>();
    static Launch& last = forever<Launch>();
    static triton_ir::Blocks& written = forever<triton_ir::Blocks>();  // by the last
    static int alike = 0;  // launches before this one were the same
    const std::lock_guard<std::mutex> lock(guard);
    alike = is_like(last) ? alike + 1 : 0;
    if (!function->source || !is_short(*function->source, grid)) return doubt();
    if (alike >= kMostAlike) {
      for (const auto& [start, end] : written) doubt_block(reinterpret_cast<void*>(start));
      return;
    }
    last = *this;
    written.clear();
    std::vector<void*> places;
    for (std::string& argument : arguments) places.push_back(&argument[0]);
    if (triton_ir::run(*function->source, grid, places.data(), written)) return;
    function->source = nullptr;
    doubt();
  }

  // Any of its arguments may be what it writes.
  void doubt() const {
    for (const std::string& argument : arguments) {
      void* pointer = nullptr;
      if (argument.size() == sizeof pointer) std::memcpy(&pointer, argument.data(), sizeof pointer);
      if (is_device(pointer)) doubt_block(pointer);
    }
  }
};

CUresult launch(CUfunction kernel, std::array<unsigned, 3> grid, CUstream on, void** arguments) {
  const auto stream = reinterpret_cast<cudaStream_t>(on);
  Launch launched{reinterpret_cast<Function*>(kernel), {grid[0], grid[1], grid[2]}, {}};
  for (const auto& [number, bytes] : launched.function->sizes) {
    if (arguments) launched.arguments.emplace_back(static_cast<char*>(arguments[number]), bytes);
  }
  if (arguments) do_or_capture(stream, [launched]() mutable { launched.run(); });
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
  const std::string image = content_of(path);
  return image.size() < sizeof(Elf64_Ehdr) ? CUDA_ERROR_FILE_NOT_FOUND : give(out, image.data());
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  *out = reinterpret_cast<CUfunction>(&(*reinterpret_cast<Module*>(module))[name]);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** arguments, void**) {
  return launch(kernel, {x, y, z}, stream, arguments);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* launched, CUfunction kernel, void** arguments,
                          void**) {
  return launch(kernel, {launched->gridDimX, launched->gridDimY, launched->gridDimZ},
                launched->hStream, arguments);
}

CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned,
                                   unsigned, unsigned, unsigned, CUstream stream,
                                   void** arguments) {
  return launch(kernel, {x, y, z}, stream, arguments);
}

}  // extern "C"
