// Packed text: the pair of the unpacked file, and damage of any byte found and named.
#include "runtime/data/unpack.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include <thread>

#include "runtime/data/input_files.h"
#include "runtime/data/text_input.h"
#include "runtime/data/tokenize.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

std::string gzip(std::string_view text) {
  z_stream stream = {};
  constexpr int kGzip = 16, kMemory = 8;
  REQUIRE(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, MAX_WBITS + kGzip, kMemory, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(out.size() - stream.avail_out);
  deflateEnd(&stream);
  return out;
}

/// One frame with a checksum. `window_log`: 0: as zstd chooses.
std::string zstd(std::string_view text, int window_log = 0) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  REQUIRE(ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1)) == 0);
  if (window_log > 0) {  // one frame of unknown length: else the window is no larger than the text
    REQUIRE(ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window_log)) == 0);
    REQUIRE(ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0)) == 0);
  }
  std::string out(ZSTD_compressBound(text.size()), '\0');
  ZSTD_inBuffer from{text.data(), text.size(), 0};
  ZSTD_outBuffer to{out.data(), out.size(), 0};
  if (window_log > 0) {
    const size_t taken = ZSTD_compressStream2(context, &to, &from, ZSTD_e_continue);
    REQUIRE(ZSTD_isError(taken) == 0);
  }
  REQUIRE(ZSTD_compressStream2(context, &to, &from, ZSTD_e_end) == 0);
  out.resize(to.pos);
  ZSTD_freeCCtx(context);
  return out;
}

std::string passed_over(std::string_view content) {
  std::string out = std::string("\x50\x2a\x4d\x18", 4) + std::string(4, '\0') + std::string(content);
  out[4] = static_cast<char>(content.size());
  return out;
}

Result<std::string> text_of(const std::string& path, TextRule rule = TextRule::kAlsoJson) {
  return read_text(path, int64_t{1} << 30, rule);
}

std::string many_lines(int64_t bytes) {
  std::string text;
  for (int i = 0; std::ssize(text) < bytes; ++i) text += fmt::format("{{\"text\": \"line {} of many\"}}\n", i * 7919);
  return text;
}

}  // namespace

