#include "dsl/change_rules.h"

#include <fmt/format.h>

#include <array>

#include "runtime/core/check.h"

namespace cairn::dsl {
namespace {

using enum ChangeClass;

constexpr std::string_view kMeaning =
    "the shapes fit, the meaning does not: the trained weights are of another function";
constexpr std::string_view kNextStep = "from the next step on";
constexpr std::string_view kLayout =
    "another layout of the same training: bit for bit with deterministic = \"layout\", else equal to rounding";
constexpr std::string_view kNoTrajectory = "changes nothing that is trained";
constexpr std::string_view kHasWeights = "has no effect: the run has weights";
constexpr std::string_view kContent = "which tokens a source holds decides: see data.NAME";

// A row for a field wins over one for all below it; of those the longest. What the table cannot know (whether two
// models have the same tensors, whether a grown file begins with the old one, how far a rate jumps) is looked at by the
// start, which then names the row that applies.
constexpr std::array kRules = {
    ChangeRule{"name", kAccept, "the folder is another run's; a run of its own needs a folder of its own (--run)"},
    ChangeRule{
        "seed", kAccept,
        "new permutations of the samples: those of the epoch under way may come again. Dropout masks change too"},
    ChangeRule{"stop", kRule, "the run ends there; spans in fractions and stages without a length stretch with it"},
    ChangeRule{"stages", kRule, "stages ahead of the position begin as they say; those behind it are not gone back to"},

    ChangeRule{"model.*", kAccept, kMeaning},
    ChangeRule{"model.rope_theta", kAccept,
               "the trained weights know other angles; T.stage or T.phase raises the base at a position"},
    ChangeRule{"model.rope.*", kAccept,
               "the trained weights know other angles; T.stage changes the base at a position"},
    ChangeRule{
        "model.context", kAccept,
        "samples are cut anew, so that some come again. Better: the longest context from the start, batch.tokens "
        "and T.phase"},
    ChangeRule{"model.layers", kRefused,
               "other tensors; a new run can begin with those that fit: T.init_from with `except`"},
    ChangeRule{"model.width", kRefused,
               "other shapes; a new run can begin with the tensors that fit: T.init_from with `except`"},
    ChangeRule{"model.vocab", kRefused,
               "other shapes; a new run can begin with the tensors that fit: T.init_from with `except`"},
    ChangeRule{"model.tied_embeddings", kRefused,
               "other tensors; a new run can begin with those that fit: T.init_from with `except`"},
    ChangeRule{"model.embedding_dropout", kRule, kNextStep},
    ChangeRule{"model.attention_dropout", kRule, kNextStep},
    ChangeRule{"model.residual_dropout", kRule, kNextStep},
    ChangeRule{"model.moe.aux_loss", kRule, kNextStep},
    ChangeRule{"model.moe.aux_scope", kRule, kNextStep},
    ChangeRule{"model.moe.z_loss", kRule, kNextStep},
    ChangeRule{"model.mtp.loss", kRule, kNextStep},
    ChangeRule{"model.mtp.depth", kRefused,
               "other tensors; a new run can begin with those that fit: T.init_from with `except`"},
    ChangeRule{"model.moe.bias_rate", kRule, kNextStep},
    ChangeRule{"model.init_std", kExact, kHasWeights},
    ChangeRule{"model.init", kExact, kHasWeights},
    ChangeRule{"tokenizer", kAccept, "token ids may mean other text"},

    ChangeRule{"data.*", kExact, kContent},
    ChangeRule{"data.seed", kAccept, "new permutations of the samples: those of the epoch under way may come again"},
    ChangeRule{"data.mask_repeats.*", kRule, kNextStep},
    ChangeRule{"objective.*", kRule, kNextStep},

    ChangeRule{"batch.*", kRule, "from this position on"},
    ChangeRule{"batch.micro", kRule, "from this position on; sums are cut elsewhere, so bits differ from now on"},
    ChangeRule{"batch.uneven", kExact, kLayout},
    ChangeRule{"batch.skip", kRule,
               "positions that the run has passed stay as they were; the others are left out from this position on"},

    ChangeRule{"optimizer.*", kRule, kNextStep},
    ChangeRule{"optimizer.lr", kRule, "the schedule is read at this position"},
    ChangeRule{"optimizer.kind", kRule,
               "adamw and lamb: the moments stay. To and from adafactor only with --accept: they begin at zero"},
    ChangeRule{"optimizer.ema", kRule,
               "one that is switched on begins at the present weights. Off only with --accept: the average is dropped"},
    ChangeRule{"optimizer.offload", kExact, kNoTrajectory},
    ChangeRule{"optimizer.zero", kExact, kLayout},
    ChangeRule{"optimizer.bucket", kExact, kLayout},
    ChangeRule{"optimizer.overlap", kExact, kLayout},
    ChangeRule{"optimizer.keep_after_forward", kExact, kLayout},
    ChangeRule{"device", kRule, "from the next step on; another device rounds otherwise"},
    ChangeRule{"precision", kRule, "from the next step on; fp16 begins at loss_scale.initial"},
    ChangeRule{"loss_scale.*", kRule, kNextStep},
    ChangeRule{"deterministic", kRule, "from the next step on, in other bits"},
    ChangeRule{"sums", kRule, "from the next step on, in other bits"},

    ChangeRule{"mesh.*", kExact, kLayout},
    ChangeRule{"schedule", kExact, kLayout},
    ChangeRule{"recompute.*", kExact, kLayout},

    ChangeRule{"checkpoint.*", kExact, kNoTrajectory},
    ChangeRule{"checkpoint.keep", kExact,
               "retention by the new rules; what they would remove and the old ones keep wants --accept"},
    ChangeRule{"init.*", kExact, kHasWeights},
    ChangeRule{"eval.*", kExact, kNoTrajectory},
    ChangeRule{"log.*", kExact, kNoTrajectory},
    ChangeRule{"hooks", kExact, kNoTrajectory},
    ChangeRule{"restart.*", kExact, kNoTrajectory},
    ChangeRule{"watch.*", kExact, "verdicts from now on"},
    ChangeRule{"watch.on_outlier", kRule, kNextStep},
    ChangeRule{"watch.recompute.*", kRule, kNextStep},
    ChangeRule{"watch.skip.*", kRule, kNextStep},
    ChangeRule{"watch.lowered_rates", kRule, kNextStep},
    ChangeRule{"watch.skip_steps", kRule, "steps that the run has passed stay as they were"},
};

bool covers(std::string_view row, std::string_view path) {
  if (!row.ends_with(".*")) return row == path;
  row.remove_suffix(2);
  return path == row || (path.starts_with(row) && path[row.size()] == '.');
}

}  // namespace

std::string_view change_class_name(ChangeClass change) {
  switch (change) {
    case kExact:
      return "exact";
    case kRule:
      return "by a rule";
    case kAccept:
      return "only with --accept";
    case kRefused:
      return "refused";
  }
  return "";
}

std::span<const ChangeRule> change_rules() { return kRules; }

const ChangeRule* find_change_rule(std::string_view path) {
  const ChangeRule* best = nullptr;
  for (const ChangeRule& rule : kRules) {
    if (!covers(rule.field, path)) continue;
    const bool whole = !rule.field.ends_with(".*");
    if (best == nullptr || whole || rule.field.size() > best->field.size()) best = &rule;
    if (whole) break;
  }
  return best;
}

const ChangeRule& change_rule(std::string_view path) {
  const ChangeRule* const best = find_change_rule(path);
  RT_CHECK(best != nullptr, "no row for {} in the table of changes", path);
  return *best;
}

std::string change_rules_markdown() {
  std::string out = "| field | class | what happens |\n|---|---|---|\n";
  for (const ChangeRule& rule : kRules) {
    out += fmt::format("| `{}` | {} | {} |\n", rule.field, change_class_name(rule.change), rule.says);
  }
  return out;
}

}  // namespace cairn::dsl
