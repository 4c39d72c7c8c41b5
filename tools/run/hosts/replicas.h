#pragma once
// Copies of a host's bank in the memory of another one, so that a host which dies loses no step
// (checkpoint.replicate). The copy of place p is held by its *buddy*, the host half the ring away.
//
// Its messages stand in runtime/hosts/message.h, under "copies of memory". Between SendBank and WholeBank the bytes of
// the slots travel, rank by rank, as they lie there.
//
// The rank that decides marks a bank (arena::Control::replica) at the end of its step; no update writes it from then
// on. Each agent sends its part and tells the leader. When all hosts have, the leader says so (agreed): that bank stays
// marked until a later one is agreed, and those before are free. So each host has in memory what every copy is of. One
// copy at a time is under way. A holder has two slots: it never writes the one that was complete last.
//
// Where other hosts keep all that a host saves anyway (ckpt/plan/free_copies.h) nothing is sent. The holder is one of
// them, its ranks put what they keep into the holder's memory as they publish a step, and no bank is marked: a copy is
// complete with its step, of each step that is a snapshot.
//
// A lost host's bank goes the same way to the host that takes its place (give()), into that one's own memory. Where
// nobody takes it the holder writes that host's part of a save (write_part()).
//
// One object for the life of the agent: what it holds is there for whoever leads next. Threads: a listener with a
// thread for each connection, a sender; the functions below are called from the agent's loop.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ckpt/persist/write_parts.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/restore.h"
#include "ckpt/snapshot/arena.h"
#include "runtime/cluster/connection.h"
#include "runtime/cluster/guests.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"
#include "runtime/hosts/message.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

/// Whose memory has the copy of this place.
constexpr int64_t buddy_of(int64_t place, int64_t hosts) { return (place + hosts / 2) % hosts; }
/// Whose copy the host of this place holds.
constexpr int64_t ward_of(int64_t place, int64_t hosts) { return (place + hosts - hosts / 2) % hosts; }

/// The slot of memory that ranks resume from; nullopt: from none.
std::optional<ckpt::WholeSlot> slot_of(const ckpt::RestoreChoice& choice);

/// What a host holds for another one, and where it listens. In `whole` slots are those that the copies are of.
struct Held {
  int64_t place = -1;  // whose; -1: nobody's
  int64_t port = 0;    // 0: it takes none
  std::vector<ckpt::WholeSlot> whole;
};

using hosts::PeerAddress;

/// Whose copy the host of this place holds; `free`: ckpt::free_holders().
int64_t ward_of(int64_t place, int64_t hosts, std::span<const int64_t> free);
/// Memory for the copies that the host of this place holds: two slots of another one's ranks, or where copies are free
/// as many as those have. Errors: as arena_spec().
Result<ckpt::ArenaSpec> ward_spec(const Plan& plan, const ckpt::RunText& run, int64_t place, int64_t hosts);

class Replicas {
 public:
  struct Options {
    int64_t port_from = 24512, port_to = 25535;
  };
  explicit Replicas(Options options) : options_(std::move(options)) {}
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  struct Segment {
    const Plan& plan;
    ckpt::RunText run;
    ckpt::Arena& arena;
    int64_t place = 0, hosts = 0;
    std::string token;
    /// From the sender's thread. Empty `why`: the copy of this step is complete at the buddy, after so many bytes.
    std::function<void(int64_t step, int64_t bytes, const std::string& why)> sent;
    std::function<void(const std::string&)> warn;  // from attach()
  };
  /// The memory of this host's ranks, until detach(). Where the recipe wants no copies, or the memory has no banks for
  /// them, nothing is sent or taken. Where copies are free and there is no memory for them, none are kept here, which
  /// is told. Errors: kUnavailable: no port is free.
  Status attach(Segment segment);
  void detach();

