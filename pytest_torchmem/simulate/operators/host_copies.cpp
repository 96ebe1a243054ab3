#include "host_copies.h"

#include "device_memory.h"
#include "operator.h"
#include "sparse.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>

namespace simulated {
namespace {

// A part of a storage. While the storage is known here, no other one has its address.
struct Part {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;  // of the tensor when it was written; autograd counts that write later
  const char *first, *end;

  bool is_unchanged(uint32_t now) const { return now - version <= 1; }
};

struct Copies {
  std::mutex guard;
  std::unordered_map<const c10::StorageImpl*, std::vector<Part>> parts;
  size_t most = 64;  // storages until those that are gone are looked for
};

Copies& copies() {
  static Copies& copies = *new Copies();
  return copies;
}
std::atomic<bool> any{false};
at::CallbackHandle following = 0;  // what the host computes; off while there is no copy

// A file does not say of its bytes that nobody computed them: these many were saved.
constexpr const char* kSavesAndLoads = "/torch/serialization.py";
std::mutex& saved_guard = *new std::mutex();
auto& saved = *new std::set<size_t>();

bool was_saved(size_t bytes) {
  const std::lock_guard<std::mutex> lock(saved_guard);
  return saved.count(bytes);
}

uint32_t version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

bool is_of_host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.numel() && !tensor.is_nested();
}

void drop_what_is_gone(Copies& all) {
  if (all.parts.size() < all.most) return;
  for (auto each = all.parts.begin(); each != all.parts.end();) {
    each = each->second.empty() || each->second[0].storage.expired() ? all.parts.erase(each) : std::next(each);
  }
  all.most = std::max<size_t>(64, 2 * all.parts.size());
}

void note(const at::Tensor& on_host, bool missing, uint32_t version) {
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.guard);
  drop_what_is_gone(all);
  const c10::StorageImpl* storage = on_host.storage().unsafeGetStorageImpl();
  const auto found = all.parts.find(storage);
  if (found == all.parts.end() && !missing) return;
  std::vector<Part>& parts = all.parts[storage];
  const auto* first = static_cast<const char*>(on_host.const_data_ptr());
  const char* end = first + span_of(on_host);
  // This write changes none of the others.
  parts.erase(std::remove_if(parts.begin(), parts.end(),
                             [&](const Part& part) {
                               const bool within = first <= part.first && part.end <= end;
                               return within || !part.is_unchanged(version);
                             }),
              parts.end());
  for (Part& part : parts) part.version = version;
  if (missing) parts.push_back({on_host.storage().getWeakStorageImpl(), version, first, end});
  if (parts.empty()) all.parts.erase(storage);
  if (any == !all.parts.empty()) return;
  any = !all.parts.empty();
  any ? at::reenableCallback(following) : at::disableCallback(following);
}

}  // namespace

// What is known and as long takes the place of what was saved before.
void note_saved(size_t bytes, bool missing) {
  if (was_saved(bytes) == missing || !torchmem_is_called_from(kSavesAndLoads)) return;
  const std::lock_guard<std::mutex> lock(saved_guard);
  if (missing) {
    saved.insert(bytes);
  } else {
    saved.erase(bytes);
  }
}

void note_host_copy(const at::Tensor& on_host, bool missing) {
  if (is_of_host(on_host)) note_saved(on_host.storage().nbytes(), missing);
  if (is_of_host(on_host) && (missing || any)) note(on_host, missing, version_of(on_host));
}

bool holds_missing(const at::Tensor& on_host) {
  if (!any || !is_of_host(on_host)) return false;
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.guard);
  const auto found = all.parts.find(on_host.storage().unsafeGetStorageImpl());
  if (found == all.parts.end()) return false;
  const auto* first = static_cast<const char*>(on_host.const_data_ptr());
  const char* end = first + span_of(on_host);
  return std::any_of(found->second.begin(), found->second.end(), [&](const Part& part) {
    return part.first < end && first < part.end && part.is_unchanged(version_of(on_host));
  });
}

