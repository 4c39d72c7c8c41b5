// cairn check-hosts: the hosts of a run and the links between them are measured, before a run is begun on them.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cluster/join.h"
#include "runtime/cluster/switchboard.h"
#include "runtime/cluster/token.h"
#include "runtime/core/units.h"
#include "runtime/json/json.h"
#include "tools/commands.h"
#include "tools/host_options.h"
#include "tools/run/agent/follower.h"
#include "tools/run/check/check_leader.h"
#include "tools/run/hosts/fleet.h"
#include "tools/version.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using cluster::News;
using nlohmann::json;

constexpr int kNotWell = 69;  // a host cannot be had
constexpr double kOneTryS = 1;
constexpr int kTickMs = 50;

struct CheckHostsArgs {
  HostArgs hosts;
  std::string folder, dtype = "fp32";
  DeviceChoice device = DeviceChoice::kAuto;
};

void say(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

/// For what other threads have to say, to the loop.
class Inbox {
 public:
  void add(hosts::Message message) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(message));
  }
  std::vector<hosts::Message> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(all_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<hosts::Message> all_;
};

void tell_report(const CheckReport& report) {
  for (const auto& [name, one] : report.figures) {
    say(one.failed.empty()
            ? fmt::format("  {:<16} matrix products {:8.1f} GFLOP/s   copies {:6.1f} GB/s   writes {:8.1f} MB/s", name,
                          one.matmul_gflops, one.copy_gb_s, one.write_mb_s)
            : fmt::format("  {:<16} {}", name, printable(one.failed)));
    if (one.gpus) say(fmt::format("  {:<16} {}", "", printable(gpus_text(*one.gpus))));
  }
  for (const std::string& note : report.notes) say(printable("  " + note));
  for (const CheckReport::Finding& one : report.findings) say(printable(finding_text(one)));
  say(fmt::format(
      "{} hosts in {} rounds, {:.1f} s: {}", report.hosts, report.rounds, report.seconds,
      report.findings.empty() ? "all are well, and so are the links that were measured" : "not all is well"));
}

Result<int> lead(const HostOptions& options, const fs::path& base, const CheckHostsArgs& args, json& result) {
  const fs::path directory = base / "cluster";
  RT_TRY_SET(cluster::Listener listener, cluster::Listener::open(options.port_from, options.port_to));
  std::error_code failed;
  fs::create_directories(directory, failed);
  if (failed) return Error{ErrorCode::kIo, fmt::format("{}: {}", directory.string(), failed.message())};
  RT_TRY_SET(const std::string token, cluster::make_token(directory));
  RT_TRY(write_leader_port(base, listener.port()));
  const cluster::Hello own = hello_of(options);
  say(hosts_text(options, listener.port()));
  cluster::Door door(
      std::move(listener),
      {.names = options.placement.names, .hosts = options.placement.hosts, .token = token, .present = {}, .barred = {}},
      own, say);
  const auto missing = [&](const std::set<int64_t>& joined) {
    std::vector<int64_t> out;
    for (int64_t k = 0; k < options.placement.hosts; ++k) {
      if (k != own.index && !joined.contains(k)) out.push_back(k);
    }
    return out;
  };
  RT_TRY(door.wait(missing, cluster::steady_after(options.join_s), nullptr));
  std::vector<cluster::Joined> members = door.take([](int64_t) { return true; });
  const std::string address =
      options.interface_address.empty() ? members.front().connection.own_address() : options.interface_address;
  cluster::Epoch epoch{.number = 1,
                       .port = door.port(),
                       .incarnation = cluster::random_hex(),
                       .members = {{own.name, address, own.boot_id, own.index}},
                       .ranks_per_host = own.ranks,
                       .recipe_hash = own.recipe_hash,
                       .build = own.build,
                       .reason = "check"};
  std::vector<CheckedHost> hosts{{own.index, own.name, address}};
  int64_t level = own.kernel_level;
  for (const cluster::Joined& member : members) {
    epoch.members.push_back({member.hello.name, member.address, member.hello.boot_id, member.hello.index});
    hosts.push_back({member.hello.index, member.hello.name, member.address});
    level = std::min(level, member.hello.kernel_level);
  }
  std::ranges::sort(hosts, {}, &CheckedHost::index);
  cluster::welcome(members, epoch, token);
  cluster::Switchboard board(options.beats);
  for (cluster::Joined& member : members)
    board.add(member.hello.index, member.hello.name, std::move(member.connection));

  Inbox inbox;
  HostChecker checker({.tell = [&](hosts::Measured measured) { inbox.add(std::move(measured)); },
                       .publish = [&](hosts::PutMeasured value) { inbox.add(std::move(value)); }});
  const auto tell = [&](int64_t index, const hosts::Message& message) {
    if (index == own.index) {
      take_check_message(checker, message, options.interface_address);
    } else {
      board.send(index, {message, 1});
    }
  };
  CheckLeader check(hosts,
                    {.dtype = args.dtype,
                     .kernel_level = level,
                     .folder = directory,
                     .gpus = args.device != DeviceChoice::kCpu,
                     .gpu_size = gpu_size_of_tests()},
                    tell);
  while (!check.tick()) {
    pollfd ready{board.fd(), POLLIN, 0};
    ::poll(&ready, 1, kTickMs);
    for (const News& news : board.take()) {
      if (news.kind == News::Kind::kLost) {
        check.lost(news.peer, news.why);
      } else {
        check.take(news.peer, news.message.what);
      }
    }
    for (const hosts::Message& message : inbox.take()) check.take(own.index, message);
  }
  const CheckReport report = check.report();
  tell_report(report);
  result = to_json(report);
  const int code = report.findings.empty() ? 0 : kNotWell;
  std::string text;
  for (const CheckReport::Finding& one : report.findings) text += finding_text(one) + "\n";
  for (const CheckedHost& host : hosts) {
    if (host.index == own.index) continue;
    board.send(host.index, {hosts::End{.code = code, .text = text}, 1});
    board.drop(host.index);
  }
  return code;
}

