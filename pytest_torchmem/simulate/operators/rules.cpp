#include "rules.h"

#include "composed.h"
#include "recurrent.h"
#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/ops/nan_to_num_ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace simulated {
namespace {

using Names = std::vector<std::string>;

// A name in these lists ends in * where any ending will do.
const Names kLeftAlone = {
    "empty*", "new_empty*", "resize*", "set_*", "_resize_output*", "as_strided*", "view",
    "_reshape_alias*", "alias", "detach*", "unfold", "_local_scalar_dense", "record_stream",
    "is_pinned", "_pin_memory", "_lazy_clone", "_cudnn_init_dropout_state",
    "_efficientzerotensor*", "_cudnn_rnn_flatten_weight",
};

const Names kHeavy = {
    "mm*", "bmm*", "addmm*", "_addmm*", "addbmm*", "baddbmm*", "addmv*", "mv", "_grouped_mm*",
    "_scaled_mm*", "_scaled_grouped_mm*", "_int_mm*", "_weight_int*", "convolution*", "_convolution*", "cudnn_convolution*", "slow_conv*", "_slow_conv*",
    "_conv*", "conv_*", "linalg_*", "_linalg_*", "cholesky*", "lu_*",
    "_scaled_dot_product*", "_flash_attention*", "_efficient_attention*", "triangular_solve*", "ormqr*", "geqrf*", "_cdist*", "_trilinear", "_fft_*", "grid_sampler*",
};

// They are named like heavy ones.
const Names kLight = {"linalg_vector_norm", "linalg_cross", "linalg_diagonal", "_convert_indices*"};

const std::pair<Indexed, Names> kIndexed[] = {
    {Indexed::kAxis,
     {"index_select", "gather", "scatter*", "index_add*", "index_copy*", "index_fill*", "index_reduce*"}},
    {Indexed::kEachAxis, {"index", "_index_put_impl_"}},
    {Indexed::kClass, {"nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"}},
    {Indexed::kRow, {"_embedding_bag", "_embedding_bag_forward_only"}},
    {Indexed::kElement, {"take", "put_"}},
};

const Names kHostReads = {
    "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "equal", "mode",
};

const Names kCompares = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isposinf", "isneginf", "logical_not",
                         "equal"};

const Names kTellShape = {"nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive",
                          "unique_dim_consecutive"};

const Names kPick = {"index", "index_select", "gather", "embedding", "take", "masked_select",
                     "_embedding_bag", "_embedding_bag_forward_only"};

const Names kChoose = {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median",
                       "nanmedian", "multinomial", "mode"};

// These, too, cost no more than the bytes of what they compare.
const Names kLook = {"isfinite", "isinf", "isin", "searchsorted", "bucketize", "any", "all",
                     "count_nonzero", "nonzero", "_unique*", "unique_*"};

const Names kLookForNan = {"isnan", "isinf", "isfinite", "isposinf", "isneginf"};

const Names kRuntimeWrites = {"copy_", "fill_", "zero_"};
const Names kOverwrites = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_",
                           "_cummax_helper", "_cummin_helper", "uniform_", "normal_", "log_normal_",
                           "exponential_", "random_", "bernoulli_", "cauchy_", "geometric_"};

bool is_one_of(const std::string& full_name, const Names& names) {
  const std::string name = full_name.substr(full_name.find("::") + 2);
  for (const std::string& other : names) {
    const size_t length = other.size() - 1;
    if (other[length] == '*' ? !name.compare(0, length, other, 0, length) : name == other) return true;
  }
  return false;
}

// --- operators of the GPU alone, and the CPU's for the same ------------------------------------------

Arguments of_convolution(const Arguments& given, size_t stride, bool transposed) {
  const std::vector<int64_t> none(given[stride].toIntVector().size(), 0);
  return {given[0], given[1], at::Tensor(), given[stride], given[2], given[stride + 1], transposed,
          transposed ? given[3] : none, given[stride + 2]};
}
Arguments of_convolution(const Arguments& given) { return of_convolution(given, 3, false); }
Arguments of_transposed(const Arguments& given) { return of_convolution(given, 4, true); }

