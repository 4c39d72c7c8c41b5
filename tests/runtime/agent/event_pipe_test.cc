#include "runtime/agent/event_pipe.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
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

  TEST_CASE("events of several threads are whole lines, also where the pipe is full and they are long") {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const Fd read_end(ends[0]);
    REQUIRE(fcntl(ends[1], F_SETPIPE_SZ, 4096) > 0);
    setenv(kEventFdEnv, std::to_string(ends[1]).c_str(), 1);
    Result<EventWriter> writer = EventWriter::from_environment();
    unsetenv(kEventFdEnv);
    REQUIRE(writer.ok());
    constexpr int kThreads = 3, kEvents = 50;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const std::string text(10'000 + static_cast<size_t>(thread), static_cast<char>('a' + thread));
        for (int k = 0; k < kEvents; ++k) ignore(writer.value().send({{"event", text}}), "counted by the reader");
      });
    }
    LineSplitter lines;
    int whole = 0, torn = 0;
    for (char bytes[1000]; whole + torn < kThreads * kEvents;) {
      const ssize_t n = read(read_end.get(), bytes, sizeof bytes);
      REQUIRE(n > 0);
      lines.feed({bytes, static_cast<size_t>(n)}, [&](std::string_view line) {
        const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
        const std::string text = event.is_object() ? event.value("event", "") : "";
        const bool good = !text.empty() && text == std::string(10'000 + static_cast<size_t>(text[0] - 'a'), text[0]);
        ++(good ? whole : torn);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(whole == kThreads * kEvents);
  }
}
