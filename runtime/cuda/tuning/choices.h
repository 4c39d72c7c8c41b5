#pragma once
// The file of choices, `tuning.json` (docs/gpu.md): bytes <-> structs, no I/O.
//
//   {"cairn_tuning": 1, "crc32c": C, "off": false, "choices": [ENTRY, ...]}
//
// An entry has "op", "card" and "library". op "product": the fields of ProductKind, and of the choice "algorithm"
// (cuBLASLt's 64 bytes as hex digits; "" where separate kernels do it), "workspace" and what timing has found. op
// "attention": the fields of AttentionKind, "by" and the "us" of each way that was timed; its library is cuDNN, 0
// without. op "layout": the products of the layout "of" have their choices; "attention_layout": so has its attention.
// Entries of other ops are kept as they are. C is the checksum of the entries' text: a choice with a wrong bit would be
// another algorithm.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/attention_ways.h"
#include "runtime/cuda/blas.h"

namespace cairn::cuda {

/// A choice holds for these.
struct TuningPlace {
  std::string card;     // with its multiprocessors: a part of a card is another one
  int64_t library = 0;  // Blas::version(); of attention AttentionLibrary::version, 0 without
  auto operator<=>(const TuningPlace&) const = default;
};
/// "NVIDIA H200 (132 multiprocessors), cuBLASLt 13.1"
std::string text(const TuningPlace& place);
/// The same of attention: "..., cuDNN 9.19.0", "..., no cuDNN"
std::string attention_text(const TuningPlace& place);

struct ChosenProduct {
  TuningPlace place;
  ProductKind kind;
  TimedProduct timed;
};
struct ChosenAttention {
  TuningPlace place;
  AttentionKind kind;
  TimedAttention timed;
};
struct CoveredLayout {
  TuningPlace place;
  std::string layout;
  auto operator<=>(const CoveredLayout&) const = default;
};

struct TuningChoices {
  bool off = false;
  std::vector<ChosenProduct> products;
  std::vector<ChosenAttention> attention;
  std::vector<CoveredLayout> layouts, attention_layouts;
  std::vector<std::string> others;  // entries of other ops, as JSON
};

std::string encode_choices(const TuningChoices& choices);
/// Errors: kCorrupt: the byte where it is no JSON; the entry and the field; the checksum. kUnsupported: a later form.
Result<TuningChoices> decode_choices(std::string_view text);

/// One of them, on one line; the same without what timing has found.
std::string encode_choice(const ChosenProduct& choice);
std::string encode_choice(const ChosenAttention& choice);
std::string encode_kind(const TuningPlace& place, const ProductKind& kind);
std::string encode_kind(const TuningPlace& place, const AttentionKind& kind);
using Choice = std::variant<ChosenProduct, ChosenAttention>;
Result<Choice> decode_choice(std::string_view line);

}  // namespace cairn::cuda
