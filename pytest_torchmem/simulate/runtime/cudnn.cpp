// cuDNN: descriptors, one engine for each graph of operations, and plans that need no workspace.
//
// How much workspace the real library would ask for is decided inside it, so what is counted is a
// lower bound; `torchmem_unknown_scratch(0)` says for how many calls. The weights of an RNN are laid
// out as cuDNN does it: their sizes follow from the descriptor.

#include "shared.h"

#include <cstring>

#ifndef CUDNN_VERSION
#define CUDNN_VERSION 92000
#endif

using namespace simulated;

extern "C" void torchmem_note_unknown_scratch(int library);

namespace {

// Numbers of cudnn_graph.h.
enum Attribute {
  kHeuristicResults = 202,
  kConfigEngine = 300,
  kConfigWorkspace = 303,
  kConfigSharedMemory = 304,
  kPlanWorkspace = 402,
  kGraphEngineCount = 802,
  kEngineIndex = 1301,
};

// Numbers of cudnn_adv.h and cudnn_ops.h.
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

int no_workspace(size_t* out) {
  torchmem_note_unknown_scratch(0);
  *out = 0;
  return 0;
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

int cudnnBackendCreateDescriptor(int, void** out) { return give_handle(out); }
int cudnnBackendDestroyDescriptor(void* descriptor) {
  std::free(descriptor);
  return 0;
}

int cudnnBackendGetAttribute(void*, int attribute, int, int64_t asked, int64_t* count, void* out) {
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

int cudnnBackendExecute(void*, void*, void*) {
  torchmem_note_unknown_scratch(0);
  enqueue(nullptr, 5);
  return 0;
}

// --- sizes that the older interface asks for ------------------------------------------------------

using P = void*;

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(P, int, int, P, P, P, P, P,
                                                             size_t* out) {
  return no_workspace(out);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(P, int, int, P, P, P, P, P, P, P,
                                                      size_t* out) {
  return no_workspace(out);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(P, int, int, P, P, size_t* out) {
  return no_workspace(out);
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
