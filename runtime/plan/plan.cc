#include "runtime/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <set>

#include "runtime/core/exact_sum.h"
#include "runtime/plan/boundary.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/recipe_rules.h"

namespace cairn {
namespace {

constexpr int64_t kFloatBytes = 4;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Each next layer goes where least lies, to the middle of those: first one to each stage, then the others.
std::vector<int64_t> balanced_stages(int64_t layers, int64_t count, double embedding_weight, double head_weight) {
  std::vector<int64_t> out(count, 1);
  std::vector<double> load(count, 1);
  load.front() += embedding_weight;
  load.back() += head_weight;
  const auto from_middle = [&](int64_t stage) { return std::abs(2 * stage - (count - 1)); };
  const auto later = [&](int64_t a, int64_t b) {  // stage a takes a layer after stage b
    return load[a] != load[b]                 ? load[a] > load[b]
           : from_middle(a) != from_middle(b) ? from_middle(a) > from_middle(b)
                                              : a > b;
  };
  std::priority_queue<int64_t, std::vector<int64_t>, decltype(later)> next(later);
  for (int64_t stage = 0; stage < count; ++stage) next.push(stage);
  for (int64_t layer = count; layer < layers; ++layer) {
    const int64_t stage = next.top();
    next.pop();
    ++out[stage];
    load[stage] += 1;
    next.push(stage);
  }
  return out;
}

// The same where layers weigh differently: `weights` of all of them. No other cut has a lighter heaviest stage, and of
// those that have an equal one none has a smaller sum of squares.
std::vector<int64_t> weighed_stages(const std::vector<double>& weights, int64_t count, double embedding_weight,
                                    double head_weight) {
  const int64_t layers = std::ssize(weights);
  struct Cut {
    double heaviest = 0, squares = 0;
    int64_t end = 0;  // of the first stage
    bool operator<(const Cut& other) const {
      return heaviest != other.heaviest ? heaviest < other.heaviest : squares < other.squares;
    }
  };
  // best[s][l]: of layers l, l + 1, ... into stages s, s + 1, ...; a layer for each stage before and behind.
  std::vector<std::vector<Cut>> best(count, std::vector<Cut>(layers + 1));
  for (int64_t stage = count - 1; stage >= 0; --stage) {
    const bool last = stage == count - 1;
    for (int64_t layer = stage; layer <= layers - (count - stage); ++layer) {
      Cut& found = best[stage][layer];
      found.heaviest = std::numeric_limits<double>::infinity();
      double load = (stage == 0 ? embedding_weight : 0.0) + (last ? head_weight : 0.0);
      for (int64_t end = layer + 1; end <= layers - (count - stage - 1); ++end) {
        load += weights[end - 1];
        if (load > found.heaviest) break;
        if (last && end < layers) continue;
        const Cut rest = last ? Cut{} : best[stage + 1][end];
        const Cut cut{std::max(load, rest.heaviest), load * load + rest.squares, end};
        if (cut < found) found = cut;
      }
    }
  }
  std::vector<int64_t> out;
  int64_t layer = 0;
  for (int64_t stage = 0; stage < count; ++stage) {
    const int64_t end = best[stage][layer].end;
    out.push_back(end - layer);
    layer = end;
  }
  return out;
}

/// What the last stage has besides its layers, as layers: each module that predicts a further token is one, and runs
/// the head once more.
double end_weight(const ModelConfig& model, const MeshConfig& mesh) {
  const auto modules = static_cast<double>(model.mtp.depth);
  return mesh.head_weight + modules * (1 + mesh.head_weight);
}

/// Of the stages, where the recipe does not say.
std::vector<int64_t> balanced_stages(const ModelConfig& model, const MeshConfig& mesh) {
  const int64_t count = mesh.pp * mesh.virtual_stages;
  const double end = end_weight(model, mesh);
  if (model.moe.dense_layers.empty()) return balanced_stages(model.layers, count, mesh.embedding_weight, end);
  std::vector<double> weights;
  for (int64_t layer = 0; layer < model.layers; ++layer) weights.push_back(layer_products(model, layer));
  const double unit = *std::ranges::max_element(weights);
  for (double& weight : weights) weight /= unit;
  return weighed_stages(weights, count, mesh.embedding_weight, end);
}

}  // namespace

std::vector<int64_t> nearest_stages(const MeshConfig& mesh, int64_t layers) {
  const int64_t count = mesh.pp * mesh.virtual_stages;
  std::vector<int64_t> out = mesh.stages;
  if (static_cast<int64_t>(out.size()) != count) {
    return balanced_stages(layers, count, mesh.embedding_weight, mesh.head_weight);
  }
  int64_t sum = 0;
  for (int64_t& stage : out) sum += stage = std::clamp<int64_t>(stage, 1, layers);
  for (; sum < layers; ++sum) ++*std::ranges::min_element(out);
  for (; sum > layers; --sum) --*std::ranges::max_element(out);
  return out;
}

std::vector<Stage> plan_stages(const ModelConfig& model, const MeshConfig& mesh) {
  const int64_t count = mesh.pp * mesh.virtual_stages;
  const std::vector<int64_t> counts = mesh.stages.empty() ? balanced_stages(model, mesh) : mesh.stages;
  std::vector<Stage> stages;
  int64_t layer = 0;
  for (int64_t s = 0; s < count; ++s) {
    stages.push_back({layer, layer + counts[s], s == 0, s == count - 1});
    layer += counts[s];
  }
  return stages;
}

// What gives the model a gradient that is no sum over rows of which each rank has its own, once in a micro-batch.
std::string_view uncut_over_tokens(const Recipe& recipe) {
  const ModelConfig& m = recipe.model;
  if (m.moe.experts > 0) return "model.moe";
  if (m.top_query) return "model.top_query";
  if (m.mtp.depth > 0) return "model.mtp";
  if (m.attention_sinks) return "model.attention_sinks";
  if (embed_dim(m) != m.width) return "model.embed_dim";
  if (m.block == BlockKind::kParallelShared) return "model.block = \"parallel_shared\"";
  if (has_own_rows(recipe)) {
    return "objectives with rows of their own";
  }
  return "";
}

int64_t token_parts(const Recipe& recipe, int64_t sequence_tokens) {
  if (!uncut_over_tokens(recipe).empty()) return 1;
  int64_t parts = 8;
  while (parts > 1 && sequence_tokens % (2 * parts * kTokenChunkAlign) != 0) parts /= 2;
  return parts;
}

namespace {

/// Of the stages of the run the most: they differ in the size of a micro-batch and in how many there are.
int64_t largest_boundary_room(const Plan& plan) {
  if (plan.mesh.pp() == 1) return 0;
  int64_t bytes = 0;
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const StepStage& stage : plan.step_stages) {
    const ScheduleShape shape = long_enough(schedule_shape(plan.recipe, stage.micro_batches(plan.mesh.dp())));
    if (!seen.insert({shape.micro_batches, stage.micro}).second) continue;
    const int64_t buffers = boundary_buffers(shape).total() + early_buffers(plan.recipe);
    bytes = std::max(bytes, buffers * boundary_tensor(plan, stage.micro).room_bytes());
  }
  return bytes;
}

}  // namespace

