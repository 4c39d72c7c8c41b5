#include "tools/planner/search.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <tuple>

#include "runtime/core/count_text.h"
#include "runtime/core/units.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::tools {
namespace {

constexpr size_t kShown = 3;  // of the layouts that would be faster and do not fit

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> out;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) out.push_back(d);
  }
  return out;
}

/// A schedule and its stages a rank.
struct Pipeline {
  PipelineKind kind;
  int64_t virtual_stages;
};

std::vector<Pipeline> pipelines(const Recipe& recipe, int64_t pp, int64_t micro_batches, const Pins& pins) {
  std::vector<Pipeline> out = {{PipelineKind::k1F1B, 1}};
  if (pins.schedule == PipelineKind::kGpipe) out.push_back({PipelineKind::kGpipe, 1});
  if (pp == 1) return out;
  std::vector<int64_t> stages = {2, 3, 4, 6};
  if (pins.virtual_stages && *pins.virtual_stages > 1) stages = {*pins.virtual_stages};
  for (const int64_t v : stages) {
    if (recipe.model.layers % (pp * v) == 0 && micro_batches % pp == 0) out.push_back({PipelineKind::kInterleaved, v});
  }
  if (recipe.deterministic == Deterministic::kLayout) return out;  // no schedule with a backward in two passes
  out.push_back({PipelineKind::kZbH1, 1});
  if (recipe.model.layers % (2 * pp) == 0) out.push_back({PipelineKind::kZbV, 2});
  return out;
}

