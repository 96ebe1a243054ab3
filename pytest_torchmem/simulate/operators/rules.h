// What is told apart among operators: which are left alone, how large the tensors may be, which
// shapes depend on values, and what is chosen where values are not known.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace simulated {

using Arguments = torch::jit::Stack;

// How an argument says where to take or leave values: along the axis that is told before it, along
// each axis in turn, as a class of each row, as a row, or as an element of all.
enum class Indexed { kNothing, kAxis, kEachAxis, kClass, kRow, kElement };

struct Rule {
  bool heavy = false;             // takes more time than it has bytes
  bool host_reads = false;        // its kernel's host part reads a number: a length, or equality
  bool counts_changes = false;    // the number is how often a sorted row changes
  bool counts_along_axis = false; // the number is how long the result is along an axis that is given
  bool counts_true = false;       // of truth values the number is how many are true
  bool tells_shape = false;       // its kernel's host part reads how long its result is
  bool compares = false;          // returns a mask: as many numbers are compared as a mask may have
  bool picks = false;             // reads no more of its first argument than it returns
  bool chooses = false;           // returns places, of the largest or of those that are drawn
  bool looks = false;             // finds values, or says that there are some
  bool looks_for_nan = false;     // says which values are finite, or none
  bool finds_finite = false;      // the former
  bool finds_equal = false;       // says which values are equal to another, or
  bool finds_other = false;       // which are not
  bool finds_all = false;         // says whether all of a mask is set
  bool is_check = false;          // does so for a check of torch's own
  bool asserts = false;           // fails where what it is given is known to be false
  bool reads_for_itself = false;  // what its kernel's host part reads decides no shape
  bool runtime_writes = false;    // the runtime copies or sets what this writes, where it can
  bool overwrites = false;        // what stood where it writes does not matter
  // Looks for what overflowed: what is not exact did not, and its second argument stays as it is.
  bool looks_for_overflow = false;
  std::vector<size_t> written;    // arguments that it writes and does not declare so
  std::vector<size_t> unread;     // arguments whose values do not count
  // Has a kernel for the CPU under another name, and with other arguments.
  const char* stand_in = nullptr;
  Arguments (*for_stand_in)(const Arguments& arguments) = nullptr;
  // Computes what no single operator of the CPU does; raises where it does not take the arguments.
  Arguments (*compute)(const Arguments& arguments) = nullptr;
  size_t axis_argument = 0;       // where it is told along which axis to choose; 0 if it does not
  Indexed indexed = Indexed::kNothing;

  // Products have an overload for a result of another kind, and the CPU has no kernel for it.
  void take_overload_for_type(const std::string& name);
  // How many bytes a tensor may have for the operator to be computed.
  size_t most_bytes(at::ScalarType type) const;
  // Whether its answer is the same for whatever values: whether they are finite, or equal themselves.
  bool is_never_in_doubt(const Arguments& given) const;
  // That answer, for each element.
  bool is_true_without_doubt(const Arguments& given) const;
  // The number that is read back, of what the CPU's kernel was given and returned.
  long answer(const Arguments& given, const Arguments& results) const;
  // The same where no value is known: all values differ in a row, and two tensors are equal.
  std::optional<long> answer_unseen(const Arguments& given) const;
  // What is not exact has not overflowed, as `isfinite` and `isinf` ask.
  void find_no_infinity(const Arguments& arguments, const Arguments& returned) const;
  // Of equal values that are not exact, row r takes number r, then r + 1, ...: a router that knows
  // nothing gives each expert as much as the others.
  void choose(const Arguments& arguments, const Arguments& returned) const;
  // What the kernel asserts of its indices where they are known not to hold it; "" otherwise.
  std::string index_out_of_bounds(const Arguments& given) const;
};

Rule rule_of(const std::string& name);

// Whether an operator only makes, looks at or describes tensors.
bool leaves_values_alone(const std::string& name);

// Whether what an argument holds does not count: the first one of `beta * self + ...` with a beta of
// 0, or what a batch norm has kept of a batch that it was not normalized by.
bool leaves_out(const c10::FunctionSchema& schema, const Arguments& arguments, size_t number);

// Values that are not exact are no NaN: programs look for it, to leave a step out.
void make_finite(const at::Tensor& values);

}  // namespace simulated
