// cairn plan RECIPE --world N: what a run will be, by arithmetic alone: mesh, stages, bytes, batch, checkpoints.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "ckpt/plan/free_copies.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/policy.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/slot_rule.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/nn/kernel_scratch.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/device_choice.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/staging_rooms.h"
#include "runtime/trainer/sum_rooms.h"
#include "tools/attention_option.h"
#include "tools/calibrate.h"
#include "tools/commands.h"
#include "tools/plan_draw.h"
#include "tools/planner/cost.h"
#include "tools/planner/memory.h"
#include "tools/planner/search.h"
#include "tools/start_check.h"

namespace cairn::tools {
namespace {

constexpr size_t kMaxRows = 8;  // of the memory table; more stages than that are told as ranges

struct PlanArgs {
  RecipeArgs recipe;
  int64_t world = 0;
  bool draw = false;
  std::string svg;  // file to write
  bool calibrate = false, search = false, force = false;
  std::string machine;  // of a data sheet
  std::string memory;   // of a rank, for the search
  std::string pins;     // of the search
  std::string storage;  // bytes a second of a host
};

/// The memory of each pipeline stage in the segment that takes most of it, with the traffic of `shown`.
std::vector<StageMemory> memory_of_stages(const Plan& shown, const Course& course) {
  std::vector<StageMemory> out;
  for (int64_t pp = 0; pp < shown.mesh.pp(); ++pp) {
    StageMemory most = stage_memory(shown, pp, true);
    for (const Plan& plan : course.plans) {
      StageMemory then = stage_memory(plan, pp, false);
      if (then.total() <= most.total()) continue;
      then.traffic = std::move(most.traffic);
      most = std::move(then);
    }
    out.push_back(std::move(most));
  }
  return out;
}

/// The most of any rank, in any segment.
kernels::ScratchBytes kernel_scratch_of(const Course& course) {
  kernels::ScratchBytes out;
  for (const Plan& plan : course.plans) {
    for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
      const kernels::ScratchBytes of_stage = nn::kernel_scratch(plan, plan.mesh.rank({.pp = pp}));
      out = {std::max(out.caller, of_stage.caller), std::max(out.helper, of_stage.helper)};
    }
  }
  return out;
}

/// Of the host, pinned for a rank on CUDA: what it communicates through.
int64_t staging_of(const Course& course) {
  int64_t out = 0;
  for (const Plan& plan : course.plans) {
    for (int64_t pp = 0; pp < plan.mesh.pp() && plan.mesh.world() > 1; ++pp)
      out = std::max(out, trainer::staging_rooms(plan, plan.mesh.rank({.pp = pp})).total_bytes());
  }
  return out;
}

/// The most of any rank, in any segment: for norms' outputs, where a rank on CUDA keeps them.
int64_t kept_norms_of(const Course& course) {
  int64_t out = 0;
  for (const Plan& plan : course.plans) {
    for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp)
      out = std::max(out, kept_norms_bytes(plan, plan.mesh.rank({.pp = pp})));
  }
  return out;
}

int64_t banks_of(const Recipe& recipe) { return ckpt::banks_for(recipe.checkpoint.in_flight); }

/// Checkpoints that are being written at once, at most.
int64_t written_at_once(const CheckpointConfig& config) { return std::max<int64_t>(1, config.in_flight); }

/// What goes over the network where a step is copied to other hosts: the banks of all ranks, each once.
int64_t replica_bytes(const Plan& plan) {
  int64_t out = 0;
  for (const ckpt::SlotLayout& rank : ckpt::slot_layouts(plan)) out += rank.bytes;
  return out;
}

/// Numbers of ranks a host with which copies of a step cost no byte of the network.
std::vector<int64_t> free_with(const Plan& plan) {
  std::vector<int64_t> out;
  for (int64_t ranks = 1; ranks < plan.mesh.world(); ++ranks) {
    if (plan.mesh.world() % ranks == 0 && !ckpt::free_holders(plan, plan.mesh.world() / ranks).empty())
      out.push_back(ranks);
  }
  return out;
}

/// Banks hold copies of state that is in each rank's own memory besides.
bool copies(const Plan& plan) { return plan.recipe.checkpoint.snapshot_by == SnapshotBy::kCopy; }

/// Of all ranks: the banks of what they save, unless they lie on a disk, and their weights, unless those are private.
int64_t shared_bytes(const Plan& plan, const std::vector<StageMemory>& memory) {
  int64_t out = plan.recipe.optimizer.offload.empty() ? banks_of(plan.recipe) * plan.checkpoint_bytes : 0;
  if (copies(plan)) return out;
  for (const StageMemory& m : memory) out += m.weight_bytes * plan.mesh.tp() * plan.mesh.replicas();
  return out;
}

/// Replicas that have no sample of their own in the last round of micro-batches.
int64_t idle_in_last_round(const Plan& plan) {
  const BatchConfig& batch = plan.recipe.batch;
  return plan.micro_batches * plan.mesh.dp() - (batch.samples + batch.micro - 1) / batch.micro;
}

std::string order_text(const MeshConfig& mesh) {
  std::string out;
  for (const MeshAxis axis : mesh.order) out += fmt::format("{}{}", out.empty() ? "" : ", ", axis_name(axis));
  return out;
}

