// Loads one state that was saved under several layouts into the ranks of several layouts, for layout_load.py, which
// interleaves them.
//   layout_load DIR MEGABYTES
// Prints its layouts, one a line, and "ready BYTES BACKEND". Each line "FROM TO" on stdin (their numbers) is one load
// of what FROM's ranks saved by all of TO's ranks, a thread each, every checksum compared, and is answered with the
// seconds it took. The state is that of a GPT whose vocabulary no tensor-parallel size divides; memory is laid out as
// in the snapshot arena and touched before.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/restore_slot.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/uring_backend.h"
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

[[noreturn]] void die(const Error& error) {
  fmt::print(stderr, "layout_load: {}\n", error.message);
  std::exit(error.exit_code());
}

Plan plan_of(const Layout& layout, int64_t megabytes) {
  Recipe r;
  r.name = "layout-load";
  r.stop = {Span::Unit::kSteps, 10};
  const int64_t width = megabytes >= 768 ? 1024 : megabytes >= 96 ? 512 : 128;
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

void save(IoBackend& io, const fs::path& dir, const Plan& plan) {
  Manifest skeleton = manifest_skeleton(plan, {"bench", "bench", {}, "{}", "none"});
  put_position({.step = 1, .samples = 1, .tokens = 1, .seed = 1}, skeleton);
  const StateIndex index(plan);
  std::vector<WriterPart> parts;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, plan.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(plan, rank).shards) {
      ShardData data{
          .tensor = index.at(shard.kind, shard.tensor), .lo = shard.box.lo, .hi = shard.box.hi, .bytes = shard.bytes};
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
    Result<ArenaSpec> spec = arena_spec(plans[to], {"bench", fmt::format("bench-{}", ::getpid()), {}, "{}", "none"});
    if (!spec.ok()) die(spec.error());
    spec.value().slots = 2;  // one is loaded into, the other never touched
    Result<Arena> arena = Arena::create(spec.value());
    if (!arena.ok()) die(arena.error());
    for (int64_t rank = 0; rank < plans[to].mesh.world(); ++rank) {  // first touch is no part of what is measured
      const auto payload = arena.value().payload(rank, 0);
      std::memset(payload.data(), 1, payload.size());
    }
    const auto begin = std::chrono::steady_clock::now();
    const Result<SlotLoad> loaded = load_slot(plans[to], arena.value(), 0, 1, *io, place(from) / step_dir_name(1));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!loaded.ok()) die(loaded.error());
    if (Status removed = arena.value().remove(); !removed.ok()) die(removed.error());
    fmt::print("{:.6f}\n", seconds);
    std::fflush(stdout);
  }
  return 0;
}
