#pragma once
// The plan: from a resolved recipe and a world size, by arithmetic alone, everything the ranks would otherwise have to
// agree on. The same functions serve `cairn plan`, the trainer (which allocates from it), snapshots, loads and reshard.
// Pure; no devices, no I/O; answers for thousands of ranks in well under a second because rank() is made on demand.
//
// Memory of a rank. All its parameters lie in one flat element range [0, flat_elems): tensors in canonical order, each
// starting at a multiple of kAlignElems, so that projections that are multiplied together (q, k, v; gate, up) are
// adjacent. The range is cut into buckets. The dp replicas are cut into *shard groups* of `shard_size` ranks (one rank
// without ZeRO, else mesh.shard or all of them), and a bucket into as many equal *shards*: the shard is what a rank
// reduces and updates. The dp / shard_size ranks that update the same shard divide the saving of it: each saves its
// *share*, a 1 / dp part of the bucket, and no more, with or without ZeRO.
//
// ZeRO-2 and -3 work by *unit* (the embedding, a layer, the head): buckets then end where units do. ZeRO-2 keeps the
// sums of gradients as shards alone; the gradients of a micro-batch are made in a few slots, which layers take in turn,
// and added to the shards. ZeRO-3 keeps the weights as shards too and gathers a unit before it is used, into slots
// likewise. deterministic = "layout" sums gradients as ZeRO-2 does under every ZeRO stage, since that adds
// micro-batches in the order of the batch, and holds both copies of a table that both ends of the model read also where
// one rank has them, since their gradients are two sums. So arrays that hold all shards of a rank one after another
// (`shard_offset`) stand beside flat ones.
//
// Experts that ep ranks divide (mesh.ep > 1) lie in buckets of their own: a rank holds 1 / ep of them, and the replicas
// of that part alone reduce, divide and save such a bucket, as above with dp / ep for dp. Wherever this says dp, it
// means the dp x cp replicas of mesh.h. With deterministic = "layout" the gradients of a rank's experts have a slot for
// each rank of the ep group whose tokens they are of, so that they too are added in the order of the batch.
//
// Optimizer state (float master weight, moments, perhaps an average) has two homes. That of the pieces a rank saves
// lies in a *bank*; in training there are several, in shared memory, and each update goes from one into another, so
// that what it read stays behind as the snapshot of the step before. All other state that the rank updates is private
// to it. Adafactor's second moments belong to rows and columns, which shards cut anywhere: every rank that holds a part
// of a matrix keeps those of all its rows and columns there, and one of them saves each.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/mesh/mesh.h"
#include "runtime/plan/batch_schedule.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/schedule.h"
#include "runtime/plan/state_kinds.h"

