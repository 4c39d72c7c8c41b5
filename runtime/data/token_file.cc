#include "runtime/data/token_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "runtime/data/file_io.h"
#include "runtime/data/file_tokens.h"
#include "runtime/data/input_files.h"
#include "runtime/data/text_input.h"

namespace cairn::data {

namespace fs = std::filesystem;
namespace {

// llm.c, dev/data/data_common.py: a header of 256 int32, then the tokens.
constexpr int64_t kLlmcHeaderBytes = 1024;
constexpr int32_t kLlmcGpt2Magic = 20240520, kLlmcGpt2Version = 1;    // uint16 tokens
constexpr int32_t kLlmcLlamaMagic = 20240801, kLlmcLlamaVersion = 7;  // uint32 tokens
constexpr int32_t kLlmcEvalMagic = 20240522;

// Set when the first 1024 bytes are an llm.c header: magic, version, count, then zeros. A raw file of tokens would
// have to hold 253 zero words at just this place to be mistaken for one.
struct LlmcHeader {
  DType dtype = DType::kU16;
  int64_t count = 0;
};

Result<bool> read_llmc_header(const OpenedFile& file, const std::string& path, LlmcHeader* header) {
  std::array<int32_t, kLlmcHeaderBytes / 4> words = {};
  if (file.size_bytes < kLlmcHeaderBytes) return false;
  RT_TRY(read_exact(file.fd.get(), path, 0, words.data(), kLlmcHeaderBytes));
  const int32_t magic = words[0];
  if (magic != kLlmcGpt2Magic && magic != kLlmcLlamaMagic && magic != kLlmcEvalMagic) return false;
  if (magic == kLlmcEvalMagic && words[1] == 1)
    return Error{ErrorCode::kUnsupported,
                 path + ": this is an llm.c evaluation file (magic 20240522), not a stream of training tokens"};
  const auto first_set = std::find_if(words.begin() + 3, words.end(), [](int32_t word) { return word != 0; });
  if (first_set != words.end() || magic == kLlmcEvalMagic) return false;
  const int32_t version = magic == kLlmcGpt2Magic ? kLlmcGpt2Version : kLlmcLlamaVersion;
  if (words[1] != version)
    return Error{ErrorCode::kUnsupported, fmt::format("{}: byte 4: llm.c shard version is {}, expected {} for magic {}",
                                                      path, words[1], version, magic)};
  header->dtype = magic == kLlmcGpt2Magic ? DType::kU16 : DType::kU32;
  header->count = words[2];
  const int64_t expected = kLlmcHeaderBytes + header->count * dtype_size_bytes(header->dtype);
  if (words[2] < 0 || expected != file.size_bytes)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte 8: the llm.c header says {} tokens, which makes {} bytes, the file has {}", path,
                             words[2], expected, file.size_bytes)};
  return true;
}

constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr int64_t kMaxNpyHeader = 1 << 16;

struct NpyHeader {
  DType dtype = DType::kU16;
  int64_t offset_bytes = 0, count = 0;
};

/// The value of `'name':` in the header's dictionary, brackets included.
std::string_view npy_field(std::string_view header, std::string_view name) {
  const size_t at = header.find(fmt::format("'{}':", name));
  if (at == header.npos) return {};
  std::string_view rest = header.substr(at + name.size() + 3);
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  const size_t end = rest.starts_with('(') ? rest.find(')') + 1 : rest.find_first_of(",}");
  return rest.substr(0, end);
}

