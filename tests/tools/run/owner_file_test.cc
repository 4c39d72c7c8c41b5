#include "tools/run/folder/owner_file.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"
#include "tools/run/folder/folder.h"

using namespace cairn;
using cairn::testing::TempDir;
using namespace cairn::tools;
namespace fs = std::filesystem;

namespace {

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> out;
  for (const auto& at : fs::directory_iterator(folder)) out.push_back(at.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

void write_owner(const fs::path& folder, int64_t number, const nlohmann::json& line) {
  std::ofstream(folder / fmt::format("run.owner-{:08}", number)) << line.dump() << "\n";
}

/// The line of a process that has ended and was reaped.
nlohmann::json line_of_dead() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return {{"host", "here"}, {"pid", child}, {"start", 1}, {"boot", this_boot()}, {"since", "then"}};
}

}  // namespace

TEST_SUITE("tools/run/owner_file") {
  TEST_CASE("a folder has one owner, whose file goes with it") {
    const TempDir dir("owner");
    {
      auto first = OwnerFile::claim(dir.path);
      REQUIRE_OK(first);
      REQUIRE(first.value().has_value());
      CHECK(first.value()->path().filename() == "run.owner-00000001");
      auto second = OwnerFile::claim(dir.path);
      REQUIRE_OK(second);
      CHECK_FALSE(second.value().has_value());
      CHECK(owner_file_in(dir.path).value() == first.value()->path());
      auto forced = OwnerFile::claim(dir.path, true);
      REQUIRE_OK(forced);
      CHECK(forced.value()->path().filename() == "run.owner-00000002");
    }
    CHECK(names_in(dir.path).empty());
    CHECK_FALSE(owner_file_in(dir.path).value().has_value());
  }

  TEST_CASE("an owner whose process is gone for certain loses the folder; any other keeps it") {
    const TempDir dir("owner-gone");
    const nlohmann::json dead = line_of_dead();
    const auto is_free = [&](const nlohmann::json& line) {
      write_owner(dir.path, 4, line);
      auto claimed = OwnerFile::claim(dir.path);
      REQUIRE_OK(claimed);
      if (claimed.value()) CHECK(claimed.value()->path().filename() == "run.owner-00000005");
      return claimed.value().has_value();
    };
    const auto with = [&](const char* key, const nlohmann::json& value) {
      nlohmann::json out = dead;
      out[key] = value;
      return out;
    };
    CHECK(is_free(dead));
    CHECK(is_free(with("pid", ::getpid())));  // its number went to this process
    CHECK_FALSE(is_free(with("boot", "another machine, or another boot")));
    CHECK_FALSE(is_free(with("boot", "")));
    CHECK_FALSE(is_free(with("pid", 0)));
    CHECK_FALSE(is_free(nlohmann::json::parse(holder_line())));  // this process
    CHECK_FALSE(is_free("no line of ours"));
    std::ofstream(dir.path / "run.owner-00000004").flush();  // empty: its maker is about to write
    CHECK_FALSE(OwnerFile::claim(dir.path).value().has_value());
    write_owner(dir.path, 2, dead);
    write_owner(dir.path, 4, dead);
    CHECK(OwnerFile::claim(dir.path).value().has_value());
    CHECK(names_in(dir.path) == std::vector<std::string>{"run.owner-00000004"});  // the one before stays
  }

  TEST_CASE("starts at the same instant make one owner, over a dead one and without one") {
    const nlohmann::json dead = line_of_dead();
    for (int round = 0; round < 40; ++round) {
      CAPTURE(round);
      const TempDir dir("owner-race");
      if (round % 2 == 0) write_owner(dir.path, 7, dead);
      std::atomic<int> owners = 0, ready = 0;
      std::atomic<bool> checked = false;
      std::vector<std::thread> starts;
      constexpr int kStarts = 8;
      for (int k = 0; k < kStarts; ++k) {
        starts.emplace_back([&] {
          ++ready;
          while (ready < kStarts) std::this_thread::yield();
          const auto claimed = OwnerFile::claim(dir.path);
          if (claimed.ok() && claimed.value()) ++owners;
          ++ready;
          while (!checked) std::this_thread::yield();  // keeps what it has
        });
      }
      while (ready < 2 * kStarts) std::this_thread::yield();
      CHECK(owners == 1);
      checked = true;
      for (std::thread& start : starts) start.join();
    }
  }
}
