#include "recurrent.h"

#include "device_memory.h"

#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/rnn_relu.h>
#include <ATen/ops/rnn_tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <exception>
#include <thread>
#include <vector>

namespace simulated {
namespace {

using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

enum Kind { kRelu, kTanh, kLstm, kGru };

// A layer, and where the arguments that describe it begin.
struct Layers {
  Layers(const Stack& given, size_t start)
      : kind(static_cast<Kind>(given[start].toInt())),
        count(given[start + 3].toInt()),
        batch_first(given[start + 4].toBool()),
        trains(given[start + 6].toBool()),
        both_ways(given[start + 7].toBool()),
        has_biases(given[2].toInt() >= 4),
        lengths(at::tensor(given[start + 8].toIntVector(), at::kLong)) {
    TORCH_CHECK(!trains || !given[start + 5].toDouble(), "what is left out is not known");
  }

  // The output, the last hidden state, and the last cells where there are any.
  Tensors run(const at::Tensor& input, const Tensors& state, const Tensors& weights) const {
    if (kind == kLstm) {
      const auto [out, last, cells] =
          lengths.numel()
              ? at::lstm(input, lengths, state, weights, has_biases, count, 0, trains, both_ways)
              : at::lstm(input, state, weights, has_biases, count, 0, trains, both_ways, batch_first);
      return {out, last, cells};
    }
    const auto computed = [&](auto of_packed, auto of_whole) -> Tensors {
      const auto [out, last] =
          lengths.numel()
              ? of_packed(input, lengths, state[0], weights, has_biases, count, 0, trains, both_ways)
              : of_whole(input, state[0], weights, has_biases, count, 0, trains, both_ways, batch_first);
      return {out, last};
    };
    if (kind == kGru) return computed(at::_ops::gru_data::call, at::_ops::gru_input::call);
    if (kind == kTanh) return computed(at::_ops::rnn_tanh_data::call, at::_ops::rnn_tanh_input::call);
    return computed(at::_ops::rnn_relu_data::call, at::_ops::rnn_relu_input::call);
  }

  Kind kind;
  int64_t count;
  bool batch_first, trains, both_ways, has_biases;
  at::Tensor lengths;  // of a packed sequence; empty for a whole one
};

Tensors initial_state(const Stack& given, Kind kind) {
  if (kind == kLstm) return {given[4].toTensor(), given[5].toTensor()};
  return {given[4].toTensor()};
}

// The gradients of the input, the initial state and the weights, in this order.
Tensors gradients(const Stack& given) {
  const c10::AutoGradMode differentiates(true);
  const Layers layers(given, 10);
  Tensors leaves{given[0].toTensor()};
  for (const at::Tensor& tensor : initial_state(given, layers.kind)) leaves.push_back(tensor);
  for (const at::Tensor& tensor : given[1].toTensorVector()) leaves.push_back(tensor);
  for (at::Tensor& leaf : leaves) leaf = leaf.detach().requires_grad_();
  const auto weights = leaves.begin() + (layers.kind == kLstm ? 3 : 2);
  const Tensors all = layers.run(leaves[0], {leaves.begin() + 1, weights}, {weights, leaves.end()});
  Tensors outputs, of_outputs;
  for (size_t at = 0; at < all.size(); ++at) {
    if (!given[7 + at].isTensor() || !given[7 + at].toTensor().defined()) continue;
    outputs.push_back(all[at]);
    of_outputs.push_back(given[7 + at].toTensor());
  }
  return torch::autograd::grad(outputs, leaves, of_outputs);
}

}  // namespace

Stack recurrent(const Stack& given) {
  const Layers layers(given, 6);
  const Tensors results =
      layers.run(given[0].toTensor(), initial_state(given, layers.kind), given[1].toTensorVector());
  return {results.begin(), results.end()};
}

Stack recurrent_backward(const Stack& given) {
  Tensors found;
  std::exception_ptr problem;
  // In a thread of its own: in this one autograd is busy with the program's backward.
  std::thread([&] {
    torchmem_compute(1);
    const at::RecordFunctionGuard nobody_observes(false);
    try {
      found = gradients(given);
    } catch (...) {
      problem = std::current_exception();
    }
  }).join();
  if (problem) std::rethrow_exception(problem);
  const size_t states = static_cast<Kind>(given[10].toInt()) == kLstm ? 2 : 1;
  const Tensors of_weights(found.begin() + 1 + states, found.end());
  return {found[0], found[1], states == 2 ? found[2] : at::Tensor(), of_weights};
}

}  // namespace simulated
