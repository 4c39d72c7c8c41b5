#include "ckpt/retention/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>

#include "runtime/config/metric_name.h"

namespace cairn::ckpt {
namespace {

using Kind = Keep::Kind;

constexpr int64_t kMostSaves = 1'000'000;  // counted one by one; beyond that nobody asks
constexpr const char* kRuleForms =
    "last(n), every(steps), every(time), best(metric, n), at(steps, ...), within(time) and fractions(n), "
    "where a time is a number with s, min, h or d";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

std::string time_text(double seconds) {
  for (const auto& [size, unit] : {std::pair(86400.0, "d"), {3600.0, "h"}, {60.0, "min"}}) {
    if (seconds >= size && std::fmod(seconds, size) == 0) return fmt::format("{}{}", seconds / size, unit);
  }
  return fmt::format("{}s", seconds);
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < 1 || out > 1'000'000'000) return std::nullopt;
  return out;
}

std::optional<double> time_of(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit = trimmed(text.substr(static_cast<size_t>(end - text.data())));
  const double size = unit == "s" ? 1 : unit == "min" ? 60 : unit == "h" ? 3600 : unit == "d" ? 86400 : 0;
  if (error != std::errc() || !(number > 0) || !(number < 1e9) || size == 0) return std::nullopt;
  return number * size;
}

/// One rule: its name and what stands between its parentheses.
std::optional<Keep> read_rule(std::string_view name, const std::vector<std::string_view>& args) {
  Keep rule;
  const auto one_count = [&](Kind kind, size_t at) -> std::optional<Keep> {
    const std::optional<int64_t> count = args.size() == at + 1 ? whole_number(args[at]) : std::nullopt;
    if (!count) return std::nullopt;
    rule.kind = kind;
    rule.count = *count;
    return rule;
  };
  if (name == "last") return one_count(Kind::kLast, 0);
  if (name == "fractions") return one_count(Kind::kFractions, 0);
  if (name == "best" && !args.empty()) {
    if (!parse_metric(args[0]).ok()) return std::nullopt;
    rule.metric = args[0];
    if (args.size() > 1) return one_count(Kind::kBest, 1);
    rule.kind = Kind::kBest;
    rule.count = 1;
    return rule;
  }
  if ((name == "every" || name == "within") && args.size() == 1) {
    rule.kind = name == "every" ? Kind::kEvery : Kind::kWithin;
    if (const std::optional<int64_t> steps = whole_number(args[0]); steps && name == "every") {
      rule.steps = *steps;
      return rule;
    }
    const std::optional<double> seconds = time_of(args[0]);
    if (!seconds) return std::nullopt;
    rule.seconds = *seconds;
    return rule;
  }
  if (name == "at" && !args.empty()) {
    rule.kind = Kind::kAt;
    for (const std::string_view arg : args) {
      const std::optional<int64_t> step = whole_number(arg);
      if (!step) return std::nullopt;
      rule.at.push_back(*step);
    }
    return rule;
  }
  return std::nullopt;
}

bool makes_sense(const Keep& rule, int64_t run_steps) {
  switch (rule.kind) {
    case Kind::kLast:
    case Kind::kBest:
      return rule.count >= 1;
    case Kind::kFractions:
      return rule.count >= 1 && run_steps >= 1;
    case Kind::kEvery:
      return (rule.steps >= 1) != (rule.seconds > 0);
    case Kind::kWithin:
      return rule.seconds > 0;
    case Kind::kAt:
      return !rule.at.empty();
  }
  return false;
}

/// The period of a time in a rhythm of `size`, both in seconds, in whole periods from 0. Manifests have milliseconds.
int64_t period(double number, double size) { return static_cast<int64_t>(std::floor(number / std::max(size, 1e-3))); }

/// Marks to each of which the first checkpoint at or behind it belongs.
std::vector<int64_t> marks_of(const Keep& rule, int64_t run_steps) {
  if (rule.kind == Kind::kAt) {
    std::vector<int64_t> marks = rule.at;
    std::sort(marks.begin(), marks.end());
    return marks;
  }
  std::vector<int64_t> marks;
  for (int64_t k = 1; k <= std::min(rule.count, run_steps); ++k) {
    marks.push_back(static_cast<int64_t>(std::ceil(static_cast<double>(run_steps) * static_cast<double>(k) /
                                                   static_cast<double>(std::min(rule.count, run_steps)))));
  }
  return marks;
}

/// Indices into `complete` (ascending by step, not empty) that the rule keeps.
std::vector<size_t> kept_by(const Keep& rule, std::span<const CheckpointInfo* const> complete, int64_t run_steps) {
  std::vector<size_t> out;
  switch (rule.kind) {
    case Kind::kLast:
      for (size_t k = complete.size() - std::min(complete.size(), static_cast<size_t>(rule.count)); k < complete.size();
           ++k)
        out.push_back(k);
      break;
    case Kind::kEvery: {
      std::set<int64_t> seen;
      for (size_t k = 0; k < complete.size(); ++k) {
        const int64_t at = rule.steps > 0
                               ? complete[k]->step / rule.steps
                               : period(static_cast<double>(complete[k]->created_unix_ms) / 1000, rule.seconds);
        if (rule.steps > 0 && at == 0) continue;  // before the first multiple
        if (seen.insert(at).second) out.push_back(k);
      }
      break;
    }
    case Kind::kAt:
    case Kind::kFractions: {
      size_t k = 0;
      for (const int64_t mark : marks_of(rule, run_steps)) {
        while (k < complete.size() && complete[k]->step < mark) ++k;
        if (k == complete.size()) break;
        if (out.empty() || out.back() != k) out.push_back(k);
      }
      break;
    }
    case Kind::kBest: {
      std::vector<std::pair<double, size_t>> ranked;
      for (size_t k = 0; k < complete.size(); ++k) {
        const std::optional<double> value = complete[k]->metric(rule.metric);
        if (value && std::isfinite(*value)) ranked.emplace_back(lower_is_better(rule.metric) ? *value : -*value, k);
      }
      std::sort(ranked.begin(), ranked.end());  // of equals the older one, which then stays the one
      if (ranked.size() > static_cast<size_t>(rule.count)) ranked.resize(static_cast<size_t>(rule.count));
      for (const auto& [value, k] : ranked) out.push_back(k);
      break;
    }
    case Kind::kWithin: {
      // Of the highest step: of all, one saved before a clock was set back would make those behind it old.
      const int64_t newest = complete.back()->created_unix_ms;
      for (size_t k = 0; k < complete.size(); ++k) {
        if (static_cast<double>(newest - complete[k]->created_unix_ms) <= rule.seconds * 1000) out.push_back(k);
      }
      break;
    }
  }
  return out;
}

}  // namespace

RetentionPolicy retention_policy(const std::vector<Keep>& rules, int64_t run_steps) {
  RetentionPolicy policy{.run_steps = run_steps};
  for (const Keep& rule : rules) {
    if (rule.kind == Kind::kLast) {
      policy.keep_last = std::max(policy.keep_last, rule.count);
    } else {
      policy.rules.push_back(rule);
    }
  }
  return policy;
}

std::string to_text(const Keep& rule) {
  switch (rule.kind) {
    case Kind::kLast:
      return fmt::format("last({})", rule.count);
    case Kind::kEvery:
      return rule.steps > 0 ? fmt::format("every({})", rule.steps) : fmt::format("every({})", time_text(rule.seconds));
    case Kind::kAt: {
      std::string steps;
      for (const int64_t step : rule.at) steps += (steps.empty() ? "" : ", ") + std::to_string(step);
      return fmt::format("at({})", steps);
    }
    case Kind::kBest:
      return fmt::format("best({}, {})", rule.metric, rule.count);
    case Kind::kWithin:
      return fmt::format("within({})", time_text(rule.seconds));
    case Kind::kFractions:
      return fmt::format("fractions({})", rule.count);
  }
  return {};
}

Result<std::vector<Keep>> parse_keep(std::string_view text) {
  std::vector<Keep> rules;
  std::string_view rest = trimmed(text);
  if (rest.empty()) return invalid(fmt::format("no rule of retention is given; there are {}", kRuleForms));
  while (!rest.empty()) {
    const size_t open = rest.find('('), close = rest.find(')');
    const std::string_view shown = trimmed(rest.substr(0, close == std::string_view::npos ? close : close + 1));
    if (open == std::string_view::npos || close == std::string_view::npos || close < open) {
      return invalid(fmt::format("\"{}\" is no rule of retention; there are {}", shown, kRuleForms));
    }
    std::vector<std::string_view> args;
    std::string_view inside = rest.substr(open + 1, close - open - 1);
    for (;;) {
      const size_t comma = inside.find(',');
      args.push_back(trimmed(inside.substr(0, comma)));
      if (comma == std::string_view::npos) break;
      inside.remove_prefix(comma + 1);
    }
    const std::optional<Keep> rule = read_rule(trimmed(rest.substr(0, open)), args);
    if (!rule) return invalid(fmt::format("\"{}\" is no rule of retention; there are {}", shown, kRuleForms));
    rules.push_back(*rule);
    rest = trimmed(rest.substr(close + 1));
    if (rest.empty()) break;
    if (rest[0] != ',' && rest[0] != '+') {
      return invalid(fmt::format("\"{}\": a comma is expected between rules of retention", rest));
    }
    rest = trimmed(rest.substr(1));
    if (rest.empty()) return invalid(fmt::format("\"{}\": no rule behind the last comma", text));
  }
  return rules;
}

std::set<int64_t> referenced_steps(std::span<const CheckpointInfo> checkpoints, const std::set<int64_t>& kept) {
  std::map<int64_t, const CheckpointInfo*> by_step;
  for (const CheckpointInfo& info : checkpoints) by_step[info.step] = &info;
  std::set<int64_t> out;
  std::vector<int64_t> open(kept.begin(), kept.end());
  while (!open.empty()) {
    const auto found = by_step.find(open.back());
    open.pop_back();
    if (found == by_step.end()) continue;
    for (const int64_t step : found->second->references) {
      if (!kept.contains(step) && out.insert(step).second) open.push_back(step);
    }
  }
  return out;
}

Result<std::vector<Fate>> plan_retention(std::span<const CheckpointInfo> checkpoints, const RetentionPolicy& policy) {
  if (policy.keep_last < 1) return invalid(fmt::format("keep_last must be at least 1, got {}", policy.keep_last));
  for (const Keep& rule : policy.rules) {
    if (makes_sense(rule, policy.run_steps)) continue;
    return invalid(rule.kind == Kind::kFractions && rule.count >= 1
                       ? fmt::format("{} needs the number of steps of the whole run (--run-steps)", to_text(rule))
                       : fmt::format("{} is no rule of retention; there are {}", to_text(rule), kRuleForms));
  }
  std::vector<Fate> out;
  std::vector<const CheckpointInfo*> complete;
  for (const CheckpointInfo& info : checkpoints) {
    out.push_back({info.step, true, info.unread ? "cannot be read" : "damaged, but not older than all that stay"});
    if (info.complete && !info.bad()) complete.push_back(&info);
  }
  if (complete.empty()) {
    const bool bad = std::ranges::any_of(checkpoints, [](const CheckpointInfo& info) { return info.complete; });
    for (Fate& fate : out) fate.why = bad ? "no complete checkpoint is anything but bad" : "no checkpoint is complete";
    return out;
  }
  std::map<int64_t, std::string> why;
  const auto keep = [&](int64_t step, const std::string& rule) {
    std::string& text = why[step];
    if (text.find(rule) == std::string::npos) text += (text.empty() ? "" : ", ") + rule;
  };
  const Keep newest{.kind = Kind::kLast, .count = policy.keep_last};
  int64_t oldest_of_last = complete.back()->step;
  for (const size_t k : kept_by(newest, complete, 0)) {
    keep(complete[k]->step, to_text(newest));
    oldest_of_last = std::min(oldest_of_last, complete[k]->step);
  }
  for (const Keep& rule : policy.rules) {
    for (const size_t k : kept_by(rule, complete, policy.run_steps)) keep(complete[k]->step, to_text(rule));
  }
  const Protected safe = protected_steps(complete);
  if (safe.good && !policy.even_good) keep(*safe.good, "the newest good one");
  if (safe.candidate && !policy.even_good) keep(*safe.candidate, "the next that may prove good");
  for (const CheckpointInfo* info : complete) {
    if (!info->held.empty()) keep(info->step, info->held);
  }
  for (const int64_t step : policy.keep_steps) keep(step, "asked for");
  std::set<int64_t> kept;
  for (const auto& [step, rule] : why) kept.insert(step);
  for (const int64_t step : referenced_steps(checkpoints, kept)) keep(step, "a kept one refers to it");
  for (size_t k = 0; k < checkpoints.size(); ++k) {
    const auto found = why.find(checkpoints[k].step);
    if (found != why.end()) {
      out[k].why = found->second;
    } else if (checkpoints[k].complete) {
      out[k] = {checkpoints[k].step, false,
                checkpoints[k].bad() ? "bad: " + checkpoints[k].label_why : "no rule keeps it"};
    } else if (!checkpoints[k].unread && checkpoints[k].step < oldest_of_last) {
      out[k] = {checkpoints[k].step, false, "damaged"};
    }
  }
  return out;
}

Protected protected_steps(std::span<const CheckpointInfo* const> usable) {
  Protected out;
  for (const CheckpointInfo* info : usable) {
    if (info->label == Label::kGood) out = {.good = info->step, .candidate = std::nullopt};
    if (info->label == Label::kNew && !out.candidate) out.candidate = info->step;
  }
  return out;
}

Result<std::vector<int64_t>> removed_by_change(std::span<const CheckpointInfo> present,
                                               const std::vector<Keep>& old_keep, int64_t old_run_steps,
                                               const std::vector<Keep>& new_keep, int64_t new_run_steps) {
  std::vector<int64_t> out;
  if (new_keep.empty()) return out;
  const auto goes = [&](const std::vector<Keep>& keep, int64_t run_steps) -> Result<std::set<int64_t>> {
    std::set<int64_t> steps;
    if (keep.empty()) return steps;
    RT_TRY_SET(const std::vector<Fate> fates, plan_retention(present, retention_policy(keep, run_steps)));
    for (const Fate& fate : fates) {
      if (!fate.stays) steps.insert(fate.step);
    }
    return steps;
  };
  RT_TRY_SET(const std::set<int64_t> before, goes(old_keep, old_run_steps));
  RT_TRY_SET(const std::set<int64_t> after, goes(new_keep, new_run_steps));
  std::ranges::set_difference(after, before, std::back_inserter(out));
  return out;
}

Result<std::vector<Fate>> plan_removal(std::span<const CheckpointInfo> checkpoints, const std::set<int64_t>& steps,
                                       bool even_good) {
  std::vector<Fate> out;
  std::vector<const CheckpointInfo*> usable;
  const CheckpointInfo* newest = nullptr;
  for (const CheckpointInfo& info : checkpoints) {
    if (info.complete && !info.bad()) usable.push_back(newest = &info);
    const bool goes = steps.contains(info.step);
    out.push_back({info.step, !goes, goes ? "asked for" : "not asked for"});
    if (goes && info.unread)
      return invalid(fmt::format("step {} stays, for it cannot be read: {}", info.step, info.problem));
    for (const int64_t needed : info.references) {
      if (!goes && steps.contains(needed)) {
        return invalid(fmt::format("step {} stays, for step {} refers to its files: remove both, or none of them",
                                   needed, info.step));
      }
    }
  }
  if (newest == nullptr)
    return invalid("no checkpoint is complete and not bad, so none is removed: one of them may be all that there is");
  if (steps.contains(newest->step)) {
    return invalid(
        fmt::format("step {} stays, for it is the newest complete one, from which a run resumes; to go back to an "
                    "older one, begin another run from that (--init-from), or move this one's folder away",
                    newest->step));
  }
  const Protected safe = protected_steps(usable);
  for (const auto& [step, what] : {std::pair(safe.good, "the newest good one, the only sure way back"),
                                   {safe.candidate, "the next that may prove good"}}) {
    if (step && steps.contains(*step) && !even_good)
      return invalid(fmt::format("step {} stays, for it is {}; --even-good removes it all the same", *step, what));
  }
  return out;
}

KeptAtOnce kept_at_once(const CheckpointConfig& config, int64_t run_steps, std::span<const int64_t> present,
                        int64_t proof) {
  // The end of the run always saves; rhythms in time may save at any step besides.
  const int64_t done = present.empty() ? 0 : present.back();
  bool by_time = false;
  std::set<int64_t> saves(present.begin(), present.end());
  if (done < run_steps) saves.insert(run_steps);
  if (saves.empty()) return {0, 0};
  for (const Every& every : config.save) {
    by_time = by_time || every.seconds > 0;
    if (every.steps <= 0) continue;
    const int64_t first = std::max<int64_t>(done / every.steps + 1, run_steps / every.steps - kMostSaves);
    for (int64_t k = first; k * every.steps <= run_steps; ++k) saves.insert(k * every.steps);
  }
  const auto count = static_cast<int64_t>(saves.size());
  if (config.keep.empty()) return {count, by_time ? -1 : count};

  std::vector<CheckpointInfo> all;
  for (const int64_t step : saves) all.push_back({.step = step, .complete = true});
  std::vector<const CheckpointInfo*> complete;
  for (const CheckpointInfo& info : all) complete.push_back(&info);
  std::set<size_t> certain{all.size() - 1};
  int64_t chance = 0;  // which ones a metric keeps is not known; at worst none that another rule keeps
  int64_t bound = 0;   // of the other rules, whatever the steps of the saves are
  bool unbounded = false;
  for (const Keep& rule : config.keep) {
    if (rule.kind == Kind::kBest) {
      chance += rule.count;
    } else if (rule.kind == Kind::kWithin || (rule.kind == Kind::kEvery && rule.seconds > 0)) {
      unbounded = true;
    } else if (makes_sense(rule, run_steps)) {
      for (const size_t k : kept_by(rule, complete, run_steps)) certain.insert(k);
      bound += rule.kind == Kind::kEvery ? run_steps / rule.steps
               : rule.kind == Kind::kAt  ? static_cast<int64_t>(rule.at.size())
                                         : rule.count;
    }
  }
  // And the newest good one and the candidate: for certain those that a clean run has at one of its last saves.
  auto kept = static_cast<int64_t>(certain.size());
  const size_t first = complete.size() - std::min<size_t>(complete.size(), 8);
  for (size_t end = first + 1; end <= complete.size(); ++end) {
    const std::span<const CheckpointInfo* const> then(complete.data(), end);
    std::set<size_t> stay{end - 1};
    for (const Keep& rule : config.keep) {
      const bool in_steps = rule.kind != Kind::kBest && rule.kind != Kind::kWithin && !(rule.seconds > 0);
      if (!in_steps || !makes_sense(rule, run_steps)) continue;
      for (const size_t k : kept_by(rule, then, run_steps)) stay.insert(k);
    }
    size_t candidate = 0;  // the first that is not proved yet
    while (candidate < end && complete[candidate]->step + proof <= complete[end - 1]->step) ++candidate;
    if (candidate > 0) stay.insert(candidate - 1);
    if (candidate < end) stay.insert(candidate);
    kept = std::max(kept, std::ssize(stay));
  }
  chance += 2;
  if (unbounded) return {kept, by_time ? -1 : count};
  const int64_t rules_keep = static_cast<int64_t>(certain.size());
  return {kept, by_time ? std::max(kept, bound + chance) : std::min(count, std::max(kept, rules_keep + chance))};
}

}  // namespace cairn::ckpt
