#include "tools/run/folder/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/replace.h"
#include "ckpt/store/posix_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/new_file.h"
#include "runtime/core/process.h"
#include "runtime/core/random.h"
#include "runtime/json/json.h"
#include "tools/run/folder/text.h"

namespace cairn::tools {

namespace fs = std::filesystem;

Status write_text_file(const fs::path& path, const std::string& text) { return place_file(path, text); }
Status write_unsynced_text_file(const fs::path& path, const std::string& text) {
  return place_file(path, text, Durable::kNo);
}

Result<std::string> read_text_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return os_error(errno != 0 ? errno : ENOENT, path.string());
  std::string text;
  char piece[65536];
  while (in.read(piece, sizeof piece), in.gcount() > 0) text.append(piece, static_cast<size_t>(in.gcount()));
  if (in.bad()) return Error{ErrorCode::kIo, path.string() + ": cannot be read"};
  return text;
}

std::string this_boot() {
  std::string out;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> out;
  for (const char* name : {"pid", "time"}) {
    std::error_code failed;
    const fs::path space = fs::read_symlink(fmt::format("/proc/self/ns/{}", name), failed);
    if (failed && std::string_view(name) == "pid") return {};
    if (!out.empty() && !failed) out += " " + space.string();
  }
  return out;
}

std::string holder_line() {
  const ckpt::WriterId me = ckpt::this_writer();
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch());
  std::random_device random;
  const nlohmann::json line{{"host", me.host},
                            {"pid", me.pid},
                            {"start", me.start},
                            {"boot", this_boot()},
                            {"since", time_text(now.count())},
                            {"token", fmt::format("{:08x}{:08x}", random(), random())}};
  return json_text(line) + "\n";
}

RunHolder holder_in(const std::string& text) {
  const auto line = json_or_nothing(text);
  const auto word = [&](const char* key) {
    return line.is_object() && line.contains(key) && line[key].is_string() ? printable(line[key].get<std::string>())
                                                                           : std::string();
  };
  RunHolder holder{.host = word("host"), .since = word("since"), .pid = "unknown", .boot = word("boot")};
  const bool older = line.is_number_integer();
  if (older || (line.is_object() && line.contains("pid") && line["pid"].is_number_integer()))
    holder.pid = json_text(older ? line : line["pid"]);
  if (line.is_object() && line.contains("start") && line["start"].is_number_integer()) holder.start = line["start"];
  return holder;
}

namespace {

struct Identity {
  std::string id, folder;  // folder: where it was written; empty: by an older build
};

Result<Identity> read_identity(const fs::path& run) {
  RT_TRY_SET(const std::string text, read_text_file(run / "run.json"));
  const auto json = json_or_nothing(text);
  if (!json.is_object() || !json.contains("id") || !json["id"].is_string()) {
    return Error{ErrorCode::kCorrupt, (run / "run.json").string() + ": expected {\"id\": ..., \"name\": ...}"};
  }
  Identity out{.id = json["id"].get<std::string>(), .folder = {}};
  if (json.contains("folder") && json["folder"].is_string()) out.folder = json["folder"].get<std::string>();
  return out;
}

/// {"step", "before" (created_unix_ms of the save of that step that was there, or -1), "recipe"}.
constexpr const char* kNextRecipe = "recipe.next.json";

Result<ckpt::Manifest> manifest_of(const fs::path& run, int64_t step) {
  ckpt::PosixBackend io;
  const fs::path dir = run / "checkpoints";
  Result<ckpt::Manifest> manifest = ckpt::read_manifest(io, dir / ckpt::step_dir_name(step));
  if (manifest.ok() || !ckpt::is_not_found(manifest.error())) return manifest;
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, dir));
  for (const ckpt::CutOff& cut : names.cut_off) {  // the start of the run is about to put it in its place
    if (cut.step == step) return ckpt::read_manifest(io, ckpt::look_at_cut_off(io, dir, cut).dir);
  }
  return manifest;
}

struct Announced {
  std::optional<std::string> recipe;  // its step has come
  std::optional<Error> unknown;       // whether it has cannot be told now
};

