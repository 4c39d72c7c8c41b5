// cairn: parses the command line, runs one subcommand, turns its error into a text and an exit code.
//   0 done   2 refused: recipe, flag or plan   others: docs/operations/exit-codes.md
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "dsl/words.h"
#include "runtime/core/log.h"
#include "tools/commands.h"
#include "tools/commands_page.h"
#include "tools/run/agent/requests.h"
#include "tools/version.h"
#include "tools/wrapped_stdout.h"

namespace cairn::tools {
namespace {

constexpr int kMisused = 2;

// In the order of `cairn --help`.
constexpr void (*kCommands[])(CLI::App&, Session&) = {
    add_init,       add_check,   add_plan,        add_explain, add_diff,     add_help,  add_data,    add_train,
    add_resume,     add_launch,  add_check_hosts, add_hosts,   add_report,   add_track, add_lineage, add_audit,
    add_ckpt,       add_convert, add_import,      add_export,  add_generate, add_eval,  add_serve,   add_rank,
    add_completion, add_copy,    add_stacks,      add_doctor,  add_measure,
};

// Their lines are for programs, or longer than any terminal: they stay as they are.
constexpr std::string_view kVerbatim[] = {"cairn help",     "cairn launch",     "cairn data encode",
                                          "cairn generate", "cairn completion", "cairn ckpt cat"};

// How this process was to take signals (nohup has SIGHUP ignored). Libraries may take some for themselves before main()
// begins: UCX, which Debian 13's Gloo loads by way of MPI, takes SIGHUP and those of a crash. What is in .preinit_array
// runs before all of theirs.
std::array<struct sigaction, NSIG> given_signals;

void note_signals(int /*argc*/, char** /*argv*/, char** /*envp*/) {
  for (int signal = 1; signal < NSIG; ++signal) sigaction(signal, nullptr, &given_signals[static_cast<size_t>(signal)]);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const kNoteSignals)(int, char**, char**) = note_signals;

void take_signals_back() {
  for (int signal = 1; signal < NSIG; ++signal) {
    const struct sigaction& given = given_signals[static_cast<size_t>(signal)];
    struct sigaction now {};
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler != given.sa_handler) sigaction(signal, &given, nullptr);
  }
}

/// A descriptor of ours must never take the place of a closed stdin, stdout or stderr.
void open_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) != fd) _exit(70);
  }
}

/// An agent has some descriptors for each rank, and readers of checkpoints some hundred files open, twice: more than
/// the 1024 that shells begin with.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

/// Whoever asked for JSON gets it also where the words around that were not understood.
bool wants_json(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    if (std::string_view(argv[i]) == "--json") return true;
  }
  return false;
}

void print_error_json(std::string_view code, const std::string& message, int exit_code) {
  print_json({{"error", {{"code", code}, {"message", message}, {"exit_code", exit_code}}}});
}

/// Cairn's name for a word of the field, or the nearest of `names`.
std::string nearest_text(const std::string& word, const std::vector<std::string>& names) {
  if (const std::optional<dsl::Meaning> meaning = dsl::meaning_of(word)) return "; here it is " + meaning->text();
  if (const std::string near = suggestion(word, names); !near.empty()) return near;
  const std::optional<dsl::Meaning> meaning = dsl::meaning_near(word);
  return meaning ? "; the nearest is " + meaning->text() : std::string();
}

/// Tells of the first word that should be a subcommand and is none: CLI11 would only say that one is missing.
bool tell_unknown_subcommand(const CLI::App& root, int argc, char** argv) {
  const CLI::App* app = &root;
  std::string path = "cairn";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] == '-') return false;
    const std::vector<const CLI::App*> below = app->get_subcommands([](const CLI::App*) { return true; });
    if (below.empty()) return false;
    const CLI::App* next = nullptr;
    for (const CLI::App* command : below) {
      if (command->get_name() == word) next = command;
    }
    if (next == nullptr) {
      const std::vector<std::string> names = subcommand_names(*app);
      const std::string message = fmt::format("`{}` is no subcommand{}", word, nearest_text(word, names));
      fmt::print(stderr, "{}: {}\n  there are: {}\n", path, printable(message), fmt::join(names, ", "));
      if (wants_json(argc, argv)) print_error_json(error_code_name(ErrorCode::kInvalidInput), message, kMisused);
      return true;
    }
    app = next;
    path += " " + word;
  }
  return false;
}

/// The deepest subcommand that was parsed, and its words.
const CLI::App* chosen_command(const CLI::App& root, std::string* path) {
  const CLI::App* app = &root;
  *path = "cairn";
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    *path += " " + app->get_name();
  }
  return app;
}

/// CLI11 lists all that it could not place, in no helpful order: name the first unknown option, and the nearest one.
std::string unknown_option(const CLI::App& command, int argc, char** argv) {
  std::vector<std::string> options;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  }
  for (int i = 1; i < argc; ++i) {
    const std::string word = std::string(argv[i]).substr(0, std::string_view(argv[i]).find('='));
    if (word == "--") break;
    if (word.size() < 2 || word[0] != '-' || command.get_option_no_throw(word) != nullptr) continue;
    std::string nearest = nearest_text(word, options);
    if (nearest.find(" is ") != std::string::npos && command.get_option_no_throw("--set") != nullptr)
      nearest += " A field is set by --set FIELD=VALUE.";
    return fmt::format("{}: no such option{}", word, nearest);
  }
  return {};
}

