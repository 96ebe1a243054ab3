#include "operator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace simulated {
namespace {

// The host's own generator, which a kernel draws from that takes none: it stands where the GPU's does, and is
// as it was afterwards.
class HostGeneratorKept {
 public:
  HostGeneratorKept(bool needed, const at::Generator& drawn_like) {
    if (!needed) return;
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    state_ = generator.get_state();
    generator.set_state(drawn_like.get_state());
  }
  ~HostGeneratorKept() {
    if (state_.defined()) {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      generator.set_state(state_);
    }
  }

 private:
  at::Tensor state_;
};

}  // namespace

Stack compute_on_host(const Operator& op, Stack arguments, const std::optional<Draw>& draw) {
  const bool as_gpu = draw && draws_as_gpu(op.drawn_by, arguments);
  const at::Generator generator = draw && !as_gpu ? draw->on_host() : at::Generator();
  const auto& declared = op.schema->arguments();
  bool drawn = false;
  for (size_t at = 0; at < arguments.size(); ++at) {
    if (!generator.defined() || declared[at].name() != "generator") continue;
    arguments[at] = generator;
    drawn = true;
  }
  const HostGeneratorKept kept(generator.defined() && !drawn, generator);
  // What computes instead returns what this operator is to write.
  Stack outs;
  if (op.rule.stand_in || op.rule.compute || as_gpu) {
    for (; declared[arguments.size() - 1].is_out(); arguments.pop_back()) {
      outs.insert(outs.begin(), arguments.back());
    }
  }
  if (op.rule.stand_in) arguments = op.rule.for_stand_in(arguments);
  if (as_gpu) {
    arguments = op.drawn_by(arguments, *draw);
  } else if (op.rule.compute) {
    arguments = op.rule.compute(arguments);
  } else {
    op.on_cpu->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  }
  for (size_t at = 0; at < outs.size(); ++at) outs[at].toTensor().copy_(arguments.at(at).toTensor());
  return arguments;
}

}  // namespace simulated
