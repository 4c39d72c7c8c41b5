#pragma once
// Which program this is. `cairn --version` prints it, and agents that join a run compare it.

#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::tools {

/// Of the sources: "0.1.0-gc2cdcd58ab12" (cmake/BuildVersion.cmake).
std::string_view tree_version();

/// "0.1.0-gc2cdcd58ab12 (build 5d1f...)": the version of the tree (cmake/BuildVersion.cmake) and the GNU build id of
/// the running program, 40 digits. The linker makes the id from all that it links, so two programs with one id are the
/// same program: a tree that differs from its commit has an id of its own. Stripping keeps it; shared libraries are not
/// in it.
std::string program_version();

/// What all hosts of a run must have in common: program_version() and the build id of the Gloo module, which it loads.
/// Errors: those of comm::gloo_module(); kInvalidInput when the module was built from another tree than the program.
Result<std::string> program_and_module_version();

}  // namespace cairn::tools