int tell_misuse(const std::string& path, const std::string& message, int argc, char** argv) {
  fmt::print(stderr, "{}: {}\n  see: {} --help\n", path, printable(message, true), path);
  if (wants_json(argc, argv)) print_error_json(error_code_name(ErrorCode::kInvalidInput), message, kMisused);
  return kMisused;
}

int tell_parse_error(const CLI::App& root, const CLI::ParseError& error, int argc, char** argv) {
  std::string path;
  const CLI::App* command = chosen_command(root, &path);
  std::string message;
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError))
    message = unknown_option(*command, argc, argv);
  if (message.empty()) message = error.what();
  return tell_misuse(path, message, argc, argv);
}

std::string without_value(std::string_view option) {
  return fmt::format("{} is given without a value: leave it out, or give one", option);
}

/// Reports an option such as `--run=`: CLI11 would take the next word for its value.
bool tell_bare_option(int argc, char** argv) {
  const std::string path = argv[1][0] == '-' ? "cairn" : fmt::format("cairn {}", argv[1]);
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string_view word = argv[i];
    if (!word.starts_with("--") || word.find('=') != word.size() - 1) continue;
    tell_misuse(path, without_value(word.substr(0, word.size() - 1)), argc, argv);
    return true;
  }
  return false;
}

/// An option that was given an empty text, as `--run "$RUN"` without that variable: it would count as not given.
std::string empty_option(const CLI::App& command) {
  constexpr std::string_view kMayBeEmpty[] = {"--prompt", "--stop"};
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty() || option->get_expected_min() == 0) continue;
    const std::string name = "--" + option->get_lnames().front();
    if (std::ranges::find(kMayBeEmpty, name) != std::end(kMayBeEmpty)) continue;
    if (std::ranges::find(option->results(), "") != option->results().end()) return without_value(name);
  }
  return {};
}

int finish(const Result<int>& result, const Session& session, const std::string& path) {
  int code = 0;
  if (result.ok()) {
    code = result.value();
  } else {
    const Error& error = result.error();
    code = error.exit_code();
    fmt::print(stderr, "{}: {}\n", path, printable(error.message, true));
    if (session.json && std::ferror(stdout) == 0) print_error_json(error_code_name(error.code), error.message, code);
  }
  if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && code == 0) {
    fmt::print(stderr, "{}: cannot write to stdout: {}\n", path, std::strerror(errno));
    code = 74;
  }
  return code;
}

/// What is thrown is an error like any other, told in the same way.
Result<int> act(const Session& session) {
  try {
    return session.action();
  } catch (const std::filesystem::filesystem_error& error) {  // what the system refused is no mistake of ours
    return os_error(error.code().value(), error.path1().string());
  } catch (const std::system_error& error) {  // of fmt::print, where stdout takes no more, or of a thread
    return os_error(error.code().value(), std::ferror(stdout) != 0
                                              ? "cannot write to stdout"
                                              : "a limit of the system, as of threads (ulimit -u)");
  } catch (const std::bad_alloc&) {
    return os_error(ENOMEM, "memory");
  } catch (const std::exception& error) {
    return Error{ErrorCode::kInternal, fmt::format("internal error: {}", error.what())};
  }
}

int run(int argc, char** argv) {
  CLI::App app("Trains large models in 3D-parallel layouts; every checkpoint loads into every layout.", "cairn");
  const std::string version = "cairn " + program_version();
  app.set_version_flag("--version", version, "name, version and build");
  app.set_help_flag("-h,--help", "what there is");
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  Session session{.root = &app};
  for (const auto add : kCommands) add(app, session);

  if (argc < 2) {
    fmt::print(stderr, "{}", app.help());
    return kMisused;
  }
  if (tell_unknown_subcommand(app, argc, argv) || tell_bare_option(argc, argv)) return kMisused;
  std::string path;
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const CLI::App* command = chosen_command(app, &path);
    const size_t space = path.rfind(' ');
    const WrappedStdout wrapped;
    fmt::print("{}", command->help(space == std::string::npos ? "" : path.substr(0, space)));
    return finish(0, session, "cairn");
  } catch (const CLI::CallForVersion&) {
    fmt::print("{}\n", version);
    return finish(0, session, "cairn");
  } catch (const CLI::ParseError& error) {
    return tell_parse_error(app, error, argc, argv);
  }
  const CLI::App* const command = chosen_command(app, &path);
  if (!command->get_name().starts_with('_')) {
    if (const std::string empty = empty_option(*command); !empty.empty()) return tell_misuse(path, empty, argc, argv);
  }
  RT_CHECK(static_cast<bool>(session.action), "{} has no action", path);
  const bool verbatim = session.json || std::ranges::find(kVerbatim, path) != std::end(kVerbatim);
  std::optional<WrappedStdout> wrapped;
  if (!verbatim) wrapped.emplace();
  const Result<int> done = act(session);
  wrapped.reset();
  return finish(done, session, path);
}

}  // namespace
}  // namespace cairn::tools

int main(int argc, char** argv) {
  cairn::tools::hold_requests(argc, argv);
  cairn::tools::take_signals_back();
  cairn::tools::open_standard_streams();
  cairn::tools::raise_file_limit();
  cairn::init_logging("cairn");
  try {
    return cairn::tools::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cairn: internal error: %s\n", error.what());
  } catch (...) {
    std::fprintf(stderr, "cairn: internal error\n");
  }
  return 70;
}
