#include "converters/unpickler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "converters/pickle_reader.h"
#include "converters/safetensors.h"

namespace cairn::convert {
namespace {

constexpr int64_t kMaxPickleBytes = int64_t{64} << 20;
constexpr size_t kMaxStack = 4096, kMaxValues = size_t{8} << 20, kMaxTensors = size_t{1} << 20;
constexpr int64_t kMaxString = 64 << 10, kMaxRank = 8;
constexpr int kMaxNesting = 16;  // of dicts, in the result

/// Operations by code; those that are carried out below are a part of them.
constexpr std::pair<uint8_t, std::string_view> kOperations[] = {{'(', "MARK"},
                                                                {'.', "STOP"},
                                                                {'0', "POP"},
                                                                {'1', "POP_MARK"},
                                                                {'2', "DUP"},
                                                                {'F', "FLOAT"},
                                                                {'I', "INT"},
                                                                {'J', "BININT"},
                                                                {'K', "BININT1"},
                                                                {'L', "LONG"},
                                                                {'M', "BININT2"},
                                                                {'N', "NONE"},
                                                                {'P', "PERSID"},
                                                                {'Q', "BINPERSID"},
                                                                {'R', "REDUCE"},
                                                                {'S', "STRING"},
                                                                {'T', "BINSTRING"},
                                                                {'U', "SHORT_BINSTRING"},
                                                                {'V', "UNICODE"},
                                                                {'X', "BINUNICODE"},
                                                                {'a', "APPEND"},
                                                                {'b', "BUILD"},
                                                                {'c', "GLOBAL"},
                                                                {'d', "DICT"},
                                                                {'}', "EMPTY_DICT"},
                                                                {'e', "APPENDS"},
                                                                {'g', "GET"},
                                                                {'h', "BINGET"},
                                                                {'i', "INST"},
                                                                {'j', "LONG_BINGET"},
                                                                {'l', "LIST"},
                                                                {']', "EMPTY_LIST"},
                                                                {'o', "OBJ"},
                                                                {'p', "PUT"},
                                                                {'q', "BINPUT"},
                                                                {'r', "LONG_BINPUT"},
                                                                {'s', "SETITEM"},
                                                                {'t', "TUPLE"},
                                                                {')', "EMPTY_TUPLE"},
                                                                {'u', "SETITEMS"},
                                                                {'G', "BINFLOAT"},
                                                                {0x80, "PROTO"},
                                                                {0x81, "NEWOBJ"},
                                                                {0x82, "EXT1"},
                                                                {0x83, "EXT2"},
                                                                {0x84, "EXT4"},
                                                                {0x85, "TUPLE1"},
                                                                {0x86, "TUPLE2"},
                                                                {0x87, "TUPLE3"},
                                                                {0x88, "NEWTRUE"},
                                                                {0x89, "NEWFALSE"},
                                                                {0x8a, "LONG1"},
                                                                {0x8b, "LONG4"},
                                                                {'B', "BINBYTES"},
                                                                {'C', "SHORT_BINBYTES"},
                                                                {0x8c, "SHORT_BINUNICODE"},
                                                                {0x8d, "BINUNICODE8"},
                                                                {0x8e, "BINBYTES8"},
                                                                {0x8f, "EMPTY_SET"},
                                                                {0x90, "ADDITEMS"},
                                                                {0x91, "FROZENSET"},
                                                                {0x92, "NEWOBJ_EX"},
                                                                {0x93, "STACK_GLOBAL"},
                                                                {0x94, "MEMOIZE"},
                                                                {0x95, "FRAME"},
                                                                {0x96, "BYTEARRAY8"},
                                                                {0x97, "NEXT_BUFFER"},
                                                                {0x98, "READONLY_BUFFER"}};

std::string operation_name(uint8_t code) {
  for (const auto& [known, name] : kOperations) {
    if (known == code) return std::string(name);
  }
  return fmt::format("0x{:02x}", code);
}

enum class Global { kOrderedDict, kRebuildTensor, kRebuildParameter, kStorage };
struct GlobalRow {
  std::string_view module, name;
  Global global;
  std::string_view dtype;  // of a storage
};
constexpr GlobalRow kGlobals[] = {{"collections", "OrderedDict", Global::kOrderedDict, ""},
                                  {"torch._utils", "_rebuild_tensor_v2", Global::kRebuildTensor, ""},
                                  {"torch._utils", "_rebuild_parameter", Global::kRebuildParameter, ""},
                                  {"torch", "FloatStorage", Global::kStorage, "F32"},
                                  {"torch", "HalfStorage", Global::kStorage, "F16"},
                                  {"torch", "BFloat16Storage", Global::kStorage, "BF16"},
                                  {"torch", "DoubleStorage", Global::kStorage, "F64"},
                                  {"torch", "LongStorage", Global::kStorage, "I64"},
                                  {"torch", "IntStorage", Global::kStorage, "I32"},
                                  {"torch", "ShortStorage", Global::kStorage, "I16"},
                                  {"torch", "CharStorage", Global::kStorage, "I8"},
                                  {"torch", "ByteStorage", Global::kStorage, "U8"},
                                  {"torch", "BoolStorage", Global::kStorage, "BOOL"}};

enum class Kind : uint8_t {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kTuple,
  kList,
  kDict,
  kGlobal,
  kStorage,
  kTensor,
  kMark,
  kOther
};
constexpr std::string_view kKindNames[] = {"None",     "a bool", "a whole number", "a number", "a string",
                                           "a tuple",  "a list", "a dict",         "a global", "a storage",
                                           "a tensor", "a mark", "an object"};

using Id = uint32_t;

/// Scalars are here; of the others `number` is an index into their table.
struct Value {
  Kind kind = Kind::kNone;
  int64_t number = 0;
};

struct Dict {
  bool ordered = false;
  std::vector<std::pair<std::string_view, Id>> items;
  std::unordered_set<std::string_view> keys;  // made when there are many
};

struct Storage {
  std::string_view key, dtype;
  int64_t count = 0;
  bool operator==(const Storage&) const = default;
};

struct Tensor {
  int64_t storage = 0, offset = 0;
  Shape shape, strides;
};

class Machine : PickleReader {
 public:
  Machine(std::string_view text, Pickle kind)
      : PickleReader(text), training_(kind == Pickle::kTraining), lone_(kind == Pickle::kTensor) {}

