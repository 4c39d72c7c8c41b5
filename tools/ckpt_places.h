#pragma once
// What the subcommands of `cairn ckpt` share: one file each, cmd_ckpt_<name>.cc, registered in cmd_ckpt.cc.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/format/manifest.h"
#include "dsl/dsl.h"
#include "runtime/core/result.h"
#include "runtime/telemetry/terminal.h"
#include "tools/run/folder/folder.h"

namespace CLI {
class App;
}

namespace cairn::ckpt {
class IoBackend;
struct PlaceOptions;
}  // namespace cairn::ckpt

namespace cairn::tools {

struct Session;

void add_ckpt_average(CLI::App& ckpt, Session& session);
void add_ckpt_merge(CLI::App& ckpt, Session& session);
void add_ckpt_edit(CLI::App& ckpt, Session& session);
void add_ckpt_cat(CLI::App& ckpt, Session& session);
void add_ckpt_diff(CLI::App& ckpt, Session& session);
void add_ckpt_inspect(CLI::App& ckpt, Session& session);
void add_ckpt_ls(CLI::App& ckpt, Session& session);
void add_ckpt_label(CLI::App& ckpt, Session& session);
void add_ckpt_prune(CLI::App& ckpt, Session& session);
void add_ckpt_reshard(CLI::App& ckpt, Session& session);
void add_ckpt_copy(CLI::App& ckpt, Session& session);
void add_ckpt_verify(CLI::App& ckpt, Session& session);

/// --endpoint, --region, --ca-file, --timeout: of a command that takes an S3 store (cmd_ckpt_copy.cc).
void add_store_options(CLI::App& command, ckpt::PlaceOptions& place);
/// `cairn ckpt ls` of a store, or of one step there: what names, sizes and manifests tell (cmd_ckpt_copy.cc).
Result<int> list_store(ckpt::PlaceOptions place, bool as_json);

/// RUN/checkpoints, or the folder itself. Errors: kInvalidInput where it is not there, is a link to nothing or has one
/// in that place, or is one checkpoint; the system's.
Result<std::filesystem::path> checkpoints_dir_of(const std::string& path);

/// The checkpoint that this is, or in whose folder it lies or would lie; empty: none. What is put into such a folder
/// goes with it.
std::filesystem::path checkpoint_around(const std::filesystem::path& path);
/// Errors: kInvalidInput when there is one.
Status check_outside_checkpoints(const std::filesystem::path& path);

/// The id of the run in whose folder these steps lie; empty outside any.
std::string run_around(std::filesystem::path steps);

/// "tp 2 x pp 1 x dp 2, zero 1, bf16"
std::string mesh_text(const ckpt::MeshInfo& mesh);
nlohmann::json mesh_json(const ckpt::MeshInfo& mesh);
/// "3 min 05 s", "12 days"
std::string age_text(int64_t created_unix_ms);

/// Becomes true with the first SIGINT or SIGTERM, so that work ends in good order; the second one ends it at once.
const std::atomic<bool>& stop_on_signals();

/// --memory: errors for what no machine has.
Result<int64_t> memory_option(uint64_t bytes);

/// A run folder that gets a step which no training wrote (average, reshard). The recipe is durable before the step, so
/// that `resume` has a recipe for each step. A recipe that replaces the one of present steps becomes visible right
/// after. Unless keep() is called, the old recipe is put back, and a folder that was made here is removed, if no
/// resumable work lies in it.
class TargetRun {
 public:
  /// Errors: kInvalidInput when it is no folder, or without `overwrite` a run with another recipe, with this step, or
  /// with a newer one, which `resume` would take; those of RunFolder::open.
  static Result<std::unique_ptr<TargetRun>> open(const std::filesystem::path& run, const dsl::LoadedRecipe& recipe,
                                                 const std::string& name, int64_t step, bool overwrite);
  ~TargetRun();
  TargetRun(const TargetRun&) = delete;

  RunFolder& folder() { return *folder_; }
  /// The step is there. Errors: its recipe, where it replaces another one, could not be written.
  Status keep();
  /// Removes what dead saves have left, and gives their names; that of `but_step` stays: its save goes on with it.
  Result<std::vector<std::string>> clean(ckpt::IoBackend& io, std::optional<int64_t> but_step);
  /// "cairn resume RUN" takes this step, not the new one; empty when it takes the new one.
  std::optional<int64_t> newer() const { return newer_; }

 private:
  TargetRun() = default;
  std::filesystem::path run_, new_step_;  // new_step_: empty: one is to be replaced
  std::optional<RunFolder> folder_;
  std::optional<std::string> recipe_before_;
  std::optional<dsl::LoadedRecipe> recipe_after_;  // replaces that of checkpoints that are there: not before the step
  std::optional<int64_t> newer_;
  bool kept_ = false;
};

/// What differs between two resolved recipes (or other JSON objects): path -> values as text, empty where it is not
/// there. Texts that are no JSON objects are compared whole, under the path "".
using Changes = std::map<std::string, std::pair<std::string, std::string>>;
Changes json_changes(const std::string& left, const std::string& right);
nlohmann::json changes_json(const Changes& changes);
void print_changes(const Changes& changes);

/// Bytes done, on stderr: a live line with speed and time left on a terminal, nothing elsewhere.
class ByteProgress {
 public:
  /// `verb`: "verified", "written".
  explicit ByteProgress(std::string verb);
  void show(int64_t done_bytes, int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string verb_;
  telemetry::ProgressLine line_;
  Clock::time_point start_ = Clock::now(), shown_ = start_;
};

}  // namespace cairn::tools
