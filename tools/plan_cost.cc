#include "tools/plan_cost.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "runtime/plan/activations.h"

namespace cairn::tools {
namespace {

constexpr double kGb = 1e9;

// Data sheets of the makers: dense bf16/fp16 matrix rate, HBM bandwidth, NVLink a direction (half of the two-way
// figure), and one 200 or 400 Gbit/s port a device. The fraction of the peak is what published runs of large dense
// models reach in their matrix products, a little above their whole utilisation (docs: systems reach 44-52 % on A100,
// 38-43 % on H100).
const std::vector<Machine>& machines() {
  constexpr int64_t kGiB = int64_t{1} << 30;
  static const std::vector<Machine> list = {
      {"a100-40", 312, 0.62, 40 * kGiB, 1555, 8, 300, 25, 8}, {"a100-80", 312, 0.62, 80 * kGiB, 2039, 8, 300, 25, 8},
      {"h100-80", 989, 0.55, 80 * kGiB, 3350, 8, 450, 50, 8}, {"h200-141", 989, 0.57, 131 * kGiB, 4800, 8, 450, 50, 8},
      {"h800-80", 989, 0.55, 80 * kGiB, 3350, 8, 200, 50, 8},
  };
  return list;
}

/// What of the model a pipeline rank holds.
struct Own {
  int64_t layers = 0, recomputed = 0;  // the second: of which whole layers are computed again
  bool head = false;
};

Own own_part(const Plan& plan, int64_t pp) {
  Own out;
  const ScheduleShape shape = plan.schedule();
  for (int64_t c = 0; c < shape.chunks; ++c) {
    const Stage& stage = plan.stages[static_cast<size_t>(stage_at(shape, pp, c))];
    out.layers += stage.end_layer - stage.first_layer;
    out.head = out.head || stage.head;
    for (int64_t l = stage.first_layer; l < stage.end_layer; ++l) {
      out.recomputed += layer_recompute(plan, stage, l) == RecomputeMode::kFull ? 1 : 0;
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

}  // namespace

const std::vector<CostPart>& cost_parts() {
  static const std::vector<CostPart> parts = {
      {"compute", &StepCost::compute_ms},     {"recompute", &StepCost::recompute_ms}, {"bubble", &StepCost::bubble_ms},
      {"tensor", &StepCost::tensor_ms},       {"pipeline", &StepCost::pipeline_ms},   {"reduce", &StepCost::reduce_ms},
      {"optimizer", &StepCost::optimizer_ms}, {"gather", &StepCost::gather_ms},       {"other", &StepCost::other_ms},
  };
  return parts;
}

std::vector<std::string> machine_names() {
  std::vector<std::string> out;
  for (const Machine& machine : machines()) out.push_back(machine.name);
  return out;
}

Result<Machine> find_machine(const std::string& name) {
  for (const Machine& machine : machines()) {
    if (machine.name == name) return machine;
  }
  return Error{ErrorCode::kInvalidInput,
               fmt::format("--machine {}: not known; there are {}", name, fmt::join(machine_names(), ", "))};
}

StepCost data_sheet_cost(const Plan& plan, const Machine& machine) {
  const ModelConfig& model = plan.recipe.model;
  const Mesh& mesh = plan.mesh;
  const auto tp = static_cast<double>(mesh.tp()), replicas = static_cast<double>(mesh.replicas());
  const auto cp = static_cast<double>(mesh.cp()), ep = static_cast<double>(mesh.ep());
  const auto c = static_cast<double>(dtype_size_bytes(plan.compute_dtype()));
  const double rows = static_cast<double>(plan.recipe.batch.micro * model.context) / cp;  // of a rank
  const auto width = static_cast<double>(model.width);
  const auto layers = static_cast<double>(model.layers);
  const double flop_per_ms = machine.peak_tflops * 1e9 * machine.gemm_fraction;
  const double memory_per_ms = machine.memory_gb_per_s * kGb / 1e3;

  // A layer of one micro-batch: three times its forward products. Their operands pass memory once each.
  const double head_flops = 6 * static_cast<double>(model.vocab) * width * rows / tp;
  const double all_flops = plan.flops_per_token() * rows / tp;
  const double layer_flops = (all_flops - head_flops) / layers;
  double layer_parameters = 0;
  for (const TensorSpec& tensor : plan.tensors) {
    if (tensor.layer != 0) continue;
    layer_parameters += static_cast<double>(count_elems(tensor.shape)) / (tensor.expert >= 0 ? ep : 1.0);
  }
  layer_parameters /= tp;
  const double saved = rows * c *
                       (2 * width + (model.heads + 2.0 * model.kv_heads) * model.head_dim / tp +
                        static_cast<double>(model.heads * model.head_dim + model.ffn * 2) / tp);
  const double layer_ms = std::max(layer_flops / flop_per_ms, 3 * (layer_parameters * c + saved) / memory_per_ms) +
                          4 * saved / memory_per_ms;  // norms, activations, residuals, forward and backward
  const double head_ms =
      head_flops / flop_per_ms + 4 * rows * static_cast<double>(model.vocab) / tp * c / memory_per_ms;

  const auto node = static_cast<double>(machine.node_devices);
  const auto ring_ms = [&](double bytes, double ranks, bool inside) {  // reduce-scatter or all-gather of `bytes`
    if (ranks <= 1) return 0.0;
    const double rate = (inside ? machine.node_gb_per_s : machine.network_gb_per_s) * kGb / 1e3;
    return bytes * (ranks - 1) / ranks / rate + (ranks - 1) * machine.latency_us / 1e3;
  };
  const bool tp_inside = tp <= node;
  // Four all-reduces a layer, or their halves; half of them in forward. A backward in two passes wants the gradient of
  // the output gathered once more for each branch.
  const double tp_pass_ms = ring_ms(rows * width * c, tp, tp_inside);
  const bool split = splits_backward(plan.recipe.schedule) && plan.recipe.mesh.sequence_parallel;
  double tensor_ms = (split ? 10 : 8) * tp_pass_ms;
  // Keys and values gathered twice and their gradients scattered; rows of choices to experts and back, five times.
  const double kv_bytes = rows * cp * 2 * static_cast<double>(model.kv_heads * model.head_dim) / tp * c;
  tensor_ms += 3 * ring_ms(kv_bytes, cp, tp * cp <= node);
  tensor_ms += 5 * ring_ms(rows * static_cast<double>(model.moe.top_k) * width * c, ep, tp * cp * ep <= node);

  // What is computed again: a layer's forward, which is a third of it, or the products of the attention core.
  const RecomputeConfig& recompute = plan.recipe.recompute;
  const double core_flops = 4 * static_cast<double>(plan.sequence_tokens) * rows *
                            static_cast<double>(model.heads * model.head_dim) / tp / 2;  // causal: half of the square
  const double again_ms = recompute.mode == RecomputeMode::kFull
                              ? layer_ms / 3 + 4 * tp_pass_ms + (recompute.distribute ? tp_pass_ms : 0)
                          : recompute.mode == RecomputeMode::kSelective ? core_flops / flop_per_ms
                                                                        : 0;

  StepCost out;
  std::vector<double> rank_ms;
  double deepest = 0, again = 0;
  for (int64_t pp = 0; pp < mesh.pp(); ++pp) {
    const Own part = own_part(plan, pp);
    const auto own = static_cast<double>(part.layers);
    const double recomputed =
        again_ms * static_cast<double>(recompute.mode == RecomputeMode::kFull ? part.recomputed : part.layers);
    deepest = std::max(deepest, own);
    again = std::max(again, recomputed);
    rank_ms.push_back(own * (layer_ms + tensor_ms) + recomputed + (part.head ? head_ms : 0.0));
  }
  const PipelineTime time = pipeline_time(plan, rank_ms);
  const auto m = static_cast<double>(plan.micro_batches);
  out.tensor_ms = m * deepest * tensor_ms;
  out.recompute_ms = m * again;
  out.compute_ms = time.busy_ms - out.tensor_ms - out.recompute_ms;
  out.bubble_ms = time.bubble_ms;
  if (mesh.pp() > 1) {
    // Every boundary crosses the slower way when a pipeline does not fit a node.
    const bool inside = tp * static_cast<double>(mesh.pp()) <= node;
    const double rate = (inside ? machine.node_gb_per_s : machine.network_gb_per_s) * kGb / 1e3;
    const auto v = static_cast<double>(plan.recipe.mesh.virtual_stages);
    out.pipeline_ms = 2 * m * v * (static_cast<double>(plan.boundary_bytes()) / rate + machine.latency_us / 1e3);
  }
  const double parameters = deepest * layer_parameters + static_cast<double>(model.vocab) * width / tp;
  const bool replicas_inside = tp * replicas * static_cast<double>(mesh.pp()) <= node;
  const int zero = plan.zero();
  // How often, and beside how much computation.
  const double backward = 2.0 / 3 * out.compute_ms + out.recompute_ms;
  const bool each = zero >= 2 || plan.layout_free();
  const double reduces = each ? m : 1;
  const double gathers = zero < 3 ? 1 : plan.recipe.optimizer.keep_after_forward ? 1 : 2 * m;
  const bool overlaps = plan.recipe.optimizer.overlap;
  const auto seen = [&](double ms, double hidden_by) { return overlaps ? std::max(0.1 * ms, ms - hidden_by) : ms; };
  out.reduce_ms = seen(reduces * ring_ms(parameters * 4, replicas, replicas_inside) * (zero > 0 ? 1 : 2),
                       each ? backward : backward / m);
  out.gather_ms = zero == 0 ? 0
                            : seen(gathers * ring_ms(parameters * c, replicas, replicas_inside),
                                   zero == 3 ? out.compute_ms : out.compute_ms / 3 / m);
  out.optimizer_ms =
      parameters / (zero > 0 ? replicas : 1.0) * (3 * 8 + 4 + c) / memory_per_ms + parameters * 4 / memory_per_ms;
  return out;
}

std::optional<StepCost> calibrated_cost(const Plan& plan, const Calibration& calibration) {
  const auto found = calibration.shapes.find(shape_key(plan, calibration.cores));
  if (found == calibration.shapes.end()) return std::nullopt;
  const std::optional<StepParts> parts = found->second.parts(plan.recipe.model.layers, plan.micro_batches);
  if (!parts) return std::nullopt;
  return StepCost{.compute_ms = parts->forward + parts->backward,
                  .bubble_ms = parts->pipeline,
                  .reduce_ms = parts->reduce,
                  .optimizer_ms = parts->optimizer,
                  .other_ms = parts->other};
}

}  // namespace cairn::tools
