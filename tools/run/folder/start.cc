#include "tools/run/folder/start.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/labels.h"
#include "ckpt/retention/policy.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/count_text.h"
#include "runtime/data/dataset.h"
#include "runtime/json/json.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;

dsl::LoadedRecipe loaded_from(Recipe recipe, const dsl::LoadedRecipe& whole) {
  dsl::LoadedRecipe out{.recipe = std::move(recipe), .sources = whole.sources, .origins = whole.origins};
  out.canonical_json = dsl::encode_recipe(out.recipe);
  out.hash_hex = dsl::recipe_hash(out.canonical_json);
  return out;
}

/// Adds the samples that guards have left out to `ranges`, which are batch.skip.
Status add_skips(std::span<const RollBack> roll_backs, std::vector<std::string>& ranges) {
  for (const RollBack& one : roll_backs) {
    if (!one.leaves_out()) continue;
    RT_TRY_SET(const SkippedPositions skip, SkippedPositions::parse(ranges).with("batch.skip"));
    const int64_t length = one.skip.last - one.skip.first + 1;
    if (skip.count(one.skip.first, one.skip.last + 1) < length) ranges.push_back(to_text(one.skip));
  }
  return {};
}

nlohmann::json json_of(const LoweredRate& one) {
  return {{"at", one.at}, {"by", one.by}, {"over", one.over}, {"back", one.back}};
}

/// Adds what guards have decided to the recipe, and to its stages that set the same fields.
Result<dsl::LoadedRecipe> with_decisions(const dsl::LoadedRecipe& loaded, std::span<const RollBack> roll_backs,
                                         std::span<const LoweredRate> lowered) {
  if (roll_backs.empty() && lowered.empty()) return loaded;
  Recipe recipe = loaded.recipe;
  RT_TRY(add_skips(roll_backs, recipe.batch.skip));
  std::vector<LoweredRate>& rates = recipe.watch.lowered_rates;
  for (const LoweredRate& one : lowered) {
    if (std::ranges::none_of(rates, [&](const LoweredRate& other) { return json_of(other) == json_of(one); }))
      rates.push_back(one);
  }
  for (RecipeStage& stage : recipe.stages) {
    nlohmann::json changes = json_or_nothing(stage.changes);
    if (changes.contains("batch.skip")) {
      auto ranges = changes["batch.skip"].get<std::vector<std::string>>();
      RT_TRY(add_skips(roll_backs, ranges));
      changes["batch.skip"] = ranges;
    }
    if (changes.contains("watch.lowered_rates")) {
      nlohmann::json& list = changes["watch.lowered_rates"];
      for (const LoweredRate& one : lowered) {
        if (std::ranges::find(list, json_of(one)) == list.end()) list.push_back(json_of(one));
      }
    }
    stage.changes = json_text(changes);
  }
  return loaded_from(std::move(recipe), loaded);
}

/// Whether a start before has lowered the rate by this already: a guard's decision is one, and a person's counts again
/// once the rate is back. A rate that the run went back behind, as it does now to `step` or did before, is not low.
bool is_lowered(const Lineage& lineage, const Lowering& lowering, int64_t step) {
  return std::ranges::any_of(lineage.lowerings(), [&](const LineageEntry& entry) {
    const Lowering& one = *entry.lowering;
    if (entry.at.step > step) return false;
    if (lowering.onset > 0) return one.onset == lowering.onset && one.step == lowering.step;
    return one == lowering && step < entry.at.step + std::max<int64_t>(1, one.over + one.back);
  });
}

Result<std::map<std::string, SourceContent>> contents_of(const Recipe& recipe) {
  RT_TRY_SET(const data::Dataset dataset, data::open_dataset(recipe.data, recipe.model.vocab, recipe.model.context));
  std::map<std::string, SourceContent> out;
  for (const data::Dataset::Source& source : dataset.sources) {
    RT_TRY_SET(out[source.name], content_of(*source.train));
  }
  return out;
}

