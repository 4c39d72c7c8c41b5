#include "runtime/agent/host_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>

namespace cairn::agent {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What is less slows a step by less than a straggler is told for.
constexpr double kThrottled = 0.1, kDelayed = 0.15, kSlowClock = 0.75;

double number_of(const json& from, const char* key) {
  const auto at = from.find(key);
  return at != from.end() && at->is_number() ? at->get<double>() : 0;
}

/// Mean over the processors of a file of theirs, in MHz; 0: there is none.
double mean_mhz(const fs::path& sys, const char* file) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t cpu = 0;; ++cpu) {
    std::ifstream in(sys / "devices/system/cpu" / fmt::format("cpu{}", cpu) / "cpufreq" / file);
    double khz = 0;
    if (!(in >> khz)) break;
    sum += khz / 1000;
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace

json to_json(const HostLoad& load) {
  return {{"throttled", load.throttled}, {"delayed", load.delayed}, {"runnable", load.runnable},
          {"cores", load.cores},         {"mhz", load.mhz},         {"full_mhz", load.full_mhz}};
}

HostLoad host_load_from_json(const json& from) {
  if (!from.is_object()) return {};
  return {.throttled = number_of(from, "throttled"),
          .delayed = number_of(from, "delayed"),
          .runnable = number_of(from, "runnable"),
          .cores = static_cast<int64_t>(std::clamp(number_of(from, "cores"), 0.0, 1e6)),
          .mhz = number_of(from, "mhz"),
          .full_mhz = number_of(from, "full_mhz")};
}

SlowCause cause_of(const HostLoad& load) {
  if (load.throttled >= kThrottled) return SlowCause::kThrottled;
  if (load.full_mhz > 0 && load.mhz < kSlowClock * load.full_mhz) return SlowCause::kClock;
  return load.delayed >= kDelayed ? SlowCause::kLoad : SlowCause::kUnknown;
}

const char* slow_cause_name(SlowCause cause) {
  constexpr std::array<const char*, 4> kNames = {"unknown", "load", "clock", "throttled"};
  return kNames.at(static_cast<size_t>(cause));
}

std::string cause_text(const HostLoad& load) {
  switch (cause_of(load)) {
    case SlowCause::kThrottled:
      return fmt::format("a CPU limit stopped its cgroup for {:.0f}% of the time", 100 * std::min(load.throttled, 1.0));
    case SlowCause::kClock:
      return fmt::format("its processors run at {:.1f} of {:.1f} GHz", load.mhz / 1000, load.full_mhz / 1000);
    case SlowCause::kLoad:
      return fmt::format("other work had its processors for {:.0f}% of the time (load {:.1f} on {} cores)",
                         100 * std::min(load.delayed, 1.0), load.runnable, load.cores);
    case SlowCause::kUnknown:
      break;
  }
  return fmt::format("no limit, no slow clock and no other load is to be seen (load {:.1f} on {} cores)", load.runnable,
                     load.cores);
}

HostLoadMeter::HostLoadMeter(Cgroup cgroup, fs::path proc, fs::path sys)
    : cgroup_(std::move(cgroup)), proc_(std::move(proc)), sys_(std::move(sys)) {}

HostLoad HostLoadMeter::measure(int64_t pid, int64_t now_ns) {
  HostLoad out{.cores = std::max<int64_t>(1, std::thread::hardware_concurrency()),
               .mhz = mean_mhz(sys_, "scaling_cur_freq"),
               .full_mhz = mean_mhz(sys_, "cpuinfo_max_freq")};
  std::ifstream(proc_ / "loadavg") >> out.runnable;
  Before now{.at_ns = now_ns, .throttled_us = cgroup_.throttled_us().value_or(0), .delayed_ns = delays_of(pid)};
  if (const auto before = before_.find(pid); before != before_.end() && before->second.at_ns < now_ns) {
    const auto took_ns = static_cast<double>(now_ns - before->second.at_ns);
    out.throttled = static_cast<double>(now.throttled_us - before->second.throttled_us) * 1e3 / took_ns;
    int64_t most_ns = 0;
    for (const auto& [thread, ns] : now.delayed_ns) {
      const auto was = before->second.delayed_ns.find(thread);
      if (was != before->second.delayed_ns.end()) most_ns = std::max(most_ns, ns - was->second);
    }
    out.delayed = static_cast<double>(most_ns) / took_ns;
  }
  before_[pid] = std::move(now);
  return out;
}

/// /proc/PID/task/TID/schedstat: nanoseconds on a processor, nanoseconds ready without one, times scheduled.
std::map<int64_t, int64_t> HostLoadMeter::delays_of(int64_t pid) const {
  std::map<int64_t, int64_t> out;
  std::error_code problem;
  for (const fs::directory_entry& thread : fs::directory_iterator(proc_ / std::to_string(pid) / "task", problem)) {
    std::ifstream in(thread.path() / "schedstat");
    int64_t ran_ns = 0, delayed_ns = 0;
    if (in >> ran_ns >> delayed_ns) out[std::atoll(thread.path().filename().c_str())] = delayed_ns;
  }
  return out;
}

}  // namespace cairn::agent
