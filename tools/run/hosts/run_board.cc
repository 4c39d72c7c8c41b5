#include "tools/run/hosts/run_board.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "runtime/core/clock.h"
#include "runtime/core/no_signals.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kBetween = std::chrono::seconds(1), kAtEnd = std::chrono::seconds(1);
constexpr std::array kPhases = {"gathering", "loading", "training", "ended"};
constexpr int64_t kMostHosts = 1'000'000;

double unix_s() { return SystemClock().unix_s(); }

}  // namespace

const char* phase_name(RunPhase phase) { return kPhases.at(static_cast<size_t>(phase)); }

fs::path hosts_file(const fs::path& run) { return run / "cluster" / "hosts.json"; }

json to_json(const RunStatus& status) {
  json hosts = json::array();
  for (const HostStatus& host : status.hosts) {
    hosts.push_back({{"index", host.index},
                     {"place", host.place},
                     {"name", host.name},
                     {"address", host.address},
                     {"state", host.state},
                     {"why", host.why},
                     {"excluded", host.excluded},
                     {"heard_s", host.heard_s}});
  }
  json out{{"time", status.time},
           {"epoch", status.epoch},
           {"leader", status.leader},
           {"phase", phase_name(status.phase)},
           {"since", status.phase_time},
           {"step", status.step},
           {"of", status.of},
           {"hosts", std::move(hosts)}};
  if (status.exit_code) out["exit_code"] = *status.exit_code;
  return out;
}

Result<RunStatus> run_status_from_json(const json& in) {
  RunStatus out;
  const auto bad = [](const char* field) {
    return Error{ErrorCode::kCorrupt, fmt::format("\"{}\" is missing or of another type", field)};
  };
  const auto phase = std::ranges::find(kPhases, json_string(in, "phase"));
  if (phase == kPhases.end()) return bad("phase");
  out.phase = static_cast<RunPhase>(phase - kPhases.begin());
  if (!json_field(in, "time").is_number()) return bad("time");
  out.time = json_number(in, "time");
  out.phase_time = json_number(in, "since");
  const std::array<std::pair<const char*, int64_t*>, 4> counts = {
      std::pair{"epoch", &out.epoch}, {"leader", &out.leader}, {"step", &out.step}, {"of", &out.of}};
  for (const auto& [name, into] : counts) {
    const std::optional<int64_t> count = json_integer(json_field(in, name), -1, INT64_MAX);
    if (!count) return bad(name);
    *into = *count;
  }
  const json hosts = json_field(in, "hosts");
  if (!hosts.is_array()) return bad("hosts");
  for (const json& one : hosts) {
    const std::optional<int64_t> index = json_integer(json_field(one, "index"), 0, kMostHosts);
    const std::optional<int64_t> place = json_integer(json_field(one, "place"), -1, kMostHosts);
    if (!index || !place) return bad("hosts");
    out.hosts.push_back({.index = *index,
                         .place = *place,
                         .name = json_string(one, "name"),
                         .address = json_string(one, "address"),
                         .state = json_string(one, "state"),
                         .why = json_string(one, "why"),
                         .excluded = json_flag(one, "excluded"),
                         .heard_s = json_number(one, "heard_s")});
  }
  if (const std::optional<int64_t> code = json_integer(json_field(in, "exit_code"), 0, 255))
    out.exit_code = static_cast<int>(*code);
  return out;
}

struct RunBoard::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  RunStatus status;
  fs::path file;                                                    // empty: none is written
  bool has_news = false, ends = false, idle = true, begun = false;  // `begun`: the thread
};

namespace {

/// Until the board is gone. Whatever it waits for on the way to the disk, nothing waits for it.
template <typename Shared>
void write_file(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  for (;;) {
    shared->changed.wait(lock, [&] { return shared->ends || (shared->has_news && !shared->file.empty()); });
    if (!shared->has_news || shared->file.empty()) return;
    shared->has_news = false;
    shared->idle = false;
    RunStatus status = shared->status;
    const fs::path file = shared->file;
    lock.unlock();
    status.time = unix_s();
    ignore(write_unsynced_text_file(file, json_text(to_json(status)) + "\n"), "the next one is written anew");
    lock.lock();
    shared->idle = true;
    shared->changed.notify_all();
    shared->changed.wait_for(lock, kBetween, [&] { return shared->ends; });
  }
}

}  // namespace

RunBoard::RunBoard() : shared_(std::make_shared<Shared>()) { shared_->status.phase_time = unix_s(); }

RunBoard::~RunBoard() {
  std::unique_lock lock(shared_->mutex);
  shared_->ends = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kAtEnd,
                            [this] { return shared_->idle && (!shared_->has_news || shared_->file.empty()); });
}

void RunBoard::write_to(const fs::path& file) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->file == file) return;
  const NoSignals none;  // for the thread
  if (!file.empty() && !std::exchange(shared_->begun, true))
    std::thread([shared = shared_] { write_file(shared); }).detach();
  if (!file.empty()) shared_->status.leads = true;
  shared_->file = file;
  shared_->has_news = !file.empty();
  shared_->changed.notify_all();
}

template <typename Change>
void RunBoard::change(const Change& how) {
  const std::lock_guard lock(shared_->mutex);
  how(shared_->status);
  shared_->has_news = true;
  if (!shared_->file.empty()) shared_->changed.notify_all();
}

namespace {

void enter(RunStatus& status, RunPhase phase) {
  if (status.phase == RunPhase::kEnded || std::exchange(status.phase, phase) == phase) return;
  status.phase_time = unix_s();
}

}  // namespace

void RunBoard::set_phase(RunPhase phase) {
  change([&](RunStatus& status) { enter(status, phase); });
}

void RunBoard::set_hosts(int64_t epoch, int64_t leader, std::vector<HostStatus> hosts) {
  change([&](RunStatus& status) {
    status.epoch = epoch;
    status.leader = leader;
    status.hosts = std::move(hosts);
  });
}

void RunBoard::follows(RunPhase phase, int64_t place) {
  change([&](RunStatus& status) {
    status.leads = false;
    status.hosts = {{.place = place}};
    enter(status, phase);
  });
}

void RunBoard::begins(int64_t step, int64_t of, bool again) {
  change([&](RunStatus& status) {
    enter(status, RunPhase::kTraining);
    status.phase_time = unix_s();
    status.step = step;
    status.of = of;
    status.restarts += again ? 1 : 0;
  });
}

void RunBoard::step(const telemetry::StepMetrics& metrics, int64_t of) {
  change([&](RunStatus& status) {
    status.step = metrics.step;
    status.of = of;
    status.last = metrics;
    status.step_time = unix_s();
  });
}

void RunBoard::saved(int64_t step, bool well) {
  change([&](RunStatus& status) {
    if (!well) {
      ++status.saves_failed;
      return;
    }
    ++status.saves;
    status.saved_step = step;
    status.saved_time = unix_s();
  });
}

void RunBoard::ended(int exit_code) {
  change([&](RunStatus& status) {
    enter(status, RunPhase::kEnded);
    status.exit_code = exit_code;
    const char* const state = phase_name(RunPhase::kEnded);
    for (HostStatus& host : status.hosts) {
      if (host.state != "away" && host.state != "spare") host.state = state;
    }
  });
}

RunStatus RunBoard::now() const {
  const std::lock_guard lock(shared_->mutex);
  RunStatus out = shared_->status;
  out.time = unix_s();
  return out;
}

}  // namespace cairn::tools
