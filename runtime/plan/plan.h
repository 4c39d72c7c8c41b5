#pragma once
// The plan: from a resolved recipe and a world size, by arithmetic alone, everything the ranks would otherwise have to
// agree on. The same functions serve `cairn plan`, the trainer (which allocates from it), snapshots, loads and reshard.
// Pure; no devices, no I/O; answers for thousands of ranks in well under a second because rank() is made on demand.
//
// Memory of a rank. All its parameters lie in one flat element range [0, flat_elems): tensors in canonical order, each
// starting at a multiple of kAlignElems, so that projections that are multiplied together (q, k, v; gate, up) are
// adjacent. The range is cut into buckets, each bucket into dp equal chunks: chunk d of every bucket is the *share* of
// data-parallel rank d. Gradients are reduce-scattered by bucket, ZeRO-1 keeps optimizer state for the share only, and
// every rank saves its share and no more, with or without ZeRO.
//
// Optimizer state (float master weight and two moments) has two homes. That of the pieces a rank saves lies in a
// *bank*; in training there are several, in shared memory, and each update goes from one into another, so that what it
// read stays behind as the snapshot of the step before. All other state that the rank updates is private to it.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/mesh/mesh.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/schedule.h"

namespace cairn {

constexpr int64_t kAlignElems = 16;                 // 64 bytes of float
constexpr int64_t kBucketElems = int64_t{8} << 20;  // 32 MiB of float gradients; below that one bucket

/// The part of one logical tensor that a rank holds.
struct LocalTensor {
  int64_t tensor = 0;        // index into Plan::tensors
  Shape shape;               // in memory; rows of a vocabulary include padding
  Box box;                   // logical elements held: the first box.count_elems() elements of the memory, contiguous
  int64_t offset = 0;        // elements into the flat range
  bool primary = true;       // exactly one rank of those that hold the same box (apart from dp) counts and saves it
  bool sum_over_tp = false;  // replicated over tp, but its gradient is partial there (sequence parallel)
  bool tied_copy = false;    // the last stage's copy of embed.tokens
};

/// A contiguous run of one logical tensor inside the rank's share: the unit of saving and loading.
struct StatePiece {
  int64_t tensor = 0;
  Box box;                   // of the logical tensor
  int64_t flat_offset = 0;   // elements into the flat range (weights)
  int64_t state_offset = 0;  // elements into each array of a bank (primary) or of the private state
  bool primary = true;       // saved by this rank; every piece is loaded
  int64_t count_elems() const { return box.count_elems(); }
};

/// A run of a tensor that this rank updates but another data-parallel replica saves and loads (ZeRO off).
struct ReplicaRun {
  int64_t tensor = 0;
  int64_t flat_offset = 0;
  int64_t state_offset = 0;  // elements into each array of the private state
  int64_t count = 0;
};

struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

struct Stage {
  int64_t first_layer = 0, end_layer = 0;
  bool embedding = false, head = false;
};

/// One of the stages of a rank.
struct Chunk {
  Stage stage;
  int64_t in_flight = 1;  // micro-batches whose activations are alive at once
};

struct RankPlan {
  int64_t rank = 0;
  Coords at;
  std::vector<Chunk> chunks;         // in model order; one but for the interleaved schedule
  std::vector<LocalTensor> tensors;  // canonical order; a tied copy stands where head.weight would
  int64_t flat_elems = 0;            // a multiple of dp * kAlignElems
  std::vector<FlatRange> buckets;    // tile [0, flat_elems)
  std::vector<FlatRange> share;      // this rank's chunk of each bucket
  int64_t share_elems = 0;
  std::vector<StatePiece> pieces;    // of the share
  std::vector<ReplicaRun> replicas;  // of the other shares; empty with ZeRO-1 or one replica
  int64_t saved_elems = 0;           // of the primary pieces: length of each array of a bank
  int64_t private_elems = 0;         // of all other state
  // Bytes this rank allocates from the plan; activations are added by stage_buffers() (runtime/plan/activations.h).
  // Weights are those that forward and backward read, in the compute dtype. Optimizer: one bank and the private state.
  int64_t weight_bytes = 0, grad_bytes = 0, optimizer_bytes = 0;

  bool embedding() const { return chunks.front().stage.embedding; }
  bool head() const { return chunks.back().stage.head; }
  /// Part of optimizer_bytes: one bank. With an agent it and the weights lie in the agent's memory.
  int64_t bank_bytes() const { return saved_elems * 12; }
  /// The tensor of that logical name, or nullptr when it lives on another stage.
  const LocalTensor* find(const std::vector<TensorSpec>& specs, std::string_view name) const;
};

struct Plan {
  Recipe recipe;
  Mesh mesh;
  std::vector<TensorSpec> tensors;
  std::vector<Stage> stages;  // pp * virtual_stages, in model order; chunk c of pipeline rank r is stages[c * pp + r]
  int64_t padded_vocab = 0;
  int64_t pass_tokens = 0;    // of a sample in one forward pass, in generation with a cache; 0: the context
  int64_t micro_batches = 0;  // a step and data-parallel rank: accumulation
  int64_t tokens_per_step = 0;
  int64_t steps = 0;  // of the run, from recipe.stop
  int64_t parameters = 0;
  int64_t checkpoint_bytes = 0;  // payload of one checkpoint: master weight and two moments, float

  DType compute_dtype() const { return recipe.precision == Precision::kBf16 ? DType::kBf16 : DType::kF32; }
  RankPlan rank(int64_t rank) const;
  /// One boundary tensor between stages: the rows of the residual stream that a rank holds, in the compute dtype.
  int64_t boundary_bytes() const;
  /// The four that a pipeline rank sends from and receives into; 0 with one stage.
  int64_t boundary_buffers_bytes() const { return mesh.pp() > 1 ? 4 * boundary_bytes() : 0; }
  ScheduleShape schedule() const { return schedule_shape(recipe, micro_batches); }
  /// 6 (N - N_input_embedding) + 6 S N D a layer: forward and backward, causal (systems.md section 2.2).
  double flops_per_token() const;
};

/// Errors: kInvalidInput, naming the fields, the values and the nearest valid ones.
Result<Plan> make_plan(const Recipe& recipe, int64_t world);

/// Layers of each of the pp * virtual_stages stages: recipe.mesh.stages, or as even as possible with the longer stages
/// in the middle, since the first and last also hold the embedding and the head.
Result<std::vector<Stage>> plan_stages(const ModelConfig& model, const MeshConfig& mesh);

/// A span of training in steps of this recipe (rounded up); kFraction is of `stop_steps`.
int64_t span_in_steps(const Span& span, const Recipe& recipe, int64_t stop_steps);

}  // namespace cairn
