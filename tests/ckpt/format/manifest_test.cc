#include "ckpt/format/manifest.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "ckpt/format/checksum.h"
#include "runtime/core/random.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using nlohmann::json;

namespace {

Manifest small() {
  Manifest m;
  m.step = 1200;
  m.samples = 9600;
  m.tokens = 1228800;
  m.created_unix_ms = 1760000000000;
  m.run = {"tiny", "r-1", {"r-0"}};
  m.recipe = R"({"model":{"layers":2}})";
  m.recipe_hash = "0123";
  m.mesh = {2, 2, 2, 1, 8, "bf16"};
  m.state = R"({"loss":2.25,"lr":0.0003,"sampler":{"epoch":0,"position":9600},"seed":42})";
  m.metrics = {{"loss", 2.25}, {"val_loss", 3}};
  m.writer = {"cairn 1", "node7"};
  m.origin = "average of three";
  m.extra = R"({"note":1})";
  m.tensors = {
      {"w", "weight", DType::kBf16, {4, 6}}, {"w", "exp_avg", DType::kF32, {4, 6}}, {"s", "weight", DType::kF32, {}}};
  m.files = {{"shard-00000-of-00002.h5", 20000, 0x1122334455667788}, {"shard-00001-of-00002.h5", 9000, 1}};
  m.shards = {{0, 0, Box{{0, 0}, {4, 3}}, 4096, 24, 4096, {1}},
              {0, 1, Box{{0, 3}, {4, 6}}, 4096, 24, 4096, {2}},
              {1, 0, Box{{0, 0}, {4, 6}}, 8192, 96, 4096, {3}},
              {2, 0, Box{{}, {}}, 8288, 4, 4096, {4}}};
  return m;
}

// Bytes with a header that fits the body, so that a test reaches what lies behind the checksum.
std::string sealed(std::string body) {
  return fmt::format("{{\"format\":\"cairn-checkpoint\",\"version\":1,\"body_bytes\":{},\"body_xxh3_64\":\"{}\"}}\n{}",
                     body.size(), hash_to_hex(hash_bytes(body)), body);
}

std::string body_of(const Manifest& m) {
  const std::string json = encode_manifest_files(m).value().json;
  return json.substr(json.find('\n') + 1);
}

std::string table_of(const Manifest& m) { return encode_manifest_files(m).value().table; }

// A whole manifest with this table, hash and size in the body fitting it.
std::string with_table(const Manifest& m, const std::string& table) {
  json body = json::parse(body_of(m));
  body["shards"]["size_bytes"] = table.size();
  body["shards"]["xxh3_64"] = hash_to_hex(hash_bytes(table));
  return sealed(body.dump() + "\n") + table;
}

void expect_error(const std::string& bytes, ErrorCode code, const std::string& words) {
  const Result<Manifest> decoded = decode_manifest(bytes);
  REQUIRE_MESSAGE(!decoded.ok(), words);
  CHECK(decoded.error().code == code);
  CHECK_MESSAGE(decoded.error().message.find(words) != std::string::npos,
                "\"" << decoded.error().message << "\" should say \"" << words << "\"");
}

class Rng {
 public:
  explicit Rng(uint64_t seed) : key_(mix64(seed)) {}
  uint64_t below(uint64_t n) { return mix64(key_ ^ mix64(counter_++)) % n; }

 private:
  uint64_t key_, counter_ = 0;
};

}  // namespace

