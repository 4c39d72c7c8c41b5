#include "runtime/data/tokenize.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/data/file_io.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace cairn::data {
namespace {

constexpr int64_t kReadBytes = 1 << 20;
constexpr size_t kPieceBytes = 1 << 20, kMostPieceBytes = 4 << 20;

// Collects a document's text and hands it to the tokenizer, whole if it is short, in pieces if it is long.
class DocumentEncoder {
 public:
  DocumentEncoder(const TokenizeArgs& args, const text::Tokenizer& tokenizer, MegatronWriter& writer,
                  TokenizeReport& report)
      : args_(args), tokenizer_(tokenizer), writer_(writer), report_(report) {}

  void start_file(const std::string& path) {
    path_ = &path;
    text_at_ = 0;
  }

  // `offset`: the text's first byte in the file, for messages.
  Status add(std::string_view text, int64_t offset) {
    if (text_.empty()) text_at_ = offset;
    // Where text was left out between two parts of a document, offsets in messages would be off; parts are contiguous.
    text_.append(text);
    while (text_.size() > look_at_) {  // some text stays: the last part is known when the document ends
      const size_t cut = cut_before(look_at_);
      if (cut == 0) {
        look_at_ += kPieceBytes;
        continue;
      }
      RT_TRY(encode(std::string_view(text_).substr(0, cut), {.first = first_part_, .last = false}));
      first_part_ = false;
      text_.erase(0, cut);
      text_at_ += static_cast<int64_t>(cut);
      look_at_ = kPieceBytes;
    }
    return {};
  }

  Status end_document() {
    if (!text_.empty()) RT_TRY(encode(text_, {.first = first_part_, .last = true}));
    text_.clear();
    first_part_ = true;
    look_at_ = kPieceBytes;
    const bool any = document_tokens_ > 0;
    document_tokens_ = 0;
    if (!any) {
      ++report_.empty_documents;
      return {};
    }
    if (args_.append_eod) {
      const int32_t eod = tokenizer_.eod();
      RT_TRY(writer_.add(std::span(&eod, 1)));
    }
    RT_TRY_SET(const bool written, writer_.end_document());
    RT_CHECK(written, "a document of tokens");
    return {};
  }

 private:
  static bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

  static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

  /// Where the first `most` bytes are cut; 0: not yet. After a line end between a letter or mark and a letter, where
  /// the patterns of a tokenizer.json cut too; where there is none in kMostPieceBytes after any line end, else at the
  /// end of a character. Bytes are cut anywhere.
  size_t cut_before(size_t most) const {
    if (args_.tokenizer.kind == TokenizerConfig::Kind::kBytes) return most;
    size_t last = std::string::npos;
    for (size_t at = text_.rfind('\n', most - 1); at != std::string::npos && at > 0; at = text_.rfind('\n', at - 1)) {
      if (last == std::string::npos) last = at + 1;
      if (is_letter(text_[at + 1]) && text_[at - 1] > ' ') return at + 1;
    }
    if (most < kMostPieceBytes) return 0;
    if (last != std::string::npos) return last;
    for (int back = 0; back < 3 && is_continuation(text_[most]); ++back) --most;
    return most;
  }

  Status encode(std::string_view text, text::Part part) {
    if (args_.append_eod && args_.tokenizer.kind == TokenizerConfig::Kind::kBytes) {
      const size_t nul = text.find('\0');
      if (nul != std::string_view::npos)
        return Error{
            ErrorCode::kInvalidInput,
            fmt::format("{}: byte {} is NUL, which is the end-of-document id of the bytes tokenizer; remove it "
                        "from the text or do not append end-of-document ids",
                        *path_, text_at_ + static_cast<int64_t>(nul))};
    }
    if (args_.tokenizer.kind != TokenizerConfig::Kind::kBytes) {  // here, where the place in the file is known
      const int64_t bad = text::find_invalid_utf8(text);
      if (bad >= 0)
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("{}: byte {}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer",
                                 *path_, text_at_ + bad, static_cast<unsigned char>(text[static_cast<size_t>(bad)]))};
    }
    ids_.clear();
    RT_TRY(tokenizer_.encode_part(text, part, &ids_).with(*path_));
    document_tokens_ += static_cast<int64_t>(ids_.size());
    return writer_.add(ids_).with(*path_);
  }

  const TokenizeArgs& args_;
  const text::Tokenizer& tokenizer_;
  MegatronWriter& writer_;
  TokenizeReport& report_;
  const std::string* path_ = nullptr;
  std::string text_;              // of the open document, what is not encoded yet
  int64_t text_at_ = 0;           // its place in the file
  size_t look_at_ = kPieceBytes;  // how much text there must be before it is cut
  bool first_part_ = true;        // nothing of the document is encoded yet
  int64_t document_tokens_ = 0;
  std::vector<int32_t> ids_;
};

// Cuts a stream of bytes into lines and those into documents.
class DocumentSplitter {
 public:
  DocumentSplitter(DocumentSeparator separator, DocumentEncoder& out) : separator_(separator), out_(out) {}

  Status feed(std::string_view bytes, int64_t offset) {
    if (separator_ == DocumentSeparator::kWholeFile) {
      open_ = true;
      return out_.add(bytes, offset);
    }
    while (!bytes.empty()) {
      const size_t end = bytes.find('\n');
      if (end == std::string_view::npos) return part_of_line(bytes, offset);
      RT_TRY(part_of_line(bytes.substr(0, end), offset));
      RT_TRY(end_of_line(offset + static_cast<int64_t>(end)));
      bytes.remove_prefix(end + 1);
      offset += static_cast<int64_t>(end) + 1;
    }
    return {};
  }

