#include "runtime/text/pre_tokenizer.h"

#include <fmt/format.h>
#include <unicode/uchar.h>

#include <algorithm>
#include <optional>

#include "runtime/text/byte_level.h"
#include "runtime/text/json_fields.h"
#include "runtime/text/regex.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::json;

// GPT-2's, as ByteLevel has it built in.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Whitespace's, whose \w is that of Rust's regular expressions.
constexpr std::string_view kWordsPattern =
    R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}]+|[^\s\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}]+)";

/// As Punctuation has it: ASCII's, and what was punctuation in Unicode 8.0.
bool is_punctuation(char32_t c) {
  const auto point = static_cast<UChar32>(c);
  if (c < 0x80) return u_ispunct(point) != 0 || (U_GET_GC_MASK(point) & U_GC_S_MASK) != 0;
  UVersionInfo age{};
  u_charAge(point, age);
  if (age[0] == 0 || age[0] > 8) return false;
  return (U_GET_GC_MASK(point) & U_GC_P_MASK) != 0 || c == 0x166D || c == 0x111C9;
}

enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

Result<Behavior> behavior_of(const std::string& name) {
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return Error{ErrorCode::kUnsupported, fmt::format("the split behavior {} is not known", name)};
}

struct Span {
  size_t begin, end;
  bool match;
};

/// Matches and the gaps between them, in order.
std::vector<Span> cover(const std::vector<std::pair<size_t, size_t>>& found, size_t size, bool invert) {
  std::vector<Span> out;
  size_t done = 0;
  for (const auto& [begin, end] : found) {
    if (begin > done) out.push_back({done, begin, invert});
    out.push_back({begin, end, !invert});
    done = end;
  }
  if (done < size) out.push_back({done, size, invert});
  return out;
}

std::vector<Span> behave(const std::vector<Span>& spans, Behavior behavior) {
  std::vector<Span> out;
  bool previous = false;
  const auto join = [&](const Span& span, bool joined) {
    if (joined && !out.empty()) {
      out.back().begin = std::min(out.back().begin, span.begin);
      out.back().end = std::max(out.back().end, span.end);
    } else {
      out.push_back(span);
    }
    previous = span.match;
  };
  switch (behavior) {
    case Behavior::kIsolated:
      return spans;
    case Behavior::kRemoved:
      std::copy_if(spans.begin(), spans.end(), std::back_inserter(out), [](const Span& span) { return !span.match; });
      return out;
    case Behavior::kContiguous:
      for (const Span& span : spans) join(span, span.match == previous);
      return out;
    case Behavior::kMergedWithPrevious:
      for (const Span& span : spans) join(span, span.match && !previous);
      return out;
    case Behavior::kMergedWithNext:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) join(*span, span->match && !previous);
      std::reverse(out.begin(), out.end());
      return out;
  }
  return out;
}

void append_spans(const std::vector<Span>& spans, const Piece& piece, std::vector<Piece>* out) {
  for (const Span& span : spans) {
    out->push_back({piece.text.substr(span.begin, span.end - span.begin), piece.at_start && span.begin == 0});
  }
}

Status split(const Regex& pattern, Behavior behavior, bool invert, Piece piece, std::vector<Piece>* out) {
  thread_local std::vector<std::pair<size_t, size_t>> found;
  found.clear();
  RT_TRY(pattern.matches(piece.text, &found));
  append_spans(behave(cover(found, piece.text.size(), invert), behavior), piece, out);
  return {};
}

struct Metaspace {
  std::string replacement;
  std::string scheme;  // always, first, never
  bool split = true;
};

Result<Metaspace> metaspace_of(const json& spec) {
  Metaspace out;
  RT_TRY_SET(out.replacement, string_field(spec, "replacement"));
  if (spec.contains("prepend_scheme")) {
    RT_TRY_SET(out.scheme, string_field(spec, "prepend_scheme"));
  } else {
    RT_TRY_SET(const bool prefix, bool_field(spec, "add_prefix_space", true));
    out.scheme = prefix ? "always" : "never";
  }
  if (out.scheme != "always" && out.scheme != "first" && out.scheme != "never") {
    return bad_field("prepend_scheme", "always, first or never", spec["prepend_scheme"]);
  }
  RT_TRY_SET(out.split, bool_field(spec, "split", true));
  return out;
}

}  // namespace

Result<PreTokenizer> PreTokenizer::make(const json& spec) {
  PreTokenizer out;
  if (!spec.is_null()) RT_TRY(out.add(spec).with("pre_tokenizer"));
  return out;
}

Status PreTokenizer::add_split(const std::string& pattern, const std::string& behavior_name) {
  RT_TRY_SET(const Regex compiled, Regex::compile(pattern));
  RT_TRY_SET(const Behavior behavior, behavior_of(behavior_name));
  steps_.push_back([compiled, behavior](Piece piece, std::vector<Piece>* out) {
    return split(compiled, behavior, /*invert=*/false, std::move(piece), out);
  });
  return {};
}

