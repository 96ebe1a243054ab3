#include "host_copies.h"

#include "device_memory.h"
#include "operator.h"
#include "sparse.h"

#include <algorithm>
#include <atomic>
#include <mutex>
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

}  // namespace

void note_host_copy(const at::Tensor& on_host, bool missing) {
  if (!is_of_host(on_host) || !(missing || any)) return;
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.guard);
  drop_what_is_gone(all);
  const c10::StorageImpl* storage = on_host.storage().unsafeGetStorageImpl();
  const auto found = all.parts.find(storage);
  if (found == all.parts.end() && !missing) return;
  std::vector<Part>& parts = all.parts[storage];
  const uint32_t version = version_of(on_host);
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
  any = !all.parts.empty();
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

// An operator of the host that makes a shape or a branch of a value, and the argument that it looks at.
struct Watching : c10::OperatorKernel {
  Watching(const Handle& handle, size_t argument)
      : kernel(kernel_of(handle, c10::DispatchKey::CPU)), argument(argument) {}

  void operator()(const Handle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const IValue& value = (*stack)[stack->size() - handle.schema().arguments().size() + argument];
    const at::Tensor& tensor = value.toTensor();
    if (at::isIntegralType(tensor.scalar_type(), true) && holds_missing(tensor)) torchmem_note_decision();
    kernel.callBoxed(handle, keys, stack);
  }

  const c10::KernelFunction kernel;
  const size_t argument;
};

}  // namespace

void watch_host_copies(std::vector<c10::RegistrationHandleRAII>& kept) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [name, argument] : {std::pair<const char*, size_t>{"aten::nonzero", 0},
                                       {"aten::masked_select", 1},
                                       {"aten::_local_scalar_dense", 0}}) {
    const auto handle = dispatcher.findSchema({name, ""});
    if (!handle) continue;
    auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Watching>(*handle, argument));
    kept.push_back(dispatcher.registerImpl(
        {name, ""}, c10::DispatchKey::CPU, c10::KernelFunction::makeFromBoxedKernel(std::move(kernel)),
        std::nullopt, nullptr, "torchmem"));
  }
}

}  // namespace simulated
