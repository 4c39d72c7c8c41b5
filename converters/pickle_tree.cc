#include "converters/pickle_tree.h"

#include <fmt/format.h>

#include <bit>

namespace cairn::convert {
namespace {

using Id = PickleTree::Id;
using Kind = PickleTree::Kind;

constexpr size_t kMaxStack = 4096;
constexpr int64_t kMaxString = 64 << 10, kMaxRank = 8;

constexpr std::string_view kKindNames[] = {"None",
                                           "a bool",
                                           "a whole number",
                                           "a number",
                                           "a string",
                                           "bytes",
                                           "a tuple",
                                           "a list",
                                           "a dict",
                                           "a class",
                                           "an object",
                                           "a storage",
                                           "a number beyond 64 bits",
                                           "a mark"};

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

/// Names of operations by code, for messages; those that are carried out below are a part of them.
constexpr std::pair<uint8_t, std::string_view> kOperationNames[] = {{'(', "MARK"},
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
  for (const auto& [known, name] : kOperationNames) {
    if (known == code) return std::string(name);
  }
  return fmt::format("0x{:02x}", code);
}

/// Classes whose objects are dicts, when they are made of nothing, or of the default that a key would get.
bool makes_dict(PickleTree::Name name, size_t arguments) {
  if (name.module != "collections") return false;
  return name.name == "OrderedDict" ? arguments == 0 : name.name == "defaultdict" && arguments <= 1;
}

}  // namespace

class PickleTreeBuilder : PickleReader {
 public:
  PickleTreeBuilder(std::string_view text, const PickleTree::Policy& policy) : PickleReader(text), policy_(policy) {}

  Result<PickleTree> run() {
    if (size() > policy_.max_bytes) {
      return corrupt(fmt::format("{} bytes of pickle; at most {} are expected", size(), policy_.max_bytes));
    }
    while (!stopped_) {
      RT_TRY_SET(const uint8_t code, next());
      Status done = step(code);
      if (!done.ok()) return std::move(done).error().with(fmt::format("byte {}", op_at()));
      if (stack_.size() > kMaxStack) return corrupt(fmt::format("byte {}: its stack grows without end", op_at()));
      if (tree_.values_.size() > policy_.max_values || held_ > policy_.max_values)
        return corrupt(fmt::format("byte {}: it makes too many values", op_at()));
    }
    if (stack_.size() != 1) return corrupt(fmt::format("it ends with {} values, expected one", stack_.size()));
    tree_.root_ = stack_[0];
    return std::move(tree_);
  }

