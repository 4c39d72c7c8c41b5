#include "runtime/text/sentencepiece_json.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "runtime/json/json.h"
#include "runtime/text/hf_json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

using nlohmann::ordered_json;

constexpr const char* kSpace = "\xE2\x96\x81";  // U+2581, which stands for a space

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

// --- the model's fields: a protocol buffer
// -----------------------------------------------------------------------------

struct Field {
  uint64_t number = 0, value = 0;  // of a varint or fixed number
  std::string_view bytes;          // of text or a message
};

/// The fields of a message, in their order. Nothing behind a field that leaves the message.
std::vector<Field> fields_of(std::string_view message) {
  std::vector<Field> out;
  const auto varint = [&]() -> std::optional<uint64_t> {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !message.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(message.front());
      message.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  };
  const auto take = [&](size_t count) {
    const std::string_view front = message.substr(0, count);
    message.remove_prefix(count);
    return front;
  };
  while (!message.empty()) {
    const auto tag = varint();
    if (!tag) return out;
    Field field{.number = *tag >> 3};
    const uint64_t type = *tag & 7;
    if (type == 0 || type == 2) {
      const auto number = varint();
      if (!number || (type == 2 && *number > message.size())) return out;
      field.value = *number;
      if (type == 2) field.bytes = take(*number);
    } else if (type == 1 || type == 5) {
      const size_t size = type == 1 ? 8 : 4;
      if (message.size() < size) return out;
      std::memcpy(&field.value, take(size).data(), size);
    } else {
      return out;
    }
    out.push_back(field);
  }
  return out;
}

// --- its parts as a tokenizer.json has them
// ---------------------------------------------------------------------------

std::string base64(std::string_view bytes) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t at = 0; at < bytes.size(); at += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k) {
      bits = bits << 8 | (at + k < bytes.size() ? static_cast<unsigned char>(bytes[at + k]) : 0);
    }
    for (size_t k = 0; k < 4; ++k) {
      out.push_back(at + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63]);
    }
  }
  return out;
}

ordered_json replace(const char* kind, const char* pattern, const char* content) {
  return {{"type", "Replace"}, {"pattern", {{kind, pattern}}}, {"content", content}};
}

