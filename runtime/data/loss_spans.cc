#include "runtime/data/loss_spans.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/core/check.h"
#include "runtime/data/file_io.h"

namespace cairn::data {
namespace {

constexpr std::string_view kMagic = "CAIRNLS1";
constexpr int64_t kSpanBytes = 8, kFirstBytes = 8, kFooterBytes = 4 * 8;
constexpr size_t kBufferSpans = 64 << 10;
constexpr int64_t kReadBytes = 1 << 20;

std::string_view bytes_of(const auto& items) {
  return {reinterpret_cast<const char*>(items.data()), items.size() * sizeof(items[0])};
}

}  // namespace

static_assert(sizeof(LossSpan) == kSpanBytes);

std::string loss_path(const std::string& prefix) { return prefix + ".loss"; }

Result<LossWriter> LossWriter::create(const std::string& prefix) {
  RT_TRY_SET(NewFile file, NewFile::beside(loss_path(prefix)));
  LossWriter out(std::move(file));
  XXH3_64bits_reset(out.hash_.get());
  RT_TRY(out.write(kMagic));
  return out;
}

Status LossWriter::write(std::string_view bytes) {
  XXH3_64bits_update(hash_.get(), bytes.data(), bytes.size());
  return file_.write(bytes);
}

Status LossWriter::flush() {
  RT_TRY(write(bytes_of(buffer_)));
  buffer_.clear();
  return {};
}

Status LossWriter::add_document(std::span<const LossSpan> spans) {
  firsts_.push_back(spans_);
  spans_ += spans.size();
  for (const LossSpan& span : spans) {
    buffer_.push_back(span);
    counted_ += span.to - span.from;
  }
  return buffer_.size() < kBufferSpans ? Status() : flush();
}

Status LossWriter::publish(int64_t tokens) {
  RT_TRY(flush());
  const auto documents = firsts_.size();
  firsts_.push_back(spans_);
  RT_TRY(write(bytes_of(firsts_)));
  const std::array<uint64_t, 3> counts = {spans_, documents, static_cast<uint64_t>(tokens)};
  RT_TRY(write(bytes_of(counts)));
  const std::array<uint64_t, 1> hash = {XXH3_64bits_digest(hash_.get())};
  RT_TRY(file_.write(bytes_of(hash)));
  return file_.publish_durably();
}

Result<LossSpans> LossSpans::open(const std::string& prefix, int64_t documents, int64_t tokens) {
  LossSpans out;
  out.path_ = loss_path(prefix);
  const auto wrong = [&](int64_t byte, const std::string& what) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte {}: {}; make the set again (cairn data chat)", out.path_, byte, what)};
  };
  Result<OpenedFile> opened = open_readable(out.path_);
  if (!opened.ok() && opened.error().code == ErrorCode::kInvalidInput)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}; it says which tokens of a conversation count, and cairn data chat writes it",
                             opened.error().message)};
  if (!opened.ok()) return std::move(opened).error();
  const int64_t size = opened.value().size_bytes;
  out.fd_ = std::make_shared<const Fd>(std::move(opened.value().fd));
  const auto header = static_cast<int64_t>(kMagic.size());
  if (size < header + kFirstBytes + kFooterBytes) return wrong(size, "the file ends before its table");
  std::array<char, kMagic.size()> magic{};
  RT_TRY(read_exact(out.fd_->get(), out.path_, 0, magic.data(), header));
  if (std::string_view(magic.data(), magic.size()) != kMagic) return wrong(0, "is no table of what counts");
  std::array<uint64_t, 4> footer{};
  RT_TRY(read_exact(out.fd_->get(), out.path_, size - kFooterBytes, footer.data(), kFooterBytes));
  const auto [spans, of_documents, of_tokens, hash] = footer;
  const auto left = static_cast<uint64_t>(size - header - kFooterBytes);
  if (spans > left / kSpanBytes || of_documents > left / kFirstBytes ||
      spans * kSpanBytes + (of_documents + 1) * kFirstBytes != left) {
    return wrong(size - kFooterBytes,
                 fmt::format("{} spans and {} documents do not fill {} bytes", spans, of_documents, size));
  }
  if (of_documents != static_cast<uint64_t>(documents) || of_tokens != static_cast<uint64_t>(tokens)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is of {} tokens in {} documents, and the pair beside it has {} in {}; make the set "
                             "again (cairn data chat)",
                             out.path_, of_tokens, of_documents, tokens, documents)};
  }
  out.documents_ = documents;
  out.spans_ = spans;
  out.hash_ = hash;
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::vector<char> block(kReadBytes);
  for (int64_t at = 0; at < size - 8;) {
    const int64_t count = std::min(kReadBytes, size - 8 - at);
    RT_TRY(read_exact(out.fd_->get(), out.path_, at, block.data(), count));
    XXH3_64bits_update(state.get(), block.data(), static_cast<size_t>(count));
    at += count;
  }
  if (XXH3_64bits_digest(state.get()) != hash) return wrong(size - 8, "its checksum is of other bytes");
  return out;
}

Status LossSpans::read(int64_t first, int64_t count, std::vector<LossSpan>* spans,
                       std::vector<uint64_t>* begins) const {
  RT_CHECK(first >= 0 && count >= 0 && first + count <= documents_, "documents {} to {} of {}", first, first + count,
           documents_);
  const auto header = static_cast<int64_t>(kMagic.size());
  const int64_t firsts_at = header + static_cast<int64_t>(spans_) * kSpanBytes;
  begins->resize(static_cast<size_t>(count) + 1);
  RT_TRY(read_exact(fd_->get(), path_, firsts_at + first * kFirstBytes, begins->data(), (count + 1) * kFirstBytes));
  const uint64_t begin = begins->front(), end = begins->back();
  if (begin > end || end > spans_ || !std::ranges::is_sorted(*begins)) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: byte {}: places of spans that do not ascend; make the set again "
                                                  "(cairn data chat)",
                                                  path_, firsts_at + first * kFirstBytes)};
  }
  spans->resize(end - begin);
  RT_TRY(read_exact(fd_->get(), path_, header + static_cast<int64_t>(begin) * kSpanBytes, spans->data(),
                    static_cast<int64_t>(end - begin) * kSpanBytes));
  for (uint64_t& at : *begins) at -= begin;
  return {};
}

}  // namespace cairn::data
