// What cuDNN asks of the driver when it compiles a kernel for a plan: the kernel is never run.
//
// CUDA's headers declare some of these, and others by other names: they stay out.

namespace {

using P = void*;
int loaded;
constexpr int kBlocksOfCluster = 8;

int give(P* out) {
  *out = &loaded;
  return 0;
}

}  // namespace

extern "C" {

int cuLibraryLoadData(P* out) { return give(out); }
int cuLibraryLoadFromFile(P* out) { return give(out); }
int cuLibraryGetKernel(P* out) { return give(out); }
int cuLibraryUnload() { return 0; }
int cuKernelGetFunction(P* out) { return give(out); }
int cuKernelSetAttribute() { return 0; }
int cuKernelGetAttribute(int* out) { return *out = 0; }
int cuOccupancyMaxPotentialClusterSize(int* out) {
  *out = kBlocksOfCluster;
  return 0;
}
int cuStreamGetCtx(P, P* out) { return give(out); }
int cuLinkCreate(unsigned, P, P, P* out) { return give(out); }
int cuLinkAddData() { return 0; }
int cuLinkDestroy() { return 0; }
int __nvrtcCPEx() { return 0; }

}  // extern "C"
