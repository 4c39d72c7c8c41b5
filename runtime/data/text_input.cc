#include "runtime/data/text_input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <set>

#include "runtime/core/crc32c.h"
#include "runtime/core/lfs_pointer.h"
#include "runtime/core/units.h"
#include "runtime/data/file_io.h"
#include "runtime/text/utf8.h"

namespace cairn::data {
namespace {

constexpr size_t kLookedAt = 4096;
constexpr size_t kStoredBytes = 256 << 10;  // of a packed file, read at once

/// The first bytes, as people write them.
std::string hex(std::string_view bytes) {
  constexpr size_t kShown = 4;
  std::string out;
  for (const char c : bytes.substr(0, kShown)) {
    out += fmt::format("{}{:02x}", out.empty() ? "" : " ", static_cast<unsigned char>(c));
  }
  return out;
}

/// Bytes at the beginning of a file that no text begins with.
struct Signature {
  std::string_view bytes;
  size_t at = 0;  // of the first one
  const char *name, *remedy;
};

using namespace std::string_view_literals;

constexpr const char *kTable = "write its text as JSON lines", *kWords = "extract its text first",
                     *kOther = "name a text file";
// The pipes that make JSON lines of tables, a batch of rows at a time.
#define CAIRN_ROWS "make JSON lines of it first: python3 -c 'import sys, json, pyarrow"
#define CAIRN_LINES "[print(json.dumps(row, default=str)) for batch in "
#define CAIRN_PIPE " for row in batch.to_pylist()]' FILE | cairn ... -"
constexpr const char *kParquet = CAIRN_ROWS ".parquet as p; " CAIRN_LINES
                                            "p.ParquetFile(sys.argv[1]).iter_batches()" CAIRN_PIPE,
                     *kArrowFile = CAIRN_ROWS " as a; f = a.ipc.open_file(sys.argv[1]); " CAIRN_LINES
                                              "map(f.get_batch, range(f.num_record_batches))" CAIRN_PIPE,
                     *kArrowStream = CAIRN_ROWS " as a; " CAIRN_LINES "a.ipc.open_stream(sys.argv[1])" CAIRN_PIPE;
#undef CAIRN_ROWS
#undef CAIRN_LINES
#undef CAIRN_PIPE

constexpr Signature kSignatures[] = {
    {"\x1f\x8b\x08"sv, 0, "packed by gzip", "unpack it first (gunzip -c)"},
    {"\x1f\x9d"sv, 0, "packed by compress", "unpack it first (uncompress -c)"},
    {"\x28\xb5\x2f\xfd"sv, 0, "packed by zstd", "unpack it first (unzstd -c)"},
    {"\xfd\x37zXZ"sv, 0, "packed by xz", "unpack it first (unxz -c)"},
    {"LZIP\x01"sv, 0, "packed by lzip", "unpack it first (lzip -dc)"},
    {"\x5d\0\0"sv, 0, "packed by lzma", "unpack it first (unlzma -c)"},
    {"1AY&SY"sv, 4, "packed by bzip2", "unpack it first (bunzip2 -c)"},
    {"\x04\x22\x4d\x18"sv, 0, "packed by lz4", "unpack it first (unlz4 -c)"},
    {"\x02\x21\x4c\x18"sv, 0, "packed by lz4", "unpack it first (unlz4 -c)"},
    {"\xff\x06\0\0sNaPpY"sv, 0, "packed by snappy", "unpack it first (snzip -dc)"},
    {"\x89LZO"sv, 0, "packed by lzop", "unpack it first (lzop -dc)"},
    {"PK\x03\x04"sv, 0, "a zip archive", "unpack it first (unzip -p)"},
    {"PK\x05\x06"sv, 0, "an empty zip archive", kOther},
    {"7z\xbc\xaf\x27\x1c"sv, 0, "a 7z archive", "unpack it first (7z x -so)"},
    {"Rar!\x1a\x07"sv, 0, "a rar archive", "unpack it first (unrar p -inul)"},
    {"ustar"sv, 257, "a tar archive", "unpack it first (tar -xOf)"},
    {"PAR1"sv, 0, "a parquet table", kParquet},
    {"PARE"sv, 0, "an encrypted parquet table", kTable},
    {"ARROW1"sv, 0, "an Arrow (feather) table", kArrowFile},
    {"FEA1"sv, 0, "a feather table", kTable},
    {"\xff\xff\xff\xff"sv, 0, "a stream of Arrow", kArrowStream},
    {"ORC"sv, 0, "an ORC table", kTable},
    {"Obj\x01"sv, 0, "an Avro table", kTable},
    {"SQLite format 3\0"sv, 0, "an SQLite database", kTable},
    {"\x89HDF\r\n\x1a\n"sv, 0, "an HDF5 file", kTable},
    {"\x93NUMPY"sv, 0, "an array of NumPy", "T.token_files reads tokens in it"},
    {"MMIDIDX\0\0"sv, 0, "the index of a Megatron pair", "T.megatron reads its tokens"},
    {"%PDF-"sv, 0, "a PDF", kWords},
    {"{\\rtf"sv, 0, "an RTF document", kWords},
    {"%!PS-"sv, 0, "a PostScript document", kWords},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, 0, "a document of Microsoft Office", kWords},
    {"\x89PNG\r\n"sv, 0, "a PNG picture", kOther},
    {"\xff\xd8\xff"sv, 0, "a JPEG picture", kOther},
    {"GIF8"sv, 0, "a GIF picture", kOther},
    {"ID3"sv, 0, "an MP3 file", kOther},
    {"OggS\0"sv, 0, "an Ogg file", kOther},
    {"RIFF"sv, 0, "a sound, a video or a picture (RIFF)", kOther},
    {"ftyp"sv, 4, "a video or a picture (MP4)", kOther},
    {"\x7f\x45LF"sv, 0, "a program", kOther},
    {"MZ\x90\0"sv, 0, "a program", kOther},
    {"\xca\xfe\xba\xbe"sv, 0, "a program", kOther},
    {"MATLAB 5.0 MAT-file"sv, 0, "a file of MATLAB", kTable},
    {"GGUF"sv, 0, "a GGUF model", kOther},
    {"\x80\x02}"sv, 0, "a pickle of Python", kTable},
    {"\x80\x03}"sv, 0, "a pickle of Python", kTable},
    {"\x80\x02\x8a\x0al\xfc\x9c"sv, 0, "a model of torch", kOther},
    {"\x80\x04\x95"sv, 0, "a pickle of Python", kTable},
    {"\x80\x05\x95"sv, 0, "a pickle of Python", kTable},
};

bool is_control(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < ' ' && c != '\n' && c != '\r' && c != '\t') || byte == 0x7f;
}

