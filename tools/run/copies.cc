#include "tools/run/copies.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "ckpt/format/manifest.h"
#include "ckpt/mirror/copy.h"
#include "ckpt/mirror/mirror.h"
#include "ckpt/mirror/placed_step.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/agent/child_process.h"
#include "runtime/agent/event_pipe.h"
#include "runtime/core/units.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using SteadyClock = std::chrono::steady_clock;

constexpr const char* kOwnerNote = "run.json";
constexpr double kFirstRestartS = 5, kLongestRestartS = 300;

double seconds_since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

}  // namespace

std::string place_of_run(const CopyTo& to, const fs::path& run) {
  fs::path name = fs::absolute(run).lexically_normal();
  if (!name.has_filename()) name = name.parent_path();  // "runs/mine/"
  return ckpt::place_join(to.path, name.filename().string());
}

ckpt::PlaceOptions place_options(const CopyTo& to, const fs::path& run) {
  return {.path = place_of_run(to, run),
          .endpoint = to.endpoint,
          .region = to.region,
          .ca_file = to.ca_file,
          .timeout_s = to.timeout_s};
}

Result<std::string> place_owner(ckpt::Place& place) {
  RT_TRY_SET(const std::optional<std::string> note, place.read_note(kOwnerNote));
  if (!note) return std::string();
  const json parsed = json_or_nothing(*note);
  if (!parsed.is_object() || !parsed.contains("id") || !parsed["id"].is_string()) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}/{}: expected {{\"id\": ..., \"name\": ...}}", place.describe(), kOwnerNote)};
  }
  return parsed["id"].get<std::string>();
}

fs::path claim_of(const fs::path& run, int64_t index) { return run / "copying" / fmt::format("{}.place", index); }

namespace {

Error of_another(const ckpt::Place& place, const std::string& owner, const std::string& run_id) {
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} holds checkpoints of another run (id {}, this one is {}); choose another place, or "
                           "another name for the run folder",
                           place.describe(), owner, run_id)};
}

/// That a folder which says nothing of an owner, and has no steps, was not this run's: a mount point looks like that.
Status check_not_gone(const ckpt::Place& place, const fs::path& claim) {
  if (ckpt::is_s3_path(place.describe())) return {};  // a store that is not there does not answer
  const Result<std::string> claimed = read_text_file(claim);
  if (!claimed.ok() || claimed.value() != place.describe() + "\n") return {};
  return Error{ErrorCode::kUnavailable,
               fmt::format("{}: nothing is there any more of what was copied there; mount it, or move it back where it "
                           "was (or remove {} to begin there anew)",
                           place.describe(), claim.string())};
}

}  // namespace

Result<PlaceContents> look_at_place(ckpt::Place& place, const fs::path& run, int64_t index) {
  PlaceContents out;
  RT_TRY_SET(out.owner, place_owner(place));
  RT_TRY_SET(out.steps, place.list());
  if (out.owner.empty() && out.steps.empty()) RT_TRY(check_not_gone(place, claim_of(run, index)));
  return out;
}

Error not_known_there(Error why, const ckpt::Place& place, const fs::path& run) {
  return std::move(why).with(
      fmt::format("{} has no checkpoint, and it is not known whether {} has one (--fresh begins anew even so)",
                  run.string(), place.describe()));
}

namespace {

bool is_of(const ckpt::Manifest& step, const std::string& run) {
  return step.run.id == run || std::ranges::find(step.run.parents, run) != step.run.parents.end();
}

/// The run that a step there is of, when it was put among those of `owner` and is none of them: it does not go on from
/// that run, and is newer than a step of its own, as what that run began with is not. Else empty. `steps`: complete
/// ones there, ascending.
Result<std::string> stranger(ckpt::Place& place, const std::string& owner, std::span<const ckpt::PlacedStep> steps,
                             int64_t step) {
  const Result<ckpt::Manifest> manifest = ckpt::placed_manifest(place, step);
  if (!manifest.ok() && ckpt::unreadable(manifest.error())) return std::string();  // whoever fetches it is told
  if (!manifest.ok()) return manifest.error();
  if (is_of(manifest.value(), owner)) return std::string();
  for (auto older = steps.rbegin(); older != steps.rend(); ++older) {
    if (older->step >= step) continue;
    const Result<ckpt::Manifest> other = ckpt::placed_manifest(place, older->step);
    if (!other.ok() && !ckpt::unreadable(other.error())) return other.error();
    if (!other.ok() || !is_of(other.value(), owner)) continue;
    return manifest.value().run.id.empty() ? std::string("?") : manifest.value().run.id;
  }
  return std::string();
}

}  // namespace

