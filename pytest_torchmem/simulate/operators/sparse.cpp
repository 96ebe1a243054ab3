#include "sparse.h"

#include "deferred.h"
#include "device_memory.h"
#include "rules.h"
#include "tensors.h"
#include "unobserved.h"

#include <ATen/ops/_coalesce_ops.h>
#include <ATen/ops/_empty_affine_quantized.h>
#include <ATen/ops/_empty_per_channel_affine_quantized.h>
#include <ATen/ops/_nested_tensor_from_tensor_list_ops.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe_ops.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe_ops.h>
#include <ATen/ops/col_indices_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/crow_indices_ops.h>
#include <ATen/ops/equal_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unbind_ops.h>

#include <algorithm>
#include <unordered_map>

namespace simulated {
namespace {

using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;
using Handle = c10::OperatorHandle;

struct PartsOperator {
  c10::KernelFunction kernel;
  bool on_cpu;
};

using Operators = std::unordered_map<const c10::FunctionSchema*, PartsOperator>;

template <DispatchKey key>
Operators& operators_of() {
  static Operators& operators = *new Operators();
  return operators;
}

// What only makes, describes or moves tensors whose parts are tensors of other operators.
const std::vector<std::string> kOnlyMade = {
    "aten::_sparse_coo_tensor", "aten::_sparse_compressed_tensor", "aten::sparse_resize",
    "aten::_coalesce", "aten::clone", "aten::copy_", "aten::zero_", "aten::resize", "aten::q_per_channel",
};

// Operators of strided tensors that make a nested or a quantized one.
const std::vector<std::string> kMakeOthers = {
    "aten::_nested_from_padded", "aten::_nested_tensor_from_mask", "aten::quantize_per_tensor",
    "aten::quantize_per_tensor_dynamic", "aten::quantize_per_channel",
};

bool is_only_made(const std::string& name) {
  for (const std::string& start : kOnlyMade) {
    if (!name.compare(0, start.size(), start)) return true;
  }
  return leaves_values_alone(name);
}

bool is_by_columns(const at::Tensor& tensor) {
  return tensor.layout() == at::kSparseCsc || tensor.layout() == at::kSparseBsc;
}

bool is_compressed(const at::Tensor& tensor) {
  return tensor.layout() == at::kSparseCsr || tensor.layout() == at::kSparseBsr || is_by_columns(tensor);
}

at::Tensor integers_of(const at::Tensor& quantized) {
  return at::for_blob(const_cast<void*>(quantized.const_data_ptr()), quantized.sizes())
      .strides(quantized.strides())
      .options(at::device(quantized.device()).dtype(c10::toUnderlying(quantized.scalar_type())))
      .target_device(quantized.device())
      .make_tensor();
}

// The strided tensors that a tensor is made of: the values of a sparse one first, the components of a
// nested one in order, the integers of a quantized one.
std::vector<at::Tensor> parts_of_any(const at::Tensor& tensor) {
  if (tensor.is_quantized()) return {integers_of(tensor)};
  if (tensor.is_nested()) return at::_ops::unbind_int::call(tensor, 0);
  if (tensor.layout() == at::kSparse) return {tensor._values(), tensor._indices()};
  if (!is_compressed(tensor)) return {tensor};
  if (is_by_columns(tensor)) {
    return {tensor.values(), at::_ops::ccol_indices::call(tensor), at::_ops::row_indices::call(tensor)};
  }
  return {tensor.values(), at::_ops::crow_indices::call(tensor), at::_ops::col_indices::call(tensor)};
}

// The same of a tensor of the GPU; none of any other.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return {};
  const bool has_parts = is_on_gpu(tensor) || tensor.is_quantized() || tensor.layout() == at::kSparse ||
                         is_compressed(tensor) || (tensor.is_nested() && tensor.layout() == at::kStrided);
  return has_parts ? parts_of_any(tensor) : std::vector<at::Tensor>();
}

at::Tensor copied_quantized(const at::Tensor& tensor, const at::Tensor& integers) {
  const auto options = at::dtype(tensor.scalar_type());
  at::Tensor made;
  if (tensor.qscheme() == at::kPerTensorAffine) {
    made = at::_empty_affine_quantized(tensor.sizes(), options, tensor.q_scale(), tensor.q_zero_point());
  } else {
    const at::Tensor scales = on_host(tensor.q_per_channel_scales()).clone();
    const at::Tensor zeros = on_host(tensor.q_per_channel_zero_points()).clone();
    made = at::_empty_per_channel_affine_quantized(tensor.sizes(), scales, zeros,
                                                   tensor.q_per_channel_axis(), options);
  }
  integers_of(made).copy_(integers);
  return made;
}

// The same tensor on the host, with memory of its own: what the GPU's kernel changes stays as it was.
at::Tensor copied(const at::Tensor& tensor) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : parts_of(tensor)) parts.push_back(on_host(part).clone());
  if (parts.empty()) return tensor;
  const at::Device host(at::kCPU);
  if (tensor.is_nested()) {
    return at::_ops::_nested_tensor_from_tensor_list::call(parts, std::nullopt, std::nullopt, host,
                                                           std::nullopt);
  }
  if (tensor.is_quantized()) return copied_quantized(tensor, parts[0]);
  if (parts.size() == 1) return parts[0];
  if (parts.size() == 2) {
    return at::_ops::_sparse_coo_tensor_unsafe::call(parts[1], parts[0], tensor.sym_sizes(), std::nullopt,
                                                     std::nullopt, host, std::nullopt,
                                                     tensor.is_coalesced());
  }
  return at::_ops::_sparse_compressed_tensor_unsafe::call(parts[1], parts[2], parts[0],
                                                          tensor.sym_sizes(), std::nullopt,
                                                          tensor.layout(), host, std::nullopt);
}

