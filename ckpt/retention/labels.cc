#include "ckpt/retention/labels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array<std::string_view, 4> kNames{"new", "good", "suspect", "bad"};
constexpr int64_t kMostBytes = int64_t{64} << 20;
constexpr const char* kTemporary = "labels.json.tmp";

}  // namespace

std::string_view to_text(Label label) { return kNames[static_cast<size_t>(label)]; }

std::string_view to_text(StepAlarm::Kind kind) {
  switch (kind) {
    case StepAlarm::Kind::kOutlier:
      return "outlier";
    case StepAlarm::Kind::kDivergence:
      return "divergence";
    case StepAlarm::Kind::kDrop:
      return "drop";
    case StepAlarm::Kind::kLevelShift:
      break;
  }
  return "level_shift";
}

std::optional<Label> parse_label(std::string_view text) {
  for (size_t k = 0; k < kNames.size(); ++k) {
    if (kNames[k] == text) return static_cast<Label>(k);
  }
  return std::nullopt;
}

std::string encode_labels(const Labels& labels) {
  json steps = json::object();
  for (const auto& [step, entry] : labels) {
    json one{{"label", to_text(entry.label)},        {"why", entry.why}, {"proved_to", entry.proved_to},
             {"saved_unix_ms", entry.saved_unix_ms}, {"by", entry.by},   {"time", entry.time}};
    if (!entry.held.empty()) one["held"] = entry.held;
    steps[std::to_string(step)] = std::move(one);
  }
  return json_text(json{{"schema", 1}, {"steps", std::move(steps)}}, 1) + "\n";
}

Result<Labels> decode_labels(std::string_view text) {
  const auto wrong = [](const std::string& what) {
    return Error{ErrorCode::kCorrupt, what +
                                          ". It is left as it is: mend it, or move it away, and a start makes labels "
                                          "again from metrics.jsonl (labels by hand are in this file only)"};
  };
  const json file = json_or_nothing(text);
  if (!file.is_object()) return wrong("not a JSON object");
  if (!file.contains("schema") || file["schema"] != 1)
    return wrong("\"schema\" is not 1, the one that this build knows");
  if (!file.contains("steps") || !file["steps"].is_object()) return wrong("\"steps\" is not an object");
  Labels out;
  for (const auto& [key, value] : file["steps"].items()) {
    const bool digits = !key.empty() && key.size() < 19 && key.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || !value.is_object())
      return wrong(fmt::format("\"steps\" has \"{}\", expected a step and its label", key));
    LabelEntry entry;
    const auto field = [&](const char* name, auto& into, bool fits) {
      if (fits) into = value[name].get<std::decay_t<decltype(into)>>();
      return fits;
    };
    const auto has = [&](const char* name) { return value.contains(name); };
    std::string label;
    const char* bad = nullptr;
    if (!field("label", label, has("label") && value["label"].is_string()) || !parse_label(label)) bad = "label";
    if (!field("why", entry.why, has("why") && value["why"].is_string())) bad = "why";
    if (!field("proved_to", entry.proved_to, has("proved_to") && value["proved_to"].is_number_integer()))
      bad = "proved_to";
    if (!field("saved_unix_ms", entry.saved_unix_ms,
               has("saved_unix_ms") && value["saved_unix_ms"].is_number_integer()))
      bad = "saved_unix_ms";
    if (!field("by", entry.by, has("by") && value["by"].is_string())) bad = "by";
    if (!field("time", entry.time, has("time") && value["time"].is_number())) bad = "time";
    if (has("held") && !field("held", entry.held, value["held"].is_string())) bad = "held";
    if (bad != nullptr) return wrong(fmt::format("step {}: \"{}\" is missing or of the wrong kind", key, bad));
    entry.label = *parse_label(label);
    out[std::stoll(key)] = std::move(entry);
  }
  return out;
}

Result<Labels> read_labels(IoBackend& io, const fs::path& checkpoints_dir) {
  const fs::path path = checkpoints_dir / kLabelsName;
  const Result<std::string> text = read_file(io, path, kMostBytes);
  if (!text.ok() && is_not_found(text.error())) return Labels();
  if (!text.ok()) return text.error();
  return decode_labels(text.value()).with(path.string());
}

Result<Labels> labels_for_start(IoBackend& io, const fs::path& checkpoints_dir) {
  Result<Labels> labels = read_labels(io, checkpoints_dir);
  if (!labels.ok() && labels.error().code != ErrorCode::kCorrupt) return Labels();
  return labels;
}

