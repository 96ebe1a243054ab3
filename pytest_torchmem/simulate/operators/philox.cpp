#include "philox.h"

#include "device_memory.h"
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/core/TransformationHelper.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/api/include/torch/version.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>

namespace simulated {
namespace {

constexpr int64_t kThreadsOfBlock = 256;
// Integers of a larger range take 64 bits each, since torch 2.7 of any kind.
constexpr bool kAnyKindTakesMoreBits = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7;
constexpr uint64_t kLargeRange = uint64_t{1} << (kAnyKindTakesMoreBits ? 28 : 32);

using Words = std::array<uint32_t, 4>;

// Calls with the number of each element, the words that its thread has drawn, and the element's place among
// the `together` ones that these are for: they are as far apart as there are threads.
template <typename Each>
void each_drawn(int64_t count, int together, const Draw& begin, Each each) {
  const int64_t blocks = (count + kThreadsOfBlock - 1) / kThreadsOfBlock;
  const int64_t threads = std::min<int64_t>(blocks * kThreadsOfBlock, torchmem_threads());
  uint64_t round = begin.offset / 4;
  for (int64_t first = 0; first < count; first += threads * together, ++round) {
    for (int64_t thread = 0; thread < std::min(threads, count - first); ++thread) {
      at::Philox4_32 sequence(begin.seed, thread, round);
      const Words words{sequence(), sequence(), sequence(), sequence()};
      for (int place = 0; place < together; ++place) {
        const int64_t number = first + thread + place * threads;
        if (number < count) each(number, words, place);
      }
    }
  }
}

uint64_t long_word(const Words& words, int place) {
  return uint64_t{words[2 * place]} << 32 | words[2 * place + 1];
}

// As cuRAND makes numbers of words: double precision takes two of them.

template <typename Number>
constexpr int kTogether = std::is_same_v<Number, double> ? 2 : 4;

double fraction(const Words& words, int first) {
  constexpr double kUnit = 1.0 / (uint64_t{1} << 53);
  return (words[first] ^ uint64_t{words[first + 1]} << 21) * kUnit + kUnit / 2;
}

// In (0, 1].
template <typename Number>
Number uniform(const Words& words, int place) {
  constexpr float kUnit = 1.0f / (uint64_t{1} << 32);
  if constexpr (std::is_same_v<Number, double>) return fraction(words, 2 * place);
  return words[place] * kUnit + kUnit / 2;
}

template <typename Number>
Number normal(const Words& words, int place) {
  constexpr Number kCircle = 6.2831853071795865;
  const int first = std::is_same_v<Number, double> ? 0 : place / 2 * 2;
  Number size, angle;
  if constexpr (std::is_same_v<Number, double>) {
    size = fraction(words, 0);
    angle = fraction(words, 2) * kCircle;
  } else {
    constexpr float kUnit = kCircle / (uint64_t{1} << 32);
    size = uniform<float>(words, first);
    angle = std::fma(static_cast<float>(words[first + 1]), kUnit, kUnit / 2);
  }
  size = std::sqrt(-2 * std::log(size));
  return size * (place == first ? std::sin(angle) : std::cos(angle));
}

template <typename Number>
Number exponential(Number uniform, Number lambda) {
  constexpr Number kLeast = std::numeric_limits<Number>::epsilon() / 2;
  return -1 / lambda * (uniform >= 1 - kLeast ? -kLeast : std::log(uniform));
}

template <typename Element>
bool fill_real(const std::string& name, const Arguments& arguments, const at::Tensor& out, const Draw& begin) {
  using Number = std::conditional_t<std::is_same_v<Element, double>, double, float>;
  const auto fill = [&](auto number_of) {
    auto* const start = out.data_ptr<Element>();
    each_drawn(out.numel(), kTogether<Number>, begin, [&](int64_t number, const Words& words, int place) {
      start[number] = number_of(words, place);
    });
    return true;
  };
  if (!arguments[1].isDouble()) return false;
  const double first = arguments[1].toDouble();
  if (name == "aten::exponential_") {
    return fill([lambda = Number(first)](const Words& words, int place) {
      return Element(exponential(uniform<Number>(words, place), lambda));
    });
  }
  if (name == "aten::bernoulli_") {
    return fill([first](const Words& words, int place) {
      return Element(uniform<Number>(words, place) < Number(first));
    });
  }
  const double second = arguments[2].toDouble();
  if (name == "aten::normal_") {
    return fill([mean = Number(first), deviation = Number(second)](const Words& words, int place) {
      return Element(std::fma(normal<Number>(words, place), deviation, mean));
    });
  }
  const auto from = Element(first), to = Element(second);
  return fill([from, to, range = Number(to - from)](const Words& words, int place) {
    const auto value = Element(std::fma(uniform<Number>(words, place), range, Number(from)));
    return value == to ? from : value;  // in [from, to)
  });
}

template <typename Element>
bool fill_integers(const Arguments& arguments, const at::Tensor& out, const Draw& begin) {
  auto* const start = out.data_ptr<Element>();
  const auto fill = [&](bool takes_more_bits, auto number_of) {
    each_drawn(out.numel(), takes_more_bits ? 2 : 4, begin, [&](int64_t number, const Words& words, int place) {
      start[number] = takes_more_bits ? number_of(long_word(words, place)) : number_of(words[place]);
    });
    return true;
  };
  const size_t bounds = arguments.size() - 2;  // between what is filled and the generator
  if (!bounds) {
    const bool takes_more_bits = std::is_same_v<Element, double> || std::is_same_v<Element, int64_t>;
    return fill(takes_more_bits, [](auto word) { return at::transformation::uniform_int<Element>(word); });
  }
  if (!arguments[bounds].isInt()) return false;
  const int64_t from = bounds == 1 ? 0 : arguments[1].toInt();
  const uint64_t range = static_cast<uint64_t>(arguments[bounds].toInt()) - static_cast<uint64_t>(from);
  const bool may = kAnyKindTakesMoreBits || std::is_same_v<Element, int64_t> ||
                   std::is_same_v<Element, double> || std::is_same_v<Element, float> ||
                   std::is_same_v<Element, c10::BFloat16>;
  return fill(may && range >= kLargeRange, [range, from](auto word) {
    return at::transformation::uniform_int_from_to<Element>(word, range, from);
  });
}

// The axes in the order in which a kernel goes over them: the last one has neighbours in memory.
std::vector<int64_t> axes_of_kernel(const at::Tensor& tensor) {
  std::vector<int64_t> axes(tensor.dim());
  std::iota(axes.begin(), axes.end(), 0);
  std::stable_sort(axes.begin(), axes.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return axes;
}

}  // namespace

at::Generator Draw::on_host() const {
  return at::detail::createCPUGenerator(seed + 0x9E3779B97F4A7C15 * (offset + 1));
}

bool draw_as_gpu(const c10::FunctionSchema& schema, const Arguments& arguments, const Draw& begin) {
  const std::string& name = schema.name();
  const bool of_integers = name == "aten::random_";
  if (!of_integers && name != "aten::uniform_" && name != "aten::normal_" && name != "aten::exponential_" &&
      name != "aten::bernoulli_") {
    return false;
  }
  const at::Tensor given = arguments[0].toTensor();
  if (!of_integers && !at::isFloatingType(given.scalar_type())) return false;
  // A kernel draws more of them in parts.
  if (!given.numel() || bytes_of(given) > std::numeric_limits<int32_t>::max()) return false;
  const at::Tensor there = given.permute(axes_of_kernel(given));
  const at::Tensor drawn = at::empty(there.sizes(), there.options());
  bool filled = false;
  if (of_integers) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, given.scalar_type(), "draw",
                               [&] { filled = fill_integers<scalar_t>(arguments, drawn, begin); });
  } else {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, given.scalar_type(), "draw",
                                    [&] { filled = fill_real<scalar_t>(name, arguments, drawn, begin); });
  }
  if (filled) there.copy_(drawn);
  return filled;
}

}  // namespace simulated
