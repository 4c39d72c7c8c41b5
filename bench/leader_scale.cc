// What leading costs with many hosts: the leader's own code (tools/run/hosts/fleet.h, runtime/cluster) in this process,
// and agents that join, beat, tell of their pace once a second and answer, in processes of a hundred each.
//
//   leader_scale [--hosts 1000] [--seconds 10] [--kills 5] [--scratch DIR] [--tiny]
//
// Prints how long joining took, the leader's share of a core while ranks train, and for each lost host the time from
// when the leader knew to when the spare had its place, the new epoch was on disk and all hosts had answered in it.
// With bars (--most-share PERCENT, --most-ms MS of the median) it ends with 1 where they are missed.
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/host_memory.h"
#include "runtime/cluster/join.h"
#include "runtime/cluster/switchboard.h"
#include "tools/run/agent/follower.h"
#include "tools/run/folder/folder.h"
#include "tools/run/hosts/fleet.h"
#include "tools/run/hosts/host_wire.h"

using namespace cairn;
using namespace cairn::tools;
using cluster::steady_ns;
using nlohmann::json;

namespace {

constexpr int64_t kOfProcess = 100;
constexpr double kPaceEveryS = 1;

struct Args {
  int64_t hosts = 1000, kills = 5;
  double seconds = 10, most_share = 0, most_ms = 0;
  std::filesystem::path scratch = std::filesystem::temp_directory_path();
};

HostOptions options_of(const Args& args, int64_t index) {
  HostOptions out{
      .placement = {.hosts = args.hosts + args.kills, .index = index, .leader = "127.0.0.1", .from = "bench"},
      .spares = args.kills,
      .ranks = 1,
      .build = "bench",
      .recipe_hash = "bench",
      .join_s = 60,
      .spare_after_s = 0};
  return out;
}

void must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "leader_scale: {}\n", status.error().message);
  std::exit(1);
}

