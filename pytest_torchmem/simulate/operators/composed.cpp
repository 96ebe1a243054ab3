#include "composed.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <utility>
#include <vector>

namespace simulated {

using Stack = torch::jit::Stack;

namespace {

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// --- attention: the gradients, from the start, as each kernel keeps other things from forward ---------

Stack attention_backward(const Stack& given, const at::Tensor& mask, const c10::IValue& dropout,
                         const c10::IValue& causal) {
  TORCH_CHECK(!dropout.toDouble(), "what is left out is not known");
  const at::Tensor query = given[1].toTensor(), key = given[2].toTensor(), value = given[3].toTensor();
  const auto used = mask.defined() && mask.numel() ? std::make_optional(mask) : std::nullopt;
  const auto scale = given.back().isNone() ? std::nullopt : std::make_optional(given.back().toDouble());
  const auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0,
                                                                          causal.toBool(), used, scale);
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      given[0].toTensor(), query, key, value, out, sums, 0.0, causal.toBool(), used, scale);
  return {of_query, of_key, of_value, at::Tensor()};
}

// --- cells: their gates stand beside each other, each as wide as the state ----------------------------

at::Tensor gates_of(const Stack& given, size_t of_gates, size_t of_bias) {
  const at::Tensor gates = given[of_gates].toTensor(), bias = tensor_or_none(given[of_bias]);
  return bias.defined() ? gates + bias : gates;
}

at::Tensor or_zero(const c10::IValue& gradient, const at::Tensor& like) {
  const at::Tensor found = tensor_or_none(gradient);
  return found.defined() ? found : at::zeros_like(like);
}

// --- parts of batch normalization, between which ranks exchange what they have --------------------------

at::Tensor along_channels(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

// Sums over all but the channels.
at::Tensor channel_sums(const at::Tensor& values) {
  return values.transpose(0, 1).reshape({values.size(1), -1}).sum(1);
}

void move_to(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(value, momentum);
}

at::Tensor of_bias(const at::Tensor& of_gates, bool has_bias) {
  return has_bias ? of_gates.sum(0) : at::Tensor();
}

// --- weights of four bits, eight to a word, as tensor cores read them ----------------------------------

// A word has two neighbours in each of four places, eight columns apart; the first neighbours come first.
at::Tensor places_in_word() { return at::arange(0, 32, 4, at::kInt).view({2, 4}); }

}  // namespace

Stack flash_attention_backward(const Stack& given) {
  return attention_backward(given, at::Tensor(), given[10], given[11]);
}
Stack efficient_attention_backward(const Stack& given) {
  return attention_backward(given, tensor_or_none(given[4]), given[9], given[11]);
}
Stack cudnn_attention_backward(const Stack& given) {
  return attention_backward(given, tensor_or_none(given[8]), given[13], given[14]);
}

Stack lstm_cell(const Stack& given) {
  const auto gates = (gates_of(given, 0, 3) + gates_of(given, 1, 4)).chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid(), kept = gates[1].sigmoid(), next = gates[2].tanh(),
                   out = gates[3].sigmoid();
  const at::Tensor cells = kept * given[2].toTensor() + in * next;
  return {out * cells.tanh(), cells, at::cat({in, kept, next, out}, 1)};
}

Stack lstm_cell_backward(const Stack& given) {
  const at::Tensor before = given[2].toTensor(), after = given[3].toTensor().tanh();
  const auto gates = given[4].toTensor().chunk(4, 1);
  const at::Tensor &in = gates[0], &kept = gates[1], &next = gates[2], &out = gates[3];
  const at::Tensor of_state = or_zero(given[0], before);
  const at::Tensor of_cells = or_zero(given[1], before) + of_state * out * (1 - after * after);
  const at::Tensor of_gates = at::cat(
      {of_cells * next * in * (1 - in), of_cells * before * kept * (1 - kept),
       of_cells * in * (1 - next * next), of_state * after * out * (1 - out)},
      1);
  return {of_gates, of_cells * kept, of_bias(of_gates, given[5].toBool())};
}