Status claim_place(ckpt::Place& place, const fs::path& claim, const std::string& run_id, const std::string& run_name) {
  RT_TRY_SET(const std::string owner, place_owner(place));
  if (owner != run_id) {
    RT_TRY_SET(const std::vector<ckpt::PlacedStep> steps, place.list());
    if (owner.empty() && steps.empty()) RT_TRY(check_not_gone(place, claim));
    if (!owner.empty() && !steps.empty()) return of_another(place, owner, run_id);
    RT_TRY(place.write_note(kOwnerNote, json_text(json{{"id", run_id}, {"name", run_name}}, 2) + "\n"));
  }
  ckpt::PosixBackend io;
  RT_TRY(ckpt::make_dirs(io, claim.parent_path()));
  return write_text_file(claim, place.describe() + "\n");
}

struct RunCopies::Child {
  size_t index = 0;
  std::string place;
  double finish_s = 0;
  std::optional<agent::ChildProcess> process;
  agent::LineSplitter lines;
  Fd control;  // 'w': a new checkpoint; 'f': finish; closed: leave
  SteadyClock::time_point restart_at;
  double restart_s = kFirstRestartS;
  bool finishing = false, finished = false, crash_told = false;

  void send(char c) {
    if (process) [[maybe_unused]]
      const ssize_t n = ::write(control.get(), &c, 1);  // full or gone: it looks by itself
  }
};

RunCopies::RunCopies(std::vector<CopyTo> places, RunFolder& folder)
    : places_(std::move(places)),
      folder_(folder),
      callbacks_{.say = [](const std::string& text) { fmt::print("{}\n", text); }, .record = {}} {}

RunCopies::~RunCopies() {
  for (const auto& child : children_) {
    if (!child->process) continue;
    agent::kill_child(*child->process);
    pollfd waiting{child->process->pidfd.get(), POLLIN, 0};
    while (::poll(&waiting, 1, -1) < 0 && errno == EINTR) {
    }
    ignore(
        [&]() -> Status {
          RT_TRY(agent::reap_child(*child->process));
          return {};
        }(),
        "it has been killed");
  }
}

void RunCopies::record(json event) {
  if (started_) {
    callbacks_.record(event);
  } else {
    early_.push_back(std::move(event));
  }
}

