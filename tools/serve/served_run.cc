#include "tools/serve/served_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "ckpt/mirror/s3_sign.h"

namespace cairn::tools {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"main", "latest", "best", "good"};
constexpr size_t kCommitDigits = 40, kLeastDigits = 7;

std::optional<int64_t> step_number(std::string_view text) {
  if (text.starts_with("step-")) text.remove_prefix(5);
  int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool all = error == std::errc() && end == text.data() + text.size() && !text.empty() && text[0] != '-';
  return all ? std::optional(out) : std::nullopt;
}

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == text.npos; }

Error unknown(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

}  // namespace

bool is_moving_name(std::string_view revision) { return std::ranges::find(kNames, revision) != kNames.end(); }

Status ServedRun::look(ckpt::IoBackend& io) {
  const auto now = std::chrono::steady_clock::now();
  if (looked_.time_since_epoch().count() != 0 && now - looked_ < std::chrono::seconds(1)) return {};
  RT_TRY_SET(ckpt::Catalog catalog, ckpt::list_checkpoints(io, options_.checkpoints, &cache_));
  bad_.clear();
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.bad() && !options_.with_bad) bad_.push_back(info.step);
  }
  std::erase_if(catalog.checkpoints,
                [&](const ckpt::CheckpointInfo& info) { return !info.complete || (info.bad() && !options_.with_bad); });
  steps_ = std::move(catalog.checkpoints);
  looked_ = now;
  return {};
}

bool ServedRun::is_suspect(ckpt::IoBackend& io, int64_t step, int64_t created_unix_ms) {
  const auto now = std::chrono::steady_clock::now();
  if (labels_read_.time_since_epoch().count() == 0 || now - labels_read_ >= std::chrono::seconds(1)) {
    labels_read_ = now;
    if (Result<ckpt::Labels> labels = ckpt::read_labels(io, options_.checkpoints); labels.ok())
      labels_ = std::move(labels).value();
  }
  const ckpt::LabelEntry* const entry = ckpt::entry_of(labels_, step, created_unix_ms);
  return entry != nullptr && entry->label == ckpt::Label::kSuspect;
}

const ckpt::CheckpointInfo* ServedRun::named(std::string_view name) const {
  const ckpt::CheckpointInfo* out = nullptr;
  const bool valid =
      std::ranges::any_of(steps_, [](const auto& info) { return info.metric("valid_loss").has_value(); });
  const auto metric = [&](const ckpt::CheckpointInfo& info) { return info.metric(valid ? "valid_loss" : "loss"); };
  for (const ckpt::CheckpointInfo& info : steps_) {
    if (info.bad()) continue;
    if (name == "main" || name == "latest" || (name == "good" && info.label == ckpt::Label::kGood)) out = &info;
    if (name == "best" && metric(info) && (out == nullptr || *metric(info) <= *metric(*out))) out = &info;
  }
  return out;
}

Result<const ckpt::CheckpointInfo*> ServedRun::find(std::string_view revision, const ServedForm& form) const {
  if (is_moving_name(revision)) {
    if (const ckpt::CheckpointInfo* const step = named(revision); step != nullptr) return step;
    if (steps_.empty()) return unknown("no step is complete yet");
    return unknown(revision == "good" ? "no step is labelled good" : "no step has a loss");
  }
  if (const std::optional<int64_t> number = step_number(revision)) {
    const auto found = std::ranges::lower_bound(steps_, *number, {}, &ckpt::CheckpointInfo::step);
    if (found != steps_.end() && found->step == *number) return &*found;
    if (std::ranges::find(bad_, *number) != bad_.end())
      return unknown(fmt::format("step {} is labelled bad; --bad serves it", *number));
  }
  const ckpt::CheckpointInfo* out = nullptr;
  if (revision.size() >= kLeastDigits && revision.size() <= kCommitDigits && is_hex(revision)) {
    for (const ckpt::CheckpointInfo& info : steps_) {
      if (!commit(info, form).starts_with(revision)) continue;
      if (out != nullptr) return unknown("several commits begin so");
      out = &info;
    }
  }
  if (out != nullptr) return out;
  std::vector<int64_t> last;
  for (auto info = steps_.rbegin(); info != steps_.rend() && last.size() < 5; ++info) last.push_back(info->step);
  return unknown(fmt::format("no such revision; the newest steps are {}", fmt::join(last, ", ")));
}

std::string ServedRun::commit(const ckpt::CheckpointInfo& step, const ServedForm& form) const {
  const std::string text = fmt::format("cairn-view 1\n{}\n{}\n{}\n{}\n{}\n{}", step.run_id, step.step,
                                       step.created_unix_ms, form.dtype ? dtype_name(*form.dtype) : "own",
                                       static_cast<int>(form.weights), options_.max_shard_bytes);
  return ckpt::sha256_hex(std::as_bytes(std::span(text))).substr(0, kCommitDigits);
}

}  // namespace cairn::tools
