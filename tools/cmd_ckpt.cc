// cairn ckpt: what its subcommands share, and their list.
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <ctime>
#include <nlohmann/json.hpp>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/json/json.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {

namespace fs = std::filesystem;
using nlohmann::json;

Result<fs::path> checkpoints_dir_of(const std::string& path) {
  const fs::path below = fs::path(path) / "checkpoints";
  RT_TRY_SET(const fs::file_type type, type_of(path));
  RT_TRY_SET(const fs::file_type type_below, type_of(below));
  if (type_below == fs::file_type::directory) return below;
  const fs::path plain = (fs::path(path) / "").lexically_normal().parent_path();  // a link's own name ends in no "/"
  std::error_code unknown;
  for (const auto& [at, what] : {std::pair(&plain, type), {&below, type_below}}) {
    if (what == fs::file_type::not_found && fs::is_symlink(fs::symlink_status(*at, unknown)))
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: is a link to nothing; mount or make what it names", at->string())};
  }
  if (type != fs::file_type::directory)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: no such folder; expected a run folder or a folder of step-NNNNNNNN", path)};
  const fs::path named = (fs::absolute(path, unknown) / "").lexically_normal().parent_path();
  const bool by_name = ckpt::parse_step_dir_name(named.filename().string()).has_value();
  RT_TRY_SET(const fs::file_type manifest, type_of(fs::path(path) / ckpt::kManifestName));
  if (by_name || manifest != fs::file_type::not_found) {
    const std::string around = (fs::path(path) / "..").lexically_normal().string();
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is one checkpoint, expected a run folder or a folder of step-NNNNNNNN{}; `cairn ckpt "
                             "inspect` and `verify` without --all take one",
                             path, by_name ? ", such as " + around : "")};
  }
  return fs::path(path);
}

fs::path checkpoint_around(const fs::path& path) {
  std::error_code unknown;
  fs::path at = fs::weakly_canonical(fs::absolute(path, unknown), unknown);
  if (unknown) return {};
  for (; at.has_relative_path(); at = at.parent_path()) {
    if (fs::exists(at / ckpt::kManifestName, unknown) && fs::exists(at / ckpt::kTableName, unknown)) return at;
  }
  return {};
}

Status check_outside_checkpoints(const fs::path& path) {
  const fs::path around = checkpoint_around(path);
  if (around.empty()) return {};
  std::error_code unknown;
  if (fs::equivalent(path, around, unknown))
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: is a checkpoint; name a place outside it", path.string())};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: lies in the folder of a checkpoint, {}, and would go with it; name a place outside it",
                           path.string(), around.string())};
}

std::string run_around(fs::path steps) {
  std::error_code unknown;
  if (steps.filename() != "checkpoints") steps = fs::canonical(steps, unknown);
  if (steps.filename() != "checkpoints") return "";
  const Result<std::string> text = read_text_file(steps.parent_path() / "run.json");
  const json parsed = json_or_nothing(text.ok() ? text.value() : "");
  return parsed.is_object() && parsed.contains("id") && parsed["id"].is_string() ? parsed["id"].get<std::string>() : "";
}

static double age_s(int64_t created_unix_ms) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count() - created_unix_ms) /
         1e3;
}

/// Days from two on: checkpoints grow older than format_duration is made for.
std::string age_text(int64_t created_unix_ms) {
  constexpr double kDay = 86400;
  const double seconds = std::max(0.0, age_s(created_unix_ms));
  if (seconds >= 2 * kDay) return fmt::format("{:.0f} days", seconds / kDay);
  return telemetry::format_duration(seconds);
}

std::string mesh_text(const ckpt::MeshInfo& mesh) {
  return fmt::format("tp {}{} x pp {} x dp {}{}, zero {}, {}", mesh.tp,
                     mesh.cp > 1 ? fmt::format(" x cp {}", mesh.cp) : "", mesh.pp, mesh.dp,
                     mesh.ep > 1 ? fmt::format(" (ep {})", mesh.ep) : "", mesh.zero, mesh.precision);
}

json mesh_json(const ckpt::MeshInfo& mesh) {
  return {{"tp", mesh.tp}, {"pp", mesh.pp},     {"dp", mesh.dp},       {"ep", mesh.ep},
          {"cp", mesh.cp}, {"zero", mesh.zero}, {"world", mesh.world}, {"precision", mesh.precision}};
}

namespace {
std::atomic<bool> stop_asked{false};
}

const std::atomic<bool>& stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_asked.store(true, std::memory_order_relaxed); };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
  return stop_asked;
}

Result<int64_t> memory_option(uint64_t bytes) {
  if (bytes > uint64_t{1} << 50)
    return Error{ErrorCode::kInvalidInput, fmt::format("--memory {}: at most 1 PiB", bytes)};
  // glibc raises this when large blocks are freed, keeps the next ones, and a promise about memory would not hold.
  mallopt(M_MMAP_THRESHOLD, 256 << 10);
  return static_cast<int64_t>(bytes);
}

