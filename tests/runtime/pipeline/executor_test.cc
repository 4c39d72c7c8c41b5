// The executor on ranks that are threads, with stages that compute nothing and let simulated time go by: messages carry
// the clock, so what each rank does when is exact and does not depend on the machine.

#include "runtime/pipeline/executor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <thread>

#include "runtime/comm/thread_world.h"
#include "runtime/plan/boundary.h"
#include "tests/runtime/pipeline/stand_in.h"

using namespace cairn;
using namespace cairn::pipeline;
using namespace cairn::pipeline::testing;

namespace {

constexpr int64_t kStamps = 25;  // of a boundary tensor of 6000 bytes: in every part of it

/// A group whose receives can be ordered ahead, as a device's. A message that was asked for may come at any time: its
/// buffer is spoilt at once.
class EarlyComm final : public comm::Comm, public comm::EarlyReceiver {
 public:
  /// `now`: actions that have run. `asked` gets that number with each message that is asked for ahead.
  EarlyComm(std::unique_ptr<comm::Comm> inner, std::function<size_t()> now, std::vector<size_t>& asked)
      : inner_(std::move(inner)), now_(std::move(now)), asked_(asked) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  Status all_reduce(void* data, int64_t count, DType dtype, comm::ReduceOp op, std::string_view what) override {
    return inner_->all_reduce(data, count, dtype, op, what);
  }
  Status reduce_scatter(const void* input, void* output, int64_t count, DType dtype, comm::ReduceOp op,
                        std::string_view what) override {
    return inner_->reduce_scatter(input, output, count, dtype, op, what);
  }
  Status reduce_scatter_add(const void* input, void* output, int64_t count, DType dtype, int64_t tree,
                            std::string_view what) override {
    return inner_->reduce_scatter_add(input, output, count, dtype, tree, what);
  }
  Status all_gather(const void* input, void* output, int64_t bytes, std::string_view what) override {
    return inner_->all_gather(input, output, bytes, what);
  }
  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    return inner_->broadcast(data, bytes, root, what);
  }
  Status all_to_all(std::span<const comm::OutPart> out, std::span<const comm::InPart> in,
                    std::string_view what) override {
    return inner_->all_to_all(out, in, what);
  }
  Status barrier(std::string_view what) override { return inner_->barrier(what); }
  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    return inner_->isend(data, bytes, dst, what);
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    RT_CHECK(early_.empty(), "a message is received before one that was asked for ahead");
    return inner_->recv(data, bytes, src, what);
  }
  Status wait_sends(std::string_view what) override { return inner_->wait_sends(what); }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    return inner_->wait_sends_to(dst, may_stay, what);
  }
  Traffic traffic() const override { return inner_->traffic(); }

  Status receive_early(DevicePtr<void> data, int64_t bytes, int64_t src, std::string_view) override {
    std::memset(address_of(data), 0xff, static_cast<size_t>(bytes));
    early_.push_back({address_of(data), bytes, src});
    asked_.push_back(now_());
    return {};
  }
  Status take_early(int64_t src, std::string_view what) override {
    RT_CHECK(!early_.empty() && early_.front().src == src);
    const Early message = early_.front();
    early_.pop_front();
    return inner_->recv(message.data, message.bytes, src, what);
  }

 private:
  struct Early {
    void* data;
    int64_t bytes, src;
  };
  const std::unique_ptr<comm::Comm> inner_;
  const std::function<size_t()> now_;
  std::vector<size_t>& asked_;
  std::deque<Early> early_;
};

struct Ran {
  std::vector<std::string> failures;  // of each rank; "" is none
  std::vector<std::vector<TimedAction>> timeline;
  std::vector<int64_t> losses;             // micro-batches in the order the last stage told them
  std::vector<int64_t> sent;               // bytes, by each rank
  std::vector<std::vector<size_t>> asked;  // by rank: actions that had run when each message was asked for ahead
};

