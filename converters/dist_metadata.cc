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
#include "converters/pickle_reader.h"

namespace cairn::convert {
namespace {

constexpr int64_t kMaxPickleBytes = int64_t{256} << 20;
constexpr size_t kMaxStack = 4096, kMaxValues = size_t{32} << 20;
constexpr int64_t kMaxString = 64 << 10, kMaxRank = 8;
constexpr int64_t kMaxElems = std::numeric_limits<int64_t>::max() / 16;

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
                                                                     {"float8_e5m2", "F8_E5M2"}};

enum class Kind : uint8_t { kNone, kBool, kInt, kFloat, kString, kTuple, kList, kDict, kName, kObject, kMark };
constexpr std::string_view kKindNames[] = {"None",   "a bool", "a whole number", "a number",  "a string", "a tuple",
                                           "a list", "a dict", "a class",        "an object", "a mark"};

using Id = uint32_t;
constexpr Id kNothing = std::numeric_limits<Id>::max();

/// Scalars are here; of the others `number` is an index into their table.
struct Value {
  Kind kind = Kind::kNone;
  int64_t number = 0;
};
struct Name {
  std::string_view module, name;
};
/// What a class was called with, and the state that was set then.
struct Object {
  Name of;
  Id arguments = kNothing, state = kNothing;
};
using Dict = std::vector<std::pair<Id, Id>>;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// The pickle as a tree of plain values.
class Tree : PickleReader {
 public:
  explicit Tree(std::string_view text) : PickleReader(text) {}

  /// Returns the value that the pickle stands for.
  Result<Id> run() {
    if (size() > kMaxPickleBytes) {
      return corrupt(fmt::format("{} bytes of pickle; at most {} are expected", size(), kMaxPickleBytes));
    }
    while (!stopped_) {
      RT_TRY_SET(const uint8_t code, next());
      Status done = step(code);
      if (!done.ok()) return std::move(done).error().with(fmt::format("byte {}", op_at()));
      if (stack_.size() > kMaxStack) return corrupt(fmt::format("byte {}: its stack grows without end", op_at()));
      if (values_.size() > kMaxValues) return corrupt(fmt::format("byte {}: it makes too many values", op_at()));
    }
    if (stack_.size() != 1) return corrupt(fmt::format("it ends with {} values, expected one", stack_.size()));
    return stack_[0];
  }

  Kind kind(Id id) const { return values_[id].kind; }
  Error wrong(std::string_view what, Id id, std::string_view expected) const {
    return corrupt(fmt::format("{} is {}, expected {}", what, kKindNames[static_cast<size_t>(kind(id))], expected));
  }
  Result<int64_t> integer(Id id, std::string_view what) const {
    if (kind(id) != Kind::kInt) return wrong(what, id, "a whole number");
    return values_[id].number;
  }
  Result<std::string_view> string(Id id, std::string_view what) const {
    if (kind(id) != Kind::kString) return wrong(what, id, "a string");
    return strings_[static_cast<size_t>(values_[id].number)];
  }
  Result<const std::vector<Id>*> items(Id id, std::string_view what) const {
    if (kind(id) != Kind::kTuple && kind(id) != Kind::kList) return wrong(what, id, "a tuple or a list");
    return &sequences_[static_cast<size_t>(values_[id].number)];
  }
  Result<const Dict*> dict(Id id, std::string_view what) const {
    if (kind(id) != Kind::kDict) return wrong(what, id, "a dict");
    return &dicts_[static_cast<size_t>(values_[id].number)];
  }
  Result<Name> name(Id id, std::string_view what) const {
    if (kind(id) != Kind::kName) return wrong(what, id, "a class");
    return names_[static_cast<size_t>(values_[id].number)];
  }
  Result<const Object*> object(Id id, std::string_view what) const {
    if (kind(id) != Kind::kObject) return wrong(what, id, "an object");
    return &objects_[static_cast<size_t>(values_[id].number)];
  }
  /// An object of that class, whose state is a dict.
  Result<const Dict*> fields(Id id, std::string_view of, std::string_view what) const {
    RT_TRY_SET(const Object* found, object(id, what));
    if (found->of.name != of) {
      return unsupported(fmt::format("{} is an object of {}.{}, expected {}", what, printable(found->of.module),
                                     printable(found->of.name), of));
    }
    if (found->state == kNothing) return corrupt(fmt::format("{} has no fields", what));
    return dict(found->state, what);
  }
  Result<Id> field(const Dict& fields, std::string_view name, std::string_view what) const {
    const Id found = find(fields, name);
    if (found == kNothing) return corrupt(fmt::format("{} has no field {}", what, name));
    return found;
  }
  Id find(const Dict& fields, std::string_view name) const {
    for (const auto& [key, value] : fields) {
      if (kind(key) == Kind::kString && strings_[static_cast<size_t>(values_[key].number)] == name) return value;
    }
    return kNothing;
  }
  /// torch.Size
  Result<Shape> shape(Id id, std::string_view what) const {
    RT_TRY_SET(const Object* size, object(id, what));
    if (size->of.module != "torch" || size->of.name != "Size" || size->arguments == kNothing) {
      return corrupt(fmt::format("{} is an object of {}.{}, expected torch.Size", what, printable(size->of.module),
                                 printable(size->of.name)));
    }
    RT_TRY_SET(const std::vector<Id>* arguments, items(size->arguments, what));
    if (arguments->size() != 1) return corrupt(fmt::format("{} is made from {} values", what, arguments->size()));
    RT_TRY_SET(const std::vector<Id>* extents, items(arguments->front(), what));
    if (static_cast<int64_t>(extents->size()) > kMaxRank) {
      return corrupt(fmt::format("{} has {} numbers, at most {} are expected", what, extents->size(), kMaxRank));
    }
    Shape out;
    for (const Id extent : *extents) {
      RT_TRY_SET(const int64_t n, integer(extent, what));
      if (n < 0) return corrupt(fmt::format("{} holds {}", what, n));
      out.push_back(n);
    }
    return out;
  }