/// What does not change where anything lies: each is a variant of the plan of the first.
std::vector<Layout> variants(const Recipe& recipe, const Layout& shape) {
  std::vector<Layout> out;
  const bool layout_free = recipe.deterministic == Deterministic::kLayout;
  const int most = splits_backward(shape.schedule) ? 1 : 3;
  for (int zero = layout_free && shape.dp > 1 ? 1 : 0; zero <= (shape.dp > 1 ? most : 0); ++zero) {
    for (const RecomputeMode mode : {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
      Layout one = shape;
      one.zero = zero;
      one.recompute = mode;
      out.push_back(one);
      const bool divides = shape.micro * recipe.model.context * recipe.model.width % shape.tp == 0;
      if (mode != RecomputeMode::kFull || shape.tp == 1 || shape.sequence_parallel || !divides) continue;
      one.distribute = true;
      out.push_back(one);
    }
  }
  return out;
}

/// Whether a phase or a stage of the run names the micro-batch: nothing is left to choose then.
bool names_micro(const std::vector<dsl::RunSegment>& segments) {
  return std::ranges::any_of(segments, [&](const dsl::RunSegment& segment) {
    const BatchConfig& batch = segment.recipe.batch;
    return batch.micro != segments.front().recipe.batch.micro ||
           std::ranges::any_of(batch.phases, [](const BatchPhase& phase) { return phase.micro > 0; });
  });
}

/// Micro-batches worth a look.
std::vector<int64_t> micro_batch_sizes(const std::vector<dsl::RunSegment>& segments, const Pins& pins) {
  if (names_micro(segments)) return {segments.front().recipe.batch.micro};
  if (pins.micro) return {*pins.micro};
  return {1, 2, 4, 8, 16, 32};
}

/// Meshes, micro-batches and schedules; ZeRO and recomputation are left to variants().
std::vector<Layout> shapes_of(const std::vector<dsl::RunSegment>& segments, int64_t world, int64_t node,
                              const Pins& pins) {
  const Recipe& recipe = segments.front().recipe;  // those that a later segment cannot train have no plan there
  const ModelConfig& m = recipe.model;
  std::vector<Layout> out;
  int64_t cuts = std::gcd(world, m.heads);  // all that tp must divide
  if (has_dense_layers(m)) cuts = std::gcd(cuts, m.ffn);
  if (m.moe.experts > 0) cuts = std::gcd(std::gcd(cuts, expert_ffn(m)), shared_ffn(m));
  for (const int64_t tp : divisors(cuts)) {
    if (m.kv_heads % tp != 0 && tp % m.kv_heads != 0) continue;
    if (tp > node && pins.tp != tp) continue;  // four collectives a layer do not cross nodes unless one asks for it
    for (const int64_t pp : divisors(world / tp)) {
      if (pp > m.layers) break;
      const MeshConfig& mesh = recipe.mesh;  // cp and ep stay as they are
      if (world / tp / pp % (mesh.cp * mesh.ep) != 0) continue;
      const int64_t dp = world / tp / pp / mesh.cp;
      for (const int64_t micro : micro_batch_sizes(segments, pins)) {
        const StepStage batch{.samples = recipe.batch.samples, .micro = micro};
        if (!recipe.batch.uneven && batch.samples % (micro * dp) != 0) continue;
        for (const Pipeline& pipeline : pipelines(recipe, pp, batch.micro_batches(dp), pins)) {
          for (const bool sp : {false, true}) {
            if (sp && (tp == 1 || micro * m.context / mesh.cp % tp != 0)) continue;
            const Layout shape = {.tp = tp,
                                  .dp = dp,
                                  .pp = pp,
                                  .virtual_stages = pipeline.virtual_stages,
                                  .micro = micro,
                                  .sequence_parallel = sp,
                                  .schedule = pipeline.kind};
            const std::vector<Layout> all = variants(recipe, shape);
            if (std::any_of(all.begin(), all.end(), [&](const Layout& one) { return pins.allow(one); })) {
              out.push_back(shape);
            }
          }
        }
      }
    }
  }
  return out;
}

/// Of a rank, without activations, if the stages were all alike: a lower bound that costs nothing.
int64_t least_rank_bytes(const Recipe& recipe, int64_t parameters, const Layout& layout) {
  const int64_t weight = recipe.precision == Precision::kF32 ? 4 : 2;
  const int64_t here = parameters / (layout.tp * layout.pp);
  const auto held = [&](int stage) { return here / (layout.zero >= stage ? layout.dp : 1); };
  return held(3) * weight + held(2) * 4 + held(1) * 4 * std::ssize(StateKinds(recipe.optimizer).arrays());
}

/// "96.6 GiB", or for a bound "at least 96.6 GiB".
std::string rank_text(const Candidate& c) {
  return fmt::format("{}{}", c.exact ? "" : "at least ", format_bytes(c.rank_bytes));
}

/// The part of the cost in which `candidate` loses most against `best`; within the model's error, that they are even.
std::string slower_text(const Candidate& candidate, const Candidate& best) {
  const CostPart* worst = nullptr;
  double most = 0;
  for (const CostPart& part : cost_parts()) {
    const double more = candidate.estimate.cost.*part.ms - best.estimate.cost.*part.ms;
    if (more > most) most = more, worst = &part;
  }
  const double slower = candidate.ms() / best.ms() - 1;
  if (worst == nullptr || slower < 5e-4) {
    return candidate.rank_bytes > best.rank_bytes
               ? fmt::format("as fast, and takes {} more", format_bytes(candidate.rank_bytes - best.rank_bytes))
               : "as fast by this model";
  }
  const std::string by = fmt::format("{} {:+.0f} ms", worst->name, most);
  return even(candidate.estimate, best.estimate) ? fmt::format("even: {:+.1f} %, {}", slower * 100, by)
                                                 : fmt::format("{:.1f} % slower: {}", slower * 100, by);
}

std::string_view mode_name(RecomputeMode mode) {
  return mode == RecomputeMode::kFull ? "full" : mode == RecomputeMode::kSelective ? "selective" : "none";
}

std::string recompute_text(const Layout& l) {
  return fmt::format("{}{}", mode_name(l.recompute), l.distribute ? ", distributed" : "");
}

/// Another variant of the plan's shape, in the same segment and batch phase.
void take_layout(Plan* plan, const Recipe& recipe, const Layout& layout) {
  const BatchConfig batch = plan->recipe.batch;
  const double rope_theta = plan->recipe.model.rope_theta;
  plan->recipe = with_layout(recipe, layout);
  plan->recipe.batch = batch;
  plan->recipe.model.rope_theta = rope_theta;
}

/// Plans that the variants of a shape share.
struct SharedPlans {
  std::vector<Plan> plans;  // of the run's segments, the last one in its last batch phase
  int64_t least = -1;       // bytes of the smallest variant; -1: not reckoned
};

/// Candidates with the plans that their shapes share.
struct Search {
  const std::vector<dsl::RunSegment>& segments;  // of the run, each with a step
  int64_t memory_bytes;
  std::vector<SharedPlans> shapes;
  std::vector<std::pair<size_t, Candidate>> all;  // with the index of the shape

  const Recipe& recipe() const { return segments.front().recipe; }

  /// Bytes of the fullest rank in any segment.
  int64_t exact_bytes(SharedPlans& shape, const Layout& layout) const {
    int64_t most = 0;
    for (size_t k = 0; k < shape.plans.size(); ++k) {
      take_layout(&shape.plans[k], segments[k].recipe, layout);
      most = std::max(most, largest_rank_bytes(shape.plans[k]));
    }
    return most;
  }

  /// Fills rank_bytes: exact, or a bound that is too much already.
  void reckon(size_t k) {
    auto& [index, candidate] = all[k];
    if (candidate.rank_bytes >= 0) return;
    SharedPlans& shape = shapes[index];
    int64_t bytes = least_rank_bytes(recipe(), shape.plans.back().parameters, candidate.layout);
    if (bytes <= memory_bytes && shape.least < 0)  // when the variant that holds least does not fit, none does
      shape.least = exact_bytes(shape, variants(recipe(), candidate.layout).back());
    if (bytes <= memory_bytes) bytes = std::max(bytes, shape.least);
    candidate.rank_bytes = bytes;
    if (bytes <= memory_bytes) settle(k);
  }

  /// Bytes of the smallest candidate, once all are reckoned: a bound gives way to a size until a size is least.
  int64_t smallest() {
    for (;;) {
      const auto least = std::ranges::min_element(
          all, {}, [](const auto& one) { return std::pair(one.second.rank_bytes, !one.second.exact); });
      if (least->second.exact) return least->second.rank_bytes;
      settle(static_cast<size_t>(least - all.begin()));
    }
  }

  /// Fills rank_bytes exactly.
  void settle(size_t k) {
    auto& [index, candidate] = all[k];
    if (!candidate.exact) candidate.rank_bytes = exact_bytes(shapes[index], candidate.layout);
    candidate.exact = true;
  }
};

/// The axes that a person would ask about.
struct Axis {
  const char* name;
  bool (*same)(const Layout&, const Layout&);  // but for this axis, and what follows from it
  std::string (*value)(const Layout&);
};

const std::vector<Axis>& axes() {
  using L = const Layout&;
  const auto pipeline = [](L a, L b) { return a.schedule == b.schedule && a.virtual_stages == b.virtual_stages; };
  static const auto same_pipeline = pipeline;
  static const auto same_recompute = [](L a, L b) {
    return a.recompute == b.recompute && a.distribute == b.distribute;
  };
  static const std::vector<Axis> out = {
      {"tp",
       [](L a, L b) {
         return a.pp == b.pp && a.micro == b.micro && a.zero == b.zero && same_pipeline(a, b) && same_recompute(a, b);
       },
       [](L l) { return fmt::format("{}{}", l.tp, l.sequence_parallel ? " with sequence parallel" : ""); }},
      {"pp",
       [](L a, L b) {
         return a.pp != b.pp && a.tp == b.tp && a.sequence_parallel == b.sequence_parallel && a.micro == b.micro &&
                a.zero == b.zero && same_recompute(a, b);
       },
       [](L l) {
         return fmt::format(
             "{}{}", l.pp,
             l.pp == 1
                 ? std::string()
                 : fmt::format(", {}{}", schedule_name(l.schedule),
                               l.schedule == PipelineKind::kInterleaved ? fmt::format(" {}", l.virtual_stages) : ""));
       }},
      {"schedule",
       [](L a, L b) {
         return a.tp == b.tp && a.pp == b.pp && a.sequence_parallel == b.sequence_parallel && a.micro == b.micro &&
                a.zero == b.zero && same_recompute(a, b);
       },
       [](L l) {
         return fmt::format("{}{}", schedule_name(l.schedule),
                            l.schedule == PipelineKind::kInterleaved ? fmt::format(" {}", l.virtual_stages) : "");
       }},
      {"micro",
       [](L a, L b) {
         return a.tp == b.tp && a.pp == b.pp && a.sequence_parallel == b.sequence_parallel && a.zero == b.zero &&
                same_pipeline(a, b) && same_recompute(a, b);
       },
       [](L l) { return fmt::format("{}", l.micro); }},
      {"ZeRO",
       [](L a, L b) {
         return a.tp == b.tp && a.pp == b.pp && a.sequence_parallel == b.sequence_parallel && a.micro == b.micro &&
                same_pipeline(a, b) && same_recompute(a, b);
       },
       [](L l) { return fmt::format("{}", l.zero); }},
      {"recompute",
       [](L a, L b) {
         return a.tp == b.tp && a.pp == b.pp && a.sequence_parallel == b.sequence_parallel && a.micro == b.micro &&
                a.zero == b.zero && same_pipeline(a, b);
       },
       [](L l) { return recompute_text(l); }},
  };
  return out;
}

/// Of each axis the best other value, with everything else as in the choice: why it is not taken.
std::vector<std::string> reasons_for(Search& search, const Candidate& choice) {
  std::vector<std::string> out;
  for (const Axis& axis : axes()) {
    const std::string mine = axis.value(choice.layout);
    for (size_t k = 0; k < search.all.size(); ++k) {  // fastest first
      const Layout& other = search.all[k].second.layout;
      if (!axis.same(other, choice.layout) || axis.value(other) == mine) continue;
      search.settle(k);
      const Candidate& candidate = search.all[k].second;
      const double slower = candidate.ms() / choice.ms() - 1;
      out.push_back(fmt::format("{} {} instead of {}: {}", axis.name, axis.value(other), mine,
                                candidate.rank_bytes > search.memory_bytes
                                    ? fmt::format("{:.1f} % {}, and takes {} a rank: too much", std::abs(slower) * 100,
                                                  slower < 0 ? "faster" : "slower", format_bytes(candidate.rank_bytes))
                                    : slower_text(candidate, choice)));
      break;
    }
  }
  return out;
}

/// The plans of a shape, one for each segment.
Result<std::vector<Plan>> plans_of(const std::vector<dsl::RunSegment>& segments, const Layout& layout, int64_t world) {
  std::vector<Plan> out;
  for (const dsl::RunSegment& segment : segments) {
    Recipe recipe = with_layout(segment.recipe, layout);
    if (names_micro(segments)) recipe.batch.micro = segment.recipe.batch.micro;
    RT_TRY_SET(Plan plan, make_plan(recipe, world, segment.past));
    plan.end_step = segment.end.step;
    out.push_back(std::move(plan));
  }
  out.back() = in_last_phase(out.back());
  return out;
}

}  // namespace

