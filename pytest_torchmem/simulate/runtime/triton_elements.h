// Elements of a kernel's values, and the functions of them that its language and CUDA's library have.
#pragma once

#include "triton_ir.h"

#include <cstdint>
#include <map>
#include <string>

namespace simulated::triton_ir {

union Cell {
  int64_t integer;
  double real;
};

// Each number has the width of its type.
int64_t wrapped(int64_t value, int bits);
uint64_t unsigned_of(int64_t value, int bits);
double rounded(double value, const Type& type);

// An element as memory holds it, and back.
Cell cell_of_bits(uint64_t bits, const Type& type);
uint64_t bits_of_cell(Cell cell, const Type& type);

// A function gets all its arguments at once; `bits` is the width of the first.
using OfReals = double (*)(const double*);
using OfIntegers = int64_t (*)(const int64_t*, int bits);

// By the operation's name, or by that of a function of CUDA's library without `__nv_` and `f`.
extern const std::map<std::string, OfReals> kOfReals;
extern const std::map<std::string, OfIntegers> kOfIntegers;

// Comparisons, by the language's words: `slt`, `uge`, `oeq`, `uno`.
bool holds_for_integers(const std::string& how, int64_t a, int64_t b, int bits);
bool holds_for_reals(const std::string& how, double a, double b);

}  // namespace simulated::triton_ir
