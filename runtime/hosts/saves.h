#pragma once
// The save of a step by all hosts of a run: what the leader and each other host (a *member*) decide, as two state
// machines. Pure: step(event, now) returns actions; no clock, no thread, no lock, no I/O. tools/run/hosts/host_saves.h
// feeds events and performs actions; tests/sim lives thousands of lives with every fault between them.
//
// One try of one step:
//
//              leader                              member
//   save       all hosts have to hear              the order is here, the persister is not
//   begun      orders are out, own part            own part
//   written    waits for the hosts' parts          waits for the leader's word
//   committed  the step gets its name              the step has its name
//   dropped    its folder is removed               the persister has to learn why
//
//   1. The leader's persister comes to a step (Ask). Where a host is away, the try waits until that host is back, or
//      until another host has a copy of its part (a *ward*).
//   2. The leader makes a folder (MakeFolder, FolderMade) and orders the step (hosts::Save). Everybody writes.
//   3. A member begins only what it has an order for: with a promise that the leader has forgotten, each would wait for
//      the other. It reports hosts::Begun, then Written or NotWritten.
//   4. With every part there the leader commits and reports Committed, else Dropped. A word counts for the try whose
//      number it carries. The next leader counts its tries from 1 again, so a member keeps silent about those of a
//      leader that is lost.
//
// A member may still promise what the leader has forgotten, and the reverse: ranks die between a step's last byte and
// its promise. Resumed says which steps both still promise.
//
// Every wait for another host has a name and a deadline (waits()); Tick ends it at that time. Work of the own disk is
// no such wait: nothing can end a call that hangs in the kernel.

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/core/error.h"
#include "runtime/hosts/message.h"

