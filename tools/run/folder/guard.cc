#include "tools/run/folder/guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include "ckpt/retention/catalog.h"
#include "ckpt/store/io_backend.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/lineage.h"
#include "tools/run/folder/sample_order.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kMostDoublings = 20;  // of lead

fs::path pending_file(const fs::path& run) { return run / "rolling_back.json"; }
fs::path lowering_file(const fs::path& run) { return run / "lowering_lr.json"; }

/// Reads `file` by `from`; nullopt: it is missing. `advice`: what to do where it is damaged.
template <class T>
Result<std::optional<T>> pending(const fs::path& file, T (*from)(const json&), const char* advice) {
  const Result<std::string> text = read_text_file(file);
  if (!text.ok()) return ckpt::is_not_found(text.error()) ? Result(std::optional<T>()) : text.error();
  try {
    return std::optional(from(json_or_nothing(text.value())));
  } catch (const json::exception& wrong) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}; {}", file.string(), wrong.what(), advice)};
  }
}

const std::vector<GuardAction>& actions_of(const WatchConfig& watch, Trouble::Kind kind) {
  switch (kind) {
    case Trouble::Kind::kDivergence:
      return watch.on_divergence;
    case Trouble::Kind::kDrop:
      return watch.on_drop;
    case Trouble::Kind::kMachine:
      return watch.on_sdc;
    case Trouble::Kind::kNotFinite:
      break;
  }
  return watch.on_not_finite;
}

Result<std::vector<int64_t>> good_checkpoints(const fs::path& run) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, run / "checkpoints"));
  std::vector<int64_t> out;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints)
    if (info.complete && info.label == ckpt::Label::kGood) out.push_back(info.step);
  return out;
}

/// Into `out`, or why it cannot be done.
Status roll_back(const WatchConfig& watch, const Trouble& trouble, std::span<const RollBack> past,
                 std::span<const int64_t> good, const std::function<Result<int64_t>(int64_t)>& begin_of,
                 GuardDecision* out) {
  const RollBackConfig& rules = watch.roll_back;
  const int64_t tried = std::ranges::count_if(
      past, [&](const RollBack& one) { return std::abs(one.step - trouble.step) < rules.within; });
  if (tried >= rules.at_most) {
    out->no_way_back = fmt::format("rolled back {} within {} steps, as often as watch.roll_back allows",
                                   count_text(tried, "time"), rules.within);
    return {};
  }
  std::vector<int64_t> before(good.begin(), std::ranges::lower_bound(good, trouble.onset));
  if (before.empty()) {
    out->no_way_back = fmt::format("no good checkpoint from before step {}", trouble.onset);
    return {};
  }
  if (trouble.kind == Trouble::Kind::kMachine) {
    out->roll_back = {.to_step = before.back(), .onset = trouble.onset, .step = trouble.step, .why = trouble.why};
    for (const RollBack& one : past) out->roll_back.number += one.step == trouble.step && !one.leaves_out() ? 1 : 0;
    out->action = GuardAction::kRollBack;
    return {};
  }
  RT_TRY_SET(const int64_t place, begin_of(std::max<int64_t>(1, trouble.onset - watch.window)));
  RT_TRY_SET(const int64_t step_begin, begin_of(trouble.step));
  RT_TRY_SET(const int64_t end, begin_of(trouble.step + 1));
  RollBack& found = out->roll_back;
  found = {.onset = trouble.onset, .step = trouble.step, .why = trouble.why};
  for (const RollBack& one : past)
    found.number += one.leaves_out() && one.skip.first < end && one.skip.last >= place ? 1 : 0;
  found.to_step = before[static_cast<size_t>(std::max<int64_t>(0, std::ssize(before) - found.number))];
  const int64_t doubled = int64_t{1} << std::min<int64_t>(found.number - 1, kMostDoublings);
  const int64_t first = std::max(found.to_step + 1, trouble.onset - rules.lead * doubled);
  RT_TRY_SET(found.skip.first, begin_of(first));
  found.skip.last = end - 1 + (end - step_begin) * rules.lead * (doubled - 1);
  found.skip.last = std::min(found.skip.last, found.skip.first + SkippedPositions::kMost / 2);
  out->action = GuardAction::kRollBack;
  return {};
}

/// Into `out`, or why it cannot be done.
void lower_lr(const WatchConfig& watch, const Trouble& trouble, std::span<const Lowering> lowered, GuardDecision* out) {
  const LowerLrConfig& rules = watch.lower_lr;
  const int64_t tried = std::ranges::count_if(
      lowered, [&](const Lowering& one) { return one.onset > 0 && std::abs(one.step - trouble.step) < rules.within; });
  if (tried >= rules.at_most) {
    out->not_lowered = fmt::format("lowered {} within {} steps, as often as watch.lower_lr allows",
                                   count_text(tried, "time"), rules.within);
    return;
  }
  out->lowering = {.by = rules.by,
                   .over = rules.over,
                   .back = rules.back,
                   .onset = trouble.onset,
                   .step = trouble.step,
                   .why = trouble.why};
  out->action = GuardAction::kLowerLr;
}

}  // namespace