Result<Plan> make_plan(const Recipe& recipe, int64_t world, const RunPast& past) {
  const ModelConfig& m = recipe.model;
  const MeshConfig& mesh = recipe.mesh;
  if (const std::vector<Mistake> mistakes = find_mistakes(recipe, world, {}, past); !mistakes.empty()) {
    return to_error(mistakes.front());
  }
  RT_TRY_SET(Mesh made, Mesh::make(mesh, world));

  Plan plan{.recipe = recipe, .mesh = made, .tensors = model_tensors(m), .stages = plan_stages(m, mesh)};
  plan.padded_vocab = padded_vocab(m.vocab, std::max(mesh.tp, plan.sum_parts()));
  plan.past = past;
  plan.step_stages = step_stages(recipe, past);
  plan.boundary_room = largest_boundary_room(plan);
  plan.sequence_tokens = recipe.batch.tokens > 0 ? recipe.batch.tokens : m.context;
  plan.micro_batches = StepStage{.samples = recipe.batch.samples, .micro = recipe.batch.micro}.micro_batches(made.dp());
  plan.tokens_per_step = recipe.batch.samples * m.context;
  plan.steps = plan.end_step = RunClock(recipe, past).step_of(recipe.stop, 0);
  for (const TensorSpec& tensor : plan.tensors) plan.parameters += count_elems(tensor.shape);
  const StateKinds kinds = plan.state_kinds();
  for (const StateKind kind : kinds.all()) {
    for (const TensorSpec& tensor : plan.tensors) {
      if (const std::optional<Shape> shape = kinds.shape_of(kind, tensor))
        plan.checkpoint_bytes += count_elems(*shape) * 4;
    }
  }
  return plan;
}

