// What is too large to be computed each time, and rests on random numbers and known values of a few MiB
// alone: it is computed once something is decided by it, or the host reads it.
//
//   logits = torch.randn(4096, 128, device="cuda")   noted: drawn by this seed
//   scores = (logits * 2).softmax(-1)                noted: computed from that
//   kept = x[scores.amax(-1) > 0.1]                  a shape rests on it: all three are computed
//
// The runtime forgets the note with the memory, and where something else is written there.
#pragma once

#include "operator.h"

#include <memory>

namespace simulated {

class Deferred;

// A note of a call that is about to run; null where it rests on what nobody can tell.
std::shared_ptr<const Deferred> defer(const Operator& op, const Stack& arguments,
                                      const std::optional<Draw>& draw);

// Notes it for what the call has written and returned.
void note_deferred(const std::shared_ptr<const Deferred>& call, const std::vector<at::Tensor>& outs);

// Computes what is noted for the memory of a tensor, where the host has room for it.
void compute_deferred(const at::Tensor& tensor);

// How many bytes one call may read and write on the host: a quarter of what is free there, also of what a
// control group leaves.
size_t room_on_host();

}  // namespace simulated
