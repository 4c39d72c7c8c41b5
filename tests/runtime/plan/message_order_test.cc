#include "runtime/plan/message_order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <utility>

using namespace cairn;

namespace {

template <typename Body>
void for_each_shape(const Body& body) {
  for (const PipelineKind kind : {PipelineKind::kGpipe, PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                  PipelineKind::kZbH1, PipelineKind::kZbV}) {
    for (int64_t pp = 2; pp <= 6; ++pp) {
      for (int64_t micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (int64_t chunks = 1; chunks <= 3; ++chunks) {
          for (int64_t group = 0; group <= (kind == PipelineKind::kInterleaved ? 8 : 0); ++group) {
            const ScheduleShape shape{kind, pp, micro_batches, chunks, group};
            if (find_mistakes(shape).empty()) body(shape);
          }
        }
      }
    }
  }
}

std::vector<std::vector<MessageCall>> all_calls(const ScheduleShape& shape, bool training = true) {
  std::vector<std::vector<MessageCall>> out;
  for (int64_t rank = 0; rank < shape.pp; ++rank) out.push_back(message_calls(shape, rank, training));
  return out;
}

}  // namespace

TEST_SUITE("runtime/plan/message_order") {
  TEST_CASE("one message of a direction under way is enough, but for groups of micro-batches larger than pp") {
    int shapes = 0, more = 0;
    for_each_shape([&](const ScheduleShape& shape) {
      CAPTURE(schedule_name(shape.kind));
      CAPTURE(shape.pp);
      CAPTURE(shape.micro_batches);
      CAPTURE(shape.chunks);
      CAPTURE(shape.group);
      ++shapes;
      const int64_t ways = message_ways(shape);
      const BoundaryBuffers buffers = boundary_buffers(shape);
      CHECK(ways <= std::max(buffers.activations, buffers.gradients));
      CHECK(messages_end(all_calls(shape), ways));
      CHECK(messages_end(all_calls(shape, false), ways));
      CHECK(message_ways(long_enough(shape)) == ways);
      if (ways == 1) return;
      ++more;
      CHECK((shape.kind == PipelineKind::kInterleaved && shape.group > shape.pp));
      CHECK_FALSE((messages_end(all_calls(shape), ways - 1) && messages_end(all_calls(shape, false), ways - 1)));
    });
    CHECK(shapes > 500);
    CHECK(more > 100);
  }

  TEST_CASE("ranks that ask in another order than their schedule's wait for ever") {
    int shapes = 0, stuck = 0;
    for_each_shape([&](const ScheduleShape& shape) {
      ++shapes;
      const int64_t ways = message_ways(shape);
      auto calls = all_calls(shape);
      // A rank waits for the answer to what it has not sent yet.
      for (std::vector<MessageCall>& of : calls) {
        for (size_t k = 0; k + 1 < of.size(); ++k) {
          if (of[k].sends && !of[k + 1].sends) std::swap(of[k], of[k + 1]), ++k;
        }
      }
      stuck += messages_end(calls, ways) ? 0 : 1;
    });
    CHECK(stuck > shapes / 2);
  }

  TEST_CASE("of a batch that grows the largest need counts") {
    Recipe recipe;
    recipe.name = "ways";
    recipe.stop = {Span::Unit::kSteps, 10};
    recipe.model = {
        .layers = 8, .width = 32, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64, .context = 16, .vocab = 64};
    recipe.batch = {.samples = 4, .micro = 1};
    recipe.mesh.pp = 2;
    CHECK(message_ways(make_plan(recipe, 2).value()) == 1);
    recipe.schedule = PipelineKind::kInterleaved;
    recipe.mesh.virtual_stages = 2;
    CHECK(message_ways(make_plan(recipe, 2).value()) == 1);
    recipe.mesh.micro_batch_group = 4;
    CHECK(message_ways(make_plan(recipe, 2).value()) > 1);
  }
}
