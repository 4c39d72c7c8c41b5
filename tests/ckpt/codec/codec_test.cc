#include "ckpt/codec/codec.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "ckpt/codec/work_pool.h"
#include "runtime/core/random.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

using Bytes = std::vector<std::byte>;

/// Numbers as a trained tensor has them: fractions at random, few exponents.
Bytes numbers(int64_t count, int64_t elem_bytes, uint64_t seed) {
  Bytes out(static_cast<size_t>(count * elem_bytes));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = mix64(seed + static_cast<uint64_t>(i));
    const auto value =
        static_cast<float>(0.02 * std::sqrt(-2 * std::log(static_cast<double>((word >> 32) + 1) / 4294967296.0)) *
                           std::cos(6.283185307 * static_cast<double>(word & 0xffffffff) / 4294967296.0));
    std::byte raw[8] = {};
    std::memcpy(raw + 4, &value, 4);
    std::memcpy(raw, &word, 4);
    for (int64_t b = 0; b < elem_bytes; ++b)  // of 2 bytes the upper half, as bf16 is
      out[static_cast<size_t>(i * elem_bytes + b)] = raw[elem_bytes <= 4 ? 8 - elem_bytes + b : b];
  }
  return out;
}

Bytes split_plainly(const Bytes& in, size_t elem) {
  Bytes out(in.size());
  const size_t count = in.size() / elem;
  for (size_t i = 0; i < in.size(); ++i) out[i < count * elem ? i % elem * count + i / elem : i] = in[i];
  return out;
}

}  // namespace

