// CUDA's libraries: handles that are not null, versions, one algorithm for a product, and sizes.
//
// What a library would ask torch to allocate for it and what is not known here is 0, and counted:
// `torchmem_unknown_scratch` says how often each library was asked. Where it is known how much that
// can be at most, `torchmem_bounded_scratch` says so, and when.

#include "cudnn_planner.h"
#include "shared.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>

using namespace simulated;

extern "C" void torchmem_note_unknown_scratch(int library);

using P = void*;

// A cublasLtMatmulHeuristicResult_t: an algorithm, its workspace in bytes, and what was expected.
static constexpr size_t kBytesOfAlgorithm = 96;

#define FOR_TYPES(F) F(S) F(D) F(C) F(Z)

template <typename Size>
static int no_sparse_scratch(Size* out) {
  torchmem_note_unknown_scratch(2);
  *out = 0;
  return 0;
}

static thread_local long products = 0;

// Before a library's call torch gives it the stream of this thread.
static thread_local cudaStream_t stream_of_libraries = nullptr;

static int set_stream(void* stream) {
  stream_of_libraries = static_cast<cudaStream_t>(stream);
  return 0;
}

// How many elements the sparse matrix has that this thread makes; -1 if nobody knows.
static thread_local long sparse_elements = -1;

long simulated::products_asked_for() { return products; }

extern "C" {

void torchmem_note_sparse_elements(long count) { sparse_elements = count; }

// --- streams: each function of a library that computes is a piece of work -------------------------

int cublasSetStream_v2(P, P stream) { return set_stream(stream); }
int cudnnSetStream(P, P stream) { return set_stream(stream); }
int cufftSetStream(int, P stream) { return set_stream(stream); }
int cusolverDnSetStream(P, P stream) { return set_stream(stream); }
int cusparseSetStream(P, P stream) { return set_stream(stream); }

void torchmem_library_work() { enqueue(stream_of_libraries, 5); }

// --- how often scratch memory of an unknown size was asked for -----------------------------------

static std::atomic<long> unknown_scratch[4];

long torchmem_unknown_scratch(int library) { return unknown_scratch[library]; }
void torchmem_note_unknown_scratch(int library) { ++unknown_scratch[library]; }

// --- cuBLAS ---------------------------------------------------------------------------------------

int cublasCreate_v2(void** out) { return give_handle(out); }
int cublasLtCreate(void** out) { return give_handle(out); }
int cublasLtMatmulDescCreate(void** out) { return give_handle(out); }
int cublasLtMatrixLayoutCreate(void** out) { return give_handle(out); }
int cublasLtMatmulPreferenceCreate(void** out) { return give_handle(out); }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* results, int* count) {
  std::memset(results, 0, kBytesOfAlgorithm);
  ++products;
  *count = 1;
  return 0;
}

size_t cublasLtGetVersion() { return 10000 * (CUDART_VERSION / 1000); }
int cublasGetVersion_v2(void*, int* out) {
  *out = 10000 * (CUDART_VERSION / 1000);
  return 0;
}

// Of a batch, the host is told whether the arguments were right.
#define BATCHES(T)                                                                                \
  int cublas##T##geqrfBatched(P, int, int, P, int, P, int* info, int) { return *info = 0; }       \
  int cublas##T##gelsBatched(P, int, int, int, int, P, int, P, int, int* info, P, int) {          \
    return *info = 0;                                                                             \
  }                                                                                               \
  int cublas##T##getrsBatched(P, int, int, int, P, int, P, P, int, int* info, int) {              \
    return *info = 0;                                                                             \
  }
FOR_TYPES(BATCHES)

// --- cuSPARSE: a function that asks for sizes writes them last --------------------------------------

