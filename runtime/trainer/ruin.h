#pragma once
// What was found when loss or gradient norm of a step was not finite, and what follows from it. Pure; trainer.cc finds
// it out.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::trainer {

inline constexpr int64_t kNamedSamples = 8;

struct RuinReport {
  int64_t step = 0;
  double loss = 0, norm = 0;         // of the step
  std::vector<std::string> samples;  // of the step, whose loss is not finite; at most kNamedSamples
  int64_t ruined_weights = 0;        // values of the weights before it that are not finite
  bool own_batch = false;            // other_loss is of the batch of the step before; else of the one behind this
  double other_loss = 0;             // what the same weights give on another batch
  int64_t vocab = 0;

  /// The weights that the step began with are useless: not finite, or without a finite loss on another batch too. Or
  /// the loss is worse than knowing nothing, and no sample's loss explains it.
  bool ruined() const;
};

/// One sentence for people: whose doing it is.
std::string to_text(const RuinReport& report);

}  // namespace cairn::trainer
