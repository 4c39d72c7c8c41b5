#include "runtime/data/tokenize.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "runtime/data/document_origins.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/data/text_input.h"
#include "runtime/data/token_file.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;
using namespace cairn::text;

namespace {

const std::string kModel = CAIRN_SOURCE_DIR "/tests/golden/sentencepiece-tiny/tiny.model";
const TokenizerConfig kBytes{TokenizerConfig::Kind::kBytes, ""};
const TokenizerConfig kPieces{TokenizerConfig::Kind::kSentencePiece, kModel};

std::vector<std::vector<int32_t>> documents_of(const std::string& prefix) {
  auto opened = open_megatron(prefix);
  REQUIRE(opened.ok());
  std::vector<std::vector<int32_t>> documents;
  for (int64_t s = 0; s < opened.value()->sequence_count(); ++s) {
    const int64_t begin = opened.value()->sequence_start(s).value();
    const int64_t end = opened.value()->sequence_start(s + 1).value();
    documents.emplace_back(static_cast<size_t>(end - begin));
    REQUIRE(opened.value()->read(begin, end - begin, documents.back().data()).ok());
  }
  return documents;
}

std::vector<std::string> texts_of(const std::string& prefix) {
  std::vector<std::string> texts;
  for (const auto& ids : documents_of(prefix)) texts.emplace_back(ids.begin(), ids.end());
  return texts;
}

std::vector<std::string> tokenize_text(const TempDir& dir, std::string_view text, DocumentSeparator separator) {
  write_file(dir / "in.txt", text);
  TokenizeArgs args;
  args.inputs = {dir / "in.txt"};
  args.output_prefix = dir / "out";
  args.tokenizer = kBytes;
  args.separator = separator;
  args.overwrite = true;
  const auto report = tokenize_file(args);
  REQUIRE(report.ok());
  const auto texts = texts_of(dir / "out");
  CHECK(report.value().documents == static_cast<int64_t>(texts.size()));
  return texts;
}

}  // namespace

