#include "ckpt/snapshot/arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"
#include "ckpt/snapshot/memory_room.h"
#include "ckpt/snapshot/populate.h"
#include "ckpt/snapshot/prepared_memory.h"
#include "ckpt/snapshot/segment_file.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/process.h"
#include "runtime/core/units.h"

namespace cairn::ckpt {
namespace {

using arena::RankEntry;
using arena::ShardExtent;
using arena::SlotHeader;
using arena::StaticHeader;

Error bad(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error damaged(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

int64_t page_up(int64_t n) { return (n + kPageBytes - 1) / kPageBytes * kPageBytes; }

RankRange ranks_here(const ArenaSpec& spec) { return spec.here.value_or(RankRange{0, std::ssize(spec.ranks)}); }

/// Where everything lies, from the spec alone.
struct Geometry {
  std::vector<RankEntry> ranks;
  int64_t directory_offset = 0, static_bytes = 0, control_offset = 0, total_bytes = 0;
};

Geometry geometry_of(const ArenaSpec& spec) {
  Geometry g;
  g.ranks.resize(spec.ranks.size());
  const RankRange here = ranks_here(spec);
  const std::span<RankEntry> mine = std::span(g.ranks).subspan(here.first, here.size());
  auto at = static_cast<int64_t>(sizeof(StaticHeader) + sizeof(RankEntry) * spec.ranks.size());
  for (size_t r = 0; r < spec.ranks.size(); ++r) {
    RankEntry& entry = g.ranks[r];
    entry.shard_table_offset = at;
    entry.shards = static_cast<int64_t>(spec.ranks[r].shards.size());
    if (here.contains(static_cast<int64_t>(r))) {
      entry.payload_bytes = spec.ranks[r].bytes;
      entry.weight_bytes = spec.weight_bytes.empty() ? 0 : spec.weight_bytes[r];
    }
    at += entry.shards * static_cast<int64_t>(sizeof(ShardExtent));
  }
  g.directory_offset = at;
  g.static_bytes = at + static_cast<int64_t>(spec.directory.size());
  g.control_offset = page_up(g.static_bytes);
  at = page_up(g.control_offset + static_cast<int64_t>(sizeof(arena::Control)));
  for (RankEntry& entry : mine) {
    for (int64_t slot = 0; slot < spec.slots; ++slot) {
      entry.header_offset[slot] = at;
      at = page_up(at + static_cast<int64_t>(sizeof(SlotHeader)) + kPositionCapacity +
                   entry.shards * static_cast<int64_t>(sizeof(uint64_t)));
    }
    entry.weights_mark_offset = at;
    at = page_up(at + static_cast<int64_t>(sizeof(arena::WeightsMark)));
  }
  for (RankEntry& entry : mine) {
    for (int64_t slot = 0; slot < spec.slots; ++slot) {
      entry.payload_offset[slot] = at;
      at = page_up(at + entry.payload_bytes);
    }
    entry.weights_offset = at;
    at = page_up(at + entry.weight_bytes);
  }
  g.total_bytes = at;
  return g;
}

/// Those that have slots: none where the entries make no sense.
RankRange ranks_with_slots(std::span<const RankEntry> entries) {
  RankRange out;
  while (out.first < std::ssize(entries) && entries[out.first].header_offset[0] == 0) ++out.first;
  out.end = out.first;
  while (out.end < std::ssize(entries) && entries[out.end].header_offset[0] != 0) ++out.end;
  return out;
}

uint64_t hash_static(const std::byte* base, int64_t static_bytes) {
  StreamingHash hash;
  constexpr uint64_t kZero = 0;
  const auto zero = std::as_bytes(std::span(&kZero, 1));
  constexpr auto kMagicEnd = static_cast<int64_t>(sizeof(uint64_t));
  constexpr auto kHashAt = static_cast<int64_t>(offsetof(StaticHeader, static_hash));
  hash.update(zero);
  hash.update({base + kMagicEnd, static_cast<size_t>(kHashAt - kMagicEnd)});
  hash.update(zero);
  hash.update({base + kHashAt + 8, static_cast<size_t>(static_bytes - kHashAt - 8)});
  return hash.digest();
}

bool is_prepared(const ArenaSpec& spec) {
  return spec.backing == ArenaBacking::kNamed && spec.prepared != nullptr && spec.prepared->folder() == spec.folder;
}

/// Looks before allocating: the kernel would answer with SIGBUS or the out-of-memory killer.
Status check_room(const ArenaSpec& spec, const Geometry& geometry, int64_t freed) {
  int64_t in_memory = geometry.total_bytes;
  if (is_prepared(spec)) freed += spec.prepared->bytes();
  if (spec.backing == ArenaBacking::kNamed) {
    struct statvfs space {};
    if (statvfs(spec.folder.c_str(), &space) != 0) {
      return bad(fmt::format("{}: no folder for snapshot memory ({}); make it, or name another", spec.folder,
                             std::strerror(errno)));
    }
    const bool on_disk = is_on_disk(spec.folder);
    const auto free = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize) + freed;
    if (free < geometry.total_bytes) {
      return Error{ErrorCode::kNoSpace,
                   fmt::format("snapshots need {} in {}, {} are free: {} are missing; enlarge it{} or remove what "
                               "fills it",
                               format_bytes(geometry.total_bytes), spec.folder, format_bytes(free),
                               format_bytes(geometry.total_bytes - free),
                               on_disk ? "" : fmt::format(" (mount -o remount,size=... {})", spec.folder)),
                   ENOSPC};
    }
    if (on_disk) {
      in_memory = 0;
      freed = 0;  // files
      for (const RankEntry& rank : geometry.ranks) in_memory += rank.weight_bytes;
    }
  }
  if (const int64_t memory = available_memory(freed); memory < in_memory) {
    return Error{ErrorCode::kNoSpace,
                 fmt::format("snapshots need {} of memory, {} are available: {} are missing", format_bytes(in_memory),
                             format_bytes(memory), format_bytes(in_memory - memory)),
                 ENOMEM};
  }
  return {};
}

}  // namespace

int64_t Arena::total_bytes(const ArenaSpec& spec) { return geometry_of(spec).total_bytes; }

Status Arena::has_room(const ArenaSpec& spec, int64_t freed) { return check_room(spec, geometry_of(spec), freed); }

Result<Arena> Arena::create(const ArenaSpec& spec) {
  const auto world = static_cast<int64_t>(spec.ranks.size());
  if (world < 1 || world > arena::kMaxWorld) return bad(fmt::format("a snapshot arena for {} ranks", world));
  const RankRange here = ranks_here(spec);
  if (here.first < 0 || here.end > world || here.size() < 1)
    return bad(fmt::format("snapshot memory for ranks {} to {} of {}", here.first, here.end - 1, world));
  if (spec.slots < 1 || spec.slots > arena::kMaxSlots) {
    return bad(fmt::format("{} snapshot slots; 1 to {} are possible", spec.slots, arena::kMaxSlots));
  }
  if (spec.chunk_bytes < kPageBytes || spec.chunk_bytes > kMaxChunkBytes || spec.chunk_bytes % kPageBytes != 0) {
    return bad(fmt::format("snapshot chunks of {} bytes; a multiple of {} up to {} is needed", spec.chunk_bytes,
                           kPageBytes, kMaxChunkBytes));
  }
  for (const std::string* text : {&spec.run_id, &spec.recipe_hash}) {
    if (static_cast<int64_t>(text->size()) >= arena::kTextBytes || text->find('\0') != std::string::npos) {
      return bad(fmt::format("run id or recipe hash \"{}\" is longer than {} bytes", *text, arena::kTextBytes - 1));
    }
  }
  for (const SlotLayout& layout : spec.ranks) {
    int64_t end = 0;
    for (const SlotShard& shard : layout.shards) {
      if (shard.offset < end || shard.bytes < 0 || shard.offset + shard.bytes > layout.bytes || shard.offset % 8 != 0 ||
          shard.bytes % 4 != 0) {
        return bad("the shards of a snapshot slot overlap, leave it or are not whole words");
      }
      end = shard.offset + shard.bytes;
    }
  }
  if (!spec.weight_bytes.empty() && spec.weight_bytes.size() != spec.ranks.size()) {
    return bad(fmt::format("weights of {} ranks, slots of {}", spec.weight_bytes.size(), spec.ranks.size()));
  }
  for (const int64_t bytes : spec.weight_bytes) {
    if (bytes < 0) return bad(fmt::format("weights of {} bytes", bytes));
  }
  const Geometry geometry = geometry_of(spec);

  const bool named = spec.backing == ArenaBacking::kNamed;
  RT_TRY(check_room(spec, geometry, 0));
  const std::string name = named ? segment_path(spec.folder, spec.run_id, this_process()) : "";
  Fd fd = is_prepared(spec) ? spec.prepared->take(name) : Fd();
  if (!fd) {
    fd.reset(named ? ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)
                   : memfd_create("cairn-snapshots", MFD_CLOEXEC));
  }
  if (!fd) return os_error(errno, fmt::format("snapshot memory {}", named ? name : "(memfd)"));
  const auto give_up = [&](Error error) {
    if (named) ::unlink(name.c_str());
    return error;
  };
  // Without flock its name protects it: it holds the agent's process, which others find dead or alive.
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && !is_missing_call(errno))
    return give_up(os_error(errno, "flock of snapshot memory"));
  if (ftruncate(fd.get(), geometry.total_bytes) != 0) {
    return give_up(
        os_error(errno, fmt::format("{} of snapshot memory in {}", format_bytes(geometry.total_bytes), name)));
  }
  void* base = mmap(nullptr, geometry.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return give_up(os_error(errno, "mmap of snapshot memory"));

  Arena out;
  out.fd_ = std::move(fd);
  out.name_ = name;
  out.base_ = static_cast<std::byte*>(base);
  out.bytes_ = geometry.total_bytes;
  out.ranks_ = here;
  out.on_disk_ = is_on_disk(out.fd_.get());
  if (!out.on_disk_) {
    out.huge_pages_ =
        spec.huge_pages && huge_pages_allowed(out.fd_.get()) && madvise(base, geometry.total_bytes, MADV_HUGEPAGE) == 0;
    // Huge pages come from a fault with the advice, so populate first; what that cannot do, fallocate does or refuses.
    ckpt::populate(base, geometry.total_bytes);
  }
  if (const int error = posix_fallocate(out.fd_.get(), 0, geometry.total_bytes); error != 0) {
    return give_up(os_error(error, fmt::format("reserving {} of snapshot memory", format_bytes(geometry.total_bytes))));
  }

  auto& header = *reinterpret_cast<StaticHeader*>(out.base_);
  header.version = here.size() == world ? arena::kVersion : arena::kPartVersion;
  header.world = static_cast<uint32_t>(world);
  header.slots = static_cast<uint32_t>(spec.slots);
  header.static_bytes = geometry.static_bytes;
  header.total_bytes = geometry.total_bytes;
  header.control_offset = geometry.control_offset;
  header.directory_offset = geometry.directory_offset;
  header.directory_bytes = static_cast<int64_t>(spec.directory.size());
  header.chunk_bytes = spec.chunk_bytes;
  header.position_capacity = kPositionCapacity;
  header.layout_hash = spec.layout_hash;
  std::memcpy(header.run_id, spec.run_id.data(), spec.run_id.size());
  std::memcpy(header.recipe_hash, spec.recipe_hash.data(), spec.recipe_hash.size());
  const std::string boot = boot_id();
  std::memcpy(header.boot_id, boot.data(), boot.size());
  const std::string machine = machine_id();
  std::memcpy(header.machine_id, machine.data(), machine.size());
  std::memcpy(out.base_ + sizeof(StaticHeader), geometry.ranks.data(), sizeof(RankEntry) * geometry.ranks.size());
  for (int64_t rank = 0; rank < world; ++rank) {
    auto* table = reinterpret_cast<ShardExtent*>(out.base_ + geometry.ranks[rank].shard_table_offset);
    for (const SlotShard& shard : spec.ranks[rank].shards) *table++ = {shard.offset, shard.bytes};
  }
  std::memcpy(out.base_ + geometry.directory_offset, spec.directory.data(), spec.directory.size());
  header.static_hash = hash_static(out.base_, geometry.static_bytes);
  const ProcessId me = this_process();
  out.control().agent_pid = me.pid;
  out.control().agent_start = me.start;
  header.magic.store(arena::kMagic, std::memory_order_release);
  return out;
}

Result<Arena> Arena::map(Fd fd, std::string name) {
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return os_error(errno, "fstat of snapshot memory");
  if (info.st_size < static_cast<int64_t>(sizeof(StaticHeader))) {
    return damaged(fmt::format("{} bytes are too few for a header", info.st_size));
  }
  void* base = mmap(nullptr, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return os_error(errno, "mmap of snapshot memory");
  Arena out;
  out.fd_ = std::move(fd);
  out.name_ = std::move(name);
  out.base_ = static_cast<std::byte*>(base);
  out.bytes_ = info.st_size;
  RT_TRY(out.validate());
  out.ranks_ = ranks_with_slots(
      {reinterpret_cast<const RankEntry*>(out.base_ + sizeof(StaticHeader)), static_cast<size_t>(out.world())});
  out.on_disk_ = is_on_disk(out.fd_.get());
  out.huge_pages_ =
      !out.on_disk_ && huge_pages_allowed(out.fd_.get()) && madvise(base, info.st_size, MADV_HUGEPAGE) == 0;
  return out;
}

Status Arena::validate() const {
  const StaticHeader& h = header();
  if (h.magic.load(std::memory_order_acquire) != arena::kMagic) {
    return damaged("no magic number: never finished, or not a snapshot segment");
  }
  if (h.version != arena::kVersion && h.version != arena::kPartVersion) {
    if (is_on_disk(fd_.get()) && is_from_before_start(fd_.get())) {
      return damaged("it is from before this machine's last start");
    }
    return Error{ErrorCode::kUnsupported,
                 fmt::format("version {}, this build reads {}: another build's", h.version, arena::kVersion)};
  }
  if (h.total_bytes != bytes_) return damaged(fmt::format("{} bytes long, its header says {}", bytes_, h.total_bytes));
  if (h.world < 1 || h.world > arena::kMaxWorld || h.slots < 1 || h.slots > arena::kMaxSlots ||
      h.chunk_bytes < kPageBytes || h.chunk_bytes > kMaxChunkBytes || h.position_capacity != kPositionCapacity ||
      h.static_bytes < static_cast<int64_t>(sizeof(StaticHeader) + sizeof(RankEntry) * h.world) ||
      h.static_bytes > bytes_) {
    return damaged("numbers in the header are out of range");
  }
  if (const uint64_t hash = hash_static(base_, h.static_bytes); hash != h.static_hash) {
    return damaged(fmt::format("header checksum {}, stored {}", hash_to_hex(hash), hash_to_hex(h.static_hash)));
  }
  const std::string boot = boot_id();
  for (const char* text : {h.boot_id, h.machine_id}) {
    if (std::memchr(text, 0, arena::kTextBytes) == nullptr) return damaged("no end of the machine's name or start");
  }
  // No descriptor left, or no memory: it may be of this start, and hold what nothing else has.
  if (boot.empty() && h.boot_id[0] != 0) {
    return Error{ErrorCode::kIo,
                 "/proc/sys/kernel/random/boot_id cannot be read, so that it is not known from which start of the "
                 "machine it is"};
  }
  if (boot != h.boot_id && machine_id() != h.machine_id)  // a folder that several machines have
    return Error{ErrorCode::kUnavailable, "it is of another machine"};
  if (boot != h.boot_id) return damaged("it is from before this machine's last start");
  const auto fits = [&](int64_t offset, int64_t size) {
    return offset >= 0 && size >= 0 && offset <= bytes_ && size <= bytes_ - offset && offset % 8 == 0;
  };
  bool good = std::memchr(h.run_id, 0, arena::kTextBytes) != nullptr &&
              std::memchr(h.recipe_hash, 0, arena::kTextBytes) != nullptr && h.directory_bytes >= 0 &&
              h.directory_offset >= 0 && h.directory_offset <= bytes_ - h.directory_bytes &&
              fits(h.control_offset, sizeof(arena::Control));
  const std::span<const RankEntry> entries(reinterpret_cast<const RankEntry*>(base_ + sizeof(StaticHeader)),
                                           static_cast<size_t>(world()));
  const RankRange mine = ranks_with_slots(entries);
  good = good && mine.size() > 0 && (mine.size() == world()) == (h.version == arena::kVersion);
  for (int64_t rank = 0; good && rank < world(); ++rank) {
    const RankEntry& e = entries[rank];
    if (!mine.contains(rank)) {
      const RankEntry nothing{.shard_table_offset = e.shard_table_offset, .shards = e.shards};
      good = std::memcmp(&e, &nothing, sizeof(RankEntry)) == 0 && e.shards >= 0 && e.shards <= bytes_ &&
             fits(e.shard_table_offset, e.shards * 16);
      continue;
    }
    good = e.shards >= 0 && e.shards <= bytes_ && fits(e.shard_table_offset, e.shards * 16) &&
           fits(e.weights_mark_offset, sizeof(arena::WeightsMark)) && fits(e.weights_offset, e.weight_bytes) &&
           e.weights_offset % kPageBytes == 0;
    for (int64_t slot = 0; good && slot < slots(); ++slot) {
      good = fits(e.header_offset[slot], static_cast<int64_t>(sizeof(SlotHeader)) + kPositionCapacity + e.shards * 8) &&
             fits(e.payload_offset[slot], e.payload_bytes) && e.payload_offset[slot] % kPageBytes == 0;
    }
    int64_t end = 0;
    for (int64_t k = 0; good && k < e.shards; ++k) {
      const ShardExtent& extent = shards(rank)[k];
      good = extent.offset >= end && extent.bytes >= 0 && extent.offset <= e.payload_bytes - extent.bytes &&
             extent.offset % 8 == 0 && extent.bytes % 4 == 0;
      if (good) end = extent.offset + extent.bytes;
    }
  }
  if (!good) return damaged("the tables behind the header do not fit together");
  return {};
}

Result<Arena> Arena::attach(const std::string& name) {
  Fd fd(::open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) {
    Error error = os_error(errno, fmt::format("snapshot memory {}", name));
    if (errno == ENOENT) error.code = ErrorCode::kUnavailable;
    return error;
  }
  return map(std::move(fd), name).with(fmt::format("snapshot memory {}", name));
}

Result<Arena> Arena::attach_fd(int fd) {
  Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) return os_error(errno, fmt::format("snapshot memory, descriptor {}", fd));
  return map(std::move(copy), "").with(fmt::format("snapshot memory, descriptor {}", fd));
}

Result<std::optional<Arena>> Arena::adopt(std::string_view run_id, const std::string& folder,
                                          const std::optional<RankRange>& ranks) {
  std::optional<Arena> best;
  std::tuple<bool, uint64_t, int64_t> best_worth;
  for (const std::string& name : stale_paths(folder, hash_bytes(run_id))) {
    Fd fd = lock_segment(name, std::chrono::seconds(2));
    if (!fd) continue;
    Result<Arena> found = map(std::move(fd), name);
    if (!found.ok() && found.error().code == ErrorCode::kUnavailable) continue;  // another machine's
    if (!found.ok() && found.error().code != ErrorCode::kCorrupt) {
      return std::move(found)
          .with(fmt::format(
              "{} holds this run's state and cannot be read; resume with the build that left it, or remove the file to "
              "give up what is in it",
              name))
          .error();
    }
    if (!found.ok() || found.value().run_id() != run_id) continue;
    if (ranks && !found.value().has_world() && found.value().ranks() != *ranks) continue;
    const std::vector<SlotView> views = found.value().views();
    const auto newest = newest_whole(views);
    const auto worth = newest ? std::tuple(true, views[*newest].incarnation, views[*newest].step)
                              : std::tuple(false, uint64_t{0}, int64_t{0});
    if (best && worth <= best_worth) continue;
    best = std::move(found).value();
    best_worth = worth;
  }
  if (!best) return std::optional<Arena>();
  const ProcessId me = this_process();
  const std::string mine = segment_path(folder, run_id, me);
  // One rename wins among agents that compete; RENAME_NOREPLACE keeps a segment that this process already has.
  if (best->name_ != mine && renameat2(AT_FDCWD, best->name_.c_str(), AT_FDCWD, mine.c_str(), RENAME_NOREPLACE) != 0) {
    if (errno == ENOENT) return std::optional<Arena>();
    return os_error(errno, fmt::format("taking over snapshot memory {}", best->name_));
  }
  best->name_ = mine;
  best->control().agent_pid = me.pid;
  best->control().agent_start = me.start;
  best->control().stop = best->control().stop_at_save = 0;
  best->control().stop_at_step = 0;
  best->control().saves_answered = best->control().saves_asked.load();
  for (int64_t slot = 0; slot < best->slots(); ++slot) {  // what the dead agent was writing is still to be written
    std::atomic<int64_t>& reserved = best->control().reserved[slot];
    if (const int64_t seen = reserved.load(); seen < 0) reserved.store(seen == INT64_MIN ? 0 : -seen);
  }
  return std::optional<Arena>(std::move(best));
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  if (base_ != nullptr) munmap(base_, bytes_);
  fd_ = std::move(other.fd_);
  name_ = std::exchange(other.name_, {});
  base_ = std::exchange(other.base_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  ranks_ = other.ranks_;
  huge_pages_ = other.huge_pages_;
  on_disk_ = other.on_disk_;
  return *this;
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

Status Arena::remove() {
  if (name_.empty()) return {};
  const std::string name = std::exchange(name_, {});
  if (::unlink(name.c_str()) != 0 && errno != ENOENT) return os_error(errno, fmt::format("removing {}", name));
  return {};
}

Result<Fd> Arena::descriptor() const {
  Fd out(::open(fmt::format("/proc/self/fd/{}", fd_.get()).c_str(), O_RDWR | O_CLOEXEC));
  if (!out) return os_error(errno, fmt::format("a descriptor of snapshot memory {}", name_));
  return out;
}

bool Arena::is_nameless() const {
  struct stat info {};
  return !name_.empty() && fstat(fd_.get(), &info) == 0 && info.st_nlink == 0;
}

std::string_view Arena::directory() const {
  return {reinterpret_cast<const char*>(base_ + header().directory_offset),
          static_cast<size_t>(header().directory_bytes)};
}

std::vector<int64_t> Arena::rank_of_file() const {
  std::vector<int64_t> out;
  for (int64_t rank = 0; rank < world(); ++rank) {
    if (!shards(rank).empty()) out.push_back(rank);
  }
  return out;
}

arena::Control& Arena::control() const { return *reinterpret_cast<arena::Control*>(base_ + header().control_offset); }

const RankEntry& Arena::entry(int64_t rank) const {
  RT_CHECK(rank >= 0 && rank < world(), "rank {} of {}", rank, world());
  return reinterpret_cast<const RankEntry*>(base_ + sizeof(StaticHeader))[rank];
}

const RankEntry& Arena::here(int64_t rank) const {
  RT_CHECK(ranks_.contains(rank), "rank {} has no memory on this host, which has ranks {} to {}", rank, ranks_.first,
           ranks_.end - 1);
  return entry(rank);
}

std::span<const ShardExtent> Arena::shards(int64_t rank) const {
  const RankEntry& e = entry(rank);
  return {reinterpret_cast<const ShardExtent*>(base_ + e.shard_table_offset), static_cast<size_t>(e.shards)};
}

SlotHeader& Arena::slot_header(int64_t rank, int64_t slot) const {
  RT_CHECK(slot >= 0 && slot < slots(), "slot {} of {}", slot, slots());
  return *reinterpret_cast<SlotHeader*>(base_ + here(rank).header_offset[slot]);
}

std::span<char> Arena::position_area(int64_t rank, int64_t slot) const {
  return {reinterpret_cast<char*>(&slot_header(rank, slot) + 1), static_cast<size_t>(kPositionCapacity)};
}

std::span<uint64_t> Arena::sum_area(int64_t rank, int64_t slot) const {
  return {reinterpret_cast<uint64_t*>(position_area(rank, slot).data() + kPositionCapacity),
          static_cast<size_t>(here(rank).shards)};
}

std::span<std::byte> Arena::weights(int64_t rank) const {
  const RankEntry& e = here(rank);
  return {base_ + e.weights_offset, static_cast<size_t>(e.weight_bytes)};
}

arena::WeightsMark& Arena::weights_mark(int64_t rank) const {
  return *reinterpret_cast<arena::WeightsMark*>(base_ + here(rank).weights_mark_offset);
}

bool Arena::weights_are_of(uint64_t incarnation, int64_t step) const {
  for (int64_t rank = ranks_.first; rank < ranks_.end; ++rank) {
    const arena::WeightsMark& mark = weights_mark(rank);
    const uint64_t sequence = mark.sequence.load(std::memory_order_acquire);
    if (entry(rank).weight_bytes == 0 || sequence == 0 || sequence % 2 != 0 ||
        mark.incarnation.load(std::memory_order_relaxed) != incarnation ||
        mark.step.load(std::memory_order_relaxed) != step) {
      return false;
    }
  }
  return true;
}

std::span<const uint64_t> Arena::starts() const {
  const std::span<const uint64_t> kept = control().starts;
  return kept.first(static_cast<size_t>(std::ranges::find(kept, 0) - kept.begin()));
}

std::set<int64_t> Arena::promised() const {
  std::set<int64_t> out;
  for (int64_t slot = 0; slot < slots(); ++slot) {
    const int64_t step = control().reserved[slot].load(std::memory_order_acquire);
    if (step != 0) out.insert(step > 0 ? step : -step);
  }
  return out;
}

/// `first` and then `rest`, of which the last may be too many.
static void store_starts(arena::Control& control, uint64_t first, std::span<const uint64_t> rest) {
  std::vector<uint64_t> starts{first};
  starts.insert(starts.end(), rest.begin(), rest.end());
  starts.resize(arena::kStartsKept);
  std::ranges::copy(starts, control.starts);
}

void Arena::begin_start(uint64_t saved) {
  const std::span<const uint64_t> known = starts();
  const auto from = std::ranges::find(known, saved);
  const std::vector<uint64_t> before(saved == 0 || from == known.end() ? known.begin() : from, known.end());
  std::random_device random;
  store_starts(control(), uint64_t{random()} << 32 | random() | 1, before);  // not 0, which ends the list
}

void Arena::go_on_from(std::span<const uint64_t> starts) { store_starts(control(), control().starts[0], starts); }

void Arena::follow_starts(std::span<const uint64_t> starts) {
  if (!starts.empty()) store_starts(control(), starts.front(), starts.subspan(1));
}

void Arena::forget_weights() {
  for (int64_t rank = ranks_.first; rank < ranks_.end; ++rank)
    weights_mark(rank).sequence.store(0, std::memory_order_release);
}

std::span<std::byte> Arena::payload(int64_t rank, int64_t slot) const {
  RT_CHECK(slot >= 0 && slot < slots(), "slot {} of {}", slot, slots());
  const RankEntry& e = here(rank);
  return {base_ + e.payload_offset[slot], static_cast<size_t>(e.payload_bytes)};
}

SlotMark Arena::mark(int64_t rank, int64_t slot) const {
  const SlotHeader& h = slot_header(rank, slot);
  const uint64_t before = h.sequence.load(std::memory_order_acquire);
  SlotMark mark{SlotPhase::kWriting, h.incarnation.load(std::memory_order_relaxed),
                h.step.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t after = h.sequence.load(std::memory_order_relaxed);
  if (before == 0) return {};
  if (before == after && before % 2 == 0) mark.phase = SlotPhase::kWhole;
  return mark;
}

std::vector<SlotView> Arena::views() const {
  std::vector<SlotView> out;
  std::vector<SlotMark> marks(ranks_.size());
  for (int64_t slot = 0; slot < slots(); ++slot) {
    for (int64_t rank = ranks_.first; rank < ranks_.end; ++rank) marks[rank - ranks_.first] = mark(rank, slot);
    const bool saving = control().reserved[slot].load(std::memory_order_acquire) != 0;
    out.push_back(view_of(marks, saving || control().replica[slot].load(std::memory_order_acquire) != 0));
    out.back().saving = saving;
  }
  return out;
}

Status Arena::invalidate_slots(const std::function<bool()>& stop, double deadline_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_s);
  for (int64_t slot = 0; slot < slots(); ++slot) {
    std::atomic<int64_t>& reserved = control().reserved[slot];
    for (int64_t seen = reserved.load(std::memory_order_acquire); seen != 0; seen = reserved.load()) {
      if (seen > 0) {
        reserved.compare_exchange_strong(seen, 0);
        continue;
      }
      if (std::chrono::steady_clock::now() > deadline) {
        return Error{ErrorCode::kTimeout, fmt::format("waiting for step {} to be written from snapshot memory", -seen)};
      }
      if (stop && stop()) {
        return Error{ErrorCode::kStopped, fmt::format("asked to stop while step {} was being written", -seen)};
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  for (int64_t slot = 0; slot < slots(); ++slot) invalidate_slot(slot);
  for (arena::StepNews& news : control().news) news.step.store(0, std::memory_order_release);
  return {};
}

void Arena::keep_news(int64_t step, std::string_view text) const {
  arena::StepNews& news = control().news[step % arena::kNewsKept];
  news.step.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (text.size() > sizeof(news.text)) return;
  std::memcpy(news.text, text.data(), text.size());
  news.bytes = static_cast<int64_t>(text.size());
  news.step.store(step, std::memory_order_release);
}

std::vector<std::string> Arena::news_until(int64_t last) const {
  std::vector<std::string> out;
  for (int64_t step = std::max<int64_t>(1, last - arena::kNewsKept + 1); step <= last; ++step) {
    const arena::StepNews& news = control().news[step % arena::kNewsKept];
    if (news.step.load(std::memory_order_acquire) != step) continue;
    const int64_t bytes = news.bytes;
    if (bytes < 0 || bytes > std::ssize(news.text)) continue;
    std::string text(news.text, static_cast<size_t>(bytes));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (news.step.load(std::memory_order_relaxed) == step) out.push_back(std::move(text));  // else written over
  }
  return out;
}

void Arena::invalidate_slot(int64_t slot) {
  if (int64_t promised = control().reserved[slot].load(); promised > 0)  // nobody can keep that any more
    control().reserved[slot].compare_exchange_strong(promised, 0);
  control().replica[slot].store(0, std::memory_order_release);
  for (int64_t rank = ranks_.first; rank < ranks_.end; ++rank)
    slot_header(rank, slot).sequence.store(0, std::memory_order_release);
}

void Arena::populate(int64_t rank) const {
  const auto touch = [](std::span<std::byte> area) {
    if (area.empty() || ckpt::populate(area.data(), std::ssize(area)) == 0) return;
    for (size_t at = 0; at < area.size(); at += kPageBytes) {
      static_cast<void>(*reinterpret_cast<const volatile std::byte*>(area.data() + at));
    }
  };
  for (int64_t slot = 0; slot < slots() && !on_disk_; ++slot) touch(payload(rank, slot));
  touch(weights(rank));
}

std::vector<StaleArena> stale_arenas(const std::string& folder) {
  std::vector<StaleArena> out;
  for (const std::string& name : stale_paths(folder, std::nullopt)) {
    StaleArena stale{.name = name};
    struct stat info {};
    if (::stat(name.c_str(), &info) != 0 || info.st_uid != getuid() || is_held(name)) continue;
    stale.bytes = info.st_blocks * 512;
    if (const Result<Arena> found = Arena::attach(name); found.ok()) {
      stale.run_id = found.value().run_id();
      stale.ranks = found.value().ranks();
      stale.world = found.value().world();
      stale.has_world = found.value().has_world();
      const std::vector<SlotView> views = found.value().views();
      const auto newest = newest_whole(views);
      if (newest && views[*newest].step > found.value().control().persisted_step.load(std::memory_order_acquire)) {
        stale.unsaved_step = views[*newest].step;
      }
    } else if (found.error().code != ErrorCode::kCorrupt) {
      stale.unread = found.error().message;
      stale.elsewhere = found.error().code == ErrorCode::kUnavailable;
    }
    out.push_back(std::move(stale));
  }
  return out;
}

bool remove_stale_arena(const StaleArena& stale) {
  const Fd fd = lock_segment(stale.name, std::chrono::milliseconds(100));
  return fd && ::unlink(stale.name.c_str()) == 0;
}

}  // namespace cairn::ckpt