double cpu_s() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// Agents of the hosts [first, end), until the run ends.
int be_agents(const Args& args, const std::filesystem::path& run, int64_t first, int64_t end) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  cluster::Switchboard board(options_of(args, first).beats);
  std::vector<std::thread> threads;
  std::atomic<bool> failed = false;
  for (int64_t index = first; index < end; ++index) {
    threads.emplace_back([&, index] {
      const HostOptions own = options_of(args, index);
      cluster::Hello hello = hello_of(own);
      hello.name = fmt::format("h{}", index);
      const int64_t deadline_ns = cluster::steady_after(60);
      for (;;) {
        const auto port = read_leader_port(run);
        Result<cluster::Place> place =
            port ? cluster::join("127.0.0.1", *port, run / "cluster", hello, deadline_ns, nullptr)
                 : Result<cluster::Place>(Error{ErrorCode::kTimeout, "not yet"});
        if (place.ok()) {
          board.add(index, hello.name, std::move(place.value().leader));
          return;
        }
        if (place.error().code != ErrorCode::kTimeout || steady_ns() >= deadline_ns) {
          fmt::print(stderr, "host {}: {}\n", index, place.error().message);
          failed = true;
          return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
  }
  for (std::thread& one : threads) one.join();
  if (failed) return 1;
  std::map<int64_t, bool> runs;  // hosts that are there: whether their ranks run
  for (int64_t index = first; index < end; ++index) runs[index] = false;
  int64_t paced_ns = steady_ns();
  while (!runs.empty()) {
    pollfd ready{board.fd(), POLLIN, 0};
    ::poll(&ready, 1, 20);
    for (const cluster::News& news : board.take()) {
      if (news.kind == cluster::News::Kind::kLost) {
        runs.erase(news.peer);
        continue;
      }
      const hosts::Message& message = news.message.what;
      if (const auto* const halt = std::get_if<hosts::Halt>(&message); halt != nullptr && halt->ask > 0) {
        runs[news.peer] = false;
        board.send(news.peer, {hosts::Idle{halt->ask}});
      } else if (std::holds_alternative<hosts::Go>(message)) {
        runs[news.peer] = true;
      } else if (std::holds_alternative<hosts::End>(message)) {
        runs.erase(news.peer);
      }
    }
    if (const Result<std::string> leaves = read_text_file(run / "leave"); leaves.ok()) {
      const int64_t host = std::atoll(leaves.value().c_str());
      if (runs.erase(host) > 0) board.drop(host);
    }
    if (static_cast<double>(steady_ns() - paced_ns) < kPaceEveryS * 1e9) continue;
    paced_ns = steady_ns();
    for (const auto& [host, running] : runs) {
      if (!running) continue;
      json pace{{"event", "pace"},
                {"blocks", {{20, 11.5}, {40, 11.6}, {60, 11.4}}},
                {"load", {{"runnable", 1.5}, {"cores", 8}}}};
      board.send(host, {hosts::RankEvent{0, host, std::move(pace)}});
    }
  }
  return 0;
}

int lead(const Args& args, const std::filesystem::path& run) {
  std::filesystem::create_directories(run / "cluster");
  Result<std::unique_ptr<Fleet>> opened = Fleet::open(options_of(args, 0), run, std::nullopt);
  if (!opened.ok()) must(opened.error());
  Fleet& fleet = *opened.value();
  int64_t known_ns = 0, paces = 0;
  const auto leave = [&](int64_t index) {  // the host that is to die reads it there
    must(Status(write_text_file(run / "leave", std::to_string(index))));
  };
  fleet.use({.say =
                 [](const std::string& text) {
                   if (std::getenv("CAIRN_BENCH_SAY") != nullptr) fmt::print("  {}\n", text);
                 },
             .stopped = [] { return false; },
             .fail = [&](const agent::Failure&) { known_ns = steady_ns(); },
             .put = {},
             .event = [&](int64_t, const json&) { ++paces; },
             .stop = [](int) {},
             .ask_save = {},
             .own_memory = {},
             .error = {},
             .stacks = {},
             .checked = {}});
  int64_t begin = steady_ns();
  double used = cpu_s();
  must(write_leader_port(run, fleet.port()));
  must(fleet.gather());
  fleet.begin({.recipe = std::string(4000, 'r'),
               .past = {},
               .init = {},
               .hosts = args.hosts,
               .run_name = "bench",
               .run_id = "bench",
               .lineage = {},
               .recipe_json = {},
               .recipe_hash = {},
               .trace = {}});
  if (const auto memory = fleet.look(Fleet::Wants::kAll); !memory.ok()) must(memory.error());
  fmt::print("{} hosts: joined and asked in {:.2f} s, {:.2f} s of the leader's\n", args.hosts,
             static_cast<double>(steady_ns() - begin) / 1e9, cpu_s() - used);
  fleet.go(0);
  const auto train = [&](double seconds) {
    const int64_t until = cluster::steady_after(seconds);
    while (steady_ns() < until && known_ns == 0) {
      pollfd ready{fleet.fd(), POLLIN, 0};
      ::poll(&ready, 1, 200);
      fleet.take_news();
      fleet.on_tick();
    }
  };
  train(1);
  begin = steady_ns();
  used = cpu_s();
  paces = 0;
  train(args.seconds);
  const double wall = static_cast<double>(steady_ns() - begin) / 1e9, share = 100 * (cpu_s() - used) / wall;
  fmt::print("{} hosts: the leader takes {:.1f}% of a core in {:.1f} s, with {} paces\n", args.hosts, share, wall,
             paces);
  if (known_ns != 0) must(Error{ErrorCode::kInternal, "a host was lost while nothing happened"});
  if (paces == 0) must(Error{ErrorCode::kInternal, "no pace came"});
  std::vector<double> took;
  for (int64_t kill = 0; kill < args.kills; ++kill) {
    const int64_t before = fleet.epoch().number;
    leave(1 + kill * (args.hosts - 2) / std::max<int64_t>(1, args.kills));
    known_ns = 0;
    train(30);
    if (known_ns == 0) must(Error{ErrorCode::kInternal, "a host that left was not missed"});
    fleet.halt("lost");
    if (const auto memory = fleet.look(Fleet::Wants::kAll); !memory.ok()) must(memory.error());
    took.push_back(static_cast<double>(steady_ns() - known_ns) / 1e6);
    if (fleet.epoch().number != before + 1) must(Error{ErrorCode::kInternal, "no new epoch"});
    known_ns = 0;
    fleet.go(0);
    train(0.2);
  }
  std::ranges::sort(took);
  const double median = took.empty() ? 0 : took[took.size() / 2];
  if (!took.empty())
    fmt::print("{} hosts: one lost, a spare in its place, all asked after {:.1f} ms (median of {}, worst {:.1f})\n",
               args.hosts, median, took.size(), took.back());
  fleet.end(0, false, "", json());
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const bool missed = (args.most_share > 0 && share > args.most_share) || (args.most_ms > 0 && median > args.most_ms);
  if (missed) fmt::print(stderr, "leader_scale: expected at most {}% and {} ms\n", args.most_share, args.most_ms);
  return missed ? 1 : 0;
}

}  // namespace

int main(int count, char** words) {
  Args args;
  for (int k = 1; k < count; ++k) {
    const std::string word = words[k];
    const auto value = [&] { return k + 1 < count ? words[++k] : "0"; };
    if (word == "--hosts")
      args.hosts = std::atoll(value());
    else if (word == "--seconds")
      args.seconds = std::atof(value());
    else if (word == "--kills")
      args.kills = std::atoll(value());
    else if (word == "--scratch")
      args.scratch = value();
    else if (word == "--most-share")
      args.most_share = std::atof(value());
    else if (word == "--most-ms")
      args.most_ms = std::atof(value());
    else if (word == "--tiny")
      args = {.hosts = 60, .kills = 3, .seconds = 3, .scratch = args.scratch};
    else
      return 2;
  }
  if (args.hosts < 4 || args.kills < 0) return 2;
  const std::filesystem::path run = args.scratch / fmt::format("leader-scale-{}", ::getpid());
  std::filesystem::create_directories(run);
  std::vector<pid_t> children;
  const int64_t all = args.hosts + args.kills;
  for (int64_t first = 1; first < all; first += kOfProcess) {
    const pid_t child = ::fork();
    if (child == 0) std::_Exit(be_agents(args, run, first, std::min(all, first + kOfProcess)));
    children.push_back(child);
  }
  int code = lead(args, run);
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) code = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(run, ignored);
  return code;
}
