#pragma once
// Whole tensors that lie in pieces in many files: runs of the flat buffers that ranks of a trainer save, or boxes. Any
// elements are read in one pass over the pieces that hold them. Files are opened when they are read, and at most
// kMostOpen at a time.

#include <cstdint>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "converters/weights_file.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

/// Files that are read at any place by any thread. One that is not as it was when it was added is an error.
class FilePool {
 public:
  static constexpr size_t kMostOpen = 64;

  /// Returns its number. Errors: kInvalidInput, kIo; with the path.
  Result<int64_t> add(const std::filesystem::path& path);
  /// Bytes [offset, offset + out.size()). Errors: kIo, kCorrupt (the file ends before); kInvalidInput for one that has
  /// changed since it was added.
  Status read(int64_t file, int64_t offset, std::span<std::byte> out) const;
  /// Errors: kInvalidInput for the first file whose size or time of change is another than when it was added.
  Status check_unchanged() const;
  std::vector<std::filesystem::path> paths() const;

 private:
  struct Known {
    std::filesystem::path path;
    int64_t bytes = 0, changed_ns = 0;
  };
  Result<std::shared_ptr<const Fd>> open(int64_t file) const;
  static Status check(const Known& known, int fd);

  std::vector<Known> files_;
  mutable std::mutex mutex_;
  mutable std::list<std::pair<int64_t, std::shared_ptr<const Fd>>> open_;  // the last used first
};

/// Elements that lie one behind the other in a file; in none (file < 0) they are zeros.
struct FlatRun {
  int64_t file = -1;
  int64_t offset = 0;  // bytes
  int64_t count = 0;   // elements
  bool operator==(const FlatRun&) const = default;
};

/// A box of a tensor, dense and row-major in a file, or a stretch of its elements; in no file (file < 0) zeros.
struct FileBox {
  Shape offsets, sizes;
  int64_t file = -1;
  int64_t offset = 0;  // bytes
  int64_t first = 0;   // element of the box that lies at `offset`
  int64_t count = -1;  // elements that follow there; -1: all of the box
  int64_t elems() const { return count >= 0 ? count : count_elems(sizes) - first; }
};
/// Rows [from, to) of a box's tensor in its first dim: what the box has of them, in the coordinates of the whole
/// tensor; no elements where it has none. `elem_bytes`: of the stored dtype.
FileBox rows_of(const FileBox& box, int64_t from, int64_t to, int64_t elem_bytes);

/// Elements of a box, one behind the other there and in its tensor.
struct BoxRun {
  int64_t from = 0, count = 0;
};
/// The elements of a box that follow element `at` of its tensor without a gap; a count of 0: the box does not hold it.
BoxRun run_in_box(const Shape& offsets, const Shape& sizes, const Shape& shape, int64_t at);

/// One buffer made of the parts of all ranks, in order, of which parameters are taken from the front.
class FlatBuffer {
 public:
  explicit FlatBuffer(std::vector<FlatRun> parts, int64_t elem_bytes) : parts_(std::move(parts)), elem_(elem_bytes) {}
  int64_t left() const;
  /// The next `count` elements; fewer where less is left.
  std::vector<FlatRun> take(int64_t count);

 private:
  std::vector<FlatRun> parts_;
  int64_t elem_ = 0;
  size_t part_ = 0;
  int64_t at_ = 0;  // elements of parts_[part_] that are taken
};

class FlatTensors final : public WeightsFile {
 public:
  /// `path`: the folder, for messages.
  FlatTensors(std::filesystem::path path, std::shared_ptr<const FilePool> files)
      : path_(std::move(path)), files_(std::move(files)) {}

  /// `runs` hold as many elements as the shape has; dtype as safetensors names it.
  void add(std::string name, std::string dtype, Shape shape, std::vector<FlatRun> runs);
  /// `boxes` fill the shape and do not overlap. With `paired`, rows of heads of so many channels are stored with the
  /// rotary pairs as neighbours, and are read with them in halves of the head.
  void add_boxes(std::string name, std::string dtype, Shape shape, std::vector<FileBox> boxes, int64_t paired = 0);
  /// The tensor of that name; null: none.
  const SafeTensor* find(std::string_view name) const;

  const std::filesystem::path& path() const override { return path_; }
  std::vector<std::filesystem::path> paths() const override { return files_->paths(); }
  const std::vector<SafeTensor>& tensors() const override { return tensors_; }
  /// `tensor` is one of tensors(); offset and bytes are of whole elements.
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;
  const std::vector<FlatRun>& runs(const SafeTensor& tensor) const;

 private:
  struct Placed {
    std::vector<FlatRun> runs;
    std::vector<int64_t> begins;  // elements before each run
    int64_t elem_bytes = 0;
    std::vector<FileBox> boxes;  // in place of runs
    int64_t paired = 0;
  };
  Status read_boxes(const SafeTensor& tensor, const Placed& placed, int64_t at, int64_t left, std::byte* out) const;
  size_t index_of(const SafeTensor& tensor) const;

  std::filesystem::path path_;
  std::shared_ptr<const FilePool> files_;
  std::vector<SafeTensor> tensors_;
  std::vector<Placed> placed_;  // of each of tensors_
  std::map<std::string, size_t, std::less<>> by_name_;
};

}  // namespace cairn::convert
