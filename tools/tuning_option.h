#pragma once
// How products and attention on CUDA get their algorithms: --tuning, for the rank that decides
// (runtime/trainer/tuning.h).

#include <filesystem>
#include <string>

#include "runtime/config/numbers.h"
#include "runtime/core/result.h"
#include "runtime/trainer/tuning.h"

namespace CLI {
class App;
}

namespace cairn::tools {

inline constexpr const char* kTuningFile = "tuning.json";  // of the run folder

struct TuningArgs {
  trainer::TuningWish wish = trainer::TuningWish::kKept;
  std::string given;  // a file of choices beside the run's own; empty: none
};

/// --tuning on | off | FILE.
void add_tuning_option(CLI::App& command, TuningArgs& args);

/// Errors, with exit code 2: choices are asked for and the ranks compute on the CPU; a missing file.
Status check_tuning(const TuningArgs& args, DeviceChoice device);

/// "kept", "on", "off": for `cairn _rank --tuning`.
std::string tuning_word(trainer::TuningWish wish);
trainer::TuningWish tuning_wish(const std::string& word);

/// The files of a rank that decides: `own`, which need not be there, then `given`, which must. `on_result` is the
/// caller's.
trainer::TuningFiles tuning_files(trainer::TuningWish wish, const std::filesystem::path& own,
                                  const std::filesystem::path& given, std::string layout);

}  // namespace cairn::tools