/// A signature that is a word may begin a text too: then all that follows is text, behind PAR1 and its kin a space
/// first.
bool may_be_text(const Signature& one, std::string_view begin) {
  const bool word = one.at != 4 && std::ranges::all_of(one.bytes, [](char c) {
                      return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
                    });
  constexpr size_t kSome = 512;
  const std::string_view behind = begin.substr(0, kSome).substr(one.at + one.bytes.size());
  const bool apart = !one.bytes.ends_with('1') || behind.empty() || behind[0] == ' ' || behind[0] == '\n';
  return word && apart && std::ranges::none_of(behind, is_control);
}

bool begins_with(std::string_view begin, const Signature& one) {
  if (begin.size() < one.at || !begin.substr(one.at).starts_with(one.bytes)) return false;
  return one.at != 4 || begin.starts_with(one.bytes == "ftyp" ? "\0"sv : "BZh"sv);
}

std::string sentence(const Signature& one) { return fmt::format("is {}: {}", one.name, one.remedy); }

/// A page of HTML, whatever the case of its first tag.
bool is_page(std::string_view begin) {
  begin.remove_prefix(begin.starts_with("\xef\xbb\xbf") ? 3 : 0);
  begin.remove_prefix(std::min(begin.find_first_not_of(" \t\r\n"), begin.size()));
  const auto starts = [&](std::string_view tag) {
    return begin.size() > tag.size() &&
           std::equal(tag.begin(), tag.end(), begin.begin(), [](char a, char b) { return a == std::tolower(b); });
  };
  return starts("<!doctype html") || starts("<html");
}

