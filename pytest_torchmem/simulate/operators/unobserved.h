// A thread that computes for the GPU.
#pragma once

#include "device_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simulated {

// While it lives, this thread computes for the GPU: nobody observes it, and nothing is cast.
class Unobserved {
 public:
  Unobserved() { torchmem_compute(1); }
  ~Unobserved() { torchmem_compute(0); }

 private:
  at::RecordFunctionGuard observers_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_modes_{c10::python_ks};
  c10::impl::ExcludeDispatchKeyGuard no_casts_{c10::autocast_dispatch_keyset};
};

// While it lives, what this thread reads from the device is not counted.
class Overlooked {
 public:
  explicit Overlooked(bool overlooks) : overlooks_(overlooks) {
    if (overlooks_) torchmem_overlook_reads(1);
  }
  ~Overlooked() {
    if (overlooks_) torchmem_overlook_reads(0);
  }

 private:
  const bool overlooks_;
};

}  // namespace simulated
