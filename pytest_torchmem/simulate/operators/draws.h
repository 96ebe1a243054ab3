// Random numbers as a GPU draws them: each thread of a kernel has a stream of Philox's numbers of its own, and
// seed, offset and number of threads say which element gets which number.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <cstdint>

namespace simulated {

// Where a generator of the GPU stands.
struct Draw {
  uint64_t seed = 0, offset = 0;

  // A generator of the host that belongs to this place: it draws other numbers.
  at::Generator on_host() const;
};

// Draws what an operator is to return or write, of arguments that are seen from the host.
using DrawnBy = torch::jit::Stack (*)(const torch::jit::Stack& given, const Draw& draw);

// The function for an operator; null where its numbers are not known.
DrawnBy drawn_by(const std::string& name);

// Whether these arguments are among those for which its numbers are the GPU's.
bool draws_as_gpu(DrawnBy function, const torch::jit::Stack& given);

}  // namespace simulated
