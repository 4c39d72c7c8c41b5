#pragma once
// Which hosts of a run train, which wait as spares, how many the run continues with, and when another host leads: what
// agents decide about each other. Pure: step(event, now) returns actions; no clock, no thread, no lock, no I/O.
// tools/run/hosts/fleet.h feeds events and performs actions; tests/sim/members.h lives thousands of lives with it.
//
// A host's *index* is the launcher's, its *place* that of its ranks in the world; a spare has no place. An *epoch* is a
// leader and the hosts with a place; its record can be made once (runtime/cluster/epoch_store.h).
//
//   Idle       no wait
//     Gather, or Resize without its hosts
//   Gathering  hosts with a place are away: each may come back, until its grace ends
//     Tick     all have come, or spares for those whose grace has ended, or enough for a smaller size
//   Judging    the driver looks whether a newer epoch has begun (CheckEpoch, Leads); as long as the store does not
//   answer
//              it looks again each second, until the gathering's end
//   Claiming   places are given to spares, and the driver makes the record (Claim, Claimed)
//     Gathered or GaveUp
//   Idle       also after Judging, where no host is away: the epoch stays
//
// The grace of a host that is away is counted from when this leader knew of it, never from a time that the host says.
// More than half of the places away: the leader lets its lease stand still, for the others may have another leader.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "runtime/core/error.h"

