#include "tools/run/folder/lineage.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <set>
#include <utility>

#include "ckpt/persist/read.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/change_rules.h"
#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "dsl/stages.h"
#include "runtime/core/clock.h"
#include "runtime/core/count_text.h"
#include "runtime/core/new_file.h"
#include "runtime/data/dataset.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kLineageName = "lineage.jsonl";
constexpr const char* kAdvice =
    "this line and those behind it are not read. Bring the file back from a copy of the run folder, or leave it: no "
    "training needs it, and a start that adds a line keeps it as lineage.damaged-N.jsonl";

fs::path recipe_file(const fs::path& run, const std::string& hash) { return run / "recipes" / (hash + ".json"); }

std::string hash_of(std::string_view line) { return fmt::format("{:016x}", XXH3_64bits(line.data(), line.size())); }

/// Throws json::exception where a field is missing or of another type.
LineageEntry entry_from(const json& line) {
  LineageEntry out;
  line.at("n").get_to(out.n);
  line.at("prev").get_to(out.prev);
  line.at("time").get_to(out.time);
  line.at("cause").get_to(out.cause);
  const json& at = line.at("at");
  at.at("step").get_to(out.at.step);
  at.at("samples").get_to(out.at.samples);
  at.at("tokens").get_to(out.at.tokens);
  at.at("updates").get_to(out.updates);
  line.at("recipe").get_to(out.recipe);
  out.changes = line.at("changes");
  line.at("accepted").get_to(out.accepted);
  for (const auto& [name, source] : line.at("data").items()) {
    out.data[name] = {source.at("content").get<std::string>(), source.at("tokens").get<int64_t>()};
  }
  out.tokenizer.file = json_string(line, "tokenizer");
  if (const auto beside = line.find("tokenizer_beside"); beside != line.end()) {  // lines of older builds have none
    beside->get_to(out.tokenizer.beside.emplace());
  }
  out.lr_begins = json_flag(line, "lr_begins");
  out.from = json_string(line, "from");
  if (const auto roll_back = line.find("roll_back"); roll_back != line.end())
    out.roll_back = roll_back_from(*roll_back);
  if (const auto lowering = line.find("lowering"); lowering != line.end()) out.lowering = lowering_from(*lowering);
  return out;
}

}  // namespace

std::string line_of(const LineageEntry& entry) {
  json data = json::object();
  for (const auto& [name, source] : entry.data) data[name] = {{"content", source.content}, {"tokens", source.tokens}};
  json out{{"n", entry.n},
           {"prev", entry.prev},
           {"time", entry.time},
           {"cause", entry.cause},
           {"at",
            {{"step", entry.at.step},
             {"samples", entry.at.samples},
             {"tokens", entry.at.tokens},
             {"updates", entry.updates}}},
           {"recipe", entry.recipe},
           {"changes", entry.changes},
           {"accepted", entry.accepted},
           {"data", std::move(data)}};
  if (!entry.tokenizer.file.empty()) out["tokenizer"] = entry.tokenizer.file;
  if (entry.tokenizer.beside) out["tokenizer_beside"] = *entry.tokenizer.beside;
  if (entry.lr_begins) out["lr_begins"] = true;
  if (!entry.from.empty()) out["from"] = entry.from;
  if (entry.roll_back) out["roll_back"] = to_json(*entry.roll_back);
  if (entry.lowering) out["lowering"] = to_json(*entry.lowering);
  return json_text(out);
}

Result<Lineage> Lineage::read(const fs::path& run) {
  Lineage out;
  out.run_ = run;
  const fs::path file = run / kLineageName;
  const Result<std::string> text = read_text_file(file);
  if (!text.ok()) return ckpt::is_not_found(text.error()) ? Result<Lineage>(std::move(out)) : text.error();
  std::string_view rest = text.value();
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    const std::string where = fmt::format("{}:{}", file.string(), out.entries_.size() + 1);
    const auto damaged = [&](std::string_view what) { out.problem_ = fmt::format("{}: {}; {}", where, what, kAdvice); };
    if (end == std::string_view::npos) {
      damaged("the line has no end");
      break;
    }
    const json fields = json_or_nothing(line);
    if (!fields.is_object()) {
      damaged("the line is no JSON object");
      break;
    }
    try {
      LineageEntry entry = entry_from(fields);
      if (entry.prev != out.head()) {
        damaged(
            fmt::format("it follows a line with hash \"{}\", and the one before has \"{}\"", entry.prev, out.head()));
        break;
      }
      entry.hash = hash_of(line);
      out.entries_.push_back(std::move(entry));
    } catch (const json::exception&) {
      damaged("a field of the line is missing or of another type");
      break;
    }
    out.text_.append(rest.substr(0, end + 1));
    rest.remove_prefix(end + 1);
  }
  return out;
}

