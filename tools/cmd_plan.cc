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

#include "ckpt/retention/policy.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/snapshot/slot_rule.h"
#include "dsl/dsl.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/plan.h"
#include "tools/calibration.h"
#include "tools/commands.h"
#include "tools/plan_cost.h"
#include "tools/plan_draw.h"
#include "tools/plan_search.h"
#include "tools/start_check.h"

namespace cairn::tools {
namespace {

constexpr size_t kMaxRows = 8;  // of the memory table; more stages than that are told as ranges

struct PlanArgs {
  RecipeArgs recipe;
  int64_t world = 0;
  bool draw = false;
  std::string svg;  // file to write
  bool calibrate = false, search = false;
  std::string machine;  // of a data sheet
  std::string memory;   // of a rank, for the search
};

/// What one rank of a stage holds; all ranks of a stage allocate the same.
struct StageMemory {
  std::vector<Chunk> chunks;
  int64_t parameters = 0;
  int64_t weight_bytes = 0, gathered_bytes = 0, grad_bytes = 0, optimizer_bytes = 0, activation_bytes = 0;
  int64_t snapshot_bytes = 0;         // of one snapshot of its share, in shared memory
  std::vector<GroupTraffic> traffic;  // what it puts in, a step
  int64_t total() const { return weight_bytes + gathered_bytes + grad_bytes + optimizer_bytes + activation_bytes; }
  /// Equal but for the activations, which shrink towards the last stage with the micro-batches in flight.
  bool same_weights(const StageMemory& other) const {
    return layers() == other.layers() && parameters == other.parameters;
  }
  bool same_size(const StageMemory& other) const {
    return same_weights(other) && in_flight() == other.in_flight() && total() == other.total();
  }
  int64_t layers() const {
    int64_t sum = 0;
    for (const Chunk& chunk : chunks) sum += chunk.stage.end_layer - chunk.stage.first_layer;
    return sum;
  }
  int64_t in_flight() const {  // of all chunks
    int64_t sum = 0;
    for (const Chunk& chunk : chunks) sum += chunk.in_flight;
    return sum;
  }
};

std::vector<StageMemory> stage_memory(const Plan& plan) {
  std::vector<StageMemory> out;
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
    const RankPlan rank = plan.rank(plan.mesh.rank({.tp = 0, .dp = 0, .pp = pp}));
    StageMemory memory{
        .chunks = rank.chunks,
        .weight_bytes = rank.weight_bytes,
        .gathered_bytes = rank.gathered_bytes,
        .grad_bytes = rank.grad_bytes,
        .optimizer_bytes = rank.optimizer_bytes - (plan.recipe.optimizer.offload.empty() ? 0 : rank.bank_bytes()),
        .activation_bytes = largest_stage_buffers_bytes(plan, rank.rank),
        .traffic = step_traffic(plan, rank)};
    for (const LocalTensor& tensor : rank.tensors) memory.parameters += tensor.box.count_elems();
    memory.snapshot_bytes = rank.bank_bytes();
    out.push_back(memory);
  }
  return out;
}

int64_t banks_of(const Recipe& recipe) { return ckpt::banks_for(recipe.checkpoint.in_flight); }

/// Banks hold copies of state that is in each rank's own memory besides.
bool copies(const Plan& plan) { return plan.recipe.checkpoint.snapshot_by == SnapshotBy::kCopy; }

/// Of all ranks: the banks of what they save, unless they lie on a disk, and their weights, unless those are private.
int64_t shared_bytes(const Plan& plan, const std::vector<StageMemory>& memory) {
  int64_t out = plan.recipe.optimizer.offload.empty() ? banks_of(plan.recipe) * plan.checkpoint_bytes : 0;
  if (copies(plan)) return out;
  for (const StageMemory& m : memory) out += m.weight_bytes * plan.mesh.tp() * plan.mesh.replicas();
  return out;
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
  std::string out = config.layers > 0 ? fmt::format("the first {} layers of each stage", config.layers) : "every layer";
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
  return out + fmt::format(" at once and {} being written = {}{}", config.in_flight,
                           kept.at_most == kept.at_least ? "" : "from ",
                           format_bytes((kept.at_least + config.in_flight) * checkpoint_bytes));
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
    out += fmt::format("{}{} {} in {} call{}", out.empty() ? "" : "; ", op, format_bytes(volume.bytes), volume.calls,
                       volume.calls == 1 ? "" : "s");
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

void print_text(const Plan& plan, const dsl::LoadedRecipe& loaded, const std::vector<StageMemory>& memory) {
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
  fmt::print("{} {} = micro {} x accumulate {} x dp {}     {} tokens a step; {} tokens in {} steps\n", head("batch"),
             recipe.batch.samples, recipe.batch.micro, plan.micro_batches, mesh.dp(), format_count(tokens),
             format_count(static_cast<double>(samples_after(plan.step_stages, plan.steps) * recipe.model.context)),
             plan.steps);
  if (plan.step_stages.size() > 1) {
    constexpr size_t kShown = 8;
    for (size_t k = 0; k < plan.step_stages.size(); ++k) {
      const StepStage& s = plan.step_stages[k];
      if (k >= kShown && k + 1 < plan.step_stages.size()) continue;
      fmt::print("  from step {}: {} samples = micro {} x accumulate {} x dp {}, sequences of {} tokens{}{}\n",
                 s.first_step, s.samples, s.micro, s.samples / (s.micro * mesh.dp()), mesh.dp(), s.tokens,
                 recipe.model.positions == Positions::kRotary ? fmt::format(", rope theta {}", s.rope_theta) : "",
                 k == kShown - 1 && k + 2 < plan.step_stages.size()
                     ? fmt::format("; {} more stages, then", plan.step_stages.size() - kShown - 1)
                     : "");
    }
  }
  fmt::print("{} {}     {}; bubble at {} micro-batches: {:.1f}%\n", head("stages"), stages_text(plan),
             schedule_text(plan), plan.micro_batches, bubble_fraction(plan.schedule()) * 100);
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
    fmt::print("  {:<9}{:>12}{:>12}{:>12}{:>14}{:>{}}{:>12}{:>{}}\n",
               range_text(i, end - 1, [](size_t n) { return n; }), format_count(static_cast<double>(m.parameters)),
               format_bytes(m.weight_bytes + m.gathered_bytes), format_bytes(m.grad_bytes),
               format_bytes(m.optimizer_bytes), range_text(m.activation_bytes, last.activation_bytes, format_bytes),
               wide, range_text(m.in_flight(), last.in_flight(), [](int64_t n) { return n; }),
               range_text(m.total(), last.total(), format_bytes), wide);
    i = end;
  }

  print_traffic(memory, head);

  const ckpt::KeptAtOnce kept = ckpt::kept_at_once(recipe.checkpoint, plan.steps);
  fmt::print("{} {} (fp32 weights{} and {}), {}; {}\n", head("checkpoint"), format_bytes(plan.checkpoint_bytes),
             recipe.optimizer.ema > 0 ? ", their average" : "", moments_text(plan.state_kinds()),
             every_text(recipe.checkpoint), kept_text(recipe.checkpoint, kept, plan.checkpoint_bytes));
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
    fmt::print("{} {} copies x {} = {} over all hosts, up to {} for a rank, besides what stands above; {}, copied\n",
               head("shared memory"), banks, format_bytes(plan.checkpoint_bytes),
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

nlohmann::json to_json(const Plan& plan, const dsl::LoadedRecipe& loaded, const std::vector<StageMemory>& memory) {
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
                      {"rank_activation_bytes", m.activation_bytes},
                      {"rank_bytes", m.total()},
                      {"rank_snapshot_bytes", m.snapshot_bytes},
                      {"rank_traffic", traffic_json(m.traffic)}});
  }
  nlohmann::json save = nlohmann::json::array();
  for (const Every& every : recipe.checkpoint.save)
    save.push_back({{"steps", every.steps}, {"seconds", every.seconds}});
  nlohmann::json keep = nlohmann::json::array();
  for (const Keep& rule : recipe.checkpoint.keep) keep.push_back(ckpt::to_text(rule));
  const ckpt::KeptAtOnce kept = ckpt::kept_at_once(recipe.checkpoint, plan.steps);
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
      {"recompute",
       {{"mode", recipe.recompute.mode == RecomputeMode::kFull        ? "full"
                 : recipe.recompute.mode == RecomputeMode::kSelective ? "selective"
                                                                      : "none"},
        {"layers", recipe.recompute.layers},
        {"distribute", recipe.recompute.distribute}}},
      {"tokens_per_step", plan.tokens_per_step},
      {"steps", plan.steps},
      {"flops_per_token", plan.flops_per_token()},
      {"stages", std::move(stages)},
      {"checkpoint",
       {{"bytes", plan.checkpoint_bytes},
        {"save", std::move(save)},
        {"keep", std::move(keep)},
        {"kept_at_least", kept.at_least},
        {"kept_at_most", kept.at_most < 0 ? nlohmann::json() : nlohmann::json(kept.at_most)},
        {"disk_bytes", (kept.at_least + recipe.checkpoint.in_flight) * plan.checkpoint_bytes}}},
      {"shared_memory",
       {{"folder", recipe.optimizer.offload.empty() ? ckpt::kSharedMemory : recipe.optimizer.offload},
        {"banks", banks_of(recipe)},
        {"bytes", shared_bytes(plan, memory)},
        {"snapshot_steps", recipe.checkpoint.snapshot_steps}}}};
}

