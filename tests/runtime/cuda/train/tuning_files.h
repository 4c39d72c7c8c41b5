#pragma once
// A run's file of choices, in memory.

#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/tuning/choices.h"
#include "runtime/trainer/tuning.h"

namespace cairn::testing {

struct TuningFilesInMemory {
  TuningFilesInMemory() {
    files.layout = "layout";
    files.read = [this]() -> Result<std::vector<std::pair<std::string, std::string>>> { return texts; };
    files.write = [this](const std::string& text) -> Status {
      written = text;
      return {};
    };
    files.on_result = [this](const std::string& line, bool) { lines.push_back(line); };
  }
  TuningFilesInMemory(const TuningFilesInMemory&) = delete;
  TuningFilesInMemory& operator=(const TuningFilesInMemory&) = delete;
  /// The next start has what was written.
  void keep() { texts = {{"run/tuning.json", written}}; }
  cuda::TuningChoices choices() const { return cuda::decode_choices(written).value(); }

  trainer::TuningFiles files;
  std::vector<std::pair<std::string, std::string>> texts;
  std::string written;
  std::vector<std::string> lines;
};

}  // namespace cairn::testing
