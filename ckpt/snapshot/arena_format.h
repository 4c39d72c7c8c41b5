#pragma once
// What lies in a snapshot segment, byte by byte. All offsets count from the start of the segment; numbers are this
// machine's (the segment never leaves it). The static part is written once by create() and covered by a hash; the rest
// changes while ranks may be killed at any instruction, so nothing in it is believed without a check.
//
//   0        StaticHeader, then RankEntry[world], then per rank ShardExtent[shards], then the directory text
//   control  Control
//   then per rank and slot   SlotHeader, position text, uint64 word sums per shard
//   then per rank            WeightsMark
//   then per rank and slot   payload: a bank of the optimizer state, which training updates where it lies
//   then per rank            weights: those that forward and backward read, which an update overwrites
// Parts begin at multiples of kPageBytes. What is not static is there for the ranks of this host alone, a range of the
// world's; the RankEntry of another has its shards and nothing else.

#include <atomic>
#include <cstdint>

namespace cairn::ckpt::arena {

inline constexpr uint64_t kMagic = 0x31414e4552414e43;  // "CNARENA1", stored last: a segment without it is unfinished
inline constexpr uint32_t kVersion = 8;                 // of a host that has all ranks
/// Of one that has some: for a reader of the other there would be all.
inline constexpr uint32_t kPartVersion = kVersion | 1u << 16;
inline constexpr int64_t kMaxSlots = 10;
inline constexpr int64_t kMaxWorld = 1 << 16;
inline constexpr int64_t kTextBytes = 128;
inline constexpr int64_t kPathBytes = 4096;
inline constexpr int64_t kMessageBytes = 2048;
inline constexpr int64_t kStartsKept = 64;

struct StaticHeader {
  std::atomic<uint64_t> magic;
  uint32_t version;
  uint32_t world;
  uint32_t slots;
  uint32_t unused;
  int64_t static_bytes;  // covered by static_hash
  int64_t total_bytes;
  int64_t control_offset;
  int64_t directory_offset, directory_bytes;
  int64_t chunk_bytes;
  int64_t position_capacity;
  uint64_t layout_hash;
  uint64_t static_hash;                              // XXH3_64 of [0, static_bytes) with magic and this field zero
  char run_id[kTextBytes], recipe_hash[kTextBytes];  // zero-terminated
  char boot_id[kTextBytes];                          // of the machine's start, as the kernel names it
  char machine_id[kTextBytes];                       // over all its starts
};

struct RankEntry {
  int64_t shard_table_offset, shards;
  // Of another host's rank, all zero:
  int64_t payload_bytes;
  int64_t weights_mark_offset, weights_offset, weight_bytes;
  int64_t header_offset[kMaxSlots], payload_offset[kMaxSlots];
};

struct ShardExtent {
  int64_t offset, bytes;  // in the slot
};

/// sequence: 0 empty, odd being written, even whole. Stored even, with release, after everything else.
struct SlotHeader {
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> incarnation;
  std::atomic<int64_t> step;
  int64_t position_bytes;
  int64_t shards;
  int64_t pause_ns;    // training stood still for this snapshot on this rank
  uint64_t head_hash;  // XXH3_64 over incarnation, step, position_bytes, shards, pause_ns, position, word sums
};

/// Which step the weights are of; sequence as in SlotHeader.
struct WeightsMark {
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> incarnation;
  std::atomic<int64_t> step;
};

enum class Source : uint32_t { kNone, kFresh, kMemory, kDisk };

/// Written by the agent while no rank runs, read by all ranks: why they cannot disagree.
struct Decision {
  std::atomic<uint64_t> incarnation;  // of the ranks it is for; stored last
  Source source;
  uint32_t slot;           // kMemory
  uint32_t weights_ready;  // kMemory: the weights of all ranks are those of this step
  int64_t step;            // of kMemory and kDisk
  char place[kPathBytes];  // kDisk: the checkpoint's directory
  int64_t position_bytes;
  char position[65536];
};

/// What a step has to report, for an agent that died with the news of it unread. step is stored last; 0: nothing.
struct StepNews {
  std::atomic<int64_t> step;
  int64_t bytes;
  char text[2032];
};
inline constexpr int64_t kNewsKept = 64;  // of the latest steps, by step modulo this

struct Control {
  std::atomic<uint64_t> incarnation;     // life of the ranks; 0: none yet
  std::atomic<uint32_t> stop;            // the agent asks for a save at the next step boundary and an end
  std::atomic<int64_t> stop_at_step;     // or at the first boundary not before this step; 0: it does not
  std::atomic<uint32_t> stop_at_save;    // or at the next boundary where a save is due
  std::atomic<uint64_t> saves_asked;     // counts the saves that the agent asks for, each at the next boundary
  std::atomic<uint64_t> saves_answered;  // how far the rank that decides has ordered them
  std::atomic<int64_t> agent_pid, agent_start;
  // Of the starts of agents that lead to what is here, the present one first; 0: no more. Written before any rank runs.
  uint64_t starts[kStartsKept];
  std::atomic<uint32_t> distrusted;  // a rank died in a way that may have scribbled over memory
  std::atomic<int64_t> saved_ns;     // monotonic: when a save was ordered last, over all lives of the ranks
  // Step to be persisted from the slot; 0: free. A rank sets it, the agent makes it negative when it starts to write
  // and 0 when it is done.
  std::atomic<int64_t> reserved[kMaxSlots];
  std::atomic<uint64_t> asked[kMaxSlots];  // how far that save answers saves_asked, 0: not; before `reserved`
  // Step that is to be copied from the slot to another host; negative: all hosts have copied it, and it stays until
  // they have a later one; 0: free. A rank sets it, the agent does the rest.
  std::atomic<int64_t> replica[kMaxSlots];
  std::atomic<int64_t> persisted_step;  // newest step of this incarnation on disk
  std::atomic<int64_t> failed_step;     // newest step whose persist failed
  // Step of this incarnation whose weights are ruined, so that it is neither saved nor gone on with; 0: none is known.
  std::atomic<int64_t> ruined_step;
  std::atomic<uint64_t> beat;        // counts up while the persister lives
  std::atomic<int32_t> failed_code;  // ErrorCode of that failure
  char failure[kMessageBytes];       // written before failed_step
  Decision decision;
  StepNews news[kNewsKept];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

}  // namespace cairn::ckpt::arena
