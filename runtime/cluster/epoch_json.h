#pragma once
// An epoch as JSON: of its record and of a leader's welcome.

#include <nlohmann/json_fwd.hpp>

#include "runtime/cluster/epoch_store.h"

namespace cairn::cluster {

nlohmann::json encode_epoch(const Epoch& epoch);
/// Errors: kCorrupt naming the key.
Result<Epoch> decode_epoch(const nlohmann::json& from);

}  // namespace cairn::cluster
