#include "runtime/arrow/table_reader.h"

namespace cairn::data {

// The only symbol of this module that is seen from outside; Arrow's libraries stay behind it.
extern "C" {
[[gnu::visibility("default")]] extern const ArrowModule cairn_arrow_module;
const ArrowModule cairn_arrow_module = {.version = kArrowModuleVersion,
                                        .open = [](TableArgs args, Result<std::unique_ptr<TableReader>>* out) {
                                          *out = make_table_reader(std::move(args));
                                        }};
}

}  // namespace cairn::data
