#include "runtime/data/tokenize.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/data/channels.h"
#include "runtime/data/document_origins.h"
#include "runtime/data/input_files.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/data/set_origin.h"
#include "runtime/data/text_input.h"
#include "runtime/json/json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace cairn::data {
namespace {

constexpr size_t kReadBytes = 1 << 20;
constexpr size_t kPieceBytes = 1 << 20, kMostPieceBytes = 4 << 20;
constexpr size_t kBatchBytes = 256 << 10, kMostUnderWay = size_t{64} << 20;

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/// Where the first `most` bytes of a longer text are cut; 0: not yet. After a line end between a letter or mark and a
/// letter, where the patterns of a tokenizer.json cut too; where there is none in kMostPieceBytes after any line end,
/// else at the end of a character. Bytes are cut anywhere.
size_t cut_before(std::string_view text, size_t most, bool of_bytes) {
  if (of_bytes) return most;
  size_t last = std::string::npos;
  for (size_t at = text.rfind('\n', most - 1); at != std::string::npos && at > 0; at = text.rfind('\n', at - 1)) {
    if (last == std::string::npos) last = at + 1;
    if (is_letter(text[at + 1]) && text[at - 1] > ' ') return at + 1;
  }
  if (most < kMostPieceBytes) return 0;
  if (last != std::string::npos) return last;
  for (int back = 0; back < 3 && is_continuation(text[most]); ++back) --most;
  return most;
}

/// Text of one document, or a part of it; or a line of JSON that holds one.
struct Piece {
  std::string text;
  size_t file = 0;
  int64_t offset = 0;                // of its first byte in the file
  int64_t line = 0;                  // of JSON, counted from 1; 0: the text itself
  Packing packing = Packing::kNone;  // of the file: bytes and lines are counted in what it unpacks to
  text::Part part;
};

/// The place of a line of JSON, or of a row.
std::string where_of(const TokenizeArgs& args, const Piece& line) {
  return fmt::format("{}{}{}", args.inputs[line.file], line.packing == Packing::kTable ? ": row " : ":", line.line);
}

/// What one thread encodes at a time.
struct Batch {
  std::vector<Piece> pieces;
  size_t bytes = 0;
  int64_t read = 0;  // of all files, up to its end
  // Filled by encode():
  std::vector<int32_t> ids;
  std::vector<size_t> ends;        // in ids, of each piece
  std::vector<ChatDocument> rows;  // of a chat, one a piece: spans and marks, its ids being in `ids`
  Status status;
  bool done = false;
};

/// Pieces -> ids. Threads: any, on batches of their own.
class PieceEncoder {
 public:
  using EncodePart = std::function<Status(std::string_view text, text::Part part, std::vector<int32_t>* ids)>;
  /// `chat`: null where the lines of JSON have texts.
  PieceEncoder(const TokenizeArgs& args, EncodePart encode, const ChatEncoder* chat)
      : args_(args), encode_(std::move(encode)), chat_(chat) {}

  void encode(Batch& batch) const {
    for (const Piece& piece : batch.pieces) {
      batch.status = chat_ != nullptr ? encode_row(piece, batch)
                     : piece.line > 0 ? encode_json(piece, batch.ids)
                                      : encode_text(piece, batch.ids);
      if (!batch.status.ok()) return;
      batch.ends.push_back(batch.ids.size());
    }
  }

 private:
  bool of_bytes() const { return args_.tokenizer.kind == TokenizerConfig::Kind::kBytes; }

  Status encode_row(const Piece& line, Batch& batch) const {
    ChatDocument row;
    if (line.line > 0) {
      Result<ChatDocument> encoded = chat_->encode(line.text);
      if (!encoded.ok()) return Status(std::move(encoded).error()).with(where_of(args_, line));
      row = std::move(encoded).value();
    }
    batch.ids.insert(batch.ids.end(), row.ids.begin(), row.ids.end());
    row.ids.clear();
    batch.rows.push_back(std::move(row));
    return {};
  }

