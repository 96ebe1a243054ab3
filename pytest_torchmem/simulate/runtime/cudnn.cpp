// cuDNN: descriptors, and plans of graphs of operations.
//
// How much workspace a plan needs is decided inside NVIDIA's library. Where that is there, it plans
// graphs (convolutions, attention) as for a real GPU. A graph that it refuses has one engine, and a
// plan that needs no workspace: what is counted is a lower bound then, and
// `torchmem_unknown_scratch(0)` says for how many calls. Another release of cuDNN may take another
// plan than the first: what the next ones need is the most that counts. The weights of an RNN are
// laid out as cuDNN does it: their sizes follow from the descriptor.

#include "cudnn_planner.h"
#include "shared.h"

#include <algorithm>
#include <cstring>
#include <vector>

#ifndef CUDNN_VERSION
#define CUDNN_VERSION 92000
#endif

using namespace simulated;

extern "C" void torchmem_note_unknown_scratch(int library);
extern "C" void torchmem_note_bounded_scratch(int library, int64_t most_bytes);

namespace {

// Numbers of cudnn_graph.h.
enum Kind {
  kEngine = 2,
  kConfig = 3,
  kHeuristics = 4,
  kPlan = 5,
  kGraph = 15,
};
enum Type { kTypeHandle = 0, kTypeInt64 = 3, kTypeDescriptor = 15 };
enum Attribute {
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kHeuristicDevice = 204,
  kConfigEngine = 300,
  kConfigWorkspace = 303,
  kConfigSharedMemory = 304,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kPlanDevice = 407,
  kGraphOperations = 801,
  kGraphEngineCount = 802,
  kEngineGraph = 1300,
  kEngineIndex = 1301,
  kEngineDevice = 1307,
};

// A descriptor of a graph's parts, or of what is planned for it.
struct Descriptor {
  int kind;
  void* real;       // NVIDIA's own, if its library is there
  bool is_planned;  // the library answers for it
  bool is_exact;    // and cuBLASLt has no part in it
  int64_t most;     // the largest workspace among the plans that another release may take
};

// cuDNN sorts its plans by the time that it expects of them. Twelve programs that others measured
// with an earlier release need no more than the largest of the first four; so twice as many.
constexpr int64_t kLikelyPlans = 8;

// Numbers of cudnn_adv.h and cudnn_ops.h.
constexpr int kSpatialPersistent = 2;
enum Cell { kRelu, kTanh, kLstm, kGru };
constexpr int kBidirectional = 1;
enum Bias { kNone, kInput, kBoth, kRecurrent };

struct Rnn {
  int cell, bias, direction, type;
  int64_t input, hidden, projected, layers;

  int64_t gates() const { return cell == kLstm ? 4 : cell == kGru ? 3 : 1; }
  int64_t directions() const { return direction == kBidirectional ? 2 : 1; }
  int64_t output() const { return cell == kLstm ? projected : hidden; }
  bool projects() const { return cell == kLstm && projected != hidden; }
  int64_t input_of(int64_t pseudo_layer) const {
    return pseudo_layer < directions() ? input : output() * directions();
  }
  int64_t biases() const { return bias == kNone ? 0 : bias == kBoth ? 2 : 1; }
  size_t element_bytes() const { return type == 1 ? 8 : type == 0 ? 4 : 2; }

