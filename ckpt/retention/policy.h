#pragma once
// Which checkpoints stay: pure rules on a list of what is there. No I/O.
//
// Rules see complete checkpoints that are not labelled bad. One stays when any rule keeps it, and so does what a kept
// one refers to. Three stay under any rules: the newest; the newest good one; and the candidate, the oldest one behind
// that which is still new, until it is proved or fails. Without it, saves closer together than it takes to prove one
// would all be gone before any is good. Bad ones go first. In a folder without labels there are no good ones and no
// candidate.
//   last(n)        the n with the highest steps
//   every(k)       the first at or behind each multiple of k steps (a save that is put off by a step still counts)
//   every(time)    the first of each such period of the clock (of each UTC day for 24 h)
//   at(steps)      the first at or behind each of these steps
//   best(m, n)     the n best of a metric (runtime/config/metric_name.h); checkpoints that have no such number are no
//   candidates within(time)   those at most so much older than the highest step; by the time of creation that manifests
//   hold fractions(n)   the first at or behind each nth part of the run
// "The first" never changes by later saves, so that what is kept once is kept by every later application too.

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/retention/catalog.h"
#include "runtime/config/checkpoint.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct RetentionPolicy {
  int64_t keep_last = 1;            // complete checkpoints, by step; at least 1
  std::vector<int64_t> keep_steps;  // never removed: being read, or asked for by a person
  std::vector<Keep> rules;          // and what these keep
  int64_t run_steps = 0;            // of the whole run, for kFractions
  bool even_good = false;  // a person wants the newest good one and the candidate to go, where no rule keeps them
};

/// What a recipe's `keep` means; with an empty list nothing is ever removed, which is for the caller to see.
RetentionPolicy retention_policy(const std::vector<Keep>& rules, int64_t run_steps);

/// "last(3), every(1000), every(24h), best(valid_loss, 2), at(100, 85000), within(2h), fractions(10)" -> rules.
/// Times have a unit: s, min, h or d. Errors: kInvalidInput naming the rule and what is accepted.
Result<std::vector<Keep>> parse_keep(std::string_view text);
/// One rule as parse_keep reads it.
std::string to_text(const Keep& rule);

/// What happens to one checkpoint, and why: "last(3)", "every(1000)", "step 40 refers to it", "no rule keeps it".
struct Fate {
  int64_t step = 0;
  bool stays = true;
  std::string why;
};

/// The fate of each checkpoint of `checkpoints` (ascending), in their order. Damaged ones go when they are older than
/// the newest keep_last complete ones; what could not be read stays; nothing goes while none is complete. Errors:
/// kInvalidInput for a rule that makes no sense (a count below 1, a time of 0, fractions without run_steps).
Result<std::vector<Fate>> plan_retention(std::span<const CheckpointInfo> checkpoints, const RetentionPolicy& policy);

/// The fates when a person wants `steps`, and no others, removed. Errors: kInvalidInput naming the step, and
/// nothing goes: the newest complete one that is not bad (a run resumes from it); an unreadable one; one whose
/// files a staying step needs; without `even_good` the newest good one and the candidate; or when none is
/// complete.
Result<std::vector<Fate>> plan_removal(std::span<const CheckpointInfo> checkpoints, const std::set<int64_t>& steps,
                                       bool even_good = false);

/// What stays under any rules besides the newest, of complete checkpoints that are not bad (ascending).
struct Protected {
  std::optional<int64_t> good;       // the newest good one
  std::optional<int64_t> candidate;  // the oldest new one behind it
};
Protected protected_steps(std::span<const CheckpointInfo* const> usable);

/// Of `present`, complete steps of a run (ascending), those that the new rules would remove and the old ones keep: what
/// a changed `checkpoint.keep`, or a run of another length, costs. By steps alone: what rules in time or by a metric
/// keep is known of `present` by its catalog. Errors: those of plan_retention.
Result<std::vector<int64_t>> removed_by_change(std::span<const CheckpointInfo> present,
                                               const std::vector<Keep>& old_keep, int64_t old_run_steps,
                                               const std::vector<Keep>& new_keep, int64_t new_run_steps);

/// The one place that knows what checkpoints need of others: the steps that those of `kept` refer to, over any number
/// of hops, without `kept` itself.
std::set<int64_t> referenced_steps(std::span<const CheckpointInfo> checkpoints, const std::set<int64_t>& kept);

/// How many checkpoints exist at once at most, over a run that saves as `config` says: what is certain (rhythms in
/// steps), and an upper bound. Without an upper bound (rhythms in time) `at_most` is -1. Counts the newest good one and
/// the candidate; `proof` is the number of steps that prove one.
/// `present`: steps that are there already, ascending; the run resumes after the last of them.
struct KeptAtOnce {
  int64_t at_least = 1, at_most = 1;
};
KeptAtOnce kept_at_once(const CheckpointConfig& config, int64_t run_steps, std::span<const int64_t> present = {},
                        int64_t proof = WatchRules{}.proof);

}  // namespace cairn::ckpt