  Status encode_json(const Piece& line, std::vector<int32_t>& ids) const {
    const std::string where = where_of(args_, line);
    Result<std::string> field = json_text_field(line.text, args_.json_key);
    if (!field.ok()) return Error{ErrorCode::kInvalidInput, fmt::format("{}: {}", where, field.error().message)};
    const std::string text = std::move(field).value();
    std::string_view rest = text;
    bool first = true;
    for (size_t look_at = kPieceBytes; rest.size() > look_at;) {
      const size_t cut = cut_before(rest, look_at, of_bytes());
      if (cut == 0) {
        look_at += kPieceBytes;
        continue;
      }
      RT_TRY(encode_part(rest.substr(0, cut), {first, false}, where, -1, ids));
      rest.remove_prefix(cut);
      first = false;
      look_at = kPieceBytes;
    }
    return rest.empty() ? Status() : encode_part(rest, {first, true}, where, -1, ids);
  }

  Status encode_text(const Piece& piece, std::vector<int32_t>& ids) const {
    if (piece.text.empty()) return {};
    const std::string& name = args_.inputs[piece.file];
    const bool packed = piece.packing != Packing::kNone;
    return encode_part(piece.text, piece.part, packed ? name + ", unpacked" : name, piece.offset, ids);
  }

  /// `offset`: of the text's first byte, for messages; -1: no byte of a file is one of the text.
  Status encode_part(std::string_view text, text::Part part, const std::string& where, int64_t offset,
                     std::vector<int32_t>& ids) const {
    const auto at = [&](size_t byte) {
      return offset < 0 ? where : fmt::format("{}: byte {}", where, offset + static_cast<int64_t>(byte));
    };
    if (args_.append_eod && of_bytes()) {
      const size_t nul = text.find('\0');
      if (nul != std::string_view::npos)
        return Error{
            ErrorCode::kInvalidInput,
            fmt::format("{} is NUL, which is the end-of-document id of the bytes tokenizer; remove it from the "
                        "text or do not append end-of-document ids",
                        at(nul))};
    }
    if (!of_bytes()) {  // here, where the place in the file is known
      const int64_t bad = text::find_invalid_utf8(text);
      if (bad >= 0)
        return Error{
            ErrorCode::kInvalidInput,
            fmt::format("{}: 0x{:02x} is not UTF-8 here; convert the text or use the bytes tokenizer",
                        at(static_cast<size_t>(bad)), static_cast<unsigned char>(text[static_cast<size_t>(bad)]))};
    }
    return encode_(text, part, &ids).with(where);
  }

  const TokenizeArgs& args_;
  const EncodePart encode_;
  const ChatEncoder* chat_;
};

/// Encodes batches on several threads and hands them back in the order in which they came.
class Encoders {
 public:
  Encoders(const PieceEncoder& encoder, int64_t threads) : encoder_(encoder) {
    for (int64_t k = 0; threads > 1 && k < threads; ++k) threads_.emplace_back([this] { work(); });
  }
  ~Encoders() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Encoders(const Encoders&) = delete;
  Encoders& operator=(const Encoders&) = delete;

  void put(Batch batch) {
    auto held = std::make_shared<Batch>(std::move(batch));
    if (threads_.empty()) {
      encoder_.encode(*held);
      held->done = true;
    }
    const std::lock_guard lock(mutex_);
    bytes_ += held->bytes;
    order_.push_back(held);
    if (held->done) return;
    todo_.push_back(std::move(held));
    wanted_.notify_one();
  }

  /// Whether as many are under way as keep all threads at work, or as much text as memory should hold.
  bool full() const { return order_.size() >= 2 * threads_.size() + 1 || (bytes_ > kMostUnderWay && !order_.empty()); }
  bool empty() const { return order_.empty(); }