ordered_json normalizer_of(const SentencePieces& model) {
  ordered_json steps = ordered_json::array();
  if (!model.charsmap.empty()) {
    steps.push_back({{"type", "Precompiled"}, {"precompiled_charsmap", base64(model.charsmap)}});
  }
  if (model.remove_spaces) {
    steps.push_back(replace("Regex", "\\A +| +\\z", ""));
    steps.push_back(replace("Regex", " {2,}", " "));
  }
  if (model.dummy_prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
  steps.push_back(replace("String", " ", kSpace));
  return {{"type", "Sequence"}, {"normalizers", std::move(steps)}};
}

ordered_json decoder_of(const SentencePieces& model) {
  ordered_json steps = {replace("String", kSpace, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  if (model.dummy_prefix) steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  return {{"type", "Sequence"}, {"decoders", std::move(steps)}};
}

/// All pairs that make a piece, the best piece first: the library joins whatever makes the best one.
ordered_json merges_of(const SentencePieces& model, const std::map<std::string_view, int64_t>& ids) {
  std::vector<const SentencePiece*> order;
  for (const SentencePiece& piece : model.pieces) {
    if (piece.type == PieceType::kNormal) order.push_back(&piece);
  }
  std::ranges::stable_sort(order, std::greater(), &SentencePiece::score);
  ordered_json out = ordered_json::array();
  for (const SentencePiece* piece : order) {
    const std::string_view text = piece->text;
    for (size_t at = utf8_length(text[0]); at < text.size(); at += utf8_length(text[at])) {
      if (ids.contains(text.substr(0, at)) && ids.contains(text.substr(at))) {
        out.push_back({text.substr(0, at), text.substr(at)});
      }
    }
  }
  return out;
}

ordered_json model_of(const SentencePieces& model, int64_t unknown) {
  const bool bytes =
      std::ranges::any_of(model.pieces, [](const SentencePiece& one) { return one.type == PieceType::kByte; });
  if (!model.bpe) {
    ordered_json vocab = ordered_json::array();
    for (const SentencePiece& piece : model.pieces) vocab.push_back({piece.text, piece.score});
    return {{"type", "Unigram"}, {"unk_id", unknown}, {"vocab", std::move(vocab)}, {"byte_fallback", bytes}};
  }
  ordered_json vocab = ordered_json::object();
  std::map<std::string_view, int64_t> ids;
  for (size_t k = 0; k < model.pieces.size(); ++k) {
    vocab[model.pieces[k].text] = k;
    if (model.pieces[k].type == PieceType::kNormal) ids[model.pieces[k].text] = static_cast<int64_t>(k);
  }
  ordered_json out = bpe_json(std::move(vocab), merges_of(model, ids), bytes);
  out["unk_token"] = model.pieces[static_cast<size_t>(unknown)].text;
  out["fuse_unk"] = true;
  return out;
}

ordered_json post_processor_of(const SpecialPieces& special, AroundText around) {
  ordered_json single = ordered_json::array(), tokens = ordered_json::object();
  const auto add = [&](const SpecialPiece& token) {
    single.push_back({{"SpecialToken", {{"id", token.piece}, {"type_id", 0}}}});
    tokens[token.piece] = {
        {"id", token.piece}, {"ids", ordered_json::array({token.id})}, {"tokens", ordered_json::array({token.piece})}};
  };
  if (around.bos && special.bos.id >= 0) add(special.bos);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  if (around.eos && special.eos.id >= 0) add(special.eos);
  if (tokens.empty()) return nullptr;
  ordered_json pair = single;
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
  return {{"type", "TemplateProcessing"},
          {"single", std::move(single)},
          {"pair", std::move(pair)},
          {"special_tokens", std::move(tokens)}};
}

// --- whether it is the same
// -------------------------------------------------------------------------------------------

/// Texts in which each piece stands beside others, with spaces of all kinds and characters that no piece has.
std::vector<std::string> probes(const SentencePieces& model) {
  constexpr size_t kInOne = 64;
  std::vector<std::string> out = {"",
                                  " ",
                                  "  a  b ",
                                  "\ta\nb\r\n\nc",
                                  "\xC3\xA9 e\xCC\x81 \xEF\xAC\x81 \xC2\xBD",
                                  "\xE2\x98\x83\xE6\xBC\xA2\xE5\xAD\x97 \xF0\x9F\x98\x80",
                                  "a \xC2\xA0 \xE3\x80\x80 b"};
  std::string text;
  size_t in_text = 0;
  for (size_t k = 0; k < model.pieces.size(); ++k) {
    if (model.pieces[k].type != PieceType::kNormal) continue;
    std::string piece = model.pieces[k].text;
    for (size_t at = piece.find(kSpace); at != piece.npos; at = piece.find(kSpace)) piece.replace(at, 3, " ");
    text += piece + (k % 3 == 0 ? " " : k % 17 == 0 ? "  " : "");
    if (++in_text % kInOne == 0) out.push_back(std::exchange(text, {}));
  }
  out.push_back(std::move(text));
  return out;
}

}  // namespace

SentencePieces sentence_pieces(std::string_view model) {
  enum : uint64_t { kPieces = 1, kTrainer = 2, kNormalizer = 3 };
  SentencePieces out;
  for (const Field& field : fields_of(model)) {
    if (field.number == kPieces) {
      SentencePiece piece;
      for (const Field& part : fields_of(field.bytes)) {
        if (part.number == 1) piece.text = part.bytes;
        if (part.number == 2) std::memcpy(&piece.score, &part.value, sizeof(float));
        if (part.number == 3) piece.type = static_cast<PieceType>(part.value);
      }
      out.pieces.push_back(std::move(piece));
    } else if (field.number == kTrainer) {
      for (const Field& part : fields_of(field.bytes)) {
        if (part.number == 3) out.bpe = part.value == 2;
        if (part.number == 3) out.other = part.value > 2;
        if (part.number == 24) out.suffix_spaces = part.value != 0;
      }
    } else if (field.number == kNormalizer) {
      for (const Field& part : fields_of(field.bytes)) {
        if (part.number == 2) out.charsmap = part.bytes;
        if (part.number == 3) out.dummy_prefix = part.value != 0;
        if (part.number == 4) out.remove_spaces = part.value != 0;
        if (part.number == 5) out.escape_spaces = part.value != 0;
      }
    }
  }
  return out;
}

Result<SpecialPieces> special_pieces(std::string_view model) {
  sentencepiece::SentencePieceProcessor read;
  const auto status = read.LoadFromSerializedProto({model.data(), model.size()});
  if (!status.ok()) return invalid(fmt::format("not a SentencePiece model ({})", status.ToString()));
  const auto piece = [&](int id) {
    return id < 0 || id >= read.GetPieceSize() ? SpecialPiece{} : SpecialPiece{id, read.IdToPiece(id)};
  };
  return SpecialPieces{piece(read.bos_id()), piece(read.eos_id()), piece(read.pad_id()), piece(read.unk_id())};
}

Result<std::string> sentencepiece_as_json(std::string_view bytes, AroundText around) {
  RT_TRY_SET(const SpecialPieces special, special_pieces(bytes));
  RT_TRY_SET(const std::unique_ptr<Tokenizer> own, make_sentencepiece_tokenizer(bytes));
  const SentencePieces model = sentence_pieces(bytes);
  if (std::ssize(model.pieces) != own->vocab()) return invalid("its pieces do not read");
  if (model.other) return unsupported("the model is of words or of characters");
  if (!model.escape_spaces || model.suffix_spaces) return unsupported("the model has no mark before words");
  ordered_json added = ordered_json::array();
  int64_t unknown = -1;
  for (size_t k = 0; k < model.pieces.size(); ++k) {
    const SentencePiece& piece = model.pieces[k];
    if (piece.text.empty() || find_invalid_utf8(piece.text) >= 0) {
      return unsupported(fmt::format("piece {} is empty or not UTF-8", k));
    }
    if (piece.type == PieceType::kUserDefined || piece.type == PieceType::kUnused) {
      return unsupported(fmt::format("piece {}, \"{}\", is {}", k, piece.text,
                                     piece.type == PieceType::kUnused ? "unused" : "a symbol of the user's"));
    }
    if (piece.type == PieceType::kUnknown) unknown = static_cast<int64_t>(k);
    if (piece.type == PieceType::kUnknown || piece.type == PieceType::kControl) {
      added.push_back(special_token_json(static_cast<int64_t>(k), piece.text));
    }
  }
  if (unknown < 0) return unsupported("the model has no unknown piece");
  ordered_json made_of =
      hf_tokenizer_json(std::move(added), normalizer_of(model), decoder_of(model), model_of(model, unknown));
  made_of["post_processor"] = post_processor_of(special, around);
  std::string out = json_text(made_of, 2) + "\n";
  Result<std::unique_ptr<Tokenizer>> made = make_hf_tokenizer(out);
  if (!made.ok()) return unsupported(made.error().message);
  for (const std::string& text : probes(model)) {
    std::vector<int32_t> wanted, found;
    RT_TRY(own->encode(text, &wanted));
    RT_TRY(made.value()->encode(text, &found));
    if (wanted != found) return unsupported("a text made of its pieces gets other ids");
  }
  return out;
}

std::string bytes_as_json() {
  ordered_json vocab = ordered_json::object();
  vocab[std::string(1, '\0')] = 0;
  for (int byte = 1; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = byte;
  const ordered_json made_of =
      hf_tokenizer_json(ordered_json::array({special_token_json(0, std::string(1, '\0'))}), nullptr,
                        {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}},
                        bpe_json(std::move(vocab), ordered_json::array(), true));
  return json_text(made_of, 2) + "\n";
}

}  // namespace cairn::text
