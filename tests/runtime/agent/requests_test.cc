#include "runtime/agent/requests.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cmath>
#include <ctime>
#include <fstream>
#include <string>

#include "tests/support/ok.h"
#include "tests/support/temp_dir.h"

namespace fs = std::filesystem;
using namespace cairn;
using namespace cairn::agent;
using cairn::testing::TempDir;

namespace {

void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

void set_time(const fs::path& path, double unix_s) {
  timespec times[2];
  times[0] = times[1] = {static_cast<time_t>(unix_s), 0};
  REQUIRE(utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
}

constexpr double kStarted = 1'700'000'000;

/// A run's folder that is looked at each second, and each fifth of one while a file may be being written.
struct Folder {
  TempDir dir{"requests"};
  RequestFiles files{dir.path, kStarted};
  double now = 100;

  RequestFiles::News after(double seconds) { return files.look(now += seconds); }
  RequestFiles::News settled() {
    const RequestFiles::News first = after(1);
    CHECK_FALSE(first.stop);
    return after(kLookAgainS);
  }
};

}  // namespace

TEST_SUITE("runtime/agent/requests") {
  TEST_CASE("a stop is at once, at the next save or at a step, and nothing else") {
    CHECK(parse_stop("").value() == StopWish{});
    CHECK(parse_stop(" \r\n").value() == StopWish{});
    CHECK(parse_stop("after-save\n").value() == StopWish{.when = StopWish::When::kAtSave});
    CHECK(parse_stop(" 500\n").value() == StopWish{.when = StopWish::When::kAtStep, .step = 500});
    for (const char* text : {"0", "-5", "+5", "5.0", "1e3", "after save", "AFTER-SAVE", "5 6", "99999999999999999999",
                             "stop", "\x01\xff", "5\n6"}) {
      CAPTURE(text);
      const Result<StopWish> wish = parse_stop(text);
      REQUIRE_FALSE(wish.ok());
      CHECK(wish.error().code == ErrorCode::kInvalidInput);
      CHECK(wish.error().message.find("after-save") != std::string::npos);
    }
    const std::string longest = parse_stop(std::string(100'000, 'x')).error().message;
    CHECK(longest.size() < 300);
  }

  TEST_CASE("a file counts once its content stands still, and once alone") {
    Folder folder;
    CHECK_FALSE(folder.after(0).stop);
    write(folder.dir / "stop", "");       // as a shell makes it, just before it writes
    CHECK_FALSE(folder.after(0.5).stop);  // not yet time to look
    CHECK_FALSE(folder.after(0.5).stop);
    write(folder.dir / "stop", "500\n");
    CHECK_FALSE(folder.after(kLookAgainS).stop);
    const auto news = folder.after(kLookAgainS);
    REQUIRE(news.stop);
    CHECK(*news.stop == StopWish{.when = StopWish::When::kAtStep, .step = 500});
    CHECK(news.notices.empty());
    for (int i = 0; i < 3; ++i) CHECK_FALSE(folder.after(1).stop);
    CHECK(folder.files.stop_obeyed().ok());
    CHECK_FALSE(fs::exists(folder.dir / "stop"));
    CHECK_FALSE(folder.after(1).stop_taken_back);
  }

  TEST_CASE("a planned stop is changed by its content and taken back with its file") {
    Folder folder;
    folder.after(0);
    write(folder.dir / "stop", "500");
    CHECK(folder.settled().stop->step == 500);
    write(folder.dir / "stop", "7000");
    CHECK(folder.settled().stop->step == 7000);
    write(folder.dir / "stop", "never");
    const auto unknown = folder.settled();
    CHECK_FALSE(unknown.stop);
    CHECK(unknown.stop_taken_back);
    REQUIRE(unknown.notices.size() == 1);
    CHECK(unknown.notices[0].find("found `never`") != std::string::npos);
    CHECK(folder.after(1).notices.empty());  // told once
    CHECK(fs::exists(folder.dir / "stop"));  // left, to be mended
    CHECK(folder.files.stop_obeyed().ok());
    CHECK(fs::exists(folder.dir / "stop"));  // it was not
    write(folder.dir / "stop", "after-save");
    CHECK(folder.settled().stop->when == StopWish::When::kAtSave);
    fs::remove(folder.dir / "stop");
    CHECK(folder.after(1).stop_taken_back);
    CHECK_FALSE(folder.after(1).stop_taken_back);
  }

  TEST_CASE("a stop from before the start is told and removed, a save from before it is made") {
    Folder folder;
    write(folder.dir / "stop", "");
    write(folder.dir / "save", "");
    set_time(folder.dir / "stop", kStarted - 1);
    set_time(folder.dir / "save", kStarted - 1);
    const auto news = folder.after(0);
    CHECK_FALSE(news.stop);
    REQUIRE(news.notices.size() == 1);
    CHECK(news.notices[0].find("2023-11-14 22:13:19 UTC") != std::string::npos);
    CHECK(news.save);
    CHECK_FALSE(fs::exists(folder.dir / "stop"));
    CHECK(folder.after(1).notices.empty());

    Folder during;  // while this start was on its way, or moved here with its old time later on
    write(during.dir / "stop", "");
    set_time(during.dir / "stop", kStarted + 1);
    CHECK_FALSE(during.after(0).stop);
    CHECK(during.after(1).stop);
    CHECK(during.files.stop_obeyed().ok());
    write(during.dir / "stop", "9");
    set_time(during.dir / "stop", kStarted - 1);
    CHECK(during.settled().stop->step == 9);
  }

  TEST_CASE("RUN/stop and RUN/save that are no files, or cannot be read, stop nothing") {
    Folder folder;
    folder.after(0);
    fs::create_directory(folder.dir / "stop");
    const auto news = folder.settled();
    CHECK_FALSE(news.stop);
    REQUIRE(news.notices.size() == 1);
    CHECK(news.notices[0].find("is no file") != std::string::npos);
    fs::remove(folder.dir / "stop");
    REQUIRE(mkfifo((folder.dir / "stop").c_str(), 0600) == 0);  // a read would wait for ever
    folder.after(1);
    CHECK_FALSE(folder.settled().stop);
  }

  TEST_CASE("a save is asked for once, goes when it is on disk, and touched meanwhile once more") {
    Folder folder;
    CHECK_FALSE(folder.after(0).save);
    write(folder.dir / "save", "");
    set_time(folder.dir / "save", kStarted + 1);
    CHECK(folder.after(1).save);
    CHECK_FALSE(folder.after(1).save);
    set_time(folder.dir / "save", kStarted + 2);
    CHECK(folder.after(1).save);  // seen
    CHECK_FALSE(folder.after(1).save);
    set_time(folder.dir / "save", kStarted + 3);
    CHECK(folder.files.saved().ok());  // not seen yet
    CHECK(fs::exists(folder.dir / "save"));
    CHECK(folder.after(1).save);
    CHECK(folder.files.saved().ok());
    CHECK(fs::is_empty(folder.dir.path));
    CHECK_FALSE(folder.after(1).save);
    CHECK(folder.files.saved().ok());
  }

  TEST_CASE("a save that failed is asked for again after a while, which grows") {
    Folder folder;
    folder.after(0);
    write(folder.dir / "save", "");
    CHECK(folder.after(1).save);
    folder.files.save_failed(folder.now);
    CHECK_FALSE(folder.after(kSaveAgainS - 1).save);
    CHECK(folder.after(1.5).save);
    folder.files.save_failed(folder.now);
    CHECK_FALSE(folder.after(2 * kSaveAgainS - 1).save);
    fs::remove(folder.dir / "save");  // nobody wants it any more
    CHECK_FALSE(folder.after(2).save);
    folder.files.save_failed(folder.now);
    CHECK_FALSE(folder.after(kSaveAgainAtMostS).save);
  }

  TEST_CASE("the option's limit wins, Slurm's counts when it is one, and what does not count is told") {
    std::string notice;
    const auto limit = [&](std::optional<double> option, const char* slurm) {
      notice.clear();
      return time_limit(option, slurm, kStarted, kStarted + 5, &notice);
    };
    CHECK_FALSE(limit(std::nullopt, nullptr));
    CHECK_FALSE(limit(std::nullopt, ""));
    CHECK(notice.empty());
    CHECK(limit(60, "1700000900")->at_unix_s == kStarted + 60);
    CHECK(limit(60, "x")->from == "--time-limit");
    CHECK(notice.empty());
    const auto slurm = limit(std::nullopt, "1700000900\n");
    REQUIRE(slurm);
    CHECK(slurm->at_unix_s == 1'700'000'900);
    CHECK(slurm->from == "SLURM_JOB_END_TIME");
    for (const char* text : {"soon", "2026-11-25T10:00:00", "-1", "1700000900.5", "1700000900000", "17 00"}) {
      CAPTURE(text);
      CHECK_FALSE(limit(std::nullopt, text));
      CHECK(notice.find("SLURM_JOB_END_TIME is `" + std::string(text)) != std::string::npos);
    }
    CHECK_FALSE(limit(std::nullopt, "1700000005"));
    CHECK(notice.find("is over") != std::string::npos);
  }

  TEST_CASE("a stop needs the longest of the last twenty steps, and twice the longest save") {
    Pace pace;
    pace.guess_save(100);
    CHECK(pace.needed_s() == 0);  // nothing has been trained yet
    pace.step(9);
    CHECK(pace.needed_s() == 9 + 2 * 100);
    for (int i = 0; i < 19; ++i) pace.step(1);
    pace.save(2);
    pace.save(5);
    pace.save(3);
    CHECK(pace.needed_s() == 9 + 2 * 5);
    pace.step(2);  // the 9 is too long ago
    CHECK(pace.needed_s() == 2 + 2 * 5);
    pace.step(std::nan(""));
    pace.save(-1);
    CHECK(pace.needed_s() == 2 + 2 * 5);
  }
}