Announced announced_recipe(const fs::path& run) {
  const Result<std::string> text = read_text_file(run / kNextRecipe);
  if (!text.ok() && ckpt::is_not_found(text.error())) return {};
  if (!text.ok()) return {.recipe = {}, .unknown = text.error()};
  const auto next = json_or_nothing(text.value());
  if (!next.is_object() || !next.contains("step") || !next["step"].is_number_integer() || !next.contains("before") ||
      !next["before"].is_number_integer() || !next.contains("recipe") || !next["recipe"].is_string()) {
    return {};
  }
  const auto before = next["before"].get<int64_t>();
  const Result<ckpt::Manifest> step = manifest_of(run, next["step"].get<int64_t>());
  if (!step.ok()) {  // one that was to be replaced, and is away, may come back
    if (before < 0 && ckpt::is_not_found(step.error())) return {};
    return {.recipe = {}, .unknown = step.error()};
  }
  if (step.value().created_unix_ms == before || step.value().recipe != next["recipe"].get<std::string>()) return {};
  return {.recipe = step.value().recipe, .unknown = {}};
}

}  // namespace

std::string run_id_of(const fs::path& run) {
  const Result<Identity> identity = read_identity(run);
  return identity.ok() ? identity.value().id : std::string();
}

Result<std::string> recipe_of_run(const fs::path& run) {
  const Announced announced = announced_recipe(run);
  if (announced.recipe) return *announced.recipe;
  if (announced.unknown && announced.unknown->os_errno != 0 && !ckpt::is_not_found(*announced.unknown)) {
    Error error = *announced.unknown;
    return std::move(error).with(
        fmt::format("{} is of a save that cannot be read, so that it is not known which recipe the run resumes with",
                    (run / kNextRecipe).string()));
  }
  return read_text_file(run / "recipe.resolved.json");
}

namespace {

bool is_mount_point(const fs::path& dir) {
  struct stat here {
  }, above{};
  return ::stat(dir.c_str(), &here) == 0 && ::stat((dir / "..").c_str(), &above) == 0 && here.st_dev != above.st_dev;
}

/// RUN and the folder of runs may well be made by the first run. A third level that is not there is more likely a mount
/// point's, and so are two below an empty folder that is none now. Only to be told: either may be what is meant.
std::string doubt_about(const fs::path& run) {
  if (!run.is_absolute()) return {};
  std::error_code unknown;
  int64_t missing = 0;
  fs::path outermost, at = (run.lexically_normal() / "").parent_path();
  for (; at.has_relative_path() && !fs::exists(fs::symlink_status(at, unknown)); at = at.parent_path()) {
    outermost = at;
    ++missing;
  }
  if (missing < 2 || (missing == 2 && (!fs::is_empty(at, unknown) || is_mount_point(at)))) return {};
  return fmt::format("{} was not there and was made: is a file system not mounted?", outermost.string());
}

/// Over what the one before has left, which never leaves nothing: somebody may be reading.
Status write_holder(int fd, const std::string& line, const fs::path& lock) {
  const auto bytes = static_cast<ssize_t>(line.size());
  const ssize_t written = ::pwrite(fd, line.data(), line.size(), 0);
  if (written >= 0 && written < bytes) return os_error(ENOSPC, lock.string());
  if (written < 0 || ::ftruncate(fd, bytes) != 0) return os_error(errno, lock.string());
  return {};
}

/// `what` follows "is in use by another cairn (...)".
Error in_use(const fs::path& lock, std::string_view what) {
  const Result<std::optional<fs::path>> owner = owner_file_in(lock.parent_path());
  const bool without_locks = owner.ok() && owner.value();
  const Result<std::string> line = read_text_file(without_locks ? *owner.value() : lock);
  const RunHolder holder = holder_in(line.ok() ? line.value() : "");
  std::string text =
      fmt::format("{} is in use by another cairn ({}){}", lock.parent_path().string(), holder.describe(), what);
  if (without_locks) {
    text +=
        fmt::format(". It has no locks of its file system, and {} says so: when that cairn is dead, remove this file",
                    owner.value()->string());
  } else if (!holder.host.empty() && holder.host != ckpt::this_writer().host) {
    text += fmt::format(
        ". If {0} is dead, the file system keeps its lock for a while: NFSv4 some 90 s, NFSv3 until {0} is up again; "
        "then, or when {1} has been removed, the same command resumes. Should that cairn be alive after all, "
        "the two train side by side until its next save, at which it leaves",
        holder.host, lock.string());
  }
  return Error{ErrorCode::kUnavailable, std::move(text), EBUSY};
}

/// Whether /proc/locks lists a flock of this file by a process of this machine.
bool is_flocked(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return false;
  const std::string wanted = fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    const bool waits = line.find("->") != std::string::npos;  // "1: FLOCK  ADVISORY  WRITE 4051 00:2e:9 0 EOF"
    if (!waits && line.find(" FLOCK ") != std::string::npos && line.find(" " + wanted + " ") != std::string::npos)
      return true;
  }
  return false;
}

