// An operator of the simulated GPU, its arguments, and the same computed on the host.
#pragma once

#include "draws.h"
#include "rules.h"
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace simulated {

using c10::IValue;
using Stack = torch::jit::Stack;
using Handle = c10::OperatorHandle;

// --- what each operator is ------------------------------------------------------------------------

struct Operator {
  const c10::FunctionSchema* schema;
  c10::KernelFunction kernel;
  Rule rule;
  bool of_torch = true;
  std::optional<Handle> on_cpu;    // the operator that has a kernel for the CPU
  bool random = false;             // draws random numbers
  DrawnBy drawn_by = nullptr;      // the GPU's own, if it is known how
  std::vector<bool> written, out;  // of each argument: it is written; what it held does not count
};

// --- arguments --------------------------------------------------------------------------------------

template <typename Call>
void for_each_tensor(const IValue& value, Call call) {
  if (value.isTensor()) {
    call(value.toTensor());
  } else if (value.isList()) {  // of tensors, or of what may be one: TorchScript has types of its own
    for (const IValue& each : value.toListRef()) {
      if (each.isTensor()) call(each.toTensor());
    }
  }
}

template <typename Call>
void for_each_on_gpu(const IValue& value, Call call) {
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (is_on_gpu(tensor)) call(tensor);
  });
}

// The same value, with another tensor in the place of each one of the GPU.
template <typename Seen>
IValue with_each(const IValue& value, Seen seen) {
  const auto other = [&](const at::Tensor& tensor) {
    return is_on_gpu(tensor) ? seen(tensor) : tensor;
  };
  if (value.isTensor()) return other(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(other(tensor));
    return list;
  }
  bool has_tensors = false;
  for_each_tensor(value, [&](const at::Tensor&) { has_tensors = true; });
  if (!has_tensors) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const IValue& each : value.toListRef()) {
    list.push_back(each.isTensor() ? std::make_optional(other(each.toTensor())) : std::nullopt);
  }
  return list;
}

// As the host sees it, with what `taken` makes of each tensor.
template <typename Taken>
IValue seen_from_host(const IValue& value, Taken taken) {
  if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
  return with_each(value, [&](const at::Tensor& tensor) { return taken(on_host(tensor)); });
}

// The same tensors, whose memory may be freed while these are there.
inline IValue without_owner(const IValue& value) {
  return with_each(value, [](const at::Tensor& t) { return seen_on(t, t.device()); });
}

// Kernels of the GPU take more kinds of numbers than those of the CPU: half precision, in which they compute
// as in single precision, and truth values as small integers.
inline at::Tensor in_single_precision(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  if (type == at::kHalf || type == at::kBFloat16) return tensor.to(at::kFloat);
  return type == at::kComplexHalf ? tensor.to(at::kComplexFloat) : tensor;
}

inline at::Tensor as_integers(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool ? tensor.to(at::kByte) : tensor;
}

// What the operator of the CPU, or what stands in for it, returns for arguments on the host. Random
// numbers are drawn as from that place, if there is one. Raises where it does not take them.
Stack compute_on_host(const Operator& op, Stack arguments, const std::optional<Draw>& draw);

}  // namespace simulated
