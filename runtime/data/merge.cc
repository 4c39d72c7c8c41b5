#include "runtime/data/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "runtime/data/channels.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/file_io.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/megatron_format.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/token_file.h"

namespace cairn::data {
namespace {

constexpr int64_t kDocumentsAtOnce = 4096, kTokensAtOnce = 1 << 18;

struct Part {
  std::string prefix;
  std::unique_ptr<TokenSource> source;
  uint8_t code = 0;  // the type of its tokens (megatron_format.h)
  std::optional<LossSpans> loss;
  std::optional<DocumentChannels> channels;
  std::optional<SetOrigin> origin;
  std::optional<DocumentOrigins> documents;
};

Result<Part> open_part(const std::string& path) {
  Part part{.prefix = megatron_prefix(path)};
  if (part.prefix.empty()) part.prefix = path;  // whose opening names what is missing
  RT_TRY_SET(part.source, open_megatron(part.prefix));
  const std::string idx = part.prefix + ".idx";
  RT_TRY_SET(const OpenedFile file, open_readable(idx));
  std::array<char, kMegatronHeaderBytes> header{};
  RT_TRY(read_exact(file.fd.get(), idx, 0, header.data(), kMegatronHeaderBytes));
  std::memcpy(&part.code, header.data() + kDtypeOffset, 1);
  uint64_t documents = 0;
  std::memcpy(&documents, header.data() + kDocumentsOffset, sizeof(documents));
  const int64_t sequences = part.source->sequence_count();
  if (documents != static_cast<uint64_t>(sequences) + 1)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: has {} sequences in {} documents, and documents of one sequence are merged", idx,
                             sequences, documents - 1)};
  if (part.code != kCodeU16 && part.code != kCodeI32)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: has tokens of type code {}; uint16 ({}) and int32 ({}) are merged", idx, part.code,
                             kCodeU16, kCodeI32)};
  if (std::filesystem::exists(loss_path(part.prefix))) {
    RT_TRY_SET(LossSpans loss, LossSpans::open(part.prefix, sequences, part.source->token_count()));
    part.loss.emplace(std::move(loss));
  }
  RT_TRY_SET(part.channels, DocumentChannels::open(part.prefix, sequences, part.source->token_count()));
  RT_TRY_SET(part.origin, read_origin(part.prefix, sequences, part.source->token_count()));
  RT_TRY_SET(part.documents, DocumentOrigins::open(part.prefix, sequences, part.source->token_count()));
  return part;
}

Status check_alike(const std::vector<Part>& parts) {
  const Part& first = parts.front();
  const auto differ = [&](const Part& other, const std::string& what) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} and {} cannot be one set: {}; T.blend takes sources of several kinds", first.prefix,
                             other.prefix, what)};
  };
  const Part* known = nullptr;
  for (const Part& part : parts) {
    if (part.code != first.code)
      return differ(part,
                    fmt::format("one has tokens of {}, the other of {}", first.code == kCodeU16 ? "uint16" : "int32",
                                part.code == kCodeU16 ? "uint16" : "int32"));
    if (part.loss.has_value() != first.loss.has_value())
      return differ(part, fmt::format("{} says which tokens count, and the other pair has no such file",
                                      loss_path(part.loss ? part.prefix : first.prefix)));
    if (part.channels.has_value() != first.channels.has_value())
      return differ(part, fmt::format("{} names channels, and the other pair has no such file",
                                      channel_path(part.channels ? part.prefix : first.prefix)));
    if (!part.origin) continue;
    if (known != nullptr && known->origin->tokenizer_hash != part.origin->tokenizer_hash)
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{} and {} cannot be one set: one is of the tokenizer {}, the other of {}, whose file has "
                      "another content",
                      known->prefix, part.prefix, known->origin->tokenizer, part.origin->tokenizer)};
    known = &part;
  }
  return {};
}

class Merger {
 public:
  /// `loss`, `origins`: null where some part has none.
  Merger(MegatronWriter& writer, LossWriter* loss, OriginWriter* origins, MergeReport& report)
      : writer_(writer), loss_(loss), origins_(origins), report_(report) {}

  Status add(const Part& part) {
    const int64_t documents = part.source->sequence_count();
    for (int64_t first = 0; first < documents; first += kDocumentsAtOnce)
      RT_TRY(add_block(part, first, std::min(kDocumentsAtOnce, documents - first)));
    if (origins_ != nullptr)
      files_.insert(files_.end(), part.documents->files().begin(), part.documents->files().end());
    return {};
  }
  /// The files of all parts so far.
  const std::vector<OriginFile>& files() const { return files_; }
  const ChannelWriter& channels() const { return channels_; }