bool Pins::allow(const Layout& l) const {
  const auto free = [](const auto& pin, const auto& value) { return !pin || *pin == value; };
  return free(tp, l.tp) && free(pp, l.pp) && free(dp, l.dp) && free(virtual_stages, l.virtual_stages) &&
         free(micro, l.micro) && free(zero, l.zero) && free(sequence_parallel, l.sequence_parallel) &&
         free(distribute, l.distribute) && free(schedule, l.schedule) && free(recompute, l.recompute);
}

Result<Pins> parse_pins(std::string_view text) {
  Pins out{.text = std::string(text)};
  const auto refused = [&](std::string_view pair, std::string_view expected) {
    return Error{ErrorCode::kInvalidInput, fmt::format("--pin {}: `{}`: expected {}", text, pair, expected)};
  };
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    if (equals == std::string_view::npos) return refused(pair, "NAME=VALUE, as tp=8,pp=4");
    const std::string name(pair.substr(0, equals)), value(pair.substr(equals + 1));
    int64_t number = -1;
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
    const bool is_number = problem == std::errc() && end == value.data() + value.size();
    const bool yes = value == "true", no = value == "false";
    const std::pair<const char*, std::optional<int64_t> Pins::*> numbers[] = {
        {"tp", &Pins::tp},
        {"pp", &Pins::pp},
        {"dp", &Pins::dp},
        {"micro", &Pins::micro},
        {"virtual_stages", &Pins::virtual_stages}};
    const auto* found =
        std::find_if(std::begin(numbers), std::end(numbers), [&](const auto& one) { return name == one.first; });
    if (found != std::end(numbers)) {
      if (!is_number || number < 1) return refused(pair, "a number from 1");
      out.*found->second = number;
    } else if (name == "zero") {
      if (!is_number || number < 0 || number > 3) return refused(pair, "0, 1, 2 or 3");
      out.zero = static_cast<int>(number);
    } else if (name == "sequence_parallel" || name == "distribute") {
      if (!yes && !no) return refused(pair, "true or false");
      (name == "distribute" ? out.distribute : out.sequence_parallel) = yes;
    } else if (name == "schedule") {
      for (const PipelineKind kind : {PipelineKind::kGpipe, PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                      PipelineKind::kZbH1, PipelineKind::kZbV}) {
        if (schedule_name(kind) == value) out.schedule = kind;
      }
      if (!out.schedule) return refused(pair, "gpipe, 1f1b, interleaved, zb-h1 or zb-v");
    } else if (name == "recompute") {
      for (const RecomputeMode mode : {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
        if (mode_name(mode) == value) out.recompute = mode;
      }
      if (!out.recompute) return refused(pair, "none, selective or full");
    } else {
      return refused(pair,
                     "tp, pp, dp, micro, virtual_stages, zero, schedule, recompute, sequence_parallel or "
                     "distribute; cp, ep and all else are the recipe's (--set)");
    }
  }
  return out;
}

