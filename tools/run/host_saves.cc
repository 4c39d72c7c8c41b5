#include "tools/run/host_saves.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/persist/commit.h"
#include "ckpt/persist/part_set_file.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/json/json.h"
#include "tools/run/host_wire.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::chrono::milliseconds kLook{100};  // at least so often a save that is given up is seen
// From the leader's word to this host's promise: its ranks are at most a step behind.
constexpr int64_t kPatienceNs = 60'000'000'000;
constexpr size_t kMostNamed = 8;  // hosts, in a text

double seconds_between(int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e9; }

/// For what follows the own part.
double patience_after(double wrote_s, const SaveLimits& limits) { return std::max(limits.parts, 4 * wrote_s); }

bool given_up(const ckpt::SaveOptions& options) {
  return options.cancel != nullptr && options.cancel->load(std::memory_order_acquire);
}

int64_t payload_bytes_of(const ckpt::Manifest& skeleton) {
  int64_t bytes = 0;
  for (const ckpt::TensorEntry& tensor : skeleton.tensors)
    bytes += Box::whole(tensor.shape).count_elems() * dtype_size_bytes(tensor.dtype);
  return bytes;
}

Error given_up_error() { return {ErrorCode::kStopped, "the save was given up"}; }

Error stopped_too_early() {
  return {ErrorCode::kUnavailable, "the ranks were stopped before all hosts had it in memory"};
}

std::vector<hosts::Ward> wards_to_wire(const std::vector<Ward>& wards) {
  std::vector<hosts::Ward> out;
  for (const Ward& ward : wards) out.push_back({ward.host, ward.holder, to_wire(ward.slot)});
  return out;
}

/// Who wrote the step, in its manifest.
void put_hosts(const std::map<int64_t, std::string>& others, int64_t epoch, ckpt::Manifest& manifest) {
  json extra = json_or_nothing(manifest.extra);
  if (!extra.is_object()) extra = json::object();
  json names = json::array({manifest.writer.host});
  for (const auto& [host, name] : others) names.push_back(name);
  extra["hosts"] = std::move(names);
  extra["epoch"] = epoch;
  manifest.extra = json_text(extra);
}

}  // namespace

const Clock& clock_of_saves() {
  static const SystemClock clock;
  return clock;
}

// --- leader --------------------------------------------------------------------------------------------------------

void LeaderSaves::set_hosts(std::map<int64_t, std::string> hosts, int64_t epoch, std::set<int64_t> away) {
  const std::lock_guard lock(mutex_);
  hosts_ = std::move(hosts);
  epoch_ = epoch;
  away_ = std::move(away);
  changed_.notify_all();
}

bool LeaderSaves::has_ward(int64_t host, int64_t step) const {
  return std::ranges::any_of(wards_, [&](const Ward& ward) { return ward.host == host && ward.slot.step == step; });
}

LeaderSaves::Owes LeaderSaves::owes(int64_t host, int64_t step, const Save& save) const {
  if (!save.all_hear) return away_.contains(host) && !has_ward(host, step) ? Owes::kToBeThere : Owes::kNothing;
  if (!save.others.contains(host) || save.written.contains(host)) return Owes::kNothing;
  const bool is_ward = std::ranges::find(save.wards, host, &Ward::host) != save.wards.end();
  return save.begun.contains(host) || is_ward ? Owes::kItsPart : Owes::kToBegin;
}

