#pragma once
// Tables by Arrow's library, for runtime/data/table.h.

#include <memory>

#include "runtime/core/result.h"
#include "runtime/data/table.h"

namespace cairn::data {

/// Keeps the promises of open_table(); never null.
Result<std::unique_ptr<TableReader>> make_table_reader(TableArgs args);

}  // namespace cairn::data