Arguments as_given(const Arguments& given) { return given; }

// Query, key, value, dropout and causality, the mask, and the scale, which comes last.
Arguments of_flash(const Arguments& given) {
  return {given[0], given[1], given[2], given[3], given[4], c10::IValue(), given.back()};
}
Arguments of_masked(const Arguments& given) {
  return {given[0], given[1], given[2], given[5], given[6], given[3], given.back()};
}

// Input, weight, the kernel's size, bias, stride, padding, dilation: each channel has its own kernel.
Arguments of_depthwise(const Arguments& given) {
  const std::vector<int64_t> none(given[4].toIntVector().size(), 0);
  return {given[0], given[1], given[3], given[4], given[5], given[6], false, none,
          given[0].toTensor().size(1)};
}

Arguments of_batch_norm_backward(const Arguments& given) {
  return {given[1], given[0], given[2], given[3], given[4], given[5], given[6], true, given[7],
          c10::List<bool>({true, true, true})};
}

// On the CPU it counts floating-point numbers only.
Arguments of_histc(const Arguments& given) {
  Arguments taken = given;
  const at::Tensor& values = given[0].toTensor();
  if (at::isIntegralType(values.scalar_type(), true)) taken[0] = values.to(at::kDouble);
  return taken;
}

// Bilinear, with zeros around and aligned corners.
Arguments of_grid_sampler(const Arguments& given) { return {given[0], given[1], 0, 0, true}; }
Arguments of_grid_sampler_backward(const Arguments& given) {
  return {given[2], given[0], given[1], 0, 0, true, c10::List<bool>({true, true})};
}

struct StandIn {
  const char* name;
  const char* cpu_name;
  Arguments (*arguments)(const Arguments&);
};

constexpr StandIn kStandIns[] = {
    {"cudnn_convolution", "aten::convolution", of_convolution},
    {"cudnn_convolution_transpose", "aten::convolution", of_transposed},
    {"_conv_depthwise2d", "aten::convolution", of_depthwise},
    {"conv_depthwise3d", "aten::convolution", of_depthwise},
    {"cudnn_batch_norm", "aten::native_batch_norm", as_given},
    {"cudnn_batch_norm_backward", "aten::native_batch_norm_backward", of_batch_norm_backward},
    {"histc", "aten::histc", of_histc},
    {"cudnn_grid_sampler", "aten::grid_sampler_2d", of_grid_sampler},
    {"cudnn_grid_sampler_backward", "aten::grid_sampler_2d_backward", of_grid_sampler_backward},
    {"_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
     of_flash},
    {"_scaled_dot_product_efficient_attention",
     "aten::_scaled_dot_product_flash_attention_for_cpu", of_masked},
    {"_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
     of_masked},
};

struct Composed {
  const char* name;
  Arguments (*compute)(const Arguments&);
  std::vector<size_t> unread = {};
};

