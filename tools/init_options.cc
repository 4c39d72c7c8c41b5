#include "tools/init_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "ckpt/format/names.h"
#include "converters/model_files.h"
#include "runtime/core/new_file.h"
#include "runtime/hub/name.h"
#include "runtime/json/json.h"
#include "tools/hub_source.h"
#include "tools/model_source.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

using Patterns = std::vector<std::string> InitConfig::*;
constexpr std::array<std::pair<const char*, Patterns>, 4> kPatterns = {{{"only", &InitConfig::only},
                                                                        {"except", &InitConfig::except},
                                                                        {"allow_missing", &InitConfig::allow_missing},
                                                                        {"allow_extra", &InitConfig::allow_extra}}};

/// The folder that `path` stands for. A run that has begun once keeps the commit, wherever the branch is now.
Result<std::string> begun_with(const std::string& path, hub::Bare bare, const fs::path& run, HubPending* pending) {
  RT_TRY_SET(const std::optional<hub::Name> name, hub::find_name(path, bare));
  if (!name) return path;
  const fs::path record = run / convert::kHubRecord;
  std::string wanted = path;
  std::error_code error;
  if (fs::exists(record, error)) {
    RT_TRY_SET(const std::string text, read_text_file(record));
    const json kept = json_or_nothing(text);
    const std::string commit = json_string(kept, "commit");
    if (json_string(kept, "name") == name->text() && hub::is_commit(commit)) wanted = "hf://" + name->id + "@" + commit;
  }
  RT_TRY_SET(const HubFolder folder,
             hub_folder(wanted, bare, pending == nullptr ? HubFetch::kAll : HubFetch::kSmallFiles));
  if (folder.missing_files > 0) *pending = {folder.name, folder.missing_files, folder.missing_bytes};
  return folder.path.string();
}

bool has_checkpoints(const fs::path& run) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", error)) {
    if (ckpt::parse_step_dir_name(entry.path().filename().string())) return true;
  }
  return false;
}

}  // namespace

void add_init_options(CLI::App& command, InitConfig& init) {
  command
      .add_option("--init-from", init.path,
                  "run, checkpoint or Hugging Face folder to start from when the run is new, or hf://ORG/NAME@REVISION "
                  "of the Hub")
      ->type_name("PATH");
  command.add_flag("--init-weights-only", init.weights_only,
                   "take weights alone: a new run from step 0, with moments of zero");
  const auto patterns = [&](const char* flag, std::vector<std::string>& into, const char* what) {
    command.add_option(flag, into, what)->type_name("PATTERN")->expected(1)->take_all();
  };
  patterns("--init-only", init.only, "load only tensors like this ('layers.*'), initialise the others; repeatable");
  patterns("--init-except", init.except, "initialise tensors like this even if the checkpoint has them; repeatable");
  patterns("--init-allow-missing", init.allow_missing,
           "initialise tensors like this if the checkpoint lacks them; repeatable");
  patterns("--init-allow-extra", init.allow_extra,
           "tensors like this may be in the checkpoint though the model lacks them; repeatable");
}

Result<InitConfig> effective_init(const InitConfig& recipe, const InitConfig& command_line, const fs::path& run,
                                  std::string* notice, HubPending* pending) {
  InitConfig out = recipe;
  if (!command_line.path.empty()) out.path = command_line.path;
  out.weights_only = out.weights_only || command_line.weights_only;
  bool options = out.weights_only;
  for (const auto& [name, member] : kPatterns) {
    if (!(command_line.*member).empty()) out.*member = command_line.*member;
    options = options || !(out.*member).empty();
  }
  if (out.path.empty()) {
    if (!options) return out;
    return Error{ErrorCode::kInvalidInput,
                 "init says what to take, but not from where: give init.path in the recipe, or --init-from"};
  }
  if (has_checkpoints(run)) {
    if (!command_line.path.empty() && notice != nullptr) {
      *notice = fmt::format("--init-from is for a new run; {} has checkpoints of its own and resumes from them",
                            run.string());
    }
    return InitConfig{};
  }
  const hub::Bare bare = command_line.path.empty() ? hub::Bare::kUnlessPath : hub::Bare::kNever;
  RT_TRY_SET(out.path, begun_with(out.path, bare, run, pending));
  if (is_hf_folder(out.path)) {  // it has weights and nothing else
    out.weights_only = true;
    out.path = fs::absolute(out.path).lexically_normal().string();
    return out;
  }
  RT_TRY_SET(const fs::path from, resolve_source(out.path));
  out.path = fs::absolute(from).lexically_normal().string();
  return out;
}

Status keep_hub_commit(const std::string& named, const InitConfig& init, const fs::path& run) {
  RT_TRY_SET(const std::optional<hub::Name> name, hub::find_name(named, hub::Bare::kUnlessPath));
  const std::string commit = fs::path(init.path).filename().string();
  if (!name || !hub::is_commit(commit)) return {};  // or the run has resumed
  return place_file(
      run / convert::kHubRecord,
      json_text(json{{"name", name->text()}, {"given", named}, {"commit", commit}, {"folder", init.path}}) + "\n");
}

std::string init_to_json(const InitConfig& init) {
  json out{{"path", init.path}, {"weights_only", init.weights_only}};
  for (const auto& [name, member] : kPatterns) out[name] = init.*member;
  return json_text(out);
}

Result<InitConfig> init_from_json(const std::string& text) {
  try {
    const json in = json_or_nothing(text);
    InitConfig out;
    in.at("path").get_to(out.path);
    in.at("weights_only").get_to(out.weights_only);
    for (const auto& [name, member] : kPatterns) in.at(name).get_to(out.*member);
    return out;
  } catch (const json::exception& error) {
    return Error{ErrorCode::kInternal, fmt::format("--init {}: {}", text, error.what())};
  }
}

}  // namespace cairn::tools
