#include "runtime/cuda/machine/module.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "runtime/cuda/blas_api.h"

namespace cairn::cuda {
namespace {

constexpr const char* kBuild = "build it with `cmake --preset cuda && cmake --build --preset cuda` where nvcc 13 is";

Result<LoadedModule> load() {
  std::error_code failed;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", failed).parent_path();
  if (failed) return Error{ErrorCode::kIo, fmt::format("/proc/self/exe: {}", failed.message())};
  const std::array places = {folder / kModuleFile, folder.parent_path() / "lib" / kModuleFile};
  for (const auto& path : places) {
    if (!std::filesystem::exists(path, failed)) continue;
    void* const opened = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto* const found = static_cast<const Module*>(opened ? ::dlsym(opened, kModuleSymbol) : nullptr);
    if (found == nullptr) return Error{ErrorCode::kUnsupported, fmt::format("{}: {}", path.string(), ::dlerror())};
    return LoadedModule{found, path.string()};
  }
  return Error{ErrorCode::kUnsupported,
               fmt::format("this build of cairn has no kernels for CUDA: {} is neither {} nor {}; {}", kModuleFile,
                           places[0].string(), places[1].string(), kBuild)};
}

}  // namespace

Result<LoadedModule> load_module(std::string_view tree_version) {
  static const Result<LoadedModule> once = load();
  if (!once.ok() || std::string_view(once.value().module->tree_version) == tree_version) return once;
  return Error{ErrorCode::kUnsupported,
               fmt::format("{} was built from other sources ({}) than this program ({}); they move together",
                           once.value().path, once.value().module->tree_version, tree_version)};
}

Result<int> visible_devices(std::string_view tree_version) {
  RT_TRY_SET(const LoadedModule loaded, load_module(tree_version));
  const Api& api = loaded.module->api();
  int out = 0;
  RT_TRY(checked(api, api.device_count(&out), "looking for devices", ErrorCode::kUnavailable));
  return out;
}

Result<std::unique_ptr<CudaMachine>> open_machine(std::string_view tree_version, const MachineOptions& options) {
  RT_TRY_SET(const LoadedModule loaded, load_module(tree_version));
  static const Result<LoadedBlas> products = load_blas(library_candidates("libcublasLt.so.13"));
  if (!products.ok()) return products.error();
  return CudaMachine::open(loaded.module->api(), products.value().api, loaded.module->kernels(), options);
}

}  // namespace cairn::cuda