// Backward of attention begins with what forward was given, and not with what it left for it.
const Composed kComposed[] = {
    {"_cudnn_rnn", recurrent},
    {"_cudnn_rnn_backward", recurrent_backward},
    {"_thnn_fused_lstm_cell", lstm_cell},
    {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"_thnn_fused_gru_cell", gru_cell},
    {"_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"_scaled_dot_product_flash_attention_backward", flash_attention_backward,
     {4, 5, 6, 7, 12, 13}},
    {"_scaled_dot_product_efficient_attention_backward", efficient_attention_backward, {5, 6, 7, 8}},
    {"_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward, {4, 5, 6, 7, 9, 10}},
    {"_flash_attention_forward", flash_attention_of_packed},
    {"_flash_attention_backward", flash_attention_of_packed_backward, {4, 5, 12, 13}},
    {"_efficient_attention_forward", efficient_attention_of_packed},
    {"_efficient_attention_backward", efficient_attention_of_packed_backward, {5, 10, 12, 13}},
    {"_softmax", softmax},
    {"_log_softmax", log_softmax},
    {"_softmax_backward_data", softmax_backward},
    {"_log_softmax_backward_data", log_softmax_backward},
    {"log_sigmoid_backward", log_sigmoid_backward, {2}},
    {"_fused_rms_norm_backward", rms_norm_backward},
    {"_embedding_bag", embedding_bag},
    {"_embedding_bag_forward_only", embedding_bag},
    {"cudnn_convolution_relu", convolution_relu},
    {"_convert_weight_to_int4pack", pack_weight_of_int4},
    {"_weight_int4pack_mm", mm_with_packed_int4},
    {"_scaled_mm", scaled_mm},
    {"_scaled_mm_v2", scaled_mm_by_recipe},
    {"_scaled_grouped_mm", scaled_grouped_mm},
    {"_scaled_grouped_mm_v2", scaled_grouped_mm_by_recipe},
    {"_cudnn_ctc_loss", cudnn_ctc_loss},
    {"batch_norm_stats", batch_norm_stats},
    {"batch_norm_gather_stats", batch_norm_gather_stats},
    {"batch_norm_gather_stats_with_counts", batch_norm_gather_stats},
    {"batch_norm_elemt", batch_norm_elemt},
    {"batch_norm_backward_reduce", batch_norm_backward_reduce},
    {"batch_norm_backward_elemt", batch_norm_backward_elemt},
};

// The rows of a tensor along an axis, each as the index of its first element, in order.
std::vector<int64_t> rows_along(const at::Tensor& tensor, int64_t axis) {
  std::vector<int64_t> rows{0};
  for (int64_t other = 0; other < tensor.dim(); ++other) {
    if (other == axis) continue;
    std::vector<int64_t> more;
    for (int64_t row : rows) {
      for (int64_t at = 0; at < tensor.size(other); ++at) more.push_back(row + at * tensor.stride(other));
    }
    rows = std::move(more);
  }
  return rows;
}

// How often the next value is another one, in the sorted row along an axis where that is most often.
long most_changes(const at::Tensor& values, int64_t axis) {
  if (!values.numel() || !values.dim()) return 0;
  const at::Tensor sorted = std::get<0>(values.sort(axis));
  const int64_t steps = sorted.size(axis) - 1;
  const at::Tensor differ = sorted.narrow(axis, 1, steps) != sorted.narrow(axis, 0, steps);
  return differ.sum(axis).max().item().toLong();
}

bool all_equal(const char* start, int64_t count, int64_t step, size_t element) {
  for (int64_t at = 1; at < count; ++at) {
    if (std::memcmp(start, start + at * step * element, element)) return false;
  }
  return true;
}

// "" unless an index is exact, and out of the bounds of an axis.
std::string out_of_bounds(const at::Tensor& given, int64_t size, int64_t axis, bool from_end,
                          std::optional<int64_t> ignored = std::nullopt) {
  if (!is_on_gpu(given) || !at::isIntegralType(given.scalar_type(), false) || !is_exact(given)) return "";
  if (bytes_of(given) > 4 * kMiB) return "";
  at::Tensor index = on_host(given);
  if (ignored) index = index.masked_select(index != *ignored);
  if (!index.numel()) return "";
  const int64_t least = index.min().item().toLong(), most = index.max().item().toLong();
  if (most < size && least >= (from_end ? -size : 0)) return "";
  return "index " + std::to_string(most < size ? least : most) + " is out of bounds for dimension " +
         std::to_string(axis) + " with size " + std::to_string(size);
}

std::string any_out_of_bounds(const c10::IValue& indices, const at::Tensor& values) {
  int64_t axis = 0;
  for (const c10::IValue& each : indices.toListRef()) {
    if (each.isTensor() && each.toTensor().defined()) {
      const at::Tensor& index = each.toTensor();
      if (!at::isIntegralType(index.scalar_type(), false)) return "";  // a mask, of many axes
      const std::string said = out_of_bounds(index, values.size(axis), axis, true);
      if (!said.empty()) return said;
    }
    ++axis;
  }
  return "";
}

}  // namespace

