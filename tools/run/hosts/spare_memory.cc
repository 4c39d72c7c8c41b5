#include "tools/run/hosts/spare_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "ckpt/position.h"
#include "ckpt/run_memory.h"
#include "ckpt/snapshot/arena.h"
#include "dsl/dsl.h"
#include "runtime/plan/device_choice.h"

namespace cairn::tools {
namespace {

constexpr int kNice = 10;  // nobody waits for it yet

}  // namespace

void SpareMemory::prepare(const HostSegment& segment, int64_t ranks, DeviceChoice device) {
  if (segment_ == segment) return;
  drop();
  segment_ = segment;
  thread_ = std::thread([this, segment, ranks, device] {
    ::setpriority(PRIO_PROCESS, 0, kNice);  // of this thread
    Result<ckpt::PreparedMemory> made = make(segment, ranks, device);
    if (made.ok()) {
      made_ = std::make_shared<ckpt::PreparedMemory>(std::move(made).value());
    } else if (!stop_) {
      say_(fmt::format("warning: no memory is ready for a place that this spare may get: {}", made.error().message));
    }
  });
}

/// As follow_segment() and open_run_memory() come to it.
Result<ckpt::PreparedMemory> SpareMemory::make(const HostSegment& segment, int64_t ranks, DeviceChoice device) const {
  RT_TRY_SET(Recipe recipe, dsl::decode_recipe(segment.recipe));
  settle_device(recipe, device);
  RT_TRY_SET(const RunPast past, ckpt::decode_past(segment.past));
  RT_TRY_SET(const Plan plan, make_plan(recipe, segment.hosts * ranks, past));
  RT_TRY_SET(ckpt::ArenaSpec spec, ckpt::arena_spec(plan,
                                                    {.run_name = segment.run_name,
                                                     .run_id = segment.run_id,
                                                     .recipe_json = segment.recipe_json,
                                                     .recipe_hash = segment.recipe_hash,
                                                     .lineage = segment.lineage},
                                                    ckpt::RankRange{0, ranks}));
  ckpt::ArenaSpec largest = spec;
  for (int64_t place = 0; place < segment.hosts && !stop_; ++place) {
    spec.here = ckpt::RankRange{place * ranks, (place + 1) * ranks};
    if (ckpt::Arena::total_bytes(spec) > ckpt::Arena::total_bytes(largest)) largest.here = spec.here;
  }
  RT_TRY(ckpt::Arena::has_room(largest));
  return ckpt::PreparedMemory::make(largest.folder, ckpt::Arena::total_bytes(largest), largest.huge_pages,
                                    [this] { return stop_.load(); });
}

std::shared_ptr<ckpt::PreparedMemory> SpareMemory::take() {
  if (thread_.joinable()) thread_.join();
  segment_.reset();
  return std::exchange(made_, nullptr);
}

void SpareMemory::drop() {
  stop_ = true;
  take();
  stop_ = false;
}

}  // namespace cairn::tools