Recipe with_layout(const Recipe& recipe, const Layout& layout) {
  Recipe out = recipe;
  out.mesh.tp = layout.tp;
  out.mesh.dp = layout.dp;
  out.mesh.pp = layout.pp;
  out.mesh.virtual_stages = layout.virtual_stages;
  out.mesh.sequence_parallel = layout.sequence_parallel;
  out.mesh.stages.clear();
  out.mesh.micro_batch_group = 0;
  if (layout.zero == 0) out.mesh.shard = 0;
  out.schedule = layout.schedule;
  out.batch.micro = layout.micro;
  out.optimizer.zero = layout.zero;
  if (layout.zero < 3) out.optimizer.keep_after_forward = false;
  out.recompute = {.mode = layout.recompute, .distribute = layout.distribute};
  return out;
}

std::string layout_text(const Layout& l) {
  std::string schedule;
  if (l.schedule == PipelineKind::kInterleaved) {
    schedule = fmt::format(", interleaved {}", l.virtual_stages);
  } else if (l.schedule != PipelineKind::k1F1B) {
    schedule = fmt::format(", {}", schedule_name(l.schedule));
  }
  return fmt::format("tp {}, pp {}, dp {}, micro {}{}{}{}{}", l.tp, l.pp, l.dp, l.micro,
                     l.sequence_parallel ? ", sequence parallel" : "",
                     l.zero > 0 ? fmt::format(", ZeRO-{}", l.zero) : "", schedule,
                     l.recompute == RecomputeMode::kNone ? "" : ", recompute " + recompute_text(l));
}

