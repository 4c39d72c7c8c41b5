// A library with the names of the CUDA runtime's functions and nothing behind them, for tests of who loads one.
#include "runtime/cuda/api.h"

using namespace cairn::cuda;

#define cudaRuntimeGetVersion other_version
#define RT_FUNCTION(member, name, parameters) \
  extern "C" int name parameters { return 0; }
RT_CUDA_CALLS(RT_FUNCTION)
#undef cudaRuntimeGetVersion

extern "C" int cudaRuntimeGetVersion(int* version) { return *version = CAIRN_OTHER_VERSION, 0; }
extern "C" const char* cudaGetErrorName(int) { return "none"; }
extern "C" const char* cudaGetErrorString(int) { return "none"; }
