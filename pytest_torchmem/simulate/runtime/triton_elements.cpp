#include "triton_elements.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace simulated::triton_ir {
namespace {

template <typename To, typename From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

double real_of_bits(uint64_t bits, const Type& type) {
  if (type.bits == 64) return same_bits<double>(bits);
  if (type.bits == 32) return same_bits<float>(static_cast<uint32_t>(bits));
  if (type.kind == Kind::kBfloat) return same_bits<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                     : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -size : size;
}

uint64_t bits_of_half(double value) {
  const uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  value = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (value >= 65520) return sign | 0x7C00;
  if (value < std::ldexp(1, -14)) return sign | static_cast<uint64_t>(std::nearbyint(std::ldexp(value, 24)));
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  const auto whole = static_cast<uint64_t>(std::nearbyint(std::ldexp(fraction, 11)));
  return sign | ((static_cast<uint64_t>(exponent + 13) << 10) + whole);
}

uint64_t bits_of_real(double value, const Type& type) {
  if (type.bits == 64) return same_bits<uint64_t>(value);
  const auto bits = same_bits<uint32_t>(static_cast<float>(value));
  if (type.bits == 32) return bits;
  if (type.kind == Kind::kFloat) return bits_of_half(value);
  if (std::isnan(value)) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

double not_a_number_first(double a, double b, bool larger) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return larger ? std::fmax(a, b) : std::fmin(a, b);
}

// From near the root on, by Newton's method.
double inverse_of_erf(double x) {
  if (std::fabs(x) >= 1) return std::fabs(x) > 1 ? NAN : std::copysign(INFINITY, x);
  const double a = std::log1p(-x * x), b = 4.3307467508 + a / 2;
  double root = std::copysign(std::sqrt(std::sqrt(b * b - a / 0.147) - b), x);
  for (int turn = 0; turn < 3; ++turn) {
    root -= (std::erf(root) - x) * 0.88622692545275801 * std::exp(root * root);
  }
  return root;
}

int64_t opposite(int64_t value) { return static_cast<int64_t>(-static_cast<uint64_t>(value)); }

}  // namespace

int64_t wrapped(int64_t value, int bits) {
  if (bits >= 64) return value;
  if (bits == 1) return value & 1;
  return static_cast<int64_t>(static_cast<uint64_t>(value) << (64 - bits)) >> (64 - bits);
}

uint64_t unsigned_of(int64_t value, int bits) {
  return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1);
}

double rounded(double value, const Type& type) {
  if (type.bits == 64) return value;
  return type.bits == 32 ? static_cast<float>(value) : real_of_bits(bits_of_real(value, type), type);
}

Cell cell_of_bits(uint64_t bits, const Type& type) {
  Cell cell;
  if (type.is_float()) {
    cell.real = real_of_bits(bits, type);
  } else {
    cell.integer = wrapped(static_cast<int64_t>(bits), type.bits);
  }
  return cell;
}

uint64_t bits_of_cell(Cell cell, const Type& type) {
  return type.is_float() ? bits_of_real(cell.real, type) : static_cast<uint64_t>(cell.integer);
}

