// Recurrent layers: cuDNN has one function for all kinds, of whole and of packed sequences, and no
// operator of the CPU stands beside it.
#pragma once

#include <ATen/core/stack.h>

namespace simulated {

// What `aten::_cudnn_rnn` and its backward return, given what they are given as tensors of the host.
// They raise where something is left out in training: it is drawn inside of cuDNN.
torch::jit::Stack recurrent(const torch::jit::Stack& given);
torch::jit::Stack recurrent_backward(const torch::jit::Stack& given);

}  // namespace simulated