Result<SearchResult> search_layouts(const Recipe& whole, int64_t world, const Machine& machine, const Pins& pins,
                                    size_t wanted) {
  RT_TRY_SET(std::vector<dsl::RunSegment> segments, dsl::segments_ahead(whole));
  while (segments.size() > 1 && segments.back().begin.step == segments.back().end.step) segments.pop_back();
  const Recipe& recipe = segments.front().recipe;
  SearchResult out;
  const int64_t memory_bytes = machine.usable_bytes();
  Search search{.segments = segments, .memory_bytes = memory_bytes};
  std::vector<std::pair<size_t, Candidate>>& all = search.all;
  Status refused;
  for (const Layout& shape : shapes_of(segments, world, machine.node_devices, pins)) {
    std::vector<Layout> layouts = variants(recipe, shape);
    const int64_t shard = recipe.mesh.shard, replicas = shape.dp * recipe.mesh.cp;
    std::erase_if(layouts, [&](const Layout& layout) {
      return !pins.allow(layout) || (layout.zero > 0 && shard > 0 && replicas % shard != 0);
    });
    if (layouts.empty()) continue;
    Result<std::vector<Plan>> made = plans_of(segments, layouts.front(), world);
    if (!made.ok()) {
      refused = std::move(made).error();
      continue;
    }
    SharedPlans shared{.plans = std::move(made).value()};
    Plan& plan = shared.plans.back();
    const double bubble = bubble_fraction(plan.schedule());
    std::optional<Placement> placed[2];  // without and with shard groups
    for (const Layout& layout : layouts) {
      take_layout(&plan, segments.back().recipe, layout);
      std::optional<Placement>& placement = placed[layout.zero > 0 ? 1 : 0];
      if (!placement) placement = place_groups(plan, machine.node_devices);
      all.push_back({search.shapes.size(),
                     {.layout = layout,
                      .estimate = estimate(plan, machine, *placement),
                      .micro_batches = plan.micro_batches,
                      .bubble = bubble}});
    }
    search.shapes.push_back(std::move(shared));
  }
  if (all.empty()) {
    const std::string pinned = pins.text.empty() ? "" : fmt::format("--pin {}: ", pins.text);
    if (!refused.ok()) return std::move(refused).error().with(pinned + "no layout can run");
    std::set<int64_t> tp, pp, dp, micro;
    for (const Layout& layout : shapes_of(segments, world, machine.node_devices, {})) {
      tp.insert(layout.tp), pp.insert(layout.pp), dp.insert(layout.dp), micro.insert(layout.micro);
    }
    if (!tp.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}no layout of {} has all of that; there are, not in every mixture, tp {}; pp {}; dp "
                               "{}; micro {}; ZeRO from dp 2 on, and up to 1 with zb-h1 and zb-v",
                               pinned, count_text(world, "rank"), fmt::join(tp, ", "), fmt::join(pp, ", "),
                               fmt::join(dp, ", "), fmt::join(micro, ", "))};
    }
    return Error{
        ErrorCode::kInvalidInput,
        pinned + fmt::format("no layout of {} cuts batch.samples = {}, model.layers = {} and model.heads = {}; a "
                             "world that shares factors with them has some",
                             count_text(world, "rank"), recipe.batch.samples, recipe.model.layers, recipe.model.heads)};
  }
  out.layouts = static_cast<int64_t>(all.size());
  const auto faster = [](const auto& a, const auto& b) { return a.second.ms() < b.second.ms(); };
  std::stable_sort(all.begin(), all.end(), faster);
  std::vector<size_t> too_large;
  for (size_t k = 0; k < all.size() && out.fitting.size() < wanted; ++k) {
    search.reckon(k);
    const Candidate& candidate = all[k].second;
    if (candidate.rank_bytes <= memory_bytes) {
      out.fitting.push_back(candidate);
    } else if (out.fitting.empty()) {
      too_large.push_back(k);
    }
  }
  for (size_t i = 0; i < too_large.size(); ++i) {
    if (i < kShown) search.settle(too_large[i]);
    Candidate& candidate = all[too_large[i]].second;
    candidate.loses = fmt::format("memory: {} of {} a rank", rank_text(candidate), format_bytes(memory_bytes));
    out.too_large.push_back(candidate);
  }
  for (size_t i = 1; i < out.fitting.size(); ++i) out.fitting[i].loses = slower_text(out.fitting[i], out.fitting[0]);
  if (out.fitting.empty()) out.least_bytes = search.smallest();
  if (!out.fitting.empty()) {
    out.reasons = reasons_for(search, out.fitting.front());
  }
  return out;
}

