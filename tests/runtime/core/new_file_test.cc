#include "runtime/core/new_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

using namespace cairn;
using cairn::testing::TempDir;
namespace fs = std::filesystem;

namespace {

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void spit(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::vector<std::string> names(const fs::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path().filename().string());
  std::ranges::sort(out);
  return out;
}

}  // namespace

TEST_SUITE("runtime/core/new_file") {
  TEST_CASE("a placed file replaces a link, and what the link leads to stays as it is") {
    const TempDir dir, elsewhere;
    spit(elsewhere / "precious", "precious");
    for (const char* name : {"note.json", "note.json.tmp"}) fs::create_symlink(elsewhere / "precious", dir / name);
    const Status placed = place_file(dir / "note.json", "text");
    REQUIRE_OK(placed);
    CHECK(slurp(dir / "note.json") == "text");
    CHECK_FALSE(fs::is_symlink(dir / "note.json"));
    CHECK(slurp(elsewhere / "precious") == "precious");
    CHECK(names(dir.path) == std::vector<std::string>{"note.json", "note.json.tmp"});
  }

  TEST_CASE("a new file is nowhere until it is published, and has no name that can be foreseen") {
    const TempDir dir;
    {
      Result<NewFile> one = NewFile::beside(dir / "a"), other = NewFile::beside(dir / "a");
      REQUIRE_OK(one);
      REQUIRE_OK(other);
      CHECK(one.value().temporary() != other.value().temporary());
      REQUIRE_OK(one.value().write("half"));
      CHECK_FALSE(fs::exists(dir / "a"));
      NewFile moved = std::move(one).value();
      const Result<bool> first = moved.publish_if_free(Durable::kYes);
      REQUIRE_OK(first);
      CHECK(first.value());
      const Result<bool> second = other.value().publish_if_free(Durable::kNo);
      REQUIRE_OK(second);
      CHECK_FALSE(second.value());
    }
    CHECK(slurp(dir / "a") == "half");
    CHECK(names(dir.path) == std::vector<std::string>{"a"});
  }

  TEST_CASE("a folder that is missing or may not be written is an error with the path, and leaves nothing") {
    const TempDir dir;
    const Status missing = place_file(dir / "no" / "a", "text");
    REQUIRE_FALSE(missing.ok());
    CHECK(missing.error().message.find((dir / "no" / "a").string()) != std::string::npos);
    fs::create_directory(dir / "a");
    CHECK_FALSE(place_file(dir / "a", "text").ok());
    CHECK(names(dir.path) == std::vector<std::string>{"a"});
  }

  TEST_CASE("a file of a fixed name is opened as a file only: a link or a pipe in its place is refused and kept") {
    const TempDir dir;
    spit(dir / "precious", "precious");
    fs::create_symlink(dir / "precious", dir / "log");
    fs::create_symlink(dir / "nothing", dir / "dangling");
    REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
    for (const char* name : {"log", "dangling", "pipe"}) {
      CAPTURE(name);
      const Result<Fd> opened = open_own(dir / name, O_RDWR | O_APPEND);
      REQUIRE_FALSE(opened.ok());
      CHECK(opened.error().code == ErrorCode::kInvalidInput);
      CHECK(opened.error().message.find("remove it") != std::string::npos);
    }
    CHECK(slurp(dir / "precious") == "precious");
    CHECK_FALSE(fs::exists(dir / "nothing"));
    const Result<Fd> made = open_own(dir / "own", O_WRONLY);
    CHECK_OK(made);
  }

  TEST_CASE("a person's output goes into a device or a pipe as it is, and otherwise into a file of its own") {
    const TempDir dir;
    CHECK(write_output("/dev/null", "text").ok());
    CHECK(fs::is_character_file("/dev/null"));
    CHECK(write_output(dir / "out.svg", "text").ok());
    CHECK(slurp(dir / "out.svg") == "text");
  }

  TEST_CASE("temporary files of killed processes are removed once they are old, and nothing else is") {
    const TempDir dir;
    spit(dir / ".new-0123456789abcdef", "old");
    spit(dir / ".new-fedcba9876543210", "young");
    spit(dir / ".new-note", "other");
    fs::last_write_time(dir / ".new-0123456789abcdef", fs::file_time_type::clock::now() - std::chrono::hours(1));
    fs::last_write_time(dir / ".new-note", fs::file_time_type::clock::now() - std::chrono::hours(1));
    remove_left_files(dir.path);
    CHECK(names(dir.path) == std::vector<std::string>{".new-fedcba9876543210", ".new-note"});
  }
}
