#include "runtime/plan/recipe_rules.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/plan/rule_list.h"

namespace cairn {
namespace {

/// What rules divide by and count with.
void check_sizes(RuleList& rules) {
  const Recipe& r = rules.recipe;
  const std::pair<const char*, int64_t> sizes[] = {
      {"model.layers", r.model.layers},
      {"model.width", r.model.width},
      {"model.heads", r.model.heads},
      {"model.kv_heads", r.model.kv_heads},
      {"model.head_dim", r.model.head_dim},
      {"model.ffn", r.model.ffn},
      {"model.context", r.model.context},
      {"model.vocab", r.model.vocab},
      {"model.moe.groups", r.model.moe.groups},
      {"objective.mask_windows", r.objective.mask_windows},
      {"batch.samples", r.batch.samples},
      {"batch.micro", r.batch.micro},
      {"mesh.tp", r.mesh.tp},
      {"mesh.pp", r.mesh.pp},
      {"mesh.cp", r.mesh.cp},
      {"mesh.ep", r.mesh.ep},
      {"mesh.virtual_stages", r.mesh.virtual_stages},
  };
  for (const auto& [field, size] : sizes) {
    if (size >= 1) continue;
    if (rules.known({field})) rules.fail(field, fmt::format("{} = {} must be 1 or more", field, size));
    rules.unsound.emplace_back(field);
  }
}

}  // namespace

bool RuleList::known(std::initializer_list<const char*> fields) const {
  return std::all_of(fields.begin(), fields.end(), [&](const char* field) {
    return (!notes.known || notes.known(field)) && std::find(unsound.begin(), unsound.end(), field) == unsound.end();
  });
}

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> low, high;
  for (int64_t k = 1; k * k <= number; ++k) {
    if (number % k != 0) continue;
    low.push_back(k);
    if (k * k != number) high.push_back(number / k);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

std::string near_values(const std::vector<int64_t>& values, int64_t wanted, size_t count) {
  const auto above = std::upper_bound(values.begin(), values.end(), wanted);
  std::vector<int64_t> chosen;
  if (count == 2) {  // one on each side says more than two on one
    if (above != values.begin()) chosen.push_back(*(above - 1));
    if (above != values.end()) chosen.push_back(*above);
  } else {
    std::vector<int64_t> sorted = values;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](int64_t a, int64_t b) { return std::abs(a - wanted) < std::abs(b - wanted); });
    chosen.assign(sorted.begin(), sorted.begin() + static_cast<int64_t>(std::min(count, sorted.size())));
    std::sort(chosen.begin(), chosen.end());
  }
  std::string out;
  for (size_t i = 0; i < chosen.size(); ++i)
    out += fmt::format("{}{}", i == 0 ? "" : i + 1 == chosen.size() ? " or " : ", ", chosen[i]);
  return out;
}

std::string near_multiples(int64_t of, int64_t wanted) {
  std::vector<int64_t> values;
  if (wanted / of > 0) values.push_back(wanted / of * of);
  values.push_back((wanted / of + 1) * of);
  return near_values(values, wanted);
}

std::vector<Mistake> find_mistakes(const Recipe& recipe, int64_t world, const FieldNotes& notes, const RunPast& past) {
  RuleList rules{recipe, world, notes, past, {}, {}};
  check_sizes(rules);
  const DataRanks ranks = mesh_rules(rules);
  model_rules(rules);
  layout_rules(rules, ranks);
  batch_rules(rules, ranks);
  run_rules(rules);
  return std::move(rules.found);
}

}  // namespace cairn
