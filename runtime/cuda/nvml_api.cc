#include "runtime/cuda/nvml_api.h"

namespace cairn::cuda {

Result<LoadedNvml> load_nvml(std::span<const std::string> candidates) {
  RT_TRY_SET(Library library, Library::open(candidates, "NVML library"));
  LoadedNvml out;
#define RT_FIND(member, function, parameters) library.find(out.api.member, #function);
  RT_NVML_CALLS(RT_FIND)
#undef RT_FIND
  library.find(out.api.error_string, "nvmlErrorString");
  RT_TRY(library.complete());
  out.path = library.path();
  return out;
}

}  // namespace cairn::cuda
