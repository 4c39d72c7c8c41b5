#pragma once
// How a host that follows gets from one generation of ranks to the next: it joins the leader, opens memory for what is
// trained, says what that holds, loads what the leader has chosen (generation.h), and lets ranks run. Pure:
// step(event, now) returns actions; no clock, no thread, no lock, no I/O. tools/run/agent/follower.h feeds events and
// performs actions; tests/sim lives thousands of lives with it.
//
// The leader, for this host:
//   Away       none is connected; ranks are being stopped
//   Joining    none, and no rank runs: the driver looks for one (Join, Joined, Silent, JoinFailed), until a deadline
//   AtDoor     a leader has this host's word and gathers its hosts; it decides how long that takes (AtDoor)
//   There      until LeaderLost
//
// This host:
//   Outside    it has no memory open: it is a spare, or waits for what is trained (Open)
//   Opening    the driver makes memory for a segment (Idled or Refused)
//   Refusing   it could not: the leader's next question is answered with that, which ends the run
//   Idle       no rank runs; questions are answered (Answer, GiveCopy)
//   Loading    the driver loads what the leader has chosen (Load, Loaded)
//   Loaded     until the leader's word to go (Run)
//   Running    until the leader halts or is lost, a rank fails, or the run ends
//   Stopping   ranks are being stopped (StopRanks, Idled)
//   Leaving    the driver closes the memory, which is not needed or is of another place (Leave, Closed)
//   Over       the run has ended, this host leads, or it gives up
//
// A leader is joined for join_s at first, for wait_s after that. At a leader's door only the leader's own time counts,
// for it may have begun later than this host: the driver stays there while that leader lives, order_s at most. A
// connected leader owes a host with open memory its next order; its own waits for other hosts end long before order_s,
// and so one that is silent for that long is dropped and joined anew.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "runtime/core/error.h"
#include "runtime/hosts/message.h"

namespace cairn::hosts::member {

struct Options {
  int64_t hosts = 0;       // of the launcher: no segment has more
  int64_t train = 0;       // of those, before an epoch is known
  double join_s = 300;     // for a leader, until one was joined
  double wait_s = 600;     // for one to be joined again
  double order_s = 7200;   // for a leader that lives to say something, while no rank runs
  double load_times = 10;  // beside that, so much of the time that this host took to load
};

/// A wait for the leader, which Tick ends.
struct Wait {
  std::string what;  // "the leader to be joined"
  int64_t until_ns = 0;
};

// --- events ----------------------------------------------------------------------------------------------------------

/// This host's place in the leader's epoch (-1: a spare), the number of places, and the leader's.
struct Joined {
  int64_t place = -1, hosts = 0, leader = 0, epoch = 0;
};
/// There is no use in looking further.
struct JoinFailed {
  Error error;
};
/// A leader that lives knows of this host, and says nothing before its hosts have gathered.
struct AtDoor {};
/// A look for a leader was in vain. The lease's age, the age at which the lead is claimed, this host's place in the
/// newest epoch of the store, and whether a host of that one leads a start (membership::Silence).
struct Silent {
  double still_s = 0, claims_after_s = 0;
  int64_t place_in_newest = -1;
  bool starts = false;
};
/// To Claim. `leads`: the epoch is made, with this place and number of places; else another host was first.
struct Claimed {
  bool leads = false;
  int64_t place = -1, hosts = 0;
};
/// The leader's last word lay in the run folder.
struct EndFound {
  int64_t code = 0;
};
struct LeaderLost {
  std::string why;
};
/// The leader's message. The driver itself takes those for ranks and saves.
struct Told {
  Message what;
};
/// Memory is open, and no rank runs.
struct Idled {};
/// To Open: there is no memory.
struct Refused {
  Error error;
};
/// To Load.
struct Loaded {
  std::optional<Error> error = {};
};
/// A rank has failed here, or StopRanks is being carried out: ranks are being stopped.
struct Failing {
  Failure failure;
};
/// All ranks of this host have ended with 0.
struct AllLeft {};
/// To Leave, or ranks have ended: memory is not open any more.
struct Closed {};
/// A person asks the run to stop, or for a save.
struct WantsStop {
  int64_t signal = 0;
};
struct WantsSave {
  std::string by;
};
/// This agent has to leave now.
struct LeaveNow {};
/// Time has passed.
struct Tick {};

using Event = std::variant<Joined, JoinFailed, AtDoor, Silent, Claimed, EndFound, LeaderLost, Told, Idled, Refused,
                           Loaded, Failing, AllLeft, Closed, WantsStop, WantsSave, LeaveNow, Tick>;

// --- actions ---------------------------------------------------------------------------------------------------------

struct Say {
  std::string text;
};
struct Send {
  Message what;
};
/// A leader is looked for. Answered with Joined or JoinFailed; with Silent as long as none is found.
struct Join {};
/// This host is to make the next epoch. Answered with Claimed.
struct Claim {};
/// It is alive and silent. The driver breaks its connection, and feeds LeaderLost.
struct Drop {
  std::string why;
};
/// A spare makes memory in advance.
struct MakeSpare {
  Segment segment;
};
/// A spare measures nothing any more.
struct EndCheck {};
/// Answered with Idled or Refused.
struct Open {
  Segment segment;
};
/// The driver sends hosts::Idle with what the memory holds.
struct Answer {
  int64_t ask = 0;
};
/// The driver sends hosts::Given when it is done.
struct GiveCopy {
  Give order;
};
/// Answered with Loaded.
struct Load {
  Resume order;
};
/// Ranks start with the last Load. `promised`: Resume::promised.
struct Run {
  std::set<int64_t> promised;
};
/// Answered with Idled.
struct StopRanks {
  std::string why;
};
/// Memory is closed, and removed where is_displaced(). Answered with Closed. kStopped: goes_on() says for what.
struct Leave {
  Error why;
};
/// nullopt: the run has ended (end()), or this host leads.
struct GaveUp {
  std::optional<Error> error;
};

using Action = std::variant<Say, Send, Join, Claim, Drop, MakeSpare, EndCheck, Open, Answer, GiveCopy, Load, Run,
                            StopRanks, Leave, GaveUp>;
using Actions = std::vector<Action>;

// --- the rule --------------------------------------------------------------------------------------------------------

class Member {
 public:
  explicit Member(Options options) : options_(options), hosts_(options.train) {}