int64_t default_bucket_elems(int64_t dp) { return std::max(int64_t{8} << 20, dp << 20); }

int64_t Plan::shard_size(bool experts) const {
  if (zero() == 0) return 1;
  return std::min(recipe.mesh.shard > 0 ? recipe.mesh.shard : mesh.replicas(), replicas(experts));
}

int64_t Plan::bucket_elems() const {
  const int64_t replicas = mesh.replicas();
  const int64_t wanted = recipe.optimizer.bucket > 0 ? recipe.optimizer.bucket : default_bucket_elems(replicas);
  return round_up(wanted, replicas * kAlignElems);
}

namespace {

/// Makes the plan of one rank, part after part: each function needs what the ones before it have left.
class RankPlanner {
 public:
  RankPlanner(const Plan& plan, int64_t rank) : plan_(plan) {
    out_.rank = rank;
    out_.at = plan.mesh.coords(rank);
    out_.expert_part = plan.mesh.expert_part(out_.at);
    out_.scattered_grads = plan.zero() >= 2 || plan.layout_free();
    out_.scattered_weights = plan.zero() >= 3;
    const ScheduleShape schedule = plan.schedule();
    const std::vector<int64_t> in_flight = in_flight_micro_batches(schedule, out_.at.pp);
    const std::vector<int64_t> late = late_micro_batches(schedule, out_.at.pp);
    for (int64_t chunk = 0; chunk < std::ssize(in_flight); ++chunk) {
      out_.chunks.push_back({plan.stages[stage_at(schedule, out_.at.pp, chunk)], in_flight[chunk], late[chunk]});
    }
  }

  RankPlan make() && {
    lay_out_tensors();
    cut_buckets();
    bind_units();
    cut_state();
    place_sums();
    count_partial();
    count_norms();
    const int64_t elem_bytes = dtype_size_bytes(plan_.compute_dtype());
    out_.weight_bytes = (out_.scattered_weights ? out_.shard_elems : out_.flat_elems) * elem_bytes;
    out_.gathered_bytes = gathered_elems_ * elem_bytes;
    out_.grad_bytes = (out_.grad_elems() + grad_slot_elems_) * 4;
    const StateKinds kinds = plan_.state_kinds();
    out_.saved_arrays = std::ssize(kinds.arrays());
    out_.private_arrays = std::ssize(kinds.without(StateKind::kEma).arrays());
    out_.optimizer_bytes = out_.bank_bytes() + out_.private_bytes() + out_.work_bytes();
    return std::move(out_);
  }

 private:
  /// One of the experts that ep ranks divide.
  bool divided(const TensorSpec& spec) const { return spec.expert >= 0 && plan_.mesh.ep() > 1; }

