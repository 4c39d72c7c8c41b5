// What cuDNN asks of the driver while it builds a plan, as libcuda.so.1: modules and kernels that are never run. With
// it real plans are built where there is no device (docs/cuda-tests.md). Signatures are those of cuda.h; handles are
// what nobody looks into.

#include <cstddef>

namespace {

void* some(int which) {
  static char places[4];
  return &places[which];
}

}  // namespace

extern "C" {

int cuLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  *library = some(0);
  return 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = some(1);
  return 0;
}
int cuLibraryGetModule(void** module, void*) {
  *module = some(2);
  return 0;
}
int cuLibraryGetGlobal(void** address, size_t* bytes, void*, const char*) {
  *address = nullptr;
  *bytes = 0;
  return 0;
}
int cuKernelGetFunction(void** function, void*) {
  *function = some(3);
  return 0;
}
int cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuModuleLoadData(void** module, const void*) {
  *module = some(2);
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = nullptr;
  return 0;
}
// It looks for these too, and says so where they are missing. None is called for a plan.
#define RT_NEVER(name) \
  int name() { return 100; } /* CUDA_ERROR_NO_DEVICE */
RT_NEVER(cuGetErrorName)
RT_NEVER(cuGetErrorString)
RT_NEVER(cuCtxGetLimit)
RT_NEVER(cuCtxPopCurrent)
RT_NEVER(cuCtxPushCurrent)
RT_NEVER(cuStreamGetCtx)
RT_NEVER(cuLinkCreate)
RT_NEVER(cuLinkAddData)
RT_NEVER(cuLinkComplete)
RT_NEVER(cuLinkDestroy)
RT_NEVER(cuLaunchKernel)
RT_NEVER(cuLaunchKernelEx)
RT_NEVER(cuLaunchCooperativeKernel)
RT_NEVER(cuDeviceGetCount)
RT_NEVER(cuDeviceGet)
RT_NEVER(cuLibraryLoadFromFile)
RT_NEVER(cuOccupancyMaxPotentialClusterSize)
#undef RT_NEVER
int cuModuleGetFunction(void** function, void*, const char*) {
  *function = some(3);
  return 0;
}

}  // extern "C"
