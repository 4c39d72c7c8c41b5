// cairn help [FIELD | SUBCOMMAND]: what the recipe language knows, from its one schema.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsl/dsl.h"
#include "dsl/words.h"
#include "tools/commands.h"
#include "tools/commands_page.h"
#include "tools/wrapped_stdout.h"

namespace cairn::tools {
namespace {

struct HelpArgs {
  std::vector<std::string> topic;  // words: of a command below another one, or of a phrase
  bool markdown = false, cluster_file = false, types = false, commands = false;
};

/// The command of these words, and the words above it; null: there is none.
const CLI::App* command_of(const CLI::App& root, const std::vector<std::string>& words, std::string* above) {
  const CLI::App* out = &root;
  for (const std::string& word : words) {
    *above += (above->empty() ? "" : " ") + out->get_name();
    const std::vector<const CLI::App*> below =
        out->get_subcommands([&](const CLI::App* command) { return command->get_name() == word; });
    if (below.empty()) return nullptr;
    out = below.front();
  }
  return out;
}

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
  const std::string topic = fmt::format("{}", fmt::join(args.topic, " "));
  const WrappedStdout wrapped;
  std::string above;
  const CLI::App* const command = command_of(root, args.topic, &above);
  const Result<std::string> text = dsl::help_text(topic);  // a field wins over a subcommand of that name
  if (text.ok()) {
    fmt::print("{}", text.value());
    if (command != nullptr && !topic.empty()) fmt::print("\nFor the subcommand: cairn {} --help\n", topic);
    if (topic.empty()) fmt::print("\nSubcommands: cairn --help\n");
    return 0;
  }
  if (command != nullptr) {
    fmt::print("{}", command->help(above));
    return 0;
  }
  const std::optional<dsl::Meaning> meaning = dsl::meaning_of(topic);
  if (!meaning) {
    std::vector<std::string> names = subcommand_names(root);
    const std::string near = dsl::nearest(topic, names);
    if (near.empty()) return text.error();
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("no field and no command \"{}\"; did you mean the command {}?", topic, near)};
  }
  fmt::print("{}: here it is {}\n", printable(topic), meaning->text());
  for (const std::string& name : meaning->here) {
    const Result<std::string> field = dsl::help_text(name);
    fmt::print("\n{}",
               field.ok() ? field.value().substr(0, field.value().find('\n') + 1) : fmt::format("{} --help\n", name));
  }
  return 0;
}

}  // namespace

void add_help(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("help", "the recipe language: a field, a block, or everything");
  const auto args = std::make_shared<HelpArgs>();
  command->add_option("FIELD", args->topic,
                      "such as optimizer.lr, mesh or T.cosine; a subcommand; or a word of the field, as epochs");
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
      "  cairn help train\n"
      "  cairn help gradient checkpointing");
  command->callback([args, &session] { session.action = [args, &session] { return help(*args, *session.root); }; });
}

}  // namespace cairn::tools