/// Whether the holder is a process of this host that is gone or ends: what it holds is free in a moment. A killed
/// process gives its memory back before it closes its files, and that of an agent is large; a child of it may be
/// between fork and exec.
bool is_ending(const RunHolder& holder) {
  if (holder.host != ckpt::this_writer().host) return false;
  const std::optional<ProcessStat> stat = process_stat(std::atoll(holder.pid.c_str()));
  return !stat || stat->ended() || stat->exiting;
}

/// The lock of the run, once a holder that ends has let go. False: it is another's.
Result<bool> take_lock(RunLock& mine, const fs::path& lock, bool waits = true) {
  constexpr int kMostTries = 1000;
  const fs::path folder = lock.parent_path();
  for (int tries = 1;; ++tries) {
    if (::flock(mine.fd.get(), LOCK_EX | LOCK_NB) == 0) {
      RT_TRY_SET(const std::optional<fs::path> other, owner_file_in(folder));  // of a host that has no flock here
      if (!other) return true;
      ::flock(mine.fd.get(), LOCK_UN);
    } else if (is_missing_call(errno)) {
      if (!is_flocked(mine.fd.get())) {
        RT_TRY_SET(mine.owner, OwnerFile::claim(folder));
      }
      if (mine.owner) return true;
    } else if (errno != EWOULDBLOCK) {
      return os_error(errno, "flock " + lock.string());
    }
    RT_TRY_SET(const std::optional<fs::path> owner, owner_file_in(folder));
    const Result<std::string> line = read_text_file(owner.value_or(lock));
    if (!waits || tries == kMostTries || !line.ok()) return false;
    const RunHolder holder = holder_in(line.value());
    if (!is_ending(holder) || (owner && holder.boot != this_boot())) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

std::string RunHolder::describe() const {
  std::string text = "pid " + pid;
  if (!host.empty()) text += " on " + host;
  if (!since.empty()) text += ", since " + since;
  return text;
}

fs::path log_of_rank(const fs::path& run, int64_t rank) {
  return run / "logs" / ("rank-" + std::to_string(rank) + ".log");
}

std::optional<RunHolder> holder_of_run(const fs::path& run) {
  const fs::path lock = run / "run.lock";
  const Fd fd(::open(lock.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  const Result<std::string> line = read_text_file(lock);
  const RunHolder holder = holder_in(line.ok() ? line.value() : "");
  if (is_flocked(fd.get())) return holder;
  if (const Result<std::optional<fs::path>> owner = owner_file_in(run); owner.ok() && owner.value()) {
    const Result<std::string> of_owner = read_text_file(*owner.value());
    return holder_in(of_owner.ok() ? of_owner.value() : "");
  }
  // A file system may number its devices otherwise than the kernel lists them (overlay, btrfs), or share its locks with
  // other hosts.
  if (::flock(fd.get(), LOCK_SH | LOCK_NB) == 0) return std::nullopt;
  return errno == EWOULDBLOCK ? std::optional(holder) : std::nullopt;
}

Result<RunFolder> RunFolder::hold(const fs::path& path, const std::string& name, bool takes_over) {
  RunFolder out;
  out.path_ = path;
  out.name_ = name;
  out.doubt_ = doubt_about(path);
  if (is_gone(path)) return out;
  if (::access(path.c_str(), W_OK | X_OK) != 0) return os_error(errno, path.string());
  if (!is_gone(path / "run.lock")) RT_TRY(out.lock(takes_over));
  RT_TRY(out.read_id());
  return out;
}

Status RunFolder::claim() {
  if (Status made = make(); !made.ok()) {
    if (made.error().code != ErrorCode::kUnavailable) remove_made();  // else another one is at work in it
    return made;
  }
  return {};
}

Result<RunFolder> RunFolder::open(const fs::path& path, const std::string& name) {
  RT_TRY_SET(RunFolder out, hold(path, name));
  RT_TRY(out.claim());
  return out;
}

Status RunFolder::lock(bool takes_over) {
  const fs::path lock = path_ / "run.lock";
  RT_TRY_SET(lock_.fd, open_own(lock, O_RDWR));
  RT_TRY_SET(const bool mine, take_lock(lock_, lock));
  if (!mine) {
    if (!takes_over) return in_use(lock, "; one run folder, one run");
    takes_over_ = true;
    if (::flock(lock_.fd.get(), LOCK_EX | LOCK_NB) != 0 && is_missing_call(errno)) {
      RT_TRY_SET(lock_.owner, OwnerFile::claim(path_, true));
    }
  }
  if (lock_.owner) {
    doubt_ += fmt::format(
        "{}the file system of {} has no locks (flock), so {} keeps other starts out. Should this machine die, remove "
        "that file before a start on another one; or mount the file system with locks (Lustre: -o flock)",
        doubt_.empty() ? "" : "; ", path_.string(), lock_.owner->path().filename().string());
  }
  return {};
}

/// Of a folder that has one; a moved or copied one is told by where it was written.
Status RunFolder::read_id() {
  if (is_gone(path_ / "run.json")) return {};
  RT_TRY_SET(const Identity identity, read_identity(path_));
  id_ = identity.id;
  written_at_ = identity.folder;
  const std::string here = fs::canonical(path_).string();
  if (written_at_.empty() || written_at_ == here) return {};
  // Moved, or a copy: then the other one is still there, and its memory and its second place are not this one's.
  std::error_code failed;
  const Result<Identity> other = read_identity(written_at_);
  if (other.ok() && other.value().id == id_ && !fs::equivalent(written_at_, here, failed)) {
    copied_from_ = written_at_;
    id_.clear();
  }
  return {};
}

Status RunFolder::make() {
  std::error_code unknown;
  ckpt::PosixBackend io;
  for (const char* below : {"", "logs", "tensorboard", "checkpoints"}) {
    const size_t before = made_.size();
    // A link whose disk is away is there.
    for (fs::path at = path_ / below; !at.empty() && !fs::exists(fs::symlink_status(at, unknown));
         at = at.parent_path()) {
      if (at.has_filename()) made_.insert(made_.begin() + static_cast<std::ptrdiff_t>(before), at);
    }
    RT_TRY(ckpt::make_dirs(io, path_ / below).with("run folder"));  // durable: a step must not vanish with its folder
  }
  const fs::path lock_file = path_ / "run.lock";
  const bool had_lock = fs::exists(lock_file, unknown), had_identity = fs::exists(path_ / "run.json", unknown);
  if (!lock_.fd) {
    RT_TRY(lock(false));
    RT_TRY(read_id());  // somebody may have made it since hold()
  }
  if (!had_lock) made_.push_back(lock_file);
  if (lock_.owner) made_.push_back(lock_.owner->path());
  if (!had_identity) made_.push_back(path_ / "run.json");
  lock_line_ = holder_line();
  RT_TRY(write_holder(lock_.fd.get(), lock_line_, lock_file));
  remove_left_files(path_);
  if (Result<ckpt::HeldFolder> held = ckpt::HeldFolder::open(path_); held.ok()) held_ = std::move(held).value();

  if (id_.empty()) {
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    id_ =
        fmt::format("{}-{:016x}", name_, mix64(mix64(static_cast<uint64_t>(now)) ^ static_cast<uint64_t>(::getpid())));
  }
  if (written_at_ != fs::canonical(path_).string() && copied_from_.empty()) RT_TRY(take_id(id_));
  return settle_recipe();
}

Status RunFolder::check_held() const {
  if (takes_over_) static_cast<void>(::flock(lock_.fd.get(), LOCK_EX | LOCK_NB));  // once the one before has let go
  const Result<std::string> line = read_text_file(path_ / "run.lock");
  if (line.ok() && line.value() == lock_line_) return {};
  if (!line.ok()) {
    if (!ckpt::is_not_found(line.error())) return line.error();
    if (held_) RT_TRY(held_->check());  // moved or unmounted as a whole, it comes back with its lock
    if (is_gone(path_)) return Error{ErrorCode::kIo, fmt::format("{}: {}", path_.string(), ckpt::kFolderGone), ENOENT};
  }
  return Error{ErrorCode::kUnavailable,
               fmt::format("{} is not this cairn's any more: {}. This one has stopped and leaves the folder as it is; "
                           "what it had not saved stays in this machine's shared memory, from where a start of the run "
                           "here takes it up",
                           path_.string(),
                           line.ok() ? fmt::format("another one has taken it ({})", holder_in(line.value()).describe())
                                     : "its run.lock was removed")};
}

void RunFolder::remove_made() const {
  std::error_code ignored;
  for (auto one = made_.rbegin(); one != made_.rend(); ++one) {
    const bool needed = one->filename() == "run.lock" || one->filename() == "run.json";
    if (needed && fs::exists(checkpoints(), ignored) && !fs::is_empty(checkpoints(), ignored)) continue;
    fs::remove(*one, ignored);  // a folder only when it is empty
  }
}

Status RunFolder::announce_recipe(int64_t step, const std::string& canonical_json) {
  const Result<ckpt::Manifest> before = manifest_of(path_, step);
  const nlohmann::json next{
      {"step", step}, {"before", before.ok() ? before.value().created_unix_ms : -1}, {"recipe", canonical_json}};
  return write_text_file(path_ / kNextRecipe, json_text(next, 2));
}

Status RunFolder::settle_recipe() {
  const Announced announced = announced_recipe(path_);
  if (announced.unknown) return {};
  if (announced.recipe) RT_TRY(write_text_file(recipe(), *announced.recipe));
  return forget_announced();
}

Status RunFolder::forget_announced() {
  std::error_code failed;
  if (fs::remove(path_ / kNextRecipe, failed); failed) return os_error(failed.value(), (path_ / kNextRecipe).string());
  return {};
}

Status RunFolder::settle() { return copied_from_.empty() ? Status() : take_id(id_); }

Status check_nothing_lost(const fs::path& run) {
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, run / "checkpoints"));
  if (!names.steps.empty()) return {};
  std::ifstream events(run / "events.jsonl", std::ios::binary);
  int64_t saved = 0;
  for (std::string line; std::getline(events, line);) {
    if (line.find(R"("saved")") == std::string::npos) continue;
    const nlohmann::json event = json_or_nothing(line);
    if (!event.is_object() || !event.contains("step") || !event["step"].is_number_integer()) continue;
    if (json_field(event, "event") == "saved") saved = event["step"].get<int64_t>();
  }
  if (saved == 0) return {};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{}: step {} was saved there, and no checkpoint is there any more; mount it, or move them back "
                  "(--fresh begins anew; without events.jsonl the run resumes from what memory holds)",
                  (run / "checkpoints").string(), saved)};
}

