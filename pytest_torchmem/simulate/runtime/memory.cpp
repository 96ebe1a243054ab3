// Device memory: host memory that is counted and limited.
//
// Addresses rise, and a gap is filled first fit, as a driver does it: the caching allocator breaks
// ties by address. A page is taken from the host when something is written to it. Kernels do not
// run, so most never are; a block that torch hands out again reads zero, not what it held before,
// unless it is one of a pool of graphs that torch puts back.

#include "shared.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

namespace simulated {
namespace {

struct Range {
  size_t bytes;
  int device;
};

// Memory of the driver's: it is mapped to addresses that were reserved.
struct Physical {
  size_t bytes;
  int device;
  bool is_own = true;  // and of no other process
  uintptr_t start = 0;  // of its addresses
  int file = -1;        // that another process can map, too
};

auto& guard = forever<std::recursive_mutex>();
using Lock = std::lock_guard<std::recursive_mutex>;

auto& ranges = forever<std::map<uintptr_t, Range>>();
size_t used_bytes[kMostDevices] = {};

// The driver gives whole pages; what is at most half of one shares a page with others.
size_t given(size_t bytes) { return bytes > kPage / 2 ? whole_pages(bytes) : bytes; }

// Counts memory of a device as used, if it has that much.
bool take(int device, size_t bytes) {
  if (whole_pages(used_bytes[device] + given(bytes)) > gpu().bytes) return false;
  used_bytes[device] += given(bytes);
  return true;
}

// --- addresses: one span for all devices, whose gaps are known --------------------------------

constexpr int kProtection = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

uintptr_t span_start = 0, span_end = 0;
auto& gaps = forever<std::map<uintptr_t, size_t>>();

void reserve_span() {
  for (size_t bytes = size_t{1} << 45; bytes >= size_t{1} << 32; bytes >>= 1) {
    void* start = mmap(nullptr, bytes, PROT_NONE, kProtection, -1, 0);
    if (start == MAP_FAILED) continue;
    span_start = whole_pages(reinterpret_cast<uintptr_t>(start));
    span_end = reinterpret_cast<uintptr_t>(start) + bytes - kPage;
    gaps[span_start] = span_end - span_start;
    return;
  }
}

void* address_space(size_t bytes) {
  if (!span_start) reserve_span();
  const size_t whole = whole_pages(bytes);
  for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
    if (gap->second < whole) continue;
    const auto [start, length] = *gap;
    gaps.erase(gap);
    if (length > whole) gaps[start + whole] = length - whole;
    return reinterpret_cast<void*>(start);
  }
  return nullptr;
}

void give_back(uintptr_t start, size_t bytes) {
  size_t whole = whole_pages(bytes);
  mmap(reinterpret_cast<void*>(start), whole, PROT_NONE, kProtection | MAP_FIXED, -1, 0);
  auto after = gaps.lower_bound(start);
  if (after != gaps.end() && after->first == start + whole) {
    whole += after->second;
    after = gaps.erase(after);
  }
  if (after != gaps.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      before->second += whole;
      return;
    }
  }
  gaps[start] = whole;
}

bool open_to_use(uintptr_t start, size_t bytes) {
  return mprotect(reinterpret_cast<void*>(start), whole_pages(bytes), PROT_READ | PROT_WRITE) == 0;
}

// --- what was written: everything else reads zero ---------------------------------------------

