#include "runtime/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <queue>

namespace cairn {
namespace {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

Error refuse(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Status divides(std::string_view what, int64_t value, std::string_view by_what, int64_t by) {
  if (value % by == 0) return {};
  const int64_t below = value / by * by;
  return refuse(fmt::format("{} = {} cannot be cut by {} = {}; nearest: {}{}", what, value, by_what, by,
                            below > 0 ? fmt::format("{}, ", below) : "", below + by));
}

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

Result<std::vector<Stage>> plan_stages(const ModelConfig& model, const MeshConfig& mesh) {
  const int64_t count = mesh.pp * mesh.virtual_stages;
  const std::string said = mesh.virtual_stages > 1 ? fmt::format("mesh.pp x mesh.virtual_stages = {}", count)
                                                   : fmt::format("mesh.pp = {}", count);
  if (model.layers < count) {
    return refuse(fmt::format("model.layers = {} is less than {}: a stage would be empty; nearest: {} stages",
                              model.layers, said, model.layers));
  }
  const std::vector<int64_t> balanced = balanced_stages(model.layers, count, mesh.embedding_weight, mesh.head_weight);
  const std::vector<int64_t>& counts = mesh.stages.empty() ? balanced : mesh.stages;
  const std::string nearest = fmt::format("nearest: {{ {} }}", fmt::join(nearest_stages(mesh, model.layers), ", "));
  if (static_cast<int64_t>(counts.size()) != count) {
    return refuse(fmt::format("mesh.stages lists {} stages, {}; {}", counts.size(), said, nearest));
  }
  std::vector<Stage> stages;
  int64_t layer = 0;
  for (int64_t s = 0; s < count; ++s) {
    if (counts[s] < 1)
      return refuse(
          fmt::format("mesh.stages[{}] = {}: a stage needs at least one layer; {}", s + 1, counts[s], nearest));
    stages.push_back({layer, layer + counts[s], s == 0, s == count - 1});
    layer += counts[s];
  }
  if (layer != model.layers) {
    return refuse(fmt::format("mesh.stages sum to {} layers, model.layers = {}; {}", layer, model.layers, nearest));
  }
  return stages;
}

int64_t span_in_steps(const Span& span, const Recipe& recipe, int64_t stop_steps) {
  const auto samples = static_cast<double>(recipe.batch.samples);
  switch (span.unit) {
    case Span::Unit::kSteps:
      return static_cast<int64_t>(std::ceil(span.value));
    case Span::Unit::kSamples:
      return static_cast<int64_t>(std::ceil(span.value / samples));
    case Span::Unit::kTokens:
      return static_cast<int64_t>(std::ceil(span.value / (samples * static_cast<double>(recipe.model.context))));
    case Span::Unit::kFraction:
      return static_cast<int64_t>(std::llround(span.value * static_cast<double>(stop_steps)));
  }
  return 0;
}

Result<Plan> make_plan(const Recipe& recipe, int64_t world) {
  const ModelConfig& m = recipe.model;
  const MeshConfig& mesh = recipe.mesh;
  RT_TRY_SET(Mesh made, Mesh::make(mesh, world));
  RT_TRY(divides("model.heads", m.heads, "mesh.tp", mesh.tp));
  RT_TRY(divides("model.kv_heads", m.kv_heads, "mesh.tp", mesh.tp));
  RT_TRY(divides("model.heads", m.heads, "model.kv_heads", m.kv_heads));
  RT_TRY(divides("model.ffn", m.ffn, "mesh.tp", mesh.tp));
  if (mesh.sequence_parallel) {
    RT_TRY(divides("batch.micro x model.context", recipe.batch.micro * m.context, "mesh.tp", mesh.tp));
  }
  if (recipe.recompute.distribute) {
    RT_TRY(divides("batch.micro x model.context x model.width of a kept input",
                   recipe.batch.micro * m.context * m.width, "mesh.tp", mesh.tp));
  }
  const int64_t slice = recipe.batch.micro * made.dp();
  if (recipe.batch.samples < 1 || recipe.batch.samples % slice != 0) {
    const int64_t below = recipe.batch.samples / slice * slice;
    return refuse(
        fmt::format("batch.samples = {} cannot be cut: micro {} x dp {} = {} does not divide it; nearest batches: {}{}",
                    recipe.batch.samples, recipe.batch.micro, made.dp(), slice,
                    below > 0 ? fmt::format("{}, ", below) : "", below + slice));
  }
  RT_TRY_SET(std::vector<Stage> stages, plan_stages(m, mesh));

  Plan plan{.recipe = recipe, .mesh = made, .tensors = model_tensors(m), .stages = std::move(stages)};
  plan.padded_vocab = padded_vocab(m.vocab, mesh.tp);
  plan.micro_batches = recipe.batch.samples / slice;
  RT_TRY(check_schedule(plan.schedule()));
  if (made.pp() > 1) plan.boundary = boundary_buffers(plan.schedule());
  plan.tokens_per_step = recipe.batch.samples * m.context;
  plan.steps = span_in_steps(recipe.stop, recipe, 0);
  for (const TensorSpec& tensor : plan.tensors) plan.parameters += count_elems(tensor.shape);
  plan.checkpoint_bytes = plan.parameters * 3 * 4;
  return plan;
}

RankPlan Plan::rank(int64_t rank) const {
  RankPlan out;
  out.rank = rank;
  out.at = mesh.coords(rank);
  const std::vector<int64_t> in_flight = in_flight_micro_batches(schedule(), out.at.pp);
  const std::vector<int64_t> late = late_micro_batches(schedule(), out.at.pp);
  for (int64_t chunk = 0; chunk < std::ssize(in_flight); ++chunk) {
    out.chunks.push_back({stages[stage_at(schedule(), out.at.pp, chunk)], in_flight[chunk], late[chunk]});
  }
  const int64_t tp = mesh.tp(), dp = mesh.dp();

  const auto hold = [&](int64_t index, bool tied_copy) {
    const TensorSpec& spec = tensors[index];
    LocalTensor local{.tensor = index, .shape = spec.shape, .box = Box::whole(spec.shape), .offset = out.flat_elems};
    if (spec.cut == TensorCut::kReplicated) {
      local.primary = out.at.tp == 0;
      local.sum_over_tp = recipe.mesh.sequence_parallel && tp > 1;
    } else {
      const size_t dim = spec.cut == TensorCut::kDim0 ? 0 : 1;
      const int64_t rows = (spec.vocab_rows ? padded_vocab : spec.shape[dim]) / tp;
      local.shape[dim] = rows;
      local.box.lo[dim] = std::min(out.at.tp * rows, spec.shape[dim]);
      local.box.hi[dim] = std::min((out.at.tp + 1) * rows, spec.shape[dim]);
    }
    if (tied_copy) {
      local.tied_copy = true;
      local.primary = false;
    }
    // A column-cut bias under sequence parallelism sees all tokens, as its matrix does; only replicated ones are
    // partial.
    out.flat_elems = round_up(local.offset + cairn::count_elems(local.shape), kAlignElems);
    out.tensors.push_back(std::move(local));
  };
  for (size_t index = 0; index < tensors.size(); ++index) {
    const TensorSpec& spec = tensors[index];
    const bool here = spec.layer == kEmbeddingLayer ? out.embedding()
                      : spec.layer == kHeadLayer
                          ? out.head()
                          : std::any_of(out.chunks.begin(), out.chunks.end(), [&](const Chunk& chunk) {
                              return spec.layer >= chunk.stage.first_layer && spec.layer < chunk.stage.end_layer;
                            });
    if (here) hold(static_cast<int64_t>(index), false);
  }
  if (out.head() && !out.embedding() && recipe.model.tied_embeddings) hold(0, true);  // embed.tokens is first

  out.flat_elems = round_up(out.flat_elems, dp * kAlignElems);
  for (int64_t begin = 0; begin < out.flat_elems;) {
    const int64_t size = std::min(round_up(kBucketElems, dp * kAlignElems), out.flat_elems - begin);
    out.buckets.push_back({begin, begin + size});
    out.share.push_back({begin + size / dp * out.at.dp, begin + size / dp * (out.at.dp + 1)});
    out.share_elems += size / dp;
    begin += size;
  }

  for (const FlatRange& share : out.share) {
    for (const LocalTensor& local : out.tensors) {
      const int64_t begin = std::max(share.begin, local.offset);
      const int64_t end = std::min(share.end, local.offset + local.box.count_elems());
      if (begin >= end) continue;
      int64_t flat = begin;
      for (Box& box : boxes_of_flat_range(local.box.extents(), begin - local.offset, end - local.offset)) {
        for (size_t d = 0; d < box.lo.size(); ++d) {
          box.lo[d] += local.box.lo[d];
          box.hi[d] += local.box.lo[d];
        }
        const int64_t count = box.count_elems();
        int64_t& elems = local.primary ? out.saved_elems : out.private_elems;
        out.pieces.push_back({local.tensor, std::move(box), flat, elems, local.primary});
        elems += count;
        flat += count;
      }
    }
  }
  if (recipe.optimizer.zero < 1) {
    for (size_t b = 0; b < out.buckets.size(); ++b) {
      const FlatRange others[] = {{out.buckets[b].begin, out.share[b].begin}, {out.share[b].end, out.buckets[b].end}};
      for (const FlatRange& range : others) {
        for (const LocalTensor& local : out.tensors) {
          const int64_t begin = std::max(range.begin, local.offset);
          const int64_t end = std::min(range.end, local.offset + local.box.count_elems());
          if (begin >= end) continue;
          out.replicas.push_back({local.tensor, begin, out.private_elems, end - begin});
          out.private_elems += end - begin;
        }
      }
    }
  }
  out.weight_bytes = out.flat_elems * dtype_size_bytes(compute_dtype());
  out.grad_bytes = out.flat_elems * 4;
  out.optimizer_bytes = (out.saved_elems + out.private_elems) * 12;
  return out;
}

const LocalTensor* RankPlan::find(const std::vector<TensorSpec>& specs, std::string_view name) const {
  for (const LocalTensor& local : tensors) {
    if (specs[local.tensor].name == name) return &local;
  }
  return nullptr;
}

int64_t Plan::boundary_bytes() const {
  const int64_t rows = recipe.batch.micro * recipe.model.context / (recipe.mesh.sequence_parallel ? mesh.tp() : 1);
  return rows * recipe.model.width * dtype_size_bytes(compute_dtype());
}

double Plan::flops_per_token() const {
  const ModelConfig& m = recipe.model;
  double matrices = 0;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.shape.size() == 2 && tensor.layer != kEmbeddingLayer)
      matrices += static_cast<double>(count_elems(tensor.shape));
  }
  if (m.tied_embeddings) matrices += static_cast<double>(m.vocab * m.width);
  return 6 * matrices + 6.0 * static_cast<double>(m.layers * m.context * m.heads * m.head_dim);
}

}  // namespace cairn