std::string stages_text(const Plan& plan) {
  std::string out;
  for (size_t i = 0; i < plan.stages.size();) {
    const Stage& stage = plan.stages[i];
    const auto text_of = [](const Stage& s) {
      return fmt::format("[{}{}{}]", s.embedding ? "emb " : "", s.end_layer - s.first_layer, s.head ? " head" : "");
    };
    size_t end = i + 1;
    while (end < plan.stages.size() && text_of(plan.stages[end]) == text_of(stage)) ++end;
    out += fmt::format("{}{}", out.empty() ? "" : " ", text_of(stage));
    if (end - i > 4) {
      out += fmt::format(" x {}", end - i);
      i = end;
    } else {
      ++i;
    }
  }
  return out;
}

std::string schedule_text(const Plan& plan) {
  const MeshConfig& mesh = plan.recipe.mesh;
  std::string out = schedule_name(plan.recipe.schedule);
  if (mesh.virtual_stages > 1) out += fmt::format(", {} stages a rank", mesh.virtual_stages);
  if (mesh.micro_batch_group > 0) out += fmt::format(" in groups of {} micro-batches", mesh.micro_batch_group);
  return out;
}

std::string recompute_text(const RecomputeConfig& config) {
  std::string out =
      config.layers > 0 ? fmt::format("the first {} of each stage", count_text(config.layers, "layer")) : "every layer";
  if (config.mode == RecomputeMode::kSelective) return "the attention core of " + out;
  return out + (config.distribute ? ", inputs kept split over tp" : "");
}

std::string every_text(const CheckpointConfig& config) {
  std::string out;
  for (const Every& every : config.save) {
    if (every.steps > 0) out += fmt::format("{}{} steps", out.empty() ? "every " : " or ", every.steps);
    if (every.seconds > 0) {
      out += out.empty() ? "every " : " or ";
      out += every.seconds >= 60 ? fmt::format("{:g} min", every.seconds / 60) : fmt::format("{:g} s", every.seconds);
    }
  }
  return out.empty() ? "at the end and on a signal" : out;
}

/// "last(3), every(1000): 13 to 15 kept at once and 1 being written = 40.5 GiB"
std::string moments_text(const StateKinds& kinds) {
  if (!kinds.factored()) return "two moments";
  return kinds.has(StateKind::kExpAvg) ? "a first moment, second moments of rows and columns"
                                       : "second moments of rows and columns";
}

std::string kept_text(const CheckpointConfig& config, const ckpt::KeptAtOnce& kept, int64_t checkpoint_bytes) {
  std::string out;
  for (const Keep& rule : config.keep) out += (out.empty() ? "" : ", ") + ckpt::to_text(rule);
  out += out.empty() ? "all kept: " : ": ";
  out += kept.at_most < 0                ? fmt::format("at least {}", kept.at_least)
         : kept.at_most == kept.at_least ? fmt::format("{}", kept.at_least)
                                         : fmt::format("{} to {}", kept.at_least, kept.at_most);
  return out + fmt::format(" at once and {} being written = {}{}", written_at_once(config),
                           kept.at_most == kept.at_least ? "" : "from ",
                           format_bytes((kept.at_least + written_at_once(config)) * checkpoint_bytes));
}

/// "3", or "3 - 7" when the ends differ.
template <typename T, typename Format>
std::string range_text(T first, T last, Format format) {
  const std::string from = fmt::format("{}", format(first));
  const std::string to = fmt::format("{}", format(last));
  return from == to ? from : from + " - " + to;
}

/// "ZeRO 3 over 8 of 16 replicas"
std::string zero_text(const Plan& plan) {
  if (plan.zero() == 0) return fmt::format("ZeRO {}", plan.recipe.optimizer.zero);
  return fmt::format("ZeRO {} over {} of {} replicas{}", plan.zero(), plan.shard_size(), plan.mesh.replicas(),
                     plan.recipe.optimizer.keep_after_forward ? ", weights kept after forward" : "");
}

/// "all-reduce 1.2 GiB in 12 calls; send 3 MiB in 4 calls"
std::string traffic_text(const Traffic& traffic) {
  std::string out;
  const auto tell = [&](const char* op, const Volume& volume) {
    if (volume.calls == 0) return;
    out += fmt::format("{}{} {} in {}", out.empty() ? "" : "; ", op, format_bytes(volume.bytes),
                       count_text(volume.calls, "call"));
  };
  tell("all-reduce", traffic.all_reduce);
  tell("reduce-scatter", traffic.reduce_scatter);
  tell("all-gather", traffic.all_gather);
  tell("broadcast", traffic.broadcast);
  tell("send", traffic.send);
  tell("all-to-all", traffic.all_to_all);
  return out.empty() ? "nothing" : out;
}

int64_t traffic_bytes(const StageMemory& memory) {
  int64_t out = 0;
  for (const GroupTraffic& group : memory.traffic) {
    const Traffic& t = group.traffic;
    out += t.all_reduce.bytes + t.reduce_scatter.bytes + t.all_gather.bytes + t.broadcast.bytes + t.send.bytes +
           t.all_to_all.bytes;
  }
  return out;
}

/// What the rank that moves most puts in.
void print_traffic(const std::vector<StageMemory>& memory, const std::function<std::string(const char*)>& head) {
  const auto most = std::max_element(memory.begin(), memory.end(), [](const StageMemory& a, const StageMemory& b) {
    return traffic_bytes(a) < traffic_bytes(b);
  });
  if (most->traffic.empty()) return;
  fmt::print("{} of a rank{}, what it puts in a step\n", head("communication"),
             memory.size() > 1 ? fmt::format(" of stage {}", most - memory.begin()) : "");
  for (const GroupTraffic& group : most->traffic) {
    fmt::print("  {:<16}{:>6} ranks   {}\n", group.group, group.size, traffic_text(group.traffic));
  }
}

