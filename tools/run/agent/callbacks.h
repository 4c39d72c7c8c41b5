#pragma once
// How the parts of a run's agent tell what happens.

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace cairn::tools {

struct RunCallbacks {
  std::function<void(const std::string&)> say;        // to the person
  std::function<void(const nlohmann::json&)> record;  // to events.jsonl
};

}  // namespace cairn::tools