/// The header that numpy.save writes (numpy.lib.format, versions 1.0 to 3.0). Errors: kUnsupported for what is no list
/// of integers, kCorrupt for a header that contradicts the file.
Result<bool> read_npy_header(const OpenedFile& file, const std::string& path, NpyHeader* out) {
  std::array<unsigned char, 12> front = {};
  if (file.size_bytes < std::ssize(front)) return false;
  RT_TRY(read_exact(file.fd.get(), path, 0, front.data(), std::ssize(front)));
  if (std::memcmp(front.data(), kNpyMagic.data(), kNpyMagic.size()) != 0) return false;
  const bool wide = front[6] >= 2;
  int64_t length = front[8] | front[9] << 8;
  if (wide) length |= static_cast<int64_t>(front[10]) << 16 | static_cast<int64_t>(front[11]) << 24;
  const int64_t begin = wide ? 12 : 10;
  if (front[6] < 1 || front[6] > 3 || length > kMaxNpyHeader || begin + length > file.size_bytes) {
    return Error{
        ErrorCode::kCorrupt,
        fmt::format("{}: byte 6: a .npy header of version {} with {} bytes; expected version 1 to 3 and at most "
                    "{} bytes within the file's {}",
                    path, front[6], length, kMaxNpyHeader, file.size_bytes)};
  }
  std::string header(static_cast<size_t>(length), '\0');
  RT_TRY(read_exact(file.fd.get(), path, begin, header.data(), length));
  constexpr std::pair<std::string_view, DType> kTypes[] = {{"'|u1'", DType::kU8},  {"'<u2'", DType::kU16},
                                                           {"'<u4'", DType::kU32}, {"'<i2'", DType::kI16},
                                                           {"'<i4'", DType::kI32}, {"'<i8'", DType::kI64}};
  const std::string_view descr = npy_field(header, "descr"), shape = npy_field(header, "shape");
  const auto* const type = std::ranges::find(kTypes, descr, &std::pair<std::string_view, DType>::first);
  int64_t count = -1;
  if (shape.starts_with('(')) {
    const auto [end, error] = std::from_chars(shape.data() + 1, shape.data() + shape.size(), count);
    const std::string_view rest = shape.substr(static_cast<size_t>(end - shape.data()));
    if (error != std::errc() || (rest != ",)" && rest != ", )") || count < 0) count = -1;
  }
  if (type == std::end(kTypes) || count < 0) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: byte {}: a .npy of type {} and shape {}; expected a list of tokens: little-endian "
                             "integers of one dimension, as numpy.save(path, ids.astype(\"<u4\").ravel()) writes",
                             path, begin, descr.empty() ? "?" : descr, shape.empty() ? "?" : shape)};
  }
  *out = {type->second, begin + length, count};
  if (out->offset_bytes + count * dtype_size_bytes(out->dtype) != file.size_bytes) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte {}: the .npy header says {} tokens of {}, which makes {} bytes, the file has {}",
                             path, begin, count, dtype_name(out->dtype),
                             out->offset_bytes + count * dtype_size_bytes(out->dtype), file.size_bytes)};
  }
  return true;
}