std::vector<LineageEntry> Lineage::segments() const {
  std::vector<LineageEntry> out;
  for (const LineageEntry& entry : entries_) {
    while (!out.empty() && out.back().at.step >= entry.at.step) out.pop_back();
    out.push_back(entry);
  }
  return out;
}

std::vector<RollBack> Lineage::roll_backs() const {
  std::vector<RollBack> out;
  for (const LineageEntry& entry : entries_) {
    while (!out.empty() && out.back().to_step > entry.at.step) out.pop_back();
    if (entry.roll_back) out.push_back(*entry.roll_back);
  }
  return out;
}

std::vector<LoweredRate> Lineage::lowered_rates() const {
  std::vector<LoweredRate> out;
  for (const LineageEntry& entry : lowerings()) {
    out.push_back({entry.at.step, entry.lowering->by, entry.lowering->over, entry.lowering->back});
  }
  return out;
}

std::vector<LineageEntry> Lineage::lowerings() const {
  std::vector<LineageEntry> out;
  for (const LineageEntry& entry : entries_) {
    while (!out.empty() && out.back().at.step > entry.at.step) out.pop_back();
    if (entry.lowering) out.push_back(entry);
  }
  return out;
}

LineageEntry Lineage::next(LineageEntry entry) const {
  entry.n = std::ssize(entries_) + 1;
  entry.prev = head();
  entry.time = SystemClock().unix_s();
  entry.hash = hash_of(line_of(entry));
  return entry;
}

Status Lineage::keep_damaged() const {
  RT_TRY_SET(const std::string text, read_text_file(run_ / kLineageName));
  for (int64_t n = 1;; ++n) {
    RT_TRY_SET(NewFile copy, NewFile::beside(run_ / fmt::format("lineage.damaged-{}.jsonl", n)));
    RT_TRY(copy.write(text));
    RT_TRY_SET(const bool kept, copy.publish_if_free(Durable::kYes));
    if (kept) return {};
  }
}

Status Lineage::append(LineageEntry entry, const std::string& recipe_json) {
  ckpt::PosixBackend io;
  RT_TRY(ckpt::make_dirs(io, run_ / "recipes"));
  const fs::path recipe = recipe_file(run_, entry.recipe);
  if (is_gone(recipe)) RT_TRY(write_text_file(recipe, recipe_json));
  if (!problem_.empty()) RT_TRY(keep_damaged());
  const std::string text = text_ + line_of(entry) + "\n";
  RT_TRY(write_text_file(run_ / kLineageName, text));
  text_ = text;
  entries_.push_back(std::move(entry));
  problem_.clear();
  return {};
}

namespace {

/// `recipe` with all that changes nothing that is trained as `last` has it, and its sources as they were.
Status make_replayable(Recipe& recipe, const Recipe& last, const LineageEntry& entry, const LineageEntry& newest) {
  for (const dsl::FieldChange& change : dsl::compare_recipes(recipe, last)) {
    if (change.path.starts_with("data.")) continue;
    if (dsl::change_rule(change.path).change == dsl::ChangeClass::kExact) RT_TRY(dsl::set_field(recipe, change));
  }
  const bool same_file = entry.tokenizer.file == newest.tokenizer.file;
  if (same_file && text::tokenizer_changes("", entry.tokenizer, newest.tokenizer).empty())
    recipe.tokenizer = last.tokenizer;  // the same file, elsewhere
  for (DataSource& source : recipe.data.sources) {
    const std::string name = source.name;
    const auto then = entry.data.find(name), now = newest.data.find(name);
    if (then == entry.data.end() || (now != newest.data.end() && now->second == then->second)) continue;
    source.tokens = then->second.tokens;
  }
  return {};
}

/// How many updates a guard has left out up to the newest checkpoint, beside the steps that `last` names. 0 without
/// one.
Result<int64_t> skipped_unnamed(const fs::path& run, const Recipe& last) {
  ckpt::PosixBackend io;
  const Result<ckpt::CheckpointInfo> newest = ckpt::newest_complete(io, run / "checkpoints");
  if (!newest.ok()) return int64_t{0};
  RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(io, newest.value().dir));
  RT_TRY_SET(const trainer::TrainPosition at, ckpt::position_of(manifest));
  const int64_t named = std::ranges::count_if(last.watch.skip_steps, [&](int64_t step) { return step <= at.step; });
  return std::max<int64_t>(0, at.guards.skipped - named);
}