  /// The oldest, once it is encoded.
  Batch take() {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Batch> first = order_.front();
    encoded_.wait(lock, [&] { return first->done; });
    order_.pop_front();
    bytes_ -= first->bytes;
    return std::move(*first);
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wanted_.wait(lock, [&] { return ended_ || !todo_.empty(); });
      if (ended_) return;
      const std::shared_ptr<Batch> batch = std::move(todo_.front());
      todo_.pop_front();
      lock.unlock();
      try {
        encoder_.encode(*batch);
      } catch (const std::exception& error) {  // memory; it ends the whole
        batch->status = Error{ErrorCode::kInternal, fmt::format("encoding: {}", error.what())};
      }
      lock.lock();
      batch->done = true;
      encoded_.notify_one();
    }
  }

  const PieceEncoder& encoder_;
  std::mutex mutex_;
  std::condition_variable wanted_, encoded_;
  std::deque<std::shared_ptr<Batch>> order_, todo_;  // order_: changed by the owner's thread alone
  size_t bytes_ = 0;                                 // of those in order_
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

// Cuts documents into pieces, has them encoded, and writes what comes back.
class DocumentWriter {
 public:
  /// Where ids go. Null `writer`: nowhere, and none are expected. Null `loss`: there are only texts. `origins`: null
  /// where they are not wanted.
  struct Sinks {
    MegatronWriter* writer = nullptr;
    LossWriter* loss = nullptr;
    ChannelWriter* channels = nullptr;  // null: rows name none
    OriginWriter* origins = nullptr;
    int32_t eod = -1;
  };
  DocumentWriter(const TokenizeArgs& args, PieceEncoder encoder, Sinks sinks, TokenizeReport& report)
      : args_(args), sinks_(sinks), report_(report), encoder_(std::move(encoder)), encoders_(encoder_, args.threads) {}

  int64_t documents() const { return sinks_.writer != nullptr ? sinks_.writer->documents() : 0; }
  int64_t tokens() const { return sinks_.writer != nullptr ? sinks_.writer->tokens() : 0; }

  void start_file(size_t file, Packing packing) {
    file_ = file;
    packing_ = packing;
    line_ = 0;
    text_at_ = 0;
  }

  // `offset`: the text's first byte in the file, for messages.
  Status add(std::string_view text, int64_t offset) {
    if (text_.empty()) text_at_ = offset;
    // Where text was left out between two parts of a document, offsets in messages would be off; parts are contiguous.
    text_.append(text);
    if (args_.separator == DocumentSeparator::kJsonLine) {
      if (std::ssize(text_) <= args_.most_line_bytes) return {};
      return check_json_line(std::ssize(text_), args_.most_line_bytes)
          .with(fmt::format("{}:{}", args_.inputs[file_], line_ + 1));
    }
    const bool of_bytes = args_.tokenizer.kind == TokenizerConfig::Kind::kBytes;
    while (text_.size() > look_at_) {  // some text stays: the last part is known when the document ends
      const size_t cut = cut_before(text_, look_at_, of_bytes);
      if (cut == 0) {
        look_at_ += kPieceBytes;
        continue;
      }
      std::string rest = text_.substr(cut);
      text_.resize(cut);
      const int64_t at = text_at_;
      RT_TRY(put(
          {.text = std::move(text_), .file = file_, .offset = at, .packing = packing_, .part = {first_part_, false}}));
      first_part_ = false;
      text_ = std::move(rest);
      text_at_ = at + static_cast<int64_t>(cut);
      look_at_ = kPieceBytes;
    }
    return {};
  }

  Status end_document() {
    const bool json = args_.separator == DocumentSeparator::kJsonLine;
    if (json) ++line_;
    Piece piece{
        .text = std::move(text_), .file = file_, .offset = text_at_, .packing = packing_, .part = {first_part_, true}};
    if (json && piece.text.find_first_not_of(" \t\r") != std::string::npos) piece.line = line_;
    if (json && piece.line == 0) piece.text.clear();  // an empty line
    text_.clear();
    first_part_ = true;
    look_at_ = kPieceBytes;
    return put(std::move(piece));
  }

  /// All that was read: `bytes` of all files.
  void has_read(int64_t bytes) { read_ = bytes; }
  /// Bytes of the input whose ids are written.
  int64_t written() const { return written_; }

