#pragma once
// The schema: every block and field of a recipe, once. Constructors, checks, help, editor types, the reference page and
// the canonical JSON all read this table; a new field is one entry in schema.cc.
//
// A field has a name (how a recipe writes it) and a key (its member in the canonical JSON and the Recipe struct). They
// differ where people say it better: `log.at = T.every { steps = 3 }` is every_steps = 3. `form` says how such a value
// is written.

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dsl/words.h"
#include "runtime/config/span.h"

namespace cairn::dsl {

using Json = nlohmann::json;

enum class Type {
  kInt,
  kSeed,  // unsigned 64 bit
  kNumber,
  kBool,
  kString,
  kEnum,
  kSpan,  // {"unit": "steps", "value": 100}
  kIntList,
  kNumberList,
  kEnumList,  // each choice once
  kStringList,
  kBlock,
  kItems,   // a list of blocks
  kObject,  // by name: numbers (weights of sources), or values by key path (what a stage of the run changes)
};

enum class Form {
  kPlain,      // a value, or a table for a block
  kPositions,  // "rotary", or T.rotary {...}, whose fields set those that their keys name
  kVocab,      // 50257, or T.vocab { size = 50257 }
  kBetas,      // { 0.9, 0.95 }: sets beta1 and beta2; no member of its own
  kEveryStep,  // T.every { steps = n }
  kLogSteps,   // the same, where 1 is stored for what is not written, and 0 for T.every { steps = 1 }
  kEveryList,  // { T.every {...}, ... }
  kKeep,       // { T.last(n), T.every {...}, ... }
  kPlaces,     // { T.place { "path", ... }, ... }, and T.group likewise: one constructor with a positional field
  kStages,     // T.schedule { T.warmup {...}, ... }
  kTokenizer,  // T.bytes, T.sentencepiece "path", T.hf_tokenizer "path"
  kData,       // T.megatron {...}, T.token_files {...}, T.blend {...}
  kSegments,   // { T.stage { at = ..., fields of a recipe }, ... }
};

enum class Unit { kNone, kCount, kSeconds, kBytes };  // which suffixes a string may carry: "450B", "30min", "2GiB"

struct Block;

struct Field {
  std::string name, key;
  Type type = Type::kInt;
  Form form = Form::kPlain;
  Unit unit = Unit::kNone;
  double lo = -std::numeric_limits<double>::infinity(), hi = std::numeric_limits<double>::infinity();
  bool lo_open = false, hi_open = false;  // > lo, not >= lo
  std::vector<std::string> choices;       // kEnum, kEnumList: in the order of the C++ enum; kSpan: units, empty: all
  bool required = false;
  bool later = false;             // newer than the first recipes: where a stored one lacks it, the default is meant
  bool silent = false;            // not in the canonical JSON where it has its default: stored recipes keep their hash
  bool from_constructor = false;  // the default is the name of the constructor that wrote the block
  Json fallback;                  // the default; null with `required` or `rule`
  std::optional<Json> llama;      // the default under T.llama where it differs
  std::string rule;               // a derived default, in words
  std::string doc, more;          // one line; and what else is worth knowing
  std::string example;            // a value as written, for the reference
  const Block* block = nullptr;   // kBlock: its fields; kItems: the stored element
  std::vector<const Block*> accepts;  // constructors this field takes

  // Binding to the struct the block describes; empty for fields that exist only in the written form.
  std::function<Json(const void*)> load;
  std::function<void(void*, const Json&)> store;
  std::function<void*(void*)> member;            // kBlock
  std::function<int64_t(const void*)> size;      // kItems
  std::function<void*(void*, int64_t)> element;  // kItems
  std::function<void(void*, int64_t)> resize;    // kItems

  bool stored() const { return load || member || element; }
};

struct Block {
  std::string name;                       // as messages say it: "no such field in adamw"
  std::vector<std::string> constructors;  // T.<name>; the first one is the usual; empty: a plain table
  bool positional = false;                // T.last(3), T.sentencepiece "path": the value is fields[0]
  bool list = false;                      // T.schedule { a, b }
  bool constant = false;                  // T.bytes: no arguments
  bool recipe_fields = false;             // T.stage: takes the fields of a recipe besides its own
  std::string doc;
  std::vector<Field> fields;

  const Field* find(std::string_view name) const;
  const Field* find_key(std::string_view key) const;
};

const Block& recipe_block();
/// What a cluster file may return: T.slurm, T.kubernetes, T.hosts.
const std::vector<const Block*>& cluster_blocks();

/// Every constructor's block, of recipes and cluster files, by name, sorted: adamw, blend, bytes, ...
const std::vector<std::pair<std::string, const Block*>>& constructors();
const Block* find_constructor(std::string_view name);

/// The field at a written path ("optimizer.peak_lr"), or null.
const Field* find_field(std::string_view path, const Block& root = recipe_block());

/// Calls visit(path, field) for each field in the schema's order, going into blocks.
void visit_fields(const std::function<void(const std::string& path, const Field& field)>& visit,
                  const Block& root = recipe_block());

/// "a number > 0", "an integer from 1 to 1024", "one of gpipe, 1f1b": what the field takes.
std::string expected(const Field& field);

/// Type and range of a resolved value. Returns what is wrong ("must be a number > 0, got -1"), or nothing.
struct Complaint {
  std::string code, message, suggest, accepted;
};
std::optional<Complaint> check_value(const Field& field, const Json& value);
/// An integer that a double does not hold: of more than 2^53.
bool loses_digits(const Json& value);

/// A span as it is stored: {"unit": "steps", "value": 100}.
Json span_json(const Span& span);

/// A JSON value as it would be written in a recipe.
std::string lua_text(const Json& value);
std::string lua_text(const Field& field, const Json& value);
std::string source_text(const Json& source, bool with_weight);  // T.megatron {...} or T.token_files {...}

/// The derived default of `path`, from `get(path)` of other fields; nothing when one of those is missing.
std::optional<Json> derived_default(const std::string& path, bool llama,
                                    const std::function<std::optional<Json>(const std::string&)>& get);

/// What metrics call a source that has no name of its own: the last part of its path, without extension.
std::string default_source_name(const std::string& path);

/// The written form of a field of a source as a recipe stores it ("path" of T.megatron is "prefix"), or null when that
/// constructor has no such field.
const Field* find_source_field(const std::string& kind, std::string_view key);

/// "450B" -> 4.5e11, "2GiB", "30min" -> 1800, "11h30min" (larger units first); a plain number is itself. Nothing when
/// it does not parse.
std::optional<double> parse_quantity(std::string_view text, Unit unit);

}  // namespace cairn::dsl
