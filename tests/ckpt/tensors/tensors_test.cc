// Numbers, statistics, slices, .npy headers, streams and comparison, on small checkpoints in a disk in memory.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/tensors/diff.h"
#include "ckpt/tensors/npy.h"
#include "ckpt/tensors/numbers.h"
#include "ckpt/tensors/stats.h"
#include "runtime/core/random.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

struct Tensor {
  TensorEntry entry;
  std::vector<std::byte> bytes;  // row-major
  int64_t row_cuts = 1;          // shards along dim 0
};

template <typename T>
Tensor tensor(const char* name, DType dtype, Shape shape, const std::vector<T>& values, int64_t row_cuts = 1) {
  Tensor out{{name, "weight", dtype, std::move(shape)}, std::vector<std::byte>(values.size() * sizeof(T)), row_cuts};
  std::memcpy(out.bytes.data(), values.data(), out.bytes.size());
  return out;
}

std::filesystem::path save(MemoryBackend& io, const std::vector<Tensor>& tensors) {
  Manifest skeleton;
  skeleton.step = 3;
  WriterPart part{shard_file_name(0, 1), {}};
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Tensor& tensor = tensors[t];
    skeleton.tensors.push_back(tensor.entry);
    const Box whole = Box::whole(tensor.entry.shape);
    for (int64_t cut = 0; cut < tensor.row_cuts; ++cut) {
      Box box = whole;
      const int64_t rows = tensor.row_cuts == 1 ? 0 : tensor.entry.shape[0];
      if (rows > 0) {
        box.lo[0] = rows * cut / tensor.row_cuts;
        box.hi[0] = rows * (cut + 1) / tensor.row_cuts;
      }
      const int64_t elem = dtype_size_bytes(tensor.entry.dtype);
      const int64_t row = whole.count_elems() / std::max<int64_t>(1, rows == 0 ? 1 : rows) * elem;
      part.shards.push_back({.tensor = static_cast<int64_t>(t),
                             .lo = box.lo,
                             .hi = box.hi,
                             .data = tensor.bytes.data() + (rows == 0 ? 0 : box.lo[0] * row),
                             .bytes = box.count_elems() * elem});
    }
  }
  const Result<SaveReport> saved = save_checkpoint(io, "/ck", skeleton, std::span(&part, 1), {{.chunk_bytes = 4096}});
  REQUIRE_OK(saved);
  return saved.value().dir;
}

std::vector<float> noise(size_t count) {
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i)
    out[i] = static_cast<float>(static_cast<int64_t>(mix64(i) >> 40) - (1 << 23)) / 1e6F;
  return out;
}

}  // namespace

