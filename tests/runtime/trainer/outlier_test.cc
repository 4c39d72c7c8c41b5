#include <doctest/doctest.h>

#include <cstdio>

#include "runtime/data/dataset.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr int64_t kContext = 16, kWindows = 700, kSteps = 40;
constexpr int64_t kLearnt = 32;  // steps until the window is no longer one of a loss that falls

bool is_planted(int64_t window) { return window % 25 == 7; }

/// Windows of few ids, which a model learns at once, and some of ids that no other window has.
std::string planted_file() {
  static const testing::TempDir dir("planted");
  std::vector<uint16_t> tokens(kWindows * kContext + 1);
  for (int64_t i = 0; i < std::ssize(tokens); ++i) {
    const double u = uniform_at(stream_key(3, "planted"), i);
    tokens[static_cast<size_t>(i)] = static_cast<uint16_t>(is_planted(i / kContext) ? 40 + static_cast<int>(u * 25)
                                                           : u < 0.6                ? 1
                                                           : u < 0.8                ? 2
                                                           : u < 0.95               ? 3
                                                                                    : 4);
  }
  const std::string path = dir / "tokens.bin";
  std::FILE* file = std::fopen(path.c_str(), "wb");
  std::fwrite(tokens.data(), 2, tokens.size(), file);
  std::fclose(file);
  return path;
}

}  // namespace

TEST_SUITE("runtime/trainer/outlier") {
  TEST_CASE("samples unlike the others are named with their losses, and the same ones by every layout") {
    Recipe recipe = tiny_recipe(true, true);
    recipe.model.layers = 2;
    recipe.model.heads = recipe.model.kv_heads = 2;
    recipe.model.head_dim = 16;
    recipe.model.ffn = 64;
    recipe.deterministic = Deterministic::kLayout;
    recipe.data.sources = {
        {.kind = DataSource::Kind::kTokenFile, .name = "a", .path = planted_file(), .dtype = "uint16"}};
    recipe.optimizer.peak_lr = 1e-2;
    recipe.optimizer.zero = 1;
    stop_after(recipe, kSteps);
    const data::Dataset dataset = data::open_dataset(recipe.data, recipe.model.vocab, kContext).value();
    const data::Sampler sampler = data::Sampler::make(data::sampler_spec(dataset, recipe).value()).value();
    std::vector<std::vector<int64_t>> planted(kSteps);
    for (const data::SampleRef& sample : sampler.peek(kSteps * recipe.batch.samples)) {
      const int64_t step = sample.position / recipe.batch.samples;
      if (step >= kLearnt && is_planted(sample.start / kContext))
        planted[static_cast<size_t>(step)].push_back(sample.position);
    }
    const auto serial = train_on_threads(recipe, 1);
    REQUIRE_OK(serial);
    const auto positions_of = [](const Trained& run) {
      std::vector<std::vector<int64_t>> out;
      for (size_t step = 0; step < run.outliers.size(); ++step) {
        out.emplace_back();
        if (static_cast<int64_t>(step) < kLearnt) continue;
        for (const telemetry::OutlierSample& one : run.outliers[step]) {
          CHECK(one.z > telemetry::SampleWatch::kLimit);
          CHECK(one.loss > 3);
          out.back().push_back(one.position);
        }
        std::ranges::sort(out.back());
      }
      return out;
    };
    CHECK(positions_of(serial.value()) == planted);
    CHECK(std::ranges::count_if(planted, [](const auto& step) { return !step.empty(); }) >= 2);
    struct Layout {
      int64_t dp, tp, pp, cp;
    };
    for (const auto& [dp, tp, pp, cp] :
         std::vector<Layout>{{2, 1, 1, 1}, {3, 1, 1, 1}, {2, 2, 1, 1}, {2, 1, 2, 1}, {1, 1, 1, 2}, {2, 1, 1, 2}}) {
      CAPTURE(dp);
      CAPTURE(tp);
      CAPTURE(pp);
      CAPTURE(cp);
      Recipe other = recipe;
      other.batch.uneven = dp == 3;
      other.mesh.tp = tp;
      other.mesh.pp = pp;
      other.mesh.cp = cp;
      if (cp > 1) other.deterministic = Deterministic::kRun;  // the same losses, to rounding
      const auto run = train_on_threads(other, dp * tp * pp * cp);
      REQUIRE_OK(run);
      if (cp == 1) CHECK(run.value().outliers == serial.value().outliers);
      CHECK(positions_of(run.value()) == planted);
    }
  }
}
