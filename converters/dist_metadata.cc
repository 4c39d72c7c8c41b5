#include "converters/dist_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "converters/family.h"
#include "converters/pickle_tree.h"

namespace cairn::convert {
namespace {

constexpr int64_t kMaxPickleBytes = int64_t{256} << 20;
constexpr int64_t kMaxElems = std::numeric_limits<int64_t>::max() / 16;
constexpr int64_t kMostCompared = int64_t{1} << 26;  // pairs of chunks

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

/// The names that such a pickle may hold; a last part "*" is any. Only Metadata and what lies in it is looked into.
constexpr std::pair<std::string_view, std::string_view> kKnown[] = {
    {kMetadataModule, "*"},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"},
    {"torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.planner", "*"},
    {"megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"},
    {"megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"},
    {"torch", "Size"},  // and the dtypes below
    {"torch.serialization", "_get_layout"},
    {"collections", "OrderedDict"},
    {"pathlib", "PosixPath"},
    {"pathlib", "PurePosixPath"},
    {"pathlib._local", "PosixPath"},
};

constexpr std::pair<std::string_view, std::string_view> kDtypes[] = {{"float32", "F32"},
                                                                     {"float16", "F16"},
                                                                     {"bfloat16", "BF16"},
                                                                     {"float64", "F64"},
                                                                     {"int64", "I64"},
                                                                     {"int32", "I32"},
                                                                     {"int16", "I16"},
                                                                     {"int8", "I8"},
                                                                     {"uint8", "U8"},
                                                                     {"bool", "BOOL"},
                                                                     {"float8_e4m3fn", "F8_E4M3"},
                                                                     {"float8_e5m2", "F8_E5M2"},
                                                                     {"complex64", "C64"},
                                                                     {"complex128", "C128"},
                                                                     {"uint16", "U16"},
                                                                     {"uint32", "U32"},
                                                                     {"uint64", "U64"}};

using Id = PickleTree::Id;
using Kind = PickleTree::Kind;
using Dict = PickleTree::Dict;
using Object = PickleTree::Object;
using Name = PickleTree::Name;
constexpr Id kNothing = PickleTree::kNothing;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

bool allows(Name name) {
  const bool known = std::ranges::any_of(kKnown, [&](const auto& row) {
    return row.first == name.module && (row.second == "*" || row.second == name.name);
  });
  return known || (name.module == "torch" &&
                   std::ranges::any_of(kDtypes, [&](const auto& row) { return row.first == name.name; }));
}

const PickleTree::Policy kPolicy{
    .of = ".metadata", .max_bytes = kMaxPickleBytes, .max_values = size_t{32} << 20, .allows = allows};

Result<std::string> dtype_of(const PickleTree& tree, Id properties) {
  RT_TRY_SET(const Object* object, tree.object(properties, "a tensor's properties"));
  if (object->of.name != "TensorProperties" || object->state == kNothing) {
    return corrupt("a tensor's properties are no TensorProperties");
  }
  Id dtype = kNothing;
  if (tree.kind(object->state) == Kind::kDict) {
    RT_TRY_SET(const Dict* fields, tree.dict(object->state, "a tensor's properties"));
    dtype = tree.find(*fields, "dtype");
  } else {  // (dtype, layout, requires_grad, memory format, pinned ...)
    RT_TRY_SET(const std::vector<Id>* parts, tree.items(object->state, "a tensor's properties"));
    if (!parts->empty()) dtype = parts->front();
  }
  if (dtype == kNothing) return corrupt("a tensor's properties have no dtype");
  RT_TRY_SET(const Name name, tree.name(dtype, "a tensor's dtype"));
  for (const auto& [torch, ours] : kDtypes) {
    if (name.module == "torch" && name.name == torch) return std::string(ours);
  }
  return unsupported(fmt::format("dtype {}.{} is not read", printable(name.module), printable(name.name)));
}

/// That chunks lie in the tensor, do not overlap and fill it.
Status check_cover(const DistTensor& tensor) {
  int64_t elems = 1, covered = 0;
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(elems, extent, &elems) || elems > kMaxElems) {
      return corrupt(fmt::format("a size of {}", to_string(tensor.shape)));
    }
  }
  const size_t dims = tensor.shape.size();
  const auto told = [](const DistChunk& c) {
    return fmt::format("{} at {}", to_string(c.sizes), to_string(c.offsets));
  };
  std::vector<const DistChunk*> filled;
  for (const DistChunk& chunk : tensor.chunks) {
    bool inside = chunk.offsets.size() == dims && chunk.sizes.size() == dims;
    int64_t here = 1;
    for (size_t d = 0; d < dims && inside; ++d) {
      inside = chunk.offsets[d] <= tensor.shape[d] && chunk.sizes[d] <= tensor.shape[d] - chunk.offsets[d];
      here *= chunk.sizes[d];
    }
    if (!inside) return corrupt(fmt::format("a chunk {} leaves the tensor's {}", told(chunk), to_string(tensor.shape)));
    covered += here;
    if (here > 0) filled.push_back(&chunk);
  }
  size_t along = 0, most = 0;  // the dim with the most cuts
  for (size_t d = 0; d < dims; ++d) {
    std::set<int64_t> cuts;
    for (const DistChunk* chunk : filled) cuts.insert(chunk->offsets[d]);
    if (cuts.size() > most) along = d, most = cuts.size();
  }
  if (dims > 0) std::ranges::stable_sort(filled, {}, [&](const DistChunk* chunk) { return chunk->offsets[along]; });
  std::vector<const DistChunk*> open;  // those that reach the next one's begin
  int64_t compared = 0;
  for (const DistChunk* chunk : filled) {
    if (dims > 0) {
      std::erase_if(open, [&](const DistChunk* before) {
        return before->offsets[along] + before->sizes[along] <= chunk->offsets[along];
      });
    }
    compared += std::ssize(open);
    if (compared > kMostCompared) return unsupported(fmt::format("{} chunks of one tensor", tensor.chunks.size()));
    for (const DistChunk* before : open) {
      bool meet = true;
      for (size_t d = 0; d < dims; ++d) {
        meet = meet && chunk->offsets[d] < before->offsets[d] + before->sizes[d] &&
               before->offsets[d] < chunk->offsets[d] + chunk->sizes[d];
      }
      if (meet) return corrupt(fmt::format("chunks {} and {} overlap", told(*before), told(*chunk)));
    }
    open.push_back(chunk);
  }
  if (covered != elems) {
    return corrupt(
        fmt::format("its chunks hold {} elements of {}: a part of the checkpoint is missing", covered, elems));
  }
  return {};
}

