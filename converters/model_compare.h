#pragma once
// Whether two ModelConfigs are one model: the same can be said in several ways (a bias for all projections or for each
// group, no rotary channels set or all of them).

#include <string>
#include <vector>

#include "runtime/config/model.h"

namespace cairn::convert {

/// The model in the one way of saying it that import uses: what is not read is unset, what is derived is left out.
ModelConfig canonical(ModelConfig model);

/// "field = value in `wanted`" for every field that differs, empty when they are one model. Both canonical.
std::vector<std::string> differing_fields(const ModelConfig& found, const ModelConfig& wanted);

}  // namespace cairn::convert
