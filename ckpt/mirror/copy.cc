#include "ckpt/mirror/copy.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/mirror/placed_step.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/retention.h"
#include "ckpt/verify/verify.h"
#include "runtime/core/file_calls.h"

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;
using SteadyClock = std::chrono::steady_clock;

constexpr std::string_view kPartSuffix = ".part";

double since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

/// Counts bytes of one phase towards its total.
class Counter {
 public:
  Counter(const CopyOptions& options, CopyPhase phase, int64_t total_bytes)
      : options_(options), phase_(phase), total_bytes_(total_bytes) {}
  Traffic traffic() {
    Traffic out = options_.traffic;
    out.on_bytes = [this](int64_t bytes) { add(bytes); };
    return out;
  }
  void add(int64_t bytes) {
    done_bytes_ += bytes;
    if (options_.progress) options_.progress(phase_, std::min(done_bytes_, total_bytes_), total_bytes_);
  }

 private:
  const CopyOptions& options_;
  CopyPhase phase_;
  int64_t total_bytes_, done_bytes_ = 0;
};

/// Names of all files but the manifest and the note, sorted.
Result<std::vector<std::string>> files_of(IoBackend& io, const fs::path& dir) {
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(dir));
  std::vector<std::string> out;
  for (const DirEntry& entry : entries) {
    if (!entry.is_dir && entry.name != kManifestName && entry.name != kReferencesName && valid_file_name(entry.name))
      out.push_back(entry.name);
  }
  return out;
}

/// Reads every byte; the throttle holds for this too.
Status verify(IoBackend& io, const fs::path& dir, CopyPhase phase, const CopyOptions& options, bool structure) {
  Pace pace(options.traffic.max_bytes_per_s);
  int64_t before = 0;
  VerifyOptions verify_options{.max_damages = 3, .structure = structure};
  verify_options.progress = [&](int64_t done, int64_t total) {
    pace.spend(done - before);
    before = done;
    if (options.progress) options.progress(phase, done, total);
  };
  RT_TRY_SET(const VerifyReport report, verify_checkpoint(io, dir, verify_options));
  if (report.whole()) return {};
  std::string text = fmt::format("{} is damaged", dir.string());
  for (const Damage& damage : report.damages) text += "\n  " + damage.message;
  return Error{ErrorCode::kCorrupt, std::move(text)};
}

Result<uint64_t> hash_there(Place& place, int64_t step, const std::string& name, int64_t bytes,
                            const Traffic& traffic) {
  StreamingHash hash;
  int64_t got = 0;
  RT_TRY(place.read(
      Place::Of::kCopy, step, name, 0,
      [&](std::span<const std::byte> data) -> Status {
        got += static_cast<int64_t>(data.size());
        hash.update(data);
        if (got <= bytes) return {};
        return Error{ErrorCode::kIo,
                     fmt::format("{} in {}: longer than the {} bytes sent", name, place.describe(), bytes)};
      },
      traffic));
  if (got != bytes) {
    return Error{ErrorCode::kIo,
                 fmt::format("{} in {}: {} bytes came back of {} sent", name, place.describe(), got, bytes)};
  }
  return hash.digest();
}

/// Which folder a name means at this moment; an exchange gives it to another.
Result<std::pair<dev_t, ino_t>> identity_of(const fs::path& dir) {
  struct stat info {};
  if (::stat(dir.c_str(), &info) != 0) return os_error(errno, dir.string());
  return std::pair(info.st_dev, info.st_ino);
}

/// Whether `manifest` refers to files of `step`'s number that are as `step` has them, or to some that are not.
bool refers_to(const Manifest& manifest, const Manifest& step, bool as_it_has_them) {
  return std::any_of(manifest.files.begin(), manifest.files.end(), [&](const FileEntry& file) {
    const FileEntry own{.name = file.name, .size_bytes = file.size_bytes, .rest_hash = file.rest_hash};
    const bool has = std::find(step.files.begin(), step.files.end(), own) != step.files.end();
    return file.step == step.step && has == as_it_has_them;
  });
}

