// Operators of sparse and of nested tensors, which have kernels of their own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace simulated {

// Whether an operator leaves values in a tensor.
bool writes_values(const c10::FunctionSchema& schema);
// The kernel that torch has for it.
c10::KernelFunction kernel_of(const c10::OperatorHandle& handle, c10::DispatchKey key);

// Has small sparse and nested tensors computed from now on, for as long as what it adds to `kept` is there.
void compute_small_values_in_parts(std::vector<c10::RegistrationHandleRAII>& kept);

}  // namespace simulated
