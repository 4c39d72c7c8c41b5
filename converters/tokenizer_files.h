#pragma once
// The tokenizer of a recipe as the files of a Hugging Face folder, for models that were trained from scratch: what
// AutoTokenizer of both lines of transformers opens, with the ids that the run's own data has.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/data.h"
#include "runtime/core/result.h"
#include "runtime/text/tokenizer.h"

namespace cairn::convert {

struct TokenizerFiles {
  std::map<std::string, std::string> files;  // by name
  int64_t vocab = 0;                         // one more than the largest id
  int64_t bos = -1, pad = -1;                // ids; -1: none
  std::vector<int64_t> eos;                  // ids that end a text
  std::vector<std::string> warnings;         // what could not be written, for people
};

/// `tokenizer`: where its file lies now, of kind bytes, sentencepiece or hf. Only the files beside it
/// that say how it is used come along: its configuration, special and added tokens, chat templates. `document_end`: the
/// recipe's, or -1. Errors: those of text::make_tokenizer().
Result<TokenizerFiles> tokenizer_files(const TokenizerConfig& tokenizer, int64_t context, int64_t document_end);

/// The tokenizer that lies in a folder; Kind::kNone: none that is read here.
TokenizerConfig tokenizer_in(const std::filesystem::path& folder);

/// Where a recipe's path may lead: from any folder above the checkpoint, the nearest first, and from the working
/// directory, as a start has it.
std::vector<std::filesystem::path> places_of(const std::filesystem::path& path,
                                             const std::filesystem::path& checkpoint);

struct FoundTokenizer {
  TokenizerConfig tokenizer;  // where its file lies
  text::TokenizerHashes hashes;
};
/// The tokenizer of a recipe, by places_of(). `trained`: the hashes that its files must have, as far as they are known.
/// Errors: kInvalidInput, with the path, for a file that is missing or has another content.
Result<FoundTokenizer> find_tokenizer(const TokenizerConfig& tokenizer, const std::filesystem::path& checkpoint,
                                      const text::TokenizerHashes& trained);

/// How a file differs from that of the training.
std::string change_text(const text::TokenizerChange& change);

}  // namespace cairn::convert