/// Steps there that refer to files of `step`, the newest first.
Result<std::vector<int64_t>> dependents_of(Place& place, const Manifest& step) {
  RT_TRY_SET(const std::vector<PlacedStep> there, place.list());
  std::vector<int64_t> out;
  for (auto other = there.rbegin(); other != there.rend() && other->step > step.step; ++other) {
    if (!has_file(*other, kManifestName)) continue;
    const Result<Manifest> manifest = placed_manifest(place, other->step);
    bool refers = manifest.ok() && refers_to(manifest.value(), step, true);  // others have lost them already
    if (!manifest.ok()) {
      RT_TRY_SET(const std::vector<int64_t> needed, announced_steps(place, *other));
      refers = std::find(needed.begin(), needed.end(), step.step) != needed.end();
    }
    if (refers) out.push_back(other->step);
  }
  return out;
}

/// Another checkpoint of this step is there: whether it may go, and what goes with it.
Result<std::vector<int64_t>> make_way(Place& place, int64_t step, const Manifest& ours, Replace replace) {
  const std::string& run_id = ours.run.id;
  const Result<Manifest> theirs = placed_manifest(place, step);
  if (!theirs.ok() && !broken(theirs.error())) return theirs.error();
  if (!theirs.ok()) {  // its own manifest is of use to nobody, but its files may be what later steps there need
    std::vector<int64_t> needing;
    bool all_older = true;  // than ours: of the line that the run has left. Ours may be the same save, archived since
    RT_TRY_SET(const std::vector<PlacedStep> there, place.list());
    for (auto other = there.rbegin(); other != there.rend() && other->step > step; ++other) {
      if (!other->complete) continue;
      const Result<Manifest> manifest = placed_manifest(place, other->step);
      if (!manifest.ok() && !broken(manifest.error())) return manifest.error();
      if (!manifest.ok() || !refers_to(manifest.value(), ours, false)) continue;
      needing.push_back(other->step);
      all_older = all_older && manifest.value().created_unix_ms < ours.created_unix_ms;
    }
    if (needing.empty() || (replace == Replace::kOwnLine && all_older)) return needing;
    return Error{
        replace == Replace::kOwnLine ? ErrorCode::kCorrupt : ErrorCode::kUnavailable,
        fmt::format("step {} in {}: kept, its manifest is damaged but step {} there refers to its files, which "
                    "are others than here; choose another place, or remove what refers to it first",
                    step, place.describe(), fmt::join(needing, ", "))};
  }
  if (replace == Replace::kSameRun && theirs.value().run.id != run_id) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{} has a step {} of another run (id {}, this one is {}); choose another place, or replace it "
                    "with --overwrite",
                    place.describe(), step, theirs.value().run.id, run_id)};
  }
  RT_TRY_SET(std::vector<int64_t> dependents, dependents_of(place, theirs.value()));
  if (dependents.empty() || replace == Replace::kOwnLine) return dependents;
  return Error{ErrorCode::kUnavailable,
               fmt::format("step {} in {}: kept, it is another one than here and step {} there refers to its files; "
                           "choose another place, or remove what refers to it first",
                           step, place.describe(), fmt::join(dependents, ", "))};
}

}  // namespace

