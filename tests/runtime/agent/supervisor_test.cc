#include "runtime/agent/supervisor.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/agent/event_pipe.h"
#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace fs = std::filesystem;
using namespace cairn;
using namespace cairn::agent;

namespace {

// --- The child: this same program, which leaves before doctest's main when CAIRN_TEST_ROLE is set
// ----------------------

int64_t env_int(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? -1 : std::atoll(text);
}

void send(const nlohmann::json& event) {
  static Result<EventWriter> writer = EventWriter::from_environment();
  if (!writer.ok() || !writer.value().send(event).ok()) _exit(99);
}

[[noreturn]] void sleep_for_ever() {
  while (true) pause();
}

[[noreturn]] void play_agent();

[[noreturn]] void play(const std::string& role) {
  const int64_t generation = env_int("TEST_GENERATION");
  if (role == "sleep") sleep_for_ever();
  if (role == "agent") play_agent();
  if (role.rfind("exit ", 0) == 0) _exit(std::atoi(role.c_str() + 5));
  if (role == "kill once") {
    if (generation == 0) raise(SIGKILL);
    _exit(0);
  }
  if (role == "kill always") raise(SIGKILL);
  if (role == "log and fail") {
    std::printf("printed to stdout\n");
    std::fflush(stdout);
    for (int i = 0; i < 8; ++i) std::fprintf(stderr, "line %d\n", i);
    _exit(1);
  }
  if (role == "torn") {
    send({{"event", "whole"}});
    const int fd = static_cast<int>(env_int("TEST_EVENT_FD"));
    (void)!write(fd, "{\"event\": \"to", 13);
    raise(SIGKILL);
  }
  if (role == "garbage") {
    const int fd = static_cast<int>(env_int("TEST_EVENT_FD"));
    (void)!write(fd, "not json\n[1]\n\n", 14);
    send({{"event", "after"}});
    _exit(0);
  }
  if (role == "burst") {
    for (int i = 0; i < 5000; ++i) send({{"event", "n"}, {"n", i}, {"pad", std::string(200, 'x')}});
    _exit(0);
  }
  if (role == "blame peer") _exit(69);
  if (role == "late cause") {  // its peers notice first; it says so before it leaves
    usleep(30'000);
    send({{"event", "error"}, {"exit_code", 65}, {"message", "shard 3 is damaged"}});
    usleep(50'000);
    _exit(65);
  }
  // Asks for a stop, or for what a scheduler and its wrapper may send in all, then ends when told through descriptor
  // 200.
  if (role == "signal parent" || role == "signal parent and die" || role == "signal parent often" || role == "wait") {
    if (role == "signal parent often") {
      for (const int signal : {SIGINT, SIGINT, SIGTERM}) {
        kill(getppid(), signal);
        usleep(30'000);  // equal pending signals merge into one
      }
      usleep(1'100'000);
    }
    if (role != "wait") kill(getppid(), SIGTERM);
    usleep(role == "signal parent often" ? 100'000 : 0);
    uint64_t count = 0;
    (void)!read(200, &count, sizeof count);
    if (role == "signal parent and die") raise(SIGKILL);
    _exit(0);
  }
  if (role == "signal parent twice") {
    kill(getppid(), SIGTERM);
    usleep(1'100'000);
    kill(getppid(), SIGINT);
    sleep_for_ever();
  }
  if (role == "survive signals") {
    sigset_t mask;
    sigprocmask(SIG_BLOCK, nullptr, &mask);
    for (const int signal : kAnsweredByAgent) {
      if (sigismember(&mask, signal)) _exit(97);  // it would wait for what unblocks it
      raise(signal);
    }
    _exit(0);
  }
  if (role == "list fds") {
    nlohmann::json open = nlohmann::json::array();
    for (int fd = 0; fd < 256; ++fd) {
      if (fcntl(fd, F_GETFD) >= 0 && fd != static_cast<int>(env_int("TEST_EVENT_FD"))) open.push_back(fd);
    }
    send({{"event", "fds"}, {"open", open}});
    _exit(0);
  }
  if (role == "stop self") {
    if (generation > 0) _exit(0);
    raise(SIGSTOP);
  }
  if (role == "beat") {  // alive for longer than the hang deadline
    for (int i = 0; i < 150; ++i) {
      send({{"event", "beat"}});
      usleep(10'000);
    }
    _exit(0);
  }
  _exit(96);
}

struct RoleDispatcher {
  RoleDispatcher() {
    const char* role = std::getenv("CAIRN_TEST_ROLE");
    if (role == nullptr) return;
    // The tests address the pipe raw as well; EventWriter must not have closed it.
    if (const char* fd = std::getenv(kEventFdEnv)) setenv("TEST_EVENT_FD", fd, 1);
    play(role);
  }
};
const RoleDispatcher dispatcher;

// --- The client ----------------------------------------------------------------------------------------------------

ChildSpec spec_for(const std::string& role, int64_t generation) {
  ChildSpec spec;
  spec.argv = {"/proc/self/exe"};
  spec.env = {{"CAIRN_TEST_ROLE", role}, {"TEST_GENERATION", std::to_string(generation)}};
  return spec;
}

struct Recorder : SupervisorClient {
  int64_t first_rank = -1;       // of the world; -1: children are counted
  std::function<bool()> finish;  // all_finished()
  std::function<void(int)> readable_hook;
  std::vector<std::string> roles;  // by rank
  std::vector<int> inherit;
  std::string log_path;
  std::function<void(int64_t, const nlohmann::json&)> event_hook;
  std::function<void(int)> stop_hook;
  std::vector<int> told;
  std::function<void()> tick_hook;
  std::function<void(int64_t)> started_hook;
  std::function<void(const RestartInfo&, bool)> failure_hook;
  std::function<void(Failure&)> settle_hook;
  std::function<Restart(const Failure&)> restart_hook;
  Evidence shown;
  std::vector<Failure> errors;

  int64_t generations = 0;
  std::vector<std::pair<int64_t, nlohmann::json>> events;
  std::vector<std::string> notices;
  std::vector<Silence> silent;
  std::vector<double> backoffs;
  std::map<int64_t, ExitStatus> exits;
  int stop_signal = 0;

  Result<std::vector<ChildSpec>> prepare_generation(int64_t generation) override {
    ++generations;
    std::vector<ChildSpec> specs;
    for (const std::string& role : roles) {
      specs.push_back(spec_for(role, generation));
      specs.back().inherit_fds = inherit;
      specs.back().log_path = log_path;
      if (first_rank >= 0) specs.back().rank = first_rank + std::ssize(specs) - 1;
    }
    return specs;
  }
  void on_generation_started(int64_t generation, const Recovery*) override {
    if (started_hook) started_hook(generation);
  }
  void on_event(int64_t rank, const nlohmann::json& event) override {
    events.emplace_back(rank, event);
    if (event_hook) event_hook(rank, event);
  }
  void on_child_exit(int64_t rank, const ExitStatus& status, bool) override { exits[rank] = status; }
  Evidence evidence() override { return shown; }
  void on_rank_error(const Failure& error) override { errors.push_back(error); }
  void settle(Failure& failure) override {
    if (settle_hook) settle_hook(failure);
  }
  Restart restart_of(const Failure& failure) override {
    return restart_hook ? restart_hook(failure) : restart_here(failure.failure_class);
  }
  void on_failure(const RestartInfo& info, bool restarting, double backoff_s) override {
    backoffs.push_back(backoff_s);
    if (failure_hook) failure_hook(info, restarting);
  }
  void on_stop_requested(int signal) override {
    stop_signal = signal;
    if (stop_hook) stop_hook(signal);
  }
  void on_signal(int signal) override { told.push_back(signal); }
  void on_readable(int fd) override {
    if (readable_hook) readable_hook(fd);
  }
  bool all_finished() override { return !finish || finish(); }
  void on_tick() override {
    if (tick_hook) tick_hook();
  }
  void on_notice(const std::string& text) override { notices.push_back(text); }
  bool on_hang(const std::vector<Silence>& found) override {
    silent = found;
    return true;
  }
  std::string place(int64_t rank) override { return "step 7 forward of rank " + std::to_string(rank); }
};

const SystemClock system_clock;

Result<Outcome> run_supervisor(Recorder& client, SupervisorOptions options = {}) {
  Result<std::unique_ptr<Supervisor>> made = Supervisor::make(std::move(options), client, system_clock);
  REQUIRE(made.ok());
  return made.value()->run();
}

Outcome run_all(Recorder& client, SupervisorOptions options = {}) {
  Result<Outcome> outcome = run_supervisor(client, std::move(options));
  REQUIRE_OK(outcome);
  // Nothing of ours is left, dead or alive.
  CHECK(waitpid(-1, nullptr, WNOHANG) == -1);
  CHECK(errno == ECHILD);
  return std::move(outcome).value();
}

int64_t count_open_fds() {
  int64_t n = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

/// An agent in a process of its own, with two sleeping ranks, which tells their process numbers on descriptor 200.
[[noreturn]] void play_agent() {
  Recorder client;
  client.roles = {"sleep", "sleep"};
  Result<std::unique_ptr<Supervisor>> made = Supervisor::make({}, client, system_clock);
  if (!made.ok()) _exit(95);
  client.started_hook = [&](int64_t) {
    std::ifstream tasks("/proc/self/task/" + std::to_string(getpid()) + "/children");
    std::string line;
    std::getline(tasks, line);
    line += "\n";
    (void)!write(200, line.data(), line.size());
  };
  if (!made.value()->run().ok()) _exit(92);
  _exit(94);
}

}  // namespace

TEST_SUITE("runtime/agent/supervisor") {
  TEST_CASE("a generation whose children all exit 0 is the whole run") {
    Recorder client;
    client.roles = {"exit 0", "exit 0", "exit 0"};
    const Outcome outcome = run_all(client);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.message.empty());
    CHECK(outcome.recoveries.empty());
    CHECK(client.generations == 1);
    CHECK(client.exits.size() == 3);
  }

  TEST_CASE("a killed rank takes its generation with it and the next one starts within milliseconds") {
    Recorder client;
    client.roles = {"sleep", "kill once", "sleep"};
    client.started_hook = [&](int64_t generation) {
      if (generation == 0) client.roles = {"exit 0", "exit 0", "exit 0"};
    };
    const Outcome outcome = run_all(client);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(client.generations == 2);
    REQUIRE(outcome.recoveries.size() == 1);
    const Recovery& recovery = outcome.recoveries[0];
    CHECK(recovery.generation == 1);
    CHECK(recovery.failed_rank == 1);
    CHECK(recovery.cause.find("was killed by signal 9") != std::string::npos);
    CHECK(recovery.detected_ns <= recovery.killed_ns);
    CHECK(recovery.killed_ns <= recovery.reaped_ns);
    CHECK(recovery.reaped_ns <= recovery.prepared_ns);
    CHECK(recovery.prepared_ns <= recovery.spawned_ns);
    // Generous for a loaded machine and sanitizers; a polling sleep anywhere would still be seen.
    CHECK((recovery.spawned_ns - recovery.detected_ns) / 1'000'000 < 500);
    MESSAGE("detected -> spawned: ", (recovery.spawned_ns - recovery.detected_ns) / 1000, " us");
  }

  TEST_CASE("restarts in a row are limited, and wait longer each time") {
    Recorder client;
    client.roles = {"kill always"};
    SupervisorOptions options;
    options.restart = {.max_restarts = 3, .backoff_s = 0.01};
    const Outcome outcome = run_all(client, options);
    CHECK(outcome.kind == EndKind::kFailed);
    CHECK(outcome.exit_code == 128 + SIGKILL);
    CHECK(client.generations == 4);
    CHECK(client.backoffs == std::vector<double>{0, 0.01, 0.02, 0});
    CHECK(outcome.message.find("rank 0") == 0);
    CHECK(outcome.message.find("given up after 3 restarts in a row without progress") != std::string::npos);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->generation == 3);
    REQUIRE(outcome.recoveries.size() == 3);
    CHECK(outcome.recoveries[1].spawned_ns - outcome.recoveries[1].reaped_ns >= 10'000'000);
    CHECK(outcome.recoveries[2].spawned_ns - outcome.recoveries[2].reaped_ns >= 20'000'000);
  }

  TEST_CASE("progress makes the count of restarts start again") {
    Recorder client;
    client.roles = {"kill always"};
    SupervisorOptions options;
    options.restart = {.max_restarts = 1};
    Result<std::unique_ptr<Supervisor>> made = Supervisor::make(options, client, system_clock);
    REQUIRE(made.ok());
    client.started_hook = [&](int64_t generation) {
      if (generation < 5) made.value()->note_progress();
    };
    const Result<Outcome> outcome = made.value()->run();
    REQUIRE(outcome.ok());
    CHECK(client.generations == 6);
    CHECK(outcome.value().kind == EndKind::kFailed);
  }

  TEST_CASE("refusals and damage are never restarted, other codes are") {
    for (const int code : {2, 65, 70, 74, 76}) {
      CAPTURE(code);
      Recorder client;
      client.roles = {"exit " + std::to_string(code), "sleep"};
      const Outcome outcome = run_all(client);
      CHECK(outcome.kind == EndKind::kFailed);
      CHECK(outcome.exit_code == code);
      CHECK(client.generations == 1);
      CHECK(client.exits[1].signal == SIGKILL);
    }
    for (const int code : {1, 69, 75, 3}) {
      CAPTURE(code);
      Recorder client;
      client.roles = {"exit " + std::to_string(code)};
      SupervisorOptions options;
      options.restart.max_restarts = 1;
      CHECK(run_all(client, options).exit_code == code);
      CHECK(client.generations == 2);
    }
  }

  TEST_CASE("the first error wins over those who only lost a peer") {
    Recorder client;
    client.roles = {"blame peer", "late cause", "blame peer"};
    const Outcome outcome = run_all(client);
    CHECK(outcome.exit_code == 65);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->rank == 1);
    CHECK(outcome.message.find("shard 3 is damaged") != std::string::npos);
    CHECK(client.generations == 1);
  }

  TEST_CASE("the first rank is named after the grace when all ranks only lost a peer") {
    Recorder client;
    client.roles = {"sleep", "blame peer"};
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    options.cause_grace_ms = 20;
    const Outcome outcome = run_all(client, options);
    CHECK(outcome.exit_code == 69);
    CHECK(outcome.failure->rank == 1);
  }

  TEST_CASE("output goes to the log and its end into the message") {
    const testing::TempDir dir;
    Recorder client;
    client.roles = {"log and fail"};
    client.log_path = (dir / "rank-0.log").string();
    std::ofstream(client.log_path) << "of an earlier run\n";
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    const Outcome outcome = run_all(client, options);
    CHECK(contents(client.log_path) ==
          "of an earlier run\nprinted to stdout\nline 0\nline 1\nline 2\nline 3\nline 4\nline 5\nline 6\nline 7\n");
    CHECK(outcome.message.find("exited with code 1; the end of " + client.log_path) != std::string::npos);
    CHECK(outcome.message.find("\n    line 3\n    line 4\n    line 5\n    line 6\n    line 7") != std::string::npos);
    CHECK(outcome.message.find("line 2") == std::string::npos);
    CHECK(outcome.message.find("earlier run") == std::string::npos);
  }

  TEST_CASE("an event torn by a kill is dropped, those before it arrive") {
    Recorder client;
    client.roles = {"torn"};
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    run_all(client, options);
    REQUIRE(client.events.size() == 1);
    CHECK(client.events[0].second["event"] == "whole");
    REQUIRE(client.notices.size() == 1);
    CHECK(client.notices[0].find("cut off") != std::string::npos);
  }

  TEST_CASE("lines that are no events are told, not fatal") {
    Recorder client;
    client.roles = {"garbage"};
    CHECK(run_all(client).kind == EndKind::kFinished);
    REQUIRE(client.events.size() == 1);
    CHECK(client.notices.size() == 2);
  }

  TEST_CASE("a burst larger than the pipe arrives whole and in order") {
    Recorder client;
    client.roles = {"burst", "burst"};
    CHECK(run_all(client).kind == EndKind::kFinished);
    REQUIRE(client.events.size() == 10000);
    std::map<int64_t, int> next;
    for (const auto& [rank, event] : client.events) CHECK(event["n"] == next[rank]++);
  }

  TEST_CASE("the first signal asks, and children that leave with 0 finish the run") {
    Fd told(eventfd(0, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"signal parent"};
    client.inherit = {200};
    client.stop_hook = [&](int) {
      const uint64_t one = 1;
      (void)!write(told.get(), &one, sizeof one);
    };
    const Outcome outcome = run_all(client);
    CHECK(client.stop_signal == SIGTERM);
    CHECK(outcome.stop_signal == SIGTERM);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(outcome.exit_code == 0);
  }

  TEST_CASE("signals that a scheduler and its wrapper send besides only ask for the stop again") {
    const Fd told(eventfd(1, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"signal parent often"};
    client.inherit = {200};
    const Outcome outcome = run_all(client);
    CHECK(client.stop_signal == SIGINT);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(outcome.exit_code == 0);
  }

  TEST_CASE("signals that came while a callback was held up count as of one moment, however long it took") {
    const Fd told(eventfd(0, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"wait"};
    client.inherit = {200};
    SupervisorOptions options;
    options.tick_ms = 20;
    client.started_hook = [&](int64_t) { kill(getpid(), SIGINT); };
    client.stop_hook = [&](int) {
      kill(getpid(), SIGINT);  // of the same moment, found when the disk has let go
      std::this_thread::sleep_for(std::chrono::milliseconds(1200));
      const uint64_t one = 1;
      (void)!write(told.get(), &one, sizeof one);
    };
    CHECK(run_all(client, options).kind == EndKind::kFinished);
  }

  TEST_CASE("a SIGINT a second after the first signal leaves at once") {
    Recorder client;
    client.roles = {"signal parent twice", "sleep"};
    const Outcome outcome = run_all(client);
    CHECK(outcome.kind == EndKind::kLeftBySignal);
    CHECK(outcome.exit_code == 128 + SIGINT);
    CHECK(outcome.stop_signal == SIGTERM);
    CHECK(client.generations == 1);
  }

  TEST_CASE("told signals are told, before, while and after children run, and end nothing") {
    Recorder client;
    client.roles = {"beat"};
    SupervisorOptions options;
    options.told_signals = {SIGUSR1, SIGQUIT};
    client.started_hook = [&](int64_t) {
      for (const int signal : {SIGQUIT, SIGUSR1, SIGUSR1}) kill(getpid(), signal);
    };
    auto made = Supervisor::make(options, client, system_clock);
    REQUIRE(made.ok());
    kill(getpid(), SIGUSR1);  // nobody runs yet
    CHECK_FALSE(made.value()->stop_asked());
    const Result<Outcome> outcome = made.value()->run();
    REQUIRE_OK(outcome);
    CHECK(outcome.value().kind == EndKind::kFinished);
    CHECK(outcome.value().stop_signal == 0);
    std::ranges::sort(client.told);
    CHECK(client.told == std::vector<int>{SIGQUIT, SIGUSR1});
    kill(getpid(), SIGUSR1);  // nobody runs any more
    made.value().reset();
    kill(getpid(), SIGQUIT);
    sigset_t both;
    sigemptyset(&both);
    for (const int signal : {SIGUSR1, SIGQUIT}) sigaddset(&both, signal);
    const timespec now{};
    for (int i = 0; i < 2; ++i) CHECK(sigtimedwait(&both, nullptr, &now) > 0);  // they waited, and would for ever
    sigprocmask(SIG_UNBLOCK, &both, nullptr);
  }

  TEST_CASE("a stop requested without a signal gets what SIGTERM gets, once") {
    Fd told(eventfd(0, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"wait"};
    client.inherit = {200};
    int64_t stops = 0;
    client.stop_hook = [&](int) {
      const uint64_t one = ++stops;
      (void)!write(told.get(), &one, sizeof one);
    };
    auto made = Supervisor::make({}, client, system_clock);
    REQUIRE(made.ok());
    std::thread asks;
    client.started_hook = [&](int64_t) {
      asks = std::thread([&] {
        for (int i = 0; i < 3; ++i) made.value()->ask_stop();
      });
    };
    const Result<Outcome> outcome = made.value()->run();
    asks.join();
    REQUIRE_OK(outcome);
    CHECK(outcome.value().kind == EndKind::kFinished);
    CHECK(outcome.value().stop_signal == SIGTERM);
    CHECK(stops == 1);
    CHECK(made.value()->stop_asked());
    CHECK(made.value()->leave_signal() == 0);
  }

  TEST_CASE("a signal during the back-off ends the run") {
    Recorder client;
    client.roles = {"kill always"};
    client.failure_hook = [](const RestartInfo& info, bool restarting) {
      if (restarting && info.restarts_in_a_row == 1) kill(getpid(), SIGTERM);
    };
    SupervisorOptions options;
    options.restart.backoff_s = 60;
    const Outcome outcome = run_all(client, options);
    CHECK(outcome.kind == EndKind::kFailed);
    CHECK(outcome.stop_signal == SIGTERM);
    CHECK(outcome.exit_code == 137);
    CHECK(outcome.message.find("asked to stop while waiting") != std::string::npos);
  }

  TEST_CASE("a child that dies after a stop was asked for is not restarted") {
    const Fd told(eventfd(0, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"signal parent and die"};
    client.inherit = {200};
    client.stop_hook = [&](int) {
      const uint64_t one = 1;
      (void)!write(told.get(), &one, sizeof one);
    };
    const Outcome outcome = run_all(client);
    CHECK(client.generations == 1);
    CHECK(outcome.stop_signal == SIGTERM);
    CHECK(outcome.kind == EndKind::kFailed);
    CHECK(outcome.exit_code == 137);
  }

  TEST_CASE("children neither die of the group's signals nor inherit a signal mask") {
    Recorder client;
    client.roles = {"survive signals"};
    sigset_t usr1;
    sigset_t before;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigprocmask(SIG_BLOCK, &usr1, &before);
    CHECK(run_all(client).exit_code == 0);
    sigprocmask(SIG_SETMASK, &before, nullptr);
  }

  TEST_CASE("a child has stdin, stdout, stderr, its events and what was inherited, nothing else") {
    const Fd leaky(dup(STDERR_FILENO));  // without O_CLOEXEC, as careless libraries do
    REQUIRE(dup2(STDERR_FILENO, 201) == 201);
    const Fd at_201(201);
    Recorder client;
    client.roles = {"list fds"};
    client.inherit = {201};
    run_all(client);
    REQUIRE(client.events.size() == 1);
    CHECK(client.events[0].second["open"] == nlohmann::json({0, 1, 2, 201}));
  }

  TEST_CASE("children die with a supervisor that is SIGKILLed") {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const Fd read_end(ends[0]);
    const pid_t agent = fork();
    if (agent == 0) {
      dup2(ends[1], 200);
      setenv("CAIRN_TEST_ROLE", "agent", 1);
      execl("/proc/self/exe", "agent", nullptr);
      _exit(93);
    }
    close(ends[1]);
    char text[256] = {};
    REQUIRE(read(read_end.get(), text, sizeof text - 1) > 0);
    std::istringstream pids(text);
    std::vector<pid_t> children;
    for (pid_t pid = 0; pids >> pid;) children.push_back(pid);
    REQUIRE(children.size() == 2);
    for (const pid_t pid : children) REQUIRE(kill(pid, 0) == 0);
    kill(agent, SIGKILL);
    waitpid(agent, nullptr, 0);
    for (const pid_t pid : children) {
      bool gone = false;
      for (int i = 0; i < 500 && !gone; ++i) {
        const char state = process_state(pid);
        gone = state == '?' || state == 'Z' || state == 'X';
        if (!gone) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      CHECK(gone);
    }
  }

  TEST_CASE("a stopped child is found, named and replaced") {
    Recorder client;
    client.roles = {"sleep", "stop self"};
    client.started_hook = [&](int64_t generation) {
      if (generation == 0) client.roles = {"exit 0", "stop self"};
    };
    SupervisorOptions options;
    options.hang_deadline_ms = 1000;  // above what a process takes to start: its libraries may take 200
    const Outcome outcome = run_all(client, options);
    CHECK(outcome.kind == EndKind::kFinished);
    REQUIRE(client.silent.size() == 2);
    CHECK(client.silent[0].rank == 1);
    CHECK(client.silent[0].state == 'T');
    CHECK(client.silent[0].silent_ms >= 1000);
    REQUIRE(outcome.recoveries.size() == 1);
    CHECK(outcome.recoveries[0].failed_rank == 1);
    CHECK(outcome.recoveries[0].cause.find("stopped (state T); last at step 7 forward of rank 1; 1 others wait") !=
          std::string::npos);
  }

  TEST_CASE("a child that sends events does not hang") {
    Recorder client;
    client.roles = {"beat"};
    SupervisorOptions options;
    options.hang_deadline_ms = 1000;
    CHECK(run_all(client, options).kind == EndKind::kFinished);
    CHECK(client.silent.empty());
  }

  TEST_CASE("a client is woken from another thread") {
    const Fd told(eventfd(0, EFD_CLOEXEC));
    REQUIRE(dup3(told.get(), 200, O_CLOEXEC) == 200);
    const Fd at_200(200);
    Recorder client;
    client.roles = {"wait"};
    client.inherit = {200};
    SupervisorOptions options;
    options.tick_ms = 0;
    Result<std::unique_ptr<Supervisor>> made = Supervisor::make(options, client, system_clock);
    REQUIRE(made.ok());
    int64_t ticks = 0;
    client.tick_hook = [&] {
      ++ticks;
      const uint64_t one = 1;
      (void)!write(told.get(), &one, sizeof one);
    };
    std::thread waker([&] { made.value()->wake(); });
    const Result<Outcome> outcome = made.value()->run();
    waker.join();
    REQUIRE(outcome.ok());
    CHECK(outcome.value().kind == EndKind::kFinished);
    CHECK(ticks == 1);
  }

  TEST_CASE("abandoned from another thread, a run ends with that error: nothing is told, nothing started again") {
    for (const char* role : {"sleep", "kill always", "exit 69"}) {
      CAPTURE(role);
      Recorder client;
      client.roles = {"sleep", role};
      SupervisorOptions options;
      options.restart.backoff_s = 60;
      Result<std::unique_ptr<Supervisor>> made = Supervisor::make(options, client, system_clock);
      REQUIRE(made.ok());
      int64_t ticks = 0;
      std::atomic<bool> ended = false;
      client.tick_hook = [&] { ticks += ended ? 1 : 0; };
      std::thread other;
      const bool runs = role == std::string("sleep");
      const auto abandon = [&] {
        ended = true;
        made.value()->abandon({ErrorCode::kUnavailable, "the run is another one's"});
        made.value()->abandon({ErrorCode::kInternal, "too late"});
      };
      client.started_hook = [&](int64_t) {
        if (runs) other = std::thread(abandon);
      };
      client.failure_hook = [&](const RestartInfo& info, bool) {
        if (info.restarts_in_a_row == 1) other = std::thread(abandon);  // in the back-off
      };
      const Result<Outcome> outcome = made.value()->run();
      other.join();
      REQUIRE_FALSE(outcome.ok());
      CHECK(outcome.error().code == ErrorCode::kUnavailable);
      CHECK(outcome.error().message == "the run is another one's");
      CHECK(client.generations == (runs ? 1 : 2));
      CHECK(ticks == 0);
      CHECK(waitpid(-1, nullptr, WNOHANG) == -1);
    }
  }

  TEST_CASE("a program or log that cannot be opened is an error that names it, and nothing is left running") {
    struct Wrong : Recorder {
      ChildSpec second;
      Result<std::vector<ChildSpec>> prepare_generation(int64_t) override {
        return std::vector<ChildSpec>{spec_for("sleep", 0), second};
      }
    };
    Wrong client;
    client.second.argv = {"/no/such/program"};
    Result<Outcome> outcome = run_supervisor(client);
    REQUIRE_FALSE(outcome.ok());
    CHECK(outcome.error().code == ErrorCode::kInvalidInput);
    CHECK(outcome.error().message == "rank 1: cannot start /no/such/program: exec: No such file or directory");
    CHECK(waitpid(-1, nullptr, WNOHANG) == -1);

    client.second = spec_for("sleep", 0);
    client.second.log_path = "/no/such/folder/rank-1.log";
    outcome = run_supervisor(client);
    REQUIRE_FALSE(outcome.ok());
    CHECK(outcome.error().message == "rank 1: /no/such/folder/rank-1.log: No such file or directory");
    CHECK(waitpid(-1, nullptr, WNOHANG) == -1);
  }

  // --- one host of several

  TEST_CASE("ranks of one host of several are called by their numbers in the world") {
    Recorder client;
    client.first_rank = 6;
    client.roles = {"exit 0", "kill always"};
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    const Outcome outcome = run_all(client, options);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->rank == 7);
    CHECK(outcome.message.starts_with("rank 7 "));
    CHECK(client.exits.contains(6));
  }

  TEST_CASE("a silent rank of one host of several is found by its number in the world") {
    Recorder client;
    client.first_rank = 6;
    client.roles = {"sleep", "stop self"};
    client.started_hook = [&](int64_t generation) {
      if (generation == 1) client.roles = {"exit 0"};
    };
    SupervisorOptions options;
    options.hang_deadline_ms = 1000;
    options.restart.max_restarts = 0;
    const Outcome outcome = run_all(client, options);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->rank == 7);
    CHECK(outcome.failure->hang);
  }

  TEST_CASE("a failure on another host ends the generation as one here does, and the first one counts") {
    Recorder client;
    client.roles = {"sleep", "sleep"};
    const Fd news(eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC));
    auto made = Supervisor::make({}, client, system_clock);
    REQUIRE_OK(made);
    RunControl& control = *made.value();
    REQUIRE_OK(control.watch(news.get()));
    std::vector<std::string> causes;
    client.readable_hook = [&](int fd) {
      CHECK(fd == news.get());
      uint64_t count = 0;
      (void)!read(fd, &count, sizeof count);
      control.fail({.rank = 9, .status = {.exit_code = 0, .signal = 9}, .message = "rank 9 of h2"});
      control.fail({.rank = 10, .status = {.exit_code = 65, .signal = 0}, .message = "rank 10 of h2"});
    };
    client.failure_hook = [&](const RestartInfo& info, bool restarting) {
      causes.push_back(info.failure.message);
      CHECK(restarting);
      client.roles = {"exit 0", "exit 0"};
    };
    const Result<Outcome> outcome = made.value()->run();
    REQUIRE_OK(outcome);
    CHECK(outcome.value().kind == EndKind::kFinished);
    CHECK(causes == std::vector<std::string>{"rank 9 of h2"});
    REQUIRE(outcome.value().recoveries.size() == 1);
    CHECK(outcome.value().recoveries[0].failed_rank == 9);
  }

  TEST_CASE("a rank elsewhere that only lost its peer is blamed when nobody else fails, here or there") {
    for (const bool cause_comes : {false, true}) {
      Recorder client;
      client.roles = {"sleep"};
      SupervisorOptions options;
      options.cause_grace_ms = 100;
      options.restart.max_restarts = 0;
      auto made = Supervisor::make(options, client, system_clock);
      REQUIRE_OK(made);
      client.started_hook = [&](int64_t) {
        made.value()->fail({.rank = 4, .status = {.exit_code = 69, .signal = 0}, .message = "rank 4 lost its peer"});
        if (!cause_comes) return;
        made.value()->fail({.rank = 6, .status = {.exit_code = 0, .signal = 11}, .message = "rank 6 crashed"});
      };
      const Result<Outcome> outcome = made.value()->run();
      REQUIRE_OK(outcome);
      REQUIRE(outcome.value().failure);
      CHECK(outcome.value().failure->rank == (cause_comes ? 6 : 4));
    }
  }

  TEST_CASE("of a rank elsewhere that keeps the others waiting the client knows, and it is blamed by its number") {
    struct Knows : Recorder {
      std::optional<std::pair<int64_t, std::string>> suspect() override {
        return std::pair<int64_t, std::string>(5, "is stopped (state T)");
      }
    };
    Knows client;
    client.roles = {"blame peer", "sleep"};
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    options.has_others = true;
    const Outcome outcome = run_all(client, options);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->rank == 5);
    CHECK(outcome.failure->hang);
    CHECK(outcome.message.starts_with("rank 5 is stopped (state T); noticed as rank 0 gave up"));
  }

  TEST_CASE("a host that was lost is no try of the ranks") {
    for (const bool host : {true, false}) {
      Recorder client;
      client.roles = {"sleep"};
      SupervisorOptions options;
      options.restart.max_restarts = 2;
      auto made = Supervisor::make(options, client, system_clock);
      REQUIRE_OK(made);
      client.started_hook = [&](int64_t generation) {
        if (generation == 7) client.roles = {"exit 0"};
        made.value()->fail({.status = {.exit_code = 69, .signal = 0}, .host = host, .message = "h2 was lost"});
      };
      client.failure_hook = [&](const RestartInfo&, bool) {
        if (client.generations == 7) client.started_hook = nullptr, client.roles = {"exit 0"};
      };
      const Result<Outcome> outcome = made.value()->run();
      REQUIRE_OK(outcome);
      CHECK((outcome.value().kind == EndKind::kFinished) == host);
      CHECK(client.generations == (host ? 8 : 3));
    }
  }

  TEST_CASE(
      "where all ranks here have ended the run goes on until those elsewhere have, and a failure there starts all") {
    Recorder client;
    client.roles = {"exit 0"};
    auto made = Supervisor::make({}, client, system_clock);
    REQUIRE_OK(made);
    int64_t asked = 0;
    client.finish = [&] {
      ++asked;
      if (asked == 1) made.value()->wake();  // as news of another host does
      if (asked == 2) made.value()->fail({.status = {.exit_code = 1, .signal = 0}, .message = "rank 3 of h1"});
      return asked > 2;
    };
    const Result<Outcome> outcome = made.value()->run();
    REQUIRE_OK(outcome);
    CHECK(outcome.value().kind == EndKind::kFinished);
    CHECK(client.generations == 2);
    CHECK(asked == 3);
  }

  TEST_CASE("ranks that have all ended with errors finish no run, though other hosts report nothing") {
    for (const bool other_decides : {false, true}) {
      struct Host : Recorder {
        Result<std::vector<ChildSpec>> prepare_generation(int64_t generation) override {
          if (generation == 1) return Error{ErrorCode::kStopped, "the leader has ended this"};
          return Recorder::prepare_generation(generation);
        }
      };
      Host client;
      client.roles = {"blame peer", "blame peer"};
      int64_t asked = 0;
      client.finish = [&] {
        ++asked;
        return true;
      };
      std::vector<std::string> causes;
      client.failure_hook = [&](const RestartInfo& info, bool) { causes.push_back(info.failure.message); };
      SupervisorOptions options;
      options.restart.max_restarts = 0;
      options.client_decides = other_decides;
      options.has_others = true;
      const Result<Outcome> outcome = run_supervisor(client, options);
      CHECK(asked == 0);
      REQUIRE(causes.size() == 1);
      CHECK(causes[0].find("exited with code 69") != std::string::npos);
      REQUIRE(outcome.ok() != other_decides);
      if (!outcome.ok()) continue;
      CHECK(outcome.value().kind == EndKind::kFailed);
      CHECK(outcome.value().exit_code == 69);
    }
  }

  TEST_CASE("where another host decides every failure waits for its word, whatever the exit code and after a stop") {
    struct Follower : Recorder {
      Result<std::vector<ChildSpec>> prepare_generation(int64_t generation) override {
        if (generation == 4) return Error{ErrorCode::kStopped, "the leader has ended this"};
        return Recorder::prepare_generation(generation);
      }
    };
    Follower client;
    client.roles = {"exit 65"};
    client.started_hook = [&](int64_t generation) {
      if (generation == 1) kill(getpid(), SIGTERM);
    };
    SupervisorOptions options;
    options.restart.max_restarts = 0;
    options.restart.backoff_s = 1000;
    options.client_decides = true;
    const Result<Outcome> outcome = run_supervisor(client, options);
    REQUIRE_FALSE(outcome.ok());
    CHECK(outcome.error().message == "the leader has ended this");
    CHECK(client.stop_signal == SIGTERM);
    CHECK(client.backoffs == std::vector<double>{0, 0, 0, 0});
  }

  TEST_CASE("a hundred fast restarts leak no descriptor and no process") {
    const int64_t before = count_open_fds();
    {
      Recorder client;
      client.roles = {"kill always", "sleep"};
      SupervisorOptions options;
      options.restart.max_restarts = 100;
      int64_t first = 0;
      int64_t last = 0;
      client.started_hook = [&](int64_t generation) { (generation == 0 ? first : last) = count_open_fds(); };
      const Outcome outcome = run_all(client, options);
      CHECK(client.generations == 101);
      CHECK(outcome.recoveries.size() == 100);
      CHECK(first == last);
      int64_t total_ns = 0;
      for (const Recovery& r : outcome.recoveries) total_ns += r.spawned_ns - r.detected_ns;
      MESSAGE("mean detected -> spawned: ", total_ns / 100'000, " us");
    }
    CHECK(count_open_fds() == before);
  }
  TEST_CASE("the class of a failure decides whether ranks start again, and what a host shows is told") {
    Recorder client;
    client.roles = {"kill always", "sleep"};
    client.shown = {
        .oom_kills = 1, .memory_peak_bytes = 64 << 20, .memory_limit_bytes = -1, .shm_full = false, .kernel = {}};
    SupervisorOptions options;
    options.restart.max_restarts = 1;
    const Outcome outcome = run_all(client, options);
    REQUIRE(outcome.failure);
    CHECK(outcome.failure->failure_class == FailureClass::kOutOfMemory);
    CHECK(
        outcome.message.find("out of memory: the kernel has killed 1 process of this cgroup (64.0 MiB at the peak)") !=
        std::string::npos);
    CHECK(client.generations == 2);
    REQUIRE(client.errors.size() == 2);  // one a generation: who was killed for it has made none
    CHECK(client.errors[0].rank == 0);
    CHECK(client.errors[0].seen_ns > 0);
    CHECK(client.errors[0].seen_ns <= client.errors[1].seen_ns);

    Recorder host;
    host.roles = {"exit 127", "sleep"};
    const Outcome ended = run_all(host);
    CHECK(ended.kind == EndKind::kFailed);
    CHECK(ended.exit_code == 127);
    CHECK(host.generations == 1);
    CHECK(ended.failure->failure_class == FailureClass::kHostSetup);
  }

  TEST_CASE("a failure that moves elsewhere is no try of the ranks") {
    Recorder client;
    client.roles = {"exit 14", "sleep"};
    int64_t asked = 0;
    client.restart_hook = [&](const Failure& failure) {
      CHECK(failure.failure_class == FailureClass::kDevice);
      if (++asked == 3) client.roles = {"exit 0", "exit 0"};
      return Restart::kElsewhere;
    };
    SupervisorOptions options;
    options.restart = {.max_restarts = 0, .backoff_s = 5};
    const Outcome outcome = run_all(client, options);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(client.generations == 4);
    CHECK(client.backoffs == std::vector<double>{0, 0, 0});
  }

  TEST_CASE("the cause that is settled on, once no rank runs, takes the place of the failure that was seen first") {
    Recorder client;
    client.roles = {"exit 1", "sleep"};
    client.settle_hook = [&](Failure& failure) {
      CHECK(failure.failure_class == FailureClass::kError);
      CHECK(client.exits.size() == 2);
      failure.status = {.exit_code = 65};
      failure.failure_class = FailureClass::kData;
      failure.message = "rank 7 of another host";
    };
    const Outcome outcome = run_all(client);
    CHECK(outcome.exit_code == 65);
    CHECK(outcome.message == "rank 7 of another host");
    CHECK(client.generations == 1);
  }

  TEST_CASE("a rank that was asked to go takes the run along as a stop does") {
    Recorder client;
    client.roles = {"exit 143", "sleep"};
    const Outcome outcome = run_all(client);
    CHECK(outcome.kind == EndKind::kFinished);
    CHECK(outcome.stop_signal == SIGTERM);
    CHECK(outcome.exit_code == 0);
    CHECK(client.generations == 1);
  }
}