Result<bool> RunCopies::prepare(bool fresh) {
  if (places_.empty()) return false;
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(*io, folder_.checkpoints()));
  int64_t newest_here = -1;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) newest_here = info.step;
  }
  struct Found {
    std::shared_ptr<ckpt::Place> place;
    std::string owner;
    std::shared_ptr<const std::vector<ckpt::PlacedStep>> all;  // complete ones there
    ckpt::PlacedStep step;
  };
  std::vector<Found> found;
  for (int64_t index = 0; index < std::ssize(places_); ++index) {
    const CopyTo& to = places_[static_cast<size_t>(index)];
    RT_TRY_SET(std::shared_ptr<ckpt::Place> place, ckpt::open_place(place_options(to, folder_.path())));
    Result<PlaceContents> looked = look_at_place(*place, folder_.path(), index);
    if (!looked.ok()) {
      if (newest_here < 0 && !fresh) {
        return not_known_there(std::move(looked).error(), *place, folder_.path());
      }
      callbacks_.say(fmt::format("warning: {}; copies are tried again later", looked.error().message));
      continue;
    }
    auto [owner, steps] = std::move(looked).value();
    std::erase_if(steps, [](const ckpt::PlacedStep& step) { return !step.complete; });
    if (steps.empty()) continue;
    if (!owner.empty() && owner != folder_.id() && (newest_here >= 0 || fresh)) {
      return of_another(*place, owner, folder_.id());
    }
    if (newest_here >= 0 && steps.back().step > newest_here) {
      callbacks_.say(
          fmt::format("{} has step {}, and here the newest is {}: resuming from here; `cairn ckpt fetch` "
                      "would bring that one",
                      place->describe(), steps.back().step, newest_here));
    }
    const auto all = std::make_shared<const std::vector<ckpt::PlacedStep>>(std::move(steps));
    Result<ckpt::Labels> noted = ckpt::placed_labels(*place);
    if (!noted.ok() && newest_here < 0) return std::move(noted).error();
    const ckpt::Labels labels = noted.ok() ? std::move(noted).value() : ckpt::Labels();
    for (const ckpt::PlacedStep& step : *all) {
      const auto label = labels.find(step.step);
      const bool bad = label != labels.end() && label->second.label == ckpt::Label::kBad;
      if (!bad) found.push_back({place, owner, all, step});
      if (bad && newest_here < 0) {
        callbacks_.say(fmt::format("step {} in {} is passed over, it is bad: {}", step.step, place->describe(),
                                   label->second.why));
      }
    }
  }
  if (newest_here >= 0 || fresh || found.empty()) return false;

  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return a.step.step > b.step.step; });
  Status last;
  for (const Found& one : found) {
    if (!one.owner.empty()) {
      RT_TRY_SET(const std::string run, stranger(*one.place, one.owner, *one.all, one.step.step));
      if (!run.empty()) {
        callbacks_.say(
            fmt::format("warning: step {} in {} is of run {}, and the place and steps in it are of run {}: not taken; "
                        "move it away from there, or `cairn ckpt fetch` it to begin with it",
                        one.step.step, one.place->describe(), run, one.owner));
        continue;
      }
    }
    callbacks_.say(fmt::format("no checkpoint here; bringing step {} ({}) from {}", one.step.step,
                               format_bytes(one.step.bytes), one.place->describe()));
    const Result<ckpt::CopyReport> fetched = ckpt::fetch_checkpoint(*one.place, *io, one.step, folder_.checkpoints());
    if (fetched.ok()) {
      record({{"event", "fetched"},
              {"step", one.step.step},
              {"place", one.place->describe()},
              {"bytes", fetched.value().bytes},
              {"seconds", fetched.value().seconds}});
      if (!one.owner.empty() && one.owner != folder_.id()) RT_TRY(folder_.take_id(one.owner));
      RT_TRY_SET(const ckpt::Labels labels, ckpt::placed_labels(*one.place));
      RT_TRY(ckpt::take_labels(*io, folder_.checkpoints(), labels));
      return true;
    }
    last = fetched.error();
    const ErrorCode code = last.error().code;
    // Damaged there: an older one will do. Anything else, a person must see: a start over would lose more.
    if (code != ErrorCode::kCorrupt && code != ErrorCode::kInvalidInput) return last.error();
    callbacks_.say("warning: " + last.error().message);
  }
  return Error(last.error())
      .with("none of the copies can be used; not starting anew over them; another name for the run folder begins anew");
}

void RunCopies::start() {
  if (started_) return;
  started_ = true;
  for (json& event : early_) callbacks_.record(std::move(event));
  early_.clear();
  release_holds();
  for (size_t i = 0; i < places_.size(); ++i) {
    auto child = std::make_unique<Child>();
    child->index = i;
    child->place = place_of_run(places_[i], folder_.path());
    child->finish_s = places_[i].finish_s;
    launch(*child);
    children_.push_back(std::move(child));
  }
}

/// What was under way to places that the recipe no longer has would lie there, and fill the disk, for ever.
void RunCopies::release_holds() {
  ckpt::PosixBackend io;
  const fs::path holds = folder_.path() / "copying";
  const Result<std::vector<ckpt::DirEntry>> entries = io.list(holds);
  for (size_t k = 0; entries.ok() && k < entries.value().size(); ++k) {
    const std::string& name = entries.value()[k].name;
    size_t place = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), place);
    if (error != std::errc() || end != name.data() + name.size() || place < places_.size()) continue;
    if (Status removed = ckpt::remove_tree(io, holds / name); !removed.ok())
      callbacks_.say("warning: " + removed.error().message);
  }
}

void RunCopies::launch(Child& child) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
    callbacks_.say(fmt::format("warning: no copies to {}: pipe: {}", child.place, std::strerror(errno)));
    child.restart_at = SteadyClock::now() + std::chrono::seconds(60);
    return;
  }
  const Fd theirs(ends[0]);
  child.control.reset(ends[1]);
  child.lines = {};
  Result<agent::ChildProcess> started =
      agent::start_child({.argv = {"/proc/self/exe", "_copy", "--run", folder_.path().string(), "--place",
                                   std::to_string(child.index), "--control-fd", std::to_string(theirs.get())},
                          .inherit_fds = {theirs.get()},
                          .log_path = (folder_.path() / "logs" / fmt::format("copy-{}.log", child.index)).string()});
  if (!started.ok()) {
    callbacks_.say(fmt::format("warning: no copies to {}: {}", child.place, started.error().message));
    child.restart_at = SteadyClock::now() + std::chrono::seconds(60);
    return;
  }
  child.process = std::move(started).value();
  if (child.finishing) child.send('f');
}

