#pragma once
// Instruction data as windows of L tokens: whole documents side by side, each of which sees only itself and counts
// where its spans say so (loss_spans.h). Windows are a token source as any other, so that order, blend, split and
// resume need to know nothing of them.
//
// Packing: documents in file order go into at most kOpenWindows open windows, each into the fullest that has room;
// where none has, into a new one, and the oldest closes if there are too many. It is a function of the lengths and L,
// takes O(documents), and is done anew by each rank. The rest of a window is filled with kFill, which counts nowhere.

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/config/data.h"
#include "runtime/core/result.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/token_file.h"

namespace cairn::data {

inline constexpr int kOpenWindows = 64;
inline constexpr int32_t kFill = 0;

/// Which documents stand in which window, in their order.
struct Packing {
  std::vector<int32_t> documents;  // by window
  std::vector<int64_t> begins;     // of each window in `documents`, and their end
  int64_t windows() const { return std::ssize(begins) - 1; }
};
/// `lengths` in tokens, each at most `window`; those of 0 are left out.
Packing pack(const std::vector<int32_t>& lengths, int64_t window);

/// Documents [first, end) of the pair `base` in windows; a token more stands behind the last window, as a sample needs
/// one. Errors: kInvalidInput for a document longer than a window, by `overlong`, or no document; those of reading.
Result<std::unique_ptr<TokenSource>> pack_documents(std::shared_ptr<const TokenSource> base,
                                                    std::shared_ptr<const LossSpans> loss, int64_t first, int64_t end,
                                                    int64_t window, DataSource::Overlong overlong);

}  // namespace cairn::data