// Parts of the addresses, apart from each other.
class Parts {
 public:
  void add(uintptr_t start, uintptr_t end) {
    auto next = ends_.upper_bound(start);
    if (next != ends_.begin() && std::prev(next)->second >= start) {
      --next;
      start = next->first;
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    while (next != ends_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    ends_[start] = end;
  }

  std::vector<std::pair<uintptr_t, uintptr_t>> within(uintptr_t start, uintptr_t end) const {
    std::vector<std::pair<uintptr_t, uintptr_t>> found;
    auto next = ends_.upper_bound(start);
    if (next != ends_.begin()) --next;
    for (; next != ends_.end() && next->first < end; ++next) {
      const uintptr_t from = std::max(start, next->first), to = std::min(end, next->second);
      if (from < to) found.emplace_back(from, to);
    }
    return found;
  }

  void remove(uintptr_t start, uintptr_t end) {
    for (const auto& [from, to] : within(start, end)) {
      auto whole = std::prev(ends_.upper_bound(from));
      const auto [first, last] = *whole;
      ends_.erase(whole);
      if (first < from) ends_[first] = from;
      if (to < last) ends_[to] = last;
    }
  }

  bool contains(uintptr_t start, uintptr_t end) const {
    const auto found = within(start, end);
    return found.size() == 1 && found[0] == std::make_pair(start, end);
  }

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // start to end
};

auto& written = forever<Parts>();  // may be other than zero
// was copied or set; what is not known is what only a kernel could have written
auto& known = forever<Parts>();
// would have been written by a kernel, or rests on such: of what is not known, what nobody computed
auto& missing = forever<Parts>();
// what is noted for bytes that can be computed later, by where they start
struct Note {
  uintptr_t end;
  size_t first_byte;
  std::shared_ptr<void> what;
};
auto& notes = forever<std::map<uintptr_t, Note>>();
// the blocks that torch has handed out: start to end
auto& blocks = forever<std::map<uintptr_t, uintptr_t>>();

// memory that another process sees, too, and the files of what this one shares
auto& shared = forever<Parts>();
auto& files = forever<std::map<uintptr_t, int>>();

void (*before_writes)() = [] {};
thread_local long writes = 0;  // copies to the device, and settings
thread_local bool computes = false;  // for the device, see ../operators
thread_local bool overlooks = false;  // what it reads from the device

// What the reads of a number give while a kernel runs whose result the host asks for. A read of two
// asks where something stands: that it was found, and stands first.
struct Answer {
  bool given = false, known = true;
  long number = 0;
};
thread_local Answer answer;

bool answers(void* to, size_t bytes) {
  constexpr long kFoundFirst[] = {1, 0};
  const bool asks_where = bytes == sizeof kFoundFirst;
  if (!answer.given || (bytes != 1 && bytes != 4 && bytes != 8 && !asks_where)) return false;
  std::memcpy(to, asks_where ? kFoundFirst : &answer.number, bytes);
  return true;
}

bool in_span(uintptr_t address) { return address >= span_start && address < span_end; }

void make_zero(uintptr_t start, uintptr_t end) {
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  for (const auto& [from, to] : written.within(start, end)) {
    const uintptr_t first = (from + page - 1) / page * page, last = to / page * page;
    if (to - from >= 512 * page && first < last && shared.within(from, to).empty()) {
      std::memset(reinterpret_cast<void*>(from), 0, first - from);
      madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
      std::memset(reinterpret_cast<void*>(last), 0, to - last);
    } else {
      std::memset(reinterpret_cast<void*>(from), 0, to - from);
    }
  }
  written.remove(start, end);
}

// Calls for each note, with what it has in common with a range.
template <typename Call>
void for_each_note(uintptr_t start, uintptr_t end, Call call) {
  auto next = notes.upper_bound(start);
  if (next != notes.begin()) --next;
  for (; next != notes.end() && next->first < end; ++next) {
    const uintptr_t from = std::max(start, next->first), to = std::min(end, next->second.end);
    if (from < to) call(from, Note{to, next->second.first_byte + (from - next->first), next->second.what});
  }
}

void forget_notes(uintptr_t start, uintptr_t end) {
  std::vector<std::pair<uintptr_t, Note>> cut;
  for_each_note(start, end, [&](uintptr_t from, Note&& part) { cut.emplace_back(from, std::move(part)); });
  for (const auto& [from, part] : cut) {
    const auto whole = std::prev(notes.upper_bound(from));
    const auto [first, note] = *whole;
    notes.erase(whole);
    if (first < from) notes[first] = {from, note.first_byte, note.what};
    if (part.end < note.end) notes[part.end] = {note.end, note.first_byte + (part.end - first), note.what};
  }
}

// Something else is there now: what nobody computed is gone, and so is what is noted.
void overwrite(uintptr_t start, uintptr_t end) {
  missing.remove(start, end);
  forget_notes(start, end);
}

void stop_sharing(uintptr_t start) {
  const auto file = files.find(start);
  if (file == files.end()) return;
  close(file->second);
  files.erase(file);
}

// What nobody uses any more reads zero where it is used again.
void give_back_unused(uintptr_t start, size_t bytes) {
  written.remove(start, start + bytes);
  known.remove(start, start + bytes);
  overwrite(start, start + bytes);
  shared.remove(start, start + bytes);
  give_back(start, bytes);
}

}  // namespace

bool is_device_range(const void* start, size_t bytes) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  const auto& [first, range] = *std::prev(after);
  return address + bytes <= first + range.bytes;
}