TEST_SUITE("runtime/data/unpack") {
  TEST_CASE("text comes out of every arrangement of members and frames") {
    const TempDir dir;
    const std::string text = many_lines(5 << 20), half = text.substr(0, text.size() / 2),
                      rest = text.substr(half.size());
    for (const auto& [name, bytes] : std::vector<std::pair<std::string, std::string>>{
             {"one.gz", gzip(text)},
             {"two.gz", gzip(half) + gzip(rest)},
             {"empty-member.gz", gzip("") + gzip(text) + gzip("")},
             {"one.zst", zstd(text)},
             {"two.zst", zstd(half) + zstd(rest)},
             {"passed-over.zst", passed_over("a") + zstd(half) + passed_over("index") + zstd(rest) + passed_over("")},
             {"empty-frame.zst", zstd("") + zstd(text)},
             {"named-otherwise", zstd(text)},
             {"window-27.zst", zstd(text, 27)}}) {
      CAPTURE(name);
      write_file(dir / name, bytes);
      const auto read = text_of(dir / name);
      REQUIRE_OK(read);
      CHECK((read.value() == text));
      CHECK((text_of(dir / name, TextRule::kAnything).value() == bytes));  // --any-text: as it is
    }
    write_file(dir / "marked.gz", gzip("\xef\xbb\xbftext"));
    CHECK(text_of(dir / "marked.gz").value() == "text");
  }

  TEST_CASE("a packed file that is cut at any byte, or has one changed, is refused with the byte and its member") {
    const TempDir dir;
    const std::string first = "the first text of many words\n", second = "a second text, and its words are others\n";
    for (const auto& [name, one, two] :
         {std::tuple("x.gz", gzip(first), gzip(second)), std::tuple("x.zst", zstd(first), zstd(second))}) {
      CAPTURE(name);
      const std::string whole = one + two;
      for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
        CAPTURE(bytes);
        write_file(dir / name, std::string_view(whole).substr(0, bytes));
        const auto read = text_of(dir / name);
        if (bytes == one.size() || bytes == whole.size()) {
          CHECK(read.value() == (bytes == one.size() ? first : first + second));
          continue;
        }
        REQUIRE_FALSE(read.ok());
        CHECK(read.error().code == ErrorCode::kCorrupt);
        CHECK(says(read.error().message, {name}));
        if (bytes >= one.size() + 4) {  // the mark is complete
          CHECK(says(read.error().message, {fmt::format(": byte {}: the file ends before its text does", bytes),
                                            fmt::format("that begins at byte {})", one.size())}));
        }
      }
      int refused = 0;
      for (size_t at = 0; at < whole.size(); ++at) {
        for (const int flip : {0x01, 0x80}) {
          CAPTURE(at);
          CAPTURE(flip);
          std::string damaged = whole;
          damaged[at] = static_cast<char>(damaged[at] ^ flip);
          write_file(dir / name, damaged);
          const auto read = text_of(dir / name);
          if (read.ok()) {  // a field beside the text: a time, a system
            CHECK(read.value() == first + second);
            continue;
          }
          ++refused;
          CHECK_MESSAGE(says(read.error().message, {name}), read.error().message);
        }
      }
      CHECK(refused > 3 * static_cast<int>(whole.size()) / 2);
    }
  }

  TEST_CASE("bytes behind a packed text, and a file named as packed that is not, are refused with their first bytes") {
    const TempDir dir;
    for (const auto& [name, bytes, part] : std::vector<std::tuple<std::string, std::string, std::string>>{
             {"x.gz", gzip("text") + "more", "byte 24: found 6d 6f 72 65, expected one more member of gzip"},
             {"x.zst", zstd("text") + "more", "found 6d 6f 72 65, expected one more frame of zstd"},
             {"x.gz", "text", "byte 0: found 74 65 78 74, expected 1f 8b 08, with which gzip begins"},
             {"x.zst", "text", "expected 28 b5 2f fd, with which zstd begins"},
             {"x.jsonl.zst", "", "byte 0: found the end of the file"}}) {
      CAPTURE(part);
      write_file(dir / name, bytes);
      const auto read = text_of(dir / name);
      REQUIRE_FALSE(read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
      CHECK_MESSAGE(says(read.error().message, {name, part}), read.error().message);
    }
    write_file(dir / "long.zst", zstd("text", 28));
    const auto window = text_of(dir / "long.zst");
    REQUIRE_FALSE(window.ok());
    CHECK(window.error().code == ErrorCode::kInvalidInput);
    CHECK(says(window.error().message, {"long.zst: was packed with a window of more than 128 MiB", "--long=31"}));
    write_file(dir / "a.tar.gz", gzip(std::string(257, 'n') + "ustar\x01" + std::string(300, 'n')));
    CHECK(says(text_of(dir / "a.tar.gz").error().message, {"a.tar.gz, unpacked: is a tar archive"}));
    write_file(dir / "a.gz", gzip(zstd("text")));
    CHECK(says(text_of(dir / "a.gz").error().message, {"a.gz, unpacked: is packed by zstd"}));
    const std::string bomb = gzip(std::string(3 << 20, 'a'));
    write_file(dir / "bomb.gz", bomb);
    CHECK(says(read_text(dir / "bomb.gz", std::ssize(bomb), TextRule::kAlsoJson).error().message, {"has more than"}));
  }

  TEST_CASE("a packed set, as a file or a pipe, gives the pair of the plain one, for any number of threads") {
    const TempDir dir;
    const std::string text = many_lines(3 << 20);
    write_file(dir / "in.jsonl", text);
    TokenizeArgs args;
    args.inputs = {dir / "in.jsonl"};
    args.output_prefix = dir / "plain";
    args.tokenizer = {TokenizerConfig::Kind::kBytes, ""};
    args.separator = DocumentSeparator::kJsonLine;
    REQUIRE_OK(tokenize_file(args));
    args.output_prefix = dir / "out";
    args.overwrite = true;
    write_file(dir / "in.jsonl.gz", gzip(text));
    write_file(dir / "in.jsonl.zst", zstd(text));
    for (const char* name : {"in.jsonl.gz", "in.jsonl.zst"}) {
      for (const int64_t threads : {1, 2, 7}) {
        CAPTURE(name);
        CAPTURE(threads);
        args.inputs = {dir / name};
        args.threads = threads;
        TokenizeProgress last;
        args.progress = [&](const TokenizeProgress& progress) {
          CHECK(progress.bytes_done >= last.bytes_done);
          last = progress;
          return true;
        };
        const auto report = tokenize_file(args);
        REQUIRE_OK(report);
        CHECK(report.value().bytes == std::ssize(text));
        CHECK(last.bytes_done == last.bytes_total);  // of the file as it is stored
        CHECK(last.bytes_total == static_cast<int64_t>(std::filesystem::file_size(dir / name)));
        CHECK((read_file(dir / "out.bin") == read_file(dir / "plain.bin")));
        CHECK((read_file(dir / "out.idx") == read_file(dir / "plain.idx")));
      }
    }
    args.progress = nullptr;
    REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
    std::thread writer([&] { std::ofstream(dir / "fifo", std::ios::binary) << read_file(dir / "in.jsonl.zst"); });
    args.inputs = {dir / "fifo"};
    const auto piped = tokenize_file(args);
    writer.join();
    REQUIRE_OK(piped);
    CHECK((read_file(dir / "out.bin") == read_file(dir / "plain.bin")));
  }

  TEST_CASE("damage deep in a packed file leaves the old pair and nothing else") {
    const TempDir dir;
    const std::string text = many_lines(6 << 20);
    TokenizeArgs args;
    args.output_prefix = dir / "out";
    args.tokenizer = {TokenizerConfig::Kind::kBytes, ""};
    args.separator = DocumentSeparator::kJsonLine;
    args.threads = 3;
    args.overwrite = true;
    write_file(dir / "old.jsonl", "{\"text\": \"old\"}\n");
    args.inputs = {dir / "old.jsonl"};
    REQUIRE_OK(tokenize_file(args));
    const std::string bin = read_file(dir / "out.bin"), idx = read_file(dir / "out.idx");
    for (const auto& [name, whole] : {std::pair("in.gz", gzip(text)), std::pair("in.zst", zstd(text))}) {
      for (const bool cut : {true, false}) {
        CAPTURE(name);
        std::string bytes = whole;
        if (cut) bytes.resize(bytes.size() / 2);
        if (!cut) bytes[bytes.size() / 2] = static_cast<char>(~bytes[bytes.size() / 2]);
        write_file(dir / name, bytes);
        args.inputs = {dir / name};
        const auto refused = tokenize_file(args);
        REQUIRE_FALSE(refused.ok());
        CHECK(says(refused.error().message, {name, ": byte "}));
        CHECK(read_file(dir / "out.bin") == bin);
        CHECK(read_file(dir / "out.idx") == idx);
        for (const std::string& left : names_in(dir)) CHECK_FALSE(left.ends_with(".tmp"));
      }
    }
    write_file(dir / "in.gz", gzip("good \xff text"));
    args.inputs = {dir / "in.gz"};
    args.separator = DocumentSeparator::kLine;
    args.tokenizer = {TokenizerConfig::Kind::kSentencePiece,
                      CAIRN_SOURCE_DIR "/tests/golden/sentencepiece-tiny/tiny.model"};
    CHECK(says(tokenize_file(args).error().message, {"in.gz, unpacked: byte 5: 0xff is not UTF-8"}));
  }

  TEST_CASE("more files than descriptors are read, and one that is replaced meanwhile is named") {
    const TempDir dir;
    constexpr int kFiles = 60;
    std::string all;
    TokenizeArgs args;
    for (int k = 0; k < kFiles; ++k) {
      const std::string text = fmt::format("text {:03}", k);
      write_file(dir / fmt::format("part-{:03}.gz", k), gzip(text));
      all += text;
    }
    const auto found = expand_patterns({dir / "part-*.gz"});
    REQUIRE_OK(found);
    args.inputs = found.value();
    CHECK(args.inputs.size() == kFiles);
    args.output_prefix = dir / "out";
    args.tokenizer = {TokenizerConfig::Kind::kBytes, ""};
    rlimit before = {};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    rlimit few = before;
    few.rlim_cur = 40;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
    const auto report = tokenize_file(args);
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    REQUIRE_OK(report);
    CHECK(report.value().documents == kFiles);
    const std::string bin = read_file(dir / "out.bin");
    REQUIRE(bin.size() == 2 * all.size());  // ids of 16 bits
    for (size_t i = 0; i < all.size(); ++i) CHECK(bin[2 * i] == all[i]);
    args.overwrite = true;
    int calls = 0;
    args.progress = [&](const TokenizeProgress&) {
      if (calls++ == 0) std::filesystem::rename(dir / "part-003.gz", dir / "part-059.gz");
      return true;
    };
    args.inputs = {dir / "part-000.gz", dir / "part-059.gz"};
    CHECK(says(tokenize_file(args).error().message, {"part-059.gz: was replaced by another file"}));
  }

  TEST_CASE("patterns name files in the order of their bytes, once, and say when there is none") {
    const TempDir dir;
    std::filesystem::create_directory(dir / "a-folder");
    for (const char* name : {"b-2", "b-10", "a", "B", "x[1]"}) write_file(dir / name, "");
    const auto names = [&](const std::vector<std::string>& inputs) {
      std::vector<std::string> full;
      for (const std::string& input : inputs) full.push_back(input == "-" ? input : std::string(dir / input));
      auto found = expand_patterns(full);
      if (!found.ok()) return std::vector<std::string>{found.error().message};
      for (std::string& path : found.value()) path = std::filesystem::path(path).filename().string();
      return found.value();
    };
    using Names = std::vector<std::string>;
    CHECK(names({"b-*", "-", "[aB]*"}) == Names{"b-10", "b-2", "-", "B", "a"});
    CHECK(names({"x[1]"}) == Names{"x[1]"});  // a file of this name
    CHECK(names({"a", "a"}) == Names{"a", "a"});
    CHECK(names({"missing"}) == Names{"missing"});  // its opening says so
    CHECK(says(names({"c*"}).at(0), {"c*: no file matches this pattern"}));
    CHECK(says(names({"a-f*"}).at(0), {"matches only folders"}));
    CHECK(says(names({"**/a"}).at(0), {"** is no pattern here"}));
    CHECK(says(names({"b-2", "b-*"}).at(0), {"b-2 is named by ", "its text would come twice"}));
  }
}
