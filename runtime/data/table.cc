#include "runtime/data/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/core/program_part.h"

namespace cairn::data {
namespace {

using namespace std::string_view_literals;

constexpr const char* kFile = "libcairn_arrow.so";
constexpr const char* kSymbol = "cairn_arrow_module";

/// Null: there is none.
Result<const ArrowModule*> load() {
  RT_TRY_SET(const ProgramPart part, load_program_part(kFile, kSymbol).with("tables are read by Arrow"));
  const auto* const module = static_cast<const ArrowModule*>(part.symbol);
  if (module == nullptr || module->version == kArrowModuleVersion) return module;
  return Error{ErrorCode::kUnsupported, fmt::format("{} is of version {}, this program needs {}: build them together",
                                                    part.path, module->version, kArrowModuleVersion)};
}

}  // namespace

TableKind table_kind(std::string_view begin) {
  if (begin.starts_with("PAR1"sv)) return TableKind::kParquet;
  if (begin.starts_with("ARROW1\0\0"sv)) return TableKind::kArrowFile;
  return begin.starts_with("\xff\xff\xff\xff"sv) ? TableKind::kArrowStream : TableKind::kNone;
}

bool named_as_table(std::string_view path) {
  constexpr std::array kEnds = {".parquet"sv, ".arrow"sv, ".feather"sv};
  return std::ranges::any_of(kEnds, [&](std::string_view end) { return path.ends_with(end); });
}

Result<std::unique_ptr<TableReader>> open_table(TableArgs args) {
  static const Result<const ArrowModule*> module = load();
  if (!module.ok()) return module.error();
  if (module.value() == nullptr) return std::unique_ptr<TableReader>();
  Result<std::unique_ptr<TableReader>> out = Error{ErrorCode::kInternal, "the module has opened no table"};
  module.value()->open(std::move(args), &out);
  return out;
}

}  // namespace cairn::data