Result<CopyReport> copy_checkpoint(Place& place, IoBackend& io, const fs::path& step_dir, const CopyOptions& options) {
  const auto begin = SteadyClock::now();
  CopyReport report;
  const std::optional<int64_t> step = parse_step_dir_name(step_dir.filename().string());
  if (!step) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: expected a folder named step-NNNNNNNN", step_dir.string())};
  }
  report.step = *step;
  RT_TRY_SET(const auto identity, identity_of(step_dir));
  RT_TRY_SET(SourceFile manifest, SourceFile::open(step_dir / kManifestName));
  RT_TRY_SET(const std::vector<PlacedStep> there, place.list());
  bool same = false;
  for (const PlacedStep& placed : there) {
    if (placed.step != *step || !has_file(placed, kManifestName)) continue;
    RT_TRY_SET(same, whole_there(place, *step, manifest, {}));
    report.was_there = same && placed.complete && !options.check_there;
    if (report.was_there) return report;
    if (!same) report.replaced.push_back(*step);
  }
  const Result<Manifest> read = read_manifest(io, step_dir);
  if (!read.ok()) {
    RT_TRY(verify(io, step_dir, CopyPhase::kVerifySource, options, false));  // says what is damaged
    return read.error();
  }
  std::vector<int64_t> dependents;
  if (!report.replaced.empty()) {
    RT_TRY_SET(dependents, make_way(place, *step, read.value(), options.replace));
  }
  RT_TRY(verify(io, step_dir, CopyPhase::kVerifySource, options, false));
  report.verify_seconds = since(begin);
  const std::vector<int64_t> needed = needed_steps(read.value().files);
  for (const int64_t other : needed) {
    if (other >= *step) continue;  // only earlier ones can be needed; a manifest that says otherwise is damage
    RT_TRY_SET(const CopyReport along,
               copy_checkpoint(place, io, step_dir.parent_path() / step_dir_name(other), options));
    report.sent_bytes += along.sent_bytes;
    report.reused_bytes += along.reused_bytes;
    report.removed.insert(report.removed.end(), along.removed.begin(), along.removed.end());
    report.repaired.insert(report.repaired.end(), along.repaired.begin(), along.repaired.end());
    report.replaced.insert(report.replaced.end(), along.replaced.begin(), along.replaced.end());
  }
  RT_TRY_SET(std::vector<std::string> names, files_of(io, step_dir));
  std::vector<SourceFile> sources;
  for (const std::string& name : names) {
    RT_TRY_SET(SourceFile source, SourceFile::open(step_dir / name));
    sources.push_back(std::move(source));
  }
  if (!needed.empty()) {
    RT_TRY_SET(SourceFile note, SourceFile::of_text(std::string(kReferencesName), references_text(needed)));
    names.push_back(note.name());
    sources.push_back(std::move(note));
  }
  // What was verified and what is sent must be one checkpoint; from here on the open files hold it.
  RT_TRY_SET(const auto now, identity_of(step_dir));
  if (now != identity) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{}: another checkpoint has taken its place meanwhile", step_dir.string())};
  }
  for (const SourceFile& source : sources) report.bytes += source.bytes();
  report.bytes += manifest.bytes();
  report.files = static_cast<int64_t>(sources.size()) + 1;

  std::vector<std::string> damaged;
  if (same && options.check_there) {
    Counter checking(options, CopyPhase::kCheckThere, report.bytes);
    const Traffic traffic = checking.traffic();
    for (SourceFile& source : sources) {
      RT_TRY_SET(const bool whole, whole_there(place, *step, source, traffic));
      if (!whole) damaged.push_back(source.name());
    }
    report.was_there = damaged.empty();
    report.seconds = since(begin);
    if (report.was_there) return report;
    report.repaired.push_back(*step);
  }

  const auto send_all = [&]() -> Status {
    RT_TRY(place.begin(*step));
    RT_TRY(place.reserve(*step, report.bytes));
    for (const std::string& name : damaged) {  // a store may still give the checksum that it had
      const Status gone = place.discard(*step, name);
      if (!gone.ok() && !is_not_found(gone.error())) return gone.error();
    }
    Counter sending(options, CopyPhase::kSend, report.bytes);
    const Traffic send_traffic = sending.traffic();
    std::vector<uint64_t> hashes;
    for (SourceFile& source : sources) {
      RT_TRY_SET(const PutReport put, place.put(*step, source, send_traffic));
      report.sent_bytes += put.sent_bytes;
      report.reused_bytes += put.reused_bytes;
      hashes.push_back(put.hash);
    }
    if (options.read_back) {
      const auto verify_begin = SteadyClock::now();
      Counter reading(options, CopyPhase::kReadBack, report.bytes);
      const Traffic read_traffic = reading.traffic();
      for (size_t i = 0; i < sources.size(); ++i) {
        const auto check = [&]() -> Status {
          RT_TRY_SET(const uint64_t hash, hash_there(place, *step, names[i], sources[i].bytes(), read_traffic));
          if (hash == hashes[i]) return {};
          return Error{ErrorCode::kIo,
                       fmt::format("{} in {}: what was read back differs from what was sent (hash {}, sent {})",
                                   names[i], place.describe(), hash_to_hex(hash), hash_to_hex(hashes[i]))};
        };
        Status checked = check();
        if (checked.ok()) continue;
        if (checked.error().code != ErrorCode::kIo) return std::move(checked).error();
        // Damaged there: once more from the start, and then it is the place that is not to be trusted.
        RT_TRY(place.discard(*step, names[i]));
        RT_TRY_SET(const PutReport again, place.put(*step, sources[i], send_traffic));
        report.sent_bytes += again.sent_bytes;
        checked = check();
        if (checked.ok()) continue;
        if (checked.error().code == ErrorCode::kIo) {
          ignore(place.discard(*step, names[i]), "the next try finds it again");
        }
        return std::move(checked).error();
      }
      report.verify_seconds += since(verify_begin);
    }
    for (const int64_t other : dependents) {  // not before the new one is there but for its name
      if (std::ranges::find(report.removed, other) != report.removed.end()) continue;  // with what this one needs
      RT_TRY(place.remove(other));
      report.removed.push_back(other);
    }
    RT_TRY(place.commit(*step, manifest, send_traffic));
    report.sent_bytes += manifest.bytes();
    return {};
  };
  if (const Status sent = send_all(); !sent.ok()) {
    // What fills a place must not stay there.
    if (sent.error().code == ErrorCode::kNoSpace) ignore(place.abandon(*step), "tidy() comes back to it");
    return sent.error();
  }
  report.seconds = since(begin);
  return report;
}

