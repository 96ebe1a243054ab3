// The operators of the simulated GPU: torch's own kernel runs first, so that memory is taken as on
// the GPU, and launches what computes nothing. Where all tensors are small, the operator's kernel for
// the CPU then computes the same on the same memory, which is the host's. Where they are not, what a
// kernel would have written reads zero and counts as not exact.
//
// This is put between the dispatcher and torch's kernels when the GPU is first looked for, and before the
// next operator where a library is loaded later. Above it nothing changes: autograd, autocast, modes,
// tracing and the profiler are over by then.

#include "deferred.h"
#include "device_memory.h"
#include "host_copies.h"
#include "operator.h"
#include "rules.h"
#include "sparse.h"
#include "tensors.h"
#include "unobserved.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace simulated {
namespace {

Stack without_owners(const Stack& values) {
  Stack seen;
  for (const IValue& value : values) seen.push_back(without_owner(value));
  return seen;
}

// --- random numbers ---------------------------------------------------------------------------------

Draw draw_of(const IValue& given, at::DeviceIndex device) {
  try {
    const at::Generator generator =
        given.isGenerator()
            ? given.toGenerator()
            : at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
    return {generator.current_seed(), generator.get_offset()};
  } catch (const c10::Error&) {  // beside a capture
    return {};
  }
}

// A draw of a graph: torch writes to the device where a launch begins.
struct CapturedDraw {
  CapturedDraw() : is_there(torchmem_captured_draw(&seed, &offset, &further)) {}
  Draw draw() const { return {*seed, *offset + further}; }

