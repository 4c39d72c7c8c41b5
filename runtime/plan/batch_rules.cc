// Rules of the batch, in every stage of the run that lies ahead: what a replica gets of it, how sequences and rows are
// cut, what the objective asks of a sequence.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/config/skipped_positions.h"
#include "runtime/plan/objective_check.h"
#include "runtime/plan/plan.h"
#include "runtime/plan/rule_list.h"
#include "runtime/plan/schedule.h"

namespace cairn {
namespace {

constexpr int64_t kMostIncrements = 10'000;  // of a ramp: each is a stage of the run

/// Whether the stages of the run can be counted.
bool changes(RuleList& rules) {
  const BatchConfig& batch = rules.recipe.batch;
  const BatchRamp& ramp = batch.ramp;
  const size_t before = rules.found.size();
  if (ramp.from > 0 && (ramp.by < 1 || ramp.over.value <= 0 || ramp.over.unit == Span::Unit::kFraction ||
                        ramp.from >= batch.samples || (batch.samples - ramp.from) % ramp.by != 0)) {
    rules.fail("batch.ramp",
               fmt::format("batch.ramp goes from {} by {} to batch.samples = {}{}: it wants `over`, not as a fraction, "
                           "and a whole number of increments",
                           ramp.from, ramp.by, batch.samples, rules.where("batch.ramp", "batch.samples")),
               batch.samples > ramp.from ? "by " + near_values(divisors(batch.samples - ramp.from), ramp.by) +
                                               ", over = T.steps(n), T.samples(n) or T.tokens(n)"
                                         : fmt::format("from 1 to {}", batch.samples - 1));
  }
  if (rules.found.size() == before && ramp.from > 0 && (batch.samples - ramp.from) / ramp.by > kMostIncrements) {
    rules.fail(
        "batch.ramp",
        fmt::format("batch.ramp goes from {} to {} in {} increments, at most {} are counted", ramp.from, batch.samples,
                    (batch.samples - ramp.from) / ramp.by, kMostIncrements),
        "by " + near_values(divisors(batch.samples - ramp.from), (batch.samples - ramp.from) / kMostIncrements + 1));
  }
  for (size_t i = 0; i < batch.phases.size(); ++i) {
    const std::string field = fmt::format("batch.phases[{}]", i + 1);
    if (batch.phases[i].at.unit == Span::Unit::kFraction) {
      rules.fail(field, fmt::format("{} begins at a number of steps, samples or tokens, not at a fraction", field),
                 "T.steps(n), T.samples(n) or T.tokens(n)");
    }
    if (batch.phases[i].rope_theta > 0 && rules.recipe.model.positions != Positions::kRotary) {
      rules.fail(field,
                 fmt::format("{} changes rope_theta to {}, and the model has no rotary positions{}", field,
                             batch.phases[i].rope_theta, rules.where(field, "model.positions")),
                 "model.positions = \"rotary\", or no rope_theta");
    }
  }
  return rules.found.size() == before;
}

/// One stage of the run; each rule is told of the first stage that breaks it.
class StageRules {
 public:
  StageRules(RuleList& rules, const DataRanks& ranks, bool several)
      : rules_(rules), ranks_(ranks), mesh_(rules.recipe.mesh), several_(several) {}

  void check(const StepStage& stage) {
    when_ = several_ ? fmt::format("from step {} on: ", stage.first_step) : "";
    if (!uneven_) uneven_ = !rules_.known({"batch.samples", "batch.micro"}) || cut_samples(stage);
    if (!schedule_ && !uneven_) schedule_ = fill_groups(stage);
    if (!rules_.known({"model.context"})) return;
    if (!sequences_) sequences_ = cut_sequences(stage);
    if (sequences_) return;
    if (!tokens_) tokens_ = cut_tokens(stage);
    if (tokens_) return;
    if (!rows_) rows_ = cut_rows(stage);
    if (!objective_ && rules_.known({"model.vocab", "objective.mask_windows"})) objective_ = ask_objective(stage);
  }

 private:
  /// Where a value of one stage is changed.
  std::string field(const char* name) const { return several_ ? "batch" : name; }