int cusparseCreate(void** out) { return give_handle(out); }
int cusparseSpMM_bufferSize(P, int, int, P, P, P, P, P, int, int, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseSDDMM_bufferSize(P, int, int, P, P, P, P, P, int, int, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseSpSM_bufferSize(P, int, int, P, P, P, P, int, int, P, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseSpMV_bufferSize(P, int, P, P, P, P, P, int, int, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseSpSV_bufferSize(P, int, P, P, P, P, int, int, P, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseSpGEMM_workEstimation(P, int, int, P, P, P, P, P, int, int, P, size_t* out, P) {
  return no_sparse_scratch(out);
}
int cusparseSpGEMM_compute(P, int, int, P, P, P, P, P, int, int, P, size_t* out, P) {
  return no_sparse_scratch(out);
}
// The size of a product of two sparse matrices depends on where their elements are.
int cusparseSpMatGetSize(P, int64_t* rows, int64_t* columns, int64_t* count) {
  *rows = *columns = 0;
  *count = std::max(sparse_elements, 0L);
  return 0;
}
int cusparseXcoosort_bufferSizeExt(P, int, int, int, P, P, size_t* out) {
  return no_sparse_scratch(out);
}
int cusparseXcsrsort_bufferSizeExt(P, int, int, int, P, P, size_t* out) {
  return no_sparse_scratch(out);
}
// At most all elements of both are in a sum.
int cusparseXcsrgeam2Nnz(P, int, int, P, int count, P, P, P, int other, P, P, P, P, int* out, P) {
  *out = sparse_elements < 0 ? count + other : sparse_elements;
  return 0;
}

#define SPARSE_SIZES(T)                                                                           \
  int cusparse##T##csrgeam2_bufferSizeExt(P, int, int, P, P, int, P, P, P, P, P, int, P, P, P, P, \
                                          P, P, P, size_t* out) {                                 \
    return no_sparse_scratch(out);                                                                \
  }                                                                                               \
  int cusparse##T##bsrsv2_bufferSize(P, int, int, int, int, P, P, P, P, int, P, int* out) {       \
    return no_sparse_scratch(out);                                                                \
  }                                                                                               \
  int cusparse##T##bsrsm2_bufferSize(P, int, int, int, int, int, int, P, P, P, P, int, P,         \
                                     int* out) {                                                  \
    return no_sparse_scratch(out);                                                                \
  }
FOR_TYPES(SPARSE_SIZES)

// --- cuSPARSELt: of two elements that stand beside each other, or of four, half are kept -----------

// What the matrix would take that this thread described last.
static thread_local size_t compressed_bytes = 0;

// Half of the elements, and where they stood: 2 bits for each kept one, 4 where elements have 4 bytes.
int cusparseLtStructuredDescriptorInit(P, P, int64_t rows, int64_t columns, int64_t, unsigned, int type,
                                       int, int) {
  const size_t count = rows * columns;
  constexpr int kFloat = 0, kHalf = 2, kBFloat16 = 14;  // of library_types.h
  const size_t element = type == kFloat ? 4 : type == kHalf || type == kBFloat16 ? 2 : 1;
  compressed_bytes = count * element / 2 + count / (element == 4 ? 4 : 8);
  return 0;
}
int cusparseLtSpMMACompressedSize2(P, P, size_t* compressed, size_t* scratch) {
  torchmem_note_unknown_scratch(3);
  *compressed = compressed_bytes;
  return *scratch = 0;
}
int cusparseLtMatmulGetWorkspace(P, P, size_t* out) {
  torchmem_note_unknown_scratch(3);
  return *out = 0;
}
int cusparseLtMatmulAlgGetAttribute(P, P, int, void* out, size_t bytes) {
  std::memset(out, 0, bytes);
  return 0;
}

// --- cuFFT ----------------------------------------------------------------------------------------

// "In the worst case, the cuFFT Library allocates space for 8*batch*n[0]*..*n[rank-1] cufftComplex
// or cufftDoubleComplex elements": cuFFT API Reference, 2.2 Fourier Transform Setup.
static constexpr int kMostCopies = 8;

// Numbers of the libraries are those of `torchmem_unknown_scratch`, and cuFFT's.
constexpr int kFourier = 4;

struct Scratch {
  int64_t time_ns, bytes, device, library;
};

static std::mutex scratch_lock;
static auto& most_of_plan = forever<std::vector<int64_t>>();
static auto& bounded_scratch = forever<std::vector<Scratch>>();

// Writes down what was taken since a call, as far as there is room; returns how much there is.
long torchmem_bounded_scratch(long first, long room, Scratch* out) {
  std::lock_guard<std::mutex> guard(scratch_lock);
  const long count = bounded_scratch.size();
  for (long at = first; at < std::min(count, first + room); ++at) *out++ = bounded_scratch[at];
  return count;
}

// Now a library may have taken so much more than what is counted.
void torchmem_note_bounded_scratch(int library, int64_t most_bytes) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  std::lock_guard<std::mutex> guard(scratch_lock);
  bounded_scratch.push_back({now.tv_sec * int64_t{1000000000} + now.tv_nsec, most_bytes,
                             chosen_device(), library});
}

int cufftCreate(int* out) {
  std::lock_guard<std::mutex> guard(scratch_lock);
  *out = most_of_plan.size();
  most_of_plan.push_back(0);
  return 0;
}
int cufftXtMakePlanMany(int plan, int rank, long long* sizes, long long*, long long, long long, int,
                        long long*, long long, long long, int, long long batch, size_t* scratch,
                        int type) {
  constexpr int kDouble = 5;  // CUDA_C_64F of library_types.h
  int64_t bytes = kMostCopies * batch * (type == kDouble ? 16 : 8);
  for (int at = 0; at < rank; ++at) bytes *= sizes[at];
  std::lock_guard<std::mutex> guard(scratch_lock);
  most_of_plan[plan] = bytes;
  *scratch = 0;
  return 0;
}
// The work area is there from here on until the transform has been given to a stream.
int cufftSetWorkArea(int plan, void*) {
  int64_t most = 0;
  {
    std::lock_guard<std::mutex> guard(scratch_lock);
    most = most_of_plan[plan];
  }
  torchmem_note_bounded_scratch(kFourier, most);
  return 0;
}

// --- cuSOLVER: a function that asks for sizes writes them last ------------------------------------

int cusolverDnCreate(void** out) { return give_handle(out); }
int cusolverDnCreateParams(void** out) { return give_handle(out); }
int cusolverDnCreateGesvdjInfo(void** out) { return give_handle(out); }

static int no_scratch(int* out) {
  torchmem_note_unknown_scratch(1);
  *out = 0;
  return 0;
}
static int no_scratch_anywhere(size_t* device, size_t* host) {
  torchmem_note_unknown_scratch(1);
  *device = *host = 0;
  return 0;
}

#define SIZES(T)                                                                                   \
  int cusolverDn##T##geqrf_bufferSize(P, int, int, P, int, int* out) { return no_scratch(out); }   \
  int cusolverDn##T##getrf_bufferSize(P, int, int, P, int, int* out) { return no_scratch(out); }   \
  int cusolverDn##T##potrf_bufferSize(P, int, int, P, int, int* out) { return no_scratch(out); }   \
  int cusolverDn##T##sytrf_bufferSize(P, int, P, int, int* out) { return no_scratch(out); }        \
  int cusolverDn##T##gesvd_bufferSize(P, int, int, int* out) { return no_scratch(out); }           \
  int cusolverDn##T##gesvdj_bufferSize(P, int, int, int, int, P, int, P, P, int, P, int, int* out, \
                                       P) {                                                        \
    return no_scratch(out);                                                                        \
  }                                                                                                \
  int cusolverDn##T##gesvdjBatched_bufferSize(P, int, int, int, P, int, P, P, int, P, int,         \
                                              int* out, P, int) {                                  \
    return no_scratch(out);                                                                        \
  }                                                                                                \
  int cusolverDn##T##gesvdaStridedBatched_bufferSize(P, int, int, int, int, P, int, long long, P,  \
                                                     long long, P, int, long long, P, int,         \
                                                     long long, int* out, int) {                   \
    return no_scratch(out);                                                                        \
  }
