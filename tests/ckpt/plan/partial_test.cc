#include "ckpt/plan/partial.h"

#include <doctest/doctest.h>

#include "ckpt/plan/save_plan.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

std::vector<TensorSpec> specs(const std::vector<std::pair<std::string, Shape>>& tensors) {
  std::vector<TensorSpec> out;
  for (const auto& [name, shape] : tensors) {
    TensorSpec spec;
    spec.name = name;
    spec.shape = shape;
    out.push_back(std::move(spec));
  }
  return out;
}

const StateKinds kKinds{OptimizerConfig{}};

Manifest manifest_of(const std::vector<TensorSpec>& tensors, bool moments = true) {
  Manifest out;
  out.tensors = state_tensors(tensors, kKinds);
  if (!moments) out.tensors.resize(tensors.size());
  out.tensors.push_back({"tokenizer.model", "file", DType::kU8, {9}});
  return out;
}

const std::vector<TensorSpec> kModel = specs({{"embed.tokens", {8, 4}},
                                              {"layers.0.attn.q.weight", {4, 4}},
                                              {"layers.1.attn.q.weight", {4, 4}},
                                              {"head.weight", {8, 4}}});

std::string refusal(const Manifest& manifest, const InitConfig& how) {
  const Result<LoadMatch> match = match_tensors(manifest, kModel, kKinds, how);
  REQUIRE_FALSE(match.ok());
  CHECK(match.error().code == ErrorCode::kInvalidInput);
  return match.error().message;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("ckpt/plan/partial") {
  TEST_CASE("patterns: * is any characters, ? is one, and nothing else is special") {
    for (const auto& [pattern, text, expected] :
         std::vector<std::tuple<std::string, std::string, bool>>{{"", "", true},
                                                                 {"", "a", false},
                                                                 {"*", "", true},
                                                                 {"*", "layers.0.q", true},
                                                                 {"layers.*", "layers.0.attn.q.weight", true},
                                                                 {"layers.*", "layers", false},
                                                                 {"*.weight", "a.weight.weight", true},
                                                                 {"*.weight", "a.weights", false},
                                                                 {"layers.?.q", "layers.3.q", true},
                                                                 {"layers.?.q", "layers.13.q", false},
                                                                 {"l*.1*.q", "layers.0.1.x.q", true},
                                                                 {"a.b", "axb", false},
                                                                 {"**a**", "bab", true},
                                                                 {"*a*b*c", "aXbXbXd", false}}) {
      CAPTURE(pattern);
      CAPTURE(text);
      CHECK(matches(pattern, text) == expected);
    }
    CHECK_FALSE(matches(std::string("*a*a*a*a*a*a*a*a*b"), std::string(4000, 'a')));  // no blow-up
  }

  TEST_CASE("strict by default: all that does not fit is named with found, expected and the option that allows it") {
    CHECK(match_tensors(manifest_of(kModel), kModel, kKinds, {}).value().taken() == 4);
    CHECK(match_tensors(manifest_of(kModel), kModel, kKinds, {}).value().left.empty());
    const Manifest other = manifest_of(specs({{"embed.tokens", {9, 4}},
                                              {"layers.0.attn.q.weight", {4, 4}},
                                              {"layers.1.attn.q.weight", {4, 4}},
                                              {"value.weight", {1, 4}}}));
    CHECK(
        refusal(other, {}) ==
        "the checkpoint is not of this model:\n"
        "  shape:   weight embed.tokens is [9, 4], the model has [8, 4]; except = { \"embed.tokens\" } starts it anew\n"
        "  missing: weight head.weight, the model has f32 [8, 4]; allow_missing = { \"head.weight\" } starts it anew\n"
        "  extra:   weight value.weight f32 [1, 4] is not in the model; allow_extra = { \"value.weight\" } leaves it "
        "there\n"
        "  extra:   exp_avg value.weight f32 [1, 4] is not in the model; allow_extra = { \"value.weight\" } leaves it "
        "there\n"
        "  extra:   exp_avg_sq value.weight f32 [1, 4] is not in the model; allow_extra = { \"value.weight\" } leaves "
        "it there\n"
        "(options of init in the recipe; on the command line --init-except, --init-allow-missing ...)");
    // Each option that a message names does what it says; the three together are enough, any two are not.
    const InitConfig all{.except = {"embed.tokens"}, .allow_missing = {"head.weight"}, .allow_extra = {"value.weight"}};
    const LoadMatch match = match_tensors(other, kModel, kKinds, all).value();
    CHECK(match.taken() == 2);
    CHECK(match.with_moments() == 2);
    CHECK(match.left.size() == 6);
    for (const auto member : {&InitConfig::except, &InitConfig::allow_missing, &InitConfig::allow_extra}) {
      InitConfig two = all;
      (two.*member).clear();
      CHECK(has(refusal(other, two), "the checkpoint is not of this model"));
    }
    Manifest half = manifest_of(kModel);
    half.tensors[3].dtype = DType::kBf16;
    CHECK(has(refusal(half, {}), "dtype:   weight head.weight is bf16, expected f32; except = { \"head.weight\" }"));
    half.tensors[3].dtype = DType::kF32;
    std::erase_if(half.tensors, [](const TensorEntry& t) { return t.kind == "exp_avg" && t.name == "embed.tokens"; });
    CHECK(has(refusal(half, {}),
              "missing: exp_avg embed.tokens, the model has f32 [8, 4]; allow_missing = { "
              "\"embed.tokens\" } starts its moments at zero, weights_only = true those of all"));
    CHECK(match_tensors(half, kModel, kKinds, {.weights_only = true}).ok());
    const LoadMatch moments = match_tensors(half, kModel, kKinds, {.allow_missing = {"embed.*"}}).value();
    CHECK((moments.taken() == 4 && moments.with_moments() == 3 && !moments.tensors[0].moments));
  }

  TEST_CASE("a pattern that is of nothing is a mistake, and what it may have meant is named") {
    const Manifest manifest = manifest_of(kModel);
    CHECK(
        has(refusal(manifest, {.only = {"layer.*", "layers.9.*"}}),
            "pattern: only = { \"layer.*\" } is of no tensor of the model; it has \"layers.0.attn.q.weight\", for one\n"
            "  pattern: only = { \"layers.9.*\" } is of no tensor"));
    CHECK(has(refusal(manifest, {.except = {"lm_head.*"}}), "except = { \"lm_head.*\" } is of no tensor"));
    CHECK(has(refusal(manifest, {.except = {"*"}}), "nothing of the checkpoint would be taken"));
    // Allowances that are not needed are fine.
    CHECK(match_tensors(manifest, kModel, kKinds, {.allow_missing = {"x.*"}, .allow_extra = {"y.*"}}).ok());
  }

  TEST_CASE("the report says what was taken, what was not and why") {
    const auto lines = [](const Manifest& manifest, const InitConfig& how) {
      return report_lines(match_tensors(manifest, kModel, kKinds, how).value(), kModel, 12);
    };
    const Manifest full = manifest_of(kModel);
    CHECK(lines(full, {}) ==
          std::vector<std::string>{
              "4 of 4 tensors taken from the checkpoint, with their moments; the run resumes at step 12"});
    CHECK(lines(manifest_of(kModel, false), {}) ==
          std::vector<std::string>{
              "4 of 4 tensors taken from the checkpoint, which has no moments: they start at zero; the "
              "run resumes at step 12"});
    CHECK(
        lines(full, {.weights_only = true, .except = {"head.*"}}) ==
        std::vector<std::string>{
            "3 of 4 tensors taken from the checkpoint, weights alone: moments start at zero, the run begins at step 0",
            "  anew: head.weight [8, 4] (`except`)", "  left in the checkpoint: weight head.weight f32 [8, 4]"});
    CHECK(lines(full, {.only = {"layers.*"}}).size() == 1 + 2 + 6);
    StateKinds averaged = kKinds;
    averaged.add(StateKind::kEma);
    Manifest with_averages = full;
    with_averages.tensors = state_tensors(kModel, averaged);
    const auto left = [&](const StateKinds& kinds, const InitConfig& how) {
      return match_tensors(with_averages, kModel, kinds, how).value().left.size();
    };
    CHECK(left(kKinds, {}) == 4);  // this run keeps none
    CHECK(lines(with_averages, {}).at(1) == "  left in the checkpoint: ema embed.tokens f32 [8, 4]");
    CHECK(left(averaged, {}) == 0);
    CHECK(left(averaged, {.weights_only = true}) == 12);  // they begin at the weights
    const std::vector<TensorSpec> many = [] {
      std::vector<std::pair<std::string, Shape>> tensors;
      for (int64_t k = 0; k < 100; ++k) tensors.push_back({"t." + std::to_string(k), {2}});
      return specs(tensors);
    }();
    const std::vector<std::string> some =
        report_lines(match_tensors(manifest_of(many), many, kKinds, {.only = {"t.5"}}).value(), many, 1);
    CHECK(some.size() == 22);
    CHECK(some.back() == "  and 376 more");
  }
}
