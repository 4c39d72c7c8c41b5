#pragma once
// The save of a step by all hosts of a run. Each agent's persister writes the files of its ranks into the folder of the
// step under way; the leader's makes that folder, waits for the others, writes the manifest and gives the step its
// name. No slot is free before that.
//
// runtime/hosts/saves.h decides. Here is what carries that out: events come from several threads, one at a time into
// the rule; what it orders a persister to do lies ready for the persister's thread.
//
// Threads: save() on those of the persisters, take() and lost() on the switchboard's, the rest on the agent's loop.
// Messages are sent without the lock, in the order of the rule for each try.

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ckpt/persist/write_parts.h"
#include "ckpt/persister.h"
#include "ckpt/snapshot/slot_rule.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/hosts/message.h"
#include "runtime/hosts/saves.h"

namespace cairn::tools {

using SaveLimits = hosts::saves::Limits;
const Clock& clock_of_saves();

using Tell = std::function<void(hosts::Message)>;  // from any thread

/// A host that is lost, and whose slot another one has a copy of: that one writes its part.
struct Ward {
  int64_t host = 0, holder = 0;  // by their index
  ckpt::WholeSlot slot;
  bool operator==(const Ward&) const = default;
};
/// Writes the part of a ward into the folder of the step under way.
using WriteWard =
    std::function<Result<ckpt::PartSet>(const Ward& ward, ckpt::IoBackend& io, const std::filesystem::path& work)>;

/// A rule that several threads feed.
template <typename Rule>
class SharedRule {
 public:
  using OnWard = std::function<void(const hosts::saves::WriteWard&)>;

  SharedRule(Rule rule, Tell tell, const Clock& clock)
      : tell_(std::move(tell)), clock_(clock), rule_(std::move(rule)) {}

  /// Sends what the rule says.
  template <typename Event>
  void feed(const Event& event, const OnWard& on_ward = {});
  /// The persister comes to a step: its try. What is returned beside it is still to be sent.
  std::pair<hosts::saves::Try, hosts::saves::Actions> ask(int64_t step);
  void send(const hosts::saves::Actions& actions, const OnWard& on_ward = {});
  /// Waits for the rule's next order to the persister of this try.
  hosts::saves::Action next(const hosts::saves::Try& of, const ckpt::SaveOptions& options);
  /// No thread will take what the rule orders for this try.
  void forget(const hosts::saves::Try& of);
  template <typename Read>
  auto read(const Read& read) const {
    const std::lock_guard lock(mutex_);
    return read(rule_);
  }

 private:
  template <typename Event>
  hosts::saves::Actions step(const Event& event);  // with the lock held

  const Tell tell_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Rule rule_;
  std::map<hosts::saves::Try, hosts::saves::Action> orders_;  // to persisters
};

class LeaderSaves {
 public:
  /// `tell`: all other hosts that are connected.
  explicit LeaderSaves(Tell tell, SaveLimits limits = {}, const Clock& clock = clock_of_saves());

  /// saves::SetHosts
  void set_hosts(std::map<int64_t, std::string> hosts, int64_t epoch, std::set<int64_t> away = {});
  /// saves::SetWards
  void set_wards(int64_t own, std::vector<Ward> wards, WriteWard write);
  /// ckpt::SaveStep
  Result<ckpt::SaveReport> save(ckpt::IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                ckpt::Manifest skeleton, std::span<const ckpt::WriterPart> parts,
                                const ckpt::SaveOptions& options);
  /// False: the message is about something else.
  bool take(int64_t host, const hosts::Message& message);
  void lost(int64_t host, const std::string& why);
  /// From here on messages reach it.
  void back(int64_t host);
  /// saves::Leader::waits_for
  std::string waits_for(int64_t step) const;
  /// saves::Settle
  void settle(const std::vector<ckpt::WholeSlot>& common);
  /// Ranks run again.
  void resumed();
  /// The save of this step has failed here before the others heard of it.
  void failed(int64_t step, const Error& error);

 private:
  class Attempt;

  WriteWard write_ward() const;

  const Clock& clock_;
  SharedRule<hosts::saves::Leader> rule_;
  mutable std::mutex of_wards_;
  WriteWard write_ward_;
};

class FollowerSaves {
 public:
  /// `tell`: the leader.
  FollowerSaves(int64_t host, Tell tell, SaveLimits limits = {}, const Clock& clock = clock_of_saves());

  /// How this host writes the part of a ward.
  void use(WriteWard write) { write_ward_ = std::move(write); }

  /// ckpt::PersistOptions::is_due: saves::Member::is_due
  bool is_due(int64_t step) const;
  /// ckpt::SaveStep, of a step that is due.
  Result<ckpt::SaveReport> save(ckpt::IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                                const ckpt::SaveOptions& options);
  bool take(const hosts::Message& message, const std::filesystem::path& checkpoints_dir);
  void leader_lost(const std::string& why);
  /// saves::Promised
  void promised(int64_t step);
  /// Parts of wards are written, and reported.
  void finish_wards();
  /// saves::Resumed
  void resumed(int64_t step, std::set<int64_t> here, std::set<int64_t> leaders);
  /// saves::Look
  void look(const std::set<int64_t>& promised);

 private:
  Result<ckpt::PartSet> write(ckpt::IoBackend& io, const std::filesystem::path& work, const ckpt::Manifest& skeleton,
                              std::span<const ckpt::WriterPart> parts, const ckpt::SaveOptions& options) const;
  Result<ckpt::SaveReport> follow(const hosts::saves::Try& of, ckpt::IoBackend& io,
                                  const std::filesystem::path& checkpoints_dir, const ckpt::Manifest& skeleton,
                                  std::span<const ckpt::WriterPart> parts, const ckpt::SaveOptions& options);
  void write_ward(const hosts::saves::WriteWard& order, const std::filesystem::path& checkpoints_dir);

  const int64_t host_;
  const Clock& clock_;
  WriteWard write_ward_;
  SharedRule<hosts::saves::Member> rule_;
  std::mutex of_writing_;
  std::vector<std::thread> writing_;  // parts of wards: once in a life of the ranks
};

}  // namespace cairn::tools