Status write_labels(IoBackend& io, const fs::path& checkpoints_dir, const Labels& labels,
                    const std::function<Status()>& check_folder) {
  const fs::path temporary = checkpoints_dir / kTemporary;
  if (const Status removed = io.remove_file(temporary); !removed.ok() && !is_not_found(removed.error())) return removed;
  RT_TRY(write_file(io, temporary, encode_labels(labels)));
  // A folder that goes before this has the new file or not, and one that goes after it takes the new file along: then
  // there is nothing to rename.
  if (Status meant = check_folder ? check_folder() : Status(); !meant.ok()) {
    ignore(io.remove_file(temporary), "it is not there where the folder went after it was written");
    return meant;
  }
  RT_TRY(io.rename(temporary, checkpoints_dir / kLabelsName));
  return io.sync_dir(checkpoints_dir);
}

const LabelEntry* entry_of(const Labels& labels, int64_t step, int64_t saved_unix_ms) {
  const auto found = labels.find(step);
  return found != labels.end() && found->second.saved_unix_ms == saved_unix_ms ? &found->second : nullptr;
}

void merge_labels(const Labels& theirs, Labels& ours) {
  for (const auto& [step, entry] : theirs) {
    const auto [mine, added] = ours.try_emplace(step, entry);
    if (added) continue;
    const LabelEntry& here = mine->second;
    const bool same = here.saved_unix_ms == entry.saved_unix_ms;
    const bool theirs_wins = !same                                         ? entry.saved_unix_ms > here.saved_unix_ms
                             : (entry.by == "hand") != (here.by == "hand") ? entry.by == "hand"
                                                                           : entry.time > here.time;
    if (theirs_wins) mine->second = entry;
  }
}

std::vector<float> StepJudge::window_of(bool of_loss) const {
  std::vector<float> out;
  for (auto row = rows_.rbegin(); row != rows_.rend() && std::ssize(out) < rules_.window; ++row) {
    if (row->step < level_from_) break;
    if (of_loss ? row->loss_counts : row->norm_counts) out.push_back(of_loss ? row->loss : row->norm);
  }
  return out;
}

StepJudge::Row StepJudge::judge_row(const StepNumbers& numbers) const {
  return {telemetry::judge_step(rules_, numbers, window_of(true), window_of(false)), numbers.step, numbers.skipped,
          numbers.suspect_from, numbers.stays};
}

std::optional<StepAlarm> StepJudge::alarm() {
  Row& row = rows_.back();
  int64_t up = 0, down = 0, first_up = 0, first_down = 0, seen = 0;
  for (auto one = rows_.rbegin(); one != rows_.rend() && seen < kTroubleOf; ++one, ++seen) {
    if (one->step <= trouble_after_) break;
    if (one->upward) ++up, first_up = one->step;
    if (one->downward) ++down, first_down = one->step;
  }
  if (up + down == 0) {
    outliers_in_trouble_ = 0;
    divergence_raised_ = drop_raised_ = false;
    return std::nullopt;
  }
  if (!row.upward && !row.downward) return std::nullopt;
  ++outliers_in_trouble_;
  if (level_from_ == row.step + 1) return StepAlarm{StepAlarm::Kind::kLevelShift, row.step, row.step, row.why};
  if (up >= kTroubleSteps && !std::exchange(divergence_raised_, true)) {
    row.raised_divergence = true;
    return StepAlarm{StepAlarm::Kind::kDivergence, row.step, first_up, row.why};
  }
  if (down >= kTroubleSteps && !std::exchange(drop_raised_, true)) {
    row.raised_drop = true;
    return StepAlarm{StepAlarm::Kind::kDrop, row.step, first_down, row.why};
  }
  if (outliers_in_trouble_ > 3 && outliers_in_trouble_ % 10 != 0) return std::nullopt;
  return StepAlarm{StepAlarm::Kind::kOutlier, row.step, row.step, row.why};
}

std::optional<StepAlarm> StepJudge::add(const StepNumbers& numbers) {
  if (numbers.step <= last()) go_back(numbers.step - 1);
  if (numbers.step > rules_.level_after) level_from_ = std::max(level_from_, rules_.level_after + 1);
  Row row = judge_row(numbers);
  if (!row.without_loss()) outliers_in_row_ = row.outlier_in_row() ? outliers_in_row_ + 1 : 0;
  if (outliers_in_row_ >= std::max<int64_t>(1, rules_.window / 2)) {  // the level has moved
    level_from_ = numbers.step + 1;
    outliers_in_row_ = 0;
  }
  rows_.push_back(std::move(row));
  const int64_t kept = 2 * rules_.window + 4 * rules_.proof + 1024;  // enough for most ways back
  while (std::ssize(rows_) > kept) rows_.pop_front();
  return alarm();
}

void StepJudge::go_back(int64_t step) {
  while (!rows_.empty() && rows_.back().step > step) rows_.pop_back();
  last_ = step;
  recount();
  if (level_from_ > step + 1) level_from_ = 0;
  end_.reset();
}

