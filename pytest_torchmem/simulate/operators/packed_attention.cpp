#include "composed.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace simulated {
namespace {

using Stack = torch::jit::Stack;

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// What a query sees: the keys from so many places before its own to so many behind it; all where that is
// negative. The last query stands at the last key, or the first one at the first.
struct Sight {
  int64_t before = -1, behind = -1;
  bool from_the_end = true;

  at::Tensor of(int64_t queries, int64_t keys) const {
    const at::Tensor own = at::arange(queries).unsqueeze(1) + (from_the_end ? keys - queries : 0);
    const at::Tensor key = at::arange(keys).unsqueeze(0);
    at::Tensor seen = at::ones({queries, keys}, at::kBool);
    if (before >= 0) seen = seen & (key >= own - before);
    if (behind >= 0) seen = seen & (key <= own + behind);
    return seen;
  }
};

// Sequences of one or of many lengths, as rows of heads: those of a batch have one length, others lie
// behind each other, and a tensor says where each begins.
struct Sequences {
  at::Tensor rows;
  std::vector<int64_t> starts;

  Sequences(const at::Tensor& given, std::vector<int64_t> starts)
      : rows(given.reshape({-1, given.size(-2), given.size(-1)}).to(at::kFloat)), starts(std::move(starts)) {}

  // Heads, rows, numbers; a head of keys serves as many heads of queries as there are for each.
  at::Tensor at(size_t number, int64_t heads) const {
    const at::Tensor own = rows.slice(0, starts[number], starts[number + 1]).transpose(0, 1);
    return own.repeat_interleave(heads / own.size(0), 0);
  }

  // Adds what belongs to each head of a sequence.
  void add(size_t number, const at::Tensor& of_heads) {
    const int64_t heads = rows.size(1);
    const at::Tensor own = of_heads.reshape({heads, -1, of_heads.size(1), of_heads.size(2)}).sum(1);
    rows.slice(0, starts[number], starts[number + 1]).add_(own.transpose(0, 1));
  }

  at::Tensor like(const at::Tensor& given) const { return rows.reshape(given.sizes()).to(given.scalar_type()); }
};

Sequences zeros_like(const Sequences& given) { return {at::zeros_like(given.rows), given.starts}; }

// Where the sequences begin, and where the last one ends.
std::vector<int64_t> starts_of(const at::Tensor& given, const at::Tensor& places) {
  std::vector<int64_t> starts;
  if (!places.defined()) {
    for (int64_t number = 0; number <= given.size(0); ++number) starts.push_back(number * given.size(1));
    return starts;
  }
  const at::Tensor all = places.to(at::kLong).contiguous();
  const int64_t* first = all.const_data_ptr<int64_t>();
  starts.assign(first, first + all.numel());
  TORCH_CHECK(!starts.empty() && starts.back() * given.size(-2) * given.size(-1) <= given.numel(),
              "sequences end behind the rows");
  return starts;
}

struct Packed {
  at::Tensor given_query, given_key, given_value;
  Sequences query, key, value;
  Sight sight;
  double scale;

  Packed(const Stack& given, size_t first, const at::Tensor& starts, const at::Tensor& key_starts,
         Sight sight, const c10::IValue& scale)
      : given_query(given[first].toTensor()),
        given_key(given[first + 1].toTensor()),
        given_value(given[first + 2].toTensor()),
        query(given_query, starts_of(given_query, starts)),
        key(given_key, starts_of(given_key, key_starts)),
        value(given_value, key.starts),
        sight(sight),
        scale(scale.isNone() ? 1 / std::sqrt(double(given_query.size(-1))) : scale.toDouble()) {}

  size_t count() const { return query.starts.size() - 1; }
  int64_t heads() const { return query.rows.size(1); }

  at::Tensor scores(size_t number) const {
    const at::Tensor own = query.at(number, heads()), others = key.at(number, heads());
    const at::Tensor made = at::matmul(own, others.transpose(1, 2)) * scale;
    return made.masked_fill(sight.of(own.size(1), others.size(1)).logical_not(),
                            -std::numeric_limits<double>::infinity());
  }

