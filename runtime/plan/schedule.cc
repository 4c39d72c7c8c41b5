#include "runtime/plan/schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/core/check.h"
#include "runtime/core/count_text.h"

namespace cairn {
namespace {

int64_t group_size(const ScheduleShape& shape) {
  if (shape.kind != PipelineKind::kInterleaved) return shape.micro_batches;
  return shape.group > 0 ? shape.group : shape.pp;
}

/// Appends actions and numbers the micro-batches of each kind and chunk. Those from `micro_batches` on count and are
/// left out: a pattern made for more of them keeps its order.
class Lister {
 public:
  Lister(const ScheduleShape& shape, int64_t rank) : shape_(shape), rank_(rank) {
    for (auto& of_kind : next_) of_kind.assign(shape.chunks, 0);
    out_.reserve((splits_backward(shape.kind) ? 3 : 2) * shape.micro_batches * shape.chunks);
  }

  int64_t count(ActionKind kind, int64_t chunk) const { return next_[static_cast<int>(kind)][chunk]; }
  void add(ActionKind kind, int64_t chunk) {
    const int64_t micro_batch = next_[static_cast<int>(kind)][chunk]++;
    if (micro_batch >= shape_.micro_batches) return;
    // Nobody waits for the input's gradient of the first stage: its two halves are one action.
    if (kind == ActionKind::kBackwardWeight && stage_at(shape_, rank_, chunk) == 0 && !out_.empty() &&
        out_.back() == Action{ActionKind::kBackwardInput, micro_batch, chunk}) {
      out_.back().kind = ActionKind::kBackward;
      return;
    }
    out_.push_back({kind, micro_batch, chunk});
  }
  std::vector<Action> take() { return std::move(out_); }

