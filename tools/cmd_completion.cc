// cairn completion bash | zsh | fish: the shell's completion, made from the same tree that parses the command line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsl/dsl.h"
#include "tools/commands.h"

namespace cairn::tools {
namespace {

struct Word {
  std::string text, doc;
};

/// One subcommand as the shells need it.
struct Level {
  std::string path;  // "data tokenize"; empty: the program
  std::vector<Word> commands, options;
  bool wants_field = false;  // a position takes a field of the recipe
};

void collect(const CLI::App& app, const std::string& path, std::vector<Level>* out) {
  Level level{.path = path};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    for (const std::string& name : option->get_lnames())
      level.options.push_back({"--" + name, option->get_description()});
    if (option->get_name() == "FIELD") level.wants_field = true;
  }
  std::vector<const CLI::App*> below;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name().empty() || command->get_name()[0] == '_') continue;
    level.commands.push_back({command->get_name(), command->get_description()});
    below.push_back(command);
  }
  out->push_back(std::move(level));
  for (const CLI::App* command : below) collect(*command, path + (path.empty() ? "" : " ") + command->get_name(), out);
}

std::string words_of(const Level& level) {
  std::string out;
  for (const auto* list : {&level.commands, &level.options}) {
    for (const Word& word : *list) out += (out.empty() ? "" : " ") + word.text;
  }
  return out;
}

/// The text inside single quotes: every ' becomes `replacement`.
std::string quoted(const std::string& text, const char* replacement) {
  std::string out;
  for (const char c : text) {
    if (c == '\'') {
      out += replacement;
    } else {
      out += c;
    }
  }
  return out;
}

std::string join_fields() { return fmt::format("{}", fmt::join(dsl::field_paths(), " ")); }

/// Words so far are matched against the tree, so options may stand between subcommands.
void print_bash(const std::vector<Level>& levels) {
  fmt::print("# bash completion of cairn. Use: source <(cairn completion bash)\n_cairn() {{\n");
  fmt::print("  local cur=\"${{COMP_WORDS[COMP_CWORD]}}\" path=\"\" word i\n");
  fmt::print(
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n    word=\"${{COMP_WORDS[i]}}\"\n    case \"$path/$word\" in\n");
  for (const Level& level : levels) {
    if (level.path.empty()) continue;
    const size_t space = level.path.rfind(' ');
    const std::string parent = space == std::string::npos ? "" : level.path.substr(0, space);
    const std::string name = space == std::string::npos ? level.path : level.path.substr(space + 1);
    fmt::print("      '{}/{}') path='{}' ;;\n", parent, name, level.path);
  }
  fmt::print("    esac\n  done\n  local words=\"\" fields=\"\"\n  case \"$path\" in\n");
  for (const Level& level : levels) {
    fmt::print("    '{}') words='{}'{} ;;\n", level.path, words_of(level), level.wants_field ? "; fields=1" : "");
  }
  fmt::print("  esac\n  [ -n \"$fields\" ] && words=\"$words {}\"\n", join_fields());
  fmt::print("  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}}\n");
  fmt::print("complete -o default -F _cairn cairn\n");
}

void print_zsh(const std::vector<Level>& levels) {
  fmt::print(
      "#compdef cairn\n# zsh completion of cairn. Use: cairn completion zsh > a folder of $fpath, as _cairn\n_cairn() "
      "{{\n");
  fmt::print("  local where='' word\n  local -a items fields\n");
  fmt::print("  for word in ${{words[2,CURRENT-1]}}; do\n    case \"$where/$word\" in\n");
  for (const Level& level : levels) {
    if (level.path.empty()) continue;
    const size_t space = level.path.rfind(' ');
    const std::string parent = space == std::string::npos ? "" : level.path.substr(0, space);
    const std::string name = space == std::string::npos ? level.path : level.path.substr(space + 1);
    fmt::print("      '{}/{}') where='{}' ;;\n", parent, name, level.path);
  }
  fmt::print("    esac\n  done\n  case \"$where\" in\n");
  for (const Level& level : levels) {
    fmt::print("    '{}') items=(", level.path);
    for (const auto* list : {&level.commands, &level.options}) {
      for (const Word& word : *list) fmt::print(" '{}:{}'", word.text, quoted(word.doc, "'\\''"));
    }
    fmt::print(" ){} ;;\n", level.wants_field ? fmt::format("; fields=({})", join_fields()) : "");
  }
  fmt::print("  esac\n  _describe 'cairn' items\n  (( $#fields )) && compadd -a fields\n  _files\n}}\n");
  fmt::print("if [ \"$funcstack[1]\" = _cairn ]; then _cairn \"$@\"; else compdef _cairn cairn; fi\n");
}

void print_fish(const std::vector<Level>& levels) {
  fmt::print("# fish completion of cairn. Use: cairn completion fish > ~/.config/fish/completions/cairn.fish\n");
  for (const Level& level : levels) {
    std::string condition = "__fish_use_subcommand";
    if (!level.path.empty()) {
      condition.clear();
      for (size_t at = 0; at < level.path.size();) {
        const size_t space = std::min(level.path.find(' ', at), level.path.size());
        condition += (condition.empty() ? "" : "; and ") +
                     fmt::format("__fish_seen_subcommand_from {}", level.path.substr(at, space - at));
        at = space + 1;
      }
    }
    for (const Word& word : level.commands) {
      fmt::print("complete -c cairn -f -n '{}' -a {} -d '{}'\n", condition, word.text, quoted(word.doc, "\\'"));
    }
    for (const Word& word : level.options) {
      fmt::print("complete -c cairn -n '{}' -l {} -d '{}'\n", condition, word.text.substr(2), quoted(word.doc, "\\'"));
    }
    if (level.wants_field) fmt::print("complete -c cairn -n '{}' -a '{}'\n", condition, join_fields());
  }
}

}  // namespace

void add_completion(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("completion", "print the completion script of a shell");
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "Exit codes: 0 done, 2 no such shell.\n"
      "Examples:\n"
      "  source <(cairn completion bash)\n"
      "  cairn completion fish > ~/.config/fish/completions/cairn.fish");
  command->callback([shell, &session] {
    session.action = [shell, &session]() -> Result<int> {
      std::vector<Level> levels;
      collect(*session.root, "", &levels);
      (*shell == "bash" ? print_bash : *shell == "zsh" ? print_zsh : print_fish)(levels);
      return 0;
    };
  });
}

}  // namespace cairn::tools