 private:
  // --- the stack ----------------------------------------------------------------------------------------------------
  void push(Kind kind, int64_t number = 0) {
    stack_.push_back(static_cast<Id>(values_.size()));
    values_.push_back({kind, number});
  }
  template <typename T>
  void push_in(std::vector<T>& table, Kind kind, T value) {
    push(kind, static_cast<int64_t>(table.size()));
    table.push_back(std::move(value));
  }
  Result<Id> pop() {
    RT_TRY_SET(const Id out, top());
    stack_.pop_back();
    return out;
  }
  Result<Id> top() const {
    if (stack_.empty() || kind(stack_.back()) == Kind::kMark) return corrupt("it takes from an empty stack");
    return stack_.back();
  }
  Result<std::vector<Id>> pop_to_mark() {
    size_t k = stack_.size();
    while (k > 0 && kind(stack_[k - 1]) != Kind::kMark) --k;
    if (k == 0) return corrupt("a mark is missing");
    std::vector<Id> out(stack_.begin() + static_cast<std::ptrdiff_t>(k), stack_.end());
    stack_.resize(k - 1);
    return out;
  }
  Result<std::vector<Id>> pop_some(size_t count) {
    std::vector<Id> out(count);
    for (size_t k = count; k-- > 0;) {
      RT_TRY_SET(out[k], pop());
    }
    return out;
  }

  // --- operations ---------------------------------------------------------------------------------------------------
  Status step(uint8_t code) {
    switch (code) {
      case 0x80: {
        RT_TRY_SET(const uint64_t protocol, number(1));
        if (protocol < 2 || protocol > 5) return unsupported(fmt::format("a pickle of protocol {}", protocol));
        return {};
      }
      case 0x95:  // FRAME: how much to read at once
        return take_only(8);
      case '.':
        stopped_ = true;
        return {};
      case '(':
        push(Kind::kMark);
        return {};
      case 'N':
        push(Kind::kNone);
        return {};
      case 0x88:
      case 0x89:
        push(Kind::kBool, code == 0x88);
        return {};
      case 'K':
        return push_integer(1);
      case 'M':
        return push_integer(2);
      case 'J': {
        RT_TRY_SET(const uint64_t n, number(4));
        push(Kind::kInt, static_cast<int32_t>(static_cast<uint32_t>(n)));
        return {};
      }
      case 0x8a:
        return push_long();
      case 'G':
        push(Kind::kFloat);
        return take_only(8);
      case 0x8c:
        return push_string(1);
      case 'X':
        return push_string(4);
      case 'C':  // bytes are as good as text here: nothing looks at them
        return push_string(1);
      case 'B':
        return push_string(4);
      case ')':
        return push_sequence(Kind::kTuple, pop_some(0));
      case 0x85:
      case 0x86:
      case 0x87:
        return push_sequence(Kind::kTuple, pop_some(static_cast<size_t>(code - 0x84)));
      case 't':
        return push_sequence(Kind::kTuple, pop_to_mark());
      case ']':
      case 0x8f:  // a set: a list to us
        return push_sequence(Kind::kList, pop_some(0));
      case 'a':
        return append(pop_some(1));
      case 'e':
      case 0x90:
        return append(pop_to_mark());
      case '}':
        push_in(dicts_, Kind::kDict, Dict{});
        return {};
      case 's':
        return set_items(pop_some(2));
      case 'u':
        return set_items(pop_to_mark());
      case 'q':
        return remember(1);
      case 'r':
        return remember(4);
      case 0x94:
        return remember(0);
      case 'h':
        return recall(1);
      case 'j':
        return recall(4);
      case 'c': {
        RT_TRY_SET(const std::string_view module, line());
        RT_TRY_SET(const std::string_view name, line());
        return push_name({module, name});
      }
      case 0x93: {
        RT_TRY_SET(const std::vector<Id> parts, pop_some(2));
        RT_TRY_SET(const std::string_view module, string(parts[0], "a module's name"));
        RT_TRY_SET(const std::string_view name, string(parts[1], "a class's name"));
        return push_name({module, name});
      }
      case 'R':
      case 0x81:
        return make_object();
      case 'b':
        return build();
      default:
        return unsupported(fmt::format("operation 0x{:02x} is not allowed: no .metadata needs it", code));
    }
  }

