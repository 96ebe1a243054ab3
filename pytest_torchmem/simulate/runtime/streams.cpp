// Streams and events, in an order that does not depend on the machine's speed.
//
// Kernels take no time, and a host that runs ahead of its GPU is the usual case. So work counts as
// done when the host waits for it, and not before, but for one bound: a driver holds no more than
// 1,024 pieces of work back, then it makes the host wait. A host that asks again and again whether
// something is done, and gives no more work meanwhile, waits for it, too. What `record_stream` defers
// is deferred the same in each run. `torch.cuda._sleep` and each kernel last for a stated time between events.

#include "shared.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulated {
namespace {

constexpr uint64_t kMostPending = 1024;
constexpr int kMostQueries = 100;  // after so many the host waits

struct Stream {
  int device = 0;
  int priority = 0;
  unsigned long long capture = 0;  // its work is captured into a graph; 0 if it is not
  uint64_t last = 0;      // the number of its last piece of work
  uint64_t done = 0;      // up to here the host has waited
  double elapsed_us = 0;  // what its work takes
  struct Wait {
    Stream* other;
    uint64_t number;
  };
  std::vector<Wait> waits;  // for other streams, until the host waits for this one
};

constexpr double kLeastUs = 0.5;

double host_us = 0;  // when what the host has waited for was done

void host_waits(double until_us) { host_us = std::max(host_us, until_us); }

struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;
  double at_us = 0;
  unsigned long long capture = 0;  // the one that it was recorded in
};

struct Graph {
  // What it does to memory, in order. It is done at each launch, and not when it is captured.
  std::vector<std::shared_ptr<std::function<void()>>> work;
  size_t nodes = 0;
};

auto& guard = forever<std::recursive_mutex>();
using Lock = std::lock_guard<std::recursive_mutex>;
uint64_t numbered = 0;
// How often this thread has heard that something is not done since the last piece of work was given.
struct Queries {
  uint64_t since = 0;
  int count = 0;
};
thread_local Queries queries;
// torch makes its streams once and keeps them.
auto& streams = forever<std::deque<Stream>>(kMostDevices);
std::atomic<unsigned long long> capture_count{0};
auto& captures = forever<std::unordered_map<unsigned long long, Graph>>();  // those that go on
std::atomic<size_t> open_captures{0};

Stream* stream_of(cudaStream_t stream) {
  const auto value = reinterpret_cast<uintptr_t>(stream);
  // The legacy and the per-thread default stream are written as 0, 1 and 2.
  if (value <= 2) return &streams[current_device()];
  return reinterpret_cast<Stream*>(stream);
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

bool is_done(const Stream* stream, uint64_t number) {
  return number <= stream->done || number + kMostPending <= numbered;
}

void wait_until(Stream* stream, uint64_t number) {
  if (number <= stream->done) return;
  stream->done = number;
  auto waits = std::move(stream->waits);
  stream->waits.clear();
  for (const auto& wait : waits) wait_until(wait.other, wait.number);
}

// The answer to a host that asks.
cudaError_t query(Stream* stream, uint64_t number) {
  if (queries.since != numbered) queries = {numbered, 0};
  if (is_done(stream, number)) return cudaSuccess;
  if (++queries.count < kMostQueries) return cudaErrorNotReady;
  wait_until(stream, number);
  return cudaSuccess;
}

// torch has a thread for each group that asks until a collective is done, to forget it, and ends the
// process after a while. It changes no memory; so what it hears need not wait for the host. It alone
// asks beside captures of its own thread only; before torch 2.15 it has a name.
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

bool watches_collectives() {
  thread_local const bool is_named = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_nccl", 7) == 0;
  }();
  return is_named || capture_mode == cudaStreamCaptureModeThreadLocal;
}

thread_local bool ignores_waits = false;

cudaError_t give_stream(cudaStream_t* out, int priority) {
  Lock lock(guard);
  streams.emplace_back();
  streams.back().device = current_device();
  streams.back().priority = priority;
  *out = reinterpret_cast<cudaStream_t>(&streams.back());
  return cudaSuccess;
}

cudaError_t give_event(cudaEvent_t* out) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

}  // namespace

void enqueue(cudaStream_t stream, double microseconds) {
  Lock lock(guard);
  Stream* busy = stream_of(stream);
  busy->last = ++numbered;
  busy->elapsed_us = std::max(busy->elapsed_us, host_us) + microseconds;
  if (busy->capture) ++captures[busy->capture].nodes;
}

uint64_t work_so_far() {
  Lock lock(guard);
  return numbered;
}

void wait_for(cudaStream_t stream) {
  Lock lock(guard);
  Stream* waited = stream_of(stream);
  wait_until(waited, waited->last);
  host_waits(waited->elapsed_us);
}

