#pragma once
// The half of a save that one process does for all: from files that are durable in the folder of a step under way to a
// committed step. write_parts.h is the other half, which each process does for its own ranks.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/write_parts.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class SpareFiles;  // ckpt/retention/spare_files.h

/// The folder of a step under way (work_dir_name()), which the caller makes or takes over, and what becomes of it when
/// the step is not saved.
class WorkFolder {
 public:
  /// `spares` are given up when the disk is full; may be null.
  WorkFolder(IoBackend& io, std::filesystem::path path, int64_t step, SpareFiles* spares = nullptr);
  WorkFolder(const WorkFolder&) = delete;
  ~WorkFolder();  // when an exception ends the save it removes the folder: whoever tries again makes one of its own

  const std::filesystem::path& path() const { return path_; }
  int64_t step() const { return step_; }

  /// Files with notes lie in it (unfinished.h): a stop keeps it.
  void keep_when_stopped() { noted_ = true; }
  /// For an error before there is a folder.
  void give_up_spares(const Error& error);
  /// Removes the folder, or keeps it for the next try, and says so in the error.
  Error abandon(Error error);

 private:
  IoBackend& io_;
  std::filesystem::path path_;
  int64_t step_;
  SpareFiles* spares_;
  bool noted_ = false;
  int exceptions_;  // before
};

struct CommitOptions {
  /// That the folder of the checkpoints is the one that is meant: asked before anything is written, once what is
  /// written lies in it, and before that gets its name. Empty: it is made when it is missing.
  std::function<Status()> check_folder;
  bool replace_existing = true;  // false: a committed step of this number is an error
  /// Also where other steps of the folder refer to the replaced one. A run that reaches this step again has abandoned
  /// those steps; its own save wins.
  bool replace_referred = false;
  /// Refuses (kUnsupported) to replace a step where two names cannot be exchanged: its bytes are nowhere else.
  bool must_exchange = false;
};

struct CommitReport {
  bool references_gone = false;  // nothing is committed: a file of an earlier step that it refers to is there no more
  std::filesystem::path dir;     // the committed directory
  Manifest manifest;             // as written, or as it was to be
  bool replaced = false;         // a committed step of this number was there before
  double remove_seconds = 0;     // for what it replaced
  std::string leftover;          // name of a directory that could not be removed (the replaced one), else empty
};

/// Looks whether a step of this number is there that may not be replaced. True: it is there, and may.
/// Errors: kInvalidInput naming it, those of looking.
Result<bool> check_existing(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                            const CommitOptions& options);

/// The manifest of a step: `skeleton` with what all sets hold, whose order is that of the manifest. Moves out of
/// `sets`. Errors: kInvalidInput for a set of another step. That a part is missing the encoding of the manifest finds.
Result<Manifest> join_parts(Manifest skeleton, std::span<PartSet> sets);

/// Steps 3 to 7 of the protocol in save.h. `sets` together must tile every tensor of `skeleton`, and their files are
/// durable in `work`. `replaces`: what check_existing() has said. On error `work` is removed, as by abandon(), and
/// nothing committed has changed; two exceptions, which the error tells: the new step may be visible and not yet
/// durable, and a replacement may be cut off between two renames, which the next start ends.
/// Errors: kInvalidInput (a part is missing, or of another step), kIo, kNoSpace, kUnsupported (must_exchange); those of
/// check_folder.
Result<CommitReport> commit_step(IoBackend& io, WorkFolder& work, Manifest skeleton, std::span<PartSet> sets,
                                 bool replaces, const CommitOptions& options = {});

/// The same of a manifest that has been joined and encoded.
Result<CommitReport> commit_manifest(IoBackend& io, WorkFolder& work, Manifest manifest, const ManifestFiles& files,
                                     bool replaces, const CommitOptions& options);

}  // namespace cairn::ckpt