std::string search_text(const Recipe& recipe, const SearchResult& found, int64_t world, const Machine& machine) {
  std::string out = fmt::format(
      "{} on {} x {} with {} each{}: {}, by {}, times within {:.0f} %\n", recipe.name, world, machine.name,
      format_bytes(machine.memory_bytes),
      machine.reserve_bytes > 0 ? fmt::format(", {} of them kept free", format_bytes(machine.reserve_bytes)) : "",
      count_text(found.layouts, "layout"), machine.source, machine.error * 100);
  if (found.fitting.empty()) {
    return out + fmt::format(
                     "none fits: the smallest rank of any layout takes {}; use more ranks, a smaller batch.micro or "
                     "a shorter model.context\n",
                     format_bytes(found.least_bytes));
  }
  const auto row = [&](const Candidate& c) {
    out += fmt::format("  {:<92}{:>9.0f} ms{:>9.1f} %{:>11}  {}\n", layout_text(c.layout), c.ms(),
                       100 * c.estimate.cost.bubble_ms / c.ms(), rank_text(c), c.loses);
  };
  out += fmt::format("  {:<92}{:>12}{:>11}{:>11}  {}\n", "layout", "step", "bubble", "rank", "against the choice");
  row(found.fitting.front());
  for (size_t i = 1; i < found.fitting.size(); ++i) row(found.fitting[i]);
  for (size_t i = 0; i < std::min(kShown, found.too_large.size()); ++i) row(found.too_large[i]);
  if (found.too_large.size() > kShown) {
    out += fmt::format("  and {} more that would be faster and do not fit\n", found.too_large.size() - kShown);
  }
  const Candidate& best = found.fitting.front();
  out += "the choice, by part:";
  for (const CostPart& part : cost_parts()) {
    const double ms = best.estimate.cost.*part.ms;
    if (ms > 0) out += fmt::format(" {} {:.0f} ms", part.name, ms);
  }
  out += fmt::format("; {}; MFU {:.0f} %; {}\n", count_text(best.micro_batches, "micro-batch"),
                     best.estimate.utilisation * 100, best.estimate.assumes);
  for (const std::string& reason : found.reasons) out += "  " + reason + "\n";
  const Layout& l = best.layout;
  std::string more = l.distribute ? " --set recompute.distribute=true" : "";
  if (recipe.recompute.layers > 0) more += " --set recompute.layers=0";
  if (l.zero == 0 && recipe.mesh.shard > 0) more += " --set mesh.shard=0";
  if (l.zero < 3 && recipe.optimizer.keep_after_forward) more += " --set optimizer.keep_after_forward=false";
  if (recipe.mesh.micro_batch_group > 0) more += " --set mesh.micro_batch_group=0";
  if (!recipe.mesh.stages.empty()) more += "   (and without mesh.stages)";
  out += fmt::format(
      "  --set mesh.tp={} --set mesh.pp={} --set mesh.dp={} --set mesh.virtual_stages={} --set "
      "mesh.sequence_parallel={} --set schedule={} --set batch.micro={} --set optimizer.zero={} --set "
      "recompute.mode={}{}\n",
      l.tp, l.pp, l.dp, l.virtual_stages, l.sequence_parallel, schedule_name(l.schedule), l.micro, l.zero,
      mode_name(l.recompute), more);
  return out;
}

