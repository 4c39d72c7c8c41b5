#pragma once
// What lies in a checkpoints folder. `latest` is never stored: it is found by looking.

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ckpt/retention/labels.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct CheckpointInfo {
  int64_t step = 0;
  std::filesystem::path dir;
  bool complete = false;  // the manifest's checksum holds, it is valid, and each file is there with its size
  std::string problem;    // why not complete
  /// Not complete, but nothing shows that it is damaged: the system would not let it be read, a newer build wrote it,
  /// or it has no name just now (CutOff; then os_errno is EAGAIN).
  bool unread = false;
  int os_errno = 0;  // of `problem`, when the system gave one
  int64_t created_unix_ms = 0;
  int64_t size_bytes = 0;                 // of the files the manifest names (or that lie there, when it cannot be read)
  std::map<std::string, double> metrics;  // of the step that was saved, by metric_key()
  std::vector<int64_t> references;        // steps of this folder whose files it needs besides its own
  std::string run_id;                     // of the run that saved it
  std::vector<uint64_t> starts;           // starts_of() its manifest
  /// By list_checkpoints. nullopt: the folder has no labels.json, or list_unlabelled did not ask for it.
  std::optional<Label> label;
  std::string label_why, held;  // as LabelEntry has them
  bool bad() const { return label == Label::kBad; }
  /// By its name (runtime/config/metric_name.h).
  std::optional<double> metric(std::string_view name) const;
};

struct Catalog {
  std::vector<CheckpointInfo> checkpoints;  // by step, ascending
  std::vector<std::string> leftovers;       // names of dead or running saves, half-done deletes and spare files
  std::vector<std::string> unknown;         // other names; never touched
};

/// Remembers what manifests say, so that listing a folder again decodes only what has changed. A manifest counts as
/// unchanged when all its bytes have the hash that they had: they are read, not decoded. Files are looked at each time.
class CatalogCache {
 public:
  int64_t decoded() const { return decoded_; }  // manifests, in all

 private:
  friend struct CatalogAccess;
  struct Seen {
    std::array<uint64_t, 2> hashes{};                              // of the manifest's two files
    CheckpointInfo info;                                           // as of a complete checkpoint
    std::vector<std::pair<std::filesystem::path, int64_t>> files;  // and their sizes
  };
  std::map<std::filesystem::path, Seen> seen_;
  int64_t decoded_ = 0;
};

/// A folder that does not exist is an empty catalog. Cost: reading every manifest, and decoding those that `cache` does
/// not know. Errors: those of read_labels() too, for damaged labels do not say which step is bad or held.
Result<Catalog> list_checkpoints(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                 CatalogCache* cache = nullptr);
/// The same without labels, for callers that ask only what lies there: no step is known to be bad, good or held.
Result<Catalog> list_unlabelled(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                CatalogCache* cache = nullptr);

/// A step that has no directory, for another save of it is taking its place, or was when its writer died (replace.h).
struct CutOff {
  int64_t step = 0;
  std::string made, old;  // names of the directories of the new and of the old one
};

/// What lies there by name alone, nothing opened: steps (ascending) that may or may not be complete, and leftovers.
struct Names {
  std::vector<int64_t> steps;  // those of cut_off too
  std::vector<std::string> leftovers, unknown;
  std::vector<CutOff> cut_off;
};
Result<Names> list_names(IoBackend& io, const std::filesystem::path& checkpoints_dir);

/// One checkpoint of the folder, as list_checkpoints describes it.
CheckpointInfo look_at_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                                  CatalogCache* cache = nullptr);

/// Of the files in a directory; 0 where it cannot be read.
int64_t bytes_lying_there(IoBackend& io, const std::filesystem::path& dir);

/// A directory of any name, as if it had this step's.
CheckpointInfo look_at_directory(IoBackend& io, const std::filesystem::path& dir, int64_t step,
                                 CatalogCache* cache = nullptr);

/// The complete checkpoint with the highest step that is not labelled bad. Errors: kInvalidInput when there is none;
/// the message names each damaged and each bad one and why. With a higher one that could not be read: that one's error,
/// not an older checkpoint (kUnavailable where it has no name just now). Also the errors of read_labels().
Result<CheckpointInfo> newest_complete(IoBackend& io, const std::filesystem::path& checkpoints_dir);

/// The complete checkpoint of this step. Errors: kInvalidInput, naming the complete steps that there are; kIo.
Result<CheckpointInfo> find_step(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step);

}  // namespace cairn::ckpt