  bool cut_samples(const StepStage& stage) {
    const int64_t samples = stage.samples, micro = stage.micro, dp = ranks_.dp > 0 ? ranks_.dp : ranks_.unit;
    const int64_t slice = micro * dp;
    if (samples % slice == 0) return false;
    const std::string at = field("batch.samples");
    if (rules_.recipe.batch.uneven) {
      const int64_t there = (samples + micro - 1) / micro;  // micro-batches
      if (there >= dp) return false;
      rules_.fail(
          at,
          fmt::format("{}batch.samples = {} makes {} micro-batches of {}, too few for dp {}: some replicas would "
                      "never have one",
                      when_, samples, there, micro, dp),
          fmt::format("samples at least {}", (dp - 1) * micro + 1), ranks_.said);
      return true;
    }
    if (ranks_.dp == 0 && dp == 1) {  // dp is not known, but none can help
      rules_.fail(
          at,
          fmt::format("{}batch.samples = {} is not divisible by batch.micro = {}{}", when_, samples, micro,
                      rules_.where(at, "batch.micro")),
          fmt::format("samples {}; micro {}", near_multiples(micro, samples), near_values(divisors(samples), micro)));
      return true;
    }
    std::string accepted;
    if (samples % dp == 0) accepted = "micro " + near_values(divisors(samples / dp), micro, 4) + "; or ";
    rules_.fail(at,
                fmt::format("{}batch.samples = {} cannot be cut: micro {} x dp {} = {} does not divide it", when_,
                            samples, micro, dp, slice),
                accepted + "samples " + near_multiples(slice, samples) + "; or batch.uneven = true",
                ranks_.dp > 0 ? ranks_.said : fmt::format("dp is a multiple of mesh.ep = {}", mesh_.ep));
    return true;
  }

  bool fill_groups(const StepStage& stage) {
    if (ranks_.dp == 0 || !rules_.known({"mesh.pp", "mesh.virtual_stages"})) return false;
    const Recipe& recipe = rules_.recipe;
    if (!find_mistakes(schedule_shape(recipe, 0)).empty()) return true;  // reported already
    for (Mistake& mistake : find_mistakes(schedule_shape(recipe, stage.micro_batches(ranks_.dp)), rules_.notes)) {
      rules_.fail(mistake.field, when_ + mistake.message, mistake.accepted, ranks_.said);
      return true;
    }
    return false;
  }

  bool cut_sequences(const StepStage& stage) {
    const int64_t context = rules_.recipe.model.context;
    const auto packed = [](const DataSource& source) { return source.kind == DataSource::Kind::kInstruct; };
    if (stage.tokens != context && std::ranges::any_of(rules_.recipe.data.sources, packed)) {
      const std::string at = field("batch.tokens");
      rules_.fail(
          at,
          fmt::format("{}batch.tokens = {} would cut conversations of T.instruct, which are packed into samples of "
                      "model.context = {}{}",
                      when_, stage.tokens, context, rules_.where(at, "model.context")),
          fmt::format("tokens {}", context));
      return true;
    }
    if (context % stage.tokens == 0) return false;
    const std::string at = field("batch.tokens");
    rules_.fail(at,
                fmt::format("{}batch.tokens = {} does not divide model.context = {}{}: samples are cut into equal "
                            "sequences",
                            when_, stage.tokens, context, rules_.where(at, "model.context")),
                "tokens " + near_values(divisors(context), stage.tokens));
    return true;
  }

  /// Context parallelism.
  bool cut_tokens(const StepStage& stage) {
    if (mesh_.cp <= 1) return false;
    const bool whole = stage.tokens == rules_.recipe.model.context;
    if (stage.tokens % (2 * mesh_.cp) != 0) {
      rules_.fail("mesh.cp",
                  fmt::format("{}mesh.cp = {} cuts sequences into {} chunks, and {} tokens{} are not divisible by that",
                              when_, mesh_.cp, 2 * mesh_.cp, stage.tokens,
                              rules_.where("mesh.cp", whole ? "model.context" : "batch.tokens")),
                  fmt::format("{} {}", whole ? "context" : "tokens", near_multiples(2 * mesh_.cp, stage.tokens)));
      return true;
    }
    if (rules_.recipe.objective.kind != ObjectiveConfig::Kind::kNextToken) return false;  // see layout
    if (rules_.recipe.deterministic != Deterministic::kLayout || !rules_.known({"model.width"})) return false;
    if (const std::string_view uncut = uncut_over_tokens(rules_.recipe); !uncut.empty()) {
      rules_.fail("mesh.cp",
                  fmt::format("deterministic = \"layout\" does not know how to cut the sums of {} for mesh.cp = {}",
                              uncut, mesh_.cp),
                  "cp = 1, or deterministic = \"run\"");
      return true;
    }
    const int64_t parts = token_parts(rules_.recipe, stage.tokens);
    if (parts % mesh_.cp == 0) return false;
    rules_.fail(
        "mesh.cp",
        fmt::format("{}deterministic = \"layout\" takes sums over the {} tokens of a sequence in {} parts: each "
                    "is two chunks of a multiple of {} tokens, and mesh.cp = {} does not divide that",
                    when_, stage.tokens, parts, kTokenChunkAlign, mesh_.cp),
        fmt::format("cp = {}, or deterministic = \"run\"", fmt::join(divisors(parts), ", ")));
    return true;
  }