namespace cairn {

constexpr int64_t kAlignElems = 16;  // 64 bytes of float

// Where an array of saved state begins: the layout is the same in a device's memory, in a snapshot's slot and in its
// file.
constexpr int64_t kPageBytes = 4096;            // of large ones: O_DIRECT writes them from where they lie
constexpr int64_t kPagedShardBytes = 64 << 10;  // smaller ones are packed: alignment would waste up to 6 %
constexpr int64_t kPackedAlign = 64;            // a cache line
constexpr int64_t kUnitSlots = 2;               // layers whose gradients (ZeRO-2) or weights (ZeRO-3) are whole at once

/// Elements of a bucket unless the recipe says: 8 Mi (32 MiB of float gradients). With many replicas more, so that each
/// still gets a piece of 1 Mi: messages stay long, and tensors undivided.
int64_t default_bucket_elems(int64_t dp);

/// The part of one logical tensor that a rank holds.
struct LocalTensor {
  int64_t tensor = 0;        // index into Plan::tensors
  Shape shape;               // in memory; rows of a vocabulary include padding
  Box box;                   // logical elements held: the first box.count_elems() elements of the memory, contiguous
  int64_t offset = 0;        // elements into the flat range
  int64_t weight_at = 0;     // elements into the weights that forward and backward read
  int64_t grad_at = 0;       // elements into the gradients that backward writes
  bool primary = true;       // exactly one rank of those that hold the same box (apart from dp) counts and saves it
  bool sum_over_tp = false;  // replicated over tp, but its gradient is partial there (its rows, its heads)
  bool sum_over_kv = false;  // of key/value heads that several tp ranks hold: each has the gradient of its own queries
  bool table_copy = false;   // the last stage's copy of embed.tokens
};

/// A contiguous run of one logical tensor inside one of the shares of the rank's shards, the unit of saving and
/// loading: of its own share, or of one that another replica saves.
struct StatePiece {
  int64_t tensor = 0;
  Box box;                   // of the logical tensor
  int64_t flat_offset = 0;   // elements into the flat range
  int64_t shard_offset = 0;  // elements into arrays of this rank's shards
  int64_t state_offset = 0;  // elements into each array of a bank (primary) or of the private state
  bool primary = true;       // saved by this rank, and by no other
  int64_t count_elems() const { return box.count_elems(); }
};

/// Factored second moments of the rows or columns of one local tensor, or of a vector's elements: so many floats of a
/// logical tensor of that kind. Ranks that hold the same shards, or other shards of the same tensors, keep the same.
struct SumPiece {
  StateKind kind = StateKind::kExpAvgSq;
  int64_t tensor = 0;        // index into Plan::tensors
  int64_t local = 0;         // index into RankPlan::tensors
  Box box;                   // of the state's shape, one dim
  int64_t state_offset = 0;  // floats behind the arrays of a bank (primary) or of the private state
  int64_t work_offset = 0;   // into the numbers that are added up over ranks
  bool primary = true;       // saved by this rank, and by no other
  int64_t count() const { return box.count_elems(); }
};

struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

/// Reduced in one collective.
struct Bucket {
  FlatRange range;
  FlatRange shard;           // this rank's part: it updates it
  FlatRange share;           // of the shard: it saves it
  int64_t shard_offset = 0;  // of `shard`, elements into arrays of this rank's shards
  bool experts = false;      // of experts that ep ranks divide: the replicas of this rank's part reduce it
};

/// Tensors that are used together: their weights are needed at the same time, their gradients are whole together.
struct Unit {
  int64_t layer = 0;                         // TensorSpec::layer
  FlatRange range;                           // tiles [0, flat_elems) with the others
  int64_t first_bucket = 0, end_bucket = 0;  // those that hold a part of it
  int64_t weight_at = 0;                     // of its begin, elements into the weights that forward and backward read
  int64_t grad_at = 0;                       // of its begin, elements into the gradients that backward writes
  int64_t weight_slot = 0, grad_slot = 0;    // units of one slot take the same memory in turn; ZeRO-3, ZeRO-2
  FlatRange experts;                         // inside `range`: of experts that ep ranks divide
  int64_t source_grads_at = 0;  // gradients of `experts` from the tokens of ep ranks 1, 2, ...: one after another
  int64_t uses = 1;             // times that a micro-batch passes it: 2 for an embedding that the head reads too
};

struct Stage {
  int64_t first_layer = 0, end_layer = 0;
  bool embedding = false, head = false;
};

/// One of the stages of a rank.
struct Chunk {
  Stage stage;
  int64_t in_flight = 1;  // micro-batches whose activations are alive at once
  int64_t late = 0;       // of those, the most whose weights' gradients wait for their turn (zero-bubble schedules)
};

struct RankPlan {
  int64_t rank = 0;
  Coords at;
  int64_t expert_part = 0;           // of mesh.ep: the part of each layer's experts that it holds
  std::vector<Chunk> chunks;         // in model order; one but for the interleaved and V schedules
  std::vector<LocalTensor> tensors;  // canonical order; a copy of the table stands at the end
  std::vector<Unit> units;           // in the order of the flat range
  int64_t flat_elems = 0;            // a multiple of replicas * kAlignElems
  std::vector<Bucket> buckets;       // tile [0, flat_elems)
  int64_t shard_elems = 0;           // of all buckets
  std::vector<StatePiece> pieces;    // of the shards, in the order of the flat range
  std::vector<SumPiece> sums;        // in the order of StateKinds::sums()
  int64_t saved_elems = 0;           // of the primary pieces, gaps included: length of each saved array
  int64_t saved_arrays = 3;          // of a bank
  int64_t saved_sums = 0;            // floats of the primary `sums`, gaps included, behind the arrays
  int64_t private_elems = 0;         // of all other state
  int64_t private_arrays = 3;        // no average: ranks keep that of what they save and of nothing else
  int64_t private_sums = 0;          // floats of the other `sums`
  // The numbers of `sums` that are added up in each update: over the shard group those of dense tensors, over the
  // experts' one the rest behind them, and over tp a range in the middle. Float factors lie behind the doubles.
  int64_t dense_work = 0, expert_work = 0;
  FlatRange tp_work;
  int64_t tensor_norms = 0;   // doubles: of LAMB, Adafactor: exact sums of each tensor's squares and of its step's
  int64_t norm_partials = 0;  // doubles: the same of each kNormElems of a piece
  int64_t tensor_rates = 0;   // floats: of Adafactor, each tensor's rate
  int64_t head_numbers = 0;   // floats: of QK clip, the heads' largest scores and factors, and how many are clipped
  int64_t partial_elems = 0;  // of gradients that are partial over tp or kv, the most that one collective adds up
  bool scattered_grads =
      false;  // ZeRO-2, deterministic = "layout": sums of gradients lie as shards, those of a micro-batch in slots
  bool scattered_weights = false;  // ZeRO-3: weights lie as shards and are gathered into slots
  // Bytes this rank allocates from the plan; activations are added by stage_buffers() (runtime/plan/activations.h).
  // Weights: what an update leaves, in the compute dtype. Gathered: slots that whole units are gathered into (ZeRO-3),
  // then forward and backward read these. Gradients: the sums, and the slots behind them (ZeRO-2). Optimizer: one bank,
  // the private state, and work memory.
  int64_t weight_bytes = 0, gathered_bytes = 0, grad_bytes = 0, optimizer_bytes = 0;