TEST_SUITE("ckpt/format/manifest") {
  TEST_CASE("a manifest goes to bytes and back, and its bytes are canonical") {
    const Manifest m = small();
    const Result<std::string> bytes = encode_manifest(m);
    REQUIRE_OK(bytes);
    CHECK(bytes.value().starts_with(R"({"format":"cairn-checkpoint","version":1,"body_bytes":)"));
    const Result<Manifest> back = decode_manifest(bytes.value());
    REQUIRE_OK(back);
    CHECK(back.value() == m);
    CHECK(encode_manifest(back.value()).value() == bytes.value());
    CHECK(describe_shard(m, m.shards[1]) == "weight w [0:4, 3:6]");
    CHECK(payload_bytes(m) == 148);
  }

  TEST_CASE("every cut and every flipped bit of a manifest is an error") {
    const std::string bytes = encode_manifest(small()).value();
    for (size_t n = 0; n < bytes.size(); ++n) REQUIRE_FALSE(decode_manifest(std::string_view(bytes).substr(0, n)).ok());
    REQUIRE_FALSE(decode_manifest(bytes + "\n").ok());
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      std::string wrong = bytes;
      wrong[bit / 8] = static_cast<char>(wrong[bit / 8] ^ (1 << bit % 8));
      CAPTURE(bit);
      REQUIRE_FALSE(decode_manifest(wrong).ok());
    }
  }

  TEST_CASE("errors say place, found and expected") {
    const std::string bytes = encode_manifest(small()).value();
    const auto header_with = [&](const std::string& from, const std::string& to) {
      std::string changed = bytes;
      changed.replace(changed.find(from), from.size(), to);
      return changed;
    };
    expect_error("", ErrorCode::kCorrupt, "byte 0: found \"\"");
    expect_error("hello", ErrorCode::kCorrupt, "byte 0: found \"hello\"");
    expect_error(header_with("\"version\":1", "\"version\":7"), ErrorCode::kUnsupported,
                 "byte 39: format version 7, this build reads 1 to 1");
    expect_error(header_with("\"version\":1", "\"version\":0"), ErrorCode::kCorrupt, "format version 0");
    expect_error(header_with("\"step\":1200", "\"step\":1201"), ErrorCode::kCorrupt, "the body has");
    expect_error(bytes.substr(0, bytes.size() - 10), ErrorCode::kCorrupt,
                 "shards.bin: byte 310: the file has 310 bytes, the manifest says 320 (file cut short?)");
    expect_error(bytes.substr(0, 400), ErrorCode::kCorrupt, "file cut short?");
    const ManifestFiles files = encode_manifest_files(small()).value();
    CHECK(decode_manifest(files.json, files.table, "run/step-1").ok());
    CHECK(decode_manifest("hello", files.table, "run/step-1")
              .error()
              .message.starts_with("run/step-1/manifest.json: byte 0: found \"hello\""));
    CHECK(decode_manifest(files.json, "hello", "run/step-1")
              .error()
              .message.starts_with("run/step-1/shards.bin: byte 5: the file has 5 bytes, the manifest says 320"));
    expect_error(sealed("{]\n"), ErrorCode::kCorrupt, "not JSON: found \"]");
    const std::string hostile = decode_manifest(sealed("{\"a\": \"\x1b[2J\xff\xc2\x9b\"}\n")).error().message;
    CHECK(hostile.find("\\xff") != std::string::npos);
    CHECK(std::all_of(hostile.begin(), hostile.end(), [](char c) { return c >= ' ' && c <= '~'; }));
    const std::string late = decode_manifest(sealed("{\"a\": \"\xc2\x9b\x7f\xff\"}\n")).error().message;
    CHECK(std::all_of(late.begin(), late.end(), [](char c) { return c >= ' ' && c <= '~'; }));
    expect_error(sealed("[]\n"), ErrorCode::kCorrupt, "$: found array, expected an object");
    expect_error(sealed(std::string(100000, '[')), ErrorCode::kCorrupt, "nested deeper than 64");
    expect_error(sealed(std::string(64, '[')), ErrorCode::kCorrupt, "not JSON");
  }

  TEST_CASE("each field is checked: type, range, and against its neighbours") {
    const json good = json::parse(body_of(small()));
    const std::string table = table_of(small());
    const auto with = [&](const std::string& pointer, const json& value) {
      json changed = good;
      changed[json::json_pointer(pointer)] = value;
      return sealed(changed.dump() + "\n") + table;
    };
    REQUIRE(decode_manifest(with("/step", 5)).ok());
    expect_error(with("/tensors/0/dtype", "f12"), ErrorCode::kUnsupported, "$.tensors[0].dtype");
    struct Case {
      const char* pointer;
      json value;
      const char* words;
    };
    const Case cases[] = {
        {"/step", -1, "$.step: found -1, expected at least 0"},
        {"/step", "12", "$.step: found string, expected a whole number"},
        {"/step", 1.5, "$.step: found a fraction"},
        {"/samples", 18446744073709551615ull, "$.samples: found a number above 2^63-1"},
        {"/state", json::array(), "$.state: found array, expected an object"},
        {"/mesh/tp", 0, "$.mesh.tp: found 0, expected at least 1"},
        {"/mesh/extra", 0, "$.mesh: found 10 keys, expected 9"},
        {"/mesh/ep", 0, "$.mesh.ep: found 0, expected at least 1"},
        {"/metrics/loss", "low", "$.metrics.loss: found string, expected a number"},
        {"/metrics/loss", 2, "$.metrics.loss: found number, expected a number with a fraction"},
        {"/metrics/a b", 2.5, "$.metrics: found \"a b\", expected names"},
        {"/extra", 1, "$.extra: found number, expected an object"},
        {"/writer/host", 1, "$.writer.host: found number, expected a string"},
        {"/files/0/step", -1, "$.files[0].step: found -1, expected at least 0"},
        {"/files/0/step", 1200, "$.files[0].step: found 1200, expected a step before 1200"},
        {"/files/0/stop", 1, "$.files[0]: found 4 keys, expected 3"},
        {"/shards/count", 5, "$.shards.count: found 5, shards.bin has 4"},
        {"/shards/chunks", 5, "$.shards.chunks: found 5, shards.bin has 4"},
        {"/shards/payload_bytes", 5, "$.shards.payload_bytes: found 5, shards.bin has 148"},
        {"/shards/size_bytes", 319, "shards.bin: byte 319: the file has 320 bytes, the manifest says 319"},
        {"/shards/xxh3_64", "0000000000000000", "shards.bin: checksum "},
        {"/run/parents", {1}, "$.run.parents: found number, expected strings"},
        {"/surprise", 1, "$: found 17 keys, expected 16"},
        {"/tensors/0/name", "a/b", "$.tensors[0].name: found \"a/b\""},
        {"/tensors/0/name", "..", "$.tensors[0].name"},
        {"/tensors/0/kind", "", "$.tensors[0].kind"},
        {"/tensors/1/kind", "weight", "$.tensors[1]: weight \"w\" is there twice"},
        {"/tensors/0/shape", {4, 0}, "$.tensors[0].shape[1]: found 0, expected at least 1"},
        {"/tensors/0/shape", {1ll << 40, 1ll << 40}, "is more than"},
        {"/tensors/0/shape", {1, 1, 1, 1, 1, 1, 1, 1, 1}, "$.tensors[0].shape: found 9 entries, expected at most 8"},
        {"/tensors/0/shape", {4, 7}, "do not tile its shape [4, 7]: they hold 24 of 28 elements"},
        {"/files/0/name", "../../etc/passwd.h5", "$.files[0].name"},
        {"/files/0/name", ".hidden.h5", "$.files[0].name"},
        {"/files/1/name", "shard-00000-of-00002.h5", "is there twice"},
        {"/files/0/size_bytes", 8200, "leave file \"shard-00000-of-00002.h5\" of 8200 bytes"},
        {"/files/0/rest_xxh3_64", "xyz", "$.files[0].rest_xxh3_64: found \"xyz\", expected 16 lower-case hex digits"},
        {"/recipe", nullptr, "$.recipe: found null, expected a string"},
    };
    for (const Case& c : cases) {
      CAPTURE(c.pointer);
      expect_error(with(c.pointer, c.value), ErrorCode::kCorrupt, c.words);
    }
    std::string doubled = body_of(small());
    doubled.replace(doubled.find("\"step\":1200"), 11, "\"step\":1,\"step\":1200");
    expect_error(sealed(doubled), ErrorCode::kCorrupt, "canonical JSON has");
    expect_error(sealed(good.dump(1) + "\n"), ErrorCode::kCorrupt, "canonical JSON has");
  }

  TEST_CASE("each number of the shard table is checked, and an error says at which byte it stands") {
    // Of small(): 64 bytes of header, four records of 32, bounds from 192 on (32 bytes a shard of two dims), hashes
    // from 288 on, the end at 320.
    const Manifest m = small();
    const std::string good = table_of(m);
    REQUIRE(good.size() == 320);
    REQUIRE(decode_manifest(with_table(m, good)).ok());
    const auto expect_at = [&](size_t at, size_t bytes, uint64_t value, const std::string& words,
                               ErrorCode code = ErrorCode::kCorrupt) {
      std::string table = good;
      std::memcpy(table.data() + at, &value, bytes);
      expect_error(with_table(m, table), code, "shards.bin: " + words);
    };
    expect_at(0, 1, 'c', "byte 0: this is no shard table");
    expect_at(8, 4, 2, "byte 8: table version 2, this build reads 1; read it with a newer build",
              ErrorCode::kUnsupported);
    expect_at(8, 4, 0, "byte 8: table version 0");
    expect_at(12, 4, 1, "byte 12: found 1, expected 0");
    expect_at(16, 8, 1ull << 40, "byte 16: found 1099511627776 shards, expected at most 33554432");
    expect_at(16, 8, 5, "byte 48: found a size of 320 bytes, expected 352 for 5 shards");
    expect_at(24, 8, ~0ull, "byte 24: found 18446744073709551615 bounds, expected at most 64");
    expect_at(32, 8, ~0ull, "byte 32: found 18446744073709551615 chunks");
    expect_at(40, 8, 5, "byte 40: found 5 stored chunks, expected at most 4");
    expect_at(48, 8, 0, "byte 48: found a size of 0 bytes, expected 320");
    expect_at(56, 8, 1, "byte 56: found 1, expected 0");
    expect_at(64, 4, 3, "byte 64: shard 0: tensor: found 3, expected 0 to 2");
    expect_at(68, 4, 2, "byte 68: shard 0: file: found 2, expected 0 to 1");
    expect_at(72, 8, ~0ull, "byte 72: found offset 18446744073709551615, expected at most 9223372036854775807");
    expect_at(72, 8, INT64_MAX, "byte 72: shard 0: 24 bytes at offset 9223372036854775807 leave file");
    expect_at(72, 8, 8190, "byte 136: shard 2: it and shard 0 overlap in file \"shard-00000-of-00002.h5\"");
    expect_at(80, 8, 0, "byte 80: found 0 bytes, expected 1 to");
    expect_at(80, 8, 25, "byte 80: shard 0: bytes: found 25, expected 24 ([0:4, 0:3] of bf16)");
    expect_at(80, 8, 1ull << 50,
              "byte 80: 1125899906842624 bytes in chunks of 4096 need 274877906944 hashes, but only 4");
    expect_at(88, 4, 0, "byte 88: found chunks of 0 bytes");
    expect_at(88, 4, 5000, "byte 88: shard 0: chunk_bytes: found 5000, expected a multiple of 4096");
    expect_at(88, 4, (1u << 30) + 1, "byte 88: found chunks of 1073741825 bytes");
    expect_at(92, 1, 9, "byte 92: found 9 dims, expected at most 8");
    expect_at(92, 1, 7, "byte 92: found 7 dims, but only 12 of 12 bounds are left");
    expect_at(92, 1, 0, "byte 24: found 12 bounds, the shards have 8");
    expect_at(93, 1, 2, "byte 93: codec 2, this build reads 0 and 1; read it with a newer build",
              ErrorCode::kUnsupported);
    expect_at(93, 1, 1, "byte 93: 1 coded chunks, but only 0 of 0 stored chunks are left");
    expect_at(94, 2, 256, "byte 94: found 256, expected 0");
    expect_at(192 + 24, 8, 7, "byte 200: shard 0: dim 1 is 0:7, expected a part of 0:6 (tensor 0 \"w\")");
    expect_at(192 + 32 + 8, 8, 2, "byte 112: shard 1: bytes: found 24, expected 32");
    std::string cut = good.substr(0, 63);
    expect_error(with_table(m, cut), ErrorCode::kCorrupt,
                 "shards.bin: byte 63: the file ends, its header alone has 64");
    expect_error(with_table(m, good + "x"), ErrorCode::kCorrupt, "byte 320: the file has 321 bytes, expected 320");
    std::string moved = good;  // shard 1 becomes [0:4, 2:5]: the same volume, but no tiling
    const int64_t lo = 2, hi = 5;
    std::memcpy(moved.data() + 192 + 32 + 8, &lo, 8);
    std::memcpy(moved.data() + 192 + 32 + 24, &hi, 8);
    expect_error(with_table(m, moved), ErrorCode::kCorrupt, "they hold 24 of 24 elements, first gap or overlap");
  }

  TEST_CASE("coded shards and files of earlier steps go to bytes and back, and their places are checked") {
    Manifest m = small();
    m.files.push_back({"shard-00000-of-00002.h5", 50000, 7, 1100});  // the name of a file here, but of another step
    m.shards[2].file = 2;
    m.shards[2].codec = Codec::kShuffleZstd;
    m.shards[2].chunk_bytes = 40;
    m.shards[2].offset = 50000;
    m.shards[2].hashes = {5, 6, 7};
    m.shards[2].stored = {{4096, 30, 0}, {4126, 40, 3}, {49990, 10, 0}};
    const std::string bytes = encode_manifest(m).value();
    REQUIRE(decode_manifest(bytes).ok());
    CHECK(decode_manifest(bytes).value() == m);
    CHECK(encode_manifest(decode_manifest(bytes).value()).value() == bytes);
    const auto refused = [&](const std::function<void(Manifest&)>& change, const std::string& words) {
      Manifest wrong = m;
      change(wrong);
      const Result<std::string> encoded = encode_manifest(wrong);
      REQUIRE_MESSAGE(!encoded.ok(), words);
      CHECK_MESSAGE(encoded.error().message.find(words) != std::string::npos, encoded.error().message);
    };
    refused([](Manifest& x) { x.files[2].step = 1200; }, "$.files[2].step: found 1200, expected a step before 1200");
    refused([](Manifest& x) { x.files[2].step = -1; }, "is there twice");
    refused([](Manifest& x) { x.shards[2].offset = 49999; }, "found address 49999 for a coded shard, expected 50000");
    refused([](Manifest& x) { x.shards[2].stored[1].offset = 4125; }, "overlap in file");
    refused([](Manifest& x) { x.shards[2].stored[2].bytes = 11; }, "leave file \"shard-00000-of-00002.h5\" of 50000");
    refused([](Manifest& x) { x.shards[2].stored[0].bytes = 0; }, "stored chunk 0 has 0 bytes");
    refused([](Manifest& x) { x.shards[2].stored[0].bytes = 4000; },
            "stored chunk 0 has 4000 bytes, expected 1 to 168");
    refused([](Manifest& x) { x.shards[2].stored[0].filter_mask = 4; }, "filter mask 4");
    refused([](Manifest& x) { x.shards[2].stored.pop_back(); }, "2 stored chunks, expected 3");
    refused([](Manifest& x) { x.shards[2].chunk_bytes = 42; }, "chunk_bytes: found 42, expected a multiple of 4");
    refused([](Manifest& x) { x.shards[2].codec = Codec::kRaw; }, "leave file");
    refused([](Manifest& x) { x.shards[0].stored = {{1, 2, 0}}; }, "a raw shard with 1 stored chunks");
    refused([](Manifest& x) { x.metrics["loss"] = 1.0 / 0.0; }, "$.metrics.loss: found inf, expected a finite number");
  }

  TEST_CASE("a manifest that no reader takes is not written") {
    Manifest m = small();
    m.state = "[1]";
    CHECK(encode_manifest(m).error().code == ErrorCode::kInvalidInput);
    m.state = "{\"a\":}";
    CHECK_FALSE(encode_manifest(m).ok());
    m.state = "{\"a\":" + std::string(70, '[') + std::string(70, ']') + "}";
    CHECK_FALSE(encode_manifest(m).ok());
    m = small();
    m.shards.pop_back();
    CHECK_FALSE(encode_manifest(m).ok());
    m = small();
    m.state = "{ \"b\" : 1, \"a\" : 0.1 }";
    CHECK(decode_manifest(encode_manifest(m).value()).value().state == R"({"a":0.1,"b":1})");
  }

  TEST_CASE("a run's name that is not UTF-8 stops no save: each wrong byte is written as U+FFFD") {
    Manifest m = small();
    m.run.name = "r\xff\xfe";
    const Result<Manifest> back = decode_manifest(encode_manifest(m).value());
    REQUIRE(back.ok());
    CHECK(back.value().run.name == "r\uFFFD\uFFFD");
  }

  TEST_CASE("the tiling check agrees with counting every element") {
    Rng rng(7);
    int64_t tilings = 0, others = 0;
    for (int round = 0; round < 3000; ++round) {
      Manifest m = small();
      const size_t dims = rng.below(4);
      Shape shape;
      for (size_t d = 0; d < dims; ++d) shape.push_back(static_cast<int64_t>(1 + rng.below(4)));
      m.tensors = {{"t", "weight", DType::kU8, shape}};
      m.files = {{"f.h5", 1 << 20, 0}};
      // Cut the whole at random, then sometimes move, drop, double or shift a piece.
      std::vector<Box> boxes = {Box::whole(shape)};
      for (uint64_t cuts = rng.below(6); cuts > 0 && dims > 0; --cuts) {
        const size_t which = rng.below(boxes.size()), d = rng.below(dims);
        const int64_t extent = boxes[which].extent(static_cast<int64_t>(d));
        if (extent < 2) continue;
        Box upper = boxes[which];
        const int64_t at = upper.lo[d] + 1 + static_cast<int64_t>(rng.below(static_cast<uint64_t>(extent - 1)));
        boxes[which].hi[d] = at;
        upper.lo[d] = at;
        boxes.push_back(upper);
      }
      const uint64_t damage = rng.below(5);
      Box& victim = boxes[rng.below(boxes.size())];
      if (damage == 0) boxes.push_back(Box(victim));
      if (damage == 1 && boxes.size() > 1) boxes.pop_back();
      if (damage == 2 && dims > 0) {
        const size_t d = rng.below(dims);
        if (victim.hi[d] < shape[d]) ++victim.lo[d], ++victim.hi[d];
      }
      if (damage == 3 && dims > 0) {
        const size_t d = rng.below(dims);
        if (victim.hi[d] < shape[d]) ++victim.hi[d];
      }
      std::vector<int> counts(static_cast<size_t>(count_elems(shape)));
      int64_t offset = 0;
      m.shards.clear();
      for (const Box& box : boxes) {
        m.shards.push_back({0, 0, box, offset, box.count_elems(), 4096, {0}});
        offset += box.count_elems();
        std::vector<int64_t> at = box.lo;
        for (int64_t i = 0; i < box.count_elems(); ++i) {
          ++counts[static_cast<size_t>(flat_offset(shape, at))];
          for (size_t d = dims; d-- > 0;) {
            if (++at[d] < box.hi[d]) break;
            at[d] = box.lo[d];
          }
        }
      }
      const bool exact = std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; });
      REQUIRE(validate_manifest(m).ok() == exact);
      ++(exact ? tilings : others);
    }
    CHECK(tilings > 500);
    CHECK(others > 500);
  }

  TEST_CASE("a manifest's numbers add up, and cost no more to check than to read") {
    Manifest many = small();
    for (int k = 0; k < 5; ++k) many.files.push_back({fmt::format("x{}.h5", k), int64_t{1} << 60, 1});
    const Result<std::string> sum = encode_manifest(many);
    REQUIRE_FALSE(sum.ok());
    CHECK(sum.error().message.find("$.files[5].size_bytes") != std::string::npos);

    // Corners of boxes in eight dims: 256 a shard.
    const Shape shape = {(1 << 16) + 1, 1, 1, 1, 1, 1, 1, 1};
    Manifest cut = small();
    cut.tensors = {{"t", "weight", DType::kF32, shape}};
    cut.files = {{"t.h5", shape[0] * 4, 1}};
    cut.shards.clear();
    for (int64_t row = 0; row < shape[0]; ++row) {
      Box box = Box::whole(shape);
      box.lo[0] = row;
      box.hi[0] = row + 1;
      cut.shards.push_back({0, 0, box, row * 4, 4, 4096, {1}});
    }
    const Result<std::string> corners = encode_manifest(cut);
    REQUIRE_FALSE(corners.ok());
    CHECK(corners.error().message.find("65537 shards of 8 dims, expected at most 65536") != std::string::npos);
  }

  TEST_CASE("100k shards are checked in well under a second") {
    Manifest m = small();
    const int64_t n = 100'000;
    m.tensors = {{"w", "weight", DType::kF32, {n / 100, 100 * 8}}};
    m.files = {{"f.h5", n * 32, 0}};
    m.shards.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = i / 100, col = i % 100 * 8;
      m.shards.push_back({0, 0, Box{{row, col}, {row + 1, col + 8}}, i * 32, 32, 4096, {static_cast<uint64_t>(i)}});
    }
    const auto start = std::chrono::steady_clock::now();
    CHECK(validate_manifest(m).ok());
    const double validate_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    MESSAGE("validate: " << validate_s << " s");
    CHECK(validate_s < 5.0);                      // far above what it takes, for sanitizers and busy machines
    std::swap(m.shards[5].box, m.shards[6].box);  // still a tiling
    CHECK(validate_manifest(m).ok());
    m.shards[7].box = m.shards[8].box;
    CHECK_FALSE(validate_manifest(m).ok());
    m.shards[7].box = Box{{0, 56}, {1, 64}};
    CHECK(decode_manifest(encode_manifest(m).value()).ok());
  }

  TEST_CASE("random damage behind a fitting checksum never crashes, and what is accepted is canonical") {
    const Manifest whole = small();
    const std::string body = body_of(whole), table = table_of(whole);
    Rng rng(11);
    int64_t accepted = 0;
    const auto check = [&](const std::string& candidate) {
      const Result<Manifest> decoded = decode_manifest(candidate);
      if (!decoded.ok()) {
        REQUIRE(!decoded.error().message.empty());
        return;
      }
      ++accepted;
      REQUIRE(encode_manifest(decoded.value()).value() == candidate);
    };
    for (int round = 0; round < 20000; ++round) {
      std::string text = body;
      for (uint64_t edits = 1 + rng.below(4); edits > 0; --edits) {
        const size_t at = rng.below(text.size());
        switch (rng.below(5)) {
          case 0:
            text[at] = static_cast<char>(rng.below(256));
            break;
          case 1:
            text.erase(at, 1 + rng.below(20));
            break;
          case 2:
            text.insert(at, text.substr(rng.below(text.size()), rng.below(40)));
            break;
          case 3:
            text.insert(at, 1, "{}[]\",:0-9e.\\\n"[rng.below(15)]);
            break;
          case 4:
            text[at] = "0123456789-"[rng.below(11)];
            break;
        }
        if (text.empty()) text = "x";
      }
      check(sealed(text) + table);
    }
    // The shard table behind a hash that fits.
    const uint64_t numbers[] = {0, 1, 2, 8, 32, 320, 4095, 4096, 1u << 30, 1ull << 60, INT64_MAX, UINT64_MAX};
    for (int round = 0; round < 20000; ++round) {
      std::string text = table;
      for (uint64_t edits = 1 + rng.below(3); edits > 0; --edits) {
        const size_t at = rng.below(text.size());
        const size_t word = at / 8 * 8;
        switch (rng.below(4)) {
          case 0:
            text[at] = static_cast<char>(rng.below(256));
            break;
          case 1:
            text.resize(std::max<size_t>(8, at));
            break;
          case 2:
            if (word + 8 <= text.size()) std::memcpy(text.data() + word, &numbers[rng.below(std::size(numbers))], 8);
            break;
          case 3:
            if (word + 8 <= text.size()) text.insert(word, text.substr(word, 8 * (1 + rng.below(4))));
            break;
        }
      }
      check(with_table(whole, text));
    }
    // Whole values replaced: valid JSON with wrong contents.
    const json good = json::parse(body);
    std::vector<json::json_pointer> places;
    const std::function<void(const json&, const json::json_pointer&)> walk = [&](const json& j,
                                                                                 const json::json_pointer& at) {
      places.push_back(at);
      if (j.is_object()) {
        for (const auto& [key, value] : j.items()) walk(value, at / key);
      } else if (j.is_array()) {
        for (size_t i = 0; i < j.size(); ++i) walk(j[i], at / i);
      }
    };
    walk(good, json::json_pointer());
    const json values[] = {0,
                           1,
                           -1,
                           4096,
                           INT64_MAX,
                           INT64_MIN,
                           UINT64_MAX,
                           1e300,
                           0.5,
                           "",
                           "x",
                           "0000000000000001",
                           nullptr,
                           true,
                           json::array(),
                           json::object(),
                           {1, 2},
                           {0},
                           {{"a", 1}}};
    for (int round = 0; round < 20000; ++round) {
      json changed = good;
      for (uint64_t edits = 1 + rng.below(2); edits > 0; --edits) {
        const json::json_pointer& at = places[rng.below(places.size())];
        if (!changed.contains(at)) continue;
        changed[at] = values[rng.below(std::size(values))];
      }
      check(sealed(changed.dump() + "\n") + table);
    }
    CHECK(accepted > 100);  // the mutations reach the inside
  }
}
