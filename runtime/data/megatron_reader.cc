#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "runtime/data/file_io.h"
#include "runtime/data/file_tokens.h"
#include "runtime/data/megatron_format.h"
#include "runtime/data/token_file.h"

namespace cairn::data {
namespace {

constexpr int64_t kBlockEntries = 32 << 10;
constexpr int64_t kMaxTokens = int64_t{1} << 56;  // times 8 bytes stays an int64

struct Index {
  Fd fd;
  std::string path;
  int64_t size_bytes = 0;
  DType dtype = DType::kU16;
  int64_t sequences = 0, documents = 0;  // S and D of the format
  int64_t tokens = 0;
  uint64_t header_hash = 0;

  int64_t lengths_at() const { return kMegatronHeaderBytes; }
  int64_t offsets_at() const { return kMegatronHeaderBytes + 4 * sequences; }
  int64_t documents_at() const { return kMegatronHeaderBytes + 12 * sequences; }
};

Error corrupt(const std::string& path, int64_t offset, std::string_view what, const std::string& stored,
              const std::string& expected) {
  return Error{ErrorCode::kCorrupt,
               fmt::format("{}: byte {}: {} is {}, expected {}", path, offset, what, stored, expected)};
}

Result<DType> dtype_of_code(const std::string& path, uint8_t code) {
  switch (code) {
    case kCodeU8:
      return DType::kU8;
    case kCodeI16:
      return DType::kI16;
    case kCodeI32:
      return DType::kI32;
    case kCodeI64:
      return DType::kI64;
    case kCodeU16:
      return DType::kU16;
    case kCodeFloatA:
    case kCodeFloatB:
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{}: byte {}: dtype code is {}, a floating-point type that Megatron-LM reads as {} and "
                               "GPT-NeoX as {}; tokens are integers, expected code 1, 3, 4, 5 or 8",
                               path, kDtypeOffset, code, code == kCodeFloatA ? "float64" : "float32",
                               code == kCodeFloatA ? "float32" : "float64")};
    case kCodeI8:
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{}: byte {}: dtype code is 2 (int8), which holds no token ids above 127; expected code "
                               "1, 3, 4, 5 or 8",
                               path, kDtypeOffset)};
    default:
      return corrupt(path, kDtypeOffset, "dtype code", fmt::format("{}", code), "1, 3, 4, 5 or 8");
  }
}

template <typename T>
T load(const char* bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof(T));
  return value;
}

