// Rules of the model: its own, what tensor parallelism cuts of it, and that groups of the optimizer name tensors of it.

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "runtime/core/glob.h"
#include "runtime/plan/model_check.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/rule_list.h"

namespace cairn {
namespace {

void heads(RuleList& rules) {
  const ModelConfig& m = rules.recipe.model;
  const int64_t tp = rules.recipe.mesh.tp;
  if (rules.known({"model.width", "model.heads", "mesh.tp"}) && !rules.is_set("model.head_dim") && !has_mla(m) &&
      m.width % m.heads != 0) {
    std::vector<int64_t> fitting = divisors(m.width);
    if (m.width % tp == 0) std::erase_if(fitting, [&](int64_t n) { return n % tp != 0; });
    rules.fail("model.heads",
               fmt::format("model.heads = {} does not divide model.width = {}{}", m.heads, m.width,
                           rules.where("model.heads", "model.width")),
               "heads " + near_values(fitting, m.heads));
  }
  if (!rules.known({"model.heads", "model.kv_heads"})) return;
  if (m.heads % m.kv_heads != 0) {
    rules.fail("model.kv_heads",
               fmt::format("model.kv_heads = {} does not divide model.heads = {}{}", m.kv_heads, m.heads,
                           rules.where("model.kv_heads", "model.heads")),
               "kv_heads " + near_values(divisors(m.heads), m.kv_heads));
  }
  if (!rules.known({"mesh.tp"})) return;
  if (m.heads % tp != 0) {
    rules.fail("mesh.tp",
               fmt::format("mesh.tp = {} does not divide model.heads = {}{}", tp, m.heads,
                           rules.where("mesh.tp", "model.heads")),
               "tp " + near_values(divisors(std::gcd(m.heads, m.kv_heads)), tp));
  } else if (m.kv_heads % tp != 0 && tp % m.kv_heads != 0) {
    std::vector<int64_t> fitting = divisors(m.heads);  // whole heads a rank, or whole ranks a head
    std::erase_if(fitting, [&](int64_t size) { return m.kv_heads % size != 0 && size % m.kv_heads != 0; });
    rules.fail("mesh.tp",
               fmt::format("mesh.tp = {} and model.kv_heads = {}{}: neither divides the other", tp, m.kv_heads,
                           rules.where("mesh.tp", "model.kv_heads")),
               "tp " + near_values(fitting, tp));
  }
}

void groups(RuleList& rules) {
  const std::vector<ParameterGroup>& groups = rules.recipe.optimizer.groups;
  if (groups.empty()) return;
  const std::vector<TensorSpec> tensors = model_tensors(rules.recipe.model);
  for (size_t i = 0; i < groups.size(); ++i) {
    const bool used = std::any_of(tensors.begin(), tensors.end(),
                                  [&](const TensorSpec& tensor) { return matches(groups[i].tensors, tensor.name); });
    if (used) continue;
    rules.fail(fmt::format("optimizer.groups[{}]", i + 1),
               fmt::format("optimizer.groups[{}]: \"{}\" is of no tensor of the model", i + 1, groups[i].tensors),
               fmt::format("a pattern of names, such as \"{}\" or \"{}\"", tensors.front().name, tensors.back().name));
  }
}

}  // namespace

void model_rules(RuleList& rules) {
  const Recipe& recipe = rules.recipe;
  const ModelConfig& m = recipe.model;
  const int64_t tp = recipe.mesh.tp;
  heads(rules);
  if (rules.known({"model.ffn", "mesh.tp"}) && m.ffn % tp != 0 && (has_dense_layers(m) || m.moe.ffn == 0) &&
      (rules.is_set("model.ffn") || m.heads % tp == 0)) {
    const std::string at = rules.is_set("model.ffn") ? "model.ffn" : "mesh.tp";
    rules.fail(at,
               fmt::format("model.ffn = {} is not divisible by mesh.tp = {}{}", m.ffn, tp, rules.where(at, "mesh.tp")),
               "ffn " + near_multiples(tp, m.ffn));
  }
  for (const auto& [field, ffn] : {std::pair("model.moe.ffn", m.moe.ffn), {"model.moe.shared_ffn", m.moe.shared_ffn}}) {
    if (!rules.known({field, "mesh.tp"}) || ffn % tp == 0) continue;
    rules.fail(field,
               fmt::format("{} = {} is not divisible by mesh.tp = {}{}", field, ffn, tp, rules.where(field, "mesh.tp")),
               "ffn " + near_multiples(tp, ffn));
  }
  if (m.mask == Mask::kPrefix && recipe.objective.kind == ObjectiveConfig::Kind::kNextToken) {
    rules.fail("model.mask",
               "model.mask = prefix: objective.kind = next_token has no prefixes that could see themselves",
               "objective.kind prefix or infill");
  }
  if (!rules.known(
          {"model.layers", "model.width", "model.heads", "model.kv_heads", "model.head_dim", "model.moe.groups"}))
    return;
  const std::vector<Mistake> mistakes = find_mistakes(m);
  for (Mistake found : mistakes) {
    if (found.field == "model.head_dim" && !has_mla(m) && !rules.is_set("model.head_dim")) {
      if (m.width % m.heads != 0) continue;  // reported already
      found.field = "model.heads";           // head_dim follows from it
    }
    rules.found.push_back(std::move(found));
  }
  if (mistakes.empty() && rules.known({"model.ffn", "model.context", "model.vocab"})) groups(rules);
}

}  // namespace cairn
