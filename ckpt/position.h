#pragma once
// Where training stands, as text: in snapshot headers (all of it) and in manifests (numbers of their own, the rest in
// Manifest::state).

#include <cstdint>
#include <string>
#include <string_view>

#include "ckpt/format/manifest.h"
#include "runtime/core/result.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::ckpt {

/// JSON object, keys sorted. A loss or rate that is no number is written as null and read back as NaN.
std::string encode_position(const trainer::TrainPosition& position);
/// The same without the metrics where it would be longer than `most_bytes`: with many sources a report may be lost, a
/// state not.
std::string encode_position(trainer::TrainPosition position, int64_t most_bytes);
/// Errors: kCorrupt naming the field.
Result<trainer::TrainPosition> decode_position(std::string_view text);

/// Of a position alone: what an agent hands to its ranks.
std::string encode_past(const RunPast& past);
/// Errors: kCorrupt naming the field.
Result<RunPast> decode_past(std::string_view text);

/// Fills step, samples, tokens and state.
void put_position(const trainer::TrainPosition& position, Manifest& manifest);
/// Errors: kCorrupt naming the field. A state without sampler (imported weights) gives an empty one: from the start.
Result<trainer::TrainPosition> position_of(const Manifest& manifest);

}  // namespace cairn::ckpt
