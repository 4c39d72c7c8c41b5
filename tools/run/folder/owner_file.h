#pragma once
// Ownership of a run folder whose file system has no flock: files RUN/run.owner-00000001, 2, ..., each created
// exclusively by one start. The newest counts:
//   1. A start looks for the newest. It is the owner while its process may be alive, and the start is refused.
//   2. If that process is gone for certain, or there is none, the start creates the next number (O_EXCL): of several
//      starts one succeeds, and the others look anew.
//   3. It looks once more. A higher number than its own means that it was late: it removes its own, and is refused.
//   4. It removes those below the one before its own, and at its end its own.
// A number is created anew only after a higher one exists, which step 3 sees, so two starts never both own the folder.
// A process is gone for certain if it ran in this boot of this machine and this PID namespace, by its pid and start
// time. A process of another machine cannot be seen from here: a person has to remove its file. Threads: none.

#include <filesystem>
#include <optional>
#include <utility>

#include "runtime/core/result.h"

namespace cairn::tools {

class OwnerFile {
 public:
  /// nullopt: another process owns the folder, or may. `by_force`: an owner has lost it, as
  /// RunFolder::check_held() reports to it. Errors: the system's.
  static Result<std::optional<OwnerFile>> claim(const std::filesystem::path& folder, bool by_force = false);

  OwnerFile(OwnerFile&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  OwnerFile& operator=(OwnerFile&& other) noexcept;
  ~OwnerFile();  // gives the folder back

  const std::filesystem::path& path() const { return path_; }

 private:
  explicit OwnerFile(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;
};

/// The file of a process that owns the folder, or may; nullopt: none does.
Result<std::optional<std::filesystem::path>> owner_file_in(const std::filesystem::path& folder);

}  // namespace cairn::tools