  bool here(const TensorSpec& spec) const {
    if (divided(spec)) {
      const int64_t part = plan_.recipe.model.moe.experts / plan_.mesh.ep();
      if (spec.expert / part != out_.expert_part) return false;
    }
    if (spec.layer == kEmbeddingLayer) return out_.embedding();
    if (spec.layer == kHeadLayer) return out_.head();
    return std::any_of(out_.chunks.begin(), out_.chunks.end(), [&](const Chunk& chunk) {
      return spec.layer >= chunk.stage.first_layer && spec.layer < chunk.stage.end_layer;
    });
  }

  LocalTensor local_part(int64_t index) const {
    const TensorSpec& spec = plan_.tensors[index];
    const int64_t tp = plan_.mesh.tp();
    LocalTensor local{.tensor = index, .shape = spec.shape, .box = Box::whole(spec.shape)};
    if (spec.cut == TensorCut::kReplicated) {
      // A column-cut bias under sequence parallelism sees all tokens, as its matrix does; only replicated ones are
      // partial.
      local.primary = out_.at.tp == 0;
      // The table of positions is whole where no layout may show: its rows of a sequence lie on several ranks.
      const bool by_rows =
          plan_.recipe.mesh.sequence_parallel && (plan_.sum_parts() == 1 || spec.name != "embed.positions");
      // Where sums over tokens are taken in parts, those of heads are added over tp in each of them.
      const bool by_heads = spec.partial && plan_.token_parts() == 1;
      local.sum_over_tp = (spec.partial ? by_heads : by_rows) && tp > 1;
      return local;
    }
    const size_t dim = spec.cut == TensorCut::kDim0 ? 0 : 1;
    const int64_t copies = spec.heads > 0 ? plan_.kv_copies() : 1, part = out_.at.tp / copies;
    const int64_t rows = (spec.vocab_rows ? plan_.padded_vocab : spec.shape[dim]) / (tp / copies);
    local.shape[dim] = rows;
    local.box.lo[dim] = std::min(part * rows, spec.shape[dim]);
    local.box.hi[dim] = std::min((part + 1) * rows, spec.shape[dim]);
    local.primary = out_.at.tp % copies == 0;
    local.sum_over_kv = copies > 1;
    return local;
  }

  /// Buckets end here: the range up to now is padded so that every replica gets an equal part of each.
  void end_segment() {
    out_.flat_elems = round_up(out_.flat_elems, plan_.mesh.replicas() * kAlignElems);
    if (segments_.empty() || segments_.back().end != out_.flat_elems)
      segments_.push_back({out_.flat_elems, in_experts_});
  }

  void hold(int64_t index, int64_t layer, bool table_copy) {
    LocalTensor local = local_part(index);
    if (table_copy) {
      local.table_copy = true;
      local.primary = false;
    }
    const bool starts_unit = out_.units.empty() || out_.units.back().layer != layer;
    // Two stages add their gradients of one table shard by shard: it is cut alike on both, apart from others.
    const bool two = plan_.mesh.pp() > 1 || plan_.layout_free();
    const bool apart = two && ends_with_table(plan_.recipe.model) && index == 0;
    const bool experts = divided(plan_.tensors[index]);
    if (apart || (starts_unit && out_.scattered_grads) || experts != in_experts_) end_segment();
    if (experts != in_experts_ && in_experts_) out_.units.back().experts.end = out_.flat_elems;
    if (starts_unit) {
      if (!out_.units.empty()) out_.units.back().range.end = out_.flat_elems;
      out_.units.push_back({.layer = layer, .range = {out_.flat_elems, 0}});
    }
    if (experts && !in_experts_) out_.units.back().experts = {out_.flat_elems, out_.flat_elems};
    in_experts_ = experts;
    local.offset = out_.flat_elems;
    out_.flat_elems = round_up(local.offset + cairn::count_elems(local.shape), kAlignElems);
    out_.tensors.push_back(std::move(local));
    if (apart) end_segment();
  }