 private:
  // --- the stack ----------------------------------------------------------------------------------------------------
  void push(Kind kind, int64_t number = 0) {
    stack_.push_back(static_cast<Id>(tree_.values_.size()));
    tree_.values_.push_back({kind, number});
  }
  template <typename T>
  void push_in(std::vector<T>& table, Kind kind, T value) {
    push(kind, static_cast<int64_t>(table.size()));
    table.push_back(std::move(value));
  }
  /// The entry of value `id` in the table of its kind.
  template <typename T>
  T& entry(std::vector<T>& table, Id id) {
    return table[static_cast<size_t>(tree_.values_[id].number)];
  }
  Result<Id> pop() {
    RT_TRY_SET(const Id out, top());
    stack_.pop_back();
    return out;
  }
  Result<Id> top() const {
    if (stack_.empty() || tree_.kind(stack_.back()) == Kind::kMark) return corrupt("it takes from an empty stack");
    return stack_.back();
  }
  Result<std::vector<Id>> pop_to_mark() {
    size_t k = stack_.size();
    while (k > 0 && tree_.kind(stack_[k - 1]) != Kind::kMark) --k;
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
  Error not_allowed(uint8_t code) const {
    return unsupported(fmt::format("operation {} is not allowed: no {} needs it", operation_name(code), policy_.of));
  }

  Status step(uint8_t code) {
    if (!policy_.operations.empty() && policy_.operations.find(static_cast<char>(code)) == std::string_view::npos)
      return not_allowed(code);
    switch (code) {
      case 0x80: {
        RT_TRY_SET(const int64_t protocol, byte());
        if (op_at() != 0 || protocol < 2 || protocol > policy_.max_protocol) {
          return unsupported(
              fmt::format("PROTO {}: a {} has protocols 2 to {}", protocol, policy_.of, policy_.max_protocol));
        }
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
        return push_long(1);
      case 0x8b:
        return push_long(4);
      case 'G': {
        RT_TRY_SET(const uint64_t bits, number(8));  // big-endian, the only number here that is
        push(Kind::kFloat, static_cast<int64_t>(__builtin_bswap64(bits)));
        return {};
      }
      case 0x8c:
        return push_text(Kind::kString, 1);
      case 'X':
        return push_text(Kind::kString, 4);
      case 0x8d:
        return push_text(Kind::kString, 8);
      case 'C':
      case 'U':
        return push_text(code == 'C' ? Kind::kBytes : Kind::kString, 1);
      case 'B':
        return push_text(Kind::kBytes, 4);
      case 0x8e:
        return push_text(Kind::kBytes, 8);
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
        push_in(tree_.dicts_, Kind::kDict, PickleTree::Dict{});
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
        RT_TRY_SET(const std::string_view module, tree_.string(parts[0], "a module's name"));
        RT_TRY_SET(const std::string_view name, tree_.string(parts[1], "a class's name"));
        return push_name({module, name});
      }
      case 'Q': {
        if (!policy_.persistent) break;
        RT_TRY_SET(const Id id, pop());
        RT_TRY_SET(const std::vector<Id>* parts, tree_.items(id, "a persistent id"));
        if (parts->size() != 5) return corrupt(fmt::format("a persistent id of {} parts, expected 5", parts->size()));
        push(Kind::kPersistent, tree_.values_[id].number);
        return made();
      }
      case 'R':
      case 0x81:
        return make_object();
      case 'b':
        return build();
      default:
        break;
    }
    return not_allowed(code);
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
  Status push_long(int length_bytes) {
    RT_TRY_SET(const uint64_t bytes, number(length_bytes));
    if (bytes > 8 && policy_.allows != nullptr) return corrupt(fmt::format("a number of {} bytes", bytes));
    if (bytes > 8) {  // of a random state
      RT_TRY(take(bytes));
      push(Kind::kOther);
      return {};
    }
    RT_TRY_SET(uint64_t n, number(static_cast<int>(bytes)));
    if (bytes > 0 && bytes < 8 && ((n >> (8 * bytes - 1)) & 1) != 0) n |= ~uint64_t{0} << (8 * bytes);
    push(Kind::kInt, static_cast<int64_t>(n));
    return {};
  }
  Status push_text(Kind kind, int length_bytes) {
    RT_TRY_SET(const uint64_t bytes, number(length_bytes));
    const auto limit = static_cast<uint64_t>(kind == Kind::kBytes ? policy_.max_bytes : kMaxString);
    if (bytes > limit) return corrupt(fmt::format("a string of {} bytes", bytes));
    RT_TRY_SET(const std::string_view text, take(bytes));
    push_in(tree_.strings_, kind, text);
    return {};
  }
  Status push_sequence(Kind kind, Result<std::vector<Id>> items) {
    if (!items.ok()) return std::move(items).error();
    held_ += items.value().size();
    push_in(tree_.sequences_, kind, std::move(items).value());
    return {};
  }
  Status append(Result<std::vector<Id>> more) {
    if (!more.ok()) return std::move(more).error();
    RT_TRY_SET(const Id target, top());
    if (holds_anything(target)) return {};  // a class that holds items: nothing to us
    if (tree_.kind(target) != Kind::kList) return tree_.wrong("what is appended to", target, "a list");
    std::vector<Id>& list = entry(tree_.sequences_, target);
    held_ += more.value().size();
    list.insert(list.end(), more.value().begin(), more.value().end());
    return {};
  }
  Status set_items(Result<std::vector<Id>> more) {
    if (!more.ok()) return std::move(more).error();
    RT_TRY_SET(const Id target, top());
    if (holds_anything(target)) return {};
    if (tree_.kind(target) != Kind::kDict) return tree_.wrong("what items are set of", target, "a dict");
    if (more.value().size() % 2 != 0) return corrupt("a key without a value");
    PickleTree::Dict& dict = entry(tree_.dicts_, target);
    held_ += more.value().size();
    for (size_t k = 0; k < more.value().size(); k += 2) dict.emplace_back(more.value()[k], more.value()[k + 1]);
    return {};
  }
  Status remember(int bytes) {
    uint64_t slot = memo_.size();
    if (bytes > 0) {
      RT_TRY_SET(slot, number(bytes));
    }
    RT_TRY_SET(const Id value, top());
    if (slot > memo_.size() + 1024 || slot >= policy_.max_values)
      return corrupt(fmt::format("memo {} after {}", slot, memo_.size()));
    if (slot >= memo_.size()) memo_.resize(slot + 1, PickleTree::kNothing);
    memo_[slot] = value;
    return {};
  }
  Status recall(int bytes) {
    RT_TRY_SET(const uint64_t slot, number(bytes));
    if (slot >= memo_.size() || memo_[slot] == PickleTree::kNothing)
      return corrupt(fmt::format("memo {} was never written", slot));
    stack_.push_back(memo_[slot]);
    return {};
  }
  Status push_name(PickleTree::Name name) {
    if (policy_.allows != nullptr && !policy_.allows(name)) {
      return unsupported(fmt::format("global \"{} {}\" is not allowed: no {} needs it; nothing was run",
                                     printable(name.module), printable(name.name), policy_.of));
    }
    push_in(tree_.names_, Kind::kName, name);
    return {};
  }
  /// Neither makes nor calls anything: notes what would have been.
  Status make_object() {
    RT_TRY_SET(const std::vector<Id> parts, pop_some(2));
    if (tree_.kind(parts[0]) == Kind::kObject && policy_.allows == nullptr) {  // what a call would have returned
      push_in(tree_.objects_, Kind::kObject, PickleTree::Object{.of = {}, .arguments = parts[1]});
      return {};
    }
    RT_TRY_SET(const PickleTree::Name of, tree_.name(parts[0], "what is called"));
    if (tree_.kind(parts[1]) != Kind::kTuple) return tree_.wrong("the arguments of a call", parts[1], "a tuple");
    if (makes_dict(of, entry(tree_.sequences_, parts[1]).size())) {
      push_in(tree_.dicts_, Kind::kDict, PickleTree::Dict{});
      return {};
    }
    push_in(tree_.objects_, Kind::kObject, PickleTree::Object{of, parts[1], PickleTree::kNothing});
    return made();
  }
  Status made() { return policy_.made ? policy_.made(tree_, stack_.back()) : Status(); }
  bool holds_anything(Id target) const { return policy_.opaque && tree_.kind(target) == Kind::kObject; }
  Status build() {
    RT_TRY_SET(const Id state, pop());
    RT_TRY_SET(const Id target, top());
    if (tree_.kind(target) == Kind::kDict) {  // the versions of modules, which a state dict carries
      if (policy_.opaque) return {};
      RT_TRY_SET(const PickleTree::Dict* attributes, tree_.dict(state, "the state that BUILD sets"));
      const bool versions = attributes->size() == 1 && tree_.find(*attributes, "_metadata") != PickleTree::kNothing;
      return versions ? Status() : unsupported("BUILD with anything but a state dict's _metadata");
    }
    if (!holds_anything(target)) return tree_.wrong("what BUILD sets the state of", target, "an object");
    entry(tree_.objects_, target).state = state;
    return {};
  }

  const PickleTree::Policy& policy_;
  bool stopped_ = false;
  std::vector<Id> stack_, memo_;
  size_t held_ = 0;  // entries of sequences and dicts
  PickleTree tree_;
};

Result<PickleTree> PickleTree::read(std::string_view pickle, const Policy& policy) {
  return PickleTreeBuilder(pickle, policy).run();
}

Error PickleTree::wrong(std::string_view what, Id id, std::string_view expected) const {
  return corrupt(fmt::format("{} is {}, expected {}", what, kKindNames[static_cast<size_t>(kind(id))], expected));
}

Result<bool> PickleTree::boolean(Id id, std::string_view what) const {
  if (kind(id) != Kind::kBool) return wrong(what, id, "a bool");
  return values_[id].number != 0;
}

Result<int64_t> PickleTree::integer(Id id, std::string_view what) const {
  if (kind(id) != Kind::kInt) return wrong(what, id, "a whole number");
  return values_[id].number;
}

Result<double> PickleTree::number(Id id, std::string_view what) const {
  if (kind(id) == Kind::kInt) return static_cast<double>(values_[id].number);
  if (kind(id) != Kind::kFloat) return wrong(what, id, "a number");
  return std::bit_cast<double>(values_[id].number);
}

Result<std::string_view> PickleTree::string(Id id, std::string_view what) const {
  if (kind(id) != Kind::kString) return wrong(what, id, "a string");
  return strings_[static_cast<size_t>(values_[id].number)];
}

Result<const std::vector<Id>*> PickleTree::items(Id id, std::string_view what) const {
  if (kind(id) != Kind::kTuple && kind(id) != Kind::kList) return wrong(what, id, "a tuple or a list");
  return &sequences_[static_cast<size_t>(values_[id].number)];
}

Result<const PickleTree::Dict*> PickleTree::dict(Id id, std::string_view what) const {
  if (kind(id) != Kind::kDict) return wrong(what, id, "a dict");
  return &dicts_[static_cast<size_t>(values_[id].number)];
}

Result<PickleTree::Name> PickleTree::name(Id id, std::string_view what) const {
  if (kind(id) != Kind::kName) return wrong(what, id, "a class");
  return names_[static_cast<size_t>(values_[id].number)];
}

Result<const PickleTree::Object*> PickleTree::object(Id id, std::string_view what) const {
  if (kind(id) != Kind::kObject) return wrong(what, id, "an object");
  return &objects_[static_cast<size_t>(values_[id].number)];
}

Result<const std::vector<Id>*> PickleTree::persistent(Id id, std::string_view what) const {
  if (kind(id) != Kind::kPersistent) return wrong(what, id, "a storage");
  return &sequences_[static_cast<size_t>(values_[id].number)];
}

Result<const PickleTree::Dict*> PickleTree::fields(Id id, std::string_view of, std::string_view what) const {
  RT_TRY_SET(const Object* found, object(id, what));
  if (found->of.name != of) {
    return unsupported(fmt::format("{} is an object of {}.{}, expected {}", what, printable(found->of.module),
                                   printable(found->of.name), of));
  }
  if (found->state == kNothing) return corrupt(fmt::format("{} has no fields", what));
  return dict(found->state, what);
}

Result<Id> PickleTree::field(const Dict& fields, std::string_view name, std::string_view what) const {
  const Id found = find(fields, name);
  if (found == kNothing) return corrupt(fmt::format("{} has no field {}", what, name));
  return found;
}

Id PickleTree::find(const Dict& fields, std::string_view name) const {
  Id out = kNothing;
  for (const auto& [key, value] : fields) {
    if (kind(key) == Kind::kString && strings_[static_cast<size_t>(values_[key].number)] == name) out = value;
  }
  return out;
}

Result<Shape> PickleTree::shape(Id id, std::string_view what) const {
  Id list = id;
  if (kind(id) == Kind::kObject) {
    RT_TRY_SET(const Object* size, object(id, what));
    if (size->of != Name{"torch", "Size"} || size->arguments == kNothing) {
      return corrupt(fmt::format("{} is an object of {}.{}, expected torch.Size", what, printable(size->of.module),
                                 printable(size->of.name)));
    }
    RT_TRY_SET(const std::vector<Id>* arguments, items(size->arguments, what));
    if (arguments->size() != 1) return corrupt(fmt::format("{} is made from {} values", what, arguments->size()));
    list = arguments->front();
  }
  RT_TRY_SET(const std::vector<Id>* extents, items(list, what));
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

}  // namespace cairn::convert