namespace {

Status check_target_recipe(const fs::path& run, const std::string& canonical_json, const ckpt::Names& names) {
  std::error_code failed;
  if (!fs::exists(run / "recipe.resolved.json", failed)) return {};
  // What a command that was killed has left: nothing was trained there, and no step came of it.
  if (names.steps.empty() && !fs::exists(run / "world", failed)) return {};
  RT_TRY_SET(const std::string there, recipe_of_run(run));
  if (there == canonical_json) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} is a run with another recipe (`cairn diff` shows how it differs); give a new folder, or "
                           "--overwrite",
                           run.string())};
}

}  // namespace

Result<std::unique_ptr<TargetRun>> TargetRun::open(const fs::path& run, const dsl::LoadedRecipe& recipe,
                                                   const std::string& name, int64_t step, bool overwrite) {
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}", run.string(), why)};
  };
  if (run.empty()) return Error{ErrorCode::kInvalidInput, "the new run's folder has no name"};
  std::error_code failed;
  RT_TRY_SET(const fs::file_type type, type_of(run));
  if (type != fs::file_type::not_found && type != fs::file_type::directory)
    return refuse("is a file, expected a folder");
  std::unique_ptr<TargetRun> out(new TargetRun);
  out->run_ = run;
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names own, ckpt::list_names(io, run));
  const fs::path plain = (run / "").lexically_normal().parent_path();
  if (!own.steps.empty() || ckpt::parse_step_dir_name(plain.filename().string()))
    return refuse("is a folder of checkpoints or one of them; give a run's folder");
  RT_TRY(check_outside_checkpoints(run));
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
  for (auto newest = names.steps.rbegin(); newest != names.steps.rend() && *newest > step && !out->newer_; ++newest) {
    if (ckpt::look_at_checkpoint(io, run / "checkpoints", *newest).complete) out->newer_ = *newest;
  }
  const bool there = std::ranges::find(names.steps, step) != names.steps.end();
  if (!there) out->new_step_ = run / "checkpoints" / ckpt::step_dir_name(step);
  if (!overwrite) {
    RT_TRY(check_target_recipe(run, recipe.canonical_json, names));
    if (there)
      return refuse(fmt::format("step {} is there already; give a new folder, or --overwrite to replace it", step));
    if (out->newer_) {
      return refuse(
          fmt::format("has step {}, which is newer than step {}: `cairn resume` would resume from that one; "
                      "give a new folder, or --overwrite to have both",
                      *out->newer_, step));
    }
  }
  RT_TRY_SET(RunFolder folder, RunFolder::open(run, name));  // nobody trains in it meanwhile
  if (!folder.doubt().empty()) fmt::print(stderr, "warning: {}\n", folder.doubt());
  if (fs::exists(run / "recipe.resolved.json", failed)) {
    RT_TRY(recipe_of_run(run));  // one that waits until its step can be read is not to be written over
    RT_TRY_SET(out->recipe_before_, read_text_file(run / "recipe.resolved.json"));
  }
  out->folder_ = std::move(folder);  // what is undone from here on puts that recipe back
  RT_TRY(out->folder_->settle());
  // Without it no step is to be resumed; but one that other steps there are resumed with stays until the new step is
  // there, or a kill would leave them with a stranger's.
  if (out->recipe_before_ && *out->recipe_before_ != recipe.canonical_json && !names.steps.empty()) {
    out->recipe_after_ = recipe;
    RT_TRY(out->folder_->announce_recipe(step, recipe.canonical_json));
  } else {
    RT_TRY(out->folder_->write_recipe(recipe));
  }
  return out;
}

Status TargetRun::keep() {
  kept_ = true;
  if (!recipe_after_) return {};
  RT_TRY(folder_->write_recipe(*recipe_after_));
  return folder_->settle_recipe();
}

TargetRun::~TargetRun() {
  if (kept_ || !folder_) return;
  std::error_code ignored;
  // A failure after the commit: the step is there, and goes with its recipe.
  if (recipe_after_) {
    ignore(folder_->settle_recipe(), "the failure itself is told");
    return;
  }
  if (!new_step_.empty() && fs::exists(new_step_, ignored)) return;
  if (recipe_before_) {
    ignore(write_text_file(folder_->recipe(), *recipe_before_), "the failure itself is told");
  } else {
    fs::remove(folder_->recipe(), ignored);
    fs::remove(run_ / "recipe", ignored);  // when it is empty
  }
  folder_->remove_made();
}