/// Steps of the run whose update was left out, as its metrics have them, and those ahead that `last` names. Errors:
/// those of reading them; kInvalidInput where they do not have all.
Result<std::vector<int64_t>> skipped_steps(const fs::path& run, const Recipe& last) {
  std::vector<telemetry::StepMetrics> told;
  if (!is_gone(run / "metrics.jsonl")) {
    RT_TRY_SET(told, telemetry::read_metrics(run / "metrics.jsonl"));
  }
  std::set<int64_t> out;
  for (const telemetry::StepMetrics& step : told) out.insert(step.skipped_steps.begin(), step.skipped_steps.end());
  if (told.empty()) {
    RT_TRY_SET(const int64_t unnamed, skipped_unnamed(run, last));
    if (unnamed > 0)
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{}: it has no steps, and {} of the run {} left out that no recipe names",
                      (run / "metrics.jsonl").string(), count_text(unnamed, "update"), unnamed == 1 ? "was" : "were")};
  }
  const bool counts = !told.empty() && !told.back().loss_scale;  // an overflow of fp16 counts too, and comes again
  if (counts && std::ssize(out) != told.back().skipped)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: {} updates were left out, and its lines name {} of them",
                             (run / "metrics.jsonl").string(), told.back().skipped, out.size())};
  for (const int64_t step : last.watch.skip_steps) {
    if (told.empty() || step > told.back().step) out.insert(step);
  }
  return std::vector<int64_t>(out.begin(), out.end());
}

/// The recipe says all that guards have done; they do no more.
void replace_guards(Recipe& recipe, const std::vector<int64_t>& skipped) {
  WatchConfig& watch = recipe.watch;
  for (auto* actions : {&watch.on_outlier, &watch.on_divergence, &watch.on_drop, &watch.on_not_finite, &watch.on_sdc})
    actions->clear();
  watch.skip = {};
  watch.recompute = {};
  watch.audit_steps = watch.replica_steps = 0;
  watch.lower_lr = {};
  watch.skip_steps = skipped;
}

}  // namespace

Result<SourceContent> content_of(const data::TokenSource& train) {
  RT_TRY_SET(const uint64_t content, data::content_hash(train, train.token_count()));
  return SourceContent{fmt::format("{:016x}", content), train.token_count()};
}

Result<Recipe> recipe_of_segment(const fs::path& run, const LineageEntry& segment) {
  const fs::path file = recipe_file(run, segment.recipe);
  RT_TRY_SET(const std::string text, read_text_file(file));
  return dsl::decode_recipe(text).with(file.string());
}

Result<Recipe> replay_recipe(const fs::path& run, const Lineage& lineage) {
  if (!lineage.problem().empty()) return Error{ErrorCode::kCorrupt, lineage.problem()};
  const std::vector<LineageEntry> segments = lineage.segments();
  const auto refuse = [&](const std::string& why) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no recipe does this run again: {}", run.string(), why)};
  };
  if (segments.empty()) return refuse("it has no lineage.jsonl, as a run of an older build, or a copied checkpoint");
  const LineageEntry& first = segments.front();
  if (first.at.step > 0) return refuse(fmt::format("its lineage begins at step {}", first.at.step));
  if (!first.from.empty()) return refuse(fmt::format("it began from {}", first.from));
  std::vector<Recipe> recipes;
  for (const LineageEntry& segment : segments) {
    for (const std::string& field : segment.accepted) {
      // A rate that jumps is a rate all the same.
      if (dsl::may_change_in_stage(field) && !field.starts_with("data.")) continue;
      return refuse(fmt::format("at step {} it resumed with --accept {}", segment.at.step, field));
    }
    RT_TRY_SET(Recipe recipe, recipe_of_segment(run, segment));
    recipes.push_back(std::move(recipe));
  }
  const Recipe last = recipes.back();
  RT_TRY_SET(const std::vector<int64_t> skipped, skipped_steps(run, last));
  for (size_t k = 0; k < recipes.size(); ++k) {
    RT_TRY(make_replayable(recipes[k], last, segments[k], segments.back()));
    replace_guards(recipes[k], skipped);
  }
  Recipe out = recipes.front();
  for (size_t k = 1; k < recipes.size(); ++k) {
    const bool sets_schedule = recipes[k].optimizer.lr_from == LrFrom::kStage && segments[k].lr_begins;
    RecipeStage stage{.at = {Span::Unit::kSteps, static_cast<double>(segments[k].at.step)},
                      .changes = dsl::stage_changes(recipes[k - 1], recipes[k], sets_schedule)};
    out.stages.push_back(std::move(stage));
  }
  return out;
}

}  // namespace cairn::tools
