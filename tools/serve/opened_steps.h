#pragma once
// The steps that are served now: pinned, opened, and closed once no request has come for them within keep_s.
//
// Threads: any, several at once. Steps are opened one after the other.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/pin.h"
#include "ckpt/store/posix_backend.h"
#include "converters/hf_view.h"
#include "runtime/core/result.h"
#include "tools/serve/hub.h"
#include "tools/serve/served_run.h"

namespace cairn::tools {

struct OpenedStep {
  std::string commit, id;  // id: the run's name with that of the form
  int64_t step = 0, created_unix_ms = 0;
  std::shared_ptr<ckpt::Pin> pin;  // null where the folder takes none; goes behind the view
  std::shared_ptr<const convert::HfView> view;

  /// A file whose bytes could not be made, and why. Empty: none is known.
  std::string broken(const std::string& file) const;
  void note_broken(const std::string& file, const std::string& why);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> broken_;  // by file
};

class OpenedSteps {
 public:
  /// `options` outlives it.
  explicit OpenedSteps(const HubOptions& options) : options_(options) {}

  /// One that is open, by the run's name with that of the form and its commit; null: none. Counts as a question.
  std::shared_ptr<OpenedStep> find(const std::string& id, const std::string& commit);
  /// Opens it, or finds it open. Errors: kUnavailable: too many are open, or it has just been removed; those of
  /// HfView::open().
  Result<std::shared_ptr<OpenedStep>> open(const ServedRun& run, const ckpt::CheckpointInfo& step,
                                           const ServedForm& form);
  /// Closes what was not asked for within keep_s. Returns their views.
  std::vector<std::shared_ptr<OpenedStep>> close_idle();

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::shared_ptr<OpenedStep> opened;
    Clock::time_point asked;
  };
  std::shared_ptr<ckpt::Pin> pin(const ServedRun& run, int64_t step);
  bool make_room();

  const HubOptions& options_;
  std::mutex opening_;     // io_, pins_, unpinned_
  ckpt::PosixBackend io_;  // outlives what is open
  std::map<std::filesystem::path, std::weak_ptr<ckpt::Pin>> pins_;
  std::set<std::string> unpinned_;                                // runs whose folder takes no pins
  std::mutex mutex_;                                              // entries_
  std::map<std::pair<std::string, std::string>, Entry> entries_;  // by id and commit
};

}  // namespace cairn::tools
