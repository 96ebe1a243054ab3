// Values of the GPU that nobody computed, where the host has copied them: what comes back from there, or is
// counted there, rests on them still.
#pragma once

#include "device_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/op_registration/op_registration.h>

#include <vector>

namespace simulated {

// A count and the truth decide; a number is shown, or compared by somebody who knows that it is none.
inline int kind_of(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), true) ? kCount : kNumber;
}

// A tensor of the host has been written with what a tensor of the GPU holds.
void note_host_copy(const at::Tensor& on_host, bool missing);

// Whether the host holds such a copy there, and has not written to the tensor since.
bool holds_missing(const at::Tensor& on_host);

// Says from now on where a shape, a count or a branch rests on such a copy, as long as what it adds to
// `kept` is there.
void watch_host_copies(std::vector<c10::RegistrationHandleRAII>& kept);

}  // namespace simulated
