#include "runtime/data/file_tokens.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/data/file_io.h"

namespace cairn::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read as they stand");

constexpr int64_t kStagingBytes = 32 << 10;  // on the stack; a window of 2048 uint32 tokens fits twice
constexpr int64_t kScanBytes = 256 << 10;    // read at once where no token is kept: fits a core's own cache
constexpr int64_t kSampledBlocks = 64;
constexpr int64_t kSampledBlockBytes = 4096;
constexpr int64_t kContentBlockTokens = 2048;

// Converts n stored tokens, returns the index of the first one outside [0, limit) or -1. The check is a running
// maximum of the value as unsigned, so that the loop stays a vector loop; the culprit is searched only if there is one.
template <typename T>
int64_t convert(const unsigned char* bytes, int64_t n, uint64_t limit, int32_t* out) {
  using U = std::make_unsigned_t<T>;
  const auto load = [bytes](int64_t i) {
    T value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  };
  U greatest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T value = load(i);
    greatest = std::max(greatest, static_cast<U>(value));
    out[i] = static_cast<int32_t>(value);
  }
  if (static_cast<uint64_t>(greatest) < limit && (!std::is_signed_v<T> || static_cast<T>(greatest) >= 0)) return -1;
  for (int64_t i = 0; i < n; ++i) {
    const T value = load(i);
    if (std::is_signed_v<T> && value < T{0}) return i;
    if (static_cast<uint64_t>(static_cast<U>(value)) >= limit) return i;
  }
  return -1;
}

int64_t convert_any(DType dtype, const unsigned char* bytes, int64_t n, uint64_t limit, int32_t* out) {
  switch (dtype) {
    case DType::kU8:
      return convert<uint8_t>(bytes, n, limit, out);
    case DType::kU16:
      return convert<uint16_t>(bytes, n, limit, out);
    case DType::kU32:
      return convert<uint32_t>(bytes, n, limit, out);
    case DType::kI16:
      return convert<int16_t>(bytes, n, limit, out);
    case DType::kI32:
      return convert<int32_t>(bytes, n, limit, out);
    case DType::kI64:
      return convert<int64_t>(bytes, n, limit, out);
    default:
      RT_CHECK(false, "no token type: {}", dtype_name(dtype));
  }
}

/// A running minimum and maximum in the stored type, so that the loop is a vector loop.
template <typename T>
IdRange range_of(const unsigned char* bytes, int64_t n, int64_t limit) {
  const auto load = [bytes](int64_t i) {
    T value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  };
  T least = std::numeric_limits<T>::max(), greatest = std::numeric_limits<T>::min();
  for (int64_t i = 0; i < n; ++i) {
    const T value = load(i);
    least = std::min(least, value);
    greatest = std::max(greatest, value);
  }
  IdRange out{static_cast<int64_t>(least), static_cast<int64_t>(greatest), 0};
  if (out.least >= 0 && out.greatest < limit) return out;
  for (int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<int64_t>(load(i));
    out.outside += value < 0 || value >= limit ? 1 : 0;
  }
  return out;
}

IdRange range_of_any(DType dtype, const unsigned char* bytes, int64_t n, int64_t limit) {
  switch (dtype) {
    case DType::kU8:
      return range_of<uint8_t>(bytes, n, limit);
    case DType::kU16:
      return range_of<uint16_t>(bytes, n, limit);
    case DType::kU32:
      return range_of<uint32_t>(bytes, n, limit);
    case DType::kI16:
      return range_of<int16_t>(bytes, n, limit);
    case DType::kI32:
      return range_of<int32_t>(bytes, n, limit);
    case DType::kI64:
      return range_of<int64_t>(bytes, n, limit);
    default:
      RT_CHECK(false, "no token type: {}", dtype_name(dtype));
  }
}

