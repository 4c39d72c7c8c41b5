#pragma once
// The subcommands of `cairn`. Each lives in cmd_<name>.cc, which declares its flags and hands main() an action; the
// work itself is a library call. A new one: its file, one line in the list below, one line in kCommands of main.cc.

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/units.h"
#include "tools/run/folder/text.h"

namespace CLI {
class App;
}
namespace cairn::dsl {
struct LoadedRecipe;
struct LoadOptions;
}  // namespace cairn::dsl

namespace cairn::tools {

/// What parsing chose. main() runs `action` and turns its Error into one text on stderr and an exit code
/// (docs/operations/exit-codes.md); an action that has told everything itself returns the code.
struct Session {
  const CLI::App* root = nullptr;
  std::function<Result<int>()> action;
  bool json = false;  // the chosen subcommand was given --json: errors also go to stdout as {"error": {...}}
};

void add_audit(CLI::App& app, Session& session);
void add_check(CLI::App& app, Session& session);
void add_check_hosts(CLI::App& app, Session& session);
void add_ckpt(CLI::App& app, Session& session);
void add_completion(CLI::App& app, Session& session);
void add_convert(CLI::App& app, Session& session);
void add_copy(CLI::App& app, Session& session);
void add_data(CLI::App& app, Session& session);
void add_diff(CLI::App& app, Session& session);
void add_doctor(CLI::App& app, Session& session);
void add_eval(CLI::App& app, Session& session);
void add_explain(CLI::App& app, Session& session);
void add_export(CLI::App& app, Session& session);
void add_generate(CLI::App& app, Session& session);
void add_help(CLI::App& app, Session& session);
void add_hosts(CLI::App& app, Session& session);
void add_import(CLI::App& app, Session& session);
void add_init(CLI::App& app, Session& session);
void add_launch(CLI::App& app, Session& session);
void add_lineage(CLI::App& app, Session& session);
void add_measure(CLI::App& app, Session& session);
void add_plan(CLI::App& app, Session& session);
void add_rank(CLI::App& app, Session& session);
void add_report(CLI::App& app, Session& session);
void add_resume(CLI::App& app, Session& session);
void add_serve(CLI::App& app, Session& session);
void add_stacks(CLI::App& app, Session& session);
void add_track(CLI::App& app, Session& session);
void add_train(CLI::App& app, Session& session);

// --- Shared by subcommands (common.cc) -------------------------------------------------------------------------------

/// A recipe on the command line: RECIPE, --set, --param, --with.
struct RecipeArgs {
  std::string path;
  std::vector<std::string> sets, params, with_files;
};

/// Declares them; `world` too when given (--world N, 0 when not set).
void add_recipe_options(CLI::App& command, RecipeArgs& args, int64_t* world = nullptr);
void add_json_flag(CLI::App& command, Session& session);
/// Names and messages may hold bytes that are no UTF-8: they are replaced.
void print_json(const nlohmann::json& value);

/// While it lives whatever is printed to stdout goes to stderr: with --json a command that tells of its progress leaves
/// stdout to its result.
class StdoutToStderr {
 public:
  StdoutToStderr();
  ~StdoutToStderr();
  StdoutToStderr(const StdoutToStderr&) = delete;
  StdoutToStderr& operator=(const StdoutToStderr&) = delete;

 private:
  int stdout_ = -1;  // the real one
};

dsl::LoadOptions load_options(const RecipeArgs& args, int64_t world);

/// The recipe, or every mistake told (text on stderr, or the list on stdout with `json`) and kRefused, to be returned.
constexpr int kRefused = 2;
Result<int> load_or_tell(const RecipeArgs& args, int64_t world, bool json, dsl::LoadedRecipe* loaded);

/// Escape sequences for a stream; all empty unless it is a terminal, NO_COLOR is unset or empty, and TERM is not dumb.
struct Palette {
  const char *bold = "", *dim = "", *red = "", *green = "", *reset = "";
};
Palette palette_for(int fd);

/// Escapes to the end of a terminal's line; empty when `fd` is none: progress lines are overwritten only there.
bool is_terminal(int fd);

}  // namespace cairn::tools
