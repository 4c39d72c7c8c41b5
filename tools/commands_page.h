#pragma once
// The reference page of the command line, made from the declarations of all subcommands: docs/commands.md holds it, and
// a test compares. It reads CLI11's objects rather than its help text, whose form differs between versions of CLI11.

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace cairn::tools {

/// Markdown: a table of all commands, then a section for each with usage, flags, exit codes and examples. `root` is
/// the program; commands whose name begins with "_" are internal and left out.
std::string commands_markdown(const CLI::App& root);

/// The subcommands below `app` that its help lists.
std::vector<std::string> subcommand_names(const CLI::App& app);

}  // namespace cairn::tools