json to_json(const Lowering& lowering) {
  return {{"by", lowering.by},       {"over", lowering.over}, {"back", lowering.back},
          {"onset", lowering.onset}, {"step", lowering.step}, {"why", lowering.why}};
}

Lowering lowering_from(const json& fields) {
  return {.by = fields.at("by").get<double>(),
          .over = fields.at("over").get<int64_t>(),
          .back = fields.at("back").get<int64_t>(),
          .onset = fields.at("onset").get<int64_t>(),
          .step = fields.at("step").get<int64_t>(),
          .why = fields.at("why").get<std::string>()};
}

json to_json(const RollBack& roll_back) {
  json out{{"to_step", roll_back.to_step},
           {"onset", roll_back.onset},
           {"step", roll_back.step},
           {"number", roll_back.number},
           {"why", roll_back.why}};
  if (roll_back.leaves_out()) out["skip"] = to_text(roll_back.skip);
  return out;
}

RollBack roll_back_from(const json& fields) {
  RollBack out{.to_step = fields.at("to_step").get<int64_t>(),
               .onset = fields.at("onset").get<int64_t>(),
               .step = fields.at("step").get<int64_t>(),
               .number = fields.at("number").get<int64_t>(),
               .why = fields.at("why").get<std::string>()};
  if (!fields.contains("skip")) return out;
  const Result<PositionRange> skip = parse_positions(fields.at("skip").get<std::string>());
  if (!skip.ok()) throw json::other_error::create(501, skip.error().message, &fields);
  out.skip = skip.value();
  return out;
}

Result<GuardDecision> decide(const WatchConfig& watch, const Trouble& trouble, std::span<const RollBack> past,
                             std::span<const int64_t> good, const std::function<Result<int64_t>(int64_t)>& begin_of,
                             std::span<const Lowering> lowered) {
  GuardDecision out;
  for (const GuardAction action : actions_of(watch, trouble.kind)) {
    if (action == GuardAction::kStop) {
      out.action = action;
    } else if (action == GuardAction::kLowerLr) {
      lower_lr(watch, trouble, lowered, &out);
    } else {
      RT_TRY(roll_back(watch, trouble, past, good, begin_of, &out));
    }
    if (out.action) break;
  }
  return out;
}

Result<GuardDecision> decide_for(const fs::path& run, const WatchConfig& watch, const Trouble& trouble) {
  if (actions_of(watch, trouble.kind).empty()) return GuardDecision();
  RT_TRY_SET(const Lineage lineage, Lineage::read(run));
  std::vector<RollBack> past;
  std::vector<Lowering> lowered;
  for (const LineageEntry& entry : lineage.entries()) {
    if (entry.roll_back) past.push_back(*entry.roll_back);
    if (entry.lowering) lowered.push_back(*entry.lowering);
  }
  RT_TRY_SET(const std::vector<int64_t> good, good_checkpoints(run));
  RT_TRY_SET(const SampleOrder order, SampleOrder::of_run(run));
  return decide(
      watch, trouble, past, good, [&](int64_t step) { return order.begin_of(step); }, lowered);
}

Result<int64_t> good_before(const fs::path& run, int64_t step) {
  RT_TRY_SET(const std::vector<int64_t> good, good_checkpoints(run));
  const auto end = std::ranges::lower_bound(good, step);
  return end == good.begin() ? 0 : *(end - 1);
}

Result<std::optional<RollBack>> pending_roll_back(const fs::path& run) {
  return pending(pending_file(run), roll_back_from,
                 "a guard has decided to roll back, and this names the step: remove the file to resume from the newest "
                 "checkpoint, or name one with --from-step");
}

Result<std::optional<Lowering>> pending_lowering(const fs::path& run) {
  return pending(lowering_file(run), lowering_from,
                 "a guard has decided to lower the rate, and this says how: remove the file to resume with the rate as "
                 "it was");
}

Status write_pending(const fs::path& run, const Lowering& lowering) {
  return write_text_file(lowering_file(run), json_text(to_json(lowering)) + "\n");
}

Status write_pending(const fs::path& run, const RollBack& roll_back) {
  return write_text_file(pending_file(run), json_text(to_json(roll_back)) + "\n");
}

Status remove_pending(const fs::path& run) {
  for (const fs::path& file : {pending_file(run), lowering_file(run)}) {
    std::error_code error;
    fs::remove(file, error);
    if (error) return os_error(error.value(), file.string());
  }
  return {};
}

}  // namespace cairn::tools
