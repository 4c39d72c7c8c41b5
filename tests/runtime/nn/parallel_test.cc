// Tensor and sequence parallelism: ranks as threads against one rank, and what they say to each other.
//
// Tolerance, float: 1e-5 of the largest value compared; only the order of sums over tp differs.

#include <tuple>

#include "runtime/comm/side_sums.h"
#include "runtime/kernels/ops.h"
#include "runtime/nn/tensor_parallel.h"
#include "tests/runtime/nn/stage_testing.h"

using namespace cairn;
using namespace cairn::nn;
using namespace cairn::nn::testing;

namespace {

/// Rank 0 of a group of two that has no other member: notes what is asked for, and fails at call `fail_at`.
class RecordingComm : public comm::Comm {
 public:
  explicit RecordingComm(int64_t fail_at = -1) : fail_at_(fail_at) {}
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 2; }
  const std::string& name() const override { return name_; }
  Status all_reduce(void*, int64_t, DType, comm::ReduceOp, std::string_view what) override {
    return note("all_reduce", what);
  }
  Status reduce_scatter(const void*, void*, int64_t, DType, comm::ReduceOp, std::string_view what) override {
    return note("reduce_scatter", what);
  }
  Status reduce_scatter_add(const void*, void*, int64_t, DType, int64_t, std::string_view what) override {
    return note("reduce_scatter_add", what);
  }
  Status all_gather(const void*, void*, int64_t, std::string_view what) override { return note("all_gather", what); }
  Status broadcast(void*, int64_t, int64_t, std::string_view what) override { return note("broadcast", what); }
  Status all_to_all(std::span<const comm::OutPart>, std::span<const comm::InPart>, std::string_view what) override {
    return note("all_to_all", what);
  }
  Status barrier(std::string_view what) override { return note("barrier", what); }
  Status isend(const void*, int64_t, int64_t, std::string_view what) override { return note("isend", what); }
  Status recv(void*, int64_t, int64_t, std::string_view what) override { return note("recv", what); }
  Status wait_sends(std::string_view what) override { return note("wait_sends", what); }
  Status wait_sends_to(int64_t, int64_t, std::string_view what) override { return note("wait_sends_to", what); }
  Traffic traffic() const override { return {}; }

  std::vector<std::string> calls;

 protected:
  Status note(std::string_view operation, std::string_view what) {
    calls.push_back(std::string(operation) + " " + std::string(what));
    if (static_cast<int64_t>(calls.size()) - 1 != fail_at_) return {};
    return Error{ErrorCode::kPeerLost, "lost in " + std::string(what)};
  }
  std::string name_ = "tp[0,1]";
  int64_t fail_at_;
};

/// The same of a group that sums beside.
class ChunkedComm final : public RecordingComm, public comm::SideSums {
 public:
  explicit ChunkedComm(int64_t least) : least_(least) {}
  int64_t least_chunk_bytes() const override { return least_; }
  Status sum_beside(DevicePtr<void> data, int64_t count, DType, std::string_view what) override {
    const auto at = static_cast<const float*>(address_of(data)) - first;
    return note(std::to_string(count) + " from " + std::to_string(at) + " beside", what);
  }
  Status join_sums() override { return note("join", ""); }

  const float* first = nullptr;

 private:
  int64_t least_;
};

Status forward_backward(const Plan& plan, RecordingComm& comm) {
  Rank rank(plan, 0, comm, draw_weights(plan));
  const Batch batch = draw_batch(plan);
  RT_TRY(rank.model().forward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr));
  return rank.model().backward(0, batch.tokens.data(), batch.targets.data(), nullptr, nullptr, 1.0f);
}

}  // namespace