  const uint64_t *seed, *offset;
  uint64_t further;
  bool is_there;
};

// The draw of a captured call that others are part of is its own: it may have been made before theirs.
struct OwnDraw {
  OwnDraw() { torchmem_exchange_draw(of_whole); }
  ~OwnDraw() {
    if (of_whole[3]) torchmem_exchange_draw(of_whole);
  }
  uint64_t of_whole[4] = {};
};

// --- a call -------------------------------------------------------------------------------------------

// Of more, the first one is chosen: to look at all of them takes too long.
constexpr size_t kMostChosenFrom = 256 * kMiB;
// Of larger values that can be computed the host reads zeros.
constexpr size_t kMostReadByHost = 16 * kMiB;

bool says_out_of_bounds(const std::string& error) {
  for (const char* words : {"out of bounds", "out of range", "invalid max index", "between 0 and 1"}) {
    if (error.find(words) != std::string::npos) return true;
  }
  return false;
}

class Call {
 public:
  Call(const Operator& op, const Stack& arguments, const std::optional<Draw>& captured = {})
      : op_(op), arguments_(arguments), draw_(captured) {
    computable_ = op.on_cpu || op.rule.compute;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      for_each_on_gpu(arguments_[at], [&](const at::Tensor& tensor) {
        if (device_ < 0) device_ = tensor.device().index();
        if (at || !op_.rule.picks) count(tensor);
        is_given_ = true;
        integers_ = integers_ && at::isIntegralType(tensor.scalar_type(), true);
      });
      if (arguments_[at].isDevice() && device_ < 0) device_ = arguments_[at].toDevice().index();
    }
    if (op_.rule.host_reads) compute_arguments();
    look();
    if (op_.rule.looks_for_overflow && !exact_) computable_ = false;
    if (computable_ && op_.random && !draw_) {
      draw_ = draw_of(given_generator(), std::max<int>(device_, 0));
    }
    if (can_be_deferred()) deferred_ = defer(op_, arguments_, draw_);
    if (!deferred_ && missing_ && (is_small_ || decides())) {
      compute_arguments();
      look();
    }
    if (!is_computed()) {
      answer_anyhow();
      return;
    }
    Saved::before_writes();  // for the operator that this one is part of
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!op_.written[at]) continue;
      for_each_on_gpu(arguments_[at], [&](const at::Tensor& tensor) {
        if (!op_.out[at] || is_read(tensor)) saved_.emplace_back(tensor);
      });
    }
    // A shape that depends on values has to be known before the kernel takes memory for it.
    if (op_.rule.host_reads && compute()) {
      const Unobserved unobserved;
      if (op_.rule.compares && missing_ && may_differ()) torchmem_note_decision(kCount);
      answer(op_.rule.answer(arguments_, results_), exact_);
    } else {
      answer_anyhow();
    }
  }

  ~Call() {
    if (answers_) torchmem_end_answers();
    const Unobserved unobserved;
    results_.clear();
  }

  // After the kernel: leaves values in what it returned, and in what it would have written.
  void finish(const Stack& returned, long writes) {
    if (op_.rule.runtime_writes && torchmem_writes() != writes) return;
    for (const IValue& value : returned) {
      for_each_on_gpu(value, [&](const at::Tensor& out) {
        count(out);
        integers_ = integers_ && (at::isIntegralType(out.scalar_type(), true) || (is_given_ && is_small(out)));
      });
    }
    const bool computed = is_computed() && (computed_ || compute());
    const bool writes_given = std::find(op_.written.begin(), op_.written.end(), true) != op_.written.end();
    // Of integers it has made larger numbers of another kind, which was not known before.
    if (!computed && !deferred_ && !writes_given && can_be_deferred()) {
      deferred_ = defer(op_, arguments_, draw_);
    }
    saved_.clear();
    computed ? deliver(returned) : forget(returned);
    if (deferred_) note_deferred(deferred_, left_by(returned));
    // A shape that rests on what nobody computed: the GPU would have made another one.
    if (op_.rule.tells_shape && (missing_ || !computed)) torchmem_note_decision(kShape);
    if (!computed && failed_assertion_.empty()) {
      failed_assertion_ = op_.rule.index_out_of_bounds(arguments_);
    }
    if (op_.rule.finds_all && !deferred_ && (!computed || missing_ || (op_.rule.is_check && !exact_))) {
      fill(returned, true, !op_.rule.is_check);
    }
    if (!computed && !deferred_ && op_.rule.is_never_in_doubt(arguments_)) {
      fill(returned, op_.rule.is_true_without_doubt(arguments_), false);
    }
  }

  // Whether all that it is given is exact, and small enough to be computed.
  bool knows_all() const { return is_computed() && exact_; }

  // What another library's kernel has returned is as long as values say that it did not know.
  void resize(Stack* stack, size_t below) {
    if (!is_computed() || !(computed_ || compute())) return;
    for (size_t at = 0; at < results_.size(); ++at) {
      IValue& returned = (*stack)[below + at];
      if (!results_[at].isTensor() || !returned.isTensor() || !is_on_gpu(returned.toTensor())) continue;
      const at::Tensor &result = results_[at].toTensor(), &target = returned.toTensor();
      if (result.sizes() != target.sizes()) returned = at::empty(result.sizes(), target.options());
    }
  }

  // What the kernel would have asserted, where values are known not to hold it; "" otherwise.
  const std::string& failed_assertion() const { return failed_assertion_; }

 private:
  template <typename Call>
  void for_each_read(Call call) const {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!op_.out[at] && !leaves_out(*op_.schema, arguments_, at)) for_each_on_gpu(arguments_[at], call);
    }
  }

  void compute_arguments() const {
    if (computable_) for_each_read(compute_deferred);
  }

  // What is known of the values that are given.
  void look() {
    exact_ = !op_.random || draws_as_gpu(op_.drawn_by, arguments_);
    missing_ = indexed_ = lost_ = false;
    if (!computable_) return;
    for_each_read([&](const at::Tensor& tensor) {
      const bool exact = is_exact(tensor);
      exact_ = exact_ && exact;
      missing_ = missing_ || (!exact && is_missing(tensor));
      if (at::isIntegralType(tensor.scalar_type(), false)) (exact ? indexed_ : lost_) = true;
    });
  }

  bool decides() const {
    const bool decides = integers_ || op_.rule.chooses || op_.rule.compares || op_.rule.looks;
    return decides && op_.of_torch && !op_.rule.heavy;
  }

  void answer(long number, bool exact) {
    answers_ = true;
    torchmem_answer_reads(number, exact);
  }

  // Two tensors are equal if nobody knows better: who goes on by that may go another way.
  void answer_anyhow() {
    if (!op_.rule.host_reads) return;
    if (op_.rule.compares && may_differ()) torchmem_note_decision(kCount);
    if (const auto number = op_.rule.answer_unseen(arguments_)) answer(*number, false);
  }

  bool may_differ() const {
    const at::Tensor &one = arguments_[0].toTensor(), &other = arguments_[1].toTensor();
    return one.sizes() == other.sizes() && one.numel() && !one.is_same(other) && (missing_ || !is_computed());
  }

  void count(const at::Tensor& tensor) {
    total_ += bytes_of(tensor);
    // The CPU adds up short integers as long ones, of which it makes a copy.
    const bool widens = at::isIntegralType(tensor.scalar_type(), true);
    on_host_ += widens ? tensor.numel() * sizeof(int64_t) : bytes_of(tensor);
    is_small_ = is_small_ && is_small(tensor) && (op_.rule.compares || total_ <= 8 * kMiB);
  }

  bool is_small(const at::Tensor& tensor) const {
    return bytes_of(tensor) <= op_.rule.most_bytes(tensor.scalar_type());
  }

  // Integers and masks decide shapes, counts and branches, and cost no more than their bytes: they are
  // computed at any size, and so is what chooses among values. What rests on nothing is not worth it.
  bool is_computed() const {
    if (!computable_ || deferred_) return false;
    if (is_small_) return true;
    return decides() && !missing_ && on_host_ <= room_on_host();
  }

  // What is not computed may be computed later.
  bool can_be_deferred() const {
    if (!computable_ || !op_.of_torch || op_.rule.host_reads || op_.rule.asserts || op_.rule.is_check) return false;
    return (missing_ || !is_computed()) && (is_small_ || !op_.rule.heavy);
  }

  std::vector<at::Tensor> left_by(const Stack& returned) const {
    std::vector<at::Tensor> left;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (op_.written[at]) for_each_on_gpu(arguments_[at], [&](auto& out) { left.push_back(out); });
    }
    const auto& declared = op_.schema->returns();
    for (size_t at = 0; at < returned.size(); ++at) {
      if (at < declared.size() && declared[at].alias_info()) continue;
      for_each_on_gpu(returned[at], [&](const at::Tensor& out) { left.push_back(out); });
    }
    return left;
  }

  // In `torch.exp(x, out=x)` what stood where it writes does matter.
  bool is_read(const at::Tensor& out) const {
    bool read = false;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (op_.out[at]) continue;
      for_each_on_gpu(arguments_[at], [&](const at::Tensor& tensor) {
        read = read || tensor.const_data_ptr() == out.const_data_ptr();
      });
    }
    return read && out.numel();
  }

  IValue given_generator() const {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (arguments_[at].isGenerator()) return arguments_[at];
    }
    return {};
  }

  bool compute() {
    const Unobserved unobserved;
    return compute([](const at::Tensor& on_host) { return on_host; }) || compute_as(in_single_precision) ||
           compute_as(as_integers);
  }

  // With another kind of numbers, where the CPU does not take these.
  template <typename Taken>
  bool compute_as(Taken taken) {
    bool changes = false;
    for (const IValue& value : arguments_) {
      for_each_on_gpu(value, [&](const at::Tensor& tensor) {
        const at::Tensor none = at::empty({0}, tensor.options().device(at::kCPU));
        changes = changes || taken(none).scalar_type() != tensor.scalar_type();
      });
    }
    return changes && failed_assertion_.empty() && compute(taken);
  }

  template <typename Taken>
  bool compute(Taken taken) {
    try {
      for (const Saved& saved : saved_) saved.restore();
      Stack given;
      std::vector<std::pair<at::Tensor, at::Tensor>> written;  // where it is to be, and where it is
      for (size_t at = 0; at < arguments_.size(); ++at) {
        given.push_back(seen_from_host(arguments_[at], [&](const at::Tensor& there) {
          const at::Tensor other = taken(there);
          if (op_.written[at] && !other.is_same(there)) written.emplace_back(there, other);
          return other;
        }));
      }
      results_ = compute_on_host(op_, std::move(given), draw_);
      for (auto& [there, other] : written) there.copy_(other);
      return computed_ = true;
    } catch (const c10::Error& error) {
      const std::string said = error.what_without_backtrace();
      // Of what is taken by an index, the index alone has to be known.
      const bool knows_indices = exact_ || (indexed_ && !lost_);
      if (says_out_of_bounds(said) ? knows_indices : op_.rule.asserts && exact_) failed_assertion_ = said;
      return false;
    } catch (const std::exception&) {
      return false;  // it does not take these on the CPU
    }
  }

  // Copies the results to where the kernel would have left them.
  void deliver(const Stack& returned) {
    const Unobserved unobserved;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (op_.written[at]) for_each_on_gpu(arguments_[at], [&](auto& out) { settle(out); });
    }
    const auto& declared = op_.schema->returns();
    for (size_t at = 0; at < returned.size(); ++at) {
      if (at < declared.size() && declared[at].alias_info()) continue;
      std::vector<at::Tensor> computed;
      if (at < results_.size()) {
        for_each_tensor(results_[at], [&](const at::Tensor& result) { computed.push_back(result); });
      }
      size_t number = 0;
      for_each_tensor(returned[at], [&](const at::Tensor& target) {
        const at::Tensor result = number < computed.size() ? computed[number] : at::Tensor();
        if (is_on_gpu(target) && !was_given(target)) deliver(result, target);
        ++number;
      });
    }
    if (exact_) return;
    op_.rule.choose(arguments_, returned);
    op_.rule.find_no_infinity(arguments_, returned);
  }

  // Of values that nobody computed any choice is as good as another, and whether they are finite is
  // told as it should be: what follows from that is a value like one that was drawn.
  bool rests_on_missing(const at::Tensor& out) const {
    if (!missing_ || op_.rule.is_check) return false;
    return !is_choice(out) && !op_.rule.is_never_in_doubt(arguments_);
  }

  // A place among values that are no integers.
  bool is_choice(const at::Tensor& out) const {
    return op_.rule.chooses && at::isIntegralType(out.scalar_type(), false) &&
           !at::isIntegralType(arguments_[0].toTensor().scalar_type(), true);
  }

  void deliver(const at::Tensor& result, const at::Tensor& target) {
    // The kernels of the CPU and of the GPU leave some results out, each others.
    if (!result.defined() || result.sizes() != target.sizes()) return forget_values(target);
    at::Tensor there = on_host(target);
    at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), there, result, false);
    settle(target);
  }

  void settle(const at::Tensor& tensor) {
    if (!exact_) make_finite(on_host(tensor));
    note_values(tensor, exact_, rests_on_missing(tensor));
  }

  void forget(const Stack& returned) {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!op_.written[at] || (op_.rule.looks_for_overflow && at == 1)) continue;
      for_each_on_gpu(arguments_[at], forget_values);
    }
    const auto& declared = op_.schema->returns();
    for (size_t at = 0; at < returned.size(); ++at) {
      if (at < declared.size() && declared[at].alias_info()) continue;
      for_each_on_gpu(returned[at], [&](const at::Tensor& out) {
        if (!was_given(out)) forget_values(out);
      });
    }
    if (!op_.rule.chooses || deferred_) return;
    const Unobserved unobserved;
    if (total_ <= kMostChosenFrom) op_.rule.choose(arguments_, returned);
    for (const IValue& value : returned) {
      for_each_on_gpu(value, [&](const at::Tensor& out) {
        if (is_choice(out)) note_values(out, false);
      });
    }
  }

  // Whether all is well cannot be known of what was not computed: a check of that kind passes. Whether it is
  // finite is told as it should be.
  static void fill(const Stack& returned, bool value, bool rests_on_missing) {
    const Unobserved unobserved;
    for_each_on_gpu(returned[0], [&](const at::Tensor& out) {
      if (bytes_of(out) > (rests_on_missing ? 4 * kMiB : room_on_host())) return;
      on_host(out).fill_(value);
      note_values(out, false, rests_on_missing);
    });
  }

  // Some operators return an argument, and do not declare so.
  bool was_given(const at::Tensor& returned) const {
    bool given = false;
    for (const IValue& argument : arguments_) {
      for_each_on_gpu(argument, [&](const at::Tensor& tensor) {
        given = given || tensor.const_data_ptr() == returned.const_data_ptr();
      });
    }
    return given && returned.numel();
  }

  const Operator& op_;
  const Stack arguments_;
  Stack results_;
  std::deque<Saved> saved_;
  std::optional<Draw> draw_;
  std::shared_ptr<const Deferred> deferred_;
  std::string failed_assertion_;
  int device_ = -1;
  size_t total_ = 0, on_host_ = 0;
  bool computable_, is_small_ = true, integers_ = true, is_given_ = false;
  bool exact_ = true, missing_ = false, computed_ = false, answers_ = false;
  bool indexed_ = false, lost_ = false;  // integers are given that are exact, and that are not
};

