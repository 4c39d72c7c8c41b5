#pragma once
// Where the rules of a recipe leave what they find (runtime/plan/recipe_rules.h). Only for the files with rules.

#include <initializer_list>
#include <string>
#include <vector>

#include "runtime/config/mistake.h"
#include "runtime/config/recipe.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn {

struct RuleList {
  const Recipe& recipe;
  int64_t world;
  const FieldNotes& notes;
  const RunPast& past;
  std::vector<std::string> unsound;  // sizes below 1, which nothing may divide by
  std::vector<Mistake> found;

  /// Have values to reckon with.
  bool known(std::initializer_list<const char*> fields) const;
  bool is_set(const char* field) const { return !notes.is_set || notes.is_set(field); }
  std::string where(const std::string& from, const std::string& field) const {
    return notes.where ? notes.where(from, field) : "";
  }
  void fail(std::string field, std::string message, std::string accepted = "", std::string detail = "") {
    found.push_back({std::move(field), std::move(message), std::move(accepted), std::move(detail)});
  }
  /// Sequences, samples or micro-batches are not the same in the whole run, or a sample is several sequences.
  bool changes_batch() const {
    return recipe.batch.ramp.from > 0 || recipe.batch.tokens > 0 || !recipe.batch.phases.empty();
  }
};

/// Data-parallel ranks of the mesh.
struct DataRanks {
  int64_t dp = 0;    // 0: the mesh does not fit the world, which is reported, or dp is not known
  int64_t unit = 1;  // where dp is not known, a number that divides it
  std::string said;  // "dp = world 8 / (tp 2 x pp 2) = 2"
};

void model_rules(RuleList& rules);                           // a model, and what tp cuts of it
DataRanks mesh_rules(RuleList& rules);                       // the mesh and the world
void layout_rules(RuleList& rules, const DataRanks& ranks);  // stages, sharding, recomputation, determinism
void batch_rules(RuleList& rules, const DataRanks& ranks);   // in every stage of the run: batch, sequences, objective
void run_rules(RuleList& rules);                             // rates, data, evaluation, checkpoints, name

// What messages name.
std::vector<int64_t> divisors(int64_t number);  // ascending
/// The nearest of sorted `values` below and above `wanted`, at most `count` in all: "48 or 64".
std::string near_values(const std::vector<int64_t>& values, int64_t wanted, size_t count = 2);
std::string near_multiples(int64_t of, int64_t wanted);

}  // namespace cairn
