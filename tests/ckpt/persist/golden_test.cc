// tests/golden/checkpoint-v1 is read for ever; today's writer equals it while version 1 is the newest.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

TEST_SUITE("ckpt/persist/golden") {
  TEST_CASE("the golden checkpoint of version 1 is complete, verifies, and holds the known numbers") {
    PosixBackend io;
    const fs::path dir = fs::path(CAIRN_SOURCE_DIR) / "tests/golden/checkpoint-v1";
    const Result<CheckpointInfo> found = newest_complete(io, dir);
    REQUIRE_OK(found);
    CHECK(found.value().step == 12);
    const VerifyReport report = verify_checkpoint(io, found.value().dir).value();
    for (const Damage& damage : report.damages) MESSAGE(damage.message);
    CHECK(report.whole());
    CHECK(compare(io, found.value().dir, make_state(12, 1)) == "");
  }

  TEST_CASE("a coded golden checkpoint and one that refers to it are complete, verify, and hold the known numbers") {
    // Read only: which bytes a coder makes of the same numbers may change with the library's version.
    PosixBackend io;
    const fs::path dir = fs::path(CAIRN_SOURCE_DIR) / "tests/golden/checkpoint-v1-cold";
    const Catalog catalog = list_checkpoints(io, dir).value();
    REQUIRE(catalog.checkpoints.size() == 2);
    for (const CheckpointInfo& info : catalog.checkpoints) {
      CHECK_MESSAGE(info.complete, info.problem);
      const VerifyReport report = verify_checkpoint(io, info.dir).value();
      for (const Damage& damage : report.damages) MESSAGE(damage.message);
      CHECK(report.whole());
      CHECK(compare(io, info.dir, cold_state(info.step)) == "");
    }
  }

  TEST_CASE("today's writer makes the golden checkpoint byte for byte") {
    REQUIRE(kFormatVersion == 1);
    PosixBackend posix;
    MemoryBackend memory;
    REQUIRE(save(memory, "/ck", make_state(12, 1)).ok());
    const fs::path golden = fs::path(CAIRN_SOURCE_DIR) / "tests/golden/checkpoint-v1/step-00000012";
    const std::vector<DirEntry> names = memory.list("/ck/step-00000012").value();
    REQUIRE(names.size() == posix.list(golden).value().size());
    for (const DirEntry& entry : names) {
      CAPTURE(entry.name);
      CHECK((read_file(posix, golden / entry.name, 1 << 20).value() ==
             read_file(memory, fs::path("/ck/step-00000012") / entry.name, 1 << 20).value()));
    }
  }

  TEST_CASE("the hex dumps in docs/format.md are the golden checkpoint's first bytes") {
    PosixBackend io;
    const fs::path root = CAIRN_SOURCE_DIR;
    const std::string doc = read_file(io, root / "docs/format.md", 1 << 20).value();
    for (const auto& [name, lines] :
         {std::pair{"manifest.json", 7}, {"shards.bin", 6}, {"shard-00000-of-00002.h5", 3}}) {
      const std::string bytes =
          read_file(io, root / "tests/golden/checkpoint-v1/step-00000012" / name, 1 << 20).value();
      for (size_t at = 0; at < static_cast<size_t>(lines) * 16; at += 16) {
        std::string dump = fmt::format("{:08x}:", at), text;
        for (size_t i = at; i < at + 16; ++i) {
          const auto byte = static_cast<unsigned char>(bytes[i]);
          dump += fmt::format("{}{:02x}", i % 2 == 0 ? " " : "", byte);
          text += byte >= ' ' && byte <= '~' ? bytes[i] : '.';
        }
        CHECK_MESSAGE(doc.find(dump + "  " + text) != std::string::npos, dump);
      }
    }
  }
}