  Status take_only(uint64_t bytes) {
    RT_TRY(take(bytes));
    return {};
  }
  Status push_integer(int bytes) {
    RT_TRY_SET(const uint64_t n, number(bytes));
    push(Kind::kInt, static_cast<int64_t>(n));
    return {};
  }
  Status push_long() {
    RT_TRY_SET(const uint64_t bytes, number(1));
    if (bytes > 8) return corrupt(fmt::format("a number of {} bytes", bytes));
    RT_TRY_SET(uint64_t n, number(static_cast<int>(bytes)));
    if (bytes > 0 && bytes < 8 && ((n >> (8 * bytes - 1)) & 1) != 0) n |= ~uint64_t{0} << (8 * bytes);
    push(Kind::kInt, static_cast<int64_t>(n));
    return {};
  }
  Status push_string(int length_bytes) {
    RT_TRY_SET(const uint64_t bytes, number(length_bytes));
    if (bytes > static_cast<uint64_t>(kMaxString)) return corrupt(fmt::format("a string of {} bytes", bytes));
    RT_TRY_SET(const std::string_view text, take(bytes));
    push_in(strings_, Kind::kString, text);
    return {};
  }
  Status push_sequence(Kind kind, Result<std::vector<Id>> items) {
    if (!items.ok()) return std::move(items).error();
    push_in(sequences_, kind, std::move(items).value());
    return {};
  }
  Status append(Result<std::vector<Id>> more) {
    if (!more.ok()) return std::move(more).error();
    RT_TRY_SET(const Id target, top());
    if (kind(target) == Kind::kObject) return {};  // a class that holds items: nothing to us
    if (kind(target) != Kind::kList) return wrong("what is appended to", target, "a list");
    std::vector<Id>& list = sequences_[static_cast<size_t>(values_[target].number)];
    list.insert(list.end(), more.value().begin(), more.value().end());
    return {};
  }
  Status set_items(Result<std::vector<Id>> more) {
    if (!more.ok()) return std::move(more).error();
    RT_TRY_SET(const Id target, top());
    if (kind(target) == Kind::kObject) return {};
    if (kind(target) != Kind::kDict) return wrong("what items are set of", target, "a dict");
    if (more.value().size() % 2 != 0) return corrupt("a key without a value");
    Dict& dict = dicts_[static_cast<size_t>(values_[target].number)];
    for (size_t k = 0; k < more.value().size(); k += 2) dict.emplace_back(more.value()[k], more.value()[k + 1]);
    return {};
  }
  Status remember(int bytes) {
    uint64_t slot = memo_.size();
    if (bytes > 0) {
      RT_TRY_SET(slot, number(bytes));
    }
    RT_TRY_SET(const Id value, top());
    if (slot > memo_.size() + 1024 || slot >= kMaxValues)
      return corrupt(fmt::format("memo {} after {}", slot, memo_.size()));
    if (slot >= memo_.size()) memo_.resize(slot + 1, kNothing);
    memo_[slot] = value;
    return {};
  }
  Status recall(int bytes) {
    RT_TRY_SET(const uint64_t slot, number(bytes));
    if (slot >= memo_.size() || memo_[slot] == kNothing) return corrupt(fmt::format("memo {} was never written", slot));
    stack_.push_back(memo_[slot]);
    return {};
  }
  Status push_name(Name name) {
    const bool known = std::ranges::any_of(kKnown, [&](const auto& row) {
      return row.first == name.module && (row.second == "*" || row.second == name.name);
    });
    const bool dtype =
        name.module == "torch" && std::ranges::any_of(kDtypes, [&](const auto& row) { return row.first == name.name; });
    if (!known && !dtype) {
      return unsupported(fmt::format("\"{} {}\" is not allowed: no .metadata needs it; nothing was run",
                                     printable(name.module), printable(name.name)));
    }
    push_in(names_, Kind::kName, name);
    return {};
  }
  /// Neither makes nor calls anything: notes what would have been.
  Status make_object() {
    RT_TRY_SET(const std::vector<Id> parts, pop_some(2));
    RT_TRY_SET(const Name of, name(parts[0], "what is called"));
    if (kind(parts[1]) != Kind::kTuple) return wrong("the arguments of a call", parts[1], "a tuple");
    push_in(objects_, Kind::kObject, Object{of, parts[1], kNothing});
    return {};
  }
  Status build() {
    RT_TRY_SET(const Id state, pop());
    RT_TRY_SET(const Id target, top());
    if (kind(target) != Kind::kObject) return wrong("what BUILD sets the state of", target, "an object");
    objects_[static_cast<size_t>(values_[target].number)].state = state;
    return {};
  }