// A copy to the host is the runtime's.
bool writes_to_host(const Operator& op, const Stack& stack) {
  const IValue& written = stack[stack.size() - op.written.size()];
  return op.rule.runtime_writes && !is_on_gpu(written.toTensor());
}

// The host reads all of a tensor. Who saves weights or compares a mask with labels does so, too, and decides
// nothing by them; places, lengths and counts are read for what they decide, if they are not shown.
void read_by_host(const IValue& written, const IValue& read) {
  bool missing = false;
  for_each_on_gpu(read, [&](const at::Tensor& tensor) {
    const at::ScalarType type = tensor.scalar_type();
    const bool decides = at::isIntegralType(type, true);
    if (decides || bytes_of(tensor) <= kMostReadByHost) compute_deferred(tensor);
    missing = is_missing(tensor);
    if (missing) torchmem_note_decision(type == at::kLong || type == at::kInt ? kCount : kNumber);
  });
  note_host_copy(written.toTensor(), missing);
}

// What nobody computed comes back from the host.
void write_from_host(const Operator& op, const Stack& arguments) {
  if (!op.rule.runtime_writes || arguments.size() < 2 || !arguments[1].isTensor()) return;
  if (holds_missing(arguments[1].toTensor())) note_values(arguments[0].toTensor(), false, true);
}