Stack gru_cell(const Stack& given) {
  const auto of_input = gates_of(given, 0, 3).chunk(3, 1), of_state = gates_of(given, 1, 4).chunk(3, 1);
  const at::Tensor state = given[2].toTensor();
  const at::Tensor reset = (of_input[0] + of_state[0]).sigmoid();
  const at::Tensor kept = (of_input[1] + of_state[1]).sigmoid();
  const at::Tensor next = (of_input[2] + reset * of_state[2]).tanh();
  return {next + kept * (state - next), at::cat({reset, kept, next, state, of_state[2]}, 1)};
}

Stack gru_cell_backward(const Stack& given) {
  const at::Tensor of_new = given[0].toTensor();
  const auto saved = given[1].toTensor().chunk(5, 1);
  const at::Tensor &reset = saved[0], &kept = saved[1], &next = saved[2], &state = saved[3];
  const at::Tensor of_kept = of_new * (state - next) * (1 - kept) * kept;
  const at::Tensor of_next = of_new * (1 - kept) * (1 - next * next);
  const at::Tensor of_reset = of_next * saved[4] * (1 - reset) * reset;
  const at::Tensor of_input_gates = at::cat({of_reset, of_kept, of_next}, 1);
  const at::Tensor of_state_gates = at::cat({of_reset, of_kept, of_next * reset}, 1);
  const bool has_bias = given[2].toBool();
  return {of_input_gates, of_state_gates, of_new * kept, of_bias(of_input_gates, has_bias),
          of_bias(of_state_gates, has_bias)};
}

// The GPU's keeps the bag of each index for backward; the CPU's does so where it needs them itself.
Stack embedding_bag(const Stack& given) {
  const at::Tensor indices = given[1].toTensor(), offsets = given[2].toTensor();
  auto [out, bags, sizes, largest] = at::_embedding_bag(
      given[0].toTensor(), indices, offsets, given[3].toBool(), given[4].toInt(), given[5].toBool(),
      tensor_or_none(given[6]), given[7].toBool(), given[8].toInt());
  const int64_t count = offsets.numel() - (given[7].toBool() ? 1 : 0);
  const at::Tensor places = at::arange(indices.numel(), offsets.options());
  bags = at::searchsorted(offsets.slice(0, 0, count), places, false, true) - 1;
  return {out, bags.to(indices.scalar_type()), sizes, largest};
}

Stack batch_norm_stats(const Stack& given) {
  const at::Tensor values = given[0].toTensor().to(at::kDouble);
  const double count = static_cast<double>(values.numel() / values.size(1));
  const at::Tensor mean = channel_sums(values) / count;
  const at::Tensor variance = channel_sums((values - along_channels(mean, values)).square()) / count;
  return {mean, (variance + given[1].toDouble()).rsqrt()};
}

// One row for each rank.
Stack batch_norm_gather_stats(const Stack& given) {
  const at::Tensor means = given[1].toTensor().to(at::kDouble);
  const double momentum = given[5].toDouble(), epsilon = given[6].toDouble();
  const at::Tensor counts = given[7].isTensor() ? given[7].toTensor().to(at::kDouble).view({-1, 1})
                                                : at::full({means.size(0), 1}, given[7].toInt(), at::kDouble);
  const at::Tensor count = counts.sum(), mean = (means * counts).sum(0) / count;
  const at::Tensor variances = given[2].toTensor().to(at::kDouble).pow(-2) - epsilon;
  const at::Tensor squares = ((variances + (means - mean).square()) * counts).sum(0);
  move_to(tensor_or_none(given[3]), mean, momentum);
  move_to(tensor_or_none(given[4]), squares / (count - 1), momentum);
  return {mean, (squares / count + epsilon).rsqrt()};
}

