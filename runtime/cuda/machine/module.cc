#include "runtime/cuda/machine/module.h"

#include <fmt/format.h>

#include <string_view>

#include "runtime/core/program_part.h"
#include "runtime/cuda/blas_api.h"

namespace cairn::cuda {
namespace {

constexpr const char* kBuild = "build it with `cmake --preset cuda && cmake --build --preset cuda` where nvcc 13 is";

Result<LoadedModule> load() {
  RT_TRY_SET(const ProgramPart part, load_program_part(kModuleFile, kModuleSymbol));
  if (part.symbol) return LoadedModule{static_cast<const Module*>(part.symbol), part.path};
  RT_TRY_SET(const auto places, program_part_places(kModuleFile));
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