std::string LeaderSaves::waits_for(int64_t step) const {
  const std::lock_guard lock(mutex_);
  const auto save = saves_.find(step);
  if (save == saves_.end()) return {};
  std::vector<std::string> out;
  size_t more = 0;
  for (const auto& [host, name] : hosts_) {
    const Owes what = owes(host, step, save->second);
    if (what == Owes::kNothing || (what == Owes::kItsPart && save->second.written_ns == 0)) continue;
    const char* const words = what == Owes::kToBeThere ? "is away"
                              : what == Owes::kToBegin ? "has not begun"
                                                       : "writes its part";
    if (out.size() < kMostNamed) {
      out.push_back(fmt::format("{} ({})", name, words));
    } else {
      ++more;
    }
  }
  return fmt::format("{}{}", fmt::join(out, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

/// With the lock held, which is free meanwhile. From its end on lost() counts for this save.
Status LeaderSaves::wait_until_all_hear(std::unique_lock<std::mutex>& lock, int64_t step,
                                        const ckpt::SaveOptions& options) {
  const int64_t since_ns = clock_.now_ns();
  for (;;) {
    Save& save = saves_[step];
    if (save.error) return *save.error;
    const auto away = std::ranges::find_if(
        hosts_, [&](const auto& host) { return owes(host.first, step, save) == Owes::kToBeThere; });
    if (away == hosts_.end()) {
      save.all_hear = true;
      return {};
    }
    if (settled_) {
      return Error{ErrorCode::kUnavailable,
                   fmt::format("{} is away: what its memory holds cannot be saved", away->second)};
    }
    if (given_up(options)) return given_up_error();
    if (seconds_between(since_ns, clock_.now_ns()) >= limits_.away)
      return Error{ErrorCode::kTimeout, fmt::format("{} has been away for {:.0f} s", away->second, limits_.away)};
    changed_.wait_for(lock, kLook);
  }
}

/// The error of a save whose own part is written.
std::optional<Error> LeaderSaves::late(int64_t step, const Save& save) const {
  const int64_t now_ns = clock_.now_ns();
  const double patience_s = patience_after(seconds_between(save.told_ns, save.written_ns), limits_);
  for (const auto& [host, name] : save.others) {
    const Owes what = owes(host, step, save);
    if (what == Owes::kToBegin && seconds_between(save.told_ns, now_ns) >= limits_.begin) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("{} has not begun in {:.0f} s", name, seconds_between(save.told_ns, now_ns))};
    }
    if (what == Owes::kItsPart && seconds_between(save.written_ns, now_ns) >= patience_s) {
      return Error{ErrorCode::kTimeout, fmt::format("{} has not written its part, {:.0f} s after the leader", name,
                                                    seconds_between(save.written_ns, now_ns))};
    }
  }
  return std::nullopt;
}

Status LeaderSaves::wait_for_parts(int64_t step, const ckpt::SaveOptions& options) {
  std::unique_lock lock(mutex_);
  Save& save = saves_[step];
  save.written_ns = clock_.now_ns();
  const auto is_written = [&](const auto& host) { return save.written.contains(host.first); };
  for (;;) {
    if (!save.error) save.error = late(step, save);
    if (save.error) return *save.error;
    if (std::ranges::all_of(save.others, is_written)) return {};
    if (given_up(options)) return given_up_error();
    changed_.wait_for(lock, kLook);
  }
}

Result<ckpt::SaveReport> LeaderSaves::save(ckpt::IoBackend& io, const fs::path& checkpoints_dir,
                                           ckpt::Manifest skeleton, std::span<const ckpt::WriterPart> parts,
                                           const ckpt::SaveOptions& options) {
  const int64_t begin_ns = clock_.now_ns(), step = skeleton.step;
  std::map<int64_t, std::string> hosts;
  int64_t number = 0, epoch = 0, own = -1;
  std::vector<Ward> wards;
  WriteWard write_ward;
  std::map<int64_t, std::string> others;  // Save::others
  std::optional<ckpt::WholeSlot> whole;   // on all hosts, which do not know that it is saved
  const auto begins = [&]() -> Status {
    std::unique_lock lock(mutex_);
    number = ++tries_;
    saves_[step] = {.number = number};
    RT_TRY(wait_until_all_hear(lock, step, options));
    if (settled_) {
      const auto common = std::ranges::find(*settled_, step, &ckpt::WholeSlot::step);
      if (common == settled_->end()) return stopped_too_early();
      whole = *common;
    }
    Save& save = saves_[step];
    save.others = hosts = hosts_;
    epoch = epoch_;
    for (const Ward& ward : wards_) {
      if (ward.slot.step == step) save.wards.push_back(ward);
    }
    wards = save.wards;
    write_ward = write_ward_;
    own = own_;
    for (const Ward& ward : wards) {
      if (ward.holder == own) save.others.erase(ward.host);
    }
    others = save.others;
    return {};
  };
  if (Status all = begins(); !all.ok()) {
    const std::lock_guard lock(mutex_);
    saves_.erase(step);
    return std::move(all).error();
  }
  bool told = false;
  auto attempt = [&]() -> Result<ckpt::SaveReport> {
    if (options.check_folder) RT_TRY(options.check_folder());
    RT_TRY_SET(const bool replaces, ckpt::check_existing(io, checkpoints_dir, step, options));
    const int64_t needed = payload_bytes_of(skeleton);
    RT_TRY_SET(const int64_t free, io.free_bytes(checkpoints_dir));
    if (free < needed) {
      return Error{ErrorCode::kNoSpace, fmt::format("{}: {} bytes free, step {} needs {}: {} are missing",
                                                    checkpoints_dir.string(), free, step, needed, needed - free)};
    }
    const ckpt::WriterId writer = options.writer ? *options.writer : ckpt::this_writer();
    ckpt::put_writer(writer, skeleton);
    const std::string folder = ckpt::work_dir_name(ckpt::kTmpPrefix, step, writer);
    ckpt::WorkFolder work(io, checkpoints_dir / folder, step, options.spares);
    RT_TRY(io.make_dir(work.path()));
    told = true;
    {
      const std::lock_guard lock(mutex_);
      saves_[step].told_ns = clock_.now_ns();
    }
    tell_(hosts::Save{step, number, folder, wards_to_wire(wards)});
    if (whole) tell_(hosts::Promise{to_wire(*whole)});
    std::vector<ckpt::PartSet> sets;
    const auto add = [&](Result<ckpt::PartSet> set) -> Status {
      if (!set.ok()) return work.abandon(std::move(set).error());
      sets.push_back(std::move(set).value());
      return {};
    };
    RT_TRY(add(ckpt::write_parts(io, work.path(), skeleton, parts, options)));
    for (const Ward& ward : wards) {
      if (ward.holder == own) RT_TRY(add(write_ward(ward, io, work.path())));
    }
    if (Status all = wait_for_parts(step, options); !all.ok()) return work.abandon(std::move(all).error());
    for (const auto& [host, name] : others) {
      Result<ckpt::PartSet> set = ckpt::read_part_set(io, work.path(), host);
      Status taken = set.ok() ? io.remove_file(work.path() / ckpt::part_set_name(host)) : Status(set.error());
      if (!taken.ok()) return work.abandon(std::move(taken).error().with(name));
      sets.push_back(std::move(set).value());
    }
    ckpt::SaveReport report;
    for (const ckpt::PartSet& set : sets) {
      report.payload_bytes += set.stats.payload_bytes;
      report.file_bytes += set.stats.file_bytes;
    }
    report.reused_files = sets.front().stats.reused_files;
    put_hosts(hosts, epoch, skeleton);
    RT_TRY_SET(ckpt::CommitReport committed, ckpt::commit_step(io, work, std::move(skeleton), sets, replaces, options));
    report.dir = std::move(committed.dir);
    report.manifest = std::move(committed.manifest);
    report.replaced = committed.replaced;
    report.remove_seconds = committed.remove_seconds;
    report.leftover = std::move(committed.leftover);
    report.seconds = seconds_between(begin_ns, clock_.now_ns());
    return report;
  };
  Result<ckpt::SaveReport> done = [&]() -> Result<ckpt::SaveReport> {
    try {
      return attempt();
    } catch (...) {  // out of memory: the others must not wait for what will not come
      drop(step, told ? number : 0, {ErrorCode::kInternal, "the leader could not save it"});
      throw;
    }
  }();
  if (!done.ok()) {
    drop(step, told ? number : 0, done.error());
    return done;
  }
  {
    const std::lock_guard lock(mutex_);
    saves_.erase(step);
  }
  tell_(hosts::Committed{step, number});
  return done;
}

void LeaderSaves::set_wards(int64_t own, std::vector<Ward> wards, WriteWard write) {
  const std::lock_guard lock(mutex_);
  own_ = own;
  wards_ = std::move(wards);
  write_ward_ = std::move(write);
  changed_.notify_all();
}

void LeaderSaves::drop(int64_t step, int64_t number, const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    saves_.erase(step);
  }
  tell_(hosts::Dropped{step, number, error});
}