namespace cairn::hosts::membership {

struct Options {
  int64_t hosts = 0;               // spares included
  int64_t own = 0;                 // index of the leader
  std::vector<std::string> names;  // of the launcher, by index; may be empty
  std::vector<int64_t> places;     // index of each place's host
  double dead_after_s = 3;         // a silent host is lost then
  double fewer_after_s = 10;       // for larger(): a spare stays that has waited this long
  double alone_s = 0;              // a leader that has just begun holds its lease this long even without the others
  int64_t epoch = 0;               // number of the newest one
  bool leads = false;              // this host has claimed that one
  int64_t led_before = -1;         // the index that led before this host claimed the lead
};

/// The index of each place's host at a start: as in the epoch before (`before`, by place), whose hosts have memory of
/// their places, or in order where that one does not fit: `train` places of `hosts` hosts, or one of `sizes`, `own`
/// among them.
std::vector<int64_t> first_places(const std::vector<int64_t>& before, int64_t train, const std::set<int64_t>& sizes,
                                  int64_t hosts, int64_t own);

/// Whether host 0 leads a start. Else a host with a place in the epoch before (`before`) does, and claims the lead as
/// if a leader were lost: hosts resume from memory in their places, and a leader needs one.
bool first_leads(const std::vector<int64_t>& before);

/// How long a lease stands still before another host claims the lead, in seconds. `every_s`: between two signs of the
/// leader; `stale_s`: so old may be what the store shows.
double claims_after_s(double dead_after_s, double every_s, double stale_s);

/// The knowledge of a host that cannot reach its leader.
struct Silence {
  double still_s = 0;            // since the lease changed last
  double claims_after_s = 0;     // as above
  bool has_joined = false;       // an epoch of this run
  int64_t place = -1;            // in the epoch that it joined; -1: a spare
  int64_t place_in_newest = -1;  // in the newest epoch of the store
  bool starts = false;           // no epoch was joined since this agent began, and host 0 does not lead (first_leads)
};
/// Whether that host claims the next epoch. The host that has its place now may, where it has lost it.
bool claims_lead(const Silence& silence);

/// A little longer than two tries of a store that does not answer, 5.25 s each. A leader that stood still may have been
/// followed by another one, and must not take its last failure for a fresh one.
inline constexpr double kStoreTriesS = 11;

/// The knowledge of a leader that is about to write into the run.
struct Sign {
  double since_shown_s = 0;   // the last sign that it has shown others
  double since_failed_s = 0;  // the last that the store did not take
  double stood_still_s = 0;   // this process, within kStoreTriesS; 0: it did not
  double claims_after_s = 0;  // as above
};
/// Whether no host can have claimed the lead meanwhile; else the leader asks for a newer epoch first. A store that
/// takes no sign takes no claim either; a leader that stood still does not know for how long that was so.
bool leads_surely(const Sign& sign);

/// A wait for a host, which Tick ends.
struct Wait {
  int64_t host = 0;
  std::string what;  // "h1 (it has not joined)"
  int64_t until_ns = 0;
};

// --- events ----------------------------------------------------------------------------------------------------------

/// Each place has to have a host. Hosts are away for `patience_s` at most, and each for `spare_after_s` before a spare
/// stands in for it, or `fewer_after_s` before a smaller size does. `announces`: Say names the hosts that are away.
/// `holders`: by place, the place whose host holds the copy of its memory; empty: no copy is complete. A host whose
/// copy is at no host that was heard since may have the only memory of its place: a spare waits the longer of both
/// times.
struct Gather {
  double patience_s = 0, spare_after_s = 0;
  std::string reason;  // of the next epoch
  bool announces = false;
  double fewer_after_s = spare_after_s;
  std::vector<int64_t> holders = {};
};
/// These have come and wait to be let in; they may leave again.
struct AtDoor {
  std::set<int64_t> hosts;
};
/// From here on messages reach it.
struct Admitted {
  int64_t host = 0;
  std::string name;
};
struct Lost {
  int64_t host = 0;
  std::string why;
};
/// When the hosts that are connected were heard last, by the clock of step(): one that is cut off counts as connected
/// until its silence is noticed.
struct Heard {
  std::map<int64_t, int64_t> at_ns;  // by index
};
/// It has come, and may not join: it is on the list of excluded hosts.
struct Barred {
  int64_t host = 0;
};
/// It leaves the run, and is not let in again until it has booted.
struct Exclude {
  int64_t host = 0;
  std::string reason;
};
/// The next epoch has this many places, for the hosts that have come. Where one was lost since that size was found,
/// this gathers as Gather does, and takes the size that is found then at once: hosts fall in groups, as a rack or a
/// switch.
struct Resize {
  int64_t hosts = 0;
  double patience_s = 0;
};
/// To CheckEpoch; `error`: why this host leads no more (kUnavailable), or that it is not known: the store is asked
/// again.
struct Leads {
  std::optional<Error> error = {};
};
/// To Claim.
struct Claimed {
  std::optional<Error> error = {};
};
/// Somebody wants to stop, or another leader has been seen.
struct Stop {};
/// Time has passed.
struct Tick {};

using Event = std::variant<Gather, AtDoor, Admitted, Lost, Heard, Barred, Exclude, Resize, Leads, Claimed, Stop, Tick>;

// --- actions ---------------------------------------------------------------------------------------------------------

struct Say {
  std::string text;
};
/// Whether the leader's lease is shown anew from here on.
struct HoldLease {
  bool held = true;
};
/// Answered with Leads.
struct CheckEpoch {};
/// Makes the record of this epoch, and lets in who stands at the door. Answered with Claimed, then Admitted for each.
struct Claim {
  int64_t number = 0;
  std::vector<int64_t> places;  // index of each place's host
  std::string reason;
};
/// These are let in. Answered with Admitted for each.
struct Admit {
  std::set<int64_t> hosts;
};
/// It has lost its place; the driver sends it that.
struct Rest {
  int64_t host = 0;
};
/// To Gather or Resize. All places have hosts that have come; the epoch has begun.
struct Gathered {};
/// To Gather or Resize. kUnavailable with smaller(): the run may continue with that size (of Gather).
struct GaveUp {
  Error error;
};

using Action = std::variant<Say, HoldLease, CheckEpoch, Claim, Admit, Rest, Gathered, GaveUp>;
using Actions = std::vector<Action>;

// --- the rule --------------------------------------------------------------------------------------------------------

class Leader {
 public:
  Leader(Options options, int64_t now_ns);

  /// Numbers of hosts that the run may continue with; none: only its own. Before Gather.
  void allow_sizes(std::set<int64_t> sizes) { sizes_ = std::move(sizes); }
  bool may_change_size() const { return !sizes_.empty(); }

  Actions step(const Event& event, int64_t now_ns);

