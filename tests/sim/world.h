#pragma once
// A run over hosts that lives in one thread, faster than the clock: the rules of saves (runtime/hosts/saves.h) and of
// generations as they are, and around them models of everything that feeds them. A life is a pure function of its
// description, so a seed replays.
//
// Modelled: training in step, memory with slots that outlives its agent, persisters, one shared disk, connections to
// the leader, agents that die and come again, copies of memory, and how hosts get from one generation of ranks to the
// next (runtime/hosts/generation.h, as it is). Not yet: a second leader, spares, two stores, skewed clocks.
//
// After each event these hold, or the life ends with the first that is broken:
//   parts      no step gets its name without the part of every host; each part is of that step
//   reported   a try that a host takes for saved has been committed
//   left       no host waits for a try that the leader has left, nor the leader for a part that no host will write
//   common     ranks start once all hosts have loaded the same step, from memory one that each has
//   copies     copies of the memory of hosts that are gone are used where they are held
//   loads      no start waits for a save that waits for a host which has nothing of that step
//   waits      every wait has a name and a deadline, and ends at it
//   ordered    no host begins a try after the leader's word that it is dropped
//   leaves     an agent that is asked to leave ends its waits at once
//   fails      without a fault no save fails
//   progress   once faults have stopped, two more steps are saved within kCalmS, and no promise is older than that;
//              else the run has ended with the right code

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cairn::sim {

enum class FaultKind : uint8_t {
  kCut,      // the connection to the leader breaks, and comes again after `seconds`
  kKill,     // the agent dies, and starts again after `seconds` with the memory of before
  kPower,    // the machine: the memory is lost too
  kLeave,    // the agent is asked to leave, and starts again
  kRank,     // a rank fails
  kFreeze,   // the agent stands still
  kSlow,     // its disk takes fifty times as long
  kHang,     // its disk answers nothing
  kFull,     // its disk is full
  kBroken,   // its disk fails
  kMemory,   // its next write runs out of memory
  kGone,     // the host never comes back; another one has a copy of its slots
  kExclude,  // the leader excludes the host; only in lives of members.h
  kStore,    // the store of epochs does not answer; the same
  kAll,      // the agents of all hosts die, and start again after `seconds` with the memory of before; the same
};
constexpr int64_t kFaultKinds = 12;  // of random_life()

struct Fault {
  double at_s = 0;
  FaultKind kind = FaultKind::kCut;
  int64_t host = 0;
  double seconds = 0;
};
/// "at 12.0 s: cut h1 for 20.0 s", and back; nullopt: no such fault.
std::string to_text(const Fault& fault);
std::optional<Fault> fault_from(std::string_view text);

struct Life {
  uint64_t seed = 0;  // of delays
  int64_t hosts = 2;
  int64_t in_flight = 1;
  int64_t save_steps = 5;  // a save each
  double step_s = 3;
  double faulty_s = 1000;  // from here on no fault
  bool members = false;    // a life of members.h, which has these:
  int64_t spares = 0;      // of the hosts
  int64_t smallest = 0;    // number of hosts that may train; 0: all places are needed
  double spare_after_s = 10;
  bool copies = false;  // of each host's memory at another: a spare whose place has one waits for nothing
  std::vector<Fault> faults;
};
/// Everything from the seed.
Life random_life(uint64_t seed);

constexpr double kCalmS = 420;

struct Outcome {
  std::optional<std::string> violation;
  std::string story;  // where it was asked for
  double seconds = 0;
  int64_t events = 0, saves = 0, failed = 0, generations = 0, messages = 0;
  double calm_s = 0;  // from the last fault to the second save after it
  int64_t ended = 0;  // with this code; 0: it trains on
};
Outcome live(const Life& life, bool story);
std::string to_text(const Life& life);
/// Reads the line that begins to_text(). False: it is none.
bool read_life(std::string_view line, Life& life);

/// Fewer faults, hosts and a shorter time with a violation of the same kind.
Life shrink(const Life& life);

}  // namespace cairn::sim