Stack last(const Stack& stack, size_t count) { return Stack(stack.end() - count, stack.end()); }

// --- a call that is captured into a graph: it is computed at each launch, with what is there then ----

struct Captured {
  const Operator& op;
  Stack arguments, returned;
  bool runtime_wrote = false;
  std::optional<CapturedDraw> draw;
  std::optional<Call> call;

  void begin() {
    call.emplace(op, arguments, draw && draw->is_there ? std::make_optional(draw->draw()) : std::nullopt);
  }
  void finish() {
    if (!runtime_wrote) call->finish(returned, torchmem_writes());
    call.reset();
  }
};

using Step = std::function<void()>;
void take(void* step) { (*static_cast<Step*>(step))(); }
void drop(void* step) { delete static_cast<Step*>(step); }

// The stream on which this thread starts work on a GPU; null if nobody can say.
void* current_stream(c10::DeviceIndex device) {
  using StreamOf = void* (*)(const c10::Stream*);
  static const auto stream_of = reinterpret_cast<StreamOf>(
      dlsym(dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "_ZNK3c104cuda10CUDAStream6streamEv"));
  if (!stream_of) return nullptr;
  const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
  const c10::Device here = device < 0 ? gpu.getDevice() : c10::Device(c10::DeviceType::CUDA, device);
  const c10::Stream stream = gpu.getStream(here);
  return stream_of(&stream);
}

