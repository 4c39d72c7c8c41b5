#include "tools/run/hosts/host_saves.h"

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "ckpt/format/names.h"
#include "ckpt/persist/commit.h"
#include "ckpt/persist/part_set_file.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/json/json.h"
#include "tools/run/hosts/host_wire.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
namespace saves = hosts::saves;
using nlohmann::json;

constexpr std::chrono::milliseconds kLook{100};  // at least so often a save that is given up is seen

double seconds_between(int64_t from_ns, int64_t to_ns) { return static_cast<double>(to_ns - from_ns) / 1e9; }

bool given_up(const ckpt::SaveOptions& options) {
  return options.cancel != nullptr && options.cancel->load(std::memory_order_acquire);
}

int64_t payload_bytes_of(const ckpt::Manifest& skeleton) {
  int64_t bytes = 0;
  for (const ckpt::TensorEntry& tensor : skeleton.tensors)
    bytes += Box::whole(tensor.shape).count_elems() * dtype_size_bytes(tensor.dtype);
  return bytes;
}

Ward from_wire(const hosts::Ward& ward) { return {ward.host, ward.holder, tools::from_wire(ward.slot)}; }

/// The agents that wrote the step, in its manifest.
void put_hosts(const std::map<int64_t, std::string>& others, int64_t epoch, ckpt::Manifest& manifest) {
  json extra = json_or_nothing(manifest.extra);
  if (!extra.is_object()) extra = json::object();
  json names = json::array({manifest.writer.host});
  for (const auto& [host, name] : others) names.push_back(name);
  extra["hosts"] = std::move(names);
  extra["epoch"] = epoch;
  manifest.extra = json_text(extra);
}

/// The try whose persister has to do this; none: it is for no persister.
std::optional<saves::Try> persister_of(const saves::Action& action) {
  return std::visit(
      [](const auto& one) -> std::optional<saves::Try> {
        using One = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<One, saves::Tell> || std::is_same_v<One, saves::WriteWard>) {
          return std::nullopt;
        } else {
          return one.of;
        }
      },
      action);
}

}  // namespace

const Clock& clock_of_saves() {
  static const SystemClock clock;
  return clock;
}

// --- a rule and its threads ------------------------------------------------------------------------------------------

template <typename Rule>
template <typename Event>
saves::Actions SharedRule<Rule>::step(const Event& event) {
  saves::Actions actions = rule_.step(event, clock_.now_ns());
  for (const saves::Action& action : actions) {
    const std::optional<saves::Try> of = persister_of(action);
    if (!of) continue;
    RT_CHECK(!orders_.contains(*of), "step {}: two orders to its persister at once", of->step);
    orders_.emplace(*of, action);
  }
  changed_.notify_all();
  return actions;
}

template <typename Rule>
template <typename Event>
void SharedRule<Rule>::feed(const Event& event, const OnWard& on_ward) {
  saves::Actions actions;
  {
    const std::lock_guard lock(mutex_);
    actions = step(event);
  }
  send(actions, on_ward);
}

template <typename Rule>
void SharedRule<Rule>::send(const saves::Actions& actions, const OnWard& on_ward) {
  for (const saves::Action& action : actions) {
    if (const auto* const tell = std::get_if<saves::Tell>(&action)) tell_(tell->what);
    if (const auto* const ward = std::get_if<saves::WriteWard>(&action)) on_ward(*ward);
  }
}

template <typename Rule>
std::pair<saves::Try, saves::Actions> SharedRule<Rule>::ask(int64_t step) {
  const std::lock_guard lock(mutex_);
  const bool busy = rule_.current(step).has_value();
  saves::Actions actions = this->step(saves::Ask{step});
  saves::Try of = busy ? saves::Try{step, 0} : rule_.current(step).value_or(saves::Try{step, 0});
  for (const saves::Action& action : actions) {
    const auto* const leave = std::get_if<saves::Leave>(&action);
    if (leave != nullptr && leave->of.step == step && !busy) of = leave->of;  // it has ended at once
  }
  return {of, std::move(actions)};
}

template <typename Rule>
saves::Action SharedRule<Rule>::next(const saves::Try& of, const ckpt::SaveOptions& options) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const auto order = orders_.find(of); order != orders_.end()) {
      saves::Action out = std::move(order->second);
      orders_.erase(order);
      return out;
    }
    lock.unlock();
    if (given_up(options)) {
      feed(saves::GiveUp{of});
    } else {
      feed(saves::Tick{});
    }
    lock.lock();
    changed_.wait_for(lock, kLook, [&] { return orders_.contains(of); });
  }
}

