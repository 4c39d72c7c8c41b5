#include "runtime/comm/gloo_module.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <string>
#include <system_error>

namespace cairn::comm {
namespace {

constexpr const char* kFile = "libcairn_gloo.so";
constexpr const char* kSymbol = "cairn_gloo_module";

Result<const GlooModule*> load() {
  std::error_code failed;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", failed).parent_path();
  if (failed) return Error{ErrorCode::kIo, fmt::format("/proc/self/exe: {}", failed.message())};
  const std::array places = {folder / kFile, folder.parent_path() / "lib" / kFile};
  for (const auto& path : places) {
    if (!std::filesystem::exists(path, failed)) continue;
    void* const module = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const void* const found = module ? ::dlsym(module, kSymbol) : nullptr;
    if (!found)
      return Error{ErrorCode::kUnsupported, fmt::format("runs of several hosts need {}: {}", kFile, ::dlerror())};
    return static_cast<const GlooModule*>(found);
  }
  return Error{
      ErrorCode::kUnsupported,
      fmt::format("runs of several hosts need {}, which is neither {} nor {}; it is built and packaged with the "
                  "program and moves with it",
                  kFile, places[0].string(), places[1].string())};
}

}  // namespace

Result<const GlooModule*> gloo_module() {
  static const Result<const GlooModule*> module = load();
  return module;
}

Result<std::unique_ptr<LinkedEngine>> make_linked_gloo_engine(const GlooConfig& config,
                                                              const std::shared_ptr<LinkedEngine>& other) {
  RT_TRY_SET(const GlooModule* const module, gloo_module());
  Result<std::unique_ptr<LinkedEngine>> engine = Error{ErrorCode::kInternal, "the module has made no engine"};
  module->make(config, other, &engine);
  return engine;
}

Result<std::unique_ptr<Engine>> make_gloo_engine(const GlooConfig& config) {
  RT_TRY_SET(auto engine, make_linked_gloo_engine(config, nullptr));
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace cairn::comm