  std::vector<Wait> waits() const;
  /// Set when hosts are away for good and no spare stands in: the size for Resize.
  std::optional<int64_t> smaller() const { return smaller_; }
  /// Set when spares have come with which the run could have this size.
  std::optional<int64_t> larger(int64_t now_ns) const;
  /// Another host can take a place at once, or one fewer may train.
  bool can_spare_one() const;
  /// A host with a place is away.
  bool someone_away() const;
  /// "h1 (the connection broke), h2 (it has not joined)"
  std::string who_is_away() const;
  /// The run continues with smaller().
  Error goes_on_smaller() const;

  int64_t epoch() const { return options_.epoch; }
  /// Index of each place's host.
  const std::vector<int64_t>& places() const { return options_.places; }
  int64_t own_place() const { return own_place_; }
  /// -1: it has none.
  int64_t place(int64_t host) const;
  /// Its messages reach this host.
  bool is_there(int64_t host) const { return host == options_.own || hosts_.at(host).there; }
  const std::string& name(int64_t host) const { return hosts_.at(host).name; }
  /// "the connection broke"; empty or old while that host is connected.
  const std::string& why_away(int64_t host) const { return hosts_.at(host).away; }
  bool is_excluded(int64_t host) const { return hosts_.at(host).excluded; }

 private:
  struct Host {
    int64_t place = -1;
    std::string name;
    std::string away;  // why
    int64_t away_since_ns = 0, there_since_ns = 0, heard_ns = 0;
    bool there = false;
    bool joined = false;    // it has been there
    bool excluded = false;  // and so it is not waited for
  };
  struct Idle {};
  struct Gathering {
    Gather how;
    int64_t until_ns = 0;
    bool resizes = false;  // of Resize
    bool stops = false;
    std::optional<Error> unknown = {};  // the store did not answer last
    int64_t ask_again_ns = 0;           // then
  };
  struct Judging {
    Gathering of;
    std::optional<Error> failed;  // what ends the gathering, unless another host leads
  };
  struct Claiming {};
  using Phase = std::variant<Idle, Gathering, Judging, Claiming>;

  void on(const Gather& event, int64_t now_ns, Actions& out);
  void on(const AtDoor& event, int64_t now_ns, Actions& out);
  void on(const Admitted& event, int64_t now_ns, Actions& out);
  void on(const Lost& event, int64_t now_ns, Actions& out);
  void on(const Heard& event, int64_t now_ns, Actions& out);
  void on(const Barred& event, int64_t now_ns, Actions& out);
  void on(const Exclude& event, int64_t now_ns, Actions& out);
  void on(const Resize& event, int64_t now_ns, Actions& out);
  void on(const Leads& event, int64_t now_ns, Actions& out);
  void on(const Claimed& event, int64_t now_ns, Actions& out);
  void on(const Stop& event, int64_t now_ns, Actions& out);
  void on(const Tick& event, int64_t now_ns, Actions& out);

  void gather(Gathering gathering, int64_t now_ns, Actions& out);
  void proceed(int64_t now_ns, Actions& out);
  void resize(int64_t hosts, Actions& out);
  bool holds_lease(int64_t now_ns) const;
  void give_up(Error error, Actions& out);
  void claim(const std::string& reason, Actions& out);
  void set_places(std::vector<int64_t> places);
  void give_places_to_spares(Actions& out);
  std::vector<int64_t> missing(const Gathering& gathering, int64_t now_ns);
  bool is_due(int64_t host, double grace_s, int64_t now_ns) const;
  bool is_copied(const std::vector<int64_t>& holders, int64_t host) const;
  double spare_grace_s(const Gather& how, int64_t host) const;
  bool has_come(int64_t host) const { return hosts_.at(host).there || door_.contains(host); }
  bool is_away(int64_t host) const { return host != options_.own && !hosts_.at(host).there; }
  std::vector<int64_t> free_spares(bool at_door) const;
  int64_t count_there(bool spares, bool at_door) const;
  std::optional<int64_t> size_for(int64_t hosts) const;
  std::string missing_text(const std::vector<int64_t>& missing) const;

  Options options_;
  std::set<int64_t> sizes_;
  std::map<int64_t, Host> hosts_;  // the others by index
  std::set<int64_t> door_;
  int64_t own_place_ = -1;
  Phase phase_;
  std::optional<int64_t> smaller_;
  int64_t alone_until_ns_ = 0;
  bool held_ = true;
};

}  // namespace cairn::hosts::membership