const std::map<std::string, OfReals> kOfReals = {
    {"arith.addf", [](const double* x) { return x[0] + x[1]; }},
    {"arith.subf", [](const double* x) { return x[0] - x[1]; }},
    {"arith.mulf", [](const double* x) { return x[0] * x[1]; }},
    {"arith.divf", [](const double* x) { return x[0] / x[1]; }},
    {"arith.remf", [](const double* x) { return std::fmod(x[0], x[1]); }},
    {"arith.negf", [](const double* x) { return -x[0]; }},
    {"arith.maxnumf", [](const double* x) { return std::fmax(x[0], x[1]); }},
    {"arith.minnumf", [](const double* x) { return std::fmin(x[0], x[1]); }},
    {"arith.maximumf", [](const double* x) { return not_a_number_first(x[0], x[1], true); }},
    {"arith.minimumf", [](const double* x) { return not_a_number_first(x[0], x[1], false); }},
    {"arith.extf", [](const double* x) { return x[0]; }},
    {"arith.truncf", [](const double* x) { return x[0]; }},
    {"tt.fp_to_fp", [](const double* x) { return x[0]; }},
    {"tt.precise_sqrt", [](const double* x) { return std::sqrt(x[0]); }},
    {"tt.precise_divf", [](const double* x) { return x[0] / x[1]; }},
    {"tt.clampf", [](const double* x) { return std::fmin(std::fmax(x[0], x[1]), x[2]); }},
    {"math.exp", [](const double* x) { return std::exp(x[0]); }},
    {"math.exp2", [](const double* x) { return std::exp2(x[0]); }},
    {"math.log", [](const double* x) { return std::log(x[0]); }},
    {"math.log2", [](const double* x) { return std::log2(x[0]); }},
    {"math.sin", [](const double* x) { return std::sin(x[0]); }},
    {"math.cos", [](const double* x) { return std::cos(x[0]); }},
    {"math.sqrt", [](const double* x) { return std::sqrt(x[0]); }},
    {"math.rsqrt", [](const double* x) { return 1 / std::sqrt(x[0]); }},
    {"math.absf", [](const double* x) { return std::fabs(x[0]); }},
    {"math.floor", [](const double* x) { return std::floor(x[0]); }},
    {"math.ceil", [](const double* x) { return std::ceil(x[0]); }},
    {"math.erf", [](const double* x) { return std::erf(x[0]); }},
    {"math.tanh", [](const double* x) { return std::tanh(x[0]); }},
    {"math.fma", [](const double* x) { return std::fma(x[0], x[1], x[2]); }},
    {"exp", [](const double* x) { return std::exp(x[0]); }},
    {"exp2", [](const double* x) { return std::exp2(x[0]); }},
    {"exp10", [](const double* x) { return std::pow(10, x[0]); }},
    {"expm1", [](const double* x) { return std::expm1(x[0]); }},
    {"log", [](const double* x) { return std::log(x[0]); }},
    {"log2", [](const double* x) { return std::log2(x[0]); }},
    {"log10", [](const double* x) { return std::log10(x[0]); }},
    {"log1p", [](const double* x) { return std::log1p(x[0]); }},
    {"sin", [](const double* x) { return std::sin(x[0]); }},
    {"cos", [](const double* x) { return std::cos(x[0]); }},
    {"tan", [](const double* x) { return std::tan(x[0]); }},
    {"asin", [](const double* x) { return std::asin(x[0]); }},
    {"acos", [](const double* x) { return std::acos(x[0]); }},
    {"atan", [](const double* x) { return std::atan(x[0]); }},
    {"atan2", [](const double* x) { return std::atan2(x[0], x[1]); }},
    {"sinh", [](const double* x) { return std::sinh(x[0]); }},
    {"cosh", [](const double* x) { return std::cosh(x[0]); }},
    {"tanh", [](const double* x) { return std::tanh(x[0]); }},
    {"asinh", [](const double* x) { return std::asinh(x[0]); }},
    {"acosh", [](const double* x) { return std::acosh(x[0]); }},
    {"atanh", [](const double* x) { return std::atanh(x[0]); }},
    {"erf", [](const double* x) { return std::erf(x[0]); }},
    {"erfc", [](const double* x) { return std::erfc(x[0]); }},
    {"erfinv", [](const double* x) { return inverse_of_erf(x[0]); }},
    {"lgamma", [](const double* x) { return std::lgamma(x[0]); }},
    {"tgamma", [](const double* x) { return std::tgamma(x[0]); }},
    {"pow", [](const double* x) { return std::pow(x[0], x[1]); }},
    {"sqrt", [](const double* x) { return std::sqrt(x[0]); }},
    {"rsqrt", [](const double* x) { return 1 / std::sqrt(x[0]); }},
    {"cbrt", [](const double* x) { return std::cbrt(x[0]); }},
    {"hypot", [](const double* x) { return std::hypot(x[0], x[1]); }},
    {"fmod", [](const double* x) { return std::fmod(x[0], x[1]); }},
    {"fabs", [](const double* x) { return std::fabs(x[0]); }},
    {"floor", [](const double* x) { return std::floor(x[0]); }},
    {"ceil", [](const double* x) { return std::ceil(x[0]); }},
    {"trunc", [](const double* x) { return std::trunc(x[0]); }},
    {"rint", [](const double* x) { return std::nearbyint(x[0]); }},
    {"nearbyint", [](const double* x) { return std::nearbyint(x[0]); }},
    {"copysign", [](const double* x) { return std::copysign(x[0], x[1]); }},
    {"nextafter", [](const double* x) { return std::nextafter(x[0], x[1]); }},
    {"fmul_rn", [](const double* x) { return x[0] * x[1]; }},
    {"fadd_rn", [](const double* x) { return x[0] + x[1]; }},
    {"fsub_rn", [](const double* x) { return x[0] - x[1]; }},
    {"fdiv_rn", [](const double* x) { return x[0] / x[1]; }},
};

