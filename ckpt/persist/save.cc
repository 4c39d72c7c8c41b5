#include "ckpt/persist/save.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "ckpt/persist/incremental.h"
#include "ckpt/persist/part_writer.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/spare_files.h"
#include "runtime/core/process.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// Files of a dead save's work directory that hold what `parts` would hold: each read and compared with its note.
Result<std::map<size_t, FinishedFile>> finished_parts(IoBackend& io, const fs::path& work, const PartSet& set,
                                                      std::span<const WriterPart> parts, uint64_t key) {
  std::map<size_t, FinishedFile> out;
  RT_TRY_SET(auto notes, read_notes(io, work, key));
  size_t first = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::span<const ShardEntry> shards = std::span(set.shards).subspan(first, parts[p].shards.size());
    first += shards.size();
    const auto note = notes.find(parts[p].file_name);
    if (note == notes.end()) continue;
    // The key stands for all that decides the bytes; how a coded shard is cut is known only once it is coded.
    const bool same =
        std::equal(shards.begin(), shards.end(), note->second.shards.begin(), note->second.shards.end(),
                   [](const ShardEntry& a, const ShardEntry& b) {
                     return a.bytes == b.bytes && (b.codec != Codec::kRaw || a.chunk_bytes == b.chunk_bytes);
                   });
    if (same && check_finished(io, work, note->second).ok()) out.emplace(p, std::move(note->second));
  }
  return out;
}

/// Takes the directory over: its name says from now on that this process is at work in it.
Status take_over(IoBackend& io, const fs::path& left, const fs::path& work,
                 const std::map<size_t, FinishedFile>& taken) {
  RT_TRY(io.rename(left, work));
  std::set<std::string> keep;
  for (const auto& [part, finished] : taken) {
    keep.insert(finished.file.name);
    keep.insert(note_name(finished.file.name));
  }
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(work));
  for (const DirEntry& entry : entries) {
    if (!entry.is_dir && !keep.contains(entry.name)) RT_TRY(io.remove_file(work / entry.name));
  }
  return {};
}

/// Files and shards of a set lie in the manifest of which they are all while this lives: nothing is copied, and spans
/// of them hold.
class Joined {
 public:
  Joined(Manifest& manifest, PartSet& set) : manifest_(manifest), set_(set) { swap(); }
  Joined(const Joined&) = delete;
  ~Joined() { swap(); }

 private:
  void swap() {
    manifest_.files.swap(set_.files);
    manifest_.shards.swap(set_.shards);
  }
  Manifest& manifest_;
  PartSet& set_;
};

/// Step 1, but for the room on the disk: `set` has all files and shards, the unchanged behind what is to be written.
/// What `skeleton` has of the save before is taken over.
Status plan_all(Manifest& skeleton, std::span<const WriterPart> parts, const SaveOptions& options,
                const Unchanged& unchanged, PartSet& set) {
  set.files = std::exchange(skeleton.files, {});
  set.shards = std::exchange(skeleton.shards, {});
  if (!unchanged.shards.empty()) set = {};
  RT_TRY_SET(const bool checked, plan_parts(skeleton, parts, options, set));
  if (checked && unchanged.shards.empty()) return {};  // then, and when encoded
  const auto own_files = static_cast<int64_t>(set.files.size());
  set.files.insert(set.files.end(), unchanged.files.begin(), unchanged.files.end());
  for (ShardEntry shard : unchanged.shards) {
    shard.file += own_files;
    set.shards.push_back(std::move(shard));
  }
  const Joined joined(skeleton, set);
  Status valid = validate_manifest(skeleton);
  return valid.ok() ? valid : invalid("state to save: " + valid.error().message);
}

/// The rest of step 1. Spare files are given up where the disk has no room without them.
Status check_room(IoBackend& io, const fs::path& checkpoints_dir, const PartSet& set, int64_t unchanged_bytes,
                  const std::map<size_t, FinishedFile>& taken, size_t parts, const SaveOptions& options) {
  constexpr int64_t kSlackBytes = int64_t{1} << 20;  // metadata and rounding, per file
  int64_t needed = kSlackBytes * static_cast<int64_t>(parts + 1) - unchanged_bytes;
  for (const ShardEntry& shard : set.shards) needed += shard.bytes;
  for (const auto& [part, finished] : taken) needed -= std::min(needed, finished.file.size_bytes);
  RT_TRY_SET(int64_t free, io.free_bytes(checkpoints_dir));
  if (options.spares != nullptr) {
    // What is no shard file, directories and manifest, finds no room in spare ones. Where they do not help nobody has
    // them, and who looks for room sees it.
    const int64_t spare = options.spares->bytes();
    const bool tight = free < kSlackBytes * static_cast<int64_t>(parts + 1);
    if (!tight && free + spare >= needed) {
      free += spare;
    } else {
      options.spares->clear(io);
      RT_TRY_SET(free, io.free_bytes(checkpoints_dir));
    }
  }
  if (free >= needed) return {};
  return Error{ErrorCode::kNoSpace, fmt::format("{}: {} bytes free, step {} needs {}: {} are missing",
                                                checkpoints_dir.string(), free, set.step, needed, needed - free)};
}