  void lay_out_tensors() {
    for (size_t index = 0; index < plan_.tensors.size(); ++index) {
      if (here(plan_.tensors[index])) hold(static_cast<int64_t>(index), plan_.tensors[index].layer, false);
    }
    const bool twice = ends_with_table(plan_.recipe.model) && out_.head();
    const bool one_copy = out_.embedding() && !plan_.layout_free();
    if (twice && !one_copy) hold(0, kHeadLayer, true);  // embed.tokens is first
    end_segment();
    if (in_experts_) out_.units.back().experts.end = out_.flat_elems;
    out_.units.back().range.end = out_.flat_elems;
    if (twice && one_copy) out_.units.front().uses = 2;
  }

  void cut_buckets() {
    int64_t begin = 0;
    for (const auto& [segment_end, experts] : segments_) {
      const int64_t all = plan_.replicas(experts), shards = plan_.shard_size(experts), replicas = all / shards;
      const int64_t mine = plan_.mesh.replica(out_.at) % all;
      const int64_t shard_index = mine % shards, replica_index = mine / shards;
      for (; begin < segment_end;) {
        const int64_t size = std::min(plan_.bucket_elems(), segment_end - begin);
        const int64_t shard = size / shards, share = shard / replicas;
        const int64_t shard_begin = begin + shard * shard_index, share_begin = shard_begin + share * replica_index;
        out_.buckets.push_back({.range = {begin, begin + size},
                                .shard = {shard_begin, shard_begin + shard},
                                .share = {share_begin, share_begin + share},
                                .shard_offset = out_.shard_elems,
                                .experts = experts});
        out_.shard_elems += shard;
        begin += size;
      }
    }
  }

  void bind_units() {
    int64_t layers = 0;
    for (Unit& unit : out_.units) layers += unit.layer >= 0 ? 1 : 0;
    const int64_t weight_slots = plan_.recipe.optimizer.keep_after_forward ? layers : std::min(kUnitSlots, layers);
    const int64_t grad_slots = std::min(kUnitSlots, layers);
    const int64_t sources = plan_.expert_sources();
    if (out_.scattered_weights) gathered_elems_ = place_slots(weight_slots, 1, &Unit::weight_slot, &Unit::weight_at);
    if (out_.scattered_grads) grad_slot_elems_ = place_slots(grad_slots, sources, &Unit::grad_slot, &Unit::grad_at);
    for (Unit& unit : out_.units) unit.source_grads_at = unit.grad_at + unit.range.size();
    size_t tensor = 0;
    for (Unit& unit : out_.units) {
      if (!out_.scattered_weights) unit.weight_at = unit.range.begin;
      if (!out_.scattered_grads) unit.grad_at = unit.range.begin;
      const auto first = std::partition_point(out_.buckets.begin(), out_.buckets.end(), [&](const Bucket& bucket) {
        return bucket.range.end <= unit.range.begin;
      });
      const auto end = std::partition_point(first, out_.buckets.end(),
                                            [&](const Bucket& bucket) { return bucket.range.begin < unit.range.end; });
      unit.first_bucket = first - out_.buckets.begin();
      unit.end_bucket = end - out_.buckets.begin();
      for (; tensor < out_.tensors.size() && out_.tensors[tensor].offset < unit.range.end; ++tensor) {
        LocalTensor& local = out_.tensors[tensor];
        local.weight_at = unit.weight_at + local.offset - unit.range.begin;
        local.grad_at = unit.grad_at + local.offset - unit.range.begin;
      }
    }
  }

