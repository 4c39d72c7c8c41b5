#include "runtime/data/document_scan.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "runtime/core/random.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

/// Text of words that come as often as words do.
std::string words(uint64_t seed, int64_t bytes) {
  std::string out;
  for (int64_t k = 0; std::ssize(out) < bytes; ++k) {
    const auto word = static_cast<uint64_t>(std::exp(7 * uniform_at(seed, k)));
    for (uint64_t rest = mix64(word), n = 2 + word % 7; n > 0; --n, rest /= 26)
      out += static_cast<char>('a' + rest % 26);
    out += k % 11 == 10 ? ".\n" : " ";
  }
  out.resize(static_cast<size_t>(bytes));
  return out;
}

std::string noise(uint64_t seed, int64_t bytes) {
  std::string out;
  for (int64_t k = 0; k < bytes; ++k) out += static_cast<char>(33 + mix64(seed + static_cast<uint64_t>(k)) % 94);
  return out;
}

void write_bytes(const std::string& prefix, const std::vector<std::string>& documents) {
  auto writer = MegatronWriter::create(prefix, DType::kU16, {true});
  REQUIRE_OK(writer);
  for (const std::string& document : documents) {
    std::vector<int32_t> ids;
    for (const char c : document) ids.push_back(static_cast<unsigned char>(c));
    REQUIRE(writer.value().add(ids).ok());
    REQUIRE(writer.value().end_document().ok());
  }
  REQUIRE(writer.value().finish({}).ok());
}

}  // namespace