nlohmann::json traffic_json(const std::vector<GroupTraffic>& traffic) {
  nlohmann::json out = nlohmann::json::array();
  const auto volume = [](const Volume& v) { return nlohmann::json{{"bytes", v.bytes}, {"calls", v.calls}}; };
  for (const GroupTraffic& group : traffic) {
    const Traffic& t = group.traffic;
    out.push_back({{"group", group.group},
                   {"ranks", group.size},
                   {"all_reduce", volume(t.all_reduce)},
                   {"reduce_scatter", volume(t.reduce_scatter)},
                   {"all_gather", volume(t.all_gather)},
                   {"broadcast", volume(t.broadcast)},
                   {"send", volume(t.send)},
                   {"all_to_all", volume(t.all_to_all)}});
  }
  return out;
}

/// A batch phase of the run, with its plan.
struct Phase {
  size_t segment;  // stages of the recipe that have begun
  StepStage stage;
  Plan plan;
};

constexpr size_t kPhasesShown = 8;

struct Phases {
  std::vector<Phase> shown;  // that a step of the run is in, the last one first; of many the last and the first
  int64_t hidden = 0;        // between those two
};

Phases phases_of(const Course& course) {
  std::vector<std::pair<size_t, size_t>> all;  // segment, phase
  for (size_t s = course.segments.size(); s-- > 0;) {
    const dsl::RunSegment& segment = course.segments[s];
    const std::vector<StepStage>& phases = course.plans[s].step_stages;
    if (s > 0 && segment.begin.step == segment.end.step) continue;
    const size_t first = stage_of_step(phases, segment.begin.step + 1);
    for (size_t k = phases.size(); k-- > first;) {
      if (k == first || segment.end.step == 0 || phases[k].first_step <= segment.end.step) all.emplace_back(s, k);
    }
  }
  Phases out;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i >= kPhasesShown && i + 1 < all.size()) {
      ++out.hidden;
      continue;
    }
    const auto [s, k] = all[i];
    Phase phase{course.segments[s].stages, course.plans[s].step_stages[k], course.plans[s].at(k)};
    phase.stage.first_step = std::max(phase.stage.first_step, course.segments[s].begin.step + 1);
    out.shown.push_back(std::move(phase));
  }
  return out;
}

void print_phases(const Course& course) {
  const auto [phases, hidden] = phases_of(course);
  if (phases.size() == 1) return;
  for (const Phase& phase : phases) {
    const StepStage& s = phase.stage;
    fmt::print(
        "  from step {}{}: {} = micro {} x accumulate {} x dp {}, sequences of {}{}; bubble {:.1f}%{}\n", s.first_step,
        phase.segment > 0 ? fmt::format(" (stages[{}])", phase.segment) : "", count_text(s.samples, "sample"), s.micro,
        phase.plan.micro_batches, phase.plan.mesh.dp(), count_text(s.tokens, "token"),
        phase.plan.recipe.model.positions == Positions::kRotary ? fmt::format(", rope theta {}", s.rope_theta) : "",
        bubble_fraction(phase.plan.schedule()) * 100,
        hidden > 0 && &phase == &phases[phases.size() - 2]
            ? fmt::format("; {} before it, and at first", count_text(hidden, "more phase"))
            : "");
  }
}

nlohmann::json segments_json(const Course& course) {
  nlohmann::json out = nlohmann::json::array();
  for (size_t k = 0; k < course.segments.size(); ++k) {
    const dsl::RunSegment& segment = course.segments[k];
    nlohmann::json weights = nlohmann::json::object();
    for (const DataSource& source : segment.recipe.data.sources) weights[source_name(source)] = source.weight;
    out.push_back({{"stage", segment.stages},
                   {"first_step", segment.begin.step + 1},
                   {"last_step", segment.end.step},
                   {"samples", segment.end.samples - segment.begin.samples},
                   {"tokens", segment.end.tokens - segment.begin.tokens},
                   {"tokens_per_step", course.plans[k].tokens_per_step},
                   {"sources", std::move(weights)}});
  }
  return out;
}

