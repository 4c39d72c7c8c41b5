#pragma once
// How the leader brings the hosts of a run from one *generation* of ranks to the next: it gathers the hosts, asks what
// their memory holds, gives hosts what others hold for them, has all load one choice, and lets ranks run. Pure:
// step(event, now) returns actions; no clock, no thread, no lock, no I/O. tools/run/hosts/fleet.h feeds events and
// performs actions; tests/sim lives thousands of lives with it.
//
//   Halting    ranks are being stopped, or none has run yet
//     Look
//   Gathering  the driver has the rule of membership find a host for each place (Gather, Gathered or GaveUp)
//   Asking     each host is asked for its memory (Ask, Heard Idle)
//   Measuring  where Look says so, the driver has all hosts measured (Measure, Measured)
//   Filling    one host after the other gets a slot that another one holds for it (Give, Heard Given)
//   Choosing   saves are settled (Settle), and the driver chooses what all resume from (Ready, Chosen)
//   Loading    all hosts load it (Heard Carried); ends with Loaded
//     Go
//   Running    until Halt
//   Ended      the run is over
//
// A host that is lost before Loading takes the leader back to Gathering, one that is lost while all load ends that with
// kPeerLost. Late answers count for nothing: an ask has a number, an order one generation.
//
// Wants::kLeft is for the last look at a membership that does not come back: copies of their memory stand for the hosts
// that are away.
//
// Every wait for another host has a name and a deadline (waits()); Tick ends it, and the host is taken for lost. A copy
// that the leader's own host does not give by then counts as one that cannot be had.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/core/error.h"
#include "runtime/hosts/message.h"

namespace cairn::hosts::generation {

struct Options {
  int64_t own = 0;         // index of the leader
  double answer_s = 600;   // for a connected host to say what its memory holds
  double give_s = 3600;    // for a host to give what it holds for another one, whose size is not known here
  double load_times = 10;  // beside that, so much of the time that the leader took to load, for a host to load
};

enum class Wants : uint8_t {
  kAll,    // hosts that are away are waited for
  kThere,  // a host that is away ends the look
  kLeft,   // a host that is away has its memory from copies
};

/// A wait for a host, which Tick ends.
struct Wait {
  int64_t host = 0;
  std::string what;  // "h1 to say what its memory holds"
  int64_t until_ns = 0;
};

// --- events ----------------------------------------------------------------------------------------------------------

/// No rank is to run; the hosts are looked at. From any phase but Ended.
struct Look {
  Wants wants = Wants::kAll;
  bool measures = false;
};
/// To Gather. The index of each place's host, the names of the others by index, and those of them that are away
/// (kLeft).
struct Gathered {
  std::vector<int64_t> places;
  std::map<int64_t, std::string> names;
  std::set<int64_t> away = {};
};
/// To Gather.
struct GaveUp {
  Error error;
};
/// Idle, CannotIdle, Given, Carried, Stopped or Left, of any host with a place, the leader's own too.
struct Heard {
  int64_t host = 0;
  Message what;
};
/// To Measure.
struct Measured {
  std::optional<Error> error = {};
};
/// To Ready: the order is out.
struct Chosen {
  uint64_t incarnation = 0;
};
/// After Loaded, or after Ready where there is nothing to load: ranks start.
struct Go {
  uint64_t incarnation = 0;
};
/// Ranks are being stopped.
struct Halt {};
struct Lost {
  int64_t host = 0;
  std::string why;
};
/// Somebody wants to stop.
struct Stop {};
struct End {};
/// Time has passed.
struct Tick {};

using Event = std::variant<Look, Gathered, GaveUp, Heard, Measured, Chosen, Go, Halt, Lost, Stop, End, Tick>;

// --- actions ---------------------------------------------------------------------------------------------------------

struct Say {
  std::string text;
};
/// Answered with Gathered or GaveUp.
struct Gather {
  Wants wants = Wants::kAll;
};
/// Each host with a place is asked for its memory, the leader's own too. Answered with Heard Idle or CannotIdle.
struct Ask {
  int64_t number = 0;
};
/// Answered with Measured.
struct Measure {};
/// `holder` sends the host of `place` what it holds for it of this slot. Answered with Heard Given of the holder.
struct Give {
  int64_t holder = 0;
  Slot slot;
  int64_t place = 0;
};
/// saves::Settle.
struct Settle {
  std::vector<Slot> common;
};
/// The memory that all other hosts have in common. Answered with Chosen or another Look.
struct Ready {
  Memory common;
};
/// To Chosen: all hosts have loaded it. Answered with Go.
struct Loaded {};
/// To Look or Chosen. kPeerLost: a host was lost while all loaded.
struct Failed {
  Error error;
};
/// It is connected and silent. The driver breaks its connection, and feeds Lost.
struct Drop {
  int64_t host = 0;
  std::string why;
};

using Action = std::variant<Say, Gather, Ask, Measure, Give, Settle, Ready, Loaded, Failed, Drop>;
using Actions = std::vector<Action>;

// --- the rule --------------------------------------------------------------------------------------------------------

class Leader {
 public:
  explicit Leader(Options options) : options_(options) {}