IValue copied(const IValue& value) {
  if (value.isTensor()) return copied(value.toTensor());
  if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(copied(tensor));
  return list;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// What is known of the tensors that a call was given.
struct Known {
  bool exact = true, missing = false;
};

void deliver(const at::Tensor& from, const at::Tensor& to, Known known) {
  if (!from.defined() || from.sizes() != to.sizes()) return forget_values(to);
  at::Tensor there = on_host(to);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(DispatchKey::CPU), there, from, false);
  if (!known.exact) make_finite(there);
  note_values(to, known.exact, known.missing);
}

// One call: computed on the host before the GPU's kernel runs, which may change what it is given.
class PartsCall {
 public:
  PartsCall(const Handle& handle, bool on_cpu, DispatchKey host_key, const Stack& arguments) {
    bool small = on_cpu;
    const std::string& name = handle.operator_name().name;
    is_sum_ = name.rfind("aten::add", 0) == 0 || name.rfind("aten::sub", 0) == 0;
    const Rule rule = rule_of(name);
    for (size_t at = 0; at < arguments.size(); ++at) {
      const bool counts = !handle.schema().arguments()[at].is_out() &&
                          !leaves_out(handle.schema(), arguments, at);
      for (const at::Tensor& tensor : tensors_of(arguments[at])) {
        const std::vector<at::Tensor> parts = parts_of(tensor);
        for (size_t number = 0; number < parts.size(); ++number) {
          const at::Tensor& part = parts[number];
          small = small && bytes_of(part) <= rule.most_bytes(part.scalar_type());
          if (small && counts) compute_deferred(part);
          Known& known = number && tensor.layout() != at::kStrided ? places_ : values_;
          known.exact = known.exact && small && (!counts || is_exact(part));
          known.missing = known.missing || (counts && is_missing(part));
          given_.push_back(part.const_data_ptr());
        }
      }
    }
    if (small) compute(handle, host_key, arguments);
  }

  bool is_computed() const { return !results_.empty(); }

  // How many elements the result has; -1 if it is not computed, or not sparse.
  long element_count() const {
    if (results_.empty() || !results_[0].isTensor()) return -1;
    const at::Tensor& result = results_[0].toTensor();
    return result.layout() == at::kStrided ? -1 : result._nnz();
  }

  void finish(const Stack& returned) const {
    // How many elements there are rests on where those are that it was given, and not on their values.
    if (places_.missing && element_count() >= 0) torchmem_note_decision(kShape);
    const Unobserved unobserved;
    for (size_t at = 0; at < returned.size(); ++at) {
      const auto targets = tensors_of(returned[at]);
      const auto computed = at < results_.size() ? tensors_of(results_[at]) : std::vector<at::Tensor>();
      for (size_t number = 0; number < targets.size(); ++number) {
        settle(number < computed.size() ? computed[number] : at::Tensor(), targets[number]);
      }
    }
  }

 private:
  void compute(const Handle& handle, DispatchKey host_key, const Stack& arguments) {
    const Unobserved unobserved;
    try {
      Stack results;
      for (const IValue& argument : arguments) results.push_back(copied(argument));
      handle.redispatchBoxed(c10::DispatchKeySet(host_key), &results);
      results_ = std::move(results);
    } catch (const std::exception&) {  // it does not take these on the CPU
    }
  }

  // Without a result the places of the elements are those that the kernel has left there.
  void settle(const at::Tensor& result, const at::Tensor& target) const {
    const auto parts = parts_of(target);
    if (parts.empty()) return;
    const bool same_kind = result.defined() && result.layout() == target.layout() &&
                           result.is_nested() == target.is_nested();
    if (target.is_nested()) {
      const auto computed = same_kind ? parts_of_any(result) : std::vector<at::Tensor>();
      for (size_t at = 0; at < parts.size(); ++at) {
        deliver(at < computed.size() ? computed[at] : at::Tensor(), parts[at], known_of(0));
      }
      return;
    }
    if (!same_kind) return forget_values(parts[0]);
    const auto computed = parts_of_any(result);
    // The GPU's kernel kept the places that it was given; on the CPU they may be in another order.
    const bool ordered = parts.size() == 1 || !was_given(parts[1]) ||
                         at::_ops::equal::call(computed[1], on_host(parts[1]));
    if (!ordered) return forget_values(parts[0]);
    // Of a sum the GPU keeps the elements of both: operators of strided tensors have put them together.
    if (is_sum_ && parts.size() == 2 && computed[0].sizes() != parts[0].sizes()) return;
    for (size_t at = 0; at < parts.size(); ++at) deliver(computed[at], parts[at], known_of(at));
  }

