// cluster_agent: what an agent does to join a run and to know who is lost, alone, for tests on several hosts.
//
//   cluster_agent RUN INDEX HOSTS [LEADER PORT]
//
// Without LEADER it leads. One JSON object a line: {"port"}, {"epoch"}, {"refused"}, {"lost", "why", "silent_s", "at"}.
// It ends at SIGTERM, or when its leader is lost.

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/cluster/epoch_json.h"
#include "runtime/cluster/join.h"
#include "runtime/cluster/switchboard.h"
#include "runtime/cluster/token.h"
#include "runtime/core/clock.h"

using namespace cairn;
using namespace cairn::cluster;
using nlohmann::json;

namespace {

void say(const json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

std::string boot_id() {
  std::string out;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), out);
  return out;
}

std::string host_name() {
  std::array<char, 256> out{};
  return ::gethostname(out.data(), out.size() - 1) == 0 ? out.data() : "";
}

/// Says who is lost until there is nobody left to hear of, or for ever on the leader.
int watch(Switchboard& board, int64_t peers) {
  while (peers > 0) {
    pollfd ready{board.fd(), POLLIN, 0};
    ::poll(&ready, 1, 1000);
    for (const News& news : board.take()) {
      if (news.kind != News::Kind::kLost) continue;
      --peers;
      say({{"lost", news.peer}, {"why", news.why}, {"silent_s", news.silent_s}, {"at", SystemClock().unix_s()}});
    }
  }
  return 0;
}

Status lead(const DoorRules& rules, const std::string& directory, const Hello& own, Beats beats) {
  RT_TRY_SET(Listener listener, Listener::open(24512, 24600));
  Door door(std::move(listener), rules, own, [](const std::string& line) { say({{"refused", line}}); });
  say({{"port", door.port()}});
  const auto missing = [&](const std::set<int64_t>& joined) {
    std::vector<int64_t> out;
    for (int64_t k = 0; k < rules.hosts; ++k) {
      if (k != own.index && !joined.contains(k)) out.push_back(k);
    }
    return out;
  };
  RT_TRY(door.wait(missing, steady_ns() + 20'000'000'000, nullptr));
  std::vector<Joined> members = door.take([](int64_t) { return true; });
  Epoch epoch{.port = door.port(),
              .incarnation = random_hex(),
              .members = {{own.name, members.front().connection.own_address(), own.boot_id}},
              .ranks_per_host = own.ranks,
              .recipe_hash = own.recipe_hash,
              .build = own.build,
              .reason = "start"};
  for (const Joined& member : members) {
    epoch.members.push_back({member.hello.name, member.address, member.hello.boot_id});
  }
  RT_TRY_SET(const std::shared_ptr<EpochStore> store, open_store({}, directory));
  RT_TRY_SET(const std::optional<Epoch> before, store->newest());
  if (before) epoch.number = before->number + 1;
  RT_TRY_SET(const bool made, store->claim(epoch));
  if (!made) return Error{ErrorCode::kStopped, "another leads"};
  welcome(members, epoch, rules.token);
  say({{"epoch", encode_epoch(epoch)}});
  Switchboard board(beats);
  const auto peers = static_cast<int64_t>(members.size());
  for (Joined& member : members) board.add(member.hello.index, member.hello.name, std::move(member.connection));
  watch(board, peers);
  return {};
}

Status follow(const std::string& leader, int64_t port, const std::string& directory, const Hello& own, Beats beats) {
  RT_TRY_SET(Place place, join(leader, port, directory, own, steady_ns() + 20'000'000'000, nullptr));
  say({{"epoch", encode_epoch(place.epoch)}});
  Switchboard board(beats);
  board.add(0, leader, std::move(place.leader));
  watch(board, 1);
  return {};
}

}  // namespace

int main(int count, char** words) {
  if (count != 4 && count != 6) return 2;
  const std::string directory = std::string(words[1]) + "/cluster";
  const Hello own{.index = std::atoll(words[2]),
                  .name = host_name(),
                  .boot_id = boot_id(),
                  .build = "test",
                  .recipe_hash = "test",
                  .ranks = 2};
  const Beats beats{.every_s = 0.1, .dead_after_s = 2};
  Status done;
  if (count == 6) {
    done = follow(words[4], std::atoll(words[5]), directory, own, beats);
  } else {
    const auto store = open_store({}, directory);
    if (!store.ok()) return 1;
    const auto token = make_token(directory);
    if (!token.ok()) return 1;
    done = lead({.hosts = std::atoll(words[3]), .token = token.value()}, directory, own, beats);
  }
  if (!done.ok()) say({{"error", done.error().message}});
  return done.ok() ? 0 : 1;
}
