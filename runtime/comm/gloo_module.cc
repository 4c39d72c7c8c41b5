#include "runtime/comm/gloo_module.h"

#include <fmt/format.h>

#include "runtime/core/program_part.h"

namespace cairn::comm {
namespace {

constexpr const char* kFile = "libcairn_gloo.so";
constexpr const char* kSymbol = "cairn_gloo_module";

Result<const GlooModule*> load() {
  RT_TRY_SET(const ProgramPart part,
             load_program_part(kFile, kSymbol).with(fmt::format("runs of several hosts need {}", kFile)));
  if (part.symbol) return static_cast<const GlooModule*>(part.symbol);
  RT_TRY_SET(const auto places, program_part_places(kFile));
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