Status read_header(Index* index) {
  std::array<char, kMegatronHeaderBytes> header = {};
  const int64_t have = std::min<int64_t>(index->size_bytes, kMegatronHeaderBytes);
  RT_TRY(read_exact(index->fd.get(), index->path, 0, header.data(), have));
  const std::string_view bytes(header.data(), static_cast<size_t>(have));
  if (bytes.starts_with(kLegacyMagic))
    return Error{ErrorCode::kUnsupported,
                 index->path +
                     ": byte 0: this is the legacy TNTIDX format. Write the set again from its text, with `cairn data "
                     "tokenize`, Megatron-LM's tools/preprocess_data.py or GPT-NeoX's preprocess_data.py "
                     "--dataset-impl mmap"};
  if (!bytes.starts_with(kMegatronMagic))
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte 0: the magic is not \"MMIDIDX\\0\\0\"; this is no Megatron index", index->path)};
  if (have < kMegatronHeaderBytes)
    return Error{ErrorCode::kCorrupt, fmt::format("{}: the file ends at byte {}, inside the header of {} bytes",
                                                  index->path, have, kMegatronHeaderBytes)};
  const auto version = load<uint64_t>(header.data(), kVersionOffset);
  if (version != kMegatronVersion)
    return corrupt(index->path, kVersionOffset, "version", fmt::format("{}", version), "1");
  RT_TRY_SET(index->dtype, dtype_of_code(index->path, load<uint8_t>(header.data(), kDtypeOffset)));

  // Bounded by the file's size before any arithmetic, so that nothing below overflows.
  const auto sequences = load<uint64_t>(header.data(), kSequencesOffset);
  const auto documents = load<uint64_t>(header.data(), kDocumentsOffset);
  const auto rest = static_cast<uint64_t>(index->size_bytes - kMegatronHeaderBytes);
  if (sequences > rest / 12)
    return corrupt(index->path, kSequencesOffset, "number of sequences", fmt::format("{}", sequences),
                   fmt::format("at most {}, for {} bytes of index", rest / 12, index->size_bytes));
  if (sequences == 0)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: byte {}: the set has no sequences", index->path, kSequencesOffset)};
  if (documents > (rest - 12 * sequences) / 8 || documents < 2)
    return corrupt(
        index->path, kDocumentsOffset, "length of the document index", fmt::format("{}", documents),
        fmt::format("2 to {}, for {} bytes of index and {} sequences (1: written without end_document calls)",
                    (rest - 12 * sequences) / 8, index->size_bytes, sequences));
  index->sequences = static_cast<int64_t>(sequences);
  index->documents = static_cast<int64_t>(documents);
  const int64_t expected = index->documents_at() + 8 * index->documents;
  if (index->size_bytes == expected + index->sequences)
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: byte {}: a mode for each sequence follows the document index; multimodal sets are "
                             "not read",
                             index->path, expected)};
  if (index->size_bytes != expected)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: {} sequences and a document index of {} make {} bytes, the file has {}", index->path,
                             index->sequences, index->documents, expected, index->size_bytes)};
  RT_TRY_SET(index->header_hash, hash_sampled_blocks(index->fd.get(), index->path, 0, kMegatronHeaderBytes, 0));
  return {};
}

// Lengths are not negative; offsets are their running sum.
Status check_sequences(Index* index) {
  const int64_t item = dtype_size_bytes(index->dtype);
  std::vector<int32_t> lengths(kBlockEntries);
  std::vector<int64_t> offsets(kBlockEntries);
  int64_t tokens = 0;
  for (int64_t first = 0; first < index->sequences; first += kBlockEntries) {
    const int64_t n = std::min(kBlockEntries, index->sequences - first);
    RT_TRY(read_exact(index->fd.get(), index->path, index->lengths_at() + 4 * first, lengths.data(), 4 * n));
    RT_TRY(read_exact(index->fd.get(), index->path, index->offsets_at() + 8 * first, offsets.data(), 8 * n));
    for (int64_t i = 0; i < n; ++i) {
      if (lengths[i] < 0)
        return corrupt(index->path, index->lengths_at() + 4 * (first + i),
                       fmt::format("length of sequence {}", first + i), fmt::format("{}", lengths[i]), "0 or more");
      if (offsets[i] != tokens * item)
        return corrupt(index->path, index->offsets_at() + 8 * (first + i),
                       fmt::format("offset of sequence {}", first + i), fmt::format("{}", offsets[i]),
                       fmt::format("{} (the sum of the lengths before it times {} bytes)", tokens * item, item));
      tokens += lengths[i];
      if (tokens > kMaxTokens)
        return corrupt(index->path, index->lengths_at() + 4 * (first + i), "sum of the lengths",
                       fmt::format("{}", tokens), "what a file can hold");
    }
  }
  index->tokens = tokens;
  return {};
}