 private:
  ScheduleShape shape_;
  int64_t rank_;
  std::vector<int64_t> next_[4];
  std::vector<Action> out_;
};

// The chunks of the forwards in order: groups of micro-batches, each through one chunk after the other.
std::vector<int64_t> forward_chunks(const ScheduleShape& shape) {
  std::vector<int64_t> out;
  out.reserve(shape.micro_batches * shape.chunks);
  const int64_t group = group_size(shape);
  for (int64_t begin = 0; begin < shape.micro_batches; begin += group) {
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      out.insert(out.end(), std::min(group, shape.micro_batches - begin), chunk);
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
    case PipelineKind::kZbH1:
      return std::min(shape.pp - rank - 1, all);
    case PipelineKind::kInterleaved:
      if (shape.micro_batches == shape.pp) return all;
      return std::min(2 * (shape.pp - rank - 1) + (shape.chunks - 1) * group_size(shape), all);
    case PipelineKind::kZbV:
      break;  // zb_v_order()
  }
  return all;
}

// Warm-up forwards, then each forward with a backward `warm_up` places behind it, which takes the chunks the other way
// round. ZB-H1 puts the weights' gradients `rank` micro-batches behind those of the inputs: as many as the rank holds
// fewer activations than the first one, so that no rank holds more than that one.
std::vector<Action> paired_order(const ScheduleShape& shape, int64_t rank) {
  const std::vector<int64_t> order = forward_chunks(shape);
  const auto all = static_cast<int64_t>(order.size());
  const int64_t warm_up = warm_up_forwards(shape, rank);
  const bool split = splits_backward(shape.kind);
  Lister list(shape, rank);
  for (int64_t k = 0; k < all + warm_up; ++k) {
    if (k < all) list.add(ActionKind::kForward, order[k]);
    if (k < warm_up) continue;
    const int64_t chunk = shape.chunks - 1 - order[k - warm_up];
    list.add(split ? ActionKind::kBackwardInput : ActionKind::kBackward, chunk);
    if (split && k - warm_up >= rank) list.add(ActionKind::kBackwardWeight, chunk);
  }
  while (split && list.count(ActionKind::kBackwardWeight, 0) < shape.micro_batches) {
    list.add(ActionKind::kBackwardWeight, 0);
  }
  return list.take();
}

// Rank r fills its time until the first micro-batch has gone down the V and come up again with 2 (pp - r) - 1 forwards
// of chunk 0 and `rank` pairs of forwards; from then on each period is a forward and a backward of both chunks.
// Weights' gradients follow at once but at the end, where they wait until the inputs' gradients have gone up the V.
std::vector<Action> zb_v_order(const ScheduleShape& shape, int64_t rank) {
  constexpr ActionKind F = ActionKind::kForward, I = ActionKind::kBackwardInput, W = ActionKind::kBackwardWeight;
  const int64_t pp = shape.pp, rest = pp - rank;
  const int64_t patterned = std::max(shape.micro_batches, 2 * pp - 1);  // fewer do not fill the pattern
  Lister list(shape, rank);
  for (int64_t k = 0; k < 2 * rest - 1; ++k) list.add(F, 0);
  for (int64_t k = 0; k < rank; ++k) {
    list.add(F, 1);
    list.add(F, 0);
  }
  for (int64_t k = 0; k < rest; ++k) {
    for (const ActionKind kind : {F, I, W}) list.add(kind, 1);
  }
  while (list.count(F, 1) < patterned) {
    if (list.count(F, 0) < patterned) list.add(F, 0);
    for (const ActionKind kind : {I, W}) list.add(kind, 0);
    for (const ActionKind kind : {F, I, W}) list.add(kind, 1);
  }
  for (int64_t k = 0; k < rank; ++k) {
    for (const int64_t chunk : {0, 1}) list.add(I, chunk);
  }
  for (int64_t k = 0; k < rest; ++k) {
    for (const ActionKind kind : {I, W}) list.add(kind, 0);
  }
  for (const int64_t chunk : {1, 0}) {
    while (list.count(W, chunk) < patterned) list.add(W, chunk);
  }
  return list.take();
}

std::vector<Action> unslotted_actions(const ScheduleShape& shape, int64_t rank) {
  return shape.kind == PipelineKind::kZbV ? zb_v_order(shape, rank) : paired_order(shape, rank);
}

/// What the chunks of a rank hold at once.
struct Held {
  std::vector<int64_t> in_flight, late;
};

Held most_held(const std::vector<Action>& actions, int64_t chunks) {
  std::vector<int64_t> in_flight(chunks, 0), late(chunks, 0);
  Held most{std::vector<int64_t>(chunks, 0), std::vector<int64_t>(chunks, 0)};
  for (const Action& a : actions) {
    const int64_t c = a.chunk;
    switch (a.kind) {
      case ActionKind::kForward:
        most.in_flight[c] = std::max(most.in_flight[c], ++in_flight[c]);
        break;
      case ActionKind::kBackwardInput:
        most.late[c] = std::max(most.late[c], ++late[c]);
        break;
      case ActionKind::kBackwardWeight:
        --late[c];
        [[fallthrough]];
      case ActionKind::kBackward:
        --in_flight[c];
        break;
    }
  }
  return most;
}

double time_of(ActionKind kind, const PassTimes& times) {
  switch (kind) {
    case ActionKind::kForward:
      return times.forward;
    case ActionKind::kBackward:
      return times.backward_input + times.backward_weight;
    case ActionKind::kBackwardInput:
      return times.backward_input;
    case ActionKind::kBackwardWeight:
      return times.backward_weight;
  }
  return 0;
}

double end_of(const std::vector<std::vector<TimedAction>>& timeline) {
  double end = 0;
  for (const auto& rank : timeline) end = std::max(end, rank.back().end);
  return end;
}

}  // namespace

ScheduleShape schedule_shape(const Recipe& recipe, int64_t micro_batches) {
  const MeshConfig& mesh = recipe.mesh;
  return {recipe.schedule, mesh.pp, micro_batches, mesh.virtual_stages, mesh.micro_batch_group};
}

const char* schedule_name(PipelineKind kind) {
  constexpr const char* kNames[] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};
  return kNames[static_cast<int>(kind)];
}