  Result<std::vector<PickledTensor>> run() {
    Result<std::vector<PickledTensor>> out = interpret();
    if (!out.ok()) return std::move(out).error().with(fmt::format("byte {}", op_at()));
    return out;
  }

 private:
  Result<std::vector<PickledTensor>> interpret() {
    if (size() > kMaxPickleBytes)
      return corrupt(fmt::format("{} bytes of pickle; at most {} are expected", size(), kMaxPickleBytes));
    while (!stopped_) {
      RT_TRY_SET(const uint8_t code, next());
      RT_TRY(step(code));
      if (stack_.size() > kMaxStack) return corrupt("its stack grows above any state dict's");
      if (values_.size() > kMaxValues) return corrupt("it makes more values than any state dict has");
    }
    return collect();
  }

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
    if (stack_.empty() || values_[stack_.back()].kind == Kind::kMark) return corrupt("it takes from an empty stack");
    const Id out = stack_.back();
    stack_.pop_back();
    return out;
  }
  Result<Id> top() {
    if (stack_.empty() || values_[stack_.back()].kind == Kind::kMark) return corrupt("it looks at an empty stack");
    return stack_.back();
  }
  Result<std::vector<Id>> pop_to_mark() {
    size_t k = stack_.size();
    while (k > 0 && values_[stack_[k - 1]].kind != Kind::kMark) --k;
    if (k == 0) return corrupt("a mark is missing");
    std::vector<Id> out(stack_.begin() + static_cast<std::ptrdiff_t>(k), stack_.end());
    stack_.resize(k - 1);
    return out;
  }
  Status push_tuple(size_t count) {
    std::vector<Id> items(count);
    for (size_t k = count; k-- > 0;) {
      RT_TRY_SET(items[k], pop());
    }
    push_in(tuples_, Kind::kTuple, std::move(items));
    return {};
  }

