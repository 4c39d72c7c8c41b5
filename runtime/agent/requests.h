#pragma once
// What may be asked of a run besides signals: by files that a person or a script puts into its folder, and by the time
// at which its machine is taken away.
//
// RUN/stop: empty: stop as at a SIGTERM; "after-save": at the next save; a number: at that step. It goes away when it
// is obeyed; whoever removes it before that takes it back. One that is older than the start was meant for another: a
// job that queues itself again would end at once for ever. RUN/save: a checkpoint at the next step boundary. It goes
// away when that checkpoint is on disk, so that a script can wait for it.
//
// A file that a shell writes is empty for a moment: its content counts once two looks have found the same.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::agent {

inline constexpr double kLookEveryS = 1, kLookAgainS = 0.2;
inline constexpr double kSaveAgainS = 30, kSaveAgainAtMostS = 600;  // a save that was asked for by a file and failed

/// What RUN/stop says.
struct StopWish {
  enum class When { kNow, kAtSave, kAtStep };
  When when = When::kNow;
  int64_t step = 0;  // with kAtStep, from 1
  bool operator==(const StopWish&) const = default;
};

/// Errors: kInvalidInput with what was found and what is understood.
Result<StopWish> parse_stop(std::string_view content);

/// RUN/stop and RUN/save. Times are seconds of any one clock, unless they are said to be Unix time.
class RequestFiles {
 public:
  /// `started_unix_s`: a stop from before that is told and removed.
  RequestFiles(std::filesystem::path run, double started_unix_s);

  struct News {
    std::optional<StopWish> stop;      // another than before
    bool stop_taken_back = false;      // one from before, without having been obeyed
    bool save = false;                 // one more is wanted
    std::vector<std::string> notices;  // for the person
  };
  /// Looks when it is time to; else no news.
  News look(double now_s);

  /// RUN/stop has been obeyed and goes, unless it is another by now. What could not be removed is told, and is not
  /// obeyed again.
  Status stop_obeyed();
  /// What RUN/save asked for is on disk: it goes. Touched since it was last seen, it asks for one more.
  Status saved();
  /// It is not, and is asked for again after a while.
  void save_failed(double now_s);

 private:
  /// By what a later file is told apart.
  struct Mark {
    uint64_t device = 0, inode = 0;
    int64_t bytes = 0, modified_ns = 0;  // Unix time
    bool regular = false;
    bool operator==(const Mark&) const = default;
  };
  static Result<std::optional<Mark>> mark_of(const std::filesystem::path& path);
  void look_for_stop(News& news);
  void look_for_save(double now_s, News& news);

  std::filesystem::path stop_, save_;
  int64_t started_ns_;
  double next_look_s_ = -1;
  bool first_ = true;
  std::optional<Mark> stop_seen_, stop_done_;  // at the last look; read, and obeyed or told
  bool stop_stands_ = false;                   // what was read is still to be obeyed
  std::optional<Mark> save_asked_;
  std::optional<double> save_again_s_;
  double save_wait_s_ = kSaveAgainS;
};

/// When the run must have ended.
struct TimeLimit {
  double at_unix_s = 0;
  std::string from;  // "--time-limit", "SLURM_JOB_END_TIME"
};

/// The limit that holds: `limit_s` from the start, else what Slurm says of the job. A variable that is malformed, or
/// lies in the past (another job's, that this shell has inherited), is told in `notice` and does not count.
std::optional<TimeLimit> time_limit(std::optional<double> limit_s, const char* slurm_job_end_time,
                                    double started_unix_s, double now_unix_s, std::string* notice);

/// How long it may take from now until a stop that is asked for now is over: the step under way, and a save that may
/// have to wait for another. Nothing before the first step: each start gets somewhere, however short its time is.
class Pace {
 public:
  /// Until a save has been seen.
  void guess_save(double seconds) { guessed_save_s_ = seconds; }
  void step(double seconds);
  void save(double seconds);
  double longest_step_s() const;  // of the last kSteps
  double longest_save_s() const;  // of the last kSaves
  double needed_s() const { return steps_.empty() ? 0 : longest_step_s() + 2 * longest_save_s(); }

  static constexpr size_t kSteps = 20, kSaves = 20;

 private:
  std::deque<double> steps_, saves_;
  double guessed_save_s_ = 0;
};

/// "2026-11-25 09:33:34 UTC"
std::string utc_text(double unix_s);

}  // namespace cairn::agent