bool splits_backward(PipelineKind kind) { return kind == PipelineKind::kZbH1 || kind == PipelineKind::kZbV; }

int64_t stage_at(const ScheduleShape& shape, int64_t rank, int64_t chunk) {
  if (shape.kind == PipelineKind::kZbV) return chunk == 0 ? rank : 2 * shape.pp - 1 - rank;
  return chunk * shape.pp + rank;
}

StagePlace place_of(const ScheduleShape& shape, int64_t stage) {
  if (shape.kind == PipelineKind::kZbV && stage >= shape.pp) return {2 * shape.pp - 1 - stage, 1};
  return {stage % shape.pp, stage / shape.pp};
}

std::vector<Mistake> find_mistakes(const ScheduleShape& shape, const FieldNotes& notes) {
  std::vector<Mistake> out;
  const int64_t pp = shape.pp, m = shape.micro_batches;
  const bool interleaved = shape.kind == PipelineKind::kInterleaved, zb_v = shape.kind == PipelineKind::kZbV;
  if (interleaved && (pp < 2 || shape.chunks < 2)) {
    out.push_back({"schedule",
                   fmt::format("schedule = \"interleaved\" needs mesh.pp >= 2 and mesh.virtual_stages >= 2, got {} and "
                               "{}",
                               pp, shape.chunks),
                   pp < 2 ? "schedule = \"1f1b\"" : "virtual_stages 2, or schedule = \"1f1b\""});
  }
  if (zb_v && (pp < 2 || shape.chunks != 2)) {
    out.push_back({"schedule",
                   fmt::format("schedule = \"zb-v\" needs mesh.pp >= 2 and mesh.virtual_stages = 2, got {} and {}", pp,
                               shape.chunks),
                   pp < 2 ? "schedule = \"zb-h1\"" : "virtual_stages 2, or schedule = \"zb-h1\""});
  }
  if (!interleaved && !zb_v && shape.chunks != 1) {
    out.push_back(
        {"mesh.virtual_stages",
         fmt::format("mesh.virtual_stages = {} is for schedule = \"interleaved\" or \"zb-v\", and \"{}\" runs "
                     "one stage a rank",
                     shape.chunks, schedule_name(shape.kind)),
         "schedule = \"interleaved\" or \"zb-v\", or virtual_stages 1"});
  }
  if (!interleaved && shape.group != 0) {
    out.push_back({"mesh.micro_batch_group",
                   fmt::format("mesh.micro_batch_group = {} is for schedule = \"interleaved\", not \"{}\"", shape.group,
                               schedule_name(shape.kind)),
                   "schedule = \"interleaved\", or micro_batch_group 0"});
  }
  const int64_t group = group_size(shape);
  if (interleaved && group < pp) {
    out.push_back(
        {"mesh.micro_batch_group",
         fmt::format("mesh.micro_batch_group = {} is less than mesh.pp = {}{}: a group must fill the pipeline, "
                     "or its first rank waits for the last one",
                     group, pp, notes.where ? notes.where("mesh.micro_batch_group", "mesh.pp") : ""),
         fmt::format("micro_batch_group {} or more, or 0 for mesh.pp", pp)});
  }
  if (!interleaved || !out.empty() || m == 0) return out;
  // A group of fewer than pp would have to wait for its own way round the ranks.
  const auto fits = [&](int64_t count) { return count % group == 0 || count % group >= pp; };
  if (m >= 1 && fits(m)) return out;
  int64_t below = m - 1, above = std::max<int64_t>(1, m + 1);
  while (below > 0 && !fits(below)) --below;
  while (!fits(above)) ++above;
  const std::string accepted =
      fmt::format("{}{} a step", below > 0 ? fmt::format("{} or ", below) : "", count_text(above, "micro-batch"));
  out.push_back({"schedule",
                 shape.group == 0
                     ? fmt::format("schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = {}, and a "
                                   "step has {}",
                                   pp, m)
                     : fmt::format("schedule = \"interleaved\" takes micro-batches in groups of "
                                   "mesh.micro_batch_group = {}, the last one of at least mesh.pp = {}, and a step "
                                   "has {}",
                                   group, pp, m),
                 accepted});
  return out;
}

