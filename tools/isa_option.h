#pragma once
// --isa: the instruction set of a run's kernels.

#include "runtime/kernels/isa.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace cairn::tools {

/// One that this machine lacks is a usage error, with those that it has.
CLI::Option* add_isa_option(CLI::App& command, kernels::GemmIsa& isa);

}  // namespace cairn::tools