template <typename Rule>
void SharedRule<Rule>::forget(const saves::Try& of) {
  const std::lock_guard lock(mutex_);
  orders_.erase(of);
}

// --- leader --------------------------------------------------------------------------------------------------------

LeaderSaves::LeaderSaves(Tell tell, SaveLimits limits, const Clock& clock)
    : clock_(clock), rule_(saves::Leader(limits), std::move(tell), clock) {}

/// One try on the leader's disk, order by order.
class LeaderSaves::Attempt {
 public:
  Attempt(ckpt::IoBackend& io, const fs::path& checkpoints_dir, ckpt::Manifest skeleton,
          std::span<const ckpt::WriterPart> parts, const ckpt::SaveOptions& options)
      : io_(io), dir_(checkpoints_dir), skeleton_(std::move(skeleton)), parts_(parts), options_(options) {}

  Result<std::string> make_folder() {
    const int64_t step = skeleton_.step;
    if (options_.check_folder) RT_TRY(options_.check_folder());
    RT_TRY_SET(replaces_, ckpt::check_existing(io_, dir_, step, options_));
    const int64_t needed = payload_bytes_of(skeleton_);
    RT_TRY_SET(const int64_t free, io_.free_bytes(dir_));
    if (free < needed) {
      return Error{ErrorCode::kNoSpace, fmt::format("{}: {} bytes free, step {} needs {}: {} are missing",
                                                    dir_.string(), free, step, needed, needed - free)};
    }
    const ckpt::WriterId writer = options_.writer ? *options_.writer : ckpt::this_writer();
    ckpt::put_writer(writer, skeleton_);
    std::string folder = ckpt::work_dir_name(ckpt::kTmpPrefix, step, writer);
    work_.emplace(io_, dir_ / folder, step, options_.spares);
    RT_TRY(io_.make_dir(work_->path()));
    return folder;
  }

  Status write(const std::vector<hosts::Ward>& wards, const WriteWard& write_ward) {
    RT_TRY(add(ckpt::write_parts(io_, work_->path(), skeleton_, parts_, options_)));
    for (const hosts::Ward& ward : wards) RT_TRY(add(write_ward(from_wire(ward), io_, work_->path())));
    return {};
  }

  Result<ckpt::SaveReport> commit(const saves::Commit& order) {
    for (const auto& [host, name] : order.parts) {
      Result<ckpt::PartSet> set = ckpt::read_part_set(io_, work_->path(), host);
      Status taken = set.ok() ? io_.remove_file(work_->path() / ckpt::part_set_name(host)) : Status(set.error());
      if (!taken.ok()) return abandon(std::move(taken).error().with(name));
      sets_.push_back(std::move(set).value());
    }
    ckpt::SaveReport report;
    for (const ckpt::PartSet& set : sets_) {
      report.payload_bytes += set.stats.payload_bytes;
      report.file_bytes += set.stats.file_bytes;
    }
    report.reused_files = sets_.front().stats.reused_files;
    put_hosts(order.hosts, order.epoch, skeleton_);
    RT_TRY_SET(ckpt::CommitReport committed,
               ckpt::commit_step(io_, *work_, std::move(skeleton_), sets_, replaces_, options_));
    report.dir = std::move(committed.dir);
    report.manifest = std::move(committed.manifest);
    report.replaced = committed.replaced;
    report.remove_seconds = committed.remove_seconds;
    report.leftover = std::move(committed.leftover);
    return report;
  }

  Error abandon(Error error) { return work_->abandon(std::move(error)); }

 private:
  Status add(Result<ckpt::PartSet> set) {
    if (!set.ok()) return abandon(std::move(set).error());
    sets_.push_back(std::move(set).value());
    return {};
  }

  ckpt::IoBackend& io_;
  const fs::path& dir_;
  ckpt::Manifest skeleton_;
  const std::span<const ckpt::WriterPart> parts_;
  const ckpt::SaveOptions& options_;
  bool replaces_ = false;
  std::optional<ckpt::WorkFolder> work_;
  std::vector<ckpt::PartSet> sets_;
};

