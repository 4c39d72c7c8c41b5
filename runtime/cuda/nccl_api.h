#pragma once
// The part of NCCL that is used, as a table like that of the runtime (runtime/cuda/api.h). A communicator is a pointer
// to what only the library knows. What is asked for is ordered on a stream and waits there for the other ranks.
//
// Types and constants are those of nccl.h; runtime/cuda/linked compares them.

#include <climits>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"

struct ncclComm;

namespace cairn::cuda {

using NcclHandle = ncclComm*;

/// What the ranks of a communicator must have in common before it is made: of one of them, for all.
struct NcclId {
  char bytes[128];
};

/// The beginning of ncclConfig_t: the library takes as much of it as `size` says, and its own values for the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21801;  // whose whole structure this is
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int later = INT_MIN;  // of later versions: not set
};

// Of ncclResult_t.
constexpr int kNcclOk = 0, kNcclInProgress = 7;
// Of ncclDataType_t.
constexpr int kNcclBytes = 1, kNcclI64 = 4, kNcclF16 = 6, kNcclF32 = 7, kNcclF64 = 8, kNcclBf16 = 9;
constexpr int kNcclSum = 0;                       // of ncclRedOp_t
constexpr int kNcclNoColor = -1;                  // of a rank that has no part in a split
constexpr int64_t kNcclPiece = int64_t{2} << 20;  // ncclMemAlloc gives whole ones: the driver's recommended granularity
constexpr int kNcclLeast = 22600;  // NCCL_LAUNCH_ORDER_IMPLICIT is read from 2.26.2 on, the first release of 2.26

/// X(member, function of the library, parameters). Each gives an ncclResult_t.
// clang-format off
#define RT_NCCL_CALLS(X)                                                                                             \
  X(version, ncclGetVersion, (int*))                                                                                 \
  X(make_id, ncclGetUniqueId, (NcclId*))                                                                             \
  X(make, ncclCommInitRankConfig, (NcclHandle*, int, NcclId, int, NcclConfig*))                                      \
  X(split, ncclCommSplit, (NcclHandle, int, int, NcclHandle*, NcclConfig*))                                          \
  X(count, ncclCommCount, (NcclHandle, int*))                                                                        \
  X(own_rank, ncclCommUserRank, (NcclHandle, int*))                                                                  \
  X(finalize, ncclCommFinalize, (NcclHandle))                                                                        \
  X(destroy, ncclCommDestroy, (NcclHandle))                                                                          \
  X(abort, ncclCommAbort, (NcclHandle))                                                                              \
  X(async_error, ncclCommGetAsyncError, (NcclHandle, int*))                                                          \
  X(mem_alloc, ncclMemAlloc, (void**, size_t))                                                                       \
  X(mem_free, ncclMemFree, (void*))                                                                                  \
  X(register_memory, ncclCommRegister, (NcclHandle, void*, size_t, void**))                                          \
  X(deregister, ncclCommDeregister, (NcclHandle, void*))                                                             \
  X(begin_group, ncclGroupStart, ())                                                                                 \
  X(end_group, ncclGroupEnd, ())                                                                                     \
  X(send, ncclSend, (const void*, size_t, int, int, NcclHandle, StreamHandle))                                       \
  X(recv, ncclRecv, (void*, size_t, int, int, NcclHandle, StreamHandle))                                             \
  X(all_gather, ncclAllGather, (const void*, void*, size_t, int, NcclHandle, StreamHandle))                          \
  X(broadcast, ncclBroadcast, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle))                      \
  X(all_reduce, ncclAllReduce, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle))                     \
  X(reduce_scatter, ncclReduceScatter, (const void*, void*, size_t, int, int, NcclHandle, StreamHandle))
// clang-format on

struct NcclApi {
#define RT_MEMBER(member, name, parameters) int(*member) parameters = nullptr;
  RT_NCCL_CALLS(RT_MEMBER)
#undef RT_MEMBER
  const char* (*error_string)(int) = nullptr;       // ncclGetErrorString
  const char* (*last_error)(NcclHandle) = nullptr;  // ncclGetLastError: of the process, in words
};

struct LoadedNccl {
  NcclApi api;
  std::string path;
  int version = 0;  // 22809: 2.28.9
};

/// As load_api(), of libnccl.so.2.
Result<LoadedNccl> load_nccl(std::span<const std::string> candidates);

/// "2.28.9"
std::string nccl_version_text(int version);

}  // namespace cairn::cuda
