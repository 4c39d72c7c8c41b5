#include "ckpt/persist/part_set_file.h"

#include <doctest/doctest.h>

#include <fstream>
#include <iterator>

#include "ckpt/store/posix_backend.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using cairn::testing::TempDir;

namespace {

PartSet some_set() {
  PartSet set{.step = 12, .files = {}, .shards = {}, .stats = {}};
  set.files = {{"shard-00002-of-00004.h5", 9000, 0xfedcba9876543210u, -1}, {"shard-00001-of-00004.h5", 4096, 7, 3}};
  set.shards.push_back({.tensor = 4,
                        .file = 0,
                        .box = {{0, 2}, {8, 5}},
                        .offset = 2048,
                        .bytes = 96,
                        .chunk_bytes = 4096,
                        .hashes = {0xffffffffffffffffu, 1}});
  set.shards.push_back({.tensor = 5,
                        .file = 1,
                        .box = {},
                        .offset = kMaxOffset,
                        .bytes = 4,
                        .chunk_bytes = 4096,
                        .hashes = {3},
                        .codec = Codec::kShuffleZstd,
                        .stored = {{4096, 17, 2}}});
  set.stats.payload_bytes = 100;
  set.stats.file_bytes = 13096;
  return set;
}

}  // namespace

TEST_SUITE("ckpt/persist/part_set_file") {
  TEST_CASE("what a host has written reaches the one that commits as it was") {
    const TempDir dir("set");
    PosixBackend io;
    REQUIRE_OK(write_part_set(io, dir.path, 2, some_set()));
    CHECK(std::filesystem::exists(dir.path / "parts-2.json"));
    const auto read = read_part_set(io, dir.path, 2);
    REQUIRE_OK(read);
    const PartSet wanted = some_set();
    CHECK(read.value().step == wanted.step);
    CHECK(read.value().files == wanted.files);
    CHECK(read.value().shards == wanted.shards);
    CHECK(read.value().stats.payload_bytes == 100);
    CHECK(read.value().stats.file_bytes == 13096);
  }

  TEST_CASE("a file that is cut off, changed or not there is refused by its name") {
    const TempDir dir("set");
    PosixBackend io;
    CHECK(is_not_found(read_part_set(io, dir.path, 1).error()));
    REQUIRE_OK(write_part_set(io, dir.path, 1, some_set()));
    const std::filesystem::path path = dir.path / "parts-1.json";
    std::ifstream in(path, std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(in), {}};
    for (size_t k = 0; k < whole.size(); k += 7) {
      for (const std::string& bytes : {whole.substr(0, k), whole.substr(0, k) + '~' + whole.substr(k + 1)}) {
        if (bytes == whole) continue;
        std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
        const auto read = read_part_set(io, dir.path, 1);
        REQUIRE_FALSE(read.ok());
        CHECK(read.error().code == ErrorCode::kCorrupt);
        CHECK(read.error().message.starts_with(path.string() + ": "));
      }
    }
  }
}
