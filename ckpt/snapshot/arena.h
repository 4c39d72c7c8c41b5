#pragma once
// Training memory that outlives the ranks: one shared segment per run and host, owned by the agent. It has slots and
// weights of the ranks that run on this host, and describes those of the whole world.
//
// The agent creates it, or adopts the one that a dead agent of the same run left. Ranks attach by inherited descriptor.
// Each rank has some slots and the weights that forward and backward read. A slot is a bank of its optimizer state, in
// the layout of what it saves, with a header whose last store publishes it as a snapshot. Updates read one bank and
// write another (slot_rule.h says which), so a snapshot is never copied. Pages are reserved and touched at creation:
// first touch costs seven times a copy (measured: 1.4 against 10.5 GB/s), and a reserved page cannot fail later with
// SIGBUS.
//
// The segment's name, `cairn-<uid>-<run id hash>-<agent pid>-<agent start>`, says whose it is. A lock (flock) backs it,
// which the agent holds, and no rank through descriptor(). A segment is stale only if that process is gone *and* the
// lock is free: a live agent in another pid namespace is never robbed.
//
// With optimizer.offload the segment is a file on a disk. The difference: pages of banks come when the update wants
// them and go when it is done. The death of any process loses nothing, since the page cache is the kernel's. The death
// of the machine loses everything, as with shared memory.
//
// Threads: one Arena object may be used by several threads; headers are written by SnapshotWriter (snapshot.h) alone.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/plan/save_plan.h"
#include "ckpt/snapshot/arena_format.h"
#include "ckpt/snapshot/slot_rule.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::ckpt {

inline constexpr int64_t kSnapshotChunkBytes = int64_t{4} << 20;  // of the files that are written: SaveOptions' default
inline constexpr int64_t kDefaultSlots = banks_for(1);
inline constexpr int64_t kPositionCapacity = 64 << 10;
inline constexpr const char* kSharedMemory = "/dev/shm";

/// Ranks [first, end) of a world: those of one host.
struct RankRange {
  int64_t first = 0, end = 0;
  int64_t size() const { return end - first; }
  bool contains(int64_t rank) const { return rank >= first && rank < end; }
  bool operator==(const RankRange&) const = default;
};

class PreparedMemory;  // prepared_memory.h

enum class ArenaBacking {
  kNamed,  // a file of ArenaSpec::folder: a later agent can adopt it
  kMemfd,  // no name: gone with its last process; ranks inherit the descriptor
};

struct ArenaSpec {
  std::string run_id, recipe_hash;
  uint64_t layout_hash = 0;
  std::vector<SlotLayout> ranks;      // of the world
  std::optional<RankRange> here;      // of this host; none: all
  std::vector<int64_t> weight_bytes;  // by rank of the world; empty: no memory for weights
  std::string directory;              // encode_manifest(slot_manifest(...)): makes the memory readable without the plan
  int64_t slots = kDefaultSlots;
  int64_t chunk_bytes = kSnapshotChunkBytes;
  ArenaBacking backing = ArenaBacking::kNamed;
  std::string folder = kSharedMemory;  // or one on a disk, whose pages come and go (disk_pager.h)
  bool huge_pages = true;              // where the system allows it; otherwise 4 KiB pages, silently
  /// Of this folder: taken by create(), which cuts or lengthens it. Null: new memory.
  std::shared_ptr<PreparedMemory> prepared;
};

class Arena {
 public:
  /// Agent. Errors: kNoSpace, saying how much is missing, when the folder or the memory cannot hold it; kInvalidInput
  /// for a spec that does not fit together or a folder that is not there.
  static Result<Arena> create(const ArenaSpec& spec);

  /// Rank, to a descriptor() of the agent's; it is borrowed, the arena keeps a duplicate. Errors: kCorrupt naming what
  /// does not hold.
  static Result<Arena> attach_fd(int fd);
  /// Whoever looks at a segment. Errors: as above; kUnavailable when there is none of that name.
  static Result<Arena> attach(const std::string& name);

  /// Agent: takes over the newest stale segment of this run, renaming it to this process's name; nullopt when there is
  /// none. A segment that is damaged, unfinished or from before this machine's last start (what a disk lacks of it
  /// then, nobody knows) is not taken. With `ranks`, those of this host: one of other ranks is left to their agent,
  /// which may share the folder.
  static Result<std::optional<Arena>> adopt(std::string_view run_id, const std::string& folder = kSharedMemory,
                                            const std::optional<RankRange>& ranks = {});

  /// Bytes that create(spec) would allocate.
  static int64_t total_bytes(const ArenaSpec& spec);

  /// kNoSpace as of create(), with `freed` bytes more in the folder than there are.
  static Status has_room(const ArenaSpec& spec, int64_t freed = 0);

  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();  // unmaps; the segment stays until remove()

  /// Owner: unlinks the name. Attached processes keep their memory.
  Status remove();

  const std::string& name() const { return name_; }  // "/dev/shm/cairn-..." ; empty for memfd
  int fd() const { return fd_.get(); }
  /// Owner: a descriptor for ranks to inherit, which has no part in the lock. It needs no name: that may be gone.
  Result<Fd> descriptor() const;
  /// Whether somebody else removed the name. Nobody finds the memory then once this process has ended.
  bool is_nameless() const;
  std::byte* base() const { return base_; }
  bool huge_pages() const { return huge_pages_; }
  bool on_disk() const { return on_disk_; }  // in a file system that is not memory
  int64_t bytes() const { return bytes_; }