  bool embedding() const { return chunks.front().stage.embedding; }
  bool head() const { return chunks.back().stage.head; }
  /// Part of optimizer_bytes: one bank. With an agent it and the weights lie in the agent's memory.
  int64_t bank_bytes() const { return (saved_elems * saved_arrays + saved_sums) * 4; }
  int64_t private_bytes() const { return (private_elems * private_arrays + private_sums) * 4; }
  /// Memory that comes and goes in a step: of partial gradients, and once they are whole, of the update. Behind it the
  /// numbers that an update reads of its step.
  int64_t work_bytes() const { return head_numbers_offset() + head_numbers * 4; }
  int64_t step_numbers_offset() const {
    return (std::max((dense_work + expert_work) * 12, partial_elems * 4) + kStepNumbersBytes - 1) / kStepNumbersBytes *
           kStepNumbersBytes;
  }
  static constexpr int64_t kStepNumbersBytes = 256;
  int64_t tensor_norms_offset() const { return step_numbers_offset() + kStepNumbersBytes; }
  static constexpr int64_t kNormElems = 16384;
  int64_t norm_partials_offset() const { return tensor_norms_offset() + tensor_norms * 8; }
  int64_t tensor_rates_offset() const { return norm_partials_offset() + norm_partials * 8; }
  int64_t head_numbers_offset() const { return tensor_rates_offset() + tensor_rates * 4; }
  /// Elements of the sums of gradients; slots lie behind them.
  int64_t grad_elems() const { return scattered_grads ? shard_elems : flat_elems; }
  /// The parts of a tensor that this rank's shards hold, as ranges of the sums of gradients.
  std::vector<FlatRange> shards_of(const LocalTensor& local) const;
  /// Where the gradients or the weights of a piece lie, elements into the sums or the weights.
  int64_t grad_offset(const StatePiece& piece) const {
    return scattered_grads ? piece.shard_offset : piece.flat_offset;
  }
  int64_t weight_offset(const StatePiece& piece) const {
    return scattered_weights ? piece.shard_offset : piece.flat_offset;
  }
  /// Where backward writes the gradient of `local`: for one of the experts that ep ranks divide, that of the tokens of
  /// ep rank `source`, where these are kept apart (Plan::expert_sources()).
  int64_t grad_at(const LocalTensor& local, int64_t source) const;
  /// Units that are used with a layer (TensorSpec::layer), indices: its own, and with the head an embedding that it
  /// reads.
  std::vector<int64_t> units_of(int64_t layer) const;
  /// The tensor of that logical name, or nullptr when it lives on another stage; of two copies of the table the first
  /// stage's.
  const LocalTensor* find(const std::vector<TensorSpec>& specs, std::string_view name) const;
};

/// Into how many parts deterministic = "layout" cuts sums over the tokens of a sequence: a power of two up to 8 that
/// leaves chunks of a multiple of kTokenChunkAlign. 1 for what it does not know how to cut.
int64_t token_parts(const Recipe& recipe, int64_t sequence_tokens);
/// What it does not know how to cut, as a message names it: "model.moe". Empty: nothing.
std::string_view uncut_over_tokens(const Recipe& recipe);
constexpr int64_t kTokenChunkAlign = 128;  // whole tiles of attention, and few enough sums to add for each of keys

struct Plan {
  Recipe recipe;
  Mesh mesh;
  std::vector<TensorSpec> tensors;
  std::vector<Stage> stages;  // pp * virtual_stages, in model order; stage_at() says which are a rank's chunks
  int64_t boundary_room = 0;  // bytes of a pipeline rank's boundary tensors, in any stage of the run
  int64_t padded_vocab = 0;
  /// Backward reads norms' outputs that forward has left, and does not compute them again: memory for time, the same
  /// bits. Each rank decides for itself, by its device's memory (runtime/trainer/kept_norms.h).
  bool keeps_norms = false;
  int64_t pass_tokens = 0;  // of a sample in one forward pass, in generation and evaluation; 0: sequence_tokens
  RunPast past;             // of a run under way
  std::vector<StepStage> step_stages;  // how the batch changes; one unless the recipe says. What follows is at()'s
  int64_t sequence_tokens = 0;         // model.context, or the part of it that samples are cut into
  int64_t micro_batches = 0;           // a step and data-parallel rank: accumulation
  int64_t tokens_per_step = 0;
  int64_t steps = 0;  // of the run, from recipe.stop
  int64_t end_step =
      0;  // where this recipe ends: steps, or before that another stage of the run begins (Recipe::stages)
  int64_t parameters = 0;
  int64_t checkpoint_bytes = 0;  // payload of one checkpoint

