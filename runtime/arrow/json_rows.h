#pragma once
// Cells of Arrow as JSON.

#include <arrow/type_fwd.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::data {

/// Appends `text` as a string of JSON. Bytes stay as they are: what is no UTF-8 is refused where the line is read.
void append_json_string(std::string_view text, std::string* out);

/// Appends the value at `row`. Text of any kind is a string, lists and structs are arrays and objects, a map of texts
/// is an object; times and decimals are their text; what is not finite is null. A struct's nulls are left out: a table
/// cannot leave a field out of one row. Errors: kUnsupported for another type, by its name.
Status append_json(const arrow::Array& column, int64_t row, std::string* out);

}  // namespace cairn::data