void LeaderSaves::failed(int64_t step, const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (saves_.contains(step)) return;  // another try of it
  }
  drop(step, 0, error);
}

bool LeaderSaves::take(int64_t host, const hosts::Message& message) {
  if (const auto* const begun = std::get_if<hosts::Begun>(&message)) {
    take_part(host, begun->step, begun->number, std::nullopt, nullptr);
  } else if (const auto* const written = std::get_if<hosts::Written>(&message)) {
    const Status well;
    take_part(host, written->step, written->number, written->of, &well);
  } else if (const auto* const not_written = std::get_if<hosts::NotWritten>(&message)) {
    const Status failed = not_written->error;
    take_part(host, not_written->step, not_written->number, not_written->of, &failed);
  } else {
    return false;
  }
  return true;
}

/// `of`: the ward whose part it is. Null `written`: the host has begun.
void LeaderSaves::take_part(int64_t host, int64_t step, int64_t number, std::optional<int64_t> of,
                            const Status* written) {
  const std::lock_guard lock(mutex_);
  const auto found = saves_.find(step);
  if (found == saves_.end() || found->second.number != number) return;
  Save& save = found->second;
  if (of && std::ranges::find(save.wards, *of, &Ward::host) == save.wards.end()) return;
  host = of.value_or(host);
  save.begun.insert(host);
  if (written != nullptr && written->ok()) save.written.insert(host);
  if (written != nullptr && !written->ok() && !save.error) save.error = Error(written->error()).with(hosts_[host]);
  changed_.notify_all();
}

