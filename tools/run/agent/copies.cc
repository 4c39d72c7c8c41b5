#include "tools/run/agent/copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
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
#include "runtime/core/units.h"
#include "runtime/json/json.h"
#include "runtime/telemetry/terminal.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOwnerNote = "run.json";

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
  std::string place;
  double finish_s = 0;
  std::optional<Helper> process;
};

RunCopies::RunCopies(std::vector<CopyTo> places, RunFolder& folder)
    : places_(std::move(places)),
      folder_(folder),
      callbacks_{.say = [](const std::string& text) { fmt::print("{}\n", text); }, .record = {}} {}

RunCopies::~RunCopies() = default;

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
    child->place = place_of_run(places_[i], folder_.path());
    child->finish_s = places_[i].finish_s;
    child->process.emplace(helper_of(*child, i));
    child->process->start();
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

Helper::Options RunCopies::helper_of(Child& child, size_t index) {
  return {.words = {"_copy", "--run", folder_.path().string(), "--place", std::to_string(index)},
          .log = folder_.path() / "logs" / fmt::format("copy-{}.log", index),
          .take = [this, &child](const json& event) { tell(child, event); },
          .not_started =
              [this, &child](const std::string& why) {
                callbacks_.say(fmt::format("warning: no copies to {}: {}", child.place, why));
              },
          .died =
              [this, &child](const std::string& how, const std::vector<std::string>& last_lines) {
                std::string text =
                    fmt::format("warning: the process that copies to {} {}; it is started again", child.place, how);
                for (const std::string& line : last_lines) text += "\n  " + line;
                callbacks_.say(text);
                record({{"event", "copy_failed"}, {"step", 0}, {"place", child.place}, {"message", how}});
              }};
}

void RunCopies::saved() {
  for (const auto& child : children_) child->process->news();
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
    child.process->worked();
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

void RunCopies::poll() {
  for (const auto& child : children_) child->process->poll();
}

void RunCopies::finish(std::span<const int> stop_signals, const std::function<Hurry()>& hurry,
                       const std::function<void()>& beside) {
  if (children_.empty()) return;
  for (const auto& child : children_) child->process->finish();
  const auto waits_for = [&](double waited_s) {
    poll();
    beside();
    std::string out;
    for (const auto& child : children_) {
      if (!child->process->finished() && waited_s < child->finish_s)
        out += (out.empty() ? "copies to " : ", ") + child->place;
    }
    return out;
  };
  const EndWait waited = wait_at_end(stop_signals, hurry, waits_for, callbacks_.say);
  for (const auto& child : children_) {
    if (child->process->finished()) continue;
    callbacks_.say(fmt::format("not everything is copied to {} ({}); the next start of this run continues it",
                               child->place, waited.text()));
    record({{"event", "copy_given_up"}, {"place", child->place}, {"seconds", waited.seconds}});
  }
}

}  // namespace cairn::tools