class Reader {
 public:
  explicit Reader(const PickleTree& tree) : tree_(tree) {}

  /// `all`: the rest of the state too.
  Result<DistIndex> run(bool all) {
    RT_TRY_SET(const Dict* metadata, tree_.fields(tree_.root(), "Metadata", "the result"));
    RT_TRY_SET(const Id tensors_id, tree_.field(*metadata, "state_dict_metadata", "Metadata"));
    RT_TRY_SET(const Dict* tensors, tree_.dict(tensors_id, "state_dict_metadata"));
    RT_TRY_SET(const Id storage, tree_.field(*metadata, "storage_data", "Metadata"));
    RT_TRY(read_places(storage));
    RT_TRY(read_paths(tree_.find(*metadata, "planner_data")));
    DistIndex out;
    std::set<std::string> names;
    for (const auto& [key, value] : *tensors) {
      RT_TRY_SET(const std::string_view key_text, tree_.string(key, "a tensor's name"));
      const std::string saved(key_text);
      const std::optional<std::string> inner = name_of(saved);
      RT_TRY_SET(const Object* kept, tree_.object(value, "a tensor's metadata"));
      const bool is_value = kept->of.name == "BytesStorageMetadata";
      if (!all && (!inner || is_value)) continue;  // another part of the state, or no tensor
      const std::string& name = inner && !is_value ? *inner : saved;
      if (name.size() > 1024 || printable(name) != name) {
        return corrupt(fmt::format("\"{}\" cannot be a tensor's name", printable(name)));
      }
      if (is_value) {
        const auto place = places_.find({saved, Shape()});
        if (place == places_.end()) return corrupt(fmt::format("no file is said to hold {}", name));
        out.values.push_back({name, place->second.file, place->second.begin, place->second.bytes});
        continue;
      }
      if (inner && !names.insert(name).second) return corrupt(fmt::format("\"{}\" is there twice", name));
      DistTensor tensor{.name = name, .dtype = {}, .shape = {}, .chunks = {}};
      RT_TRY(read_tensor(saved, value, &tensor).with(name));
      (inner ? out.model : out.others).push_back(std::move(tensor));
    }
    if (out.model.empty()) return corrupt("it holds no tensors");
    return out;
  }