/// The start of the segment under way, when it is this very recipe's: what it was begun with needs no --accept again.
void take_accepted(RunStart& start) {
  const std::vector<LineageEntry> segments = start.lineage.segments();
  if (segments.empty()) return;
  const LineageEntry& last = segments.back();
  for (const std::string& field : last.accepted) {
    const auto is_now = [&](const std::string& name) {
      const auto then = last.data.find(name);
      const auto now = start.data.find(name);
      return then != last.data.end() && now != start.data.end() && then->second == now->second;
    };
    if (!field.starts_with("data.") || field == "data.seed" || is_now(field.substr(5))) {
      start.request.accepted.push_back(field);
    }
  }
  if (last.recipe != start.segment_hash) start.request.accepted.clear();
}

constexpr const char* kKeep = "checkpoint.keep";

bool accepts_keep(const RunStart& start) {
  return std::ranges::find(start.request.accept, kKeep) != start.request.accept.end();
}

/// Fills RunStart::held, and says so in the verdict. Rules in fractions change with the run's length too.
Status judge_keep(const RunFolder& folder, RunStart& start) {
  const ckpt::StartState& state = start.verdict.state;
  if (!state.any() || state.recipe.empty() || start.request.init) return {};
  RT_TRY_SET(const Recipe before, dsl::decode_recipe(state.recipe).with("recipe in " + state.place));
  const Segment& now = start.verdict.segment;
  const std::vector<Keep>&old_keep = before.checkpoint.keep, &new_keep = now.recipe.checkpoint.keep;
  const int64_t old_steps = RunClock(before, state.position.past).step_of(before.stop, 0);
  if (new_keep.empty() || (old_keep == new_keep && old_steps == now.steps)) return {};
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, folder.checkpoints()));
  std::vector<ckpt::CheckpointInfo> complete;
  std::ranges::copy_if(catalog.checkpoints, std::back_inserter(complete), &ckpt::CheckpointInfo::complete);
  RT_TRY_SET(start.held, ckpt::removed_by_change(complete, old_keep, old_steps, new_keep, now.steps));
  if (start.held.empty()) return {};
  start.verdict.notes.push_back(
      fmt::format("{}: the new rules would remove {} {}, which the old ones keep: {}", kKeep,
                  plural(std::ssize(start.held), "step"), fmt::join(start.held, ", "),
                  accepts_keep(start) ? "accepted" : "they stay; --accept checkpoint.keep lets them go"));
  return {};
}

/// The line of lineage that this start adds; nothing where it goes on in the segment under way.
std::optional<LineageEntry> next_line(const RunStart& start) {
  const StartVerdict& verdict = start.verdict;
  if (verdict.finished) return std::nullopt;
  const trainer::TrainPosition& at = verdict.state.position;
  LineageEntry entry{.at = {at.step, at.samples, at.tokens},
                     .updates = at.step - at.loss_scale.skipped - at.guards.skipped,
                     .recipe = start.segment_hash,
                     .data = start.data,
                     .tokenizer = start.tokenizer};
  entry.lr_begins =
      verdict.segment.recipe.optimizer.lr_from == LrFrom::kStage && verdict.segment.past.lr_step == at.step;
  if (start.request.init) entry.from = verdict.state.place;
  const std::vector<LineageEntry> segments = start.lineage.segments();
  // A start that was killed may have written it, with another checkpoint to go back to.
  const std::vector<RollBack> before = start.lineage.roll_backs();
  const bool written = std::ranges::any_of(before, [&](const RollBack& one) {
    return start.rolls_back && one.step == start.rolls_back->step && one.number == start.rolls_back->number &&
           one.skip == start.rolls_back->skip;
  });
  if (start.rolls_back && !written) {
    entry.cause = "roll_back";
    entry.roll_back = start.rolls_back;
  } else if (start.lowers) {
    entry.cause = "lower_lr";
    entry.lowering = start.lowers;
  } else if (segments.empty()) {
    entry.cause = start.request.init ? "init_from" : "start";
  } else if (const LineageEntry& last = segments.back(); last.recipe != start.segment_hash) {
    entry.cause = verdict.segment.index > 0 && !verdict.edited ? "stage" : "recipe";
  } else if (last.data != start.data || last.tokenizer.file != start.tokenizer.file ||
             !text::tokenizer_changes("", last.tokenizer, start.tokenizer).empty()) {
    entry.cause = "data";
  } else if ((start.goes_back && !start.rolls_back) || at.step < last.at.step) {
    entry.cause = "back_to";
  } else if (entry.lr_begins && at.step > last.at.step) {
    entry.cause = "stage";  // that sets the schedule as it was: it begins anew
  } else {
    return std::nullopt;
  }
  for (const FieldVerdict& one : verdict.changes) {
    entry.changes.push_back(one.json());
    if (one.change == dsl::ChangeClass::kAccept) entry.accepted.push_back(one.field);
  }
  return start.lineage.next(std::move(entry));
}

}  // namespace

