// Operators, nodes of the backward graph and ranges, with the storages of their inputs.
#include "rows.h"
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <cstring>

namespace torchmem {

void meet(const c10::Storage& storage);
void look_for_ends();

namespace {

constexpr int THREAD_SHIFT = 40;
at::CallbackHandle handle = 0;
bool is_observing = false;

int16_t device_code(c10::Device device) {
  return static_cast<int16_t>(static_cast<int>(device.type()) << 8 | (device.is_cpu() ? 0 : std::max<int>(0, device.index())));
}

std::string written(const at::RecordFunction& fn) {
  std::string text = fn.name();
  auto schema = fn.operator_schema();
  if (!schema) return text;
  text += "\n" + schema->overload_name() + "\n";
  for (auto& argument : schema->arguments()) text += argument.alias_info() && argument.alias_info()->isWrite() ? 'w' : 'r';
  return text;
}

// An operator's name stands in its schema, for ever; that of a node no longer than its range, and its address is used again. So
// the text is compared each time.
int32_t name(Thread& t, const at::RecordFunction& fn) {
  const char* text = fn.name();
  KnownName& known = t.names[text];
  if (size_t length = strlen(text); !known.text || strncmp(known.text, text, length) || known.text[length] > '\n') {
    known.number = NAMES.number(written(fn));
    known.text = NAMES.text(known.number);
  }
  return known.number;
}

// No checked accessor: they raise for fake tensors, make a copy of a copy-on-write tensor, or fail for sizes that are symbols.
void mention(Thread& t, int32_t row, int16_t argument, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || !impl->has_storage()) return;
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return;
  auto address = reinterpret_cast<uint64_t>(storage->_mutable_data_ptr_no_checks().get());
  if (!address) return;
  t.mentions.add({address, storage->sym_nbytes().maybe_as_int().value_or(0), row, argument, device_code(storage->device())});
}

template <class Visit>
void visit_tensors(c10::ArrayRef<const c10::IValue> inputs, Visit visit) {
  int16_t argument = 0;
  for (auto& value : inputs) {
    if (value.isTensor()) visit(value.toTensor(), argument);
    else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorList()) visit(tensor, argument);
    else if (value.isList()) for (const c10::IValue& item : value.toListRef()) if (item.isTensor()) visit(item.toTensor(), argument);
    argument++;
  }
}

// A range may end where others are open, or on another thread.
struct Range final : at::ObserverContext {
  Thread* thread;
  int32_t row, recording;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
  Thread& t = thread();
  bool is_range = fn.scope() == at::RecordScope::USER_SCOPE;
  if (!is_range) t.depth++;
  if (!is_on.load(std::memory_order_relaxed)) return nullptr;
  look_for_ends();
  if (!is_range) visit_tensors(fn.inputs(), [](const at::Tensor& tensor, int16_t) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (tensor.defined() && impl->has_storage() && impl->device_type() == c10::DeviceType::CPU) meet(impl->unsafe_storage());
  });
  int64_t now = now_ns();
  int32_t line = follow_calls(t, now);
  int64_t sequence = fn.seqNr();
  if (sequence >= 0) {
    uint64_t maker = fn.scope() == at::RecordScope::BACKWARD_FUNCTION ? fn.forwardThreadId() : 0;
    sequence |= static_cast<int64_t>(maker ? maker : t.number) << THREAD_SHIFT;
  }
  int32_t row = t.begin({now, 0, sequence, -1, 0, name(t, fn), line, -1, OPERATOR, static_cast<uint8_t>(fn.scope())});
  if (is_range) {
    t.open.push_back({row, false, true, nullptr, line, 0});
    auto range = std::make_unique<Range>();
    range->thread = &t, range->row = row, range->recording = t.recording;
    return range;
  }
  t.open.push_back({row, false, false, frame_now(), line, t.depth});
  visit_tensors(fn.inputs(), [&](const at::Tensor& tensor, int16_t argument) { mention(t, row, argument, tensor); });
  return nullptr;
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (auto* range = static_cast<Range*>(context)) {
    if (range->recording != recording) return;
    Thread& t = *range->thread;
    int64_t now = now_ns();
    t.rows[range->row].stop = now;
    if (&t != &thread()) return;
    // What it called is over, and an operator that began later may be what ends it: so slices nest.
    if (is_on) follow_calls(t, now);
    for (auto& open : t.open)
      if (!open.is_call && !open.is_range && open.row > range->row) {
        t.rows[range->row].stop = t.rows[open.row].start_ns;
        break;
      }
    for (size_t place = t.open.size(); place-- > 0;)
      if (t.open[place].row == range->row) return t.close(place, now);
    return;
  }
  // Also in a pause: what begins after it is not within what ended meanwhile.
  Thread& t = thread();
  for (size_t place = t.open.size(); place-- > 0;) {
    Open& open = t.open[place];
    if (open.is_call || open.is_range) continue;
    if (open.depth == t.depth) t.close(place, now_ns());
    break;
  }
  t.depth--;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void torchmem_observe_operators(int on) {
  if (on && !is_observing) handle = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).needsInputs(true));
  if (!on && is_observing) at::removeCallback(handle);
  is_observing = on;
}

}  // namespace torchmem