 private:
  struct Place {
    std::string file;
    int64_t begin = 0, bytes = 0;
  };

  Status read_tensor(const std::string& saved, Id id, DistTensor* out) {
    RT_TRY_SET(const Dict* fields, tree_.fields(id, "TensorStorageMetadata", "a tensor's metadata"));
    RT_TRY_SET(const Id properties, tree_.field(*fields, "properties", "a tensor"));
    RT_TRY_SET(out->dtype, dtype_of(tree_, properties));
    RT_TRY_SET(const Id size, tree_.field(*fields, "size", "a tensor"));
    RT_TRY_SET(out->shape, tree_.shape(size, "a tensor's size"));
    RT_TRY_SET(const Id list, tree_.field(*fields, "chunks", "a tensor"));
    RT_TRY_SET(const std::vector<Id>* chunks, tree_.items(list, "a tensor's chunks"));
    for (const Id chunk : *chunks) {
      RT_TRY_SET(const Dict* box, tree_.fields(chunk, "ChunkStorageMetadata", "a chunk"));
      DistChunk part;
      RT_TRY_SET(const Id offsets, tree_.field(*box, "offsets", "a chunk"));
      RT_TRY_SET(const Id sizes, tree_.field(*box, "sizes", "a chunk"));
      RT_TRY_SET(part.offsets, tree_.shape(offsets, "a chunk's offsets"));
      RT_TRY_SET(part.sizes, tree_.shape(sizes, "a chunk's sizes"));
      const auto place = places_.find({saved, part.offsets});
      if (place == places_.end()) {
        return corrupt(fmt::format("no file is said to hold the chunk at {}", to_string(part.offsets)));
      }
      part.file = place->second.file;
      part.begin = place->second.begin;
      part.bytes = place->second.bytes;
      out->chunks.push_back(std::move(part));
    }
    return check_cover(*out);
  }

