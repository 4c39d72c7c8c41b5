#include "tools/planner/cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "runtime/plan/activations.h"
#include "runtime/plan/boundary.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::tools {
namespace {

constexpr double kGb = 1e9;

/// What of the model a pipeline rank holds.
struct Own {
  int64_t layers = 0, recomputed = 0;        // the second: of which whole layers are computed again
  double weight = 0, recomputed_weight = 0;  // the same in mean layers
  bool head = false;
};

/// What each layer takes, its products by the mean's; empty: all the same.
std::vector<double> layer_weights(const ModelConfig& model) {
  std::vector<double> out;
  if (model.moe.dense_layers.empty()) return out;
  for (int64_t layer = 0; layer < model.layers; ++layer) out.push_back(layer_products(model, layer));
  const double mean = std::accumulate(out.begin(), out.end(), 0.0) / static_cast<double>(out.size());
  for (double& weight : out) weight /= mean;
  return out;
}

Own own_part(const Plan& plan, int64_t pp, const std::vector<double>& weights = {}) {
  Own out;
  const ScheduleShape shape = plan.schedule();
  for (int64_t c = 0; c < shape.chunks; ++c) {
    const Stage& stage = plan.stages[static_cast<size_t>(stage_at(shape, pp, c))];
    out.layers += stage.end_layer - stage.first_layer;
    out.head = out.head || stage.head;
    for (int64_t l = stage.first_layer; l < stage.end_layer; ++l) {
      const bool full = layer_recompute(plan, stage, l) == RecomputeMode::kFull;
      const double weight = weights.empty() ? 1.0 : weights[static_cast<size_t>(l)];
      out.recomputed += full ? 1 : 0;
      out.weight += weight;
      out.recomputed_weight += full ? weight : 0;
    }
  }
  return out;
}

/// One micro-batch through the stages of each pipeline rank, and what a step of them makes.
struct PipelineTime {
  double busy_ms = 0, bubble_ms = 0;
};

PipelineTime pipeline_time(const Plan& plan, const std::vector<double>& rank_ms) {
  const auto m = static_cast<double>(plan.micro_batches);
  const double slowest = *std::max_element(rank_ms.begin(), rank_ms.end());
  if (rank_ms.size() == 1) return {m * slowest, 0};
  double through = 0;
  for (const double ms : rank_ms) through += ms;
  // Under 1F1B the first micro-batch passes all stages and the others follow at the pace of the slowest, so a rank
  // idles while the other pp - 1 work; other schedules idle for the part of that time that they do when all are equal.
  const double bubble = bubble_fraction(plan.schedule());
  const double part = bubble / (1 - bubble) * m / static_cast<double>(rank_ms.size() - 1);
  return {m * slowest, (through - slowest) * part};
}

/// Gradients are added to shards micro-batch by micro-batch, not once a step.
bool reduces_each_micro_batch(const Plan& plan) { return plan.zero() >= 2 || plan.layout_free(); }

double utilisation_of(const Plan& plan, const StepCost& cost, double peak_tflops) {
  if (peak_tflops <= 0 || cost.total() <= 0) return 0;
  return plan.flops_per_token() * static_cast<double>(plan.tokens_per_step) / (cost.total() * 1e9 * peak_tflops);
}

}  // namespace

