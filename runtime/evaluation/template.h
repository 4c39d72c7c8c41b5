#pragma once
// The patterns of tasks: the part of Jinja that lm-evaluation-harness' tasks of choices and of generation use. Text
// with
// {{ expressions }} of an item's fields; no statements, no code. Anything else is refused by its name.
//
//   expression  parts joined by ~ or +
//   part        a field, 'text', a whole number, [list], (expression), each followed by
//               .field  [index]  [first:end]  .method(arguments)  | filter
//   methods     strip lstrip rstrip lower upper capitalize title replace split join index startswith endswith
//   filters     trim lower upper capitalize title replace join length first last string int
//
// {{- and -}} strip the whitespace beside them, {# comments #} are left out. A field that an item lacks is an error.
// Threads: pure.

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::evaluation {

struct Expression;

class Template {
 public:
  /// Errors: kInvalidInput with the byte within `text`; kUnsupported naming a tag, filter or method that is not read.
  static Result<Template> parse(std::string_view text);

  /// Errors: kInvalidInput naming what the item lacks, or a value of another type.
  Result<std::string> text(const nlohmann::ordered_json& item) const;
  /// The value of a template that is one expression; else its text.
  Result<nlohmann::ordered_json> value(const nlohmann::ordered_json& item) const;

 private:
  struct Piece {
    std::string text;
    std::shared_ptr<const Expression> expression;  // null: text
  };
  std::vector<Piece> pieces_;
};

/// The value of a list, a text or a number as Python writes it: ['a', 'b']. Errors: as Template::parse().
Result<nlohmann::ordered_json> python_literal(std::string_view text);

/// str() of a value.
std::string python_text(const nlohmann::ordered_json& value);

}  // namespace cairn::evaluation