size_t used_bytes_of(int device) {
  Lock lock(guard);
  return whole_pages(used_bytes[device]);
}

bool is_device(const void* pointer) { return is_device_range(pointer, 1); }

bool is_known(const void* start, size_t bytes) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  return !bytes || !in_span(address) || known.contains(address, address + bytes);
}

bool is_missing(const void* start, size_t bytes) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  return bytes && in_span(address) && !missing.within(address, address + bytes).empty();
}

void read_bytes(void* to, const void* from, size_t bytes) {
  const bool answered = answers(to, bytes);
  if (!answered) {
    Lock lock(guard);
    std::memmove(to, from, bytes);
  }
  if (overlooks) return;
  if (answered ? !answer.known : !is_known(from, bytes)) note_unknown_read();
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (!bytes) return;
  const auto target = reinterpret_cast<uintptr_t>(to);
  const auto source = reinterpret_cast<uintptr_t>(from);
  const bool to_device = in_span(target);
  if (!to_device && in_span(source)) return read_bytes(to, from, bytes);
  const bool overlaps = target < source + bytes && source < target + bytes;
  if (to_device) before_writes();
  Lock lock(guard);
  writes += to_device;
  if (!to_device || !in_span(source) || overlaps) {
    std::memmove(to, from, bytes);
    if (to_device) {
      written.add(target, target + bytes);
      known.add(target, target + bytes);
      overwrite(target, target + bytes);
    }
    return;
  }
  const auto parts = written.within(source, source + bytes);
  const auto known_parts = known.within(source, source + bytes);
  const auto missing_parts = missing.within(source, source + bytes);
  std::vector<std::pair<uintptr_t, Note>> noted;
  for_each_note(source, source + bytes, [&](uintptr_t from, Note&& part) { noted.emplace_back(from, std::move(part)); });
  make_zero(target, target + bytes);
  known.remove(target, target + bytes);
  overwrite(target, target + bytes);
  for (const auto& [start, end] : parts) {
    const uintptr_t there = target + (start - source);
    std::memcpy(reinterpret_cast<void*>(there), reinterpret_cast<void*>(start), end - start);
    written.add(there, there + (end - start));
  }
  for (const auto& [start, end] : known_parts) {
    known.add(target + (start - source), target + (end - source));
  }
  for (const auto& [start, end] : missing_parts) {
    missing.add(target + (start - source), target + (end - source));
  }
  for (const auto& [start, part] : noted) {
    notes[target + (start - source)] = {target + (part.end - source), part.first_byte, part.what};
  }
}

void forget_bytes(void* start, size_t bytes) {
  before_writes();
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  make_zero(address, address + bytes);
  known.remove(address, address + bytes);
  if (!bytes || !in_span(address)) return;
  overwrite(address, address + bytes);
  missing.add(address, address + bytes);
}

