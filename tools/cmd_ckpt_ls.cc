// cairn ckpt ls PATH: steps, ages, sizes, loss, and whether each is complete.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/run_labels.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/plan/batch_schedule.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Leftover {
  std::string name, host;  // host: of its writer, where it is another one
  bool alive = false;
  std::string text() const {
    if (!alive) return "its writer is gone; the run's next start removes it";
    if (name.starts_with(ckpt::kSparePrefix)) return "room for the next save; the run's end or next start removes it";
    if (name.starts_with(ckpt::kPinPrefix) && host.empty()) return "a process reads this step, which stays meanwhile";
    if (host.empty()) return "its writer may be at work";
    return fmt::format("its writer may be at work on {}; if it is gone, prune --leftovers --other-hosts removes it",
                       host);
  }
};

Leftover leftover_of(const std::string& name) {
  const std::optional<ckpt::WorkDir> work = ckpt::parse_work_dir_name(name);
  if (!work) return {.name = name};
  return {name, ckpt::is_of_this_host(work->writer) ? "" : work->writer.host, ckpt::may_be_alive(work->writer)};
}

/// What the manifest of a complete checkpoint has to say in one line.
struct Told {
  std::map<std::string, double> metrics;
  int64_t samples = 0, tokens = 0;
  bool weights_only = false;
  std::string origin, host;
};

Told told_by(const ckpt::Manifest& manifest) {
  const bool moments = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                   [](const ckpt::TensorEntry& tensor) { return ckpt::is_moment_kind(tensor.kind); });
  return {manifest.metrics, manifest.samples, manifest.tokens, !moments, manifest.origin, manifest.writer.host};
}

/// What the rules of the run that these steps are of make of each.
struct Kept {
  std::vector<std::string> rules;    // as the recipe has them; empty: none, and all stay
  std::string best_by;               // the metric of the first that chooses by another one than the loss
  std::map<int64_t, ckpt::Fate> of;  // by step
};

/// By the recipe of the run folder around `dir`, else by that of the newest checkpoint; nullopt where neither tells.
std::optional<Kept> kept_by_rules(const fs::path& dir, const ckpt::Catalog& catalog, ckpt::IoBackend& io) {
  Result<std::string> text = recipe_of_run((dir / "").lexically_normal().parent_path().parent_path());
  RunPast past;
  for (auto info = catalog.checkpoints.rbegin(); info != catalog.checkpoints.rend(); ++info) {
    if (!info->complete) continue;
    const Result<ckpt::Manifest> manifest = ckpt::read_manifest(io, info->dir);
    if (!manifest.ok()) continue;
    if (!text.ok()) text = manifest.value().recipe;
    if (const auto position = ckpt::position_of(manifest.value()); position.ok()) past = position.value().past;
    break;
  }
  if (!text.ok()) return std::nullopt;
  const Result<Recipe> recipe = dsl::decode_recipe(text.value());
  if (!recipe.ok()) return std::nullopt;  // an older build's, or an import's
  const std::vector<Keep>& keep = recipe.value().checkpoint.keep;
  Kept out;
  bool last = false;
  for (const Keep& rule : keep) {
    out.rules.push_back(ckpt::to_text(rule));
    if (rule.kind == Keep::Kind::kBest && rule.metric != "loss" && out.best_by.empty()) out.best_by = rule.metric;
    last |= rule.kind == Keep::Kind::kLast;
  }
  if (keep.empty()) {
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) out.of[info.step] = {info.step, true, "no rules: all"};
    return out;
  }
  const int64_t steps = RunClock(recipe.value(), past).step_of(recipe.value().stop, 0);
  const Result<std::vector<ckpt::Fate>> fates =
      ckpt::plan_retention(catalog.checkpoints, ckpt::retention_policy(keep, steps));
  if (!fates.ok()) return std::nullopt;
  for (const ckpt::Fate& fate : fates.value()) {
    ckpt::Fate& of = out.of[fate.step] = fate;
    constexpr std::string_view kNewest = "last(1)";  // stays whatever the rules are
    if (!last && of.why.starts_with(kNewest)) of.why.replace(0, kNewest.size(), "the newest");
  }
  return out;
}