TEST_SUITE("runtime/data/tokenize") {
  TEST_CASE("a link by the name of an output's temporary file is refused, and what it leads to stays as it is") {
    const TempDir dir;
    write_file(dir / "in.txt", "text");
    for (const char* suffix : {"out.bin.tmp", "out.idx.tmp"}) {
      CAPTURE(suffix);
      write_file(dir / "precious", "precious");
      std::filesystem::create_symlink(dir / "precious", dir / suffix);
      TokenizeArgs args;
      args.inputs = {dir / "in.txt"};
      args.output_prefix = dir / "out";
      args.tokenizer = kBytes;
      const auto refused = tokenize_file(args);
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().message.find("is a link") != std::string::npos);
      CHECK(read_file(dir / "precious") == "precious");
      std::filesystem::remove(dir / suffix);
    }
  }

  TEST_CASE("bytes go to ids 0 to 255 and back") {
    auto tokenizer = make_tokenizer(kBytes).value();
    CHECK(tokenizer->vocab() == 256);
    std::string all(256, '\0');
    for (int i = 0; i < 256; ++i) all[static_cast<size_t>(i)] = static_cast<char>(i);
    std::vector<int32_t> ids;
    REQUIRE(tokenizer->encode(all, &ids).ok());
    CHECK(ids[200] == 200);
    CHECK(tokenizer->decode(ids).value() == all);
    CHECK(!tokenizer->decode(std::vector<int32_t>{256}).ok());
    CHECK(!tokenizer->decode(std::vector<int32_t>{-1}).ok());
  }

  TEST_CASE("a SentencePiece model encodes as spm_encode does and decodes to the text") {
    auto made = make_tokenizer(kPieces);
    REQUIRE(made.ok());
    const Tokenizer& tokenizer = *made.value();
    CHECK(tokenizer.vocab() == 330);
    CHECK(tokenizer.eod() == 2);
    std::vector<int32_t> ids;
    REQUIRE(tokenizer.encode("the stone hill \xc3\xa9", &ids).ok());
    CHECK(ids == std::vector<int32_t>{261, 276, 292, 303, 198, 172});
    CHECK(tokenizer.decode(ids).value() == "the stone hill \xc3\xa9");
    const Status bad = tokenizer.encode("ab\xff", &ids);
    REQUIRE(!bad.ok());
    CHECK(says(bad.error().message, {"byte 2", "0xff", "not UTF-8"}));
    CHECK(!tokenizer.decode(std::vector<int32_t>{330}).ok());
  }

  TEST_CASE("tokenize refuses a file that is no tokenizer model") {
    const TempDir dir;
    CHECK(!make_tokenizer({}).ok());
    CHECK(says(make_tokenizer({TokenizerConfig::Kind::kSentencePiece, dir / "none"}).error().message,
               {"none", "No such"}));
    const std::string model = read_file(kModel);
    write_file(dir / "m", "");
    CHECK(!make_tokenizer({TokenizerConfig::Kind::kSentencePiece, dir / "m"}).ok());
    write_file(dir / "m", "hello, this is text");
    CHECK(says(make_tokenizer({TokenizerConfig::Kind::kSentencePiece, dir / "m"}).error().message,
               {"not a SentencePiece"}));
    write_file(dir / "m", model.substr(0, model.size() / 2 + 1));
    CHECK(!make_tokenizer({TokenizerConfig::Kind::kSentencePiece, dir / "m"}).ok());
  }

  TEST_CASE("UTF-8 is checked as RFC 3629 says") {
    CHECK(find_invalid_utf8("") == -1);
    CHECK(find_invalid_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80") == -1);
    CHECK(find_invalid_utf8("a\x80") == 1);
    CHECK(find_invalid_utf8("ab\xc0\x80") == 2);        // overlong
    CHECK(find_invalid_utf8("\xe0\x9f\xbf") == 0);      // overlong
    CHECK(find_invalid_utf8("\xed\xa0\x80") == 0);      // surrogate
    CHECK(find_invalid_utf8("\xf4\x90\x80\x80") == 0);  // beyond U+10FFFF
    CHECK(find_invalid_utf8("\xf5\x80\x80\x80") == 0);
    CHECK(find_invalid_utf8("x\xe2\x82") == 1);  // cut
    CHECK(find_invalid_utf8("x\xe2\x28\xa1") == 1);
  }

  TEST_CASE("documents are whole files, lines, or set apart by blank lines") {
    const TempDir dir;
    using Texts = std::vector<std::string>;
    CHECK(tokenize_text(dir, "a\n\nb\n", DocumentSeparator::kWholeFile) == Texts{"a\n\nb\n"});
    CHECK(tokenize_text(dir, "one\n\ntwo\r\n three\rx\nlast", DocumentSeparator::kLine) ==
          Texts{"one", "two", " three\rx", "last"});
    CHECK(tokenize_text(dir, "\n\n first\nline \n\n \t\r\nsecond\r\nmore\r\n\r\n\r\nthird",
                        DocumentSeparator::kBlankLine) == Texts{" first\nline", "second\r\nmore", "third"});
    CHECK(tokenize_text(dir, "x\n   \ny  \n\n", DocumentSeparator::kBlankLine) == Texts{"x", "y"});
  }

  TEST_CASE("tokenize cuts documents independently of where the reader's blocks end") {
    // Against a naive splitter, on texts longer than the 1 MiB blocks.
    const TempDir dir;
    std::mt19937 random(5);
    std::string text;
    while (text.size() < (9u << 17)) {
      const uint32_t kind = random() % 8;
      if (kind == 0) text += "\n";
      if (kind == 1) text += "\n\n";
      if (kind == 2) text += " \n\t\n";
      if (kind == 3) text += "\r\n";
      if (kind >= 4)
        text += std::string(1 + random() % (kind == 7 ? 60000 : 40), static_cast<char>('a' + random() % 26));
    }
    std::vector<std::string> lines;
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      lines.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    std::vector<std::string> by_line, by_blank;
    std::string open;
    bool is_open = false;
    for (std::string line : lines) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) {
        if (is_open) by_blank.push_back(open);
        is_open = false;
      } else {
        open = is_open ? open + "\n" + line : line;
        is_open = true;
      }
      if (line.ends_with('\r')) line.pop_back();
      if (!line.empty()) by_line.push_back(line);
    }
    if (is_open) by_blank.push_back(open);
    // Blanks at a document's end belong to the separator.
    CHECK(tokenize_text(dir, text, DocumentSeparator::kLine) == by_line);
    const auto ours = tokenize_text(dir, text, DocumentSeparator::kBlankLine);
    REQUIRE(ours.size() == by_blank.size());
    for (size_t i = 0; i < ours.size(); ++i)
      CHECK(ours[i] == by_blank[i].substr(0, by_blank[i].find_last_not_of(" \t\r") + 1));
  }

  TEST_CASE("long documents are encoded in pieces at line ends, and lose nothing") {
    const TempDir dir;
    std::string text;
    for (int i = 0; text.size() < (1u << 20) + 123456; ++i)
      text += i % 1000 == 0 ? "the fox \xc3\xa9 over\n" : "the cairn stands on the hill \xe2\x82\xac ";
    write_file(dir / "in.txt", text);
    TokenizeArgs args;
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "out";
    args.tokenizer = kPieces;
    const auto report = tokenize_file(args);
    REQUIRE(report.ok());
    CHECK(report.value().documents == 1);
    CHECK(report.value().vocab == 330);
    const auto tokenizer = make_tokenizer(kPieces).value();
    const auto ids = documents_of(dir / "out").at(0);
    std::string back = tokenizer->decode(ids).value();
    // A piece starts with the model's dummy prefix, a space, which decode drops only at the very beginning.
    const auto squeeze = [](std::string s) {
      std::erase(s, ' ');
      return s;
    };
    CHECK(squeeze(back) == squeeze(text));

    // Without a line end for more than a piece the cut falls between characters.
    std::string euros;
    while (euros.size() < (5u << 18)) euros += "\xe2\x82\xac";
    write_file(dir / "in.txt", euros);
    args.overwrite = true;
    REQUIRE(tokenize_file(args).ok());
    CHECK(squeeze(tokenizer->decode(documents_of(dir / "out").at(0)).value()) == euros);
  }

  TEST_CASE("a long document has the ids of its whole text, whatever the file puts before a text") {
    const TempDir dir;
    std::filesystem::create_directory(dir / "tk");
    write_file(dir / "tk/tokenizer.json",
               R"({"model":{"type":"BPE","vocab":{"\u0120":0,"a":1,"\u010a":2,"b":3,"\u0120a":4,"ab":5},)"
               R"("merges":["\u0120 a","a b"]},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true}})");
    TokenizeArgs args;
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "out";
    args.tokenizer = {TokenizerConfig::Kind::kHf, dir / "tk/tokenizer.json"};
    args.overwrite = true;
    std::string lines, late((1 << 20) + 5, 'a');
    while (lines.size() < (3u << 20)) lines += "ab  a b a\nb  \n\n";
    late += "\nb" + late + "\nab";  // no line ends in the first MiB
    for (const std::string& text : {std::string(3'000'000, 'a'), lines, late}) {
      write_file(dir / "in.txt", text);
      REQUIRE_OK(tokenize_file(args));
      std::vector<int32_t> whole;
      REQUIRE_OK(make_tokenizer(args.tokenizer).value()->encode(text, &whole));
      CHECK(documents_of(dir / "out").at(0) == whole);
    }
  }

  TEST_CASE("JSON lines give the text of one field, and the pair is the same for any number of threads") {
    const TempDir dir;
    std::string lines;
    std::vector<std::string> texts;
    for (int i = 0; i < 3000; ++i) {
      texts.push_back(
          fmt::format("document {} says \"\u00e9\"\n{}", i, std::string(i % 7 == 0 ? 9000 : 40, 'a' + i % 26)));
      if (i == 1500) {
        texts.back() = std::string((2 << 20) + 7, 'x') + "\nyes\n" + std::string(1 << 20, 'z');  // cut in parts
      }
      lines += nlohmann::json{{"id", i}, {"text", "no"}, {"body", texts.back()}}.dump() + (i % 3 == 0 ? "\r\n" : "\n");
      if (i % 500 == 0) lines += "\n";  // an empty line
    }
    lines += R"({"body": ""})";  // no text, and no line end
    write_file(dir / "in.jsonl", lines);
    TokenizeArgs args;
    args.inputs = {dir / "in.jsonl"};
    args.output_prefix = dir / "out";
    args.overwrite = true;
    args.tokenizer = {.kind = TokenizerConfig::Kind::kBytes};
    args.separator = DocumentSeparator::kJsonLine;
    args.json_key = "body";
    std::string bin, idx;
    for (const int64_t threads : {1, 2, 7}) {
      CAPTURE(threads);
      args.threads = threads;
      const auto report = tokenize_file(args);
      REQUIRE_OK(report);
      CHECK(report.value().documents == 3000);
      CHECK(report.value().empty_documents == 7);
      CHECK(report.value().bytes == std::ssize(lines));
      if (threads == 1) {
        bin = read_file(dir / "out.bin");
        idx = read_file(dir / "out.idx");
        const auto documents = documents_of(dir / "out");
        REQUIRE(documents.size() == texts.size());
        for (size_t k = 0; k < texts.size(); ++k)
          CHECK(
              std::ranges::equal(documents[k], texts[k], {}, {}, [](char c) { return static_cast<unsigned char>(c); }));
      }
      CHECK(read_file(dir / "out.bin") == bin);
      CHECK(read_file(dir / "out.idx") == idx);
    }
    for (const int64_t threads : {1, 3}) {  // the first mistake of the input, whoever finds one first
      args.threads = threads;
      for (const auto& [bad, says] : std::vector<std::pair<std::string, std::string>>{
               {R"({"text": "a", "title": "b", "n": 1})",
                "in.jsonl:2: \"body\" is missing; fields with text: \"text\", \"title\""},
               {R"({"body": 5})", "in.jsonl:2: \"body\" is no text; fields with text: none"},
               {R"({"body": "cut)", "in.jsonl:2: byte "},
               {R"(["a"])", "in.jsonl:2: expected a JSON object a line"}}) {
        write_file(dir / "in.jsonl", "{\"body\": \"good\"}\n" + bad + "\n" + lines + bad + "\n");
        const auto refused = tokenize_file(args);
        REQUIRE_FALSE(refused.ok());
        CHECK(refused.error().code == ErrorCode::kInvalidInput);
        CHECK_MESSAGE(refused.error().message.find(says) != std::string::npos, refused.error().message);
        CHECK(read_file(dir / "out.bin") == bin);  // the old pair stands
      }
    }
    args.most_line_bytes = 60;
    for (const int64_t spare : {0, 1}) {  // a line of 60 bytes, and of one more
      write_file(dir / "in.jsonl", "{\"body\":\"good\"}\n{\"body\":\"" + std::string(60 - 11 + spare, 'a') + "\"}\n");
      const auto done = tokenize_file(args);
      CHECK(done.ok() == (spare == 0));
      if (spare > 0) CHECK(says(done.error().message, {"in.jsonl:2: a line of more than 60 B; JSON lines have"}));
    }
  }

  TEST_CASE("the origin of each document is the file and byte at which its text begins, for any kind of document") {
    const TempDir dir;
    const std::string text = "\xEF\xBB\xBFone\r\n\ntwo tokens\n  \n\nthree\nof lines\n\nfour";
    const std::string json =
        "{\"text\": \"one\"}\n\n {\"text\": \"two tokens\"}\r\n{\"text\": \"\"}\n{\"text\": \"four\"}";
    write_file(dir / "a", text);
    write_file(dir / "b.jsonl", json);
    TokenizeArgs args;
    args.output_prefix = dir / "out";
    args.overwrite = true;
    args.tokenizer = kBytes;
    const auto begins = [&](std::vector<std::string> inputs, DocumentSeparator separator, int64_t threads) {
      args.inputs = std::move(inputs);
      args.separator = separator;
      args.threads = threads;
      const auto report = tokenize_file(args);
      REQUIRE_OK(report);
      auto origins = DocumentOrigins::open(args.output_prefix, report.value().documents, report.value().tokens);
      REQUIRE_OK(origins);
      REQUIRE(origins.value().has_value());
      std::vector<std::string> out;
      for (const DocumentOrigin& one : origins.value()->read(0, report.value().documents).value()) {
        const std::string& file = origins.value()->files()[one.file].name;
        out.push_back(read_file(file).substr(one.byte, 5));
      }
      return out;
    };
    using Texts = std::vector<std::string>;
    const std::string a = dir / "a", b = dir / "b.jsonl";
    for (const int64_t threads : {1, 3}) {
      CHECK(begins({a, a}, DocumentSeparator::kWholeFile, threads) == Texts{"one\r\n", "one\r\n"});
      CHECK(begins({a}, DocumentSeparator::kLine, threads) ==
            Texts{"one\r\n", "two t", "  \n\nt", "three", "of li", "four"});
      CHECK(begins({a}, DocumentSeparator::kBlankLine, threads) == Texts{"one\r\n", "two t", "three", "four"});
      CHECK(begins({b, b}, DocumentSeparator::kJsonLine, threads) ==
            Texts{"{\"tex", " {\"te", "{\"tex", "{\"tex", " {\"te", "{\"tex"});
    }
    // A file of another pair, damaged ones, and a pair that is made anew without one.
    const auto opened = [&](int64_t documents, int64_t tokens) {
      return DocumentOrigins::open(args.output_prefix, documents, tokens);
    };
    const int64_t tokens = 2 * (3 + 10 + 4);
    CHECK_FALSE(opened(5, tokens).value().has_value());
    CHECK_FALSE(opened(6, tokens + 1).value().has_value());
    const std::string path = document_origins_path(args.output_prefix), good = read_file(path);
    const auto damaged = [&](std::string bytes) {
      write_file(path, bytes);
      const auto found = opened(6, tokens);
      if (!found.ok()) return found.error().code == ErrorCode::kCorrupt ? found.error().message : "another code";
      const auto read = found.value()->read(0, 6);
      return read.ok() ? std::string() : read.error().message;
    };
    CHECK(damaged(good).empty());
    std::string wrong = good;
    wrong[8] = 2;
    CHECK(damaged(wrong).find("byte 8: file 2 of 2") != std::string::npos);
    wrong = good;
    wrong[good.size() - 60] ^= 1;  // a name
    CHECK(damaged(wrong).find("its checksum is of other bytes") != std::string::npos);
    CHECK(damaged("CAIRNOR2" + good.substr(8)).find("byte 0") != std::string::npos);
    CHECK(damaged(good.substr(0, 20)).find("ends before its table") != std::string::npos);
    CHECK(damaged(good.substr(0, good.size() - 9)).find("do not fill") != std::string::npos);
    args.origins = false;
    REQUIRE(tokenize_file(args).ok());
    CHECK_FALSE(std::filesystem::exists(path));
  }

  TEST_CASE("tokenize refuses a file that is no text of its kind by what it looks like") {
    const TempDir dir;
    const auto wide = [](std::string_view text, size_t bytes, size_t at) {
      std::string out;
      for (const char c : text) {
        out.append(bytes, '\0');
        out[out.size() - bytes + at] = c;
      }
      return out;
    };
    TokenizeArgs args;
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "out";
    args.overwrite = true;
    args.tokenizer = {.kind = TokenizerConfig::Kind::kBytes};
    for (const auto& [text, says] :
         std::vector<std::pair<std::string, std::string>>{{"{\"text\": \"a\"}\n", "looks like JSON"},
                                                          {"\n  { \"a\\\"b\" : [1]}", "looks like JSON"},
                                                          {"[\n {\"text\": 1}]", "looks like JSON"},
                                                          {"BZh91AY&SYxxx", "is packed by bzip2"},
                                                          {"\xfd\x37zXZ\x01", "is packed by xz"},
                                                          {"\x04\x22\x4d\x18pq", "is packed by lz4"},
                                                          {"PK\x03\x04pq", "is a zip archive"},
                                                          {std::string(257, 'n') + "ustar\x01", "is a tar archive"},
                                                          {"PAR1\x15\x02", "is a parquet table"},
                                                          {"PAR1yyyyPAR1", "is a parquet table"},
                                                          {"ARROW1\x01\x02", "is an Arrow (feather) table"},
                                                          {"FEA1\x01", "is a feather table"},
                                                          {"ORC\x01", "is an ORC table"},
                                                          {"%PDF-1.7\n", "is a PDF"},
                                                          {"\x93NUMPY\x01", "is an array of NumPy"},
                                                          {"\x89HDF\r\n\x1a\n", "is an HDF5 file"},
                                                          {"\xff\xfe\x61\x01", "is UTF-16LE"},
                                                          {"\xfe\xff\x01\x61", "is UTF-16BE"},
                                                          {wide("a line of text\n", 2, 0), "is UTF-16LE"},
                                                          {wide("a line of text\n", 2, 1), "is UTF-16BE"},
                                                          {wide("a line of text\n", 4, 0), "is UTF-32LE"},
                                                          {wide("a line of text\n", 4, 3), "is UTF-32BE"}}) {
      CAPTURE(says);
      write_file(dir / "in.txt", text);
      args.any_text = false;
      const auto refused = tokenize_file(args);
      REQUIRE_FALSE(refused.ok());
      CHECK_MESSAGE(refused.error().message.find(says) != std::string::npos, refused.error().message);
      args.any_text = true;
      CHECK(tokenize_file(args).ok());
    }
    args.any_text = false;
    for (const std::string& text :
         {std::string("{"), std::string("{}"), std::string("{ x: 1 }"), std::string("[\"a\", \"b\"]"),
          std::string("{\"a\", \"b\"};"), std::string("BZh is a word"), std::string("[[link]]: {\"a"),
          std::string("PAR1 is a magic number"), std::string("ORC means a table"), std::string("one\0two\0", 8),
          std::string("\0a\0", 3)}) {
      CAPTURE(text);
      write_file(dir / "in.txt", text);
      CHECK(tokenize_file(args).ok());
    }
  }

  TEST_CASE("a pipe gives the pair of the file with the same text, however slowly it comes") {
    const TempDir dir;
    std::string text;
    for (int i = 0; text.size() < (size_t{3} << 20); ++i) text += fmt::format("line {} of many\n", i * 7919);
    text += std::string(1 << 20, 'x');  // no line end: cut by size
    write_file(dir / "in.txt", text);
    TokenizeArgs args;
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "file";
    args.tokenizer = kPieces;
    REQUIRE_OK(tokenize_file(args));
    REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
    for (const size_t chunk : {size_t{1000}, size_t{1} << 20, text.size()}) {
      CAPTURE(chunk);
      std::thread writer([&] {
        std::ofstream out(dir / "fifo", std::ios::binary);
        for (size_t at = 0; at < text.size(); at += chunk) {
          out << std::string_view(text).substr(at, chunk) << std::flush;
        }
      });
      args.inputs = {dir / "fifo"};
      args.output_prefix = dir / "pipe";
      args.overwrite = true;
      int64_t total = -1;
      args.progress = [&](const TokenizeProgress& progress) {
        total = progress.bytes_total;
        return true;
      };
      const auto report = tokenize_file(args);
      writer.join();
      REQUIRE_OK(report);
      CHECK(report.value().bytes == std::ssize(text));
      CHECK(total == 0);
      CHECK(read_file(dir / "pipe.bin") == read_file(dir / "file.bin"));
      CHECK(read_file(dir / "pipe.idx") == read_file(dir / "file.idx"));
    }
  }

  TEST_CASE("a pipe that gives nothing ends at the deadline, with its name; standard input is read from where it is") {
    const TempDir dir;
    REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
    auto quiet = TextInput::open(dir / "fifo", TextRule::kNoJson, std::chrono::milliseconds(5));
    REQUIRE_OK(quiet);
    std::string out;
    const Status waited = quiet.value().read(10, &out);
    REQUIRE_FALSE(waited.ok());
    CHECK(waited.error().code == ErrorCode::kTimeout);
    CHECK(says(waited.error().message, {"fifo: byte 0: waited 0.005 s"}));
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    REQUIRE(::write(ends[1], "some text", 9) == 9);
    ::close(ends[1]);
    const std::string path = fmt::format("/dev/fd/{}", ends[0]);
    CHECK(read_text(path, 9, TextRule::kNoJson).value() == "some text");  // its writer has left already
    ::close(ends[0]);
    write_file(dir / "long", "0123456789");
    CHECK(says(read_text(dir / "long", 9, TextRule::kNoJson).error().message, {"long: has more than 9 bytes"}));
    CHECK(says(read_text(dir / "", 9, TextRule::kNoJson).error().message, {"is a folder"}));
  }

  TEST_CASE("several files, end-of-document ids, progress and the report") {
    const TempDir dir;
    write_file(dir / "a.txt", "the fox\nthe dog\n\n");
    write_file(dir / "b.txt", "");
    write_file(dir / "c.txt", "the hill");
    TokenizeArgs args;
    args.inputs = {dir / "a.txt", dir / "b.txt", dir / "c.txt"};
    args.output_prefix = dir / "out";
    args.tokenizer = kPieces;
    args.separator = DocumentSeparator::kLine;
    args.append_eod = true;
    int64_t calls = 0, last = 0;
    args.progress = [&](const TokenizeProgress& progress) {
      ++calls;
      CHECK(progress.bytes_total == 25);
      CHECK(progress.bytes_done >= last);
      last = progress.bytes_done;
      return true;
    };
    const auto report = tokenize_file(args);
    REQUIRE(report.ok());
    CHECK(calls == 3);  // two files with text, and the end
    CHECK(last == 25);
    CHECK(report.value().bytes == 25);
    CHECK(report.value().documents == 3);
    CHECK(report.value().empty_documents == 1);
    CHECK(report.value().dtype == DType::kU16);
    const auto documents = documents_of(dir / "out");
    int64_t tokens = 0;
    for (const auto& ids : documents) {
      CHECK(ids.back() == 2);
      tokens += static_cast<int64_t>(ids.size());
    }
    CHECK(report.value().tokens == tokens);

    CHECK(says(tokenize_file(args).error().message, {"out.bin exists"}));
    args.overwrite = true;
    args.progress = [](const TokenizeProgress&) { return false; };
    const std::string before = read_file(dir / "out.idx");
    const auto stopped = tokenize_file(args);
    REQUIRE(!stopped.ok());
    CHECK(stopped.error().code == ErrorCode::kStopped);
    CHECK(read_file(dir / "out.idx") == before);
    CHECK(names_in(dir).size() == 7);  // no temporary files
  }

  TEST_CASE("bad input is named with file and byte, and writes nothing") {
    const TempDir dir;
    TokenizeArgs args;
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "out";
    args.tokenizer = kPieces;
    const auto message = [&args] {
      const auto report = tokenize_file(args);
      REQUIRE(!report.ok());
      return report.error().message;
    };
    CHECK(says(message(), {"in.txt", "No such file"}));
    std::string text(3 << 20, 'a');
    text[2 << 20 | 7] = '\xff';
    for (size_t i = 99; i < text.size(); i += 100) text[i] = '\n';
    write_file(dir / "in.txt", text);
    CHECK(says(message(), {"in.txt: byte 2097159: 0xff is not UTF-8"}));
    args.tokenizer = kBytes;
    args.append_eod = true;
    text[2 << 20 | 7] = '\0';
    write_file(dir / "in.txt", text);
    CHECK(says(message(), {"in.txt: byte 2097159 is NUL"}));
    args.separator = DocumentSeparator::kLine;
    CHECK(says(message(), {"in.txt: byte 2097159 is NUL"}));
    args.separator = DocumentSeparator::kBlankLine;
    CHECK(says(message(), {"in.txt: byte 2097159 is NUL"}));
    write_file(dir / "in.txt", "\n\n");
    CHECK(says(message(), {"no text"}));
    args.inputs.clear();
    CHECK(says(message(), {"no input files"}));
    args.inputs = {dir / "in.txt"};
    args.output_prefix = dir / "in.txt/out";
    CHECK(says(message(), {"in.txt", "Not a directory"}));
    args.output_prefix = dir / "x/";
    CHECK(says(message(), {"expected a path whose last part is a name"}));
    CHECK(names_in(dir).size() == 1);
  }

  TEST_CASE("a writer killed at any moment leaves the old pair, no pair, or the new pair") {
    const TempDir dir;
    const auto write_pair = [&dir](int32_t token, size_t documents) {
      auto writer = MegatronWriter::create(dir / "set", DType::kI32, {true});
      if (!writer.ok()) return false;
      const std::vector<int32_t> tokens(100, token);
      for (size_t i = 0; i < documents; ++i)
        if (!writer.value().add(tokens).ok() || !writer.value().end_document().ok()) return false;
      return writer.value().finish().ok();
    };
    REQUIRE(write_pair(1, 500));
    std::mt19937 random(11);
    int old_pairs = 0, new_pairs = 0, no_pairs = 0;
    for (int round = 0; round < 30; ++round) {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(write_pair(2, 500) ? 0 : 1);
      ::usleep(random() % 6000);
      ::kill(child, SIGKILL);
      int status = 0;
      ::waitpid(child, &status, 0);
      auto opened = open_megatron(dir / "set");
      if (opened.ok()) {
        std::vector<int32_t> out(50000);
        REQUIRE(opened.value()->token_count() == 50000);
        REQUIRE(opened.value()->read(0, 50000, out.data()).ok());
        CHECK((out.front() == 1 || out.front() == 2));
        CHECK(out.front() == out.back());
        ++(out.front() == 1 ? old_pairs : new_pairs);
      } else {
        CHECK(!std::filesystem::exists(dir / "set.idx"));  // then there is no set, and it says so
        ++no_pairs;
      }
      REQUIRE(write_pair(1, 500));  // the killed writer's temporary files are taken over
    }
    MESSAGE("old " << old_pairs << ", new " << new_pairs << ", none " << no_pairs);
    CHECK(names_in(dir).size() == 2);
  }

  TEST_CASE("two writers of one set are kept apart, and misuse is refused") {
    const TempDir dir;
    auto first = MegatronWriter::create(dir / "set", DType::kU16, {});
    REQUIRE(first.ok());
    auto second = MegatronWriter::create(dir / "set", DType::kU16, {});
    REQUIRE(!second.ok());
    CHECK(says(second.error().message, {"another process is writing"}));
    CHECK(std::filesystem::exists(dir / "set.bin.tmp"));  // the loser must not remove the winner's file
    CHECK(says(first.value().add(std::vector<int32_t>{1, 65536}).error().message, {"token 1 of document 0 is 65536"}));
    CHECK(MegatronWriter::dtype_for_vocab(65499) == DType::kU16);
    CHECK(MegatronWriter::dtype_for_vocab(65500) == DType::kI32);
    auto empty = MegatronWriter::create(dir / "none", DType::kU16, {});
    CHECK(says(empty.value().finish().error().message, {"no tokens"}));
  }
}
