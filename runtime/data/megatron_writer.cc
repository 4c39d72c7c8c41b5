#include "runtime/data/megatron_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>

#include "runtime/core/file_calls.h"
#include "runtime/core/make_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/data/channels.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/file_io.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/megatron_format.h"
#include "runtime/data/set_origin.h"

namespace cairn::data {
namespace {

constexpr size_t kTokenBufferBytes = 1 << 20;
constexpr size_t kLengthBufferEntries = 64 << 10;
constexpr int64_t kMaxDocumentTokens = std::numeric_limits<int32_t>::max();

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// Opens or takes over a temporary file. The lock comes before the truncation, and the name must still be ours after
// it, so that two writers never share a file.
Result<Fd> open_temporary(const std::string& path) {
  Result<Fd> made = open_own(path, O_RDWR | O_EXCL);
  const bool is_new = made.ok();
  if (!is_new && made.error().os_errno == EEXIST) made = open_own(path, O_RDWR);
  RT_TRY_SET(Fd fd, std::move(made));
  struct stat by_fd = {}, by_name = {};
  bool locked = ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
  if (!locked && is_missing_call(errno)) {
    if (!is_new) {
      return Error{ErrorCode::kInvalidInput,
                   path +
                       ": exists, and its file system has no locks (flock) to say whether another process writes "
                       "this set; if none does, remove it"};
    }
    locked = true;  // made by this process: another one would find it
  }
  if (!locked || ::fstat(fd.get(), &by_fd) != 0 || ::lstat(path.c_str(), &by_name) != 0 ||
      by_fd.st_ino != by_name.st_ino || by_fd.st_dev != by_name.st_dev)
    return Error{ErrorCode::kInvalidInput, path +
                                               ": another process is writing this set; wait for it or take another "
                                               "output prefix"};
  if (::ftruncate(fd.get(), 0) != 0) return os_error(errno, path);
  return fd;
}

}  // namespace

DType MegatronWriter::dtype_for_vocab(int64_t vocab) { return vocab < kUint16Vocab ? DType::kU16 : DType::kI32; }

Result<MegatronWriter> MegatronWriter::create(const std::string& prefix, DType dtype, const Options& options) {
  RT_CHECK(dtype == DType::kU16 || dtype == DType::kI32, "{}", dtype_name(dtype));
  if (!options.overwrite)
    for (const char* suffix : {".bin", ".idx"})
      if (exists(prefix + suffix))
        return Error{ErrorCode::kInvalidInput,
                     prefix + suffix + " exists; remove it, or replace the pair with --overwrite"};
  RT_TRY(make_folder_of(prefix + ".bin"));
  MegatronWriter writer;
  writer.dtype_ = dtype;
  RT_TRY_SET(writer.bin_, open_temporary(prefix + ".bin.tmp"));
  writer.prefix_ = prefix;  // from here on the destructor removes the temporary files: they are ours
  RT_TRY_SET(writer.idx_, open_temporary(prefix + ".idx.tmp"));
  writer.token_buffer_.reserve(kTokenBufferBytes + sizeof(int32_t));
  writer.length_buffer_.reserve(kLengthBufferEntries);
  return writer;
}

MegatronWriter::~MegatronWriter() {
  if (prefix_.empty()) return;
  if (bin_) ::unlink((prefix_ + ".bin.tmp").c_str());
  if (idx_) ::unlink((prefix_ + ".idx.tmp").c_str());
}

Status MegatronWriter::add(std::span<const int32_t> tokens) {
  const int64_t limit = dtype_ == DType::kU16 ? 65535 : std::numeric_limits<int32_t>::max();
  if (open_tokens_ > kMaxDocumentTokens - static_cast<int64_t>(tokens.size()))
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("document {} has more than {} tokens, the most a Megatron index can describe; cut the text "
                    "into documents",
                    documents_, kMaxDocumentTokens)};
  for (const int32_t token : tokens) {
    if (token < 0 || token > limit)
      return Error{ErrorCode::kInvalidInput, fmt::format("token {} of document {} is {}, expected 0 to {}",
                                                         open_tokens_, documents_, token, limit)};
    std::array<unsigned char, sizeof(int32_t)> bytes;
    std::memcpy(bytes.data(), &token, sizeof(int32_t));  // little-endian: the low bytes come first
    token_buffer_.insert(token_buffer_.end(), bytes.begin(), bytes.begin() + dtype_size_bytes(dtype_));
    if (token_buffer_.size() >= kTokenBufferBytes) RT_TRY(flush_tokens());
    ++open_tokens_;
  }
  return {};
}

