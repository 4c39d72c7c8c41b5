#pragma once
// Constants of Megatron's indexed datasets, shared by reader and writer. Source: Megatron-LM,
// megatron/core/datasets/indexed_dataset.py. All integers are little-endian; nothing is aligned.
//
//   offset        size  content of the .idx
//   0             9     "MMIDIDX\0\0"
//   9             8     uint64 version = 1
//   17            1     uint8 dtype code of the tokens
//   18            8     uint64 S, number of sequences
//   26            8     uint64 D, length of the document index
//   34            4 S   int32 length of each sequence, in tokens
//   34 + 4 S      8 S   int64 byte offset of each sequence in the .bin
//   34 + 12 S     8 D   int64 document index: d[0] = 0, ascending, d[D-1] = S

#include <cstdint>
#include <string_view>

namespace cairn::data {

constexpr std::string_view kMegatronMagic{"MMIDIDX\0\0", 9};
constexpr std::string_view kLegacyMagic{"TNTIDX\0\0", 8};
constexpr uint64_t kMegatronVersion = 1;
constexpr int64_t kMegatronHeaderBytes = 34;
constexpr int64_t kVersionOffset = 9, kDtypeOffset = 17, kSequencesOffset = 18, kDocumentsOffset = 26;

constexpr uint8_t kCodeU8 = 1, kCodeI8 = 2, kCodeI16 = 3, kCodeI32 = 4, kCodeI64 = 5, kCodeFloatA = 6, kCodeFloatB = 7,
                  kCodeU16 = 8;

/// Writers take uint16 below this vocabulary, int32 from it on (Megatron's optimal_dtype).
constexpr int64_t kUint16Vocab = 65500;

}  // namespace cairn::data
