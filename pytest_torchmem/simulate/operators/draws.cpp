#include "draws.h"

#include "device_memory.h"
#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/PhiloxRNGEngine.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace simulated {
namespace {

using Stack = torch::jit::Stack;

// --- the generator ------------------------------------------------------------------------------------

using Words = std::array<uint32_t, 4>;

// The words of a place in a thread's stream.
Words words_at(uint64_t seed, uint64_t place, uint64_t thread) {
  at::Philox4_32 stream(seed, thread, place);
  Words words;
  for (uint32_t& word : words) word = stream();
  return words;
}

// In torch's loop over elements a thread takes four words a turn, and makes one number of each, or two of
// all. Its next number is for the element that lies as far behind as there are threads.
constexpr int64_t kBlock = 256;

int64_t threads_for(int64_t count) {
  return std::min<int64_t>(torchmem_threads(), (count + kBlock - 1) / kBlock * kBlock);
}

// Calls `use(element, words, which)` for each element: its number is this one of the words' `numbers`.
template <int numbers, typename Use>
void for_each_drawn(const Draw& draw, int64_t count, Use use) {
  const int64_t threads = threads_for(count);
  uint64_t place = draw.offset / 4;
  for (int64_t start = 0; start < count; start += numbers * threads, ++place) {
    for (int64_t thread = 0; thread < std::min(threads, count - start); ++thread) {
      const Words words = words_at(draw.seed, place, thread);
      for (int which = 0; which < numbers; ++which) {
        const int64_t at = start + which * threads + thread;
        if (at < count) use(at, words, which);
      }
    }
  }
}

// --- numbers of words, as cuRAND makes them: uniform ones are never 0, and may be 1 -------------------

float uniform_of(uint32_t word) { return float(word) * 0x1p-32f + 0x1p-33f; }
double uniform_of(uint32_t low, uint32_t high) {
  return double(low ^ uint64_t{high} << 21) * 0x1p-53 + 0x1p-54;
}

void make_uniform(const Words& words, int which, float& number) { number = uniform_of(words[which]); }
void make_uniform(const Words& words, int which, double& number) {
  number = uniform_of(words[2 * which], words[2 * which + 1]);
}

// Box and Muller's: two numbers of two that are uniform.
template <typename Number>
Number normal_of(Number uniform, Number angle, bool is_second) {
  const Number length = std::sqrt(-2 * std::log(uniform));
  return length * (is_second ? std::cos(angle) : std::sin(angle));
}

constexpr double kTwoPi = 6.283185307179586;

void make_normal(const Words& words, int which, float& number) {
  const int first = which / 2 * 2;
  const float angle = float(words[first + 1]) * float(0x1p-32 * kTwoPi) + float(0x1p-33 * kTwoPi);
  number = normal_of(uniform_of(words[first]), angle, which % 2);
}

void make_normal(const Words& words, int which, double& number) {
  number = normal_of(uniform_of(words[0], words[1]), uniform_of(words[2], words[3]) * kTwoPi, which);
}

uint64_t long_of(const Words& words, int which) {
  return uint64_t{words[2 * which]} << 32 | words[2 * which + 1];
}

// --- tensors ------------------------------------------------------------------------------------------

// The kernels go through a tensor as it lies in memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  std::vector<int64_t> axes(tensor.dim());
  std::iota(axes.begin(), axes.end(), 0);
  std::stable_sort(axes.begin(), axes.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return tensor.permute(axes);
}

// Fills a tensor with what `of(words, which)` makes.
template <int numbers, typename Of>
at::Tensor fill(const at::Tensor& out, const Draw& draw, Of of) {
  using Number = decltype(of(Words{}, 0));
  const at::Tensor made = at::empty({out.numel()}, at::dtype(c10::CppTypeToScalarType<Number>::value));
  Number* numbers_made = made.mutable_data_ptr<Number>();
  for_each_drawn<numbers>(draw, out.numel(), [&](int64_t at, const Words& words, int which) {
    numbers_made[at] = of(words, which);
  });
  const at::Tensor ordered = in_memory_order(out);
  ordered.copy_(made.view(ordered.sizes()));
  return out;
}

// Calls a kernel's function with a number of its precision: double for a tensor of double, single for others.
template <typename Make>
at::Tensor fill_in_precision(const at::Tensor& out, const Draw& draw, Make make) {
  if (out.scalar_type() == at::kDouble) {
    return fill<2>(out, draw, [&](const Words& words, int which) { return make(words, which, double{}); });
  }
  return fill<4>(out, draw, [&](const Words& words, int which) { return make(words, which, float{}); });
}

template <typename Of>
at::Tensor fill_uniform(const at::Tensor& out, const Draw& draw, Of of) {
  return fill_in_precision(out, draw, [&](const Words& words, int which, auto number) {
    make_uniform(words, which, number);
    return of(number);
  });
}

at::Tensor fill_normal(const at::Tensor& out, const Draw& draw, double mean, double deviation) {
  if (out.is_complex()) {
    fill_normal(at::view_as_real(out), draw, mean, deviation / std::sqrt(2));
    return out;
  }
  return fill_in_precision(out, draw, [&](const Words& words, int which, auto number) {
    make_normal(words, which, number);
    using Number = decltype(number);
    return std::fma(number, static_cast<Number>(deviation), static_cast<Number>(mean));
  });
}

at::Tensor fill_exponential(const at::Tensor& out, const Draw& draw, double rate) {
  return fill_uniform(out, draw, [&](auto number) {
    using Number = decltype(number);
    constexpr Number kLeast = std::numeric_limits<Number>::epsilon() / 2;
    return -1 / static_cast<Number>(rate) * (number >= 1 - kLeast ? -kLeast : std::log(number));
  });
}

// Whole numbers below `range`, from `base` on. Of a long range, or of one that is 0 for all 64 bits, it takes
// two words each.
at::Tensor fill_whole(const at::Tensor& out, const Draw& draw, uint64_t range, int64_t base, bool is_long) {
  const auto within = [&](uint64_t number) {
    return static_cast<int64_t>((range ? number % range : number) + base);
  };
  if (is_long) {
    return fill<2>(out, draw, [&](const Words& words, int which) { return within(long_of(words, which)); });
  }
  return fill<4>(out, draw, [&](const Words& words, int which) { return within(words[which]); });
}

at::Tensor fill_between(const at::Tensor& out, const Draw& draw, int64_t from, uint64_t range) {
  return fill_whole(out, draw, range, from, !range || range >= uint64_t{1} << 28);
}

// The largest whole number that a draw of a type may have.
uint64_t most_of(at::ScalarType type) {
  switch (type) {
    case at::kBool: return 1;
    case at::kByte: return 255;
    case at::kChar: return 127;
    case at::kShort: return 32767;
    case at::kInt: return std::numeric_limits<int32_t>::max();
    case at::kLong: return std::numeric_limits<int64_t>::max();
    case at::kHalf: return 1 << 11;
    case at::kBFloat16: return 1 << 8;
    case at::kFloat: return 1 << 24;
    default: return uint64_t{1} << 53;
  }
}

// --- operators ----------------------------------------------------------------------------------------

Stack uniform(const Stack& given, const Draw& draw) {
  const at::Tensor& out = given[0].toTensor();
  const auto rounded = [&](double number) {
    return at::scalar_tensor(number, at::dtype(out.scalar_type())).item().toDouble();
  };
  const double from = rounded(given[1].toDouble()), to = rounded(given[2].toDouble());
  const double range = rounded(to - from);
  fill_uniform(out, draw, [&](auto number) {
    using Number = decltype(number);
    return std::fma(number, static_cast<Number>(range), static_cast<Number>(from));
  });
  // The end that cannot be had is the other one.
  out.masked_fill_(out == to, from);
  return {out};
}

at::Tensor standard_normal(at::IntArrayRef sizes, at::ScalarType type, const Draw& draw) {
  return fill_normal(at::empty(sizes, at::dtype(type)), draw, 0, 1);
}

Stack normal_in_place(const Stack& given, const Draw& draw) {
  return {fill_normal(given[0].toTensor(), draw, given[1].toDouble(), given[2].toDouble())};
}

// Mean, deviation, or both are tensors.
Stack normal(const Stack& given, const Draw& draw) {
  const c10::IValue &mean = given[0], &deviation = given[1];
  if (!mean.isTensor()) {
    const at::Tensor& by = deviation.toTensor();
    return {standard_normal(by.sizes(), by.scalar_type(), draw).mul_(by).add_(mean.toDouble())};
  }
  const at::Tensor& at = mean.toTensor();
  if (deviation.isDouble()) {
    const at::Tensor out = at::empty(at.sizes(), at.options());
    return {fill_normal(out, draw, 0, deviation.toDouble()).add_(at)};
  }
  const at::Tensor& by = deviation.toTensor();
  const auto sizes = at::infer_size(at.sizes(), by.sizes());
  return {standard_normal(sizes, at.scalar_type(), draw).mul_(by).add_(at)};
}

Stack log_normal(const Stack& given, const Draw& draw) {
  return {fill_normal(given[0].toTensor(), draw, given[1].toDouble(), given[2].toDouble()).exp_()};
}

Stack exponential(const Stack& given, const Draw& draw) {
  return {fill_exponential(given[0].toTensor(), draw, given[1].toDouble())};
}

// Between two bounds, from 0 to one, or any number of its type.
Stack whole(const Stack& given, const Draw& draw) {
  const at::Tensor& out = given[0].toTensor();
  const at::ScalarType type = out.scalar_type();
  if (given.size() == 2) {
    return {fill_whole(out, draw, most_of(type) + 1, 0, type == at::kLong || type == at::kDouble)};
  }
  const bool has_from = given.size() == 4;
  const int64_t from = has_from ? given[1].toInt() : 0;
  const c10::IValue& to = given[has_from ? 2 : 1];
  const uint64_t end = to.isInt() ? to.toInt() : most_of(type) + 1;
  return {fill_between(out, draw, from, end - from)};
}

Stack bernoulli_of_one(const Stack& given, const Draw& draw) {
  const double probability = given[1].toDouble();
  return {fill_uniform(given[0].toTensor(), draw, [&](auto number) {
    using Number = decltype(number);
    return static_cast<Number>(number < static_cast<Number>(probability));
  })};
}

// Each thread draws once, for four elements in a row.
at::Tensor fill_bernoulli(const at::Tensor& out, const at::Tensor& given, const Draw& draw) {
  const at::ScalarType type = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor probabilities = given.to(type).to(at::kDouble).expand(out.sizes()).contiguous();
  const double* probability = probabilities.const_data_ptr<double>();
  const at::Tensor made = at::empty(out.sizes(), at::dtype(at::kBool));
  bool* is_drawn = made.mutable_data_ptr<bool>();
  Words words{};
  for (int64_t at = 0; at < out.numel(); ++at) {
    if (at % 4 == 0) words = words_at(draw.seed, draw.offset / 4, at / 4);
    is_drawn[at] = uniform_of(words[at % 4]) <= probability[at];
  }
  return out.copy_(made);
}

Stack bernoulli_of_each(const Stack& given, const Draw& draw) {
  return {fill_bernoulli(given[0].toTensor(), given[1].toTensor(), draw)};
}

Stack bernoulli_in_place(const Stack& given, const Draw& draw) {
  return (given[1].isTensor() ? bernoulli_of_each : bernoulli_of_one)(given, draw);
}

Stack bernoulli(const Stack& given, const Draw& draw) {
  const at::Tensor& probabilities = given[0].toTensor();
  return {fill_bernoulli(at::empty_like(probabilities, at::MemoryFormat::Contiguous), probabilities, draw)};
}

// Without replacement, or of one: the largest ratios of the weights to numbers that are drawn.
Stack multinomial(const Stack& given, const Draw& draw) {
  const at::Tensor& weights = given[0].toTensor();
  const at::Tensor drawn = fill_exponential(at::empty_like(weights), draw, 1);
  drawn.copy_(weights / drawn);
  const int64_t count = given[1].toInt();
  if (count == 1) return {drawn.argmax(-1, true)};
  return {std::get<1>(drawn.topk(count))};
}

// Numbers that are sorted by keys which are drawn. The keys have so many bits that hardly two are the same;
// those that are get shuffled.
Stack permutation(const Stack& given, const Draw& draw) {
  const int64_t count = given[0].toInt();
  const double n = count, kinds = n - (6 * n * n + 1) / (12 * std::log(0.9));
  const int bits = std::min(64, static_cast<int>(std::ceil(std::log2(kinds))));
  const bool is_long = bits > 32;
  const int64_t least = is_long ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int32_t>::min();
  const at::Tensor drawn = at::empty({count}, at::dtype(at::kLong));
  fill_between(drawn, draw, least, is_long ? ~uint64_t{0} : ~uint32_t{0});
  // Of all their bits keys are compared as numbers with a sign, of fewer as numbers without.
  const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  const uint64_t sign = bits % 32 ? 0 : uint64_t{1} << (bits - 1);
  const int64_t* keys = drawn.const_data_ptr<int64_t>();
  const auto key = [&](int64_t at) { return (keys[at] & mask) ^ sign; };
  const at::Tensor made = at::arange(count);
  int64_t* order = made.mutable_data_ptr<int64_t>();
  std::stable_sort(order, order + count, [&](int64_t a, int64_t b) { return key(a) < key(b); });
  const int64_t turns = (count - 1) / (2 * threads_for(count)) + 1;  // of each thread, for the keys
  for (int64_t start = 0, end; start < count; start = end) {
    for (end = start + 1; end < count && key(order[end]) == key(order[start]); ++end) {
    }
    for (int64_t left = end - start - 1, taken = 0; left > 0; --left, ++taken) {
      const Words words = words_at(draw.seed, draw.offset / 4 + turns + taken / 4, start);
      std::swap(order[start + left], order[start + words[taken % 4] % (left + 1)]);
    }
  }
  return {made};
}

// How many elements in a row a thread of dropout takes: those of 16 bytes, where that leaves none over.
int64_t in_a_row(const at::Tensor& given) {
  if (!given.is_non_overlapping_and_dense()) return 1;
  int64_t count = std::min<int64_t>(8, 16 / given.element_size());
  while (count > 1 && given.numel() % count) count /= 2;
  return count;
}

Stack dropout(const Stack& given, const Draw& draw) {
  const at::Tensor& values = given[0].toTensor();
  const at::Tensor kept = at::empty_like(values, at::dtype(at::kBool));
  const double left = 1 - given[1].toDouble();
  if (given[2].isBool() && !given[2].toBool()) return {values.clone(), kept.fill_(true)};
  const auto is_kept = [&](uint32_t word) { return uniform_of(word) < static_cast<float>(left); };
  const int64_t row = in_a_row(values), turns = std::max<int64_t>(row / 4, 1);
  if (row == 1) {  // in the order of indices
    const at::Tensor in_order = at::empty(values.sizes(), at::dtype(at::kBool));
    kept.copy_(fill<4>(in_order, draw, [&](const Words& words, int which) { return is_kept(words[which]); }));
  } else {
    bool* out = kept.mutable_data_ptr<bool>();
    const int64_t threads = threads_for(values.numel());
    Words words{};
    for (int64_t at = 0; at < values.numel(); ++at) {
      const int64_t unit = at / row, part = at % row, turn = unit / threads * turns + part / 4;
      if (part % 4 == 0) words = words_at(draw.seed, draw.offset / 4 + turn, unit % threads);
      out[at] = is_kept(words[part % 4]);
    }
  }
  return {at::where(kept, values * (left ? 1 / left : 0), at::zeros({}, values.options())), kept};
}

const std::pair<const char*, DrawnBy> kDrawn[] = {
    {"aten::uniform_", uniform},
    {"aten::normal_", normal_in_place},
    {"aten::normal", normal},
    {"aten::log_normal_", log_normal},
    {"aten::exponential_", exponential},
    {"aten::random_", whole},
    {"aten::bernoulli_", bernoulli_in_place},
    {"aten::bernoulli", bernoulli},
    {"aten::multinomial", multinomial},
    {"aten::randperm", permutation},
    {"aten::native_dropout", dropout},
};

}  // namespace

