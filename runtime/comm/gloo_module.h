#pragma once
// The Gloo engine lives in a module (runtime/gloo, libcairn_gloo.so), which is loaded when a run has several hosts:
// Gloo brings libraries of RDMA and of stores with it, up to 0.2 s at each start of a process, of which no other
// command has any use. The module lies beside the program, or, installed, in lib beside the program's folder.

#include <memory>

#include "runtime/comm/gloo_engine.h"
#include "runtime/comm/linked_engine.h"
#include "runtime/core/result.h"

namespace cairn::comm {

struct GlooModule {
  const char* tree_version;  // of the tree that it is built from (cmake/BuildVersion.cmake)
  void (*make)(const GlooConfig& config, const std::shared_ptr<LinkedEngine>& other,
               Result<std::unique_ptr<LinkedEngine>>* out);  // make_linked_gloo_engine()
};

/// Loads it at the first call; it stays loaded. Safe from any thread.
/// Errors: kUnsupported when it is not there, or a library that it needs is not.
Result<const GlooModule*> gloo_module();

}  // namespace cairn::comm
