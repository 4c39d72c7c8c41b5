#include "runtime/plan/schedule.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn {
namespace {

struct Work {
  int64_t micro_batch, chunk;
};

// The forwards of a rank in order: groups of micro-batches, each through one chunk after the other.
std::vector<Work> forward_order(const ScheduleShape& shape) {
  std::vector<Work> out;
  out.reserve(shape.micro_batches * shape.chunks);
  const int64_t group = shape.kind == PipelineKind::kInterleaved ? shape.pp : shape.micro_batches;
  for (int64_t begin = 0; begin < shape.micro_batches; begin += group) {
    const int64_t end = std::min(begin + group, shape.micro_batches);
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (int64_t m = begin; m < end; ++m) out.push_back({m, chunk});
    }
  }
  return out;
}

int64_t warm_up_forwards(const ScheduleShape& shape, int64_t rank) {
  const int64_t all = shape.micro_batches * shape.chunks;
  switch (shape.kind) {
    case PipelineKind::kGpipe:
      return all;
    case PipelineKind::k1F1B:
      return std::min(shape.pp - rank - 1, all);
    case PipelineKind::kInterleaved:
      if (shape.micro_batches == shape.pp) return all;
      return std::min(2 * (shape.pp - rank - 1) + (shape.chunks - 1) * shape.pp, all);
  }
  return all;
}

}  // namespace

ScheduleShape schedule_shape(const Recipe& recipe, int64_t micro_batches) {
  const MeshConfig& mesh = recipe.mesh;
  return {recipe.schedule, mesh.pp, micro_batches, mesh.virtual_stages};
}

Status check_schedule(const ScheduleShape& shape) {
  const auto refuse = [](std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; };
  const int64_t pp = shape.pp, m = shape.micro_batches;
  if (shape.kind != PipelineKind::kInterleaved) {
    if (shape.chunks == 1) return {};
    return refuse(
        fmt::format("mesh.virtual_stages = {} is for schedule = \"interleaved\"; the schedule here runs one "
                    "stage a rank",
                    shape.chunks));
  }
  if (pp < 2 || shape.chunks < 2) {
    return refuse(
        fmt::format("schedule = \"interleaved\" needs mesh.pp >= 2 and mesh.virtual_stages >= 2, got {} and "
                    "{}; with one stage a rank it is \"1f1b\"",
                    pp, shape.chunks));
  }
  if (m % pp != 0) {
    return refuse(
        fmt::format("schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = {}, and a step has "
                    "{}; nearest: {}{}",
                    pp, m, m > pp ? fmt::format("{}, ", m / pp * pp) : "", (m / pp + 1) * pp));
  }
  return {};
}

std::vector<int64_t> in_flight_micro_batches(const ScheduleShape& shape, int64_t rank) {
  if (shape.kind == PipelineKind::kGpipe) return {shape.micro_batches};
  if (shape.kind == PipelineKind::k1F1B) return {std::min(shape.pp - rank, shape.micro_batches)};
  std::vector<int64_t> now(shape.chunks, 0), most(shape.chunks, 1);
  const std::vector<Work> order = forward_order(shape);
  const auto all = static_cast<int64_t>(order.size());
  const int64_t warm_up = warm_up_forwards(shape, rank);
  for (int64_t k = 0; k < all + warm_up; ++k) {  // the k-th forward, then the backward `warm_up` places behind it
    if (k < all) {
      const int64_t chunk = order[k].chunk;
      most[chunk] = std::max(most[chunk], ++now[chunk]);
    }
    if (k >= warm_up) --now[shape.chunks - 1 - order[k - warm_up].chunk];
  }
  return most;
}

std::vector<Action> schedule_actions(const ScheduleShape& shape, int64_t rank) {
  const std::vector<Work> order = forward_order(shape);
  const auto all = static_cast<int64_t>(order.size());
  const int64_t warm_up = warm_up_forwards(shape, rank);
  const std::vector<int64_t> slots = in_flight_micro_batches(shape, rank);
  std::vector<Action> out;
  out.reserve(2 * order.size());
  for (int64_t k = 0; k < all + warm_up; ++k) {
    if (k < all) {
      const auto [micro_batch, chunk] = order[k];
      out.push_back({ActionKind::kForward, micro_batch, chunk, micro_batch % slots[chunk]});
    }
    if (k >= warm_up) {  // backwards take the chunks the other way round
      const int64_t micro_batch = order[k - warm_up].micro_batch;
      const int64_t chunk = shape.chunks - 1 - order[k - warm_up].chunk;
      out.push_back({ActionKind::kBackward, micro_batch, chunk, micro_batch % slots[chunk]});
    }
  }
  return out;
}

std::vector<Action> forward_actions(const ScheduleShape& shape) {
  std::vector<Action> out;
  for (const Work& work : forward_order(shape)) out.push_back({ActionKind::kForward, work.micro_batch, work.chunk, 0});
  return out;
}

double bubble_fraction(const ScheduleShape& shape) {
  const auto idle = static_cast<double>(shape.pp - 1);
  return idle / (static_cast<double>(shape.micro_batches * shape.chunks) + idle);
}

Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape, double forward,
                                                                double backward) {
  const int64_t pp = shape.pp, m = shape.micro_batches, stages = pp * shape.chunks;
  std::vector<std::vector<Action>> lists;
  for (int64_t rank = 0; rank < pp; ++rank) lists.push_back(schedule_actions(shape, rank));
  std::vector<double> forward_end(stages * m, -1), backward_end(stages * m, -1);
  std::vector<std::vector<TimedAction>> out(pp);
  std::vector<double> now(pp, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < pp; ++rank) {
      while (out[rank].size() < lists[rank].size()) {
        const Action& action = lists[rank][out[rank].size()];
        const int64_t stage = action.chunk * pp + rank;
        const bool is_forward = action.kind == ActionKind::kForward;
        double ready = 0;  // when what it needs is there; below 0: not yet
        if (is_forward && stage > 0) ready = forward_end[(stage - 1) * m + action.micro_batch];
        if (!is_forward) {
          ready = stage + 1 < stages ? backward_end[(stage + 1) * m + action.micro_batch]
                                     : forward_end[stage * m + action.micro_batch];
        }
        if (ready < 0) break;
        const double begin = std::max(now[rank], ready);
        now[rank] = begin + (is_forward ? forward : backward);
        (is_forward ? forward_end : backward_end)[stage * m + action.micro_batch] = now[rank];
        out[rank].push_back({action, begin, now[rank]});
        moved = true;
      }
    }
  }
  for (int64_t rank = 0; rank < pp; ++rank) {
    if (out[rank].size() != lists[rank].size()) {
      return Error{ErrorCode::kInternal, fmt::format("pipeline rank {} waits for ever before action {} of {}", rank,
                                                     out[rank].size(), lists[rank].size())};
    }
  }
  return out;
}

}  // namespace cairn
