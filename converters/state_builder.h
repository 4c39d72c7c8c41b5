#pragma once
// A ForeignState while a reader of another program's files fills it: tensors of three kinds, one count of updates.

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "converters/flat_tensors.h"
#include "converters/foreign_state.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

inline constexpr std::array<std::string_view, 2> kMoments = {"exp_avg", "exp_avg_sq"};
inline constexpr size_t kKinds = 3;  // masters and the two moments
inline constexpr std::string_view kCopyAgain = "copy the files of one save here, or save again";

/// Says what was found at `place`, what was expected and what to do.
Error refusal(ErrorCode code, std::string_view place, std::string_view wrong, std::string_view expected,
              std::string_view remedy);

struct Parameter {
  std::string name;
  Shape shape;
  int64_t elems = 0;
};

struct StateBuilder {
  StateBuilder(TrainingState about, bool weights_only);
  const std::filesystem::path& dir() const { return out.about.folder; }
  /// Errors: kCorrupt for a duplicate name.
  Status add(const Parameter& parameter, const std::array<std::string, kKinds>& dtypes,
             std::array<std::vector<FlatRun>, kKinds> runs);
  /// The optimizer's own count of updates, as `place` has it. Errors: kCorrupt for no count, or another one than
  /// before.
  Status take_step(double step, const std::string& place);
  bool has_step() const { return !step_place_.empty(); }

  const bool weights_only;
  ForeignState out;

 private:
  std::string step_place_;
};

}  // namespace cairn::convert
