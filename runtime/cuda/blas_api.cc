#include "runtime/cuda/blas_api.h"

#include <fmt/format.h>

namespace cairn::cuda {

Result<LoadedBlas> load_blas(std::span<const std::string> candidates) {
  RT_TRY_SET(Library library, Library::open(candidates, "cuBLASLt library"));
  LoadedBlas out;
#define RT_FIND(member, function, parameters) library.find(out.api.member, #function);
  RT_BLAS_CALLS(RT_FIND)
#undef RT_FIND
  library.find(out.api.version, "cublasLtGetVersion");
  library.find(out.api.status_name, "cublasLtGetStatusName");
  RT_TRY(library.complete());
  out.path = library.path();
  const size_t version = out.api.version();  // 130100: 13.1
  if (version / 10000 != kMajor) {
    return Error{ErrorCode::kUnsupported, fmt::format("{} is version {}.{} of cuBLASLt; {}.x is needed", out.path,
                                                      version / 10000, version % 10000 / 100, kMajor)};
  }
  return out;
}

}  // namespace cairn::cuda