ScheduleShape long_enough(const ScheduleShape& shape) {
  if (shape.kind == PipelineKind::kGpipe) return shape;  // holds all of them
  const int64_t group = shape.kind == PipelineKind::kInterleaved ? group_size(shape) : 1;
  const int64_t enough = 2 * (steady_micro_batches(shape) + group - 1) / group * group;
  ScheduleShape out = shape;
  if (shape.micro_batches > enough) out.micro_batches = enough + (shape.micro_batches - enough) % group;
  return out;
}

std::vector<int64_t> in_flight_micro_batches(const ScheduleShape& shape, int64_t rank) {
  return most_held(unslotted_actions(long_enough(shape), rank), shape.chunks).in_flight;
}

std::vector<int64_t> late_micro_batches(const ScheduleShape& shape, int64_t rank) {
  if (!splits_backward(shape.kind)) return std::vector<int64_t>(shape.chunks, 0);
  return most_held(unslotted_actions(long_enough(shape), rank), shape.chunks).late;
}

std::vector<Action> schedule_actions(const ScheduleShape& shape, int64_t rank) {
  std::vector<Action> out = unslotted_actions(shape, rank);
  // Micro-batches begin and end in order, so those alive are neighbours and the remainder tells them apart.
  const Held most = most_held(out, shape.chunks);
  for (Action& a : out) {
    a.slot = a.micro_batch % most.in_flight[a.chunk];
    const bool half = a.kind == ActionKind::kBackwardInput || a.kind == ActionKind::kBackwardWeight;
    if (half) a.late = a.micro_batch % most.late[a.chunk];
  }
  return out;
}

std::vector<Action> forward_actions(const ScheduleShape& shape, int64_t rank) {
  std::vector<Action> out = unslotted_actions(shape, rank);
  std::erase_if(out, [](const Action& a) { return a.kind != ActionKind::kForward; });
  return out;
}

BoundaryBuffers boundary_buffers(const ScheduleShape& full) {
  const ScheduleShape shape = long_enough(full);
  // Neighbours are in step: each message is taken before its sender wants to send the next.
  if (shape.kind == PipelineKind::kGpipe || shape.kind == PipelineKind::k1F1B) return {};
  const auto timeline = simulate_schedule(shape, PassTimes{});
  RT_CHECK(timeline.ok(), "{}", timeline.error().message);
  const int64_t m = shape.micro_batches, stages = shape.pp * shape.chunks;
  // When an action of a stage and micro-batch begins: it takes what was sent to it.
  std::vector<double> forward(stages * m), backward(stages * m);
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    for (const TimedAction& timed : timeline.value()[rank]) {
      const int64_t at = stage_at(shape, rank, timed.action.chunk) * m + timed.action.micro_batch;
      if (timed.action.kind == ActionKind::kForward) {
        forward[at] = timed.begin;
      } else if (timed.action.kind != ActionKind::kBackwardWeight) {
        backward[at] = timed.begin;
      }
    }
  }
  BoundaryBuffers out{.rings = shape.kind == PipelineKind::kZbV ? 2 : 1};
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    for (int64_t ring = 0; ring < out.rings; ++ring) {
      // Until when each buffer of a send still under way is in use, per direction.
      std::vector<double> activations, gradients;
      const auto send = [](std::vector<double>& in_use, int64_t& most, double begin, double taken) {
        std::erase_if(in_use, [&](double until) { return until <= begin; });
        in_use.push_back(taken);
        most = std::max<int64_t>(most, std::ssize(in_use));
      };
      for (const TimedAction& timed : timeline.value()[rank]) {
        const Action& a = timed.action;
        const int64_t stage = stage_at(shape, rank, a.chunk);
        if (out.rings > 1 && a.chunk != ring) continue;
        if (a.kind == ActionKind::kForward && stage + 1 < stages) {
          send(activations, out.activations, timed.begin, forward[(stage + 1) * m + a.micro_batch]);
        } else if ((a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardInput) && stage > 0) {
          send(gradients, out.gradients, timed.begin, backward[(stage - 1) * m + a.micro_batch]);
        }
      }
    }
  }
  return out;
}