TEST_SUITE("runtime/nn/parallel") {
  TEST_CASE("tensor-parallel ranks give the losses and gradients of one rank") {
    for (const bool tied : {true, false}) {
      for (Recipe recipe : {gpt2_recipe(), llama_recipe()}) {
        recipe.model.tied_embeddings = tied;
        const Plan one_plan = plan_of(recipe);
        const Logical weights = draw_weights(one_plan);
        const Batch batch = draw_batch(one_plan);
        const Outcome one = run_alone(one_plan, weights, batch);
        const std::vector<double> one_losses(one.losses.begin(), one.losses.end());
        const double floor = largest(one.grads);
        for (const int64_t tp : {2, 4}) {
          for (const int64_t pp : {1, 2}) {
            for (const bool sequence_parallel : {false, true}) {
              CAPTURE(recipe.name);
              CAPTURE(tied);
              CAPTURE(tp);
              CAPTURE(pp);
              CAPTURE(sequence_parallel);
              recipe.mesh.tp = tp;
              recipe.mesh.pp = pp;
              recipe.mesh.sequence_parallel = sequence_parallel;
              const Plan plan = plan_of(recipe);
              const Outcome got = run_threads(plan, weights, batch);
              CHECK(distance({got.losses.begin(), got.losses.end()}, one_losses, 0) < 1e-5);
              for (size_t t = 0; t < plan.tensors.size(); ++t) {
                CAPTURE(plan.tensors[t].name);
                CHECK(distance(got.grads[t], one.grads[t], floor) < 1e-5);
              }
            }
          }
        }
      }
    }
  }

  TEST_CASE("dropout masks are the same for every way of cutting the model") {
    Recipe recipe = gpt2_recipe();
    recipe.model.embedding_dropout = recipe.model.attention_dropout = recipe.model.residual_dropout = 0.3;
    const Plan one_plan = plan_of(recipe);
    const Logical weights = draw_weights(one_plan);
    Batch batch = draw_batch(one_plan);
    batch.dropout_keys = {mix64(5), mix64(6)};
    const Outcome one = run_alone(one_plan, weights, batch);
    for (const auto& [tp, pp, sequence_parallel] :
         std::vector<std::tuple<int64_t, int64_t, bool>>{{2, 1, false}, {2, 2, true}, {4, 1, true}, {1, 3, false}}) {
      CAPTURE(tp);
      CAPTURE(pp);
      recipe.mesh.tp = tp;
      recipe.mesh.pp = pp;
      recipe.mesh.sequence_parallel = sequence_parallel;
      const Plan plan = plan_of(recipe);
      const Outcome got = tp > 1 ? run_threads(plan, weights, batch) : run_alone(plan, weights, batch);
      for (size_t t = 0; t < plan.tensors.size(); ++t) {
        CAPTURE(plan.tensors[t].name);
        CHECK(distance(got.grads[t], one.grads[t], largest(one.grads)) < 1e-5);
      }
    }
  }

  TEST_CASE("every option gives under tensor, sequence and pipeline parallelism what it gives alone") {
    for (const Variant& variant : option_variants()) {
      CAPTURE(variant.name);
      Recipe recipe = variant.recipe;
      const Plan one_plan = plan_of(recipe);
      const Logical weights = draw_weights(one_plan);
      const Batch batch = draw_batch(one_plan);
      const Outcome one = run_alone(one_plan, weights, batch);
      const std::vector<double> one_losses(one.losses.begin(), one.losses.end());
      const double floor = largest(one.grads);
      for (const auto& [tp, pp, sequence_parallel] :
           {std::tuple<int64_t, int64_t, bool>{2, 1, false}, {4, 2, false}, {2, 3, true}, {4, 1, true}}) {
        CAPTURE(tp);
        CAPTURE(pp);
        CAPTURE(sequence_parallel);
        recipe.mesh.tp = tp;
        recipe.mesh.pp = pp;
        recipe.mesh.sequence_parallel = sequence_parallel;
        const Plan plan = plan_of(recipe);
        const Outcome got = run_threads(plan, weights, batch);
        CHECK(distance({got.losses.begin(), got.losses.end()}, one_losses, 0) < 1e-5);
        for (size_t t = 0; t < plan.tensors.size(); ++t) {
          CAPTURE(plan.tensors[t].name);
          CHECK(distance(got.grads[t], one.grads[t], floor) < 1e-5);
        }
      }
    }
  }

  TEST_CASE("a rank's rows may begin and end inside a sample") {
    Recipe recipe = gpt2_recipe();
    recipe.batch = {.samples = 3, .micro = 3};  // 18 rows, 9 a rank, samples of 6
    const Plan one_plan = plan_of(recipe);
    const Logical weights = draw_weights(one_plan);
    const Batch batch = draw_batch(one_plan);
    const Outcome one = run_alone(one_plan, weights, batch);
    recipe.mesh.tp = 2;
    recipe.mesh.sequence_parallel = true;
    const Plan plan = plan_of(recipe);
    const Outcome got = run_threads(plan, weights, batch);
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      CAPTURE(plan.tensors[t].name);
      CHECK(distance(got.grads[t], one.grads[t], largest(one.grads)) < 1e-5);
    }
  }

  TEST_CASE("sequence parallelism holds in bf16 and for biases on a gated MLP") {
    Recipe recipe = llama_recipe();
    recipe.model.bias = true;
    recipe.precision = Precision::kBf16;
    const Plan one_plan = plan_of(recipe);
    Logical weights = draw_weights(one_plan);
    round_to_bf16(weights);
    const Batch batch = draw_batch(one_plan);
    recipe.precision = Precision::kF32;
    const Outcome exact = run_alone(plan_of(recipe), weights, batch);
    recipe.precision = Precision::kBf16;
    recipe.mesh.tp = 4;
    recipe.mesh.sequence_parallel = true;
    const Plan plan = plan_of(recipe);
    const Outcome got = run_threads(plan, weights, batch);
    const double floor = largest(exact.grads);
    for (size_t r = 0; r < exact.losses.size(); ++r) CHECK(std::abs(got.losses[r] - exact.losses[r]) < 5e-2);
    for (size_t t = 0; t < plan.tensors.size(); ++t) {
      CAPTURE(plan.tensors[t].name);
      CHECK(distance(got.grads[t], exact.grads[t], floor) < 8e-2);  // as one rank in bf16, stage_model_test.cc
    }
  }

  TEST_CASE("every collective has its name and its place") {
    Recipe recipe = gpt2_recipe();
    recipe.model.layers = 1;
    recipe.mesh.tp = 2;
    {
      RecordingComm comm;
      REQUIRE(forward_backward(plan_of(recipe), comm).ok());
      CHECK(comm.calls == std::vector<std::string>{"all_reduce embedding", "all_reduce layer 0 attn.out",
                                                   "all_reduce layer 0 mlp.out", "all_reduce head.max",
                                                   "all_reduce head.sums", "all_reduce head.din",
                                                   "all_reduce layer 0 mlp.din", "all_reduce layer 0 attn.din"});
    }
    recipe.mesh.sequence_parallel = true;
    {
      RecordingComm comm;
      REQUIRE(forward_backward(plan_of(recipe), comm).ok());
      CHECK(comm.calls == std::vector<std::string>{"reduce_scatter embedding", "all_gather layer 0 attn.in",
                                                   "reduce_scatter layer 0 attn.out", "all_gather layer 0 mlp.in",
                                                   "reduce_scatter layer 0 mlp.out", "all_gather head.in",
                                                   "all_reduce head.max", "all_reduce head.sums", "all_gather head.in",
                                                   "reduce_scatter head.din", "all_gather layer 0 mlp.dout",
                                                   "all_gather layer 0 mlp.in", "reduce_scatter layer 0 mlp.din",
                                                   "all_gather layer 0 attn.dout", "all_gather layer 0 attn.in",
                                                   "reduce_scatter layer 0 attn.din", "all_gather embedding.dout"});
    }
  }

  TEST_CASE(
      "a product over tp is summed in chunks of rows, each while the next is multiplied, where chunks are large") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    const kernels::Exec<float> on = kernels::exec_on<float>(*stream);
    std::vector<float> data(10 * 4);
    const auto calls = [&](int64_t least, bool sequence_parallel) {
      StageDims d{};
      d.rows = 10;
      d.local_rows = sequence_parallel ? 5 : 10;
      d.width = 4;
      ChunkedComm comm(least);
      comm.first = data.data();
      const TensorParallel<float> tp(on, comm, d, sequence_parallel);
      CHECK(tp.sum_of_rows(DevicePtr<float>(data.data()), "sum", [&](int64_t row, int64_t rows) {
                comm.calls.push_back(std::to_string(rows) + " rows from " + std::to_string(row));
              }).ok());
      return comm.calls;
    };
    const std::vector<std::string> scattered = {"10 rows from 0", "reduce_scatter sum"},
                                   whole = {"10 rows from 0", "all_reduce sum"};
    CHECK(calls(16, false) == std::vector<std::string>{"3 rows from 0", "12 from 0 beside sum", "3 rows from 3",
                                                       "12 from 12 beside sum", "3 rows from 6",
                                                       "12 from 24 beside sum", "1 rows from 9", "4 from 36 beside sum",
                                                       "join "});
    CHECK(calls(80, false) == std::vector<std::string>{"5 rows from 0", "20 from 0 beside sum", "5 rows from 5",
                                                       "20 from 20 beside sum", "join "});
    CHECK(calls(81, false) == whole);
    CHECK(calls(0, false) == whole);
    CHECK(calls(16, true) == scattered);
  }

  TEST_CASE("a collective that fails ends the pass with its error, whichever it is") {
    for (const bool sequence_parallel : {false, true}) {
      Recipe recipe = gpt2_recipe();
      recipe.mesh.tp = 2;
      recipe.mesh.sequence_parallel = sequence_parallel;
      const Plan plan = plan_of(recipe);
      bool failed = true;
      int64_t count = 0;
      for (int64_t n = 0; failed; ++n) {  // the sweep ends by itself, past the last collective
        CAPTURE(n);
        RecordingComm comm(n);
        const Status status = forward_backward(plan, comm);
        failed = !status.ok();
        if (!failed) break;
        CHECK(status.error().code == ErrorCode::kPeerLost);
        CHECK(static_cast<int64_t>(comm.calls.size()) == n + 1);  // nothing was asked for after it
        CHECK(comm.calls.back().ends_with(status.error().message.substr(std::strlen("lost in "))));
        ++count;
      }
      CHECK(count == (sequence_parallel ? 37 : 16));
    }
  }

  TEST_CASE("a group that is not the plan's is refused, and whole logits need tp 1") {
    Recipe recipe = gpt2_recipe();
    const Plan one = plan_of(recipe);
    RecordingComm comm;
    const auto refused = StageModel::make(*make_cpu_stream(), one, one.rank(0), 0, {.tp = &comm}, nullptr, nullptr, {});
    REQUIRE(!refused.ok());
    CHECK(refused.error().message.find("tp[0,1]") != std::string::npos);

    recipe.mesh.tp = 2;
    const Plan plan = plan_of(recipe);
    Rank rank(plan, 0, comm, draw_weights(plan));
    std::vector<float> out(12 * 65);
    const Status logits = rank.model().logits(0, out);
    REQUIRE(!logits.ok());
    CHECK(logits.error().code == ErrorCode::kUnsupported);
  }
}
