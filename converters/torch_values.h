#pragma once
// Values that torch.save wrote beside plain weights: the pickle of an archive as a tree of values (pickle_tree.h), and
// the tensors among them as stretches of the file. Any class is kept as a name with its state: what a trainer's client
// saved may hold anything, and nothing of it is run.
// Source: pytorch torch/_utils.py, torch/_tensor.py.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converters/pickle_tree.h"
#include "converters/torch_archive.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// A dense row-major tensor in a file.
struct TorchTensor {
  std::string dtype;  // as safetensors names it
  Shape shape;
  int64_t elems = 0;
  int64_t offset = 0;  // of its first byte in the archive
};

class TorchValues {
 public:
  using Id = PickleTree::Id;
  using Kind = PickleTree::Kind;
  using Dict = PickleTree::Dict;
  static constexpr Id kNothing = PickleTree::kNothing;

  /// Errors, with the path: those of TorchArchive::open and PickleTree::read.
  static Result<std::unique_ptr<TorchValues>> read(const std::filesystem::path& path);
  /// The same for an archive in bytes [begin, begin + bytes) of an open file.
  static Result<std::unique_ptr<TorchValues>> read_part(std::shared_ptr<const Fd> fd, const std::filesystem::path& path,
                                                        int64_t begin, int64_t bytes);

  const TorchArchive& archive() const { return archive_; }
  const PickleTree& tree() const { return *tree_; }
  /// For messages: the file's name.
  std::string name() const { return archive_.path().filename().string(); }
  Id root() const { return tree_->root(); }

  // Looks that find nothing where the value is absent or of another kind.
  /// A value of the dict at the root.
  Id find(std::string_view key) const { return get(root(), key); }
  Id get(Id of, std::string_view key) const;
  /// The value of an integer key.
  Id get(Id of, int64_t key) const;
  const Dict* dict(Id id) const;
  const std::vector<Id>* items(Id id) const;
  std::string text(Id id) const;  // empty: none
  std::optional<int64_t> integer(Id id) const;
  /// A number, or a tensor of one number.
  std::optional<double> number(Id id) const;
  /// The state that an object of any class would have got, or the dict itself.
  const Dict* state(Id id) const;
  bool is_tensor(Id id) const { return tensor_arguments(id) != nullptr; }
  /// The key of the storage that a tensor is a view of, with the byte where it begins: equal of tied tensors.
  std::string storage_key(Id id) const;
  /// The dtype of a tensor, without a look at its storage; empty for anything else.
  std::string dtype_of(Id id) const;
  /// Elements of its storage; -1 for anything else.
  int64_t storage_elems(Id id) const;

  /// Errors: kCorrupt (no tensor, a storage that is missing or of another size, elements outside of it), kUnsupported
  /// (a strided view).
  Result<TorchTensor> tensor(Id id, std::string_view what) const;
  /// Plain values as JSON; what is none (tensors, classes) is left out and counted in `left_out`.
  nlohmann::json json(Id id, int64_t* left_out) const;

 private:
  TorchValues() = default;
  static Result<std::unique_ptr<TorchValues>> of(TorchArchive archive);
  const std::vector<Id>* tensor_arguments(Id id) const;
  nlohmann::json json(Id id, int depth, int64_t* values, int64_t* left_out) const;

  TorchArchive archive_;
  std::string pickle_;  // the tree points into it
  std::optional<PickleTree> tree_;
};

}  // namespace cairn::convert
