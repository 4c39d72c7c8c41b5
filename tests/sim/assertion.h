#pragma once
// In the simulator a failed RT_CHECK is a violation like another one: it ends a life, not the program.

#include <string>

namespace cairn::sim {

struct AssertionFailed {
  std::string what;
};

}  // namespace cairn::sim