Result<std::vector<std::string>> TargetRun::clean(ckpt::IoBackend& io, std::optional<int64_t> but_step) {
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, folder_->checkpoints()));
  std::vector<ckpt::WriterId> stay;
  for (const std::string& name : names.leftovers) {
    const auto work = ckpt::parse_work_dir_name(ckpt::kTmpPrefix, name);
    if (work && work->step == but_step) stay.push_back(work->writer);
  }
  RT_TRY_SET(ckpt::CleanReport cleaned,
             ckpt::clean_leftovers(io, folder_->checkpoints(), [&](const ckpt::WriterId& writer) {
               return std::ranges::find(stay, writer) != stay.end() || ckpt::may_be_alive(writer);
             }));
  return std::move(cleaned.removed);
}

namespace {

/// Leaves by their path; "optimizer.lr[1].to". A Span is one leaf.
void flatten(const json& value, const std::string& path, std::map<std::string, std::string>* out) {
  const bool span = value.is_object() && value.size() == 2 && value.contains("unit") && value.contains("value") &&
                    value["value"].is_number() && value["unit"].is_string();
  if (span) {
    (*out)[path] = fmt::format("{} {}", value["value"].get<double>(), value["unit"].get<std::string>());
  } else if (value.is_object()) {
    for (const auto& [key, below] : value.items()) flatten(below, path.empty() ? key : path + "." + key, out);
  } else if (value.is_array() && !value.empty()) {
    for (size_t i = 0; i < value.size(); ++i) flatten(value[i], fmt::format("{}[{}]", path, i + 1), out);
  } else {
    (*out)[path] = json_text(value);
  }
}

}  // namespace

Changes json_changes(const std::string& left, const std::string& right) {
  Changes out;
  if (left == right) return out;
  const json parsed[2] = {json_or_nothing(left), json_or_nothing(right)};
  if (!parsed[0].is_object() || !parsed[1].is_object()) return {{"", {left, right}}};
  std::map<std::string, std::string> sides[2];
  for (const int side : {0, 1}) flatten(parsed[side], "", &sides[side]);
  for (const auto& [path, value] : sides[0]) {
    const auto other = sides[1].find(path);
    if (other == sides[1].end()) {
      out[path] = {value, ""};
    } else if (other->second != value) {
      out[path] = {value, other->second};
    }
  }
  for (const auto& [path, value] : sides[1]) {
    if (!sides[0].contains(path)) out[path] = {"", value};
  }
  return out;
}

json changes_json(const Changes& changes) {
  json list = json::array();
  for (const auto& [path, pair] : changes) {
    json change = {{"path", path}};
    if (!pair.first.empty()) change["left"] = pair.first;
    if (!pair.second.empty()) change["right"] = pair.second;
    list.push_back(std::move(change));
  }
  return list;
}

void print_changes(const Changes& changes) {
  const Palette color = palette_for(STDOUT_FILENO);
  for (const auto& [path, pair] : changes) {
    fmt::print("{}{}{}: {}{}{} -> {}{}{}\n", color.bold, printable(path), color.reset, color.red,
               pair.first.empty() ? "(none)" : printable(pair.first), color.reset, color.green,
               pair.second.empty() ? "(none)" : printable(pair.second), color.reset);
  }
}

ByteProgress::ByteProgress(std::string verb) : verb_(std::move(verb)), line_(STDERR_FILENO) {}

void ByteProgress::show(int64_t done_bytes, int64_t total_bytes) {
  if (!line_.terminal()) return;
  const auto now = Clock::now();
  const auto since = [&](Clock::time_point t) { return std::chrono::duration<double>(now - t).count(); };
  if (since(shown_) < 0.1 && done_bytes != total_bytes) return;
  const double rate = since(start_) > 0 ? static_cast<double>(done_bytes) / since(start_) : 0;
  const double left_s = rate > 0 ? static_cast<double>(total_bytes - done_bytes) / rate : 0;
  const double percent =
      100.0 * static_cast<double>(done_bytes) / static_cast<double>(std::max<int64_t>(1, total_bytes));
  line_.show(
      {{fmt::format("{} {} of {} ({:.0f} %)", verb_, format_bytes(done_bytes), format_bytes(total_bytes), percent), 0},
       {fmt::format("{:.2f} GB/s", rate / 1e9), 2},
       {fmt::format("{} left", telemetry::format_duration(left_s)), 1}},
      "", false);
  shown_ = now;
}

void add_ckpt(CLI::App& app, Session& session) {
  CLI::App* ckpt = app.add_subcommand(
      "ckpt", "list, inspect, verify, compare, average, merge, edit, label, prune, reshard and copy checkpoints");
  ckpt->require_subcommand(1);
  for (const auto add :
       {add_ckpt_ls, add_ckpt_inspect, add_ckpt_verify, add_ckpt_diff, add_ckpt_cat, add_ckpt_average, add_ckpt_merge,
        add_ckpt_edit, add_ckpt_label, add_ckpt_prune, add_ckpt_reshard, add_ckpt_copy})
    add(*ckpt, session);
}

}  // namespace cairn::tools
