#include <build_version.inc>

#include "runtime/comm/gloo_module.h"
#include "runtime/gloo/engine.h"

namespace cairn::comm {

// Alone of this module to be seen from outside. Its parts of runtime/comm and below are copies: what crosses the border
// are objects with virtual functions and values that own their memory.
extern "C" {
[[gnu::visibility("default")]] extern const GlooModule cairn_gloo_module;
const GlooModule cairn_gloo_module = {
    .tree_version = CAIRN_TREE_VERSION,
    .make = [](const GlooConfig& config, const std::shared_ptr<LinkedEngine>& other,
               Result<std::unique_ptr<LinkedEngine>>* out) { *out = make_engine(config, other); }};
}

}  // namespace cairn::comm
