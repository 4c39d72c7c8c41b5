// The stages of a recipe: each is one more layer over the layers of the recipe and the stages before it, resolved and
// checked as a recipe of its own.
#include <fmt/format.h>

#include <algorithm>

#include "dsl/checks.h"
#include "dsl/compare.h"
#include "dsl/resolve.h"
#include "dsl/stages.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

/// The optimizer's table of a stage: what sets the schedule there says where it counts from.
NodePtr with_lr_from(const Node& optimizer, bool* sets_schedule) {
  Node out = optimizer;
  const Entry* lr = optimizer.find("lr");
  const Entry* from = optimizer.find("lr_from");
  if (from != nullptr && from->value->kind == Node::Kind::kUnset) {
    std::erase_if(out.entries, [](const Entry& entry) { return entry.key == "lr_from"; });
  } else if (from != nullptr) {
    *sets_schedule = true;
  } else if (lr != nullptr && lr->value->kind != Node::Kind::kUnset) {
    *sets_schedule = true;
    Node stage;
    stage.kind = Node::Kind::kString;
    stage.text = "stage";
    out.entries.push_back({"lr_from", std::make_shared<const Node>(std::move(stage)), lr->place});
  }
  return std::make_shared<const Node>(std::move(out));
}

}  // namespace

/// These layers with the stage over them: nothing resolved yet, mistakes of the stage's own values noted.
Resolver Resolver::layered(const Node& stage, bool* sets_schedule) const {
  Resolver out(files_);
  out.settings_ = settings_;
  out.blocks_ = blocks_;
  out.reported_ = reported_;
  out.epoch_samples_ = epoch_samples_;
  std::vector<Entry> entries;
  for (const Entry& entry : stage.entries) {
    if (entry.key == "at") continue;
    if (entry.key == "stages") {
      out.complain("stages", entry.place, {"unknown_field", ": a stage has no stages of its own", "", ""});
      continue;
    }
    entries.push_back(entry);
    const bool table = entry.value->is_table() || entry.value->kind == Node::Kind::kReplace;
    if (entry.key == "optimizer" && table) entries.back().value = with_lr_from(*entry.value, sets_schedule);
  }
  out.apply_entries(recipe_block(), "", entries);
  return out;
}

void Resolver::resolve_stages(Recipe& recipe, int64_t world) {
  const auto setting = settings_.find("stages");
  if (setting == settings_.end()) return;
  const Setting stages = setting->second;
  const Json beginnings = *convert("stages", *find_field("stages"), *stages.value, stages.place, Pass::kFinal);
  std::vector<NodePtr> nodes;
  if (stages.value->kind == Node::Kind::kCtor) nodes.push_back(stages.value);
  if (nodes.empty())
    for (const Entry& entry : stages.value->entries) nodes.push_back(entry.value);

  std::vector<Recipe> segments = {recipe};
  PastWalk walk(recipe);
  auto before = std::make_unique<Resolver>(files_);
  before->settings_ = settings_;
  before->settings_.erase("stages");
  before->blocks_ = blocks_;
  before->reported_ = reported_;
  before->epoch_samples_ = epoch_samples_;
  const auto told = [&](const Diagnostic& one) {
    return std::any_of(diagnostics_.begin(), diagnostics_.end(), [&](const Diagnostic& d) {
      return d.path == one.path && (d.message == one.message || d.message.ends_with(": " + one.message));
    });
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::string name = fmt::format("stages[{}]", i + 1);
    bool sets_schedule = false;
    Resolver after = before->layered(*nodes[i], &sets_schedule);
    // Of a value that the stage did not write itself the stage's own line is told: it is the stage that breaks it.
    const auto locate_in_stage = [&](const std::string& path) {
      const auto here = after.locate(after.place_of(path));
      return here == before->locate(before->place_of(path)) ? after.locate(nodes[i]->place) : here;
    };
    Recipe next;
    after.fill(recipe_block(), "", &next);
    RecipeStage stage;
    if (const Json& at = beginnings[i].at("at"); !at.is_null())
      find_field("stages")->block->find("at")->store(&stage, at);
    stage.changes = stage_changes(segments.back(), next, sets_schedule);
    const std::vector<FieldChange> changes = compare_recipes(segments.back(), next);
    recipe.stages.push_back(stage);
    segments.push_back(next);

    bool allowed = true;
    for (const FieldChange& change : changes) {
      std::tuple<std::string, int> line = locate_in_stage(change.path);
      if (may_change_in_stage(change.path)) {
        stage_origins_.push_back(
            {name + "." + change.path, change.after, stages.place.call->layer, std::get<0>(line), std::get<1>(line)});
        continue;
      }
      allowed = false;
      Diagnostic wrong;
      std::tie(wrong.file, wrong.line) = line;
      wrong.path = change.path;
      wrong.code = "not_in_stage";
      wrong.message = fmt::format("{} cannot change in the middle of a run: {} before, {} here", change.path,
                                  change.before.empty() ? "nothing" : change.before,
                                  change.after.empty() ? "nothing" : change.after);
      wrong.source = after.source_line(wrong.file, wrong.line);
      after.diagnostics_.push_back(std::move(wrong));
    }
    const std::optional<RunPast> past = walk.enter(stage, next);
    if (allowed) {
      const size_t own = after.diagnostics_.size();
      after.check(next, world, past);
      for (size_t d = own; d < after.diagnostics_.size(); ++d) {
        Diagnostic& wrong = after.diagnostics_[d];
        std::tie(wrong.file, wrong.line) = locate_in_stage(wrong.path);
        wrong.source = after.source_line(wrong.file, wrong.line);
      }
    }
    for (Diagnostic& wrong : after.diagnostics_) {
      if (told(wrong)) continue;
      wrong.message = name + ": " + wrong.message;
      diagnostics_.push_back(std::move(wrong));
    }
    after.diagnostics_.clear();
    before = std::make_unique<Resolver>(std::move(after));
  }
  if (const auto wrong = stage_out_of_order(recipe, segments)) {
    const Entry* at = nodes[wrong->first]->find("at");
    Diagnostic out = to_diagnostic(wrong->second);
    std::tie(out.file, out.line) = locate(at == nullptr ? nodes[wrong->first]->place : at->place);
    out.source = source_line(out.file, out.line);
    diagnostics_.push_back(std::move(out));
  }
  Json resolved = Json::array();
  for (size_t i = 0; i < nodes.size(); ++i)
    resolved.push_back({{"at", beginnings[i].at("at")}, {"changes", json_or_nothing(recipe.stages[i].changes)}});
  resolved_["stages"] = std::move(resolved);
}

}  // namespace cairn::dsl