void LeaderSaves::lost(int64_t host, const std::string& why) {
  const std::lock_guard lock(mutex_);
  away_.insert(host);
  for (auto& [step, save] : saves_) {
    if (!save.all_hear || save.error) continue;
    const bool holds = std::ranges::any_of(
        save.wards, [&](const Ward& ward) { return ward.holder == host && !save.written.contains(ward.host); });
    if (holds || owes(host, step, save) != Owes::kNothing)
      save.error = Error{ErrorCode::kUnavailable, fmt::format("{} was lost: {}", hosts_[host], why)};
  }
  changed_.notify_all();
}

void LeaderSaves::back(int64_t host) {
  const std::lock_guard lock(mutex_);
  away_.erase(host);
  changed_.notify_all();
}

void LeaderSaves::settle(const std::vector<ckpt::WholeSlot>& common) {
  std::vector<ckpt::WholeSlot> promised;
  {
    const std::lock_guard lock(mutex_);
    settled_ = common;
    for (auto& [step, save] : saves_) {
      const auto has_to_begin = [&, step = step](const auto& host) {
        return owes(host.first, step, save) == Owes::kToBegin;
      };
      if (save.error || (save.all_hear && std::ranges::none_of(save.others, has_to_begin))) continue;
      const auto whole = std::ranges::find(common, step, &ckpt::WholeSlot::step);
      if (whole == common.end()) {
        save.error = stopped_too_early();
      } else {
        promised.push_back(*whole);
      }
    }
    changed_.notify_all();
  }
  for (const ckpt::WholeSlot& slot : promised) tell_(hosts::Promise{to_wire(slot)});
}

void LeaderSaves::resumed() {
  const std::lock_guard lock(mutex_);
  settled_.reset();
}

// --- follower ------------------------------------------------------------------------------------------------------

