#pragma once
// What a model of a type that no family reads would need and Cairn does not compute: state-space layers, linear
// attention, ... By the keys of its config.json, and by its type where no key says it.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace cairn::convert {

/// "state-space layers (mamba_d_state = 128)", ..., each once, with the key that shows it; those of `text_config`,
/// which wrappers of several kinds of input have, among them. Empty: no key names one. docs/families.md has the list.
std::vector<std::string> missing_mechanisms(const nlohmann::json& config);

}  // namespace cairn::convert
