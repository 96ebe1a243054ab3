// What the parts of the simulated CUDA runtime share: the GPU, the clock, and handles.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

constexpr size_t kPage = size_t{2} << 20;
constexpr int kMostDevices = 64;

// Makes a value that is never destroyed: threads of torch call in while the process ends.
template <typename Value, typename... Arguments>
Value& forever(Arguments... arguments) {
  return *new Value(arguments...);
}

// The GPU that all devices are, from the environment of the process.
struct Gpu {
  std::string name;
  size_t bytes;
  int major, minor;
  int processors, cache_bytes;
  int installed;             // on the machine
  std::vector<int> visible;  // of them, in the order in which this process counts them
  bool alone;  // one rank of a job whose other ranks are not run
};
const Gpu& gpu();
inline int device_count() { return static_cast<int>(gpu().visible.size()); }

// The device that this thread works on, which has a context from then on.
int current_device();
// The same, only to name it.
int chosen_device();
bool has_context(int device);
// A program has called the runtime or the driver, which answer from then on.
void begin();
bool has_begun();
cudaError_t fail(cudaError_t error);

inline size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

template <typename Handle>
int give_handle(Handle* out) {
  *out = reinterpret_cast<Handle>(std::calloc(1, 4096));
  return 0;
}

// --- memory.cpp: device memory is host memory that is counted ---------------------------------

// Moves bytes; of device memory only what was written is moved, and what is zero takes no page.
void copy_bytes(void* to, const void* from, size_t bytes);
void set_bytes(void* to, int value, size_t bytes);
// A kernel would write here what is not known.
void forget_bytes(void* start, size_t bytes);
// What was just written there is exact, or is not; it may rest on what no kernel has computed.
void note_values(void* start, size_t bytes, bool exact, bool rests_on_missing = false);
// Whether any byte would have been written by a kernel, or rests on such.
bool is_missing(const void* start, size_t bytes);
// This thread chooses a shape, a count or a branch by what no kernel has computed, or may do so: see
// `torchmem_note_decision`.
void note_decision(int kind);
// Writes on a stream, see `do_or_capture`; it counts as a write of this thread.
void write_on(cudaStream_t stream, std::function<void()> work);
bool is_device(const void* pointer);
bool was_captured();  // a graph, by this process
size_t used_bytes_of(int device);
// Whether all of it was allocated at once.
bool is_device_range(const void* start, size_t bytes);
// The block that torch handed out and an address lies in: its start and its end, or twice 0.
std::pair<uintptr_t, uintptr_t> block_of(const void* address);
// A kernel may have written from here to the end of the block that torch handed out.
void doubt_block(const void* start);
// Whether every byte was copied or set, or computed from such; host memory always is.
bool is_known(const void* start, size_t bytes);

// --- nccl.cpp -----------------------------------------------------------------------------------

// Memory is copied: within a group of transfers it is what a rank gives to itself.
void note_copy(const void* from, size_t bytes);

// --- reads.cpp: the host looks at values that are not exact ------------------------------------

// Keeps the line of the program that is running.
void note_unknown_read();
void note_decision_on_missing(int kind);

// --- streams.cpp ------------------------------------------------------------------------------

// Puts a piece of work on a stream, behind what is there.
void enqueue(cudaStream_t stream, double microseconds);
// How many pieces of work were put on streams.
uint64_t work_so_far();
// The host waits for a stream, as it does for a copy to its own memory.
void wait_for(cudaStream_t stream);
// Whether streams that this thread tells to wait for another one go on.
void ignore_waits(bool on);
// Whether a stream's work is captured into a graph.
bool is_capturing(cudaStream_t stream);
// Does a piece of work that changes memory: now, or at each launch of the graph that a stream's work
// is captured into.
void do_or_capture(cudaStream_t stream, std::function<void()> work);

}  // namespace simulated