StateCalls state_calls(const Plan& plan) {
  if (plan.mesh.replicas() == 1) return {};
  // The units of the rank with most layers: buckets end where they do, when gradients or weights are cut by unit.
  int64_t layers = 0;
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) layers = std::max(layers, own_part(plan, pp).layers);
  const ModelConfig& model = plan.recipe.model;
  double layer = 0;
  const int64_t kinds = model.moe.dense_layers.empty() ? 1 : model.layers;  // the mean of layers that differ
  for (const TensorSpec& tensor : plan.tensors) {
    if (tensor.layer < 0 || tensor.layer >= kinds) continue;
    const double part = tensor.expert >= 0 ? static_cast<double>(plan.mesh.ep()) : 1.0;
    const double cut = tensor.cut == TensorCut::kReplicated ? 1.0 : static_cast<double>(plan.mesh.tp());
    layer += static_cast<double>(count_elems(tensor.shape)) / part / cut;
  }
  layer /= static_cast<double>(kinds);
  const auto bucket = static_cast<double>(plan.bucket_elems());
  const double table = static_cast<double>(plan.padded_vocab * embed_dim(model)) / static_cast<double>(plan.mesh.tp());
  const double in_layer = std::ceil(layer / bucket), in_table = std::ceil(table / bucket);
  const auto m = static_cast<double>(plan.micro_batches), n = static_cast<double>(layers);
  const double flat = std::ceil((n * layer + table) / bucket), by_unit = n * in_layer + in_table;
  StateCalls out;
  out.reduces = reduces_each_micro_batch(plan) ? m * by_unit : flat;
  if (plan.zero() == 0) return out;
  // ZeRO-3: forward gathers all layers, backward all again, but two slots keep what was used last.
  const double passes = plan.recipe.optimizer.keep_after_forward ? n : 2 * m * std::max(0.0, n - 2) + std::min(n, 2.0);
  out.gathers = plan.zero() < 3 ? (reduces_each_micro_batch(plan) ? by_unit : flat) : passes * in_layer + in_table;
  return out;
}

const std::vector<CostPart>& cost_parts() {
  static const std::vector<CostPart> parts = {
      {"compute", &StepCost::compute_ms},     {"recompute", &StepCost::recompute_ms},
      {"bubble", &StepCost::bubble_ms},       {"tensor", &StepCost::tensor_ms},
      {"pipeline", &StepCost::pipeline_ms},   {"reduce", &StepCost::reduce_ms},
      {"optimizer", &StepCost::optimizer_ms}, {"gather", &StepCost::gather_ms},
      {"offload", &StepCost::offload_ms},     {"other", &StepCost::other_ms},
  };
  return parts;
}