/// Files whose signature is no constant; empty: it is none of them.
std::string computed_kind(std::string_view begin) {
  if (begin.size() >= 4 && (begin[0] & 0xf0) == 0x50 && begin.substr(1, 3) == "\x2a\x4d\x18") {
    return "is packed by zstd or lz4: unpack it first (unzstd -c)";  // a frame that is passed over comes first
  }
  // The length of a header of JSON, and its beginning.
  if (begin.size() > 9 && begin.substr(4, 4) == "\0\0\0\0"sv && begin.substr(8, 2) == "{\"") {
    return fmt::format("is a safetensors file: {}", kOther);
  }
  uint32_t checksum = 0;
  constexpr size_t kLength = 8;
  if (begin.size() > kLength + sizeof(checksum)) {
    std::memcpy(&checksum, begin.data() + kLength, sizeof(checksum));
    if (masked_crc32c(begin.substr(0, kLength)) == checksum) return fmt::format("is a TFRecord file: {}", kTable);
  }
  if (is_lfs_pointer(begin)) return std::string(kLfsPointer);
  return {};
}

/// Names a file's kind by its signature, with the remedy; empty: none is known.
std::string packed_kind(std::string_view begin) {
  for (const Signature& one : kSignatures) {
    if (begins_with(begin, one) && !may_be_text(one, begin)) return sentence(one);
  }
  return computed_kind(begin);
}

/// Names the wide characters of a text; empty: it has none.
std::string wide_characters(std::string_view begin) {
  for (const auto& [mark, name] : {std::pair("\xff\xfe\0\0"sv, "UTF-32LE"), std::pair("\0\0\xfe\xff"sv, "UTF-32BE"),
                                   std::pair("\xff\xfe"sv, "UTF-16LE"), std::pair("\xfe\xff"sv, "UTF-16BE")}) {
    if (begin.starts_with(mark)) return name;
  }
  // Without a mark, the NULs: counts, at each place of four, of them and of the high bytes of alphabets.
  std::array<size_t, 4> nul = {}, low = {};
  const size_t words = begin.size() / 4;
  if (words < 2) return {};
  for (size_t i = 0; i < words * 4; ++i) {
    const auto c = static_cast<unsigned char>(begin[i]);
    nul[i % 4] += c == 0 ? 1 : 0;
    low[i % 4] += c < 0x10 && c != '\t' && c != '\n' && c != '\r' ? 1 : 0;
  }
  const auto most = [](size_t count, size_t of) { return count * 20 >= of * 19; };
  const auto few = [](size_t count, size_t of) { return count * 20 <= of; };
  if (nul[3] == words && most(nul[2], words) && few(nul[0], words)) return "UTF-32LE (or numbers of four bytes)";
  if (nul[0] == words && most(nul[1], words) && few(nul[3], words)) return "UTF-32BE (or numbers of four bytes)";
  const size_t even = nul[0] + nul[2], odd = nul[1] + nul[3], pairs = 2 * words;
  if (few(even, pairs) && !few(odd, pairs) && most(low[1] + low[3], pairs)) return "UTF-16LE (or numbers of two bytes)";
  if (few(odd, pairs) && !few(even, pairs) && most(low[0] + low[2], pairs)) return "UTF-16BE (or numbers of two bytes)";
  return {};
}

/// Whether a text begins as JSON does: {"key": ... or [{"key": ...
bool begins_as_json(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  const auto next_is = [&](char c) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    if (!text.starts_with(c)) return false;
    text.remove_prefix(1);
    return true;
  };
  if (!next_is('{') && !(next_is('[') && next_is('{'))) return false;
  if (!next_is('"')) return false;
  while (!text.empty() && text[0] != '"') text.remove_prefix(std::min<size_t>(text[0] == '\\' ? 2 : 1, text.size()));
  return next_is('"') && next_is(':');
}

