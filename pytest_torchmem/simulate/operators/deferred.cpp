#include "deferred.h"

#include "device_memory.h"
#include "unobserved.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <unordered_map>

namespace simulated {
namespace {

constexpr size_t kMostKept = 16 * kMiB;           // bytes of a value that is copied
constexpr size_t kMostKeptTogether = 256 * kMiB;  // bytes of all that are kept
constexpr size_t kMostLists = 16;                 // tensors of a call that makes many: an optimizer's
constexpr size_t kMostTensors = 1024;             // tensors of a call that makes one: they are put together
constexpr int kMostDepth = 64;                    // calls that rest on each other

// The memory of a value that was noted, from a byte of it on.
struct Place {
  std::shared_ptr<const Deferred> call;
  size_t number;  // of the tensors that the call has written and returned
};

// A value that is kept for calls that rest on it.
struct Kept {
  explicit Kept(at::Tensor value) : value(std::move(value)), bytes(this->value.storage().nbytes()) {
    together += bytes;
  }
  ~Kept() { together -= bytes; }

  const at::Tensor value;
  const size_t bytes;
  static inline std::atomic<size_t> together{0};
};

// Bytes of a tensor of a call: part of what was noted, or a value.
struct Piece {
  std::shared_ptr<const Place> place;
  size_t first_byte = 0;  // of the place
  std::shared_ptr<const Kept> kept;
  size_t start = 0, bytes = 0;  // from the tensor's first byte on
};

// A tensor of a call: rows that were written one after another have a piece each.
struct Whole {
  std::vector<Piece> pieces;
  bool exact = true;
};

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

// One row of those that an expanded tensor shows many times.
at::Tensor without_repeats(at::Tensor tensor) {
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (!tensor.stride(axis) && tensor.size(axis) > 1) tensor = tensor.narrow(axis, 0, 1);
  }
  return tensor;
}

// A copy of a value, or of one element where all are zero; null where there is no room for it.
std::shared_ptr<const Kept> keep(const at::Tensor& tensor) {
  const at::Tensor there = without_repeats(on_host(tensor));
  if (tensor.numel() && torchmem_is_zero(tensor.const_data_ptr(), span_of(tensor))) {
    const std::vector<int64_t> none(there.dim(), 0);
    return std::make_shared<Kept>(at::zeros({}, there.options()).as_strided(there.sizes(), none));
  }
  const size_t bytes = bytes_of(there);
  if (bytes > kMostKept || Kept::together + bytes > kMostKeptTogether) return nullptr;
  return std::make_shared<Kept>(there.clone());
}

}  // namespace

class Deferred {
 public:
  Deferred(const Operator& op, const Stack& given, const std::optional<Draw>& draw)
      : op(op), draw(draw), exact(!op.random || draws_as_gpu(op.drawn_by, given)) {}

  void add(Whole whole, const at::Tensor& tensor) {
    bytes += bytes_of(tensor);
    exact = exact && whole.exact;
    for (const Piece& piece : whole.pieces) {
      if (piece.place) depth = std::max(depth, piece.place->call->depth + 1);
    }
    wholes.push_back(std::move(whole));
  }

  void add_out(const at::Tensor& out) const {
    outs.push_back({out.sizes().vec(), out.strides().vec(), out.scalar_type()});
    bytes += bytes_of(out);
  }

  const Operator& op;
  const std::optional<Draw> draw;
  Stack arguments;            // tensors of the GPU are there for their sizes alone
  std::vector<Whole> wholes;  // one for each of them
  int depth = 1;
  bool exact;
  // Known once the call has run.
  struct Out {
    std::vector<int64_t> sizes, strides;
    at::ScalarType type;
  };
  mutable std::vector<Out> outs;
  mutable size_t bytes = 0;  // that it reads and writes
};

namespace {

// The calls that are computed together.
class Computation {
 public:
  // Whether all bytes that it would read and write, with those before, fit on the host.
  bool has_room_for(const Deferred& call) {
    count(call);
    return bytes_ <= room_on_host();
  }

  // What a call has left, as memory that lies as the GPU's; raises where the CPU does not take it.
  const std::vector<at::Tensor>& values_of(const Deferred& call) {
    const auto found = values_.find(&call);
    if (found != values_.end()) return found->second;
    // What fails there is not tried once more with other kinds of numbers here.
    for (const Whole& whole : call.wholes) {
      for (const Piece& piece : whole.pieces) {
        if (piece.place) values_of(*piece.place->call);
      }
    }
    std::vector<at::Tensor> left;
    const Taken as_given = [](const at::Tensor& given) { return given; };
    for (const Taken taken : {as_given, Taken(in_single_precision), Taken(as_integers)}) {
      try {
        left = left_by(call, arguments_of(call, taken));
        break;
      } catch (const c10::Error&) {
        if (taken == Taken(as_integers)) throw;
      }
    }
    return values_[&call] = std::move(left);
  }

