// SamplerState <-> JSON. Integers must be integers and fingerprints hex: a manifest edited by hand, or by a program
// that turned 64-bit numbers into doubles, is refused and not rounded.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/data/sampler.h"
#include "runtime/json/json.h"

namespace cairn::data {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

Error bad_field(std::string_view field, std::string_view expected, const json* found) {
  return Error{ErrorCode::kCorrupt, fmt::format("sampler state: \"{}\" is {}, expected {}", field,
                                                found ? printable_ascii(json_text(*found)) : "missing", expected)};
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

bool read_count(const json& value, int64_t* out) { return read_int(value, out) && *out >= 0; }

bool read_unsigned(const json& value, uint64_t* out) {
  if (!value.is_number_unsigned()) return false;
  *out = value.get<uint64_t>();
  return true;
}

template <typename T, typename ReadOne>
bool read_list(const json& value, ReadOne read_one, std::vector<T>* out) {
  if (!value.is_array()) return false;
  out->resize(value.size());
  for (size_t i = 0; i < value.size(); ++i)
    if (!read_one(value[i], &(*out)[i])) return false;
  return true;
}

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

bool read_hash(const json& value, uint64_t* out) {
  *out = 0;
  return value.is_null() || (read_hex(value, out) && *out != 0);
}

bool read_string(const json& value, std::string* out) {
  if (!value.is_string()) return false;
  *out = value.get<std::string>();
  return true;
}

bool read_era(const json& value, Era* out) {
  std::vector<int64_t> numbers;
  if (!read_list(value, read_int, &numbers) || numbers.size() != 3) return false;
  *out = {numbers[0], numbers[1], numbers[2]};
  return true;
}

// The fields of an object, each to be asked for once; no other may be there.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  const json* find(std::string_view field) {
    known_.push_back(field);
    const auto it = object_.find(field);
    return it == object_.end() ? nullptr : &*it;
  }

  template <typename T, typename ReadOne>
  Status required(std::string_view field, std::string_view expected, ReadOne read_one, T* out) {
    const json* found = find(field);
    if (!found || !read_one(*found, out)) return bad_field(field, expected, found);
    return {};
  }

  template <typename T, typename ReadOne>
  Status list(std::string_view field, std::string_view expected, ReadOne read_one, std::vector<T>* out) {
    return required(
        field, expected, [&](const json& value, std::vector<T>* to) { return read_list(value, read_one, to); }, out);
  }

  Status no_others(std::string_view inside = "") const {
    for (const auto& item : object_.items())
      if (std::find(known_.begin(), known_.end(), item.key()) == known_.end())
        return Error{ErrorCode::kCorrupt, fmt::format("sampler state: unknown field \"{}{}\"", inside, item.key())};
    return {};
  }

 private:
  const json& object_;
  std::vector<std::string_view> known_;
};

Status read_common(Fields& fields, SamplerState* state) {
  RT_TRY(fields.required("position", "an integer >= 0", read_count, &state->position));
  RT_TRY(fields.required("seed", "an integer >= 0", read_unsigned, &state->seed));
  RT_TRY(fields.required("seq_len", "an integer >= 1", read_count, &state->seq_len));
  if (state->seq_len < 1)
    return Error{ErrorCode::kCorrupt, "sampler state: \"seq_len\" is 0, expected an integer >= 1"};
  return {};
}

Status wrong_length(std::string_view field, size_t found, size_t sources) {
  return Error{
      ErrorCode::kCorrupt,
      fmt::format("sampler state: \"{}\" has {} entries, expected one for each of {} sources", field, found, sources)};
}

// Version 1: sources by their place, with fingerprints and nothing else to know them by.
Status read_v1(Fields& fields, SamplerState* state) {
  std::vector<int64_t> taken;
  std::vector<uint64_t> fingerprints;
  std::vector<double> weights;
  RT_TRY(fields.list("taken", "a list of integers", read_int, &taken));
  RT_TRY(fields.list("fingerprints", "a list of 16 hex digits each", read_hex, &fingerprints));
  RT_TRY(fields.list("weights", "a list of finite numbers", read_number, &weights));
  if (fingerprints.size() != taken.size()) return wrong_length("fingerprints", fingerprints.size(), taken.size());
  if (weights.size() != taken.size()) return wrong_length("weights", weights.size(), taken.size());
  for (size_t i = 0; i < taken.size(); ++i) {
    SourceState source;
    source.stream = static_cast<int64_t>(i);
    source.taken = taken[i];
    source.fingerprint = fingerprints[i];
    source.weight = weights[i];
    state->sources.push_back(std::move(source));
  }
  return {};
}