  // --- typed looks at a value ---------------------------------------------------------------------------------------
  Error wrong(std::string_view what, Id id, std::string_view expected) const {
    return corrupt(
        fmt::format("{} is {}, expected {}", what, kKindNames[static_cast<size_t>(values_[id].kind)], expected));
  }
  Result<int64_t> integer(Id id, std::string_view what) const {
    if (values_[id].kind != Kind::kInt) return wrong(what, id, "a whole number");
    return values_[id].number;
  }
  Result<std::string_view> string(Id id, std::string_view what) const {
    if (values_[id].kind != Kind::kString) return wrong(what, id, "a string");
    return strings_[static_cast<size_t>(values_[id].number)];
  }
  Result<const std::vector<Id>*> tuple(Id id, std::string_view what) const {
    if (values_[id].kind != Kind::kTuple) return wrong(what, id, "a tuple");
    return &tuples_[static_cast<size_t>(values_[id].number)];
  }
  Result<Shape> extents(Id id, std::string_view what) const {
    RT_TRY_SET(const std::vector<Id>* items, tuple(id, what));
    if (static_cast<int64_t>(items->size()) > kMaxRank)
      return corrupt(fmt::format("{} has {} numbers, at most {} are expected", what, items->size(), kMaxRank));
    Shape out;
    for (const Id item : *items) {
      RT_TRY_SET(const int64_t extent, integer(item, what));
      if (extent < 0) return corrupt(fmt::format("{} holds {}", what, extent));
      out.push_back(extent);
    }
    return out;
  }
  bool is_empty_dict(Id id) const {
    return values_[id].kind == Kind::kDict && dicts_[static_cast<size_t>(values_[id].number)].items.empty();
  }

  // --- operations ---------------------------------------------------------------------------------------------------
  Status step(uint8_t code) {
    switch (code) {
      case 0x80: {
        RT_TRY_SET(const uint8_t protocol, byte());
        if (protocol != 2 || op_at() != 0)
          return unsupported(fmt::format("PROTO {}: torch.save writes pickles of protocol 2", protocol));
        return {};
      }
      case '.':
        stopped_ = true;
        return {};
      case 'N':
        push(Kind::kNone);
        return {};
      case 0x88:
      case 0x89:
        push(Kind::kBool, code == 0x88);
        return {};
      case 'J': {
        RT_TRY_SET(const uint64_t n, number(4));
        push(Kind::kInt, static_cast<int32_t>(static_cast<uint32_t>(n)));
        return {};
      }
      case 'K':
      case 'M': {
        RT_TRY_SET(const uint64_t n, number(code == 'K' ? 1 : 2));
        push(Kind::kInt, static_cast<int64_t>(n));
        return {};
      }
      case 0x8a:
        return push_long();
      case 'G':
        RT_TRY(take(8));
        push(Kind::kFloat);  // its value is of no interest
        return {};
      case 'X': {
        RT_TRY_SET(const uint64_t bytes, number(4));
        return push_string(static_cast<int64_t>(bytes));
      }
      case 'U': {
        RT_TRY_SET(const uint64_t bytes, number(1));
        return push_string(static_cast<int64_t>(bytes));
      }
      case '(':
        push(Kind::kMark);
        return {};
      case ')':
        return push_tuple(0);
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple(static_cast<size_t>(code - 0x84));
      case 't': {
        RT_TRY_SET(std::vector<Id> items, pop_to_mark());
        push_in(tuples_, Kind::kTuple, std::move(items));
        return {};
      }
      case ']':
        push(Kind::kList);  // what is in a list is of no interest: no tensor of a state dict lies in one
        return {};
      case 'a':
        return append(1);
      case 'e':
        return append(0);
      case '}':
        push_in(dicts_, Kind::kDict, Dict{});
        return {};
      case 's':
      case 'u':
        return set_items(code == 's');
      case 'q':
      case 'r': {
        RT_TRY_SET(const uint64_t slot, number(code == 'q' ? 1 : 4));
        RT_TRY_SET(const Id value, top());
        if (slot >= kMaxValues) return corrupt(fmt::format("memo {} is above any state dict's", slot));
        if (slot >= memo_.size()) {
          // A writer counts up; whoever leaps would have us fill the room between.
          if (slot > memo_.size() + 1024) return corrupt(fmt::format("memo {} after {}", slot, memo_.size()));
          memo_.resize(slot + 1, kNothing);
        }
        memo_[slot] = value;
        return {};
      }
      case 'h':
      case 'j': {
        RT_TRY_SET(const uint64_t slot, number(code == 'h' ? 1 : 4));
        if (slot >= memo_.size() || memo_[slot] == kNothing)
          return corrupt(fmt::format("memo {} was never written", slot));
        stack_.push_back(memo_[slot]);
        return {};
      }
      case 'c':
        return push_global();
      case 'Q':
        return persistent();
      case 'R':
        return reduce();
      case 'b':
        return build();
      case 0x81:  // NEWOBJ
        if (training_) return call_other();
        [[fallthrough]];
      default:
        return unsupported(
            fmt::format("operation {} is not allowed: a state dict does not need it", operation_name(code)));
    }
  }

