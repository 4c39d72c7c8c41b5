// Log-likelihoods of requests: their ids, their sums against the whole text's, and that nothing else changes a bit.

#include "runtime/evaluation/scorer.h"

#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "tests/runtime/inference/drawn_session.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::evaluation;
using cairn::inference::testing::session_of;

namespace {

Recipe recipe_of(int64_t context = 96) {
  Recipe r;
  r.name = "scorer";
  r.seed = 5;
  r.stop = {Span::Unit::kSteps, 1};
  r.model = {
      .layers = 2, .width = 48, .heads = 6, .kv_heads = 2, .head_dim = 8, .ffn = 80, .context = context, .vocab = 256};
  r.model.positions = Positions::kRotary;
  r.model.norm = NormKind::kRmsNorm;
  r.model.activation = Activation::kSwiGlu;
  r.model.bias = false;
  r.model.tied_embeddings = false;
  r.model.init_std = 0.3;
  r.batch = {1, 1};
  r.optimizer.peak_lr = 1e-3;
  return r;
}

std::vector<int32_t> drawn(size_t count, unsigned seed) {
  std::mt19937 draw(seed);
  std::vector<int32_t> out(count);
  for (int32_t& id : out) id = static_cast<int32_t>(draw() % 256);
  return out;
}

std::unique_ptr<text::Tokenizer> bytes() {
  auto made = text::make_tokenizer({.kind = TokenizerConfig::Kind::kBytes});
  REQUIRE_OK(made);
  return std::move(made).value();
}

Score score_of(Scorer& scorer, const Encoded& request) {
  const Result<Score> made = scorer.score(request);
  REQUIRE_OK(made);
  return made.value();
}

/// The same by the loss of the whole text.
double whole_logprob(inference::Session& session, const Encoded& request) {
  std::vector<int32_t> ids = request.context;
  ids.insert(ids.end(), request.continuation.begin(), request.continuation.end());
  const auto context = session.plan().recipe.model.context;
  if (std::ssize(ids) > context + 1) ids.erase(ids.begin(), ids.end() - (context + 1));
  const auto losses = session.token_losses(ids);
  REQUIRE_OK(losses);
  double out = 0;
  for (size_t k = losses.value().size() - request.continuation.size(); k < losses.value().size(); ++k) {
    out -= losses.value()[k];
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/evaluation/scorer") {
  TEST_CASE("a request's ids are the harness': spaces move to the continuation, an empty context is the begin token") {
    const auto tokenizer = bytes();
    const TextIds ids{tokenizer.get(), {}, 7};
    const auto pair = [&](std::string_view context, std::string_view continuation) {
      Result<Encoded> made = encode_pair(ids, context, continuation);
      REQUIRE_OK(made);
      return std::move(made).value();
    };
    CHECK(pair("ab ", "c").context == std::vector<int32_t>{'a', 'b'});
    CHECK(pair("ab ", "c").continuation == std::vector<int32_t>{' ', 'c'});
    CHECK(pair("ab\u3000", "c").continuation.size() == 4);  // str.rstrip() takes Unicode's spaces
    CHECK(pair("", "c").context == std::vector<int32_t>{7});
    CHECK(pair("",
               "\x07"
               "c")
              .continuation == std::vector<int32_t>{'c'});  // it begins with the begin token itself
    CHECK(pair(" \n", "c").continuation == std::vector<int32_t>{' ', '\n', 'c'});
    CHECK_FALSE(encode_pair(ids, "ab", "").ok());
    CHECK_FALSE(encode_pair({tokenizer.get(), {}, -1}, "", "c").ok());
    const TextIds with_begin{tokenizer.get(), {7}, 7};
    const auto begun = encode_pair(with_begin, "ab", "c");
    REQUIRE_OK(begun);
    CHECK(begun.value().context == std::vector<int32_t>{7, 'a', 'b'});
    CHECK(begun.value().continuation == std::vector<int32_t>{'c'});
    const auto spelled = encode_pair(with_begin,
                                     "\x07"
                                     "ab",
                                     "c");
    REQUIRE_OK(spelled);
    CHECK(spelled.value().context == std::vector<int32_t>{7, 'a', 'b'});
  }

  TEST_CASE("a request's sum is that of the whole text, for short and long contexts and continuations") {
    const auto session = session_of(recipe_of());
    Scorer scorer(*session);
    for (const size_t context : {1, 2, 8, 9, 70, 96, 120}) {
      for (const size_t continuation : {1, 3, 12, 90, 96}) {
        CAPTURE(context);
        CAPTURE(continuation);
        const Encoded request{drawn(context, 1), drawn(continuation, 2)};
        const Score score = score_of(scorer, request);
        CHECK(score.tokens == static_cast<int64_t>(continuation));
        CHECK(std::abs(score.logprob - whole_logprob(*session, request)) < 2e-5 * static_cast<double>(continuation));
      }
    }
    CHECK_FALSE(scorer.score({drawn(3, 1), drawn(97, 2)}).ok());
  }

  TEST_CASE("neither the requests before, their order, nor the number of threads changes a bit") {
    std::vector<Encoded> requests;
    // Neighbours have one context, or others of the same length.
    for (unsigned k = 0; k < 24; ++k) {
      requests.push_back({drawn(5 + k / 4 % 3 * 30, k / 2 % 5), drawn(1 + k % 7, 100 + k)});
    }
    std::vector<double> first;
    {
      const auto session = session_of(recipe_of());
      for (const Encoded& one : requests) {
        Scorer alone(*session);
        first.push_back(score_of(alone, one).logprob);
      }
    }
    const int before = omp_get_max_threads();
    for (const int threads : {1, 3}) {
      omp_set_num_threads(threads);
      const auto session = session_of(recipe_of());
      Scorer scorer(*session);
      for (size_t k = requests.size(); k-- > 0;) {
        CAPTURE(k);
        CHECK(std::bit_cast<uint64_t>(score_of(scorer, requests[k]).logprob) == std::bit_cast<uint64_t>(first[k]));
      }
    }
    omp_set_num_threads(before);
  }

  TEST_CASE("greedy and rank say which token is the likeliest") {
    const auto session = session_of(recipe_of());
    Scorer scorer(*session);
    const std::vector<int32_t> context = drawn(20, 3);
    const auto made = scorer.generate(context, 4, {}, [](auto) { return true; });
    REQUIRE_OK(made);
    const Score likeliest = score_of(scorer, {context, made.value()});
    CHECK(likeliest.greedy == true);
    CHECK(likeliest.first_rank == 1);
    std::vector<int32_t> other = made.value();
    other[0] = (other[0] + 1) % 256;
    const Score less = score_of(scorer, {context, other});
    CHECK(less.greedy == false);
    CHECK(less.first_rank > 1);
    const auto next = scorer.next_logprobs(context);
    REQUIRE_OK(next);
    double sum = 0;
    for (const double one : next.value()) sum += std::exp(one);
    CHECK(sum == doctest::Approx(1));
    CHECK(next.value()[other[0]] == doctest::Approx(less.first_logprob));
  }

  TEST_CASE("the scorer reads a rolling text once, in windows of the model's context") {
    const auto session = session_of(recipe_of(32));
    Scorer scorer(*session);
    for (const size_t count : {1, 31, 32, 33, 64, 75}) {
      CAPTURE(count);
      const std::vector<int32_t> ids = drawn(count, 4);
      const auto rolling = scorer.rolling(7, ids);
      REQUIRE_OK(rolling);
      CHECK(rolling.value().tokens == static_cast<int64_t>(count));
      double expected = 0;
      std::vector<int32_t> all = {7};
      all.insert(all.end(), ids.begin(), ids.end());
      for (size_t begin = 0; begin < count;) {
        const size_t now = std::min<size_t>(32, count - begin), end = begin + now;
        const size_t reach = end > 32 ? end - 32 : 0;  // the last window reaches back
        expected += whole_logprob(*session, {{all.begin() + reach, all.begin() + begin + 1},
                                             {all.begin() + begin + 1, all.begin() + end + 1}});
        begin = end;
      }
      CHECK(std::abs(rolling.value().logprob - expected) < 1e-3);
    }
  }
}