Result<RunLock> lock_run_of(const fs::path& checkpoints) {
  std::error_code unknown;
  fs::path dir = (fs::absolute(checkpoints).lexically_normal() / "").parent_path();
  if (dir.filename() != "checkpoints") {  // or by a link that leads to one
    dir = fs::canonical(dir, unknown);
    if (unknown || dir.filename() != "checkpoints") return RunLock();
  }
  const fs::path lock = dir.parent_path() / "run.lock";
  RunLock out;
  out.fd.reset(::open(lock.c_str(), O_RDWR | O_CLOEXEC));
  const bool mine = static_cast<bool>(out.fd);
  if (!out.fd && errno == EACCES) out.fd.reset(::open(lock.c_str(), O_RDONLY | O_CLOEXEC));  // another user's run
  if (!out.fd) return errno == ENOENT || errno == ENOTDIR ? Result<RunLock>(RunLock()) : os_error(errno, lock.string());
  RT_TRY_SET(const bool free, take_lock(out, lock, false));
  if (free) {
    // Or the next one is told of who held it before. A full disk, which `prune` is for, is no reason to refuse. What an
    // agent of another host has written stays: where a lock is local to a host it may be alive, and would stop for
    // this.
    std::string before(4096, '\0');
    before.resize(static_cast<size_t>(std::max<ssize_t>(0, ::pread(out.fd.get(), before.data(), before.size(), 0))));
    const std::string host = holder_in(before).host;
    if (mine && (host.empty() || host == ckpt::this_writer().host))
      ignore(write_holder(out.fd.get(), holder_line(), lock), "only a name for messages");
    return out;
  }
  return in_use(lock, ", which has its own retention; stop it first, or choose another folder");
}