  /// An object that is made of something by somebody: nothing to us.
  Status call_other() {
    RT_TRY(pop());
    RT_TRY(pop());
    push(Kind::kOther);
    return {};
  }
  bool is_other(Id id) const { return training_ && values_[id].kind == Kind::kOther; }

  Status push_long() {
    RT_TRY_SET(const uint8_t bytes, byte());
    if (training_ && bytes > 8) {  // of a random state
      RT_TRY(take(bytes));
      push(Kind::kOther);
      return {};
    }
    if (bytes > 8) return corrupt(fmt::format("a number of {} bytes", bytes));
    RT_TRY_SET(uint64_t n, number(bytes));
    if (bytes > 0 && bytes < 8 && ((n >> (8 * bytes - 1)) & 1) != 0) n |= ~uint64_t{0} << (8 * bytes);
    push(Kind::kInt, static_cast<int64_t>(n));
    return {};
  }

  Status push_string(int64_t bytes) {
    if (bytes > kMaxString) return corrupt(fmt::format("a string of {} bytes", bytes));
    RT_TRY_SET(const std::string_view text, take(bytes));
    push_in(strings_, Kind::kString, text);
    return {};
  }

  Status append(size_t count) {
    if (count == 1) {
      RT_TRY(pop());
    } else {
      RT_TRY(pop_to_mark());
    }
    RT_TRY_SET(const Id list, top());
    if (is_other(list)) return {};
    if (values_[list].kind != Kind::kList) return wrong("what is appended to", list, "a list");
    return {};
  }

  Status set_items(bool one) {
    std::vector<Id> items;
    if (one) {
      items.resize(2);
      RT_TRY_SET(items[1], pop());
      RT_TRY_SET(items[0], pop());
    } else {
      RT_TRY_SET(items, pop_to_mark());
    }
    RT_TRY_SET(const Id target, top());
    if (is_other(target)) return {};
    if (values_[target].kind != Kind::kDict) return wrong("what items are set of", target, "a dict");
    if (items.size() % 2 != 0) return corrupt("a key without a value");
    Dict& dict = dicts_[static_cast<size_t>(values_[target].number)];
    constexpr size_t kMany = 16;
    for (size_t k = 0; k < items.size(); k += 2) {
      // Numbers as keys are an optimizer's; whoever is looked at below has names.
      if (values_[items[k]].kind == Kind::kInt) continue;
      if (training_ && values_[items[k]].kind != Kind::kString) continue;
      RT_TRY_SET(const std::string_view key, string(items[k], "the key of a dict"));
      bool doubled = false;
      if (dict.items.size() < kMany) {
        doubled =
            std::any_of(dict.items.begin(), dict.items.end(), [&](const auto& item) { return item.first == key; });
      } else {
        if (dict.keys.empty()) {
          for (const auto& [known, unused] : dict.items) dict.keys.insert(known);
        }
        doubled = !dict.keys.insert(key).second;
      }
      if (doubled) return corrupt(fmt::format("\"{}\" is there twice", printable(key)));
      dict.items.emplace_back(key, items[k + 1]);
    }
    return {};
  }

  Status push_global() {
    RT_TRY_SET(const std::string_view module, line());
    RT_TRY_SET(const std::string_view name, line());
    for (size_t k = 0; k < std::size(kGlobals); ++k) {
      if (kGlobals[k].module != module || kGlobals[k].name != name) continue;
      push(Kind::kGlobal, static_cast<int64_t>(k));
      return {};
    }
    if (training_) {
      push(Kind::kOther);
      return {};
    }
    return unsupported(fmt::format("global \"{} {}\" is not allowed: a state dict does not need it; nothing was run",
                                   printable(module), printable(name)));
  }

  Result<GlobalRow> global(Id id, std::string_view what) const {
    if (values_[id].kind != Kind::kGlobal) return wrong(what, id, "a global");
    return kGlobals[static_cast<size_t>(values_[id].number)];
  }