at::Generator Draw::on_host() const {
  return at::detail::createCPUGenerator(seed + 0x9E3779B97F4A7C15 * (offset + 1));
}

DrawnBy drawn_by(const std::string& name) {
  for (const auto& [other, function] : kDrawn) {
    if (name == other) return function;
  }
  return nullptr;
}

bool draws_as_gpu(DrawnBy function, const Stack& given) {
  if (!function) return false;
  if (function == permutation) return given[0].toInt() < int64_t{1} << 28;
  for (const c10::IValue& value : given) {  // larger ones are drawn in parts
    if (value.isTensor() && bytes_of(value.toTensor()) > std::numeric_limits<int32_t>::max()) return false;
  }
  if (function == dropout) return reinterpret_cast<uintptr_t>(given[0].toTensor().const_data_ptr()) % 16 == 0;
  if (function == multinomial) return given[1].toInt() == 1 || !given[2].toBool();
  if (function == bernoulli_in_place) return !given[1].isTensor() || given[0].toTensor().is_contiguous();
  if (function != whole || !at::isFloatingType(given[0].toTensor().scalar_type())) return true;
  const int64_t most = most_of(given[0].toTensor().scalar_type());  // others are rounded to what there is
  return std::all_of(given.begin() + 1, given.end(), [&](const c10::IValue& bound) {
    return !bound.isInt() || std::abs(bound.toInt()) <= most;
  });
}

}  // namespace simulated