std::string stored_value(DType dtype, const unsigned char* bytes, int64_t index) {
  const int64_t size = dtype_size_bytes(dtype);
  uint64_t raw = 0;
  std::memcpy(&raw, bytes + index * size, static_cast<size_t>(size));
  const bool is_signed = dtype == DType::kI16 || dtype == DType::kI32 || dtype == DType::kI64;
  if (!is_signed) return fmt::format("{}", raw);
  const int shift = static_cast<int>(64 - 8 * size);
  return fmt::format("{}", static_cast<int64_t>(raw << shift) >> shift);
}

}  // namespace

Result<int64_t> TokenSource::sequence_start(int64_t index) const {
  RT_CHECK(index >= 0 && index <= sequence_count(), "sequence {} of {}", index, sequence_count());
  return index == 0 ? 0 : token_count();
}

Result<std::vector<int64_t>> TokenSource::sequence_starts(int64_t first, int64_t count) const {
  std::vector<int64_t> out;
  for (int64_t k = 0; k <= count; ++k) {
    RT_TRY_SET(const int64_t start, sequence_start(first + k));
    out.push_back(start);
  }
  return out;
}

Status TokenSource::rows(int64_t start, int64_t count, int32_t*, int32_t*, int32_t*) const {
  RT_CHECK(false, "{}: rows {} to {} of a source that has only tokens", name(), start, start + count);
  return {};
}

Result<std::vector<DocumentPart>> TokenSource::documents(int64_t start, int64_t count) const {
  RT_CHECK(start >= 0 && count >= 0 && start <= token_count() - count, "{}: documents of tokens [{}, {} + {}) of {}",
           name(), start, start, count, token_count());
  if (sequence_count() == 1) return std::vector{DocumentPart{name(), -1, start, start + count, start}};
  int64_t low = 0, high = sequence_count();  // the last sequence that begins at or before `start` is in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    RT_TRY_SET(const int64_t begin, sequence_start(middle));
    (begin <= start ? low : high) = middle;
  }
  std::vector<DocumentPart> out;
  RT_TRY_SET(int64_t begin, sequence_start(low));
  for (int64_t at = start; at < start + count; ++low) {
    RT_TRY_SET(const int64_t next, sequence_start(low + 1));
    const int64_t end = std::min(next, start + count);
    if (at < end) out.push_back({name(), low, at - begin, end - begin, at});
    at = std::max(at, end);
    begin = next;
  }
  return out;
}

std::string TokenSource::place(int64_t token) const {
  const Result<std::vector<DocumentPart>> parts = documents(token, 1);
  if (!parts.ok()) return fmt::format("{}: token {}", name(), token);
  if (parts.value().empty()) return fmt::format("{}: fill of a window", name());
  const DocumentPart& part = parts.value().front();
  if (part.document < 0) return fmt::format("{}: token {}", part.file, part.begin);
  return fmt::format("{}: document {}, token {} of it", part.file, part.document, part.begin);
}

Status FileTokens::read(int64_t start, int64_t count, int32_t* out) const {
  RT_CHECK(start >= 0 && count >= 0 && start <= region_.count - count, "{}: tokens [{}, {} + {}) of {}", region_.path,
           start, start, count, region_.count);
  const int64_t size = dtype_size_bytes(region_.dtype);
  const uint64_t limit = region_.vocab > 0 ? static_cast<uint64_t>(region_.vocab)
                                           : static_cast<uint64_t>(std::numeric_limits<int32_t>::max()) + 1;
  alignas(64) std::array<unsigned char, kStagingBytes> staging;
  while (count > 0) {
    const int64_t n = std::min(count, kStagingBytes / size);
    const int64_t offset = region_.offset_bytes + start * size;
    RT_TRY(read_exact(region_.fd.get(), region_.path, offset, staging.data(), n * size));
    const int64_t bad = convert_any(region_.dtype, staging.data(), n, limit, out);
    if (bad >= 0)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: token {} (byte {}) is {}, expected 0 to {}{}", region_.path, start + bad,
                               offset + bad * size, stored_value(region_.dtype, staging.data(), bad), limit - 1,
                               region_.vocab > 0 ? "; was the file made with another tokenizer than the recipe's?"
                                                 : ", what a token can be")};
    start += n;
    count -= n;
    out += n;
  }
  return {};
}