/// One step, or one evaluation, of the schedule by `tp` pipelines whose ranks of a stage hold the same: timeline and
/// losses of the pipeline of tp rank 0; failures of all.
Ran run(const ScheduleShape& shape, const PassTimes& times, int64_t boundary_bytes, bool train, int64_t tp = 1,
        bool early = false) {
  comm::ShmWorldConfig config;
  config.world_size = shape.pp * tp;
  config.channel_bytes = 1024;  // what is sent is larger: a send is under way until its receiver takes it
  comm::ThreadWorld world(config, {.deadline_ms = 20000});
  std::vector<int32_t> numbers(shape.micro_batches);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::vector<MicroBatch> batches;
  for (const int32_t& number : numbers) batches.push_back({&number, &number});

  Ran out{.failures = std::vector<std::string>(config.world_size),
          .timeline = std::vector<std::vector<TimedAction>>(shape.pp),
          .sent = std::vector<int64_t>(config.world_size),
          .asked = std::vector<std::vector<size_t>>(config.world_size)};
  const BoundaryTensor tensor = cut_boundary(boundary_bytes, tp);
  const auto body = [&](int64_t rank, int64_t tp_rank) -> Status {
    std::vector<int64_t> pipeline, stage;
    for (int64_t p = 0; p < shape.pp; ++p) pipeline.push_back(p * tp + tp_rank);
    for (int64_t t = 0; t < tp; ++t) stage.push_back(rank * tp + t);
    const auto engine = world.engine(rank * tp + tp_rank);
    RT_TRY_SET(std::unique_ptr<comm::Comm> activations, engine->group("pp", pipeline));
    RT_TRY_SET(std::unique_ptr<comm::Comm> gradients, engine->group("pp back", pipeline));
    RT_TRY_SET(const auto tp_group, engine->group("tp", stage));
    RankClock clock{.pass = [&](RankClock& c, ActionKind kind, double ready) {
      c.now = std::max(c.now, ready) + (kind == ActionKind::kForward         ? times.forward
                                        : kind == ActionKind::kBackwardInput ? times.backward_input
                                        : kind == ActionKind::kBackwardWeight
                                            ? times.backward_weight
                                            : times.backward_input + times.backward_weight);
    }};
    if (early) {
      const auto ran = [&clock] { return clock.timeline.size(); };
      for (std::unique_ptr<comm::Comm>* const of : {&activations, &gradients}) {
        *of = std::make_unique<EarlyComm>(std::move(*of), ran, out.asked[rank * tp + tp_rank]);
      }
    }
    std::vector<std::unique_ptr<StandIn>> models;
    std::vector<nn::StageModel*> chunks;
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      models.push_back(std::make_unique<StandIn>(shape, rank, chunk, boundary_bytes, clock, kStamps));
      chunks.push_back(models.back().get());
    }
    std::vector<std::byte> buffers((boundary_buffers(shape).total() + (early ? kEarlyBuffers : 0)) *
                                   tensor.room_bytes());
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    Executor executor(*stream, shape, tensor, chunks, *activations, *gradients, *tp_group,
                      {DevicePtr(buffers.data()), std::ssize(buffers)});
    const auto on_losses = [&](int64_t micro_batch, std::span<const float> losses) {
      RT_CHECK(losses[0] == static_cast<float>(micro_batch));
      if (tp_rank == 0) out.losses.push_back(micro_batch);  // one rank of it has the last stage
    };
    if (train) {
      RT_TRY(executor.train(batches, 1.0f));
      RT_CHECK(stream->settled() == 0);  // the step's one wait is the caller's
      RT_TRY(stream->settle());
      executor.tell_losses(on_losses);
    } else {
      RT_TRY(executor.evaluate(batches, on_losses));
    }
    if (tp_rank == 0) out.timeline[rank] = std::move(clock.timeline);
    out.sent[rank * tp + tp_rank] = activations->traffic().send.bytes + gradients->traffic().send.bytes;
    return activations->barrier("end");
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < config.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const Status status = body(rank / tp, rank % tp);
      if (!status.ok()) out.failures[rank] = status.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

std::vector<ScheduleShape> shapes() {
  std::vector<ScheduleShape> out;
  for (const int64_t pp : {2, 3, 8}) {
    for (const int64_t m : pp < 8 ? std::vector<int64_t>{1, 2 * pp + 1} : std::vector<int64_t>{9}) {
      out.push_back({PipelineKind::kGpipe, pp, m});
      out.push_back({PipelineKind::k1F1B, pp, m});
      out.push_back({PipelineKind::kZbH1, pp, m});
      out.push_back({PipelineKind::kZbV, pp, m, 2});
    }
    out.push_back({PipelineKind::kInterleaved, pp, pp < 8 ? 3 * pp : pp, 2});
    if (pp == 8) continue;
    out.push_back({PipelineKind::kInterleaved, pp, 2 * pp + 1, 2, pp + 1});  // a short last group of pp
    out.push_back({PipelineKind::kInterleaved, pp, 2 * pp, 3, 2 * pp});
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/pipeline/executor") {
  TEST_CASE("every rank does each action exactly when the simulation says, whatever the passes take") {
    for (const ScheduleShape& shape : shapes()) {
      REQUIRE(find_mistakes(shape).empty());
      for (const PassTimes& times : {PassTimes{1, 1, 1}, PassTimes{2, 3, 1}}) {
        CAPTURE(schedule_name(shape.kind));
        CAPTURE(shape.pp);
        CAPTURE(shape.micro_batches);
        CAPTURE(shape.group);
        const Ran ran = run(shape, times, 6000, true);
        for (const std::string& failure : ran.failures) CHECK(failure == "");
        const auto wanted = simulate_schedule(shape, times).value();
        for (int64_t rank = 0; rank < shape.pp; ++rank) {
          REQUIRE(ran.timeline[rank].size() == wanted[rank].size());
          for (size_t k = 0; k < wanted[rank].size(); ++k) {
            REQUIRE(ran.timeline[rank][k].action == wanted[rank][k].action);
            REQUIRE(ran.timeline[rank][k].begin == wanted[rank][k].begin);
            REQUIRE(ran.timeline[rank][k].end == wanted[rank][k].end);
          }
        }
        CHECK(std::ssize(ran.losses) == shape.micro_batches);
        CHECK(std::ranges::is_sorted(ran.losses));
      }
    }
  }

  TEST_CASE("a group that can is asked for each message while the action before it runs, into a buffer that is free") {
    for (const ScheduleShape& shape : shapes()) {
      for (const bool train : {true, false}) {
        for (const int64_t tp : {1, 2}) {
          if (shape.pp > 3 && tp > 1) continue;
          CAPTURE(schedule_name(shape.kind));
          CAPTURE(shape.pp);
          CAPTURE(shape.micro_batches);
          CAPTURE(train);
          CAPTURE(tp);
          const Ran ran = run(shape, {2, 3, 1}, 6000, train, tp, true);
          for (const std::string& failure : ran.failures) CHECK(failure == "");
          for (int64_t rank = 0; rank < shape.pp; ++rank) {
            const auto actions = train ? schedule_actions(shape, rank) : forward_actions(shape, rank);
            std::vector<size_t> wanted;  // each action but the first that takes what another rank sends
            for (size_t k = 1; k < actions.size(); ++k) {
              if (actions[k].kind == ActionKind::kBackwardWeight) continue;
              const int64_t stage = stage_at(shape, rank, actions[k].chunk);
              const int64_t from = actions[k].kind == ActionKind::kForward ? stage - 1 : stage + 1;
              if (from < 0 || from == shape.pp * shape.chunks || place_of(shape, from).rank == rank) continue;
              wanted.push_back(k - 1);
            }
            CHECK(ran.asked[rank * tp] == wanted);
          }
        }
      }
    }
  }

  TEST_CASE("evaluation runs each forward once and tells every loss in order") {
    for (const ScheduleShape& shape : shapes()) {
      CAPTURE(schedule_name(shape.kind));
      CAPTURE(shape.pp);
      CAPTURE(shape.micro_batches);
      const Ran ran = run(shape, {}, 6000, false);
      for (const std::string& failure : ran.failures) CHECK(failure == "");
      std::vector<int64_t> all(shape.micro_batches);
      std::iota(all.begin(), all.end(), 0);
      CHECK(ran.losses == all);
      for (const auto& rank : ran.timeline) CHECK(std::ssize(rank) == shape.micro_batches * shape.chunks);
    }
  }

  TEST_CASE(
      "what tp ranks hold alike is sent in parts and gathered, at the same times; what stays on a rank is not cut") {
    constexpr int64_t kBytes = 6000, kTp = 3;  // parts of 2048 bytes: 144 more than there are
    for (const ScheduleShape& shape : shapes()) {
      if (shape.pp > 3) continue;
      CAPTURE(schedule_name(shape.kind));
      CAPTURE(shape.pp);
      CAPTURE(shape.micro_batches);
      const Ran whole = run(shape, {2, 3, 1}, kBytes, true), parts = run(shape, {2, 3, 1}, kBytes, true, kTp);
      for (const std::string& failure : parts.failures) CHECK(failure == "");
      for (int64_t rank = 0; rank < shape.pp; ++rank) {
        REQUIRE(parts.timeline[rank].size() == whole.timeline[rank].size());
        for (size_t k = 0; k < whole.timeline[rank].size(); ++k) {
          REQUIRE(parts.timeline[rank][k].action == whole.timeline[rank][k].action);
          REQUIRE(parts.timeline[rank][k].end == whole.timeline[rank][k].end);
        }
        int64_t cut = 0, all = 0;  // boundaries that this rank's tensors pass
        for (int64_t stage = 0; stage + 1 < shape.pp * shape.chunks; ++stage) {
          const bool stays = place_of(shape, stage).rank == place_of(shape, stage + 1).rank;
          for (const int64_t sender : {place_of(shape, stage).rank, place_of(shape, stage + 1).rank}) {
            if (sender == rank) ++(stays ? all : cut);
          }
        }
        CHECK(whole.sent[rank] == shape.micro_batches * (cut + all) * kBytes);
        for (int64_t t = 0; t < kTp; ++t) {
          CHECK(parts.sent[rank * kTp + t] == shape.micro_batches * (cut * 2048 + all * kBytes));
        }
      }
      const Ran evaluated = run(shape, {}, kBytes, false, kTp);
      for (const std::string& failure : evaluated.failures) CHECK(failure == "");
      CHECK(std::ssize(evaluated.losses) == shape.micro_batches);
    }
  }

  TEST_CASE("a pipeline of one rank needs no buffers and sends nothing") {
    const Ran ran = run({PipelineKind::kZbH1, 1, 4}, {}, 64, true);
    CHECK(ran.failures[0] == "");
    CHECK(ran.timeline[0].size() == 8);
    CHECK(ran.timeline[0].back().end == 12);
  }
}
