#include "runtime/data/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include "runtime/data/file_io.h"

namespace cairn::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  int32_t eod() const override { return 0; }
  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    ids->reserve(ids->size() + text.size());
    for (const char c : text) ids->push_back(static_cast<unsigned char>(c));
    return {};
  }
  Result<std::string> decode(std::span<const int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id > 255)
        return Error{ErrorCode::kInvalidInput, fmt::format("token {} is no byte: expected 0 to 255", id)};
      text.push_back(static_cast<char>(id));
    }
    return text;
  }
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& path) {
    RT_TRY_SET(const OpenedFile file, open_readable(path));
    std::string bytes(static_cast<size_t>(file.size_bytes), '\0');
    RT_TRY(read_exact(file.fd.get(), path, 0, bytes.data(), file.size_bytes));
    auto tokenizer = std::make_unique<SentencePieceTokenizer>();
    const auto status = tokenizer->model_.LoadFromSerializedProto(bytes);
    if (!status.ok() || tokenizer->model_.GetPieceSize() < 1)
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: not a SentencePiece model ({})", path,
                                                         status.ok() ? "it has no pieces" : status.ToString())};
    return std::unique_ptr<Tokenizer>(std::move(tokenizer));
  }

  int64_t vocab() const override { return model_.GetPieceSize(); }
  int32_t eod() const override { return model_.eos_id(); }
  Status encode(std::string_view text, std::vector<int32_t>* ids) const override {
    const int64_t bad = find_invalid_utf8(text);  // the library would put U+FFFD there and say nothing
    if (bad >= 0)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("byte {}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer", bad,
                               static_cast<unsigned char>(text[static_cast<size_t>(bad)]))};
    std::vector<int> pieces;
    const auto status = model_.Encode(absl::string_view(text.data(), text.size()), &pieces);
    if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
    ids->insert(ids->end(), pieces.begin(), pieces.end());
    return {};
  }
  Result<std::string> decode(std::span<const int32_t> ids) const override {
    for (const int32_t id : ids)
      if (id < 0 || id >= model_.GetPieceSize())
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("token {} is outside the model: expected 0 to {}", id, model_.GetPieceSize() - 1)};
    std::string text;
    const auto status = model_.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
    if (!status.ok()) return Error{ErrorCode::kInternal, "SentencePiece: " + status.ToString()};
    return text;
  }

 private:
  sentencepiece::SentencePieceProcessor model_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> make_tokenizer(const TokenizerConfig& config) {
  switch (config.kind) {
    case TokenizerConfig::Kind::kBytes:
      return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
    case TokenizerConfig::Kind::kSentencePiece:
      return SentencePieceTokenizer::load(config.path);
    case TokenizerConfig::Kind::kNone:
      break;
  }
  return Error{ErrorCode::kInvalidInput, "no tokenizer is given; expected bytes or a SentencePiece model"};
}

int64_t find_invalid_utf8(std::string_view text) {
  size_t i = 0;
  const auto byte = [&text](size_t at) { return static_cast<unsigned char>(text[at]); };
  while (i < text.size()) {
    const unsigned char lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    // Length by the leading byte, and the range of the second byte that keeps out overlong forms, surrogates and
    // code points beyond U+10FFFF (RFC 3629, section 4).
    size_t length = 0;
    unsigned char low = 0x80, high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      length = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      length = 3;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      length = 4;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (length == 0 || i + length > text.size() || byte(i + 1) < low || byte(i + 1) > high)
      return static_cast<int64_t>(i);
    for (size_t j = 2; j < length; ++j)
      if ((byte(i + j) & 0xC0) != 0x80) return static_cast<int64_t>(i);
    i += length;
  }
  return -1;
}

}  // namespace cairn::data