void print_text(const Plan& plan, const Course& course, const dsl::LoadedRecipe& loaded,
                const std::vector<StageMemory>& memory) {
  const Recipe& recipe = plan.recipe;
  const Palette color = palette_for(STDOUT_FILENO);
  const auto head = [&](const char* word) { return fmt::format("{}{}{}", color.bold, word, color.reset); };
  const Mesh& mesh = plan.mesh;
  const auto tokens = static_cast<double>(plan.tokens_per_step);

  fmt::print("{} {}, recipe hash {}\n", head("recipe"), recipe.name, loaded.hash_hex);
  fmt::print("{} {} parameters; {} FLOP a token, {} a step\n", head("model"),
             format_count(static_cast<double>(plan.parameters)), format_count(plan.flops_per_token()),
             format_count(plan.flops_per_token() * tokens));
  fmt::print("{} {} = pp {} x dp {}{} x tp {}     (neighbours first: {}; sequence parallel {}; {})\n", head("world"),
             mesh.world(), mesh.pp(), mesh.dp(), mesh.cp() > 1 ? fmt::format(" x cp {}", mesh.cp()) : "", mesh.tp(),
             order_text(recipe.mesh), recipe.mesh.sequence_parallel ? "on" : "off", zero_text(plan));
  if (mesh.ep() > 1) {
    fmt::print("{} {} of the {} of a layer on each of ep {} ranks; {} hold the same\n", head("experts"),
               recipe.model.moe.experts / mesh.ep(), recipe.model.moe.experts, mesh.ep(), mesh.expert_replicas());
  }
  fmt::print("{} {} = micro {} x accumulate {} x dp {}     {} tokens a step; {} tokens in {}\n", head("batch"),
             recipe.batch.samples, recipe.batch.micro, plan.micro_batches, mesh.dp(), format_count(tokens),
             format_count(static_cast<double>(course.segments.back().end.tokens)),
             count_text(course.run_steps(), "step"));
  if (const int64_t idle = idle_in_last_round(plan); idle > 0) {
    fmt::print("{} in the last round {} of dp {} repeat samples that do not count: batch.uneven\n", head(""), idle,
               mesh.dp());
  }
  print_phases(course);
  fmt::print("{} {}     {}; bubble at {}: {:.1f}%\n", head("stages"), stages_text(plan), schedule_text(plan),
             count_text(plan.micro_batches, "micro-batch"), bubble_fraction(plan.schedule()) * 100);
  if (recipe.recompute.mode != RecomputeMode::kNone) {
    fmt::print("{} {}\n", head("recompute"), recompute_text(recipe.recompute));
  }

  fmt::print("{} of a rank, {}\n", head("memory"),
             recipe.precision == Precision::kF32 ? "fp32"
                                                 : fmt::format("{} weights, fp32 gradients, masters and moments",
                                                               recipe.precision == Precision::kBf16 ? "bf16" : "fp16"));
  const std::string optimizer = plan.zero() > 0 ? fmt::format("optimizer/{}", plan.shard_size()) : "optimizer";
  const int wide = memory.size() > kMaxRows ? 22 : 13;
  fmt::print("  {}{:<9}{:>12}{:>12}{:>12}{:>14}{:>{}}{:>12}{:>{}}{}\n", color.dim, "stage", "parameters", "weights",
             "grads", optimizer, "activations", wide, "in flight", "total", wide, color.reset);
  for (size_t i = 0; i < memory.size();) {
    size_t end = i + 1;
    while (end < memory.size() &&
           (memory.size() > kMaxRows ? memory[end].same_weights(memory[i]) : memory[end].same_size(memory[i]))) {
      ++end;
    }
    const StageMemory& m = memory[i];
    const StageMemory& last = memory[end - 1];
    fmt::print(
        "  {:<9}{:>12}{:>12}{:>12}{:>14}{:>{}}{:>12}{:>{}}\n", range_text(i, end - 1, [](size_t n) { return n; }),
        format_count(static_cast<double>(m.parameters)), format_bytes(m.weight_bytes + m.gathered_bytes),
        format_bytes(m.grad_bytes), format_bytes(m.optimizer_bytes),
        range_text(m.activation_bytes + m.boundary_bytes, last.activation_bytes + last.boundary_bytes, format_bytes),
        wide, range_text(m.in_flight(), last.in_flight(), [](int64_t n) { return n; }),
        range_text(m.total(), last.total(), format_bytes), wide);
    i = end;
  }

  const kernels::ScratchBytes scratch = kernel_scratch_of(course);
  const int64_t room = attention_room(plan);
  fmt::print("{} {} of a rank on a CPU, and {} for each thread after its first{}\n", head("kernels"),
             format_bytes(scratch.caller), format_bytes(scratch.helper),
             room > 0 ? fmt::format("; on CUDA {} with --attention cudnn", format_bytes(room)) : "");
  fmt::print("{} {} more of a rank on CUDA for norms' outputs, where its device has room: backward reads them then\n",
             head("norms"), format_bytes(kept_norms_of(course)));
  if (const int64_t staging = staging_of(course); staging > 0) {
    fmt::print(
        "{} {} of the host for a rank on CUDA, through which it communicates; by NCCL none, and {} of its device\n",
        head("pinned"), format_bytes(staging), format_bytes(trainer::sum_rooms(plan).total_bytes()));
  }

  print_traffic(memory, head);

  const ckpt::KeptAtOnce kept = ckpt::kept_at_once(recipe.checkpoint, course.run_steps());
  fmt::print("{} {} (fp32 weights{} and {}), {}; {}\n", head("checkpoint"), format_bytes(plan.checkpoint_bytes),
             recipe.optimizer.ema > 0 ? ", their average" : "", moments_text(plan.state_kinds()),
             every_text(recipe.checkpoint), kept_text(recipe.checkpoint, kept, plan.checkpoint_bytes));
  if (const int64_t every = recipe.checkpoint.replicate_steps; every > 0) {
    fmt::print(
        "{} {} on several hosts: {} over the network each time, over all hosts; two banks and two copies more, {} of "
        "memory over all hosts\n",
        head("replicas"), every == 1 ? std::string("each step") : fmt::format("every {} steps", every),
        format_bytes(replica_bytes(plan)), format_bytes(2 * ckpt::kReplicaBanks * replica_bytes(plan)));
    if (const std::vector<int64_t> free = free_with(plan); !free.empty()) {
      fmt::print(
          "{} with {} ranks a host: nothing over the network, for other hosts keep the same state; {} of memory "
          "over all hosts\n",
          head("replicas"), fmt::join(free, ", "), format_bytes(banks_of(recipe) * replica_bytes(plan)));
    }
  }
  const int64_t banks = banks_of(recipe);
  int64_t rank_most = 0;
  for (const StageMemory& m : memory) {
    rank_most = std::max(rank_most, banks * m.snapshot_bytes + (copies(plan) ? 0 : m.weight_bytes));
  }
  const std::string snapshots = recipe.checkpoint.snapshot_steps == 1 ? std::string("every step is a snapshot")
                                : recipe.checkpoint.snapshot_steps > 1
                                    ? fmt::format("a snapshot every {} steps", recipe.checkpoint.snapshot_steps)
                                    : std::string("a snapshot when saving");
  if (copies(plan)) {
    fmt::print("{} {} x {} = {} over all hosts, up to {} for a rank, besides what stands above; {}, copied\n",
               head("shared memory"), count_text(banks, "copy"), format_bytes(plan.checkpoint_bytes),
               format_bytes(shared_bytes(plan, memory)), format_bytes(rank_most), snapshots);
  } else if (recipe.optimizer.offload.empty()) {
    fmt::print(
        "{} {} banks x {} and weights = {} over all hosts, up to {} for a rank (weights and one bank stand "
        "above); {}\n",
        head("shared memory"), banks, format_bytes(plan.checkpoint_bytes), format_bytes(shared_bytes(plan, memory)),
        format_bytes(rank_most), snapshots);
  } else {
    fmt::print(
        "{} {} banks x {} and weights = {} over all hosts in {}, up to {} for a rank; {} read and as much "
        "written in a step; {}\n",
        head("offload"), banks, format_bytes(plan.checkpoint_bytes),
        format_bytes(banks * plan.checkpoint_bytes + shared_bytes(plan, memory)), recipe.optimizer.offload,
        format_bytes(rank_most), format_bytes(plan.checkpoint_bytes), snapshots);
  }
}

