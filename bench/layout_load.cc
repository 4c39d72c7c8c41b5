// Loads one state that was saved under several layouts into the ranks of several layouts, for layout_load.py, which
// interleaves them.
//   layout_load DIR MEGABYTES
// Prints its layouts, one a line, and "ready BYTES BACKEND". Each line "FROM TO" on stdin (their numbers) is one load
// of what FROM's ranks saved by all of TO's ranks, a thread each, every checksum compared, and is answered with the
// seconds it took. The state is that of a GPT whose vocabulary no tensor-parallel size divides; memory is laid out as
// in the snapshot arena and touched before.

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/core/random.h"
#include "runtime/plan/plan.h"

using namespace cairn;
using namespace cairn::ckpt;
namespace fs = std::filesystem;

namespace {

struct Layout {
  int64_t tp, pp, dp;
  std::string text() const { return fmt::format("tp{} pp{} dp{}", tp, pp, dp); }
};
const std::vector<Layout> kLayouts = {{2, 1, 2}, {4, 1, 1}, {1, 4, 1}, {1, 1, 4}, {1, 2, 2}, {2, 2, 1}};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory allocate(int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(kHuge, static_cast<size_t>((bytes / kHuge + 1) * kHuge))));
  if (!memory) {
    fmt::print(stderr, "layout_load: no memory for {} bytes\n", bytes);
    std::exit(74);
  }
  std::memset(memory.get(), 1, static_cast<size_t>(bytes));  // first touch is no part of what is measured
  return memory;
}

[[noreturn]] void die(const Error& error) {
  fmt::print(stderr, "layout_load: {}\n", error.message);
  std::exit(error.exit_code());
}

Plan plan_of(const Layout& layout, int64_t megabytes) {
  Recipe r;
  r.name = "layout-load";
  r.stop = {Span::Unit::kSteps, 10};
  const int64_t width = megabytes >= 256 ? 1024 : 128;
  r.model = {.width = width, .heads = 16, .kv_heads = 16, .head_dim = width / 16, .ffn = 4 * width, .context = 128};
  r.model.vocab = 16 * width + 3;
  r.model.layers = std::max<int64_t>(4, (megabytes << 20) / (12 * width * width * 12) - 1);
  r.batch = {.samples = 4, .micro = 1};
  r.optimizer.zero = 1;
  r.mesh = {.tp = layout.tp, .pp = layout.pp};
  Result<Plan> plan = make_plan(r, layout.tp * layout.pp * layout.dp);
  if (!plan.ok()) die(plan.error());
  return std::move(plan).value();
}

/// One rank's memory, and where its state stands in it.
struct RankMemory {
  Memory memory;
  std::vector<trainer::StateTensor> tensors;
};

RankMemory rank_memory(const Plan& plan, int64_t rank) {
  RankMemory out;
  const SlotLayout slot = slot_layout(plan, rank);
  int64_t bytes = slot.bytes;
  const RankPlan mine = plan.rank(rank);
  for (const StatePiece& piece : mine.pieces) {
    if (!piece.primary) bytes += 3 * piece.count_elems() * 4;
  }
  out.memory = allocate(std::max<int64_t>(bytes, 4096));
  for (const SlotShard& shard : slot.shards) {
    out.tensors.push_back({static_cast<trainer::StateKind>(shard.kind), shard.tensor, shard.box,
                           out.memory.get() + shard.offset, shard.bytes, true});
  }
  int64_t at = slot.bytes;
  for (int64_t kind = 0; kind < 3; ++kind) {
    for (const StatePiece& piece : mine.pieces) {
      if (piece.primary) continue;
      out.tensors.push_back({static_cast<trainer::StateKind>(kind), piece.tensor, piece.box, out.memory.get() + at,
                             piece.count_elems() * 4, false});
      at += piece.count_elems() * 4;
    }
  }
  return out;
}

void save(IoBackend& io, const fs::path& dir, const Plan& plan) {
  Manifest skeleton = manifest_skeleton(plan, {"bench", "bench", {}, "{}", "none"});
  put_position({.step = 1, .samples = 1, .tokens = 1, .seed = 1}, skeleton);
  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(plan, rank).shards) {
      ShardData data{.tensor = manifest_tensor(plan, shard.kind, shard.tensor),
                     .lo = shard.box.lo,
                     .hi = shard.box.hi,
                     .bytes = shard.bytes};
      data.fill = [](int64_t offset, std::span<std::byte> target) -> Status {
        for (size_t k = 0; k + 4 <= target.size(); k += 4) {
          const auto word = static_cast<uint32_t>((static_cast<uint64_t>(offset) + k) * 2654435761u);
          std::memcpy(target.data() + k, &word, 4);
        }
        return {};
      };
      part.shards.push_back(std::move(data));
    }
    parts.push_back(std::move(part));
  }
  const Result<SaveReport> saved = save_checkpoint(io, dir, std::move(skeleton), parts);
  if (!saved.ok()) die(saved.error());
}

}  // namespace

int main(int argc, char** argv) {
  int64_t megabytes = 0;
  const std::string_view size = argc == 3 ? argv[2] : "";
  if (argc != 3 || std::from_chars(size.data(), size.data() + size.size(), megabytes).ec != std::errc() ||
      megabytes < 1) {
    fmt::print(stderr, "usage: layout_load DIR MEGABYTES\n");
    return 2;
  }
  const fs::path root = argv[1];
  const std::unique_ptr<IoBackend> io = make_best_backend();
  std::vector<Plan> plans;
  const auto place = [&](size_t k) { return root / fmt::format("layout-{}", k); };
  for (size_t k = 0; k < kLayouts.size(); ++k) {
    plans.push_back(plan_of(kLayouts[k], megabytes));
    save(*io, place(k), plans.back());
    fmt::print("{}\n", kLayouts[k].text());
  }
  fmt::print("ready {} {}\n", plans[0].checkpoint_bytes, io->name());
  std::fflush(stdout);

  for (size_t from = 0, to = 0; std::cin >> from >> to;) {
    if (from >= plans.size() || to >= plans.size()) return 2;
    const auto world = static_cast<size_t>(plans[to].mesh.world());
    std::vector<RankMemory> memory;
    std::vector<std::unique_ptr<IoBackend>> backends;
    for (size_t rank = 0; rank < world; ++rank) {
      memory.push_back(rank_memory(plans[to], static_cast<int64_t>(rank)));
      backends.push_back(make_best_backend());
    }
    std::vector<Status> done(world);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> ranks;
    if (std::getenv("ONE") != nullptr) {
      std::vector<trainer::StateTensor> all;
      for (const RankMemory& rank : memory) all.insert(all.end(), rank.tensors.begin(), rank.tensors.end());
      const Result<trainer::TrainPosition> loaded =
            load_from_disk(plans[to], *backends[0], place(from) / step_dir_name(1), all);
      if (!loaded.ok()) done[0] = loaded.error();
    } else
    for (size_t rank = 0; rank < world; ++rank) {
      ranks.emplace_back([&, rank] {
        const Result<trainer::TrainPosition> loaded =
            load_from_disk(plans[to], *backends[rank], place(from) / step_dir_name(1), memory[rank].tensors);
        if (!loaded.ok()) done[rank] = loaded.error();
      });
    }
    for (std::thread& rank : ranks) rank.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (const Status& status : done) {
      if (!status.ok()) die(status.error());
    }
    fmt::print("{:.6f}\n", seconds);
    std::fflush(stdout);
  }
  return 0;
}