  Actions step(const Event& event, int64_t now_ns);

  std::vector<Wait> waits() const;
  bool is_running() const { return std::holds_alternative<Running>(phase_); }
  bool is_loading() const { return std::holds_alternative<Loading>(phase_); }
  /// The number of the ranks that were ordered last.
  uint64_t incarnation() const { return incarnation_; }
  /// All ranks of the other hosts have ended with 0, or have stopped.
  bool all_left() const;
  bool all_stopped() const;
  /// The slots that a host holds for another one, as it has answered.
  Held held(int64_t host) const;
  /// The hosts that are away and for which another one holds this slot.
  std::vector<Ward> wards(const Slot& slot) const;

 private:
  struct Halting {};
  struct Gathering {};
  struct Asking {
    int64_t until_ns = 0;
    std::set<int64_t> owe;
  };
  struct Measuring {};
  struct Filling {
    int64_t until_ns = 0;
    Give now;
  };
  struct Choosing {};
  struct Loading {
    int64_t since_ns = 0;
    double limit_s = 0;  // 0: the leader's own host still loads
    std::map<int64_t, std::optional<Error>> carried;
    bool over = false;
  };
  struct Running {};
  struct Ended {};
  using Phase = std::variant<Halting, Gathering, Asking, Measuring, Filling, Choosing, Loading, Running, Ended>;

  void on(const Look& event, int64_t now_ns, Actions& out);
  void on(const Gathered& event, int64_t now_ns, Actions& out);
  void on(const GaveUp& event, int64_t now_ns, Actions& out);
  void on(const Heard& event, int64_t now_ns, Actions& out);
  void on(const Measured& event, int64_t now_ns, Actions& out);
  void on(const Chosen& event, int64_t now_ns, Actions& out);
  void on(const Go& event, int64_t now_ns, Actions& out);
  void on(const Halt& event, int64_t now_ns, Actions& out);
  void on(const Lost& event, int64_t now_ns, Actions& out);
  void on(const Stop& event, int64_t now_ns, Actions& out);
  void on(const End& event, int64_t now_ns, Actions& out);
  void on(const Tick& event, int64_t now_ns, Actions& out);

  void take_memory(int64_t host, int64_t ask, Idle idle, std::optional<Error> error, int64_t now_ns, Actions& out);
  void take_given(int64_t host, const std::optional<Error>& error, int64_t now_ns, Actions& out);
  void take_carried(int64_t host, const std::optional<Error>& error, int64_t now_ns, Actions& out);
  void regather(Actions& out);
  void fail(Error error, Actions& out);
  void asked(int64_t now_ns, Actions& out);
  void fill(int64_t now_ns, Actions& out);
  void finish(Actions& out);
  void conclude(Loading& loading, Actions& out);
  int64_t until_ns(const Loading& loading) const;
  std::set<int64_t> silent() const;
  std::optional<Slot> newest(bool with_copies) const;
  std::vector<Slot> memory_of(int64_t place) const;
  std::optional<int64_t> holder_of(int64_t place) const;
  std::vector<Slot> copies_of(int64_t place) const;

  const Options options_;
  Phase phase_;
  Look look_;
  std::vector<int64_t> places_;           // index of each place's host
  std::map<int64_t, std::string> names_;  // of the others with a place
  std::set<int64_t> away_;                // of those
  bool lost_one_ = false;                 // since they were gathered
  int64_t asks_ = 0;
  std::map<int64_t, Idle> answers_;               // by host
  std::optional<Error> refused_;                  // a host cannot continue
  std::set<std::pair<int64_t, int64_t>> unheld_;  // place and step of a copy that could not be had
  uint64_t incarnation_ = 0;
  std::set<int64_t> stopped_, left_;  // of its ranks
};

}  // namespace cairn::hosts::generation
