#include "runtime/cuda/nccl_api.h"

#include <fmt/format.h>

namespace cairn::cuda {

std::string nccl_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

Result<LoadedNccl> load_nccl(std::span<const std::string> candidates) {
  RT_TRY_SET(Library library, Library::open(candidates, "NCCL library"));
  LoadedNccl out;
#define RT_FIND(member, function, parameters) library.find(out.api.member, #function);
  RT_NCCL_CALLS(RT_FIND)
#undef RT_FIND
  library.find(out.api.error_string, "ncclGetErrorString");
  library.find(out.api.last_error, "ncclGetLastError");
  RT_TRY(library.complete());
  out.path = library.path();
  if (const int error = out.api.version(&out.version); error != kNcclOk) {
    return Error{ErrorCode::kUnsupported, fmt::format("{}: ncclGetVersion: {}", out.path, out.api.error_string(error))};
  }
  if (out.version < kNcclLeast || out.version / 10000 != kNcclLeast / 10000) {
    return Error{ErrorCode::kUnsupported, fmt::format("{} is version {} of NCCL; 2.x from {} on is needed", out.path,
                                                      nccl_version_text(out.version), nccl_version_text(kNcclLeast))};
  }
  return out;
}

}  // namespace cairn::cuda
