#pragma once
// The recipe's `data`, `objective` and `tokenizer`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

/// One stream of tokens. Formats: Megatron pair (.bin/.idx), a raw little-endian token file, or a pair of instruction
/// data, whose documents are packed into samples (runtime/data/packed.h).
struct DataSource {
  enum class Kind { kMegatron, kTokenFile, kInstruct } kind = Kind::kMegatron;
  enum class Overlong { kRefuse, kDrop, kTruncate };
  enum class Weigh { kToken, kSample };
  std::string name;           // for metrics; defaults to the file's stem
  std::string path;           // Megatron: the prefix; token file: the training file
  std::string valid_path;     // token file: its validation file, may be empty
  std::string dtype;          // token file: "uint16" or "uint32"
  double weight = 1.0;        // in a blend; normalised
  int64_t tokens = 0;         // of the training part, its first ones; 0: all
  std::vector<double> split;  // Megatron: train, valid, test parts by documents; one document is cut by tokens instead
  Overlong overlong = Overlong::kRefuse;  // instruction data: a document longer than a sample
  Weigh weigh = Weigh::kToken;            // instruction data: sample: each document's loss counts as much as another's
};

/// Samples whose tokens repeat with a period of at most `period`, `count` times or more, have no targets.
struct MaskRepeats {
  int64_t period = 0, count = 0;  // 0: none is masked
};

struct DataConfig {
  std::vector<DataSource> sources;
  uint64_t seed = 0;  // of the sample order; 0: the recipe's seed
  MaskRepeats mask_repeats;
};

constexpr int32_t kNoTarget = -1;  // in the place of a token to be guessed: the loss of the row does not count

/// How a sample's tokens become inputs and targets, where each stands and what it sees (runtime/data/objective.h).
struct ObjectiveConfig {
  enum class Kind { kNextToken, kPrefix, kInfill } kind = Kind::kNextToken;
  int64_t document_end = -1;    // the token that ends a document; -1: documents are not told apart
  bool reset_attention = true;  // no token sees an earlier document
  bool reset_positions = true;  // each document begins at position 0
  bool document_loss = false;   // guessing how the next document begins counts
  int64_t mask_token = -1, gmask_token = -1, start_token = -1, end_token = -1;  // infill: [MASK], [gMASK], sop, eop
  double gmask_share = 0.7;  // infill: of the sequences, one gap at the end; the others have short gaps
  int64_t mask_windows = 1;  // infill: windows that a sequence with short gaps is cut into
  bool operator==(const ObjectiveConfig&) const = default;
};

struct TokenizerConfig {
  enum class Kind { kNone, kBytes, kSentencePiece, kHf } kind = Kind::kNone;
  std::string path;  // SentencePiece model or tokenizer.json
};

}  // namespace cairn