/// The descriptor that "-", /dev/stdin and /dev/fd/N name; nothing: another path.
std::optional<int> descriptor_of(std::string_view path) {
  if (path == "-" || path == "/dev/stdin") return STDIN_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    int number = -1;
    if (!path.starts_with(folder)) continue;
    const char* const end = path.data() + path.size();
    const auto [stop, error] = std::from_chars(path.data() + folder.size(), end, number);
    if (error == std::errc() && stop == end && number >= 0) return number;
  }
  return std::nullopt;
}

}  // namespace

Status check_text(std::string_view begin, TextRule rule) {
  if (rule == TextRule::kAnything) return {};
  begin = begin.substr(0, kLookedAt);
  if (const std::string found = packed_kind(begin); !found.empty()) {
    return Error{ErrorCode::kInvalidInput, found + ", or give --any-text for its bytes as they are"};
  }
  if (is_page(begin)) {
    return Error{
        ErrorCode::kInvalidInput,
        "is a page of HTML, whose tags would become tokens: extract its text first, or give --any-text for its "
        "bytes as they are"};
  }
  if (const std::string wide = wide_characters(begin); !wide.empty()) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("is {}: convert it first (iconv -t UTF-8), or give --any-text for its bytes as they are", wide)};
  }
  if (rule != TextRule::kNoJson || !begins_as_json(begin)) return {};
  return Error{
      ErrorCode::kInvalidInput,
      "looks like JSON, whose braces and keys would become tokens: --json-key KEY reads the text of one field of "
      "JSON lines, --any-text takes the file as it is"};
}

size_t mark_bytes(std::string_view begin, TextRule rule) {
  return rule != TextRule::kAnything && begin.starts_with("\xef\xbb\xbf") ? 3 : 0;
}

Status check_json_line(int64_t bytes, int64_t most) {
  if (bytes <= most) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("a line of more than {}; JSON lines have one object a line, and a longer document is split "
                           "into several",
                           format_bytes(most))};
}

std::string no_tokens(std::string_view begin) {
  begin = begin.substr(0, kLookedAt);
  for (const Signature& one : kSignatures) {
    const bool gzip = &one == &kSignatures[0];
    if ((one.bytes.size() >= 4 || gzip) && begins_with(begin, one)) return sentence(one);
  }
  if (std::string kind = computed_kind(begin); !kind.empty()) return kind;
  // Bytes of tokens are hardly ever well-formed up to here, unless one token repeats.
  constexpr size_t kFewest = 64, kFewestKinds = 8;
  begin = begin.substr(0, text::whole_characters(begin));
  if (begin.size() < kFewest || std::set<char>(begin.begin(), begin.end()).size() < kFewestKinds ||
      text::find_invalid_utf8(begin) >= 0 || std::ranges::any_of(begin, is_control)) {
    return {};
  }
  return "is text: make tokens of it (cairn data tokenize)";
}

Result<TextInput> TextInput::open(const std::string& path, TextRule rule, std::chrono::milliseconds patience) {
  TextInput out;
  out.path_ = path == "-" ? "standard input" : path;
  out.rule_ = rule;
  out.patience_ = patience;
  const std::optional<int> held = descriptor_of(path);
  // A FIFO without a writer must not hang here: read() waits for the first byte, with a deadline.
  if (path != "-") out.fd_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!out.fd_ && held) out.fd_.reset(::fcntl(*held, F_DUPFD_CLOEXEC, 0));  // a socket cannot be opened by its path
  if (!out.fd_) return os_error(errno, out.path_);
  struct stat info = {};
  if (::fstat(out.fd_.get(), &info) != 0) return os_error(errno, out.path_);
  if (S_ISDIR(info.st_mode)) {
    return Error{ErrorCode::kInvalidInput, out.path_ + ": is a folder; name the text files in it"};
  }
  if (S_ISBLK(info.st_mode)) return Error{ErrorCode::kInvalidInput, out.path_ + ": is a disk, not a text file"};
  if (S_ISREG(info.st_mode) && path != "-") {  // standard input is read from where it is
    out.size_bytes_ = info.st_size;
    out.device_ = info.st_dev;
    out.inode_ = info.st_ino;
    if (!held) out.fd_.reset();  // there may be more files than descriptors
  }
  return out;
}

