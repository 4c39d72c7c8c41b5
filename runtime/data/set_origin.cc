#include "runtime/data/set_origin.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "runtime/core/new_file.h"
#include "runtime/data/file_io.h"
#include "runtime/json/json.h"

namespace cairn::data {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;
constexpr int kIndent = 1;
constexpr std::array kPackings = {Packing::kNone, Packing::kGzip, Packing::kZstd, Packing::kTable};

/// Nothing: a field is missing or of another type.
std::optional<SetOrigin> origin_of(const nlohmann::json& json) {
  const auto text = [](const nlohmann::json& at, const char* key) { return at.at(key).get<std::string>(); };
  try {
    SetOrigin out{.tokenizer = text(json, "tokenizer"),
                  .tokenizer_hash = text(json, "tokenizer_hash"),
                  .chat = text(json, "chat"),
                  .documents = json.at("documents").get<int64_t>(),
                  .tokens = json.at("tokens").get<int64_t>()};
    for (const nlohmann::json& input : json.at("inputs")) {
      out.inputs.push_back({.path = text(input, "path"), .bytes = input.at("bytes").get<int64_t>()});
      const std::string packed = text(input, "packed");
      const auto* const found = std::ranges::find(kPackings, packed, packing_name);
      if (found == kPackings.end()) return std::nullopt;
      out.inputs.back().packing = *found;
    }
    return out;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::string origin_path(const std::string& prefix) { return prefix + ".made.json"; }

std::string_view packing_name(Packing packing) {
  switch (packing) {
    case Packing::kNone:
      return "";
    case Packing::kGzip:
      return "gzip";
    case Packing::kZstd:
      return "zstd";
    case Packing::kTable:
      return "table";
  }
  return "";
}

Status write_origin(const std::string& prefix, const SetOrigin& origin) {
  nlohmann::ordered_json inputs = nlohmann::ordered_json::array();
  for (const SetOrigin::Input& input : origin.inputs) {
    inputs.push_back({{"path", input.path}, {"bytes", input.bytes}, {"packed", packing_name(input.packing)}});
  }
  const nlohmann::ordered_json json = {{"tokenizer", origin.tokenizer}, {"tokenizer_hash", origin.tokenizer_hash},
                                       {"chat", origin.chat},           {"documents", origin.documents},
                                       {"tokens", origin.tokens},       {"inputs", std::move(inputs)}};
  return place_file(origin_path(prefix), json_text(json, kIndent) + "\n");
}

Result<std::optional<SetOrigin>> read_origin(const std::string& prefix, int64_t documents, int64_t tokens) {
  const std::string path = origin_path(prefix);
  Result<OpenedFile> file = open_readable(path);
  if (!file.ok() && file.error().os_errno == ENOENT) return std::optional<SetOrigin>();
  if (!file.ok()) return std::move(file).error();
  const int64_t bytes = file.value().size_bytes;
  const auto damaged = [&](const std::string& what) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}; the pair beside it does not need this file", path, what)};
  };
  if (bytes > kMostBytes) return damaged(fmt::format("has {} bytes, expected {} at most", bytes, kMostBytes));
  std::string text(static_cast<size_t>(bytes), '\0');
  RT_TRY(read_exact(file.value().fd.get(), path, 0, text.data(), bytes));
  Result<nlohmann::json> json = parse_json(text);
  if (!json.ok()) return damaged(json.error().message);
  std::optional<SetOrigin> origin = origin_of(json.value());
  if (!origin) return damaged("a field is missing, or of another type");
  if (origin->documents != documents || origin->tokens != tokens) origin.reset();
  return origin;
}

}  // namespace cairn::data
