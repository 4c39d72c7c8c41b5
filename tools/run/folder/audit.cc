#include "tools/run/folder/audit.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/file.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/diff.h"
#include "dsl/change_rules.h"
#include "dsl/recipe_lua.h"
#include "runtime/agent/child_process.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/metrics.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/json_lines.h"
#include "tools/run/folder/sample_order.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kDiffMemory = 256 << 20;
constexpr const char* kLock = "audit.lock";  // held by the audit; it says that the folder is one's

Error refused(std::string text) { return {ErrorCode::kInvalidInput, std::move(text)}; }

/// The last one that begins at `step` or before; null: none does.
template <typename One, typename Begin>
const One* behind(std::span<const One> all, int64_t step, Begin begin) {
  const One* out = nullptr;
  for (const One& one : all) {
    if (begin(one) <= step) out = &one;
  }
  return out;
}

Result<std::vector<int64_t>> saved_steps(const fs::path& run) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, run / "checkpoints"));
  std::vector<int64_t> out;
  for (const ckpt::CheckpointInfo& one : catalog.checkpoints) {
    if (one.complete) out.push_back(one.step);
  }
  return out;
}

/// Without all that changes no step and costs time, space or another place's contents.
Recipe quiet(Recipe recipe) {
  recipe.checkpoint = {.snapshot_steps = 0, .direct_io = recipe.checkpoint.direct_io};
  recipe.checkpoint.keep = {{.kind = Keep::Kind::kLast, .count = 2}};
  recipe.eval = {.steps = recipe.eval.steps};
  recipe.watch.early_stop = {};
  recipe.log.tensorboard = false;
  recipe.log.trackers.clear();
  recipe.hooks.clear();
  recipe.restart.max_restarts = 0;
  recipe.watch.on_divergence.clear();
  recipe.watch.on_drop.clear();
  recipe.watch.on_not_finite.clear();
  recipe.watch.on_sdc.clear();
  return recipe;
}

/// The run's checkpoint as one of the scratch folder, which is empty: links where the file system has them. Beside it
/// the choices that decide bits on a device.
Status take_checkpoint(const fs::path& run, const fs::path& scratch, int64_t step) {
  std::error_code failed;
  fs::create_directories(scratch / "checkpoints", failed);
  if (failed) return os_error(failed.value(), scratch.string());
  for (const char* name : {"tuning.json", "attention", "device"}) {
    if (is_gone(run / name)) continue;
    RT_TRY_SET(const std::string text, read_text_file(run / name));
    RT_TRY(write_text_file(scratch / name, text));
  }
  if (step == 0) return {};
  const fs::path from = run / "checkpoints" / ckpt::step_dir_name(step);
  const fs::path to = scratch / "checkpoints" / ckpt::step_dir_name(step);
  fs::copy(from, to, fs::copy_options::recursive | fs::copy_options::create_hard_links, failed);
  if (!failed) return {};
  fs::remove_all(to, failed);
  fs::copy(from, to, fs::copy_options::recursive, failed);
  if (failed && is_gone(from)) return removed_meanwhile(from);
  return failed ? os_error(failed.value(), to.string()) : Status();
}

/// Refuses a --set on which the run's steps depend.
Status check_sets(std::span<const std::string> sets) {
  constexpr std::string_view kOurs[] = {"data", "checkpoint", "init", "eval", "log", "watch"};
  for (const std::string& one : sets) {
    const std::string field = one.substr(0, one.find_first_of("=-"));
    const std::string_view block = std::string_view(field).substr(0, field.find('.'));
    const dsl::ChangeRule* const rule = dsl::find_change_rule(field);
    if (rule != nullptr && rule->change == dsl::ChangeClass::kExact &&
        std::ranges::find(kOurs, block) == std::end(kOurs))
      continue;
    return refused(
        fmt::format("--set {}: the steps are trained as the run trained them; expected a field of another "
                    "layout of the same training, as mesh.tp, schedule or optimizer.zero",
                    one));
  }
  return {};
}

class Auditor {
 public:
  Auditor(const fs::path& run, const AuditScratch& scratch, const AuditOptions& options)
      : run_(run), scratch_(scratch), options_(options) {}

  Result<std::vector<AuditedLeg>> work();

 private:
  Status check_told() const;
  Status check_data(const AuditLeg& leg) const;
  Status train(const AuditLeg& leg);
  Status check_layout(const AuditLeg& leg, const Recipe& recipe) const;
  Result<AuditedLeg> compare(const AuditLeg& leg) const;
  Status compare_steps(AuditedLeg& out) const;
  Status compare_checkpoints(AuditedLeg& out) const;