  /// ('storage', class, key, place, count)
  Status persistent() {
    RT_TRY_SET(const Id id, pop());
    RT_TRY_SET(const std::vector<Id>* items, tuple(id, "a persistent id"));
    if (items->size() != 5) return corrupt(fmt::format("a persistent id of {} parts, expected 5", items->size()));
    RT_TRY_SET(const std::string_view tag, string((*items)[0], "the tag of a persistent id"));
    if (tag != "storage")
      return unsupported(fmt::format("a persistent id \"{}\", expected \"storage\"", printable(tag)));
    RT_TRY_SET(const GlobalRow type, global((*items)[1], "the class of a storage"));
    if (type.global != Global::kStorage)
      return corrupt(fmt::format("{} {} is no class of storages", type.module, type.name));
    RT_TRY_SET(const std::string_view key, string((*items)[2], "the key of a storage"));
    RT_TRY(string((*items)[3], "the place of a storage"));
    RT_TRY_SET(const int64_t count, integer((*items)[4], "the size of a storage"));
    if (key.empty() || key.size() > 20 || key.find_first_not_of("0123456789") != key.npos)
      return corrupt(fmt::format("\"{}\" is no key of a storage", printable(key)));
    if (count < 0 || count > std::numeric_limits<int64_t>::max() / 8)
      return corrupt(fmt::format("storage {} of {} elements", key, count));
    const Storage storage{key, type.dtype, count};
    const auto [known, is_new] = by_key_.emplace(key, static_cast<int64_t>(storages_.size()));
    if (!is_new && storages_[static_cast<size_t>(known->second)] != storage) {
      const Storage& before = storages_[static_cast<size_t>(known->second)];
      return corrupt(fmt::format("storage {} is {} of {} elements here and {} of {} before", key, storage.dtype,
                                 storage.count, before.dtype, before.count));
    }
    if (is_new) storages_.push_back(storage);
    push(Kind::kStorage, known->second);
    return {};
  }

  Status reduce() {
    RT_TRY_SET(const Id arguments_id, pop());
    RT_TRY_SET(const Id callee, pop());
    if (is_other(callee)) {
      push(Kind::kOther);
      return {};
    }
    RT_TRY_SET(const GlobalRow called, global(callee, "what is called"));
    RT_TRY_SET(const std::vector<Id>* arguments, tuple(arguments_id, "the arguments of a call"));
    switch (called.global) {
      case Global::kOrderedDict:
        if (!arguments->empty()) return unsupported("an OrderedDict made from something");
        push_in(dicts_, Kind::kDict, Dict{.ordered = true});
        return {};
      case Global::kRebuildTensor:
        return rebuild(std::vector<Id>(*arguments));
      case Global::kRebuildParameter: {  // (tensor, requires_grad, hooks)
        const auto& items = *arguments;
        if (items.size() != 3 || values_[items[0]].kind != Kind::kTensor || values_[items[1]].kind != Kind::kBool ||
            !is_empty_dict(items[2]))
          return corrupt("_rebuild_parameter takes a tensor, a bool and an empty dict");
        stack_.push_back(items[0]);
        return {};
      }
      case Global::kStorage:
        break;
    }
    return unsupported(fmt::format("a call of {} {}", called.module, called.name));
  }

  /// (storage, offset, sizes, strides, requires_grad, hooks[, metadata])
  Status rebuild(const std::vector<Id>& items) {
    if ((items.size() != 6 && items.size() != 7) || values_[items[0]].kind != Kind::kStorage ||
        values_[items[4]].kind != Kind::kBool || !is_empty_dict(items[5]) ||
        (items.size() == 7 && values_[items[6]].kind != Kind::kNone && !is_empty_dict(items[6])))
      return corrupt("_rebuild_tensor_v2 takes a storage, an offset, sizes, strides, a bool and an empty dict");
    Tensor tensor{.storage = values_[items[0]].number};
    RT_TRY_SET(tensor.offset, integer(items[1], "a tensor's offset"));
    RT_TRY_SET(tensor.shape, extents(items[2], "a tensor's size"));
    RT_TRY_SET(tensor.strides, extents(items[3], "a tensor's stride"));
    if (tensor.shape.size() != tensor.strides.size()) return corrupt("a tensor has more or fewer strides than sizes");
    const Storage& storage = storages_[static_cast<size_t>(tensor.storage)];
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
    push_in(tensors_, Kind::kTensor, std::move(tensor));
    return {};
  }

