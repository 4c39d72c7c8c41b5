// The table of the CUDA runtime, filled from libraries: the real one where it is, and two that are none.
#include "runtime/cuda/api.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/cuda/blas_api.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/nvml_api.h"

using namespace cairn;
using namespace cairn::cuda;

namespace {

std::string beside_tests(const char* name) { return std::string(CAIRN_BINARY_DIR) + "/" + name; }

}  // namespace

TEST_SUITE("runtime/cuda/api") {
  TEST_CASE("no library at all names each place where one was looked for") {
    const std::vector<std::string> nowhere = {"/nowhere/libcudart.so.13", "/nor/here/libcudart.so.13"};
    const auto loaded = load_api(nowhere);
    REQUIRE_FALSE(loaded.ok());
    CHECK(loaded.error().code == ErrorCode::kUnavailable);
    for (const std::string& place : nowhere) CHECK(loaded.error().message.find(place) != std::string::npos);
  }

  TEST_CASE("the first library that opens is taken, and says where it is from") {
    const std::vector<std::string> places = {"/nowhere/libcudart.so.13", beside_tests("libcudart_of_13.so"),
                                             beside_tests("libcudart_of_12.so")};
    const auto loaded = load_api(places);
    REQUIRE(loaded.ok());
    CHECK(std::filesystem::equivalent(loaded.value().path, places[1]));
    int count = -1;
    CHECK(loaded.value().api.device_count(&count) == 0);
  }

  TEST_CASE("a library of another major version, or without a function that is used, is refused by name") {
    const std::vector<std::string> old = {beside_tests("libcudart_of_12.so")};
    const auto loaded = load_api(old);
    REQUIRE_FALSE(loaded.ok());
    CHECK(loaded.error().code == ErrorCode::kUnsupported);
    CHECK(loaded.error().message.find("is version 12.4 of the CUDA runtime; 13.x is needed") != std::string::npos);
    const std::vector<std::string> none = {"libm.so.6"};
    const auto other = load_api(none);
    REQUIRE_FALSE(other.ok());
    CHECK(other.error().message.find("libm.so.6 lacks cudaGetDeviceCount, cudaSetDevice, ") == 0);
  }

  TEST_CASE("a run looks where the loader does, in the toolkit, and in the folders of CAIRN_CUDA_PATH") {
    REQUIRE(setenv("CAIRN_CUDA_PATH", "/a/lib:/b", 1) == 0);
    CHECK(library_candidates("libx.so.13") == std::vector<std::string>{"libx.so.13", "/usr/local/cuda/lib64/libx.so.13",
                                                                       "/usr/local/cuda/lib/libx.so.13",
                                                                       "/a/lib/libx.so.13", "/b/libx.so.13"});
    REQUIRE(unsetenv("CAIRN_CUDA_PATH") == 0);
  }

  TEST_CASE("the real runtime has all functions, and says that there is no device where there is none") {
    const auto loaded = load_api(library_candidates("libcudart.so.13"));
    if (!loaded.ok() && loaded.error().code == ErrorCode::kUnavailable) {
      MESSAGE("no CUDA runtime here: ", loaded.error().message);
      return;
    }
    REQUIRE(loaded.ok());
    int count = 0;
    const Status asked = checked(loaded.value().api, loaded.value().api.device_count(&count), "looking for devices");
    MESSAGE(loaded.value().path, ": ", count, " device(s)", asked.ok() ? "" : ", " + asked.error().message);
  }

  TEST_CASE("a library without NVML's functions is refused by name, and the real one has all of them") {
    const std::vector<std::string> none = {"libm.so.6"};
    const auto other = load_nvml(none);
    REQUIRE_FALSE(other.ok());
    CHECK(other.error().message.find("libm.so.6 lacks nvmlInit_v2, nvmlShutdown, ") == 0);
    const auto loaded = load_nvml(library_candidates(kNvmlFile));
    if (!loaded.ok() && loaded.error().code == ErrorCode::kUnavailable) {
      MESSAGE("no NVML here: ", loaded.error().message);
      return;
    }
    REQUIRE(loaded.ok());
  }

  TEST_CASE("the real cuBLASLt has all functions, and refuses a handle where there is no device") {
    const auto loaded = load_blas(library_candidates("libcublasLt.so.13"));
    if (!loaded.ok() && loaded.error().code == ErrorCode::kUnavailable) {
      MESSAGE("no cuBLASLt here: ", loaded.error().message);
      return;
    }
    REQUIRE(loaded.ok());
    MESSAGE(loaded.value().path, " ", loaded.value().api.version());
    BlasHandle handle = nullptr;
    const int made = loaded.value().api.create(&handle);
    if (made == 0) {
      loaded.value().api.destroy(handle);
    } else {
      CHECK(std::string(loaded.value().api.status_name(made)) == "CUBLAS_STATUS_NOT_INITIALIZED");
    }
  }

  TEST_CASE("NCCL is taken from 2.26 on; an older one is refused by its version, another library by what it lacks") {
    const std::vector<std::string> places = {"/nowhere/libnccl.so.2", beside_tests("libnccl_of_22809.so")};
    const auto loaded = load_nccl(places);
    REQUIRE(loaded.ok());
    CHECK(std::filesystem::equivalent(loaded.value().path, places[1]));
    CHECK(nccl_version_text(loaded.value().version) == "2.28.9");
    const auto old = load_nccl(std::vector<std::string>{beside_tests("libnccl_of_21705.so")});
    REQUIRE_FALSE(old.ok());
    CHECK(old.error().code == ErrorCode::kUnsupported);
    CHECK(old.error().message.find("is version 2.17.5 of NCCL; 2.x from 2.26.0 on is needed") != std::string::npos);
    const auto other = load_nccl(std::vector<std::string>{"libm.so.6"});
    REQUIRE_FALSE(other.ok());
    CHECK(other.error().message.find("libm.so.6 lacks ncclGetVersion, ncclGetUniqueId, ") == 0);
  }

  TEST_CASE("the real NCCL has all functions, and says its version") {
    const auto loaded = load_nccl(library_candidates("libnccl.so.2"));
    if (!loaded.ok() && loaded.error().code == ErrorCode::kUnavailable) {
      MESSAGE("no NCCL here: ", loaded.error().message);
      return;
    }
    REQUIRE(loaded.ok());
    MESSAGE(loaded.value().path, " ", nccl_version_text(loaded.value().version));
  }
}
