#include "runtime/cuda/cudnn_api.h"

#include <fmt/format.h>

#include <utility>

namespace cairn::cuda {
namespace {

constexpr int kMajorUnit = 10000;  // of a version

}  // namespace

std::string cudnn_version_text(int version) {
  return fmt::format("{}.{}.{}", version / kMajorUnit, version % kMajorUnit / 100, version % 100);
}

Result<LoadedCudnn> load_cudnn(std::span<const std::string> candidates) {
  RT_TRY_SET(Library library, Library::open(candidates, "cuDNN library"));
  size_t (*version)() = nullptr;
  library.find(version, "cudnnGetVersion");
  RT_TRY(library.complete());
  LoadedCudnn out{.library = library, .path = library.path(), .version = static_cast<int>(version())};
  if (out.version < kCudnnLeast || out.version / kMajorUnit != kCudnnLeast / kMajorUnit) {
    return Error{ErrorCode::kUnsupported, fmt::format("{} is version {} of cuDNN; {}.x from {} on is needed", out.path,
                                                      cudnn_version_text(out.version), kCudnnLeast / kMajorUnit,
                                                      cudnn_version_text(kCudnnLeast))};
  }
  return out;
}

}  // namespace cairn::cuda