Stack batch_norm_elemt(const Stack& given) {
  const at::Tensor values = given[0].toTensor(), weight = tensor_or_none(given[1]),
                   bias = tensor_or_none(given[2]);
  at::Tensor out = values - along_channels(given[3].toTensor(), values);
  out = out * along_channels(given[4].toTensor(), values);
  if (weight.defined()) out = out * along_channels(weight, values);
  return {bias.defined() ? out + along_channels(bias, values) : out};
}

Stack batch_norm_backward_reduce(const Stack& given) {
  const at::Tensor of_out = given[0].toTensor().to(at::kDouble), values = given[1].toTensor();
  const at::Tensor distance = values - along_channels(given[2].toTensor(), values);
  const at::Tensor sums = channel_sums(of_out), with_values = channel_sums(of_out * distance);
  const at::Tensor none;
  const bool of_input = given[5].toBool();
  return {of_input ? sums : none, of_input ? with_values : none,
          given[6].toBool() ? with_values * given[3].toTensor() : none, given[7].toBool() ? sums : none};
}

Stack batch_norm_backward_elemt(const Stack& given) {
  const at::Tensor values = given[1].toTensor(), scale = given[3].toTensor(),
                   weight = tensor_or_none(given[4]), count = given[7].toTensor().sum();
  const at::Tensor slope = given[6].toTensor() / count * scale * scale;
  at::Tensor of_input = given[0].toTensor() - along_channels(given[5].toTensor() / count, values);
  of_input = of_input - (values - along_channels(given[2].toTensor(), values)) * along_channels(slope, values);
  const at::Tensor factor = weight.defined() ? scale * weight : scale;
  return {of_input * along_channels(factor, values)};
}

// Eight rows and four words are a warp's 32 lanes. A byte has two columns, the first one in its high bits.
Stack pack_weight_of_int4(const Stack& given) {
  const at::Tensor bytes = given[0].toTensor().to(at::kInt);
  const int64_t words = given[1].toInt() / 2, columns = 2 * bytes.size(1);
  const at::Tensor values = at::stack({bytes.bitwise_right_shift(4), bytes.bitwise_and(15)}, -1)
                                .view({-1, 8, columns / (32 * words), words, 4, 4, 2})
                                .permute({0, 2, 1, 5, 3, 6, 4});
  const at::Tensor packed = values.bitwise_left_shift(places_in_word()).sum({5, 6}, false, at::kInt);
  return {packed.flatten(2, 3)};
}

// Each row has a scale, and a value for what is 8, for so many columns.
Stack mm_with_packed_int4(const Stack& given) {
  const at::Tensor left = given[0].toTensor(), packed = given[1].toTensor();
  const int64_t tiles = packed.size(0), outer = packed.size(1), words = packed.size(3);
  const at::Tensor values = packed.view({tiles, outer, 8, 4, words, 1, 1})
                                .bitwise_right_shift(places_in_word())
                                .bitwise_and(15)
                                .permute({0, 2, 1, 4, 6, 3, 5})
                                .reshape({8 * tiles, -1, given[2].toInt()});
  const at::Tensor scales = given[3].toTensor().to(at::kFloat).transpose(0, 1).unsqueeze(2);
  const at::Tensor weight = (values - 8) * scales.select(-1, 0) + scales.select(-1, 1);
  return {left.to(at::kFloat).matmul(weight.flatten(1).t()).to(left.scalar_type())};
}

// The GPU casts within: half precision in, single precision out. The kernel of the CPU refuses that.
at::Tensor cast_before(const Stack& given) {
  return given[2].toBool() ? given[0].toTensor().to(at::kFloat) : given[0].toTensor();
}
Stack product_in(const Stack& given) {
  const at::ScalarType type = given[2].toScalarType();
  return {given[0].toTensor().to(type).matmul(given[1].toTensor().to(type))};
}
Stack product_added_in(const Stack& given) {
  const at::ScalarType type = given[3].toScalarType();
  const at::Tensor product = given[1].toTensor().to(type).matmul(given[2].toTensor().to(type));
  return {given[0].toTensor().to(type) * given[4].toScalar() + product * given[5].toScalar()};
}