  const fs::path& run_;
  const AuditScratch& scratch_;
  const AuditOptions& options_;
  std::vector<telemetry::StepMetrics> told_;
};

Status Auditor::train(const AuditLeg& leg) {
  RT_TRY_SET(const Recipe recipe, recipe_of_segment(run_, leg.segment));
  const fs::path file = scratch_.path() / "audit.lua";
  RT_TRY(write_text_file(file, dsl::recipe_lua(quiet(recipe))));
  agent::ChildSpec spec{.argv = {options_.program, "train", file.string(), "--run", scratch_.path().string(),
                                 "--stop-at", std::to_string(leg.to), "--nproc", std::to_string(leg.layout.world)},
                        .log_path = (scratch_.path() / "train.log").string()};
  const auto add = [&](const std::string& option, const std::string& value) {
    spec.argv.insert(spec.argv.end(), {option, value});
  };
  if (!leg.layout.isa.empty()) add("--isa", leg.layout.isa);
  for (const std::string& set : options_.sets) add("--set", set);
  std::set<std::string> accepted(leg.segment.accepted.begin(), leg.segment.accepted.end());
  // A stage of the run is an edit of the recipe here, and what a stage says needs no --accept. The data are the run's:
  // check_data().
  for (const json& change : leg.segment.changes) accepted.insert(json_string(change, "field"));
  if (leg.segment.cause == "stage") accepted.insert("optimizer.lr");
  for (const std::string& field : accepted) add("--accept", field);
  spec.argv.insert(spec.argv.end(), options_.train_more.begin(), options_.train_more.end());
  RT_TRY_SET(const agent::ChildProcess child, agent::start_child(spec));
  std::optional<agent::ExitStatus> ended;
  while (!ended) {
    pollfd end{.fd = child.pidfd.get(), .events = POLLIN, .revents = 0};
    if (::poll(&end, 1, -1) < 0 && errno != EINTR) return os_error(errno, "poll");
    RT_TRY_SET(ended, agent::reap_child(child));
  }
  if (ended->ok()) return check_layout(leg, recipe);
  return Error{
      ended->exit_code == 2 ? ErrorCode::kInvalidInput : ErrorCode::kUnavailable,
      fmt::format("training steps {} to {} again in {} {}:\n  {}", leg.from + 1, leg.to, scratch_.path().string(),
                  agent::describe(*ended), fmt::join(agent::log_tail(child, 12), "\n  "))};
}

/// Refuses a layout in which equal computations have other bits.
Status Auditor::check_layout(const AuditLeg& leg, const Recipe& recipe) const {
  const std::vector<RankLayout> here = rank_layouts(json_lines(scratch_.path() / "events.jsonl"));
  if (here.empty()) return Error{ErrorCode::kInternal, scratch_.path().string() + ": events.jsonl has no start"};
  if (recipe.deterministic == Deterministic::kLayout || here.back().mesh == leg.layout.mesh) return {};
  return refused(
      fmt::format("steps {} to {} were trained as {}, and would be trained again as {}: with deterministic = "
                  "\"run\" only the same layout repeats the bits; say the run's by --set mesh.FIELD=N",
                  leg.from + 1, leg.to, leg.layout.mesh, here.back().mesh));
}

Status Auditor::compare_steps(AuditedLeg& out) const {
  RT_TRY_SET(const std::vector<telemetry::StepMetrics> again,
             telemetry::read_metrics(scratch_.path() / "metrics.jsonl"));
  size_t at = 0;
  for (const telemetry::StepMetrics& one : told_) {
    if (one.step <= out.leg.from || one.step > out.leg.to) continue;
    while (at < again.size() && again[at].step < one.step) ++at;
    if (at == again.size() || again[at].step != one.step) continue;
    const telemetry::StepMetrics& here = again[at];
    ++out.steps;
    for (const auto& [field, in_run, now] :
         {std::tuple("loss", one.loss, here.loss), std::tuple("grad_norm", one.grad_norm, here.grad_norm),
          std::tuple("lr", one.lr, here.lr),
          std::tuple("samples", static_cast<double>(one.samples), static_cast<double>(here.samples)),
          std::tuple("tokens", static_cast<double>(one.tokens), static_cast<double>(here.tokens))}) {
      if (std::bit_cast<uint64_t>(in_run) == std::bit_cast<uint64_t>(now)) continue;
      ++out.differing;
      if (!out.first) out.first = AuditedLeg::Difference{one.step, field, in_run, now};
      break;
    }
  }
  return {};
}

