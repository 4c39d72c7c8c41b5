#include "runtime/agent/event_pipe.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

using namespace cairn;
using namespace cairn::agent;

namespace {

std::vector<std::string> split(LineSplitter& splitter, const std::vector<std::string>& portions) {
  std::vector<std::string> lines;
  for (const std::string& portion : portions) {
    splitter.feed(portion, [&](std::string_view line) { lines.emplace_back(line); });
  }
  return lines;
}

}  // namespace

TEST_SUITE("runtime/agent/event_pipe") {
  TEST_CASE("lines come out the same however the bytes are cut") {
    const std::string text = "one\n\ntwo three\nfour\n";
    const std::vector<std::string> expected = {"one", "", "two three", "four"};
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      for (size_t second = cut; second <= text.size(); ++second) {
        LineSplitter splitter;
        CHECK(split(splitter, {text.substr(0, cut), text.substr(cut, second - cut), text.substr(second)}) == expected);
        CHECK_FALSE(splitter.torn());
      }
    }
  }

  TEST_CASE("a line without its newline is torn, not delivered") {
    LineSplitter splitter;
    CHECK(split(splitter, {"whole\nhal"}) == std::vector<std::string>{"whole"});
    CHECK(splitter.torn());
  }

  TEST_CASE("an endless line is dropped whole and the next one arrives") {
    LineSplitter splitter;
    const std::string part(static_cast<size_t>(kMaxEventBytes) / 2 + 1, 'x');
    CHECK(split(splitter, {part, part, part, "tail\nnext\n"}) == std::vector<std::string>{"next"});
    CHECK(splitter.dropped() == 1);
    CHECK_FALSE(splitter.torn());
  }

  TEST_CASE("a writer sends one line an event, even with bytes that are no UTF-8") {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const Fd read_end(ends[0]);
    setenv(kEventFdEnv, std::to_string(ends[1]).c_str(), 1);
    {
      Result<EventWriter> writer = EventWriter::from_environment();
      REQUIRE(writer.ok());
      REQUIRE(writer.value().send({{"event", "step"}, {"step", 3}}).ok());
      writer.value().send_error(Error{ErrorCode::kCorrupt, "a\xff\nb"});
    }
    unsetenv(kEventFdEnv);
    char bytes[1024];
    const ssize_t n = read(read_end.get(), bytes, sizeof bytes);
    REQUIRE(n > 0);
    LineSplitter splitter;
    const std::vector<std::string> lines = split(splitter, {std::string(bytes, static_cast<size_t>(n))});
    REQUIRE(lines.size() == 2);
    CHECK(nlohmann::json::parse(lines[0])["step"] == 3);
    const nlohmann::json error = nlohmann::json::parse(lines[1]);
    CHECK(error["event"] == "error");
    CHECK(error["exit_code"] == 65);
  }

  TEST_CASE("a wrong CAIRN_EVENT_FD is refused, a missing one swallows events") {
    unsetenv(kEventFdEnv);
    Result<EventWriter> silent = EventWriter::from_environment();
    REQUIRE(silent.ok());
    CHECK(silent.value().send({{"event", "x"}}).ok());
    for (const char* wrong : {"", "x", "7x", "-1", "1", "999999"}) {
      CAPTURE(wrong);
      setenv(kEventFdEnv, wrong, 1);
      const Result<EventWriter> refused = EventWriter::from_environment();
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().code == ErrorCode::kInvalidInput);
    }
    unsetenv(kEventFdEnv);
  }
}