Status read_v2(Fields& fields, SamplerState* state) {
  std::vector<std::string> names;
  std::vector<int64_t> taken, tokens, streams, base_taken;
  std::vector<uint64_t> content;
  std::vector<double> weights;
  RT_TRY(fields.list("names", "a list of strings", read_string, &names));
  RT_TRY(fields.list("taken", "a list of integers", read_int, &taken));
  RT_TRY(fields.list("tokens", "a list of integers", read_int, &tokens));
  RT_TRY(fields.list("content", "a list of 16 hex digits (or null) each", read_hash, &content));
  RT_TRY(fields.list("weights", "a list of finite numbers", read_number, &weights));
  const size_t n = names.size();
  if (taken.size() != n) return wrong_length("taken", taken.size(), n);
  if (tokens.size() != n) return wrong_length("tokens", tokens.size(), n);
  if (content.size() != n) return wrong_length("content", content.size(), n);
  if (weights.size() != n) return wrong_length("weights", weights.size(), n);
  if (const json* found = fields.find("streams")) {
    if (!read_list(*found, read_int, &streams)) return bad_field("streams", "a list of integers", found);
    if (streams.size() != n) return wrong_length("streams", streams.size(), n);
  }
  if (const json* found = fields.find("skipped");
      found && (!read_count(*found, &state->skipped) || state->skipped == 0))
    return bad_field("skipped", "an integer >= 1", found);
  if (const json* found = fields.find("base")) {
    if (!found->is_object()) return bad_field("base", "an object", found);
    Fields base(*found);
    RT_TRY(base.required("position", "an integer >= 0", read_count, &state->base_position));
    RT_TRY(base.list("taken", "a list of integers", read_int, &base_taken));
    if (base_taken.size() != n) return wrong_length("base.taken", base_taken.size(), n);
    RT_TRY(base.no_others("base."));
  }
  state->sources.resize(n);
  for (size_t i = 0; i < n; ++i) {
    SourceState& source = state->sources[i];
    source.name = std::move(names[i]);
    source.stream = streams.empty() ? static_cast<int64_t>(i) : streams[i];
    source.taken = taken[i];
    source.base_taken = base_taken.empty() ? 0 : base_taken[i];
    source.tokens = tokens[i];
    source.content = content[i];
    source.weight = weights[i];
  }
  // Few sources have these: objects whose keys are streams.
  for (const std::string_view field : {"fingerprints", "growth"}) {
    const json* found = fields.find(field);
    if (!found) continue;
    if (!found->is_object()) return bad_field(field, "an object", found);
    for (SourceState& source : state->sources) {
      const std::string stream = fmt::format("{}", source.stream);
      if (!found->contains(stream)) continue;
      const json& value = found->at(stream);
      if (field == "growth" ? !read_list(value, read_era, &source.growth) : !read_hex(value, &source.fingerprint))
        return bad_field(fmt::format("{}.{}", field, stream),
                         field == "growth" ? "lists of [sample, windows, epoch]" : "16 hex digits", &value);
    }
    for (const auto& item : found->items())
      if (std::none_of(state->sources.begin(), state->sources.end(),
                       [&](const SourceState& source) { return fmt::format("{}", source.stream) == item.key(); }))
        return Error{ErrorCode::kCorrupt,
                     fmt::format("sampler state: \"{}\" has stream {}, which no source is", field, item.key())};
  }
  return {};
}

}  // namespace

std::string to_json(const SamplerState& state) {
  ordered_json names = ordered_json::array(), streams = names, taken = names, base_taken = names, tokens = names,
               content = names, weights = names, fingerprints = ordered_json::object(), growth = fingerprints;
  bool plain_streams = true;
  for (const SourceState& source : state.sources) {
    plain_streams = plain_streams && source.stream == static_cast<int64_t>(names.size());
    names.push_back(source.name);
    streams.push_back(source.stream);
    taken.push_back(source.taken);
    base_taken.push_back(source.base_taken);
    tokens.push_back(source.tokens);
    content.push_back(source.content == 0 ? ordered_json() : ordered_json(hex(source.content)));
    weights.push_back(source.weight);
    const std::string stream = fmt::format("{}", source.stream);
    if (source.content == 0) fingerprints[stream] = hex(source.fingerprint);
    for (const Era& era : source.growth) growth[stream].push_back({era.k0, era.windows, era.epoch});
  }
  ordered_json object;
  object["position"] = state.position;
  if (state.skipped != 0) object["skipped"] = state.skipped;
  object["names"] = std::move(names);
  if (!plain_streams) object["streams"] = std::move(streams);
  object["taken"] = std::move(taken);
  if (state.base_position != 0) object["base"] = {{"position", state.base_position}, {"taken", std::move(base_taken)}};
  object["seed"] = state.seed;
  object["tokens"] = std::move(tokens);
  object["content"] = std::move(content);
  if (!fingerprints.empty()) object["fingerprints"] = std::move(fingerprints);
  object["seq_len"] = state.seq_len;
  object["weights"] = std::move(weights);
  if (!growth.empty()) object["growth"] = std::move(growth);
  object["order_version"] = kOrderVersion;
  return json_text(object);  // a name need not be UTF-8
}

Status check_state_fits(SamplerState state) {
  // Counters grow by digits, and a stage of the blend adds its own.
  state.position = state.base_position = state.skipped = INT64_MAX;
  for (SourceState& source : state.sources) source.taken = source.base_taken = INT64_MAX;
  const size_t bytes = to_json(state).size(), count = state.sources.size();
  if (bytes <= kMaxStateBytes) return {};
  return Error{
      ErrorCode::kInvalidInput,
      fmt::format("{} data sources are too many for a snapshot's position: their state may come to take {} bytes "
                  "of {}; blend at most about {}, or use shorter names",
                  count, bytes, kMaxStateBytes, count * kMaxStateBytes / bytes)};
}

Result<SamplerState> sampler_state_from_json(std::string_view text) {
  const json object = json_or_nothing(text);
  if (!object.is_object()) return Error{ErrorCode::kCorrupt, "sampler state: not a JSON object"};
  Fields fields(object);
  int64_t version = 0;
  RT_TRY(fields.required("order_version", "an integer >= 1", read_count, &version));
  if (version > kOrderVersion)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("sampler state: \"order_version\" is {}, this build reads 1 to {}; resume with a build of "
                             "that version",
                             version, kOrderVersion)};
  if (version < 1) return bad_field("order_version", "an integer >= 1", fields.find("order_version"));
  SamplerState state;
  RT_TRY(read_common(fields, &state));
  RT_TRY(version == 1 ? read_v1(fields, &state) : read_v2(fields, &state));
  RT_TRY(fields.no_others());
  return state;
}

}  // namespace cairn::data