/// Looks at raw tokens read as uint16 or uint32 for the pattern of another type: high halves of wider tokens are small
/// and come at fixed places, and halves of narrower ones make ids beyond the vocabulary. A file that numpy.save wrote
/// says its type, so it needs no look. Errors: kInvalidInput with the likely type.
Status check_dtype(const OpenedFile& file, const std::string& path, DType dtype, int64_t vocab) {
  constexpr int64_t kBlock = 8192, kFewest = 256;
  const int64_t whole = file.size_bytes / 8 * 8;
  if (whole < kFewest) return {};
  std::vector<uint16_t> halves;
  const int64_t last = std::max<int64_t>(0, whole - kBlock);
  for (const int64_t at : {int64_t{0}, last / 2 / 8 * 8, last}) {
    std::vector<uint16_t> block(static_cast<size_t>(std::min(kBlock, whole) / 2));
    RT_TRY(read_exact(file.fd.get(), path, at, block.data(), std::ssize(block) * 2));
    halves.insert(halves.end(), block.begin(), block.end());
  }
  // A vocabulary has fewer than 2^20 tokens. Low halves are of any size, so most are above that of a high half.
  constexpr uint16_t kMostHigh = 15;
  const auto words = std::ssize(halves) / 4;
  std::array<int64_t, 4> small = {}, zero = {};
  int64_t beyond = 0, halves_beyond = 0;
  for (int64_t i = 0; i < words * 4; ++i) {
    small[i % 4] += halves[i] <= kMostHigh ? 1 : 0;
    zero[i % 4] += halves[i] == 0 ? 1 : 0;
    if (i % 2 == 1) beyond += (static_cast<int64_t>(halves[i]) << 16 | halves[i - 1]) >= vocab ? 1 : 0;
    halves_beyond += halves[i] >= vocab ? 1 : 0;
  }
  const auto refused = [&](std::string_view likely, std::string_view remedy) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: read as {} it has no likely tokens; the file looks like {}: {}. Is it {} after all, "
                             "write it with numpy.save, whose header says so",
                             path, dtype == DType::kU16 ? "uint16" : "uint32", likely, remedy,
                             dtype == DType::kU16 ? "uint16" : "uint32")};
  };
  const bool wide = small[1] == words && zero[2] == words && zero[3] == words && small[0] < words / 2;
  if (wide) return refused("int64", "numpy.fromfile(path, \"<i8\").astype(\"<u4\").tofile(new) makes uint32 of it");
  if (dtype == DType::kU16 && small[1] == words && small[3] == words && small[0] + small[2] < words) {
    return refused("uint32", "say dtype = \"uint32\" (--dtype uint32)");
  }
  if (dtype == DType::kU32 && vocab > 0 && halves_beyond == 0 && beyond > words) {
    return refused("uint16", "say dtype = \"uint16\" (--dtype uint16)");
  }
  return {};
}

Result<std::unique_ptr<TokenSource>> open_one(const std::string& path, const std::string& dtype_text,
                                              const OpenOptions& options) {
  RT_TRY_SET(OpenedFile file, open_readable(path));
  FileTokens::Region region;
  region.path = path;
  region.vocab = options.vocab;

  LlmcHeader header;
  RT_TRY_SET(const bool is_llmc, read_llmc_header(file, path, &header));
  NpyHeader npy;
  RT_TRY_SET(const bool is_npy, read_npy_header(file, path, &npy));
  DType wanted = DType::kU16;
  if (dtype_text == "uint32") {
    wanted = DType::kU32;
  } else if (dtype_text != "uint16" && !(dtype_text.empty() && (is_llmc || is_npy))) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: token type is \"{}\", expected \"uint16\" or \"uint32\" (a raw token file does not "
                             "tell its own)",
                             path, dtype_text)};
  }
  if (is_llmc) {
    if (!dtype_text.empty() && wanted != header.dtype)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: the recipe says {}, but this is an llm.c shard of {} tokens (byte 0)", path,
                               dtype_text, header.dtype == DType::kU16 ? "uint16" : "uint32")};
    region.dtype = header.dtype;
    region.offset_bytes = kLlmcHeaderBytes;
    region.count = header.count;
  } else if (is_npy) {
    const bool named = npy.dtype == DType::kU16 || npy.dtype == DType::kU32;  // by a recipe: the other types cannot be
    if (!dtype_text.empty() && named && wanted != npy.dtype) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: the recipe says {}, but this is a .npy of {} tokens (byte 0)", path, dtype_text,
                               npy.dtype == DType::kU16 ? "uint16" : "uint32")};
    }
    region.dtype = npy.dtype;
    region.offset_bytes = npy.offset_bytes;
    region.count = npy.count;
  } else {
    std::string begin(static_cast<size_t>(std::min<int64_t>(file.size_bytes, 4096)), '\0');
    RT_TRY(read_exact(file.fd.get(), path, 0, begin.data(), std::ssize(begin)));
    if (const std::string kind = no_tokens(begin); !kind.empty()) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: {}; a token file has nothing but numbers of two or four bytes", path, kind)};
    }
    const int64_t size = dtype_size_bytes(wanted);
    if (file.size_bytes % size != 0)
      return Error{ErrorCode::kCorrupt, fmt::format("{}: {} bytes is no whole number of {} tokens of {} bytes", path,
                                                    file.size_bytes, dtype_text, size)};
    RT_TRY(check_dtype(file, path, wanted, options.vocab));
    region.dtype = wanted;
    region.count = file.size_bytes / size;
  }
  if (region.count == 0) return Error{ErrorCode::kInvalidInput, path + ": no tokens"};
  region.fd = std::move(file.fd);
  auto source = std::make_unique<FileTokens>(std::move(region));
  RT_TRY(source->compute_fingerprint(is_llmc ? 2 : is_npy ? 3 : 1));
  return std::unique_ptr<TokenSource>(std::move(source));
}

