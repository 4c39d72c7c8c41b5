// Averages of small checkpoints: what is not finite, what is taken of the last one, and the memory that many take.
#include "ckpt/merge.h"

#include <doctest/doctest.h>
#include <malloc.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/memory_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/box_stream.h"
#include "tests/support/ok.h"
#include "tests/support/status_kib.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::ckpt;
using cairn::testing::status_kib;
namespace fs = std::filesystem;

namespace {

struct Tensor {
  std::string kind, name;
  std::vector<float> values;
};

fs::path save(IoBackend& io, const fs::path& dir, int64_t step, const std::vector<Tensor>& tensors) {
  Manifest skeleton;
  skeleton.step = step;
  skeleton.state = R"({"loss":2.5})";
  WriterPart part{shard_file_name(0, 1), {}};
  for (const Tensor& tensor : tensors) {
    const Shape shape = {std::ssize(tensor.values)};
    part.shards.push_back({.tensor = std::ssize(skeleton.tensors),
                           .lo = {0},
                           .hi = shape,
                           .data = reinterpret_cast<const std::byte*>(tensor.values.data()),
                           .bytes = shape[0] * 4});
    skeleton.tensors.push_back({tensor.name, tensor.kind, DType::kF32, shape});
  }
  const Result<SaveReport> saved = save_checkpoint(io, dir, skeleton, std::span(&part, 1));
  REQUIRE_OK(saved);
  return saved.value().dir;
}

std::vector<float> read(IoBackend& io, const fs::path& dir, const std::string& kind, const std::string& name) {
  Result<CheckpointReader> reader = CheckpointReader::open(io, dir);
  REQUIRE_OK(reader);
  const Manifest& m = reader.value().manifest();
  for (size_t s = 0; s < m.shards.size(); ++s) {
    const TensorEntry& tensor = m.tensors[static_cast<size_t>(m.shards[s].tensor)];
    if (tensor.kind != kind || tensor.name != name) continue;
    std::vector<float> values(static_cast<size_t>(m.shards[s].bytes / 4));
    REQUIRE(reader.value().read_shard(static_cast<int64_t>(s), std::as_writable_bytes(std::span(values))).ok());
    return values;
  }
  return {};
}

}  // namespace

TEST_SUITE("ckpt/merge") {
  TEST_CASE("an average keeps values that are not finite, and names their tensors and sources") {
    constexpr size_t kElems = 200'000;  // several pieces
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
    MemoryBackend io;
    std::vector<fs::path> sources;
    for (int64_t i = 0; i < 3; ++i) {
      std::vector<Tensor> tensors;
      for (const char* name : {"fine", "both", "one"})
        tensors.push_back({"weight", name, std::vector<float>(kElems, static_cast<float>(i))});
      if (i == 1) tensors[1].values[7] = kNan;
      if (i == 2) tensors[1].values[kElems - 1] = -kInf;
      if (i == 0) tensors[2].values[150'000] = kInf;
      sources.push_back({save(io, "/run/checkpoints", i, tensors)});
    }
    for (const int64_t memory : {int64_t{11} << 20, int64_t{256} << 20}) {
      const auto done =
          merge_checkpoints(io, sources, "/to/checkpoints", {.memory_bytes = memory, .replace_existing = true});
      REQUIRE_OK(done);
      const std::vector<NotFinite>& found = done.value().not_finite;
      REQUIRE(found.size() == 2);
      CHECK((found[0].tensor == "both" && found[0].sources == std::vector<fs::path>{sources[1], sources[2]}));
      CHECK((found[1].tensor == "one" && found[1].sources == std::vector<fs::path>{sources[0]}));
      CHECK(read(io, done.value().dir, "weight", "fine") == std::vector<float>(kElems, 1));
      const std::vector<float> both = read(io, done.value().dir, "weight", "both");
      CHECK((std::isnan(both[7]) && both[8] == 1 && both[kElems - 1] == -kInf));
    }
  }

  TEST_CASE("moments and the moving average are dropped or the last one's, which has to have moments") {
    MemoryBackend io;
    const auto state = [](float value) {
      std::vector<Tensor> out;
      for (const char* kind : {"weight", "exp_avg", "exp_avg_sq", "ema"})
        out.push_back({kind, "w", std::vector<float>(64, value)});
      return out;
    };
    std::vector<fs::path> sources = {{save(io, "/a", 1, state(2))}, {save(io, "/a", 2, state(4))}};
    const auto dropped = merge_checkpoints(io, sources, "/dropped", {});
    REQUIRE_OK(dropped);
    CHECK((dropped.value().manifest.tensors.size() == 1 && dropped.value().manifest.state == "{}"));
    const auto last = merge_checkpoints(io, sources, "/last", {.moments = Moments::kLast});
    REQUIRE_OK(last);
    CHECK(last.value().manifest.state == R"({"loss":2.5})");
    CHECK(read(io, last.value().dir, "weight", "w") == std::vector<float>(64, 3));
    for (const char* kind : {"exp_avg", "exp_avg_sq", "ema"})
      CHECK(read(io, last.value().dir, kind, "w") == std::vector<float>(64, 4));
    sources.push_back({dropped.value().dir});
    const auto refused = merge_checkpoints(io, sources, "/refused", {.moments = Moments::kLast});
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
    CHECK(refused.error().message.find("/dropped/step-00000002: weights only") == 0);
    CHECK(merge_checkpoints(io, sources, "/three", {}).ok());
  }

  TEST_CASE("many sources with large chunks stay within the memory, or are told how much they need") {
    const cairn::testing::TempDir temp("average");
    const std::unique_ptr<IoBackend> io = make_best_backend();
    std::vector<float> values(8 << 20);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000);
    const fs::path dir = save(*io, temp / "source", 1, {{"weight", "w", values}});
    REQUIRE(largest_chunk(read_manifest(*io, dir).value()) == int64_t{4} << 20);
    const std::vector<fs::path> sources(16, {dir});
    MergeOptions options{.memory_bytes = int64_t{64} << 20, .make_io = [] { return make_best_backend(); }};
    const auto refused = merge_checkpoints(*io, sources, temp / "to", options);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kInvalidInput);
    const std::string words = "a merge of 16 needs ";
    REQUIRE_MESSAGE(refused.error().message.starts_with(words), refused.error().message);
    options.memory_bytes = std::stoll(refused.error().message.substr(words.size()));
    CHECK((options.memory_bytes > int64_t{128} << 20 && options.memory_bytes < int64_t{192} << 20));
    --options.memory_bytes;
    CHECK_FALSE(merge_checkpoints(*io, sources, temp / "to", options).ok());
    ++options.memory_bytes;

    mallopt(M_MMAP_THRESHOLD, 256 << 10);  // as the program does
    malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
    const int64_t before = status_kib("VmRSS:");
    const auto done = merge_checkpoints(*io, sources, temp / "to", options);
    const int64_t peak = status_kib("VmHWM:") - before;
    REQUIRE_OK(done);
    MESSAGE("memory " << (options.memory_bytes >> 10) << " KiB, peak " << peak << " KiB");
#ifndef CAIRN_SANITIZED
    CHECK(peak < options.memory_bytes >> 10);
    CHECK(peak > int64_t{64} << 10);  // the measure sees what it should
#endif
    CHECK(read(*io, done.value().dir, "weight", "w") == values);
  }
}
