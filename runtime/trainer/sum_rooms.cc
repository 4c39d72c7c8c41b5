#include "runtime/trainer/sum_rooms.h"

#include <algorithm>

#include "runtime/trainer/staging_rooms.h"

namespace cairn::trainer {
namespace {

// At 400 GB/s between devices 32 MiB take 80 us, ten times what a launch does: no larger room makes an operation
// faster.
constexpr int64_t kMost = int64_t{32} << 20;
constexpr int64_t kLeastOfRank = 256;  // NcclRooms

}  // namespace

SumRooms sum_rooms(const Plan& plan) {
  const int64_t world = plan.mesh.world();
  if (world == 1) return {};
  SumRooms out;
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
    // What would be staged is no less than what is summed.
    const StagingRooms staged = staging_rooms(plan, plan.mesh.rank({.pp = pp}));
    out.own_bytes = std::max(out.own_bytes, staged.own_bytes);
    out.beside_bytes = std::max(out.beside_bytes, staged.lane_bytes);
  }
  for (int64_t* const bytes : {&out.own_bytes, &out.beside_bytes}) {
    *bytes = std::max(std::min(*bytes, kMost), world * kLeastOfRank);
  }
  return out;
}

}  // namespace cairn::trainer
