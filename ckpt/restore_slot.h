#pragma once
// Loads a checkpoint into snapshot memory. One process of the host, the agent, reads each byte once, for any saved
// layout and any number of ranks; on several hosts each reads what its own ranks save. What a rank saves then lies in
// its bank already; replicas are copied from there. Ranks that read for themselves would read replicas once each, and
// the chunks at the edges of their boxes once per neighbour.

#include <cstdint>
#include <filesystem>
#include <span>

#include "ckpt/persist/read.h"
#include "ckpt/snapshot/arena.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"
#include "runtime/device/device_link.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

struct SlotLoad {
  trainer::TrainPosition position;  // with how.weights_only the beginning of a run
  ReadStats stats;
};

/// Agent, while no rank runs and the slot is empty: fills `slot` of all ranks of this host from the checkpoint in
/// `dir`, verifying each chunk, and publishes it as a snapshot of its step. `arena` is of `plan`. `how` may take a part
/// of the checkpoint (plan/partial.h): weights that are not taken are as a fresh run's, moments zero; those are zero
/// too where the plan's past says that they begin (moments_begin). Killed in the middle, it leaves an empty slot.
/// Errors: kInvalidInput when the checkpoint does not fit, kCorrupt naming the chunk; the slot is empty then.
/// `buffers`: kept memory for payload to pass through; may be null.
Result<SlotLoad> load_slot(const Plan& plan, const Arena& arena, int64_t slot, uint64_t incarnation, IoBackend& io,
                           const std::filesystem::path& dir, const InitConfig& how = {},
                           BufferStore* buffers = nullptr);

/// Rank: fills `state`, which others save and no bank of this host has, from the checkpoint that filled the slots.
/// Errors: as of load_slot().
Status load_state(const Plan& plan, IoBackend& io, const std::filesystem::path& dir, const InitConfig& how,
                  std::span<const trainer::StateTensor> state, DeviceLink& link);

}  // namespace cairn::ckpt