  Actions step(const Event& event, int64_t now_ns);

  std::vector<Wait> waits() const;
  /// -1: a spare.
  int64_t place() const { return place_; }
  int64_t hosts() const { return hosts_; }
  int64_t leader_place() const { return leader_place_; }
  bool is_joined() const { return std::holds_alternative<There>(leader_); }
  /// Until when a leader is looked for, or waited for at its door; nullopt: none is.
  std::optional<int64_t> joins_until_ns() const;
  /// Memory is open, or being made.
  bool is_open() const;
  bool is_running() const { return std::holds_alternative<Running>(phase_); }
  /// Has loaded what the ranks of that number start with.
  bool has_loaded(uint64_t incarnation) const;
  /// The number of the ranks that ran last.
  uint64_t incarnation() const { return incarnation_; }
  /// Open memory is of another place, or of another number of hosts.
  bool is_displaced() const { return displaced_; }
  /// The leader's last word.
  const std::optional<End>& end() const { return end_; }
  /// Another segment follows, or this host has lost its place, or it leads.
  bool goes_on() const { return next_.has_value() || displaced_ || leads_; }

 private:
  struct Away {};
  struct Joining {
    int64_t until_ns = 0;
    std::optional<int64_t> door_until_ns = {};  // at a leader's door
  };
  struct There {
    int64_t heard_ns = 0;
    bool stop_told = false;
  };
  struct Outside {};
  struct Opening {};
  struct Refusing {
    Error why;
  };
  struct Idle {};
  struct Loading {
    int64_t since_ns = 0;
    uint64_t incarnation = 0;
    std::set<int64_t> promised;
  };
  struct HasLoaded {
    Loading of;
    double took_s = 0;
  };
  struct Running {
    bool left = false;  // all have ended with 0
  };
  struct Stopping {};
  struct Leaving {};
  struct Over {};
  using Phase = std::variant<Outside, Opening, Refusing, Idle, Loading, HasLoaded, Running, Stopping, Leaving, Over>;

  void on(const Joined& event, int64_t now_ns, Actions& out);
  void on(const JoinFailed& event, int64_t now_ns, Actions& out);
  void on(const AtDoor& event, int64_t now_ns, Actions& out);
  void on(const Silent& event, int64_t now_ns, Actions& out);
  void on(const Claimed& event, int64_t now_ns, Actions& out);
  void on(const EndFound& event, int64_t now_ns, Actions& out);
  void on(const LeaderLost& event, int64_t now_ns, Actions& out);
  void on(const Told& event, int64_t now_ns, Actions& out);
  void on(const Idled& event, int64_t now_ns, Actions& out);
  void on(const Refused& event, int64_t now_ns, Actions& out);
  void on(const Loaded& event, int64_t now_ns, Actions& out);
  void on(const Failing& event, int64_t now_ns, Actions& out);
  void on(const AllLeft& event, int64_t now_ns, Actions& out);
  void on(const Closed& event, int64_t now_ns, Actions& out);
  void on(const WantsStop& event, int64_t now_ns, Actions& out);
  void on(const WantsSave& event, int64_t now_ns, Actions& out);
  void on(const LeaveNow& event, int64_t now_ns, Actions& out);
  void on(const Tick& event, int64_t now_ns, Actions& out);

  void take_begin(const Begin& begin);
  void take_end(const End& end, Actions& out);
  void take_halt(const Halt& halt, Actions& out);
  void take_resume(const Resume& order, int64_t now_ns, Actions& out);
  void take_go(const Go& go, Actions& out);
  void take_place(int64_t place, int64_t hosts);
  bool is_idle() const { return std::holds_alternative<Idle>(phase_) || std::holds_alternative<HasLoaded>(phase_); }
  void answer(Actions& out);
  void stop_ranks(std::string why, Actions& out);
  void leave(Error why, Actions& out);
  void give_up(std::optional<Error> error, Actions& out);
  void tell_wishes(Actions& out);
  void settle(int64_t now_ns, Actions& out);
  std::optional<int64_t> order_until_ns() const;

  const Options options_;
  std::variant<Away, Joining, There> leader_;
  Phase phase_;
  std::string away_;         // why the leader is
  bool has_joined_ = false;  // an epoch of this run
  int64_t place_ = -1, hosts_ = 0, leader_place_ = 0;
  bool displaced_ = false, leads_ = false;
  std::optional<Segment> segment_, next_;  // that this host is at; that follows it
  std::optional<End> end_;
  std::optional<int64_t>
      halt_;  // a question of the leader that is still to be answered; 0: it only wants ranks stopped
  uint64_t incarnation_ = 0;
  int64_t stop_signal_ = 0;  // 0: no stop is asked for
  std::string save_by_;      // empty: no save is asked for
};

}  // namespace cairn::hosts::member
