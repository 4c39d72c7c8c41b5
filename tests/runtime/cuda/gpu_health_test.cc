// How GPUs are, read through the table of NVML from a double of it.
#include "runtime/cuda/gpu_health.h"

#include <doctest/doctest.h>

#include "tests/simt/nvml_double.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::cuda;
using cairn::simt::NvmlDouble;

TEST_SUITE("runtime/cuda/gpu_health") {
  TEST_CASE("a GPU that is well has its names, its place, no errors and all links") {
    NvmlDouble nvml(simt::nvml_devices(3, ""));
    const Result<std::vector<GpuHealth>> read = read_gpus(nvml.api());
    REQUIRE_OK(read);
    REQUIRE(read.value().size() == 3);
    CHECK(read.value()[2] == GpuHealth{.index = 2,
                                       .name = "a double, no device",
                                       .uuid = "GPU-d2",
                                       .pci = "0000:03:00.0",
                                       .lost = {},
                                       .ecc_uncorrected = 0,
                                       .rows_remapped = 0,
                                       .remapping_pending = 0,
                                       .remapping_failed = 0,
                                       .links = 18,
                                       .links_active = 18,
                                       .links_down = {},
                                       .processes = {}});
    CHECK(nvml.open == 0);  // given back
  }

  TEST_CASE("each thing that is not well is read, of the GPU that has it alone") {
    NvmlDouble nvml(
        simt::nvml_devices(8, "ecc:0,remapping_pending:1,remapping_failed:2,link_down:3,hot:4,busy:5,mig:6,lost:7"));
    nvml.devices()[0].remaps_rows = false;
    nvml.devices()[0].pages_retired = 5;
    const Result<std::vector<GpuHealth>> read = read_gpus(nvml.api());
    REQUIRE_OK(read);
    const std::vector<GpuHealth>& gpus = read.value();
    REQUIRE(gpus.size() == 8);
    const auto only = [&](size_t index, const auto& told) {
      for (size_t k = 0; k < 7; ++k) CHECK_MESSAGE(told(gpus[k]) == (k == index), "GPU ", k);
    };
    only(0, [](const GpuHealth& one) { return one.ecc_uncorrected == 2; });
    only(0, [](const GpuHealth& one) {
      return one.pages_retired == 5 && one.retirement_pending == 1 && one.rows_remapped < 0;
    });
    only(1, [](const GpuHealth& one) { return one.remapping_pending == 1; });
    only(2, [](const GpuHealth& one) { return one.remapping_failed == 1; });
    only(3, [](const GpuHealth& one) {
      return one.links_active == 16 && one.links_down == std::vector<int64_t>{3, 4} && one.links == 18;
    });
    only(4, [](const GpuHealth& one) { return slowed_text(one.slowed_by) == "heat"; });
    only(5, [](const GpuHealth& one) { return one.processes == std::vector<int64_t>{4711}; });
    only(6, [](const GpuHealth& one) { return one.mig; });
    CHECK(gpus[7].lost == "GPU is lost");
    CHECK(gpus[7].ecc_uncorrected == -1);
  }

  TEST_CASE("an NVML that does not begin is an error with what to do") {
    NvmlDouble nvml({});
    nvml.refuse();
    const Result<std::vector<GpuHealth>> read = read_gpus(nvml.api());
    REQUIRE_FALSE(read.ok());
    CHECK(read.error().code == ErrorCode::kUnavailable);
    CHECK(read.error().message.find("nvmlInit_v2: Unknown Error; see what `nvidia-smi` says") == 0);
  }

  TEST_CASE("an address of PCI is the same however it is written, and what is none is none") {
    for (const char* written : {"0000:3b:00.0", "00000000:3B:00.0", "0000:3b:00", "0:3B:0.0"})
      CHECK_MESSAGE(pci_text(written) == "0000:3b:00.0", written);
    CHECK(pci_text("00010000:01:02.0") == "10000:01:02.0");
    for (const char* written : {"", "3b:00.0", "x:3b:00", "0000:3b:00:1", "0000::00", "0000:3b:"})
      CHECK_MESSAGE(pci_text(written).empty(), written);
  }
}
