#pragma once
// A session with the weights that training begins with.

#include <doctest/doctest.h>

#include <memory>
#include <utility>

#include "runtime/inference/session.h"
#include "runtime/trainer/initial.h"
#include "tests/support/ok.h"

namespace cairn::inference::testing {

/// On the CPU where `machine` is null.
inline std::unique_ptr<Session> session_of(const Recipe& recipe, Machine* machine = nullptr) {
  Result<std::unique_ptr<Session>> made = Session::make(recipe, machine);
  REQUIRE_OK(made);
  std::unique_ptr<Session> out = std::move(made).value();
  for (const trainer::StateTensor& run : out->weights()) {
    trainer::initial_weights(out->plan(), run.tensor, run.box, address_of(run.data.as<float>()));
  }
  const Status ready = out->weights_ready();
  REQUIRE_OK(ready);
  return out;
}

}  // namespace cairn::inference::testing