  /// What tp cuts of a micro-batch outside of attention and MLP.
  bool cut_rows(const StepStage& stage) {
    const Recipe& recipe = rules_.recipe;
    if (!rules_.known({"batch.micro", "mesh.tp", "mesh.cp"}) || mesh_.tp == 1) return false;
    const int64_t context = recipe.model.context, rows = stage.micro * context / mesh_.cp;
    const std::string product = fmt::format("batch.micro {} x model.context {}{}", stage.micro, context,
                                            mesh_.cp > 1 ? fmt::format(" / mesh.cp {}", mesh_.cp) : "");
    const std::string near = near_multiples(mesh_.tp * mesh_.cp, context);
    if (mesh_.sequence_parallel && rows % mesh_.tp != 0) {
      rules_.fail("mesh.sequence_parallel",
                  fmt::format("{}mesh.sequence_parallel: {} = {} tokens are not divisible by mesh.tp = {}", when_,
                              product, rows, mesh_.tp),
                  fmt::format("context {}, or sequence_parallel = false", near));
      return true;
    }
    if (!recipe.recompute.distribute || !rules_.known({"model.width"}) || rows * recipe.model.width % mesh_.tp == 0)
      return false;
    rules_.fail("recompute.distribute",
                fmt::format("{}recompute.distribute: a layer's input of {} x model.width {} elements cannot be split "
                            "over mesh.tp = {}",
                            when_, product, recipe.model.width, mesh_.tp),
                fmt::format("context {}, or distribute = false", near));
    return true;
  }

  bool ask_objective(const StepStage& stage) {
    std::vector<Mistake> mistakes = find_mistakes(rules_.recipe.objective, rules_.recipe.model, stage.tokens);
    for (Mistake& mistake : mistakes) {
      mistake.message = when_ + mistake.message;
      rules_.found.push_back(std::move(mistake));
    }
    return !mistakes.empty();
  }

  RuleList& rules_;
  const DataRanks& ranks_;
  const MeshConfig& mesh_;
  const bool several_;
  std::string when_;
  bool uneven_ = false, schedule_ = false, sequences_ = false, tokens_ = false, rows_ = false, objective_ = false;
};

}  // namespace

void batch_rules(RuleList& rules, const DataRanks& ranks) {
  const Recipe& recipe = rules.recipe;
  if (recipe.batch.uneven && recipe.model.moe.experts > 0) {
    rules.fail(
        "batch.uneven",
        "batch.uneven = true fills the last round with samples that count in no loss, and the balance of experts "
        "would count them",
        "false");
  }
  if (const auto skip = SkippedPositions::parse(recipe.batch.skip); !skip.ok())
    rules.fail("batch.skip", "batch.skip: " + skip.error().message, "ranges as \"51200..51263\"");
  std::vector<StepStage> stages;
  if (rules.changes_batch()) {
    // Spans and parts of sequences have no meaning without these.
    if (!rules.known({"batch.samples", "batch.micro", "model.context"}) || !changes(rules)) return;
    stages = step_stages(recipe, rules.past);
  } else {
    stages.push_back({.samples = recipe.batch.samples, .micro = recipe.batch.micro, .tokens = recipe.model.context});
  }
  StageRules check(rules, ranks, stages.size() > 1);
  for (const StepStage& stage : stages) check.check(stage);
}

}  // namespace cairn
