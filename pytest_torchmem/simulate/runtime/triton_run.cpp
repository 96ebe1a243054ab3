#include "triton_elements.h"

#include "shared.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <stdexcept>

namespace simulated::triton_ir {
namespace {

// A kernel that makes more elements than this takes too long: a tenth of a second, or so.
constexpr size_t kMostElements = size_t{1} << 24;

struct Value {
  Type type;
  std::vector<Cell> cells;  // one for each element, rows first
};

[[noreturn]] void not_understood(const std::string& text) { throw std::runtime_error(text); }

size_t count_of(const std::vector<int64_t>& sizes) {
  size_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

// A number behind a word, as in `{axis = 1 : i32}`.
int64_t number_after(const std::string& text, const std::string& word) {
  const size_t at = text.find(word);
  if (at == std::string::npos) not_understood(text);
  return std::strtoll(text.c_str() + at + word.size(), nullptr, 10);
}

class Program {
 public:
  Program(const Kernel& kernel, const uint32_t grid[3], size_t& left, Blocks& written)
      : kernel_(kernel), grid_(grid), left_(left), written_(written), values_(kernel.values) {}

  void run(const uint32_t place[3], void** arguments) {
    place_ = place;
    exact_ = true;
    for (size_t at = 0; at < kernel_.parameters.size(); ++at) {
      const Type& type = kernel_.parameters[at];
      uint64_t bits = 0;
      std::memcpy(&bits, arguments[at], type.bytes());
      values_[kernel_.body.arguments[at]] = {type, {cell_of_bits(bits, type)}};
    }
    run(kernel_.body);
  }

 private:
  // The values that a region ends with.
  std::vector<Value> run(const Region& region) {
    for (const Operation& done : region.operations) {
      if (done.name == "scf.yield" || done.name.find(".return") != std::string::npos) {
        std::vector<Value> out;
        for (int place : done.given) out.push_back(values_[place]);
        return out;
      }
      run(done);
    }
    return {};
  }

  void run(const Operation& done) {
    const Handler handler = handler_of(done.name);
    const bool needs_type = handler != &Program::nothing && handler != &Program::constant &&
                            done.name.rfind("scf.", 0);
    if (!handler || (needs_type && done.types.empty())) not_understood(done.name);
    (this->*handler)(done);
    size_t made = 1;
    for (int place : done.made) made += values_[place].cells.size();
    if (made > left_) not_understood("too long");
    left_ -= made;
  }

  using Handler = void (Program::*)(const Operation&);

  static Handler handler_of(const std::string& name) {
    if (kOfReals.count(name)) return &Program::of_reals;
    if (kOfIntegers.count(name)) return &Program::of_integers;
    static const std::map<std::string, Handler> handlers = {
        {"arith.constant", &Program::constant},
        {"arith.cmpi", &Program::compare},
        {"arith.cmpf", &Program::compare},
        {"arith.select", &Program::select},
        {"arith.sitofp", &Program::to_real},
        {"arith.uitofp", &Program::to_real},
        {"arith.fptosi", &Program::to_integer},
        {"arith.fptoui", &Program::to_integer},
        {"arith.bitcast", &Program::reinterpret},
        {"tt.bitcast", &Program::reinterpret},
        {"tt.extern_elementwise", &Program::of_library},
        {"tt.get_program_id", &Program::own_place},
        {"tt.get_num_programs", &Program::size_of_grid},
        {"tt.make_range", &Program::range},
        {"tt.splat", &Program::broadcast},
        {"tt.unsplat", &Program::reshape},
        {"tt.broadcast", &Program::broadcast},
        {"tt.expand_dims", &Program::reshape},
        {"tt.reshape", &Program::reshape},
        {"tt.trans", &Program::transpose},
        {"tt.join", &Program::join},
        {"tt.split", &Program::split},
        {"tt.addptr", &Program::move_pointer},
        {"tt.load", &Program::load},
        {"tt.store", &Program::store},
        {"tt.atomic_rmw", &Program::change},
        {"tt.dot", &Program::product},
        {"tt.reduce", &Program::reduce},
        {"tt.scan", &Program::scan},
        {"scf.for", &Program::loop},
        {"scf.if", &Program::branch},
        {"tt.assert", &Program::nothing},
        {"tt.print", &Program::nothing},
        {"llvm.intr.assume", &Program::nothing},
        {"gpu.barrier", &Program::nothing},
        {"tt.debug_barrier", &Program::nothing},
        {"ttg.barrier", &Program::nothing},
    };
    const auto found = handlers.find(name);
    return found == handlers.end() ? nullptr : found->second;
  }

  const Value& given(const Operation& done, size_t number) const {
    if (number >= done.given.size()) not_understood(done.text);
    return values_[done.given[number]];
  }

  // The shape of the largest value that an operation is given, and the kind of its last type. Regions
  // of reductions are written for elements, and are run for tensors.
  Value like_given(const Operation& done) const {
    Value out;
    out.type = done.types.back();
    out.type.sizes.clear();
    size_t most = 0;
    for (size_t number = 0; number < done.given.size(); ++number) {
      const Value& value = given(done, number);
      if (value.cells.size() < most) continue;
      most = value.cells.size();
      out.type.sizes = value.type.sizes;
    }
    out.cells.resize(most);
    return out;
  }

  static Cell cell(const Value& value, size_t at) { return value.cells[value.cells.size() == 1 ? 0 : at]; }

  void keep(const Operation& done, Value value, size_t number = 0) {
    values_[done.made.at(number)] = std::move(value);
  }

  // --- elements ---------------------------------------------------------------------------------

  void of_reals(const Operation& done) { apply(done, kOfReals.at(done.name)); }

  void apply(const Operation& done, OfReals function) {
    Value out = like_given(done);
    const size_t count = std::min<size_t>(done.given.size(), 3);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      double x[3] = {};
      for (size_t number = 0; number < count; ++number) x[number] = cell(given(done, number), at).real;
      out.cells[at].real = rounded(function(x), out.type);
    }
    keep(done, std::move(out));
  }

  void of_integers(const Operation& done) {
    const OfIntegers function = kOfIntegers.at(done.name);
    Value out = like_given(done);
    const int bits = given(done, 0).type.bits;
    for (size_t at = 0; at < out.cells.size(); ++at) {
      int64_t x[2] = {};
      for (size_t number = 0; number < std::min<size_t>(done.given.size(), 2); ++number) {
        x[number] = cell(given(done, number), at).integer;
      }
      out.cells[at].integer = wrapped(function(x, bits), out.type.bits);
    }
    keep(done, std::move(out));
  }

  void of_library(const Operation& done) {
    const size_t start = done.text.find("__nv_");
    if (start == std::string::npos) not_understood(done.text);
    std::string name = done.text.substr(start + 5, done.text.find('"', start) - start - 5);
    auto found = kOfReals.find(name);
    if (found == kOfReals.end() && !name.empty() && name.back() == 'f') {
      name.pop_back();
      found = kOfReals.find(name);
    }
    if (found != kOfReals.end()) return apply(done, found->second);
    const bool not_a_number = name == "isnan" || name == "isnand", infinite = name == "isinf" || name == "isinfd";
    if (!not_a_number && !infinite) not_understood(done.text);
    Value out = like_given(done);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      const double x = cell(given(done, 0), at).real;
      out.cells[at].integer = not_a_number ? std::isnan(x) : std::isinf(x);
    }
    keep(done, std::move(out));
  }

