// Whose a run folder is.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/lineage.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

void nap_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// A process that holds the folder. A child of it has the lock's file too, and stays for `ms`; where it `ends` the
/// process itself goes at once, and nobody waits for it yet.
pid_t holder(const fs::path& run, bool ends, int64_t ms) {
  const pid_t pid = ::fork();
  if (pid != 0) {
    while (!fs::exists(run / "held")) nap_ms(1);
    siginfo_t ended;
    if (ends) CHECK(::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT) == 0);
    return pid;
  }
  const Result<RunFolder> folder = RunFolder::open(run, "test");
  if (!folder.ok()) ::_exit(1);
  if (::fork() == 0) {
    nap_ms(ms);
    ::_exit(0);
  }
  fs::create_directory(run / "held");
  if (!ends) nap_ms(ms);
  ::_exit(0);
}

}  // namespace

TEST_SUITE("run folder") {
  TEST_CASE("links by the names of a start's files lead nowhere: what they lead to stays as it is") {
    const TempDir dir;
    const fs::path run = dir.path / "run", precious = dir.path / "precious";
    fs::create_directory(run);
    std::ofstream(precious) << "precious";
    for (const char* name : {"run.json", "recipe.resolved.json", "world", "failure.json", "lineage.jsonl"})
      fs::create_symlink(precious, run / (std::string(name) + ".tmp"));
    {
      const Result<RunFolder> mine = RunFolder::open(run, "test");
      REQUIRE_OK(mine);
      const Status written = write_text_file(run / "world", "4\n");
      CHECK_OK(written);
      CHECK(read_text_file(precious).value() == "precious");
    }
    fs::remove(run / "run.lock");
    fs::create_symlink(precious, run / "run.lock");
    const Result<RunFolder> refused = RunFolder::open(run, "test");
    REQUIRE(!refused.ok());
    CHECK(refused.error().message.find("run.lock is a link") != std::string::npos);
    CHECK(read_text_file(precious).value() == "precious");
  }

  TEST_CASE("whose holder ends is waited for, as a killed agent lets go only when its memory has gone") {
    const TempDir dir;
    const pid_t pid = holder(dir.path / "run", true, 300);
    const Result<RunFolder> mine = RunFolder::open(dir.path / "run", "test");
    CHECK_OK(mine);
    ::waitpid(pid, nullptr, 0);
  }

  TEST_CASE("whose holder lives is refused at once") {
    const TempDir dir;
    const pid_t pid = holder(dir.path / "run", false, 1000);
    const auto begin = std::chrono::steady_clock::now();
    const Result<RunFolder> mine = RunFolder::open(dir.path / "run", "test");
    REQUIRE(!mine.ok());
    CHECK(mine.error().message.find("is in use by another cairn (pid " + std::to_string(pid)) != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(500));
    ::waitpid(pid, nullptr, 0);
  }
}

TEST_SUITE("lineage") {
  TEST_CASE("a damaged lineage is named with its line, and adding a line keeps the file") {
    const TempDir dir;
    const fs::path file = dir.path / "lineage.jsonl";
    Lineage fresh = Lineage::read(dir.path).value();
    for (const char* const recipe : {"a", "b"}) REQUIRE_OK(fresh.append(fresh.next({.recipe = recipe}), "{}"));
    const std::string whole = read_text_file(file).value();
    REQUIRE(Lineage::read(dir.path).value().entries().size() == 2);
    int64_t times = 0;
    for (const std::string& text : {"x" + whole, "{}\n" + whole, "[1]\n" + whole, whole.substr(whole.find('\n') + 1)}) {
      CAPTURE(text);
      REQUIRE_OK(write_text_file(file, text));
      Lineage damaged = Lineage::read(dir.path).value();
      CHECK(damaged.entries().empty());
      CHECK(damaged.problem().starts_with(file.string() + ":1: "));
      CHECK(damaged.problem().find("exception") == std::string::npos);
      CHECK(damaged.problem().find("Bring the file back") != std::string::npos);
      CHECK(replay_recipe(dir.path, damaged).error().code == ErrorCode::kCorrupt);
      REQUIRE_OK(damaged.append(damaged.next({.recipe = "c"}), "{}"));
      CHECK(read_text_file(dir.path / ("lineage.damaged-" + std::to_string(++times) + ".jsonl")).value() == text);
      CHECK(Lineage::read(dir.path).value().problem().empty());
    }
  }
}
