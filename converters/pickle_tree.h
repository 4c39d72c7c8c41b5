#pragma once
// A pickle as a tree of plain values, read without running it. The interpreter knows the operations that data needs,
// keeps the names of classes and functions as names, looks nothing up and calls nothing: an object is the name of its
// class with the arguments and the state that it would have got. Values live in an arena and refer to each other by
// number, so neither depth nor cycles in hostile input reach our own stack; a reader that walks the tree bounds its
// depth. Source: CPython Lib/pickletools.py, Lib/pickle.py.

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "converters/pickle_reader.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

class PickleTree {
 public:
  using Id = uint32_t;
  static constexpr Id kNothing = std::numeric_limits<Id>::max();

  /// kPersistent: a storage of torch's. kOther: an integer of more than eight bytes.
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kBytes,
    kTuple,
    kList,
    kDict,
    kName,
    kObject,
    kPersistent,
    kOther,
    kMark
  };
  struct Name {
    std::string_view module, name;
    bool operator==(const Name&) const = default;
  };
  /// The arguments that a class or a function would have got, and the state that would have been set then.
  struct Object {
    Name of;
    Id arguments = kNothing, state = kNothing;
  };
  using Dict = std::vector<std::pair<Id, Id>>;

  struct Policy {
    std::string_view of;  // what such a pickle is, for messages: ".metadata"
    int64_t max_bytes = 0;
    size_t max_values = 0;
    std::string_view operations;  // by code; empty: all that data may need
    int max_protocol = 5;
    bool (*allows)(Name name) = nullptr;  // nothing: any name is kept, and what may have been called
    bool persistent = false;              // storages of torch are allowed
    bool opaque = true;                   // objects may hold items and state, dicts attributes
    /// Looks at each object and storage where it is made: an error of it has the byte.
    std::function<Status(const PickleTree& tree, Id id)> made;
  };

  /// `pickle` outlives the tree, which points into it. Errors: kUnsupported naming the operation or the name that the
  /// policy does not allow, kCorrupt for what no honest pickle has; both with the byte.
  static Result<PickleTree> read(std::string_view pickle, const Policy& policy);

  Id root() const { return root_; }
  Kind kind(Id id) const { return values_[id].kind; }

  // Typed looks at a value. Errors: kCorrupt, saying `what` it is, what was found and what was expected.
  Result<bool> boolean(Id id, std::string_view what) const;
  Result<int64_t> integer(Id id, std::string_view what) const;
  /// A whole number too.
  Result<double> number(Id id, std::string_view what) const;
  Result<std::string_view> string(Id id, std::string_view what) const;
  /// The items of a tuple or a list.
  Result<const std::vector<Id>*> items(Id id, std::string_view what) const;
  Result<const Dict*> dict(Id id, std::string_view what) const;
  Result<Name> name(Id id, std::string_view what) const;
  Result<const Object*> object(Id id, std::string_view what) const;
  /// The five parts of a storage: ('storage', class, key, place, count).
  Result<const std::vector<Id>*> persistent(Id id, std::string_view what) const;
  /// The state of an object of class `of`, a dict.
  Result<const Dict*> fields(Id id, std::string_view of, std::string_view what) const;
  Result<Id> field(const Dict& fields, std::string_view name, std::string_view what) const;
  /// The value of a key that is a string; kNothing without one. The last one counts, as in Python.
  Id find(const Dict& fields, std::string_view name) const;
  /// torch.Size, or a tuple or list of numbers that are not negative; at most 8.
  Result<Shape> shape(Id id, std::string_view what) const;
  Error wrong(std::string_view what, Id id, std::string_view expected) const;

 private:
  friend class PickleTreeBuilder;
  /// Scalars are here; of the others `number` is an index into their table.
  struct Value {
    Kind kind = Kind::kNone;
    int64_t number = 0;
  };
  Id root_ = kNothing;
  std::vector<Value> values_;
  std::vector<std::string_view> strings_;  // into the pickle
  std::vector<std::vector<Id>> sequences_;
  std::vector<Dict> dicts_;
  std::vector<Name> names_;
  std::vector<Object> objects_;
};

}  // namespace cairn::convert
