// The module of kernels, as a program finds it: where it was built it loads and is complete, and what is missing of the
// rest of the machine is an error in words; where it was not, the error says how to build it.

#include "runtime/cuda/machine/module.h"

#include <doctest/doctest.h>
#include <build_version.inc>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "runtime/cuda/context.h"
#include "tests/support/ok.h"

using namespace cairn;

namespace {

#ifdef CAIRN_CUDNN
constexpr bool kHasCudnn = true;
#else
[[maybe_unused]] constexpr bool kHasCudnn = false;
#endif

bool is_mapped(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  return std::string(std::istreambuf_iterator<char>(maps), {}).find(name) != std::string::npos;
}

/// A table is nothing but pointers to functions.
template <typename Table>
bool is_complete(const Table& table) {
  static_assert(sizeof(Table) % sizeof(void*) == 0);
  std::vector<void*> functions(sizeof(Table) / sizeof(void*));
  std::memcpy(functions.data(), static_cast<const void*>(&table), sizeof(Table));
  for (void* const function : functions) {
    if (function == nullptr) return false;
  }
  return true;
}

}  // namespace

TEST_SUITE("runtime/cuda/machine/module") {
#ifdef CAIRN_HAS_CUDA_MODULE
  TEST_CASE("the module loads with all of its symbols, and its tables are complete") {
    CHECK_FALSE(is_mapped(cuda::kModuleFile));
    const auto loaded = cuda::load_module(CAIRN_TREE_VERSION);
    REQUIRE_OK(loaded);
    CHECK(is_mapped(cuda::kModuleFile));
    CHECK_FALSE(is_mapped("libcuda.so"));
    CHECK_FALSE(is_mapped("libcudnn"));
    CHECK(loaded.value().path.ends_with(cuda::kModuleFile));
    cuda::KernelTables tables = loaded.value().module->kernels();
    CHECK((tables.cudnn != nullptr) == kHasCudnn);
    if (!kHasCudnn) tables.cudnn = [](const cuda::Api&, int) -> Result<cuda::AttentionLibrary> { return Error{}; };
    CHECK(is_complete(tables));
    CHECK(is_complete(*tables.of_f32));
    CHECK(is_complete(*tables.of_bf16));
    CHECK(is_complete(*tables.of_f16));
    CHECK(is_complete(*tables.state));
    CHECK(is_complete(loaded.value().module->api()));
    int version = 0;
    CHECK(loaded.value().module->api().runtime_version(&version) == 0);
    CHECK(version / 1000 == cuda::kMajor);
  }

  TEST_CASE("a module of other sources is refused") {
    const auto loaded = cuda::load_module("0.0.0-other");
    REQUIRE_FALSE(loaded.ok());
    CHECK(loaded.error().message.find("was built from other sources") != std::string::npos);
  }

  TEST_CASE("a machine without a driver or a device says so, or the device opens") {
    const auto loaded = cuda::load_module(CAIRN_TREE_VERSION);
    REQUIRE_OK(loaded);
    const cuda::Api& api = loaded.value().module->api();
    int count = 0;
    const int asked = api.device_count(&count);
    const auto opened = cuda::Context::open(api, 0);
    CHECK(opened.ok() == (asked == 0 && count > 0));
    if (opened.ok()) return;
    CHECK(opened.error().code == ErrorCode::kUnavailable);
    const std::string& message = opened.error().message;
    const bool says = message.find("no NVIDIA driver") != std::string::npos ||
                      message.find("driver is for CUDA") != std::string::npos ||
                      message.find("looking for devices") != std::string::npos ||
                      message.find("has 0 CUDA device(s)") != std::string::npos;
    CHECK_MESSAGE(says, message);
  }
#else
  TEST_CASE("a program that was built without CUDA says where the module would be, and how to build it") {
    const auto loaded = cuda::load_module(CAIRN_TREE_VERSION);
    REQUIRE_FALSE(loaded.ok());
    CHECK(loaded.error().code == ErrorCode::kUnsupported);
    for (const char* const words : {"has no kernels for CUDA", "libcairn_cuda.so", "cmake --preset cuda"}) {
      CAPTURE(words);
      CHECK(loaded.error().message.find(words) != std::string::npos);
    }
    const auto machine = cuda::open_machine(CAIRN_TREE_VERSION, {});
    REQUIRE_FALSE(machine.ok());
    CHECK(machine.error().message == loaded.error().message);
    CHECK_FALSE(is_mapped("libcublas"));
  }
#endif
}