  Stack forward(size_t further_results) const {
    Sequences out(at::zeros({query.rows.size(0), heads(), value.rows.size(2)}), query.starts);
    std::vector<at::Tensor> sums;
    for (size_t number = 0; number < count(); ++number) {
      const at::Tensor made = scores(number);
      sums.push_back(made.logsumexp(-1));
      out.add(number, at::matmul(made.softmax(-1).nan_to_num(), value.at(number, heads())));
    }
    std::vector<int64_t> sizes = given_query.sizes().vec();
    sizes.back() = value.rows.size(2);
    const bool batch = given_query.dim() == 4 && given_query.size(0) == int64_t(count());
    Stack made{out.rows.reshape(sizes).to(given_query.scalar_type()),
               batch ? at::stack(sums) : at::cat(sums, 1)};
    made.resize(made.size() + further_results);
    return made;
  }

  Stack backward(const at::Tensor& of_out) const {
    const Sequences gradient(of_out, query.starts);
    Sequences of_query = zeros_like(query), of_key = zeros_like(key), of_value = zeros_like(value);
    for (size_t number = 0; number < count(); ++number) {
      const at::Tensor weights = scores(number).softmax(-1).nan_to_num();
      const at::Tensor own = gradient.at(number, heads());
      const at::Tensor of_weights = at::matmul(own, value.at(number, heads()).transpose(1, 2));
      const at::Tensor of_scores =
          weights * (of_weights - (of_weights * weights).sum(-1, true)) * scale;
      of_query.add(number, at::matmul(of_scores, key.at(number, heads())));
      of_key.add(number, at::matmul(of_scores.transpose(1, 2), query.at(number, heads())));
      of_value.add(number, at::matmul(weights.transpose(1, 2), own));
    }
    return {of_query.like(given_query), of_key.like(given_key), of_value.like(given_value)};
  }
};

void check_plain(const c10::IValue& dropout, const Stack& given, std::initializer_list<size_t> unsupported) {
  bool plain = !dropout.toDouble();
  for (size_t at : unsupported) {
    if (at >= given.size() || given[at].isNone()) continue;
    plain = plain && given[at].isTensor() && !given[at].toTensor().defined();
  }
  TORCH_CHECK(plain, "is computed by the GPU's kernel alone");
}

Sight flash_sight(const c10::IValue& causal, const Stack& given, size_t window) {
  const auto side = [](const c10::IValue& value) { return value.isNone() ? -1 : value.toInt(); };
  const int64_t behind = side(given[window + 1]);
  return {side(given[window]), causal.toBool() ? 0 : behind};
}

Sight efficient_sight(const c10::IValue& kind) { return {-1, kind.toInt() ? 0 : -1, kind.toInt() == 2}; }

}  // namespace

Stack flash_attention_of_packed(const Stack& given) {
  check_plain(given[7], given, {13, 14, 15});
  return Packed(given, 0, tensor_or_none(given[3]), tensor_or_none(given[4]),
                flash_sight(given[8], given, 11), given[10])
      .forward(3);
}

Stack flash_attention_of_packed_backward(const Stack& given) {
  check_plain(given[10], given, {});
  return Packed(given, 1, tensor_or_none(given[6]), tensor_or_none(given[7]),
                flash_sight(given[11], given, 15), given[14])
      .backward(given[0].toTensor());
}

Stack efficient_attention_of_packed(const Stack& given) {
  check_plain(given[8], given, {3, 12, 13});
  return Packed(given, 0, tensor_or_none(given[4]), tensor_or_none(given[5]), efficient_sight(given[9]),
                given[11])
      .forward(2);
}

Stack efficient_attention_of_packed_backward(const Stack& given) {
  check_plain(given[11], given, {4, 18});
  Stack made = Packed(given, 1, tensor_or_none(given[6]), tensor_or_none(given[7]),
                      efficient_sight(given[14]), given[16])
                   .backward(given[0].toTensor());
  made.emplace_back();
  return made;
}

}  // namespace simulated
