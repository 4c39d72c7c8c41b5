#include "tools/plan_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>

#include "runtime/plan/activations.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

constexpr size_t kLookedAt = 200;  // candidates whose memory is reckoned before the search gives up

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> out;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) out.push_back(d);
  }
  return out;
}

std::vector<Layout> layouts_of(const Recipe& recipe, int64_t world, int64_t node) {
  const ModelConfig& m = recipe.model;
  std::vector<Layout> out;
  for (const int64_t tp : divisors(std::gcd(world, std::gcd(m.heads, m.ffn)))) {
    if ((m.kv_heads % tp != 0 && tp % m.kv_heads != 0) || tp > node) continue;  // four collectives a layer do not cross nodes
    for (const int64_t pp : divisors(world / tp)) {
      if (pp > m.layers) break;
      const MeshConfig& mesh = recipe.mesh;  // cp and ep stay as they are
      if (world / tp / pp % (mesh.cp * mesh.ep) != 0) continue;
      const int64_t dp = world / tp / pp / mesh.cp;
      if (recipe.batch.samples % dp != 0) continue;
      for (const int64_t micro : {1, 2, 4, 8, 16, 32}) {
        if (recipe.batch.samples / dp % micro != 0) continue;
        const int64_t micro_batches = recipe.batch.samples / dp / micro;
        for (const int64_t v : {1, 2, 3, 4, 6}) {
          if (v > 1 && (pp == 1 || m.layers % (pp * v) != 0 || micro_batches % pp != 0)) continue;
          for (const bool sp : {false, true}) {
            if (sp && (tp == 1 || micro * m.context / mesh.cp % tp != 0)) continue;
            for (const int zero : {0, 1}) {
              if (zero > 0 && dp == 1) continue;
              out.push_back({tp, dp, pp, v, micro, zero, sp});
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
  const int64_t weight = recipe.precision == Precision::kBf16 ? 2 : 4;
  const int64_t here = parameters / (layout.tp * layout.pp);
  return here * (weight + 4) + here / (layout.zero > 0 ? layout.dp : 1) * 12;
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
  out.schedule = layout.virtual_stages > 1 ? PipelineKind::kInterleaved : PipelineKind::k1F1B;
  out.batch.micro = layout.micro;
  out.optimizer.zero = layout.zero;
  return out;
}

std::string layout_text(const Layout& l) {
  return fmt::format("tp {}, pp {}, dp {}, micro {}{}{}{}", l.tp, l.pp, l.dp, l.micro,
                     l.sequence_parallel ? ", sequence parallel" : "",
                     l.zero > 0 ? fmt::format(", ZeRO-{}", l.zero) : "",
                     l.virtual_stages > 1 ? fmt::format(", interleaved {}", l.virtual_stages) : "");
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
    most = std::max(most, rank.weight_bytes + rank.grad_bytes + rank.optimizer_bytes + stage_buffers_bytes(plan, rank) +
                              plan.boundary_buffers_bytes());
  }
  return most;
}

Result<SearchResult> search_layouts(const Recipe& recipe, int64_t world, int64_t memory_bytes, const Machine& machine,
                                    size_t wanted) {
  SearchResult out;
  std::vector<Candidate> all;
  Status refused;
  int64_t parameters = 0;
  for (const Layout& layout : layouts_of(recipe, world, machine.node_devices)) {
    Result<Plan> plan = make_plan(with_layout(recipe, layout), world);
    if (!plan.ok()) {
      refused = std::move(plan).error();
      continue;
    }
    parameters = plan.value().parameters;
    all.push_back({.layout = layout,
                   .cost = data_sheet_cost(plan.value(), machine),
                   .micro_batches = plan.value().micro_batches,
                   .bubble = bubble_fraction(plan.value().schedule())});
  }
  if (all.empty()) {
    if (!refused.ok()) return std::move(refused).error();
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("no layout of {} ranks cuts batch.samples = {}, model.layers = {} and model.heads = {}; a world "
                    "that shares factors with them has some",
                    world, recipe.batch.samples, recipe.model.layers, recipe.model.heads)};
  }
  out.layouts = static_cast<int64_t>(all.size());
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cost.total() < b.cost.total(); });
  size_t looked = 0;
  const auto reckon = [&](Candidate& candidate) -> Status {
    candidate.rank_bytes = least_rank_bytes(recipe, parameters, candidate.layout);
    if (candidate.rank_bytes > memory_bytes) return {};
    ++looked;
    RT_TRY_SET(const Plan plan, make_plan(with_layout(recipe, candidate.layout), world));
    candidate.rank_bytes = largest_rank_bytes(plan);
    return {};
  };
  for (Candidate& candidate : all) {
    if (out.fitting.size() >= wanted || looked > kLookedAt) break;
    RT_TRY(reckon(candidate));
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
    std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
      const auto cut = [](const Layout& l) { return l.tp * l.pp * (l.zero > 0 ? l.dp : 1); };
      return std::pair(cut(b.layout), a.layout.micro) < std::pair(cut(a.layout), b.layout.micro);
    });
    looked = 0;
    for (Candidate& candidate : all) {
      if (candidate.rank_bytes >= 0) continue;
      if (looked > kLookedAt) break;
      RT_TRY(reckon(candidate));
      out.least_bytes = std::min(out.least_bytes, candidate.rank_bytes);
      if (candidate.rank_bytes <= memory_bytes) out.fitting.push_back(candidate);
    }
    std::stable_sort(out.fitting.begin(), out.fitting.end(),
                     [](const Candidate& a, const Candidate& b) { return a.cost.total() < b.cost.total(); });
    if (out.fitting.size() > wanted) out.fitting.resize(wanted);
    for (size_t i = 1; i < out.fitting.size(); ++i) out.fitting[i].loses = slower_text(out.fitting[i], out.fitting[0]);
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
    out += fmt::format("  {:<66}{:>9.0f} ms{:>9.1f} %{:>11}  {}\n", layout_text(c.layout), c.cost.total(),
                       100 * c.cost.bubble_ms / c.cost.total(), format_bytes(c.rank_bytes), c.loses);
  };
  out += fmt::format("  {:<66}{:>12}{:>11}{:>11}  {}\n", "layout", "step", "bubble", "rank", "against the choice");
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
  const Layout& l = best.layout;
  out += fmt::format(
      "  --set mesh.tp={} --set mesh.pp={} --set mesh.dp={} --set mesh.virtual_stages={} --set "
      "mesh.sequence_parallel={} --set schedule={} --set batch.micro={} --set optimizer.zero={}\n",
      l.tp, l.pp, l.dp, l.virtual_stages, l.sequence_parallel, l.virtual_stages > 1 ? "interleaved" : "1f1b", l.micro,
      l.zero);
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
  return {{"layouts", found.layouts}, {"fitting", std::move(fitting)}, {"too_large", std::move(large)}};
}

}  // namespace cairn::tools
