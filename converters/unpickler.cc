#include "converters/unpickler.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "converters/pickle_tree.h"

namespace cairn::convert {
namespace {

using Id = PickleTree::Id;
using Kind = PickleTree::Kind;
using Name = PickleTree::Name;

constexpr size_t kMaxTensors = size_t{1} << 20;
constexpr int kMaxNesting = 16;  // of dicts, in the result

constexpr Name kOrderedDict{"collections", "OrderedDict"}, kRebuildTensor{"torch._utils", "_rebuild_tensor_v2"},
    kRebuildParameter{"torch._utils", "_rebuild_parameter"};

/// The dtype of each class of storages, as safetensors names it.
constexpr std::pair<Name, std::string_view> kStorages[] = {
    {{"torch", "FloatStorage"}, "F32"},  {{"torch", "HalfStorage"}, "F16"}, {{"torch", "BFloat16Storage"}, "BF16"},
    {{"torch", "DoubleStorage"}, "F64"}, {{"torch", "LongStorage"}, "I64"}, {{"torch", "IntStorage"}, "I32"},
    {{"torch", "ShortStorage"}, "I16"},  {{"torch", "CharStorage"}, "I8"},  {{"torch", "ByteStorage"}, "U8"},
    {{"torch", "BoolStorage"}, "BOOL"}};

/// Nothing for a class that is none of storages.
std::string_view storage_dtype(Name name) {
  const auto found = std::ranges::find(kStorages, name, [](const auto& row) { return row.first; });
  return found == std::end(kStorages) ? std::string_view() : found->second;
}

bool is_of_state_dict(Name name) {
  return name == kOrderedDict || name == kRebuildTensor || name == kRebuildParameter || !storage_dtype(name).empty();
}

/// The operations of a state dict as torch.save writes it, in protocol 2. A whole program's state has objects too
/// (NEWOBJ).
constexpr std::string_view kOperations = "\x80.N\x88\x89JKM\x8aGXU()\x85\x86\x87t]ae}suqrhjcQRb";
constexpr std::string_view kTrainingOperations = "\x80.N\x88\x89JKM\x8aGXU()\x85\x86\x87t]ae}suqrhjcQRb\x81";

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

struct Storage {
  std::string_view key, dtype;
  int64_t count = 0;
  bool operator==(const Storage&) const = default;
};

struct Tensor {
  size_t storage = 0;
  int64_t offset = 0;
  Shape shape, strides;
};

/// The tensors of a pickle. Each storage and each tensor is checked where the pickle makes it.
class StateDict {
 public:
  explicit StateDict(Pickle kind) : training_(kind == Pickle::kTraining) {}

  Status made(const PickleTree& tree, Id id) {
    if (tree.kind(id) == Kind::kPersistent) return made_storage(tree, id);
    RT_TRY_SET(const PickleTree::Object* object, tree.object(id, "what is called"));
    if (object->of == kOrderedDict) return unsupported("an OrderedDict made from something");
    if (!storage_dtype(object->of).empty())
      return unsupported(fmt::format("a call of {} {}", object->of.module, object->of.name));
    if (object->of != kRebuildTensor && object->of != kRebuildParameter) return {};  // of a program: nothing to us
    RT_TRY_SET(const std::vector<Id>* arguments, tree.items(object->arguments, "the arguments of a call"));
    return object->of == kRebuildTensor ? made_tensor(tree, id, *arguments) : made_parameter(tree, id, *arguments);
  }

  Result<std::vector<PickledTensor>> collect(const PickleTree& tree, bool lone) {
    if (lone) {
      if (!tensors_of_.contains(tree.root())) return tree.wrong("the result", tree.root(), "a tensor");
      return std::vector{named(tree.root(), "")};
    }
    RT_TRY_SET(const PickleTree::Dict* root, tree.dict(tree.root(), "the result"));
    const PickleTree::Dict* inner = nullptr;
    for (const auto& [key, value] : *root) {
      if (tree.kind(key) != Kind::kString || tree.kind(value) != Kind::kDict) continue;
      RT_TRY_SET(const std::string_view name, tree.string(key, "the key of a dict"));
      if (name != "state_dict" && name != "model" && name != "module") continue;
      if (inner != nullptr) return corrupt("the result has several of the keys state_dict, model and module");
      RT_TRY_SET(inner, tree.dict(value, name));
    }
    std::vector<PickledTensor> out;
    RT_TRY(flatten(tree, inner != nullptr ? *inner : *root, "", 0, out));
    if (out.empty()) return corrupt("it holds no tensors");
    return out;
  }

