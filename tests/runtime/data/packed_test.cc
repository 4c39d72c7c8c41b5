// Documents of instruction data in windows: where they stand, what counts, what sees what.
#include "runtime/data/packed.h"

#include <doctest/doctest.h>

#include <numeric>
#include <random>
#include <set>

#include "runtime/data/dataset.h"
#include "runtime/data/megatron_writer.h"
#include "runtime/data/objective.h"
#include "tests/runtime/data/scratch.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::data;

namespace {

struct Document {
  std::vector<int32_t> ids;
  std::vector<LossSpan> spans;
};

/// PREFIX.bin, .idx and .loss of `documents`.
void write_set(const std::string& prefix, const std::vector<Document>& documents) {
  auto writer = MegatronWriter::create(prefix, DType::kU16, {.overwrite = true});
  REQUIRE_OK(writer);
  auto loss = LossWriter::create(prefix);
  REQUIRE_OK(loss);
  for (const Document& document : documents) {
    REQUIRE(writer.value().add(document.ids).ok());
    REQUIRE(writer.value().end_document().ok());
    REQUIRE(loss.value().add_document(document.spans).ok());
  }
  REQUIRE(writer.value().finish([&] { return loss.value().publish(writer.value().tokens()); }).ok());
}

std::vector<Document> drawn(int count, int longest, uint64_t seed) {
  std::mt19937_64 draw(seed);
  const auto up_to = [&](int most) { return static_cast<int>(draw() % static_cast<uint64_t>(most)); };
  std::vector<Document> out(static_cast<size_t>(count));
  for (Document& document : out) {
    document.ids.resize(static_cast<size_t>(1 + up_to(longest)));
    for (int32_t& id : document.ids) id = 1 + up_to(999);
    const auto length = static_cast<uint32_t>(document.ids.size());
    for (uint32_t at = static_cast<uint32_t>(up_to(4)); at < length;) {
      const uint32_t to = std::min(length, at + 1 + static_cast<uint32_t>(up_to(5)));
      document.spans.push_back({at, to});
      at = to + 1 + static_cast<uint32_t>(up_to(6));
    }
  }
  return out;
}

DataConfig instruct(const std::string& prefix, DataSource::Overlong overlong = DataSource::Overlong::kRefuse) {
  DataConfig out;
  DataSource source;
  source.kind = DataSource::Kind::kInstruct;
  source.name = "ift";
  source.path = prefix;
  source.split = {1.0};
  source.overlong = overlong;
  out.sources.push_back(source);
  return out;
}

/// Every window of the training part, as a sample.
std::vector<SampleRef> all_windows(const Dataset& dataset, int64_t window) {
  std::vector<SampleRef> out;
  const int64_t windows = (dataset.sources[0].train->token_count() - 1) / window;
  for (int64_t k = 0; k < windows; ++k) out.push_back({.position = k, .source = 0, .k = k, .start = k * window});
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/packed") {
  TEST_CASE("documents go into the fullest window with room, in their order") {
    const Packing packed = pack({6, 3, 5, 2, 4, 0, 8}, 8);
    // 6 | 3 | 3 5 full | 6 2 full | 4 | - | 8
    CHECK(packed.begins == std::vector<int64_t>{0, 2, 4, 5, 6});
    CHECK(packed.documents == std::vector<int32_t>{0, 3, 1, 2, 4, 6});
    // The oldest of 64 closes: 64 windows with room 1, a document of 2, and one of 1 that goes into the second.
    std::vector<int32_t> lengths(kOpenWindows, 7);
    lengths.push_back(2);
    lengths.push_back(1);
    const Packing many = pack(lengths, 8);
    CHECK(many.windows() == kOpenWindows + 1);
    CHECK(many.begins[1] == 1);      // the first closed with one document
    CHECK(many.begins[2] - 1 == 2);  // the second took the last
  }

  TEST_CASE("each document stands once in a window, and little is left") {
    for (const int longest : {3, 60, 128}) {
      std::vector<int32_t> lengths;
      for (const Document& document : drawn(5000, longest, 7))
        lengths.push_back(static_cast<int32_t>(document.ids.size()));
      const Packing packed = pack(lengths, 128);
      std::vector<int> seen(lengths.size());
      int64_t room = 0;
      for (int64_t window = 0; window < packed.windows(); ++window) {
        int64_t filled = 0;
        for (int64_t k = packed.begins[window]; k < packed.begins[window + 1]; ++k) {
          ++seen[packed.documents[k]];
          filled += lengths[packed.documents[k]];
          if (k > packed.begins[window]) CHECK(packed.documents[k - 1] < packed.documents[k]);
        }
        CHECK(filled <= 128);
        room += 128 - filled;
      }
      CHECK(std::ranges::all_of(seen, [](int times) { return times == 1; }));
      CHECK(static_cast<double>(room) < 0.05 * 128 * static_cast<double>(packed.windows()));
    }
  }

  TEST_CASE("tokens, targets, positions and what is seen, against a plain rewrite") {
    const TempDir dir;
    constexpr int64_t kWindow = 64;
    const std::vector<Document> documents = drawn(400, 40, 3);
    write_set(dir / "set", documents);
    const auto opened = open_dataset(instruct(dir / "set"), 1000, kWindow);
    REQUIRE_OK(opened);
    const std::vector<SampleRef> samples = all_windows(opened.value(), kWindow);
    MicroBatch batch;
    REQUIRE(load_samples(opened.value(), DataPart::kTrain, samples, kWindow, &batch).ok());
    std::vector<int32_t> lengths;
    for (const Document& document : documents) lengths.push_back(static_cast<int32_t>(document.ids.size()));
    const Packing packed = pack(lengths, kWindow);
    REQUIRE(packed.windows() == std::ssize(samples));
    int64_t wrong = 0;
    const TokenSource& windows = *opened.value().sources[0].train;
    for (int64_t window = 0; window < packed.windows(); ++window) {
      std::vector<DocumentPart> held;
      int64_t filled_to = window * kWindow;
      for (int64_t k = packed.begins[window]; k < packed.begins[window + 1]; ++k) {
        const int64_t document = packed.documents[k], length = std::ssize(documents[document].ids);
        held.push_back({(dir / "set").string() + ".bin", document, 0, length, filled_to});
        filled_to += length;
      }
      wrong += windows.documents(window * kWindow, kWindow).value() != held;
      std::vector<int32_t> inputs, targets, positions, starts;
      for (int64_t k = packed.begins[window]; k < packed.begins[window + 1]; ++k) {
        const Document& document = documents[packed.documents[k]];
        const auto begin = static_cast<int32_t>(inputs.size());
        for (size_t t = 0; t < document.ids.size(); ++t) {
          inputs.push_back(document.ids[t]);
          positions.push_back(static_cast<int32_t>(t));
          starts.push_back(begin);
          const auto counts = [&](const LossSpan& span) { return span.from <= t + 1 && t + 1 < span.to; };
          targets.push_back(std::ranges::any_of(document.spans, counts) ? document.ids[t + 1] : kNoTarget);
        }
      }
      const auto filled = static_cast<int32_t>(inputs.size());
      for (int32_t t = filled; t < kWindow; ++t) {
        inputs.push_back(kFill);
        targets.push_back(kNoTarget);
        positions.push_back(t - filled);
        starts.push_back(filled);
      }
      const auto same = [&](const std::vector<int32_t>& rows, const std::vector<int32_t>& wanted) {
        return std::equal(wanted.begin(), wanted.end(), rows.begin() + window * kWindow);
      };
      wrong += !same(batch.inputs, inputs) + !same(batch.targets, targets) + !same(batch.positions, positions) +
               !same(batch.starts, starts);
    }
    CHECK(wrong == 0);
    CHECK(batch.ends.empty());
    CHECK(opened.value().sources[0].train->place(0).find("document 0, token 0") != std::string::npos);
  }

  TEST_CASE("documents that are too long are refused with their number, left out, or cut") {
    const TempDir dir;
    std::vector<Document> documents = drawn(20, 16, 5);
    documents[4].ids.assign(40, 9);
    documents[4].spans = {{2, 40}};
    documents[9].ids.assign(17, 8);
    documents[9].spans = {{16, 17}};
    write_set(dir / "set", documents);
    using Overlong = DataSource::Overlong;
    const std::string refused = open_dataset(instruct(dir / "set"), 1000, 16).error().message;
    CHECK(refused.find("2 documents longer than a sample of 16 tokens (document 4 has 40)") != std::string::npos);
    CHECK(refused.find("overlong") != std::string::npos);
    for (const Overlong overlong : {Overlong::kDrop, Overlong::kTruncate}) {
      const auto opened = open_dataset(instruct(dir / "set", overlong), 1000, 16);
      REQUIRE_OK(opened);
      MicroBatch batch;
      REQUIRE(load_samples(opened.value(), DataPart::kTrain, all_windows(opened.value(), 16), 16, &batch).ok());
      const bool cut = overlong == Overlong::kTruncate;
      CHECK(std::ranges::count(batch.inputs, 9) >= (cut ? 16 : 0));
      CHECK((std::ranges::count(batch.targets, 9) >= 14) == cut);
      CHECK(std::ranges::count(batch.targets, 8) <= 3);  // the token that counts is cut off
    }
    CHECK(open_dataset(instruct(dir / "nowhere"), 0, 16).error().message.find("No such file") != std::string::npos);
  }

  TEST_CASE("beside a plain source, whose rows see the window before them, or their document") {
    const TempDir dir;
    write_set(dir / "set", drawn(100, 16, 11));
    std::vector<uint16_t> text(2000);
    std::iota(text.begin(), text.end(), 0);
    for (uint16_t& token : text) token = static_cast<uint16_t>(token % 7);
    write_file(dir / "text.bin", bytes_of(text));
    DataConfig config = instruct(dir / "set");
    config.sources.push_back(
        {.kind = DataSource::Kind::kTokenFile, .name = "text", .path = dir / "text.bin", .dtype = "uint16"});
    const Dataset dataset = open_dataset(config, 1000, 16).value();
    const std::vector<SampleRef> samples = {{.position = 0, .source = 1, .start = 32},
                                            {.position = 1, .source = 0, .start = 16}};
    MicroBatch before, after;
    REQUIRE(load_samples(dataset, DataPart::kTrain, samples, 16, &before).ok());
    for (int32_t t = 0; t < 16; ++t) {
      CHECK(before.positions[t] == t);
      CHECK(before.starts[t] == 0);
      CHECK(before.targets[t] == (33 + t) % 7);
    }
    CHECK(before.apart == std::vector<uint8_t>{0, 1});
    ObjectiveConfig objective;
    objective.document_end = 6;
    REQUIRE(load_samples(dataset, DataPart::kTrain, samples, 16, &after).ok());
    apply_objective(objective, 1, 16, samples, &after);
    CHECK(after.starts[3] == 3);  // token 34 ends a document
    CHECK(after.targets[2] == kNoTarget);
    const auto second = [](const std::vector<int32_t>& rows) {
      return std::vector<int32_t>(rows.begin() + 16, rows.end());
    };
    CHECK(second(after.targets) == second(before.targets));
    CHECK(second(after.starts) == second(before.starts));
    CHECK(second(after.positions) == second(before.positions));
    // A batch with none of its rows from there has them all the same: layouts must agree.
    REQUIRE(load_samples(dataset, DataPart::kTrain, std::span(samples).first(1), 16, &after).ok());
    CHECK(after.starts.size() == 16);
  }

  TEST_CASE("spans are a part of the content: others make it other data") {
    const TempDir dir;
    std::vector<Document> documents = drawn(50, 16, 13);
    write_set(dir / "a", documents);
    documents[7].spans = {{0, static_cast<uint32_t>(documents[7].ids.size())}};
    write_set(dir / "b", documents);
    const Dataset a = open_dataset(instruct(dir / "a"), 0, 16).value(),
                  b = open_dataset(instruct(dir / "b"), 0, 16).value();
    const int64_t tokens = a.sources[0].train->token_count();
    CHECK(content_hash(*a.sources[0].train, tokens).value() != content_hash(*b.sources[0].train, tokens).value());
    CHECK(a.sources[0].train->fingerprint() != b.sources[0].train->fingerprint());
  }

  TEST_CASE("a validation part is packed for itself") {
    const TempDir dir;
    write_set(dir / "set", drawn(100, 16, 17));
    DataConfig config = instruct(dir / "set");
    config.sources[0].split = {80, 20};
    const Dataset dataset = open_dataset(config, 0, 16).value();
    REQUIRE(dataset.sources[0].valid != nullptr);
    const auto set = ValidationSet::make(dataset, 16, 2, 3);
    REQUIRE_OK(set);
    MicroBatch batch;
    REQUIRE(load_samples(dataset, DataPart::kValid, set.value().batch(0), 16, &batch).ok());
    CHECK(batch.positions[0] == 0);
    CHECK(std::ranges::count(batch.targets, kNoTarget) > 0);
  }
}
