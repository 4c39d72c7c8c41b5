// SamplerState <-> JSON. Integers must be integers and fingerprints hex: a manifest edited by hand, or by a program
// that turned 64-bit numbers into doubles, is refused and not rounded.
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/data/sampler.h"

namespace cairn::data {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

Error bad_field(std::string_view field, std::string_view expected, const json* found) {
  return Error{ErrorCode::kCorrupt,
               fmt::format("sampler state: \"{}\" is {}, expected {}", field,
                           found ? found->dump(-1, ' ', true, json::error_handler_t::replace) : "missing", expected)};
}

bool read_int(const json& value, int64_t* out) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
  *out = value.get<int64_t>();
  return true;
}

bool read_hex(const json& value, uint64_t* out) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  if (text.size() != 16) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, 16);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_number(const json& value, double* out) {
  if (!value.is_number()) return false;
  *out = value.get<double>();
  return std::isfinite(*out);
}

template <typename T, typename ReadOne>
bool read_list(const json& value, ReadOne read_one, std::vector<T>* out) {
  if (!value.is_array()) return false;
  out->resize(value.size());
  for (size_t i = 0; i < value.size(); ++i)
    if (!read_one(value[i], &(*out)[i])) return false;
  return true;
}

}  // namespace

std::string to_json(const SamplerState& state) {
  ordered_json object;
  object["position"] = state.position;
  object["taken"] = state.taken;
  object["seed"] = state.seed;
  object["fingerprints"] = ordered_json::array();
  for (const uint64_t fingerprint : state.fingerprints)
    object["fingerprints"].push_back(fmt::format("{:016x}", fingerprint));
  object["seq_len"] = state.seq_len;
  object["weights"] = state.weights;
  object["order_version"] = state.order_version;
  return object.dump();
}

Result<SamplerState> sampler_state_from_json(std::string_view text) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return Error{ErrorCode::kCorrupt, "sampler state: not a JSON object"};
  static constexpr std::string_view kFields[] = {"position", "taken",   "seed",         "fingerprints",
                                                 "seq_len",  "weights", "order_version"};
  for (const auto& item : object.items()) {
    bool known = false;
    for (const std::string_view field : kFields) known = known || item.key() == field;
    if (!known) return Error{ErrorCode::kCorrupt, fmt::format("sampler state: unknown field \"{}\"", item.key())};
  }
  const auto find = [&object](std::string_view field) {
    const auto it = object.find(field);
    return it == object.end() ? nullptr : &*it;
  };

  SamplerState state;
  const json* field = find("position");
  if (!field || !read_int(*field, &state.position) || state.position < 0)
    return bad_field("position", "an integer >= 0", field);
  field = find("taken");
  if (!field || !read_list(*field, read_int, &state.taken)) return bad_field("taken", "a list of integers", field);
  field = find("seed");
  if (!field || !field->is_number_unsigned()) return bad_field("seed", "an integer >= 0", field);
  state.seed = field->get<uint64_t>();
  field = find("fingerprints");
  if (!field || !read_list(*field, read_hex, &state.fingerprints))
    return bad_field("fingerprints", "a list of 16 hex digits each", field);
  field = find("seq_len");
  if (!field || !read_int(*field, &state.seq_len) || state.seq_len < 1)
    return bad_field("seq_len", "an integer >= 1", field);
  field = find("weights");
  if (!field || !read_list(*field, read_number, &state.weights))
    return bad_field("weights", "a list of finite numbers", field);
  int64_t version = 0;
  field = find("order_version");
  if (!field || !read_int(*field, &version) || version < 1 || version > INT32_MAX)
    return bad_field("order_version", "an integer >= 1", field);
  state.order_version = static_cast<int32_t>(version);
  return state;
}

}  // namespace cairn::data