  int64_t world() const { return header().world; }  // ranks of the run, on all hosts
  RankRange ranks() const { return ranks_; }        // of this host: only these have slots, marks and weights here
  bool has_world() const { return ranks_.size() == world(); }
  int64_t slots() const { return header().slots; }
  int64_t chunk_bytes() const { return header().chunk_bytes; }
  uint64_t layout_hash() const { return header().layout_hash; }
  std::string_view run_id() const { return header().run_id; }
  std::string_view recipe_hash() const { return header().recipe_hash; }
  std::string_view directory() const;
  /// Whose slots the files of directory() are, in their order: a rank that saves nothing has none.
  std::vector<int64_t> rank_of_file() const;
  arena::Control& control() const;

  std::span<const arena::ShardExtent> shards(int64_t rank) const;  // of any rank of the world
  arena::SlotHeader& slot_header(int64_t rank, int64_t slot) const;
  std::span<char> position_area(int64_t rank, int64_t slot) const;
  std::span<uint64_t> sum_area(int64_t rank, int64_t slot) const;  // one a shard
  std::span<std::byte> payload(int64_t rank, int64_t slot) const;
  std::span<std::byte> weights(int64_t rank) const;
  arena::WeightsMark& weights_mark(int64_t rank) const;

  /// Of the starts of agents that lead to what is here, the present one first.
  std::span<const uint64_t> starts() const;
  /// Steps that this memory promises to save, or that are being saved from it.
  std::set<int64_t> promised() const;
  /// Agent, while no rank runs: a new start, which goes on from what is here. Of those before it, the ones ahead of
  /// `saved` have saved nothing that is there, and are forgotten; 0: none is.
  void begin_start(uint64_t saved);
  /// Agent, while no rank runs: the present start goes on from a checkpoint that these led to, not from what was here.
  void go_on_from(std::span<const uint64_t> starts);
  /// The same on a host where another one decides: `starts` are those of its memory, and are this one's from now on.
  void follow_starts(std::span<const uint64_t> starts);

  /// Whether the weights of all ranks of this host are those of the step of this incarnation.
  bool weights_are_of(uint64_t incarnation, int64_t step) const;
  /// Agent, while no rank runs: the weights of no rank of this host are of any step. Before ranks make them again, or a
  /// kill among that would leave marks that hold for what is half written.
  void forget_weights();

  /// What the slot says of itself; not yet a proof that its bytes hold.
  SlotMark mark(int64_t rank, int64_t slot) const;
  /// Over the ranks of this host: what is whole here may be half written on another one.
  std::vector<SlotView> views() const;

  /// On the rank that decides, after each step. News that are too long are not kept.
  void keep_news(int64_t step, std::string_view text) const;
  /// Those kept of the latest steps up to `last`, oldest first. The rank may go on meanwhile.
  std::vector<std::string> news_until(int64_t last) const;

  /// Agent, while no rank runs: drops what was promised to be persisted, waits for a write that has begun, and empties
  /// all slots. Errors: kTimeout when that write does not end, kStopped when `stop` says so meanwhile (may be empty).
  Status invalidate_slots(const std::function<bool()>& stop = {}, double deadline_s = 1800);
  /// Agent, while no rank runs: empties one slot on all ranks of this host. What the persister has begun to write stays
  /// as it is.
  void invalidate_slot(int64_t slot);
  /// Fills this process's page table for one rank's slots, unless they lie on a disk, and weights, so that its first
  /// steps are as fast as later ones.
  void populate(int64_t rank) const;

 private:
  Arena() = default;
  static Result<Arena> map(Fd fd, std::string name);
  Status validate() const;
  const arena::StaticHeader& header() const { return *reinterpret_cast<const arena::StaticHeader*>(base_); }
  const arena::RankEntry& entry(int64_t rank) const;
  const arena::RankEntry& here(int64_t rank) const;  // of a rank of this host

  Fd fd_;
  std::string name_;
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  RankRange ranks_;
  bool huge_pages_ = false, on_disk_ = false;
};

/// A segment whose agent is gone.
struct StaleArena {
  std::string name, run_id;  // run_id: empty where the segment cannot be read
  std::string unread;        // why it cannot be read now, by this build; it may hold what no checkpoint has
  bool elsewhere = false;    // it is another machine's, in a folder that several have; `unread` says so too
  int64_t bytes = 0;
  RankRange ranks;           // whose memory it is; empty where it cannot be read
  int64_t world = 0;         // ranks of the run
  bool has_world = true;     // of all ranks of the run
  int64_t unsaved_step = 0;  // its newest whole step, where that is not known to be on disk; 0: nothing to lose
};

/// Those of this user in a folder, the longest dead agent's (by its start) first; none whose lock an agent holds. Keeps
/// no lock itself: another agent may be taking one over.
std::vector<StaleArena> stale_arenas(const std::string& folder = kSharedMemory);

/// False when somebody else holds it or has taken it over.
bool remove_stale_arena(const StaleArena& stale);

}  // namespace cairn::ckpt