  // Values rest on the places, too, and places on places alone.
  Known known_of(size_t part) const {
    if (part) return places_;
    return {values_.exact && places_.exact, values_.missing || places_.missing};
  }

  bool was_given(const at::Tensor& part) const {
    return std::find(given_.begin(), given_.end(), part.const_data_ptr()) != given_.end();
  }

  Stack results_;
  std::vector<const void*> given_;
  Known values_, places_;
  bool is_sum_ = false;
};

template <DispatchKey key, DispatchKey host_key>
void run_in_parts(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const PartsOperator& op = operators_of<key>().find(&handle.schema())->second;
  const size_t count = handle.schema().arguments().size(), below = stack->size() - count;
  const PartsCall call(handle, op.on_cpu, host_key, Stack(stack->end() - count, stack->end()));
  // What the host reads on the way is read of the kernel, whose result is not used.
  const Overlooked reads(call.is_computed());
  torchmem_note_sparse_elements(call.element_count());
  op.kernel.callBoxed(handle, keys, stack);
  torchmem_note_sparse_elements(-1);
  call.finish(Stack(stack->begin() + below, stack->end()));
}

// --- how many elements are left when a tensor is coalesced is read by the host ----------------------

at::Tensor coalesced_on_host(const at::Tensor& sparse) {
  const Unobserved unobserved;
  return at::_ops::_coalesce::call(copied(sparse));
}

// A number of elements that is not known is the largest that it may be. Places decide how long the result
// is: they are sorted at any size.
void run_coalesce(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const PartsOperator& op = operators_of<DispatchKey::SparseCUDA>().find(&handle.schema())->second;
  const at::Tensor sparse = stack->back().toTensor();
  const at::Tensor places = sparse._indices();
  compute_deferred(places);
  const bool known = 4 * (bytes_of(places) + bytes_of(sparse._values())) <= room_on_host() && is_exact(places);
  if (!known && is_missing(places)) torchmem_note_decision(kShape);
  const at::Tensor computed = known ? coalesced_on_host(sparse) : at::Tensor();
  torchmem_answer_reads((known ? computed : sparse)._nnz(), known);
  op.kernel.callBoxed(handle, keys, stack);
  torchmem_end_answers();
  const at::Tensor made = stack->back().toTensor();
  if (made.unsafeGetTensorImpl() == sparse.unsafeGetTensorImpl()) return;
  const Unobserved unobserved;
  const bool exact = known && is_exact(sparse._values());
  deliver(known ? computed._indices() : computed, made._indices(), {});
  deliver(known ? computed._values() : computed, made._values(), {exact, is_missing(sparse._values())});
}

// A nested tensor's random numbers are drawn by operators of its strided parts.
bool is_computed_here(const Handle& handle, DispatchKey key) {
  const std::string& name = handle.operator_name().name;
  if (key == DispatchKey::CUDA) {
    return std::find(kMakeOthers.begin(), kMakeOthers.end(), name) != kMakeOthers.end();
  }
  if (key == DispatchKey::NestedTensorCUDA && handle.hasTag(at::Tag::nondeterministic_seeded)) return false;
  return !is_only_made(name) && writes_values(handle.schema());
}

template <DispatchKey key, DispatchKey host_key>
void put_there(std::vector<c10::RegistrationHandleRAII>& kept) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findSchema(name);
    if (!handle || name.name.rfind("aten::", 0) || !handle->hasKernelForDispatchKey(key)) continue;
    const bool counts = name.name == "aten::_coalesce" && key == DispatchKey::SparseCUDA;
    if (!counts && !is_computed_here(*handle, key)) continue;
    operators_of<key>().emplace(
        &handle->schema(),
        PartsOperator{kernel_of(*handle, key), handle->hasKernelForDispatchKey(host_key)});
    auto run = counts ? c10::KernelFunction::makeFromBoxedFunction<&run_coalesce>()
                      : c10::KernelFunction::makeFromBoxedFunction<&run_in_parts<key, host_key>>();
    kept.push_back(
        dispatcher.registerImpl(name, key, std::move(run), std::nullopt, nullptr, "torchmem"));
  }
}

}  // namespace

void compute_small_values_in_parts(std::vector<c10::RegistrationHandleRAII>& kept) {
  put_there<DispatchKey::SparseCUDA, DispatchKey::SparseCPU>(kept);
  put_there<DispatchKey::SparseCsrCUDA, DispatchKey::SparseCsrCPU>(kept);
  put_there<DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorCPU>(kept);
  put_there<DispatchKey::QuantizedCUDA, DispatchKey::QuantizedCPU>(kept);
  put_there<DispatchKey::CUDA, DispatchKey::CPU>(kept);
}

}  // namespace simulated
