#pragma once
// A checkpoint as the Hugging Face folder that an export of it would write, and no byte of it written: names, sizes,
// and the bytes of any range, read from the checkpoint, each chunk checked, cast and put in order on the way.
//
// Bytes are made in blocks. Those in use lately are kept (BlockStore), so that readers side by side cost
// one reading of each. Threads: const functions may be called from any, several at once.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "converters/export_plan.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct HfViewOptions {
  ExportOptions of;                        // dtype, weights, max_shard_bytes and those of tokenizers count
  int64_t readers = 2;                     // blocks that are made at once
  int64_t block_bytes = int64_t{4} << 20;  // a multiple of 8; no less than a chunk of a checkpoint, or it is read again
};

struct ViewFile {
  std::string name;
  int64_t bytes = 0;
  std::string text;      // of a small file
  int64_t weights = -1;  // index into the weights files; -1: a small one
};

class HfView {
 public:
  /// `name`: of the model, in its card. `io` outlives the view. Errors: those of export_hf() before it writes.
  static Result<std::unique_ptr<HfView>> open(ckpt::IoBackend& io, const std::filesystem::path& checkpoint_dir,
                                              const std::string& name, const HfViewOptions& options,
                                              const RecipeDecoder& decode);

  /// By name.
  const std::vector<ViewFile>& files() const { return files_; }
  const ViewFile* find(std::string_view name) const;
  int64_t id() const { return id_; }  // of no other view of this process
  int64_t block_bytes() const { return block_bytes_; }
  const std::vector<std::string>& warnings() const { return plan_.warnings; }

  /// Block `block` of a weights file: block_bytes(), or as many as remain. Waits for a reader. Errors: kCorrupt for a
  /// chunk that does not hold, naming it; kUnsupported for a weight that f16 cannot hold; kIo.
  Result<std::vector<std::byte>> block(int64_t weights, int64_t block) const;

 private:
  HfView();

  int64_t id_, block_bytes_ = 0;
  std::filesystem::path dir_;
  std::unique_ptr<CheckpointWeights> source_;
  ExportPlan plan_;
  std::vector<HfFile> weights_;
  std::vector<ViewFile> files_;
  std::vector<int64_t> tensors_;  // all of them

  // Sources that are free, and how many more may be made.
  mutable std::mutex mutex_;
  mutable std::condition_variable freed_;
  mutable std::vector<std::unique_ptr<TensorSource>> idle_;
  mutable int64_t unmade_ = 0;
};

/// Blocks of views, those whose use is the longest ago forgotten first. A block that several ask for is made once.
class BlockStore {
 public:
  explicit BlockStore(int64_t most_bytes) : most_bytes_(most_bytes) {}

  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  /// A block of a weights file of `view`, made where it is not kept. An error is not kept.
  Result<Bytes> get(const std::shared_ptr<const HfView>& view, int64_t weights, int64_t block);
  /// Whether it is kept, or under way.
  bool has(int64_t view, int64_t weights, int64_t block) const;
  void forget(int64_t view);  // by its id

 private:
  struct Key {
    int64_t view, weights, block;
    auto operator<=>(const Key&) const = default;
  };
  struct Entry {
    Bytes bytes;  // null while it is made
    std::list<Key>::iterator used;
  };
  const int64_t most_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable made_;
  std::map<Key, Entry> entries_;
  std::list<Key> used_;  // the longest ago first
  int64_t bytes_ = 0;
};

}  // namespace cairn::convert
