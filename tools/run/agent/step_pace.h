#pragma once
// Whether the steps of a run take much longer than its own steps did: a link that loses packets, a disk that other jobs
// use, a device that is throttled. Steps are compared in windows by the mean time a token, so a stage with another
// batch size counts alike. A mean, since a CPU limit or a lost packet stops some steps for long and others not at all;
// without the two longest steps, which may hold a save and a validation. Pure.

#include <cstdint>
#include <optional>
#include <vector>

namespace cairn::tools {

class StepPace {
 public:
  static constexpr double kSlow = 2, kOver = 1.5;  // a window's time a token to that of the fastest window
  static constexpr int64_t kSteps = 8;             // of a window at least; the first ones of each start are left out
  static constexpr double kWindowS = 5;            // at least, without the longest: less is noise of a busy machine

  struct News {
    bool over = false;   // they are no longer slow
    int64_t step = 0;    // the window's last
    double ratio = 1;    // the window's time a token to that of the fastest window
    double step_ms = 0;  // mean of the window
    bool operator==(const News&) const = default;
  };
  /// `tokens`: of the run, after this step. Steps that were trained before count for nothing.
  std::optional<News> add(int64_t step, double ms, int64_t tokens);
  /// New processes train: their first steps are no measure. Whether steps are slow stays.
  void clear();

 private:
  std::optional<News> judge(int64_t step);

  struct Step {
    double ms = 0, token_ms = 0;
  };
  int64_t left_out_ = 0;           // steps since clear()
  int64_t tokens_ = 0;             // after the step before
  std::vector<Step> window_;       // its longest steps first
  std::optional<double> fastest_;  // time a token of the fastest window
  bool slow_ = false;
};

}  // namespace cairn::tools