  Status finish() {
    if (!batch_.pieces.empty()) submit();
    while (!encoders_.empty()) RT_TRY(write(encoders_.take()));
    return {};
  }

 private:
  Status put(Piece piece) {
    batch_.bytes += piece.text.size() + 64;
    batch_.pieces.push_back(std::move(piece));
    if (batch_.bytes < kBatchBytes) return {};
    submit();
    while (encoders_.full()) RT_TRY(write(encoders_.take()));
    return {};
  }

  void submit() {
    batch_.read = read_;
    encoders_.put(std::exchange(batch_, {}));
  }

  Status write(Batch batch) {
    size_t begin = 0;
    for (size_t k = 0; k < batch.ends.size(); ++k) {  // those before a mistake too: nothing is committed
      const Piece& piece = batch.pieces[k];
      if (piece.part.first) {
        const int64_t at = piece.packing == Packing::kTable ? piece.line : piece.offset;
        document_from_ = {.file = static_cast<uint32_t>(piece.file), .byte = static_cast<uint64_t>(at)};
      }
      const auto ids = std::span(batch.ids).subspan(begin, batch.ends[k] - begin);
      begin = batch.ends[k];
      document_tokens_ += std::ssize(ids);
      if (!ids.empty()) RT_TRY(sinks_.writer->add(ids).with(args_.inputs[piece.file]));
      if (sinks_.loss != nullptr && !ids.empty()) RT_TRY(add_spans(batch.rows[k], piece));
      if (piece.part.last) RT_TRY(end_written_document());
    }
    written_ = batch.read;
    return batch.status;
  }

  Status add_spans(const ChatDocument& row, const Piece& piece) {
    constexpr int64_t kNamed = 3;
    if (row.open && report_.open++ < kNamed) report_.opens.push_back(where_of(args_, piece));
    if (sinks_.channels != nullptr)
      RT_TRY(sinks_.channels->add_document(row.channel)
                 .with(fmt::format("{}: {}", where_of(args_, piece), printable_ascii(args_.channel_key))));
    return sinks_.loss->add_document(row.spans);
  }

  Status end_written_document() {
    if (std::exchange(document_tokens_, 0) == 0) {
      ++report_.empty_documents;
      return {};
    }
    if (args_.append_eod) {
      RT_TRY(sinks_.writer->add(std::span(&sinks_.eod, 1)));
    }
    RT_TRY_SET(const bool written, sinks_.writer->end_document());
    RT_CHECK(written, "a document of tokens");
    return sinks_.origins != nullptr ? sinks_.origins->add_document(document_from_) : Status();
  }

  const TokenizeArgs& args_;
  const Sinks sinks_;
  TokenizeReport& report_;
  const PieceEncoder encoder_;
  Encoders encoders_;
  Batch batch_;                       // to be encoded next
  size_t file_ = 0;                   // under way
  Packing packing_ = Packing::kNone;  // of that file
  int64_t line_ = 0;                  // of JSON, that have ended
  std::string text_;                  // of the open document, what is not given away yet
  int64_t text_at_ = 0;               // its place in the file
  size_t look_at_ = kPieceBytes;      // how much text there must be before it is cut
  bool first_part_ = true;            // nothing of the document is given away yet
  int64_t read_ = 0, written_ = 0;
  int64_t document_tokens_ = 0;  // of the document that is being written
  DocumentOrigin document_from_;
};

// Cuts a stream of bytes into lines and those into documents.
class DocumentSplitter {
 public:
  DocumentSplitter(DocumentSeparator separator, DocumentWriter& out) : separator_(separator), out_(out) {}

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
    if (by_line()) {
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

  bool by_line() const { return separator_ == DocumentSeparator::kLine || separator_ == DocumentSeparator::kJsonLine; }
  std::string_view holdable() const { return by_line() ? std::string_view("\r") : std::string_view(" \t\r"); }
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
  DocumentWriter& out_;
  bool open_ = false;           // a document has begun
  bool in_line_ = false;        // bytes since the last line end
  bool line_has_text_ = false;  // more than blanks since the last line end
  std::string held_;
  int64_t held_at_ = 0;
};

/// The inputs of a command, all opened before any work: a typo in the last name should not cost an hour.
class Inputs {
 public:
  static Result<Inputs> open(const TokenizeArgs& args) {
    RT_TRY(check_read_once(args.inputs));
    Inputs out(args);
    bool sized = true;
    for (const std::string& path : args.inputs) {
      RT_TRY_SET(TextInput file, TextInput::open(path, out.rule_));
      if (args.chat.empty()) file.only_column(args.json_key);
      sized = sized && file.size_bytes() >= 0;
      out.progress_.bytes_total += file.size_bytes();
      out.files_.push_back(std::move(file));
    }
    if (!sized) out.progress_.bytes_total = 0;
    return out;
  }

