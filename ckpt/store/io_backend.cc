#include "ckpt/store/io_backend.h"

#include <fmt/format.h>

#include <cerrno>

namespace cairn::ckpt {

namespace fs = std::filesystem;

Status IoFile::write(int64_t offset, std::span<const std::byte> data) {
  RT_TRY_SET(const IoTicket ticket, submit_write(offset, data.data(), static_cast<int64_t>(data.size())));
  return wait(ticket);
}

Status IoFile::read(int64_t offset, std::span<std::byte> data) {
  RT_TRY_SET(const IoTicket ticket, submit_read(offset, data.data(), static_cast<int64_t>(data.size())));
  return wait(ticket);
}

Result<IoTicket> IoFile::submit_sync() {
  RT_TRY(sync());
  return IoTicket{0};  // wait() knows no such ticket, which means: done
}

Result<std::unique_ptr<IoFile>> IoBackend::reopen(const std::filesystem::path& path, int64_t /*size_bytes*/) {
  return Error{ErrorCode::kUnsupported, path.string() + ": is not to be written over"};
}

bool is_not_found(const Error& error) { return error.os_errno == ENOENT; }
bool is_refused(const Error& error) {
  return error.os_errno == EACCES || error.os_errno == EPERM || error.os_errno == EMFILE || error.os_errno == ENFILE ||
         error.os_errno == ENOMEM;
}

Status make_dirs(IoBackend& io, const fs::path& path) {
  if (path.empty()) return {};
  Result<FileStat> there = io.stat(path);
  if (there.ok()) {
    if (there.value().is_dir) return {};
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: is a file, expected a directory", path.string()), ENOTDIR};
  }
  if (!is_not_found(there.error())) return std::move(there).error();
  RT_TRY(make_dirs(io, path.parent_path()));
  if (Status made = io.make_dir(path); !made.ok()) {
    if (made.error().os_errno != EEXIST) return made;
    there = io.stat(path);
    if (there.ok() && there.value().is_dir) return {};  // someone else was faster
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is a link to nothing; mount or make what it names", path.string())};
  }
  return path.has_parent_path() ? io.sync_dir(path.parent_path()) : io.sync_dir(".");
}

Result<std::string> read_file(IoBackend& io, const fs::path& path, int64_t max_bytes) {
  RT_TRY_SET(const std::unique_ptr<IoFile> file, io.open(path));
  RT_TRY_SET(const int64_t size, file->size());
  if (size > max_bytes)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: {} bytes, expected at most {}", path.string(), size, max_bytes)};
  std::string bytes(static_cast<size_t>(size), '\0');
  if (size > 0) RT_TRY(file->read(0, std::as_writable_bytes(std::span(bytes))));
  return bytes;
}

Status write_file(IoBackend& io, const fs::path& path, std::string_view bytes) {
  RT_TRY_SET(const std::unique_ptr<IoFile> file, io.create(path, static_cast<int64_t>(bytes.size())));
  if (!bytes.empty()) RT_TRY(file->write(0, std::as_bytes(std::span(bytes))));
  RT_TRY(file->sync());
  return file->close();
}

Status remove_tree(IoBackend& io, const fs::path& path) {
  Result<FileStat> there = io.stat(path);
  if (!there.ok()) {
    if (is_not_found(there.error())) return {};
    return std::move(there).error();
  }
  if (!there.value().is_dir || there.value().is_link) return io.remove_file(path);
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(path));
  for (const DirEntry& entry : entries) {
    if (entry.is_dir) {
      RT_TRY(remove_tree(io, path / entry.name));
    } else {
      RT_TRY(io.remove_file(path / entry.name));
    }
  }
  return io.remove_dir(path);
}

}  // namespace cairn::ckpt