namespace cairn::hosts::saves {

/// How long a save waits, in seconds.
struct Limits {
  double away = 660;   // for a host that is away
  double begin = 180;  // for each host to begin, from the order on
  /// For the parts of all hosts, and for the leader's last word, once the own part is written. Four times as long as
  /// that took, where that is longer.
  double parts = 600;
  double promise = 60;  // from the order to this host's promise: its ranks are at most a step behind
};

/// The leader's try of a step.
struct Try {
  int64_t step = 0, number = 0;
  auto operator<=>(const Try&) const = default;
};

enum class Phase : uint8_t { kSave, kBegun, kWritten, kCommitted, kDropped };
std::string_view phase_name(Phase phase);

/// A wait for another host, which Tick ends.
struct Wait {
  Try of;
  std::string what;  // "h1 to begin"
  int64_t until_ns = 0;
};

// --- events ----------------------------------------------------------------------------------------------------------

/// The persister comes to a step: of the leader one that it promises, of a member one that is due.
struct Ask {
  int64_t step = 0;
};
/// The own part is durable, at the leader those of its wards too.
struct PartWritten {
  Try of;
};
/// The persister has left the try, and nothing of it is left on the disk. At the leader also after Abandon.
struct Failed {
  Try of;
  Error error;
};
/// The persister is asked to end.
struct GiveUp {
  Try of;
};
/// Time has passed.
struct Tick {};
/// Ranks run again, from `step` on. `here`, `leaders`: steps up to that one which the memory of this host and the
/// leader's still promise to save. The leader needs none of the three.
struct Resumed {
  int64_t step = 0;
  std::set<int64_t> here = {}, leaders = {};
};

// Only the leader has these.
struct FolderMade {
  Try of;
  std::string folder;
};
/// The step has its name.
struct Named {
  Try of;
};
/// The save of this step has failed before there was a try.
struct NeverAsked {
  int64_t step = 0;
  Error error;
};
struct Heard {
  int64_t host = 0;
  Message what;
};
struct Lost {
  int64_t host = 0;
  std::string why;
};
/// From here on messages reach it.
struct Back {
  int64_t host = 0;
};
/// The other hosts by their index, with their names, and the epoch that they belong to. `away`: those that hear
/// nothing.
struct SetHosts {
  std::map<int64_t, std::string> hosts;
  int64_t epoch = 0;
  std::set<int64_t> away = {};
};
/// In the next save of this step lost hosts have their parts from copies. `own`: this host's index.
struct SetWards {
  int64_t own = -1;
  std::vector<Ward> wards;
};
/// No rank runs on any host. A step that not all hosts have begun is promised by all where it is complete in the memory
/// of all, else it fails. The same counts for what this host's persister begins later, until Resumed. A host that is
/// away now stays away.
struct Settle {
  std::vector<Slot> common;
};

// Only a member has these.
/// Save, Committed or Dropped.
struct Told {
  Message what;
};
struct LeaderLost {
  std::string why;
};
/// The leader saves this step, whatever was before. To be fed before the memory promises it.
struct Promised {
  int64_t step = 0;
};
/// The steps that this host's memory promises to save. Fed now and then.
struct Look {
  std::set<int64_t> promised;
};
/// Memory ran out. The persister comes again.
struct Thrown {
  Try of;
};
struct WardWritten {
  Try of;
  int64_t host = 0;  // the ward
  std::optional<Error> error = {};
};

using LeaderEvent = std::variant<Ask, FolderMade, PartWritten, Named, Failed, GiveUp, NeverAsked, Heard, Lost, Back,
                                 SetHosts, SetWards, Settle, Resumed, Tick>;
using MemberEvent = std::variant<Ask, PartWritten, Failed, GiveUp, Thrown, WardWritten, Told, LeaderLost, Promised,
                                 Resumed, Look, Tick>;

// --- actions ---------------------------------------------------------------------------------------------------------

/// At the leader to all hosts that are connected, at a member to the leader.
struct Tell {
  Message what;
};

// To the persister that has asked.
/// Checks the folder and its space, and makes a folder for this try. Answered with FolderMade or Failed.
struct MakeFolder {
  Try of;
};
/// Answered with PartWritten or Failed. `wards`: at the leader those whose part it writes too. `folder`: of a member.
struct WriteParts {
  Try of;
  std::string folder = {};
  std::vector<Ward> wards = {};
};
/// Answered with Named or Failed.
struct Commit {
  Try of;
  std::map<int64_t, std::string> parts;  // whose parts come as files
  std::map<int64_t, std::string> hosts;  // all others
  int64_t epoch = 0;
};
/// Removes the folder. Answered with Failed.
struct Abandon {
  Try of;
  Error error;
};
/// The try has ended; without an error well. Not answered.
struct Leave {
  Try of;
  std::optional<Error> error = {};
};

/// At a member, beside its persister. Answered with WardWritten.
struct WriteWard {
  Try of;
  std::string folder;
  Ward ward;
};

using Action = std::variant<Tell, MakeFolder, WriteParts, Commit, Abandon, Leave, WriteWard>;
using Actions = std::vector<Action>;

// --- the rule --------------------------------------------------------------------------------------------------------

class Leader {
 public:
  explicit Leader(Limits limits = {}) : limits_(limits) {}

  Actions step(const LeaderEvent& event, int64_t now_ns);

  std::vector<Wait> waits() const;
  /// The hosts that the save of this step waits for, and what each owes: "h1 (is away), h2 (writes its part)". Empty:
  /// it waits for none.
  std::string waits_for(int64_t step) const;
  /// The try of a step that is under way.
  std::optional<Try> current(int64_t step) const;
  std::optional<Phase> phase(const Try& of) const;

 private:
  struct Save {
    Try of;
    Phase phase = Phase::kSave;
    bool all_hear = false;  // no host is away: from here on each loss counts
    bool gives_up = false;
    int64_t asked_ns = 0, told_ns = 0, written_ns = 0;  // orders out; own part written
    std::map<int64_t, std::string> others;              // whose parts come as files
    std::map<int64_t, std::string> hosts;               // all others
    int64_t epoch = 0;
    std::set<int64_t> begun, written;
    std::vector<Ward> wards;
    std::optional<Slot> whole;  // on all hosts, which do not know that it is saved
    std::optional<Error> error;
  };
  /// A host's debt to a save.
  enum class Owes { kNothing, kToBeThere, kToBegin, kItsPart };

