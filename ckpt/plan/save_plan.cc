#include "ckpt/plan/save_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kElemBytes = 4;  // all saved state is f32

class TextHash {
 public:
  void add(std::string_view text) { hash_.update(std::as_bytes(std::span(text))); }
  void add(const std::vector<int64_t>& numbers) {
    const auto count = static_cast<int64_t>(numbers.size());
    hash_.update(std::as_bytes(std::span(&count, 1)));
    hash_.update(std::as_bytes(std::span(numbers)));
  }
  uint64_t digest() const { return hash_.digest(); }

 private:
  StreamingHash hash_;
};

}  // namespace

bool is_state_kind(std::string_view kind) {
  return std::find(kStateKinds.begin(), kStateKinds.end(), kind) != kStateKinds.end();
}

bool is_moment_kind(std::string_view kind) {
  const auto found = std::find(kStateKinds.begin(), kStateKinds.end(), kind);
  return found != kStateKinds.end() && is_moment(static_cast<StateKind>(found - kStateKinds.begin()));
}

StateKinds kinds_in(const Manifest& manifest) {
  StateKinds out;
  for (const TensorEntry& entry : manifest.tensors) {
    const auto found = std::find(kStateKinds.begin(), kStateKinds.end(), entry.kind);
    if (found != kStateKinds.end()) out.add(static_cast<StateKind>(found - kStateKinds.begin()));
  }
  return out;
}

bool has_moments(const Manifest& manifest) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [](const TensorEntry& entry) { return is_moment_kind(entry.kind); });
}

bool moments_begin(const Plan& plan, const Manifest& manifest) {
  return plan.past.moments_from > 0 && has_moments(manifest) &&
         kinds_in(manifest).moments() != plan.state_kinds().moments();
}

Status check_moments(const StateKinds& saved, const StateKinds& wanted) {
  const bool both = saved.has(StateKind::kExpAvgSq) && wanted.has(StateKind::kExpAvgSq);
  if (!both || saved.factored() == wanted.factored()) return {};
  const auto name = [](const StateKinds& kinds) { return kinds.factored() ? "Adafactor" : "AdamW or LAMB"; };
  return Error{ErrorCode::kInvalidInput,
               fmt::format("the checkpoint has the optimizer state of {}, and the recipe's optimizer is {}; a run that "
                           "begins with init = {{ weights_only = true }} (--init-weights-only) takes its weights alone",
                           name(saved), name(wanted))};
}

SlotLayout slot_layout(const Plan& plan, int64_t rank) { return slot_layout(plan, rank, plan.state_kinds()); }

SlotLayout slot_layout(const Plan& plan, int64_t rank, const StateKinds& kinds) {
  const RankPlan mine = plan.rank(rank);
  SlotLayout out;
  const auto add = [&](StateKind kind, const auto& piece) {
    out.shards.push_back({static_cast<int64_t>(kind), piece.tensor, piece.box,
                          out.bytes + piece.state_offset * kElemBytes, piece.box.count_elems() * kElemBytes});
  };
  for (const StateKind kind : kinds.arrays()) {
    for (const StatePiece& piece : mine.pieces) {
      if (piece.primary) add(kind, piece);
    }
    out.bytes += mine.saved_elems * kElemBytes;
  }
  if (!kinds.factored()) return out;
  for (const SumPiece& piece : mine.sums) {
    if (piece.primary) add(piece.kind, piece);
  }
  out.bytes += mine.saved_sums * kElemBytes;
  return out;
}

std::vector<SlotLayout> slot_layouts(const Plan& plan) {
  std::vector<SlotLayout> out;
  out.reserve(plan.mesh.world());
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) out.push_back(slot_layout(plan, rank));
  return out;
}

std::vector<TensorEntry> state_tensors(const Plan& plan) { return state_tensors(plan.tensors, plan.state_kinds()); }

std::vector<TensorEntry> state_tensors(const std::vector<TensorSpec>& tensors, const StateKinds& kinds) {
  std::vector<TensorEntry> out;
  for (const StateKind kind : kinds.all()) {
    for (const TensorSpec& spec : tensors) {
      const std::optional<Shape> shape = kinds.shape_of(kind, spec);
      if (shape) out.push_back({spec.name, std::string(kStateKinds[static_cast<size_t>(kind)]), DType::kF32, *shape});
    }
  }
  return out;
}

StateIndex::StateIndex(const std::vector<TensorSpec>& tensors, const StateKinds& kinds) {
  for (const StateKind kind : kinds.all()) {
    std::vector<int64_t>& index = index_[static_cast<size_t>(kind)];
    index.assign(tensors.size(), -1);
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (!kinds.shape_of(kind, tensors[t])) continue;
      index[t] = size();
      tensor_.push_back(static_cast<int64_t>(t));
    }
  }
}

Manifest manifest_skeleton(const Plan& plan, const RunText& run) {
  Manifest out;
  out.run = {run.run_name, run.run_id, run.parents};
  out.recipe = run.recipe_json;
  out.recipe_hash = run.recipe_hash;
  out.mesh = {.tp = plan.mesh.tp(),
              .pp = plan.mesh.pp(),
              .dp = plan.mesh.dp(),
              .zero = plan.recipe.optimizer.zero,
              .world = plan.mesh.world(),
              .precision = plan.recipe.precision == Precision::kBf16  ? "bf16"
                           : plan.recipe.precision == Precision::kF16 ? "fp16"
                                                                      : "fp32",
              .virtual_stages = plan.recipe.mesh.virtual_stages,
              .ep = plan.mesh.ep(),
              .cp = plan.mesh.cp()};
  out.tensors = state_tensors(plan);
  return out;
}

Manifest slot_manifest(const Plan& plan, const std::vector<SlotLayout>& layouts, const RunText& run,
                       int64_t chunk_bytes) {
  Manifest out = manifest_skeleton(plan, run);
  const auto world = static_cast<int64_t>(layouts.size());
  const StateIndex index(plan);
  size_t shards = 0;
  for (const SlotLayout& layout : layouts) shards += layout.shards.size();
  out.shards.reserve(shards);
  for (int64_t rank = 0; rank < world; ++rank) {
    const SlotLayout& layout = layouts[rank];
    if (layout.shards.empty()) continue;
    const auto file = static_cast<int64_t>(out.files.size());
    out.files.push_back({shard_file_name(rank, world), layout.bytes, 0});
    for (const SlotShard& shard : layout.shards) {
      out.shards.push_back({index.at(shard.kind, shard.tensor), file, shard.box, shard.offset, shard.bytes, chunk_bytes,
                            std::vector<uint64_t>((shard.bytes + chunk_bytes - 1) / chunk_bytes, 0)});
    }
  }
  return out;
}

uint64_t layout_hash(const Plan& plan, const std::vector<SlotLayout>& layouts) {
  TextHash hash;
  hash.add(fmt::format("cairn slot layout 1, world {}\n", layouts.size()));
  for (const TensorSpec& spec : plan.tensors) {
    hash.add(spec.name);
    hash.add(spec.shape);
  }
  for (const SlotLayout& layout : layouts) {
    hash.add(std::vector<int64_t>{static_cast<int64_t>(layout.shards.size()), layout.bytes});
    for (const SlotShard& shard : layout.shards) {
      hash.add({shard.kind, shard.tensor, shard.offset, shard.bytes});
      hash.add(shard.box.lo);
      hash.add(shard.box.hi);
    }
  }
  return hash.digest();
}

}  // namespace cairn::ckpt