Result<bool> MegatronWriter::end_document() {
  if (open_tokens_ == 0) return false;
  length_buffer_.push_back(static_cast<int32_t>(open_tokens_));
  if (length_buffer_.size() >= kLengthBufferEntries) RT_TRY(flush_lengths());
  ++documents_;
  tokens_ += open_tokens_;
  open_tokens_ = 0;
  return true;
}

Status MegatronWriter::flush_tokens() {
  const auto size = static_cast<int64_t>(token_buffer_.size());
  RT_TRY(write_exact(bin_.get(), prefix_ + ".bin.tmp", bin_bytes_, token_buffer_.data(), size));
  bin_bytes_ += size;
  token_buffer_.clear();
  return {};
}

// The lengths begin at a fixed place, so they can be written before their number is known.
Status MegatronWriter::flush_lengths() {
  const auto count = static_cast<int64_t>(length_buffer_.size());
  RT_TRY(write_exact(idx_.get(), prefix_ + ".idx.tmp", kMegatronHeaderBytes + 4 * idx_lengths_, length_buffer_.data(),
                     4 * count));
  idx_lengths_ += count;
  length_buffer_.clear();
  return {};
}

Status MegatronWriter::write_index_tail() {
  const std::string path = prefix_ + ".idx.tmp";
  const int64_t offsets_at = kMegatronHeaderBytes + 4 * documents_;
  const int64_t documents_at = kMegatronHeaderBytes + 12 * documents_;
  const auto block = static_cast<int64_t>(kLengthBufferEntries);
  std::vector<int32_t> lengths(kLengthBufferEntries);
  std::vector<int64_t> entries(kLengthBufferEntries);
  int64_t offset = 0;
  for (int64_t first = 0; first < documents_; first += block) {
    const int64_t n = std::min(block, documents_ - first);
    RT_TRY(read_exact(idx_.get(), path, kMegatronHeaderBytes + 4 * first, lengths.data(), 4 * n));
    for (int64_t i = 0; i < n; ++i) {
      entries[i] = offset;
      offset += lengths[i] * dtype_size_bytes(dtype_);
    }
    RT_TRY(write_exact(idx_.get(), path, offsets_at + 8 * first, entries.data(), 8 * n));
  }
  for (int64_t first = 0; first <= documents_; first += block) {
    const int64_t n = std::min(block, documents_ + 1 - first);
    for (int64_t i = 0; i < n; ++i) entries[i] = first + i;
    RT_TRY(write_exact(idx_.get(), path, documents_at + 8 * first, entries.data(), 8 * n));
  }
  std::array<char, kMegatronHeaderBytes> header = {};
  const uint8_t code = dtype_ == DType::kU16 ? kCodeU16 : kCodeI32;
  const auto sequences = static_cast<uint64_t>(documents_), documents = sequences + 1;
  std::memcpy(header.data(), kMegatronMagic.data(), kMegatronMagic.size());
  std::memcpy(header.data() + kVersionOffset, &kMegatronVersion, 8);
  std::memcpy(header.data() + kDtypeOffset, &code, 1);
  std::memcpy(header.data() + kSequencesOffset, &sequences, 8);
  std::memcpy(header.data() + kDocumentsOffset, &documents, 8);
  return write_exact(idx_.get(), path, 0, header.data(), kMegatronHeaderBytes);
}

Status MegatronWriter::finish(const std::function<Status()>& beside) {
  RT_TRY_SET(const bool ended, end_document());
  (void)ended;
  if (documents_ == 0) return Error{ErrorCode::kInvalidInput, prefix_ + ": no tokens to write"};
  RT_TRY(flush_tokens());
  RT_TRY(flush_lengths());
  RT_TRY(write_index_tail());
  const std::string bin = prefix_ + ".bin", idx = prefix_ + ".idx";
  RT_TRY(sync_file(bin_.get(), bin + ".tmp"));
  RT_TRY(sync_file(idx_.get(), idx + ".tmp"));
  if (::unlink(idx.c_str()) != 0 && errno != ENOENT) return os_error(errno, idx);
  RT_TRY(sync_parent_dir(idx));  // until here a crash leaves the old pair; from here on there is none till the commit
  for (const std::string& old :
       {loss_path(prefix_), channel_path(prefix_), origin_path(prefix_), document_origins_path(prefix_)}) {
    if (::unlink(old.c_str()) != 0 && errno != ENOENT) return os_error(errno, old);
  }
  if (beside) RT_TRY(beside());
  if (::rename((bin + ".tmp").c_str(), bin.c_str()) != 0) return os_error(errno, bin);
  bin_.reset();
  if (::rename((idx + ".tmp").c_str(), idx.c_str()) != 0) return os_error(errno, idx);
  idx_.reset();
  return sync_parent_dir(idx);
}

}  // namespace cairn::data
