// Products of matrices whose numbers have 8 or 4 bits, and a scale for all, for each row or for a block.

#include "composed.h"

#include <ATen/ATen.h>

#include <limits>
#include <string>
#include <vector>

namespace simulated {
namespace {

using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kBlock = 128;
constexpr int64_t kBlockOfRows = 5;  // the recipe of 128 x 128, see ATen/BlasBackend.h

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool is_of_type(const at::Tensor& tensor, const char* name) {  // not every release of torch knows each
  return std::string(c10::toString(tensor.scalar_type())) == name;
}

int64_t count_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Where numbers have 4 bits, two stand in a byte, the first one in its low bits.
at::Tensor numbers_of(const at::Tensor& given) {
  if (!is_of_type(given, "Float4_e2m1fn_x2")) return given.to(at::kFloat);
  const at::Tensor positive = at::tensor({0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f});
  const at::Tensor bytes = given.view(at::kByte);
  const at::Tensor bits = at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, -1).flatten(-2);
  return at::cat({positive, -positive}).take(bits.to(at::kLong));
}

// A row has a scale for each 32 or 16 columns. They lie as tensor cores read them: those of 128 rows and
// four blocks behind each other, of each 32nd row first.
at::Tensor scale_of_small_blocks(const at::Tensor& scale, int64_t rows, int64_t columns) {
  const int64_t size = is_of_type(scale, "Float8_e8m0fnu") ? 32 : 16;
  const int64_t down = count_of(rows, kBlock), across = count_of(count_of(columns, size), 4);
  const at::Tensor in_order = scale.to(at::kFloat).view({down, across, 32, 4, 4}).permute({0, 3, 2, 1, 4});
  return in_order.reshape({down * kBlock, across * 4}).repeat_interleave(size, 1);
}

// One factor for each number of a matrix, or what becomes that.
at::Tensor factors_of(const at::Tensor& scale, const at::Tensor& numbers) {
  const int64_t rows = numbers.size(0), columns = numbers.size(1);
  if (scale.numel() == 1) return scale.to(at::kFloat).view({1, 1});
  at::Tensor factors = scale;
  if (scale.element_size() == 1) {
    factors = scale_of_small_blocks(scale, rows, columns);
  } else if (scale.numel() == rows) {
    return scale.reshape({rows, 1});
  } else {
    if (scale.size(0) != rows) factors = factors.repeat_interleave(kBlock, 0);
    factors = factors.repeat_interleave(kBlock, 1);
  }
  return factors.slice(0, 0, rows).slice(1, 0, columns);
}

at::Tensor scaled(const at::Tensor& given, const Tensors& scales) {
  at::Tensor numbers = numbers_of(given);
  for (const at::Tensor& scale : scales) numbers = numbers * factors_of(scale, numbers);
  return numbers;
}

// By recipe. The scales of blocks that lie beside each other fill a column, up to a multiple of four.
at::Tensor scaled(const at::Tensor& given, const c10::IValue& scales, const c10::IValue& recipes) {
  Tensors in_rows = scales.toTensorVector();
  const std::vector<int64_t> kinds = recipes.toIntVector();
  for (size_t place = 0; place < kinds.size(); ++place) {
    if (kinds[place] != kBlockOfRows) continue;
    const int64_t down = count_of(given.size(0), kBlock), across = count_of(given.size(1), kBlock);
    TORCH_CHECK(in_rows[place].sizes() == at::IntArrayRef({count_of(across, 4) * 4, down}),
                "how these scales lie is not known");
    in_rows[place] = in_rows[place].t();
  }
  return scaled(given, in_rows);
}

// What is too large for a type of eight bits becomes its largest number.
at::Tensor rounded_to(const at::Tensor& values, const c10::IValue& type, at::ScalarType otherwise) {
  const at::ScalarType kind = type.isNone() ? otherwise : type.toScalarType();
  double most = std::numeric_limits<double>::infinity();
  if (kind == at::kFloat8_e4m3fn) most = std::numeric_limits<c10::Float8_e4m3fn>::max();
  if (kind == at::kFloat8_e5m2) most = std::numeric_limits<c10::Float8_e5m2>::max();
  return values.clamp(-most, most).to(kind);
}

// The rows of the second matrix are the columns that the operator is given.
at::Tensor product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias) {
  const at::Tensor made = left.matmul(right.transpose(-2, -1));
  return bias.defined() ? made + bias.to(at::kFloat) : made;
}

// --- groups: matrices beside each other, or behind each other along one of their axes -----------------

struct Side {
  at::Tensor rows, scale;
  int64_t axis, groups;

  at::Tensor of(int64_t group, int64_t start, int64_t end) const {
    const bool apart = rows.dim() == 3;
    const at::Tensor own = apart ? rows[group] : rows.slice(axis, start, end);
    if (apart) return scaled(own, {scale[group]});
    return scaled(own, {axis ? scale.view({groups, -1})[group] : scale.slice(0, start, end)});
  }
};

}  // namespace

Stack scaled_mm(const Stack& given) {
  const at::Tensor left = given[0].toTensor(), of_result = tensor_or_none(given[5]);
  at::Tensor scale = given[3].toTensor();
  if (scale.dim() == 2 && scale.element_size() > 1) scale = scale.t();
  at::Tensor made = product(scaled(left, {given[2].toTensor()}), scaled(given[1].toTensor().t(), {scale}),
                            tensor_or_none(given[4]));
  if (of_result.defined()) made = made * of_result;
  return {rounded_to(made, given[6], left.scalar_type())};
}

Stack scaled_mm_by_recipe(const Stack& given) {
  const at::Tensor left = given[0].toTensor();
  const at::Tensor made = product(scaled(left, given[2], given[3]),
                                  scaled(given[1].toTensor().t(), given[5], given[6]),
                                  tensor_or_none(given[8]));
  return {rounded_to(made, given[9], left.scalar_type())};
}

// An offset says where a group ends: among the rows of one matrix, or the columns of both.
Stack scaled_grouped_mm(const Stack& given) {
  const at::Tensor left = given[0].toTensor(), right = given[1].toTensor().transpose(-2, -1);
  const at::Tensor scale = given[2].toTensor(), other_scale = given[3].toTensor(), ends = tensor_or_none(given[4]);
  TORCH_CHECK(scale.scalar_type() == at::kFloat, "how these scales lie is not known");
  const int64_t groups = ends.defined() ? ends.numel() : left.size(0), axis = left.dim() == right.dim();
  const Side first{left, scale, axis, groups}, second{right, other_scale, axis, groups};
  Tensors parts;
  int64_t start = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = ends.defined() ? ends[group].item().toLong() : 0;
    parts.push_back(product(first.of(group, start, end), second.of(group, start, end), at::Tensor()));
    start = end;
  }
  const at::Tensor made = axis ? at::stack(parts) : at::cat(parts, right.dim() == 2);
  return {rounded_to(made, given[7], at::kBFloat16)};
}

Stack scaled_grouped_mm_by_recipe(const Stack& given) {
  const c10::IValue scale = given[2].toTensorVector().at(0), other = given[5].toTensorVector().at(0);
  return scaled_grouped_mm({given[0], given[1], scale, other, given[8], given[9], c10::IValue(), given[10]});
}

}  // namespace simulated
