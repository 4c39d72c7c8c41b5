#include "runtime/data/token_file.h"

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "runtime/data/megatron_writer.h"
#include "tests/runtime/data/scratch.h"

using namespace cairn;
using namespace cairn::data;

namespace {

// As Megatron-LM's indexed_dataset.py lays it out: uint16, three documents of 5, 3 and 8 tokens.
const std::string kVectorIdx = from_hex(
    "4d4d494449445800000100000000000000080300000000000000040000000000000005000000030000000800000000000000"
    "000000000a000000000000001000000000000000000000000000000001000000000000000200000000000000030000000000"
    "0000");

std::vector<uint16_t> counting(size_t n) {
  std::vector<uint16_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), uint16_t{100});
  return tokens;
}

std::vector<int32_t> all_of(const TokenSource& source) {
  std::vector<int32_t> out(static_cast<size_t>(source.token_count()));
  const Status status = source.read(0, source.token_count(), out.data());
  REQUIRE(status.ok());
  return out;
}

Error error_of(Result<std::unique_ptr<TokenSource>> result) {
  REQUIRE(!result.ok());
  return result.error();
}

template <typename T>
void put(std::string& bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

/// The vector with the bytes at `offset` replaced by `value`.
template <typename T>
std::string with(size_t offset, T value) {
  std::string idx = kVectorIdx;
  put(idx, offset, value);
  return idx;
}

}  // namespace

