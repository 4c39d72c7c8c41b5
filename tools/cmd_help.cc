// cairn help [FIELD | SUBCOMMAND]: what the recipe language knows, from its one schema.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "dsl/dsl.h"
#include "tools/commands.h"
#include "tools/commands_page.h"

namespace cairn::tools {
namespace {

struct HelpArgs {
  std::string topic;
  bool markdown = false, cluster_file = false, types = false, commands = false;
};

Result<int> help(const HelpArgs& args, const CLI::App& root) {
  if (args.markdown || args.cluster_file || args.types) {
    fmt::print("{}", args.markdown       ? dsl::reference_markdown()
                     : args.cluster_file ? dsl::cluster_markdown()
                                         : dsl::editor_types());
    return 0;
  }
  if (args.commands) {
    fmt::print("{}", commands_markdown(root));
    return 0;
  }
  const auto same_name = [&](const CLI::App* command) { return command->get_name() == args.topic; };
  const std::vector<const CLI::App*> commands = root.get_subcommands(same_name);
  Result<std::string> text = dsl::help_text(args.topic);  // a field wins over a subcommand of that name
  if (!text.ok() && !commands.empty()) {
    fmt::print("{}", commands.front()->help("cairn"));
    return 0;
  }
  if (!text.ok()) return std::move(text).error();
  fmt::print("{}", text.value());
  if (!commands.empty()) fmt::print("\nFor the subcommand: cairn {} --help\n", args.topic);
  if (args.topic.empty()) fmt::print("\nSubcommands: cairn --help\n");
  return 0;
}

}  // namespace

void add_help(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("help", "the recipe language: a field, a block, or everything");
  const auto args = std::make_shared<HelpArgs>();
  command->add_option("FIELD", args->topic, "such as optimizer.lr, mesh or T.cosine; or a subcommand");
  CLI::Option* markdown = command->add_flag("--markdown", args->markdown,
                                            "print the reference page of the recipe language (docs/recipe.md)");
  CLI::Option* cluster = command
                             ->add_flag("--cluster-file", args->cluster_file,
                                        "print the reference page of cluster files (docs/cluster-file.md)")
                             ->excludes(markdown);
  command->add_flag("--types", args->types, "print the type file for editors (LuaLS)")
      ->excludes(markdown)
      ->excludes(cluster);
  command->add_flag("--commands", args->commands, "print all commands as a page (docs/commands.md)")
      ->excludes(markdown)
      ->excludes(cluster);
  command->footer(
      "Exit codes: 0 done, 2 no such field or command.\n"
      "Examples:\n"
      "  cairn help optimizer.lr\n"
      "  cairn help T.cosine\n"
      "  cairn help T.slurm            # of a cluster file\n"
      "  cairn help train");
  command->callback([args, &session] { session.action = [args, &session] { return help(*args, *session.root); }; });
}

}  // namespace cairn::tools