Status check_documents(const Index& index) {
  std::vector<int64_t> entries(kBlockEntries);
  int64_t last = 0;
  for (int64_t first = 0; first < index.documents; first += kBlockEntries) {
    const int64_t n = std::min(kBlockEntries, index.documents - first);
    RT_TRY(read_exact(index.fd.get(), index.path, index.documents_at() + 8 * first, entries.data(), 8 * n));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = index.documents_at() + 8 * (first + i);
      const std::string what = fmt::format("document index {}", first + i);
      if (first + i == 0 && entries[i] != 0) return corrupt(index.path, at, what, fmt::format("{}", entries[i]), "0");
      if (entries[i] < last || entries[i] > index.sequences)
        return corrupt(index.path, at, what, fmt::format("{}", entries[i]),
                       fmt::format("{} to {}", last, index.sequences));
      last = entries[i];
    }
  }
  if (last != index.sequences)
    return corrupt(index.path, index.documents_at() + 8 * (index.documents - 1), "last entry of the document index",
                   fmt::format("{}", last), fmt::format("{}, the number of sequences", index.sequences));
  return {};
}

class MegatronTokens final : public FileTokens {
 public:
  MegatronTokens(Region region, Index index) : FileTokens(std::move(region)), index_(std::move(index)) {}

  int64_t sequence_count() const override { return index_.sequences; }
  Result<int64_t> sequence_start(int64_t sequence) const override {
    RT_TRY_SET(const std::vector<int64_t> starts, sequence_starts(sequence, 0));
    return starts[0];
  }
  Result<std::vector<int64_t>> sequence_starts(int64_t first, int64_t count) const override {
    RT_CHECK(first >= 0 && count >= 0 && first <= index_.sequences - count, "sequences {} to {} of {}", first,
             first + count, index_.sequences);
    std::vector<int64_t> out(static_cast<size_t>(count) + 1, index_.tokens);
    const int64_t stored = std::min(count + 1, index_.sequences - first);  // behind the last one the file has none
    const int64_t at = index_.offsets_at() + 8 * first;
    RT_TRY(read_exact(index_.fd.get(), index_.path, at, out.data(), 8 * stored));
    const int64_t item = dtype_size_bytes(index_.dtype);
    for (int64_t k = 0; k < stored; ++k) {
      const int64_t offset = out[k];
      if (offset < 0 || offset % item != 0 || offset / item > index_.tokens)
        return corrupt(index_.path, at + 8 * k, fmt::format("offset of sequence {}", first + k),
                       fmt::format("{}", offset), "what it was when the file was opened");
      out[k] = offset / item;
    }
    return out;
  }

 private:
  Index index_;
};

}  // namespace

Result<std::unique_ptr<TokenSource>> open_megatron(const std::string& prefix, const OpenOptions& options) {
  Index index;
  index.path = prefix + ".idx";
  auto index_file = open_readable(index.path);
  if (!index_file.ok())
    return std::move(index_file).error().with("a Megatron set is the pair <prefix>.bin, <prefix>.idx");
  index.fd = std::move(index_file.value().fd);
  index.size_bytes = index_file.value().size_bytes;
  RT_TRY(read_header(&index));
  RT_TRY(check_sequences(&index));
  RT_TRY(check_documents(index));

  FileTokens::Region region;
  region.path = prefix + ".bin";
  RT_TRY_SET(OpenedFile bin, open_readable(region.path));
  const int64_t item = dtype_size_bytes(index.dtype);
  if (bin.size_bytes != index.tokens * item)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: {} bytes, but {} says {} tokens of {} bytes, {} bytes; the two files do not belong "
                             "together or the .bin is cut",
                             region.path, bin.size_bytes, index.path, index.tokens, item, index.tokens * item)};
  if (index.tokens == 0) return Error{ErrorCode::kInvalidInput, region.path + ": no tokens"};
  RT_TRY_SET(const uint64_t salt, hash_sampled_blocks(index.fd.get(), index.path, kMegatronHeaderBytes,
                                                      index.size_bytes - kMegatronHeaderBytes, index.header_hash));
  region.fd = std::move(bin.fd);
  region.count = index.tokens;
  region.dtype = index.dtype;
  region.vocab = options.vocab;
  auto source = std::make_unique<MegatronTokens>(std::move(region), std::move(index));
  RT_TRY(source->compute_fingerprint(salt));
  return std::unique_ptr<TokenSource>(std::move(source));
}

}  // namespace cairn::data
