// Bits that flip on the disk, in every kind of byte that a checkpoint has: each is found, pinned to its tensor and
// chunk, and none is loaded. CAIRN_FLIPS sets their number (100000 take about 7 s).
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdlib>
#include <map>

#include "ckpt/persist/read.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kStep = "/ck/step-00000012";
constexpr int64_t kVersionAt = 39;  // in the manifest: docs/format.md

int64_t number_from_environment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::max<int64_t>(1, std::atoll(text));
}

/// Where a flip goes: a range of bytes of a file, and for payload the shard.
struct Range {
  std::string file;
  int64_t begin, end, shard;
};

std::vector<Range> ranges_of(const Manifest& m, MemoryBackend& disk) {
  std::vector<Range> out;
  for (const DirEntry& entry : disk.list(kStep).value()) {
    std::map<int64_t, int64_t> shards;  // offset -> index
    for (size_t s = 0; s < m.shards.size(); ++s) {
      if (m.files[static_cast<size_t>(m.shards[s].file)].name == entry.name)
        shards[m.shards[s].offset] = static_cast<int64_t>(s);
    }
    int64_t at = 0;
    for (const auto& [offset, s] : shards) {
      if (offset > at) out.push_back({entry.name, at, offset, -1});
      at = offset + m.shards[static_cast<size_t>(s)].bytes;
      out.push_back({entry.name, offset, at, s});
    }
    const auto size = static_cast<int64_t>(disk.bytes_of(kStep / entry.name).size());
    if (size > at) out.push_back({entry.name, at, size, -1});
  }
  return out;
}

}  // namespace

TEST_SUITE("crash/flip") {
  TEST_CASE("every flipped bit is found and pinned; none is loaded") {
    const int64_t flips = number_from_environment("CAIRN_FLIPS", 100'000);
    MemoryBackend disk;
    const TestState state = make_state(12, 1);
    const Manifest m = save(disk, "/ck", state).value().manifest;
    const std::vector<Range> ranges = ranges_of(m, disk);
    std::vector<const Range*> kinds[3];  // manifest and table, structure, payload: a third of the flips each
    for (const Range& range : ranges)
      kinds[range.shard >= 0 ? 2 : range.file.ends_with(".h5") ? 1 : 0].push_back(&range);
    for (const auto& kind : kinds) REQUIRE_FALSE(kind.empty());
    int64_t count[3] = {}, loads_refused = 0, tensors_spared = 0;
    for (int64_t round = 0; round < flips; ++round) {
      const auto draw = [&](uint64_t salt, size_t below) {
        return static_cast<int64_t>(mix64(mix64(static_cast<uint64_t>(round)) + salt) % below);
      };
      const auto kind = static_cast<size_t>(round % 3);
      const Range& range = *kinds[kind][static_cast<size_t>(draw(1, kinds[kind].size()))];
      std::byte& victim =
          disk.bytes_of(kStep / range.file)[static_cast<size_t>(range.begin + draw(2, range.end - range.begin))];
      const int64_t offset = &victim - disk.bytes_of(kStep / range.file).data();
      // One bit mostly; sometimes the byte becomes another one altogether.
      const auto mask = static_cast<std::byte>(round % 7 == 0 ? 1 + draw(3, 255) : 1 << draw(3, 8));
      victim ^= mask;
      CAPTURE(range.file);
      CAPTURE(offset);
      CAPTURE(round);
      // libhdf5 is given the files whose checksum holds: a slow way to look at those that were not touched.
      const Result<VerifyReport> checked = verify_checkpoint(disk, kStep, {.structure = round % 64 == 0});
      if (range.file == "manifest.json" && offset == kVersionAt && !checked.ok()) {
        REQUIRE(checked.error().code == ErrorCode::kUnsupported);  // a higher number is a newer build's
        victim ^= mask;
        continue;
      }
      const VerifyReport& report = checked.value();
      REQUIRE(report.damages.size() == 1);
      const Damage& damage = report.damages[0];
      REQUIRE(damage.file == range.file);
      REQUIRE(damage.shard == range.shard);
      if (range.shard >= 0) {
        const ShardEntry& shard = m.shards[static_cast<size_t>(range.shard)];
        REQUIRE(damage.chunk == (offset - shard.offset) / shard.chunk_bytes);
        REQUIRE(damage.message.find(describe_chunk(m, shard, damage.chunk)) != std::string::npos);
      }
      ++count[kind];
      if (round % 4 != 0 && kind == 2) {
        // A load touches the damaged chunk: refused, by the tensor's name.
        const std::string loaded = compare(disk, kStep, state);
        REQUIRE(loaded.find(m.tensors[static_cast<size_t>(m.shards[static_cast<size_t>(range.shard)].tensor)].name) !=
                std::string::npos);
        REQUIRE(loaded.find("chunk") != std::string::npos);
        ++loads_refused;
      } else if (round % 4 != 0) {
        // Manifest: refused. Structure: not needed by a load, which then has every bit right.
        const std::string loaded = compare(disk, kStep, state);
        if (kind == 0) {
          REQUIRE(loaded != "");
          REQUIRE(loaded.find("differs") == std::string::npos);
          REQUIRE(loaded.find(range.file) != std::string::npos);
          ++loads_refused;
        } else {
          REQUIRE(loaded == "");
          ++tensors_spared;
        }
      }
      victim ^= mask;
    }
    MESSAGE(count[0] << " flips in the manifest, " << count[1] << " in HDF5 structure, " << count[2]
                     << " in payload: all found and pinned; " << loads_refused << " loads refused, " << tensors_spared
                     << " loads past damaged structure right to the bit");
    CHECK(verify_checkpoint(disk, kStep).value().whole());
  }
}