  /// Once. `from`: what was read, a file each; may be null.
  Status read(DocumentWriter& documents, TokenizeReport* report, std::vector<SetOrigin::Input>* from) {
    DocumentSplitter splitter(args_.separator, documents);
    int64_t stored = 0;  // bytes of the files that are done
    std::string buffer;
    for (size_t i = 0; i < files_.size(); ++i) {
      TextInput file = std::move(files_[i]);  // closed when it has been read
      int64_t at = 0;
      do {
        RT_TRY(file.read(kReadBytes, &buffer));
        if (at == 0) documents.start_file(i, file.packing());
        if (buffer.empty()) break;
        report->bytes += std::ssize(buffer);
        documents.has_read(stored + file.taken_bytes());
        const size_t mark = at == 0 ? mark_bytes(buffer, rule_) : 0;
        RT_TRY(splitter.feed(std::string_view(buffer).substr(mark), static_cast<int64_t>(mark) + at));
        RT_TRY(tell(documents));
        at += std::ssize(buffer);
      } while (buffer.size() == kReadBytes);
      RT_TRY(splitter.end_file(at));
      stored += file.taken_bytes();
      if (from != nullptr) from->push_back({.path = args_.inputs[i], .bytes = at, .packing = file.packing()});
    }
    RT_TRY(documents.finish());
    return tell(documents);
  }

 private:
  explicit Inputs(const TokenizeArgs& args)
      : args_(args),
        rule_(args.any_text                                    ? TextRule::kAnything
              : args.separator == DocumentSeparator::kJsonLine ? TextRule::kRows
                                                               : TextRule::kNoJson) {}

  Status tell(const DocumentWriter& documents) {
    progress_.bytes_done = documents.written();
    progress_.documents = documents.documents();
    progress_.tokens = documents.tokens();
    if (!args_.progress || args_.progress(progress_)) return {};
    return Error{ErrorCode::kStopped, "tokenizing was stopped; no set was written"};
  }