Result<IdRange> FileTokens::id_range(int64_t start, int64_t count, int64_t limit) const {
  RT_CHECK(start >= 0 && count >= 0 && start <= region_.count - count, "{}: tokens [{}, {} + {}) of {}", region_.path,
           start, start, count, region_.count);
  const int64_t size = dtype_size_bytes(region_.dtype);
  std::vector<unsigned char> staging(static_cast<size_t>(std::min(kScanBytes, count * size)));
  IdRange out;
  while (count > 0) {
    const int64_t n = std::min(count, kScanBytes / size);
    RT_TRY(read_exact(region_.fd.get(), region_.path, region_.offset_bytes + start * size, staging.data(), n * size));
    out.add(range_of_any(region_.dtype, staging.data(), n, limit));
    start += n;
    count -= n;
  }
  return out;
}

Status FileTokens::compute_fingerprint(uint64_t salt) {
  const uint64_t seed = hash_words({static_cast<uint64_t>(region_.dtype), static_cast<uint64_t>(region_.count), salt});
  RT_TRY_SET(fingerprint_, hash_sampled_blocks(region_.fd.get(), region_.path, region_.offset_bytes,
                                               region_.count * dtype_size_bytes(region_.dtype), seed));
  return {};
}

namespace {

// Of `whole` blocks, the i-th of `sampled`: spread over all, the first and the last among them. The division keeps
// i * (whole - 1) far below 2^63 for any real file.
int64_t sampled_block(int64_t i, int64_t sampled, int64_t whole) {
  return sampled == 1 ? 0 : i * (whole - 1) / (sampled - 1);
}

}  // namespace

Result<uint64_t> content_hash(const TokenSource& source, int64_t first_tokens) {
  RT_CHECK(first_tokens >= 1 && first_tokens <= source.token_count(), "{}: content of {} tokens of {}", source.name(),
           first_tokens, source.token_count());
  std::vector<int32_t> block(kContentBlockTokens);
  uint64_t hash = hash_words({static_cast<uint64_t>(first_tokens)});
  const int64_t whole = (first_tokens + kContentBlockTokens - 1) / kContentBlockTokens;  // the last may be short
  const int64_t sampled = std::min(whole, kSampledBlocks);
  for (int64_t i = 0; i < sampled; ++i) {
    const int64_t begin = sampled_block(i, sampled, whole) * kContentBlockTokens;
    const int64_t count = std::min(kContentBlockTokens, first_tokens - begin);
    RT_TRY(source.read(begin, count, block.data()));
    hash = XXH3_64bits_withSeed(block.data(), static_cast<size_t>(count) * sizeof(int32_t), hash);
  }
  if (source.marks() != 0) hash = hash_words({hash, source.marks()});
  return std::max<uint64_t>(hash, 1);
}

Result<uint64_t> hash_sampled_blocks(int fd, const std::string& path, int64_t offset, int64_t size, uint64_t seed) {
  std::array<unsigned char, kSampledBlockBytes> block;
  uint64_t hash = hash_words({seed, static_cast<uint64_t>(size)});
  const int64_t whole = (size + kSampledBlockBytes - 1) / kSampledBlockBytes;  // blocks, the last may be short
  const int64_t sampled = std::min(whole, kSampledBlocks);
  for (int64_t i = 0; i < sampled; ++i) {
    const int64_t begin = sampled_block(i, sampled, whole) * kSampledBlockBytes;
    const int64_t length = std::min(kSampledBlockBytes, size - begin);
    RT_TRY(read_exact(fd, path, offset + begin, block.data(), length));
    hash = XXH3_64bits_withSeed(block.data(), static_cast<size_t>(length), hash);
  }
  return hash;
}

uint64_t hash_words(std::initializer_list<uint64_t> words) {
  return XXH3_64bits(words.begin(), words.size() * sizeof(uint64_t));
}

}  // namespace cairn::data
