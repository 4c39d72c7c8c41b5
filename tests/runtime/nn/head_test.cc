// The head working on some rows at a time, as it does when [T, V] logits would be too large.

#include "runtime/nn/head.h"

#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn;
using namespace cairn::nn::testing;

namespace {

struct HeadRun {
  std::vector<float> losses, logits, dinput, grads;
};

/// Forward, logits, backward of the head alone with a logits buffer of `logit_rows` rows.
HeadRun run_head(const Plan& plan, int64_t logit_rows) {
  const RankPlan rank = plan.rank(0);
  StageDims dims = stage_dims(plan, rank);
  REQUIRE(dims.logit_rows == dims.rows);
  dims.logit_rows = logit_rows;  // uses a part of the plan's buffer
  const Logical logical = draw_weights(plan);
  HeadRun out;
  std::vector<float> weights(rank.flat_elems, 0.0f);
  out.grads.assign(rank.flat_elems, 0.0f);
  for (const LocalTensor& local : rank.tensors) {
    std::copy(logical[local.tensor].begin(), logical[local.tensor].end(), weights.begin() + local.offset);
  }
  const int64_t bytes = stage_buffers_bytes(plan, rank);
  const std::unique_ptr<std::byte, void (*)(std::byte*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(kBufferAlignBytes, bytes)), [](std::byte* p) { std::free(p); });
  std::memset(memory.get(), 0xff, bytes);
  const Buffers buffers = Buffers::lay_out(plan, rank, {DevicePtr(memory.get()), bytes}).value();

  LoneComm comm;
  const std::unique_ptr<Stream> stream = make_cpu_stream();
  const kernels::Exec<float> on = kernels::exec_on<float>(*stream);
  const TensorParallel<float> tp(on, comm, dims, false);
  const Scratch<float> scratch{
      .rows_TH = buffers.get<float>("scratch.rows"),
      .partial_TH = buffers.get<float>("scratch.partial"),
      .dresidual_RH = buffers.get<float>("scratch.dresidual"),
      .stats = {.mean = buffers.get<float>("scratch.mean"), .rstd = buffers.get<float>("scratch.rstd")}};
  const Parameters<float> parameters(on, plan, rank, DevicePtr<const float>(weights.data()),
                                     DevicePtr(out.grads.data()));
  Head<float> head(parameters, plan.recipe.model, "final_norm", 0.0, dims, tp, scratch, buffers);
  const SavedHead<float> saved{.input_RH = buffers.get<float>("head.input"),
                               .max_T = buffers.get<float>("head.max"),
                               .sum_exp_T = buffers.get<float>("head.sums"),
                               .loss_T = buffers.get<float>("head.sums") + dims.rows};
  for (int64_t i = 0; i < dims.rows * dims.width; ++i) address_of(saved.input_RH)[i] = normal_at(9, i);
  const Batch batch = draw_batch(plan);
  const DevicePtr<const int32_t> targets(batch.targets.data());

  REQUIRE(head.forward(saved, {targets, nullptr}).ok());
  out.losses.assign(address_of(saved.loss_T), address_of(saved.loss_T) + dims.rows);
  out.logits.resize(dims.rows * plan.recipe.model.vocab);
  REQUIRE(head.logits(saved, 0, dims.rows, out.logits).ok());
  REQUIRE(head.backward(saved, {targets, nullptr}, 0.5f).ok());
  out.dinput.assign(address_of(scratch.dresidual_RH), address_of(scratch.dresidual_RH) + dims.rows * dims.width);

  // Backward has overwritten the logits: asked again, they come again.
  std::vector<float> again(out.logits.size());
  REQUIRE(head.logits(saved, 0, dims.rows, again).ok());
  CHECK(again == out.logits);
  return out;
}

std::vector<double> widen(const std::vector<float>& values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_SUITE("runtime/nn/head") {
  TEST_CASE("a head that takes its rows in parts gives what it gives in one") {
    const Plan plan = plan_of(gpt2_recipe());
    const HeadRun whole = run_head(plan, 12);
    for (const int64_t logit_rows : {1, 4, 5, 11}) {
      CAPTURE(logit_rows);
      const HeadRun parts = run_head(plan, logit_rows);
      // 1e-6: a product of other shape may add in another order.
      CHECK(distance(widen(parts.losses), widen(whole.losses), 0) < 1e-6);
      CHECK(distance(widen(parts.logits), widen(whole.logits), 0) < 1e-6);
      CHECK(distance(widen(parts.dinput), widen(whole.dinput), 0) < 1e-6);
      CHECK(distance(widen(parts.grads), widen(whole.grads), 0) < 1e-6);
    }
  }
}
