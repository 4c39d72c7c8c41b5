// Faults, and the lives that they are drawn for.
#include "tests/sim/world_model.h"

#include <cmath>
#include <cstdio>

namespace cairn::sim {

void World::strike(const Fault& fault) {
  Host& host = hosts_[static_cast<size_t>(fault.host)];
  const double until_s = now_s_ + fault.seconds;
  if (host.gone) return;
  say("FAULT {}", to_text(fault));
  const auto restart = [this, &host](double seconds) { after(seconds, [this, &host] { start(host); }); };
  switch (fault.kind) {
    case FaultKind::kCut:
      if (host.index == 0) return;
      host.cut_s = std::max(host.cut_s, until_s);
      return break_link(host.index, uniform(0, kDeadS), uniform(0, kDeadS));
    case FaultKind::kKill:
      stop_process(host);
      return restart(fault.seconds);
    case FaultKind::kPower:
      stop_process(host);
      lose_memory(host);
      return restart(fault.seconds);
    case FaultKind::kLeave: {
      if (!host.up || host.frozen_s > now_s_) return;
      for (Thread& thread : host.threads) {
        if (thread.at != Thread::At::kRule) continue;
        const Try of = thread.of;
        feed(host, saves::GiveUp{of});
        require(thread.at != Thread::At::kRule || thread.of != of, "leaves",
                fmt::format("{} still waits for step {}", host.name, of.step));
      }
      after(0.3, host, [this, &host] { stop_process(host); });
      return restart(std::max(1.0, fault.seconds));
    }
    case FaultKind::kRank:
      if (!host.up || !host.ranks) return;
      if (host.index == 0) return fail_generation("a rank of h0 has failed");
      advance(host, member::Failing{});
      return ranks_stop(host);
    case FaultKind::kFreeze:
      host.frozen_s = std::max(host.frozen_s, until_s);
      if (fault.seconds <= kDeadS) return;
      if (host.index > 0) return break_link(host.index, uniform(kDeadS * 0.9, kDeadS * 1.1), 0);
      for (const int64_t member : members()) break_link(member, 0, uniform(kDeadS * 0.9, kDeadS * 1.1));
      return;
    case FaultKind::kSlow:
      host.slow_s = until_s;
      return;
    case FaultKind::kHang:
      host.hang_s = until_s;
      return;
    case FaultKind::kFull:
      host.full_s = until_s;
      return;
    case FaultKind::kBroken:
      host.broken_s = until_s;
      return;
    case FaultKind::kMemory:
      host.no_memory = true;
      return;
    case FaultKind::kGone:
      if (host.index == 0 || !places_.contains(host.index)) return;
      stop_process(host);
      host.gone = true;
      return;
    case FaultKind::kExclude:
    case FaultKind::kStore:
    case FaultKind::kAll:
      return;
  }
}

// --- lives -----------------------------------------------------------------------------------------------------------

std::string to_text(const Fault& fault) {
  return fmt::format("at {:.1f} s: {} h{} for {:.1f} s", fault.at_s, kFaultNames[static_cast<size_t>(fault.kind)],
                     fault.host, fault.seconds);
}

std::optional<Fault> fault_from(std::string_view text) {
  char kind[16] = {};
  Fault out;
  int host = 0;
  if (std::sscanf(std::string(text).c_str(), "at %lf s: %15s h%d for %lf s", &out.at_s, kind, &host, &out.seconds) != 4)
    return std::nullopt;
  const auto* const found = std::ranges::find(kFaultNames, std::string_view(kind));
  if (found == kFaultNames.end()) return std::nullopt;
  out.kind = static_cast<FaultKind>(found - kFaultNames.begin());
  out.host = host;
  return out;
}

constexpr std::string_view kCopies = " copies";

std::string to_text(const Life& life) {
  std::string out =
      life.members ? fmt::format("members: seed={} hosts={} spares={} smallest={} spare_after_s={} faulty_s={}{}\n",
                                 life.seed, life.hosts, life.spares, life.smallest, life.spare_after_s, life.faulty_s,
                                 life.copies ? kCopies : "")
                   : fmt::format("life: seed={} hosts={} in_flight={} save_steps={} step_s={} faulty_s={}\n", life.seed,
                                 life.hosts, life.in_flight, life.save_steps, life.step_s, life.faulty_s);
  for (const Fault& fault : life.faults) out += fmt::format("fault: {}\n", to_text(fault));
  return out;
}

bool read_life(std::string_view line, Life& life) {
  const std::string text(line);
  life.members = line.starts_with("members: ");
  life.copies = line.ends_with(kCopies);
  const int read =
      life.members
          ? std::sscanf(text.c_str(),
                        "members: seed=%lu hosts=%ld spares=%ld smallest=%ld spare_after_s=%lf faulty_s=%lf",
                        &life.seed, &life.hosts, &life.spares, &life.smallest, &life.spare_after_s, &life.faulty_s)
          : std::sscanf(text.c_str(), "life: seed=%lu hosts=%ld in_flight=%ld save_steps=%ld step_s=%lf faulty_s=%lf",
                        &life.seed, &life.hosts, &life.in_flight, &life.save_steps, &life.step_s, &life.faulty_s);
  return read == 6;
}

Life random_life(uint64_t seed) {
  const uint64_t key = mix64(seed ^ 0x5EED);
  uint64_t draws = 0;
  const auto uniform = [&](double low, double high) { return low + (high - low) * uniform_at(key, draws++); };
  const auto whole = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(uniform(0, 1) * static_cast<double>(high - low + 1));
  };
  Life life{.seed = seed};
  life.hosts = uniform(0, 1) < 0.8 ? whole(2, 4) : whole(5, 8);
  life.in_flight = uniform(0, 1) < 0.7 ? 1 : whole(2, 3);
  life.save_steps = whole(3, 10);
  life.step_s = uniform(1, 5);
  const bool cruel = uniform(0, 1) < 0.5;  // faults close together
  const int64_t faults = uniform(0, 1) < 0.03 ? 0 : whole(3, 9);
  double at_s = uniform(5, 60);
  for (int64_t k = 0; k < faults; ++k) {
    Fault fault{.at_s = std::round(at_s * 10) / 10};
    fault.kind = static_cast<FaultKind>(whole(0, kFaultKinds - (uniform(0, 1) < 0.5 ? 1 : 2)));
    fault.host = whole(0, life.hosts - 1);
    if ((fault.kind == FaultKind::kCut || fault.kind == FaultKind::kGone) && fault.host == 0) fault.host = 1;
    const double length = uniform(0, 1), next = uniform(0, 1);
    fault.seconds = std::round((length < 0.5   ? uniform(0.1, 5)
                                : length < 0.9 ? uniform(5, 60)
                                               : uniform(60, 300)) *
                               10) /
                    10;
    if (fault.kind == FaultKind::kHang && next < 0.15) fault.seconds = 1600;
    if (fault.kind == FaultKind::kHang && next < 0.1) fault.host = 0;
    life.faults.push_back(fault);
    if (fault.kind == FaultKind::kGone && next < 0.4) {  // and its holder, while copies are used
      life.faults.push_back({.at_s = std::round((fault.at_s + uniform(30, 37)) * 10) / 10,
                             .kind = FaultKind::kKill,
                             .host = (fault.host + 1) % life.hosts,
                             .seconds = 5});
    }
    at_s += cruel && uniform(0, 1) < 0.6 ? uniform(0.1, 8) : uniform(20, 200);
  }
  life.faulty_s = 1000;
  for (const Fault& fault : life.faults) life.faulty_s = std::max(life.faulty_s, fault.at_s + fault.seconds + 5);
  return life;
}