 private:
  using Taken = at::Tensor (*)(const at::Tensor&);

  void count(const Deferred& call) {
    if (!counted_.insert({&call, true}).second) return;
    bytes_ += call.bytes;
    for (const Whole& whole : call.wholes) {
      for (const Piece& piece : whole.pieces) {
        if (piece.place) count(*piece.place->call);
      }
    }
  }

  Stack arguments_of(const Deferred& call, Taken taken) {
    Stack arguments;
    size_t number = 0;
    for (const IValue& value : call.arguments) {
      const bool is_device = value.isDevice() && value.toDevice().is_cuda();
      arguments.push_back(is_device ? IValue(at::Device(at::kCPU))
                                    : with_each(value, [&](const at::Tensor& tensor) {
                                        return taken(value_of(call.wholes[number++], tensor));
                                      }));
    }
    return arguments;
  }

  at::Tensor value_of(const Whole& whole, const at::Tensor& tensor) {
    at::Tensor own = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       tensor.options().device(at::kCPU));
    own._set_conj(tensor.is_conj());
    own._set_neg(tensor.is_neg());
    auto* start = static_cast<char*>(own.data_ptr());
    for (const Piece& piece : whole.pieces) {
      if (piece.place) {
        const at::Tensor& noted = values_of(*piece.place->call).at(piece.place->number);
        std::memcpy(start + piece.start, static_cast<char*>(noted.data_ptr()) + piece.first_byte, piece.bytes);
      } else if (piece.bytes) {
        at::from_blob(start + piece.start, {static_cast<int64_t>(piece.bytes)}, at::dtype(at::kByte))
            .copy_(piece.kept->value);
      } else {
        without_repeats(own).copy_(piece.kept->value);
      }
    }
    return own;
  }

  static std::vector<at::Tensor> left_by(const Deferred& call, Stack arguments) {
    std::vector<at::Tensor> left;
    for (size_t at = 0; at < arguments.size(); ++at) {
      if (call.op.written[at]) {
        for_each_tensor(arguments[at], [&](const at::Tensor& out) { left.push_back(out); });
      }
    }
    const Stack results = compute_on_host(call.op, std::move(arguments), call.draw);
    const auto& declared = call.op.schema->returns();
    for (size_t at = 0; at < results.size(); ++at) {
      if (at < declared.size() && declared[at].alias_info()) continue;
      for_each_tensor(results[at], [&](const at::Tensor& out) { left.push_back(out); });
    }
    TORCH_CHECK(left.size() == call.outs.size(), "other tensors than the GPU's");
    for (size_t at = 0; at < left.size(); ++at) {
      const auto& [sizes, strides, type] = call.outs[at];
      TORCH_CHECK(left[at].sizes() == at::IntArrayRef(sizes), "other sizes than the GPU's");
      left[at] = at::empty_strided(sizes, strides, at::dtype(type)).copy_(left[at]);
      if (!call.exact) make_finite(left[at]);
    }
    return left;
  }

  size_t bytes_ = 0;
  std::unordered_map<const Deferred*, bool> counted_;
  std::unordered_map<const Deferred*, std::vector<at::Tensor>> values_;
};

// Memory for which something is noted.
struct Part {
  std::shared_ptr<const Place> place;
  char* start;
  size_t bytes, first_byte;
};

using Noted = std::shared_ptr<const Place>;
void drop(void* noted) { delete static_cast<Noted*>(noted); }

void note(const Part& part) {
  torchmem_defer(part.start, part.bytes, part.first_byte, new Noted(part.place), drop);
}

std::vector<Part> parts_of(const at::Tensor& tensor) {
  std::vector<Part> parts;
  const auto take = [](void* noted, void* start, size_t bytes, size_t first_byte, void* parts) {
    static_cast<std::vector<Part>*>(parts)->push_back(
        {*static_cast<Noted*>(noted), static_cast<char*>(start), bytes, first_byte});
  };
  torchmem_each_deferred(tensor.const_data_ptr(), span_of(tensor), take, &parts);
  return parts;
}

