#include "tools/isa_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace cairn::tools {

CLI::Option* add_isa_option(CLI::App& command, kernels::GemmIsa& isa) {
  const auto take = [&isa](const std::string& name) {
    std::string here;
    for (const kernels::GemmIsa one : kernels::kGemmIsas) {
      if (!kernels::gemm_isa_runs(one)) continue;
      if (kernels::gemm_isa_name(one) == name) {
        isa = one;
        return;
      }
      here += fmt::format("{}{}", here.empty() ? "" : ", ", kernels::gemm_isa_name(one));
    }
    throw CLI::ValidationError("--isa", fmt::format("{}: this machine has {}", name, here));
  };
  return command
      .add_option_function<std::string>(
          "--isa", take,
          "instruction set of the kernels: x86-64, avx2, avx512, avx512-bf16 or amx; another one gives other last bits "
          "(default: the best of this machine; of several hosts, the best that all have)")
      ->type_name("NAME");
}

}  // namespace cairn::tools
