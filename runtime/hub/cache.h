#pragma once
// One model in the Hub's cache on this machine, in the layout of huggingface_hub, whose programs share it:
//
//   CACHE/models--ORG--NAME/blobs/ETAG              content; ETAG.incomplete while it comes
//   CACHE/models--ORG--NAME/snapshots/COMMIT/PATH   relative links to blobs
//   CACHE/models--ORG--NAME/refs/REVISION           the commit of a branch or a tag
//   CACHE/.locks/models--ORG--NAME/ETAG.lock        held (flock) while the blob is written
//
// Source: huggingface_hub 0.36 and 2.4, file_download.py.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::hub {

class ModelCache {
 public:
  ModelCache(const std::filesystem::path& cache, const std::string& id);

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path snapshot(const std::string& commit) const { return folder_ / "snapshots" / commit; }
  std::filesystem::path blob(const std::string& etag) const { return folder_ / "blobs" / etag; }

  /// The commit that a revision had when it was last read here; a commit is its own.
  std::optional<std::string> commit_of(const std::string& revision) const;
  /// Records it. Errors: kIo, kNoSpace.
  Status set_commit(const std::string& revision, const std::string& commit) const;

  /// Whether the snapshot has the file in this length.
  bool has(const std::string& commit, const std::string& path, int64_t size) const;
  /// Links PATH of a snapshot to a blob. Errors: kIo, kNoSpace.
  Status link(const std::string& commit, const std::string& path, const std::string& etag) const;

  /// The lock of a blob; nullopt: another process or thread holds it.
  Result<std::optional<Fd>> try_lock(const std::string& etag) const;
  /// Bytes of all files that hold the content, or will: they grow while another process downloads.
  int64_t bytes_of(const std::string& etag) const;
  std::filesystem::path lock_file(const std::string& etag) const { return locks_ / (etag + ".lock"); }

 private:
  std::filesystem::path folder_, locks_;
};

}  // namespace cairn::hub
