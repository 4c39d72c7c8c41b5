// Coded shards: what is saved comes back bit for bit, through our reader and through libhdf5 with the two filters.
#include "ckpt/persist/coded_file.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "ckpt/persist/hdf5_file.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
using cairn::testing::TempDir;

namespace {

/// A state whose numbers have few exponents; one tensor is noise, one zero, some are too small to be coded.
TestState coded_state(int64_t step, uint64_t seed = 1) {
  const std::vector<TensorSpec> specs = {{"wide.weight", "weight", DType::kF32, {40, 6000}, 3},
                                         {"tall.weight", "weight", DType::kBf16, {30'011, 7}, 2},
                                         {"flat.weight", "exp_avg", DType::kF32, {500'000}, 2},
                                         {"deep.weight", "weight", DType::kF32, {3, 40, 5, 300}, 1},
                                         {"zero.weight", "exp_avg_sq", DType::kF32, {100, 900}, 2},
                                         {"noise", "weight", DType::kI64, {9000}, 1},
                                         {"norm.weight", "weight", DType::kF32, {24}, 1},
                                         {"scale", "weight", DType::kF32, {}, 1}};
  TestState state = make_state(step, seed, 2, specs);
  size_t box = 0;
  for (size_t t = 0; t < specs.size(); ++t) {
    std::vector<std::byte>& whole = state.tensors[t];
    const auto elem = static_cast<size_t>(dtype_size_bytes(specs[t].dtype));
    if (specs[t].name == "zero.weight") std::fill(whole.begin(), whole.end(), std::byte{0});
    if (specs[t].name != "noise") {
      for (size_t i = elem - 1; i < whole.size(); i += elem) whole[i] = std::byte{0x3c} | (whole[i] & std::byte{0x81});
      if (specs[t].name == "zero.weight") std::fill(whole.begin(), whole.end(), std::byte{0});
    }
    for (int64_t c = 0; c < specs[t].cuts; ++c, ++box) {
      Box at = Box::whole(specs[t].shape);
      if (!specs[t].shape.empty()) {
        at.lo[0] = specs[t].shape[0] * c / specs[t].cuts;
        at.hi[0] = specs[t].shape[0] * (c + 1) / specs[t].cuts;
      }
      const std::vector<std::byte> bytes = cut(whole, specs[t].shape, at, static_cast<int64_t>(elem));
      std::copy(bytes.begin(), bytes.end(), state.boxes[box].begin());
    }
  }
  return state;
}

SaveOptions coded_options(int64_t threads = 2) {
  SaveOptions options = small_options();
  options.codec = Codec::kShuffleZstd;
  options.codec_threads = threads;
  options.fill_bytes = 4 << 20;  // chunks of some 200 KiB: several a shard
  return options;
}

size_t undo_zstd(unsigned flags, size_t, const unsigned*, size_t bytes, size_t* room, void** buffer) {
  if ((flags & H5Z_FLAG_REVERSE) == 0) return 0;
  const unsigned long long size = ZSTD_getFrameContentSize(*buffer, bytes);
  if (size > (1u << 30)) return 0;
  void* out = H5allocate_memory(static_cast<size_t>(size), false);
  const size_t found = ZSTD_decompress(out, static_cast<size_t>(size), *buffer, bytes);
  if (ZSTD_isError(found)) {
    H5free_memory(out);
    return 0;
  }
  H5free_memory(*buffer);
  *buffer = out;
  *room = static_cast<size_t>(size);
  return found;
}

}  // namespace

TEST_SUITE("ckpt/persist/coded") {
  TEST_CASE("chunks of any box are runs of it") {
    const std::vector<std::vector<int64_t>> boxes = {{1'000'000},    {7, 1'000'003},  {1, 1'000'003}, {40, 6000},
                                                     {300, 2, 5000}, {2, 3, 700, 11}, {1, 1, 5},      {100'000, 3},
                                                     {1, 64, 4096},  {3, 1 << 21},    {2, 30'030}};
    for (const auto& extents : boxes) {
      for (const int64_t target : {32 << 10, 100'000, 1 << 20}) {
        CAPTURE(fmt::format("{}", fmt::join(extents, "x")));
        CAPTURE(target);
        const std::vector<int64_t> chunk = coded_chunk_extents(extents, 4, target);
        if (chunk.empty()) continue;
        // A run: full dims at the end, one cut dim, ones before it; and where something lies outside, all before is
        // one.
        size_t d = 0;
        while (d < extents.size() && chunk[d] == 1 && extents[d] != 1) ++d;
        int64_t outer = 1;
        for (size_t i = 0; i < d; ++i) outer *= extents[i];
        for (size_t i = d + 1; i < extents.size(); ++i) {
          if (chunk[i] == extents[i]) continue;
          REQUIRE(chunk[d] == 1);
          outer *= extents[d];
          d = i;
        }
        if (d < extents.size() && outer > 1) CHECK(extents[d] % chunk[d] == 0);
        int64_t bytes = 4;
        for (const int64_t n : chunk) bytes *= n;
        CHECK(bytes <= 16 << 20);
      }
    }
    CHECK(coded_chunk_extents({}, 4, 1 << 20).empty());
    CHECK(coded_chunk_extents({100}, 4, 1 << 20).empty());
    CHECK(coded_chunk_extents({40, 6000}, 4, 1 << 20) == std::vector<int64_t>{40, 6000});
    CHECK(coded_chunk_extents({1'000'000}, 4, 1 << 20) == std::vector<int64_t>{250'000});
    // A prime row length has no cut but the row itself; a row too long for one chunk stays raw.
    CHECK(coded_chunk_extents({7, 1'000'003}, 4, 1 << 20) == std::vector<int64_t>{1, 1'000'003});
    CHECK(coded_chunk_extents({7, 15'485'863}, 4, 1 << 20).empty());
  }

  TEST_CASE("a coded checkpoint is smaller and comes back bit for bit, however many threads code") {
    MemoryBackend disk;
    const TestState state = coded_state(3);
    Result<SaveReport> raw = save(disk, "/raw", state);
    REQUIRE(raw.ok());
    Manifest first;
    for (const int64_t threads : {1, 2, 4}) {
      const std::string dir = fmt::format("/{}", threads);
      SaveOptions options = coded_options(threads);
      options.fill_bytes = threads * (1 << 20);
      Result<SaveReport> saved = save(disk, dir, state, options);
      REQUIRE_OK(saved);
      CHECK(saved.value().file_bytes < raw.value().file_bytes * 9 / 10);
      CHECK(saved.value().payload_bytes == raw.value().payload_bytes);
      CHECK(compare(disk, saved.value().dir, state, {.window_bytes = 1 << 20, .codec_threads = threads}) == "");
      CHECK(compare(disk, saved.value().dir, state, {.verify = false}) == "");
      const Result<VerifyReport> checked = verify_checkpoint(disk, saved.value().dir);
      REQUIRE(checked.ok());
      CHECK_MESSAGE(checked.value().whole(),
                    (checked.value().whole() ? std::string() : checked.value().damages[0].message));
      int64_t coded = 0, kept = 0;
      for (const ShardEntry& shard : saved.value().manifest.shards) {
        (shard.codec == Codec::kRaw ? kept : coded) += 1;
        if (shard.codec != Codec::kRaw) CHECK(shard.offset >= saved.value().manifest.files[0].size_bytes);
      }
      CHECK(coded == 11);
      CHECK(kept == 2);
    }
  }

  TEST_CASE("the same state gives the same compressed files") {
    MemoryBackend disk;
    const TestState state = coded_state(3);
    const Result<SaveReport> a = save(disk, "/a", state, coded_options()), b = save(disk, "/b", state, coded_options());
    REQUIRE(a.ok());
    REQUIRE(b.ok());
    CHECK(a.value().manifest == b.value().manifest);
  }

  TEST_CASE("filled shards are coded as those in memory are") {
    MemoryBackend disk;
    TestState state = coded_state(3);
    for (WriterPart& part : state.parts) {
      for (ShardData& shard : part.shards) {
        const std::byte* from = std::exchange(shard.data, nullptr);
        shard.fill = [from](int64_t offset, std::span<std::byte> to) -> Status {
          std::memcpy(to.data(), from + offset, to.size());
          return {};
        };
      }
    }
    const Result<SaveReport> saved = save(disk, "/filled", state, coded_options());
    REQUIRE(saved.ok());
    CHECK(compare(disk, saved.value().dir, state) == "");
    state.parts[1].shards[2].fill = [](int64_t, std::span<std::byte>) -> Status {
      return Error{ErrorCode::kIo, "no more"};
    };
    const Result<SaveReport> failed = save(disk, "/failed", state, coded_options());
    REQUIRE(!failed.ok());
    CHECK(failed.error().message.find("no more") != std::string::npos);
    CHECK(disk.list("/failed").value().empty());
  }

  TEST_CASE("any part of a coded tensor can be read, several at once and wherever it lies") {
    MemoryBackend disk;
    const TestState state = coded_state(3);
    const Result<SaveReport> saved = save(disk, "/c", state, coded_options());
    REQUIRE(saved.ok());
    Result<CheckpointReader> reader = CheckpointReader::open(disk, saved.value().dir);
    REQUIRE(reader.ok());
    const Manifest& m = reader.value().manifest();
    uint64_t random = 5;
    for (int round = 0; round < 20; ++round) {
      std::vector<ReadRange> ranges;
      std::vector<std::vector<std::byte>> found, expected;
      for (size_t s = 0; s < m.shards.size(); ++s) {
        const ShardEntry& shard = m.shards[s];
        const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
        const std::vector<std::byte> all = cut(state.tensors[static_cast<size_t>(shard.tensor)], tensor.shape,
                                               shard.box, dtype_size_bytes(tensor.dtype));
        random = mix64(random);
        const int64_t from = static_cast<int64_t>(random % static_cast<uint64_t>(shard.bytes));
        random = mix64(random);
        const int64_t bytes = 1 + static_cast<int64_t>(random % static_cast<uint64_t>(shard.bytes - from));
        found.emplace_back(static_cast<size_t>(bytes));
        expected.emplace_back(all.begin() + from, all.begin() + from + bytes);
        ranges.push_back({shard.file, shard.offset + from, bytes, found.back().data()});
        if (round % 2 == 0) continue;
        ReadRange& range = ranges.back();  // every so many bytes of it
        range.source_stride = 1 + static_cast<int64_t>(mix64(random) % static_cast<uint64_t>(bytes));
        range.bytes = range.target_stride = (range.source_stride + 1) / 2;
        range.rows = 1 + (bytes - range.bytes) / range.source_stride;
        std::vector<std::byte>& parts = expected.back();
        for (int64_t row = 0; row < range.rows; ++row) {
          std::copy_n(all.begin() + from + row * range.source_stride, range.bytes, parts.begin() + row * range.bytes);
        }
        parts.resize(static_cast<size_t>(range.rows * range.bytes));
        found.back().resize(parts.size());
      }
      REQUIRE(reader.value().read_ranges(ranges).ok());
      CHECK(found == expected);
    }
  }

  TEST_CASE("libhdf5 with the two filters reads the same numbers") {
    static const H5Z_class2_t filter = {H5Z_CLASS_T_VERS, 32015, 1, 1, "zstd", nullptr, nullptr, undo_zstd};
    TempDir temp("coded");
    PosixBackend disk;
    const TestState state = coded_state(3);
    const Result<SaveReport> saved = save(disk, temp.path / "checkpoints", state, coded_options());
    REQUIRE(saved.ok());
    const std::lock_guard lock(hdf5_mutex());
    REQUIRE(H5Zregister(&filter) >= 0);
    const Manifest& m = saved.value().manifest;
    for (const ShardEntry& shard : m.shards) {
      const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
      const std::string path = (saved.value().dir / m.files[static_cast<size_t>(shard.file)].name).string();
      const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
      REQUIRE(file >= 0);
      const hid_t dataset = H5Dopen2(file, dataset_path(tensor, shard.box).c_str(), H5P_DEFAULT);
      REQUIRE(dataset >= 0);
      const hid_t type = H5Dget_type(dataset);
      std::vector<std::byte> bytes(static_cast<size_t>(shard.bytes));
      CHECK(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()) >= 0);
      CHECK(bytes == cut(state.tensors[static_cast<size_t>(shard.tensor)], tensor.shape, shard.box,
                         dtype_size_bytes(tensor.dtype)));
      H5Tclose(type);
      H5Dclose(dataset);
      H5Fclose(file);
    }
    H5Zunregister(32015);
  }

  TEST_CASE("each flipped bit of a coded checkpoint is found, in payload with its chunk") {
    MemoryBackend disk;
    const TestState state = coded_state(3);
    const Result<SaveReport> saved = save(disk, "/c", state, coded_options());
    REQUIRE(saved.ok());
    const Manifest& m = saved.value().manifest;
    uint64_t random = 11;
    for (int round = 0; round < 60; ++round) {
      random = mix64(random);
      const size_t f = random % m.files.size();
      const std::filesystem::path path = saved.value().dir / m.files[f].name;
      random = mix64(random);
      const auto at = static_cast<int64_t>(random % static_cast<uint64_t>(m.files[f].size_bytes));
      std::byte& byte = disk.bytes_of(path)[static_cast<size_t>(at)];
      const std::byte bit{static_cast<unsigned char>(1u << (random >> 61))};
      byte ^= bit;
      const Result<VerifyReport> checked = verify_checkpoint(disk, saved.value().dir, {.structure = false});
      REQUIRE(checked.ok());
      REQUIRE(!checked.value().whole());
      int64_t shard = -1, chunk = -1;
      for (size_t s = 0; s < m.shards.size(); ++s) {
        if (m.shards[s].file != static_cast<int64_t>(f)) continue;
        for (size_t c = 0; c < m.shards[s].stored.size(); ++c) {
          const StoredChunk& stored = m.shards[s].stored[c];
          if (at < stored.offset || at >= stored.offset + stored.bytes) continue;
          shard = static_cast<int64_t>(s);
          chunk = static_cast<int64_t>(c);
        }
      }
      if (shard >= 0) {
        CHECK(checked.value().damages[0].shard == shard);
        CHECK(checked.value().damages[0].chunk == chunk);
        CHECK(compare(disk, saved.value().dir, state).find("checksum") != std::string::npos);
      }
      byte ^= bit;
    }
    CHECK(compare(disk, saved.value().dir, state) == "");
  }

  TEST_CASE("a coded save cut off at any I/O call leaves the old checkpoint or the new one") {
    const std::vector<TensorSpec> specs = {{"a", "weight", DType::kF32, {300, 71}, 2},
                                           {"b", "weight", DType::kBf16, {33}, 1}};
    TestState old_state = make_state(10, 1, 2, specs), new_state = make_state(20, 2, 2, specs);
    MemoryBackend start;
    REQUIRE(save(start, "/c", old_state, coded_options()).ok());
    bool fired = true;
    int64_t kept_old = 0, got_new = 0;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n, static_cast<uint64_t>(n)));
      const Result<SaveReport> saved = save(io, "/c", new_state, coded_options());
      fired = io.fired();
      for (uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(n);
        CAPTURE(seed);
        const auto after = disk->clone();
        after->power_cycle(seed);
        const Result<CheckpointInfo> found = newest_complete(*after, "/c");
        REQUIRE(found.ok());
        if (compare(*after, found.value().dir, new_state).empty()) {
          ++got_new;
          continue;
        }
        REQUIRE(!saved.ok());
        REQUIRE(compare(*after, found.value().dir, old_state) == "");
        ++kept_old;
      }
    }
    CHECK(kept_old > 50);
    CHECK(got_new >= 6);
  }

  TEST_CASE("a cancelled coded save leaves nothing") {
    MemoryBackend disk;
    std::atomic<bool> cancel = true;
    SaveOptions options = coded_options();
    options.cancel = &cancel;
    const Result<SaveReport> saved = save(disk, "/c", coded_state(3), options);
    REQUIRE(!saved.ok());
    CHECK(saved.error().code == ErrorCode::kStopped);
    CHECK(disk.list("/c").value().empty());
  }
}