TEST_SUITE("ckpt/codec/codec") {
  TEST_CASE("planes of every element size and length are split as HDF5 splits them, and joined again") {
    for (const int64_t elem : {1, 2, 3, 4, 8, 16}) {
      for (const size_t size : {0, 1, 3, 16, 31, 64, 65, 127, 128, 130, 1000, 4096}) {
        CAPTURE(elem);
        CAPTURE(size);
        Bytes in(size), planes(size), back(size);
        for (size_t i = 0; i < size; ++i) in[i] = static_cast<std::byte>(mix64(i));
        split_planes(in, elem, planes);
        CHECK(planes == split_plainly(in, static_cast<size_t>(elem)));
        join_planes(planes, elem, back);
        CHECK(back == in);
      }
    }
  }

  TEST_CASE("chunks of every size come back bit for bit, and the same chunk gives the same bytes") {
    ChunkEncoder encoder, other;
    ChunkDecoder decoder;
    for (const int64_t elem : {1, 2, 4, 8}) {
      for (const int64_t count : {1, 5, 1000, 70'000}) {
        for (const int64_t missing : {int64_t{0}, count / 3}) {
          CAPTURE(elem);
          CAPTURE(count);
          CAPTURE(missing);
          Bytes payload = numbers(count - missing, elem, 7);
          CodedChunk coded, again;
          REQUIRE(encoder.encode(payload, elem, count * elem, coded).ok());
          REQUIRE(other.encode(payload, elem, count * elem, again).ok());
          CHECK(coded.bytes == again.bytes);
          CHECK(static_cast<int64_t>(coded.bytes.size()) <= count * elem);
          Bytes chunk(static_cast<size_t>(count * elem));
          REQUIRE(decoder.decode(coded.bytes, coded.filter_mask, elem, chunk).ok());
          payload.resize(chunk.size());
          CHECK(chunk == payload);
        }
      }
    }
  }

  TEST_CASE("the codec makes numbers of few exponents smaller, nearly drops zeros, and stores noise as it is") {
    ChunkEncoder encoder;
    CodedChunk coded;
    const int64_t count = 1 << 18;
    REQUIRE(encoder.encode(numbers(count, 4, 1), 4, 4 * count, coded).ok());
    CHECK(coded.filter_mask == 0);
    CHECK(static_cast<double>(4 * count) / static_cast<double>(coded.bytes.size()) > 1.15);
    REQUIRE(encoder.encode(numbers(count, 2, 1), 2, 2 * count, coded).ok());
    CHECK(static_cast<double>(2 * count) / static_cast<double>(coded.bytes.size()) > 1.4);
    REQUIRE(encoder.encode(Bytes(1 << 20), 4, 1 << 20, coded).ok());
    CHECK(coded.bytes.size() < 1000);
    Bytes noise(1 << 16);
    for (size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::byte>(mix64(i) >> 7);
    REQUIRE(encoder.encode(noise, 4, 1 << 16, coded).ok());
    CHECK(coded.filter_mask == (kNotShuffled | kNotCompressed));
    CHECK(coded.bytes == noise);
  }

  TEST_CASE("stored bytes that are wrong are refused with what was found and expected") {
    ChunkEncoder encoder;
    ChunkDecoder decoder;
    CodedChunk coded;
    REQUIRE(encoder.encode(numbers(1000, 4, 3), 4, 4000, coded).ok());
    const auto expect = [&](const Bytes& stored, uint32_t mask, size_t size, ErrorCode code, const char* message) {
      Bytes chunk(size);
      const Status status = decoder.decode(stored, mask, 4, chunk);
      REQUIRE(!status.ok());
      CHECK(status.error().code == code);
      CHECK(status.error().message.find(message) != std::string::npos);
      MESSAGE(status.error().message);
    };
    expect(coded.bytes, 0, 4004, ErrorCode::kCorrupt, "undoes to 4000 bytes, expected 4004");
    expect(coded.bytes, 0, 3996, ErrorCode::kCorrupt, "undoing to 3996 bytes");
    expect(coded.bytes, 3, 4000, ErrorCode::kCorrupt, "not compressed, expected 4000");
    expect(coded.bytes, 4, 4000, ErrorCode::kUnsupported, "filter mask 0x4");
    expect({}, 0, 4000, ErrorCode::kCorrupt, "no whole zstd frame");
    Bytes longer = coded.bytes;
    longer.push_back(std::byte{0});
    expect(longer, 0, 4000, ErrorCode::kCorrupt, "stored bytes");
    Bytes twice = coded.bytes;  // two frames are what zstd itself would take as one
    twice.insert(twice.end(), coded.bytes.begin(), coded.bytes.end());
    expect(twice, 0, 8000, ErrorCode::kCorrupt, "the zstd frame ends after");
    for (size_t cut = 0; cut < coded.bytes.size(); cut += 97)
      expect(Bytes(coded.bytes.begin(), coded.bytes.begin() + static_cast<std::ptrdiff_t>(cut)), 0, 4000,
             ErrorCode::kCorrupt, "zstd frame");
  }

  TEST_CASE("whatever the stored bytes are, undoing them ends with the right size or an error") {
    ChunkEncoder encoder;
    ChunkDecoder decoder;
    CodedChunk coded;
    REQUIRE(encoder.encode(numbers(3000, 4, 3), 4, 12'000, coded).ok());
    Bytes chunk(12'000);
    int64_t refused = 0;
    constexpr int64_t kRounds = 3000;
    for (int64_t round = 0; round < kRounds; ++round) {
      Bytes hurt = coded.bytes;
      uint64_t random = mix64(static_cast<uint64_t>(round));
      const auto next = [&] { return random = mix64(random + 1); };
      const uint64_t flips = 1 + next() % 4;
      for (uint64_t f = 0; f < flips; ++f)  // half of them in the headers, where they hurt most
        hurt[next() % (next() % 2 == 0 ? hurt.size() : 64)] ^= static_cast<std::byte>(1u << (next() % 8));
      if (next() % 4 == 0) hurt.resize(next() % hurt.size());
      if (!decoder.decode(hurt, static_cast<uint32_t>(next() % 2), 4, chunk).ok()) ++refused;
    }
    CHECK(refused > 0);
    CHECK(refused < kRounds);  // flips in literals go unseen here: the chunk's own hash is what finds them
  }

  TEST_CASE("a pool runs every job, tells each one's error, and turns what is thrown into one") {
    WorkPool pool(3);
    std::vector<std::future<Status>> results;
    for (int i = 0; i < 100; ++i) {
      results.push_back(pool.submit([i](int64_t thread) -> Status {
        if (thread < 0 || thread >= 3) return Error{ErrorCode::kInternal, "thread"};
        if (i == 41) throw std::runtime_error("41");
        if (i == 42) return Error{ErrorCode::kCorrupt, "42"};
        return {};
      }));
    }
    for (int i = 0; i < 100; ++i) {
      const Status status = results[static_cast<size_t>(i)].get();
      CHECK(status.ok() == (i != 41 && i != 42));
      if (i == 41) CHECK(status.error().code == ErrorCode::kInternal);
      if (i == 42) CHECK(status.error().message == "42");
    }
  }
}