  /// No rank runs: what is under way may end within a moment, and nothing is sent or taken any more.
  void halt();
  /// Ranks are about to run, from this slot of memory or from none. Copies go to `buddy`; those that come are of this
  /// epoch.
  void begin(int64_t epoch, PeerAddress buddy, const std::optional<ckpt::WholeSlot>& from);
  /// All hosts have copied this step.
  void agreed(int64_t step);
  /// Some host has not: its banks are free again.
  void dropped(int64_t step);

  Held held() const;
  /// By place, the place whose host holds the copy of its memory. Empty: no copies are kept, or none is complete yet of
  /// a step that the ranks have made since begin(). Kept after detach(), for a host that leads next.
  std::vector<int64_t> holders() const;
  /// Copies cost no byte of the network: ranks make them.
  bool are_free() const;
  /// Of the memory that this host's ranks put them in, to inherit; none: they make no copies.
  Result<Fd> descriptor() const;
  /// Writes what is held of this bank as its host would write its part of a save (ckpt::write_parts). Any thread.
  Result<ckpt::PartSet> write_part(const ckpt::WholeSlot& slot, ckpt::IoBackend& io,
                                   const std::filesystem::path& work) const;
  /// Sends what is held of this step to the host that takes the place, into its slot. `done` from the sender's thread.
  void give(const ckpt::WholeSlot& slot, PeerAddress to, std::function<void(const Status&)> done);

 private:
  struct Gift {
    ckpt::WholeSlot slot;
    PeerAddress to;
    std::function<void(const Status&)> done;
  };
  struct Incoming {
    explicit Incoming(cluster::Connection from) : connection(std::move(from)) {}
    cluster::Connection connection;
    std::atomic<bool> ended = false;
    std::thread thread;
  };
  struct Friend {  // a sender that has proved the run's token
    bool restores = false;
    int64_t epoch = 0;
  };
  void listen();
  void admit(cluster::Guest guest, const cluster::Message& message);
  Status serve(cluster::Connection& connection, const Friend& from);
  Status take_bank(cluster::Connection& connection, const hosts::Bank& head, bool restores);
  void send();
  void send_marked(int64_t slot, int64_t step);
  void give_away(Gift gift);
  Status make_ward();
  void forget_all_but(const std::optional<ckpt::WholeSlot>& from);
  std::optional<int64_t> marked_slot();
  int64_t bank_of(int64_t slot) const;
  Result<int64_t> ward_slot_of(const ckpt::WholeSlot& slot) const;

  const Options options_;
  std::optional<cluster::Guests> guests_;  // what has proved nothing yet; of the listener's thread
  int64_t port_ = 0;                       // where that listens
  std::thread listening_, sending_;
  std::list<Incoming> incoming_;  // what has proved the token; of the listener's thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Segment> segment_;
  bool wants_ = false;    // copies: the recipe does, and the memory has banks for them
  bool free_ = false;     // and ranks make them
  bool running_ = false;  // ranks; between begin() and halt()
  PeerAddress buddy_;
  std::deque<Gift> gifts_;
  int64_t sent_step_ = -1;                       // of the mark that was dealt with last
  std::atomic<int64_t> epoch_ = 0, busy_ = 0;    // busy_: banks that are being sent or taken
  std::atomic<bool> cut_ = true, ends_ = false;  // cut_: no copy is sent or taken

  std::mutex of_own_;                        // held while the memory of this host's ranks is read or filled here
  std::optional<cluster::Connection> link_;  // to the buddy; of the sender's thread

  std::atomic<bool> agreed_ = false;  // on a step, since begin()

  mutable std::mutex of_ward_;  // of what follows: held while a copy is taken or given
  std::optional<ckpt::ArenaSpec> ward_spec_;
  std::optional<ckpt::Arena> ward_;  // of the ward's ranks
  int64_t ward_place_ = -1;
  std::vector<int64_t> holders_;     // by place
  int64_t begun_from_ = -1;          // the step of begin()
  std::vector<int64_t> ward_slots_;  // by slot of ward_: that of the bank that came; -1: ranks write it, of theirs
};

}  // namespace cairn::tools
