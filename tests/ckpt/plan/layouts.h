#pragma once
// Layouts and a synthetic state whose every number says which element of which tensor it is: a byte that lands in the
// wrong place cannot go unseen.

#include <cstring>
#include <string>
#include <vector>

#include "ckpt/plan/save_plan.h"
#include "runtime/plan/plan.h"

namespace cairn::ckpt::testing {

struct Layout {
  int64_t tp, pp, dp;
  int zero = 1;
  std::vector<MeshAxis> order = {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp};
  std::vector<int64_t> stages;
};

inline Plan plan_of(const Layout& layout, bool tied, int64_t ffn = 40) {
  Recipe r;
  r.name = "synthetic";
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {.layers = 4, .width = 24, .heads = 4, .kv_heads = 4, .head_dim = 6, .ffn = ffn, .context = 8, .vocab = 65};
  r.model.tied_embeddings = tied;
  r.batch = {.samples = 24, .micro = 1};
  r.optimizer.zero = layout.zero;
  r.mesh = {.tp = layout.tp, .pp = layout.pp, .order = layout.order, .stages = layout.stages};
  return make_plan(r, layout.tp * layout.pp * layout.dp).value();
}

inline std::vector<Layout> layouts() {
  return {{1, 1, 1, 0},
          {1, 1, 1},
          {2, 1, 1},
          {4, 1, 1},
          {1, 2, 1},
          {1, 4, 1},
          {1, 1, 2},
          {1, 1, 3},
          {2, 2, 1, 0},
          {2, 2, 2},
          {2, 2, 2, 0, {MeshAxis::kPp, MeshAxis::kDp, MeshAxis::kTp}},
          {4, 2, 1},
          {1, 2, 4},
          {2, 2, 1, 1, {MeshAxis::kTp, MeshAxis::kDp, MeshAxis::kPp}, {1, 3}}};
}

/// The number at `flat` (row-major, logical) of a tensor: exact in a float, different for each element of each tensor.
inline float element(int64_t kind, int64_t tensor, int64_t flat) {
  return static_cast<float>((kind * 60 + tensor) * 65536 + flat) * 0.5f;
}

/// Row-major walk over the elements of a box: calls visit(position in box, flat index in the tensor).
template <typename Visit>
void walk(const Box& box, const Shape& shape, Visit&& visit) {
  const int64_t count = box.count_elems();
  std::vector<int64_t> at = box.lo;
  for (int64_t k = 0; k < count; ++k) {
    visit(k, flat_offset(shape, at));
    for (int64_t d = box.dims() - 1; d >= 0; --d) {
      if (++at[d] < box.hi[d]) break;
      at[d] = box.lo[d];
    }
  }
}

inline std::vector<float> box_values(const Plan& plan, int64_t kind, int64_t tensor, const Box& box) {
  std::vector<float> out(box.count_elems());
  const Shape shape = plan.state_kinds().shape_of(static_cast<StateKind>(kind), plan.tensors[tensor]).value();
  walk(box, shape, [&](int64_t k, int64_t flat) { out[k] = element(kind, tensor, flat); });
  return out;
}

/// What a rank's slot holds.
inline std::vector<std::byte> slot_bytes(const Plan& plan, const SlotLayout& layout) {
  std::vector<std::byte> out(layout.bytes);
  for (const SlotShard& shard : layout.shards) {
    const std::vector<float> values = box_values(plan, shard.kind, shard.tensor, shard.box);
    std::memcpy(out.data() + shard.offset, values.data(), shard.bytes);
  }
  return out;
}

}  // namespace cairn::ckpt::testing
