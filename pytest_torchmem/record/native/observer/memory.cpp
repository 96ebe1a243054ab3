// The CPU's memory: an allocator around torch's own.
//
// It is never taken out again: storages keep its address, and that of our deleter. Idle it is one load and one call.
#include "rows.h"
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Storage.h>
#include <pthread.h>

namespace torchmem {
namespace {

c10::DeleterFnPtr free_inner = nullptr;

void freed(void* address) {
  // oneDNN frees what it never took.
  if (address && is_on.load(std::memory_order_relaxed)) note_memory(address, 0, 0);
  free_inner(address);
}

struct Watched final : c10::Allocator {
  explicit Watched(c10::Allocator* inner) : inner(inner) {}
  c10::Allocator* inner;
  c10::DataPtr allocate(size_t bytes) override {
    auto data = inner->allocate(bytes);
    void* address = data.get();
    // A context of another kind is somebody's own: its deleter must stay.
    if (address && data.get_context() == address && data.compare_exchange_deleter(free_inner, &freed) &&
        is_on.load(std::memory_order_relaxed))
      note_memory(address, static_cast<int64_t>(bytes), 0);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner->copy_data(to, from, bytes); }
};
Watched* watched = nullptr;

// Storages on the CPU whose memory came not through us. They are met when an operator takes one, and their end is seen when the
// next operator begins: a weak reference of C++'s keeps no memory alive, and nobody can tell that it is there.
struct Outside {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  void* address;
  int64_t bytes;
  Origin origin;
};
auto& outside_lock = *new std::mutex;
auto& outside = *new std::unordered_map<c10::StorageImpl*, Outside>;
std::atomic<size_t> outside_count{0};

}  // namespace

void meet(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  if (!data.get() || data.get_deleter() == &freed) return;
  auto bytes = impl->sym_nbytes().maybe_as_int().value_or(0);
  if (bytes <= 0) return;
  // A storage that is made by itself, as a deep copy's is, has memory of torch's default allocator, whoever stands before that.
  Origin origin = data.get_deleter() == free_inner ? UNSEEN : OTHERS;
  // Our weak reference keeps its place from another storage. But its memory may be another one by now, as after `share_memory_`.
  Outside before{storage.getWeakStorageImpl(), data.get(), bytes, origin};
  bool is_new;
  {
    std::lock_guard<std::mutex> hold(outside_lock);
    auto [known, was_made] = outside.try_emplace(impl, before);
    is_new = was_made;
    if (!is_new && known->second.address == data.get()) return;
    std::swap(known->second, before);
    outside_count = outside.size();
  }
  if (!is_new) note_memory(before.address, -before.bytes, 0, before.origin);
  note_memory(data.get(), bytes, 0, origin);
}

void look_for_ends() {
  if (!outside_count.load(std::memory_order_relaxed)) return;
  std::vector<Outside> gone;
  {
    std::lock_guard<std::mutex> hold(outside_lock);
    for (auto each = outside.begin(); each != outside.end();) {
      if (!each->second.storage.expired()) { ++each; continue; }
      gone.push_back(each->second);
      each = outside.erase(each);
    }
    outside_count = outside.size();
  }
  for (auto& each : gone) note_memory(each.address, -each.bytes, 0, each.origin);
}

void forget_outside() {
  std::lock_guard<std::mutex> hold(outside_lock);
  outside.clear();
  outside_count = 0;
}

void note_memory(void* address, int64_t bytes, int16_t device, Origin origin) {
  Thread& t = thread();
  int64_t now = now_ns();
  int32_t line = bytes > 0 ? follow_calls(t, now) : 0;
  int32_t row = t.begin({now, bytes, reinterpret_cast<int64_t>(address), -1, 0, -1, line, device, ALLOCATION, origin});
  t.rows[row].end = row + 1;
}

extern "C" {
#pragma GCC visibility push(default)
// Whether the end of a storage will be noted: the memory of one that is older than the installation comes not through us.
int torchmem_sees_end(c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return !data.get() || data.get_deleter() == &freed;
}
// Of a GPU's memory; a free has its bytes, below zero.
void torchmem_note_memory(void* address, int64_t bytes, int16_t device) {
  if (address && is_on.load(std::memory_order_relaxed)) note_memory(address, bytes, device);
}
void torchmem_note_refusal(int64_t bytes, int16_t device) {
  if (!is_on.load(std::memory_order_relaxed)) return;
  Thread& t = thread();
  int64_t now = now_ns();
  int32_t line = follow_calls(t, now);
  int32_t row = t.begin({now, bytes, 0, -1, 0, -1, line, device, OUT_OF_MEMORY, 0});
  t.rows[row].end = row + 1;
}
// 0, or why not. Done before a model is made, so that its memory comes through us.
int torchmem_install() {
  if (watched) return 0;
  auto* inner = c10::GetCPUAllocator();
  if (!inner->raw_deleter()) return 1;
  free_inner = inner->raw_deleter();
  watched = new Watched(inner);
  c10::SetCPUAllocator(watched, 255);
  pthread_atfork(nullptr, nullptr, [] { is_on = is_under_way = false; });
  return 0;
}
#pragma GCC visibility pop
}

}  // namespace torchmem
