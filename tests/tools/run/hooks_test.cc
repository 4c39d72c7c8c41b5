#include "tools/run/agent/hooks.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/support/temp_dir.h"

using namespace cairn;
using namespace cairn::tools;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::string text_of(const fs::path& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

Hook shell(std::vector<std::string> events, const std::string& script, double timeout_s = 60) {
  return {.events = std::move(events), .run = {"sh", "-c", script, "sh", "{step}", "{dir}"}, .timeout_s = timeout_s};
}

struct Hooked {
  explicit Hooked(std::vector<Hook> of) : dir("hooks") {
    fs::create_directory(dir / "logs");
    hooks.emplace(of, std::vector<Keep>{}, dir.path);
    hooks->report_to({.say = [this](const std::string& text) { said += text + "\n"; },
                      .record = [this](const json& event) { recorded.push_back(event); }});
  }
  void saved(int64_t step) { hooks->hear({{"event", "saved"}, {"step", step}, {"bytes", 7}}, step); }
  bool until(const std::function<bool()>& so) {
    for (int tries = 0; tries < 5000; ++tries) {
      hooks->poll();
      if (so()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }
  /// The end of a run.
  void finish() {
    hooks->finish({}, [] { return Hurry::kNone; });
  }

  cairn::testing::TempDir dir;
  std::string said;
  std::vector<json> recorded;
  std::optional<RunHooks> hooks;
};

bool lives(pid_t pid) { return ::kill(pid, 0) == 0; }

}  // namespace

TEST_SUITE("tools/run/hooks") {
  TEST_CASE("hooks hear the events that the recipe names, under its names") {
    const std::vector<std::pair<json, std::string>> names = {{{{"event", "start"}, {"generation", 0}}, "started"},
                                                             {{{"event", "start"}, {"generation", 1}}, ""},
                                                             {{{"event", "saved"}}, "saved"},
                                                             {{{"event", "roll_back"}}, "rolled_back"},
                                                             {{{"event", "failure"}}, "failed"},
                                                             {{{"event", "end"}}, "ended"},
                                                             {{{"event", "hook_failed"}}, ""},
                                                             {json::object(), ""}};
    for (const auto& [event, name] : names) CHECK(hook_event_of(event) == name);
    CHECK(hooks_not_run(2) == "2 hooks of the recipe are not run: --hooks");
    CHECK(hooks_not_run(1) == "1 hook of the recipe is not run: --hooks");
  }

  TEST_CASE("step, dir and run are put into the arguments, and other braces stay") {
    CHECK(hook_argv({"up", "--at={step}", "{dir}{step}", "{", "{stop}", "{{step}}", "{run}/x"}, 7, "/d/{run}", "/r") ==
          std::vector<std::string>{"up", "--at=7", "/d/{run}7", "{", "{stop}", "{7}", "/r/x"});
  }

  TEST_CASE("a command gets the event on stdin, the run in its environment, and a log") {
    Hooked it({shell({"saved"}, "cat > event; echo $CAIRN_RUN $CAIRN_STEP $1 $2 $(nice); echo word >&2")});
    it.hooks->hear({{"event", "ready"}}, 3);
    it.hooks->poll();
    CHECK(it.recorded.empty());
    it.saved(12);
    it.finish();
    const std::string run = fs::absolute(it.dir.path).string();
    const std::string log = text_of(it.dir / "logs/hook-1.log");
    CHECK(log == fmt::format("{0} 12 12 {0}/checkpoints/step-00000012 {1}\nword\n", run, 10 + ::nice(0)));
    const json event = json::parse(text_of("event"));
    fs::remove("event");
    CHECK(event["event"] == "saved");
    CHECK(event["on"] == "saved");
    CHECK(event["step"] == 12);
    CHECK(event["bytes"] == 7);
    CHECK(event["run"] == run);
    CHECK(it.recorded.empty());
    CHECK(it.said.empty());
  }

  TEST_CASE("a hook runs one command at a time, and the newest event waits") {
    Hooked it({shell({"saved"}, "echo $1 >> \"$CAIRN_RUN/steps\"; read go < \"$CAIRN_RUN/gate\""),
               shell({"saved"}, "echo $1 >> \"$CAIRN_RUN/others\"")});
    REQUIRE(::mkfifo((it.dir / "gate").c_str(), 0600) == 0);
    it.saved(1);
    REQUIRE(it.until([&] { return text_of(it.dir / "steps") == "1\n"; }));
    it.saved(2);
    REQUIRE(it.until([&] { return text_of(it.dir / "others") == "1\n2\n"; }));  // another hook does not wait
    it.saved(3);
    REQUIRE(it.until([&] { return text_of(it.dir / "others") == "1\n2\n3\n"; }));
    CHECK(text_of(it.dir / "steps") == "1\n");
    for (int times = 0; times < 2; ++times) {
      std::ofstream(it.dir / "gate") << "go\n";
      REQUIRE(it.until([&] { return text_of(it.dir / "steps") == "1\n3\n"; }));
    }
    it.finish();
    CHECK(text_of(it.dir / "steps") == "1\n3\n");
  }

  TEST_CASE("a command that takes too long is ended with all that it has started") {
    Hooked it({shell({"saved"}, "sleep 600 & echo $! > \"$CAIRN_RUN/pid\"; wait", 1)});
    it.saved(4);
    REQUIRE(it.until([&] { return !it.recorded.empty(); }));
    CHECK(it.recorded[0]["event"] == "hook_failed");
    CHECK(it.recorded[0]["hook"] == 1);
    CHECK(it.recorded[0]["on"] == "saved");
    CHECK(it.recorded[0]["step"] == 4);
    CHECK(it.recorded[0]["message"].get<std::string>().find("took longer than") != std::string::npos);
    CHECK(it.said.find("warning: hook 1 (sh) of saved, step 4: was ended") == 0);
    const pid_t child = std::stoi(text_of(it.dir / "pid"));
    CHECK(it.until([&] { return !lives(child); }));
  }

  TEST_CASE("SIGKILL follows where SIGTERM is ignored") {
    Hooked it({shell({"saved"}, "trap '' TERM; echo up > \"$CAIRN_RUN/up\"; while :; do sleep 600; done", 0.05)});
    it.saved(4);
    REQUIRE(it.until([&] { return !it.recorded.empty(); }));
  }

  TEST_CASE("a failure is an event and is reported once in a row; a missing program is a failure") {
    Hooked it({shell({"saved"}, "echo no room; [ $1 -gt 2 ]"),
               {.events = {"saved"}, .run = {"/nonexistent/program"}, .timeout_s = 1}});
    for (const int64_t step : {1, 2, 3, 4}) {
      it.saved(step);
      it.finish();
    }
    std::vector<std::pair<int64_t, int64_t>> failed;
    for (const json& event : it.recorded) failed.emplace_back(event["hook"], event["step"]);
    std::ranges::sort(failed);
    CHECK(failed == std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 3}, {2, 4}});
    CHECK(it.said.find("hook 1 (sh) of saved, step 1: exited with code 1\n  no room\n") != std::string::npos);
    CHECK(it.said.find("step 2: exited") == std::string::npos);
    CHECK(it.said.find("cannot start /nonexistent/program") != std::string::npos);
  }

  TEST_CASE("a hook runs at most `at_most` times within its span") {
    Hook hook = shell({"saved"}, "echo $1 >> \"$CAIRN_RUN/steps\"");
    hook.at_most = 2;
    hook.within_s = 3600;
    Hooked it({hook});
    for (const int64_t step : {1, 2, 3}) {
      it.saved(step);
      it.until([&] { return text_of(it.dir / "steps").ends_with(std::to_string(std::min<int64_t>(step, 2)) + "\n"); });
      it.finish();
    }
    CHECK(text_of(it.dir / "steps") == "1\n2\n");
    REQUIRE(it.recorded.size() == 1);
    CHECK(it.recorded[0]["message"] == "was not run: the run ends (at_most leaves no room)");
  }

  TEST_CASE("the end of a run waits for a hook at most its timeout, and a signal ends the wait") {
    Hooked it({shell({"ended"}, "echo up > \"$CAIRN_RUN/up\"; read go < \"$CAIRN_RUN/gate\"", 600)});
    REQUIRE(::mkfifo((it.dir / "gate").c_str(), 0600) == 0);
    it.hooks->hear({{"event", "end"}, {"exit_code", 0}}, 9);
    REQUIRE(it.until([&] { return fs::exists(it.dir / "up"); }));
    sigset_t usr;
    sigemptyset(&usr);
    sigaddset(&usr, SIGUSR1);
    ::pthread_sigmask(SIG_BLOCK, &usr, nullptr);
    ::kill(::getpid(), SIGUSR1);
    it.hooks->finish(std::array{SIGUSR1}, [] { return Hurry::kNone; });
    ::pthread_sigmask(SIG_UNBLOCK, &usr, nullptr);
    REQUIRE(it.recorded.size() == 1);
    CHECK(it.recorded[0]["message"].get<std::string>().find("the run ends (stopped by a signal after") !=
          std::string::npos);

    Hooked short_one({shell({"ended"}, "read go < \"$CAIRN_RUN/gate\"", 0.2)});
    REQUIRE(::mkfifo((short_one.dir / "gate").c_str(), 0600) == 0);
    short_one.hooks->hear({{"event", "end"}}, 9);
    short_one.finish();
    CHECK(short_one.recorded.size() == 1);
  }

  TEST_CASE("a run's end in a hurry ends commands and records them") {
    for (const auto& [hurry, says] : {std::pair{Hurry::kSignal, "(stopped by a signal after"},  // one already taken
                                      std::pair{Hurry::kTimeLimit, "(at the time limit after"}}) {
      const char* const script = hurry == Hurry::kSignal ? "echo up > \"$CAIRN_RUN/up\"; read go < \"$CAIRN_RUN/gate\""
                                                         : "trap '' TERM; echo up > \"$CAIRN_RUN/up\"; while :; do "
                                                           "sleep 600; done";
      Hooked it({shell({"saved", "ended"}, script, 600)});
      REQUIRE(::mkfifo((it.dir / "gate").c_str(), 0600) == 0);
      it.saved(9);
      REQUIRE(it.until([&] { return fs::exists(it.dir / "up"); }));
      it.hooks->hear({{"event", "end"}, {"exit_code", 0}}, 9);  // waits behind it
      it.hooks->finish({}, [hurry = hurry] { return hurry; });
      REQUIRE(it.recorded.size() == 2);
      for (const auto& [event, on, how] : {std::tuple{&it.recorded[0], "ended", "was not run: the run ends "},
                                           std::tuple{&it.recorded[1], "saved", "was ended: the run ends "}}) {
        CHECK((*event)["on"] == on);
        CHECK((*event)["message"].get<std::string>().starts_with(std::string(how) + says));
      }
    }
  }

  TEST_CASE("an event behind a command that takes the hook's whole timeout is reported as not run") {
    Hooked it({shell({"saved", "ended"}, "read go < \"$CAIRN_RUN/gate\"", 0.2)});
    REQUIRE(::mkfifo((it.dir / "gate").c_str(), 0600) == 0);
    it.saved(9);
    it.hooks->hear({{"event", "end"}}, 9);
    it.finish();
    std::map<std::string, int> told;
    for (const json& event : it.recorded) ++told[event["on"].get<std::string>()];
    CHECK(told == std::map<std::string, int>{{"saved", 1}, {"ended", 1}});
  }
}