StepCost machine_cost(const Plan& plan, const Machine& machine, const Placement& placement) {
  const ModelConfig& model = plan.recipe.model;
  const Mesh& mesh = plan.mesh;
  const auto tp = static_cast<double>(mesh.tp());
  const auto cp = static_cast<double>(mesh.cp()), ep = static_cast<double>(mesh.ep());
  const auto c = static_cast<double>(dtype_size_bytes(plan.compute_dtype()));
  const double rows = static_cast<double>(plan.recipe.batch.micro * model.context) / cp;  // of a rank
  const auto width = static_cast<double>(model.width);
  const auto layers = static_cast<double>(model.layers);
  const double flop_per_ms = machine.peak_tflops(plan.recipe.precision) * 1e9 * machine.gemm_fraction;
  const double memory_per_ms = machine.memory_gb_per_s * kGb / 1e3;

  // A layer of one micro-batch: three times its forward products. Their operands pass memory once each.
  const double head_flops = 6 * static_cast<double>(model.vocab) * width * rows / tp;
  const double all_flops = plan.flops_per_token() * rows / tp;
  const double layer_flops = (all_flops - head_flops) / layers;
  double layer_parameters = 0;
  const int64_t kinds = model.moe.dense_layers.empty() ? 1 : model.layers;
  for (const TensorSpec& tensor : plan.tensors) {
    if (tensor.layer < 0 || tensor.layer >= kinds) continue;
    layer_parameters += static_cast<double>(count_elems(tensor.shape)) / (tensor.expert >= 0 ? ep : 1.0);
  }
  layer_parameters /= tp * static_cast<double>(kinds);
  const double saved = rows * c *
                       (2 * width + (model.heads + 2.0 * model.kv_heads) * model.head_dim / tp +
                        static_cast<double>(model.heads * model.head_dim + model.ffn * 2) / tp);
  const double layer_ms = std::max(layer_flops / flop_per_ms, 3 * (layer_parameters * c + saved) / memory_per_ms) +
                          4 * saved / memory_per_ms;  // norms, activations, residuals, forward and backward
  const double head_ms =
      head_flops / flop_per_ms + 4 * rows * static_cast<double>(model.vocab) / tp * c / memory_per_ms;

  // Reduce-scatter or all-gather of `bytes` in so many calls: a ring, which leaves each node by a port for each of its
  // members there.
  const auto ring_ms = [&](double bytes, const GroupSpan& group, double calls = 1) {
    if (group.ranks <= 1) return 0.0;
    const auto hops = static_cast<double>(group.ranks - 1);
    const double rate =
        group.crosses ? std::min(machine.node_gb_per_s, machine.network_gb_per_s * static_cast<double>(group.in_node))
                      : machine.node_gb_per_s;
    const double latency_us = group.crosses ? machine.network_latency_us : machine.node_latency_us;
    return bytes * hops / (hops + 1) / (rate * kGb / 1e3) + calls * hops * latency_us / 1e3;
  };
  // Four all-reduces a layer, or their halves; half of them in forward. A backward in two passes wants the gradient of
  // the output gathered once more for each branch.
  const double tp_pass_ms = ring_ms(rows * width * c, placement.tp);
  const bool split = splits_backward(plan.recipe.schedule) && plan.recipe.mesh.sequence_parallel;
  double tensor_ms = (split ? 10 : 8) * tp_pass_ms;
  // Keys and values gathered twice and their gradients scattered; rows of choices to experts and back, five times.
  const double kv_bytes = rows * cp * 2 * static_cast<double>(model.kv_heads * model.head_dim) / tp * c;
  tensor_ms += 3 * ring_ms(kv_bytes, placement.cp);
  tensor_ms += 5 * ring_ms(rows * static_cast<double>(model.moe.top_k) * width * c, placement.ep);

  // What is computed again: a layer's forward, which is a third of it, or the products of the attention core.
  const RecomputeConfig& recompute = plan.recipe.recompute;
  const double core_flops = 4 * plan.keys_per_query() * rows * static_cast<double>(model.heads * model.head_dim) / tp;
  const double again_ms = recompute.mode == RecomputeMode::kFull
                              ? layer_ms / 3 + 4 * tp_pass_ms + (recompute.distribute ? tp_pass_ms : 0)
                          : recompute.mode == RecomputeMode::kSelective ? core_flops / flop_per_ms
                                                                        : 0;

  StepCost out;
  std::vector<double> rank_ms;
  const std::vector<double> weights = layer_weights(model);
  double deepest = 0, again = 0;
  for (int64_t pp = 0; pp < mesh.pp(); ++pp) {
    const Own part = own_part(plan, pp, weights);
    const auto own = static_cast<double>(part.layers);
    const double recomputed = again_ms * (recompute.mode == RecomputeMode::kFull ? part.recomputed_weight : own);
    deepest = std::max(deepest, own);
    again = std::max(again, recomputed);
    rank_ms.push_back(part.weight * layer_ms + own * tensor_ms + recomputed + (part.head ? head_ms : 0.0));
  }
  const PipelineTime time = pipeline_time(plan, rank_ms);
  const auto m = static_cast<double>(plan.micro_batches);
  out.tensor_ms = m * deepest * tensor_ms;
  out.recompute_ms = m * again;
  out.compute_ms = time.busy_ms - out.tensor_ms - out.recompute_ms;
  out.bubble_ms = time.bubble_ms;
  if (mesh.pp() > 1) {
    // All stages go at the pace of the slowest boundary.
    const double rate = (placement.pipeline_crosses ? machine.network_gb_per_s : machine.node_gb_per_s) * kGb / 1e3;
    const double latency_us = placement.pipeline_crosses ? machine.network_latency_us : machine.node_latency_us;
    const auto v = static_cast<double>(plan.recipe.mesh.virtual_stages);
    const BoundaryTensor tensor = boundary_tensor(plan);
    const double gathered = tensor.parts > 1 ? ring_ms(static_cast<double>(tensor.room_bytes()), placement.tp) : 0;
    out.pipeline_ms = 2 * m * v * (static_cast<double>(tensor.part_bytes) / rate + latency_us / 1e3 + gathered);
  }
  const double parameters = deepest * layer_parameters + static_cast<double>(model.vocab) * width / tp;
  const int zero = plan.zero();
  const auto shards = static_cast<double>(plan.shard_size());
  // How often, and beside how much computation.
  const double backward = 2.0 / 3 * out.compute_ms + out.recompute_ms;
  const bool each = reduces_each_micro_batch(plan);
  const StateCalls calls = state_calls(plan);
  const bool overlaps = plan.recipe.optimizer.overlap;
  const auto seen = [&](double ms, double hidden_by) { return overlaps ? std::max(0.1 * ms, ms - hidden_by) : ms; };
  const double times = each ? m : 1;
  const double reduce_ms = ring_ms(times * parameters * 4, placement.shard, calls.reduces) +
                           2 * ring_ms(parameters / shards * 4, placement.replica, calls.reduces / times);
  out.reduce_ms = seen(reduce_ms, each ? backward : backward / m);
  const double gathers = zero < 3 ? 1 : plan.recipe.optimizer.keep_after_forward ? 1 : 2 * m;
  out.gather_ms = zero == 0 ? 0
                            : seen(ring_ms(gathers * parameters * c, placement.shard, calls.gathers),
                                   zero == 3 ? out.compute_ms : out.compute_ms / 3 / m);
  out.optimizer_ms = parameters / shards * (3 * 8 + 4 + c) / memory_per_ms + parameters * 4 / memory_per_ms;
  if (!plan.recipe.optimizer.offload.empty() && machine.storage_gb_per_s > 0) {
    const double state = static_cast<double>(plan.checkpoint_bytes) / static_cast<double>(mesh.world());
    const double rate = machine.storage_gb_per_s / static_cast<double>(std::min(machine.node_devices, mesh.world()));
    out.offload_ms = 2 * state / (rate * kGb / 1e3);
  }
  return out;
}

