#pragma once
// Which documents of a pair are unlike the others: `cairn data scan`. A document is measured in pieces, for dirt may
// fill only a part of it, and each measure is compared with pieces of a similar length (within a factor of two). Where
// all of a length are unlike those half and twice as long, they are compared with these: dirt may fill a length.
//
//   packed    bytes that zstd (level 1) makes of the ids, over their bytes
//   distinct  different ids over all
//   run       the longest run of one id, in tokens
//   period    the longest stretch that repeats a period of 2 to 13 ids, in tokens
//   odd       share of control characters and U+FFFD in the text
//
// Both ends count: text that packs too well repeats itself, and text that packs too little is noise.

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/token_file.h"
#include "runtime/text/tokenizer.h"

namespace cairn::data {

inline constexpr std::array<std::string_view, 5> kScanMeasures{"packed", "distinct", "run", "period", "odd"};
inline constexpr size_t kScanCount = kScanMeasures.size();
inline constexpr int64_t kLongestPeriod = 13;  // of ids, as in OLMo's filter of repeated n-grams

struct ScannedPiece {
  int64_t document = 0;
  int64_t begin = 0, tokens = 0;  // of the document's
  uint64_t hash = 0;              // XXH3 of the ids
  std::array<float, kScanCount> measures{};
};

struct DocumentScanArgs {
  int64_t piece_tokens = 2048;
  double share = 1;                                 // of the documents, drawn by their numbers
  const text::Tokenizer* tokenizer = nullptr;       // for `odd`, which is 0 without one
  std::function<bool(int64_t documents)> progress;  // false stops with kStopped; may be null
};

/// One pass. Memory: 48 bytes a piece. Errors: those of reading; kStopped.
Result<std::vector<ScannedPiece>> scan_documents(const TokenSource& source, const DocumentScanArgs& args);

/// How many robust deviations a piece lies above those of its length, by measure. A measure that few pieces of a length
/// can be compared by has 0.
std::vector<std::array<float, kScanCount>> scan_deviations(const std::vector<ScannedPiece>& pieces);

/// For each piece the first one with the same ids: itself where none is earlier, or it has fewer than kLeastCopied
/// tokens.
inline constexpr int64_t kLeastCopied = 16;
std::vector<int64_t> first_copies(const std::vector<ScannedPiece>& pieces);

}  // namespace cairn::data