// The stream of a call whose work is captured; null for any other call.
void* captured_stream(const Stack& arguments) {
  if (!torchmem_captures()) return nullptr;
  c10::DeviceIndex device = -1;
  for (const IValue& argument : arguments) {
    for_each_on_gpu(argument, [&](const at::Tensor& tensor) { device = tensor.device().index(); });
  }
  void* stream = current_stream(device);
  return torchmem_is_capturing(stream) ? stream : nullptr;
}

void run_captured(const Handle& handle, const Operator& op, c10::DispatchKeySet keys, Stack* stack,
                  void* stream) {
  const size_t count = op.written.size(), below = stack->size() - count;
  const Stack arguments = last(*stack, count);
  const std::shared_ptr<Captured> captured(new Captured{op, without_owners(arguments)});
  torchmem_capture(stream, take, drop, new Step([captured] { captured->begin(); }));
  const long writes = torchmem_writes();
  {
    const OwnDraw own;
    op.kernel.callBoxed(handle, keys, stack);
    captured->draw.emplace();
  }
  captured->arguments = without_owners(arguments);  // the kernel may have given one its size
  captured->returned = without_owners(last(*stack, stack->size() - below));
  captured->runtime_wrote = op.rule.runtime_writes && torchmem_writes() != writes;
  torchmem_capture(stream, take, drop, new Step([captured] { captured->finish(); }));
}

