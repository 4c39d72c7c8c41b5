#pragma once
// Training of a byte-level BPE: words and how often each comes -> a vocabulary and merges, those that the `tokenizers`
// package's BpeTrainer makes of the same words. Source: huggingface/tokenizers, models/bpe/trainer.rs and word.rs.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

class PreTokenizer;

/// Words in the alphabet of byte_level.h, and how often each comes.
using WordCounts = std::unordered_map<std::string, int64_t>;

/// Cuts texts into words as the pre-tokenizer ByteLevel does, without a space in front. Threads: any.
class WordCutter {
 public:
  static Result<WordCutter> make();
  /// Adds the words of `text`, well-formed UTF-8.
  Status count(std::string_view text, WordCounts* counts) const;

 private:
  explicit WordCutter(std::shared_ptr<const PreTokenizer> cut) : cut_(std::move(cut)) {}
  std::shared_ptr<const PreTokenizer> cut_;
};

struct BpeTraining {
  int64_t vocab = 0;                    // tokens wanted, special ones and the 256 bytes among them
  int64_t min_frequency = 2;            // a pair that comes less often is not merged
  std::vector<std::string> specials;    // the first ids
  std::function<bool(int64_t)> tokens;  // called now and then with the tokens made; false stops. May be null
};

struct TrainedBpe {
  std::vector<std::string> tokens;                          // by id
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
};

/// Deterministic: neither the order of `words` nor a hash decides. Memory: that of the distinct words, some times.
/// Errors: kInvalidInput for a vocabulary below specials and bytes, two equal specials, or no words; kStopped.
Result<TrainedBpe> train_bpe(const WordCounts& words, const BpeTraining& training);

/// The tokenizer.json: ByteLevel before and after, BPE between, the specials as added tokens.
std::string tokenizer_json(const TrainedBpe& trained, const std::vector<std::string>& specials);

}  // namespace cairn::text