// Either side may have forgotten a step of before: ranks were killed between its last byte and the promise. Which ones
// the other side has not, is known of steps up to resumed_step_.

bool FollowerSaves::is_due(int64_t step) {
  const std::lock_guard lock(mutex_);
  return told_.contains(step) || (step <= resumed_step_ && !leaders_.contains(step));
}

Result<ckpt::SaveReport> FollowerSaves::save(ckpt::IoBackend& io, const fs::path& checkpoints_dir,
                                             const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                                             const ckpt::SaveOptions& options) {
  const int64_t begin_ns = clock_.now_ns(), step = skeleton.step;
  Told told;
  {
    const std::lock_guard lock(mutex_);
    const auto found = told_.find(step);
    if (found == told_.end())
      return Error{ErrorCode::kUnavailable, fmt::format("step {} is not in the leader's memory", step)};
    told = std::move(found->second);
    told_.erase(found);
    if (told.error) return *told.error;
    running_[step] = {.number = told.number};
  }
  const auto attempt = [&]() -> Result<ckpt::SaveReport> {
    const fs::path work = checkpoints_dir / told.folder;
    tell_(hosts::Begun{step, told.number});
    const auto written = [&]() -> Result<ckpt::PartSet> {
      RT_TRY_SET(ckpt::PartSet set, ckpt::write_parts(io, work, skeleton, parts, options));
      RT_TRY(ckpt::write_part_set(io, work, host_, set));
      RT_TRY(io.sync_dir(work));
      return set;
    };
    Result<ckpt::PartSet> set = written();
    if (!set.ok()) {
      tell_(hosts::NotWritten{.step = step, .number = told.number, .error = set.error()});
      return std::move(set).error();
    }
    tell_(hosts::Written{step, told.number});
    RT_TRY(wait_for_commit(step, seconds_between(begin_ns, clock_.now_ns()), options));
    ckpt::SaveReport report{.dir = checkpoints_dir / ckpt::step_dir_name(step), .manifest = skeleton};
    report.payload_bytes = set.value().stats.payload_bytes;
    report.file_bytes = set.value().stats.file_bytes;
    report.manifest.files = std::move(set.value().files);  // so the next save's part is planned faster
    report.manifest.shards = std::move(set.value().shards);
    report.seconds = seconds_between(begin_ns, clock_.now_ns());
    return report;
  };
  const auto end = [&](bool again) {
    const std::lock_guard lock(mutex_);
    told.error = running_[step].error;
    running_.erase(step);
    if (again) told_.try_emplace(step, told);
  };
  try {
    Result<ckpt::SaveReport> done = attempt();
    end(false);
    return done;
  } catch (...) {  // out of memory: the leader waits for the next try
    end(true);
    throw;
  }
}

/// The leader writes its own part as long as it takes, and then waits for the other hosts'.
Status FollowerSaves::wait_for_commit(int64_t step, double wrote_s, const ckpt::SaveOptions& options) {
  const int64_t since_ns = clock_.now_ns();
  std::unique_lock lock(mutex_);
  const Running& save = running_[step];
  for (;;) {
    if (save.error) return *save.error;
    if (save.committed) return {};
    if (given_up(options)) return given_up_error();
    if (const double waited_s = seconds_between(since_ns, clock_.now_ns());
        waited_s >= 2 * patience_after(wrote_s, limits_)) {
      return Error{
          ErrorCode::kTimeout,
          fmt::format("the leader has not committed step {}, {:.0f} s after this host's part", step, waited_s)};
    }
    changed_.wait_for(lock, kLook);
  }
}

void FollowerSaves::finish_wards() {
  std::vector<std::thread> writing;
  {
    const std::lock_guard lock(mutex_);
    writing.swap(writing_);
  }
  for (std::thread& one : writing) one.join();
}