namespace {

/// One file of a fetch: into NAME.part from where it ends, then synced and renamed to NAME.
Status fetch_file(Place& place, int64_t step, const PlacedFile& file, const fs::path& work, const Traffic& traffic,
                  CopyReport& report) {
  const fs::path done = work / file.name, part = work / (file.name + std::string(kPartSuffix));
  struct stat info {};
  if (::stat(done.c_str(), &info) == 0 && info.st_size == file.bytes) {
    report.reused_bytes += file.bytes;
    if (traffic.on_bytes) traffic.on_bytes(file.bytes);
    return {};
  }
  const Fd fd(::open(part.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd || ::fstat(fd.get(), &info) != 0) return os_error(errno, part.string());
  int64_t at = info.st_size;
  if (at > file.bytes) {
    at = 0;
    if (::ftruncate(fd.get(), 0) != 0) return os_error(errno, part.string());
  }
  report.reused_bytes += at;
  if (at > 0 && traffic.on_bytes) traffic.on_bytes(at);
  if (at < file.bytes) {
    RT_TRY(place.read(
        Place::Of::kComplete, step, file.name, at,
        [&](std::span<const std::byte> data) -> Status {
          if (static_cast<int64_t>(data.size()) > file.bytes - at) {
            return Error{ErrorCode::kUnavailable,
                         fmt::format("{} in {}: more than its {} bytes come", file.name, place.describe(), file.bytes)};
          }
          for (size_t written = 0; written < data.size();) {
            const ssize_t n = ::pwrite(fd.get(), data.data() + written, data.size() - written, at);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return os_error(errno, part.string());
            written += static_cast<size_t>(n);
            at += n;
            report.sent_bytes += n;
          }
          return {};
        },
        traffic));
  }
  if (at != file.bytes) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("{} in {}: {} bytes came of {}", file.name, place.describe(), at, file.bytes)};
  }
  if (sync_to_disk(fd.get()) != 0) return os_error(errno, part.string());
  if (::rename(part.c_str(), done.c_str()) != 0) return os_error(errno, done.string());
  return {};
}

/// Puts `work` in the place of a step's folder, which then goes. `in_place`: it is there, also when that fails, or will
/// be.
Status exchange_for(IoBackend& io, const fs::path& checkpoints_dir, const fs::path& work, bool* in_place) {
  Replacement replacement = replace_step(io, work);
  *in_place = replacement.status.ok() || replacement.cut_off;
  RT_TRY(std::move(replacement.status));
  RT_TRY(io.sync_dir(checkpoints_dir));  // what it has replaced stays until the new name is durable
  ignore(remove_tree(io, replacement.old), "the next start cleans it");
  return {};
}

