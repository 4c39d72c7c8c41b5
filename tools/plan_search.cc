#include "tools/plan_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "runtime/plan/activations.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

constexpr size_t kLookedAt = 400;  // candidates whose memory is reckoned before the search gives up

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

std::vector<Pipeline> pipelines(const Recipe& recipe, int64_t pp, int64_t micro_batches) {
  std::vector<Pipeline> out = {{PipelineKind::k1F1B, 1}};
  if (pp == 1) return out;
  for (const int64_t v : {2, 3, 4, 6}) {
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

/// Meshes, micro-batches and schedules; ZeRO and recomputation are left to variants().
std::vector<Layout> shapes_of(const Recipe& recipe, int64_t world, int64_t node) {
  const ModelConfig& m = recipe.model;
  std::vector<Layout> out;
  for (const int64_t tp : divisors(std::gcd(world, std::gcd(m.heads, m.ffn)))) {
    if ((m.kv_heads % tp != 0 && tp % m.kv_heads != 0) || tp > node)
      continue;  // four collectives a layer do not cross nodes
    for (const int64_t pp : divisors(world / tp)) {
      if (pp > m.layers) break;
      const MeshConfig& mesh = recipe.mesh;  // cp and ep stay as they are
      if (world / tp / pp % (mesh.cp * mesh.ep) != 0) continue;
      const int64_t dp = world / tp / pp / mesh.cp;
      if (recipe.batch.samples % dp != 0) continue;
      for (const int64_t micro : {1, 2, 4, 8, 16, 32}) {
        if (recipe.batch.samples / dp % micro != 0) continue;
        for (const Pipeline& pipeline : pipelines(recipe, pp, recipe.batch.samples / dp / micro)) {
          for (const bool sp : {false, true}) {
            if (sp && (tp == 1 || micro * m.context / mesh.cp % tp != 0)) continue;
            out.push_back({.tp = tp,
                           .dp = dp,
                           .pp = pp,
                           .virtual_stages = pipeline.virtual_stages,
                           .micro = micro,
                           .sequence_parallel = sp,
                           .schedule = pipeline.kind});
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

/// The part of the cost in which `candidate` loses most against `best`.
std::string slower_text(const Candidate& candidate, const Candidate& best) {
  const CostPart* worst = nullptr;
  double most = 0;
  for (const CostPart& part : cost_parts()) {
    const double more = candidate.cost.*part.ms - best.cost.*part.ms;
    if (more > most) most = more, worst = &part;
  }
  const double slower = candidate.cost.total() / best.cost.total() - 1;
  if (worst == nullptr || slower < 5e-4) {
    return candidate.rank_bytes > best.rank_bytes
               ? fmt::format("as fast, and takes {} more", format_bytes(candidate.rank_bytes - best.rank_bytes))
               : "as fast by this model";
  }
  return fmt::format("{:.1f} % slower: {} {:+.0f} ms", slower * 100, worst->name, most);
}

std::string recompute_text(const Layout& l) {
  return l.recompute == RecomputeMode::kNone        ? "none"
         : l.recompute == RecomputeMode::kSelective ? "selective"
         : l.distribute                             ? "full, distributed"
                                                    : "full";
}

/// A candidate with the plan that its shape shares, made for it.
struct Search {
  const Recipe& recipe;
  int64_t world, memory_bytes;
  std::vector<Plan> plans;                        // of the shapes
  std::vector<std::pair<size_t, Candidate>> all;  // with the index of the shape
  std::vector<int64_t> least;                     // bytes of each shape's smallest variant; -1: not reckoned
  size_t looked = 0;

  Plan& plan_of(size_t k) {
    Plan& plan = plans[all[k].first];
    plan.recipe = with_layout(recipe, all[k].second.layout);
    return plan;
  }

  /// Fills rank_bytes: exact, or a bound that is too much already.
  void reckon(size_t k) {
    const auto& [shape, candidate] = all[k];
    if (candidate.rank_bytes >= 0) return;
    const Layout& layout = candidate.layout;
    int64_t bytes = least_rank_bytes(recipe, plans[shape].parameters, layout);
    if (bytes <= memory_bytes && least[shape] < 0) {  // the variant that holds least: when it does not fit, none does
      ++looked;
      plans[shape].recipe = with_layout(recipe, variants(recipe, layout).back());
      least[shape] = largest_rank_bytes(plans[shape]);
    }
    if (bytes <= memory_bytes) bytes = std::max(bytes, least[shape]);
    if (bytes <= memory_bytes) {
      ++looked;
      bytes = largest_rank_bytes(plan_of(k));
    }
    all[k].second.rank_bytes = bytes;
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
      search.reckon(k);
      const Candidate& candidate = search.all[k].second;
      const double slower = candidate.cost.total() / choice.cost.total() - 1;
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

}  // namespace

Result<int64_t> parse_bytes(std::string_view text) {
  constexpr std::pair<std::string_view, double> kUnits[] = {{"TiB", 1099511627776.0},
                                                            {"GiB", 1073741824.0},
                                                            {"MiB", 1048576.0},
                                                            {"KiB", 1024.0},
                                                            {"TB", 1e12},
                                                            {"GB", 1e9},
                                                            {"MB", 1e6},
                                                            {"kB", 1e3},
                                                            {"B", 1.0},
                                                            {"", 1.0}};
  const std::string copy(text);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  std::string_view unit(end);
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const auto& [name, bytes] : kUnits) {
    if (unit == name && end != copy.c_str() && value > 0 && value * bytes < 9e18) {
      return static_cast<int64_t>(value * bytes);
    }
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("{}: expected bytes, as 80GiB or 40GB", text)};
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

int64_t largest_rank_bytes(const Plan& plan) {
  int64_t most = 0;
  // Stages in the middle differ only in how many micro-batches they hold, which shrinks: the second stands for them,
  // and where stages are not equally long, all are looked at.
  std::vector<int64_t> stages = {0, std::min<int64_t>(1, plan.mesh.pp() - 1), plan.mesh.pp() - 1};
  if (plan.recipe.model.layers % (plan.mesh.pp() * plan.recipe.mesh.virtual_stages) != 0) {
    stages.resize(static_cast<size_t>(plan.mesh.pp()));
    std::iota(stages.begin(), stages.end(), 0);
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    if (i > 0 && stages[i] == stages[i - 1]) continue;
    const RankPlan rank = plan.rank(plan.mesh.rank({.tp = 0, .dp = 0, .pp = stages[i]}));
    const int64_t on_disk = plan.recipe.optimizer.offload.empty() ? 0 : rank.bank_bytes();
    most = std::max(most, rank.weight_bytes + rank.grad_bytes + rank.optimizer_bytes - on_disk +
                              stage_buffers_bytes(plan, rank) + plan.boundary_buffers_bytes());
  }
  return most;
}

Result<SearchResult> search_layouts(const Recipe& recipe, int64_t world, int64_t memory_bytes, const Machine& machine,
                                    size_t wanted) {
  SearchResult out;
  Search search{.recipe = recipe, .world = world, .memory_bytes = memory_bytes};
  std::vector<std::pair<size_t, Candidate>>& all = search.all;
  Status refused;
  for (const Layout& shape : shapes_of(recipe, world, machine.node_devices)) {
    const std::vector<Layout> layouts = variants(recipe, shape);
    Result<Plan> made = make_plan(with_layout(recipe, layouts.front()), world);
    if (!made.ok()) {
      refused = std::move(made).error();
      continue;
    }
    Plan plan = std::move(made).value();
    const double bubble = bubble_fraction(plan.schedule());
    for (const Layout& layout : layouts) {
      plan.recipe = with_layout(recipe, layout);
      all.push_back({search.plans.size(),
                     {.layout = layout,
                      .cost = data_sheet_cost(plan, machine),
                      .micro_batches = plan.micro_batches,
                      .bubble = bubble}});
    }
    search.plans.push_back(std::move(plan));
  }
  search.least.assign(search.plans.size(), -1);
  if (all.empty()) {
    if (!refused.ok()) return std::move(refused).error();
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("no layout of {} ranks cuts batch.samples = {}, model.layers = {} and model.heads = {}; a world "
                    "that shares factors with them has some",
                    world, recipe.batch.samples, recipe.model.layers, recipe.model.heads)};
  }
  out.layouts = static_cast<int64_t>(all.size());
  const auto faster = [](const auto& a, const auto& b) { return a.second.cost.total() < b.second.cost.total(); };
  std::stable_sort(all.begin(), all.end(), faster);
  for (size_t k = 0; k < all.size(); ++k) {
    if (out.fitting.size() >= wanted || search.looked > kLookedAt) break;
    search.reckon(k);
    Candidate& candidate = all[k].second;
    if (out.least_bytes < 0 || candidate.rank_bytes < out.least_bytes) out.least_bytes = candidate.rank_bytes;
    if (candidate.rank_bytes <= memory_bytes) {
      if (!out.fitting.empty()) candidate.loses = slower_text(candidate, out.fitting.front());
      out.fitting.push_back(candidate);
    } else if (out.fitting.empty()) {
      candidate.loses =
          fmt::format("memory: {} of {} a rank", format_bytes(candidate.rank_bytes), format_bytes(memory_bytes));
      out.too_large.push_back(candidate);
    }
  }
  if (out.fitting.empty()) {
    // Nothing among the fastest: the layouts that cut the model most, whatever they cost.
    std::vector<size_t> order(all.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const auto cut = [&](size_t k) {
        const Layout& l = all[k].second.layout;
        return std::tuple(-l.tp * l.pp * (l.zero > 0 ? l.dp : 1), -l.zero, -static_cast<int>(l.recompute), l.micro);
      };
      return cut(a) < cut(b);
    });
    search.looked = 0;
    for (const size_t k : order) {
      if (search.looked > kLookedAt) break;
      search.reckon(k);
      const Candidate& candidate = all[k].second;
      out.least_bytes = std::min(out.least_bytes, candidate.rank_bytes);
      if (candidate.rank_bytes <= memory_bytes) out.fitting.push_back(candidate);
    }
    std::stable_sort(out.fitting.begin(), out.fitting.end(),
                     [](const Candidate& a, const Candidate& b) { return a.cost.total() < b.cost.total(); });
    if (out.fitting.size() > wanted) out.fitting.resize(wanted);
    for (size_t i = 1; i < out.fitting.size(); ++i) out.fitting[i].loses = slower_text(out.fitting[i], out.fitting[0]);
  }
  if (!out.fitting.empty()) {
    out.fitting.front().loses.clear();
    out.reasons = reasons_for(search, out.fitting.front());
  }
  return out;
}

std::string search_text(const Recipe& recipe, const SearchResult& found, int64_t world, int64_t memory_bytes,
                        const Machine& machine) {
  std::string out = fmt::format("{} on {} x {} with {} each: {} layouts\n", recipe.name, world, machine.name,
                                format_bytes(memory_bytes), found.layouts);
  if (found.fitting.empty()) {
    return out + fmt::format(
                     "none fits: the smallest rank looked at takes {}; use more ranks, a smaller batch.micro or "
                     "a shorter model.context\n",
                     format_bytes(found.least_bytes));
  }
  const auto row = [&](const Candidate& c) {
    out += fmt::format("  {:<88}{:>9.0f} ms{:>9.1f} %{:>11}  {}\n", layout_text(c.layout), c.cost.total(),
                       100 * c.cost.bubble_ms / c.cost.total(), format_bytes(c.rank_bytes), c.loses);
  };
  out += fmt::format("  {:<88}{:>12}{:>11}{:>11}  {}\n", "layout", "step", "bubble", "rank", "against the choice");
  row(found.fitting.front());
  for (size_t i = 1; i < found.fitting.size(); ++i) row(found.fitting[i]);
  constexpr size_t kShown = 3;
  for (size_t i = 0; i < std::min(kShown, found.too_large.size()); ++i) row(found.too_large[i]);
  if (found.too_large.size() > kShown) {
    out += fmt::format("  and {} more that would be faster and do not fit\n", found.too_large.size() - kShown);
  }
  const Candidate& best = found.fitting.front();
  out += "the choice, by part:";
  for (const CostPart& part : cost_parts()) {
    if (best.cost.*part.ms > 0) out += fmt::format(" {} {:.0f} ms", part.name, best.cost.*part.ms);
  }
  out += fmt::format("; {} micro-batches\n", best.micro_batches);
  for (const std::string& reason : found.reasons) out += "  " + reason + "\n";
  const Layout& l = best.layout;
  out += fmt::format(
      "  --set mesh.tp={} --set mesh.pp={} --set mesh.dp={} --set mesh.virtual_stages={} --set "
      "mesh.sequence_parallel={} --set schedule={} --set batch.micro={} --set optimizer.zero={} --set "
      "recompute.mode={}{}\n",
      l.tp, l.pp, l.dp, l.virtual_stages, l.sequence_parallel, schedule_name(l.schedule), l.micro, l.zero,
      l.recompute == RecomputeMode::kFull        ? "full"
      : l.recompute == RecomputeMode::kSelective ? "selective"
                                                 : "none",
      l.distribute ? " --set recompute.distribute=true" : "");
  return out;
}

nlohmann::json search_json(const SearchResult& found) {
  const auto one = [](const Candidate& c) {
    nlohmann::json parts = nlohmann::json::object();
    for (const CostPart& part : cost_parts()) parts[part.name] = c.cost.*part.ms;
    return nlohmann::json{{"tp", c.layout.tp},
                          {"pp", c.layout.pp},
                          {"dp", c.layout.dp},
                          {"virtual_stages", c.layout.virtual_stages},
                          {"micro", c.layout.micro},
                          {"zero", c.layout.zero},
                          {"sequence_parallel", c.layout.sequence_parallel},
                          {"schedule", schedule_name(c.layout.schedule)},
                          {"recompute", c.layout.recompute == RecomputeMode::kFull        ? "full"
                                        : c.layout.recompute == RecomputeMode::kSelective ? "selective"
                                                                                          : "none"},
                          {"distribute", c.layout.distribute},
                          {"micro_batches", c.micro_batches},
                          {"bubble", c.bubble},
                          {"rank_bytes", c.rank_bytes},
                          {"step_ms", c.cost.total()},
                          {"parts_ms", std::move(parts)},
                          {"loses", c.loses}};
  };
  nlohmann::json fitting = nlohmann::json::array(), large = nlohmann::json::array();
  for (const Candidate& c : found.fitting) fitting.push_back(one(c));
  for (const Candidate& c : found.too_large) large.push_back(one(c));
  return {{"layouts", found.layouts},
          {"reasons", found.reasons},
          {"fitting", std::move(fitting)},
          {"too_large", std::move(large)}};
}

}  // namespace cairn::tools