  /// Layers take `layer_slots` slots in turn; embedding and head have one each. Divided experts are in a slot `sources`
  /// times. Returns the elements of all slots.
  int64_t place_slots(int64_t layer_slots, int64_t sources, int64_t Unit::*slot, int64_t Unit::*at) {
    int64_t layer = 0, others = layer_slots;
    for (Unit& unit : out_.units) unit.*slot = unit.layer >= 0 ? layer++ % layer_slots : others++;
    std::vector<int64_t> sizes(others, 0), begins(others, 0);
    for (const Unit& unit : out_.units) {
      sizes[unit.*slot] = std::max(sizes[unit.*slot], unit.range.size() + (sources - 1) * unit.experts.size());
    }
    std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), int64_t{0});
    for (Unit& unit : out_.units) unit.*at = begins[unit.*slot];
    return begins.back() + sizes.back();
  }

  /// Calls body(tensor, begin, end) for the logical elements of `range`: gaps and padding are left out.
  template <typename Body>
  void for_tensors_in(const FlatRange& range, const Body& body) const {
    auto local = std::partition_point(out_.tensors.begin(), out_.tensors.end(), [&](const LocalTensor& t) {
      return t.offset + cairn::count_elems(t.shape) <= range.begin;
    });
    for (; local != out_.tensors.end() && local->offset < range.end; ++local) {
      const int64_t begin = std::max(range.begin, local->offset);
      const int64_t end = std::min(range.end, local->offset + local->box.count_elems());
      if (begin < end) body(*local, begin, end);
    }
  }

  void cut_state() {
    for (const Bucket& bucket : out_.buckets) {
      const int64_t to_shard = bucket.shard_offset - bucket.shard.begin, share = bucket.share.size();
      for (int64_t at = bucket.shard.begin; at < bucket.shard.end; at += share) {
        for_tensors_in({at, at + share}, [&](const LocalTensor& local, int64_t begin, int64_t end) {
          const bool primary = local.primary && at == bucket.share.begin;
          int64_t flat = begin;
          for (Box& box : boxes_of_flat_range(local.box.extents(), begin - local.offset, end - local.offset)) {
            for (size_t d = 0; d < box.lo.size(); ++d) {
              box.lo[d] += local.box.lo[d];
              box.hi[d] += local.box.lo[d];
            }
            const int64_t count = box.count_elems();
            const int64_t at_state = take_state(primary ? out_.saved_elems : out_.private_elems, count, primary);
            out_.pieces.push_back({local.tensor, std::move(box), flat, flat + to_shard, at_state, primary});
            flat += count;
          }
        });
      }
    }
    out_.saved_elems = round_up(out_.saved_elems, kPageBytes / kFloatBytes);
  }

  /// Where the next `count` floats begin in saved arrays, or in private ones, of which `floats` are taken.
  static int64_t take_state(int64_t& floats, int64_t count, bool saved) {
    const int64_t align = count * kFloatBytes >= kPagedShardBytes ? kPageBytes : kPackedAlign;
    const int64_t begin = saved ? round_up(floats, align / kFloatBytes) : floats;
    floats = begin + count;
    return begin;
  }

  /// A dim of a local tensor whose sums are partial on each tp rank: the other one is cut.
  bool partial_over_tp(const TensorSpec& spec, StateKind kind) const {
    return plan_.mesh.tp() > 1 && ((kind == StateKind::kExpAvgSqRow && spec.cut == TensorCut::kDim1) ||
                                   (kind == StateKind::kExpAvgSqCol && spec.cut == TensorCut::kDim0));
  }

  void place_sums() {
    const StateKinds kinds = plan_.state_kinds();
    for (const StateKind kind : kinds.sums()) {
      for (size_t local = 0; local < out_.tensors.size(); ++local) {
        const LocalTensor& here = out_.tensors[local];
        const TensorSpec& spec = plan_.tensors[here.tensor];
        if (!kinds.shape_of(kind, spec)) continue;
        const size_t dim = kind == StateKind::kExpAvgSqCol ? 1 : 0;
        SumPiece piece{.kind = kind,
                       .tensor = here.tensor,
                       .local = static_cast<int64_t>(local),
                       .box = {{here.box.lo[dim]}, {here.box.hi[dim]}}};
        if (piece.box.empty()) continue;  // rows of padding; their columns are added up over tp all the same
        piece.primary = here.primary && plan_.mesh.replica(out_.at) % plan_.replicas(divided(spec)) == 0 &&
                        (!partial_over_tp(spec, kind) || out_.at.tp == 0);
        piece.state_offset =
            take_state(piece.primary ? out_.saved_sums : out_.private_sums, piece.count(), piece.primary);
        out_.sums.push_back(std::move(piece));
      }
    }
    out_.saved_sums = round_up(out_.saved_sums, kPageBytes / kFloatBytes);
    // Dense and whole, dense and partial over tp, of divided experts and partial, of those and whole.
    int64_t at = 0;
    for (const auto& [experts, partial] : {std::pair(false, false), {false, true}, {true, true}, {true, false}}) {
      if (partial && !experts) out_.tp_work.begin = at;
      for (SumPiece& piece : out_.sums) {
        const TensorSpec& spec = plan_.tensors[piece.tensor];
        if (divided(spec) != experts || partial_over_tp(spec, piece.kind) != partial) continue;
        piece.work_offset = at;
        at += piece.count();
      }
      if (partial && experts) out_.tp_work.end = at;
      (experts ? out_.expert_work : out_.dense_work) = at - (experts ? out_.dense_work : 0);
    }
  }

  void count_norms() {
    const ModelConfig& model = plan_.recipe.model;
    if (plan_.recipe.optimizer.qk_clip > 0) out_.head_numbers = model.layers * (2 * model.heads + model.kv_heads) + 1;
    const OptimizerKind kind = plan_.recipe.optimizer.kind;
    if (kind == OptimizerKind::kAdamW) return;
    if (kind == OptimizerKind::kAdafactor) out_.tensor_rates = std::ssize(plan_.tensors);
    constexpr int64_t kWords = 2 * ExactSum::kWords, kElems = RankPlan::kNormElems;
    out_.tensor_norms = kWords * std::ssize(plan_.tensors);
    for (const StatePiece& piece : out_.pieces) {
      if (!piece.primary) continue;
      out_.norm_partials += kWords * ((piece.count_elems() + kElems - 1) / kElems);
    }
  }

  void count_partial() {
    int64_t over_tp = 0, over_kv = 0;
    for (const LocalTensor& local : out_.tensors) {
      if (!local.sum_over_tp && !local.sum_over_kv) continue;
      for (const FlatRange& part : out_.shards_of(local)) {
        over_tp += local.sum_over_tp ? part.size() : 0;
        over_kv += local.sum_over_kv ? part.size() : 0;
      }
    }
    if (plan_.layout_free()) {  // unit by unit, each micro-batch
      over_tp = 0;
      for (const Unit& unit : out_.units) over_tp = std::max(over_tp, partial_elems(out_, unit));
    }
    out_.partial_elems = std::max(over_tp, over_kv);
  }

  const Plan& plan_;
  RankPlan out_;
  struct Segment {
    int64_t end;
    bool experts;
  };
  std::vector<Segment> segments_;  // buckets do not reach over their ends
  bool in_experts_ = false;        // the last tensor is one of the experts that ep ranks divide
  int64_t gathered_elems_ = 0, grad_slot_elems_ = 0;
};

}  // namespace