  // `true` and `false` have no type.
  void constant(const Operation& done) {
    Value out;
    out.type.bits = 1;
    if (!done.types.empty()) out.type = done.types.back();
    const size_t dense = done.text.find("dense<");
    const size_t start = dense == std::string::npos ? done.text.find_first_not_of(' ') : dense + 6;
    const std::string text = done.text.substr(start);
    if (text[0] == '[' || text[0] == '"' || text[0] == '{') not_understood(done.text);
    Cell cell;
    if (out.type.is_float()) {
      cell = text.rfind("0x", 0) ? Cell{} : cell_of_bits(std::strtoull(text.c_str(), nullptr, 16), out.type);
      if (text.rfind("0x", 0)) cell.real = rounded(std::strtod(text.c_str(), nullptr), out.type);
    } else {
      cell.integer = text.rfind("true", 0) == 0 ? 1 : std::strtoll(text.c_str(), nullptr, 10);
    }
    out.cells.assign(count_of(out.type.sizes), cell);
    keep(done, std::move(out));
  }

  void compare(const Operation& done) {
    Value out = like_given(done);
    out.type.kind = Kind::kInteger;
    out.type.bits = 1;
    const size_t start = done.text.find_first_not_of(' ');
    const std::string how = done.text.substr(start, done.text.find(',') - start);
    const Value &a = given(done, 0), &b = given(done, 1);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      out.cells[at].integer =
          a.type.is_float() ? holds_for_reals(how, cell(a, at).real, cell(b, at).real)
                            : holds_for_integers(how, cell(a, at).integer, cell(b, at).integer, a.type.bits);
    }
    keep(done, std::move(out));
  }