  void on(const Ask& event, int64_t now_ns, Actions& out);
  void on(const FolderMade& event, int64_t now_ns, Actions& out);
  void on(const PartWritten& event, int64_t now_ns, Actions& out);
  void on(const Named& event, int64_t now_ns, Actions& out);
  void on(const Failed& event, int64_t now_ns, Actions& out);
  void on(const GiveUp& event, int64_t now_ns, Actions& out);
  void on(const NeverAsked& event, int64_t now_ns, Actions& out);
  void on(const Heard& event, int64_t now_ns, Actions& out);
  void on(const Lost& event, int64_t now_ns, Actions& out);
  void on(const Back& event, int64_t now_ns, Actions& out);
  void on(const SetHosts& event, int64_t now_ns, Actions& out);
  void on(const SetWards& event, int64_t now_ns, Actions& out);
  void on(const Settle& event, int64_t now_ns, Actions& out);
  void on(const Resumed& event, int64_t now_ns, Actions& out);
  void on(const Tick& event, int64_t now_ns, Actions& out);

  Save* find(const Try& of);
  Owes owes(int64_t host, const Save& save) const;
  bool has_ward(int64_t host, int64_t step) const;
  double patience_s(const Save& save) const;
  void take_part(int64_t host, const Try& of, std::optional<int64_t> ward, const Error* error, bool written);
  void proceed(int64_t now_ns, Actions& out);
  bool begin(Save& save, int64_t now_ns, Actions& out);
  std::optional<Error> why_not_begun(const Save& save, int64_t now_ns) const;
  std::optional<Error> late(const Save& save, int64_t now_ns) const;
  void conclude(Save& save, int64_t now_ns, Actions& out);

  const Limits limits_;
  std::map<int64_t, std::string> hosts_;
  std::set<int64_t> away_;  // of hosts_
  int64_t epoch_ = 0;
  std::map<int64_t, Save> saves_;            // by step
  std::optional<std::vector<Slot>> common_;  // of Settle, while no rank runs
  int64_t tries_ = 0;
  int64_t own_ = -1;
  std::vector<Ward> wards_;  // of the step of their slots
};

class Member {
 public:
  explicit Member(int64_t host, Limits limits = {}) : host_(host), limits_(limits) {}

  Actions step(const MemberEvent& event, int64_t now_ns);

  /// Whether the persister may Ask: the leader is at this step, has dropped it, or will never come to it.
  bool is_due(int64_t step) const;
  std::vector<Wait> waits() const;
  std::optional<Try> current(int64_t step) const;
  std::optional<Phase> phase(const Try& of) const;

 private:
  /// The leader's order of a step that the persister has not come to.
  struct Order {
    std::string folder;
    int64_t number = 0;  // 0: it has failed before hosts heard of it
    int64_t at_ns = 0;
    std::optional<Error> error;  // it is dropped
  };
  /// The try that the persister is at; the leader may be at the next already.
  struct Running {
    Order order;
    Phase phase = Phase::kBegun;
    bool gives_up = false;
    int64_t began_ns = 0, written_ns = 0;
    bool committed = false;
    bool orphan = false;  // its leader is lost: no word reaches it, and none is said of it
  };

  void on(const Ask& event, int64_t now_ns, Actions& out);
  void on(const PartWritten& event, int64_t now_ns, Actions& out);
  void on(const Failed& event, int64_t now_ns, Actions& out);
  void on(const GiveUp& event, int64_t now_ns, Actions& out);
  void on(const Thrown& event, int64_t now_ns, Actions& out);
  void on(const WardWritten& event, int64_t now_ns, Actions& out);
  void on(const Told& event, int64_t now_ns, Actions& out);
  void on(const LeaderLost& event, int64_t now_ns, Actions& out);
  void on(const Promised& event, int64_t now_ns, Actions& out);
  void on(const Resumed& event, int64_t now_ns, Actions& out);
  void on(const Look& event, int64_t now_ns, Actions& out);
  void on(const Tick& event, int64_t now_ns, Actions& out);

  Running* find(const Try& of);
  Running* find_told(const Try& of);
  int64_t until_ns(const Running& save) const;
  void take_order(const hosts::Save& order, int64_t now_ns, Actions& out);
  void take_dropped(const hosts::Dropped& dropped);
  void proceed(int64_t now_ns, Actions& out);

  const int64_t host_;
  const Limits limits_;
  std::map<int64_t, Order> orders_;     // by step
  std::map<int64_t, Running> running_;  // by step
  std::multiset<Try> with_wards_;       // of this leader: a ward is being written here
  int64_t resumed_step_ = -1;
  std::set<int64_t> here_, leaders_;  // of Resumed, and what was promised since
};

}  // namespace cairn::hosts::saves