/// What a step takes: on the machine of --machine by its data sheet, else on this one as it was measured.
struct StepTime {
  std::optional<StepCost> cost;
  std::string source;  // of the cost, or why there is none
};

Result<StepTime> step_time(const Plan& plan, const PlanArgs& args) {
  if (!args.machine.empty()) {
    RT_TRY_SET(const Machine machine, find_machine(args.machine));
    return StepTime{data_sheet_cost(plan, machine), fmt::format("by the data sheet of {}", machine.name)};
  }
  RT_TRY_SET(std::optional<Calibration> calibration, load_calibration());
  if (args.calibrate) {
    if (!calibration) calibration.emplace();
    RT_TRY(calibrate(plan, &*calibration));
    RT_TRY(save_calibration(*calibration));
    fmt::print(stderr, "measured, and kept in {}\n", calibration_path().string());
  }
  if (!calibration) return StepTime{std::nullopt, "this machine is not measured; --calibrate does"};
  std::optional<StepCost> cost = calibrated_cost(plan, *calibration);
  if (!cost) return StepTime{std::nullopt, "these shapes are not measured here; --calibrate does"};
  return StepTime{cost,
                  fmt::format("on this machine ({}, {} cores) as measured", calibration->cpu, calibration->cores)};
}

std::string step_time_text(const StepTime& time) {
  if (!time.cost) return time.source;
  std::string out = fmt::format("{:.4g} ms {}:", time.cost->total(), time.source);
  for (const CostPart& part : cost_parts()) {
    if ((*time.cost).*part.ms > 0) out += fmt::format(" {} {:.3g}", part.name, (*time.cost).*part.ms);
  }
  return out;
}