  void select(const Operation& done) {
    Value out = like_given(done);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      out.cells[at] = cell(given(done, cell(given(done, 0), at).integer ? 1 : 2), at);
    }
    keep(done, std::move(out));
  }

  void to_real(const Operation& done) {
    Value out = like_given(done);
    const Value& x = given(done, 0);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      const int64_t whole = x.cells[at].integer;
      const bool is_signed = done.name == "arith.sitofp";
      const double real = is_signed ? static_cast<double>(x.type.bits == 1 ? -whole : whole)
                                    : static_cast<double>(unsigned_of(whole, x.type.bits));
      out.cells[at].real = rounded(real, out.type);
    }
    keep(done, std::move(out));
  }

  void to_integer(const Operation& done) {
    Value out = like_given(done);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      const double real = given(done, 0).cells[at].real;
      const bool fits = std::fabs(real) < 9.2e18;
      out.cells[at].integer = fits ? wrapped(static_cast<int64_t>(real), out.type.bits) : 0;
    }
    keep(done, std::move(out));
  }

  void reinterpret(const Operation& done) {
    Value out = like_given(done);
    const Value& x = given(done, 0);
    for (size_t at = 0; at < out.cells.size(); ++at) {
      out.cells[at] = cell_of_bits(bits_of_cell(x.cells[at], x.type), out.type);
    }
    keep(done, std::move(out));
  }

  // --- shapes -----------------------------------------------------------------------------------

  static size_t axis_of_grid(const Operation& done) {
    for (const char letter : {'x', 'y', 'z'}) {
      if (done.text.compare(0, 2, std::string(" ") + letter) == 0) return letter - 'x';
    }
    not_understood(done.text);
  }

  void own_place(const Operation& done) { keep_number(done, place_[axis_of_grid(done)]); }
  void size_of_grid(const Operation& done) { keep_number(done, grid_[axis_of_grid(done)]); }

  void keep_number(const Operation& done, int64_t number) {
    Value out;
    out.type = done.types.back();
    out.cells.resize(1);
    out.cells[0].integer = number;
    keep(done, std::move(out));
  }

  void range(const Operation& done) {
    Value out;
    out.type = done.types.back();
    out.cells.resize(count_of(out.type.sizes));
    const int64_t start = number_after(done.text, "start = ");
    for (size_t at = 0; at < out.cells.size(); ++at) out.cells[at].integer = start + at;
    keep(done, std::move(out));
  }

  // Makes each element of the last type from the given one whose place a function says.
  template <typename From>
  void gather(const Operation& done, const Value& from, From place_of) {
    Value out;
    out.type = done.types.back();
    out.type.kind = from.type.kind;
    out.cells.resize(count_of(out.type.sizes));
    std::vector<int64_t> at(out.type.sizes.size(), 0);
    for (Cell& made : out.cells) {
      made = from.cells[place_of(at)];
      for (size_t axis = at.size(); axis-- > 0 && ++at[axis] == out.type.sizes[axis];) at[axis] = 0;
    }
    keep(done, std::move(out));
  }

  void broadcast(const Operation& done) {
    const Value& from = given(done, 0);
    gather(done, from, [&](const std::vector<int64_t>& at) {
      size_t place = 0;
      for (size_t axis = 0; axis < from.type.sizes.size(); ++axis) {
        place = place * from.type.sizes[axis] + (from.type.sizes[axis] == 1 ? 0 : at[axis]);
      }
      return place;
    });
  }

  void reshape(const Operation& done) {
    Value out = given(done, 0);
    out.type.sizes = done.types.back().sizes;
    if (out.cells.size() != count_of(out.type.sizes)) not_understood(done.text);
    keep(done, std::move(out));
  }

  void transpose(const Operation& done) {
    const Value from = given(done, 0);
    std::vector<int64_t> order;
    size_t start = done.text.find("array<i32: ");
    if (start == std::string::npos) not_understood(done.text);
    for (const char* at = done.text.c_str() + start + 11; std::isdigit(*at); at += *at == ',' ? 2 : 0) {
      char* end = nullptr;
      order.push_back(std::strtoll(at, &end, 10));
      at = end;
    }
    gather(done, from, [&](const std::vector<int64_t>& at) {
      std::vector<int64_t> source(at.size());
      for (size_t axis = 0; axis < at.size(); ++axis) source[order[axis]] = at[axis];
      size_t place = 0;
      for (size_t axis = 0; axis < at.size(); ++axis) place = place * from.type.sizes[axis] + source[axis];
      return place;
    });
  }

  void join(const Operation& done) {
    Value out;
    out.type = done.types.back();
    const Value &a = given(done, 0), &b = given(done, 1);
    for (size_t at = 0; at < a.cells.size(); ++at) {
      out.cells.push_back(a.cells[at]);
      out.cells.push_back(b.cells[at]);
    }
    keep(done, std::move(out));
  }

  void split(const Operation& done) {
    const Value from = given(done, 0);
    for (size_t number = 0; number < 2; ++number) {
      Value out;
      out.type = from.type;
      out.type.sizes.pop_back();
      for (size_t at = number; at < from.cells.size(); at += 2) out.cells.push_back(from.cells[at]);
      keep(done, std::move(out), number);
    }
  }

  // --- memory -----------------------------------------------------------------------------------

  void move_pointer(const Operation& done) {
    Value out = like_given(done);
    out.type.kind = Kind::kPointer;
    out.type.bits = 64;
    out.type.target = given(done, 0).type.target;
    const int64_t bytes = out.type.target->bytes();
    for (size_t at = 0; at < out.cells.size(); ++at) {
      out.cells[at].integer =
          cell(given(done, 0), at).integer + bytes * cell(given(done, 1), at).integer;
    }
    keep(done, std::move(out));
  }

  // Where the elements lie that a mask lets through, in their order; 0 for the others.
  static std::vector<uintptr_t> places_of(const Value& pointers, const Value* mask) {
    std::vector<uintptr_t> places(pointers.cells.size(), 0);
    const size_t bytes = pointers.type.target->bytes();
    uintptr_t first = UINTPTR_MAX, last = 0;
    for (size_t at = 0; at < places.size(); ++at) {
      if (mask && !cell(*mask, at).integer) continue;
      places[at] = pointers.cells[at].integer;
      first = std::min(first, places[at]);
      last = std::max(last, places[at]);
    }
    const auto is_there = [&](uintptr_t place) {
      return is_device(reinterpret_cast<void*>(place)) &&
             is_device(reinterpret_cast<void*>(place + bytes - 1));
    };
    if (last && is_device_range(reinterpret_cast<void*>(first), last - first + bytes)) return places;
    for (uintptr_t place : places) {
      if (place && !is_there(place)) not_understood("memory of nobody");
    }
    return places;
  }

  bool is_exact_at(const std::vector<uintptr_t>& places, size_t bytes) const {
    uintptr_t first = UINTPTR_MAX, last = 0;
    for (uintptr_t place : places) {
      if (place) first = std::min(first, place), last = std::max(last, place);
    }
    if (!last || is_known(reinterpret_cast<void*>(first), last - first + bytes)) return true;
    return std::all_of(places.begin(), places.end(), [&](uintptr_t place) {
      return !place || is_known(reinterpret_cast<void*>(place), bytes);
    });
  }

  static Cell read(uintptr_t place, const Type& type) {
    uint64_t bits = 0;
    std::memcpy(&bits, reinterpret_cast<void*>(place), type.bytes());
    return cell_of_bits(bits, type);
  }

  void load(const Operation& done) {
    const Value& pointers = given(done, 0);
    Value out;
    out.type = *pointers.type.target;
    out.type.sizes = pointers.type.sizes;
    out.cells.resize(pointers.cells.size(), Cell{0});
    const auto places = places_of(pointers, done.given.size() > 1 ? &given(done, 1) : nullptr);
    for (size_t at = 0; at < places.size(); ++at) {
      if (places[at]) {
        out.cells[at] = read(places[at], out.type);
      } else if (done.given.size() > 2) {
        out.cells[at] = cell(given(done, 2), at);
      } else if (out.type.is_float()) {
        out.cells[at].real = 0;
      }
    }
    exact_ = exact_ && is_exact_at(places, out.type.bytes());
    keep(done, std::move(out));
  }

  static void write(uintptr_t place, Cell value, const Type& type) {
    const uint64_t bits = bits_of_cell(value, type);
    std::memcpy(reinterpret_cast<void*>(place), &bits, type.bytes());
  }

  // Says that values were left in these places.
  void note(std::vector<uintptr_t> places, size_t bytes) {
    std::sort(places.begin(), places.end());
    for (size_t at = 0; at < places.size();) {
      const size_t first = at;
      while (++at < places.size() && places[at] <= places[at - 1] + bytes) {
      }
      if (!places[first]) continue;
      note_values(reinterpret_cast<void*>(places[first]), places[at - 1] + bytes - places[first], exact_);
      note_block(places[first]);
    }
  }

  void note_block(uintptr_t place) {
    const auto after = written_.upper_bound(place);
    if (after != written_.begin() && place < std::prev(after)->second) return;
    written_.insert(block_of(reinterpret_cast<void*>(place)));
  }

  // A value that is not exact is no NaN, as elsewhere.
  Cell told(Cell value, const Type& type) const {
    if (!exact_ && type.is_float() && std::isnan(value.real)) value.real = 0;
    return value;
  }

  void store(const Operation& done) {
    const Value& pointers = given(done, 0);
    const Type type = *pointers.type.target;
    const auto places = places_of(pointers, done.given.size() > 2 ? &given(done, 2) : nullptr);
    for (size_t at = 0; at < places.size(); ++at) {
      if (places[at]) write(places[at], told(cell(given(done, 1), at), type), type);
    }
    note(places, type.bytes());
  }

  void change(const Operation& done) {
    const Value& pointers = given(done, 0);
    const Type type = *pointers.type.target;
    const size_t start = done.text.find_first_not_of(' ');
    const std::string how = done.text.substr(start, done.text.find(',') - start);
    const auto places = places_of(pointers, done.given.size() > 2 ? &given(done, 2) : nullptr);
    exact_ = exact_ && is_exact_at(places, type.bytes());
    Value out = given(done, 1);
    for (size_t at = 0; at < places.size(); ++at) {
      if (!places[at]) continue;
      const Cell before = read(places[at], type), with = cell(given(done, 1), at);
      write(places[at], told(changed(how, before, with, type), type), type);
      out.cells[out.cells.size() == 1 ? 0 : at] = before;
    }
    note(places, type.bytes());
    if (!done.made.empty()) keep(done, std::move(out));
  }

  static Cell changed(const std::string& how, Cell before, Cell with, const Type& type) {
    Cell out = with;
    if (how == "fadd") {
      out.real = rounded(before.real + with.real, type);
    } else if (how == "add") {
      out.integer = wrapped(before.integer + with.integer, type.bits);
    } else if (how == "max" || how == "min") {
      out.integer = (how == "max") == (before.integer > with.integer) ? before.integer : with.integer;
    } else if (how == "and") {
      out.integer = before.integer & with.integer;
    } else if (how == "or") {
      out.integer = before.integer | with.integer;
    } else if (how != "exch") {
      not_understood(how);
    }
    return out;
  }

  // --- products, reductions, and what runs regions ------------------------------------------------

  void product(const Operation& done) {
    const Value a = given(done, 0), b = given(done, 1);
    Value out = given(done, 2);
    if (a.type.sizes.size() != 2 || !a.type.is_float()) not_understood(done.text);
    const int64_t rows = a.type.sizes[0], inner = a.type.sizes[1], columns = b.type.sizes[1];
    if (static_cast<size_t>(rows * inner * columns) > left_) not_understood("too long");
    left_ -= rows * inner * columns;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        double sum = out.cells[row * columns + column].real;
        for (int64_t at = 0; at < inner; ++at) {
          sum += a.cells[row * inner + at].real * b.cells[at * columns + column].real;
        }
        out.cells[row * columns + column].real = rounded(sum, out.type);
      }
    }
    keep(done, std::move(out));
  }

  // Each `step`-th slice along an axis from the first on, as one value.
  static Value slices(const Value& from, size_t axis, int64_t first, int64_t step) {
    Value out;
    out.type = from.type;
    const int64_t size = from.type.sizes[axis];
    out.type.sizes[axis] = (size - first + step - 1) / step;
    size_t inner = 1;
    for (size_t at = axis + 1; at < from.type.sizes.size(); ++at) inner *= from.type.sizes[at];
    const size_t outer = from.cells.size() / (inner * size);
    out.cells.reserve(outer * inner * out.type.sizes[axis]);
    for (size_t block = 0; block < outer; ++block) {
      for (int64_t at = first; at < size; at += step) {
        const Cell* start = &from.cells[(block * size + at) * inner];
        out.cells.insert(out.cells.end(), start, start + inner);
      }
    }
    return out;
  }

  std::vector<Value> combined(const Region& region, const std::vector<Value>& a, const std::vector<Value>& b) {
    for (size_t number = 0; number < a.size(); ++number) {
      values_[region.arguments.at(number)] = a[number];
      values_[region.arguments.at(a.size() + number)] = b[number];
    }
    return run(region);
  }

  std::vector<Value> operands_of(const Operation& done) const {
    std::vector<Value> found;
    for (size_t number = 0; number < done.given.size(); ++number) found.push_back(given(done, number));
    return found;
  }

  static std::vector<Value> slices(const std::vector<Value>& from, size_t axis, int64_t first, int64_t step) {
    std::vector<Value> found;
    for (const Value& value : from) found.push_back(slices(value, axis, first, step));
    return found;
  }

  // Neighbours first: sizes are powers of two.
  void reduce(const Operation& done) {
    const size_t axis = number_after(done.text, "axis = ");
    std::vector<Value> all = operands_of(done);
    while (all[0].type.sizes.at(axis) > 1) {
      all = combined(done.regions.at(0), slices(all, axis, 0, 2), slices(all, axis, 1, 2));
    }
    for (size_t number = 0; number < all.size(); ++number) {
      all[number].type.sizes.erase(all[number].type.sizes.begin() + axis);
      keep(done, std::move(all[number]), number);
    }
  }

  void scan(const Operation& done) {
    const size_t axis = number_after(done.text, "axis = ");
    const bool reverse = done.text.find("reverse = true") != std::string::npos;
    const std::vector<Value> all = operands_of(done);
    const int64_t size = all[0].type.sizes.at(axis);
    std::vector<Value> out = all, before;
    for (int64_t number = 0; number < size; ++number) {
      const int64_t at = reverse ? size - 1 - number : number;
      std::vector<Value> here = slices(all, axis, at, size);
      before = number ? combined(done.regions.at(0), before, here) : here;
      for (size_t value = 0; value < out.size(); ++value) put(before[value], out[value], axis, at);
    }
    for (size_t value = 0; value < out.size(); ++value) keep(done, std::move(out[value]), value);
  }

  static void put(const Value& slice, Value& into, size_t axis, int64_t place) {
    size_t inner = 1;
    for (size_t at = axis + 1; at < into.type.sizes.size(); ++at) inner *= into.type.sizes[at];
    for (size_t at = 0; at < slice.cells.size(); ++at) {
      into.cells[(at / inner * into.type.sizes[axis] + place) * inner + at % inner] = slice.cells[at];
    }
  }

  // `%i = %first to %end step %step iter_args(%a = %b, ...)`
  void loop(const Operation& done) {
    std::vector<Value> carried;
    for (size_t at = 5; at < done.given.size(); at += 2) carried.push_back(given(done, at));
    const Value first = given(done, 1);
    const int64_t end = given(done, 2).cells[0].integer, step = given(done, 3).cells[0].integer;
    if (step <= 0) not_understood(done.text);
    for (int64_t number = first.cells[0].integer; number < end; number += step) {
      Value counted = first;
      counted.cells[0].integer = number;
      values_[done.given[0]] = std::move(counted);
      for (size_t at = 0; at < carried.size(); ++at) values_[done.given[4 + 2 * at]] = std::move(carried[at]);
      carried = run(done.regions.at(0));
    }
    for (size_t at = 0; at < done.made.size(); ++at) keep(done, std::move(carried.at(at)), at);
  }

  void branch(const Operation& done) {
    const bool holds = given(done, 0).cells[0].integer;
    if (!holds && done.regions.size() < 2) return;
    std::vector<Value> out = run(done.regions[holds ? 0 : 1]);
    for (size_t at = 0; at < done.made.size(); ++at) keep(done, std::move(out.at(at)), at);
  }

  void nothing(const Operation&) {}

  const Kernel& kernel_;
  const uint32_t* grid_;
  const uint32_t* place_ = nullptr;
  size_t& left_;
  Blocks& written_;
  std::vector<Value> values_;
  bool exact_ = true;  // all that this program has loaded
};

}  // namespace

bool is_short(const Kernel& kernel, const uint32_t grid[3]) {
  const size_t programs = size_t{grid[0]} * grid[1] * grid[2];
  return programs <= kMostElements && programs * kernel.elements <= kMostElements;
}

bool run(const Kernel& kernel, const uint32_t grid[3], void** arguments, Blocks& written) {
  size_t left = kMostElements;
  try {
    Program program(kernel, grid, left, written);
    uint32_t place[3];
    for (place[2] = 0; place[2] < grid[2]; ++place[2]) {
      for (place[1] = 0; place[1] < grid[1]; ++place[1]) {
        for (place[0] = 0; place[0] < grid[0]; ++place[0]) program.run(place, arguments);
      }
    }
  } catch (const std::exception& problem) {
    if (std::getenv("SIMULATED_CUDA_DEBUG")) std::fprintf(stderr, "not run: %s\n", problem.what());
    return false;
  }
  return true;
}

}  // namespace simulated::triton_ir
