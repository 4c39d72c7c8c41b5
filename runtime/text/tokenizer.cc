#include "runtime/text/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "runtime/core/lfs_pointer.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

namespace fs = std::filesystem;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  int32_t eod() const override { return 0; }
  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    ids->reserve(ids->size() + text.size());
    for (const char c : text) ids->push_back(static_cast<unsigned char>(c));
    return {};
  }
  Result<std::string> decode(std::span<const int32_t> ids, Specials specials) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id > 255) return invalid(fmt::format("token {} is no byte: expected 0 to 255", id));
      if (id != eod() || specials == Specials::kKeep) text.push_back(static_cast<char>(id));
    }
    return text;
  }
  std::optional<int32_t> find(std::string_view token) const override {
    return token.size() == 1 ? std::optional<int32_t>(static_cast<unsigned char>(token[0])) : std::nullopt;
  }
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  Status load(std::string_view bytes) {
    const auto status = model_.LoadFromSerializedProto({bytes.data(), bytes.size()});
    if (status.ok() && model_.GetPieceSize() > 0) return {};
    return invalid(fmt::format("not a SentencePiece model ({})", status.ok() ? "it has no pieces" : status.ToString()));
  }

  int64_t vocab() const override { return model_.GetPieceSize(); }
  int32_t eod() const override { return model_.eos_id(); }
  std::string why_no_eod() const override { return "the model has no eos piece (it was trained with --eos_id=-1)"; }
  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    const int64_t bad = find_invalid_utf8(text);  // the library would put U+FFFD there and say nothing
    if (bad >= 0)
      return invalid(fmt::format("byte {}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer",
                                 bad, static_cast<unsigned char>(text[static_cast<size_t>(bad)])));
    std::vector<int> pieces;
    const auto status = model_.Encode(absl::string_view(text.data(), text.size()), &pieces);
    if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
    ids->insert(ids->end(), pieces.begin(), pieces.end());
    return {};
  }
  Result<std::string> decode(std::span<const int32_t> ids, Specials specials) const override {
    std::vector<int> kept;
    for (const int32_t id : ids) {
      if (id < 0 || id >= model_.GetPieceSize())
        return invalid(fmt::format("token {} is outside the model: expected 0 to {}", id, model_.GetPieceSize() - 1));
      if (specials == Specials::kKeep || !model_.IsControl(id)) kept.push_back(id);
    }
    std::string text;
    const auto status = model_.Decode(kept, &text);
    if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
    return text;
  }
  std::optional<int32_t> find(std::string_view token) const override {
    const int id = model_.PieceToId({token.data(), token.size()});
    return model_.IsUnknown(id) && token != model_.IdToPiece(id) ? std::nullopt : std::optional<int32_t>(id);
  }

 private:
  sentencepiece::SentencePieceProcessor model_;
};

Result<std::string> read_file(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    return invalid(fmt::format("{}: {}", path.string(),
                               fs::exists(path, error) ? "is no file" : "No such file; a tokenizer's was expected"));
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  if (!in) return os_error(EIO, path.string());
  if (is_lfs_pointer(out.view())) return invalid(fmt::format("{}: {}", path.string(), kLfsPointer));
  return std::move(out).str();
}

/// The contents, or nothing when there is no such file.
Result<std::string> read_if_there(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return std::string();
  return read_file(path);
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> make_sentencepiece_tokenizer(std::string_view model) {
  auto out = std::make_unique<SentencePieceTokenizer>();
  RT_TRY(out->load(model));
  return std::unique_ptr<Tokenizer>(std::move(out));
}

Result<std::unique_ptr<Tokenizer>> make_tokenizer(const TokenizerConfig& config) {
  switch (config.kind) {
    case TokenizerConfig::Kind::kBytes:
      return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
    case TokenizerConfig::Kind::kSentencePiece: {
      RT_TRY_SET(const std::string model, read_file(config.path));
      return make_sentencepiece_tokenizer(model).with(config.path);
    }
    case TokenizerConfig::Kind::kHf: {
      const fs::path folder = fs::path(config.path).parent_path();
      RT_TRY_SET(const std::string tokenizer, read_file(config.path));
      RT_TRY_SET(const std::string beside, read_if_there(folder / "tokenizer_config.json"));
      RT_TRY_SET(const std::string map, read_if_there(folder / "special_tokens_map.json"));
      return make_hf_tokenizer(tokenizer, beside, map).with(config.path);
    }
    case TokenizerConfig::Kind::kNone:
      break;
  }
  return invalid("no tokenizer is given; expected bytes, a tokenizer.json or a SentencePiece model");
}

TokenizerConfig tokenizer_config(const std::string& name) {
  if (name == "bytes") return {.kind = TokenizerConfig::Kind::kBytes};
  fs::path path(name);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    path /= fs::exists(path / "tokenizer.json", error) ? "tokenizer.json" : "tokenizer.model";
  }
  const bool json = path.extension() == ".json";
  return {json ? TokenizerConfig::Kind::kHf : TokenizerConfig::Kind::kSentencePiece, path.string()};
}

Result<std::string> StreamDecoder::text_of(size_t begin) const {
  return tokenizer_.decode(std::span<const int32_t>(ids_).subspan(begin), specials_);
}

Result<std::string> StreamDecoder::add(int32_t id) {
  // What a token spells may depend on those before it (a space that only the first one drops, half a character), so the
  // latest ones are decoded together, and the window moves on where the text is whole.
  constexpr size_t kWindow = 16;
  if (!tokenizer_.has(id)) return std::string();
  ids_.push_back(id);
  RT_TRY_SET(const std::string text, text_of(context_));
  const size_t end = std::max(shown_, whole_characters(text));
  std::string out = shown_ < text.size() ? text.substr(shown_, end - shown_) : std::string();
  shown_ = end;
  if (ids_.size() - context_ >= 2 * kWindow && end == text.size()) {
    const size_t next = ids_.size() - kWindow;
    RT_TRY_SET(const std::string rest, text_of(next));
    if (whole_characters(rest) == rest.size()) {  // the window itself may not begin inside a character
      context_ = next;
      shown_ = rest.size();
    }
  }
  return out;
}

Result<std::string> StreamDecoder::finish() {
  RT_TRY_SET(const std::string text, text_of(context_));
  std::string out = shown_ < text.size() ? text.substr(shown_) : std::string();
  shown_ = text.size();
  return out;
}

}  // namespace cairn::text