FOR_TYPES(SIZES)

#define SIZES_OF_KIND(T, eig, orth)                                                              \
  int cusolverDn##T##eig##evd_bufferSize(P, int, int, int, P, int, P, int* out) {                \
    return no_scratch(out);                                                                      \
  }                                                                                              \
  int cusolverDn##T##eig##evjBatched_bufferSize(P, int, int, int, P, int, P, int* out, P, int) { \
    return no_scratch(out);                                                                      \
  }                                                                                              \
  int cusolverDn##T##orth##gqr_bufferSize(P, int, int, int, P, int, P, int* out) {               \
    return no_scratch(out);                                                                      \
  }                                                                                              \
  int cusolverDn##T##orth##mqr_bufferSize(P, int, int, int, int, int, P, int, P, P, int,         \
                                          int* out) {                                            \
    return no_scratch(out);                                                                      \
  }
SIZES_OF_KIND(S, sy, or)
SIZES_OF_KIND(D, sy, or)
SIZES_OF_KIND(C, he, un)
SIZES_OF_KIND(Z, he, un)

int cusolverDnXgeqrf_bufferSize(P, P, int64_t, int64_t, int, P, int64_t, int, P, int, size_t* device,
                                size_t* host) {
  return no_scratch_anywhere(device, host);
}
int cusolverDnXpotrf_bufferSize(P, P, int, int64_t, int, P, int64_t, int, size_t* device,
                                size_t* host) {
  return no_scratch_anywhere(device, host);
}
int cusolverDnXsyevd_bufferSize(P, P, int, int, int64_t, int, P, int64_t, int, P, int,
                                size_t* device, size_t* host) {
  return no_scratch_anywhere(device, host);
}
int cusolverDnXsyevBatched_bufferSize(P, P, int, int, int64_t, int, P, int64_t, int, P, int,
                                      size_t* device, size_t* host, int64_t) {
  return no_scratch_anywhere(device, host);
}
int cusolverDnXgeev_bufferSize(P, P, int, int, int64_t, int, P, int64_t, int, P, int, P, int64_t,
                               int, P, int64_t, int, size_t* device, size_t* host) {
  return no_scratch_anywhere(device, host);
}
int cusolverDnXsytrs_bufferSize(P, int, int64_t, int64_t, int, P, int64_t, P, int, P, int64_t,
                                size_t* device, size_t* host) {
  return no_scratch_anywhere(device, host);
}

}  // extern "C"
