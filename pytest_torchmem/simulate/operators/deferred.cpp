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

// A tensor of a call: part of what was noted, or a value.
struct Piece {
  std::shared_ptr<const Place> place;
  size_t first_byte = 0;
  std::shared_ptr<const Kept> kept;
};

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

// A copy of a value, or of one element where all are zero; null where there is no room for it.
std::shared_ptr<const Kept> keep(const at::Tensor& tensor) {
  const at::Tensor there = on_host(tensor);
  if (tensor.numel() && torchmem_is_zero(tensor.const_data_ptr(), span_of(tensor))) {
    const std::vector<int64_t> none(tensor.dim(), 0);
    return std::make_shared<Kept>(at::zeros({}, there.options()).as_strided(tensor.sizes(), none));
  }
  const size_t bytes = bytes_of(tensor);
  if (bytes > kMostKept || Kept::together + bytes > kMostKeptTogether) return nullptr;
  return std::make_shared<Kept>(there.clone());
}

}  // namespace

class Deferred {
 public:
  Deferred(const Operator& op, const at::Generator& generator)
      : op(op), generator(generator), exact(!op.random) {}

  void add(const Piece& piece, const at::Tensor& tensor, bool is_exact) {
    pieces.push_back(piece);
    bytes += bytes_of(tensor);
    exact = exact && (piece.place ? piece.place->call->exact : is_exact);
    if (piece.place) depth = std::max(depth, piece.place->call->depth + 1);
  }

  void add_out(const at::Tensor& out) const {
    outs.push_back({out.sizes().vec(), out.strides().vec(), out.scalar_type()});
    bytes += bytes_of(out);
  }

  const Operator& op;
  const at::Generator generator;
  Stack arguments;            // tensors of the GPU are there for their sizes alone
  std::vector<Piece> pieces;  // one for each of them
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
  // All bytes that it would read and write.
  size_t bytes_of_calls(const Deferred& call) {
    if (!counted_.insert({&call, true}).second) return 0;
    size_t bytes = call.bytes;
    for (const Piece& piece : call.pieces) {
      if (piece.place) bytes += bytes_of_calls(*piece.place->call);
    }
    return bytes;
  }

  // What a call has left, as memory that lies as the GPU's; raises where the CPU does not take it.
  const std::vector<at::Tensor>& values_of(const Deferred& call) {
    const auto found = values_.find(&call);
    if (found != values_.end()) return found->second;
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

  Stack arguments_of(const Deferred& call, Taken taken) {
    Stack arguments;
    size_t number = 0;
    for (const IValue& value : call.arguments) {
      const bool is_device = value.isDevice() && value.toDevice().is_cuda();
      arguments.push_back(is_device ? IValue(at::Device(at::kCPU))
                                    : with_each(value, [&](const at::Tensor& tensor) {
                                        return taken(value_of(call.pieces[number++], tensor));
                                      }));
    }
    return arguments;
  }

  at::Tensor value_of(const Piece& piece, const at::Tensor& tensor) {
    at::Tensor own = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       tensor.options().device(at::kCPU));
    if (piece.kept) return own.copy_(piece.kept->value);
    if (!piece.place) return own;
    const at::Tensor& whole = values_of(*piece.place->call).at(piece.place->number);
    return own.copy_(at::from_blob(static_cast<char*>(whole.data_ptr()) + piece.first_byte,
                                   tensor.sizes(), tensor.strides(), own.options()));
  }

  static std::vector<at::Tensor> left_by(const Deferred& call, Stack arguments) {
    std::vector<at::Tensor> left;
    for (size_t at = 0; at < arguments.size(); ++at) {
      if (call.op.written[at]) {
        for_each_tensor(arguments[at], [&](const at::Tensor& out) { left.push_back(out); });
      }
    }
    const Stack results = compute_on_host(call.op, std::move(arguments), call.generator);
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

  std::unordered_map<const Deferred*, bool> counted_;
  std::unordered_map<const Deferred*, std::vector<at::Tensor>> values_;
};

// Memory for which something is noted.
struct Part {
  std::shared_ptr<const Place> place;
  char* start;
  size_t bytes, first_byte;

  bool holds(const char* first, size_t count) const {
    return start <= first && first + count <= start + bytes;
  }
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

// Whether there are several notes, or one of a part, and nothing beside them is missing.
bool is_noted_in_parts(const std::vector<Part>& parts, const at::Tensor& tensor) {
  const auto* at = static_cast<const char*>(tensor.const_data_ptr());
  const char* end = at + span_of(tensor);
  if (parts.empty() || (parts.size() == 1 && parts[0].holds(at, end - at))) return false;
  for (const Part& part : parts) {
    if (at < part.start && torchmem_is_missing(at, part.start - at)) return false;
    at = part.start + part.bytes;
  }
  return at >= end || !torchmem_is_missing(at, end - at);
}

// What an argument is, if it can be told later as well.
std::optional<Piece> piece_of(const at::Tensor& tensor, bool exact) {
  const std::vector<Part> parts = parts_of(tensor);
  const auto* start = static_cast<const char*>(tensor.const_data_ptr());
  if (parts.size() == 1 && parts[0].holds(start, span_of(tensor))) {
    return Piece{parts[0].place, parts[0].first_byte + (start - parts[0].start), nullptr};
  }
  if (!exact && is_missing(tensor)) return std::nullopt;
  auto kept = keep(tensor);
  return kept ? std::make_optional(Piece{nullptr, 0, std::move(kept)}) : std::nullopt;
}

void fill(const Part& part) {
  if (!torchmem_is_missing(part.start, part.bytes)) return;  // it was filled before
  Computation together;
  const Deferred& call = *part.place->call;
  if (together.bytes_of_calls(call) > room_on_host()) return;
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
                                      const at::Generator& generator) {
  size_t count = 0;
  for (const IValue& value : arguments) for_each_on_gpu(value, [&](const auto&) { ++count; });
  const auto& returns = op.schema->returns();
  const bool makes_one = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
  if (count > (makes_one ? kMostTensors : kMostLists)) return nullptr;
  // Rows that were written one after another: later some may be others.
  for (size_t at = 0; at < arguments.size(); ++at) {
    for_each_on_gpu(arguments[at], [&](const at::Tensor& tensor) {
      if (!op.out[at] && is_noted_in_parts(parts_of(tensor), tensor)) compute_deferred(tensor);
    });
  }
  const Unobserved unobserved;
  auto call = std::make_shared<Deferred>(op, generator);
  bool told = true;
  for (size_t at = 0; told && at < arguments.size(); ++at) {
    const bool is_read = !op.out[at] && !leaves_out(*op.schema, arguments, at);
    for_each_on_gpu(arguments[at], [&](const at::Tensor& tensor) {
      if (!told) return;
      const bool exact = !is_read || is_exact(tensor);
      const auto piece = is_read ? piece_of(tensor, exact) : std::make_optional<Piece>();
      told = piece.has_value();
      if (!told) return;
      call->add(*piece, tensor, exact);
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
  for (const Part& part : parts) fill(part);
}

size_t room_on_host() {
  size_t room = number_in("/proc/meminfo", "MemAvailable:") * kKiB;
  const size_t most = number_in("/sys/fs/cgroup/memory.max", "");
  if (most) room = std::min(room, most - std::min(most, number_in("/sys/fs/cgroup/memory.current", "")));
  return room / 4;
}

}  // namespace simulated