// What is noted of a tensor, and the bytes beside it; nothing where some of them are missing.
std::optional<Whole> whole_of(const at::Tensor& tensor, const std::vector<Part>& parts) {
  Whole whole;
  auto* const start = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  char *const end = start + span_of(tensor), *at = start;
  const auto keep_until = [&](char* until) {
    if (at >= until) return true;
    const at::Tensor beside = at::for_blob(at, {until - at})
                                  .options(tensor.options().dtype(at::kByte))
                                  .target_device(tensor.device())
                                  .make_tensor();
    whole.exact = whole.exact && is_exact(beside);
    if (is_missing(beside)) return false;
    whole.pieces.push_back({nullptr, 0, keep(beside), static_cast<size_t>(at - start), bytes_of(beside)});
    return whole.pieces.back().kept != nullptr;
  };
  for (const Part& part : parts) {
    if (!keep_until(part.start)) return std::nullopt;
    at = std::max(at, part.start);
    char* const until = std::min(end, part.start + part.bytes);
    whole.exact = whole.exact && part.place->call->exact;
    whole.pieces.push_back({part.place, part.first_byte + (at - part.start), nullptr,
                            static_cast<size_t>(at - start), static_cast<size_t>(until - at)});
    at = until;
  }
  return keep_until(end) ? std::make_optional(std::move(whole)) : std::nullopt;
}

// What an argument is, if it can be told later as well.
std::optional<Whole> whole_of(const at::Tensor& tensor) {
  const std::vector<Part> parts = parts_of(tensor);
  if (!parts.empty()) {
    if (auto whole = whole_of(tensor, parts)) return whole;
  }
  const bool exact = is_exact(tensor);
  if (!exact && is_missing(tensor)) return std::nullopt;
  auto kept = keep(tensor);
  return kept ? std::make_optional(Whole{{{nullptr, 0, std::move(kept)}}, exact}) : std::nullopt;
}

void fill(const Part& part, Computation& together) {
  if (!torchmem_is_missing(part.start, part.bytes)) return;  // it was filled before
  const Deferred& call = *part.place->call;
  if (!together.has_room_for(call)) together = Computation();
  if (!together.has_room_for(call)) return;
  try {
    const at::Tensor& whole = together.values_of(call).at(part.place->number);
    std::memcpy(part.start, static_cast<const char*>(whole.data_ptr()) + part.first_byte, part.bytes);
  } catch (const std::exception&) {
    return;  // it stays what nobody computed
  }
  torchmem_note_values(part.start, part.bytes, call.exact, false);
  note(part);
}

size_t number_in(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (name.empty()) return std::strtoull(word.c_str(), nullptr, 10);
    if (word == name && file >> word) return std::strtoull(word.c_str(), nullptr, 10);
  }
  return 0;
}

}  // namespace

std::shared_ptr<const Deferred> defer(const Operator& op, const Stack& arguments,
                                      const std::optional<Draw>& draw) {
  size_t count = 0;
  for (const IValue& value : arguments) for_each_on_gpu(value, [&](const auto&) { ++count; });
  const auto& returns = op.schema->returns();
  const bool makes_one = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
  if (count > (makes_one ? kMostTensors : kMostLists)) return nullptr;
  const Unobserved unobserved;
  auto call = std::make_shared<Deferred>(op, arguments, draw);
  bool told = true;
  for (size_t at = 0; told && at < arguments.size(); ++at) {
    const bool is_read = !op.out[at] && !leaves_out(*op.schema, arguments, at);
    for_each_on_gpu(arguments[at], [&](const at::Tensor& tensor) {
      if (!told) return;
      auto whole = is_read ? whole_of(tensor) : std::make_optional<Whole>();
      told = whole.has_value();
      if (told) call->add(*std::move(whole), tensor);
    });
    const bool is_generator = arguments[at].isGenerator();
    call->arguments.push_back(is_generator ? IValue() : without_owner(arguments[at]));
  }
  return told && call->depth <= kMostDepth ? call : nullptr;
}

void note_deferred(const std::shared_ptr<const Deferred>& call, const std::vector<at::Tensor>& outs) {
  for (const at::Tensor& out : outs) call->add_out(out);
  for (size_t at = 0; at < outs.size(); ++at) {
    if (!is_dense(outs[at]) || !outs[at].numel()) continue;
    auto* start = static_cast<char*>(const_cast<void*>(outs[at].const_data_ptr()));
    note({std::make_shared<const Place>(Place{call, at}), start, bytes_of(outs[at]), 0});
  }
}

void compute_deferred(const at::Tensor& tensor) {
  if (!is_on_gpu(tensor)) return;
  const std::vector<Part> parts = parts_of(tensor);
  if (parts.empty()) return;
  Saved::before_writes();  // for the operator that this one is part of
  const Unobserved unobserved;
  Computation together;
  for (const Part& part : parts) fill(part, together);
}

size_t room_on_host() {
  size_t room = number_in("/proc/meminfo", "MemAvailable:") * kKiB;
  const size_t most = number_in("/sys/fs/cgroup/memory.max", "");
  if (most) room = std::min(room, most - std::min(most, number_in("/sys/fs/cgroup/memory.current", "")));
  return room / 4;
}

}  // namespace simulated