Status RunFolder::take_id(const std::string& id) {
  const nlohmann::json identity{{"id", id}, {"name", name_}, {"folder", fs::canonical(path_).string()}};
  RT_TRY(write_text_file(path_ / "run.json", json_text(identity, 2) + "\n"));
  id_ = id;
  return {};
}

Result<bool> RunFolder::write_recipe(const dsl::LoadedRecipe& loaded) {
  bool changed = false;
  if (fs::exists(recipe())) {
    RT_TRY_SET(const std::string before, read_text_file(recipe()));
    changed = before != loaded.canonical_json;
  }
  RT_TRY(write_text_file(recipe(), loaded.canonical_json));
  const fs::path sources = path_ / "recipe";
  ckpt::PosixBackend io;
  RT_TRY(ckpt::make_dirs(io, sources));
  for (const auto& [file, text] : loaded.sources) {
    RT_TRY(write_text_file(sources / fs::path(file).filename(), text));
  }
  RT_TRY(forget_announced());  // or one that could not be told before would overrule this one later
  return changed;
}

namespace {

/// A step's folder by a path that ends in its own name: siblings that it refers to are looked for beside that name. A
/// link of the step's name stays as it is, since its siblings may be links too.
Result<fs::path> named_plainly(const fs::path& step) {
  std::error_code failed;
  const fs::path name = step.filename();
  const bool plain = !name.empty() && name != "." && name != "..";
  if (plain && (ckpt::parse_step_dir_name(name.string()) || !fs::is_symlink(step, failed))) return step;
  fs::path out = fs::canonical(step, failed);
  if (failed) return os_error(failed.value(), step.string());
  return out;
}

}  // namespace