std::pair<uintptr_t, uintptr_t> block_of(const void* address) {
  Lock lock(guard);
  const auto place = reinterpret_cast<uintptr_t>(address);
  const auto after = blocks.upper_bound(place);
  if (after == blocks.begin() || std::prev(after)->second <= place) return {0, 0};
  return *std::prev(after);
}

void doubt_block(const void* start) {
  Lock lock(guard);
  const uintptr_t end = block_of(start).second;
  if (!end) return;
  const auto address = reinterpret_cast<uintptr_t>(start);
  known.remove(address, end);
  forget_notes(address, end);
}

void set_bytes(void* to, int value, size_t bytes) {
  before_writes();
  Lock lock(guard);
  const auto start = reinterpret_cast<uintptr_t>(to);
  writes += in_span(start);
  if (in_span(start)) {
    known.add(start, start + bytes);
    overwrite(start, start + bytes);
  }
  if (value == 0 && in_span(start)) {
    make_zero(start, start + bytes);
    return;
  }
  std::memset(to, value, bytes);
  if (in_span(start)) written.add(start, start + bytes);
}

void note_values(void* start, size_t bytes, bool exact, bool rests_on_missing) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  if (!bytes || !in_span(address)) return;
  ++writes;
  written.add(address, address + bytes);
  exact ? known.add(address, address + bytes) : known.remove(address, address + bytes);
  overwrite(address, address + bytes);
  if (rests_on_missing) missing.add(address, address + bytes);
}

void note_decision(int kind) {
  if (!overlooks) note_decision_on_missing(kind);
}

void write_on(cudaStream_t stream, std::function<void()> work) {
  ++writes;
  do_or_capture(stream, std::move(work));
}

}  // namespace simulated

using namespace simulated;

extern "C" {

cudaError_t cudaMalloc(void** out, size_t bytes) {
  Lock lock(guard);
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  const int device = current_device();
  if (!take(device, bytes)) return fail(cudaErrorMemoryAllocation);
  *out = address_space(bytes);
  if (!*out || !open_to_use(reinterpret_cast<uintptr_t>(*out), bytes)) {
    used_bytes[device] -= given(bytes);
    return fail(cudaErrorMemoryAllocation);
  }
  ranges[reinterpret_cast<uintptr_t>(*out)] = {bytes, device};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Lock lock(guard);
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  auto found = ranges.find(start);
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  const auto [bytes, device] = found->second;
  used_bytes[device] -= given(bytes);
  ranges.erase(found);
  stop_sharing(start);
  give_back_unused(start, bytes);
  return cudaSuccess;
}

// Pages that move between the host and a device are counted as the device's.
cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) { return cudaMalloc(out, bytes); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = gpu().bytes;
  *free = gpu().bytes - used_bytes_of(current_device());
  return cudaSuccess;
}

