#include "tools/run/check/check_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

namespace cairn::tools {
namespace {

constexpr double kStallShare = 0.04;     // of round trips
constexpr int64_t kStalls = 3;           // at least: a machine may stand still once
constexpr double kTripSlackUs = 10'000;  // processes that share a core answer each other as late
constexpr double kSlowTrip = 5;

}  // namespace

void CheckJudge::add_host(int64_t host, HostFigures figures) { alone_[host].push_back({round_, std::move(figures)}); }

const HostFigures* CheckJudge::first_figures(int64_t host) const {
  const auto results = alone_.find(host);
  return results == alone_.end() || results->second.empty() ? nullptr : &results->second.front().figures;
}

void CheckJudge::add_pair(PairFigures figures) {
  if (!figures.reach) {
    rates_[round_].push_back(figures.gb_s);
    if (figures.trips > 0) trips_[round_].push_back(figures.trip_us);
  }
  pairs_.push_back(std::move(figures));
}

std::pair<CheckJudge::Well, std::string> CheckJudge::judge_alone(int64_t host, int64_t round) const {
  const HostFigures* own = nullptr;
  std::vector<double> matmul, copy, write;
  std::map<std::string, int64_t> digests;
  for (const auto& [index, results] : alone_) {
    for (const Alone& one : results) {
      if (one.round != round) continue;
      if (index == host) own = &one.figures;
    }
  }
  for (const auto& [index, results] : alone_) {
    for (const Alone& one : results) {
      if (!one.figures.failed.empty()) continue;
      if (one.round == 1) ++digests[one.figures.digest];  // of all hosts
      if (one.round != round) continue;
      matmul.push_back(one.figures.matmul_gflops);
      copy.push_back(one.figures.copy_gb_s);
      write.push_back(one.figures.write_mb_s);
    }
  }
  if (own == nullptr) return {Well::kYes, ""};
  if (!own->failed.empty()) return {Well::kBroken, own->failed};
  int64_t compared = 0;
  for (const auto& [digest, times] : digests) compared += times;
  const auto most = std::ranges::max_element(digests, {}, [](const auto& one) { return one.second; });
  if (most != digests.end() && own->digest != most->first && 2 * most->second > compared)
    return {Well::kBroken, "the same matrix product gives other bits than on the other hosts"};
  const auto slow = [](double rate, const std::vector<double>& all, double bar) {
    return rate > 0 && rate * bar < upper_median(all);
  };
  if (slow(own->matmul_gflops, matmul, kSlowHost)) {
    return {Well::kSlow, fmt::format("matrix products: {:.1f} GFLOP/s, the others {:.1f}", own->matmul_gflops,
                                     upper_median(matmul))};
  }
  if (slow(own->copy_gb_s, copy, kSlowHost)) {
    return {Well::kSlow,
            fmt::format("copies in memory: {:.1f} GB/s, the others {:.1f}", own->copy_gb_s, upper_median(copy))};
  }
  if (slow(own->write_mb_s, write, kSlowWrite)) {
    return {Well::kSlow, fmt::format("writes to the run folder: {:.1f} MB/s, the others {:.1f}", own->write_mb_s,
                                     upper_median(write))};
  }
  return {Well::kYes, ""};
}

std::map<int64_t, const HostGpus*> CheckJudge::gpus_of(int64_t round) const {
  std::map<int64_t, const HostGpus*> out;
  for (const auto& [host, results] : alone_) {
    for (const Alone& one : results) {
      if (one.round == round && one.figures.gpus) out[host] = &*one.figures.gpus;
    }
  }
  return out;
}

std::vector<GpuFault> CheckJudge::always_slow(int64_t host, int64_t& times) const {
  std::vector<GpuFault> out;
  times = 0;
  const auto results = alone_.find(host);
  if (results == alone_.end()) return out;
  for (const Alone& one : results->second) {
    const std::map<int64_t, const HostGpus*> all = gpus_of(one.round);
    if (!all.contains(host)) continue;
    std::vector<GpuFault> slow = slow_beside(all, host);
    if (times++ > 0) {
      std::erase_if(slow, [&](const GpuFault& fault) {
        return std::ranges::none_of(out, [&](const GpuFault& before) {
          return before.index == fault.index && before.measured == fault.measured;
        });
      });
    }
    out = std::move(slow);
  }
  return out;
}

void CheckJudge::add_gpus(std::vector<CheckFinding>& out) const {
  for (const auto& [host, results] : alone_) {
    std::vector<GpuFault> faults;
    for (const Alone& one : results) {
      const std::map<int64_t, const HostGpus*> all = gpus_of(one.round);
      if (!all.contains(host)) continue;
      std::vector<GpuFault> found = one.round == 1 ? faults_beside(all, host) : std::vector<GpuFault>();
      for (const GpuFigures& gpu : all.at(host)->gpus) {
        for (GpuFault& fault : faults_of(gpu)) found.push_back(std::move(fault));
      }
      for (GpuFault& fault : found) {
        const bool told = std::ranges::any_of(faults, [&](const GpuFault& before) {
          return before.index == fault.index && before.measured == fault.measured;
        });
        if (!told) faults.push_back(std::move(fault));
      }
    }
    int64_t times = 0;
    std::vector<GpuFault> slow = always_slow(host, times);
    if (times >= kTimesSlow) faults.insert(faults.end(), slow.begin(), slow.end());
    for (GpuFault& fault : faults) {
      const std::string why = fault_text(fault);
      out.push_back(
          {fault.slow ? CheckFinding::Kind::kSlowGpu : CheckFinding::Kind::kGpu, host, -1, why, std::move(fault)});
    }
  }
}

/// Of the first pairs; of all where there are so few hosts that a bad one is in most.
double CheckJudge::usual_gb_s() const {
  std::vector<double> all;
  for (const auto& [round, rates] : rates_) {
    if (hosts() > 3 && !all.empty()) break;
    all.insert(all.end(), rates.begin(), rates.end());
  }
  if (all.empty()) return 0;
  return hosts() > 3 ? upper_median(all) : std::ranges::max(all);
}

double CheckJudge::usual_trip_us() const {
  std::vector<double> all;
  for (const auto& [round, trips] : trips_) {
    if (hosts() > 3 && !all.empty()) break;
    all.insert(all.end(), trips.begin(), trips.end());
  }
  if (all.empty()) return 0;
  std::ranges::sort(all);
  return hosts() > 3 ? all[(all.size() - 1) / 2] : all.front();
}

std::pair<CheckJudge::Well, std::string> CheckJudge::judge_pair(const PairFigures& pair) const {
  if (!pair.failed.empty()) return {Well::kBroken, pair.failed};
  const int64_t lost = std::min(pair.stalls, pair.resent);
  if (lost >= kStalls && static_cast<double>(lost) >= kStallShare * static_cast<double>(pair.trips)) {
    return {Well::kBroken, fmt::format("packets are lost: {} of {} round trips had to wait for one", lost, pair.trips)};
  }
  if (pair.reach) return {Well::kYes, ""};
  if (pair.gb_s * kSlowLink < usual_gb_s()) {
    return {Well::kSlow, fmt::format("{:.3g} MB/s, other pairs {:.3g}", 1e3 * pair.gb_s, 1e3 * usual_gb_s())};
  }
  if (pair.trip_us > kSlowTrip * usual_trip_us() + kTripSlackUs) {
    return {Well::kSlow,
            fmt::format("{:.1f} ms for a round trip, other pairs {:.1f}", pair.trip_us / 1e3, usual_trip_us() / 1e3)};
  }
  return {Well::kYes, ""};
}

bool CheckJudge::is_cleared(int64_t host) const {
  return std::ranges::any_of(pairs_, [&](const PairFigures& pair) {
    return !pair.reach && (pair.a == host || pair.b == host) && judge_pair(pair).first == Well::kYes;
  });
}

bool CheckJudge::has_pair(int64_t a, int64_t b) const {
  return std::ranges::any_of(pairs_, [&](const PairFigures& pair) {
    if (std::minmax(pair.a, pair.b) != std::minmax(a, b)) return false;
    return !pair.reach || judge_pair(pair).first != Well::kYes;
  });
}

std::vector<const PairFigures*> CheckJudge::bad_with_cleared(int64_t host) const {
  std::vector<const PairFigures*> out;
  std::set<int64_t> partners;
  for (const PairFigures& pair : pairs_) {
    if (pair.a != host && pair.b != host) continue;
    const int64_t other = pair.a == host ? pair.b : pair.a;
    if (judge_pair(pair).first == Well::kYes || !is_cleared(other) || !partners.insert(other).second) continue;
    out.push_back(&pair);
  }
  return out;
}

int64_t CheckJudge::times_bad(int64_t a, int64_t b) const {
  int64_t out = 0;
  for (const PairFigures& pair : pairs_) {
    if (std::minmax(pair.a, pair.b) != std::minmax(a, b)) continue;
    if (judge_pair(pair).first != Well::kYes) {
      ++out;
    } else if (!pair.reach) {
      return 0;
    }
  }
  return out;
}

/// Not well whenever they were measured, and not often enough yet.
std::vector<int64_t> CheckJudge::suspects_alone() const {
  std::vector<int64_t> out;
  for (const auto& [host, results] : alone_) {
    int64_t broken = 0, slow = 0;
    for (const Alone& one : results) {
      const Well well = judge_alone(host, one.round).first;
      broken += well == Well::kBroken ? 1 : 0;
      slow += well == Well::kSlow ? 1 : 0;
    }
    int64_t times = 0;
    const bool slow_gpu = !always_slow(host, times).empty() && times < kTimesSlow;
    if (slow_gpu || (broken + slow == std::ssize(results) && broken < kTimesBroken && broken + slow < kTimesSlow))
      out.push_back(host);
  }
  return out;
}

/// By pairs: neither cleared, nor at fault by two cleared partners. Those with bad pairs first.
std::vector<int64_t> CheckJudge::undecided() const {
  std::vector<int64_t> suspects, fresh;
  for (int64_t host = 0; host < hosts(); ++host) {
    if (is_cleared(host) || bad_with_cleared(host).size() >= 2) continue;
    const bool measured = std::ranges::any_of(
        pairs_, [&](const PairFigures& pair) { return !pair.reach && (pair.a == host || pair.b == host); });
    (measured ? suspects : fresh).push_back(host);
  }
  suspects.insert(suspects.end(), fresh.begin(), fresh.end());
  return suspects;
}

std::vector<std::pair<int64_t, int64_t>> CheckJudge::next_pairs() const {
  std::vector<std::pair<int64_t, int64_t>> out;
  std::set<int64_t> taken;
  const auto take = [&](int64_t a, int64_t b, bool again = false) {
    if (taken.contains(a) || taken.contains(b) || a == b || has_pair(a, b) != again) return;
    taken.insert(a);
    taken.insert(b);
    out.emplace_back(std::min(a, b), std::max(a, b));
  };
  std::vector<int64_t> open = undecided();
  for (const int64_t host : open) {
    for (int64_t partner = 0; partner < hosts(); ++partner) {
      if (is_cleared(partner)) take(host, partner);
    }
  }
  // Nobody is cleared that they could be measured with: with each other, fresh ones first.
  std::ranges::stable_partition(open, [&](int64_t host) {
    return std::ranges::none_of(
        pairs_, [&](const PairFigures& pair) { return !pair.reach && (pair.a == host || pair.b == host); });
  });
  for (const int64_t host : open) {
    for (const int64_t other : open) take(host, other);
  }
  for (const PairFigures& pair : std::vector(pairs_)) {  // links that may be bad
    if (is_cleared(pair.a) && is_cleared(pair.b) && times_bad(pair.a, pair.b) == 1) take(pair.a, pair.b, true);
  }
  if (hosts() == 3) {  // what is usual is known of all pairs alone
    for (int64_t a = 0; a < 3; ++a) {
      for (int64_t b = a + 1; b < 3; ++b) take(a, b);
    }
  }
  return out;
}

CheckJudge::Round CheckJudge::next() {
  Round out;
  if (round_ == 0) {
    for (int64_t host = 0; host < hosts(); ++host) out.alone.push_back(host);
    out.reach = hosts() > 1;
  } else if (round_ <= kPairRounds) {
    out.pairs = next_pairs();
    out.alone = suspects_alone();
    // Beside them one that is well, to compare with at the same time.
    const std::vector<int64_t> suspects = out.alone;
    for (int64_t host = 0; host < hosts() && !suspects.empty(); ++host) {
      int64_t times = 0;
      if (std::ranges::count(suspects, host) > 0 || judge_alone(host, 1).first != Well::kYes ||
          !always_slow(host, times).empty())
        continue;
      out.alone.push_back(host);
      break;
    }
  }
  if (!out.empty()) ++round_;
  return out;
}

std::vector<CheckFinding> CheckJudge::findings() const {
  std::vector<CheckFinding> out;
  std::set<int64_t> told;
  for (const auto& [host, results] : alone_) {
    int64_t broken = 0, slow = 0;
    std::string why;
    for (const Alone& one : results) {
      const auto [well, what] = judge_alone(host, one.round);
      broken += well == Well::kBroken ? 1 : 0;
      slow += well == Well::kSlow ? 1 : 0;
      if (well != Well::kYes) why = what;
    }
    if (broken + slow < std::ssize(results) || (broken < kTimesBroken && broken + slow < kTimesSlow)) continue;
    out.push_back({broken > 0 ? CheckFinding::Kind::kHost : CheckFinding::Kind::kSlowHost, host, -1, why});
    told.insert(host);
  }
  std::vector<int64_t> unclear;
  for (int64_t host = 0; host < hosts(); ++host) {
    if (hosts() < 2 || is_cleared(host)) continue;
    const std::vector<const PairFigures*> bad = bad_with_cleared(host);
    if (bad.size() < 2) {
      const bool ill = std::ranges::any_of(pairs_, [&](const PairFigures& pair) {
        return (pair.a == host || pair.b == host) && judge_pair(pair).first != Well::kYes;
      });
      if (ill) unclear.push_back(host);
      continue;
    }
    if (!told.insert(host).second) continue;
    bool broken = false;
    std::vector<std::string> whys;
    for (const PairFigures* pair : bad) {
      const auto [well, what] = judge_pair(*pair);
      broken = broken || well == Well::kBroken;
      whys.push_back(
          fmt::format("with {}: {}", names_[static_cast<size_t>(pair->a == host ? pair->b : pair->a)], what));
    }
    whys.resize(std::min<size_t>(whys.size(), 2));
    out.push_back({broken ? CheckFinding::Kind::kHost : CheckFinding::Kind::kSlowHost, host, -1,
                   fmt::format("its network: {}", fmt::join(whys, "; "))});
  }
  std::set<std::pair<int64_t, int64_t>> links;
  for (const PairFigures& pair : pairs_) {
    const auto [well, what] = judge_pair(pair);
    const auto link = std::minmax(pair.a, pair.b);
    if (times_bad(pair.a, pair.b) < 2 || !is_cleared(pair.a) || !is_cleared(pair.b) || !links.insert(link).second)
      continue;
    out.push_back({CheckFinding::Kind::kLink, link.first, link.second, what});
  }
  std::erase_if(unclear, [&](int64_t host) { return told.contains(host); });
  if (!unclear.empty()) {
    std::vector<std::string> who, whys;
    for (const int64_t host : unclear) who.push_back(names_[static_cast<size_t>(host)]);
    for (const PairFigures& pair : pairs_) {
      if (const auto [well, what] = judge_pair(pair); well != Well::kYes && whys.size() < 2) {
        whys.push_back(fmt::format("{} and {}: {}", names_[static_cast<size_t>(pair.a)],
                                   names_[static_cast<size_t>(pair.b)], what));
      }
    }
    out.push_back({CheckFinding::Kind::kNetwork, -1, -1,
                   fmt::format("between {}: {}; no host is well enough to say which it is", fmt::join(who, ", "),
                               fmt::join(whys, "; "))});
  }
  // More than half of the hosts: what they have in common is broken, and none of them is to leave.
  const auto blamed = std::ranges::count_if(out, [](const CheckFinding& one) {
    return one.kind == CheckFinding::Kind::kHost || one.kind == CheckFinding::Kind::kSlowHost;
  });
  if (2 * blamed > hosts() && hosts() > 1) {
    const std::string why = out.front().why;
    std::erase_if(out, [](const CheckFinding& one) {
      return one.kind == CheckFinding::Kind::kHost || one.kind == CheckFinding::Kind::kSlowHost;
    });
    out.push_back({CheckFinding::Kind::kNetwork, -1, -1,
                   fmt::format("{} of {} hosts are not well, one of them: {}", blamed, hosts(), why)});
  }
  add_gpus(out);
  return out;
}

}  // namespace cairn::tools
