#include "runtime/cuda/api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <sstream>

namespace cairn::cuda {
Status checked(const Api& api, int error, const char* what, ErrorCode code) {
  if (error == 0) return {};
  api.last_error();  // reported here: the next look at this thread's last error is for its own
  return Error{error == kOutOfMemory ? ErrorCode::kNoSpace : code,
               fmt::format("{}: {} ({})", what, api.error_string(error), api.error_name(error))};
}

Result<Library> Library::open(std::span<const std::string> candidates, const char* what) {
  std::string tried;
  for (const std::string& name : candidates) {
    Library out;
    // Never closed: the driver's threads live on.
    out.handle_ = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    out.path_ = name;
    if (out.handle_ != nullptr) return out;
    const char* const why = dlerror();
    tried += fmt::format("\n  {}", why != nullptr ? why : name.c_str());
  }
  return Error{ErrorCode::kUnavailable, fmt::format("no {} can be opened:{}", what, tried)};
}

void* Library::symbol(const char* function) {
  void* const out = dlsym(handle_, function);
  Dl_info found{};
  if (out == nullptr) {
    missing_ += fmt::format("{}{}", missing_.empty() ? "" : ", ", function);
  } else if (dladdr(out, &found) != 0 && found.dli_fname != nullptr) {
    path_ = found.dli_fname;
  }
  return out;
}

Status Library::complete() const {
  if (missing_.empty()) return {};
  return Error{ErrorCode::kUnsupported, fmt::format("{} lacks {}", path_, missing_)};
}

Result<LoadedApi> load_api(std::span<const std::string> candidates) {
  RT_TRY_SET(Library library, Library::open(candidates, "CUDA runtime library"));
  LoadedApi out;
#define RT_FIND(member, function, parameters) library.find(out.api.member, #function);
  RT_CUDA_CALLS(RT_FIND)
#undef RT_FIND
  library.find(out.api.error_name, "cudaGetErrorName");
  library.find(out.api.error_string, "cudaGetErrorString");
  RT_TRY(library.complete());
  out.path = library.path();
  int version = 0;
  RT_TRY(checked(out.api, out.api.runtime_version(&version), "cudaRuntimeGetVersion"));
  if (version / 1000 != kMajor) {
    return Error{ErrorCode::kUnsupported, fmt::format("{} is version {}.{} of the CUDA runtime; {}.x is needed",
                                                      out.path, version / 1000, version % 1000 / 10, kMajor)};
  }
  return out;
}

std::vector<std::string> library_candidates(const char* file) {
  std::vector<std::string> out = {file};
  for (const char* const folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/lib"}) {
    out.push_back(fmt::format("{}/{}", folder, file));
  }
  if (const char* const more = std::getenv("CAIRN_CUDA_PATH")) {
    std::istringstream folders(more);
    for (std::string folder; std::getline(folders, folder, ':');) {
      if (!folder.empty()) out.push_back(fmt::format("{}/{}", folder, file));
    }
  }
  return out;
}

}  // namespace cairn::cuda