  /// Where each chunk lies: MetadataIndex -> _StorageInfo.
  Status read_places(Id id) {
    RT_TRY_SET(const Dict* storage, tree_.dict(id, "storage_data"));
    for (const auto& [key, value] : *storage) {
      RT_TRY_SET(const Dict* index, tree_.fields(key, "MetadataIndex", "an index of storage_data"));
      RT_TRY_SET(const Id fqn, tree_.field(*index, "fqn", "an index of storage_data"));
      RT_TRY_SET(const std::string_view name, tree_.string(fqn, "the name of an index"));
      const Id offset = tree_.find(*index, "offset");
      Shape offsets;  // empty: no tensor, or one of a single number
      if (offset != kNothing && tree_.kind(offset) != Kind::kNone) {
        RT_TRY_SET(offsets, tree_.shape(offset, "the offset of an index"));
      }
      RT_TRY_SET(const Dict* info, tree_.fields(value, "_StorageInfo", "a value of storage_data"));
      Place place;
      RT_TRY_SET(const Id path, tree_.field(*info, "relative_path", "a _StorageInfo"));
      RT_TRY_SET(const std::string_view file, tree_.string(path, "a file's name"));
      RT_TRY_SET(const Id begin, tree_.field(*info, "offset", "a _StorageInfo"));
      RT_TRY_SET(place.begin, tree_.integer(begin, "a chunk's place"));
      RT_TRY_SET(const Id bytes, tree_.field(*info, "length", "a _StorageInfo"));
      RT_TRY_SET(place.bytes, tree_.integer(bytes, "a chunk's length"));
      const Id transforms = tree_.find(*info, "transform_descriptors");
      if (transforms != kNothing && tree_.kind(transforms) != Kind::kNone) {
        RT_TRY_SET(const std::vector<Id>* how, tree_.items(transforms, "transform_descriptors"));
        if (!how->empty()) return unsupported("its chunks are transformed (compressed, for one); save it without");
      }
      const bool plain =
          !file.empty() && file != "." && file != ".." && file.find('/') == file.npos && file.find('\0') == file.npos;
      if (!plain) return corrupt(fmt::format("\"{}\" is no name of a file in its folder", printable(file)));
      if (place.begin < 0 || place.bytes < 0 || place.begin > kMaxElems || place.bytes > kMaxElems) {
        return corrupt(fmt::format("{} bytes at {} of {}", place.bytes, place.begin, printable(file)));
      }
      place.file = std::string(file);
      places_[{std::string(name), std::move(offsets)}] = std::move(place);
    }
    return {};
  }

  /// planner_data: from the flat names to the keys of the nested dicts that were saved. Other things stand there too.
  Status read_paths(Id id) {
    if (id == kNothing || tree_.kind(id) != Kind::kDict) return {};
    RT_TRY_SET(const Dict* flat, tree_.dict(id, "planner_data"));
    for (const auto& [key, value] : *flat) {
      if (tree_.kind(key) != Kind::kString || tree_.kind(value) != Kind::kTuple) continue;
      RT_TRY_SET(const std::vector<Id>* keys, tree_.items(value, "planner_data"));
      std::vector<std::string_view> parts;
      for (const Id part : *keys) {
        if (tree_.kind(part) != Kind::kString) break;
        RT_TRY_SET(const std::string_view key_text, tree_.string(part, "planner_data"));
        parts.push_back(key_text);
      }
      size_t model = 0;  // its key, which may lie in the dict of the application's state
      while (model < parts.size() && is_wrapper(parts[model]) && parts[model] != "module") ++model;
      if (model + 1 >= parts.size()) continue;
      if (parts[model] != "model" && parts[model] != "module" && parts[model] != "state_dict") continue;
      const std::string name = fmt::format("{}", fmt::join(parts.begin() + model + 1, parts.end(), "."));
      RT_TRY_SET(const std::string_view saved, tree_.string(key, "planner_data"));
      inner_[std::string(saved)] = std::move(name);
    }
    return {};
  }

  /// No value: it is not of the model.
  std::optional<std::string> name_of(const std::string& saved) const {
    if (inner_.empty()) return saved;
    const auto found = inner_.find(saved);
    return found == inner_.end() ? std::nullopt : std::optional(found->second);
  }

  const PickleTree& tree_;
  std::map<std::pair<std::string, Shape>, Place> places_;
  std::map<std::string, std::string> inner_;  // what lies under model, module or state_dict
};

}  // namespace

bool is_passed_dtype(std::string_view dtype) {
  return dtype == "C64" || dtype == "C128" || dtype == "U16" || dtype == "U32" || dtype == "U64";
}

Result<DistIndex> read_dist_index(std::string_view pickle) {
  RT_TRY_SET(const PickleTree tree, PickleTree::read(pickle, kPolicy));
  return Reader(tree).run(true);
}

Result<std::vector<DistTensor>> read_dist_metadata(std::string_view pickle) {
  RT_TRY_SET(const PickleTree tree, PickleTree::read(pickle, kPolicy));
  RT_TRY_SET(DistIndex index, Reader(tree).run(false));
  return std::move(index.model);
}

}  // namespace cairn::convert