 private:
  Status add_block(const Part& part, int64_t first, int64_t count) {
    RT_TRY_SET(const std::vector<int64_t> starts, part.source->sequence_starts(first, count));
    if (part.loss) RT_TRY(part.loss->read(first, count, &spans_, &begins_));
    std::vector<DocumentOrigin> from;
    if (origins_ != nullptr) {
      RT_TRY_SET(from, part.documents->read(first, count));
    }
    for (int64_t k = 0; k < count; ++k) {
      RT_TRY(add_tokens(*part.source, starts[k], starts[k + 1]));
      RT_TRY_SET(const bool written, writer_.end_document());
      if (!written) ++report_.empty_documents;
      if (written && origins_ != nullptr) {
        const DocumentOrigin& one = from[static_cast<size_t>(k)];
        RT_TRY(origins_->add_document({one.file + static_cast<uint32_t>(files_.size()), one.byte}));
      }
      if (written && part.channels)
        RT_TRY(channels_.add_document(part.channels->names[part.channels->of_document[static_cast<size_t>(first + k)]])
                   .with(channel_path(part.prefix)));
      if (written && part.loss)
        RT_TRY(loss_->add_document(std::span(spans_).subspan(begins_[k], begins_[k + 1] - begins_[k])));
    }
    return {};
  }

  Status add_tokens(const TokenSource& source, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kTokensAtOnce) {
      ids_.resize(static_cast<size_t>(std::min(kTokensAtOnce, end - at)));
      RT_TRY(source.read(at, std::ssize(ids_), ids_.data()));
      RT_TRY(writer_.add(ids_).with(source.name()));
    }
    return {};
  }

  MegatronWriter& writer_;
  LossWriter* loss_;
  OriginWriter* origins_;
  ChannelWriter channels_;
  std::vector<OriginFile> files_;
  MergeReport& report_;
  std::vector<int32_t> ids_;
  std::vector<LossSpan> spans_;
  std::vector<uint64_t> begins_;
};

/// The origins of all parts as one; nothing where one is not known.
std::optional<SetOrigin> joined_origin(const std::vector<Part>& parts) {
  std::optional<SetOrigin> out;
  for (const Part& part : parts) {
    if (!part.origin) return std::nullopt;
    if (!out) {
      out = part.origin;
      continue;
    }
    if (out->chat != part.origin->chat) out->chat = "several";
    out->inputs.insert(out->inputs.end(), part.origin->inputs.begin(), part.origin->inputs.end());
  }
  return out;
}

}  // namespace

Result<MergeReport> merge_sets(const std::vector<std::string>& prefixes, const std::string& out, bool overwrite) {
  if (prefixes.size() < 2)
    return Error{ErrorCode::kInvalidInput, fmt::format("{} set to merge, expected two or more", prefixes.size())};
  std::vector<Part> parts;
  for (const std::string& prefix : prefixes) {
    RT_TRY_SET(Part part, open_part(prefix));
    std::error_code none;
    if (std::filesystem::equivalent(part.prefix + ".bin", out + ".bin", none))
      return Error{ErrorCode::kInvalidInput, fmt::format("{} is one of the sets that are merged; name a new one", out)};
    parts.push_back(std::move(part));
  }
  RT_TRY(check_alike(parts));
  MergeReport report;
  report.dtype = parts.front().code == kCodeU16 ? DType::kU16 : DType::kI32;
  for (const Part& part : parts) {
    if (!part.origin) report.unknown.push_back(part.prefix);
  }
  RT_TRY_SET(MegatronWriter writer, MegatronWriter::create(out, report.dtype, {overwrite}));
  std::optional<LossWriter> loss;
  if (parts.front().loss) {
    RT_TRY_SET(LossWriter made, LossWriter::create(out));
    loss.emplace(std::move(made));
  }
  std::optional<OriginWriter> origins;
  if (std::ranges::all_of(parts, [](const Part& part) { return part.documents.has_value(); })) {
    RT_TRY_SET(OriginWriter made, OriginWriter::create(out));
    origins.emplace(std::move(made));
  }
  Merger merger(writer, loss ? &*loss : nullptr, origins ? &*origins : nullptr, report);
  for (const Part& part : parts) RT_TRY(merger.add(part));
  std::optional<SetOrigin> origin = joined_origin(parts);
  RT_TRY(writer.finish([&]() -> Status {
    if (loss) RT_TRY(loss->publish(writer.tokens()));
    if (parts.front().channels) RT_TRY(merger.channels().publish(out, writer.tokens()));
    if (origins) RT_TRY(origins->publish(merger.files(), writer.tokens()));
    if (!origin) return {};
    origin->documents = writer.documents();
    origin->tokens = writer.tokens();
    return write_origin(out, *origin);
  }));
  report.documents = writer.documents();
  report.tokens = writer.tokens();
  if (loss) report.counted = loss->counted();
  return report;
}

}  // namespace cairn::data