/// All files of a placed step into `work`, verified and synced.
Status bring(Place& place, IoBackend& io, const PlacedStep& step, const fs::path& work,
             const std::vector<int64_t>& needed, const CopyOptions& options, CopyReport& report) {
  // What a killed save or fetch left may hold other files; they are not of this step's copy.
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(work));
  int64_t present_bytes = 0;
  for (const DirEntry& entry : entries) {
    const bool wanted = std::any_of(step.files.begin(), step.files.end(), [&](const PlacedFile& file) {
      return entry.name == file.name || entry.name == file.name + std::string(kPartSuffix);
    });
    if (entry.is_dir || !wanted) {
      RT_TRY(entry.is_dir ? remove_tree(io, work / entry.name) : io.remove_file(work / entry.name));
      continue;
    }
    RT_TRY_SET(const FileStat stat, io.stat(work / entry.name));
    present_bytes += stat.size_bytes;
  }
  RT_TRY_SET(const int64_t free_bytes, io.free_bytes(work));
  if (free_bytes < step.bytes - present_bytes) {
    return Error{ErrorCode::kNoSpace,
                 fmt::format("{}: {} bytes free, step {} of {} needs {}", work.parent_path().string(), free_bytes,
                             step.step, place.describe(), step.bytes - present_bytes)};
  }
  Counter fetching(options, CopyPhase::kFetch, step.bytes);
  const Traffic traffic = fetching.traffic();
  for (const PlacedFile& file : step.files) {
    if (!valid_file_name(file.name)) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: a file named \"{}\"", place.describe(), file.name)};
    }
    RT_TRY(fetch_file(place, step.step, file, work, traffic, report));
  }
  const auto verify_begin = SteadyClock::now();
  CopyOptions unthrottled = options;
  unthrottled.traffic.max_bytes_per_s = 0;
  Status whole = verify(io, work, CopyPhase::kVerifyFetched, unthrottled, true);
  if (whole.ok()) {
    RT_TRY_SET(const Manifest fetched, read_manifest(io, work));
    if (fetched.step != step.step) {
      whole = Error{ErrorCode::kCorrupt,
                    fmt::format("step {} of {} says that it is step {}", step.step, place.describe(), fetched.step)};
    }
  }
  if (!whole.ok()) {
    return std::move(whole).with(fmt::format("step {} as fetched from {}", step.step, place.describe())).error();
  }
  report.verify_seconds = since(verify_begin);
  if (!needed.empty()) {  // what retention here looks at: as the manifest has it, whatever the place had
    if (has_file(step, kReferencesName)) RT_TRY(io.remove_file(work / kReferencesName));
    RT_TRY(write_file(io, work / kReferencesName, references_text(needed)));
  }
  return io.sync_dir(work);
}

}  // namespace