  /// The ZeRO stage in effect: 0 when there is one replica.
  int zero() const { return mesh.replicas() > 1 ? recipe.optimizer.zero : 0; }
  StateKinds state_kinds() const { return StateKinds(recipe.optimizer); }
  /// Sums are taken in an order that no layout changes: gradients micro-batch by micro-batch, in the order of the
  /// batch; what tensor and context parallelism cut in sum_parts() and token_parts() parts.
  bool layout_free() const { return recipe.deterministic == Deterministic::kLayout; }
  /// Parts of every sum that tensor-parallel ranks may divide, added by a balanced tree; a rank has a subtree. 1: each
  /// sum is taken as the ranks cut it.
  int64_t sum_parts() const { return layout_free() ? cairn::sum_parts(recipe.model) : 1; }
  /// Parts of every sum over the tokens of a sequence (runtime/core/token_runs.h), added by a balanced tree; a rank of
  /// context parallelism has a subtree. 1: each sum is taken as the ranks cut it.
  int64_t token_parts() const {
    return layout_free() && pass_tokens == 0 ? cairn::token_parts(recipe, sequence_tokens) : 1;
  }
  /// Tensor-parallel ranks that hold the same key/value head, neighbours in tp; 1 where there is a head for each.
  int64_t kv_copies() const { return std::max<int64_t>(1, mesh.tp() / std::max<int64_t>(1, recipe.model.kv_heads)); }
  /// World ranks of those, with this rank's other coordinates.
  std::vector<int64_t> kv_group(int64_t rank) const;
  /// Replicas that divide a bucket among them; of experts that ep ranks divide, fewer may.
  int64_t shard_size(bool experts = false) const;
  int64_t replicas(bool experts) const { return experts ? mesh.expert_replicas() : mesh.replicas(); }
  /// ep ranks whose tokens' gradients of experts are kept apart: all with deterministic = "layout", else 1.
  int64_t expert_sources() const { return layout_free() ? mesh.ep() : 1; }
  /// Modules that predict further tokens and run: none where one pass follows the other, in generation and evaluation.
  int64_t mtp_depth() const { return pass_tokens > 0 ? 0 : recipe.model.mtp.depth; }
  /// Largest bucket, elements.
  int64_t bucket_elems() const;
  /// Of weights, activations and what pipeline and tensor parallelism send; gradients and optimizer state are float.
  DType compute_dtype() const {
    return recipe.precision == Precision::kBf16  ? DType::kBf16
           : recipe.precision == Precision::kF16 ? DType::kF16
                                                 : DType::kF32;
  }
  RankPlan rank(int64_t rank) const;
  /// The plan while step_stages[stage] lasts: recipe.batch, rope_theta and what follows from them are its own. The flat
  /// range, buckets and optimizer state of a rank are the same in all.
  Plan at(size_t stage) const;
  /// One boundary tensor between stages: the rows of the residual stream that a rank holds, in the compute dtype.
  int64_t boundary_bytes() const;
  /// Those that a pipeline rank sends from and receives into, in any stage of the run; 0 with one rank.
  int64_t boundary_buffers_bytes() const { return boundary_room; }
  /// The last stage lies on another rank than the first, so a table of embeddings that both read is there twice.
  bool has_table_copy() const {
    return ends_with_table(recipe.model) && place_of(schedule(), std::ssize(stages) - 1).rank != 0;
  }
  ScheduleShape schedule() const { return schedule_shape(recipe, micro_batches); }
  /// Keys that a query meets, the mean over the queries of a sequence and over the layers with attention: with S tokens
  /// S / 2 behind a causal mask or a prefix, W - W^2 / 2 S in a window of W, S where all see all.
  double keys_per_query() const { return keys_per_query(sequence_tokens); }
  double keys_per_query(int64_t sequence) const;
  /// Model FLOPs of forward and backward: 6 a weight of each matrix that a token meets (of experts its top k; not the
  /// table of embeddings) and 12 N D a key and layer (Narayanan et al. 2021, appendix), with other widths of keys and
  /// values 6 N (D + Dv). Modules of model.mtp count as a layer and the head. Nothing that is computed again, and not
  /// the zeros that widen values (model.mla).
  double flops_per_token() const { return flops_per_token(sequence_tokens); }
  double flops_per_token(int64_t sequence) const;
};

/// Of a device's memory, what a rank leaves to the driver's context, communication's buffers and fragments.
constexpr int64_t kDeviceReserveBytes = int64_t{3} << 30;

/// `past`: of the position that the run goes on from; stages of the batch and spans in samples or tokens are read
/// there. Errors: kInvalidInput, the first of find_mistakes(recipe, world, {}, past) (runtime/plan/recipe_rules.h).
Result<Plan> make_plan(const Recipe& recipe, int64_t world, const RunPast& past = {});

/// Layers of each of the pp * virtual_stages stages: recipe.mesh.stages, or as even as possible, where the embedding
/// weighs mesh.embedding_weight layers of the first stage and the head mesh.head_weight of the last, and with
/// moe.dense_layers each layer as its products (layer_products(); the heaviest is 1); longer stages in
/// the middle. Each stage has at least one. For a model and a mesh in which find_mistakes() finds none.
std::vector<Stage> plan_stages(const ModelConfig& model, const MeshConfig& mesh);

/// A valid mesh.stages for a model of `layers`, at least as many as there are stages: the written list with its
/// shortest stages longer or its longest ones shorter; balanced if it has not an entry for each stage.
std::vector<int64_t> nearest_stages(const MeshConfig& mesh, int64_t layers);

}  // namespace cairn