Life shrink(const Life& life) {
  const auto kind_of = [](const std::optional<std::string>& violation) {
    return violation ? violation->substr(0, violation->find(':')) : std::string();
  };
  Life best = life;
  const std::string wanted = kind_of(live(life, false).violation);
  const auto still = [&](const Life& one) { return kind_of(live(one, false).violation) == wanted; };
  for (bool smaller = true; smaller;) {
    smaller = false;
    const auto attempt = [&](const Life& one) {
      if (!still(one)) return false;
      best = one;
      return smaller = true;
    };
    for (size_t k = 0; k < best.faults.size(); ++k) {
      Life one = best;
      one.faults.erase(one.faults.begin() + static_cast<int64_t>(k));
      if (attempt(one)) break;
    }
    const bool uses_last =
        std::ranges::any_of(best.faults, [&](const Fault& one) { return one.host == best.hosts - 1; });
    if (best.hosts > 2 && !uses_last && !best.members) {
      Life one = best;
      --one.hosts;
      attempt(one);
    }
    if (best.in_flight > 1) {
      Life one = best;
      --one.in_flight;
      attempt(one);
    }
    for (const double faulty_s :
         {best.faults.empty() ? 0.0 : best.faults.back().at_s + best.faults.back().seconds + 5}) {
      if (faulty_s + 10 > best.faulty_s) continue;
      Life one = best;
      one.faulty_s = faulty_s;
      attempt(one);
    }
  }
  return best;
}

}  // namespace cairn::sim