Status PreTokenizer::add(const json& spec) {
  RT_TRY_SET(const std::string type, type_of(spec, "pre_tokenizer"));
  if (type == "Sequence") {
    const auto list = spec.find("pretokenizers");
    if (list == spec.end() || !list->is_array()) return bad_field("pretokenizers", "a list", spec);
    for (const json& step : *list) RT_TRY(add(step));
    return {};
  }
  if (type == "Split") {
    RT_TRY_SET(const Regex pattern, Regex::from_json(spec));
    RT_TRY_SET(const std::string name, string_field(spec, "behavior"));
    RT_TRY_SET(const Behavior behavior, behavior_of(name));
    RT_TRY_SET(const bool invert, bool_field(spec, "invert", false));
    steps_.push_back([pattern, behavior, invert](Piece piece, std::vector<Piece>* out) {
      return split(pattern, behavior, invert, std::move(piece), out);
    });
    return {};
  }
  if (type == "ByteLevel") {
    RT_TRY_SET(const bool prefix, bool_field(spec, "add_prefix_space", true));
    RT_TRY_SET(const bool use_regex, bool_field(spec, "use_regex", true));
    if (prefix) {
      steps_.push_back([](Piece piece, std::vector<Piece>* out) -> Status {
        if (!piece.goes_on && !piece.text.starts_with(' ')) piece.text.insert(0, " ");
        out->push_back(std::move(piece));
        return {};
      });
    }
    if (use_regex) RT_TRY(add_split(std::string(kByteLevelPattern), "Isolated"));
    steps_.push_back([](const Piece& piece, std::vector<Piece>* out) -> Status {
      out->push_back({bytes_to_alphabet(piece.text), piece.at_start});
      return {};
    });
    return {};
  }
  if (type == "Metaspace") {
    RT_TRY_SET(const Metaspace meta, metaspace_of(spec));
    RT_TRY_SET(const Regex space, Regex::literal(" "));
    RT_TRY_SET(const Regex replacement, Regex::literal(meta.replacement));
    steps_.push_back([meta, space, replacement](Piece piece, std::vector<Piece>* out) -> Status {
      RT_TRY_SET(piece.text, space.replaced(piece.text, meta.replacement));
      const bool wanted = !piece.goes_on && (meta.scheme == "always" || (meta.scheme == "first" && piece.at_start));
      if (wanted && !piece.text.starts_with(meta.replacement)) piece.text.insert(0, meta.replacement);
      if (meta.split) return split(replacement, Behavior::kMergedWithNext, false, std::move(piece), out);
      out->push_back(std::move(piece));
      return {};
    });
    return {};
  }
  if (type == "Digits") {
    RT_TRY_SET(const bool each, bool_field(spec, "individual_digits", false));
    return add_split(R"(\p{N})", each ? "Isolated" : "Contiguous");
  }
  if (type == "Punctuation") {
    std::string name = "Isolated";
    if (spec.contains("behavior")) {
      RT_TRY_SET(name, string_field(spec, "behavior"));
    }
    RT_TRY_SET(const Behavior behavior, behavior_of(name));
    steps_.push_back([behavior](const Piece& piece, std::vector<Piece>* out) -> Status {
      std::vector<std::pair<size_t, size_t>> found;
      for (size_t at = 0; at < piece.text.size(); at += utf8_length(piece.text[at])) {
        if (is_punctuation(utf8_at(piece.text, at))) found.emplace_back(at, at + utf8_length(piece.text[at]));
      }
      append_spans(behave(cover(found, piece.text.size(), /*invert=*/false), behavior), piece, out);
      return {};
    });
    return {};
  }
  if (type == "WhitespaceSplit") return add_split(R"(\s)", "Removed");
  if (type == "Whitespace") {
    RT_TRY_SET(const Regex pattern, Regex::compile(kWordsPattern));
    steps_.push_back([pattern](Piece piece, std::vector<Piece>* out) {
      return split(pattern, Behavior::kRemoved, /*invert=*/true, std::move(piece), out);
    });
    return {};
  }
  return Error{ErrorCode::kUnsupported,
               fmt::format("the type {} is not read here; known are ByteLevel, Digits, Metaspace, Punctuation, "
                           "Sequence, Split, Whitespace, WhitespaceSplit",
                           type)};
}

Result<std::vector<Piece>> PreTokenizer::apply(Piece whole) const {
  std::vector<Piece> pieces;
  if (!whole.text.empty()) pieces.push_back(std::move(whole));
  for (const Step& step : steps_) {
    std::vector<Piece> next;
    next.reserve(pieces.size());
    for (Piece& piece : pieces) RT_TRY(step(std::move(piece), &next));
    pieces = std::move(next);
  }
  return pieces;
}

}  // namespace cairn::text