  const TokenizeArgs& args_;
  TextRule rule_;
  std::vector<TextInput> files_;
  TokenizeProgress progress_;
};

}  // namespace

Result<TokenizeReport> tokenize_file(const TokenizeArgs& args) {
  if (args.inputs.empty()) return Error{ErrorCode::kInvalidInput, "no input files to tokenize"};
  if (args.output_prefix.empty() || args.output_prefix.back() == '/')
    return Error{ErrorCode::kInvalidInput, fmt::format("output prefix is \"{}\", expected a path whose last part is a "
                                                       "name: out/text makes out/text.bin and out/text.idx",
                                                       args.output_prefix)};
  RT_TRY_SET(const text::TokenizerHashes hashes, text::tokenizer_hashes(args.tokenizer));
  RT_TRY_SET(const std::unique_ptr<text::Tokenizer> tokenizer, text::make_tokenizer(args.tokenizer));
  SetOrigin origin{.tokenizer = args.tokenizer.path.empty() ? "bytes" : args.tokenizer.path,
                   .tokenizer_hash = hashes.file,
                   .chat = args.chat};
  if (args.append_eod && tokenizer->eod() < 0)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: --eod appends the token that ends a document, and there is none: {}. Name one in "
                             "tokenizer_config.json, or leave --eod out",
                             args.tokenizer.path, tokenizer->why_no_eod())};
  ChatFormat format;
  std::optional<ChatEncoder> chat;
  if (!args.chat.empty()) {
    RT_CHECK(args.separator == DocumentSeparator::kJsonLine && !args.append_eod, "a chat of {}", args.inputs[0]);
    RT_TRY_SET(format, chat_format(args.chat, *tokenizer));
    chat.emplace(format, *tokenizer, args.specials, args.channel_key);
  }
  RT_TRY_SET(Inputs inputs, Inputs::open(args));
  TokenizeReport report;
  report.vocab = tokenizer->vocab();
  report.dtype = MegatronWriter::dtype_for_vocab(report.vocab);
  RT_TRY_SET(MegatronWriter writer, MegatronWriter::create(args.output_prefix, report.dtype, {args.overwrite}));
  std::optional<LossWriter> loss;
  if (chat) {
    RT_TRY_SET(LossWriter made, LossWriter::create(args.output_prefix));
    loss.emplace(std::move(made));
  }
  ChannelWriter channels;
  const bool has_channels = !args.channel_key.empty();
  std::optional<OriginWriter> origins;
  if (args.origins) {
    RT_TRY_SET(OriginWriter made, OriginWriter::create(args.output_prefix));
    origins.emplace(std::move(made));
  }
  const auto encode = [&](std::string_view text, text::Part part, std::vector<int32_t>* ids) {
    return tokenizer->encode_part(text, part, ids);
  };
  DocumentWriter documents(args, PieceEncoder(args, encode, chat ? &*chat : nullptr),
                           {.writer = &writer,
                            .loss = loss ? &*loss : nullptr,
                            .channels = has_channels ? &channels : nullptr,
                            .origins = origins ? &*origins : nullptr,
                            .eod = tokenizer->eod()},
                           report);
  RT_TRY(inputs.read(documents, &report, &origin.inputs));
  if (writer.documents() == 0)
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no text to tokenize", args.inputs[0])};
  if (loss) report.counted = loss->counted();
  RT_TRY(writer.finish([&]() -> Status {
    if (loss) RT_TRY(loss->publish(writer.tokens()));
    if (has_channels) RT_TRY(channels.publish(args.output_prefix, writer.tokens()));
    std::vector<OriginFile> files;
    for (const SetOrigin::Input& input : origin.inputs) files.push_back({input.path, input.packing});
    if (origins) RT_TRY(origins->publish(files, writer.tokens()));
    origin.documents = writer.documents();
    origin.tokens = writer.tokens();
    return write_origin(args.output_prefix, origin);
  }));
  report.documents = writer.documents();
  report.tokens = writer.tokens();
  return report;
}

Result<TokenizeReport> visit_texts(const TokenizeArgs& args, const TextVisitor& visit) {
  if (args.inputs.empty()) return Error{ErrorCode::kInvalidInput, "no input files"};
  TokenizeArgs as_text = args;
  as_text.tokenizer.kind = TokenizerConfig::Kind::kHf;  // texts of UTF-8, cut where its patterns cut
  RT_TRY_SET(Inputs inputs, Inputs::open(as_text));
  TokenizeReport report;
  std::atomic<int64_t> ends = 0;
  const auto encode = [&](std::string_view text, text::Part part, std::vector<int32_t>*) {
    ends += part.last ? 1 : 0;
    return visit(text, part);
  };
  DocumentWriter documents(as_text, PieceEncoder(as_text, encode, nullptr), {}, report);
  RT_TRY(inputs.read(documents, &report, nullptr));
  report.documents = ends;
  report.empty_documents -= report.documents;
  if (report.documents == 0) return Error{ErrorCode::kInvalidInput, fmt::format("{}: no text in it", args.inputs[0])};
  return report;
}

}  // namespace cairn::data