Status Auditor::compare_checkpoints(AuditedLeg& out) const {
  const std::string name = ckpt::step_dir_name(out.leg.to);
  const fs::path theirs = run_ / "checkpoints" / name, ours = scratch_.path() / "checkpoints" / name;
  const std::unique_ptr<ckpt::IoBackend> left_io = ckpt::make_best_backend(), right_io = ckpt::make_best_backend();
  if (is_gone(theirs)) return {};  // the run's own retention
  RT_TRY_SET(ckpt::CheckpointReader left, ckpt::CheckpointReader::open(*left_io, theirs, {}));
  RT_TRY_SET(ckpt::CheckpointReader right, ckpt::CheckpointReader::open(*right_io, ours, {}));
  RT_TRY_SET(const std::vector<ckpt::TensorDiff> tensors,
             ckpt::diff_tensors(left, right, {.stream = {.memory_bytes = kDiffMemory / 2, .ahead = true}}));
  out.tensors_in_all = std::ssize(tensors);
  out.tensors = std::ranges::count_if(
      tensors, [](const ckpt::TensorDiff& one) { return one.what != ckpt::TensorDiff::What::kEqual; });
  return {};
}

Result<AuditedLeg> Auditor::compare(const AuditLeg& leg) const {
  AuditedLeg out{.leg = leg};
  RT_TRY(compare_steps(out));
  if (leg.to_saved) RT_TRY(compare_checkpoints(out));
  if (out.steps == 0 && !out.tensors)
    return refused(fmt::format("{}: metrics.jsonl has none of steps {} to {}", run_.string(), leg.from + 1, leg.to));
  return out;
}

/// Refuses steps that metrics.jsonl lacks.
Status Auditor::check_told() const {
  auto at = std::ranges::lower_bound(told_, options_.first, {}, &telemetry::StepMetrics::step);
  for (int64_t step = options_.first; step <= options_.last; ++step, ++at) {
    if (at == told_.end() || at->step != step)
      return refused(
          fmt::format("{}: metrics.jsonl has no line of step {}, which cannot be compared", run_.string(), step));
  }
  return {};
}

/// Refuses data that are no longer those which trained the leg.
Status Auditor::check_data(const AuditLeg& leg) const {
  RT_TRY_SET(const SampleOrder order, SampleOrder::of_run(run_));
  return order.visit(leg.from + 1, leg.from + 1, [](const OrderedStep&) { return Status(); });
}

Result<std::vector<AuditedLeg>> Auditor::work() {
  RT_TRY(check_sets(options_.sets));
  RT_TRY_SET(told_, telemetry::read_metrics(run_ / "metrics.jsonl"));
  const int64_t last_told = told_.empty() ? 0 : told_.back().step;
  if (options_.last > last_told)
    return refused(
        fmt::format("step {} is asked for, and the last one of {} is {}", options_.last, run_.string(), last_told));
  RT_TRY(check_told());
  RT_TRY_SET(const Lineage lineage, Lineage::read(run_));
  if (!lineage.problem().empty()) return Error{ErrorCode::kCorrupt, lineage.problem()};
  RT_TRY_SET(const std::vector<int64_t> saved, saved_steps(run_));
  RT_TRY_SET(const std::vector<AuditLeg> legs, audit_legs(options_.first, options_.last, saved, lineage.segments(),
                                                          rank_layouts(json_lines(run_ / "events.jsonl"))));
  for (size_t k = 0; k < legs.size(); ++k) {
    if (k == 0 || legs[k].segment.n != legs[k - 1].segment.n) RT_TRY(check_data(legs[k]));
  }
  std::vector<AuditedLeg> out;
  for (const AuditLeg& leg : legs) {
    options_.begins(leg);
    const bool goes_on = !out.empty() && out.back().equal();
    if (!goes_on) {
      if (!out.empty() && !leg.from_saved) break;  // where it would begin is not the run's
      RT_TRY(scratch_.empty());
      RT_TRY(take_checkpoint(run_, scratch_.path(), leg.from));
    }
    RT_TRY(train(leg));
    RT_TRY_SET(AuditedLeg audited, compare(leg));
    options_.told(audited);
    out.push_back(std::move(audited));
  }
  return out;
}

}  // namespace

std::vector<RankLayout> rank_layouts(std::span<const json> events) {
  std::vector<RankLayout> out;
  for (const json& event : events) {
    if (json_string(event, "event") != "start") continue;
    const auto number = [&](const char* key) -> int64_t {
      return event.contains(key) && event[key].is_number_integer() ? event[key].get<int64_t>() : 0;
    };
    RankLayout one{.from = number("step"),
                   .world = number("world"),
                   .mesh = json_string(event, "mesh"),
                   .isa = json_string(event, "isa")};
    while (!out.empty() && out.back().from >= one.from) out.pop_back();
    if (out.empty() || !out.back().same(one)) out.push_back(std::move(one));
  }
  return out;
}