void RunCopies::saved() {
  for (const auto& child : children_) child->send('w');
}

void RunCopies::tell(Child& child, const json& event) {
  const std::string kind = json_string(event, "event");
  if (kind == "notice") {
    callbacks_.say(json_string(event, "message"));
    return;
  }
  if (kind != "copied" && kind != "copy_failed") return;
  record(event);
  if (kind == "copied") {
    child.restart_s = kFirstRestartS;
    child.crash_told = false;
    std::string text = fmt::format("copied step {} to {} in {}", json_count(event, "step"), child.place,
                                   telemetry::format_duration(json_number(event, "seconds")));
    if (json_count(event, "failures") > 0)
      text += fmt::format(", after {} failed tries", json_count(event, "failures"));
    callbacks_.say(text);
  } else {
    const int64_t step = json_count(event, "step");  // 0: the place could not be asked which are there
    callbacks_.say(fmt::format("warning: {} not copied to {} yet: {}; it is tried again",
                               step > 0 ? fmt::format("step {} is", step) : "checkpoints are", child.place,
                               json_string(event, "message")));
  }
}

void RunCopies::take_events(Child& child) {
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::read(child.process->events.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    child.lines.feed({bytes, static_cast<size_t>(n)}, [&](std::string_view line) {
      const json event = json_or_nothing(line);
      if (event.is_object()) tell(child, event);
    });
  }
}

void RunCopies::poll() {
  for (const auto& owned : children_) {
    Child& child = *owned;
    if (child.finished) continue;
    if (!child.process) {
      if (SteadyClock::now() >= child.restart_at) launch(child);
      continue;
    }
    take_events(child);
    const Result<std::optional<agent::ExitStatus>> ended = agent::reap_child(*child.process);
    if (!ended.ok() || !ended.value()) continue;
    take_events(child);
    const agent::ExitStatus status = *ended.value();
    if (child.finishing && status.ok()) {
      child.finished = true;
      child.process.reset();
      continue;
    }
    if (!child.crash_told) {
      const std::vector<std::string> tail = agent::log_tail(*child.process, 3);
      std::string text = fmt::format("warning: the process that copies to {} {}; it is started again", child.place,
                                     agent::describe(status));
      for (const std::string& line : tail) text += "\n  " + line;
      callbacks_.say(text);
      record({{"event", "copy_failed"}, {"step", 0}, {"place", child.place}, {"message", agent::describe(status)}});
      child.crash_told = true;
    }
    child.process.reset();
    child.restart_at = SteadyClock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * child.restart_s));
    child.restart_s = std::min(kLongestRestartS, 2 * child.restart_s);
  }
}

void RunCopies::finish(std::span<const int> stop_signals, const std::function<bool()>& out_of_time) {
  if (children_.empty()) return;
  const auto begin = SteadyClock::now();
  for (const auto& child : children_) {
    child->finishing = true;
    child->send('f');
  }
  sigset_t stop;
  sigemptyset(&stop);
  for (const int signal : stop_signals) sigaddset(&stop, signal);
  bool told = false, interrupted = false, late = false;
  for (;;) {
    poll();
    const double waited = seconds_since(begin);
    std::string waiting;
    for (const auto& child : children_) {
      if (!child->finished && waited < child->finish_s) waiting += (waiting.empty() ? "" : ", ") + child->place;
    }
    late = out_of_time();
    if (waiting.empty() || interrupted || late) break;
    if (!told && waited > 2) {
      callbacks_.say(fmt::format("waiting for copies to {}; a signal ends the wait", waiting));
      told = true;
    }
    const timespec pause{0, 50'000'000};
    interrupted = ::sigtimedwait(&stop, nullptr, &pause) > 0;
  }
  for (const auto& child : children_) {
    if (child->finished) continue;
    callbacks_.say(fmt::format("not everything is copied to {} ({} after {}); the next start of this run continues it",
                               child->place,
                               interrupted ? "stopped by a signal"
                               : late      ? "at the time limit"
                                           : "given up",
                               telemetry::format_duration(seconds_since(begin))));
    record({{"event", "copy_given_up"}, {"place", child->place}, {"seconds", seconds_since(begin)}});
  }
}

}  // namespace cairn::tools