Result<ckpt::SaveReport> LeaderSaves::save(ckpt::IoBackend& io, const fs::path& checkpoints_dir,
                                           ckpt::Manifest skeleton, std::span<const ckpt::WriterPart> parts,
                                           const ckpt::SaveOptions& options) {
  const int64_t begin_ns = clock_.now_ns();
  const auto [of, first] = rule_.ask(skeleton.step);
  try {
    // Within: an exception on its way out removes the folder.
    std::optional<Attempt> attempt(std::in_place, io, checkpoints_dir, std::move(skeleton), parts, options);
    ckpt::SaveReport report;
    rule_.send(first);
    for (;;) {
      const saves::Action order = rule_.next(of, options);
      if (const auto* const leave = std::get_if<saves::Leave>(&order)) {
        if (leave->error) return *leave->error;
        return report;
      }
      std::optional<Error> failed;
      if (std::holds_alternative<saves::MakeFolder>(order)) {
        Result<std::string> folder = attempt->make_folder();
        if (folder.ok()) {
          rule_.feed(saves::FolderMade{of, std::move(folder).value()});
        } else {
          failed = std::move(folder).error();
        }
      } else if (const auto* const write = std::get_if<saves::WriteParts>(&order)) {
        Status written = attempt->write(write->wards, write_ward());
        if (written.ok()) {
          rule_.feed(saves::PartWritten{of});
        } else {
          failed = std::move(written).error();
        }
      } else if (const auto* const commit = std::get_if<saves::Commit>(&order)) {
        Result<ckpt::SaveReport> done = attempt->commit(*commit);
        if (done.ok()) {
          report = std::move(done).value();
          report.seconds = seconds_between(begin_ns, clock_.now_ns());
          rule_.feed(saves::Named{of});
        } else {
          failed = std::move(done).error();
        }
      } else if (const auto* const abandon = std::get_if<saves::Abandon>(&order)) {
        failed = attempt->abandon(abandon->error);
      }
      if (!failed) continue;
      attempt.reset();  // its folder, before hosts hear of it
      rule_.feed(saves::Failed{of, *std::move(failed)});
    }
  } catch (...) {  // out of memory: the others must not wait for what will not come
    rule_.feed(saves::Failed{of, {ErrorCode::kInternal, "the leader could not save it"}});
    rule_.forget(of);
    throw;
  }
}

void LeaderSaves::set_hosts(std::map<int64_t, std::string> hosts, int64_t epoch, std::set<int64_t> away) {
  rule_.feed(saves::SetHosts{std::move(hosts), epoch, std::move(away)});
}

void LeaderSaves::set_wards(int64_t own, std::vector<Ward> wards, WriteWard write) {
  {
    const std::lock_guard lock(of_wards_);
    write_ward_ = std::move(write);
  }
  saves::SetWards event{.own = own, .wards = {}};
  for (const Ward& ward : wards) event.wards.push_back({ward.host, ward.holder, to_wire(ward.slot)});
  rule_.feed(event);
}

WriteWard LeaderSaves::write_ward() const {
  const std::lock_guard lock(of_wards_);
  return write_ward_;
}

bool LeaderSaves::take(int64_t host, const hosts::Message& message) {
  if (!std::holds_alternative<hosts::Begun>(message) && !std::holds_alternative<hosts::Written>(message) &&
      !std::holds_alternative<hosts::NotWritten>(message))
    return false;
  rule_.feed(saves::Heard{host, message});
  return true;
}

void LeaderSaves::lost(int64_t host, const std::string& why) { rule_.feed(saves::Lost{host, why}); }

void LeaderSaves::back(int64_t host) { rule_.feed(saves::Back{host}); }

std::string LeaderSaves::waits_for(int64_t step) const {
  return rule_.read([step](const saves::Leader& rule) { return rule.waits_for(step); });
}

void LeaderSaves::settle(const std::vector<ckpt::WholeSlot>& common) { rule_.feed(saves::Settle{to_wire(common)}); }

void LeaderSaves::resumed() { rule_.feed(saves::Resumed{}); }

void LeaderSaves::failed(int64_t step, const Error& error) { rule_.feed(saves::NeverAsked{step, error}); }

// --- follower ------------------------------------------------------------------------------------------------------

FollowerSaves::FollowerSaves(int64_t host, Tell tell, SaveLimits limits, const Clock& clock)
    : host_(host), clock_(clock), rule_(saves::Member(host, limits), std::move(tell), clock) {}

bool FollowerSaves::is_due(int64_t step) const {
  return rule_.read([step](const saves::Member& rule) { return rule.is_due(step); });
}