/// Nullopt: a file of an earlier step that it was to refer to has been removed meanwhile. Nothing is left of it then.
Result<std::optional<SaveReport>> save_once(IoBackend& io, const fs::path& checkpoints_dir, Manifest& skeleton,
                                            std::span<const WriterPart> parts, const SaveOptions& options,
                                            const WriterId& writer) {
  const auto start = Clock::now();
  if (options.codec != Codec::kRaw || options.base != nullptr) RT_TRY(check_all_sums(parts, skeleton));
  RT_TRY_SET(const Unchanged unchanged, find_unchanged(skeleton, parts, options));
  if (!unchanged.shards.empty()) parts = unchanged.rest;
  PartSet set;
  RT_TRY(plan_all(skeleton, parts, options, unchanged, set));
  const auto check_folder = [&]() -> Status {
    Status there = options.check_folder ? options.check_folder() : Status();
    return std::move(there).with(fmt::format("step {} was not saved", skeleton.step));
  };
  RT_TRY(check_folder());
  if (!options.check_folder) RT_TRY(make_dirs(io, checkpoints_dir));
  RT_TRY_SET(const bool replaces, check_existing(io, checkpoints_dir, skeleton.step, options));

  const fs::path left = checkpoints_dir / options.resume_from;
  WriteHooks hooks;
  if (!options.resume_from.empty()) {
    RT_TRY_SET(hooks.taken, finished_parts(io, left, set, parts, options.resume_key));
    if (hooks.taken.empty()) RT_TRY(remove_tree(io, left));  // its space is needed
  }

  RT_TRY(check_room(io, checkpoints_dir, set, unchanged.bytes, hooks.taken, parts.size(), options));

  WorkFolder work(io, checkpoints_dir / work_dir_name(kTmpPrefix, skeleton.step, writer), skeleton.step,
                  options.spares);
  // Steps A, B1 and B2 of ckpt/retention/references.h; B2 is the commit's.
  if (hooks.taken.empty()) {
    if (Status made = io.make_dir(work.path()); !made.ok()) {
      work.give_up_spares(made.error());
      return std::move(made).error();
    }
  } else {
    work.keep_when_stopped();
    if (Status moved = take_over(io, left, work.path(), hooks.taken); !moved.ok())
      return work.abandon(std::move(moved).error());
  }
  if (Status meant = check_folder(); !meant.ok()) {
    ignore(remove_tree(io, work.path()), "it is empty");
    return std::move(meant).error();
  }
  if (!unchanged.files.empty()) {
    if (Status told = write_file(io, work.path() / kReferencesName, references_text(needed_steps(unchanged.files)));
        !told.ok())
      return work.abandon(std::move(told).error());
    Result<bool> there = all_there(io, work.path(), unchanged.files);
    if (!there.ok()) return work.abandon(std::move(there).error());
    if (!there.value()) {
      RT_TRY(remove_tree(io, work.path()));
      return std::optional<SaveReport>();
    }
  }
  ManifestFiles files;
  hooks.noted = [&] { work.keep_when_stopped(); };
  hooks.meanwhile = [&]() -> Status {
    const Joined joined(skeleton, set);
    RT_TRY_SET(files, encode_manifest_files(skeleton));
    return {};
  };
  if (Status written = write_planned(io, work.path(), skeleton, parts, options, hooks, set); !written.ok())
    return work.abandon(std::move(written).error());
  // The first save has found no layouts and has taken more buffers than may lie beside them.
  if (options.cache != nullptr) options.cache->buffers().limit(options.cache->buffer_bytes(options.fill_bytes));

  SaveReport report;
  const WriteStats stats = set.stats;
  RT_TRY_SET(Manifest manifest, join_parts(std::move(skeleton), {&set, 1}));
  RT_TRY_SET(CommitReport committed, commit_manifest(io, work, std::move(manifest), files, replaces, options));
  if (committed.references_gone) {
    skeleton = std::move(committed.manifest);
    return std::optional<SaveReport>();
  }
  report.seconds = seconds_since(start) - committed.remove_seconds;
  report.dir = std::move(committed.dir);
  report.manifest = std::move(committed.manifest);
  report.payload_bytes = stats.payload_bytes;
  report.file_bytes = stats.file_bytes;
  report.referenced_bytes = unchanged.bytes;
  report.layout_seconds = stats.layout_seconds;
  report.sync_seconds = stats.sync_seconds;
  report.remove_seconds = committed.remove_seconds;
  report.taken_files = stats.taken_files;
  report.taken_bytes = stats.taken_bytes;
  report.reused_files = stats.reused_files;
  report.replaced = committed.replaced;
  report.leftover = std::move(committed.leftover);
  return std::optional(std::move(report));
}

}  // namespace

WriterId this_writer() {
  static std::atomic<int64_t> saves{0};
  WriterId writer;
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) == 0) writer.host = host;
  const ProcessId me = this_process();
  writer.pid = me.pid;
  writer.start = me.start;
  writer.sequence = saves++;
  return writer;
}

void put_writer(const WriterId& writer, Manifest& manifest) {
  if (manifest.writer.program.empty()) manifest.writer.program = "cairn " CAIRN_VERSION;
  if (manifest.writer.host.empty()) manifest.writer.host = writer.host;
}

Result<SaveReport> save_checkpoint(IoBackend& io, const fs::path& checkpoints_dir, Manifest skeleton,
                                   std::span<const WriterPart> parts, const SaveOptions& options) {
  const WriterId writer = options.writer ? *options.writer : this_writer();
  put_writer(writer, skeleton);
  RT_TRY_SET(std::optional<SaveReport> report, save_once(io, checkpoints_dir, skeleton, parts, options, writer));
  if (report) return *std::move(report);
  skeleton.files.clear();
  skeleton.shards.clear();
  SaveOptions without = options;
  without.base = nullptr;
  RT_TRY_SET(report, save_once(io, checkpoints_dir, skeleton, parts, without, options.writer ? writer : this_writer()));
  RT_CHECK(report.has_value(), "a save without a base refers to nothing");
  return *std::move(report);
}

}  // namespace cairn::ckpt