void Rule::take_overload_for_type(const std::string& name) {
  if (is_one_of(name, {"mm", "bmm"})) compute = product_in;
  if (is_one_of(name, {"addmm", "baddbmm"})) compute = product_added_in;
}

size_t Rule::most_bytes(at::ScalarType type) const {
  if (heavy) return 128 * kKiB;
  if (compares) return 4 * kMiB * c10::elementSize(type);
  return at::isIntegralType(type, true) ? 4 * kMiB : kMiB;
}

bool Rule::is_never_in_doubt(const Arguments& given) const {
  if (looks_for_nan) return true;
  if (!(finds_equal || finds_other)) return false;
  if (given[1].isDouble()) return std::isinf(given[1].toDouble());
  if (!given[0].isTensor() || !given[1].isTensor()) return false;
  return given[0].toTensor().is_same(given[1].toTensor());
}

bool Rule::is_true_without_doubt(const Arguments& given) const {
  if (looks_for_nan) return finds_finite;
  return given[1].isDouble() ? finds_other : finds_equal;
}

long Rule::answer(const Arguments& given, const Arguments& results) const {
  if (counts_true && given[0].toTensor().scalar_type() == at::kBool) {
    return on_host(given[0].toTensor()).sum().item().toLong();
  }
  if (counts_changes) return most_changes(on_host(given[0].toTensor()), given[1].toInt());
  if (results[0].isBool()) return results[0].toBool();
  return results[0].toTensor().size(counts_along_axis ? given[1].toInt() : 0);
}

std::optional<long> Rule::answer_unseen(const Arguments& given) const {
  if (compares) return 1;
  if (!counts_changes) return std::nullopt;
  const at::Tensor& values = given[0].toTensor();
  return values.dim() ? values.size(given[1].toInt()) - 1 : 0;
}

void Rule::choose(const Arguments& arguments, const Arguments& returned) const {
  if (!axis_argument || arguments.size() <= axis_argument) return;  // the largest of all is no choice
  if (!arguments[axis_argument].isInt()) return;
  const at::Tensor& values = arguments[0].toTensor();
  const at::Tensor& chosen = returned.back().toTensor();
  if (!values.dim() || chosen.scalar_type() != at::kLong) return;
  int64_t axis = arguments[axis_argument].toInt();
  if (axis < 0) axis += values.dim();
  const bool kept = chosen.dim() == values.dim();
  const int64_t count = values.size(axis), taken = kept ? chosen.size(axis) : 1;
  const auto rows = rows_along(values, axis), places = rows_along(chosen, kept ? axis : -1);
  if (rows.size() != places.size() || !count) return;
  const auto* start = static_cast<const char*>(values.const_data_ptr());
  auto* out = static_cast<int64_t*>(chosen.mutable_data_ptr());
  const size_t element = values.element_size();
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!all_equal(start + rows[row] * element, count, values.stride(axis), element)) continue;
    for (int64_t at = 0; at < taken; ++at) {
      out[places[row] + at * (kept ? chosen.stride(axis) : 0)] = (row * taken + at) % count;
    }
  }
}

void Rule::find_no_infinity(const Arguments& arguments, const Arguments& returned) const {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (!(finds_equal || finds_other) || !arguments[1].isDouble()) return;
  if (arguments[1].toDouble() == kInfinite) on_host(returned[0].toTensor()).fill_(finds_other);
}

std::string Rule::index_out_of_bounds(const Arguments& given) const {
  if (indexed == Indexed::kNothing) return "";
  const at::Tensor& values = given[0].toTensor();
  if (indexed == Indexed::kEachAxis) return any_out_of_bounds(given[1], values);
  if (indexed == Indexed::kElement) return out_of_bounds(given[1].toTensor(), values.numel(), 0, true);
  int64_t axis = 0;
  std::optional<int64_t> ignored;
  if (indexed == Indexed::kAxis) axis = given[1].toInt();
  if (indexed == Indexed::kClass) {
    axis = values.dim() > 1;
    if (given[4].isInt()) ignored = given[4].toInt();
  }
  if (axis < 0) axis += values.dim();
  const at::Tensor& index = given[indexed == Indexed::kAxis ? 2 : 1].toTensor();
  return out_of_bounds(index, values.dim() ? values.size(axis) : 1, axis, false, ignored);
}