Result<ckpt::SaveReport> FollowerSaves::save(ckpt::IoBackend& io, const fs::path& checkpoints_dir,
                                             const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                                             const ckpt::SaveOptions& options) {
  const auto [of, first] = rule_.ask(skeleton.step);
  try {
    rule_.send(first);
    return follow(of, io, checkpoints_dir, skeleton, parts, options);
  } catch (...) {  // out of memory: the leader waits for the next try
    rule_.feed(saves::Thrown{of});
    rule_.forget(of);
    throw;
  }
}

Result<ckpt::SaveReport> FollowerSaves::follow(const saves::Try& of, ckpt::IoBackend& io,
                                               const fs::path& checkpoints_dir, const ckpt::Manifest& skeleton,
                                               std::span<const ckpt::WriterPart> parts,
                                               const ckpt::SaveOptions& options) {
  const int64_t begin_ns = clock_.now_ns();
  ckpt::SaveReport report{.dir = checkpoints_dir / ckpt::step_dir_name(of.step), .manifest = skeleton};
  for (;;) {
    const saves::Action order = rule_.next(of, options);
    if (const auto* const leave = std::get_if<saves::Leave>(&order)) {
      if (leave->error) return *leave->error;
      report.seconds = seconds_between(begin_ns, clock_.now_ns());
      return report;
    }
    Result<ckpt::PartSet> set =
        write(io, checkpoints_dir / std::get<saves::WriteParts>(order).folder, skeleton, parts, options);
    if (!set.ok()) {
      rule_.feed(saves::Failed{of, std::move(set).error()});
      continue;
    }
    report.payload_bytes = set.value().stats.payload_bytes;
    report.file_bytes = set.value().stats.file_bytes;
    report.manifest.files = std::move(set.value().files);  // so the next save's part is planned faster
    report.manifest.shards = std::move(set.value().shards);
    rule_.feed(saves::PartWritten{of});
  }
}

Result<ckpt::PartSet> FollowerSaves::write(ckpt::IoBackend& io, const fs::path& work, const ckpt::Manifest& skeleton,
                                           std::span<const ckpt::WriterPart> parts,
                                           const ckpt::SaveOptions& options) const {
  RT_TRY_SET(ckpt::PartSet set, ckpt::write_parts(io, work, skeleton, parts, options));
  RT_TRY(ckpt::write_part_set(io, work, host_, set));
  RT_TRY(io.sync_dir(work));
  return set;
}

void FollowerSaves::finish_wards() {
  std::vector<std::thread> writing;
  {
    const std::lock_guard lock(of_writing_);
    writing.swap(writing_);
  }
  for (std::thread& one : writing) one.join();
}

void FollowerSaves::write_ward(const saves::WriteWard& order, const fs::path& checkpoints_dir) {
  const std::lock_guard lock(of_writing_);
  writing_.emplace_back([this, order, work = checkpoints_dir / order.folder] {
    const auto attempt = [&]() -> Status {
      ckpt::PosixBackend io;
      RT_TRY_SET(const ckpt::PartSet set, write_ward_(from_wire(order.ward), io, work));
      RT_TRY(ckpt::write_part_set(io, work, order.ward.host, set));
      return io.sync_dir(work);
    };
    saves::WardWritten done{.of = order.of, .host = order.ward.host};
    if (Status written = attempt(); !written.ok()) done.error = std::move(written).error();
    rule_.feed(done);
  });
}

bool FollowerSaves::take(const hosts::Message& message, const fs::path& checkpoints_dir) {
  if (!std::holds_alternative<hosts::Save>(message) && !std::holds_alternative<hosts::Committed>(message) &&
      !std::holds_alternative<hosts::Dropped>(message))
    return false;
  rule_.feed(saves::Told{message}, [&](const saves::WriteWard& order) { write_ward(order, checkpoints_dir); });
  return true;
}

void FollowerSaves::leader_lost(const std::string& why) { rule_.feed(saves::LeaderLost{why}); }

void FollowerSaves::promised(int64_t step) { rule_.feed(saves::Promised{step}); }

void FollowerSaves::resumed(int64_t step, std::set<int64_t> here, std::set<int64_t> leaders) {
  rule_.feed(saves::Resumed{step, std::move(here), std::move(leaders)});
}

void FollowerSaves::look(const std::set<int64_t>& promised) { rule_.feed(saves::Look{promised}); }

}  // namespace cairn::tools