nlohmann::json to_json(const Plan& plan, const Course& course, const dsl::LoadedRecipe& loaded,
                       const std::vector<StageMemory>& memory) {
  const Recipe& recipe = plan.recipe;
  nlohmann::json order = nlohmann::json::array();
  for (const MeshAxis axis : recipe.mesh.order) order.push_back(axis_name(axis));
  nlohmann::json stages = nlohmann::json::array();
  for (const StageMemory& m : memory) {
    nlohmann::json chunks = nlohmann::json::array();
    for (const Chunk& chunk : m.chunks) {
      chunks.push_back({{"first_layer", chunk.stage.first_layer},
                        {"end_layer", chunk.stage.end_layer},
                        {"embedding", chunk.stage.embedding},
                        {"head", chunk.stage.head},
                        {"in_flight_micro_batches", chunk.in_flight},
                        {"late_micro_batches", chunk.late}});
    }
    stages.push_back({{"chunks", std::move(chunks)},
                      {"rank_parameters", m.parameters},
                      {"rank_weight_bytes", m.weight_bytes},
                      {"rank_gathered_bytes", m.gathered_bytes},
                      {"rank_grad_bytes", m.grad_bytes},
                      {"rank_optimizer_bytes", m.optimizer_bytes},
                      {"rank_activation_bytes", m.activation_bytes + m.boundary_bytes},
                      {"rank_boundary_bytes", m.boundary_bytes},  // part of those
                      {"rank_bytes", m.total()},
                      {"rank_snapshot_bytes", m.snapshot_bytes},
                      {"rank_traffic", traffic_json(m.traffic)}});
  }
  nlohmann::json save = nlohmann::json::array();
  for (const Every& every : recipe.checkpoint.save)
    save.push_back({{"steps", every.steps}, {"seconds", every.seconds}});
  nlohmann::json keep = nlohmann::json::array();
  for (const Keep& rule : recipe.checkpoint.keep) keep.push_back(ckpt::to_text(rule));
  const ckpt::KeptAtOnce kept = ckpt::kept_at_once(recipe.checkpoint, course.run_steps());
  const kernels::ScratchBytes scratch = kernel_scratch_of(course);
  return {
      {"name", recipe.name},
      {"hash", loaded.hash_hex},
      {"world", plan.mesh.world()},
      {"mesh",
       {{"tp", plan.mesh.tp()},
        {"pp", plan.mesh.pp()},
        {"dp", plan.mesh.dp()},
        {"ep", plan.mesh.ep()},
        {"cp", plan.mesh.cp()},
        {"order", std::move(order)},
        {"sequence_parallel", recipe.mesh.sequence_parallel}}},
      {"batch", {{"samples", recipe.batch.samples}, {"micro", recipe.batch.micro}, {"accumulate", plan.micro_batches}}},
      {"parameters", plan.parameters},
      {"padded_vocab", plan.padded_vocab},
      {"zero", recipe.optimizer.zero},
      {"shard", plan.shard_size()},
      {"schedule", schedule_name(recipe.schedule)},
      {"virtual_stages", recipe.mesh.virtual_stages},
      {"micro_batch_group", recipe.mesh.micro_batch_group},
      {"bubble", bubble_fraction(plan.schedule())},
      {"boundary_buffer_bytes", plan.boundary_buffers_bytes()},
      {"kernel_scratch", {{"first_thread_bytes", scratch.caller}, {"other_thread_bytes", scratch.helper}}},
      {"cuda_kept_norm_bytes", kept_norms_of(course)},
      {"cuda_staging_bytes", staging_of(course)},
      {"cuda_sum_room_bytes", trainer::sum_rooms(plan).total_bytes()},
      {"cudnn_attention_bytes", attention_room(plan)},
      {"recompute",
       {{"mode", recipe.recompute.mode == RecomputeMode::kFull        ? "full"
                 : recipe.recompute.mode == RecomputeMode::kSelective ? "selective"
                                                                      : "none"},
        {"layers", recipe.recompute.layers},
        {"distribute", recipe.recompute.distribute}}},
      {"tokens_per_step", plan.tokens_per_step},
      {"steps", course.run_steps()},
      {"segments", segments_json(course)},
      {"flops_per_token", plan.flops_per_token()},
      {"stages", std::move(stages)},
      {"checkpoint",
       {{"bytes", plan.checkpoint_bytes},
        {"save", std::move(save)},
        {"keep", std::move(keep)},
        {"kept_at_least", kept.at_least},
        {"kept_at_most", kept.at_most < 0 ? nlohmann::json() : nlohmann::json(kept.at_most)},
        {"disk_bytes", (kept.at_least + written_at_once(recipe.checkpoint)) * plan.checkpoint_bytes}}},
      {"replicas",
       {{"every_steps", recipe.checkpoint.replicate_steps},
        {"wire_bytes", recipe.checkpoint.replicate_steps > 0 ? replica_bytes(plan) : 0},
        {"free_with_ranks_per_host", recipe.checkpoint.replicate_steps > 0 ? free_with(plan) : std::vector<int64_t>()},
        {"memory_bytes", recipe.checkpoint.replicate_steps > 0 ? 2 * ckpt::kReplicaBanks * replica_bytes(plan) : 0}}},
      {"shared_memory",
       {{"folder", recipe.optimizer.offload.empty() ? ckpt::kSharedMemory : recipe.optimizer.offload},
        {"banks", banks_of(recipe)},
        {"bytes", shared_bytes(plan, memory)},
        {"snapshot_steps", recipe.checkpoint.snapshot_steps}}}};
}

