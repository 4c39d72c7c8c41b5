#include "tools/commands_page.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cairn::tools {
namespace {

/// `from` replaced by `to`, everywhere.
std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

/// A table's cell ends at a bar.
std::string cell(std::string text) { return replaced(std::move(text), "|", "\\|"); }

struct ValueText {
  std::string name;    // "N", "save|stop", "TEXT"; empty for a flag
  std::string limits;  // "1 to 4096", "above 0"; empty where any value of the type serves
};

/// CLI11 joins type and checks by ':', as "N:INT in [1 to 4096]" and "TEXT:{hf,cairn}".
ValueText value_text(const CLI::Option& option) {
  if (option.get_expected_max() == 0) return {};
  const std::string type = option.get_type_name();
  const size_t colon = type.find(':');
  ValueText text{.name = type.substr(0, colon)};
  if (colon == std::string::npos) return text;
  const std::string check = type.substr(colon + 1);
  const size_t range = check.find(" in [");
  if (range != std::string::npos && check.back() == ']') {
    text.limits = check.substr(range + 5, check.size() - range - 6);
  } else if (check.front() == '{' && check.back() == '}') {
    if (text.name.find('|') == std::string::npos) text.name = replaced(check.substr(1, check.size() - 2), ",", "|");
  }
  return text;
}

std::string option_row(const CLI::Option& option) {
  const ValueText value = value_text(option);
  std::string names;
  if (option.get_positional()) names = "`" + option.get_name(true, false) + "`";
  for (const std::string& name : option.get_lnames()) {
    names += fmt::format("{}`--{}{}`", names.empty() ? "" : ", ", name, value.name.empty() ? "" : " " + value.name);
  }
  std::string notes;
  const auto note = [&](const std::string& text) { notes += (notes.empty() ? "" : "; ") + text; };
  if (option.get_required()) note("required");
  if (!value.limits.empty()) note(value.limits);
  if (!option.get_default_str().empty()) note("default: " + option.get_default_str());
  if (!notes.empty()) notes = " (" + notes + ")";
  return fmt::format("| {} | {} |\n", cell(names), cell(option.get_description() + notes));
}

std::vector<const CLI::App*> shown(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return command->get_name().front() != '_'; });
}

/// "cairn ckpt ls" and its like, in the order of the help; groups of commands are entered, not listed.
void collect(const CLI::App& app, const std::string& path, std::vector<std::pair<std::string, const CLI::App*>>* out) {
  for (const CLI::App* command : shown(app)) {
    const std::string name = path + " " + command->get_name();
    if (shown(*command).empty()) out->emplace_back(name, command);
    collect(*command, name, out);
  }
}

std::string usage(const std::string& path, const CLI::App& command) {
  bool has_flags = false;
  for (const CLI::Option* option : command.get_options()) has_flags |= option->nonpositional();
  std::string words;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_positional()) {
      const std::string name = option->get_name(true, false) + (option->get_expected_max() > 1 ? "..." : "");
      words += option->get_required() ? " " + name : " [" + name + "]";
    } else if (option->get_required()) {
      const std::string value = value_text(*option).name;
      words += fmt::format(" --{}{}", option->get_lnames().front(), value.empty() ? "" : " " + value);
    }
  }
  return path + words + (has_flags ? " [FLAGS]" : "");
}

/// The footer of a command: a text, a line "Exit codes: ...", and after "Examples:" commands, each indented.
std::string footer_markdown(const std::string& footer) {
  std::string out, line;
  bool code = false;
  for (size_t from = 0; from < footer.size();) {
    const size_t end = std::min(footer.find('\n', from), footer.size());
    line = footer.substr(from, end - from);
    from = end + 1;
    if (line == "Examples:") {
      code = true;
      out += "\n";
    } else if (code) {
      out += "  " + line + "\n";
    } else if (line.rfind("Exit codes:", 0) == 0) {
      out += (out.empty() ? "" : "\n") + line + "\n";
    } else {
      out += line + "\n";
    }
  }
  return out;
}

}  // namespace

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name()[0] != '_') names.push_back(command->get_name());
  }
  return names;
}

std::string commands_markdown(const CLI::App& root) {
  std::vector<std::pair<std::string, const CLI::App*>> commands;
  collect(root, root.get_name(), &commands);
  std::string out = "| command | what it does |\n|---|---|\n";
  for (const auto& [path, command] : commands) {
    out += fmt::format("| [`{}`](#{}) | {} |\n", path, replaced(path, " ", "-"), cell(command->get_description()));
  }
  for (const auto& [path, command] : commands) {
    std::string what = command->get_description();
    what.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(what.front())));
    out += fmt::format("\n## {}\n\n{}.\n\n    {}\n\n", path, what, usage(path, *command));
    std::string arguments, flags;
    for (const CLI::Option* option : command->get_options()) {
      if (option == command->get_help_ptr() || option->get_group().empty()) continue;
      (option->get_positional() ? arguments : flags) += option_row(*option);
    }
    const std::string rows = arguments + flags;
    if (!rows.empty()) out += "| flag | meaning |\n|---|---|\n" + rows + "\n";
    out += footer_markdown(command->get_footer());
  }
  return out;
}

}  // namespace cairn::tools
