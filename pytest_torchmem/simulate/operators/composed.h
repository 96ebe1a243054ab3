// Operators of the GPU alone that are computed with several of the CPU's.
#pragma once

#include <ATen/core/stack.h>

namespace simulated {

// Each returns what the operator of its name does, given what it is given as tensors of the host.
// They raise where something is left out in training: it is drawn inside of a kernel.
torch::jit::Stack flash_attention_backward(const torch::jit::Stack& given);
torch::jit::Stack efficient_attention_backward(const torch::jit::Stack& given);
torch::jit::Stack cudnn_attention_backward(const torch::jit::Stack& given);
// The same where sequences of many lengths lie behind each other (packed_attention.cpp).
torch::jit::Stack flash_attention_of_packed(const torch::jit::Stack& given);
torch::jit::Stack flash_attention_of_packed_backward(const torch::jit::Stack& given);
torch::jit::Stack efficient_attention_of_packed(const torch::jit::Stack& given);
torch::jit::Stack efficient_attention_of_packed_backward(const torch::jit::Stack& given);
torch::jit::Stack lstm_cell(const torch::jit::Stack& given);
torch::jit::Stack lstm_cell_backward(const torch::jit::Stack& given);
torch::jit::Stack gru_cell(const torch::jit::Stack& given);
torch::jit::Stack gru_cell_backward(const torch::jit::Stack& given);
torch::jit::Stack softmax(const torch::jit::Stack& given);
torch::jit::Stack softmax_backward(const torch::jit::Stack& given);
torch::jit::Stack log_softmax(const torch::jit::Stack& given);
torch::jit::Stack log_softmax_backward(const torch::jit::Stack& given);
torch::jit::Stack log_sigmoid_backward(const torch::jit::Stack& given);
torch::jit::Stack rms_norm_backward(const torch::jit::Stack& given);
torch::jit::Stack embedding_bag(const torch::jit::Stack& given);
// A product whose result is of another kind than its factors, which comes behind them.
torch::jit::Stack product_in(const torch::jit::Stack& given);
torch::jit::Stack product_added_in(const torch::jit::Stack& given);
torch::jit::Stack convolution_relu(const torch::jit::Stack& given);
torch::jit::Stack pack_weight_of_int4(const torch::jit::Stack& given);
torch::jit::Stack mm_with_packed_int4(const torch::jit::Stack& given);
// scaled_products.cpp
torch::jit::Stack scaled_mm(const torch::jit::Stack& given);
torch::jit::Stack scaled_mm_by_recipe(const torch::jit::Stack& given);
torch::jit::Stack scaled_grouped_mm(const torch::jit::Stack& given);
torch::jit::Stack scaled_grouped_mm_by_recipe(const torch::jit::Stack& given);
torch::jit::Stack cudnn_ctc_loss(const torch::jit::Stack& given);
torch::jit::Stack batch_norm_stats(const torch::jit::Stack& given);
torch::jit::Stack batch_norm_gather_stats(const torch::jit::Stack& given);
torch::jit::Stack batch_norm_elemt(const torch::jit::Stack& given);
torch::jit::Stack batch_norm_backward_reduce(const torch::jit::Stack& given);
torch::jit::Stack batch_norm_backward_elemt(const torch::jit::Stack& given);

}  // namespace simulated
