// What the GPU draws: a kernel of torch's gives each thread a sequence of Philox of its own.
#pragma once

#include "rules.h"

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>

#include <cstdint>

namespace simulated {

// Where a kernel's draws begin.
struct Draw {
  uint64_t seed, offset;

  // A generator of the CPU's, for kernels whose draws only differ from call to call as the GPU's do.
  at::Generator on_host() const;
};

// Fills the first argument, on the host, as the GPU's kernel would. Returns false where it is not known how.
bool draw_as_gpu(const c10::FunctionSchema& schema, const Arguments& arguments, const Draw& begin);

}  // namespace simulated