void ignore_waits(bool on) { ignores_waits = on; }

bool is_capturing(cudaStream_t stream) {
  if (!open_captures) return false;
  Lock lock(guard);
  return stream_of(stream)->capture;
}

bool was_captured() { return capture_count > 0; }

void do_or_capture(cudaStream_t stream, std::function<void()> work) {
  if (!is_capturing(stream)) return work();
  Lock lock(guard);
  captures[stream_of(stream)->capture].work.push_back(
      std::make_shared<std::function<void()>>(std::move(work)));
}

}  // namespace simulated

using namespace simulated;

extern "C" {

cudaError_t cudaDeviceSynchronize() {
  Lock lock(guard);
  const int device = current_device();
  for (size_t at = 0; at < streams.size(); ++at) {
    const bool is_default = at < kMostDevices;
    if (is_default ? static_cast<int>(at) == device : streams[at].device == device) {
      wait_until(&streams[at], streams[at].last);
      host_waits(streams[at].elapsed_us);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* out) { return give_stream(out, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) { return give_stream(out, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  return give_stream(out, priority);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) {
  *out = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(guard);
  Stream* asked = stream_of(stream);
  return query(asked, asked->last);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_capturing(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  wait_for(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(guard);
  Stream* waiting = stream_of(stream);
  const Event* awaited = event_of(event);
  if (ignores_waits || !awaited->stream || awaited->stream == waiting) return cudaSuccess;
  if (captures.count(awaited->capture)) waiting->capture = awaited->capture;
  waiting->elapsed_us = std::max(waiting->elapsed_us, awaited->at_us);
  if (is_done(awaited->stream, awaited->number)) return cudaSuccess;
  waiting->waits.push_back({awaited->stream, awaited->number});
  waiting->last = ++numbered;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) { return give_event(out); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { return give_event(out); }

// What a process does for another is done when that one hears of it.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t) {
  std::memset(out, 0, sizeof *out);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t) { return give_event(out); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(guard);
  Stream* recorded = stream_of(stream);
  recorded->elapsed_us = std::max(recorded->elapsed_us, host_us);
  *event_of(event) = {recorded, recorded->last, recorded->elapsed_us, recorded->capture};
  // Two events are never at one moment.
  recorded->elapsed_us += kLeastUs;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(guard);
  const Event* asked = event_of(event);
  if (watches_collectives() || !asked->stream) return cudaSuccess;
  return query(asked->stream, asked->number);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(guard);
  if (Stream* stream = event_of(event)->stream) wait_until(stream, event_of(event)->number);
  host_waits(event_of(event)->at_us);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t from, cudaEvent_t to) {
  *out = static_cast<float>((event_of(to)->at_us - event_of(from)->at_us) / 1000);
  return cudaSuccess;
}

// --- graphs: what is captured takes its memory while it is captured, and is done at each launch -----

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                unsigned long long* id, cudaGraph_t* graph) {
  Lock lock(guard);
  const unsigned long long capture = stream_of(stream)->capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture;
  if (graph) *graph = nullptr;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  return capture_info(stream, out, nullptr, nullptr);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return capture_info(stream, status, id, graph);
}

#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t**, size_t*) {
  return capture_info(stream, status, id, graph);
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Lock lock(guard);
  stream_of(stream)->capture = ++capture_count;
  captures[capture_count];
  open_captures = captures.size();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  Lock lock(guard);
  const unsigned long long capture = stream_of(stream)->capture;
  for (Stream& other : streams) {
    if (other.capture == capture) other.capture = 0;
  }
  *out = reinterpret_cast<cudaGraph_t>(new Graph(std::move(captures[capture])));
  captures.erase(capture);
  open_captures = captures.size();
  return cudaSuccess;
}

static cudaError_t instantiate(cudaGraphExec_t* out, cudaGraph_t graph) {
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph,
                                          unsigned long long) {
  return instantiate(out, graph);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  return instantiate(out, graph);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const auto& work : reinterpret_cast<Graph*>(graph)->work) (*work)();
  enqueue(stream, 5);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}

// --- for those who compute values, see ../operators ---------------------------------------------

int torchmem_captures() { return static_cast<int>(open_captures); }

int torchmem_is_capturing(void* stream) { return is_capturing(static_cast<cudaStream_t>(stream)); }

void torchmem_capture(void* stream, void (*run)(void*), void (*drop)(void*), void* what) {
  const std::shared_ptr<void> kept(what, drop);
  do_or_capture(static_cast<cudaStream_t>(stream), [run, kept] { run(kept.get()); });
}

}  // extern "C"