class SlicedTokens final : public TokenSource {
 public:
  SlicedTokens(std::shared_ptr<const TokenSource> base, int64_t begin, int64_t end)
      : base_(std::move(base)),
        begin_(begin),
        count_(end - begin),
        name_(fmt::format("{} [{}, {})", base_->name(), begin, end)) {}

  const std::string& name() const override { return name_; }
  int64_t token_count() const override { return count_; }
  Status read(int64_t start, int64_t count, int32_t* out) const override {
    RT_CHECK(start >= 0 && count >= 0 && start <= count_ - count, "{}: tokens [{}, {} + {}) of {}", name_, start, start,
             count, count_);
    return base_->read(begin_ + start, count, out);
  }
  Result<IdRange> id_range(int64_t start, int64_t count, int64_t limit) const override {
    RT_CHECK(start >= 0 && count >= 0 && start <= count_ - count, "{}: tokens [{}, {} + {}) of {}", name_, start, start,
             count, count_);
    return base_->id_range(begin_ + start, count, limit);
  }
  uint64_t fingerprint() const override {
    return hash_words({base_->fingerprint(), static_cast<uint64_t>(begin_), static_cast<uint64_t>(count_)});
  }
  Result<std::vector<DocumentPart>> documents(int64_t start, int64_t count) const override {
    RT_TRY_SET(std::vector<DocumentPart> out, base_->documents(begin_ + start, count));
    for (DocumentPart& part : out) part.at -= begin_;
    return out;
  }

 private:
  std::shared_ptr<const TokenSource> base_;
  int64_t begin_ = 0, count_ = 0;
  std::string name_;
};

class JoinedTokens final : public TokenSource {
 public:
  explicit JoinedTokens(std::vector<std::shared_ptr<const TokenSource>> parts) : parts_(std::move(parts)) {
    starts_.push_back(0);
    for (const auto& part : parts_) starts_.push_back(starts_.back() + part->token_count());
    name_ =
        parts_.size() == 1 ? parts_[0]->name() : fmt::format("{} and {} more", parts_[0]->name(), parts_.size() - 1);
  }

  const std::string& name() const override { return name_; }
  int64_t token_count() const override { return starts_.back(); }
  Status read(int64_t start, int64_t count, int32_t* out) const override {
    RT_CHECK(start >= 0 && count >= 0 && start <= starts_.back() - count, "{}: tokens [{}, {} + {}) of {}", name_,
             start, start, count, starts_.back());
    auto part = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), start) - starts_.begin() - 1);
    for (; count > 0; ++part) {
      const int64_t n = std::min(count, starts_[part + 1] - start);
      RT_TRY(parts_[part]->read(start - starts_[part], n, out));
      start += n;
      count -= n;
      out += n;
    }
    return {};
  }
  Result<IdRange> id_range(int64_t start, int64_t count, int64_t limit) const override {
    RT_CHECK(start >= 0 && count >= 0 && start <= starts_.back() - count, "{}: tokens [{}, {} + {}) of {}", name_,
             start, start, count, starts_.back());
    auto part = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), start) - starts_.begin() - 1);
    IdRange out;
    for (; count > 0; ++part) {
      const int64_t n = std::min(count, starts_[part + 1] - start);
      RT_TRY_SET(const IdRange of_part, parts_[part]->id_range(start - starts_[part], n, limit));
      out.add(of_part);
      start += n;
      count -= n;
    }
    return out;
  }
  uint64_t fingerprint() const override {
    uint64_t hash = hash_words({parts_.size()});
    for (const auto& part : parts_) hash = hash_words({hash, part->fingerprint()});
    return hash;
  }
  int64_t sequence_count() const override { return static_cast<int64_t>(parts_.size()); }
  Result<int64_t> sequence_start(int64_t index) const override { return starts_.at(static_cast<size_t>(index)); }
  Result<std::vector<DocumentPart>> documents(int64_t start, int64_t count) const override {
    std::vector<DocumentPart> out;
    auto part = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end() - 1, start) - starts_.begin() - 1);
    for (int64_t at = start; at < start + count; ++part) {
      const int64_t end = std::min(start + count, starts_[part + 1]);
      RT_TRY_SET(std::vector<DocumentPart> found, parts_[part]->documents(at - starts_[part], end - at));
      for (DocumentPart& one : found) {
        one.at += starts_[part];
        out.push_back(std::move(one));
      }
      at = end;
    }
    return out;
  }

 private:
  std::vector<std::shared_ptr<const TokenSource>> parts_;
  std::vector<int64_t> starts_;  // of each part, and the total
  std::string name_;
};

}  // namespace