// Another library may compute with torch's operators alone, and then has all values. What it computes
// with kernels of its own is what its kernel for the CPU computes.
void run_of_others(const Handle& handle, const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.written.size(), below = stack->size() - count;
  const Stack arguments = last(*stack, count);
  if (captured_stream(arguments)) return op.kernel.callBoxed(handle, keys, stack);
  Call call(op, arguments);
  const long launches = torchmem_launches_of_others();
  {
    const Overlooked reads(call.knows_all());
    op.kernel.callBoxed(handle, keys, stack);
  }
  if (torchmem_launches_of_others() == launches) return;
  call.resize(stack, below);
  call.finish(last(*stack, stack->size() - below), torchmem_writes());
}

void run(const Handle& handle, const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!op.of_torch) return run_of_others(handle, op, keys, stack);
  const size_t count = op.written.size(), below = stack->size() - count;
  if (writes_to_host(op, *stack)) {
    const IValue* given = &stack->end()[-static_cast<long>(count)];
    read_by_host(given[0], given[1]);
    return op.kernel.callBoxed(handle, keys, stack);
  }
  const Stack arguments = last(*stack, count);
  if (void* stream = captured_stream(arguments)) {
    return run_captured(handle, op, keys, stack, stream);
  }
  Call call(op, arguments);
  const long writes = torchmem_writes();
  {
    const Overlooked reads(op.rule.reads_for_itself && call.knows_all());
    op.kernel.callBoxed(handle, keys, stack);
  }
  call.finish(last(*stack, stack->size() - below), writes);
  write_from_host(op, arguments);
  TORCH_CHECK(call.failed_assertion().empty(), "CUDA error: device-side assert triggered\n",
              call.failed_assertion(), " (a real GPU says so later, and works no more after that)");
}

// The host reads a number. One that is not exact has not overflowed: a loop that ends at an infinite loss
// goes on.
void run_read(const Handle& handle, const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor tensor = stack->back().toTensor();
  compute_deferred(tensor);
  if (is_on_gpu(tensor) && is_missing(tensor)) torchmem_note_decision(kind_of(tensor));
  op.kernel.callBoxed(handle, keys, stack);
  const IValue& read = stack->back();
  if (read.isDouble() && std::isinf(read.toDouble()) && is_on_gpu(tensor) && !is_exact(tensor)) {
    stack->back() = 0.0;
  }
}

// --- putting it there ---------------------------------------------------------------------------------

// An operator's entry, which its handle keeps to itself.
template <auto Member>
struct Entry {
  friend auto& entry_of(const Handle& handle) { return (handle.*Member)->op; }
};
auto& entry_of(const Handle& handle);
template struct Entry<&Handle::operatorDef_>;

bool is_of_torch(const c10::OperatorName& name) { return !name.name.rfind("aten::", 0); }

bool reads_number(const Handle& handle) {
  return handle.operator_name().name == "aten::_local_scalar_dense";
}

bool is_wanted(const Handle& handle) {
  const c10::OperatorName& name = handle.operator_name();
  if (reads_number(handle)) return true;
  if (!is_of_torch(name)) {
    return handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
           handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) && writes_values(handle.schema());
  }
  // Of these a kernel for any device calls the GPU's, and no operator of its own.
  const bool composed = name.name == "aten::copy_" || name.name == "aten::linalg_lstsq" ||
                        name.name == "aten::conj_physical_" || name.name == "aten::mode" ||
                        name.name == "aten::_is_all_true";
  if (!handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !composed) return false;
  const Rule rule = rule_of(name.name);
  const bool tells_values = rule.host_reads || rule.asserts;
  return (tells_values || writes_values(handle.schema())) && !leaves_values_alone(name.name);
}

