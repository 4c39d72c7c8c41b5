#pragma once
// Writes a Hugging Face folder: weights in safetensors files, the index, and small files beside them.
//
//   1. Work in .NAME.converting beside the target, under a lock: two conversions into one folder never meet. In the
//      target where nothing can be renamed into it from beside it (a mount point), or nothing written there.
//   2. Each weights file is made in a stream, several at a time, in bounded memory; durable, it gets a note with the
//      hashes of its bytes. A conversion that was killed or stopped, or whose disk was full or failed, leaves them; the
//      same one, started again, takes over the files whose bytes hold and removes the rest. What is left of another one
//      is removed. What is still to be written has to find room before the first byte of it is.
//   3. The small files, config.json last.
//   4. Notes are removed; the folder takes the target's name. Over a folder that is not empty (overwrite): remove its
//      config.json (what is left cannot be opened), remove the other files that a conversion writes, move the new ones
//      in, config.json last. So also from within the target.
//      Their names are noted in the work folder before (.moving): what one that was killed or failed has moved goes
//      back to the rest, so that a target in which nothing else lay is empty again, and the next attempt takes it over.
//      Other files are never touched, and a README.md that is there stays.
// On any other error the target is as it was and nothing is left beside it; where the disk was full or failed, the
// files that were done, for the next attempt.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/weights_file.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

inline constexpr int64_t kDefaultShardBytes = 5'000'000'000;  // transformers 4.x and huggingface_hub
inline constexpr std::string_view kCardFile = "README.md";

/// Which file of the folder holds which tensor.
using Split = std::map<std::string, std::string>;

/// What the file has of a tensor: its numbers, or one of the two parts of a matrix in blocks (block_fp8.h).
enum class OutputPart { kNumbers, kCodes, kScales };

struct OutputTensor {
  std::string name;
  Shape shape;
  std::optional<DType> own_dtype;  // of numbers, where it is not HfOutput::dtype
  OutputPart part = OutputPart::kNumbers;
};

struct HfOutput {
  std::vector<OutputTensor> tensors;  // in the order in which files are filled: embedding, layers, final norm, head
  DType dtype = DType::kF32;
  std::optional<Split> split;                // as it was in the source; else by size
  std::map<std::string, std::string> texts;  // small files by name, config.json and README.md among them
  std::string source;                        // all that decides the weights' bytes, as text

  /// As the file names it.
  std::string_view dtype_of(const OutputTensor& tensor) const;
  int64_t elem_bytes(const OutputTensor& tensor) const;
  int64_t parameters() const;
};

/// Makes the bytes of some tensors of an HfOutput. Used by one thread, tensor after tensor, elements ascending.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Elements [first, first + out.size() / element size) of a tensor, in the dtype that it has in the file.
  virtual Status fill(int64_t tensor, int64_t first, std::span<std::byte> out) = 0;
};
/// Called from several threads, once for a file with its tensors in the order in which they will be asked for.
using OpenTensors = std::function<Result<std::unique_ptr<TensorSource>>(std::span<const int64_t> tensors)>;

/// One weights file: its header, and the tensors behind it.
struct HfFile {
  std::string name;
  std::vector<SafeTensor> tensors;  // in file order
  std::vector<int64_t> indices;     // of each, into the output's tensors
  std::string head;
  int64_t data_bytes = 0;
  int64_t file_bytes() const { return static_cast<int64_t>(head.size()) + data_bytes; }
};

/// The weights files of an output, by name. `max_shard_bytes`: as HfWriteOptions has it.
Result<std::vector<HfFile>> lay_out_files(const HfOutput& output, int64_t max_shard_bytes);
/// The text of kIndexFile; empty where one file needs none.
std::string index_text(const HfOutput& output, const std::vector<HfFile>& files);
/// Bytes [offset, offset + out.size()) of a weights file; `offset` and what follows behind it are multiples of 8, so
/// that no element is cut. Errors: those of the source.
Status fill_file(const HfOutput& output, const HfFile& file, TensorSource& source, int64_t offset,
                 std::span<std::byte> out);

struct HfWriteOptions {
  int64_t max_shard_bytes = 0;                // tensor bytes of a file; 0: HfOutput::split, else kDefaultShardBytes
  bool overwrite = false;                     // a target folder that is not empty
  int64_t threads = 2;                        // files at a time
  const std::atomic<bool>* cancel = nullptr;  // looked at every few MiB; when true it ends with kStopped
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // from one thread at a time; may be empty
  std::function<std::unique_ptr<ckpt::IoBackend>()> make_io;              // one a thread; empty: make_best_backend
  /// Instead of step 2, one file after the other: makes `path`, whose tensors are in file order. To be asked before it
  /// takes room: `has_room`, whether this file and those after it will find it.
  std::function<Status(const std::filesystem::path& path, const std::vector<SafeTensor>& tensors,
                       std::span<const int64_t> indices, const std::function<Status()>& has_room)>
      write_file;
};

struct HfWriteReport {
  std::filesystem::path dir;
  int64_t tensors = 0, parameters = 0, data_bytes = 0, shards = 0, texts = 0;
  int64_t taken_files = 0, taken_bytes = 0;  // that an earlier, cut-off conversion had written
  std::vector<std::string> not_finite;       // tensors with a NaN or an infinity, but for those of files taken over
};

/// Errors: kInvalidInput (the target is not empty, is no folder, or another process converts into it), kNoSpace (also
/// before anything is written, with what is missing), kIo, kStopped, and what `open` and its sources say.
Result<HfWriteReport> write_hf_folder(const std::filesystem::path& target, const HfOutput& output,
                                      const OpenTensors& open, const HfWriteOptions& options);

/// Whether the target can be written, so that nobody waits to hear it: the first of write_hf_folder's errors. A folder
/// that is a checkpoint and no Hugging Face folder is never replaced.
Status check_hf_target(const std::filesystem::path& target, bool overwrite);
/// Errors: kInvalidInput when the target is the checkpoint that is read, lies in it, or is a folder above it.
Status check_apart(const std::filesystem::path& source, const std::filesystem::path& target);

/// The split that an index has, when it names exactly these tensors and files of safe names.
std::optional<Split> split_of_index(const std::vector<OutputTensor>& tensors, const std::string& index);

}  // namespace cairn::convert
