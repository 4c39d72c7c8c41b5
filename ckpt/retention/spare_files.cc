#include "ckpt/retention/spare_files.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>

#include "ckpt/format/names.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr size_t kAtOnce = 16;  // files that become durable together

int64_t whole_pages(int64_t bytes) { return (bytes + kIoAlign - 1) / kIoAlign * kIoAlign; }

/// A file whose first page is being zeroed.
struct Wiped {
  std::unique_ptr<IoFile> file;
  IoTicket sync = 0;
};

Result<Wiped> wipe(IoBackend& io, const fs::path& path, int64_t bytes) {
  alignas(kIoAlign) static constexpr std::array<std::byte, kIoAlign> kZeros{};
  RT_TRY_SET(std::unique_ptr<IoFile> file, io.reopen(path, bytes));
  RT_TRY(file->write(0, kZeros));
  RT_TRY_SET(const IoTicket sync, file->submit_sync());
  return Wiped{std::move(file), sync};
}

Status end(Wiped& wiped) {
  RT_TRY(wiped.file->wait(wiped.sync));
  return wiped.file->close();
}

}  // namespace

void SpareFiles::limit(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

int64_t SpareFiles::bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes();
}

int64_t SpareFiles::kept_bytes() const {
  int64_t bytes = 0;
  for (const Spare& spare : spares_) bytes += spare.bytes;
  return bytes;
}

Status SpareFiles::take_in(IoBackend& io, const fs::path& trash) {
  const std::lock_guard one_at_a_time(upkeep_);
  const std::optional<WorkDir> name = parse_work_dir_name(trash.filename().string());
  const Result<FileStat> stat = io.stat(trash);
  const Result<std::vector<DirEntry>> entries = io.list(trash);
  trim(io);
  int64_t room = 0;
  {
    const std::lock_guard lock(mutex_);
    room = limit_ - kept_bytes();
  }
  // Behind a link lies a folder that is not ours to write to.
  if (room < kIoAlign || !name || !stat.ok() || stat.value().is_link || !entries.ok()) return remove_tree(io, trash);
  const fs::path folder = trash.parent_path() / work_dir_name(kSparePrefix, name->step, name->writer);
  if (!io.make_dir(folder).ok()) return remove_tree(io, trash);
  {
    const std::lock_guard lock(mutex_);
    folders_.insert(folder);
  }
  // Away from the directory in which readers may be: whoever opens a file there either has it before, or finds none.
  std::vector<Spare> moved;
  for (const DirEntry& entry : entries.value()) {
    const Result<FileStat> file = io.stat(trash / entry.name);
    const int64_t bytes = file.ok() ? file.value().size_bytes : 0;
    const bool fits = entry.name.ends_with(".h5") && !entry.is_dir && bytes >= kIoAlign && bytes <= room;
    if (!fits || !io.rename(trash / entry.name, folder / entry.name).ok()) continue;
    room -= bytes;
    moved.push_back({folder / entry.name, bytes});
  }
  // Trash may be put back as a step (clean_leftovers), which must not have a wiped file then.
  if (!io.sync_dir(trash).ok()) moved.clear();
  for (size_t at = 0; at < moved.size(); at += kAtOnce) {
    const std::span<Spare> some = std::span(moved).subspan(at, std::min(kAtOnce, moved.size() - at));
    std::vector<Result<Wiped>> wiped;
    for (const Spare& spare : some) wiped.push_back(wipe(io, spare.path, spare.bytes));
    for (size_t i = 0; i < some.size(); ++i) {
      if (wiped[i].ok() && end(wiped[i].value()).ok()) {
        const std::lock_guard lock(mutex_);
        spares_.push_back(std::move(some[i]));
      } else {
        ignore(io.remove_file(some[i].path), "clear() removes it");
      }
    }
  }
  if (moved.empty()) {
    forget(io, folder);
  } else {
    leave(io, folder);
  }
  return remove_tree(io, trash);
}

void SpareFiles::trim(IoBackend& io) {
  std::vector<Spare> surplus;
  {
    const std::lock_guard lock(mutex_);
    while (kept_bytes() > limit_) {
      const auto largest = std::ranges::max_element(spares_, {}, &Spare::bytes);
      surplus.push_back(std::move(*largest));
      spares_.erase(largest);
    }
  }
  for (const Spare& spare : surplus) {
    ignore(io.remove_file(spare.path), "clear() removes it");
    leave(io, spare.path.parent_path());
  }
}

std::unique_ptr<IoFile> SpareFiles::reuse(IoBackend& io, const fs::path& path, int64_t size_bytes) {
  Spare spare;
  {
    const std::lock_guard lock(mutex_);
    // The smallest that has all blocks, else the largest.
    const auto best = std::min_element(spares_.begin(), spares_.end(), [&](const Spare& a, const Spare& b) {
      const bool a_serves = whole_pages(a.bytes) >= size_bytes, b_serves = whole_pages(b.bytes) >= size_bytes;
      if (a_serves != b_serves) return a_serves;
      return a_serves ? a.bytes < b.bytes : a.bytes > b.bytes;
    });
    if (best == spares_.end()) return nullptr;
    spare = std::move(*best);
    spares_.erase(best);
  }
  const bool moved = io.rename(spare.path, path).ok();
  leave(io, spare.path.parent_path());
  if (!moved) return nullptr;
  Result<std::unique_ptr<IoFile>> file = io.reopen(path, size_bytes);
  if (file.ok()) return std::move(file).value();
  ignore(io.remove_file(path), "whoever makes the file anew is told");
  return nullptr;
}

bool SpareFiles::clear(IoBackend& io) {
  const std::lock_guard one_at_a_time(upkeep_);
  std::set<fs::path> folders;
  {
    const std::lock_guard lock(mutex_);
    spares_.clear();
    folders = folders_;
  }
  for (const fs::path& folder : folders) forget(io, folder);
  return !folders.empty();
}

void SpareFiles::leave(IoBackend& io, const fs::path& folder) {
  const auto lies_there = [&](const Spare& spare) { return spare.path.parent_path() == folder; };
  {
    const std::lock_guard lock(mutex_);
    if (std::any_of(spares_.begin(), spares_.end(), lies_there)) return;
  }
  if (!io.remove_dir(folder).ok()) return;  // another save is about to take the last file, and comes here then
  const std::lock_guard lock(mutex_);
  folders_.erase(folder);
}

void SpareFiles::forget(IoBackend& io, const fs::path& folder) {
  constexpr int kTries = 3;  // a save may take a file from under it
  for (int i = 0; i < kTries; ++i) {
    if (!remove_tree(io, folder).ok()) continue;
    const std::lock_guard lock(mutex_);
    folders_.erase(folder);
    return;
  }
}

}  // namespace cairn::ckpt