Result<int> follow(const HostOptions& options, const fs::path& base) {
  say(hosts_text(options, options.port_from));
  const int64_t deadline_ns = cluster::steady_after(options.join_s);
  const cluster::Hello own = hello_of(options);
  std::optional<cluster::Place> place;
  while (!place) {
    Result<cluster::Place> joined =
        cluster::join(options.placement.leader, read_leader_port(base).value_or(options.port_from), base / "cluster",
                      own, deadline_ns, nullptr, std::min(deadline_ns, cluster::steady_after(kOneTryS)), {},
                      [&] { return cluster::steady_after(options.join_s); });  // the leader may have begun last
    if (joined.ok()) {
      place = std::move(joined).value();
    } else if (joined.error().code != ErrorCode::kTimeout || cluster::steady_ns() >= deadline_ns) {
      return std::move(joined).error();
    }
  }
  cluster::Switchboard board(options.beats);
  board.add(0, options.placement.leader, std::move(place->leader));
  HostChecker checker({.tell =
                           [&](hosts::Measured measured) {
                             board.send(0, {std::move(measured), 1});
                           },
                       .publish =
                           [&](hosts::PutMeasured value) {
                             board.send(0, {std::move(value), 1});
                           }});
  for (;;) {
    pollfd ready{board.fd(), POLLIN, 0};
    ::poll(&ready, 1, -1);
    for (const News& news : board.take()) {
      if (news.kind == News::Kind::kLost)
        return Error{ErrorCode::kUnavailable,
                     fmt::format("the check has no end here: the leader was lost: {}", news.why)};
      const auto* const end = std::get_if<hosts::End>(&news.message.what);
      if (take_check_message(checker, news.message.what, options.interface_address) || end == nullptr) continue;
      say(end->text.empty() ? "all are well" : printable(end->text, true));
      return static_cast<int>(end->code);
    }
  }
}

Result<int> check_hosts(const CheckHostsArgs& args, bool as_json) {
  RT_TRY_SET(std::optional<HostOptions> hosts, find_hosts(args.hosts, 1));
  if (!hosts) {
    return Error{ErrorCode::kInvalidInput,
                 "one host alone cannot be compared with others: name them by --hosts or --cluster, or start this by a "
                 "launcher of several hosts, as `cairn train`"};
  }
  hosts->ranks = 1;
  RT_TRY_SET(hosts->build, program_and_module_version());
  hosts->recipe_hash = "check-hosts " + args.dtype;
  const fs::path base = fs::path(args.folder) / "check-hosts";
  if (!fs::is_directory(args.folder)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: no such folder; expected one that all hosts share", args.folder)};
  }
  if (hosts->placement.index != 0) return follow(*hosts, base);
  json result;
  Result<int> code = [&] {
    std::optional<StdoutToStderr> progress;
    if (as_json) progress.emplace();
    return lead(*hosts, base, args, result);
  }();
  std::error_code left;  // what is not of this check stays
  for (const char* name : {"cluster/token", "cluster/leader-port", "cluster", ""}) fs::remove(base / name, left);
  if (code.ok() && as_json) print_json(result);
  return code;
}

}  // namespace

void add_check_hosts(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("check-hosts", "measure hosts and the links between them; the same command on each host");
  const auto args = std::make_shared<CheckHostsArgs>();
  command->add_option("FOLDER", args->folder, "a folder that all hosts share, as the run's: its speed is measured too")
      ->required()
      ->type_name("DIR");
  command->add_option("--dtype", args->dtype, "of matrix products (default: fp32)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  command
      ->add_option_function<std::string>(
          "--device",
          [args](const std::string& word) { args->device = word == "cpu" ? DeviceChoice::kCpu : DeviceChoice::kAuto; },
          "what is measured: cpu, or auto: GPUs too, where hosts have them (default: auto)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "cpu"}));
  add_host_options(*command, args->hosts);
  add_json_flag(*command, session);
  command->footer(
      "Each host alone: matrix products, copies in memory, writes to FOLDER. Then in pairs, over the engine that "
      "trains:\n"
      "all-gathers and round trips. Who is not well is measured again beside one that is, with other partners.\n"
      "GPUs that nobody computes on: matrix products, whose every bit is compared, copies in memory, to the host and\n"
      "between GPUs. Of all: what NVML and the kernel's log say of failed memory, NVLinks and Xids.\n"
      "Exit codes: 0 all are well, 2 refused, 69 a host or a link is not well, or a host has not come.\n"
      "Examples:\n"
      "  cairn check-hosts /shared/runs --hosts h0,h1,h2,h3\n"
      "  srun -N4 --ntasks-per-node=1 cairn check-hosts /shared/runs");
  command->callback(
      [args, &session] { session.action = [args, &session] { return check_hosts(*args, session.json); }; });
}

}  // namespace cairn::tools
