#pragma once
// A mirror of checkpoints: a directory (a shared file system's mount) or an S3-compatible object store.
//
// A mirror holds steps, each a flat set of files, as a checkpoints folder does. A step is complete exactly when its
// manifest is there, which is put last:
//   directory   files in `.tmp-step-N.writer/`, each fsynced, then the manifest, then one rename: the local protocol
//   S3          objects PREFIX/step-NNNNNNNN/FILE; the manifest's object is the commit mark. Removal takes it first
// begin() takes over what an interrupted copy of that step left, so that put() sends only what is missing.
//
// Threads: one at a time. Every wait has an end: a server that stops answering is kUnavailable or kTimeout after
// PlaceOptions::timeout_s without a byte.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/mirror/source_file.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct PlacedFile {
  std::string name;
  int64_t bytes = 0;
};

struct PlacedStep {
  int64_t step = 0;
  bool complete = false;
  int64_t bytes = 0;
  std::vector<PlacedFile> files;
};

/// What all operations of one copy share. All members may be unset.
struct Traffic {
  int64_t max_bytes_per_s = 0;                  // either direction; 0: as fast as it goes
  const std::atomic<bool>* cancel = nullptr;    // looked at between pieces; when true the operation ends with kStopped
  std::function<void(int64_t bytes)> on_bytes;  // sent, received, or found to be there already

  bool cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
};

struct PutReport {
  int64_t sent_bytes = 0, reused_bytes = 0;
  uint64_t hash = 0;  // XXH3_64 of the whole source file as it was read
};

using ByteSink = std::function<Status(std::span<const std::byte>)>;

class Place {
 public:
  virtual ~Place() = default;
  /// "s3://bucket/prefix", "/mnt/shared/run".
  virtual std::string describe() const = 0;

  /// By step, ascending. A place that does not exist yet is empty.
  virtual Result<std::vector<PlacedStep>> list() = 0;

  /// Before the puts of a step. When the step is complete there, it is about to be replaced.
  virtual Status begin(int64_t step) = 0;
  /// Whether the begun step's files, `bytes` in all, have room, where that can be asked. Errors: kNoSpace.
  virtual Status reserve(int64_t /*step*/, int64_t /*bytes*/) { return {}; }
  /// Throws away what the begun step has got, where it takes up room that others need.
  virtual Status abandon(int64_t /*step*/) { return {}; }
  /// Copies one file of the begun step; durable when it returns. Sends what is not there yet.
  virtual Result<PutReport> put(int64_t step, SourceFile& source, const Traffic& traffic) = 0;
  /// Throws away a file of the begun step: it was found damaged.
  virtual Status discard(int64_t step, const std::string& name) = 0;
  /// Makes the begun step complete, `manifest` last, and reads the manifest back.
  virtual Status commit(int64_t step, SourceFile& manifest, const Traffic& traffic) = 0;

  /// Bytes of one file from `offset` on, from the medium rather than a cache where that can be asked for.
  enum class Of { kCopy, kComplete };  // of the begun step, or of a complete one
  virtual Status read(Of of, int64_t step, const std::string& name, int64_t offset, const ByteSink& sink,
                      const Traffic& traffic) = 0;

  virtual Status remove(int64_t step) = 0;
  /// Removes what interrupted copies and removals left, but not what belongs to `keep`. Returns sentences.
  virtual Result<std::vector<std::string>> tidy(std::optional<int64_t> keep) = 0;

  /// A small text beside the steps (which run this place belongs to); nullopt when there is none.
  virtual Result<std::optional<std::string>> read_note(const std::string& name) = 0;
  virtual Status write_note(const std::string& name, const std::string& text) = 0;
};

struct PlaceOptions {
  std::string path;       // "s3://bucket/prefix" or a directory
  std::string endpoint;   // S3: "https://host:port"; empty: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, Amazon's own
  std::string region;     // S3; empty: AWS_REGION, AWS_DEFAULT_REGION, us-east-1
  std::string ca_file;    // S3 over https: PEM; empty: AWS_CA_BUNDLE, the system's. A certificate is always verified
  double timeout_s = 60;  // without any progress
  /// S3: larger files are sent in parts of this size, or more if they are many. A part is in memory while it is sent:
  /// up to four at a time, as long as they come to 256 MiB at most.
  int64_t part_bytes = int64_t{16} << 20;
};
/// S3's own limits of a part; the last one of a file may be shorter.
inline constexpr int64_t kMinPartBytes = int64_t{5} << 20, kMaxPartBytes = int64_t{5} << 30;

/// Does not touch the network or the disk. Errors: kInvalidInput naming what is wrong with the path, the endpoint or
/// the credentials.
Result<std::unique_ptr<Place>> open_place(const PlaceOptions& options);

bool is_s3_path(std::string_view path);
/// Whether it is meant as the address of a store, of a kind that there is or not, rather than as a directory.
bool is_store_address(std::string_view path);

/// `path` with one more part: where a run's steps lie below the place that the recipe names.
std::string place_join(const std::string& path, const std::string& part);

/// Whether a place may give us this file name: what a checkpoint's own files are called, and nothing that could leave
/// its folder.
bool valid_file_name(std::string_view name);

// The two kinds, for open_place.
Result<std::unique_ptr<Place>> open_directory_place(const PlaceOptions& options);
Result<std::unique_ptr<Place>> open_s3_place(const PlaceOptions& options);

}  // namespace cairn::ckpt
