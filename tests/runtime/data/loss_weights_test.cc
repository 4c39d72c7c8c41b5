// How much each token weighs where the loss is weighed by sample, against a plain rewrite.
#include "runtime/data/loss_weights.h"

#include <doctest/doctest.h>

#include <map>
#include <vector>

using namespace cairn;
using namespace cairn::data;

namespace {

constexpr int32_t kNo = kNoTarget;

/// Two samples of source 1, which weighs by sample, and one of source 0, which does not. Documents of source 1: 3 rows
/// of which 2 count, 1 that counts, 2 of which none does, fill; 4 rows of which 3 count, 3 of which 1 does.
MicroBatch batch() {
  MicroBatch out;
  out.samples = 3;
  out.seq_len = 7;
  out.sources = {1, 0, 1};
  out.starts = {0, 0, 0, 3, 4, 4, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4};
  out.targets = {5, kNo, 6, 7, kNo, kNo, kNo, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, kNo, kNo, kNo, 4};
  out.inputs.assign(21, 1);
  return out;
}

}  // namespace

TEST_SUITE("runtime/data/loss_weights") {
  TEST_CASE("sources that weigh by sample are known, and none where all weigh by token") {
    DataConfig config;
    config.sources.resize(3);
    CHECK(sources_by_sample(config).empty());
    config.sources[1].weigh = DataSource::Weigh::kSample;
    CHECK(sources_by_sample(config) == std::vector<uint8_t>{0, 1, 0});
  }

  TEST_CASE("each document weighs alike, and a source as much as its tokens") {
    MicroBatch of = batch();
    std::vector<DocumentCount> counts(2);
    count_documents(std::vector<uint8_t>{0, 1}, &of, counts);
    CHECK(of.counts == std::vector<int32_t>{2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 1, 1, 1});
    CHECK(counts[0].documents == 0);
    CHECK(counts[0].tokens == 0);
    CHECK(counts[1].documents == 4);
    CHECK(counts[1].tokens == 7);
    std::map<int64_t, double> of_document;  // what the tokens of each weigh together
    double all = 0;
    for (int64_t row = 0; row < std::ssize(of.targets); ++row) {
      if (of.targets[row] == kNo || of.counts[row] == 0) continue;
      const double weight = counts[1].weight(of.counts[row]);
      of_document[row / of.seq_len * of.seq_len + of.starts[row]] += weight;
      all += weight;
    }
    CHECK(of_document.size() == 4);
    for (const auto& [document, weight] : of_document) CHECK(weight == doctest::Approx(7.0 / 4).epsilon(1e-6));
    CHECK(all == doctest::Approx(7).epsilon(1e-6));
  }

  TEST_CASE("counts of several micro-batches add up") {
    MicroBatch of = batch();
    std::vector<DocumentCount> counts(2);
    for (int k = 0; k < 3; ++k) count_documents(std::vector<uint8_t>{0, 1}, &of, counts);
    CHECK(counts[1].documents == 12);
    CHECK(counts[1].tokens == 21);
  }
}