ckpt::StartLook start_look(const fs::path& run, const std::string& id, const Recipe& recipe) {
  ckpt::StartLook look{.checkpoints_dir = run / "checkpoints", .run_id = id, .folders = {ckpt::kSharedMemory}};
  if (const std::string& offload = recipe.optimizer.offload; !offload.empty()) {
    look.folders.push_back(fs::absolute(offload).lexically_normal().string());
  }
  return look;
}

int64_t RunStart::level_after() const {
  std::vector<LineageEntry> segments = lineage.segments();
  if (begins) segments.push_back(*begins);
  int64_t out = 0;
  for (const LineageEntry& segment : segments) {
    const bool moves = std::ranges::any_of(segment.changes, [](const nlohmann::json& change) {
      const std::string field = json_string(change, "field");
      return field != "batch.skip" && std::ranges::any_of(std::array{"data", "batch", "model", "objective"},
                                                          [&](const char* block) { return field.starts_with(block); });
    });
    if (moves || segment.cause == "data") out = segment.at.step;
  }
  return out;
}

int64_t RunStart::trouble_after() const {
  int64_t out = lowers ? verdict.state.step() : 0;
  for (const LoweredRate& one : lineage.lowered_rates()) {
    if (one.at <= verdict.state.step()) out = std::max(out, one.at);
  }
  return out;
}

fs::path segment_recipe(const RunFolder& folder, const RunStart& start) {
  return folder.path() / "recipes" / (start.segment_hash + ".json");
}