TEST_SUITE("runtime/data/document_scan") {
  TEST_CASE(
      "noise, repetition and control characters are found as a document and as a part of one, and clean text is not") {
    const TempDir dir;
    std::vector<std::string> documents;
    std::set<int64_t> planted;
    for (int64_t k = 0; k < 1200; ++k) {
      const auto seed = static_cast<uint64_t>(k);
      const int64_t bytes = 300 + static_cast<int64_t>(uniform_at(9, k) * 1500);
      std::string text = words(seed, bytes);
      if (k % 60 == 7) text = noise(seed, bytes);
      if (k % 60 == 18) text.replace(0, text.size() / 2, std::string(text.size() / 2, '\n'));
      if (k % 60 == 29) text.replace(text.size() / 2, text.size() / 2, noise(seed, bytes / 2));
      if (k % 60 == 40) {
        for (size_t at = 0; at < text.size(); ++at) text[at] = "click here! "[at % 12];
      }
      if (k % 60 == 51) {
        for (size_t at = 10; at < text.size(); at += 25) text[at] = '\x01';
      }
      if (k % 60 % 11 == 7) planted.insert(k);
      documents.push_back(std::move(text));
    }
    documents.push_back(documents[3]);
    write_bytes(dir / "set", documents);
    const auto source = open_megatron(dir / "set");
    REQUIRE_OK(source);
    const auto bytes = text::make_tokenizer({.kind = TokenizerConfig::Kind::kBytes});
    REQUIRE_OK(bytes);
    const auto pieces = scan_documents(*source.value(), {.tokenizer = bytes.value().get(), .progress = {}});
    REQUIRE_OK(pieces);
    REQUIRE(pieces.value().size() == documents.size());
    const auto z = scan_deviations(pieces.value());
    std::set<int64_t> found;
    for (size_t k = 0; k < z.size(); ++k) {
      if (std::ranges::any_of(z[k], [](float one) { return std::fabs(one) > 6; }))
        found.insert(pieces.value()[k].document);
    }
    std::vector<int64_t> missed, wrong;
    std::ranges::set_difference(planted, found, std::back_inserter(missed));
    std::ranges::set_difference(found, planted, std::back_inserter(wrong));
    CAPTURE(fmt::format("{} planted, {} found, {} missed, {} wrong", planted.size(), found.size(), missed.size(),
                        wrong.size()));
    CHECK(planted.size() == 100);
    CHECK(missed.size() <= 10);
    CHECK(wrong.size() <= 12);
    const std::vector<int64_t> first = first_copies(pieces.value());
    CHECK(first.back() == 3);
    CHECK(std::ranges::count_if(first, [&, k = int64_t{0}](int64_t of) mutable { return of != k++; }) == 1);
  }

  TEST_CASE("dirt that fills every document of a length is found, and no length of clean text") {
    const auto scanned = [](const std::function<std::string(uint64_t seed, int64_t bytes)>& of_thousands) {
      const TempDir dir;
      std::vector<std::string> documents;
      for (int64_t k = 0; k < 1500; ++k) {
        const auto seed = static_cast<uint64_t>(k);
        const auto bytes = static_cast<int64_t>(std::exp2(5 + 7 * uniform_at(9, k)));  // 32 to 4096
        documents.push_back(bytes >= 1024 && bytes < 2048 ? of_thousands(seed, bytes) : words(seed, bytes));
      }
      write_bytes(dir / "set", documents);
      const auto source = open_megatron(dir / "set");
      REQUIRE_OK(source);
      const auto pieces = scan_documents(*source.value(), {.piece_tokens = 4096, .progress = {}}).value();
      const auto z = scan_deviations(pieces);
      std::array<int64_t, 2> all{}, found{};  // of that length, and of others
      for (size_t k = 0; k < pieces.size(); ++k) {
        const size_t other = pieces[k].tokens >= 1024 && pieces[k].tokens < 2048 ? 0 : 1;
        ++all[other];
        if (std::ranges::any_of(z[k], [](float one) { return std::fabs(one) > 6; })) ++found[other];
      }
      REQUIRE(all[0] > 150);
      CHECK(found[1] <= all[1] / 100);
      return std::pair(found[0], all[0]);
    };
    const auto [newlines, of_newlines] =
        scanned([](uint64_t, int64_t bytes) { return std::string(static_cast<size_t>(bytes), '\n'); });
    CHECK(newlines == of_newlines);
    const auto [clicks, of_clicks] = scanned([](uint64_t, int64_t bytes) {
      std::string out;
      while (std::ssize(out) < bytes) out += "click here! "[out.size() % 12];
      return out;
    });
    CHECK(clicks == of_clicks);
    const auto [clean, of_clean] = scanned(words);
    CHECK(clean <= of_clean / 100);
  }

  TEST_CASE("measures are what they say, of pieces in order, and a share of the documents is drawn by number") {
    const TempDir dir;
    write_bytes(dir / "set", {"abcabcabcxy", "aaaaab", std::string(40, 'q') + std::string(7, 'r')});
    const auto source = open_megatron(dir / "set");
    REQUIRE_OK(source);
    const auto pieces = scan_documents(*source.value(), {.piece_tokens = 20, .progress = {}}).value();
    REQUIRE(pieces.size() == 5);
    CHECK(pieces[0].measures[1] == doctest::Approx(5.0 / 11));
    CHECK(pieces[0].measures[2] == 1);
    CHECK(pieces[0].measures[3] == 9);
    CHECK(pieces[1].measures[2] == 5);
    CHECK(pieces[2].measures[2] == 20);
    CHECK(pieces[4].document == 2);
    CHECK(pieces[4].begin == 40);
    CHECK(pieces[4].tokens == 7);
    CHECK(first_copies(pieces) == std::vector<int64_t>{0, 1, 2, 2, 4});
    for (const auto& z : scan_deviations(pieces)) {
      for (const float one : z) CHECK(one == 0);  // too few to compare
    }
    write_bytes(dir / "many", std::vector<std::string>(1000, "ab"));
    const auto many = open_megatron(dir / "many");
    REQUIRE_OK(many);
    const auto some = scan_documents(*many.value(), {.share = 0.1, .progress = {}}).value();
    CHECK(some.size() > 60);
    CHECK(some.size() < 140);
    const auto stopped = scan_documents(*many.value(), {.progress = [](int64_t) { return false; }});
    CHECK_FALSE(stopped.ok());
  }
}