  int64_t matrices_of(int64_t pseudo_layer) const {
    const int64_t projection = projects() ? projected * hidden : 0;
    return gates() * hidden * (input_of(pseudo_layer) + output()) + projection;
  }
  int64_t elements() const {
    int64_t sum = 0;
    for (int64_t layer = 0; layer < layers * directions(); ++layer) {
      sum += matrices_of(layer) + biases() * gates() * hidden;
    }
    return sum;
  }
};

struct Tensor {
  int type, count;
  int sizes[8];
};

// A graph, and what leads from it to its plan, is planned if its parts are; the parts stand for
// themselves.
bool begins_a_plan(int kind) {
  switch (kind) {
    case kEngine: case kConfig: case kHeuristics: case kPlan: case kGraph: return false;
    default: return true;
  }
}

Descriptor* as_descriptor(void* pointer) { return static_cast<Descriptor*>(pointer); }

// The attribute that takes the device's description, for one that takes what is to be planned.
int device_attribute(int attribute) {
  switch (attribute) {
    case kHeuristicGraph: return kHeuristicDevice;
    case kEngineGraph: return kEngineDevice;
    case kPlanConfig: return kPlanDevice;
    default: return 0;
  }
}

// A convolution may be a product of cuBLASLt's, whose workspace is not known here.
bool needs_cublaslt(void* config) {
  const auto& planner = *cudnn_planner();
  void *engine = nullptr, *other = nullptr;
  long count = 0;
  planner.create(kEngine, &engine);
  planner.create(kConfig, &other);
  planner.get(config, kConfigEngine, kTypeDescriptor, 1, &count, &engine);
  planner.set(other, kConfigEngine, kTypeDescriptor, 1, &engine);
  const long before = products_asked_for();
  planner.finalize(other);
  planner.destroy(other);
  planner.destroy(engine);
  return products_asked_for() != before;
}

int64_t workspace_of(void* real, int attribute) {
  int64_t bytes = 0;
  long count = 0;
  return cudnn_planner()->get(real, attribute, kTypeInt64, 1, &count, &bytes) ? 0 : bytes;
}

// The largest workspace among the plans that come first: torch asks for all, or for one.
int64_t most_of_likely(const void* heuristics) {
  const auto& planner = *cudnn_planner();
  void* configs[kLikelyPlans] = {};
  for (auto& config : configs) planner.create(kConfig, &config);
  long found = 0;
  planner.get(heuristics, kHeuristicResults, kTypeDescriptor, kLikelyPlans, &found, configs);
  int64_t most = 0;
  for (long at = 0; at < std::min<long>(found, kLikelyPlans); ++at) {
    most = std::max(most, workspace_of(configs[at], kConfigWorkspace));
  }
  for (void* config : configs) planner.destroy(config);
  return most;
}

int set_parts(Descriptor& whole, int attribute, int64_t count, void* const* parts) {
  const auto& planner = *cudnn_planner();
  std::vector<void*> real;
  bool are_planned = true;
  for (int64_t at = 0; at < count; ++at) {
    real.push_back(as_descriptor(parts[at])->real);
    are_planned = are_planned && as_descriptor(parts[at])->is_planned;
  }
  const int device = device_attribute(attribute);
  if (device || attribute == kGraphOperations || attribute == kConfigEngine) {
    whole.is_planned = are_planned;
  }
  if (!whole.is_planned) return 0;
  if (device) planner.set(whole.real, device, kTypeDescriptor, 1, &planner.device);
  if (attribute == kPlanConfig) {
    whole.is_exact = !needs_cublaslt(real[0]);
    whole.most = as_descriptor(parts[0])->most;
  }
  return planner.set(whole.real, attribute, kTypeDescriptor, count, real.data());
}

int get_parts(const Descriptor& whole, int attribute, int64_t asked, int64_t* count, void** parts) {
  std::vector<void*> real;
  for (int64_t at = 0; at < asked; ++at) real.push_back(as_descriptor(parts[at])->real);
  const int status = cudnn_planner()->get(whole.real, attribute, kTypeDescriptor, asked, count,
                                          real.data());
  for (int64_t at = 0; !status && at < asked; ++at) {
    as_descriptor(parts[at])->real = real[at];
    as_descriptor(parts[at])->is_planned = true;
  }
  if (attribute != kHeuristicResults || status) return status;
  const int64_t most = most_of_likely(whole.real);
  for (int64_t at = 0; at < std::min<int64_t>(asked, *count); ++at) {
    as_descriptor(parts[at])->most = most;
  }
  return status;
}

int no_workspace(size_t* out) {
  torchmem_note_unknown_scratch(0);
  *out = 0;
  return 0;
}

// Only the mode for channels that come last takes scratch memory.
int batch_norm_workspace(int mode, size_t* out) {
  *out = 0;
  return mode == kSpatialPersistent ? no_workspace(out) : 0;
}

// torch asks for a matrix and for its bias in turns, and leaves the other's descriptor out.
void describe(void* descriptor, int type, int64_t rows, int64_t columns) {
  if (!descriptor) return;
  *static_cast<Tensor*>(descriptor) = {
      type, 3, {1, static_cast<int>(rows), static_cast<int>(columns)}};
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
int cudnnGetProperty(int which, int* out) {
  const int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION % 10000 / 100, CUDNN_VERSION % 100};
  *out = parts[which % 3];
  return 0;
}
const char* cudnnGetErrorString(int) { return "error of the simulated cuDNN"; }
void cudnnGetLastErrorString(char* out, size_t bytes) {
  if (bytes) *out = '\0';
}

int cudnnCreate(void** out) { return give_handle(out); }
int cudnnGetStream(void*, void** out) {
  *out = nullptr;
  return 0;
}
int cudnnCreateTensorDescriptor(void** out) { return give_handle(out); }
int cudnnCreateFilterDescriptor(void** out) { return give_handle(out); }
int cudnnCreateConvolutionDescriptor(void** out) { return give_handle(out); }
int cudnnCreateActivationDescriptor(void** out) { return give_handle(out); }
int cudnnCreateDropoutDescriptor(void** out) { return give_handle(out); }
int cudnnCreatePoolingDescriptor(void** out) { return give_handle(out); }
int cudnnCreateSpatialTransformerDescriptor(void** out) { return give_handle(out); }
int cudnnCreateCTCLossDescriptor(void** out) { return give_handle(out); }
int cudnnCreateRNNDescriptor(void** out) { return give_handle(out); }
int cudnnCreateRNNDataDescriptor(void** out) { return give_handle(out); }

// --- graphs: convolutions and attention ----------------------------------------------------------

int cudnnBackendCreateDescriptor(int kind, void** out) {
  auto* made = new Descriptor{kind, nullptr, false, true, 0};
  // Without the variable nothing is planned, also where it was taken away while the program runs.
  if (auto* planner = std::getenv(kCudnnFolder) ? cudnn_planner() : nullptr) {
    made->is_planned = !planner->create(kind, &made->real) && begins_a_plan(kind);
  }
  *out = made;
  return 0;
}

int cudnnBackendDestroyDescriptor(void* descriptor) {
  if (auto* real = as_descriptor(descriptor)->real) cudnn_planner()->destroy(real);
  delete as_descriptor(descriptor);
  return 0;
}

int cudnnBackendSetAttribute(void* descriptor, int attribute, int type, int64_t count,
                             const void* values) {
  auto& changed = *as_descriptor(descriptor);
  // The library has the device's description in place of a handle.
  if (!changed.real || type == kTypeHandle) return 0;
  if (type == kTypeDescriptor) {
    return set_parts(changed, attribute, count, static_cast<void* const*>(values));
  }
  // Some attributes of a plan's maker come before what is to be planned.
  const int status = cudnn_planner()->set(changed.real, attribute, type, count, values);
  return changed.is_planned ? status : 0;
}

int cudnnBackendFinalize(void* descriptor) {
  auto& made = *as_descriptor(descriptor);
  if (!made.is_planned) return 0;
  const int status = cudnn_planner()->finalize(made.real);
  if (!status || (made.kind != kGraph && made.kind != kHeuristics)) return status;
  made.is_planned = false;
  return 0;
}

int cudnnBackendGetAttribute(void* descriptor, int attribute, int type, int64_t asked,
                             int64_t* count, void* out) {
  const auto& whole = *as_descriptor(descriptor);
  if (whole.is_planned && type == kTypeDescriptor && out) {
    return get_parts(whole, attribute, asked, count, static_cast<void**>(out));
  }
  if (whole.is_planned) {
    return cudnn_planner()->get(whole.real, attribute, type, asked, count, out);
  }
  int64_t found = 0;
  switch (attribute) {
    case kHeuristicResults: found = 1; break;  // the caller has made the descriptors
    case kConfigEngine: found = 1; break;
    case kConfigSharedMemory:
      found = 1;
      if (out && asked) *static_cast<int32_t*>(out) = 0;
      break;
    case kGraphEngineCount:
    case kEngineIndex:
    case kConfigWorkspace:
    case kPlanWorkspace:
      found = 1;
      if (out && asked) *static_cast<int64_t*>(out) = attribute == kGraphEngineCount ? 1 : 0;
      break;
  }
  if (count) *count = found;
  return 0;
}

int cudnnBackendExecute(void*, void* plan, void*) {
  const auto& run = *as_descriptor(plan);
  if (!run.is_planned || !run.is_exact) {
    torchmem_note_unknown_scratch(0);
  } else if (const int64_t more = run.most - workspace_of(run.real, kPlanWorkspace); more > 0) {
    torchmem_note_bounded_scratch(0, more);
  }
  enqueue(nullptr, 5);
  return 0;
}

// --- sizes that the older interface asks for ------------------------------------------------------

using P = void*;

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(P, int mode, int, P, P, P, P, P,
                                                             size_t* out) {
  return batch_norm_workspace(mode, out);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(P, int mode, int, P, P, P, P, P, P, P,
                                                      size_t* out) {
  return batch_norm_workspace(mode, out);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(P, int mode, int, P, P, size_t* out) {
  return batch_norm_workspace(mode, out);
}
int cudnnGetCTCLossWorkspaceSize(P, P, P, P, P, P, int, P, size_t* out) {
  return no_workspace(out);
}
int cudnnGetCTCLossWorkspaceSize_v8(P, int, P, P, P, size_t* out) { return no_workspace(out); }
int cudnnDropoutGetStatesSize(P, size_t* out) { return no_workspace(out); }

// --- RNN ------------------------------------------------------------------------------------------

int cudnnSetRNNDescriptor_v8(P descriptor, int, int cell, int bias, int direction, int, int type,
                             int, int, int32_t input, int32_t hidden, int32_t projected,
                             int32_t layers, P, uint32_t) {
  *static_cast<Rnn*>(descriptor) = {cell, bias, direction, type, input, hidden, projected, layers};
  return 0;
}

int cudnnGetRNNWeightSpaceSize(P, P descriptor, size_t* out) {
  const auto& rnn = *static_cast<Rnn*>(descriptor);
  *out = rnn.elements() * rnn.element_bytes();
  return 0;
}

int cudnnGetRNNTempSpaceSizes(P, P, int, P, size_t* workspace, size_t* reserve) {
  if (reserve) *reserve = 0;
  return no_workspace(workspace);
}

// Matrices of all layers come first, then their biases; in a layer those of the input come first.
int cudnnGetRNNWeightParams(P, P descriptor, int32_t layer, size_t, const void* weights,
                            int32_t which, P matrix, void** matrix_out, P bias, void** bias_out) {
  const auto& rnn = *static_cast<Rnn*>(descriptor);
  const int64_t gates = rnn.gates(), hidden = rnn.hidden;
  auto* start = static_cast<char*>(const_cast<void*>(weights));
  void *no_matrix, *no_bias;
  if (!matrix_out) matrix_out = &no_matrix;
  if (!bias_out) bias_out = &no_bias;
  int64_t before = 0, all_matrices = 0;
  for (int64_t other = 0; other < rnn.layers * rnn.directions(); ++other) {
    all_matrices += rnn.matrices_of(other);
    if (other < layer) before += rnn.matrices_of(other);
  }
  const int64_t columns = which < gates ? rnn.input_of(layer) : rnn.output();
  const int64_t of_input = gates * hidden * rnn.input_of(layer);
  if (which == 2 * gates) {  // the projection
    describe(matrix, rnn.type, rnn.projected, hidden);
    before += of_input + gates * hidden * rnn.output();
    *bias_out = nullptr;
  } else {
    describe(matrix, rnn.type, hidden, columns);
    before += which < gates ? which * hidden * columns
                            : of_input + (which - gates) * hidden * columns;
    describe(bias, rnn.type, hidden, 1);
    const int64_t place = layer * rnn.biases() * gates + which;
    const bool has_bias = rnn.biases() == 2 || (rnn.biases() == 1 && which < gates);
    *bias_out = has_bias ? start + (all_matrices + place * hidden) * rnn.element_bytes() : nullptr;
  }
  *matrix_out = start + before * rnn.element_bytes();
  return 0;
}

int cudnnGetTensorNdDescriptor(P descriptor, int asked, int* type, int* count, int* sizes,
                               int* strides) {
  const auto& tensor = *static_cast<Tensor*>(descriptor);
  *type = tensor.type;
  *count = tensor.count;
  int stride = 1;
  for (int at = tensor.count - 1; at >= 0; --at) {
    if (at < asked) {
      sizes[at] = tensor.sizes[at];
      strides[at] = stride;
    }
    stride *= tensor.sizes[at];
  }
  return 0;
}

}  // extern "C"
