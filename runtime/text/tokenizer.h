#pragma once
// Text <-> token ids: raw bytes, a SentencePiece model, or a Hugging Face tokenizer.json. Threads: a Tokenizer is
// immutable.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/data.h"
#include "runtime/core/result.h"
#include "runtime/text/beside.h"

namespace cairn::text {

/// Whether a text begins and ends where it stands, or is a part of a longer one that is given piece by piece.
struct Part {
  bool first = true, last = true;
};

/// Where a byte of a text falls among its ids: `ended` of them hold nothing at or behind it, `begun` something before
/// it. The two differ by the tokens that spell bytes of both sides.
struct Place {
  size_t ended = 0, begun = 0;
  bool operator==(const Place&) const = default;
};

/// Special tokens in a decoded text: as they are written, or left out.
enum class Specials { kKeep, kSkip };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// One more than the largest id.
  virtual int64_t vocab() const = 0;
  /// The same without tokens that only a file beside it adds: a model may lack rows for them, as long as none comes.
  virtual int64_t own_vocab() const { return vocab(); }

  /// Sentences for people, where readers of these files differ.
  virtual std::vector<std::string> notes() const { return {}; }

  /// Whether a token has this id. A model may have more rows than its tokenizer has tokens, and there may be gaps.
  virtual bool has(int32_t id) const { return id >= 0 && id < vocab(); }

  /// The id that ends a document, or -1. Bytes: 0, the byte that text does not contain. Else the eos_token of the
  /// tokenizer_config.json or special_tokens_map.json beside it; SentencePiece without one: the model's eos.
  virtual int32_t eod() const = 0;
  /// Where eod() is -1: which file was asked for the token, and what it said. Goes behind the tokenizer's path.
  virtual std::string why_no_eod() const { return "it has no token that ends a document"; }

  /// Appends the ids of `text`, without those that a model wants around it. Errors: kInvalidInput, with the byte within
  /// `text`, when it cannot be encoded (not UTF-8, except for bytes).
  virtual Status encode(std::string_view text, std::vector<int32_t>* ids) const = 0;

  /// The same for a part of a longer text, cut where nothing joins the two sides. What a tokenizer.json adds before a
  /// text, or strips at its ends, applies to the ends of the text alone. SentencePiece takes each part for a text.
  virtual Status encode_part(std::string_view text, Part /*part*/, std::vector<int32_t>* ids) const {
    return encode(text, ids);
  }

  /// The same for a text that is joined of several, with a Place for each of `bytes`, which ascend. No special token is
  /// found within `plain`, ranges that ascend and are disjoint: what looks like one there is text.
  virtual Result<std::vector<Place>> encode_joined(std::string_view text, std::span<const size_t> bytes,
                                                   std::span<const ByteRange> plain,
                                                   std::vector<int32_t>* ids) const = 0;

  /// A special token that encode() finds in `text`, as the text spells it; empty: none.
  virtual Result<std::string> special_within(std::string_view text) const = 0;

  /// Whether the token is a mark that text does not spell: an end of turn, an end of document.
  virtual bool special(int32_t id) const = 0;

  /// What a model wants around a text (the beginning-of-sequence token, for one), by the file's post-processor.
  virtual std::vector<int32_t> before() const { return {}; }
  virtual std::vector<int32_t> after() const { return {}; }

  /// The text of `ids`. Not always UTF-8: a byte token may be half a character. Errors: kInvalidInput for an id
  /// outside the vocabulary.
  virtual Result<std::string> decode(std::span<const int32_t> ids, Specials specials = Specials::kKeep) const = 0;

  /// The token as the vocabulary spells it, or nothing.
  virtual std::optional<int32_t> find(std::string_view token) const = 0;
};

/// Errors: kInvalidInput for Kind::kNone and a file that is missing or damaged, kUnsupported naming a part of a
/// tokenizer.json that is not computed here.
Result<std::unique_ptr<Tokenizer>> make_tokenizer(const TokenizerConfig& config);

/// The files beside the tokenizer's file at `path`. Errors: kInvalidInput, with the path, for one that is no JSON
/// object or a link to nothing; kIo.
Result<BesideFiles> beside_files(const std::string& path);

/// Hashes of the files that decide how a run's texts become tokens, as its lineage.jsonl has them.
struct TokenizerHashes {
  std::string file;                                          // empty: bytes, or not known
  std::optional<std::map<std::string, std::string>> beside;  // of those of kBesideNames that exist; none: not known
  bool operator==(const TokenizerHashes&) const = default;
};
/// Reads the files as they are now. Errors: those of reading them.
Result<TokenizerHashes> tokenizer_hashes(const TokenizerConfig& config);
/// The same from contents. `file`: empty where it is missing.
TokenizerHashes tokenizer_hashes(std::string_view file, BesideFiles beside);

/// A file of a tokenizer with another content. Hashes, or "missing".
struct TokenizerChange {
  std::string path, then, now;
};
/// Compares the files at `path` and beside it, as far as both sides know them.
std::vector<TokenizerChange> tokenizer_changes(const std::string& path, const TokenizerHashes& then,
                                               const TokenizerHashes& now);

/// The same from the files' contents.
Result<std::unique_ptr<Tokenizer>> make_hf_tokenizer(std::string_view tokenizer_json, const BesideFiles& beside = {});
Result<std::unique_ptr<Tokenizer>> make_sentencepiece_tokenizer(std::string_view model, const BesideFiles& beside = {});

/// "bytes", the path of a tokenizer.json (or of a folder that has one), or the path of a SentencePiece model: as a
/// person names a tokenizer on the command line.
TokenizerConfig tokenizer_config(const std::string& name);

/// The text of a stream of ids, as far as it will not change any more: for printing tokens as they come.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, Specials specials) : tokenizer_(tokenizer), specials_(specials) {}

  /// What `id` adds: possibly nothing, while a character is not whole, and always for an id that no token has (as
  /// transformers has it: a padding row of the model may be chosen, and spells nothing).
  Result<std::string> add(int32_t id);
  /// What was held back, at the end.
  Result<std::string> finish();

 private:
  Result<std::string> text_of(size_t begin) const;
  const Tokenizer& tokenizer_;
  Specials specials_;
  std::vector<int32_t> ids_;
  size_t context_ = 0;  // ids before it cannot change what later ones spell
  size_t shown_ = 0;    // bytes of the text from context_ on that were given out
};

}  // namespace cairn::text