TEST_SUITE("ckpt/tensors") {
  TEST_CASE("rounding from double to sixteen bits is one rounding, not two") {
    // 1 + 2^-8 + 2^-40 lies just above the middle of two bf16 numbers; by way of float it would be the middle itself.
    const double above = 1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
    for (const double sign : {1.0, -1.0}) {
      const std::vector<double> in = {sign * above, sign * (1 + std::ldexp(1.0, -8)), sign * 1e300, sign * 1e-300};
      std::vector<std::byte> bytes(8);
      std::vector<double> out(4);
      from_doubles(DType::kBf16, in, bytes);
      to_doubles(DType::kBf16, bytes, out);
      CHECK(out[0] == sign * (1 + std::ldexp(1.0, -7)));
      CHECK(out[1] == sign);  // a tie goes to the even one
      CHECK(out[2] == sign * std::numeric_limits<double>::infinity());
      CHECK(out[3] == 0);
    }
    const double above_half = 1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
    std::vector<std::byte> half(2);
    std::vector<double> back(1);
    from_doubles(DType::kF16, std::vector<double>{above_half}, half);
    to_doubles(DType::kF16, half, back);
    CHECK(back[0] == 1 + std::ldexp(1.0, -10));
  }

  TEST_CASE("statistics in pieces are those of the whole, and what is not finite is counted apart") {
    const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
    std::vector<double> values;
    for (int i = 0; i < 1000; ++i) values.push_back(1e8 + std::sin(i));
    double mean = 0, squares = 0;
    for (const double x : values) mean += x / 1000;
    for (const double x : values) squares += (x - mean) * (x - mean);
    values.insert(values.begin() + 500, {nan, inf, -inf, nan});
    for (const size_t piece : {size_t{1}, size_t{7}, size_t{2000}}) {
      StatsSum sum;
      for (size_t at = 0; at < values.size(); at += piece)
        sum.add(std::span(values).subspan(at, std::min(piece, values.size() - at)));
      const TensorStats stats = sum.result();
      CHECK((stats.elements == 1004 && stats.nans == 2 && stats.infs == 2 && stats.zeros == 0));
      CHECK(stats.mean == doctest::Approx(mean).epsilon(1e-14));
      CHECK(stats.std == doctest::Approx(std::sqrt(squares / 1000)).epsilon(1e-9));
    }
    StatsSum nothing;
    nothing.add(std::vector<double>{nan});
    CHECK((nothing.result().finite() == 0 && nothing.result().std == 0));
  }

  TEST_CASE("a slice is what NumPy makes of it") {
    const Shape shape = {10, 4, 6};
    const Slice slice = parse_slice(" 2:-1 , -2,", shape).value();
    CHECK(slice.box == Box{{2, 2, 0}, {9, 3, 6}});
    CHECK(slice.shape == Shape{7, 6});
    CHECK(parse_slice("", shape).value().shape == shape);
    CHECK(parse_slice("", {}).value().shape == Shape{});
    for (const char* bad : {"10", "-11", "3:3", "5:2", "0:11", "1:2:3", "a", "0,0,0,0", "1e3"}) {
      CAPTURE(bad);
      REQUIRE_FALSE(parse_slice(bad, shape).ok());
      CHECK(parse_slice(bad, shape).error().code == ErrorCode::kInvalidInput);
    }
    for (const Shape& dims : {Shape{}, Shape{5}, shape}) {
      const std::string header = npy_header(DType::kF32, dims);
      CHECK(header.size() % 64 == 0);
      CHECK(header.back() == '\n');
      CHECK(static_cast<size_t>(static_cast<uint8_t>(header[8]) + 256 * static_cast<uint8_t>(header[9])) ==
            header.size() - 10);
    }
  }

  TEST_CASE("each bfloat16 is written as the float32 with its bits, whatever kind of NaN it is") {
    MemoryBackend io;
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    const std::filesystem::path dir = save(io, {tensor<uint16_t>("w", DType::kBf16, {65536}, all)});
    CheckpointReader reader = CheckpointReader::open(io, dir).value();
    std::vector<std::byte> file;
    REQUIRE(write_npy(reader, 0, parse_slice("", {65536}).value(), {}, [&](std::span<const std::byte> bytes) {
              file.insert(file.end(), bytes.begin(), bytes.end());
              return Status();
            }).ok());
    std::vector<uint32_t> written(all.size());
    REQUIRE(file.size() > written.size() * 4);
    std::memcpy(written.data(), file.data() + file.size() - written.size() * 4, written.size() * 4);
    size_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) wrong += written[i] != uint32_t{all[i]} << 16 ? 1 : 0;
    CHECK(wrong == 0);
  }

  TEST_CASE("a stream gives the same bytes whatever its window, ahead or not, in order or not") {
    MemoryBackend io;
    const std::vector<float> a = noise(64 * 700), b = noise(3000);
    const auto dir = save(io, {tensor("a", DType::kF32, {64, 700}, a, 5), tensor("b", DType::kF32, {3000}, b)});
    for (const bool ahead : {false, true}) {
      for (const int64_t memory : {int64_t{16} << 10, int64_t{100} << 10, int64_t{4} << 20}) {
        CAPTURE(memory);
        CheckpointReader reader = CheckpointReader::open(io, dir).value();
        const LoadPlanner planner(reader.manifest());
        const std::vector<StreamItem> items = {stream_item(reader.manifest(), 0, Box{{3, 10}, {60, 650}}),
                                               stream_item(reader.manifest(), 1, Box::whole({3000}))};
        BoxStream stream(reader, planner, items, {.memory_bytes = memory, .ahead = ahead});
        std::vector<std::byte> out(7777);
        const auto check = [&](int64_t at, int64_t bytes) {
          const auto span = std::span(out).first(static_cast<size_t>(bytes));
          REQUIRE(stream.copy(0, at, span).ok());
          for (int64_t i = 0; i < bytes / 4; ++i) {
            const int64_t flat = at / 4 + i;
            float value = 0;
            std::memcpy(&value, span.data() + i * 4, 4);
            REQUIRE(value == a[static_cast<size_t>((3 + flat / 640) * 700 + 10 + flat % 640)]);
          }
        };
        for (int64_t at = 0; at < items[0].bytes; at += 7776) check(at, std::min<int64_t>(7776, items[0].bytes - at));
        std::vector<float> all(3000);
        REQUIRE(stream.copy(1, 0, std::as_writable_bytes(std::span(all))).ok());
        CHECK(all == b);
        for (const int64_t at : {int64_t{40000}, int64_t{0}, items[0].bytes - 400}) check(at, 400);
      }
    }
  }

  TEST_CASE("a damaged chunk ends a stream with its name, also when it was read ahead") {
    MemoryBackend io;
    const auto dir = save(io, {tensor("a", DType::kF32, {40000}, noise(40000))});
    const Manifest manifest = read_manifest(io, dir).value();
    io.bytes_of(dir / manifest.files[0].name)[static_cast<size_t>(manifest.shards[0].offset + 100000)] ^= std::byte{4};
    for (const bool ahead : {false, true}) {
      CheckpointReader reader = CheckpointReader::open(io, dir).value();
      const std::vector<int64_t> tensors = {0};
      const auto stats = tensor_stats(reader, tensors, {.memory_bytes = 32 << 10, .ahead = ahead});
      REQUIRE_FALSE(stats.ok());
      CHECK(stats.error().code == ErrorCode::kCorrupt);
      CHECK(stats.error().message.find("chunk 24") != std::string::npos);
    }
  }

  TEST_CASE("a comparison counts bits, measures values, and says what has no counterpart") {
    const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
    const std::vector<float> x = {1, 2, nan, 0.0F, 5, inf}, y = {1, 2.5, nan, -0.0F, nan, inf};
    const std::vector<uint16_t> one_bf16 = {0x3f80, 0x4000};  // 1, 2
    MemoryBackend left_io, right_io;
    const auto left_dir = save(left_io, {tensor("same", DType::kF32, {6}, x), tensor("off", DType::kF32, {2, 3}, x, 2),
                                         tensor("shape", DType::kF32, {6}, x), tensor("gone", DType::kF32, {6}, x),
                                         tensor<float>("recast", DType::kF32, {2}, {1, 2})});
    const auto right_dir = save(right_io, {tensor("off", DType::kF32, {2, 3}, y), tensor("same", DType::kF32, {6}, x),
                                           tensor("shape", DType::kF32, {3, 2}, x), tensor("new", DType::kF32, {6}, x),
                                           tensor("recast", DType::kBf16, {2}, one_bf16)});
    CheckpointReader left = CheckpointReader::open(left_io, left_dir).value();
    CheckpointReader right = CheckpointReader::open(right_io, right_dir).value();
    const std::vector<TensorDiff> found = diff_tensors(left, right).value();
    using What = TensorDiff::What;
    REQUIRE(found.size() == 6);
    CHECK(found[0].what == What::kEqual);
    CHECK(found[1].what == What::kDiffers);
    CHECK(found[1].differing == 3);  // 2.5, -0, nan
    CHECK(found[1].nans == 1);
    CHECK(found[1].max_abs == 0.5);
    CHECK(found[1].max_abs_at == 1);
    CHECK(found[1].max_rel == doctest::Approx(0.2));
    CHECK(found[2].what == What::kOtherShape);
    CHECK(found[3].what == What::kOnlyLeft);
    CHECK((found[4].what == What::kDiffers && found[4].differing == 0));  // the same values in other bits
    CHECK(found[5].what == What::kOnlyRight);
    CHECK(diff_tensors(left, right, {.only = {"weight/s*"}}).value().size() == 2);
    CHECK(diff_tensors(left, right, {.only = {"exp_avg/*"}}).value().empty());
  }

  TEST_CASE("differences are exact where a double has no room for them") {
    constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();
    constexpr int64_t kBeyond = int64_t{1} << 53;  // from here on doubles leave integers out
    const double inf = std::numeric_limits<double>::infinity();
    MemoryBackend left_io, right_io;
    const auto left_dir = save(left_io, {tensor<int64_t>("near", DType::kI64, {3}, {kBeyond, -7, 7}),
                                         tensor<int64_t>("far", DType::kI64, {2}, {kLow, 1}),
                                         tensor<double>("large", DType::kF64, {5}, {1e308, 1, inf, -0.0, inf}),
                                         tensor<int64_t>("recast", DType::kI64, {2}, {kBeyond + 1, 5})});
    const auto right_dir = save(right_io, {tensor<int64_t>("near", DType::kI64, {3}, {kBeyond + 1, -7, 7}),
                                           tensor<int64_t>("far", DType::kI64, {2}, {kHigh, 1}),
                                           tensor<double>("large", DType::kF64, {5}, {-1e308, 1, inf, 0.0, inf}),
                                           tensor<double>("recast", DType::kF64, {2}, {std::ldexp(1.0, 53), 5})});
    CheckpointReader left = CheckpointReader::open(left_io, left_dir).value();
    CheckpointReader right = CheckpointReader::open(right_io, right_dir).value();
    const std::vector<TensorDiff> found = diff_tensors(left, right).value();
    REQUIRE(found.size() == 4);
    CHECK((found[0].differing == 1 && found[0].max_abs == 1 && found[0].max_abs_at == 0));
    CHECK(static_cast<uint64_t>(found[1].max_abs) == ~uint64_t{0});
    CHECK((found[2].differing == 2 && found[2].max_abs == 2 * static_cast<long double>(1e308)));
    CHECK((found[2].max_rel == 2 && found[2].max_abs_at == 0));
    CHECK((found[3].differing == 1 && found[3].max_abs == 1));  // nearest double or not
  }

  TEST_CASE("statistics are exact where a double has no room for sums, squares or integers") {
    constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();
    MemoryBackend io;
    const auto dir = save(io, {tensor<int64_t>("whole", DType::kI64, {3}, {kHigh, kLow + 1, kHigh}),
                               tensor<double>("large", DType::kF64, {4}, {1e308, 1e308, 1e308, -1e308})});
    CheckpointReader reader = CheckpointReader::open(io, dir).value();
    const std::vector<int64_t> both = {0, 1};
    const std::vector<TensorStats> stats = tensor_stats(reader, both, {}).value();
    CHECK((static_cast<int64_t>(stats[0].min) == kLow + 1 && static_cast<int64_t>(stats[0].max) == kHigh));
    CHECK(stats[1].mean == doctest::Approx(5e307));
    CHECK(stats[1].std == doctest::Approx(std::sqrt(3.0) / 2 * 1e308));
  }
}