RankPlan Plan::rank(int64_t rank) const { return RankPlanner(*this, rank).make(); }

std::vector<FlatRange> RankPlan::shards_of(const LocalTensor& local) const {
  std::vector<FlatRange> out;
  const int64_t tensor_end = local.offset + count_elems(local.shape);
  for (const Bucket& bucket : buckets) {
    const int64_t begin = std::max(bucket.shard.begin, local.offset), end = std::min(bucket.shard.end, tensor_end);
    if (begin >= end) continue;
    const int64_t at = scattered_grads ? bucket.shard_offset + begin - bucket.shard.begin : begin;
    out.push_back({at, at + end - begin});
  }
  return out;
}

int64_t RankPlan::grad_at(const LocalTensor& local, int64_t source) const {
  if (source == 0) return local.grad_at;
  const auto unit =
      std::partition_point(units.begin(), units.end(), [&](const Unit& u) { return u.range.end <= local.offset; });
  return unit->source_grads_at + (source - 1) * unit->experts.size() + local.offset - unit->experts.begin;
}

std::vector<int64_t> Plan::kv_group(int64_t rank) const {
  const std::vector<int64_t> all = mesh.group(MeshAxis::kTp, rank);
  const int64_t copies = kv_copies(), first = mesh.coords(rank).tp / copies * copies;
  return {all.begin() + first, all.begin() + first + copies};
}