  /// The versions of modules that a state dict carries: dropped.
  Status build() {
    RT_TRY_SET(const Id state, pop());
    RT_TRY_SET(const Id target, top());
    if (is_other(target)) return {};
    if (values_[target].kind != Kind::kDict || !dicts_[static_cast<size_t>(values_[target].number)].ordered)
      return wrong("what BUILD sets the state of", target, "an OrderedDict");
    if (values_[state].kind != Kind::kDict) return wrong("the state that BUILD sets", state, "a dict");
    const Dict& dict = dicts_[static_cast<size_t>(values_[state].number)];
    if (dict.items.size() != 1 || dict.items[0].first != "_metadata")
      return unsupported("BUILD with anything but a state dict's _metadata");
    return {};
  }

  // --- the result ---------------------------------------------------------------------------------------------------
  Result<std::vector<PickledTensor>> collect() {
    if (stack_.size() != 1) return corrupt(fmt::format("it ends with {} values, expected one", stack_.size()));
    if (lone_) {
      if (values_[stack_[0]].kind != Kind::kTensor) return wrong("the result", stack_[0], "a tensor");
      return std::vector{named(stack_[0], "")};
    }
    if (values_[stack_[0]].kind != Kind::kDict) return wrong("the result", stack_[0], "a dict of tensors");
    const Dict* root = &dicts_[static_cast<size_t>(values_[stack_[0]].number)];
    const Dict* inner = nullptr;
    for (const auto& [key, value] : root->items) {
      if (key != "state_dict" && key != "model" && key != "module") continue;
      if (values_[value].kind != Kind::kDict) continue;
      if (inner != nullptr) return corrupt("the result has several of the keys state_dict, model and module");
      inner = &dicts_[static_cast<size_t>(values_[value].number)];
    }
    std::vector<PickledTensor> out;
    std::set<std::string> names;
    RT_TRY(flatten(inner != nullptr ? *inner : *root, "", 0, names, out));
    if (out.empty()) return corrupt("it holds no tensors");
    return out;
  }

  PickledTensor named(Id id, const std::string& name) const {
    const Tensor& tensor = tensors_[static_cast<size_t>(values_[id].number)];
    const Storage& storage = storages_[static_cast<size_t>(tensor.storage)];
    return {
        name,          std::string(storage.key), std::string(storage.dtype), storage.count, tensor.offset, tensor.shape,
        tensor.strides};
  }

  Status flatten(const Dict& dict, const std::string& prefix, int depth, std::set<std::string>& names,
                 std::vector<PickledTensor>& out) {
    if (depth > kMaxNesting) return corrupt(fmt::format("dicts are nested deeper than {}", kMaxNesting));
    for (const auto& [key, value] : dict.items) {
      if (++visited_ > kMaxTensors) return corrupt("more entries than any state dict has");
      const std::string name = prefix + std::string(key);
      if (values_[value].kind == Kind::kDict) {
        RT_TRY(flatten(dicts_[static_cast<size_t>(values_[value].number)], name + ".", depth + 1, names, out));
        continue;
      }
      if (training_ && values_[value].kind != Kind::kTensor) continue;
      if (values_[value].kind != Kind::kTensor) return wrong(fmt::format("\"{}\"", printable(name)), value, "a tensor");
      if (name.size() > 1024 ||
          std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
        return corrupt(fmt::format("\"{}\" cannot be a tensor's name", printable(name)));
      if (!names.insert(name).second) return corrupt(fmt::format("\"{}\" is there twice", printable(name)));
      out.push_back(named(value, name));
    }
    return {};
  }

  static constexpr Id kNothing = std::numeric_limits<Id>::max();
  bool training_ = false, lone_ = false;
  bool stopped_ = false;
  std::vector<Value> values_;
  std::vector<Id> stack_, memo_;
  std::vector<std::string_view> strings_;  // into the pickle
  std::vector<std::vector<Id>> tuples_;
  std::vector<Dict> dicts_;
  std::vector<Storage> storages_;
  std::vector<Tensor> tensors_;
  std::map<std::string_view, int64_t> by_key_;
  size_t visited_ = 0;
};

}  // namespace

Result<std::vector<PickledTensor>> unpickle_state_dict(std::string_view pickle, Pickle kind) {
  return Machine(pickle, kind).run();
}

}  // namespace cairn::convert
