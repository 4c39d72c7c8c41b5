#include "runtime/data/document_origins.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "runtime/core/check.h"
#include "runtime/data/file_io.h"

namespace cairn::data {
namespace {

constexpr std::string_view kMagic = "CAIRNOR1";
constexpr size_t kDocumentBytes = 12, kFileBytes = 5, kBufferBytes = 768 << 10;
constexpr int64_t kCountsBytes = 4 * 8, kFooterBytes = kCountsBytes + 8;

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T take(const char* at) {
  T out;
  std::memcpy(&out, at, sizeof(out));
  return out;
}

}  // namespace

std::string document_origins_path(const std::string& prefix) { return prefix + ".origin"; }

Result<OriginWriter> OriginWriter::create(const std::string& prefix) {
  RT_TRY_SET(NewFile file, NewFile::beside(document_origins_path(prefix)));
  OriginWriter out(std::move(file));
  out.buffer_ = kMagic;
  return out;
}

Status OriginWriter::add_document(const DocumentOrigin& origin) {
  put(buffer_, origin.file);
  put(buffer_, origin.byte);
  ++documents_;
  if (buffer_.size() < kBufferBytes) return {};
  RT_TRY(file_.write(buffer_));
  buffer_.clear();
  return {};
}

Status OriginWriter::publish(const std::vector<OriginFile>& files, int64_t tokens) {
  std::string table;
  for (const OriginFile& file : files) {
    put(table, static_cast<uint32_t>(file.name.size()));
    put(table, static_cast<uint8_t>(file.packing));
    table += file.name;
  }
  const uint64_t table_bytes = table.size();
  for (const uint64_t count : {uint64_t{files.size()}, table_bytes, documents_, static_cast<uint64_t>(tokens)})
    put(table, count);
  put(table, static_cast<uint64_t>(XXH3_64bits(table.data(), table.size())));
  RT_TRY(file_.write(buffer_ + table));
  return file_.publish_durably();
}

Result<std::optional<DocumentOrigins>> DocumentOrigins::open(const std::string& prefix, int64_t documents,
                                                             int64_t tokens) {
  DocumentOrigins out;
  out.path_ = document_origins_path(prefix);
  std::error_code none;
  if (!std::filesystem::exists(out.path_, none)) return std::optional<DocumentOrigins>();
  const auto wrong = [&](int64_t byte, const std::string& what) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte {}: {}; remove the file, or make the set again", out.path_, byte, what)};
  };
  RT_TRY_SET(OpenedFile opened, open_readable(out.path_));
  const int64_t size = opened.size_bytes;
  out.fd_ = std::make_shared<const Fd>(std::move(opened.fd));
  const auto header = static_cast<int64_t>(kMagic.size());
  if (size < header + kFooterBytes) return wrong(size, "the file ends before its table");
  std::array<char, kMagic.size()> magic{};
  RT_TRY(read_exact(out.fd_->get(), out.path_, 0, magic.data(), header));
  if (std::string_view(magic.data(), magic.size()) != kMagic) return wrong(0, "is no table of documents' origins");
  std::array<uint64_t, 5> footer{};
  RT_TRY(read_exact(out.fd_->get(), out.path_, size - kFooterBytes, footer.data(), kFooterBytes));
  const auto [files, table_bytes, of_documents, of_tokens, hash] = footer;
  const auto left = static_cast<uint64_t>(size - header - kFooterBytes);
  if (table_bytes > left || files > table_bytes / kFileBytes || of_documents != (left - table_bytes) / kDocumentBytes ||
      (left - table_bytes) % kDocumentBytes != 0) {
    return wrong(size - kFooterBytes, fmt::format("{} documents and a table of {} bytes do not fill {} bytes",
                                                  of_documents, table_bytes, size));
  }
  const int64_t table_at = size - kFooterBytes - static_cast<int64_t>(table_bytes);
  std::string table(table_bytes + static_cast<size_t>(kCountsBytes), '\0');
  RT_TRY(read_exact(out.fd_->get(), out.path_, table_at, table.data(), std::ssize(table)));
  if (XXH3_64bits(table.data(), table.size()) != hash) return wrong(size - 8, "its checksum is of other bytes");
  if (of_documents != static_cast<uint64_t>(documents) || of_tokens != static_cast<uint64_t>(tokens))
    return std::optional<DocumentOrigins>();
  size_t at = 0;
  for (uint64_t k = 0; k < files; ++k) {
    const size_t there = table_bytes - at;
    const auto length = there < kFileBytes ? uint32_t{0} : take<uint32_t>(&table[at]);
    const auto packing = there < kFileBytes ? uint8_t{0xff} : take<uint8_t>(&table[at + 4]);
    if (packing > static_cast<uint8_t>(Packing::kTable) || length > there - kFileBytes)
      return wrong(table_at + static_cast<int64_t>(at), fmt::format("file {} of the table is none", k));
    out.files_.push_back({table.substr(at + kFileBytes, length), static_cast<Packing>(packing)});
    at += kFileBytes + length;
  }
  out.documents_ = documents;
  return std::optional<DocumentOrigins>(std::move(out));
}

Result<std::vector<DocumentOrigin>> DocumentOrigins::read(int64_t first, int64_t count) const {
  RT_CHECK(first >= 0 && count >= 0 && first <= documents_ - count, "documents {} to {} of {}", first, first + count,
           documents_);
  const int64_t begin = static_cast<int64_t>(kMagic.size()) + first * static_cast<int64_t>(kDocumentBytes);
  std::string bytes(static_cast<size_t>(count) * kDocumentBytes, '\0');
  RT_TRY(read_exact(fd_->get(), path_, begin, bytes.data(), std::ssize(bytes)));
  std::vector<DocumentOrigin> out;
  out.reserve(static_cast<size_t>(count));
  for (size_t at = 0; at < bytes.size(); at += kDocumentBytes) {
    out.push_back({take<uint32_t>(&bytes[at]), take<uint64_t>(&bytes[at + 4])});
    if (out.back().file >= files_.size()) {
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: byte {}: file {} of {}; remove the file, or make the set again", path_,
                               begin + static_cast<int64_t>(at), out.back().file, files_.size())};
    }
  }
  return out;
}

}  // namespace cairn::data