std::vector<int64_t> RankPlan::units_of(int64_t layer) const {
  std::vector<int64_t> out;
  for (size_t u = 0; u < units.size(); ++u) {
    const bool table = layer == kHeadLayer && units[u].layer == kEmbeddingLayer && units[u].uses > 1;
    if (units[u].layer == layer || table) out.push_back(static_cast<int64_t>(u));
  }
  return out;
}

const LocalTensor* RankPlan::find(const std::vector<TensorSpec>& specs, std::string_view name) const {
  for (const LocalTensor& local : tensors) {
    if (specs[local.tensor].name == name) return &local;
  }
  return nullptr;
}

Plan Plan::at(size_t stage) const {
  const StepStage& s = step_stages.at(stage);
  Plan out = *this;
  out.recipe.batch.samples = s.samples;
  out.recipe.batch.micro = s.micro;
  out.recipe.model.rope_theta = s.rope_theta;
  out.sequence_tokens = s.tokens;
  out.micro_batches = s.micro_batches(mesh.dp());
  out.tokens_per_step = s.samples * recipe.model.context;
  return out;
}

int64_t Plan::boundary_bytes() const { return boundary_tensor(*this).bytes; }

double Plan::keys_per_query(int64_t sequence) const {
  const ModelConfig& m = recipe.model;
  const auto tokens = static_cast<double>(sequence);
  const double all = m.mask == Mask::kBidirectional ? tokens : tokens / 2;
  const double window = std::min(static_cast<double>(m.sliding_window), tokens);
  const double near = window - window * window / (2 * tokens);
  const double in_chunk = std::min(static_cast<double>(m.attention_chunk), tokens) / 2;
  double keys = 0;
  const int64_t layers = m.layers + layers_behind(m);
  for (int64_t layer = 0; layer < layers; ++layer) {
    keys += has_window(m, layer) ? near : has_chunks(m, layer) ? in_chunk : all;
  }
  return keys / static_cast<double>(layers);
}

double Plan::flops_per_token(int64_t sequence) const {
  const ModelConfig& m = recipe.model;
  double matrices = 0;
  for (const TensorSpec& tensor : tensors) {
    const bool table = tensor.layer == kEmbeddingLayer || tensor.name == "top_query.positions";
    if (!tensor.decay || table) continue;  // matrices
    const bool expert = tensor.name.find(".experts.") != std::string::npos;
    const double used = expert ? static_cast<double>(m.moe.top_k) / static_cast<double>(m.moe.experts) : 1.0;
    matrices += used * static_cast<double>(count_elems(tensor.shape));
  }
  const int64_t heads_again = m.mtp.depth + (m.tied_embeddings ? 1 : 0);  // passes of the head's matrix, not counted
  matrices += static_cast<double>(heads_again * m.vocab * embed_dim(m));
  return 6 * matrices + 6.0 * keys_per_query(sequence) *
                            static_cast<double>((m.layers + layers_behind(m)) * m.heads * (m.head_dim + value_dim(m)));
}

}  // namespace cairn