void FollowerSaves::write(int64_t step, int64_t number, const Ward& ward, const fs::path& work) const {
  const auto attempt = [&]() -> Status {
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::PartSet set, write_ward_(ward, io, work));
    RT_TRY(ckpt::write_part_set(io, work, ward.host, set));
    return io.sync_dir(work);
  };
  if (const Status done = attempt(); done.ok()) {
    tell_(hosts::Written{step, number, ward.host});
  } else {
    tell_(hosts::NotWritten{step, number, ward.host, done.error()});
  }
}

bool FollowerSaves::take(const hosts::Message& message, const fs::path& checkpoints_dir) {
  const std::lock_guard lock(mutex_);
  if (const auto* const save = std::get_if<hosts::Save>(&message)) {
    told_[save->step] = {.folder = save->folder, .number = save->number, .at_ns = clock_.now_ns(), .error = {}};
    for (const hosts::Ward& one : save->wards) {
      if (one.holder != host_) continue;
      const Ward ward{one.host, one.holder, from_wire(one.slot)};
      writing_.emplace_back([this, step = save->step, number = save->number, ward,
                             work = checkpoints_dir / save->folder] { write(step, number, ward, work); });
    }
    return true;
  }
  // What is of no try that this host knows has ended here, or is of a line that was left.
  const auto at_it = [&](int64_t step, int64_t number) {
    const auto here = running_.find(step);
    return here != running_.end() && here->second.number == number ? &here->second : nullptr;
  };
  if (const auto* const committed = std::get_if<hosts::Committed>(&message)) {
    if (Running* const here = at_it(committed->step, committed->number)) here->committed = true;
  } else if (const auto* const dropped = std::get_if<hosts::Dropped>(&message)) {
    const auto told = told_.find(dropped->step);
    if (Running* const here = at_it(dropped->step, dropped->number)) {
      if (!here->error) here->error = dropped->error;
    } else if (dropped->number == 0 || (told != told_.end() && told->second.number == dropped->number)) {
      told_[dropped->step].error = dropped->error;
    }
  } else {
    return false;
  }
  changed_.notify_all();
  return true;
}

void FollowerSaves::leader_lost(const std::string& why) {
  const std::lock_guard lock(mutex_);
  told_.clear();
  for (auto& [step, save] : running_) {
    if (!save.error) save.error = Error{ErrorCode::kUnavailable, "the leader was lost: " + why};
  }
  changed_.notify_all();
}

void FollowerSaves::promised(int64_t step) {
  const std::lock_guard lock(mutex_);
  here_.insert(step);
  leaders_.insert(step);
  if (const auto told = told_.find(step); told != told_.end() && told->second.error) told_.erase(told);
}

void FollowerSaves::resumed(int64_t step, std::set<int64_t> here, std::set<int64_t> leaders) {
  {
    const std::lock_guard lock(mutex_);
    resumed_step_ = step;
    here_ = here;
    leaders_ = std::move(leaders);
    // What was told of steps that are trained again is of the line that was left.
    std::erase_if(told_, [step](const auto& one) { return one.first > step || one.second.error; });
  }
  look(here);
}

void FollowerSaves::look(const std::set<int64_t>& promised) {
  std::vector<int64_t> forgotten;
  {
    const std::lock_guard lock(mutex_);
    const int64_t now_ns = clock_.now_ns();
    for (const auto& [step, told] : told_) {
      if (told.error || running_.contains(step)) continue;
      const bool late = !promised.contains(step) && now_ns - told.at_ns > kPatienceNs;
      if (late || (step <= resumed_step_ && !here_.contains(step))) forgotten.push_back(step);
    }
  }
  for (const int64_t step : forgotten) refuse(step);
}

void FollowerSaves::refuse(int64_t step) {
  int64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto told = told_.find(step);
    if (told == told_.end()) return;
    number = told->second.number;
    told_.erase(told);
  }
  Error error{ErrorCode::kUnavailable, fmt::format("step {} is not in the memory of all hosts any more", step)};
  tell_(hosts::NotWritten{.step = step, .number = number, .error = std::move(error)});
}

}  // namespace cairn::tools