 private:
  static bool is_empty_dict(const PickleTree& tree, Id id) {
    return tree.kind(id) == Kind::kDict && tree.dict(id, "").value()->empty();
  }

  /// ('storage', class, key, place, count)
  Status made_storage(const PickleTree& tree, Id id) {
    RT_TRY_SET(const std::vector<Id>* items, tree.persistent(id, "a storage"));
    RT_TRY_SET(const std::string_view tag, tree.string((*items)[0], "the tag of a persistent id"));
    if (tag != "storage")
      return unsupported(fmt::format("a persistent id \"{}\", expected \"storage\"", printable(tag)));
    RT_TRY_SET(const Name type, tree.name((*items)[1], "the class of a storage"));
    const std::string_view dtype = storage_dtype(type);
    if (dtype.empty())
      return corrupt(fmt::format("{} {} is no class of storages", printable(type.module), printable(type.name)));
    RT_TRY_SET(const std::string_view key, tree.string((*items)[2], "the key of a storage"));
    RT_TRY(tree.string((*items)[3], "the place of a storage"));
    RT_TRY_SET(const int64_t count, tree.integer((*items)[4], "the size of a storage"));
    if (key.empty() || key.size() > 20 || key.find_first_not_of("0123456789") != key.npos)
      return corrupt(fmt::format("\"{}\" is no key of a storage", printable(key)));
    if (count < 0 || count > std::numeric_limits<int64_t>::max() / 8)
      return corrupt(fmt::format("storage {} of {} elements", key, count));
    const Storage storage{key, dtype, count};
    const auto [known, is_new] = by_key_.emplace(key, storages_.size());
    if (is_new) storages_.push_back(storage);
    if (const Storage& before = storages_[known->second]; before != storage) {
      return corrupt(fmt::format("storage {} is {} of {} elements here and {} of {} before", key, storage.dtype,
                                 storage.count, before.dtype, before.count));
    }
    storages_of_[id] = known->second;
    return {};
  }

  /// (storage, offset, sizes, strides, requires_grad, hooks[, metadata])
  Status made_tensor(const PickleTree& tree, Id id, const std::vector<Id>& items) {
    const bool count = items.size() == 6 || items.size() == 7;
    const auto storage_of = count ? storages_of_.find(items[0]) : storages_of_.end();
    if (storage_of == storages_of_.end() || tree.kind(items[4]) != Kind::kBool || !is_empty_dict(tree, items[5]) ||
        (items.size() == 7 && tree.kind(items[6]) != Kind::kNone && !is_empty_dict(tree, items[6])))
      return corrupt("_rebuild_tensor_v2 takes a storage, an offset, sizes, strides, a bool and an empty dict");
    Tensor tensor{.storage = storage_of->second};
    RT_TRY_SET(tensor.offset, tree.integer(items[1], "a tensor's offset"));
    RT_TRY_SET(tensor.shape, tree.shape(items[2], "a tensor's size"));
    RT_TRY_SET(tensor.strides, tree.shape(items[3], "a tensor's stride"));
    if (tensor.shape.size() != tensor.strides.size()) return corrupt("a tensor has more or fewer strides than sizes");
    const Storage& storage = storages_[tensor.storage];
    const auto outside = [&] {
      return corrupt(fmt::format("a tensor of size {}, stride {} at {} leaves storage {} of {} elements",
                                 to_string(tensor.shape), to_string(tensor.strides), tensor.offset, storage.key,
                                 storage.count));
    };
    if (tensor.offset < 0 || tensor.offset > storage.count) return outside();
    int64_t elems = 1, last = tensor.offset;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      int64_t reach = 0;
      // Bytes must be countable too: elements have 8 at most.
      if (__builtin_mul_overflow(elems, tensor.shape[d], &elems) || elems > std::numeric_limits<int64_t>::max() / 8)
        return outside();
      if (tensor.shape[d] > 0 && (__builtin_mul_overflow(tensor.shape[d] - 1, tensor.strides[d], &reach) ||
                                  __builtin_add_overflow(last, reach, &last)))
        return outside();
    }
    if (elems > 0 && last >= storage.count) return outside();
    if (tensors_.size() >= kMaxTensors) return corrupt("more tensors than any state dict has");
    tensors_of_[id] = tensors_.size();
    tensors_.push_back(std::move(tensor));
    return {};
  }

