#include "ckpt/persist/read.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>

#include "ckpt/plan/load_plan.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/planned_range.h"
#include "ckpt/verify/verify.h"
#include "tests/ckpt/persist/test_state.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

std::vector<TensorSpec> specs() {
  return {{"a", "weight", DType::kF32, {300, 257}, 3},
          {"b", "weight", DType::kBf16, {17}, 1},
          {"c", "weight", DType::kU8, {1'000'003}, 2},
          {"d", "weight", DType::kF32, {}, 1},
          {"e", "weight", DType::kF32, {6, 32'768}, 2}};  // rows of sixteen chunks
}

// Reads random ranges of random shards, every third of many rows, and compares each with the file's own bytes and what
// lies between its rows with what was there.
void read_at_random(IoBackend& io, const fs::path& dir, const ReadOptions& options, uint64_t seed) {
  Result<CheckpointReader> opened = CheckpointReader::open(io, dir, options);
  REQUIRE_OK(opened);
  CheckpointReader& reader = opened.value();
  const Manifest& m = reader.manifest();
  std::vector<std::string> files;
  for (const FileEntry& file : m.files) files.push_back(read_file(io, dir / file.name, int64_t{1} << 30).value());
  std::vector<std::vector<std::byte>> buffers;
  std::vector<ReadRange> ranges;
  for (int i = 0; i < 300; ++i) {
    const auto draw = [&](uint64_t n) { return static_cast<int64_t>(mix64(++seed) % n); };
    const ShardEntry& shard = m.shards[static_cast<size_t>(draw(m.shards.size()))];
    ReadRange range;
    range.file = shard.file;
    const int64_t from = draw(static_cast<uint64_t>(shard.bytes));
    range.bytes = i % 5 == 0 ? shard.bytes - from : std::min<int64_t>(shard.bytes - from, draw(3000));
    if (i % 7 == 0) range.bytes = shard.bytes;
    range.offset = shard.offset + (range.bytes == shard.bytes ? 0 : from);
    if (i % 3 == 0 && range.bytes > 0) {
      const int64_t room = shard.offset + shard.bytes - range.offset;
      range.bytes = 1 + draw(static_cast<uint64_t>(std::min<int64_t>(room, i % 2 == 0 ? 200 : 90'000)));
      range.source_stride = range.bytes + draw(i % 2 == 0 ? 300 : 200'000);
      range.target_stride = range.bytes + draw(70);
      range.rows = 1 + (room - range.bytes) / range.source_stride;
    }
    buffers.emplace_back(static_cast<size_t>((range.rows - 1) * range.target_stride + range.bytes) + 1,
                         std::byte{0xEE});
    ranges.push_back(range);
  }
  for (size_t i = 0; i < ranges.size(); ++i) ranges[i].dst = buffers[i].data();
  const Status read = reader.read_ranges(ranges);
  REQUIRE_OK(read);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const std::string& file = files[static_cast<size_t>(ranges[i].file)];
    std::vector<std::byte> expected(buffers[i].size(), std::byte{0xEE});
    for (int64_t row = 0; row < ranges[i].rows; ++row) {
      std::memcpy(expected.data() + row * ranges[i].target_stride,
                  file.data() + ranges[i].offset + row * ranges[i].source_stride, static_cast<size_t>(ranges[i].bytes));
    }
    REQUIRE((buffers[i] == expected));
  }
}

// Counts the files that are open for reading, and those that were closed with a read under way.
struct WatchedDisk : PosixBackend {
  int64_t open_now = 0, open_most = 0, opened = 0, closed_in_use = 0;

  struct File : PosixFile {
    File(WatchedDisk& on, Fd fd, const fs::path& path) : PosixFile(std::move(fd), path.string()), disk(on) {
      ++disk.opened;
      disk.open_most = std::max(disk.open_most, ++disk.open_now);
    }
    ~File() override {
      --disk.open_now;
      disk.closed_in_use += under_way > 0 ? 1 : 0;
    }
    Result<IoTicket> submit_read(int64_t offset, std::byte* data, int64_t bytes) override {
      ++under_way;
      return PosixFile::submit_read(offset, data, bytes);
    }
    Status wait(IoTicket ticket) override {
      --under_way;
      return PosixFile::wait(ticket);
    }
    WatchedDisk& disk;
    int64_t under_way = 0;
  };

  Result<std::unique_ptr<IoFile>> open(const fs::path& path) override {
    RT_TRY_SET(Fd fd, open_fd(path));
    return std::unique_ptr<IoFile>(std::make_unique<File>(*this, std::move(fd), path));
  }
};

}  // namespace

TEST_SUITE("ckpt/persist/read") {
  TEST_CASE("ranges of any size come back right, verified or not, in small and large windows") {
    const TestState state = make_state(12, 3, 2, specs());
    MemoryBackend memory;
    SaveOptions options = small_options();
    options.chunk_bytes = 64 << 10;
    REQUIRE(save(memory, "/ck", state, options).ok());
    const std::unique_ptr<IoBackend> disk = make_best_backend({.request_bytes = 64 << 10, .depth = 8});
    const cairn::testing::TempDir dir("read");
    REQUIRE(save(*disk, dir.path, state, options).ok());
    uint64_t seed = 1;
    for (const bool verify : {true, false}) {
      for (const int64_t window : {1 << 10, 1 << 20, 64 << 20}) {
        ReadOptions read;
        read.huge_pages = seed % 2 == 0;  // only a hint about the memory
        read.verify = verify;
        read.window_bytes = window;
        read_at_random(memory, "/ck/step-00000012", read, seed++ << 32);
        read_at_random(*disk, dir.path / "step-00000012", read, seed++ << 32);
        CHECK(compare(*disk, dir.path / "step-00000012", state, read) == "");
      }
    }
  }

  TEST_CASE("each chunk is read once and small neighbours together") {
    const TestState state = make_state(12, 3, 1, small_specs());
    MemoryBackend memory;
    REQUIRE(save(memory, "/ck", state).ok());
    FaultPlan count;
    count.only = IoOp::kRead;
    FaultBackend io(memory, count);
    Result<CheckpointReader> reader = CheckpointReader::open(io, "/ck/step-00000012");
    REQUIRE(reader.ok());
    const int64_t before = io.calls();
    const Manifest& m = reader.value().manifest();
    std::vector<std::byte> all(static_cast<size_t>(payload_bytes(m)));
    std::vector<ReadRange> ranges;
    int64_t at = 0;
    for (const ShardEntry& shard : m.shards) {  // 100-byte slices: many per chunk
      for (int64_t from = 0; from < shard.bytes; from += 100) {
        const int64_t n = std::min<int64_t>(100, shard.bytes - from);
        ranges.push_back({shard.file, shard.offset + from, n, all.data() + at});
        at += n;
      }
    }
    std::reverse(ranges.begin(), ranges.end());
    REQUIRE(reader.value().read_ranges(ranges).ok());
    CHECK(ranges.size() > 300);
    CHECK(io.calls() - before <= 2);  // the whole payload is one neighbourhood
  }

  TEST_CASE("the reader reads once what several ranks of a node want: replicas and slices") {
    const TestState state = make_state(12, 3, 2, specs());
    const std::unique_ptr<IoBackend> disk = make_best_backend();
    const cairn::testing::TempDir dir("read-spread");
    SaveOptions options = small_options();
    options.chunk_bytes = 64 << 10;
    REQUIRE(save(*disk, dir.path, state, options).ok());
    for (const bool verify : {true, false}) {
      CAPTURE(verify);
      ReadOptions read;
      read.verify = verify;
      Result<CheckpointReader> reader = CheckpointReader::open(*disk, dir.path / "step-00000012", read);
      REQUIRE(reader.ok());
      const Manifest& m = reader.value().manifest();
      std::vector<std::vector<std::byte>> buffers;
      std::vector<ReadRange> ranges;
      std::vector<std::vector<std::byte>> expected;
      int64_t wanted = 0;
      for (const ShardEntry& shard : m.shards) {
        const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
        const auto bytes = cut(state.tensors[static_cast<size_t>(shard.tensor)], tensor.shape, shard.box,
                               dtype_size_bytes(tensor.dtype));
        for (int rank = 0; rank < 4; ++rank) {  // two replicas of the whole, then the two halves
          const int64_t half = shard.bytes / 2;
          const int64_t from = rank == 3 ? half : 0, to = rank == 2 ? half : shard.bytes;
          buffers.emplace_back(static_cast<size_t>(to - from));
          expected.emplace_back(bytes.begin() + from, bytes.begin() + to);
          ranges.push_back({shard.file, shard.offset + from, to - from, nullptr});
          wanted += to - from;
        }
      }
      for (size_t i = 0; i < ranges.size(); ++i) ranges[i].dst = buffers[i].data();
      REQUIRE(reader.value().read_ranges(ranges).ok());
      CHECK((buffers == expected));
      CHECK(reader.value().stats().wanted_bytes == wanted);
      // Gaps between neighbours that are read together are at most the page that a shard's end is rounded up to.
      const int64_t gaps = static_cast<int64_t>(m.shards.size()) * kIoAlign;
      CHECK(reader.value().stats().read_bytes >= payload_bytes(m));
      CHECK(reader.value().stats().read_bytes <= payload_bytes(m) + gaps);
    }
  }

  TEST_CASE("a reader of some columns of long rows reads their chunks and no others, each verified") {
    const std::vector<TensorSpec> wide = {{"w", "weight", DType::kF32, {24, 65'536}, 2},
                                          {"narrow", "weight", DType::kF32, {40, 24}, 1},
                                          {"e", "weight", DType::kBf16, {3, 64, 2048}, 1}};
    const TestState state = make_state(12, 3, 1, wide);
    MemoryBackend disk;
    REQUIRE(save(disk, "/ck", state, {}).ok());
    const fs::path dir = "/ck/step-00000012";
    const auto read_columns = [&](size_t t, Box box) -> Result<std::pair<std::vector<std::byte>, ReadStats>> {
      RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(disk, dir));
      const TensorEntry& tensor = reader.manifest().tensors[t];
      const WantedBox wanted{tensor.kind, tensor.name, box};
      RT_TRY_SET(const std::vector<LoadRead> reads, LoadPlanner(reader.manifest()).plan_reads(std::span(&wanted, 1)));
      std::vector<std::byte> out(static_cast<size_t>(box.count_elems() * dtype_size_bytes(tensor.dtype)));
      std::vector<ReadRange> ranges;
      for (const LoadRead& read : reads) ranges.push_back(range_of(read, out.data()));
      RT_TRY(reader.read_ranges(ranges));
      return std::pair(std::move(out), reader.stats());
    };
    const auto expected = [&](size_t t, const Box& box) {
      return cut(state.tensors[t], wide[t].shape, box, dtype_size_bytes(wide[t].dtype));
    };
    for (const int64_t parts : {2, 4, 8}) {
      for (int64_t part = 0; part < parts; ++part) {
        const Box columns{{0, 65'536 * part / parts}, {24, 65'536 * (part + 1) / parts}};
        const auto got = read_columns(0, columns);
        REQUIRE_OK(got);
        CHECK((got.value().first == expected(0, columns)));
        CHECK(got.value().second.read_bytes == got.value().second.wanted_bytes);
        const Box middle{{0, 64 * part / parts, 0}, {3, 64 * (part + 1) / parts, 2048}};
        const auto experts = read_columns(2, middle);
        REQUIRE(experts.ok());
        CHECK((experts.value().first == expected(2, middle)));
        CHECK(experts.value().second.read_bytes == experts.value().second.wanted_bytes);
      }
    }

    // A flipped bit is found by who reads its columns, named by its chunk, and by nobody else.
    const Manifest m = read_manifest(disk, dir).value();
    const ShardEntry& shard = m.shards[0];
    REQUIRE(shard.chunk_bytes == 16 << 10);
    const fs::path file = dir / m.files[0].name;
    std::string bytes = read_file(disk, file, int64_t{1} << 30).value();
    bytes[static_cast<size_t>(shard.offset + 3 * 262'144 + 70'000)] ^= 1;  // row 3, column 17,500
    REQUIRE((disk.remove_file(file).ok() && write_file(disk, file, bytes).ok()));
    const auto damaged = read_columns(0, Box{{0, 16'384}, {24, 32'768}});
    REQUIRE_FALSE(damaged.ok());
    CHECK(damaged.error().code == ErrorCode::kCorrupt);
    CHECK(damaged.error().message.find("chunk 52 of 192") != std::string::npos);
    CHECK(read_columns(0, Box{{0, 0}, {24, 16'384}}).ok());
    CHECK(read_columns(0, Box{{4, 0}, {24, 65'536}}).ok());
    const VerifyReport report = verify_checkpoint(disk, dir).value();
    REQUIRE(report.damages.size() == 1);
    CHECK(report.damages[0].chunk == 52);
  }

  TEST_CASE("the reader keeps some of many files open, and closes none that is being read") {
    constexpr int64_t kFiles = 200;
    const TestState state = make_state(12, 3, kFiles, {{"t", "weight", DType::kF32, {kFiles * 3, 700}, kFiles * 3}});
    const std::unique_ptr<IoBackend> disk = make_best_backend();
    const cairn::testing::TempDir dir("read-many");
    REQUIRE(save(*disk, dir.path, state).ok());
    for (const int64_t open_files : {1, 5, 128}) {
      CAPTURE(open_files);
      WatchedDisk watched;
      Result<CheckpointReader> reader =
          CheckpointReader::open(watched, dir.path / "step-00000012", {.open_files = open_files});
      REQUIRE_OK(reader);
      const Manifest& m = reader.value().manifest();
      watched.opened = watched.open_most = 0;
      std::vector<std::byte> all(static_cast<size_t>(payload_bytes(m)));
      std::vector<ReadRange> ranges;
      int64_t at = 0;
      for (const ShardEntry& shard : m.shards) {
        ranges.push_back({shard.file, shard.offset, shard.bytes, all.data() + at});
        at += shard.bytes;
      }
      REQUIRE(reader.value().read_ranges(ranges).ok());
      CHECK(watched.opened == kFiles);  // once each, as a load does
      CHECK(watched.open_most == open_files);
      CHECK(watched.closed_in_use == 0);
      REQUIRE(reader.value().read_ranges(std::span(ranges).last(1)).ok());
      CHECK(watched.opened == kFiles);  // the last one is open still
    }
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    // Two descriptors a file, and some for this program.
    const rlimit few{64, before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
    const auto restore = [&] { REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0); };
    const fs::path step = dir.path / "step-00000012";
    const std::string all_open = compare(*disk, step, state, {.open_files = kFiles});
    std::vector<std::string> found;
    for (const int64_t open_files : {1, 3, 16})
      found.push_back(compare(*disk, step, state, {.open_files = open_files}));
    read_at_random(*disk, step, {.window_bytes = 64 << 20, .open_files = 3}, uint64_t{1} << 40);
    restore();
    CHECK(all_open.find("Too many open files") != std::string::npos);
    CHECK((found == std::vector<std::string>(3)));
    const rlimit ours{2 * kOpenReadFiles + 64, before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &ours) == 0);
    const std::string usual = compare(*disk, step, state);
    restore();
    CHECK(usual == "");
  }

  TEST_CASE("a range outside every shard is refused, whatever its numbers") {
    MemoryBackend memory;
    REQUIRE(save(memory, "/ck", make_state(12, 1)).ok());
    Result<CheckpointReader> reader = CheckpointReader::open(memory, "/ck/step-00000012");
    REQUIRE(reader.ok());
    const ShardEntry shard = reader.value().manifest().shards[0];
    std::vector<std::byte> dst(1 << 20);
    for (const auto& [file, offset, bytes] : {std::tuple<int64_t, int64_t, int64_t>{0, 0, 8},
                                              {0, shard.offset, shard.bytes + 1},
                                              {7, shard.offset, 8},
                                              {-1, shard.offset, 8},
                                              {0, -8, 8},
                                              {0, INT64_MAX, 8},
                                              {0, shard.offset + 8, INT64_MAX},
                                              {0, shard.offset, -1}}) {
      const ReadRange range{file, offset, bytes, dst.data()};
      const Status read = reader.value().read_ranges(std::span(&range, 1));
      REQUIRE_FALSE(read.ok());
      CHECK(read.error().code == ErrorCode::kInvalidInput);
    }
    for (const auto& [rows, source_stride, target_stride] :
         {std::tuple<int64_t, int64_t, int64_t>{0, 8, 8},
          {-1, 8, 8},
          {2, 7, 8},  // they overlap in the file
          {2, 8, 7},  // and in memory
          {2, -8, 8},
          {2, shard.bytes - 7, 8},  // the last one ends behind the shard
          {shard.bytes / 8 + 1, 8, 8},
          {INT64_MAX, 8, 8},
          {INT64_MAX, INT64_MAX, 8}}) {
      CAPTURE(rows);
      CAPTURE(source_stride);
      const ReadRange range{shard.file, shard.offset, 8, dst.data(), rows, source_stride, target_stride};
      const Status read = reader.value().read_ranges(std::span(&range, 1));
      REQUIRE_FALSE(read.ok());
      CHECK(read.error().code == ErrorCode::kInvalidInput);
      CHECK(read.error().message.find("lie in no shard") != std::string::npos);
    }
    const ReadRange fits{shard.file, shard.offset, 8, dst.data(), 2, shard.bytes - 8, 8};
    CHECK(reader.value().read_ranges(std::span(&fits, 1)).ok());
    CHECK_FALSE(reader.value().read_shard(99, dst).ok());
    CHECK_FALSE(reader.value().read_shard(0, std::span(dst).first(3)).ok());
    const ReadRange nothing{0, shard.offset, 0, nullptr};
    CHECK(reader.value().read_ranges(std::span(&nothing, 1)).ok());
    CHECK(CheckpointReader::open(memory, "/ck/step-00000099").error().code == ErrorCode::kInvalidInput);
  }
}
