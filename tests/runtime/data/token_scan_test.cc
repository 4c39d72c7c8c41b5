#include "runtime/data/token_scan.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/runtime/data/scratch.h"

namespace cairn::data {
namespace {

template <typename T>
std::shared_ptr<const TokenSource> raw(const TempDir& dir, const std::vector<T>& tokens, int64_t vocab) {
  write_file(dir / "t.bin", bytes_of(tokens));
  return open_token_file(dir / "t.bin", sizeof(T) == 2 ? "uint16" : "uint32", {vocab}).value();
}

constexpr int64_t kMany = (5 << 20) + 77;  // six blocks, the last one short

}  // namespace

TEST_SUITE("runtime/data/token_scan") {
  TEST_CASE("the token scan finds one id beyond the vocabulary wherever it stands, with its place") {
    const TempDir dir;
    for (const int64_t at : {int64_t{0}, int64_t{1} << 20, kMany / 2, kMany - 1}) {
      CAPTURE(at);
      std::vector<uint16_t> tokens(kMany, 5);
      tokens[static_cast<size_t>(at)] = 300;
      const auto source = raw(dir, tokens, 256);
      const ScanReport report = scan_tokens(*source, kMany, {.vocab = 256}).value();
      CHECK(report.tokens == kMany);
      CHECK(report.share() == 1);
      CHECK(report.ids == IdRange{5, 300, 1});
      REQUIRE(!report.bad.ok());
      CHECK(says(report.bad.error().message, {"token " + std::to_string(at) + " ", "is 300, expected 0 to 255"}));
      if (at > 0) {  // not among those asked for
        const ScanReport before = scan_tokens(*source, at, {.vocab = 256}).value();
        CHECK(before.bad.ok());
        CHECK(before.ids == IdRange{5, 5, 0});
      }
    }
  }

  TEST_CASE("the last id of the vocabulary is within, the next one is outside") {
    const TempDir dir;
    const auto source = raw(dir, std::vector<uint16_t>{0, 255, 17}, 256);
    CHECK(scan_tokens(*source, 3, {.vocab = 256}).value().bad.ok());
    const auto smaller = raw(dir, std::vector<uint16_t>{0, 255, 17}, 255);
    CHECK(!scan_tokens(*smaller, 3, {.vocab = 255}).value().bad.ok());
  }

  TEST_CASE("the token scan names the first of several places and counts all, with any number of threads") {
    const TempDir dir;
    std::vector<uint32_t> tokens(kMany, 9);
    for (const int64_t at : {kMany - 1, int64_t{3'000'000}, int64_t{2'500'000}, int64_t{2'500'001}})
      tokens[static_cast<size_t>(at)] = 70'000;
    const auto source = raw(dir, tokens, 65'536);
    for (const int64_t threads : {1, 2, 7}) {
      const ScanReport report = scan_tokens(*source, kMany, {.vocab = 65'536, .threads = threads}).value();
      CHECK(report.ids == IdRange{9, 70'000, 4});
      REQUIRE(!report.bad.ok());
      CHECK(says(report.bad.error().message, {"token 2500000 "}));
    }
  }

  TEST_CASE("ids below zero and above an int32 are outside without a vocabulary too") {
    const TempDir dir;
    const auto wide = raw(dir, std::vector<uint32_t>{1, 0xffffffff, 3}, 0);
    const ScanReport report = scan_tokens(*wide, 3, {}).value();
    CHECK(report.ids == IdRange{1, 0xffffffff, 1});
    CHECK(!report.bad.ok());

    const std::vector<int32_t> ids = {7, -4, 9};  // a Megatron pair of int32, one document
    std::string idx("MMIDIDX\0\0", 9);
    const auto put = [&](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
    put(uint64_t{1}), put(uint8_t{4}), put(uint64_t{1}), put(uint64_t{2}), put(int32_t{3}), put(int64_t{0});
    put(int64_t{0}), put(int64_t{1});
    write_file(dir / "set.idx", idx);
    write_file(dir / "set.bin", bytes_of(ids));
    const auto source = open_megatron(dir / "set", {100}).value();
    const ScanReport below = scan_tokens(*source, 3, {.vocab = 100}).value();
    CHECK(below.ids == IdRange{-4, 9, 1});
    REQUIRE(!below.bad.ok());
    CHECK(says(below.bad.error().message, {"token 1 ", "is -4"}));
  }

  TEST_CASE("a slice and several files in a row are looked at within their own bounds") {
    const TempDir dir;
    std::vector<uint16_t> tokens(1000, 3);
    tokens[700] = 300;
    const auto source = raw(dir, tokens, 256);
    CHECK(scan_tokens(*slice_tokens(source, 0, 700), 700, {.vocab = 256}).value().bad.ok());
    CHECK(scan_tokens(*slice_tokens(source, 701, 1000), 299, {.vocab = 256}).value().bad.ok());
    CHECK(!scan_tokens(*slice_tokens(source, 700, 701), 1, {.vocab = 256}).value().bad.ok());
    const auto joined = concat_tokens({slice_tokens(source, 0, 700), slice_tokens(source, 690, 1000)});
    const ScanReport report = scan_tokens(*joined, 1010, {.vocab = 256}).value();
    CHECK(report.ids.outside == 1);
    CHECK(!report.bad.ok());
  }

  TEST_CASE("the token scan looks at the end first under a limit of time, and reports the share") {
    const TempDir dir;
    std::vector<uint16_t> tokens(kMany, 5);
    tokens.back() = 300;
    const auto source = raw(dir, tokens, 256);
    const ScanReport report =
        scan_tokens(*source, kMany, {.vocab = 256, .threads = 1, .seconds = 1e-9}).value();  // one block
    CHECK(report.tokens == 77);
    CHECK(report.share() < 1e-4);
    CHECK(!report.bad.ok());
    CHECK(scan_tokens(*source, kMany, {.vocab = 256, .threads = 2, .seconds = 1e9}).value().tokens == kMany);
  }
}

}  // namespace cairn::data
