#pragma once
// The messages of a run's hosts: a struct for each, all in one variant, and one codec between them and JSON. Each says
// which agent sends it, which one answers, and with what. *Leader* and *host* are agents; *sender* and *holder* are
// agents whose memory is copied from one to the other (tools/run/hosts/replicas.h).
//
// The codec believes nothing. It refuses an unknown kind, a missing field, an unknown field and a value that the field
// cannot have, each by name, so agents of two programs never guess what the other one means. A field that is optional
// may be missing. Two messages may share a kind; a field that only one of them has tells them apart (kMark).
//
// Some values stay JSON here, since their owner's reader checks them: a rank's lines (runtime/agent), stacks
// (agent::rank_stacks_from_json), figures of GPUs (tools/run/check/gpu_judge.h), the record of a failure
// (tools/run/folder/failure_record.h). These types have to move down before the structs can hold them. A hello stays
// JSON until its proof holds.
//
// Pure: no sockets, no clocks, no threads.

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::hosts {

using Json = nlohmann::json;

// --- parts of messages -----------------------------------------------------------------------------------------------

inline constexpr int64_t kMostSlots = 10;  // of an arena

/// A slot that holds a complete step (ckpt::WholeSlot).
struct Slot {
  int64_t slot = 0;
  uint64_t incarnation = 0;
  int64_t step = 0;
  bool operator==(const Slot&) const = default;
};

/// The complete slots in a host's memory of its own place (ckpt::HostMemory).
struct Memory {
  uint64_t incarnation = 0;
  std::vector<Slot> whole;
  bool operator==(const Memory&) const = default;
};

/// The slots that a host holds for another one, and where it listens.
struct Held {
  int64_t place = -1;  // the other one's; -1: none
  int64_t port = 0;    // 0: it takes none
  std::vector<Slot> whole;
  bool operator==(const Held&) const = default;
};

/// Where a host takes copies.
struct PeerAddress {
  std::string host;
  int64_t port = 0;  // 0: it takes nothing
  bool operator==(const PeerAddress&) const = default;
};

/// A lost host whose slot another one holds: that one writes its part of a save.
struct Ward {
  int64_t host = 0, holder = 0;  // by their index
  Slot slot;
  bool operator==(const Ward&) const = default;
};

/// The work of a host until the next one: the segment of a recipe, and the run it belongs to.
struct Segment {
  std::string recipe, past, init;         // decode_recipe(), decode_past(), init_from_json()
  int64_t end_step = 0;                   // of this segment
  int64_t hosts = 0;                      // that train
  std::string run_name, run_id, lineage;  // RunText
  std::string recipe_json, recipe_hash;   // RunText: what checkpoints keep
  std::string trace;                      // steps=A..B; empty: none
  bool time_kernels = false;              // cairn train --time-kernels
  bool operator==(const Segment&) const = default;
};

/// A rank's failure (agent::Failure).
struct Failure {
  int64_t rank = 0;
  int64_t exit_code = 0, signal = 0;
  bool hang = false;
  std::string message, failure_class;
  int64_t pid = 0;
  int64_t seen_ns = 0;  // by the clock of the host that sends it
  std::vector<std::string> last_lines;
  bool operator==(const Failure&) const = default;
};

/// The operation that a thread of a rank is in (comm::OperationView). Read from memory that a rank may have damaged:
/// any numbers.
struct Operation {
  bool inside = false;
  int64_t operations = 0, awaits = -1, since_ms = 0;
  std::string text;
  bool operator==(const Operation&) const = default;
};
/// Where a rank is (agent::RankState).
struct RankState {
  int64_t rank = 0;
  std::string state;  // a letter
  Operation own, beside;
  int64_t pid = 0;
  bool closed = false;
  int64_t step = -1;
  std::string phase, description;
  bool operator==(const RankState&) const = default;
};

/// A host introduces itself to the leader.
struct Hello {
  int64_t index = 0;  // of the hosts
  std::string name;   // this host's
  std::string boot_id;
  std::string build;  // of the program: all agents run the same
  std::string recipe_hash;
  std::string computes;      // by what means its ranks do: "cpu", "cuda, staged, attention own"
  int64_t ranks = 0;         // of this host
  int64_t kernel_level = 0;  // the highest of its processor (kernels::GemmIsa): others give other last bits
  std::map<std::string, std::string> nccl;  // variables of its ranks, where they compute on GPUs
  std::string gid_types;                    // host::NcclCheck::gid_types: all agents have the same
  bool operator==(const Hello&) const = default;
};

/// A sender of copies introduces itself to their holder.
struct CopyHello {
  int64_t place = 0, epoch = 0;
  bool restores = false;  // it gives back what the place's host has lost; else a copy to keep
  std::string nonce;
  bool operator==(const CopyHello&) const = default;
};

/// The whole slot of one rank, as its header says.
struct BankRank {
  std::string position;
  std::vector<uint64_t> sums;
  bool operator==(const BankRank&) const = default;
};

// --- joining (runtime/cluster/join.h) --------------------------------------------------------------------------------

/// Both ways, now and then: a sign of life. Has no answer.
struct Beat {
  static constexpr std::string_view kKind = "beat";
};
/// Leader -> a new connection. Answered with Join.
struct Challenge {
  static constexpr std::string_view kKind = "challenge";
  std::string nonce, token_name;
};
/// Host -> leader: `hello` is a Hello, once `proof` holds. Answered with Welcome or Refused.
struct Join {
  static constexpr std::string_view kKind = "join";
  Json hello;
  std::string nonce, proof;
};
/// Leader -> host: it is one of the epoch, whose text this is (encode_epoch).
struct Welcome {
  static constexpr std::string_view kKind = "welcome", kMark = "epoch";
  std::string epoch, proof;
};
/// Leader -> host that does not fit, and holder -> sender whose hello or slot it does not take. Without a proof: to a
/// stranger, or within a proved connection.
struct Refused {
  static constexpr std::string_view kKind = "refused";
  std::string why;
  std::optional<bool> barred = {};  // of a host that joins: for good
  std::optional<std::string> proof = {};
};

// --- copies of memory (tools/run/hosts/replicas.h)
// -------------------------------------------------------------------------

/// Holder -> a new connection. Answered with OfferCopies.
struct KeepsCopies {
  static constexpr std::string_view kKind = "keeps copies";
  std::string nonce;
};
/// Sender -> holder: `hello` is a CopyHello, once `proof` holds. Answered with TakesCopies or Refused.
struct OfferCopies {
  static constexpr std::string_view kKind = "hello";
  Json hello;
  std::string proof;
};
/// Holder -> sender.
struct TakesCopies {
  static constexpr std::string_view kKind = "welcome";
  std::string proof;
};
/// Sender -> holder: the slot whose bytes follow. Answered with SendBank or Refused.
struct Bank {
  static constexpr std::string_view kKind = "bank";
  Slot slot;
  std::vector<BankRank> ranks;
};
/// Holder -> sender: now its bytes, rank by rank. Answered with those bytes; then comes WholeBank or Refused.
struct SendBank {
  static constexpr std::string_view kKind = "go";
};
/// Holder -> sender: the word sums of what came are those of the header.
struct WholeBank {
  static constexpr std::string_view kKind = "whole";
};

// --- what is trained, and where (tools/run/hosts/fleet.h, follower.h)
// ------------------------------------------------------

/// Leader -> host: what is trained from here on, its place and the leader's. The host opens its memory.
struct Begin {
  static constexpr std::string_view kKind = "begin";
  Segment segment;
  int64_t place = 0, leader = 0;
};
/// Leader -> spare: what the others train. It makes memory for that in advance.
struct Prepare {
  static constexpr std::string_view kKind = "prepare";
  Segment segment;
};
/// Leader -> host: it has no place any more, and is a spare.
struct Rest {
  static constexpr std::string_view kKind = "rest";
};
/// Leader -> host: no rank may run. With an `ask` above 0 answered with Idle or CannotIdle; 0: with Stopped.
struct Halt {
  static constexpr std::string_view kKind = "halt";
  int64_t ask = 0;
  std::optional<std::string> why = {};
};
/// Host -> leader: no rank runs, and this is in its memory. Answered with Resume.
struct Idle {
  static constexpr std::string_view kKind = "idle";
  int64_t ask = 0;
  Memory memory;
  std::optional<Held> held = {};  // missing: it keeps no copies
};
/// Host -> leader: it has no memory and cannot continue. The run ends.
struct CannotIdle {
  static constexpr std::string_view kKind = "idle", kMark = "error";
  int64_t ask = 0;
  Error error;
};
/// Leader -> host: it sends what it holds of this slot to that address. Answered with Given.
struct Give {
  static constexpr std::string_view kKind = "give";
  Slot slot;
  PeerAddress to;
};
/// Host -> leader: done, or why not.
struct Given {
  static constexpr std::string_view kKind = "given";
  std::optional<Error> error = {};
};
/// Leader -> host: what its ranks resume from. It loads that. Answered with Carried.
struct Resume {
  enum class Source : uint8_t { kFresh, kMemory, kDisk };
  static constexpr std::string_view kKind = "resume";
  uint64_t incarnation = 0;
  Source source = Source::kFresh;
  int64_t step = 0, slot = 0;
  uint64_t slot_incarnation = 0;
  std::string dir;                // kDisk: in the run's own folder of checkpoints, or absolute
  bool init = false;              // kDisk: a person named it
  bool foreign = false;           // kDisk: it is no checkpoint
  std::vector<uint64_t> starts;   // Arena::starts of the leader
  std::vector<int64_t> promised;  // steps that its memory promises to save
  int64_t kernel_level = 0;       // kernels::GemmIsa of all ranks
  int64_t epoch = 0;
  std::vector<PeerAddress> peers;  // by place
};
/// Host -> leader: done, or why not. Answered with Go.
struct Carried {
  static constexpr std::string_view kKind = "carried";
  std::optional<Error> error = {};
};
/// Leader -> host: ranks start.
struct Go {
  static constexpr std::string_view kKind = "go", kMark = "incarnation";
  uint64_t incarnation = 0;
};
/// Leader -> host: the run is over for it. A check of hosts leaves out `keep` and `failure`.
struct End {
  static constexpr std::string_view kKind = "end";
  int64_t code = 0;
  std::optional<bool> keep = {};  // memory holds what no checkpoint has
  std::string text;
  std::optional<Json> failure = {};  // failure_record() of what ended it, or null
};

// --- what ranks do ---------------------------------------------------------------------------------------------------

/// Host -> leader, which sends it to the other hosts: what a rank has published. Any bytes.
struct Put {
  static constexpr std::string_view kKind = "put";
  uint64_t incarnation = 0;
  std::string key, value;
};
/// Host -> leader: its ranks have failed, and it stops them.
struct Failed {
  static constexpr std::string_view kKind = "failed";
  uint64_t incarnation = 0;
  Failure failure;
};
/// Host -> leader: a rank has failed by itself; also while ranks are being stopped.
struct RankError {
  static constexpr std::string_view kKind = "error";
  uint64_t incarnation = 0;
  Failure failure;
};
/// Host -> leader: none of its ranks runs any more.
struct Stopped {
  static constexpr std::string_view kKind = "stopped";
  uint64_t incarnation = 0;
};
/// Host -> leader: all its ranks have ended with 0.
struct Left {
  static constexpr std::string_view kKind = "left";
  uint64_t incarnation = 0;
};
/// Host -> leader: a line of a rank.
struct RankEvent {
  static constexpr std::string_view kKind = "event";
  uint64_t incarnation = 0;
  int64_t rank = 0;
  Json event;
};
/// Leader -> host. Answered with Ranks while ranks run.
struct Look {
  static constexpr std::string_view kKind = "look";
};
/// Host -> leader: where its ranks are, and what they wait for.
struct Ranks {
  static constexpr std::string_view kKind = "ranks";
  uint64_t incarnation = 0;
  std::vector<RankState> ranks;
};
/// Leader -> host. Answered with Stacks while ranks run.
struct AskStacks {
  static constexpr std::string_view kKind = "stacks";
};
/// Host -> leader: of its ranks.
struct Stacks {
  static constexpr std::string_view kKind = "stacks", kMark = "stacks";
  uint64_t incarnation = 0;
  std::vector<Json> stacks;
};
/// Leader -> host: its own time. Answered with Clock.
struct AskClock {
  static constexpr std::string_view kKind = "clock";
  int64_t asked_ns = 0;
};
/// Host -> leader: the question's time, and its own.
struct Clock {
  static constexpr std::string_view kKind = "clock", kMark = "there_ns";
  int64_t asked_ns = 0, there_ns = 0;
};
/// Leader -> host: a rank of it is killed, to see the run recover.
struct Kill {
  static constexpr std::string_view kKind = "kill";
  int64_t rank = 0;
};
/// Host -> leader: a person asks the run to stop. Answered with Halt or End in time.
struct Stop {
  static constexpr std::string_view kKind = "stop";
  int64_t signal = 0;
};
/// Host -> leader: a person asks for a save.
struct AskSave {
  static constexpr std::string_view kKind = "ask_save";
  std::string by;
};
/// Host -> leader: the copy of this step of its place is complete, and how many bytes that took.
struct Copied {
  static constexpr std::string_view kKind = "replicated", kMark = "bytes";
  uint64_t incarnation = 0;
  int64_t step = 0, bytes = 0;
};
/// Host -> leader: it is not.
struct NotCopied {
  static constexpr std::string_view kKind = "unreplicated", kMark = "bytes";
  uint64_t incarnation = 0;
  int64_t step = 0, bytes = 0;
  std::string why;
};
/// Leader -> host: all hosts have copied this step.
struct AllCopied {
  static constexpr std::string_view kKind = "replicated";
  uint64_t incarnation = 0;
  int64_t step = 0;
};
/// Leader -> host: one host has not.
struct NotAllCopied {
  static constexpr std::string_view kKind = "unreplicated";
  uint64_t incarnation = 0;
  int64_t step = 0;
};

// --- saves (tools/run/hosts/host_saves.h). `number` is the leader's try of that step
// ---------------------------------------

/// Leader -> host: where the files of a step go, and whose parts who writes too. Answered with Begun.
struct Save {
  static constexpr std::string_view kKind = "save";
  int64_t step = 0, number = 0;
  std::string folder;
  std::vector<Ward> wards;
};
/// Host -> leader: its persister is at it, since the slot is whole there. Written or NotWritten follows.
struct Begun {
  static constexpr std::string_view kKind = "begun";
  int64_t step = 0, number = 0;
};
/// Host -> leader: its files are durable; or those of a ward. Answered with Committed or Dropped.
struct Written {
  static constexpr std::string_view kKind = "written";
  int64_t step = 0, number = 0;
  std::optional<int64_t> of = {};  // the ward's index
};
/// Host -> leader: they are not. Answered with Dropped.
struct NotWritten {
  static constexpr std::string_view kKind = "not_written";
  int64_t step = 0, number = 0;
  std::optional<int64_t> of = {};
  Error error;
};
/// Leader -> host: the step has its name.
struct Committed {
  static constexpr std::string_view kKind = "committed";
  int64_t step = 0, number = 0;
};
/// Leader -> host: that try has failed. 0: no host has heard of it.
struct Dropped {
  static constexpr std::string_view kKind = "dropped";
  int64_t step = 0, number = 0;
  Error error;
};
/// Leader -> host: what is whole in this slot of all hosts is saved, though no rank may have asked there.
struct Promise {
  static constexpr std::string_view kKind = "promise";
  Slot slot;
};

// --- checks of hosts (tools/run/check/check_leader.h)
// ----------------------------------------------------------------------

/// Leader -> host: what it measures now. Answered with Measured, several times.
struct Measure {
  static constexpr std::string_view kKind = "measure";
  int64_t round = 0;
  int64_t self = 0;  // this host's number in the check
  std::string address;
  int64_t kernel_level = 0;
  std::string dtype, folder;
  double limit_s = 20;
  std::optional<bool> alone = {}, gpus = {};
  std::optional<int64_t> gpu_size = {}, partner = {};
  std::optional<std::vector<int64_t>> reach = {};  // the numbers of those it has to reach
};
/// Leader -> host: what it measures ends.
struct EndMeasure {
  static constexpr std::string_view kKind = "measure_end";
};
/// Host -> leader: what a measurement has found.
struct Measured {
  static constexpr std::string_view kKind = "measured";
  struct Alone {
    static constexpr std::string_view kEvent = "alone";
    double matmul_gflops = 0, copy_gb_s = 0;
    std::optional<double> write_mb_s = {};
    std::string digest;
    std::optional<std::string> failed = {};
  };
  struct Gpus {
    static constexpr std::string_view kEvent = "gpus";
    Json gpus, notes;
  };
  struct Pair {  // its figures, or why there are none
    static constexpr std::string_view kEvent = "pair";
    int64_t partner = 0;
    std::optional<double> gb_s = {}, trip_us = {};
    std::optional<int64_t> trips = {}, stalls = {}, resent = {};
    std::optional<std::string> failed = {};
  };
  struct Reach {
    static constexpr std::string_view kEvent = "reach";
    int64_t host = 0;
    std::string failed;  // empty: it is reached
  };
  struct Reached {  // all that can be
    static constexpr std::string_view kEvent = "reached";
  };
  struct Failed {
    static constexpr std::string_view kEvent = "error";
    std::optional<int64_t> exit_code = {};
    std::string message;
  };
  struct Ended {  // the last one
    static constexpr std::string_view kEvent = "ended";
    std::string failed;  // empty: well
  };
  int64_t round = 0;
  std::variant<Ended, Alone, Gpus, Pair, Reach, Reached, Failed> what;
};
/// Host -> leader, which sends it to the host's partner: what a measurement has published. Any bytes.
struct PutMeasured {
  static constexpr std::string_view kKind = "measure_put";
  uint64_t round = 0;
  std::string key, value;
};

// --- the codec -------------------------------------------------------------------------------------------------------

// Among messages of one kind the marked one stands first.
using Message =
    std::variant<Beat, Challenge, Join, Welcome, Refused, KeepsCopies, OfferCopies, TakesCopies, Bank, WholeBank, Begin,
                 Prepare, Rest, Halt, CannotIdle, Idle, Give, Given, Resume, Carried, Go, SendBank, End, Put, Failed,
                 RankError, Stopped, Left, RankEvent, Look, Ranks, Stacks, AskStacks, Clock, AskClock, Kill, Stop,
                 AskSave, Copied, NotCopied, AllCopied, NotAllCopied, Save, Begun, Written, NotWritten, Committed,
                 Dropped, Promise, Measure, EndMeasure, Measured, PutMeasured>;

std::string_view kind_of(const Message& message);
/// The body: an object.
Json encode(const Message& message);
/// Errors: kCorrupt, naming the message, the field and what was found: "`halt`: field `ask` is \"x\", not a number from
/// 0 on", "`halt`: no field `ask`", "`halt`: an unknown field `asks`", "an unknown kind, `hold`".
Result<Message> decode(std::string_view kind, const Json& body);

/// A hello, whose text a proof covers; it is decoded once that holds. Errors: as above.
Json encode_hello(const Hello& hello);
Result<Hello> decode_hello(const Json& from);
Json encode_hello(const CopyHello& hello);
Result<CopyHello> decode_copy_hello(const Json& from);

/// For std::visit.
template <typename... Each>
struct Overloaded : Each... {
  using Each::operator()...;
};

}  // namespace cairn::hosts
