// A library with the names of NCCL's functions and nothing behind them, for tests of who loads one.
#include "runtime/cuda/nccl_api.h"

using namespace cairn::cuda;

#define ncclGetVersion other_version
#define RT_FUNCTION(member, name, parameters) \
  extern "C" int name parameters { return 0; }
RT_NCCL_CALLS(RT_FUNCTION)
#undef ncclGetVersion

extern "C" int ncclGetVersion(int* version) { return *version = CAIRN_OTHER_VERSION, 0; }
extern "C" const char* ncclGetErrorString(int) { return "none"; }
extern "C" const char* ncclGetLastError(NcclHandle) { return "none"; }
