#pragma once
// The engine of runtime/comm/gloo_engine.h.

#include <memory>

#include "runtime/comm/gloo_engine.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/core/result.h"

namespace cairn::comm {

/// As make_linked_gloo_engine() promises.
Result<std::unique_ptr<LinkedEngine>> make_engine(const GlooConfig& config, const std::shared_ptr<LinkedEngine>& other);

}  // namespace cairn::comm