Stack softmax(const Stack& given) { return {at::_softmax(cast_before(given), given[1].toInt(), false)}; }
Stack log_softmax(const Stack& given) {
  return {at::_log_softmax(cast_before(given), given[1].toInt(), false)};
}

// The gradient, what forward returned, the axis, and what forward was given.
Stack softmax_backward(const Stack& given) {
  const at::Tensor gradient = given[0].toTensor();
  const at::Tensor of_input = at::_softmax_backward_data(gradient, given[1].toTensor(), given[2].toInt(),
                                                         gradient.scalar_type());
  return {of_input.to(given[3].toScalarType())};
}
Stack log_softmax_backward(const Stack& given) {
  const at::Tensor gradient = given[0].toTensor();
  const at::Tensor of_input = at::_log_softmax_backward_data(gradient, given[1].toTensor(), given[2].toInt(),
                                                             gradient.scalar_type());
  return {of_input.to(given[3].toScalarType())};
}

// Forward keeps something for backward on the CPU alone.
Stack log_sigmoid_backward(const Stack& given) {
  return {given[0].toTensor() * (-given[1].toTensor()).sigmoid()};
}

// The last axes are normalized, as many as are named.
Stack rms_norm_backward(const Stack& given) {
  const at::Tensor values = given[1].toTensor(), weight = tensor_or_none(given[4]);
  const auto kind = at::toOpMathType(values.scalar_type());
  const size_t axis_count = given[2].toIntVector().size();
  std::vector<int64_t> kept_sizes = values.sizes().vec(), axes;
  int64_t count = 1;
  for (size_t at = values.dim() - axis_count; at < kept_sizes.size(); ++at) {
    axes.push_back(at);
    count *= std::exchange(kept_sizes[at], 1);
  }
  const at::Tensor scale = given[3].toTensor().to(kind).view(kept_sizes);
  const at::Tensor of_out = given[0].toTensor().to(kind), normalized = values.to(kind) * scale;
  const at::Tensor weighted = weight.defined() ? of_out * weight.to(kind) : of_out;
  const at::Tensor shared = (weighted * normalized).sum(axes, true) / count;
  const at::Tensor of_values = (weighted - normalized * shared) * scale;
  if (!weight.defined()) return {of_values, at::Tensor()};
  return {of_values, (of_out * normalized).sum_to_size(weight.sizes())};
}

// cuDNN computes the gradient with the loss. Lengths are lists or tensors.
Stack cudnn_ctc_loss(const Stack& given) {
  const at::Tensor values = given[0].toTensor(), targets = given[1].toTensor().to(at::kCPU, at::kLong);
  const auto lengths = [&](size_t at) {
    return given[at].isTensor() ? given[at].toTensor().to(at::kCPU, at::kLong)
                                : at::tensor(given[at].toIntVector(), at::kLong);
  };
  const at::Tensor of_inputs = lengths(2), of_targets = lengths(3);
  const int64_t blank = given[4].toInt();
  const bool zero_infinity = given[6].toBool();
  const auto [loss, sums] = at::_ctc_loss(values, targets, of_inputs, of_targets, blank, zero_infinity);
  return {loss, at::_ctc_loss_backward(at::ones_like(loss), values, targets, of_inputs, of_targets, loss,
                                       sums, blank, zero_infinity)};
}

Stack convolution_relu(const Stack& given) {
  const std::vector<int64_t> none(given[3].toIntVector().size(), 0);
  return {at::convolution(given[0].toTensor(), given[1].toTensor(), tensor_or_none(given[2]),
                          given[3].toIntVector(), given[4].toIntVector(), given[5].toIntVector(), false,
                          none, given[6].toInt())
              .relu()};
}

}  // namespace simulated
