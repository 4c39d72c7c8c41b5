#pragma once
// The save of a step by all hosts of a run. Each agent's persister writes the files of its ranks into the folder of the
// step under way; the leader's makes that folder, waits for the others, writes the manifest and gives the step its
// name. Nobody's bank is free before that.
// Its messages stand in runtime/hosts/message.h, under "saves".
//
// The leader's persister says which step is next. One that follows begins what it is told alone (is_due()): waiting for
// another step it would be missing for this one.
//
// A host that is away hears nothing: a save waits until it is back before it sends orders, or until others have copies
// of its part. Every wait ends, by an error that names the host at the latest (SaveLimits).
//
// Threads: save() on those of the persisters, take() and lost() on the switchboard's, the rest on the agent's loop.

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/persist/write_parts.h"
#include "ckpt/persister.h"
#include "ckpt/snapshot/slot_rule.h"
#include "runtime/core/clock.h"
#include "runtime/core/result.h"
#include "runtime/hosts/message.h"

namespace cairn::tools {

/// How long a save waits, in seconds.
struct SaveLimits {
  double away = 660;   // for a host that is away
  double begin = 180;  // for each host to begin, from the order on
  /// For the parts of all hosts, and for the leader's last word, once the own part is written. Four times as long as
  /// that took, where that is longer.
  double parts = 600;
};
const Clock& clock_of_saves();

using Tell = std::function<void(hosts::Message)>;  // from any thread

/// A host that is lost, and whose bank another one has a copy of: that one writes its part.
struct Ward {
  int64_t host = 0, holder = 0;  // by their index
  ckpt::WholeSlot slot;
  bool operator==(const Ward&) const = default;
};
/// Writes the part of a ward into the folder of the step under way.
using WriteWard =
    std::function<Result<ckpt::PartSet>(const Ward& ward, ckpt::IoBackend& io, const std::filesystem::path& work)>;

class LeaderSaves {
 public:
  /// `tell`: all other hosts that are connected.
  explicit LeaderSaves(Tell tell, SaveLimits limits = {}, const Clock& clock = clock_of_saves())
      : tell_(std::move(tell)), limits_(limits), clock_(clock) {}

  /// The other hosts by their index, with their names, and the epoch that they are of. `away`: of them, those that hear
  /// nothing.
  void set_hosts(std::map<int64_t, std::string> hosts, int64_t epoch, std::set<int64_t> away = {});
  /// In the next save of this step hosts that are lost have their parts from copies. `own`: this host's index.
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
  /// The hosts that the save of this step waits for, and what each owes: "h1 (is away), h2 (writes its part)". Empty:
  /// it waits for none.
  std::string waits_for(int64_t step) const;
  /// No rank runs on any host. What not all of them have begun is promised by all, where it is whole in the memory of
  /// all; else nobody will complete it. The same counts for what this host's persister begins later, until resumed().
  /// A host that is away now stays away: a save that waits for it fails.
  void settle(const std::vector<ckpt::WholeSlot>& common);
  /// Ranks run again.
  void resumed();
  /// The save of this step has failed here before the others were told of it.
  void failed(int64_t step, const Error& error);

 private:
  struct Save {
    int64_t number = 0;                     // of the try
    bool all_hear = false;                  // no host is away: the save begins, and messages go out
    int64_t told_ns = 0;                    // 0: not yet
    int64_t written_ns = 0;                 // when the own part was; 0: not yet
    std::map<int64_t, std::string> others;  // whose parts come as files
    std::set<int64_t> begun, written;
    std::vector<Ward> wards;
    std::optional<Error> error;
  };
  /// A host's debt to a save.
  enum class Owes { kNothing, kToBeThere, kToBegin, kItsPart };
  Owes owes(int64_t host, int64_t step, const Save& save) const;
  Status wait_until_all_hear(std::unique_lock<std::mutex>& lock, int64_t step, const ckpt::SaveOptions& options);
  Status wait_for_parts(int64_t step, const ckpt::SaveOptions& options);
  std::optional<Error> late(int64_t step, const Save& save) const;
  bool has_ward(int64_t host, int64_t step) const;
  void drop(int64_t step, int64_t number, const Error& error);
  void take_part(int64_t host, int64_t step, int64_t number, std::optional<int64_t> of, const Status* written);

  const Tell tell_;
  const SaveLimits limits_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::string> hosts_;
  std::set<int64_t> away_;  // of hosts_
  int64_t epoch_ = 0;
  std::map<int64_t, Save> saves_;                        // by step
  std::optional<std::vector<ckpt::WholeSlot>> settled_;  // of settle(), while no rank runs
  int64_t tries_ = 0;
  int64_t own_ = -1;
  std::vector<Ward> wards_;  // of the step of their slots
  WriteWard write_ward_;
};

class FollowerSaves {
 public:
  /// `tell`: the leader.
  FollowerSaves(int64_t host, Tell tell, SaveLimits limits = {}, const Clock& clock = clock_of_saves())
      : host_(host), tell_(std::move(tell)), limits_(limits), clock_(clock) {}

  /// How this host writes the part of a ward.
  void use(WriteWard write) { write_ward_ = std::move(write); }

  /// ckpt::PersistOptions::is_due: the leader is at this step, has dropped it, or will never come to it.
  bool is_due(int64_t step);
  /// ckpt::SaveStep, of a step that is due.
  Result<ckpt::SaveReport> save(ckpt::IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                                const ckpt::SaveOptions& options);
  bool take(const hosts::Message& message, const std::filesystem::path& checkpoints_dir);
  void leader_lost(const std::string& why);
  /// The leader saves this step, whatever was before. To be called before the memory promises it.
  void promised(int64_t step);
  /// Parts of wards are written, and told.
  void finish_wards();
  /// Ranks run again, from `step` on. `here`, `leaders`: steps up to that one that the memory of this host and the
  /// leader's still promise to save.
  void resumed(int64_t step, std::set<int64_t> here, std::set<int64_t> leaders);
  /// Now and then: refuses what the leader asks for and nobody here will write. `promised`: the steps that this host's
  /// memory promises to save.
  void look(const std::set<int64_t>& promised);

 private:
  /// The leader's try of a step that the persister has not come to.
  struct Told {
    std::string folder;
    int64_t number = 0;  // 0: it has failed before hosts were told of it
    int64_t at_ns = 0;
    std::optional<Error> error;
  };
  /// The one that the persister is at; the leader may be at the next already.
  struct Running {
    int64_t number = 0;
    bool committed = false;
    std::optional<Error> error;
  };

  void write(int64_t step, int64_t number, const Ward& ward, const std::filesystem::path& work) const;

  Status wait_for_commit(int64_t step, double wrote_s, const ckpt::SaveOptions& options);

  const int64_t host_;
  const Tell tell_;
  const SaveLimits limits_;
  const Clock& clock_;
  WriteWard write_ward_;
  std::vector<std::thread> writing_;  // parts of wards: once in a life of the ranks
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Told> told_;        // by step
  std::map<int64_t, Running> running_;  // by step
  int64_t resumed_step_ = -1;
  std::set<int64_t> here_, leaders_;  // of resumed(), and what was promised since

  void refuse(int64_t step);
};

}  // namespace cairn::tools