  /// (tensor, requires_grad, hooks)
  Status made_parameter(const PickleTree& tree, Id id, const std::vector<Id>& items) {
    const auto tensor = items.size() == 3 ? tensors_of_.find(items[0]) : tensors_of_.end();
    if (tensor == tensors_of_.end() || tree.kind(items[1]) != Kind::kBool || !is_empty_dict(tree, items[2]))
      return corrupt("_rebuild_parameter takes a tensor, a bool and an empty dict");
    tensors_of_[id] = tensor->second;
    return {};
  }

  PickledTensor named(Id id, const std::string& name) const {
    const Tensor& tensor = tensors_[tensors_of_.at(id)];
    const Storage& storage = storages_[tensor.storage];
    return {
        name,          std::string(storage.key), std::string(storage.dtype), storage.count, tensor.offset, tensor.shape,
        tensor.strides};
  }

  Status flatten(const PickleTree& tree, const PickleTree::Dict& dict, const std::string& prefix, int depth,
                 std::vector<PickledTensor>& out) {
    if (depth > kMaxNesting) return corrupt(fmt::format("dicts are nested deeper than {}", kMaxNesting));
    std::set<std::string_view> keys;
    for (const auto& [key, value] : dict) {
      if (++visited_ > kMaxTensors) return corrupt("more entries than any state dict has");
      if (tree.kind(key) == Kind::kInt) continue;  // of an optimizer's state
      if (training_ && tree.kind(key) != Kind::kString) continue;
      RT_TRY_SET(const std::string_view text, tree.string(key, "the key of a dict"));
      const std::string name = prefix + std::string(text);
      if (!keys.insert(text).second) return corrupt(fmt::format("\"{}\" is there twice", printable(name)));
      if (tree.kind(value) == Kind::kDict) {
        RT_TRY_SET(const PickleTree::Dict* below, tree.dict(value, name));
        RT_TRY(flatten(tree, *below, name + ".", depth + 1, out));
        continue;
      }
      const bool tensor = tensors_of_.contains(value);
      if (training_ && !tensor) continue;
      if (!tensor) return tree.wrong(fmt::format("\"{}\"", printable(name)), value, "a tensor");
      if (name.size() > 1024 ||
          std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
        return corrupt(fmt::format("\"{}\" cannot be a tensor's name", printable(name)));
      if (!names_.insert(name).second) return corrupt(fmt::format("\"{}\" is there twice", printable(name)));
      out.push_back(named(value, name));
    }
    return {};
  }

  bool training_ = false;
  std::vector<Storage> storages_;
  std::map<std::string_view, size_t> by_key_;
  std::vector<Tensor> tensors_;
  std::unordered_map<Id, size_t> storages_of_, tensors_of_;  // of values of the tree
  std::set<std::string> names_;
  size_t visited_ = 0;
};

}  // namespace

Result<std::vector<PickledTensor>> unpickle_state_dict(std::string_view pickle, Pickle kind) {
  const bool training = kind == Pickle::kTraining;
  StateDict out(kind);
  PickleTree::Policy policy{.of = "state dict",
                            .max_bytes = int64_t{64} << 20,
                            .max_values = size_t{8} << 20,
                            .operations = training ? kTrainingOperations : kOperations,
                            .max_protocol = 2,
                            .allows = training ? nullptr : is_of_state_dict,
                            .persistent = true,
                            .opaque = training};
  policy.made = [&](const PickleTree& tree, Id id) { return out.made(tree, id); };
  RT_TRY_SET(const PickleTree tree, PickleTree::read(pickle, policy));
  return out.collect(tree, kind == Pickle::kTensor);
}

}  // namespace cairn::convert