bool is_gone(const fs::path& step) {
  std::error_code unknown;
  return !fs::exists(step, unknown) && !unknown;
}

Error removed_meanwhile(const fs::path& step) {
  ckpt::PosixBackend io;
  const fs::path folder = step.has_parent_path() ? step.parent_path() : fs::path(".");
  if (const auto number = ckpt::parse_step_dir_name(step.filename().string())) {
    const ckpt::CheckpointInfo info = ckpt::look_at_checkpoint(io, folder, *number);
    if (info.unread && info.os_errno == EAGAIN) return Error{ErrorCode::kUnavailable, info.problem};
  }
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("{}: was removed meanwhile, as the retention of a run at work does; take the newest again, or "
                  "a step that the run keeps for longer",
                  step.string())};
}

bool is_step_of(const fs::path& step, const fs::path& run) {
  std::error_code failed;
  const fs::path real = fs::canonical(step, failed), own = run / "checkpoints";
  if (failed) return false;
  if (fs::equivalent(real.parent_path(), own, failed) && !failed) return true;
  // A link among the run's steps that leads elsewhere is the run's all the same.
  const fs::path named = (fs::absolute(step).lexically_normal() / "").parent_path();
  return (fs::equivalent(named.parent_path(), own, failed) && !failed) ||
         (fs::equivalent(real, own / real.filename(), failed) && !failed);
}

Result<fs::file_type> type_of(const fs::path& path) {
  std::error_code failed;
  const fs::file_type type = fs::status(path, failed).type();
  if (type == fs::file_type::none) return os_error(failed.value(), path.string());
  return type;
}

Result<fs::path> resolve_checkpoint(const fs::path& path) {
  RT_TRY_SET(const fs::file_type type, type_of(path));
  RT_TRY_SET(const fs::file_type manifest, type_of(path / ckpt::kManifestName));
  if (manifest != fs::file_type::not_found) return named_plainly(path);
  RT_TRY_SET(const fs::file_type below, type_of(path / "checkpoints"));
  const fs::path folder = below == fs::file_type::directory ? path / "checkpoints" : path;
  if (below != fs::file_type::directory && type != fs::file_type::directory) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: no such folder; expected a run folder or a checkpoint (step-NNNNNNNN)", path.string())};
  }
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::CheckpointInfo newest, ckpt::newest_complete(io, folder));
  return newest.dir;
}

}  // namespace cairn::tools