Result<int> show_search(const Recipe& recipe, int64_t world, const PlanArgs& args, bool json) {
  RT_TRY_SET(Machine machine, find_machine(args.machine.empty() ? "a100-80" : args.machine));
  int64_t memory = machine.memory_bytes;
  if (!args.memory.empty()) {
    RT_TRY_SET(memory, parse_bytes(args.memory));
  }
  constexpr size_t kWanted = 5;
  RT_TRY_SET(const SearchResult found, search_layouts(recipe, world, memory, machine, kWanted));
  if (json) {
    print_json(search_json(found));
  } else {
    fmt::print("{}", search_text(recipe, found, world, memory, machine));
  }
  return found.fitting.empty() ? 1 : 0;
}

/// A flag that would be passed over is a mistake.
Status refuse_useless(const PlanArgs& args) {
  const auto invalid = [](std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; };
  if (!args.search && !args.memory.empty()) return invalid("--memory is for --search");
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
  Result<Plan> plan = make_plan(loaded.recipe, world);
  if (!plan.ok()) return std::move(plan).error().with(args.recipe.path);
  const std::vector<StageMemory> memory = stage_memory(plan.value());
  RT_TRY_SET(const StepTime time, step_time(plan.value(), args));
  if (!args.svg.empty()) {
    RT_TRY_SET(const std::string svg,
               schedule_svg(plan.value().schedule(),
                            fmt::format("{}: {}, {} micro-batches on {} pipeline ranks", loaded.recipe.name,
                                        schedule_text(plan.value()), plan.value().micro_batches, mesh.pp)));
    errno = 0;
    std::ofstream file(args.svg, std::ios::binary | std::ios::trunc);
    file << svg;
    if (!file.flush()) return os_error(errno != 0 ? errno : EIO, args.svg);
  }
  StartReport found;
  const DataFacts data = check_data(loaded.recipe, plan.value(), 0, found);
  if (json) {
    nlohmann::json out = to_json(plan.value(), loaded, memory);
    out["data"] = data_json(data);
    const nlohmann::json findings = start_json(found, loaded);
    out["data"]["problems"] = findings["diagnostics"];
    out["data"]["warnings"] = findings["warnings"];
    if (time.cost) {
      nlohmann::json parts = nlohmann::json::object();
      for (const CostPart& part : cost_parts()) parts[part.name] = (*time.cost).*part.ms;
      out["step_time"] = {{"ms", time.cost->total()}, {"source", time.source}, {"parts_ms", std::move(parts)}};
    }
    print_json(out);
  } else {
    print_text(plan.value(), loaded, memory);
    const Palette color = palette_for(STDOUT_FILENO);
    for (const std::string& line : data_lines(data)) fmt::print("{}data{} {}\n", color.bold, color.reset, line);
    for (const StartFinding& problem : found.problems) {
      const bool told = std::any_of(data.sources.begin(), data.sources.end(), [&](const SourceFacts& source) {
        return !source.problem.empty() && problem.message.ends_with(source.problem);
      });
      if (!told) fmt::print("  a start would be refused: {}\n", printable(problem.message, true));
    }
    for (const StartFinding& warning : found.warnings) fmt::print("  warning: {}\n", printable(warning.message, true));
    fmt::print("{}step time{} {}\n", color.bold, color.reset, step_time_text(time));
    if (args.world == 0) fmt::print("the smallest world that fits; say --world N for another\n");
  }
  if (args.draw && !json) {
    winsize size{};
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    RT_TRY_SET(const std::string drawn,
               draw_schedule(plan.value().schedule(), known ? size.ws_col : 120, palette_for(STDOUT_FILENO)));
    fmt::print("{}", drawn);
  }
  return 0;
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
  command->add_flag("--search", args->search,
                    "find the fastest layouts for --world ranks of --machine (default a100-80), and why others lose");
  command->add_option("--memory", args->memory, "of a rank in the search (default: the machine's)")->type_name("80GiB");
  add_json_flag(*command, session);
  command->callback([args, &session] { session.action = [args, &session] { return show_plan(*args, session.json); }; });
}

}  // namespace cairn::tools
