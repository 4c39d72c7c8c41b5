#include "runtime/cuda/tuning/choices.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/core/crc32c.h"
#include "runtime/cuda/cudnn_api.h"
#include "runtime/json/json.h"

namespace cairn::cuda {
namespace {

using nlohmann::json;

constexpr int64_t kForm = 1;
constexpr const char *kProduct = "product", *kAttention = "attention", *kLayout = "layout",
                     *kAttentionLayout = "attention_layout";
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Names of an entry's fields: the same lists read and write them.
template <typename Kind, typename Visit>
void visit_numbers(Kind& of, const Visit& visit) {
  visit("m", of.m);
  visit("n", of.n);
  visit("k", of.k);
  visit("lda", of.lda);
  visit("ldb", of.ldb);
  visit("ldc", of.ldc);
  visit("epilogue", of.epilogue);
  visit("align_a", of.align_a);
  visit("align_b", of.align_b);
  visit("align_c", of.align_c);
  visit("align_d", of.align_d);
  visit("align_vector", of.align_vector);
  visit("align_pre", of.align_pre);
  visit("workspace_limit", of.workspace_bytes);
}
template <typename Kind, typename Visit>
void visit_flags(Kind& of, const Visit& visit) {
  visit("trans_a", of.trans_a);
  visit("trans_b", of.trans_b);
  visit("residual", of.added);
}
template <typename Kind, typename Visit>
void visit_types(Kind& of, const Visit& visit) {
  visit("ab", of.ab_dtype);
  visit("c", of.c_dtype);
}

template <typename Shape, typename Visit>
void visit_shape(Shape& of, const Visit& visit) {
  visit("samples", of.samples);
  visit("tokens", of.tokens);
  visit("heads", of.heads);
  visit("kv_heads", of.kv_heads);
  visit("head_dim", of.head_dim);
  visit("q_stride", of.q_stride);
  visit("kv_stride", of.kv_stride);
  visit("out_stride", of.out_stride);
  visit("window", of.window);
}
template <typename Shape, typename Visit>
void visit_shape_flags(Shape& of, const Visit& visit) {
  visit("causal", of.causal);
  visit("alibi", of.alibi);
}

Error ill(const char* field, std::string_view expected) {
  return Error{ErrorCode::kCorrupt, fmt::format("\"{}\" is missing or not {}", field, expected)};
}

constexpr int kWordDigits = 16;

std::string hex(const BlasAlgorithm& of) {
  std::string out;
  for (const uint64_t word : of.data) out += fmt::format("{:016x}", word);
  return out;
}
std::optional<BlasAlgorithm> algorithm_of(std::string_view digits) {
  BlasAlgorithm out{};
  if (digits.size() != kWordDigits * std::size(out.data)) return std::nullopt;
  for (size_t i = 0; i < digits.size(); ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const size_t digit = kDigits.find(digits[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    uint64_t& word = out.data[i / kWordDigits];
    word = word << 4 | digit;
  }
  return out;
}

double rounded(double us) { return std::round(us * 1e3) / 1e3; }

json to_json(const TuningPlace& place, const char* op) {
  return {{"op", op}, {"card", place.card}, {"library", place.library}};
}
json to_json(const TuningPlace& place, const ProductKind& kind) {
  json out = to_json(place, kProduct);
  visit_numbers(kind, [&](const char* name, auto number) { out[name] = number; });
  visit_flags(kind, [&](const char* name, bool flag) { out[name] = flag; });
  visit_types(kind, [&](const char* name, DType dtype) { out[name] = std::string(dtype_name(dtype)); });
  return out;
}
json to_json(const ChosenProduct& of) {
  json out = to_json(of.place, of.kind);
  const ProductChoice& choice = of.timed.choice;
  out["algorithm"] = choice.by_library ? hex(choice.algorithm) : std::string();
  out["workspace"] = choice.workspace_bytes;
  out["proposed"] = of.timed.proposed;
  out["repeated"] = of.timed.repeated;
  out["us"] = rounded(of.timed.us);
  out["first_us"] = rounded(of.timed.first_us);
  return out;
}
json to_json(const TuningPlace& place, const AttentionKind& kind) {
  json out = to_json(place, kAttention);
  visit_shape(kind.shape, [&](const char* name, int64_t number) { out[name] = number; });
  visit_shape_flags(kind.shape, [&](const char* name, bool flag) { out[name] = flag; });
  out["dtype"] = std::string(dtype_name(kind.shape.dtype));
  out["pass"] = pass_word(kind.pass);
  return out;
}
json to_json(const ChosenAttention& of) {
  json out = to_json(of.place, of.kind);
  out["by"] = by_word(of.timed.by);
  json us = json::object();
  for (const auto& [by, found] : of.timed.us) us[by_word(by)] = rounded(found);
  out["us"] = std::move(us);
  return out;
}

Result<int64_t> count_in(const json& from, const char* field) {
  const std::optional<int64_t> out = json_integer(json_field(from, field), 0, kMost);
  if (!out) return ill(field, "a whole number from 0");
  return *out;
}
Result<std::string> text_in(const json& from, const char* field) {
  const json& value = json_field(from, field);
  if (!value.is_string()) return ill(field, "a text");
  return value.get<std::string>();
}
Result<double> us_in(const json& from, const char* field) {
  const json& value = json_field(from, field);
  if (!value.is_number() || !std::isfinite(value.get<double>())) return ill(field, "a number");
  return value.get<double>();
}

Result<TuningPlace> place_in(const json& from) {
  TuningPlace out;
  RT_TRY_SET(out.card, text_in(from, "card"));
  RT_TRY_SET(out.library, count_in(from, "library"));
  return out;
}

/// Reads fields of an entry, and keeps the first that is ill.
struct FieldReader {
  const json& from;
  Status failed{};

  void operator()(const char* name, bool& flag) {
    const json& value = json_field(from, name);
    if (!value.is_boolean() && failed.ok()) failed = ill(name, "true or false");
    flag = value.is_boolean() && value.get<bool>();
  }
  void operator()(const char* name, DType& dtype) {
    const std::string word = json_string(from, name);
    for (const DType of : {DType::kF32, DType::kBf16, DType::kF16}) {
      if (word == dtype_name(of)) {
        dtype = of;
        return;
      }
    }
    if (failed.ok()) failed = ill(name, "the name of a type");
  }
  template <typename Number>
  void operator()(const char* name, Number& number) {
    const std::optional<int64_t> found =
        json_integer(json_field(from, name), 0, static_cast<int64_t>(std::numeric_limits<Number>::max()));
    if (!found && failed.ok()) failed = ill(name, "a whole number from 0");
    number = static_cast<Number>(found.value_or(0));
  }
};

Result<ProductKind> kind_in(const json& from) {
  ProductKind out;
  FieldReader read{from};
  const auto visit = [&](const char* name, auto& field) { read(name, field); };
  visit_numbers(out, visit);
  visit_flags(out, visit);
  visit_types(out, visit);
  RT_TRY(std::move(read.failed));
  return out;
}

Result<AttentionKind> attention_kind_in(const json& from) {
  AttentionKind out;
  FieldReader read{from};
  const auto visit = [&](const char* name, auto& field) { read(name, field); };
  visit_shape(out.shape, visit);
  visit_shape_flags(out.shape, visit);
  read("dtype", out.shape.dtype);
  RT_TRY(std::move(read.failed));
  const std::string pass = json_string(from, "pass");
  for (const AttentionPass of : {AttentionPass::kForward, AttentionPass::kBackward}) {
    out.pass = of;
    if (pass == pass_word(of)) return out;
  }
  return ill("pass", "\"forward\" or \"backward\"");
}

std::optional<AttentionBy> by_of(std::string_view word) {
  for (const AttentionBy by : {AttentionBy::kOwn, AttentionBy::kWarpgroup, AttentionBy::kCudnn}) {
    if (word == by_word(by)) return by;
  }
  return std::nullopt;
}

Result<ChosenAttention> attention_in(const json& from) {
  ChosenAttention out;
  RT_TRY_SET(out.place, place_in(from));
  RT_TRY_SET(out.kind, attention_kind_in(from));
  const std::optional<AttentionBy> by = by_of(json_string(from, "by"));
  if (!by) return ill("by", "\"own\", \"warpgroup\" or \"cudnn\"");
  out.timed.by = *by;
  const json& us = json_field(from, "us");
  if (!us.is_object()) return ill("us", "times by name");
  for (const AttentionBy of : {AttentionBy::kOwn, AttentionBy::kWarpgroup, AttentionBy::kCudnn}) {
    if (!us.contains(by_word(of))) continue;
    RT_TRY_SET(const double found, us_in(us, by_word(of)));
    out.timed.us.emplace_back(of, found);
  }
  return out;
}

Result<CoveredLayout> layout_in(const json& from) {
  CoveredLayout out;
  RT_TRY_SET(out.place, place_in(from));
  RT_TRY_SET(out.layout, text_in(from, "of"));
  return out;
}

Result<ChosenProduct> product_in(const json& from) {
  ChosenProduct out;
  RT_TRY_SET(out.place, place_in(from));
  RT_TRY_SET(out.kind, kind_in(from));
  RT_TRY_SET(const std::string digits, text_in(from, "algorithm"));
  ProductChoice& choice = out.timed.choice;
  choice.by_library = !digits.empty();
  if (choice.by_library) {
    const std::optional<BlasAlgorithm> algorithm = algorithm_of(digits);
    if (!algorithm) return ill("algorithm", "64 bytes in hex digits, or nothing");
    choice.algorithm = *algorithm;
  } else if (!out.kind.fused()) {
    return Error{ErrorCode::kCorrupt, "\"algorithm\" is empty, and only a fused product can do without"};
  }
  RT_TRY_SET(choice.workspace_bytes, count_in(from, "workspace"));
  RT_TRY_SET(out.timed.proposed, count_in(from, "proposed"));
  RT_TRY_SET(out.timed.repeated, count_in(from, "repeated"));
  RT_TRY_SET(out.timed.us, us_in(from, "us"));
  RT_TRY_SET(out.timed.first_us, us_in(from, "first_us"));
  return out;
}

int64_t checksum(const json& entries) {
  const std::string text = json_text(entries);
  return static_cast<int64_t>(crc32c(text));
}

}  // namespace

std::string text(const TuningPlace& place) {
  return fmt::format("{}, cuBLASLt {}.{}.{}", place.card, place.library / 10000, place.library % 10000 / 100,
                     place.library % 100);
}
std::string attention_text(const TuningPlace& place) {
  if (place.library == 0) return place.card + ", no cuDNN";
  return fmt::format("{}, cuDNN {}", place.card, cudnn_version_text(static_cast<int>(place.library)));
}

std::string encode_choice(const ChosenProduct& choice) { return json_text(to_json(choice)); }
std::string encode_choice(const ChosenAttention& choice) { return json_text(to_json(choice)); }
std::string encode_kind(const TuningPlace& place, const ProductKind& kind) { return json_text(to_json(place, kind)); }
std::string encode_kind(const TuningPlace& place, const AttentionKind& kind) { return json_text(to_json(place, kind)); }

Result<Choice> decode_choice(std::string_view line) {
  RT_TRY_SET(const json entry, parse_json(line));
  if (json_string(entry, "op") == kAttention) {
    RT_TRY_SET(ChosenAttention attention, attention_in(entry));
    return Choice(std::move(attention));
  }
  RT_TRY_SET(ChosenProduct product, product_in(entry));
  return Choice(std::move(product));
}

std::string encode_choices(const TuningChoices& choices) {
  json entries = json::array();
  for (const ChosenProduct& of : choices.products) entries.push_back(to_json(of));
  for (const ChosenAttention& of : choices.attention) entries.push_back(to_json(of));
  const auto add = [&](const std::vector<CoveredLayout>& layouts, const char* op) {
    for (const CoveredLayout& of : layouts) {
      json entry = to_json(of.place, op);
      entry["of"] = of.layout;
      entries.push_back(std::move(entry));
    }
  };
  add(choices.layouts, kLayout);
  add(choices.attention_layouts, kAttentionLayout);
  for (const std::string& of : choices.others) entries.push_back(json_or_nothing(of));
  std::string out = fmt::format("{{\"cairn_tuning\": {}, \"crc32c\": {}, \"off\": {}, \"choices\": [", kForm,
                                checksum(entries), choices.off);
  const char* before = "\n";
  for (const json& entry : entries) out += std::exchange(before, ",\n") + json_text(entry);
  return out + "\n]}\n";
}

Result<TuningChoices> decode_choices(std::string_view text) {
  RT_TRY_SET(const json file, parse_json(text));
  RT_TRY_SET(const int64_t form, count_in(file, "cairn_tuning"));
  if (form != kForm) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("it has form {} of such files, and this program reads form {}", form, kForm)};
  }
  const json &entries = json_field(file, "choices"), &off = json_field(file, "off");
  if (!entries.is_array()) return ill("choices", "a list");
  if (!off.is_boolean()) return ill("off", "true or false");
  RT_TRY_SET(const int64_t stored, count_in(file, "crc32c"));
  TuningChoices out{
      .off = off.get<bool>(), .products = {}, .attention = {}, .layouts = {}, .attention_layouts = {}, .others = {}};
  for (size_t i = 0; i < entries.size(); ++i) {
    const json& entry = entries[i];
    const Status taken = [&]() -> Status {
      RT_TRY_SET(const std::string op, text_in(entry, "op"));
      if (op == kProduct) {
        RT_TRY_SET(ChosenProduct product, product_in(entry));
        out.products.push_back(std::move(product));
      } else if (op == kAttention) {
        RT_TRY_SET(ChosenAttention attention, attention_in(entry));
        out.attention.push_back(std::move(attention));
      } else if (op == kLayout || op == kAttentionLayout) {
        RT_TRY_SET(CoveredLayout layout, layout_in(entry));
        (op == kLayout ? out.layouts : out.attention_layouts).push_back(std::move(layout));
      } else {
        out.others.push_back(json_text(entry));
      }
      return {};
    }();
    if (!taken.ok()) return Error(taken.error()).with(fmt::format("choices[{}]", i));
  }
  if (const int64_t found = checksum(entries); found != stored) {
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("\"crc32c\" is {}, and its choices have {}: they are not what was written", stored, found)};
  }
  return out;
}

}  // namespace cairn::cuda