namespace {

// --- what the host computes of its copies rests on them, too --------------------------------------------

bool is_one_of(const char* name, std::initializer_list<const char*> others) {
  return std::any_of(others.begin(), others.end(), [&](const char* other) { return !std::strcmp(name, other); });
}

// Whether an operator's result is the same for whatever values.
bool reads_no_values(const std::string& name) {
  return name.rfind("aten::new_", 0) == 0 || (name.size() > 5 && !name.compare(name.size() - 5, 5, "_like")) ||
         is_one_of(name.c_str(), {"aten::isnan", "aten::isinf", "aten::isfinite", "aten::fill_", "aten::zero_"});
}

// An operator that the host runs. Its arguments are there only while it begins.
struct Running : at::ObserverContext {
  explicit Running(const at::RecordFunction& call) : name(call.name()) {
    const auto inputs = call.inputs();
    for (size_t at = 0; at < inputs.size(); ++at) {
      const bool is_read = at || name != "aten::copy_";
      for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
        rests_on_copies = rests_on_copies || (is_read && holds_missing(tensor));
        if (is_of_host(tensor)) storages.push_back(tensor.storage().unsafeGetStorageImpl());
      });
    }
    of_integers = !inputs.empty() && inputs[0].isTensor() &&
                  at::isIntegralType(inputs[0].toTensor().scalar_type(), true);
  }

  bool writes(const at::RecordFunction& call) const {
    return name.back() == '_' || call.operator_name()->overload_name.find("out") != std::string::npos;
  }

  bool is_view(const at::Tensor& out) const {
    const auto* storage = out.storage().unsafeGetStorageImpl();
    return std::find(storages.begin(), storages.end(), storage) != storages.end();
  }

  // Places among values that are no integers are any that there are, see `Call::is_choice`.
  bool is_choice(const at::Tensor& out) const {
    return !of_integers && at::isIntegralType(out.scalar_type(), false) && rule_of(name).chooses;
  }

  const std::string name;
  std::vector<const c10::StorageImpl*> storages;
  bool rests_on_copies = false, of_integers = false;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  const bool follows = any && !std::strncmp(call.name(), "aten::", 6) && call.operator_name();
  return follows ? std::make_unique<Running>(call) : nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext* context) {
  const auto* running = static_cast<Running*>(context);
  if (!running || !running->rests_on_copies) return;
  const bool writes = running->writes(call), reads_none = reads_no_values(running->name);
  for (const IValue& returned : call.outputs()) {
    for_each_tensor(returned, [&](const at::Tensor& out) {
      if (!is_of_host(out) || (!writes && running->is_view(out))) return;
      // The write has been counted, and the next one is another's.
      note(out, !reads_none && !running->is_choice(out), version_of(out) - 1);
    });
  }
}

// An operator of the host that makes a shape or a branch of a value, and the argument that it looks at.
struct Watching : c10::OperatorKernel {
  Watching(const Handle& handle, size_t argument, bool tells_shape)
      : kernel(kernel_of(handle, c10::DispatchKey::CPU)), argument(argument), tells_shape(tells_shape) {}

  void operator()(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const IValue& value = (*stack)[stack->size() - handle.schema().arguments().size() + argument];
    const at::Tensor& tensor = value.toTensor();
    if (holds_missing(tensor)) torchmem_note_decision(tells_shape ? kShape : kind_of(tensor));
    kernel.callBoxed(handle, keys, stack);
  }

  const c10::KernelFunction kernel;
  const size_t argument;
  const bool tells_shape;
};

// A tensor is made of a storage, which is read from a file. One of a size that was saved is what was saved.
struct Loading : c10::OperatorKernel {
  explicit Loading(const Handle& handle) : kernel(kernel_of(handle, c10::DispatchKey::CPU)) {}

  void operator()(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
    kernel.callBoxed(handle, keys, stack);
    const at::Tensor& made = stack->back().toTensor();
    if (!is_of_host(made) || !was_saved(made.storage().nbytes())) return;
    if (torchmem_is_called_from(kSavesAndLoads)) note(made, true, version_of(made));
  }

  const c10::KernelFunction kernel;
};

}  // namespace

void watch_host_copies(std::vector<c10::RegistrationHandleRAII>& kept) {
  following = at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                                        .needsInputs(true)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
  at::disableCallback(following);
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto put = [&](const c10::OperatorName& name, auto functor) {
    auto kernel = c10::BoxedKernel::makeFromFunctor(std::move(functor));
    kept.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CPU, c10::KernelFunction::makeFromBoxedKernel(std::move(kernel)),
        std::nullopt, nullptr, "torchmem"));
  };
  for (const auto& [name, argument, tells_shape] : {std::tuple<const char*, size_t, bool>{"aten::nonzero", 0, true},
                                                    {"aten::masked_select", 1, true},
                                                    {"aten::_local_scalar_dense", 0, false}}) {
    const auto handle = dispatcher.findSchema({name, ""});
    if (handle) put({name, ""}, std::make_unique<Watching>(*handle, argument, tells_shape));
  }
  for (const char* overload : {"source_Storage", "source_Storage_storage_offset"}) {
    const auto handle = dispatcher.findSchema({"aten::set_", overload});
    if (handle) put({"aten::set_", overload}, std::make_unique<Loading>(*handle));
  }
}

}  // namespace simulated
