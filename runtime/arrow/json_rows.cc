#include "runtime/arrow/json_rows.h"

#include <arrow/api.h>
#include <arrow/extension_type.h>
#include <fmt/format.h>

#include <cmath>

namespace cairn::data {
namespace {

template <typename Array>
const Array& as(const arrow::Array& column) {
  return static_cast<const Array&>(column);
}

template <typename Array>
Status append_text(const arrow::Array& column, int64_t row, std::string* out) {
  append_json_string(as<Array>(column).GetView(row), out);
  return {};
}

template <typename Array>
Status append_whole(const arrow::Array& column, int64_t row, std::string* out) {
  fmt::format_to(std::back_inserter(*out), "{}", as<Array>(column).Value(row));
  return {};
}

template <typename Array>
Status append_real(const arrow::Array& column, int64_t row, std::string* out) {
  const auto value = as<Array>(column).Value(row);
  if (std::isfinite(value)) {
    fmt::format_to(std::back_inserter(*out), "{}", value);
  } else {
    *out += "null";
  }
  return {};
}

Status append_items(const arrow::Array& items, int64_t from, int64_t count, std::string* out) {
  *out += '[';
  for (int64_t i = from; i < from + count; ++i) {
    if (i > from) *out += ',';
    RT_TRY(append_json(items, i, out));
  }
  *out += ']';
  return {};
}

template <typename Array>
Status append_list(const arrow::Array& column, int64_t row, std::string* out) {
  const auto& list = as<Array>(column);
  return append_items(*list.values(), list.value_offset(row), list.value_length(row), out);
}

Status append_struct(const arrow::Array& column, int64_t row, std::string* out) {
  const auto& fields = as<arrow::StructArray>(column);
  *out += '{';
  bool first = true;
  for (int k = 0; k < fields.num_fields(); ++k) {
    const std::shared_ptr<arrow::Array> field = fields.field(k);  // from the struct's own offset on
    if (field->IsNull(row)) continue;
    if (!std::exchange(first, false)) *out += ',';
    append_json_string(fields.struct_type()->field(k)->name(), out);
    *out += ':';
    RT_TRY(append_json(*field, row, out));
  }
  *out += '}';
  return {};
}

Status append_map(const arrow::Array& column, int64_t row, std::string* out) {
  const auto& map = as<arrow::MapArray>(column);
  if (map.keys()->type_id() != arrow::Type::STRING) return append_list<arrow::MapArray>(column, row, out);
  *out += '{';
  const int64_t from = map.value_offset(row);
  for (int64_t i = from; i < from + map.value_length(row); ++i) {
    if (i > from) *out += ',';
    RT_TRY(append_json(*map.keys(), i, out));
    *out += ':';
    RT_TRY(append_json(*map.items(), i, out));
  }
  *out += '}';
  return {};
}

Status append_dictionary(const arrow::Array& column, int64_t row, std::string* out) {
  const auto& coded = as<arrow::DictionaryArray>(column);
  return append_json(*coded.dictionary(), coded.GetValueIndex(row), out);
}

/// Times and decimals, as Arrow writes them.
Status append_as_text(const arrow::Array& column, int64_t row, std::string* out) {
  const arrow::Result<std::shared_ptr<arrow::Scalar>> value = column.GetScalar(row);
  if (!value.ok()) return Error{ErrorCode::kUnsupported, value.status().message()};
  append_json_string((*value)->ToString(), out);
  return {};
}

}  // namespace

void append_json_string(std::string_view text, std::string* out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  *out += '"';
  size_t plain = 0;  // the first byte that is not written yet
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c >= ' ' && c != '"' && c != '\\') [[likely]]
      continue;
    out->append(text, plain, i - plain);
    plain = i + 1;
    *out += '\\';
    if (c == '"' || c == '\\') {
      *out += text[i];
    } else if (c == '\n') {
      *out += 'n';
    } else {
      *out += "u00";
      *out += kHex[c >> 4];
      *out += kHex[c & 15];
    }
  }
  out->append(text, plain);
  *out += '"';
}

Status append_json(const arrow::Array& column, int64_t row, std::string* out) {
  using arrow::Type;
  if (column.IsNull(row)) {
    *out += "null";
    return {};
  }
  switch (column.type_id()) {
    case Type::STRING:
      return append_text<arrow::StringArray>(column, row, out);
    case Type::LARGE_STRING:
      return append_text<arrow::LargeStringArray>(column, row, out);
    case Type::STRING_VIEW:
      return append_text<arrow::StringViewArray>(column, row, out);
    case Type::BINARY:
      return append_text<arrow::BinaryArray>(column, row, out);
    case Type::LARGE_BINARY:
      return append_text<arrow::LargeBinaryArray>(column, row, out);
    case Type::BINARY_VIEW:
      return append_text<arrow::BinaryViewArray>(column, row, out);
    case Type::BOOL:
      *out += as<arrow::BooleanArray>(column).Value(row) ? "true" : "false";
      return {};
    case Type::INT8:
      return append_whole<arrow::Int8Array>(column, row, out);
    case Type::INT16:
      return append_whole<arrow::Int16Array>(column, row, out);
    case Type::INT32:
      return append_whole<arrow::Int32Array>(column, row, out);
    case Type::INT64:
      return append_whole<arrow::Int64Array>(column, row, out);
    case Type::UINT8:
      return append_whole<arrow::UInt8Array>(column, row, out);
    case Type::UINT16:
      return append_whole<arrow::UInt16Array>(column, row, out);
    case Type::UINT32:
      return append_whole<arrow::UInt32Array>(column, row, out);
    case Type::UINT64:
      return append_whole<arrow::UInt64Array>(column, row, out);
    case Type::FLOAT:
      return append_real<arrow::FloatArray>(column, row, out);
    case Type::DOUBLE:
      return append_real<arrow::DoubleArray>(column, row, out);
    case Type::LIST:
      return append_list<arrow::ListArray>(column, row, out);
    case Type::LARGE_LIST:
      return append_list<arrow::LargeListArray>(column, row, out);
    case Type::FIXED_SIZE_LIST:
      return append_list<arrow::FixedSizeListArray>(column, row, out);
    case Type::STRUCT:
      return append_struct(column, row, out);
    case Type::MAP:
      return append_map(column, row, out);
    case Type::DICTIONARY:
      return append_dictionary(column, row, out);
    case Type::EXTENSION:
      return append_json(*as<arrow::ExtensionArray>(column).storage(), row, out);
    case Type::DATE32:
    case Type::DATE64:
    case Type::TIME32:
    case Type::TIME64:
    case Type::TIMESTAMP:
    case Type::DURATION:
    case Type::DECIMAL128:
    case Type::DECIMAL256:
      return append_as_text(column, row, out);
    case Type::NA:
      *out += "null";
      return {};
    default:
      return Error{ErrorCode::kUnsupported,
                   fmt::format("a column is of type {}, which has no JSON", column.type()->ToString())};
  }
}

}  // namespace cairn::data