static auto& pinned = forever<std::map<uintptr_t, size_t>>();

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*out) return fail(cudaErrorMemoryAllocation);
  Lock lock(guard);
  pinned[reinterpret_cast<uintptr_t>(*out)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(guard);
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(guard);
  pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(guard);
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  Lock lock(guard);
  std::memset(out, 0, sizeof *out);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(address);
  if (after != ranges.begin() &&
      address < std::prev(after)->first + std::prev(after)->second.bytes) {
    out->type = cudaMemoryTypeDevice;
    out->device = std::prev(after)->second.device;
    out->devicePointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  auto host = pinned.upper_bound(address);
  if (host != pinned.begin() && address < std::prev(host)->first + std::prev(host)->second) {
    out->type = cudaMemoryTypeHost;
    out->device = chosen_device();
    out->hostPointer = out->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

static void copy_on(cudaStream_t stream, void* to, const void* from, size_t bytes) {
  note_copy(from, bytes);
  // Right away: what comes before it on the stream has left its result already.
  write_on(stream, [=] { copy_bytes(to, from, bytes); });
  enqueue(stream, 5);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy_on(nullptr, to, from, bytes);
  wait_for(nullptr);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  copy_on(stream, to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  copy_on(stream, to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  write_on(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      copy_bytes(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
  enqueue(stream, 5);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  set_bytes(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  write_on(stream, [=] { set_bytes(to, value, bytes); });
  enqueue(stream, 5);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char memory[1 << 16];
  *out = memory;
  return cudaSuccess;
}

// --- memory that several processes see: a file is put in its place -----------------------------------

// Stands in the handle that one process gives to another.
struct Ticket {
  int process, file, device;
  size_t bytes;
};

// Behind the memory the file has its device and its known parts, as distances from its start.
constexpr size_t kMostTold = size_t{1} << 12;
struct Told {
  int device;
  size_t count;
  std::pair<size_t, size_t> parts[kMostTold];
};

static void* map_file(void* start, int file, size_t bytes) {
  return mmap(start, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
}

// Another process may write to any part of it.
static void note_shared(uintptr_t start, size_t bytes) {
  shared.add(start, start + bytes);
  written.add(start, start + bytes);
}

static int file_in_place_of(uintptr_t start, size_t bytes) {
  const int file = memfd_create("torchmem", MFD_CLOEXEC);
  if (file < 0) return file;
  bool copied = ftruncate(file, whole_pages(bytes) + sizeof(Told)) == 0;
  for (const auto& [from, to] : written.within(start, start + bytes)) {
    const auto length = static_cast<ssize_t>(to - from);
    copied = copied && pwrite(file, reinterpret_cast<void*>(from), length, from - start) == length;
  }
  if (copied && map_file(reinterpret_cast<void*>(start), file, bytes) != MAP_FAILED) {
    note_shared(start, bytes);
    return file;
  }
  close(file);
  return -1;
}

static bool tell_known(int file, uintptr_t start, size_t bytes, int device) {
  auto told = std::make_unique<Told>();
  told->device = device;
  for (const auto& [from, to] : known.within(start, start + bytes)) {
    if (told->count < kMostTold) told->parts[told->count++] = {from - start, to - start};
  }
  return pwrite(file, told.get(), sizeof(Told), whole_pages(bytes)) == sizeof(Told);
}

static std::unique_ptr<Told> told_in(int file, size_t bytes) {
  auto told = std::make_unique<Told>();
  const bool is_there = pread(file, told.get(), sizeof(Told), whole_pages(bytes)) == sizeof(Told);
  return is_there ? std::move(told) : nullptr;
}

// Memory of another process is there now.
static void hear_known(int file, uintptr_t start, size_t bytes) {
  blocks[start] = start + bytes;
  note_shared(start, bytes);
  const auto told = told_in(file, bytes);
  for (size_t at = 0; told && at < told->count; ++at) {
    known.add(start + told->parts[at].first, start + told->parts[at].second);
  }
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* pointer) {
  Lock lock(guard);
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  const auto found = ranges.find(start);
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  const auto [bytes, device] = found->second;
  const auto made = files.find(start);
  const int file = made == files.end() ? file_in_place_of(start, bytes) : made->second;
  if (file < 0 || !tell_known(file, start, bytes, device)) return fail(cudaErrorMemoryAllocation);
  files[start] = file;
  const Ticket ticket{getpid(), file, device, bytes};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &ticket, sizeof ticket);
  return cudaSuccess;
}

// It counts as used where it was allocated, and not once more.
cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned) {
  Lock lock(guard);
  Ticket ticket;
  std::memcpy(&ticket, &handle, sizeof ticket);
  const std::string path =
      "/proc/" + std::to_string(ticket.process) + "/fd/" + std::to_string(ticket.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  *out = file < 0 ? nullptr : address_space(ticket.bytes);
  const bool mapped = *out && map_file(*out, file, ticket.bytes) != MAP_FAILED;
  const auto start = reinterpret_cast<uintptr_t>(*out);
  if (mapped) {
    ranges[start] = {ticket.bytes, ticket.device};
    hear_known(file, start, ticket.bytes);
  }
  if (file >= 0) close(file);
  return mapped ? cudaSuccess : fail(cudaErrorMapBufferObjectFailed);
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  Lock lock(guard);
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  const auto found = ranges.find(start);
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  const size_t bytes = found->second.bytes;
  ranges.erase(found);
  blocks.erase(start);
  give_back_unused(start, bytes);
  return cudaSuccess;
}

// --- the driver's virtual memory, which expandable segments stand on ---------------------------

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  Lock lock(guard);
  *out = reinterpret_cast<CUdeviceptr>(address_space(bytes));
  return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  Lock lock(guard);
  give_back(start, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  Lock lock(guard);
  const int device = properties->location.id;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{bytes, device});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(guard);
  auto* physical = reinterpret_cast<Physical*>(handle);
  if (physical->is_own) used_bytes[physical->device] -= given(physical->bytes);
  if (physical->file >= 0) close(physical->file);
  delete physical;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  Lock lock(guard);
  auto* physical = reinterpret_cast<Physical*>(handle);
  const bool is_file = physical->file >= 0;
  const bool mapped = is_file ? map_file(reinterpret_cast<void*>(start), physical->file, bytes) != MAP_FAILED
                              : open_to_use(start, bytes);
  if (!mapped) return CUDA_ERROR_OUT_OF_MEMORY;
  ranges[start] = {bytes, physical->device};
  physical->start = start;
  if (is_file) hear_known(physical->file, start, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  Lock lock(guard);
  auto* physical = reinterpret_cast<Physical*>(handle);
  const auto [bytes, device, is_own, start, made] = *physical;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !start) return CUDA_ERROR_NOT_SUPPORTED;
  physical->file = made < 0 ? file_in_place_of(start, bytes) : made;
  if (physical->file < 0 || !tell_known(physical->file, start, bytes, device)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *static_cast<int*>(out) = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

// It counts as used where it was allocated, and not once more.
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* handle,
                                        CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(handle)), F_DUPFD_CLOEXEC, 0);
  struct stat found {};
  const size_t bytes = fstat(file, &found) ? 0 : found.st_size - sizeof(Told);
  const auto told = bytes ? told_in(file, bytes) : nullptr;
  if (!told) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(
      new Physical{bytes, told->device, false, 0, file});
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  Lock lock(guard);
  void* address = reinterpret_cast<void*>(start);
  mmap(address, whole_pages(bytes), PROT_NONE, kProtection | MAP_FIXED, -1, 0);
  written.remove(start, start + bytes);
  known.remove(start, start + bytes);
  overwrite(start, start + bytes);
  shared.remove(start, start + bytes);
  ranges.erase(ranges.lower_bound(start), ranges.lower_bound(start + bytes));
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *out = kPage;
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  cudaMemGetInfo(free, total);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  const bool had = cudaMalloc(reinterpret_cast<void**>(out), bytes) == cudaSuccess;
  return had ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  cudaFree(reinterpret_cast<void*>(pointer));
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(out) = pointer; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(out) = CU_MEMORYTYPE_DEVICE; break;
    default: *static_cast<unsigned*>(out) = 0;
  }
  return CUDA_SUCCESS;
}

// --- for those who compute values, see ../operators ---------------------------------------------

int torchmem_is_known(const void* start, size_t bytes) { return is_known(start, bytes); }

int torchmem_is_missing(const void* start, size_t bytes) { return is_missing(start, bytes); }

int torchmem_is_zero(const void* start, size_t bytes) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  return in_span(address) && written.within(address, address + bytes).empty();
}

void torchmem_note_values(void* start, size_t bytes, int exact, int rests_on_missing) {
  note_values(start, bytes, exact != 0, rests_on_missing != 0);
}
void torchmem_note_decision(int kind) { note_decision(kind); }

void torchmem_defer(void* start, size_t bytes, size_t first_byte, void* what, void (*drop)(void*)) {
  const std::shared_ptr<void> kept(what, drop);
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  if (in_span(address)) notes[address] = {address + bytes, first_byte, kept};
}

void torchmem_each_deferred(const void* start, size_t bytes,
                            void (*call)(void*, void*, size_t, size_t, void*), void* context) {
  Lock lock(guard);
  const auto address = reinterpret_cast<uintptr_t>(start);
  if (notes.empty() || !in_span(address)) return;
  auto next = notes.upper_bound(address);
  if (next != notes.begin()) --next;
  for (; next != notes.end() && next->first < address + bytes; ++next) {
    const auto& [from, note] = *next;
    if (note.end <= address) continue;
    call(note.what.get(), reinterpret_cast<void*>(from), note.end - from, note.first_byte, context);
  }
}

void torchmem_forget_values(void* start, size_t bytes) { forget_bytes(start, bytes); }
void torchmem_before_writes(void (*call)()) { before_writes = call; }
long torchmem_writes() { return writes; }
void torchmem_answer_reads(long number, int exact) { answer = {true, exact != 0, number}; }
void torchmem_end_answers() { answer = {}; }
void torchmem_overlook_reads(int on) { overlooks = on != 0; }
void torchmem_compute(int on) { computes = on != 0; }

// --- torch's own report of each block that it hands out ----------------------------------------

struct Library {
  const char* name;
  uintptr_t start = UINTPTR_MAX, end = 0;

  explicit Library(const char* name) : name(name) {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* library) {
          auto* found = static_cast<Library*>(library);
          if (!std::strstr(info->dlpi_name, found->name)) return 0;
          for (int part = 0; part < info->dlpi_phnum; ++part) {
            const auto& header = info->dlpi_phdr[part];
            const uintptr_t start = info->dlpi_addr + header.p_vaddr;
            if (header.p_type != PT_LOAD) continue;
            found->start = std::min(found->start, start);
            found->end = std::max(found->end, start + header.p_memsz);
          }
          return 1;
        },
        this);
  }

  bool has(const void* call) const {
    const auto address = reinterpret_cast<uintptr_t>(call);
    return address >= start && address < end;
  }
};

// True where torch puts the pool of graphs back to a state of before, as cudagraph trees do: it
// hands out the blocks of tensors that are alive. Nothing else of Python's asks the allocator
// without an operator; `raw_alloc` does, and its memory has any values.
static bool is_put_back() {
  if (!was_captured()) return false;
  static const Library allocator("libc10_cuda.so"), python("libtorch_python.so");
  void* calls[12];
  const int count = backtrace(calls, 12);
  bool within = false;
  for (int call = 0; call < count; ++call) {
    if (allocator.has(calls[call])) within = true;
    else if (within) return python.has(calls[call]);
  }
  return false;
}

// c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device). The caching
// allocator calls it for each block, profiled or not. This library is loaded before libc10.so, so
// the call comes here first: a block that is handed out again is new memory to those who read it.
void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(void* pointer, int64_t bytes,
                                                           size_t allocated, size_t reserved,
                                                           uint16_t device) {
  using Report = void (*)(void*, int64_t, size_t, size_t, uint16_t);
  static const auto report = reinterpret_cast<Report>(
      dlsym(dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD),
            "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"));
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  if (bytes > 0 && in_span(start)) {
    Lock lock(guard);
    if (!is_put_back()) {
      make_zero(start, start + bytes);
      known.remove(start, start + bytes);
      overwrite(start, start + bytes);
    }
    blocks[start] = start + bytes;
  }
  if (!computes) report(pointer, bytes, allocated, reserved, device);
}

}  // extern "C"
