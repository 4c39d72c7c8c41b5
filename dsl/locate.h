#pragma once
// Finds the line of a field inside a constructor's braces, in the text of a recipe. Run only when there is something to
// report: Lua knows the line of a call, not of `weight_deacy = 0.1` four lines further down.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dsl/node.h"

namespace cairn::dsl {

/// The tables of one file, as written.
class TableMap {
 public:
  explicit TableMap(std::string_view text);
  ~TableMap();
  TableMap(TableMap&&) noexcept;

  /// The line of the deepest part of `path` that stands in the braces of a call of `constructor` at `line`; `line`
  /// itself when nothing is found.
  int line_of(const std::string& constructor, int line, const std::vector<std::string>& path) const;

 private:
  struct Table;
  std::vector<std::unique_ptr<Table>> tables_;
};

/// Line `line` (from 1) of `text`, without the line feed.
std::string line_text(std::string_view text, int line);

}  // namespace cairn::dsl