Result<RunStart> examine_state(const RunFolder& folder, const StartOptions& options, ckpt::StartState state) {
  RT_TRY_SET(Lineage lineage, Lineage::read(folder.path()));
  std::vector<RollBack> roll_backs = lineage.roll_backs();
  if (options.roll_back) roll_backs.push_back(*options.roll_back);
  std::vector<LoweredRate> lowered = lineage.lowered_rates();
  const int64_t step = state.position.step;
  std::erase_if(lowered, [&](const LoweredRate& one) { return one.at > step; });
  std::optional<Lowering> lowers = options.lowering;
  if (lowers && options.lowering_by_hand && is_lowered(lineage, *lowers, step))
    lowers = options.lowering_by_hand;  // a start that was killed has lowered it by the guard's
  const bool is_new = lowers && !is_lowered(lineage, *lowers, step);
  if (is_new) lowered.push_back({step, lowers->by, lowers->over, lowers->back});
  RT_TRY_SET(dsl::LoadedRecipe whole, with_decisions(options.loaded, roll_backs, lowered));
  RunStart out{.request = {.recipe = whole.recipe,
                           .world = options.world,
                           .run = folder.path().string(),
                           .accept = options.accept},
               .lineage = std::move(lineage),
               .whole = std::move(whole),
               .goes_back = options.named_step,
               .rolls_back = options.roll_back,
               .lowers = is_new ? lowers : std::nullopt,
               .asked_to_lower = lowers.has_value()};
  if (!state.any() && !options.init.path.empty() && !options.init_is_foreign) {
    ckpt::PosixBackend io;
    RT_TRY_SET(state, ckpt::state_in(io, options.init.path).with(options.init.path));
    out.request.init = true;
    out.request.weights_only = options.init.weights_only;
  }
  {
    // The segment's hash decides what was accepted; where it begins needs no judgement yet.
    const trainer::TrainPosition at = out.request.weights_only ? trainer::TrainPosition{} : state.position;
    RT_TRY_SET(const Segment segment, segment_at(out.request.recipe, at, nullptr));
    out.segment_json = dsl::encode_recipe(segment.recipe);
    out.segment_hash = dsl::recipe_hash(out.segment_json);
    out.remaining = loaded_from(segment.remaining, out.whole);
    RT_TRY_SET(out.data, contents_of(segment.recipe));
    RT_TRY_SET(out.tokenizer, text::tokenizer_hashes(segment.recipe.tokenizer));
  }
  take_accepted(out);
  const std::vector<LineageEntry> segments = out.lineage.segments();
  if (!segments.empty()) out.request.tokenizer_before = segments.back().tokenizer;
  out.request.tokenizer_now = out.tokenizer;
  RT_TRY_SET(out.verdict, judge_start(out.request, std::move(state)));
  if (is_new && lowers->onset > 0 && out.verdict.finished && !out.request.init) {
    StartOptions as_it_is = options;  // no step is left whose rate a guard could lower
    as_it_is.lowering = std::exchange(as_it_is.lowering_by_hand, std::nullopt);
    RT_TRY_SET(RunStart ended, examine_state(folder, as_it_is, std::move(out.verdict.state)));
    ended.asked_to_lower = true;
    return ended;
  }
  if (const auto& by_hand = options.lowering_by_hand;
      by_hand && is_new && lowers->onset > 0 && !is_lowered(out.lineage, *by_hand, step)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--lower-lr {},over={},back={}: {} says that a guard lowers the rate at this start, times "
                             "{} for {}; start without --lower-lr, or remove that file",
                             by_hand->by, by_hand->over, by_hand->back, (folder.path() / "lowering_lr.json").string(),
                             lowers->by, count_text(lowers->over, "step"))};
  }
  RT_TRY(judge_keep(folder, out));
  if (!out.lineage.problem().empty()) out.verdict.notes.push_back("warning: " + out.lineage.problem());
  out.begins = next_line(out);
  return out;
}

Result<RunStart> examine_start(const RunFolder& folder, const StartOptions& options) {
  ckpt::PosixBackend io;
  ckpt::StartLook look = start_look(folder.path(), folder.id(), options.loaded.recipe);
  look.verify = options.verify;
  RT_TRY_SET(ckpt::StartState state, ckpt::look_at_start(io, look));
  return examine_state(folder, options, std::move(state));
}

Status hold_kept_steps(const RunFolder& folder, const RunStart& start) {
  ckpt::PosixBackend io;
  if (!accepts_keep(start) && start.held.empty()) return {};
  return ckpt::hold_steps(io, folder.checkpoints(), accepts_keep(start) ? std::vector<int64_t>() : start.held,
                          "checkpoint.keep changed, and that was not accepted");
}

Status begin_segment(const RunFolder& folder, RunStart& start) {
  if (start.begins) return start.lineage.append(*start.begins, start.segment_json);
  if (!is_gone(segment_recipe(folder, start))) return {};
  ckpt::PosixBackend io;  // of a finished run, or removed by hand
  RT_TRY(ckpt::make_dirs(io, folder.path() / "recipes"));
  return write_text_file(segment_recipe(folder, start), start.segment_json);
}

}  // namespace cairn::tools