TEST_SUITE("runtime/data/token_file") {
  TEST_CASE("the writer makes the published index, the reader reads it") {
    const TempDir dir;
    auto created = MegatronWriter::create(dir / "set", DType::kU16, {});
    REQUIRE(created.ok());
    MegatronWriter writer = std::move(created).value();
    int32_t next = 100;
    for (const int n : {5, 3, 8}) {
      std::vector<int32_t> tokens(static_cast<size_t>(n));
      std::iota(tokens.begin(), tokens.end(), next);
      next += n;
      REQUIRE(writer.add(tokens).ok());
      REQUIRE(writer.end_document().ok());
    }
    REQUIRE(writer.finish().ok());
    CHECK(read_file(dir / "set.idx") == kVectorIdx);
    CHECK(read_file(dir / "set.bin") == bytes_of(counting(16)));
    CHECK(names_in(dir).size() == 2);

    auto opened = open_megatron(dir / "set");
    REQUIRE(opened.ok());
    const TokenSource& source = *opened.value();
    CHECK(source.token_count() == 16);
    CHECK(source.sequence_count() == 3);
    CHECK(source.sequence_start(0).value() == 0);
    CHECK(source.sequence_start(1).value() == 5);
    CHECK(source.sequence_start(2).value() == 8);
    CHECK(source.sequence_start(3).value() == 16);
    std::vector<int32_t> some(4);
    REQUIRE(source.read(6, 4, some.data()).ok());
    CHECK(some == std::vector<int32_t>{106, 107, 108, 109});
  }

  TEST_CASE("every integer token type is read") {
    const TempDir dir;
    const auto check = [&dir]<typename T>(uint8_t code, T) {
      std::string idx = kVectorIdx;
      put(idx, 17, code);
      put<int64_t>(idx, 34 + 12 + 8, 5 * sizeof(T));
      put<int64_t>(idx, 34 + 12 + 16, 8 * sizeof(T));
      std::vector<T> tokens(16);
      std::iota(tokens.begin(), tokens.end(), T{100});
      write_file(dir / "set.idx", idx);
      write_file(dir / "set.bin", bytes_of(tokens));
      auto opened = open_megatron(dir / "set", {116});
      REQUIRE(opened.ok());
      CHECK(all_of(*opened.value())[15] == 115);
    };
    check(1, uint8_t{});
    check(3, int16_t{});
    check(4, int32_t{});
    check(5, int64_t{});
    check(8, uint16_t{});
  }

  TEST_CASE("each wrong field of an index is named with place, stored and expected value") {
    const TempDir dir;
    write_file(dir / "set.bin", bytes_of(counting(16)));
    const auto refused = [&dir](const std::string& idx) {
      write_file(dir / "set.idx", idx);
      return error_of(open_megatron(dir / "set"));
    };
    CHECK(says(refused(with(0, 'X')).message, {"set.idx", "byte 0", "magic"}));
    CHECK(says(refused(with<uint64_t>(9, 2)).message, {"byte 9", "version is 2", "expected 1"}));
    Error floats = refused(with<uint8_t>(17, 6));
    CHECK(floats.code == ErrorCode::kUnsupported);
    CHECK(says(floats.message, {"code is 6", "Megatron-LM reads as float64", "GPT-NeoX as float32"}));
    CHECK(says(refused(with<uint8_t>(17, 7)).message, {"code is 7", "reads as float32", "GPT-NeoX as float64"}));
    CHECK(says(refused(with<uint8_t>(17, 2)).message, {"int8"}));
    CHECK(says(refused(with<uint8_t>(17, 0)).message, {"byte 17", "is 0"}));
    CHECK(says(refused(with<uint64_t>(18, UINT64_MAX)).message, {"byte 18", "at most 5"}));
    CHECK(says(refused(with<uint64_t>(18, 0)).message, {"no sequences"}));
    CHECK(says(refused(with<uint64_t>(26, UINT64_MAX)).message, {"byte 26", "2 to 4"}));
    CHECK(says(refused(with<uint64_t>(26, 1)).message, {"byte 26", "end_document"}));
    CHECK(says(refused(with<uint64_t>(26, 3)).message, {"94 bytes", "has 102"}));
    CHECK(says(refused(with<int32_t>(38, -3)).message, {"byte 38", "length of sequence 1 is -3"}));
    CHECK(says(refused(with<int32_t>(38, 4)).message, {"byte 62", "offset of sequence 2 is 16", "expected 18"}));
    CHECK(says(refused(with<int64_t>(46, 2)).message, {"byte 46", "offset of sequence 0 is 2", "expected 0"}));
    CHECK(says(refused(with<int64_t>(70, 1)).message, {"byte 70", "document index 0 is 1", "expected 0"}));
    CHECK(says(refused(with<int64_t>(78, 9)).message, {"byte 78", "document index 1 is 9"}));
    CHECK(says(refused(with<int64_t>(86, 0)).message, {"byte 86", "document index 2 is 0", "1 to 3"}));
    CHECK(says(refused(with<int64_t>(94, 2)).message, {"byte 94", "last entry", "is 2", "expected 3"}));
    CHECK(says(refused(with<int32_t>(42, 9)).message, {"set.bin", "32 bytes", "17 tokens"}));
    CHECK(says(refused(kVectorIdx + std::string(3, '\0')).message, {"multimodal"}));
    CHECK(says(refused(kVectorIdx + "x").message, {"102 bytes", "has 103"}));
    CHECK(says(refused("").message, {"magic"}));
    for (size_t cut = 9; cut < kVectorIdx.size(); ++cut)
      CHECK(refused(kVectorIdx.substr(0, cut)).code == ErrorCode::kCorrupt);

    Error legacy = refused(std::string("TNTIDX\0\0", 8) + std::string(40, '\1'));
    CHECK(legacy.code == ErrorCode::kUnsupported);
    CHECK(says(legacy.message, {"TNTIDX", "cairn data tokenize", "--dataset-impl mmap"}));

    write_file(dir / "set.idx", kVectorIdx);
    write_file(dir / "set.bin", std::string(31, 'x'));
    CHECK(says(error_of(open_megatron(dir / "set")).message, {"31 bytes", "32 bytes"}));
    std::filesystem::remove(dir / "set.bin");
    CHECK(error_of(open_megatron(dir / "set")).code == ErrorCode::kInvalidInput);
    std::filesystem::remove(dir / "set.idx");
    CHECK(says(error_of(open_megatron(dir / "set")).message, {"<prefix>.idx", "No such file"}));
    CHECK(says(error_of(open_token_file("/dev/null", "uint16")).message, {"not a regular file"}));
  }

  TEST_CASE("random damage to an index gives an error or a set that can be read, never a crash") {
    const TempDir dir;
    write_file(dir / "set.bin", bytes_of(counting(16)));
    std::mt19937_64 random(20240520);
    int fine = 0, refused = 0;
    for (int round = 0; round < 4000; ++round) {
      std::string idx = kVectorIdx;
      const int edits = 1 + static_cast<int>(random() % 4);
      for (int e = 0; e < edits && !idx.empty(); ++e) {
        const size_t at = random() % idx.size();
        switch (random() % 5) {
          case 0:
            idx[at] = static_cast<char>(random());
            break;
          case 1:
            idx[at] = static_cast<char>(idx[at] ^ (1 << random() % 8));
            break;
          case 2:
            idx.resize(at);
            break;
          case 3:
            idx.insert(at, std::string(1 + random() % 16, static_cast<char>(random())));
            break;
          default:
            for (size_t i = at; i < std::min(at + 8, idx.size()); ++i)
              idx[i] = static_cast<char>(random() % 2 ? 255 : 127);
        }
      }
      write_file(dir / "set.idx", idx);
      auto opened = open_megatron(dir / "set");
      if (opened.ok()) {
        ++fine;
        std::vector<int32_t> out(static_cast<size_t>(opened.value()->token_count()));
        REQUIRE(out.size() * 2 == 32);
        REQUIRE(opened.value()->read(0, opened.value()->token_count(), out.data()).ok());
        for (int64_t s = 0; s <= opened.value()->sequence_count(); ++s) {
          auto start = opened.value()->sequence_start(s);
          REQUIRE(start.ok());
          REQUIRE((start.value() >= 0 && start.value() <= opened.value()->token_count()));
        }
      } else {
        ++refused;
        REQUIRE(says(opened.error().message, {(dir / "set.").native()}));
      }
    }
    CHECK(refused > 3000);
    MESSAGE(fine << " read, " << refused << " refused");
  }

  TEST_CASE("raw token files are read, their mistakes named") {
    const TempDir dir;
    write_file(dir / "train.bin", bytes_of(counting(1000)));
    auto opened = open_token_file(dir / "train.bin", "uint16", {2000});
    REQUIRE(opened.ok());
    CHECK(opened.value()->token_count() == 1000);
    CHECK(opened.value()->sequence_count() == 1);
    CHECK(all_of(*opened.value())[999] == 1099);
    CHECK(open_token_file(dir / "train.bin", "uint32").value()->token_count() == 500);
    CHECK(says(error_of(open_token_file(dir / "train.bin", "")).message, {"token type is \"\"", "uint16"}));
    CHECK(says(error_of(open_token_file(dir / "train.bin", "int8")).message, {"int8"}));
    write_file(dir / "odd.bin", "abc");
    CHECK(says(error_of(open_token_file(dir / "odd.bin", "uint16")).message, {"odd.bin", "3 bytes"}));
    write_file(dir / "empty.bin", "");
    CHECK(says(error_of(open_token_file(dir / "empty.bin", "uint16")).message, {"no tokens"}));
  }

  TEST_CASE("a list that numpy.save wrote is read behind its header, by its own type") {
    const TempDir dir;
    const auto npy = [](std::string header, const std::string& tokens, char version = 1) {
      header.resize(118, ' ');
      header.back() = '\n';
      std::string out = std::string("\x93NUMPY") + version + '\0' + static_cast<char>(header.size()) + '\0';
      if (version > 1) out += std::string(2, '\0');
      return out + header + tokens;
    };
    const std::string small = bytes_of(counting(300));
    write_file(dir / "a.npy", npy("{'descr': '<u2', 'fortran_order': False, 'shape': (300,), }", small));
    for (const char* dtype : {"uint16", ""}) {
      const auto opened = open_token_file(dir / "a.npy", dtype, {2000});
      REQUIRE(opened.ok());
      CHECK(opened.value()->token_count() == 300);
      CHECK(all_of(*opened.value())[0] == 100);
      CHECK(all_of(*opened.value())[299] == 399);
    }
    CHECK(says(error_of(open_token_file(dir / "a.npy", "uint32")).message, {"says uint32", ".npy of uint16 tokens"}));
    std::vector<int64_t> wide(300, 70000);
    write_file(dir / "w.npy", npy("{'descr': '<i8', 'fortran_order': False, 'shape': (300,), }", bytes_of(wide), 2));
    CHECK(all_of(*open_token_file(dir / "w.npy", "uint16").value())[7] == 70000);  // a recipe has no name for int64
    for (const char* header : {"{'descr': '<f4', 'fortran_order': False, 'shape': (150,), }",
                               "{'descr': '>u2', 'fortran_order': False, 'shape': (300,), }",
                               "{'descr': '<u2', 'fortran_order': False, 'shape': (30, 10), }",
                               "{'descr': '<u2', 'fortran_order': False, 'shape': (), }", "{}", ""}) {
      CAPTURE(header);
      write_file(dir / "b.npy", npy(header, small));
      const Error refused = error_of(open_token_file(dir / "b.npy", "uint16"));
      CHECK(refused.code == ErrorCode::kUnsupported);
      CHECK(says(refused.message, {"b.npy: byte 10", "expected a list of tokens"}));
    }
    write_file(dir / "c.npy", npy("{'descr': '<u2', 'fortran_order': False, 'shape': (301,), }", small));
    CHECK(says(error_of(open_token_file(dir / "c.npy", "uint16")).message, {"says 301 tokens", "the file has"}));
    write_file(dir / "d.npy", std::string("\x93NUMPY\x01\0\xff\xff", 10) + small);
    CHECK(error_of(open_token_file(dir / "d.npy", "uint16")).code == ErrorCode::kCorrupt);
  }

  TEST_CASE("a token file that is text, or packed, is refused by its kind") {
    const TempDir dir;
    const std::string more(4000, 'x');
    for (const auto& [bytes, says_kind] : std::vector<std::pair<std::string, std::string>>{
             {"{\"text\": \"a line of it\"}\n" + more, "is text: make tokens of it"},
             {"\xd1\x82\xd0\xb5\xd0\xba\xd1\x81\xd1\x82 " + more, "is text"},
             {std::string("\x1f\x8b\x08\0", 4) + more, "is packed by gzip"},
             {"PK\x03\x04" + more, "is a zip archive"},
             {"PAR1\x15\x02" + more, "is a parquet table"},
             {std::string("\x20\x01\0\0\0\0\0\0{\"a", 11) + more, "is a safetensors file"}}) {
      CAPTURE(says_kind);
      write_file(dir / "t.bin", bytes.size() % 2 == 0 ? bytes : bytes + "x");
      CHECK(says(error_of(open_token_file(dir / "t.bin", "uint16")).message, {"t.bin: " + says_kind}));
    }
    std::mt19937 draw(4);
    for (const uint32_t vocab : {30, 127, 256, 32000, 65536}) {  // tokens of every kind are none of these
      std::vector<uint16_t> tokens(3000);
      for (uint16_t& token : tokens) token = static_cast<uint16_t>(draw() % vocab);
      write_file(dir / "t.bin", bytes_of(tokens));
      CHECK(open_token_file(dir / "t.bin", "uint16").ok());
    }
  }

  TEST_CASE("raw tokens of another type than they are read as are refused, with the likely type") {
    const TempDir dir;
    std::mt19937 draw(3);
    const auto tokens_of = [&]<typename T>(T, uint32_t vocab) {
      std::vector<T> out(5000);
      for (T& token : out) token = static_cast<T>(draw() % vocab);
      return bytes_of(out);
    };
    const auto refused = [&](const std::string& bytes, const char* dtype, int64_t vocab) {
      write_file(dir / "t.bin", bytes);
      auto opened = open_token_file(dir / "t.bin", dtype, {vocab});
      return opened.ok() ? std::string() : opened.error().message;
    };
    for (const uint32_t vocab : {300, 50257, 128256, 1000000}) {
      CAPTURE(vocab);
      CHECK(says(refused(tokens_of(uint32_t{}, vocab), "uint16", 1000000),
                 {"t.bin: read as uint16", "looks like uint32"}));
      CHECK(says(refused(tokens_of(int64_t{}, vocab), "uint16", 0), {"looks like int64"}));
      CHECK(says(refused(tokens_of(int64_t{}, vocab), "uint32", 0), {"read as uint32", "looks like int64"}));
      CHECK(refused(tokens_of(uint32_t{}, vocab), "uint32", vocab).empty());
    }
    CHECK(says(refused(tokens_of(uint16_t{}, 32000), "uint32", 128256), {"looks like uint16"}));
    for (const uint32_t vocab : {2, 17, 256, 50257, 65536}) {
      CAPTURE(vocab);
      CHECK(refused(tokens_of(uint16_t{}, vocab), "uint16", vocab).empty());
    }
    std::vector<uint16_t> turns(5000);  // a few small tokens in turn with others are tokens all the same
    for (size_t i = 0; i < turns.size(); ++i) turns[i] = static_cast<uint16_t>(i % 2 == 0 ? draw() % 500 : draw() % 40);
    CHECK(refused(bytes_of(turns), "uint16", 500).empty());
  }

  TEST_CASE("a token beyond the vocabulary is named with file, token and byte, also through a slice") {
    const TempDir dir;
    std::vector<uint32_t> tokens(100000, 7);
    tokens[77777] = 50257;
    write_file(dir / "t.bin", bytes_of(tokens));
    std::shared_ptr<const TokenSource> source = open_token_file(dir / "t.bin", "uint32", {50257}).value();
    std::vector<int32_t> out(tokens.size());
    CHECK(source->read(0, 77777, out.data()).ok());
    CHECK(source->read(77778, 22222, out.data()).ok());
    const Status whole = source->read(0, 100000, out.data());
    REQUIRE(!whole.ok());
    CHECK(whole.error().code == ErrorCode::kCorrupt);
    CHECK(says(whole.error().message, {"t.bin: token 77777 (byte 311108) is 50257, expected 0 to 50256"}));
    const Status sliced = slice_tokens(source, 70000, 80000)->read(7000, 1000, out.data());
    REQUIRE(!sliced.ok());
    CHECK(says(sliced.error().message, {"token 77777 (byte 311108)"}));

    tokens[77777] = 0xffffffff;  // without a vocabulary: what int32 cannot hold
    write_file(dir / "t.bin", bytes_of(tokens));
    const Status wide = open_token_file(dir / "t.bin", "uint32").value()->read(77700, 100, out.data());
    REQUIRE(!wide.ok());
    CHECK(says(wide.error().message, {"is 4294967295"}));

    std::string idx = kVectorIdx;
    put<uint8_t>(idx, 17, 3);  // int16, one negative
    write_file(dir / "set.idx", idx);
    std::vector<uint16_t> negative = counting(16);
    negative[3] = 0xfff0;
    write_file(dir / "set.bin", bytes_of(negative));
    const Status signed_status = open_megatron(dir / "set").value()->read(0, 16, out.data());
    REQUIRE(!signed_status.ok());
    CHECK(says(signed_status.error().message, {"token 3 (byte 6) is -16"}));
  }

  TEST_CASE("a file cut while it is open is an error, not a signal") {
    const TempDir dir;
    write_file(dir / "t.bin", std::string(1 << 20, 'a'));
    auto source = open_token_file(dir / "t.bin", "uint16").value();
    std::filesystem::resize_file(dir / "t.bin", 1000);
    std::vector<int32_t> out(100);
    CHECK(source->read(400, 100, out.data()).ok());
    const Status status = source->read(450, 100, out.data());
    REQUIRE(!status.ok());
    CHECK(status.error().code == ErrorCode::kCorrupt);
    CHECK(says(status.error().message, {"t.bin", "ends at byte 1000"}));
  }

  TEST_CASE("llm.c shards are recognised by their header") {
    const TempDir dir;
    const auto shard = [](int32_t magic, int32_t version, int32_t count, const std::string& payload) {
      std::vector<int32_t> header(256);
      header[0] = magic, header[1] = version, header[2] = count;
      return bytes_of(header) + payload;
    };
    write_file(dir / "a_000000.bin", shard(20240520, 1, 10, bytes_of(counting(10))));
    for (const char* dtype : {"", "uint16"}) {
      auto opened = open_token_file(dir / "a_000000.bin", dtype);
      REQUIRE(opened.ok());
      CHECK(opened.value()->token_count() == 10);
      CHECK(all_of(*opened.value())[0] == 100);
    }
    CHECK(says(error_of(open_token_file(dir / "a_000000.bin", "uint32")).message, {"uint32", "shard of uint16"}));
    write_file(dir / "l.bin", shard(20240801, 7, 4, bytes_of(std::vector<uint32_t>{1, 2, 3, 128000})));
    CHECK(all_of(*open_token_file(dir / "l.bin", "").value()) == std::vector<int32_t>{1, 2, 3, 128000});
    write_file(dir / "bad.bin", shard(20240520, 1, 11, bytes_of(counting(10))));
    CHECK(says(error_of(open_token_file(dir / "bad.bin", "")).message, {"byte 8", "11 tokens", "1046", "1044"}));
    write_file(dir / "bad.bin", shard(20240520, 1, -10, bytes_of(counting(10))));
    CHECK(error_of(open_token_file(dir / "bad.bin", "")).code == ErrorCode::kCorrupt);
    write_file(dir / "bad.bin", shard(20240520, 3, 10, bytes_of(counting(10))));
    CHECK(says(error_of(open_token_file(dir / "bad.bin", "")).message, {"byte 4", "version is 3", "expected 1"}));
    write_file(dir / "eval.bin", shard(20240522, 1, 10, "xx"));
    CHECK(says(error_of(open_token_file(dir / "eval.bin", "")).message, {"evaluation file"}));

    // Several shards by pattern are one stream, in the order of their names.
    std::vector<uint16_t> more(5, 9);
    write_file(dir / "a_000001.bin", shard(20240520, 1, 5, bytes_of(more)));
    auto joined = open_token_file(dir / "a_*.bin", "uint16");
    REQUIRE(joined.ok());
    CHECK(joined.value()->token_count() == 15);
    CHECK(joined.value()->sequence_count() == 2);
    std::vector<int32_t> across(4);
    REQUIRE(joined.value()->read(8, 4, across.data()).ok());
    CHECK(across == std::vector<int32_t>{108, 109, 9, 9});
    CHECK(says(error_of(open_token_file(dir / "b_*.bin", "uint16")).message, {"no file matches"}));
  }

  TEST_CASE("documents of a range are those of its tokens, also in a slice and in a join") {
    const TempDir dir;
    const std::vector<int64_t> lengths = {5, 1, 8, 3};
    MegatronWriter writer = std::move(MegatronWriter::create(dir / "set", DType::kI32, {})).value();
    std::vector<std::pair<int64_t, int64_t>> known;  // document and token in it, of each token
    for (size_t document = 0; document < lengths.size(); ++document) {
      for (int32_t t = 0; t < lengths[document]; ++t) {
        REQUIRE(writer.add(std::span(&t, 1)).ok());
        known.emplace_back(document, t);
      }
      REQUIRE(writer.end_document().ok());
    }
    REQUIRE(writer.finish().ok());
    write_file(dir / "plain.bin", bytes_of(counting(7)));
    const std::shared_ptr<const TokenSource> pair = open_megatron(dir / "set").value();
    const std::shared_ptr<const TokenSource> plain = open_token_file(dir / "plain.bin", "uint16").value();
    // 2 to 15 of the pair, then all of the plain file.
    const auto joined = concat_tokens({slice_tokens(pair, 2, 15), plain});
    for (int64_t start = 0; start < joined->token_count(); ++start) {
      for (int64_t count = 0; count <= joined->token_count() - start; ++count) {
        const auto parts = joined->documents(start, count);
        REQUIRE(parts.ok());
        int64_t at = start, wrong = 0;
        for (const DocumentPart& part : parts.value()) {
          wrong += part.at != at || part.end <= part.begin;
          for (int64_t token = part.begin; token < part.end; ++token, ++at) {
            if (at < 13)
              wrong += part.file != pair->name() || known[at + 2] != std::pair(part.document, token);
            else
              wrong += part.file != plain->name() || part.document != -1 || token != at - 13;
          }
        }
        CAPTURE(start);
        CAPTURE(count);
        CHECK(wrong == 0);
        CHECK(at == start + count);
      }
    }
    CHECK(joined->place(4) == pair->name() + ": document 2, token 0 of it");
    CHECK(joined->place(15) == plain->name() + ": token 2");
  }

  TEST_CASE("content is of the first tokens, whatever holds them") {
    const TempDir dir;
    std::vector<uint16_t> tokens(300'000);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * 7 % 50'000);
    const std::vector<uint32_t> wide(tokens.begin(), tokens.end());
    const std::vector<int32_t> ids(tokens.begin(), tokens.end());
    write_file(dir / "a.bin", bytes_of(tokens));
    write_file(dir / "b.bin", bytes_of(wide));
    write_file(dir / "c-1.bin", bytes_of(std::vector(tokens.begin(), tokens.begin() + 70'001)));
    write_file(dir / "c-2.bin", bytes_of(std::vector(tokens.begin() + 70'001, tokens.end())));
    MegatronWriter writer = std::move(MegatronWriter::create(dir / "set", DType::kI32, {})).value();
    REQUIRE(writer.add(std::span(ids).first(1000)).ok());
    REQUIRE(writer.end_document().ok());
    REQUIRE(writer.add(std::span(ids).subspan(1000)).ok());
    REQUIRE(writer.end_document().ok());
    REQUIRE(writer.finish().ok());
    const std::shared_ptr<const TokenSource> a = open_token_file(dir / "a.bin", "uint16").value();
    // Pinned: checkpoints hold these for ever. Computed apart from this code, from the words of docs/format.md.
    CHECK(content_hash(*a, 5).value() == 0x9e8f6761a3627d68);
    CHECK(content_hash(*a, 300'000).value() == 0xedd85e0b7943097f);
    for (const int64_t first : {1, 2048, 2049, 131'072, 131'073, 299'999, 300'000}) {
      CAPTURE(first);
      const uint64_t content = content_hash(*a, first).value();
      CHECK(content != 0);
      CHECK(content == content_hash(*open_token_file(dir / "b.bin", "uint32").value(), first).value());
      CHECK(content == content_hash(*open_token_file(dir / "c-?.bin", "uint16").value(), first).value());
      CHECK(content == content_hash(*open_megatron(dir / "set").value(), first).value());
      CHECK(content == content_hash(*slice_tokens(a, 0, first), first).value());
      if (first > 1) CHECK(content != content_hash(*a, first - 1).value());
      // What is there of the last block is seen, and nothing behind it.
      std::vector<int32_t> changed = ids;
      changed[static_cast<size_t>(first) - 1] ^= 1;
      CHECK(content != content_hash(MemoryTokens(changed), first).value());
      if (first == 300'000) continue;
      changed = ids;
      changed[static_cast<size_t>(first)] ^= 1;
      CHECK(content == content_hash(MemoryTokens(changed), first).value());
    }
    std::vector<int32_t> small(ids.begin(), ids.begin() + 131'072);
    const uint64_t before = content_hash(MemoryTokens(small), 131'072).value();
    for (size_t at = 5; at < small.size(); at += 10'007) {
      small[at] ^= 1;
      CHECK(content_hash(MemoryTokens(small), 131'072).value() != before);
      small[at] ^= 1;
    }
    OpenOptions options;
    options.vocab = 40'000;
    const auto bad = content_hash(*open_token_file(dir / "a.bin", "uint16", options).value(), 300'000);
    REQUIRE(!bad.ok());
    CHECK(bad.error().code == ErrorCode::kCorrupt);
    CHECK(says(bad.error().message, {"a.bin", "token 5715 ", "is 40005"}));
  }

  TEST_CASE("fingerprints see content, size, type and range, not the path") {
    const TempDir dir;
    std::vector<uint16_t> tokens(200000);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * 31);
    write_file(dir / "a.bin", bytes_of(tokens));
    write_file(dir / "b.bin", bytes_of(tokens));
    std::shared_ptr<const TokenSource> a = open_token_file(dir / "a.bin", "uint16").value();
    CHECK(a->fingerprint() == open_token_file(dir / "b.bin", "uint16").value()->fingerprint());
    CHECK(a->fingerprint() != open_token_file(dir / "b.bin", "uint32").value()->fingerprint());
    CHECK(a->fingerprint() != slice_tokens(a, 0, 199999)->fingerprint());
    CHECK(slice_tokens(a, 0, 5)->fingerprint() != slice_tokens(a, 1, 6)->fingerprint());
    auto changed = tokens;
    changed.back() ^= 1;
    write_file(dir / "b.bin", bytes_of(changed));
    CHECK(a->fingerprint() != open_token_file(dir / "b.bin", "uint16").value()->fingerprint());
    changed = tokens;
    changed.push_back(0);
    write_file(dir / "b.bin", bytes_of(changed));
    CHECK(a->fingerprint() != open_token_file(dir / "b.bin", "uint16").value()->fingerprint());
    // Up to 64 blocks of 4096 bytes, every byte counts.
    std::string small(100000, 'x');
    write_file(dir / "s.bin", small);
    const uint64_t before = open_token_file(dir / "s.bin", "uint16").value()->fingerprint();
    for (size_t at = 0; at < small.size(); at += 9973) {
      std::string damaged = small;
      damaged[at] = 'y';
      write_file(dir / "s.bin", damaged);
      CHECK(open_token_file(dir / "s.bin", "uint16").value()->fingerprint() != before);
    }
  }
}