  bool stopped_ = false;
  std::vector<Value> values_;
  std::vector<Id> stack_, memo_;
  std::vector<std::string_view> strings_;  // into the pickle
  std::vector<std::vector<Id>> sequences_;
  std::vector<Dict> dicts_;
  std::vector<Name> names_;
  std::vector<Object> objects_;
};

Result<std::string> dtype_of(const Tree& tree, Id properties) {
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
  for (size_t k = 0; k < tensor.chunks.size(); ++k) {
    const DistChunk& chunk = tensor.chunks[k];
    const auto told = [](const DistChunk& c) {
      return fmt::format("{} at {}", to_string(c.sizes), to_string(c.offsets));
    };
    bool inside = chunk.offsets.size() == dims && chunk.sizes.size() == dims;
    int64_t here = 1;
    for (size_t d = 0; d < dims && inside; ++d) {
      inside = chunk.offsets[d] <= tensor.shape[d] && chunk.sizes[d] <= tensor.shape[d] - chunk.offsets[d];
      here *= chunk.sizes[d];
    }
    if (!inside) return corrupt(fmt::format("a chunk {} leaves the tensor's {}", told(chunk), to_string(tensor.shape)));
    covered += here;
    for (size_t other = 0; other < k && here > 0; ++other) {
      const DistChunk& before = tensor.chunks[other];
      bool meet = true;
      for (size_t d = 0; d < dims; ++d) {
        meet = meet && chunk.offsets[d] < before.offsets[d] + before.sizes[d] &&
               before.offsets[d] < chunk.offsets[d] + chunk.sizes[d];
      }
      if (meet) return corrupt(fmt::format("chunks {} and {} overlap", told(before), told(chunk)));
    }
  }
  if (covered != elems) {
    return corrupt(
        fmt::format("its chunks hold {} elements of {}: a part of the checkpoint is missing", covered, elems));
  }
  return {};
}

class Reader {
 public:
  explicit Reader(std::string_view pickle) : tree_(pickle) {}

  Result<std::vector<DistTensor>> run() {
    RT_TRY_SET(const Id root, tree_.run());
    RT_TRY_SET(const Dict* metadata, tree_.fields(root, "Metadata", "the result"));
    RT_TRY_SET(const Id tensors_id, tree_.field(*metadata, "state_dict_metadata", "Metadata"));
    RT_TRY_SET(const Dict* tensors, tree_.dict(tensors_id, "state_dict_metadata"));
    RT_TRY_SET(const Id storage, tree_.field(*metadata, "storage_data", "Metadata"));
    RT_TRY(read_places(storage));
    RT_TRY(read_paths(tree_.find(*metadata, "planner_data")));
    std::vector<DistTensor> out;
    std::set<std::string> names;
    for (const auto& [key, value] : *tensors) {
      RT_TRY_SET(const std::string_view key_text, tree_.string(key, "a tensor's name"));
      const std::string saved(key_text);
      const std::optional<std::string> name = name_of(saved);
      RT_TRY_SET(const Object* kept, tree_.object(value, "a tensor's metadata"));
      if (!name || kept->of.name == "BytesStorageMetadata") continue;  // another part of the state, or no tensor
      if (name->size() > 1024 || printable(*name) != *name) {
        return corrupt(fmt::format("\"{}\" cannot be a tensor's name", printable(*name)));
      }
      if (!names.insert(*name).second) return corrupt(fmt::format("\"{}\" is there twice", *name));
      DistTensor tensor{.name = *name, .dtype = {}, .shape = {}, .chunks = {}};
      RT_TRY(read_tensor(saved, value, &tensor).with(*name));
      out.push_back(std::move(tensor));
    }
    if (out.empty()) return corrupt("it holds no tensors");
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
      if (offset == kNothing || tree_.kind(offset) == Kind::kNone) continue;  // no tensor
      RT_TRY_SET(Shape offsets, tree_.shape(offset, "the offset of an index"));
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

  Tree tree_;
  std::map<std::pair<std::string, Shape>, Place> places_;
  std::map<std::string, std::string> inner_;  // what lies under model, module or state_dict
};

}  // namespace

Result<std::vector<DistTensor>> read_dist_metadata(std::string_view pickle) { return Reader(pickle).run(); }

}  // namespace cairn::convert