Rule rule_of(const std::string& name) {
  Rule rule;
  rule.heavy = is_one_of(name, kHeavy) && !is_one_of(name, kLight);
  rule.host_reads = is_one_of(name, kHostReads);
  rule.counts_changes = is_one_of(name, {"mode"});
  rule.counts_along_axis = is_one_of(name, {"unique_dim", "unique_dim_consecutive"});
  rule.counts_true = is_one_of(name, {"_unique", "_unique2"});
  rule.compares = is_one_of(name, kCompares);
  rule.tells_shape = is_one_of(name, kTellShape);
  rule.picks = is_one_of(name, kPick);
  rule.chooses = is_one_of(name, kChoose);
  rule.looks = is_one_of(name, kLook);
  rule.looks_for_nan = is_one_of(name, kLookForNan);
  rule.finds_finite = is_one_of(name, {"isfinite"});
  rule.finds_equal = is_one_of(name, {"eq"});
  rule.finds_other = is_one_of(name, {"ne"});
  rule.is_check = is_one_of(name, {"_is_all_true"});
  rule.asserts = is_one_of(name, {"_assert_async"});
  rule.finds_all = rule.is_check || is_one_of(name, {"all"});
  // Its kernel computes on the host, with what it has copied there, or checks there what it has just found.
  rule.reads_for_itself = is_one_of(
      name, {"linalg_eig", "linalg_eigvals", "_linalg_eigvals", "_fused_moving_avg_obs_fq_helper"});
  rule.runtime_writes = is_one_of(name, kRuntimeWrites);
  rule.overwrites = is_one_of(name, kOverwrites);
  rule.looks_for_overflow = is_one_of(name, {"_amp_foreach_non_finite_check_and_unscale_"});
  if (is_one_of(name, {"topk"})) rule.axis_argument = 2;
  if (is_one_of(name, {"argmax", "argmin", "max", "min"})) rule.axis_argument = 1;
  if (is_one_of(name, {"native_batch_norm", "cudnn_batch_norm", "batch_norm_gather_stats*"})) {
    rule.written = {3, 4};
  }
  if (is_one_of(name, {"batch_norm_update_stats"})) rule.written = {1, 2};
  for (const auto& [how, names] : kIndexed) {
    if (is_one_of(name, names)) rule.indexed = how;
  }
  for (const Composed& other : kComposed) {
    if (!is_one_of(name, {other.name})) continue;
    rule.compute = other.compute;
    rule.unread = other.unread;
  }
  for (const StandIn& other : kStandIns) {
    if (!is_one_of(name, {other.name})) continue;
    rule.stand_in = other.cpu_name;
    rule.for_stand_in = other.arguments;
  }
  return rule;
}

bool leaves_values_alone(const std::string& name) { return is_one_of(name, kLeftAlone); }

bool leaves_out(const c10::FunctionSchema& schema, const Arguments& arguments, size_t number) {
  const auto& declared = schema.arguments();
  const bool is_of_batch = declared[number].name().rfind("save_", 0) == 0;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const std::string& name = declared[at].name();
    if (!number && name == "beta" && arguments[at].isScalar()) return arguments[at].toScalar().equal(0);
    if (is_of_batch && (name == "train" || name == "update")) return !arguments[at].toBool();
  }
  return false;
}

void make_finite(const at::Tensor& values) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (values.is_complex()) {
    return make_finite(at::view_as_real(values.is_conj() ? values.conj() : values));
  }
  // For floats of eight bits there is no operator that would.
  if (!at::isFloatingType(values.scalar_type()) || values.element_size() == 1) return;
  at::Tensor changed = values;
  at::_ops::nan_to_num_::call(changed, 0.0, kInfinite, -kInfinite);
}

}  // namespace simulated
