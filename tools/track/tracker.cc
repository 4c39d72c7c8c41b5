#include "tools/track/tracker.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "dsl/dsl.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using SteadyClock = std::chrono::steady_clock;

constexpr double kFirstWaitS = 0.2, kLongestWaitS = 60, kLookEveryS = 1;

/// RUN/tracking/NAME.json.
struct State {
  TrackPosition position;
  json note = json::object();
  bool ended = false;  // the service knows
};

Result<State> read_state(const fs::path& path) {
  State out;
  const Result<std::string> text = read_text_file(path);
  if (!text.ok() && text.error().os_errno == ENOENT) return out;
  RT_TRY(text);
  Result<json> parsed = parse_json(text.value());
  if (!parsed.ok()) return std::move(parsed).error().with(path.string());
  Result<TrackPosition> position = position_from_json(json_field(parsed.value(), "position"));
  if (!position.ok()) return std::move(position).error().with(path.string());
  out.position = std::move(position).value();
  out.note = json_field(parsed.value(), "note");
  if (!out.note.is_object()) return Error{ErrorCode::kCorrupt, path.string() + ": expected an object \"note\""};
  out.ended = json_flag(parsed.value(), "ended");
  return out;
}

/// The same. A damaged file is set aside, with a warning, and the state is a new one: services find out what they have.
Result<State> read_state_or_begin(const fs::path& path, const std::function<void(const std::string&)>& warn) {
  Result<State> known = read_state(path);
  if (known.ok() || known.error().code != ErrorCode::kCorrupt) return known;
  fs::path aside = path;
  aside += ".damaged";
  std::error_code problem;
  fs::rename(path, aside, problem);
  if (problem) return os_error(problem.value(), path.string());
  if (warn) {
    warn(fmt::format("{}; the file is now {}, and the service is asked for what it has", known.error().message,
                     aside.filename().string()));
  }
  known = State();
  return known;
}

/// Writes the state where it has changed.
class StateFile {
 public:
  explicit StateFile(fs::path path) : path_(std::move(path)) {}

  Status write(const State& state) {
    const std::string text =
        json_text(json{{"position", to_json(state.position)}, {"note", state.note}, {"ended", state.ended}}) + "\n";
    if (text == written_) return {};
    RT_TRY(place_file(path_, text));
    written_ = text;
    return {};
  }

 private:
  fs::path path_;
  std::string written_;
};

Result<TrackedRun> tracked_run(const fs::path& run) {
  TrackedRun out{.folder = fs::absolute(run).lexically_normal(), .id = run_id_of(run), .recipe = {}};
  if (!out.folder.has_filename()) out.folder = out.folder.parent_path();
  if (out.id.empty())
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: has no run.json; is this a run folder?", run.string())};
  out.name = out.folder.filename().string();
  if (const Result<std::string> text = read_text_file(run / "recipe.resolved.json"); text.ok())
    out.recipe = json_or_nothing(text.value());
  return out;
}

/// Waits that grow while nothing works.
class Patience {
 public:
  explicit Patience(double patience_s) : patience_s_(patience_s) {}
  void worked() {
    wait_s_ = kFirstWaitS;
    failing_ = false;
  }
  bool is_over() {
    if (!std::exchange(failing_, true)) since_ = SteadyClock::now();
    return std::chrono::duration<double>(SteadyClock::now() - since_).count() >= patience_s_;
  }
  double next_wait_s() { return std::exchange(wait_s_, std::min(kLongestWaitS, 2 * wait_s_)); }

 private:
  double patience_s_, wait_s_ = kFirstWaitS;
  bool failing_ = false;
  SteadyClock::time_point since_;  // of the first failure in a row while finishing
};

}  // namespace

std::string tracker_name(const Tracker& tracker) {
  const std::string to = fmt::format("{}\n{}\n{}", tracker.to, tracker.project, tracker.entity);
  return fmt::format("{}-{}", tracker_kind(tracker), dsl::recipe_hash(to).substr(0, 8));
}

Status track(const Tracker& tracker, const fs::path& run, const TrackLoop& loop) {
  RT_TRY_SET(const std::unique_ptr<TrackService> service, open_service(tracker));
  RT_TRY_SET(const TrackedRun tracked, tracked_run(run));
  const fs::path folder = run / "tracking";
  std::error_code problem;
  fs::create_directories(folder, problem);
  if (problem) return os_error(problem.value(), folder.string());
  const fs::path path = folder / (tracker_name(tracker) + ".json");
  RT_TRY_SET(const Fd lock, open_own(folder / (tracker_name(tracker) + ".lock"), O_RDWR));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Error{ErrorCode::kUnavailable, fmt::format("{}: another process sends this already", path.string()), EBUSY};
  }
  RT_TRY_SET(State state, read_state_or_begin(path, loop.warned));
  StateFile file(path);
  TrackReader reader(run, state.position);
  Patience patience(loop.patience_s);
  bool open = false, told = false;
  const auto once = [&]() -> Result<bool> {  // whether there may be more
    if (!open) RT_TRY(service->open(tracked, state.note));
    open = true;
    const bool last = loop.finishing();  // before the look at the files
    RT_TRY_SET(const TrackBatch batch, reader.next(service->most_steps()));
    if (!batch.steps.empty()) {
      RT_TRY(service->send(batch.steps, state.note));
      state.ended = false;
    }
    const std::optional<int64_t> exit_code =
        last && batch.steps.empty() && !state.ended ? exit_code_of(run) : std::nullopt;
    if (exit_code) RT_TRY(service->finish({*exit_code, reader.late_events()}, state.note));
    state.ended = state.ended || exit_code.has_value();
    reader.given(batch);
    state.position = reader.position();
    RT_TRY(file.write(state));
    if (!batch.steps.empty() && loop.sent) loop.sent(batch.steps.back().step);
    return !last || !batch.steps.empty();
  };
  for (;;) {
    const int64_t before = reader.position().step;
    const Result<bool> more = once();
    for (const std::string& warning : service->take_warnings()) {
      if (loop.warned) loop.warned(warning);
    }
    if (more.ok()) {
      told = false;
      patience.worked();
      if (!more.value()) return {};
      if (reader.position().step == before) loop.wait(kLookEveryS);
      continue;
    }
    open = false;
    if (more.error().code == ErrorCode::kCorrupt && state.note.is_object() && !state.note.empty()) {
      if (loop.warned) loop.warned(more.error().message + "; it is written anew, from the first step on");
      state.note = json::object();
      state.ended = false;
      reader = TrackReader(run, {});
      continue;
    }
    if (loop.finishing() && patience.is_over()) return more.error();
    if (!std::exchange(told, true) && loop.failed) loop.failed(more.error());
    loop.wait(patience.next_wait_s());
  }
}

}  // namespace cairn::tools
