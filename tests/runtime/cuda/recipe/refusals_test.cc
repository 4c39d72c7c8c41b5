// What CUDA lacks is refused by the field that asks for it, and nothing else is.

#include "runtime/cuda/recipe/refusals.h"

#include <doctest/doctest.h>

#include <functional>
#include <set>
#include <string>
#include <tuple>

#include "runtime/cuda/ops/missing.h"
#include "runtime/plan/device_choice.h"
#include "tests/support/ok.h"

using namespace cairn;

namespace {

Recipe plain() {
  Recipe out;
  out.name = "plain";
  out.stop = {Span::Unit::kSteps, 10};
  out.model = {
      .layers = 2, .width = 32, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64, .context = 16, .vocab = 65};
  out.data.sources = {{.kind = DataSource::Kind::kTokenFile, .name = "a", .path = "a", .dtype = "uint16"}};
  out.batch = {.samples = 4, .micro = 2};
  out.optimizer = {.peak_lr = 1e-3};
  return out;
}

void give_experts(Recipe& recipe, int64_t count) {
  recipe.model.activation = Activation::kSwiGlu;
  recipe.model.bias = false;
  recipe.model.moe = {.experts = count, .top_k = 2};
}

std::set<std::string> refused(const std::function<void(Recipe&)>& change, int64_t world = 1) {
  Recipe recipe = plain();
  change(recipe);
  settle_device(recipe, DeviceChoice::kCuda);
  const auto plan = make_plan(recipe, world);
  REQUIRE_OK(plan);
  std::set<std::string> out;
  for (const cuda::Refusal& one : cuda::refusals(plan.value())) out.insert(one.field);
  return out;
}

}  // namespace

TEST_SUITE("runtime/cuda/recipe/refusals") {
  TEST_CASE("all that is missing has a field for which it is refused") {
    for (const std::string_view op : cuda::missing_ops()) {
      CAPTURE(op);
      CHECK_FALSE(cuda::fields_needing(op).empty());
    }
  }

  TEST_CASE("what asks for something missing is refused by its field, and nothing else is") {
    using Fields = std::set<std::string>;
    CHECK(refused([](Recipe&) {}) == Fields{});
    CHECK(refused([](Recipe& r) { r.optimizer.kind = OptimizerKind::kLamb; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.optimizer.kind = OptimizerKind::kAdafactor; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.optimizer.ema = 0.9; }) == Fields{});
    CHECK(refused([](Recipe& r) { give_experts(r, 4); }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.logit_cap = 30; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.qk_norm = QkNorm::kWhole; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.qk_norm = QkNorm::kHead; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.qk_norm = QkNorm::kHeadLayerNorm; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.qk_norm = QkNorm::kSharedLayerNorm; }) == Fields{});
    CHECK(refused([](Recipe& r) {
            r.model.positions = Positions::kAlibi;
            r.model.alibi = AlibiForm::kRounded;
          }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.width = 1 << 15; }) == Fields{});  // LayerNorm with biases
    CHECK(refused([](Recipe& r) { r.model.head_dim = 288; }) == Fields{"model.head_dim"});
    CHECK(refused([](Recipe& r) { give_experts(r, 2049); }) == Fields{"model.moe.experts"});
    CHECK(refused([](Recipe& r) { r.model.attention_sinks = true; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.attention_chunk = 8; }) == Fields{});
    CHECK(refused([](Recipe& r) { r.model.activation = Activation::kSwiGluClamp; }) == Fields{});
    CHECK(refused([](Recipe& r) {
            give_experts(r, 4);
            r.model.moe.scale_input = true;
          }) == Fields{});
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      CHECK(refused([&](Recipe& r) {
              give_experts(r, 4);
              r.model.bias = true;
              r.model.moe.router_bias = true;
              r.precision = precision;
            }) == Fields{});
    }
    CHECK(refused([](Recipe& r) { r.deterministic = Deterministic::kLayout; }) == Fields{"deterministic"});
    CHECK(refused([](Recipe& r) { r.checkpoint.snapshot_by = SnapshotBy::kBanks; }) ==
          Fields{"checkpoint.snapshot_by"});
    CHECK(refused([](Recipe& r) { r.checkpoint.snapshot_by = SnapshotBy::kCopy; }) == Fields{});
    CHECK(refused([](Recipe&) {}, 2) == Fields{});
  }

  TEST_CASE("an unwritten snapshot_by is banks on a CPU and copy on CUDA; a written one stays") {
    for (const auto& [written, cpu, on_cuda] : {std::tuple(SnapshotBy::kAuto, SnapshotBy::kBanks, SnapshotBy::kCopy),
                                                std::tuple(SnapshotBy::kBanks, SnapshotBy::kBanks, SnapshotBy::kBanks),
                                                std::tuple(SnapshotBy::kCopy, SnapshotBy::kCopy, SnapshotBy::kCopy)}) {
      for (const DeviceChoice device : {DeviceChoice::kCpu, DeviceChoice::kCuda}) {
        Recipe recipe = plain();
        recipe.checkpoint.snapshot_by = written;
        settle_device(recipe, device);
        CHECK(recipe.device == device);
        CHECK(recipe.checkpoint.snapshot_by == (device == DeviceChoice::kCpu ? cpu : on_cuda));
      }
    }
  }
}
