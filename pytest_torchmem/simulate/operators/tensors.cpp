#include "tensors.h"

#include "device_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace simulated {
namespace {

constexpr size_t kMostRuns = size_t{1} << 16;
// What is forgotten piece by piece takes longer than it is worth: the half of each row of a large tensor.
constexpr size_t kMostForgotten = size_t{1} << 9;

// Calls with each contiguous run of a tensor's bytes, and returns true; false if there are too many.
template <typename Call>
bool for_each_run(const at::Tensor& tensor, Call call, size_t most_runs = kMostRuns) {
  if (!tensor.numel()) return true;
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride and size, the smallest stride first
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1 && tensor.stride(axis)) {
      axes.emplace_back(tensor.stride(axis), tensor.size(axis));
    }
  }
  std::sort(axes.begin(), axes.end());
  int64_t run = 1;
  size_t inner = 0;
  for (; inner < axes.size() && axes[inner].first <= run; ++inner) {
    run = std::max(run, axes[inner].first * (axes[inner].second - 1) + run);
  }
  size_t runs = 1;
  for (size_t axis = inner; axis < axes.size(); ++axis) runs *= axes[axis].second;
  if (runs > most_runs) return false;
  auto* start = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  const int64_t element = tensor.element_size();
  std::vector<int64_t> at(axes.size(), 0);
  for (size_t number = 0; number < runs; ++number) {
    int64_t offset = 0;
    for (size_t axis = inner; axis < axes.size(); ++axis) offset += at[axis] * axes[axis].first;
    call(start + offset * element, run * element);
    for (size_t axis = inner; axis < axes.size() && ++at[axis] == axes[axis].second; ++axis) {
      at[axis] = 0;
    }
  }
  return true;
}

}  // namespace

size_t span_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += tensor.stride(axis) * (tensor.size(axis) - 1);
  }
  return tensor.numel() ? (last + 1) * tensor.element_size() : 0;
}

at::Tensor seen_on(const at::Tensor& tensor, at::Device device) {
  at::Tensor seen = at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
                        .strides(tensor.strides())
                        .options(tensor.options().device(device))
                        .target_device(device)
                        .make_tensor();
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return seen;
}

bool is_exact(const at::Tensor& tensor) {
  bool exact = true;
  const bool seen = for_each_run(tensor, [&](char* start, size_t bytes) {
    exact = exact && torchmem_is_known(start, bytes);
  });
  return seen && exact;
}

bool is_missing(const at::Tensor& tensor) {
  bool missing = false;
  const bool seen = for_each_run(tensor, [&](char* start, size_t bytes) {
    missing = missing || torchmem_is_missing(start, bytes);
  });
  return seen ? missing : torchmem_is_missing(tensor.const_data_ptr(), span_of(tensor));
}

void note_values(const at::Tensor& tensor, bool exact, bool rests_on_missing) {
  const bool seen = for_each_run(tensor, [&](char* start, size_t bytes) {
    torchmem_note_values(start, bytes, exact, rests_on_missing);
  });
  // Between the runs lies what another tensor may hold: its values stay, and count as not exact.
  if (!seen) {
    torchmem_note_values(const_cast<void*>(tensor.const_data_ptr()), span_of(tensor), false,
                         rests_on_missing);
  }
}

void forget_values(const at::Tensor& tensor) {
  if (for_each_run(tensor, torchmem_forget_values, kMostForgotten)) return;
  torchmem_note_values(const_cast<void*>(tensor.const_data_ptr()), span_of(tensor), false, true);
}

namespace {

thread_local std::vector<Saved*> all_saved;

}  // namespace

Saved::Saved(const at::Tensor& tensor) : tensor_(tensor), sizes_(tensor.sizes().vec()) {
  all_saved.push_back(this);
}

Saved::~Saved() { all_saved.erase(std::find(all_saved.begin(), all_saved.end(), this)); }

void Saved::before_writes() {
  for (Saved* saved : all_saved) {
    if (saved->bytes_) continue;
    std::vector<char>& kept = saved->bytes_.emplace();
    kept.reserve(bytes_of(saved->tensor_));
    for_each_run(saved->tensor_, [&](char* start, size_t bytes) {
      kept.insert(kept.end(), start, start + bytes);
    });
  }
}

void Saved::restore() const {
  if (!bytes_ || tensor_.sizes() != at::IntArrayRef(sizes_)) return;
  const char* from = bytes_->data();
  for_each_run(tensor_, [&](char* start, size_t bytes) {
    std::memcpy(start, from, bytes);
    from += bytes;
  });
}

}  // namespace simulated
