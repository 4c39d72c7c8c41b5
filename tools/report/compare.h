#pragma once
// Several runs in one terminal: a table, and their losses in one picture.

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/telemetry/terminal.h"
#include "tools/report/report.h"

namespace cairn::tools {

struct ComparedRun {
  std::string name;  // the folder as it was typed
  bool alive = false;
  Summary summary;
  double goodput = NAN;  // a share
  int64_t saves = 0, starts = 0;
  std::vector<telemetry::CurvePoint> loss;
};
ComparedRun compared_run(const History& history, std::string name);

/// The losses over one axis of steps. A run is drawn with its letter (A, B, ...), `*` is where several meet. Values
/// that are not finite are left out, and a column shows the mean of its values. Empty without two steps.
std::string draw_losses(const std::vector<ComparedRun>& runs, int64_t columns, int64_t rows, bool utf8);

/// The picture, its legend and the table, in lines of at most `columns` (at least 60).
std::string compare_text(const std::vector<ComparedRun>& runs, int64_t columns, bool utf8);

}  // namespace cairn::tools