Operator described(const Handle& handle) {
  Operator op;
  op.schema = &handle.schema();
  op.kernel = kernel_of(handle, c10::DispatchKey::CUDA);
  op.of_torch = is_of_torch(handle.operator_name());
  op.rule = op.of_torch ? rule_of(handle.operator_name().name) : Rule{true};  // how heavy is not known
  if (op.of_torch && handle.operator_name().overload_name.rfind("dtype", 0) == 0) {
    op.rule.take_overload_for_type(handle.operator_name().name);
  }
  if (op.rule.stand_in) {
    op.on_cpu = c10::Dispatcher::singleton().findSchema({op.rule.stand_in, ""});
  } else if (handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    op.on_cpu = handle;
  }
  // Attention counts among them for its dropout, with which it is not computed.
  op.random = handle.hasTag(at::Tag::nondeterministic_seeded) && !op.rule.stand_in && !op.rule.compute;
  if (op.random) op.drawn_by = drawn_by(handle.operator_name().name);
  for (const auto& argument : handle.schema().arguments()) {
    op.written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    op.out.push_back(argument.is_out() || (op.rule.overwrites && op.written.back()));
  }
  for (size_t at : op.rule.written) op.written[at] = true;
  for (size_t at : op.rule.unread) op.out[at] = true;
  return op;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void compute_registered();
std::atomic<bool> more_registered{false};

// The kernel that is put in the place of an operator's own.
struct Computing : c10::OperatorKernel {
  explicit Computing(const Handle& handle) : op(described(handle)), reads(reads_number(handle)) {}
  void operator()(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
    if (more_registered) compute_registered();
    (reads ? run_read : run)(handle, op, keys, stack);
  }
  const Operator op;
  const bool reads;
};

// The operators that torch and other libraries have registered since somebody last looked.
struct Registered : c10::OpRegistrationListener {
  void onOperatorRegistered(const Handle& handle) override {
    const std::lock_guard<std::mutex> lock(guard);
    names.push_back(handle.operator_name());
    more_registered = true;
  }
  void onOperatorDeregistered(const Handle&) override {}

  std::vector<c10::OperatorName> take() {
    const std::lock_guard<std::mutex> lock(guard);
    more_registered = false;
    return std::exchange(names, {});
  }

  std::mutex guard;
  std::vector<c10::OperatorName> names;
};

auto& registered = *new Registered();
auto& kept = *new std::vector<c10::RegistrationHandleRAII>();

void compute_registered() {
  static std::mutex& one_at_a_time = *new std::mutex();
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  // torch warns of a kernel that is put in the place of another.
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : registered.take()) {
    const auto handle = dispatcher.findSchema(name);
    if (!handle || !is_wanted(*handle)) continue;
    auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Computing>(*handle));
    kept.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedKernel(std::move(kernel)),
        std::nullopt, nullptr, "torchmem"));
  }
}

}  // namespace

// Whether an operator leaves values in a tensor.
bool writes_values(const c10::FunctionSchema& schema) {
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    writes = writes || (argument.alias_info() && argument.alias_info()->isWrite());
  }
  for (const auto& returned : schema.returns()) {
    writes = writes || (!returned.alias_info() &&
                        returned.type()->str().find("Tensor") != std::string::npos);
  }
  return writes;
}

c10::KernelFunction kernel_of(const Handle& handle, c10::DispatchKey key) {
  return entry_of(handle).lookup(c10::DispatchKeySet(key));
}

}  // namespace simulated

extern "C" void torchmem_compute_small_values() {
  using namespace simulated;
  // It is told at once of all that are there.
  kept.push_back(c10::Dispatcher::singleton().addRegistrationListener(
      std::unique_ptr<c10::OpRegistrationListener>(&registered)));
  compute_registered();
  compute_small_values_in_parts(kept);
  watch_host_copies(kept);
  torchmem_before_writes(Saved::before_writes);
}