Status TextInput::reopen() {
  fd_.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd_) return os_error(errno, path_);
  struct stat info = {};
  if (::fstat(fd_.get(), &info) != 0) return os_error(errno, path_);
  if (info.st_dev == device_ && info.st_ino == inode_) return {};
  return Error{ErrorCode::kInvalidInput, path_ + ": was replaced by another file since this command began"};
}

Result<size_t> TextInput::read_some(char* out, size_t most) {
  for (;;) {
    struct pollfd wait = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&wait, 1, static_cast<int>(patience_.count()));
    if (ready < 0 && errno != EINTR) return os_error(errno, path_);
    if (ready == 0) {
      return Error{ErrorCode::kTimeout,
                   fmt::format("{}: byte {}: waited {} s for the next byte of this pipe; is the program alive that "
                               "writes to it?",
                               path_, taken_, std::chrono::duration<double>(patience_).count())};
    }
    if (ready < 0) continue;
    const ssize_t got = ::read(fd_.get(), out, most);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR && errno != EAGAIN) return os_error(errno, fmt::format("{}: byte {}", path_, taken_));
  }
}

/// The next `most` stored bytes, fewer only at the end.
Result<size_t> TextInput::read_stored(char* out, size_t most) {
  if (size_bytes_ >= 0) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(most), size_bytes_ - taken_);
    RT_TRY(read_exact(fd_.get(), path_, taken_, out, count));
    taken_ += count;
    return static_cast<size_t>(count);
  }
  size_t filled = 0;  // as full as a file would fill it: what is made of the text does not depend on a pipe's pace
  while (filled < most) {
    RT_TRY_SET(const size_t got, read_some(out + filled, most - filled));
    if (got == 0) break;
    filled += got;
    taken_ += static_cast<int64_t>(got);
  }
  return filled;
}

/// More stored bytes behind those that are not used yet; none at the end.
Status TextInput::refill() {
  stored_.erase(0, at_);
  at_ = 0;
  const size_t kept = stored_.size();
  stored_.resize(kept + kStoredBytes);
  RT_TRY_SET(const size_t got, read_stored(stored_.data() + kept, kStoredBytes));
  stored_.resize(kept + got);
  return {};
}

Status TextInput::begin() {
  begun_ = true;
  if (!fd_) RT_TRY(reopen());
  if (rule_ == TextRule::kAnything) return {};
  RT_TRY(refill());
  const TableKind kind = rule_ == TextRule::kRows && size_bytes_ >= 0 ? table_kind(stored_) : TableKind::kNone;
  if (kind != TableKind::kNone && !packed_kind(stored_.substr(0, kLookedAt)).empty()) {
    RT_TRY(begin_table(kind));
    if (table_) return {};
  }
  packing_ = packing_of(stored_);
  if (packed()) unpacker_ = Unpacker::make(packing_);
  const Packing named = named_packing(path_);
  if (packed() || named == Packing::kNone) return {};
  const bool gzip = named == Packing::kGzip;
  return Error{ErrorCode::kCorrupt,
               fmt::format("{}: byte 0: found {}, expected {}, with which {} begins: it is damaged, or no packed file, "
                           "and then has a wrong name",
                           path_, stored_.empty() ? "the end of the file" : hex(stored_),
                           gzip ? "1f 8b 08" : "28 b5 2f fd", gzip ? "gzip" : "zstd")};
}

/// Without the module for tables it stays a file that is refused by its kind.
Status TextInput::begin_table(TableKind kind) {
  Fd fd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!fd) return os_error(errno, path_);
  RT_TRY_SET(table_, open_table({.kind = kind, .fd = std::move(fd), .column = column_}).with(path_));
  if (!table_) return {};
  packing_ = Packing::kTable;
  checked_ = true;
  stored_.clear();
  return {};
}

int64_t TextInput::taken_bytes() const {
  return table_ ? static_cast<int64_t>(table_->done() * static_cast<double>(size_bytes_)) : taken_;
}