double bubble_fraction(const ScheduleShape& shape) {
  const int64_t pp = shape.pp, m = shape.micro_batches, v = shape.chunks;
  if (shape.kind == PipelineKind::kZbV && m < 2 * pp - 1) {  // the pattern is not full: no formula, and few actions
    const auto timeline = simulate_schedule(shape, PassTimes{});
    RT_CHECK(timeline.ok(), "{}", timeline.error().message);
    return 1 - static_cast<double>(3 * m * v) / end_of(timeline.value());
  }
  int64_t idle = 3 * (pp - 1);  // in units of one forward of a stage, of which a rank has 3 m v to do
  if (shape.kind == PipelineKind::kZbH1) idle = pp - 1 + std::max<int64_t>(0, pp - m);
  if (shape.kind == PipelineKind::kZbV) idle = pp - 1;
  return static_cast<double>(idle) / static_cast<double>(3 * m * v + idle);
}

int64_t steady_micro_batches(const ScheduleShape& shape) {
  switch (shape.kind) {
    case PipelineKind::kGpipe:  // all forwards, then all backwards: a line from the first on
      return 1;
    case PipelineKind::k1F1B:
    case PipelineKind::kZbH1:
      return shape.pp;
    case PipelineKind::kInterleaved:
      return 2 * group_size(shape);
    case PipelineKind::kZbV:
      return 2 * shape.pp - 1;
  }
  return 1;
}

Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape,
                                                                std::span<const PassTimes> times) {
  const int64_t pp = shape.pp, m = shape.micro_batches, stages = pp * shape.chunks;
  RT_CHECK(std::ssize(times) == stages, "times of {} stages for {}", times.size(), stages);
  std::vector<std::vector<Action>> lists;
  for (int64_t rank = 0; rank < pp; ++rank) lists.push_back(schedule_actions(shape, rank));
  std::vector<double> forward_end(stages * m, -1), backward_end(stages * m, -1);  // backward: of the input's gradient
  std::vector<std::vector<TimedAction>> out(pp);
  std::vector<double> now(pp, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < pp; ++rank) {
      while (out[rank].size() < lists[rank].size()) {
        const Action& action = lists[rank][out[rank].size()];
        const int64_t stage = stage_at(shape, rank, action.chunk), at = stage * m + action.micro_batch;
        double ready = 0;  // when what it needs is there; below 0: not yet
        if (action.kind == ActionKind::kForward) {
          if (stage > 0) ready = forward_end[at - m];
        } else if (action.kind == ActionKind::kBackwardWeight) {
          ready = backward_end[at];
        } else {
          ready = stage + 1 < stages ? backward_end[at + m] : forward_end[at];
        }
        if (ready < 0) break;
        const double begin = std::max(now[rank], ready);
        now[rank] = begin + time_of(action.kind, times[stage]);
        if (action.kind == ActionKind::kForward) {
          forward_end[at] = now[rank];
        } else if (action.kind != ActionKind::kBackwardWeight) {
          backward_end[at] = now[rank];
        }
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

Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape, const PassTimes& times) {
  return simulate_schedule(shape, std::vector<PassTimes>(static_cast<size_t>(shape.pp * shape.chunks), times));
}

}  // namespace cairn
