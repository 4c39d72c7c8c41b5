#include "tools/serve/opened_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ckpt/format/names.h"

namespace cairn::tools {

std::string OpenedStep::broken(const std::string& file) const {
  const std::lock_guard lock(mutex_);
  const auto found = broken_.find(file);
  return found == broken_.end() ? std::string() : found->second;
}

void OpenedStep::note_broken(const std::string& file, const std::string& why) {
  const std::lock_guard lock(mutex_);
  broken_[file] = why;
}

std::shared_ptr<OpenedStep> OpenedSteps::find(const std::string& id, const std::string& commit) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find({id, commit});
  if (found == entries_.end()) return nullptr;
  found->second.asked = Clock::now();
  return found->second.opened;
}

/// A place for one more: the one that was not asked for the longest goes, if no answer is read from it.
bool OpenedSteps::make_room() {
  const std::lock_guard lock(mutex_);
  while (std::ssize(entries_) >= options_.most_steps) {
    auto oldest = entries_.end();
    for (auto one = entries_.begin(); one != entries_.end(); ++one) {
      if (one->second.opened.use_count() > 1) continue;
      if (oldest == entries_.end() || one->second.asked < oldest->second.asked) oldest = one;
    }
    if (oldest == entries_.end()) return false;
    entries_.erase(oldest);
  }
  return true;
}

std::shared_ptr<ckpt::Pin> OpenedSteps::pin(const ServedRun& run, int64_t step) {
  std::weak_ptr<ckpt::Pin>& kept = pins_[run.checkpoints() / ckpt::step_dir_name(step)];
  if (std::shared_ptr<ckpt::Pin> there = kept.lock()) return there;
  Result<std::unique_ptr<ckpt::Pin>> made = ckpt::Pin::make(io_, run.checkpoints(), step, options_.reader());
  if (!made.ok()) {
    if (unpinned_.insert(run.name()).second) {
      options_.warning(fmt::format("{}: its steps are not pinned, retention may remove one while it is read: {}",
                                   run.name(), made.error().message));
    }
    return nullptr;
  }
  std::shared_ptr<ckpt::Pin> out = std::move(made).value();
  kept = out;
  return out;
}

Result<std::shared_ptr<OpenedStep>> OpenedSteps::open(const ServedRun& run, const ckpt::CheckpointInfo& step,
                                                      const ServedForm& form) {
  const std::string commit = run.commit(step, form);
  const std::lock_guard opening(opening_);
  if (std::shared_ptr<OpenedStep> there = find(run.name() + form.name, commit)) return there;
  if (!make_room()) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{} steps are being read, and no more are open at once; try again", options_.most_steps)};
  }
  auto out = std::make_shared<OpenedStep>();
  out->commit = commit;
  out->step = step.step;
  out->created_unix_ms = step.created_unix_ms;
  out->id = run.name() + form.name;
  out->pin = pin(run, step.step);
  // It may have gone before the pin was made.
  const ckpt::CheckpointInfo now = ckpt::look_at_checkpoint(io_, run.checkpoints(), step.step);
  if (!now.complete || now.created_unix_ms != step.created_unix_ms || now.run_id != step.run_id) {
    return Error{ErrorCode::kUnavailable, fmt::format("step {} was removed or saved anew just now", step.step)};
  }
  convert::HfViewOptions options{.of = {.dtype = form.dtype, .weights = form.weights}, .readers = options_.readers};
  options.of.max_shard_bytes = run.max_shard_bytes();
  options.of.without_tokenizer = options_.without_tokenizer;
  options.of.trained_tokenizer = [&](const ckpt::Manifest& manifest) {
    return options_.trained_tokenizer(now.dir, manifest);
  };
  Result<std::unique_ptr<convert::HfView>> view =
      convert::HfView::open(io_, now.dir, run.name(), options, options_.decode);
  if (!view.ok()) return std::move(view).error();
  for (const std::string& warning : view.value()->warnings())
    options_.warning(fmt::format("{}: step {}: {}", run.name(), step.step, warning));
  out->view = std::move(view).value();
  const std::lock_guard lock(mutex_);
  entries_[{out->id, commit}] = {out, Clock::now()};
  return out;
}

std::vector<std::shared_ptr<OpenedStep>> OpenedSteps::close_idle() {
  std::vector<std::shared_ptr<OpenedStep>> out;
  const auto since = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.keep_s));
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](auto& one) {
    if (one.second.opened.use_count() > 1 || Clock::now() - one.second.asked < since) return false;
    out.push_back(std::move(one.second.opened));
    return true;
  });
  return out;
}

}  // namespace cairn::tools
