// The instruction set of a process; and of this program, where CAIRN_TEST_ISA says one: all kernels' tests run with it.
#include "runtime/kernels/isa.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <string_view>

using namespace cairn::kernels;

namespace {

const bool chosen = [] {
  const char* const wanted = std::getenv("CAIRN_TEST_ISA");
  if (wanted == nullptr) return false;
  for (const GemmIsa isa : kGemmIsas) {
    if (gemm_isa_name(isa) != std::string_view(wanted)) continue;
    if (!gemm_isa_runs(isa)) std::_Exit(77);  // skipped
    use_gemm_isa(isa);
    return true;
  }
  std::_Exit(1);
}();

}  // namespace

TEST_CASE("a process uses the instructions that it was told to, else the best of its machine") {
  const char* const wanted = std::getenv("CAIRN_TEST_ISA");
  CHECK(chosen == (wanted != nullptr));
  if (chosen) {
    CHECK(gemm_isa_name(gemm_isa()) == std::string_view(wanted));
    CHECK((simd_level() == SimdLevel::kBaseline) == (gemm_isa() == GemmIsa::kBaseline));
  } else {
    for (const GemmIsa isa : kGemmIsas) {
      if (gemm_isa_runs(isa) && isa != GemmIsa::kAvx512Bf16) CHECK(gemm_isa() >= isa);
    }
  }
}