Result<int> list(const std::string& path, bool as_json) {
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(path));
  ckpt::PosixBackend io;
  Result<ckpt::Catalog> labelled = ckpt::list_checkpoints(io, dir);
  const bool know_labels = labelled.ok();
  ckpt::Catalog catalog;
  if (know_labels) {
    catalog = std::move(labelled).value();
    ckpt::label_from_metrics(io, dir, catalog);
  } else {
    RT_TRY_SET(catalog, ckpt::list_unlabelled(io, dir));
    fmt::print(stderr, "cairn ckpt ls: warning: {}\n", printable(labelled.error().message));
  }
  std::vector<Leftover> leftovers;
  for (const std::string& name : catalog.leftovers) leftovers.push_back(leftover_of(name));
  std::optional<int64_t> newest;
  int64_t bytes = 0;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) newest = info.step;
    bytes += info.size_bytes;
  }
  std::map<int64_t, Told> told;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (!info.complete) continue;
    if (const Result<ckpt::Manifest> manifest = ckpt::read_manifest(io, info.dir); manifest.ok())
      told[info.step] = told_by(manifest.value());
  }
  const std::optional<Kept> kept = know_labels ? kept_by_rules(dir, catalog, io) : std::nullopt;
  if (as_json) {
    json steps = json::array(), rest = json::array();
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
      steps.push_back({{"step", info.step},
                       {"dir", info.dir.string()},
                       {"complete", info.complete},
                       {"created_unix_ms", info.created_unix_ms},
                       {"size_bytes", info.size_bytes}});
      if (!info.complete) steps.back().update({{"problem", info.problem}, {"unread", info.unread}});
      if (info.complete && info.label)
        steps.back().update(
            {{"label", ckpt::to_text(*info.label)}, {"label_why", info.label_why}, {"held", info.held}});
      if (const auto more = told.find(info.step); more != told.end()) {
        steps.back().update({{"metrics", more->second.metrics},
                             {"samples", more->second.samples},
                             {"tokens", more->second.tokens},
                             {"weights_only", more->second.weights_only},
                             {"origin", more->second.origin},
                             {"host", more->second.host}});
      }
    }
    for (json& step : steps) {
      const auto fate = kept ? kept->of.find(step["step"].get<int64_t>()) : std::map<int64_t, ckpt::Fate>::iterator();
      if (kept && fate != kept->of.end()) step.update({{"stays", fate->second.stays}, {"why", fate->second.why}});
    }
    for (const Leftover& leftover : leftovers) {
      rest.push_back(
          {{"name", leftover.name}, {"writer_alive", leftover.alive}, {"other_host", !leftover.host.empty()}});
    }
    print_json({{"dir", dir.string()},
                {"checkpoints", std::move(steps)},
                {"newest_complete", newest ? json(*newest) : json()},
                {"rules", kept ? json(kept->rules) : json()},
                {"leftovers", std::move(rest)},
                {"unknown", catalog.unknown}});
    return 0;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  const std::string best_by = kept ? kept->best_by : "";
  const size_t width = std::max<size_t>(12, best_by.size() + 2);
  if (catalog.checkpoints.empty()) {
    fmt::print("{}: no checkpoints\n", dir.string());
  } else {
    fmt::print("{}{:<16}{:>14}{:>12}{:>12}{}{:>10}{}   {}\n", color.dim, "step", "age", "size", "loss",
               best_by.empty() ? "" : fmt::format("{:>{}}", best_by, width), "label", color.reset, dir.string());
  }
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    const std::string age = info.created_unix_ms == 0 ? "?" : age_text(info.created_unix_ms);
    const auto more = told.find(info.step);
    const auto metric = [&](const std::string& name, size_t wide) {
      const std::string key = ckpt::metric_key(name);
      const bool has = more != told.end() && more->second.metrics.contains(key);
      return fmt::format("{:>{}}", has ? fmt::format("{:.5g}", more->second.metrics.at(key)) : "-", wide);
    };
    const std::string label = info.complete && info.label ? std::string(ckpt::to_text(*info.label)) : "-";
    fmt::print("{:<16}{:>14}{:>12}{}{}{}{:>10}{}   ", info.dir.filename().string(), age, format_bytes(info.size_bytes),
               metric("loss", 12), best_by.empty() ? "" : metric(best_by, width),
               label == "good"                        ? color.green
               : label == "suspect" || label == "bad" ? color.red
                                                      : "",
               label, color.reset);
    const auto fate = kept ? kept->of.find(info.step) : std::map<int64_t, ckpt::Fate>::const_iterator();
    const std::string rule = !kept || kept->rules.empty() || fate == kept->of.end() ? ""
                             : fate->second.stays ? fmt::format("; kept by {}", fate->second.why)
                                                  : fmt::format("; goes: {}", fate->second.why);
    if (info.complete) {
      fmt::print("{}complete{}{}{}{}{}{}\n", color.green, color.reset, info.step == newest ? ", the newest" : "",
                 more != told.end() && more->second.weights_only ? ", weights alone" : "",
                 more != told.end() && !more->second.origin.empty() ? ", " + printable(more->second.origin) : "",
                 info.label_why.empty() ? "" : "; " + printable(info.label_why), rule);
    } else {
      fmt::print("{}{}{}: {}\n", color.red, info.unread ? "not read" : "damaged", color.reset, printable(info.problem));
    }
  }
  if (catalog.checkpoints.size() > 1) fmt::print("{} in all\n", format_bytes(bytes));
  for (const Leftover& leftover : leftovers) {
    fmt::print("left over: {} ({})\n", printable(leftover.name), leftover.text());
  }
  for (const std::string& name : catalog.unknown) fmt::print("not ours:  {}\n", printable(name));
  return 0;
}

}  // namespace

void add_ckpt_ls(CLI::App& ckpt, Session& session) {
  CLI::App* command =
      ckpt.add_subcommand("ls", "steps, ages, sizes, metrics, whether each is complete, and the rule that keeps it");
  const auto place = std::make_shared<ckpt::PlaceOptions>();
  command->add_option("PATH", place->path, "run folder, folder of steps, or s3://bucket/prefix")->required();
  add_store_options(*command, *place);
  add_json_flag(*command, session);
  command->footer(
      "Complete: the manifest holds and all files are there with their sizes. What lies in them is checked by verify.\n"
      "Exit codes: 0 done, 2 refused, 69 the store did not answer, 74 an I/O error.\nExamples:\n  cairn ckpt ls "
      "runs/gpt2\n  cairn ckpt ls runs/gpt2 --json | jq '.checkpoints[].metrics.loss'");
  command->callback([place, &session] {
    session.action = [place, &session] {
      return ckpt::is_store_address(place->path) ? list_store(*place, session.json) : list(place->path, session.json);
    };
  });
}

}  // namespace cairn::tools