nlohmann::json search_json(const SearchResult& found, const Machine& machine) {
  const auto one = [](const Candidate& c) {
    nlohmann::json parts = nlohmann::json::object();
    for (const CostPart& part : cost_parts()) parts[part.name] = c.estimate.cost.*part.ms;
    return nlohmann::json{{"tp", c.layout.tp},
                          {"pp", c.layout.pp},
                          {"dp", c.layout.dp},
                          {"virtual_stages", c.layout.virtual_stages},
                          {"micro", c.layout.micro},
                          {"zero", c.layout.zero},
                          {"sequence_parallel", c.layout.sequence_parallel},
                          {"schedule", schedule_name(c.layout.schedule)},
                          {"recompute", mode_name(c.layout.recompute)},
                          {"distribute", c.layout.distribute},
                          {"micro_batches", c.micro_batches},
                          {"bubble", c.bubble},
                          {c.exact ? "rank_bytes" : "rank_bytes_at_least", c.rank_bytes},
                          {"step_ms", c.ms()},
                          {"low_ms", c.estimate.low_ms()},
                          {"high_ms", c.estimate.high_ms()},
                          {"mfu", c.estimate.utilisation},
                          {"parts_ms", std::move(parts)},
                          {"loses", c.loses}};
  };
  nlohmann::json fitting = nlohmann::json::array(), large = nlohmann::json::array();
  for (const Candidate& c : found.fitting) fitting.push_back(one(c));
  for (const Candidate& c : found.too_large) large.push_back(one(c));
  return {{"layouts", found.layouts},
          {"machine",
           {{"name", machine.name},
            {"source", machine.source},
            {"memory_bytes", machine.memory_bytes},
            {"reserve_bytes", machine.reserve_bytes},
            {"error", machine.error}}},
          {"reasons", found.reasons},
          {"fitting", std::move(fitting)},
          {"too_large", std::move(large)}};
}

}  // namespace cairn::tools
