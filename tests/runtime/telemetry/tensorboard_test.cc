// Vectors: made with protoc from TensorBoard's own .proto files.
#include "runtime/telemetry/tensorboard.h"
#include "tests/support/temp_dir.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

using namespace cairn::telemetry;

namespace {

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return out;
}

}  // namespace

TEST_SUITE("runtime/telemetry/tensorboard") {
  TEST_CASE("events and records are TensorBoard's own bytes") {
    CHECK(hex(tensorboard_record(version_event(1.0))) ==
          "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a");
    CHECK(hex(scalar_event(2.0, 7, "loss", 2.5f)) ==
          "09000000000000004010072a0d0a0b0a046c6f73731500002040");  // simple_value
    CHECK(hex(tensorboard_record(session_start_event(3.0, 7))) ==
          "0f000000000000006d532b0909000000000000084010073a02080167edf0c3");
  }

  TEST_CASE("records that did not fit on the disk leave nothing that hides those behind them") {
    const cairn::testing::TempDir dir("tensorboard");
    auto writer = TensorBoardWriter::open(dir.path, 1.0, 1).value();
    REQUIRE(writer.write({.step = 1}).ok());
    const auto path = std::filesystem::directory_iterator(dir.path)->path();
    const auto whole = std::filesystem::file_size(path);
    const auto before = ::signal(SIGXFSZ, SIG_IGN);
    rlimit old{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
    const rlimit limit{whole + 30, old.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    const cairn::Status written = writer.write({.step = 2});
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
    ::signal(SIGXFSZ, before);
    REQUIRE_FALSE(written.ok());
    CHECK(written.error().os_errno == EFBIG);
    CHECK(std::filesystem::file_size(path) == whole);
    CHECK(writer.write({.step = 3}).ok());
  }

  TEST_CASE("each start writes a file of its own, also within one second") {
    const cairn::testing::TempDir dir("tensorboard");
    auto first = TensorBoardWriter::open(dir.path, 1.0, 1), second = TensorBoardWriter::open(dir.path, 1.0, 5);
    REQUIRE(first.ok());
    REQUIRE(second.ok());
    CHECK(first.value().write({.step = 1, .loss = 2}).ok());
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir.path))
      files += entry.path().string().find("tfevents") != std::string::npos;
    CHECK(files == 2);
    CHECK_FALSE(TensorBoardWriter::open(dir / "none", 1.0, 1).ok());
  }
}