/// What steps are reckoned by: --machine, or this host as it was measured.
struct Reckoner {
  std::optional<Machine> machine;  // of --machine
  std::optional<Calibration> calibration;

  /// Nothing when the shape was not measured here.
  std::optional<StepEstimate> operator()(const Plan& plan) const {
    if (machine) return estimate(plan, *machine, place_groups(plan, machine->node_devices));
    return calibration ? calibrated_estimate(plan, *calibration) : std::nullopt;
  }
  std::string why_not() const {
    return calibration ? "these shapes are not measured here; --calibrate does"
                       : "this machine is not measured; --calibrate does";
  }
};

Result<double> storage_rate(const PlanArgs& args) {
  std::string_view rate = args.storage;
  if (rate.ends_with("/s")) rate.remove_suffix(2);
  RT_TRY_SET(const int64_t bytes, parse_bytes(rate).with("--storage"));
  return static_cast<double>(bytes) / 1e9;
}

Result<Reckoner> make_reckoner(const Plan& plan, const PlanArgs& args) {
  Reckoner out;
  if (!args.machine.empty()) {
    RT_TRY_SET(out.machine, find_machine(args.machine));
    if (!args.storage.empty()) {
      RT_TRY_SET(out.machine->storage_gb_per_s, storage_rate(args));
    }
    return out;
  }
  RT_TRY_SET(out.calibration, load_calibration());
  if (args.calibrate) {
    if (!out.calibration) out.calibration.emplace();
    RT_TRY(calibrate(plan, &*out.calibration));
    RT_TRY(save_calibration(*out.calibration));
    fmt::print(stderr, "measured, and kept in {}\n", calibration_path().string());
  }
  return out;
}

std::string step_time_text(const StepEstimate& time) {
  std::string out = fmt::format("{:.4g} ms ({:.4g} to {:.4g})", time.cost.total(), time.low_ms(), time.high_ms());
  if (time.utilisation > 0) out += fmt::format(", MFU {:.1f} %", time.utilisation * 100);
  out += fmt::format(", by {}:", time.source);
  for (const CostPart& part : cost_parts()) {
    if (time.cost.*part.ms > 0) out += fmt::format(" {} {:.3g}", part.name, time.cost.*part.ms);
  }
  if (!time.assumes.empty()) out += "; " + time.assumes;
  return out;
}

nlohmann::json step_time_json(const StepEstimate& time) {
  nlohmann::json parts = nlohmann::json::object();
  for (const CostPart& part : cost_parts()) parts[part.name] = time.cost.*part.ms;
  return {{"ms", time.cost.total()},     {"low_ms", time.low_ms()}, {"high_ms", time.high_ms()},
          {"mfu", time.utilisation},     {"source", time.source},   {"assumes", time.assumes},
          {"parts_ms", std::move(parts)}};
}

/// Whether the fullest rank fits the machine.
struct Fit {
  int64_t rank_bytes = 0;
  bool fits = true;
  std::string text;
};

Fit fit_of(const std::vector<StageMemory>& memory, const Machine& machine) {
  Fit out;
  for (const StageMemory& m : memory) out.rank_bytes = std::max(out.rank_bytes, m.total());
  out.fits = out.rank_bytes <= machine.usable_bytes();
  out.text = fmt::format("{} of the {} of {} that are left when {} are kept for the device's own",
                         format_bytes(out.rank_bytes), format_bytes(machine.usable_bytes()), machine.name,
                         format_bytes(machine.reserve_bytes));
  return out;
}

int64_t host_memory_bytes() {
  return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(::sysconf(_SC_PAGESIZE));
}