StepCost machine_cost(const Plan& plan, const Machine& machine) {
  return machine_cost(plan, machine, place_groups(plan, machine.node_devices));
}

StepEstimate estimate(const Plan& plan, const Machine& machine, const Placement& placement) {
  StepEstimate out{.cost = machine_cost(plan, machine, placement), .error = machine.error, .source = machine.source};
  const double peak = machine.peak_tflops(plan.recipe.precision);
  out.utilisation = utilisation_of(plan, out.cost, peak * static_cast<double>(plan.mesh.world()));
  out.assumes = fmt::format("matrix products at {:.0f} % of {:.4g} TFLOP/s", machine.gemm_fraction * 100, peak);
  if (plan.mesh.replicas() > 1) {
    out.assumes += !plan.recipe.optimizer.overlap ? "; nothing runs beside the computation"
                   : plan.zero() == 3             ? "; gathers beside all of it, reductions beside backward"
                   : reduces_each_micro_batch(plan)
                       ? "; reductions beside backward, gathers beside the first forward"
                       : "; reductions beside the last backward, gathers beside the first forward";
  }
  return out;
}

bool even(const StepEstimate& a, const StepEstimate& b) {
  const double least = std::min(a.cost.total(), b.cost.total());
  return std::abs(a.cost.total() - b.cost.total()) <= std::max(a.error, b.error) * least;
}

StorageTime storage_time(const Plan& plan, std::span<const StageMemory> stages, int64_t node_devices, double gb_per_s) {
  StorageTime out{.gb_per_s = gb_per_s};
  const int64_t world = plan.mesh.world();
  out.hosts = (world + node_devices - 1) / node_devices;
  double restored = 0;
  for (const StageMemory& stage : stages) restored += static_cast<double>(stage.restored_bytes);
  restored *= static_cast<double>(plan.mesh.tp() * plan.mesh.replicas());
  const double all_hosts = gb_per_s * kGb * static_cast<double>(out.hosts);
  out.save_s = static_cast<double>(plan.checkpoint_bytes) / all_hosts;
  out.load_s = restored / all_hosts;
  return out;
}

std::optional<StepEstimate> calibrated_estimate(const Plan& plan, const Calibration& calibration) {
  const auto found = calibration.shapes.find(shape_key(plan, calibration.cores));
  if (found == calibration.shapes.end()) return std::nullopt;
  const std::optional<StepParts> parts = found->second.parts(plan.recipe.model.layers, plan.micro_batches);
  if (!parts) return std::nullopt;
  StepEstimate out{.cost = {.compute_ms = parts->forward + parts->backward,
                            .bubble_ms = parts->pipeline,
                            .reduce_ms = parts->reduce,
                            .optimizer_ms = parts->optimizer,
                            .other_ms = parts->other},
                   .error = 0.1,
                   .source = fmt::format("this host ({}, {} cores) as measured", calibration.cpu, calibration.cores),
                   .assumes = "extrapolated from steps of fewer layers and micro-batches"};
  out.utilisation = utilisation_of(plan, out.cost, calibration.peak_tflops(plan.recipe.precision));
  return out;
}

}  // namespace cairn::tools
