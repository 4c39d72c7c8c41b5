#include "tools/run/hosts/host_wire.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "runtime/kernels/isa.h"

namespace cairn::tools {
namespace {

static_assert(hosts::kMostSlots == ckpt::arena::kMaxSlots);

hosts::Operation to_wire(const comm::OperationView& view) {
  return {.inside = view.inside,
          .operations = view.operations,
          .awaits = view.awaits,
          .since_ms = view.since_ms,
          .text = view.text};
}

void take(const hosts::Operation& from, comm::OperationView& view) {
  view.inside = from.inside;
  view.operations = std::max<int64_t>(0, from.operations);
  view.awaits = std::max<int64_t>(-1, from.awaits);
  view.since_ms = std::max<int64_t>(0, from.since_ms);
  view.text = from.text;
}

}  // namespace

hosts::Slot to_wire(const ckpt::WholeSlot& slot) { return {slot.slot, slot.incarnation, slot.step}; }
ckpt::WholeSlot from_wire(const hosts::Slot& slot) { return {slot.slot, slot.incarnation, slot.step}; }

std::vector<hosts::Slot> to_wire(const std::vector<ckpt::WholeSlot>& slots) {
  std::vector<hosts::Slot> out;
  for (const ckpt::WholeSlot& slot : slots) out.push_back(to_wire(slot));
  return out;
}
std::vector<ckpt::WholeSlot> from_wire(const std::vector<hosts::Slot>& slots) {
  std::vector<ckpt::WholeSlot> out;
  for (const hosts::Slot& slot : slots) out.push_back(from_wire(slot));
  return out;
}

hosts::Memory to_wire(const ckpt::HostMemory& memory) { return {memory.incarnation, to_wire(memory.whole)}; }
ckpt::HostMemory from_wire(const hosts::Memory& memory) { return {memory.incarnation, from_wire(memory.whole)}; }

hosts::Resume to_wire(const ckpt::RestoreChoice& choice) {
  using Source = hosts::Resume::Source;
  return {.incarnation = choice.incarnation,
          .source = choice.source == ckpt::arena::Source::kMemory ? Source::kMemory
                    : choice.source == ckpt::arena::Source::kDisk ? Source::kDisk
                                                                  : Source::kFresh,
          .step = choice.step,
          .slot = choice.slot,
          .slot_incarnation = choice.slot_incarnation,
          .dir = choice.dir.string(),
          .init = choice.match.has_value(),
          .foreign = choice.foreign,
          .starts = {},
          .promised = {},
          .peers = {}};
}

Result<ckpt::RestoreChoice> from_wire(const hosts::Resume& order) {
  using Source = hosts::Resume::Source;
  if (order.kernel_level >= std::ssize(kernels::kGemmIsas))
    return Error{ErrorCode::kCorrupt,
                 fmt::format("the leader orders instructions {}, which are unknown", order.kernel_level)};
  ckpt::RestoreChoice out{.incarnation = order.incarnation,
                          .source = order.source == Source::kMemory ? ckpt::arena::Source::kMemory
                                    : order.source == Source::kDisk ? ckpt::arena::Source::kDisk
                                                                    : ckpt::arena::Source::kFresh,
                          .step = order.step,
                          .slot = order.slot,
                          .slot_incarnation = order.slot_incarnation,
                          .dir = order.dir,
                          .foreign = order.foreign};
  if (order.init) out.match.emplace();
  return out;
}

hosts::Failure to_wire(const agent::Failure& failure) {
  return {.rank = failure.rank,
          .exit_code = failure.status.exit_code,
          .signal = failure.status.signal,
          .hang = failure.hang,
          .message = failure.message,
          .failure_class = std::string(agent::rule_of(failure.failure_class).name),
          .pid = failure.pid,
          .seen_ns = failure.seen_ns,
          .last_lines = failure.last_lines};
}

agent::Failure from_wire(const hosts::Failure& failure) {
  agent::Failure out{.rank = failure.rank, .hang = failure.hang};
  out.status.exit_code = static_cast<int>(failure.exit_code);
  out.status.signal = static_cast<int>(failure.signal);
  out.message = failure.message;
  out.pid = failure.pid;
  out.seen_ns = failure.seen_ns;
  out.failure_class = agent::class_named(failure.failure_class).value_or(agent::classify(out.status, out.pid, {}));
  out.last_lines = failure.last_lines;
  return out;
}

std::vector<hosts::RankState> to_wire(const std::vector<agent::RankState>& ranks) {
  std::vector<hosts::RankState> out;
  for (const agent::RankState& rank : ranks) {
    out.push_back({.rank = rank.rank,
                   .state = std::string(1, rank.state),
                   .own = to_wire(static_cast<const comm::OperationView&>(rank.view)),
                   .beside = to_wire(rank.view.beside),
                   .pid = rank.view.pid,
                   .closed = rank.view.closed,
                   .step = rank.view.step,
                   .phase = rank.view.phase,
                   .description = rank.view.description});
  }
  return out;
}

std::vector<agent::RankState> from_wire(const std::vector<hosts::RankState>& ranks) {
  std::vector<agent::RankState> out;
  for (const hosts::RankState& one : ranks) {
    agent::RankState& rank = out.emplace_back(agent::RankState{.rank = one.rank});
    rank.state = one.state.empty() ? '?' : one.state.front();
    take(one.own, rank.view);
    take(one.beside, rank.view.beside);
    rank.view.pid = std::max<int64_t>(0, one.pid);
    rank.view.closed = one.closed;
    rank.view.step = std::max<int64_t>(-1, one.step);
    rank.view.phase = one.phase;
    rank.view.description = one.description;
  }
  return out;
}

}  // namespace cairn::tools