Result<int> show_search(const Recipe& recipe, int64_t world, const PlanArgs& args, bool json) {
  RT_TRY_SET(const Pins pins, parse_pins(args.pins));
  Machine machine;
  if (!args.machine.empty()) {
    RT_TRY_SET(machine, find_machine(args.machine));
  } else {
    RT_TRY_SET(const std::optional<Calibration> calibration, load_calibration());
    if (!calibration) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("--search: this host is not measured, and no --machine is named; measure it once with "
                               "`cairn plan {} --calibrate`, or take a data sheet: --machine {}",
                               args.recipe.path, fmt::join(machine_names(), ", "))};
    }
    machine = host_machine(*calibration, world, host_memory_bytes());
  }
  if (!args.memory.empty()) {
    RT_TRY_SET(machine.memory_bytes, parse_bytes(args.memory));
    if (machine.usable_bytes() <= 0) {
      return Error{ErrorCode::kInvalidInput, fmt::format("--memory {}: {} of it are kept for a device's own",
                                                         args.memory, format_bytes(machine.reserve_bytes))};
    }
  }
  if (!args.storage.empty()) {
    RT_TRY_SET(machine.storage_gb_per_s, storage_rate(args));
  }
  constexpr size_t kWanted = 5;
  RT_TRY_SET(const SearchResult found, search_layouts(recipe, world, machine, pins, kWanted));
  if (json) {
    print_json(search_json(found, machine));
  } else {
    fmt::print("{}", search_text(recipe, found, world, machine));
  }
  return found.fitting.empty() ? 1 : 0;
}

/// A flag that would be passed over is a mistake.
Status refuse_useless(const PlanArgs& args) {
  const auto invalid = [](std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; };
  if (!args.search && !args.memory.empty()) return invalid("--memory is for --search");
  if (!args.search && !args.pins.empty()) return invalid("--pin is for --search");
  if (args.force && (args.search || args.machine.empty())) {
    return invalid("--force goes on where a rank does not fit --machine, for one layout");
  }
  if (args.calibrate && !args.machine.empty())
    return invalid("--calibrate measures this machine, and --machine is for another one; give one of them");
  for (const auto& [given, flag] : {std::pair(args.draw, "--draw"), std::pair(!args.svg.empty(), "--svg"),
                                    std::pair(args.calibrate, "--calibrate")}) {
    if (args.search && given) return invalid(fmt::format("{} is for one layout, --search is for many", flag));
  }
  return {};
}

