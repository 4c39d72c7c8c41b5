#pragma once
// How long each op of a rank's steps took (runtime/device/op_clock.h): as JSON for programs, as a table for people.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/device/op_clock.h"

namespace cairn::telemetry {

struct KernelTimes {
  int64_t rank = 0;
  std::string device;  // device_name() of where it trained
  OpTimes times;
};

/// {"rank", "device", "steps", "left_out", "steps_ms", "gaps_ms", "ops": [{"op", "sizes", "words", "calls", "ms"},
/// ...]}; times are of all steps together, and in milliseconds.
nlohmann::json to_json(const KernelTimes& of);
/// Errors: kCorrupt, naming the field that is missing or ill-typed.
Result<KernelTimes> kernel_times_from_json(const nlohmann::json& from);

/// Lines of the table: a head, the longest ops, the others together, the gaps, the step. Without a step that counts
/// one line, which says so.
std::vector<std::string> table_of(const KernelTimes& of);

}  // namespace cairn::telemetry