Error TextInput::damage(std::string_view what) const {
  const int64_t used = taken_ - std::ssize(stored_) + static_cast<int64_t>(at_);
  return Error{ErrorCode::kCorrupt, fmt::format("{}: byte {}: {} (the {} that begins at byte {})", path_, used, what,
                                                unpacker_->member(), member_at_)};
}

/// Whether one more member follows.
Result<bool> TextInput::next_member() {
  constexpr size_t kMark = 4;
  if (stored_.size() - at_ < kMark) RT_TRY(refill());
  member_at_ = taken_ - std::ssize(stored_) + static_cast<int64_t>(at_);
  const std::string_view next = std::string_view(stored_).substr(at_);
  if (next.empty()) return false;
  if (unpacker_->begins_member(next)) return true;
  return Error{ErrorCode::kCorrupt, fmt::format("{}: byte {}: found {}, expected one more {}, or the end of the file",
                                                path_, member_at_, hex(next), unpacker_->member())};
}

Status TextInput::read_unpacked(size_t most, std::string* out) {
  out->resize(most);
  size_t filled = 0;
  while (filled < most) {
    if (!in_member_) {
      RT_TRY_SET(in_member_, next_member());
      if (!in_member_) break;
    }
    Result<Unpacker::Step> step =
        unpacker_->step(std::string_view(stored_).substr(at_), std::span(*out).subspan(filled));
    if (!step.ok() && step.error().code != ErrorCode::kCorrupt) return std::move(step).error().with(path_);
    if (!step.ok()) return damage("is damaged: " + step.error().message);
    at_ += step.value().in;
    filled += step.value().out;
    in_member_ = !step.value().ended;
    if (!in_member_ || step.value().in + step.value().out > 0) continue;
    RT_TRY(refill());
    if (stored_.empty()) return damage("the file ends before its text does: it was cut, or is still being written");
  }
  out->resize(filled);
  return {};
}

Status TextInput::read_table(size_t most, std::string* out) {
  out->clear();
  for (bool more = true; out->size() < most && more;) {
    const size_t count = std::min(most - out->size(), stored_.size() - at_);
    out->append(stored_, at_, count);
    at_ += count;
    if (at_ < stored_.size()) break;
    stored_.clear();
    at_ = 0;
    if (out->size() == most) break;
    RT_TRY_SET(more, table_->read(&stored_).with(path_));
  }
  return {};
}

Status TextInput::read_plain(size_t most, std::string* out) {
  const size_t held = std::min(most, stored_.size() - at_);
  const size_t left = size_bytes_ >= 0 ? static_cast<size_t>(size_bytes_ - taken_) : most;
  out->resize(std::min(most, held + left));
  std::copy_n(stored_.data() + at_, held, out->data());
  at_ += held;
  RT_TRY_SET(const size_t got, read_stored(out->data() + held, out->size() - held));
  out->resize(held + got);
  return {};
}

Status TextInput::read(size_t most, std::string* out) {
  if (!begun_) RT_TRY(begin());
  RT_TRY(table_ ? read_table(most, out) : packed() ? read_unpacked(most, out) : read_plain(most, out));
  if (checked_) return {};
  checked_ = true;
  return check_text(*out, rule_).with(packed() ? path_ + ", unpacked" : path_);
}

Result<std::string> read_text(const std::string& path, int64_t most_bytes, TextRule rule) {
  RT_TRY_SET(TextInput in, TextInput::open(path, rule));
  const auto too_long = [&] {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: has more than {} bytes, the most that are read at once", path, most_bytes)};
  };
  if (in.size_bytes() > most_bytes) return too_long();
  constexpr size_t kAtOnce = 1 << 20;
  std::string out, part;
  for (bool first = true;; first = false) {
    RT_TRY(in.read(kAtOnce, &part));
    out += std::string_view(part).substr(first ? mark_bytes(part, rule) : 0);
    if (std::ssize(out) > most_bytes) return too_long();
    if (part.size() < kAtOnce) return out;
  }
}

bool named_as_json_lines(std::string_view path) {
  path = without_packing(path);
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

}  // namespace cairn::data
