#include "runtime/hub/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "runtime/core/file_calls.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/hub/name.h"

namespace cairn::hub {
namespace fs = std::filesystem;

namespace {

std::string folder_name(const std::string& id) {
  std::string out = "models--" + id;
  out.replace(out.find('/'), 1, "--");
  return out;
}

}  // namespace

ModelCache::ModelCache(const fs::path& cache, const std::string& id)
    : folder_(cache / folder_name(id)), locks_(cache / ".locks" / folder_name(id)) {}

std::optional<std::string> ModelCache::commit_of(const std::string& revision) const {
  if (is_commit(revision)) return revision;
  std::ifstream file(folder_ / "refs" / revision, std::ios::binary);
  std::string text(64, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  text.erase(text.find_last_not_of(" \r\n") + 1);
  return is_commit(text) ? std::optional(text) : std::nullopt;
}

Status ModelCache::set_commit(const std::string& revision, const std::string& commit) const {
  if (commit_of(revision) == commit) return {};
  const fs::path ref = folder_ / "refs" / revision;
  RT_TRY(make_folder_of(ref));
  return place_file(ref, commit);
}

bool ModelCache::has(const std::string& commit, const std::string& path, int64_t size) const {
  std::error_code error;
  const auto found = fs::file_size(snapshot(commit) / path, error);
  return !error && std::cmp_equal(found, size);
}

Status ModelCache::link(const std::string& commit, const std::string& path, const std::string& etag) const {
  const fs::path at = snapshot(commit) / path;
  RT_TRY(make_folder_of(at));
  const fs::path target = blob(etag).lexically_relative(at.parent_path());
  for (int tries = 0; tries < 3; ++tries) {
    if (::symlink(target.c_str(), at.c_str()) == 0) return {};
    if (errno != EEXIST) return os_error(errno, at.string());
    std::error_code error;
    if (fs::equivalent(at, blob(etag), error)) return {};
    if (::unlink(at.c_str()) != 0 && errno != ENOENT) return os_error(errno, at.string());
  }
  return os_error(EEXIST, at.string());
}

Result<std::optional<Fd>> ModelCache::try_lock(const std::string& etag) const {
  RT_TRY(make_folder_of(lock_file(etag)));
  RT_TRY_SET(Fd fd, open_own(lock_file(etag), O_RDWR, 0664));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 || is_missing_call(errno)) return std::optional(std::move(fd));
  if (errno == EWOULDBLOCK) return std::optional<Fd>();
  return os_error(errno, lock_file(etag).string());
}

int64_t ModelCache::bytes_of(const std::string& etag) const {
  int64_t out = 0;
  std::error_code error;
  for (fs::directory_iterator at(folder_ / "blobs", error), end; !error && at != end; at.increment(error)) {
    std::error_code gone;
    if (at->path().filename().string().starts_with(etag)) {
      const auto size = at->file_size(gone);
      if (!gone) out += static_cast<int64_t>(size);
    }
  }
  return out;
}

}  // namespace cairn::hub