const std::map<std::string, OfIntegers> kOfIntegers = {
    {"arith.addi", [](const int64_t* x, int) { return static_cast<int64_t>(uint64_t(x[0]) + x[1]); }},
    {"arith.subi", [](const int64_t* x, int) { return static_cast<int64_t>(uint64_t(x[0]) - x[1]); }},
    {"arith.muli", [](const int64_t* x, int) { return static_cast<int64_t>(uint64_t(x[0]) * x[1]); }},
    // What is divided by zero is masked, or undefined; the least number by -1 stops the processor.
    {"arith.divsi",
     [](const int64_t* x, int) {
       if (x[1] == -1) return opposite(x[0]);
       return x[1] ? x[0] / x[1] : 0;
     }},
    {"arith.remsi", [](const int64_t* x, int) { return x[1] && x[1] != -1 ? x[0] % x[1] : 0; }},
    {"arith.divui",
     [](const int64_t* x, int bits) -> int64_t {
       return x[1] ? unsigned_of(x[0], bits) / unsigned_of(x[1], bits) : 0;
     }},
    {"arith.remui",
     [](const int64_t* x, int bits) -> int64_t {
       return x[1] ? unsigned_of(x[0], bits) % unsigned_of(x[1], bits) : 0;
     }},
    {"arith.andi", [](const int64_t* x, int) { return x[0] & x[1]; }},
    {"arith.ori", [](const int64_t* x, int) { return x[0] | x[1]; }},
    {"arith.xori", [](const int64_t* x, int) { return x[0] ^ x[1]; }},
    {"arith.shli",
     [](const int64_t* x, int bits) -> int64_t { return x[1] < bits ? uint64_t(x[0]) << x[1] : 0; }},
    {"arith.shrsi", [](const int64_t* x, int bits) { return x[0] >> std::min<int64_t>(x[1], bits - 1); }},
    {"arith.shrui",
     [](const int64_t* x, int bits) -> int64_t {
       return x[1] < bits ? unsigned_of(x[0], bits) >> x[1] : 0;
     }},
    {"arith.maxsi", [](const int64_t* x, int) { return std::max(x[0], x[1]); }},
    {"arith.minsi", [](const int64_t* x, int) { return std::min(x[0], x[1]); }},
    {"arith.maxui",
     [](const int64_t* x, int bits) { return unsigned_of(x[0], bits) > unsigned_of(x[1], bits) ? x[0] : x[1]; }},
    {"arith.minui",
     [](const int64_t* x, int bits) { return unsigned_of(x[0], bits) < unsigned_of(x[1], bits) ? x[0] : x[1]; }},
    {"tt.mulhiui",
     [](const int64_t* x, int bits) {
       const auto product = static_cast<unsigned __int128>(unsigned_of(x[0], bits)) * unsigned_of(x[1], bits);
       return static_cast<int64_t>(product >> bits);
     }},
    {"math.absi", [](const int64_t* x, int) { return std::abs(x[0]); }},
    {"arith.index_cast", [](const int64_t* x, int) { return x[0]; }},
    {"arith.extsi", [](const int64_t* x, int bits) { return bits == 1 ? -x[0] : x[0]; }},
    {"arith.trunci", [](const int64_t* x, int) { return x[0]; }},
    {"arith.extui",
     [](const int64_t* x, int bits) { return static_cast<int64_t>(unsigned_of(x[0], bits)); }},
    {"tt.int_to_ptr", [](const int64_t* x, int) { return x[0]; }},
    {"tt.ptr_to_int", [](const int64_t* x, int) { return x[0]; }},
};

bool holds_for_integers(const std::string& how, int64_t a, int64_t b, int bits) {
  const bool is_unsigned = how[0] == 'u';
  const bool less = is_unsigned ? unsigned_of(a, bits) < unsigned_of(b, bits) : a < b;
  if (how == "eq") return a == b;
  if (how == "ne") return a != b;
  const std::string kind = how.substr(1);
  if (kind == "lt") return less;
  if (kind == "le") return less || a == b;
  if (kind == "gt") return !less && a != b;
  return !less;
}

bool holds_for_reals(const std::string& how, double a, double b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  if (how == "ord") return !unordered;
  if (how == "uno") return unordered;
  if (unordered) return how[0] == 'u';
  const std::string kind = how.substr(1);
  if (kind == "eq") return a == b;
  if (kind == "ne") return a != b;
  if (kind == "lt") return a < b;
  if (kind == "le") return a <= b;
  return kind == "gt" ? a > b : a >= b;
}

}  // namespace simulated::triton_ir
