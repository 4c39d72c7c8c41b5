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

int64_t own_layers(const Plan& plan, int64_t pp) {
  int64_t out = 0;
  for (int64_t c = 0; c < plan.recipe.mesh.virtual_stages; ++c) {
    const Stage& stage = plan.stages[static_cast<size_t>(c * plan.mesh.pp() + pp)];
    out += stage.end_layer - stage.first_layer;
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
  double through = 0;
  for (const double ms : rank_ms) through += ms;
  // The first micro-batch passes all stages, the others follow at the pace of the slowest; with v stages a rank the
  // first needs a v-th of that (Narayanan et al. 2021, section 2.2).
  const auto v = static_cast<double>(plan.recipe.mesh.virtual_stages);
  return {m * slowest, (through - slowest) / v};
}

}  // namespace

const std::vector<CostPart>& cost_parts() {
  static const std::vector<CostPart> parts = {
      {"compute", &StepCost::compute_ms},   {"bubble", &StepCost::bubble_ms}, {"tensor", &StepCost::tensor_ms},
      {"pipeline", &StepCost::pipeline_ms}, {"reduce", &StepCost::reduce_ms}, {"optimizer", &StepCost::optimizer_ms},
      {"gather", &StepCost::gather_ms},
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
  double tensor_ms = 8 * ring_ms(rows * width * c, tp, tp_inside);  // 4 all-reduces a layer, or their halves
  // Keys and values gathered twice and their gradients scattered; rows of choices to experts and back, five times.
  const double kv_bytes = rows * cp * 2 * static_cast<double>(model.kv_heads * model.head_dim) / tp * c;
  tensor_ms += 3 * ring_ms(kv_bytes, cp, tp * cp <= node);
  tensor_ms += 5 * ring_ms(rows * static_cast<double>(model.moe.top_k) * width * c, ep, tp * cp * ep <= node);

  StepCost out;
  std::vector<double> rank_ms;
  double deepest = 0;
  for (int64_t pp = 0; pp < mesh.pp(); ++pp) {
    const auto own = static_cast<double>(own_layers(plan, pp));
    deepest = std::max(deepest, own);
    rank_ms.push_back(own * (layer_ms + tensor_ms) + (pp == mesh.pp() - 1 ? head_ms : 0.0));
  }
  const PipelineTime time = pipeline_time(plan, rank_ms);
  const auto m = static_cast<double>(plan.micro_batches);
  out.tensor_ms = m * deepest * tensor_ms;
  out.compute_ms = time.busy_ms - out.tensor_ms;
  out.bubble_ms = time.bubble_ms;
  if (mesh.pp() > 1) {
    // Every boundary crosses the slower way when a pipeline does not fit a node.
    const bool inside = tp * static_cast<double>(mesh.pp()) <= node;
    const double rate = (inside ? machine.node_gb_per_s : machine.network_gb_per_s) * kGb / 1e3;
    const auto v = static_cast<double>(plan.recipe.mesh.virtual_stages);
    out.pipeline_ms = 2 * m * v * (static_cast<double>(plan.boundary_bytes()) / rate + machine.latency_us / 1e3);
  }
  const double parameters = deepest * layer_parameters + static_cast<double>(model.vocab) * width / tp;
  const bool inside = tp * replicas * static_cast<double>(mesh.pp()) <= node;
  const bool sharded = plan.recipe.optimizer.zero > 0;
  out.reduce_ms = ring_ms(parameters * 4, replicas, inside) * (sharded ? 1 : 2);
  out.gather_ms = sharded ? ring_ms(parameters * c, replicas, inside) : 0;
  out.optimizer_ms =
      parameters / (sharded ? replicas : 1.0) * (3 * 8 + 4 + c) / memory_per_ms + parameters * 4 / memory_per_ms;
  return out;
}

std::optional<StepCost> calibrated_cost(const Plan& plan, const Calibration& calibration) {
  if (plan.mesh.ep() > 1 || plan.mesh.cp() > 1) return std::nullopt;  // their collectives are not measured
  const auto found = calibration.shapes.find(shape_key(plan, calibration.cores));
  if (found == calibration.shapes.end()) return std::nullopt;
  const ShapeTimes& shape = found->second;
  const Mesh& mesh = plan.mesh;
  const auto m = static_cast<double>(plan.micro_batches);
  bool known = true;
  const auto comm_ms = [&](const char* op, int64_t ranks, int64_t bytes, int64_t calls) {
    if (ranks <= 1 || bytes == 0) return 0.0;
    const auto speed = shape.comm.find(fmt::format("{} x {}", op, ranks));
    if (speed == shape.comm.end()) {
      known = false;
      return 0.0;
    }
    return speed->second.ms(bytes, calls);
  };
  const auto traffic_ms = [&](const comm::Comm::Traffic& t) {
    const int64_t tp = mesh.tp();
    // Payloads are of the whole where the speeds were measured for the whole: an all-gather counts its own chunk.
    double ms = comm_ms("all_reduce", tp, t.all_reduce.bytes, 0) +
                comm_ms("reduce_scatter", tp, t.reduce_scatter.bytes, 0) +
                comm_ms("all_gather", tp, t.all_gather.bytes * tp, 0);
    const char* const usual = t.reduce_scatter.bytes > 0 ? "reduce_scatter" : "all_reduce";
    const auto speed = shape.comm.find(fmt::format("{} x {}", usual, tp));
    if (speed != shape.comm.end())
      ms += speed->second.latency_ms *
            static_cast<double>(t.all_reduce.calls + t.reduce_scatter.calls + t.all_gather.calls);
    return ms;
  };
  const double layer_comm = traffic_ms(shape.layer_traffic), ends_comm = traffic_ms(shape.ends_traffic);

  StepCost out;
  std::vector<double> rank_ms;
  double most_comm = 0, sum_ms = 0;
  for (int64_t pp = 0; pp < mesh.pp(); ++pp) {
    const auto own = static_cast<double>(own_layers(plan, pp));
    const bool last = pp == mesh.pp() - 1;  // the head is nearly all of the ends
    double ms = own * (shape.layer_forward_ms + shape.layer_backward_ms);
    double comm = own * layer_comm;
    if (last) ms += shape.ends_forward_ms + shape.ends_backward_ms, comm += ends_comm;
    most_comm = std::max(most_comm, comm);
    rank_ms.push_back(ms + comm);
    sum_ms += ms;
  }
  const PipelineTime time = pipeline_time(plan, rank_ms);
  out.tensor_ms = m * most_comm;
  out.compute_ms = time.busy_ms - out.tensor_ms;
  out.bubble_ms = time.bubble_ms;
  // More ranks than cores take turns: the work of all, on all cores, is the least a step takes.
  const double turns_ms =
      sum_ms * m * static_cast<double>(mesh.tp() * mesh.dp()) / static_cast<double>(calibration.cores);
  if (mesh.world() > calibration.cores && turns_ms > out.compute_ms + out.bubble_ms) {
    out.compute_ms = turns_ms;
    out.bubble_ms = 0;
  }
  if (mesh.pp() > 1) {
    const auto calls = static_cast<int64_t>(2 * m) * plan.recipe.mesh.virtual_stages;
    out.pipeline_ms = comm_ms("p2p", 2, calls * plan.boundary_bytes(), calls);
  }
  double share = 0, flat = 0;
  int64_t buckets = 0;
  for (int64_t pp = 0; pp < mesh.pp(); ++pp) {
    const RankPlan rank = plan.rank(mesh.rank({.tp = 0, .dp = 0, .pp = pp}));
    if (static_cast<double>(rank.flat_elems) < flat) continue;
    flat = static_cast<double>(rank.flat_elems);
    share = static_cast<double>(rank.saved_elems + rank.private_elems);
    buckets = static_cast<int64_t>(rank.buckets.size());
  }
  const auto flat_bytes = static_cast<int64_t>(flat) * 4;
  const bool sharded = plan.recipe.optimizer.zero > 0;
  out.reduce_ms = comm_ms(sharded ? "reduce_scatter" : "all_reduce", mesh.dp(), flat_bytes, buckets) +
                  comm_ms("all_reduce", mesh.world(), 64, 1);
  if (sharded) {
    out.gather_ms =
        comm_ms("all_gather", mesh.dp(), static_cast<int64_t>(flat) * dtype_size_bytes(plan.compute_dtype()), buckets);
  }
  const double ranks_a_core = std::max(1.0, static_cast<double>(mesh.world()) / static_cast<double>(calibration.cores));
  out.optimizer_ms = ranks_a_core * (share * shape.adamw_ns + flat * shape.clear_ns + share * shape.norm_ns) / 1e6;
  if (!known) return std::nullopt;
  return out;
}

}  // namespace cairn::tools
