#include "tools/run/check/check_leader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "runtime/cluster/connection.h"

namespace cairn::tools {
namespace {

using nlohmann::json;

std::vector<std::string> names_of(const std::vector<CheckedHost>& hosts) {
  std::vector<std::string> out;
  for (const CheckedHost& host : hosts) out.push_back(host.name);
  return out;
}

}  // namespace

std::string finding_text(const CheckReport::Finding& finding) {
  switch (finding.kind) {
    case CheckFinding::Kind::kHost:
      return fmt::format("{} is broken: {}", finding.host, finding.why);
    case CheckFinding::Kind::kSlowHost:
      return fmt::format("{} is slow: {}", finding.host, finding.why);
    case CheckFinding::Kind::kLink:
      return fmt::format("the link between {} and {} is bad: {}", finding.host, finding.with, finding.why);
    case CheckFinding::Kind::kGpu:
    case CheckFinding::Kind::kSlowGpu:
      return fmt::format("{}: {}", finding.host, finding.why);
    case CheckFinding::Kind::kNetwork:
      break;
  }
  return fmt::format("the network, or what the hosts have in common: {}", finding.why);
}

const char* finding_name(CheckFinding::Kind kind) {
  switch (kind) {
    case CheckFinding::Kind::kHost:
      return "host";
    case CheckFinding::Kind::kSlowHost:
      return "slow_host";
    case CheckFinding::Kind::kLink:
      return "link";
    case CheckFinding::Kind::kGpu:
      return "gpu";
    case CheckFinding::Kind::kSlowGpu:
      return "slow_gpu";
    case CheckFinding::Kind::kNetwork:
      break;
  }
  return "network";
}

json to_json(const CheckReport& report) {
  json figures = json::array();
  for (const auto& [name, one] : report.figures) {
    json& out = figures.emplace_back(json{{"host", name},
                                          {"matmul_gflops", one.matmul_gflops},
                                          {"copy_gb_s", one.copy_gb_s},
                                          {"write_mb_s", one.write_mb_s}});
    if (!one.failed.empty()) out["failed"] = one.failed;
    if (one.gpus) out["gpus"] = to_json(*one.gpus)["gpus"];
  }
  json findings = json::array();
  for (const CheckReport::Finding& one : report.findings) {
    json& out = findings.emplace_back(json{{"kind", finding_name(one.kind)}, {"why", one.why}});
    if (!one.host.empty()) out["host"] = one.host;
    if (!one.with.empty()) out["with"] = one.with;
    if (one.kind != CheckFinding::Kind::kGpu && one.kind != CheckFinding::Kind::kSlowGpu) continue;
    out["gpu"] = {{"uuid", one.gpu.uuid}, {"pci", one.gpu.pci}};
    if (one.gpu.index >= 0) out["gpu"]["index"] = one.gpu.index;
    out["found"] = one.gpu.found;
    out["expected"] = one.gpu.expected;
    out["to_do"] = one.gpu.todo;
  }
  return {{"hosts", report.hosts},         {"rounds", report.rounds}, {"seconds", report.seconds},
          {"figures", std::move(figures)}, {"notes", report.notes},   {"findings", std::move(findings)}};
}

CheckLeader::CheckLeader(std::vector<CheckedHost> hosts, CheckOptions options, Tell tell)
    : hosts_(std::move(hosts)),
      options_(std::move(options)),
      tell_(std::move(tell)),
      judge_(names_of(hosts_)),
      round_id_(cluster::steady_ns()),  // no other check's
      begun_ns_(cluster::steady_ns()) {
  begin_round();
}

int64_t CheckLeader::number_of(int64_t index) const {
  const auto at = std::ranges::find(hosts_, index, &CheckedHost::index);
  return at == hosts_.end() ? -1 : at - hosts_.begin();
}

void CheckLeader::begin_round() {
  const CheckJudge::Round round = judge_.next();
  parts_.clear();
  if (round.empty()) {
    over_ = true;
    ended_ns_ = cluster::steady_ns();
    return;
  }
  ++round_id_;
  for (const int64_t host : round.alone) {
    parts_[host].alone = true;
    parts_[host].asks_gpus = options_.gpus;
    parts_[host].reach = round.reach;
  }
  for (const auto& [a, b] : round.pairs) {
    parts_[a].partner = b;
    parts_[b].partner = a;
  }
  deadline_ns_ = cluster::steady_after(options_.limit_s + options_.grace_s);
  for (auto& [host, part] : parts_) {
    if (const auto gone = lost_.find(host); gone != lost_.end()) {
      part.ended = true;
      part.failed = gone->second;
      continue;
    }
    hosts::Measure order{.round = round_id_,
                         .self = host,
                         .address = hosts_[static_cast<size_t>(host)].address,
                         .kernel_level = options_.kernel_level,
                         .dtype = options_.dtype,
                         .folder = options_.folder.string(),
                         .limit_s = options_.limit_s};
    if (part.alone) order.alone = true;
    if (part.asks_gpus) order.gpus = true;
    if (part.asks_gpus && options_.gpu_size > 0) order.gpu_size = options_.gpu_size;
    if (part.partner >= 0) order.partner = part.partner;
    if (part.reach) {
      std::vector<int64_t>& others = order.reach.emplace();
      for (int64_t other = 0; other < std::ssize(hosts_); ++other) {
        if (other != host) others.push_back(other);
      }
    }
    tell_(hosts_[static_cast<size_t>(host)].index, order);
  }
}

bool CheckLeader::take(int64_t index, const hosts::Message& message) {
  const auto* const measured = std::get_if<hosts::Measured>(&message);
  const auto* const put = std::get_if<hosts::PutMeasured>(&message);
  if (measured == nullptr && put == nullptr) return false;
  const int64_t host = number_of(index);
  if (over_ || host < 0 || lost_.contains(host)) return true;
  if (measured != nullptr) {
    take_result(host, *measured);
  } else if (put->round == static_cast<uint64_t>(round_id_)) {
    const auto own = parts_.find(host);
    for (const auto& [other, part] : parts_) {
      // Of pairs the partner; where each tries each, all.
      if (other != host && own != parts_.end() && (part.reach || part.partner == host))
        tell_(hosts_[static_cast<size_t>(other)].index, *put);
    }
  }
  return true;
}

void CheckLeader::take_result(int64_t host, const hosts::Measured& message) {
  using hosts::Measured;
  const auto found = parts_.find(host);
  if (found == parts_.end() || message.round != round_id_) return;
  Part& part = found->second;
  std::visit(hosts::Overloaded{
                 [&](const Measured::Alone& one) {
                   part.figures = HostFigures{.matmul_gflops = one.matmul_gflops,
                                              .copy_gb_s = one.copy_gb_s,
                                              .write_mb_s = one.write_mb_s.value_or(0),
                                              .digest = one.digest,
                                              .failed = one.failed.value_or(""),
                                              .gpus = {}};
                 },
                 [&](const Measured::Gpus& all) {
                   if (part.asks_gpus) part.gpus = host_gpus_from_json({{"gpus", all.gpus}, {"notes", all.notes}});
                 },
                 [&](const Measured::Pair& one) {
                   if (part.partner < 0) return;
                   part.pair = PairFigures{.a = host,
                                           .b = part.partner,
                                           .gb_s = one.gb_s.value_or(0),
                                           .trip_us = one.trip_us.value_or(0),
                                           .trips = one.trips.value_or(0),
                                           .stalls = one.stalls.value_or(0),
                                           .resent = std::max<int64_t>(0, one.resent.value_or(0)),
                                           .failed = one.failed.value_or("")};
                 },
                 [&](const Measured::Reach& one) { part.reaches[one.host] = one.failed; },
                 [&](const Measured::Reached&) { part.reached = true; },
                 [&](const Measured::Failed& one) { part.failed = one.message; },
                 [&](const Measured::Ended& one) {
                   part.ended = true;
                   if (part.failed.empty()) part.failed = one.failed;
                 },
             },
             message.what);
}

void CheckLeader::lost(int64_t index, const std::string& why) {
  const int64_t host = number_of(index);
  if (over_ || host < 0 || !lost_.emplace(host, "it was lost: " + why).second) return;
  const auto part = parts_.find(host);
  if (part == parts_.end()) return;
  part->second.ended = true;
  part->second.figures.reset();
  part->second.gpus.reset();
  part->second.pair.reset();
  part->second.failed = lost_[host];
}

bool CheckLeader::tick() {
  if (over_) return true;
  const bool all = std::ranges::all_of(parts_, [](const auto& one) { return one.second.answered(); });
  if (all || cluster::steady_ns() >= deadline_ns_) {
    end_round();
    begin_round();
  }
  return over_;
}

void CheckLeader::end_round() {
  const std::string silent = fmt::format("it has told nothing in {:.0f} s", options_.limit_s + options_.grace_s);
  const auto why = [&](const Part& part) { return part.failed.empty() ? silent : part.failed; };
  for (const auto& [host, part] : parts_) {
    if (!part.ended) tell_(hosts_[static_cast<size_t>(host)].index, hosts::EndMeasure{});
    if (part.alone) {
      HostFigures figures = part.figures ? *part.figures : HostFigures{.digest = {}, .failed = why(part), .gpus = {}};
      figures.gpus = part.gpus;
      if (part.asks_gpus && !part.gpus && figures.failed.empty()) figures.failed = "its GPUs: " + why(part);
      judge_.add_host(host, std::move(figures));
    }
    if (part.partner > host) {
      const Part& other = parts_.at(part.partner);
      PairFigures both{.a = host, .b = part.partner, .failed = {}};
      if (part.pair && other.pair) {
        both = *part.pair;
        both.gb_s = std::min(both.gb_s, other.pair->gb_s);
        both.trip_us = std::max(both.trip_us, other.pair->trip_us);
        both.trips = std::min(both.trips, other.pair->trips);
        both.stalls = std::max(both.stalls, other.pair->stalls);
        both.resent = both.resent > INT64_MAX - other.pair->resent ? INT64_MAX : both.resent + other.pair->resent;
        if (both.failed.empty()) both.failed = other.pair->failed;
      } else {
        both.failed = !part.pair ? why(part) : why(other);
      }
      judge_.add_pair(std::move(both));
    }
    if (!part.reach) continue;
    for (const auto& [to, failed] : part.reaches) {  // either way
      const auto back = parts_.find(to);
      if (failed.empty() || back == parts_.end()) continue;
      const auto told = back->second.reaches.find(host);
      if (to < host && told != back->second.reaches.end() && !told->second.empty()) continue;  // by the other
      judge_.add_pair({.a = host, .b = to, .reach = true, .failed = failed});
    }
  }
}

CheckReport CheckLeader::report() const {
  CheckReport out{.findings = {},
                  .notes = {},
                  .figures = {},
                  .hosts = static_cast<int64_t>(hosts_.size()),
                  .rounds = judge_.rounds(),
                  .seconds = static_cast<double>((over_ ? ended_ns_ : cluster::steady_ns()) - begun_ns_) / 1e9};
  for (int64_t host = 0; host < std::ssize(hosts_); ++host) {
    const HostFigures* const figures = judge_.first_figures(host);
    if (figures == nullptr) continue;
    const std::string& name = hosts_[static_cast<size_t>(host)].name;
    out.figures.emplace_back(name, *figures);
    if (!figures->gpus) continue;
    for (const std::string& note : figures->gpus->notes) out.notes.push_back(fmt::format("{}: {}", name, note));
    for (const GpuFigures& gpu : figures->gpus->gpus) {
      for (const std::string& note : notes_of(gpu))
        out.notes.push_back(fmt::format("{}: {}: {}", name, gpu_text(gpu.health), note));
    }
  }
  for (const CheckFinding& one : judge_.findings()) {
    CheckReport::Finding& finding = out.findings.emplace_back();
    finding.kind = one.kind;
    finding.why = one.why;
    finding.gpu = one.gpu;
    if (one.a >= 0) {
      finding.index = hosts_[static_cast<size_t>(one.a)].index;
      finding.host = hosts_[static_cast<size_t>(one.a)].name;
      finding.lost = lost_.contains(one.a);
    }
    if (one.b >= 0) {
      finding.other = hosts_[static_cast<size_t>(one.b)].index;
      finding.with = hosts_[static_cast<size_t>(one.b)].name;
    }
  }
  return out;
}

int64_t gpu_size_of_tests() {
  const char* const size = std::getenv("CAIRN_CHECK_GPU_SIZE");
  return size == nullptr ? 0 : std::max<int64_t>(0, std::atoll(size));
}

bool take_check_message(HostChecker& checker, const hosts::Message& message, const std::string& address) {
  if (const auto* const measure = std::get_if<hosts::Measure>(&message)) {
    hosts::Measure order = *measure;
    if (!address.empty()) order.address = address;
    checker.start(std::move(order));
  } else if (std::holds_alternative<hosts::EndMeasure>(message)) {
    checker.stop();
  } else if (const auto* const put = std::get_if<hosts::PutMeasured>(&message)) {
    checker.put(*put);
  } else {
    return false;
  }
  return true;
}

}  // namespace cairn::tools