  Status end_file(int64_t offset) {
    if (separator_ != DocumentSeparator::kWholeFile && (in_line_ || !held_.empty())) RT_TRY(end_of_line(offset));
    held_.clear();
    in_line_ = line_has_text_ = false;
    if (!open_ && separator_ != DocumentSeparator::kWholeFile) return {};  // an empty file is an empty document
    open_ = false;
    return out_.end_document();
  }

 private:
  // Text whose fate depends on what follows is held back: a CR before the LF, and, between lines of a document, the
  // line ends and blanks that turn out to be a separator if nothing but blanks follows on the line.
  Status part_of_line(std::string_view part, int64_t offset) {
    in_line_ = true;
    for (size_t i = 0; i < part.size();) {
      const size_t text_end = std::min(part.find_first_of(holdable(), i), part.size());
      if (text_end > i) {
        RT_TRY(release());
        line_has_text_ = true;
        open_ = true;
        RT_TRY(out_.add(part.substr(i, text_end - i), offset + static_cast<int64_t>(i)));
      }
      size_t blank_end = part.find_first_not_of(holdable(), text_end);
      blank_end = std::min(blank_end, part.size());
      if (blank_end > text_end)
        hold(part.substr(text_end, blank_end - text_end), offset + static_cast<int64_t>(text_end));
      i = blank_end;
      if (held_.size() > kPieceBytes) {  // a megabyte of blanks is text
        RT_TRY(release());
        line_has_text_ = open_ = true;
      }
    }
    return {};
  }

  Status end_of_line(int64_t offset) {
    in_line_ = false;
    const bool blank = !line_has_text_;
    line_has_text_ = false;
    if (separator_ == DocumentSeparator::kLine) {
      if (held_.ends_with('\r')) held_.pop_back();
      if (!held_.empty()) {
        open_ = true;
        RT_TRY(release());
      }
      open_ = false;
      return out_.end_document();
    }
    if (!blank) {  // the line end belongs to the document if another line of it follows
      hold("\n", offset);
      return {};
    }
    held_.clear();
    if (!open_) return {};
    open_ = false;
    return out_.end_document();
  }

  std::string_view holdable() const {
    return separator_ == DocumentSeparator::kLine ? std::string_view("\r") : std::string_view(" \t\r");
  }
  void hold(std::string_view text, int64_t offset) {
    if (held_.empty()) held_at_ = offset;
    held_.append(text);
  }
  Status release() {
    if (held_.empty()) return {};
    const std::string text = std::move(held_);
    held_.clear();
    return out_.add(text, held_at_);
  }

  DocumentSeparator separator_;
  DocumentEncoder& out_;
  bool open_ = false;           // a document has begun
  bool in_line_ = false;        // bytes since the last line end
  bool line_has_text_ = false;  // more than blanks since the last line end
  std::string held_;
  int64_t held_at_ = 0;
};

}  // namespace

Result<TokenizeReport> tokenize_file(const TokenizeArgs& args) {
  if (args.inputs.empty()) return Error{ErrorCode::kInvalidInput, "no input files to tokenize"};
  if (args.output_prefix.empty() || args.output_prefix.back() == '/')
    return Error{ErrorCode::kInvalidInput, fmt::format("output prefix is \"{}\", expected a path whose last part is a "
                                                       "name: out/text makes out/text.bin and out/text.idx",
                                                       args.output_prefix)};
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer, text::make_tokenizer(args.tokenizer));
  if (args.append_eod && tokenizer->eod() < 0)
    return Error{ErrorCode::kInvalidInput,
                 args.tokenizer.path + ": the model has no end-of-sentence id to append after documents"};
  TokenizeProgress progress;
  std::vector<OpenedFile> files;  // all opened before any work: a typo in the last name should not cost an hour
  for (const std::string& path : args.inputs) {
    RT_TRY_SET(OpenedFile file, open_readable(path));
    progress.bytes_total += file.size_bytes;
    files.push_back(std::move(file));
  }

  TokenizeReport report;
  report.vocab = tokenizer->vocab();
  report.dtype = MegatronWriter::dtype_for_vocab(report.vocab);
  RT_TRY_SET(MegatronWriter writer, MegatronWriter::create(args.output_prefix, report.dtype, {args.overwrite}));
  DocumentEncoder encoder(args, *tokenizer, writer, report);
  DocumentSplitter splitter(args.separator, encoder);
  std::string buffer;
  for (size_t i = 0; i < files.size(); ++i) {
    encoder.start_file(args.inputs[i]);
    for (int64_t at = 0; at < files[i].size_bytes; at += kReadBytes) {
      buffer.resize(static_cast<size_t>(std::min(kReadBytes, files[i].size_bytes - at)));
      const auto size = static_cast<int64_t>(buffer.size());
      RT_TRY(read_exact(files[i].fd.get(), args.inputs[i], at, buffer.data(), size));
      RT_TRY(splitter.feed(buffer, at));
      progress.bytes_done += size;
      progress.documents = writer.documents();
      progress.tokens = writer.tokens();
      if (args.progress && !args.progress(progress))
        return Error{ErrorCode::kStopped, "tokenizing was stopped; no set was written"};
    }
    RT_TRY(splitter.end_file(files[i].size_bytes));
    files[i].fd.reset();
  }
  if (writer.documents() == 0)
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no text to tokenize", args.inputs[0])};
  RT_TRY(writer.finish());
  report.bytes = progress.bytes_total;
  report.documents = writer.documents();
  report.tokens = writer.tokens();
  return report;
}

}  // namespace cairn::data
