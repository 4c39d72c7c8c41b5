// The sums that an update leaves are compared while a save passes over the memory: damage never becomes a checkpoint.
#include <doctest/doctest.h>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/memory_backend.h"
#include "runtime/core/word_sums.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

/// Shards of less than a page, of some pages, of several passes over the memory, and large enough to go to the disk
/// from where they lie; all of whole words.
TestState summed_state(int64_t step) {
  TestState state = make_state(step, 3, 2,
                               {{"small", "weight", DType::kF32, {24}, 1},
                                {"middle", "weight", DType::kF32, {37, 240}, 3},
                                {"long", "exp_avg", DType::kF32, {77'777}, 1},
                                {"large", "weight", DType::kF32, {300, 1000}, 2}});
  for (WriterPart& part : state.parts) {
    for (ShardData& shard : part.shards) shard.word_sums = word_sums(shard.data, shard.bytes / 4);
  }
  return state;
}

}  // namespace

TEST_SUITE("ckpt/persist/sums") {
  TEST_CASE("a save with the sums of its bytes is the save without them, whatever way the bytes go") {
    for (const bool in_place : {false, true}) {
      for (const int64_t chunk : {int64_t{4096}, int64_t{200} << 10, int64_t{4} << 20}) {
        MemoryBackend with, without;
        TestState state = summed_state(12);
        SaveOptions options = small_options();
        options.chunk_bytes = chunk;
        options.huge_pages = in_place;
        const Result<SaveReport> summed = save(with, "/run", state, options);
        REQUIRE_OK(summed);
        CHECK(compare(with, summed.value().dir, state) == "");
        for (WriterPart& part : state.parts) {
          for (ShardData& shard : part.shards) shard.word_sums.reset();
        }
        const Result<SaveReport> plain = save(without, "/run", state, options);
        REQUIRE(plain.ok());
        CHECK(plain.value().manifest.shards == summed.value().manifest.shards);  // hashes among them
        CHECK(plain.value().manifest.files == summed.value().manifest.files);
      }
    }
  }

  TEST_CASE("a word that has changed since the update ends the save, which names the tensor and commits nothing") {
    enum class Way { kPacked, kInPlace, kCoded, kIncremental };
    for (const Way way : {Way::kPacked, Way::kInPlace, Way::kCoded, Way::kIncremental}) {
      CAPTURE(static_cast<int>(way));
      MemoryBackend disk;
      SaveOptions options = small_options();
      options.huge_pages = way == Way::kInPlace;
      if (way == Way::kCoded) options.codec = Codec::kShuffleZstd;
      const Result<SaveReport> first = save(disk, "/run", summed_state(11), options);
      REQUIRE(first.ok());
      if (way == Way::kIncremental) options.base = &first.value().manifest;
      TestState state = summed_state(12);
      for (size_t box = 0; box < state.boxes.size(); ++box) {
        PageBytes& bytes = state.boxes[box];
        for (const size_t at : {size_t{1}, bytes.size() / 2, bytes.size() - 2}) {
          bytes[at] ^= std::byte{8};
          const Result<SaveReport> saved = save(disk, "/run", state, options);
          bytes[at] ^= std::byte{8};
          REQUIRE_FALSE(saved.ok());
          CHECK(saved.error().code == ErrorCode::kCorrupt);
          CHECK_MESSAGE(saved.error().message.find("has changed in memory since it was updated") != std::string::npos,
                        saved.error().message);
          const Catalog catalog = list_checkpoints(disk, "/run").value();
          CHECK(catalog.checkpoints.size() == 1);
          CHECK(catalog.leftovers.empty());
        }
      }
      CHECK(save(disk, "/run", state, options).ok());
    }
  }
}