Result<std::vector<AuditLeg>> audit_legs(int64_t first, int64_t last, std::span<const int64_t> saved,
                                         std::span<const LineageEntry> segments, std::span<const RankLayout> layouts) {
  const auto begin_saved = std::ranges::lower_bound(saved, first);
  int64_t from = begin_saved == saved.begin() ? 0 : *std::prev(begin_saved);
  if (from == 0 && (segments.empty() || segments.front().at.step > 0 || segments.front().cause == "init_from" ||
                    !segments.front().from.empty())) {
    return refused(
        fmt::format("no checkpoint before step {} is left, and this run did not begin with weights of its "
                    "own; the first checkpoint is {}",
                    first, saved.empty() ? "not there yet" : fmt::format("of step {}", saved.front())));
  }
  std::set<int64_t> ends{last};
  const auto cut = [&](int64_t step) {
    if (step > from && step < last) ends.insert(step);
  };
  for (const int64_t step : saved) cut(step);
  for (const LineageEntry& one : segments) cut(one.at.step);
  for (const RankLayout& one : layouts) cut(one.from);
  std::vector<AuditLeg> out;
  const auto is_saved = [&](int64_t step) { return std::ranges::binary_search(saved, step); };
  for (const int64_t to : ends) {
    const LineageEntry* const segment = behind(segments, from, [](const LineageEntry& one) { return one.at.step; });
    const RankLayout* const layout = behind(layouts, from, [](const RankLayout& one) { return one.from; });
    if (segment == nullptr || layout == nullptr || layout->world == 0) {
      return refused(fmt::format("how step {} was trained is not known: its start is not in {}", from + 1,
                                 segment == nullptr ? "lineage.jsonl" : "events.jsonl"));
    }
    out.push_back({.from = from,
                   .to = to,
                   .segment = *segment,
                   .layout = *layout,
                   .from_saved = from == 0 || is_saved(from),
                   .to_saved = is_saved(to)});
    from = to;
  }
  return out;
}

Result<AuditScratch> AuditScratch::take(const fs::path& path, const fs::path& run) {
  std::error_code failed;
  const auto whole = [&](const fs::path& one) {
    const fs::path out = fs::weakly_canonical(one, failed);
    return out.has_filename() ? out : out.parent_path();  // of "runs/"
  };
  const fs::path ours = whole(path), theirs = whole(run);
  const auto is_in = [](const fs::path& inner, const fs::path& outer) {
    return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
  };
  if (is_in(theirs, ours) || is_in(ours, theirs / "checkpoints")) {
    return refused(fmt::format(
        "{}: the run itself, its checkpoints or what lies around them; its contents would be lost", path.string()));
  }
  const fs::path lock = path / kLock;
  const bool left = fs::is_regular_file(fs::symlink_status(lock, failed));
  if (!left && !is_gone(path) && (!fs::is_directory(path, failed) || !fs::is_empty(path, failed)))
    return refused(fmt::format("{}: not empty, and no audit's; its contents would be lost", path.string()));
  fs::create_directories(path, failed);
  if (failed) return os_error(failed.value(), path.string());
  AuditScratch out;
  out.path_ = path;
  RT_TRY_SET(out.lock_, open_own(lock, O_RDWR, 0644));
  if (::flock(out.lock_.get(), LOCK_EX | LOCK_NB) != 0)
    return Error{ErrorCode::kUnavailable, fmt::format("{}: another audit is at work there", path.string())};
  RT_TRY(out.empty());
  return out;
}

Status AuditScratch::empty() const {
  if (const std::string dead = run_id_of(path_); !dead.empty()) {
    RT_TRY_SET(std::optional<ckpt::Arena> memory, ckpt::Arena::adopt(dead));
    if (memory) ignore(memory->remove(), "the next run reaps it");
  }
  std::error_code failed;
  for (const fs::directory_entry& one : fs::directory_iterator(path_, failed)) {
    if (one.path().filename() != kLock) fs::remove_all(one.path(), failed);
    if (failed) break;
  }
  return failed ? os_error(failed.value(), path_.string()) : Status();
}

Status AuditScratch::remove() {
  RT_TRY(empty());
  std::error_code failed;
  fs::remove_all(path_, failed);
  return failed ? os_error(failed.value(), path_.string()) : Status();
}

Result<std::vector<AuditedLeg>> audit(const fs::path& run, const AuditScratch& scratch, const AuditOptions& options) {
  return Auditor(run, scratch, options).work();
}

}  // namespace cairn::tools
