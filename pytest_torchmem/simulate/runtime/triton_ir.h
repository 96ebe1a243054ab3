// Kernels of Triton in its own language, as its compiler leaves them beside the machine code: parsed,
// and run one program after the other on the simulated memory.
//
// https://triton-lang.org/main/dialects/TritonDialect.html
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace simulated::triton_ir {

enum class Kind { kInteger, kFloat, kBfloat, kPointer };

// A scalar, or a tensor of them.
struct Type {
  Kind kind = Kind::kInteger;
  int bits = 32;
  std::vector<int64_t> sizes;
  std::shared_ptr<Type> target;  // of a pointer

  bool is_float() const { return kind == Kind::kFloat || kind == Kind::kBfloat; }
  size_t bytes() const { return bits <= 8 ? 1 : bits / 8; }
};

struct Region;

struct Operation {
  std::string name, text;        // the text is all behind the name
  std::vector<int> given, made;  // places of values
  std::vector<Type> types;       // all that the text names, in order
  std::vector<Region> regions;
};

struct Region {
  std::vector<int> arguments;
  std::vector<Operation> operations;
};

struct Kernel {
  std::vector<Type> parameters;
  Region body;
  size_t values = 0;
  size_t elements = 0;  // of what one program makes, loops counted once
};

// The function that a text declares. Raises std::exception for what is not understood.
Kernel parse(const std::string& text);

// Whether it does not take too long; a loop counts as one turn.
bool is_short(const Kernel& kernel, const uint32_t grid[3]);

// The blocks of memory that a kernel has written to: start to end.
using Blocks = std::map<uintptr_t, uintptr_t>;

// Runs all programs of a grid. `arguments` are as a launch passes them. Returns false if that took too
// long, or something is not understood; some values may have been written then.
bool run(const Kernel& kernel, const uint32_t grid[3], void** arguments, Blocks& written);

}  // namespace simulated::triton_ir
