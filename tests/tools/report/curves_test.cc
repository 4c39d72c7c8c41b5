// Curves in a bounded number of bytes: extremes stay, and so does what is not finite.
#include "tools/report/curves.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "runtime/json/json.h"

using namespace cairn::tools;
using cairn::telemetry::StepMetrics;
using nlohmann::json;

namespace {

constexpr int64_t kPlenty = 100'000'000;

StepMetrics step_of(int64_t step, double loss) {
  return {.step = step, .tokens = step * 1000, .time = 100.0 + static_cast<double>(step), .loss = loss, .grad_norm = 1};
}

History history_of(int64_t steps) {
  History out;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> noise(0, 1);
  for (int64_t step = 1; step <= steps; ++step) {
    StepMetrics one = step_of(step, 3 + noise(random));
    for (const char* source : {"a", "b"}) one.source_loss.emplace_back(source, one.loss + noise(random));
    for (const char* phase : {"forward", "backward", "other"}) one.split_ms.emplace_back(phase, 40 * noise(random));
    out.steps.push_back(one);
  }
  return out;
}

}  // namespace

TEST_SUITE("tools/report/curves") {
  TEST_CASE("each bucket keeps its least, its greatest and its mean") {
    std::mt19937 random(3);
    std::normal_distribution<double> noise;
    std::vector<double> values;
    for (int k = 0; k < 1003; ++k) values.push_back(noise(random));
    for (const int64_t each : {1, 2, 7, 100, 5000}) {
      CAPTURE(each);
      const Reduced reduced = reduce(values, each, true);
      REQUIRE(std::ssize(reduced.mean) == (1003 + each - 1) / each);
      double sum = 0;
      for (size_t b = 0; b < reduced.mean.size(); ++b) {
        const auto from = values.begin() + static_cast<int64_t>(b) * each;
        const auto to = std::min(values.end(), from + std::min<int64_t>(each, values.end() - from));
        CHECK(reduced.least[b] == *std::min_element(from, to));
        CHECK(reduced.greatest[b] == *std::max_element(from, to));
        sum += reduced.mean[b] * static_cast<double>(to - from);
      }
      CHECK(sum == doctest::Approx(std::accumulate(values.begin(), values.end(), 0.0)));
      CHECK(reduced.not_finite.empty());
    }
  }

  TEST_CASE("values that are not finite move no mean, and their places stay") {
    const std::vector<double> values = {1, NAN, 3, INFINITY, NAN, -INFINITY, 5};
    const Reduced reduced = reduce(values, 3, true);
    CHECK(reduced.mean[0] == 2);
    CHECK(std::isnan(reduced.mean[1]));
    CHECK(std::isnan(reduced.least[1]));
    CHECK(reduced.mean[2] == 5);
    CHECK(reduced.not_finite == std::vector<int64_t>{1, 3, 4, 5});
    CHECK(reduce(values, 3, false).not_finite == std::vector<int64_t>{3, 5});  // NaN: the step has no such value
    CHECK(reduce({}, 3, true).mean.empty());
  }

  TEST_CASE("a report holds every step while the bytes last, and then buckets of them") {
    const json all = curves_of(history_of(300), kPlenty);
    const json& loss = all.at("series").at("loss");
    CHECK(all.at("axes").at(0).at("each") == 1);
    CHECK(loss.at("mean").size() == 300);
    CHECK_FALSE(loss.contains("least"));
    CHECK(all.at("series").contains("source_loss/a"));
    CHECK(all.at("series").contains("split_ms/forward"));

    History history = history_of(20000);
    history.steps[12345].loss = 99;
    history.steps[13456].loss = NAN;
    for (const int64_t bytes : {100'000, 300'000}) {
      CAPTURE(bytes);
      const json curves = curves_of(history, bytes);
      const std::string text = cairn::json_text(curves);
      CHECK(std::ssize(text) < bytes);
      CHECK(std::ssize(text) > bytes / 3);
      const json& of = curves.at("series").at("loss");
      CHECK(*std::ranges::max_element(of.at("greatest")) == 99);
      CHECK(of.at("not_finite").at("count") == 1);
      CHECK(of.at("not_finite").at("steps") == json{13457});
      const json& axis = curves.at("axes").at(of.at("axis").get<size_t>());
      CHECK(axis.at("step").size() == of.at("mean").size());
      CHECK(axis.at("last_step") == 20000);
      const json& coarse = curves.at("series").at("source_loss/a");
      CHECK(coarse.at("mean").size() < of.at("mean").size());
    }
  }

  TEST_CASE("steps that were done again are pieces of their own") {
    History history = history_of(50);
    for (const int64_t step : {41, 42, 43, 30, 31}) history.superseded.push_back(step_of(step, 9));
    const json curves = curves_of(history, kPlenty);
    REQUIRE(curves.at("abandoned").size() == 2);
    CHECK(curves.at("axes").at(curves.at("abandoned")[0].at("axis").get<size_t>()).at("step") == json{41, 42, 43});
    CHECK(curves.at("series").at("loss").at("mean").size() == 50);
    for (int64_t k = 0; k < 50; ++k) history.superseded.push_back(step_of(40 - k % 2, 9));
    CHECK(curves_of(history, kPlenty).at("abandoned").size() == 20);
    CHECK(curves_of(history, kPlenty).at("left_out").at("abandoned") > 0);
  }

  TEST_CASE("evaluations and saves have axes of their own") {
    History history = history_of(100);
    for (const int64_t step : {10, 50, 100}) {
      history.steps[static_cast<size_t>(step - 1)].valid_loss = step == 50 ? NAN : 2.5;
      history.steps[static_cast<size_t>(step - 1)].valid_source_loss = {{"a", 2.25}};
    }
    history.saves = {{.step = 20, .seconds = 1.5, .pause_s = 0.004},
                     {.step = 500, .seconds = 3}};  // a step without a line
    const json curves = curves_of(history, kPlenty);
    const json& valid = curves.at("series").at("valid_loss");
    CHECK(curves.at("axes").at(valid.at("axis").get<size_t>()).at("step") == json{10, 50, 100});
    CHECK(valid.at("mean") == json{2.5, nullptr, 2.5});
    CHECK(valid.at("not_finite").at("steps") == json{50});
    CHECK(curves.at("series").at("valid_source_loss/a").at("mean") == json{2.25, 2.25, 2.25});
    CHECK(curves.at("series").at("save_seconds").at("mean") == json{1.5});
    CHECK(curves.at("series").at("save_pause_ms").at("mean") == json{4});
  }

  TEST_CASE("a run without steps, and one of many sources, have bounded curves") {
    CHECK(curves_of(History(), kPlenty).at("series").empty());
    History history = history_of(3);
    for (int k = 0; k < 1000; ++k) history.steps[1].source_loss.emplace_back("s" + std::to_string(k), 1.0);
    const json curves = curves_of(history, kPlenty);
    CHECK(curves.at("series").size() < 60);
    CHECK(curves.at("left_out").at("sources") == 978);
  }

  TEST_CASE("numbers have six digits") {
    CHECK(rounded(2.123456789) == 2.12346);
    CHECK(rounded(123456789) == 123457000);
    CHECK(rounded(-1e-300) == -1e-300);
  }
}
