#pragma once
// What a check of hosts measures next, and what its measurements say: which host is broken or slow, which link is, or
// that it is the network. Hosts are numbered 0 to n - 1 here.
//
// Each host is measured alone, then with a partner: (0, 1), (2, 3), ... Who fails or is slow is a suspect and is
// measured again beside a host that is not, the pairs with a partner that has been *cleared*: one of its pairs is well.
// A host is at fault when it is so with two cleared partners; where both members of a bad pair are cleared by others
// it is their link, once it was measured again. What one partner says is never enough, nor is one measurement: machines
// are busy. Of GPUs (gpu_judge.h) a slow one is measured again like a slow host; what else is found of one counts at
// once, for no other work makes it. Pure.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/run/check/gpu_judge.h"

namespace cairn::tools {

// Wide, for hosts may be busy with something else: what is below is noise there.
inline constexpr double kSlowHost = 3;                      // times the median's time for the same work
inline constexpr double kSlowWrite = 5;                     // of a shared folder: what others write shows in it
inline constexpr double kSlowLink = 3;                      // times the time of the usual pair
inline constexpr int64_t kTimesBroken = 2, kTimesSlow = 3;  // in a row, alone: a slow one may have been busy
inline constexpr int64_t kPairRounds = 4;                   // at most, behind the one in which hosts are alone

/// Of a host alone. A rate of 0 was not measured.
struct HostFigures {
  double matmul_gflops = 0, copy_gb_s = 0, write_mb_s = 0;
  std::string digest;                 // of what it computed: equal on all hosts
  std::string failed;                 // what it could not do; empty: nothing
  std::optional<HostGpus> gpus = {};  // nullopt: it was not asked
  bool operator==(const HostFigures&) const = default;
};

/// Of two hosts.
struct PairFigures {
  int64_t a = 0, b = 0;
  bool reach = false;             // only whether they reach each other
  double gb_s = 0;                // of an all-gather, each way
  double trip_us = 0;             // of the fast ones
  int64_t trips = 0, stalls = 0;  // round trips, and those that took as long as a lost packet does
  int64_t resent = 0;             // TCP segments of both hosts meanwhile: a busy host stalls without
  std::string failed;             // empty: nothing
  bool operator==(const PairFigures&) const = default;
};

struct CheckFinding {
  enum class Kind {
    kHost,      // broken: `a`
    kSlowHost,  // `a`
    kLink,      // between `a` and `b`
    kGpu,       // `gpu` of `a` is broken, or missing
    kSlowGpu,   // `gpu` of `a`
    kNetwork,   // more hosts than not, or nobody to compare with: no host is to blame
  } kind = Kind::kHost;
  int64_t a = -1, b = -1;
  std::string why;
  GpuFault gpu = {};
  bool operator==(const CheckFinding&) const = default;
};

class CheckJudge {
 public:
  explicit CheckJudge(std::vector<std::string> names) : names_(std::move(names)) {}

  struct Round {
    std::vector<int64_t> alone;                      // hosts measured by themselves, at once
    bool reach = false;                              // and whether each reaches each
    std::vector<std::pair<int64_t, int64_t>> pairs;  // disjoint, at once
    bool empty() const { return alone.empty() && pairs.empty(); }
  };
  /// What to measure now; empty: findings() are final. Each call begins a round: its results come before the next.
  Round next();
  void add_host(int64_t host, HostFigures figures);
  void add_pair(PairFigures figures);

  std::vector<CheckFinding> findings() const;
  int64_t rounds() const { return round_; }
  /// Null: it was not measured.
  const HostFigures* first_figures(int64_t host) const;

 private:
  struct Alone {
    int64_t round = 0;
    HostFigures figures;
  };
  enum class Well { kYes, kSlow, kBroken };
  int64_t hosts() const { return static_cast<int64_t>(names_.size()); }
  /// Why the host is not well in this round, by those that were measured at once; empty: it is.
  std::pair<Well, std::string> judge_alone(int64_t host, int64_t round) const;
  std::pair<Well, std::string> judge_pair(const PairFigures& pair) const;
  /// The GPUs of all hosts that were measured in this round, by host.
  std::map<int64_t, const HostGpus*> gpus_of(int64_t round) const;
  /// Slow GPUs of the host in each of its rounds, the last ones as they are told, by the names of what was measured.
  std::vector<GpuFault> always_slow(int64_t host, int64_t& times) const;
  void add_gpus(std::vector<CheckFinding>& out) const;
  double usual_gb_s() const;
  double usual_trip_us() const;
  bool is_cleared(int64_t host) const;
  bool has_pair(int64_t a, int64_t b) const;
  /// Results of a host with cleared partners that are not well.
  std::vector<const PairFigures*> bad_with_cleared(int64_t host) const;
  std::vector<int64_t> suspects_alone() const;
  /// Never well, so often measured; 0: well at least once.
  int64_t times_bad(int64_t a, int64_t b) const;
  std::vector<int64_t> undecided() const;
  std::vector<std::pair<int64_t, int64_t>> next_pairs() const;

  std::vector<std::string> names_;
  int64_t round_ = 0;  // that have begun
  std::map<int64_t, std::vector<Alone>> alone_;
  std::vector<PairFigures> pairs_;
  std::map<int64_t, std::vector<double>> rates_, trips_;  // of pairs, by round
};

}  // namespace cairn::tools