Result<CopyReport> fetch_checkpoint(Place& place, IoBackend& io, const PlacedStep& step,
                                    const fs::path& checkpoints_dir, const CopyOptions& options) {
  const auto begin = SteadyClock::now();
  CopyReport report{.step = step.step, .files = static_cast<int64_t>(step.files.size()), .bytes = step.bytes};
  report.dir = checkpoints_dir / step_dir_name(step.step);
  if (!step.complete) {
    return Error{ErrorCode::kInvalidInput, fmt::format("step {} in {} is not complete", step.step, place.describe())};
  }
  RT_TRY(make_dirs(io, checkpoints_dir));
  RT_TRY_SET(const Manifest manifest, placed_manifest(place, step.step));
  const std::vector<int64_t> needed = needed_steps(manifest.files);
  if (!needed.empty()) {
    RT_TRY_SET(const std::vector<PlacedStep> there, place.list());
    for (const PlacedStep& other : there) {
      if (other.step >= step.step || !other.complete ||
          std::find(needed.begin(), needed.end(), other.step) == needed.end())
        continue;
      RT_TRY_SET(const CopyReport along, fetch_checkpoint(place, io, other, checkpoints_dir, options));
      report.sent_bytes += along.sent_bytes;
      report.reused_bytes += along.reused_bytes;
      report.repaired.insert(report.repaired.end(), along.repaired.begin(), along.repaired.end());
    }
  }
  CopyOptions unthrottled = options;
  unthrottled.traffic.max_bytes_per_s = 0;
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  RT_TRY(finish_replacements(io, checkpoints_dir, names));
  RT_TRY_SET(const Catalog catalog, list_unlabelled(io, checkpoints_dir));
  bool exchange = false, remove = false;
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (info.step != step.step) continue;
    const Result<bool> same = same_checkpoint(place, step.step, info.dir);
    if (!same.ok() && !unreadable(same.error())) return same.error();
    if (same.ok() && same.value()) {
      Status whole;
      if (!info.complete) whole = Error{ErrorCode::kCorrupt, info.problem};
      if (whole.ok() && options.check_there) {
        whole = verify(io, info.dir, CopyPhase::kVerifyHere, unthrottled, true);
      }
      report.was_there = whole.ok();
      if (report.was_there) return report;
      if (whole.error().code != ErrorCode::kCorrupt) return whole.error();
      report.repaired.push_back(step.step);
      exchange = true;  // others may refer to it: there is no moment without it
    } else if (info.complete) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} is there and is another checkpoint; move it away first", info.dir.string())};
    } else if (const Result<Manifest> here = read_manifest(io, info.dir); !here.ok()) {
      if (!broken(here.error())) return here.error();
      for (const CheckpointInfo& other : catalog.checkpoints) {  // its files may be whole, and what later ones need
        if (!other.complete || other.step <= step.step) continue;
        const Result<Manifest> needing = read_manifest(io, other.dir);
        if (!needing.ok() && !broken(needing.error())) return needing.error();
        if (!needing.ok() || !refers_to(needing.value(), manifest, false)) continue;
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{} is damaged, and step {} refers to its files, which are others than those in {}; "
                                 "move both away first, or fetch into another folder",
                                 info.dir.string(), other.step, place.describe())};
      }
      exchange = true;
    } else {
      RT_TRY_SET(const std::set<int64_t> others, announced_references(io, checkpoints_dir));
      if (others.contains(step.step)) {
        return Error{ErrorCode::kUnavailable,
                     fmt::format("{} is damaged, is another checkpoint than the one in {}, and others refer to its "
                                 "files; move them away first, or fetch into another folder",
                                 info.dir.string(), place.describe())};
      }
      remove = true;
    }
  }
  const fs::path work = checkpoints_dir / work_dir_name(kTmpPrefix, step.step, this_writer());
  bool taken = false;
  for (const std::string& name : catalog.leftovers) {
    const std::optional<WorkDir> left = parse_work_dir_name(kTmpPrefix, name);
    if (taken || !left || left->step != step.step || may_be_alive(left->writer)) continue;
    RT_TRY(io.rename(checkpoints_dir / name, work));
    taken = true;
  }
  if (!taken) RT_TRY(io.make_dir(work));
  bool in_place = false;
  const auto place_it = [&]() -> Status {
    if (remove) RT_TRY(remove_checkpoint(io, checkpoints_dir, step.step, this_writer()));
    if (exchange) return exchange_for(io, checkpoints_dir, work, &in_place);
    RT_TRY(io.rename(work, report.dir));
    return io.sync_dir(checkpoints_dir);
  };
  Status brought = bring(place, io, step, work, needed, options, report);
  if (!brought.ok()) {
    // What a place that went away has given is for the next try to go on from; else it would only take up room.
    const ErrorCode code = brought.error().code;
    if (code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout || code == ErrorCode::kStopped) {
      return std::move(brought).error();
    }
  } else {
    brought = place_it();
  }
  if (!brought.ok() && in_place) return std::move(brought).error();
  if (!brought.ok()) {
    ignore(remove_tree(io, work), "the next start cleans it");
    const int why = brought.error().os_errno;
    if (why != ENOTEMPTY && why != EEXIST) return std::move(brought).error();
    const Result<bool> same = same_checkpoint(place, step.step, report.dir);  // another fetch was faster
    report.was_there = same.ok() && same.value();
    if (!report.was_there) return std::move(brought).error();
  }
  report.seconds = since(begin);
  return report;
}

}  // namespace cairn::ckpt