void StepJudge::recount() {
  outliers_in_row_ = outliers_in_trouble_ = 0;
  divergence_raised_ = drop_raised_ = false;
  for (auto row = rows_.rbegin(); row != rows_.rend() && row->step >= level_from_; ++row) {
    if (row->without_loss()) continue;
    if (!row->outlier_in_row()) break;
    ++outliers_in_row_;
  }
  int64_t clean = 0;
  for (auto row = rows_.rbegin(); row != rows_.rend() && clean < kTroubleOf && row->step > trouble_after_; ++row) {
    const bool outlier = row->upward || row->downward;
    clean = outlier ? 0 : clean + 1;
    outliers_in_trouble_ += outlier ? 1 : 0;
    divergence_raised_ |= row->raised_divergence;
    drop_raised_ |= row->raised_drop;
  }
}

void StepJudge::set_end_loss(int64_t step, double loss) {
  const Row row = judge_row({step + 1, loss, std::nan("")});
  end_ = {step, row.upward ? row.why : ""};
}

std::optional<StepJudge::Onset> StepJudge::onset(int64_t of) const {
  std::optional<Onset> out;
  int64_t seen = 0;
  for (auto row = rows_.rbegin(); row != rows_.rend() && seen < of; ++row, ++seen) {
    if (row->harmful()) out = {row->step, row->above};
  }
  return out;
}

std::optional<StepJudge::Verdict> StepJudge::judge(int64_t step, int64_t run_steps) const {
  if (rows_.empty() || step > last() || step + rules_.proof < rows_.front().step) return std::nullopt;
  for (const Row& row : rows_) {
    if (row.suspect_from > 0 && step >= row.suspect_from && (step <= row.step || row.stays)) {
      return Verdict{Label::kSuspect,
                     fmt::format("step {} found an error of the machine, and none was found to be sound since step {}",
                                 row.step, row.suspect_from - 1),
                     row.step, true};
    }
  }
  // On both sides `proof` steps count, and one more for each that is passed over. A step that is not known counts not.
  int64_t before = 0, behind = 0, passed_before = 0, passed_behind = 0, seen_to = step;
  const Row* outlier = nullptr;  // the first one
  const auto next = std::ranges::upper_bound(rows_, step, {}, &Row::step);
  for (auto row = next; row != rows_.begin();) {
    --row;
    if (row->step <= step - rules_.proof - passed_before) break;
    ++(row->passed_over() ? passed_before : before);
    if (row->harmful() && row->step > step - rules_.proof) outlier = &*row;
  }
  for (auto row = next; row != rows_.end(); ++row) {
    if (row->step > step + rules_.proof + passed_behind) break;
    ++(row->passed_over() ? passed_behind : behind);
    if (row->harmful() && outlier == nullptr) outlier = &*row;
    seen_to = row->step;
  }
  if (outlier != nullptr) {
    return Verdict{Label::kSuspect, fmt::format("step {}: {}", outlier->step, outlier->why), outlier->step};
  }
  if (behind == rules_.proof) {
    return Verdict{Label::kGood, fmt::format("{} clean steps followed", behind), seen_to};
  }
  if (step == last() && step >= run_steps && before > 0 && before >= std::min(rules_.proof, step - passed_before)) {
    if (end_ && end_->first == step && !end_->second.empty())
      return Verdict{Label::kSuspect, "after the last update: " + end_->second, step};
    return Verdict{Label::kGood, fmt::format("ends the run, behind {} clean steps", before), step};
  }
  return Verdict{Label::kNew, "", seen_to};
}

bool judge_saves(const StepJudge& judge, const std::vector<std::pair<int64_t, int64_t>>& saves, int64_t run_steps,
                 double now, Labels& labels, const std::vector<int64_t>& unknown) {
  const Labels before = labels;
  std::erase_if(labels, [&](const auto& one) {
    return std::ranges::find(saves, std::pair(one.first, one.second.saved_unix_ms)) == saves.end() &&
           std::ranges::find(unknown, one.first) == unknown.end();
  });
  for (const auto& [step, saved_unix_ms] : saves) {
    LabelEntry& entry = labels[step];
    if (entry.by.empty()) entry = {.time = now, .by = "watch", .saved_unix_ms = saved_unix_ms};
    if (entry.by == "hand" || entry.label == Label::kBad) continue;
    const std::optional<StepJudge::Verdict> verdict = judge.judge(step, run_steps);
    if (!verdict || (entry.label == Label::kGood && !verdict->by_audit)) continue;
    if (verdict->label != entry.label) entry.time = now;
    entry.label = verdict->label;
    entry.why = verdict->why;
    entry.proved_to = verdict->proved_to;
  }
  return labels != before;
}

}  // namespace cairn::ckpt
