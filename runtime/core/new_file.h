#pragma once
// How a file is made in a folder that others may write to. A new file gets a name that cannot be foreseen, is opened
// exclusively and never through a link, and takes its own name once it is complete. A file of a fixed name that is
// written in place (a log, a lock) is opened by open_own(). The ctest `layering` keeps other ways out.

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn {

enum class Durable { kNo, kYes };

/// A file under a temporary name in the folder of `path`. Without publish() it is gone with the object.
class NewFile {
 public:
  static Result<NewFile> beside(const std::filesystem::path& path, mode_t mode = 0666);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&& other) noexcept;
  ~NewFile();

  int fd() const { return fd_.get(); }
  const std::string& temporary() const { return temporary_; }
  Status write(std::string_view bytes);
  Status sync();

  /// The file becomes `path`, in the place of an existing one: a link is replaced, and not followed.
  Status publish();
  /// The same, durable when it returns.
  Status publish_durably();
  /// The same, unless `path` exists: then false.
  Result<bool> publish_if_free(Durable durable);

 private:
  NewFile(std::filesystem::path path, std::string temporary, Fd fd);
  void discard();
  Status sync_folder() const;

  std::filesystem::path path_;
  std::string temporary_;  // empty: published, or moved from
  Fd fd_;
};

/// Makes `path` hold `text`, at once: a reader sees the old file or the new one.
Status place_file(const std::filesystem::path& path, std::string_view text, Durable durable = Durable::kYes);

/// The same for a path that a person has named: a pipe, a terminal or a device is written to.
Status write_output(const std::filesystem::path& path, std::string_view text);

/// Removes what processes that were killed have left of temporary files in `folder`: those older than ten minutes.
void remove_left_files(const std::filesystem::path& folder);

/// Opens a file of a fixed name, made where it is missing; `flags` beside O_CREAT. Errors: kInvalidInput where `path`
/// is a link or no regular file: what it leads to may be another user's choice.
Result<Fd> open_own(const std::filesystem::path& path, int flags, mode_t mode = 0666);

}  // namespace cairn
