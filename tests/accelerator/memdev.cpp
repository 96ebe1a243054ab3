// A device of its own kind, for tests: its memory is the host's, and its operators run on the CPU.
//
// What counts is the allocator. It rounds, keeps what is freed and hands it out again, counts all
// four kinds of bytes, tells torch's profiler of each allocation and free, and runs out of memory
// when it is told to. Python reaches the switches at the end of this file through ctypes.

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kRound = 512;
// A block that was freed serves again without being split if no more than this is left over.
constexpr size_t kTail = size_t(64) << 10;

thread_local c10::DeviceIndex current = 0;

bool counts = true;
bool counts_all = true;
bool reports = true;

struct Block {
  c10::DeviceIndex device;
  size_t size;
  size_t requested;
};

struct Memory {
  std::multimap<size_t, void*> cached;
  size_t capacity = ~size_t(0);
  size_t allocated = 0;
  size_t reserved = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current);
    void* data = bytes ? take(current, bytes) : nullptr;
    return {data, data, &give, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& memory : memories_) {
      release(memory);
    }
  }

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto stats = memories_.at(index).stats;
    if (!counts_all) {
      stats.active_bytes = stats.requested_bytes = {};
    }
    if (!counts) {
      stats = {};
    }
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = memories_.at(index).stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                        &stats.requested_bytes}) {
      (*bytes)[0].reset_peak();
    }
  }

  size_t block_size(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.at(data).size;
  }

  void set_capacity(c10::DeviceIndex index, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memories_.at(index).capacity = bytes;
  }

 private:
  void* take(c10::DeviceIndex index, size_t requested) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& memory = memories_.at(index);
    size_t size = (requested + kRound - 1) / kRound * kRound;
    void* data = nullptr;
    if (auto found = memory.cached.lower_bound(size);
        found != memory.cached.end() && found->first - size <= kTail) {
      size = found->first;
      data = found->second;
      memory.cached.erase(found);
    } else {
      data = reserve(memory, index, size);
    }
    blocks_[data] = {index, size, requested};
    memory.allocated += size;
    memory.stats.allocated_bytes[0].increase(size);
    memory.stats.active_bytes[0].increase(size);
    memory.stats.requested_bytes[0].increase(requested);
    report(data, static_cast<int64_t>(size), memory, index);
    return data;
  }

  void* reserve(Memory& memory, c10::DeviceIndex index, size_t size) {
    if (memory.reserved + size > memory.capacity) {
      release(memory);
    }
    if (memory.reserved + size > memory.capacity) {
      const c10::Device device(kType, index);
      c10::reportOutOfMemoryToProfiler(
          static_cast<int64_t>(size), memory.allocated, memory.reserved, device);
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "memdev out of memory: tried to allocate ", size, " bytes, ",
          memory.capacity - memory.reserved, " are free");
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kRound, size) == 0, "the host is out of memory");
    memory.reserved += size;
    memory.stats.reserved_bytes[0].increase(size);
    return data;
  }

  static void release(Memory& memory) {
    for (const auto& [size, data] : memory.cached) {
      std::free(data);
      memory.reserved -= size;
      memory.stats.reserved_bytes[0].decrease(size);
    }
    memory.cached.clear();
  }

  static void give(void* data);

  void take_back(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) {
      return;
    }
    const Block block = found->second;
    blocks_.erase(found);
    auto& memory = memories_.at(block.device);
    memory.cached.emplace(block.size, data);
    memory.allocated -= block.size;
    memory.stats.allocated_bytes[0].decrease(block.size);
    memory.stats.active_bytes[0].decrease(block.size);
    memory.stats.requested_bytes[0].decrease(block.requested);
    report(data, -static_cast<int64_t>(block.size), memory, block.device);
  }

  static void report(void* data, int64_t size, const Memory& memory, c10::DeviceIndex index) {
    if (reports) {
      c10::reportMemoryUsageToProfiler(
          data, size, memory.allocated, memory.reserved, c10::Device(kType, index));
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::array<Memory, kDevices> memories_;
};

// Tensors may be freed after static objects are gone, so this one never goes.
Allocator& allocator() {
  static auto* the_one = new Allocator;
  return *the_one;
}

void Allocator::give(void* data) {
  if (data) {
    allocator().take_back(data);
  }
}

// The device has one stream, and what is asked of it is done when the call returns.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, current);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.has_index() ? device.index() : current;
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current = index;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = allocator().allocate(bytes);
    if (storage.nbytes() && bytes) {
      std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

using Layout = std::optional<c10::Layout>;
using Type = std::optional<c10::ScalarType>;
using Where = std::optional<c10::Device>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size, Type type, Layout, Where device, std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(
      size, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, Type type, Layout, Where device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), kKeys, c10::dtype_or_default(type));
}

// The same memory, as a tensor of the CPU: what is on this device can be read there.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor
                         : at::from_blob(
                               tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                               tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.numel()) {
    on_cpu(to).copy_(on_cpu(from));
  }
  return to;
}

const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (bytes > tensor->storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), bytes);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    resize(to, from.sizes(), std::nullopt);
  }
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  return on_cpu(self).item();
}

at::Tensor& set_part(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  tensor->set_sizes_and_strides(size, stride);
  return self;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

} // namespace

namespace at {
REGISTER_ALLOCATOR(kType, &allocator());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
} // namespace at

static const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &at::native::set_);
}

extern "C" {

// The most that a device may reserve.
void memdev_set_capacity(int index, size_t bytes) {
  allocator().set_capacity(static_cast<c10::DeviceIndex>(index), bytes);
}

size_t memdev_block_size(void* data) {
  return allocator().block_size(data);
}

// Whether the counters say anything, whether they say what was requested and is active, and whether
// the profiler is told.
void memdev_set_honesty(bool any, bool all, bool to_profiler) {
  counts = any;
  counts_all = all;
  reports = to_profiler;
}
}