Result<std::unique_ptr<TokenSource>> open_token_file(const std::string& path, const std::string& dtype,
                                                     const OpenOptions& options) {
  RT_TRY_SET(const std::vector<std::string> paths, matching_paths(path));
  if (paths.size() == 1) return open_one(paths[0], dtype, options);
  std::vector<std::shared_ptr<const TokenSource>> parts;
  for (const std::string& one : paths) {
    RT_TRY_SET(std::unique_ptr<TokenSource> part, open_one(one, dtype, options));
    parts.push_back(std::move(part));
  }
  return concat_tokens(std::move(parts));
}

std::unique_ptr<TokenSource> slice_tokens(std::shared_ptr<const TokenSource> base, int64_t begin, int64_t end) {
  RT_CHECK(base && 0 <= begin && begin <= end && end <= base->token_count(), "slice [{}, {})", begin, end);
  return std::make_unique<SlicedTokens>(std::move(base), begin, end);
}

std::unique_ptr<TokenSource> concat_tokens(std::vector<std::shared_ptr<const TokenSource>> parts) {
  RT_CHECK(!parts.empty(), "no parts");
  return std::make_unique<JoinedTokens>(std::move(parts));
}

std::string megatron_prefix(const std::string& path) {
  std::error_code ignored;
  if (fs::exists(path + ".idx", ignored)) return path;
  const fs::path file(path);
  if (file.extension() != ".idx" && file.extension() != ".bin") return {};
  const std::string prefix = path.substr(0, path.size() - 4);
  // A lone .bin is a token file; a lone .idx can only be half a pair, and opening that names what is missing.
  return fs::exists(prefix + ".idx", ignored) || file.extension() == ".idx" ? prefix : std::string();
}

Result<NamedTokens> open_named_tokens(const std::string& path, const std::string& dtype, const OpenOptions& options) {
  NamedTokens out{.source = nullptr, .prefix = megatron_prefix(path)};
  std::error_code ignored, failed;
  if (out.prefix.empty() && !path.empty() && dtype.empty() && !fs::exists(path, failed)) {
    if (failed) return os_error(failed.value(), path);
    const bool half = fs::exists(path + ".bin", ignored);
    return Error{ErrorCode::kInvalidInput,
                 half ? fmt::format("{}.idx: is missing, and {}.bin is half of a Megatron pair; as a token file it is "
                                    "named with its ending and its dtype",
                                    path, path)
                      : fmt::format("{}: neither {}.idx (a Megatron pair) nor a file of that name", path, path)};
  }
  if (out.prefix.empty()) {
    RT_TRY_SET(out.source, open_token_file(path, dtype, options));
  } else {
    RT_TRY_SET(out.source, open_megatron(out.prefix, options));
  }
  return out;
}

}  // namespace cairn::data
