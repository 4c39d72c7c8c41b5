#include "runtime/data/token_file.h"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/data/file_io.h"
#include "runtime/data/file_tokens.h"

namespace cairn::data {
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

Result<std::unique_ptr<TokenSource>> open_one(const std::string& path, const std::string& dtype_text,
                                              const OpenOptions& options) {
  RT_TRY_SET(OpenedFile file, open_readable(path));
  FileTokens::Region region;
  region.path = path;
  region.vocab = options.vocab;

  LlmcHeader header;
  RT_TRY_SET(const bool is_llmc, read_llmc_header(file, path, &header));
  DType wanted = DType::kU16;
  if (dtype_text == "uint32") {
    wanted = DType::kU32;
  } else if (dtype_text != "uint16" && !(dtype_text.empty() && is_llmc)) {
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
  } else {
    const int64_t size = dtype_size_bytes(wanted);
    if (file.size_bytes % size != 0)
      return Error{ErrorCode::kCorrupt, fmt::format("{}: {} bytes is no whole number of {} tokens of {} bytes", path,
                                                    file.size_bytes, dtype_text, size)};
    region.dtype = wanted;
    region.count = file.size_bytes / size;
  }
  if (region.count == 0) return Error{ErrorCode::kInvalidInput, path + ": no tokens"};
  region.fd = std::move(file.fd);
  auto source = std::make_unique<FileTokens>(std::move(region));
  RT_TRY(source->compute_fingerprint(is_llmc ? 2 : 1));
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
  std::string place(int64_t token) const override { return base_->place(begin_ + token); }

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
  std::string place(int64_t token) const override {
    const auto part =
        static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end() - 1, token) - starts_.begin() - 1);
    return parts_[part]->place(token - starts_[part]);
  }

 private:
  std::vector<std::shared_ptr<const TokenSource>> parts_;
  std::vector<int64_t> starts_;  // of each part, and the total
  std::string name_;
};

Result<std::vector<std::string>> matching_paths(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 || path.find_first_of("*?[") == std::string::npos) return std::vector{path};
  glob_t found = {};
  const int rc = ::glob(path.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; rc == 0 && i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (rc == GLOB_NOMATCH) return Error{ErrorCode::kInvalidInput, path + ": no file matches this pattern"};
  if (rc != 0) return Error{ErrorCode::kIo, path + ": a folder of this pattern cannot be read"};
  std::sort(paths.begin(), paths.end());  // by bytes: glob's own order depends on the locale
  return paths;
}

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

}  // namespace cairn::data
