// Tensors of the simulated GPU, seen as tensors of the host, and what is known of their values.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace simulated {

constexpr size_t kKiB = size_t{1} << 10, kMiB = size_t{1} << 20;

inline bool is_on_gpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_quantized();
}

inline size_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

// All bytes between the first and the last of a tensor.
size_t span_of(const at::Tensor& tensor);

// The same memory, as a tensor of the host or of a GPU. It does not keep the memory from being freed.
at::Tensor seen_on(const at::Tensor& tensor, at::Device device);
inline at::Tensor on_host(const at::Tensor& tensor) { return seen_on(tensor, at::kCPU); }

// Whether every value was copied, set, or computed from such values.
bool is_exact(const at::Tensor& tensor);

// Whether a value is none that was computed, or rests on such.
bool is_missing(const at::Tensor& tensor);

// Says that the values that stand there were computed.
void note_values(const at::Tensor& tensor, bool exact, bool rests_on_missing = false);

// Says that a kernel would have written values that are not known: they read zero.
void forget_values(const at::Tensor& tensor);

// The values of a tensor, and a way to write them back. Most kernels leave them alone, so they are
// copied when this thread is about to write to the device, and not before. A kernel that gives its
// argument another size, as observers do with what they find of each channel, leaves nothing to write back.
class Saved {
 public:
  explicit Saved(const at::Tensor& tensor);
  Saved(const Saved&) = delete;
  ~Saved();
  void restore() const;

  // Copies what all that this thread has saved held until now.
  static void before_writes();

 private:
  const at::Tensor tensor_;
  const std::vector<int64_t> sizes_;
  std::optional<std::vector<char>> bytes_;
};

}  // namespace simulated