Result<int> show_plan(const PlanArgs& args, bool json) {
  RT_TRY(refuse_useless(args));
  dsl::LoadedRecipe loaded;
  RT_TRY_SET(const int refused, load_or_tell(args.recipe, args.search ? 0 : args.world, json, &loaded));
  if (refused != 0) return refused;
  const MeshConfig& mesh = loaded.recipe.mesh;
  const int64_t world = args.world > 0 ? args.world : wanted_world(mesh);
  if (args.search) return show_search(loaded.recipe, world, args, json);
  RT_TRY_SET(std::vector<dsl::RunSegment> segments, dsl::segments_ahead(loaded.recipe).with(args.recipe.path));
  for (dsl::RunSegment& segment : segments) {  // of any machine: what `auto` is here does not matter
    Recipe& recipe = segment.recipe;
    if (recipe.device != DeviceChoice::kAuto) settle_device(recipe, recipe.device);
  }
  RT_TRY_SET(const Course course, make_course(std::move(segments), world).with(args.recipe.path));
  // Of a step that happens: those at the end of the run, which are most.
  const Plan plan = in_last_phase(course.plans[course.last()]);
  const std::vector<StageMemory> memory = memory_of_stages(plan, course);
  RT_TRY_SET(const Reckoner reckon, make_reckoner(plan, args));
  const std::optional<StepEstimate> time = reckon(plan);
  const std::optional<Fit> fit = reckon.machine ? std::optional(fit_of(memory, *reckon.machine)) : std::nullopt;
  std::optional<StorageTime> storage;
  if (reckon.machine) {
    storage = storage_time(plan, memory, reckon.machine->node_devices, reckon.machine->storage_gb_per_s);
  } else if (!args.storage.empty()) {
    RT_TRY_SET(const double rate, storage_rate(args));
    storage = storage_time(plan, memory, world, rate);
  }
  const int code = fit && !fit->fits && !args.force ? kRefused : 0;
  if (!args.svg.empty()) {
    RT_TRY_SET(const std::string svg,
               schedule_svg(plan.schedule(), fmt::format("{}: {}, {} on {}", loaded.recipe.name, schedule_text(plan),
                                                         count_text(plan.micro_batches, "micro-batch"),
                                                         count_text(mesh.pp, "pipeline rank"))));
    RT_TRY(make_folder_of(args.svg));
    RT_TRY(write_output(args.svg, svg));
  }
  StartReport found;
  const DataFacts data = check_data(course.plans.front(), course, {}, 0, found);
  if (json) {
    nlohmann::json out = to_json(plan, course, loaded, memory);
    out["data"] = data_json(data);
    const nlohmann::json findings = start_json(found, loaded);
    out["data"]["problems"] = findings["diagnostics"];
    out["data"]["warnings"] = findings["warnings"];
    if (time) out["step_time"] = step_time_json(*time);
    if (fit) {
      out["machine"] = {{"name", reckon.machine->name},
                        {"memory_bytes", reckon.machine->memory_bytes},
                        {"reserve_bytes", reckon.machine->reserve_bytes},
                        {"rank_bytes", fit->rank_bytes},
                        {"fits", fit->fits}};
    }
    if (storage) {
      out["storage"] = {{"gb_per_s", storage->gb_per_s},
                        {"hosts", storage->hosts},
                        {"save_s", storage->save_s},
                        {"load_s", storage->load_s}};
    }
    out["phases"] = nlohmann::json::array();
    for (const Phase& phase : phases_of(course).shown) {
      const std::optional<StepEstimate> phase_time = reckon(phase.plan);
      out["phases"].push_back({{"stage", phase.segment},
                               {"first_step", phase.stage.first_step},
                               {"samples", phase.stage.samples},
                               {"micro", phase.stage.micro},
                               {"accumulate", phase.plan.micro_batches},
                               {"sequence_tokens", phase.stage.tokens},
                               {"tokens_per_step", phase.plan.tokens_per_step},
                               {"flops_per_token", phase.plan.flops_per_token()},
                               {"bubble", bubble_fraction(phase.plan.schedule())},
                               {"step_time", phase_time ? step_time_json(*phase_time) : nlohmann::json()}});
    }
    print_json(out);
  } else {
    print_text(plan, course, loaded, memory);
    const Palette color = palette_for(STDOUT_FILENO);
    for (const std::string& line : data_lines(data)) fmt::print("{}data{} {}\n", color.bold, color.reset, line);
    for (const StartFinding& problem : found.problems) {
      const bool told = std::any_of(data.sources.begin(), data.sources.end(), [&](const SourceFacts& source) {
        return !source.problem.empty() && problem.message.ends_with(source.problem);
      });
      if (!told) fmt::print("  a start would be refused: {}\n", printable(problem.message, true));
    }
    for (const StartFinding& warning : found.warnings) fmt::print("  warning: {}\n", printable(warning.message, true));
    fmt::print("{}step time{} {}\n", color.bold, color.reset, time ? step_time_text(*time) : reckon.why_not());
    if (const Phases phases = phases_of(course); time && phases.shown.size() > 1) {
      for (const Phase& phase : phases.shown) {
        const std::optional<StepEstimate> phase_time = reckon(phase.plan);
        if (phase_time) fmt::print("  from step {}: {:.4g} ms\n", phase.stage.first_step, phase_time->cost.total());
      }
    }
    if (storage) {
      fmt::print("{}storage{} a checkpoint is saved in {:.3g} s and loaded in {:.3g} s by {} at {:.3g} GB/s each{}\n",
                 color.bold, color.reset, storage->save_s, storage->load_s, count_text(storage->hosts, "host"),
                 storage->gb_per_s, args.storage.empty() ? " (assumed; --storage says another)" : "");
    }
    if (fit && fit->fits) fmt::print("{}fits{} {}\n", color.bold, color.reset, fit->text);
    if (args.world == 0) fmt::print("the smallest world that fits; say --world N for another\n");
  }
  if (args.draw && !json) {
    winsize size{};
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    RT_TRY_SET(const std::string drawn,
               draw_schedule(plan.schedule(), known ? size.ws_col : 120, palette_for(STDOUT_FILENO)));
    fmt::print("{}", drawn);
  }
  if (fit && !fit->fits) {
    fmt::print(stderr, "{}: a rank does not fit: it takes {}{}\n", args.recipe.path, fit->text,
               args.force ? "" : "; cut it further, recompute, or go on all the same with --force");
  }
  return code;
}

}  // namespace

void add_plan(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("plan", "mesh, stages, bytes of a rank, batch, checkpoints and data; needs no machine");
  const auto args = std::make_shared<PlanArgs>();
  add_recipe_options(*command, args->recipe, &args->world);
  command->add_flag("--draw", args->draw, "also draw the pipeline's schedule as a timeline");
  command->add_option("--svg", args->svg, "write that timeline to this SVG file")->type_name("FILE");
  command->add_flag("--calibrate", args->calibrate,
                    "measure on this machine what the step time needs, some seconds, and keep it for later plans");
  command
      ->add_option("--machine", args->machine,
                   fmt::format("reckon the step time by a data sheet: {}", fmt::join(machine_names(), ", ")))
      ->type_name("NAME");
  command->add_flag(
      "--search", args->search,
      "find the fastest layouts for --world ranks of --machine, or of this host as --calibrate measured it, "
      "and why others lose");
  command->add_option("--pin", args->pins, "what the layouts of the search must have, as tp=8,pp=4,zero=1")
      ->type_name("NAME=VALUE,...");
  command->add_option("--memory", args->memory, "of a rank's device in the search (default: the machine's)")
      ->type_name("80GiB");
  command->add_option("--storage", args->storage, "what a host writes or reads a second, for saves, loads and offload")
      ->type_name("2GB/s");
  command->add_flag("--force", args->force, "exit 0 also where a rank does not fit --machine");
  add_json_flag(*command, session);
  command->footer(
      "Exit codes: 0 done, 1 --search: no layout fits, 2 refused: each mistake is reported; or a rank does not fit "
      "--machine.\n"
      "Examples:\n"
      "  cairn plan recipes/mine.lua --world 8 --draw\n"
      "  cairn plan recipes/mine.lua --world 8 --calibrate\n"
      "  cairn plan recipes/mine.lua --world 1024 --machine h100-80 --storage 5GB/s\n"
      "  cairn plan recipes/mine.lua --world 1024 --search --machine h100-80 --pin tp=8,zero=1");
  command->callback([args, &session] { session.action = [args, &session] { return show_plan(*args, session.json); }; });
}

}  // namespace cairn::tools
