#pragma once
// Work of a device that can be done in several ways, of which the fastest is found by timing: products, attention. A
// choice holds for a card and a library, and decides bits, so all ranks of a run take the same ones and a run keeps
// them in a file (runtime/trainer/tuning.h). Kinds of work and choices are texts here; runtime/cuda/tuning implements
// this.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn {

/// How the choices of one sort of work stand, for people.
struct TuningTopic {
  std::string what;       // "products"
  std::string where;      // card and library: "NVIDIA H200 (132 multiprocessors), cuBLASLt 13.1"
  int64_t choices = 0;    // for these
  std::string elsewhere;  // cards and libraries of other choices; empty: none
  std::string chosen;     // what was chosen, where that is short; else empty
};

/// Threads: one at a time, that of the device's stream.
class DeviceTuning {
 public:
  virtual ~DeviceTuning() = default;
  /// Whether a file says that no choices are to be used. Errors: kCorrupt, with the byte or the entry.
  virtual Result<bool> says_off(std::string_view text) const = 0;
  /// Takes the choices of a file; those of a file that was read before stay. `uses`: those for this card and library
  /// are used from now on. Errors: as says_off().
  virtual Status read(std::string_view text, bool uses) = 0;
  /// Whether a file that was read says that the work of `layout` (trainer::TuningFiles) has its choices on this card.
  virtual bool covers(std::string_view layout) const = 0;
  /// One for each sort of work that the run has, always in the same order.
  virtual std::vector<TuningTopic> topics() const = 0;

  /// Kinds of work that the stream was asked for and that have no choice, in an order that is the same on all ranks.
  virtual std::vector<std::string> unchosen() const = 0;
  /// Times the ways to do the work, of the arrays of its last call, whose outputs are overwritten. Errors: of the
  /// stream; kUnsupported.
  virtual Result<std::string> choose(const std::string& work) = 0;
  /// The work is done so from now on, where the choice holds for this card and library; text() has it in any case.
  virtual Status use(const std::string& choice) = 0;
  /// The file of all that was read and used, which says `off`; it covers `layout`, unless that is empty, on this card
  /// and on the cards of what was used.
  virtual std::string text(std::string_view layout, bool off) const = 0;
};

}  // namespace cairn
