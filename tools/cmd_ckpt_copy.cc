// cairn ckpt push | fetch: checkpoints to a second place (another directory, an S3-compatible store) and back; and ls
// of a store, where that of folders (cmd_ckpt_ls.cc) has nothing to look at.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/format/names.h"
#include "ckpt/mirror/copy.h"
#include "ckpt/mirror/mirror.h"
#include "ckpt/mirror/place.h"
#include "ckpt/mirror/placed_step.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/store/uring_backend.h"
#include "runtime/core/count_text.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"
#include "tools/step_target.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

bool weights_only(const ckpt::Manifest& manifest) {
  return std::ranges::none_of(manifest.tensors, ckpt::is_moment_kind, &ckpt::TensorEntry::kind);
}

struct CopyArgs {
  std::string from, to;
  ckpt::PlaceOptions place;
  double max_mb_per_s = 0;
  int64_t part_bytes = int64_t{16} << 20;
  bool no_read_back = false, overwrite = false;
};

/// One progress line a phase.
class CopyProgress {
 public:
  void show(ckpt::CopyPhase phase, int64_t done, int64_t total) {
    if (!line_ || phase != phase_) {
      static constexpr const char* kVerbs[] = {"verified here", "sent",           "read back",    "fetched",
                                               "verified",      "compared there", "verified here"};
      line_.emplace(kVerbs[static_cast<size_t>(phase)]);
      phase_ = phase;
    }
    line_->show(done, total);
  }

 private:
  ckpt::CopyPhase phase_ = ckpt::CopyPhase::kVerifySource;
  std::optional<ByteProgress> line_;
};

ckpt::CopyOptions copy_options(const CopyArgs& args, CopyProgress& progress) {
  ckpt::CopyOptions options{.replace = args.overwrite ? ckpt::Replace::kAnyRun : ckpt::Replace::kSameRun,
                            .check_there = true,
                            .read_back = !args.no_read_back};
  options.traffic.max_bytes_per_s = static_cast<int64_t>(args.max_mb_per_s * 1e6);
  options.progress = [&progress](ckpt::CopyPhase phase, int64_t done, int64_t total) {
    progress.show(phase, done, total);
  };
  return options;
}

int tell(const ckpt::CopyReport& report, const std::string& from, const std::string& to, const char* moved,
         bool as_json) {
  if (as_json) {
    print_json(json{{"step", report.step},
                    {"from", from},
                    {"to", to},
                    {"was_there", report.was_there},
                    {"replaced", !report.replaced.empty()},
                    {"replaced_steps", report.replaced},
                    {"repaired", report.repaired},
                    {"files", report.files},
                    {"bytes", report.bytes},
                    {moved, report.sent_bytes},
                    {"kept_bytes", report.reused_bytes},
                    {"seconds", report.seconds},
                    {"verify_seconds", report.verify_seconds}});
    return 0;
  }
  std::string also;
  if (!report.repaired.empty())
    also += fmt::format("; damaged there, and repaired: step {}", fmt::join(report.repaired, ", "));
  if (!report.replaced.empty())
    also += fmt::format("; another checkpoint was there and is gone: step {}", fmt::join(report.replaced, ", "));
  if (report.was_there) {
    fmt::print("{}: step {} is there already, and whole{}\n", to, report.step, also);
    return 0;
  }
  fmt::print("{}: step {}, {} in {} from {}, {} in all, {} of it to verify", to, report.step,
             format_bytes(report.bytes), count_text(report.files, "file"), from,
             telemetry::format_duration(report.seconds), telemetry::format_duration(report.verify_seconds));
  if (report.reused_bytes > 0) fmt::print("; {} were there from before", format_bytes(report.reused_bytes));
  fmt::print("{}\n", also);
  return 0;
}

/// A directory's path in full, as names that can be taken apart; an S3 place as it stands, and what was meant as one.
std::string plain(const std::string& place) {
  if (place.empty() || ckpt::is_store_address(place)) return place;
  const fs::path path = fs::absolute(place).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

/// PLACE or PLACE/step-NNNNNNNN.
std::pair<std::string, std::optional<int64_t>> split_step(std::string place) {
  while (place.size() > 1 && place.back() == '/') place.pop_back();
  const size_t slash = place.rfind('/');
  if (slash == std::string::npos) return {place, std::nullopt};
  const std::optional<int64_t> step = ckpt::parse_step_dir_name(place.substr(slash + 1));
  return step ? std::pair(place.substr(0, slash), step) : std::pair(place, std::optional<int64_t>());
}

/// A folder of steps, into which one goes. In a step's own folder nobody would find it, and it would go with that step.
Status check_folder_of_steps(const std::string& place, const char* what) {
  const auto [above, step] = split_step(place);
  if (!place.empty() && !step) return ckpt::is_s3_path(place) ? Status() : check_outside_checkpoints(place);
  if (place.empty()) return Error{ErrorCode::kInvalidInput, fmt::format("{} has no name", what)};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: is the name of one step; give the folder of steps, {}", place, above)};
}

/// What is known of the step here is known there.
Status push_label(ckpt::Place& place, const ckpt::Labels& here, int64_t step) {
  if (!here.contains(step)) return {};
  RT_TRY_SET(const std::vector<ckpt::PlacedStep> there, place.list());
  RT_TRY_SET(ckpt::Labels labels, ckpt::placed_labels(place));
  ckpt::merge_labels({{step, here.at(step)}}, labels);
  std::vector<int64_t> steps;
  for (const ckpt::PlacedStep& one : there) steps.push_back(one.step);
  return ckpt::place_labels(place, labels, steps);
}

Result<int> push(CopyArgs args, bool as_json) {
  RT_TRY_SET(const fs::path resolved, resolve_checkpoint(args.from));
  fs::path source = plain(resolved.string());  // "DIR/" and "DIR/." are that folder too, and so is a link to it
  if (std::error_code failed; !ckpt::parse_step_dir_name(source.filename().string())) {
    const fs::path real = fs::canonical(source, failed);
    if (!failed) source = real;
  }
  args.place.path = plain(args.to);
  RT_TRY(check_folder_of_steps(args.place.path, "the place"));
  RT_TRY(check_not_beside_checkpoints(args.to));
  args.place.part_bytes = args.part_bytes;
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(args.place));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const RunLock lock, ckpt::is_s3_path(args.to) ? Result<RunLock>(RunLock()) : lock_run_of(args.place.path));
  if (const Result<ckpt::Manifest> manifest = ckpt::read_manifest(*io, source); manifest.ok()) {
    RT_TRY_SET(const std::string owner, run_of_target(*place));
    RT_TRY(check_run(place->describe(), owner, manifest.value().step,
                     {manifest.value().run.id, run_around(source.parent_path())}));
  }
  RT_TRY_SET(const ckpt::Labels here, ckpt::read_labels(*io, source.parent_path()));
  Result<ckpt::CopyReport> done = [&] {
    CopyProgress progress;
    return ckpt::copy_checkpoint(*place, *io, source, copy_options(args, progress));
  }();
  RT_TRY_SET(const ckpt::CopyReport report, unless_removed({source}, std::move(done)));
  RT_TRY(push_label(*place, here, report.step));
  return tell(report, source.string(), place->describe(), "sent_bytes", as_json);
}

Result<int> fetch(CopyArgs args, bool as_json) {
  RT_TRY(check_folder_of_steps(plain(args.to), "the folder to bring it to"));
  const auto [path, asked] = split_step(plain(args.from));
  args.place.path = path;
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(args.place));
  RT_TRY_SET(const std::vector<ckpt::PlacedStep> steps, place->list());
  RT_TRY_SET(const ckpt::Labels labels, ckpt::placed_labels(*place));
  const ckpt::PlacedStep* found = nullptr;
  for (auto step = steps.rbegin(); step != steps.rend() && found == nullptr; ++step) {
    if (!step->complete || (asked && step->step != *asked)) continue;
    const auto label = labels.find(step->step);
    if (!asked && label != labels.end() && label->second.label == ckpt::Label::kBad) {
      fmt::print(stderr, "step {} is passed over, it is bad: {}\n", step->step, printable(label->second.why));
    } else {
      found = &*step;
    }
  }
  if (found == nullptr) {
    std::string there;
    for (const ckpt::PlacedStep& step : steps) {
      there += fmt::format("{}{}{}", there.empty() ? "" : ", ", step.step, step.complete ? "" : " (incomplete)");
    }
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: {}; there: {}", place->describe(),
                             asked ? fmt::format("no complete step {}", *asked) : "no complete step",
                             there.empty() ? "nothing" : there)};
  }
  // A run folder keeps its steps below checkpoints/.
  fs::path target = plain(args.to);
  std::error_code failed;
  if (fs::is_directory(target / "checkpoints", failed)) target /= "checkpoints";
  RT_TRY_SET(const RunLock lock, lock_run_of(target));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> here, ckpt::open_directory_place({.path = target.string()}));
  RT_TRY_SET(const std::string owner, run_of_target(*here));
  if (!owner.empty()) {
    // What a run has copied there comes back to it, also what it began with, and what is here can be repaired.
    const Result<ckpt::Manifest> manifest = ckpt::placed_manifest(*place, found->step);
    const Result<bool> same = ckpt::same_checkpoint(*place, found->step, target / ckpt::step_dir_name(found->step));
    RT_TRY_SET(const std::string from, noted_run(*place));
    if (manifest.ok() && !(same.ok() && same.value())) {
      RT_TRY(check_run(here->describe(), owner, found->step,
                       {manifest.value().run.id, from, ckpt::is_s3_path(path) ? "" : run_around(path)}));
    }
  }
  Result<ckpt::CopyReport> done = [&] {
    CopyProgress progress;
    return ckpt::fetch_checkpoint(*place, *io, *found, target, copy_options(args, progress));
  }();
  RT_TRY_SET(const ckpt::CopyReport report, std::move(done));
  RT_TRY(ckpt::take_labels(*io, target, labels));
  return tell(report, place->describe(), report.dir.string(), "received_bytes", as_json);
}

struct StoreRow {
  ckpt::PlacedStep step;
  ckpt::PlacedLook look;
  std::string address;
};

json store_json(const StoreRow& row) {
  json out{{"step", row.step.step},
           {"dir", row.address},
           {"complete", row.look.problem.empty()},
           {"created_unix_ms", row.look.manifest ? row.look.manifest->created_unix_ms : 0},
           {"size_bytes", row.step.bytes}};
  if (!row.look.problem.empty()) out.update({{"problem", row.look.problem}, {"unread", row.look.unread}});
  if (!row.look.problem.empty()) return out;
  const ckpt::Manifest& manifest = *row.look.manifest;
  out.update({{"metrics", manifest.metrics},
              {"samples", manifest.samples},
              {"tokens", manifest.tokens},
              {"weights_only", weights_only(manifest)},
              {"origin", manifest.origin},
              {"host", manifest.writer.host}});
  return out;
}

void print_store_row(const StoreRow& row, bool newest, const Palette& color) {
  const std::optional<ckpt::Manifest>& manifest = row.look.manifest;
  const bool has_loss = row.look.problem.empty() && manifest->metrics.contains("loss");
  fmt::print("{:<16}{:>14}{:>12}{:>12}   ", ckpt::step_dir_name(row.step.step),
             manifest ? age_text(manifest->created_unix_ms) : "?", format_bytes(row.step.bytes),
             has_loss ? fmt::format("{:.5g}", manifest->metrics.at("loss")) : "-");
  if (row.look.problem.empty()) {
    fmt::print("{}complete{}{}{}{}\n", color.green, color.reset, newest ? ", the newest" : "",
               weights_only(*manifest) ? ", weights alone" : "",
               manifest->origin.empty() ? "" : ", " + printable(manifest->origin));
    return;
  }
  const char* kind = row.look.unread ? "not read" : row.step.complete ? "damaged" : "incomplete";
  fmt::print("{}{}{}: {}\n", color.red, kind, color.reset, printable(row.look.problem));
}

}  // namespace

Result<int> list_store(ckpt::PlaceOptions options, bool as_json) {
  const auto [path, asked] = split_step(options.path);
  options.path = path;
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> place, ckpt::open_place(options));
  RT_TRY_SET(const std::vector<ckpt::PlacedStep> there, place->list());
  RT_TRY_SET(const std::string run, noted_run(*place));
  std::vector<StoreRow> rows;
  std::optional<int64_t> newest;
  int64_t bytes = 0;
  for (const ckpt::PlacedStep& step : there) {
    if (asked && step.step != *asked) continue;
    RT_TRY_SET(ckpt::PlacedLook look, ckpt::look_at_placed(*place, there, step));
    if (look.problem.empty()) newest = step.step;
    if (look.manifest) look.manifest->shards = {};  // the hashes of all chunks: not to be held of every step
    bytes += step.bytes;
    rows.push_back({step, std::move(look), ckpt::place_join(place->describe(), ckpt::step_dir_name(step.step))});
  }
  if (as_json) {
    json steps = json::array();
    for (const StoreRow& row : rows) steps.push_back(store_json(row));
    print_json({{"dir", place->describe()},
                {"run", run.empty() ? json() : json(run)},
                {"checkpoints", std::move(steps)},
                {"newest_complete", newest ? json(*newest) : json()},
                {"leftovers", json::array()},
                {"unknown", json::array()}});
    return 0;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  const std::string whose = run.empty() ? "" : fmt::format(" (of run {})", printable(run));
  if (rows.empty()) {
    fmt::print("{}{}: {}\n", place->describe(), whose,
               asked ? fmt::format("no step {}", *asked) : "no checkpoints; a run's copies lie below its name");
    return 0;
  }
  fmt::print("{}{:<16}{:>14}{:>12}{:>12}{}   {}{}\n", color.dim, "step", "age", "size", "loss", color.reset,
             place->describe(), whose);
  for (const StoreRow& row : rows) print_store_row(row, row.step.step == newest, color);
  if (rows.size() > 1) fmt::print("{} in all\n", format_bytes(bytes));
  return 0;
}

void add_store_options(CLI::App& command, ckpt::PlaceOptions& place) {
  command.add_option("--ca-file", place.ca_file, "of an S3 store with https: whom to believe (PEM)");
  command.add_option("--endpoint", place.endpoint, "of an S3 store that is not Amazon's, as http://HOST:PORT")
      ->type_name("URL");
  command.add_option("--region", place.region, "of the bucket (default: AWS_REGION, or us-east-1)")->type_name("NAME");
  command.add_option("--timeout", place.timeout_s, "seconds without any progress before giving up (default 60)")
      ->type_name("SECONDS")
      ->transform(number_in(1.0, 86400.0));
}

void add_ckpt_copy(CLI::App& ckpt, Session& session) {
  const auto declare = [&](const char* name, const char* what, const char* from, const char* from_what, const char* to,
                           const char* to_what, Result<int> (*action)(CopyArgs, bool)) {
    CLI::App* command = ckpt.add_subcommand(name, what);
    const auto args = std::make_shared<CopyArgs>();
    command->add_option(from, args->from, from_what)->required();
    command->add_option(to, args->to, to_what)->required();
    add_store_options(*command, args->place);
    command->add_option("--max-mb-per-s", args->max_mb_per_s, "not faster than so many 10^6 bytes a second")
        ->type_name("RATE")
        ->transform(number_in(0.001, 1e6));
    add_json_flag(*command, session);
    command->callback([args, action, &session] {
      session.action = [args, action, &session] { return action(*args, session.json); };
    });
    return std::pair(command, args);
  };
  const auto [command, args] = declare(
      "push", "copy a checkpoint to another directory or an S3 store; resumes after a kill", "DIR",
      "step folder, or run folder for its newest complete step", "PLACE", "directory, or s3://bucket/prefix", push);
  command
      ->add_option("--part-size", args->part_bytes,
                   "of large files on S3, 5MiB to 5GiB (default 16MiB); up to four, in 256 MiB, or one are in memory")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command->add_flag("--no-read-back", args->no_read_back, "trust the place's checksums instead of reading all back");
  command->add_flag("--overwrite", args->overwrite, "replace another run's checkpoint of that step");
  command->footer(
      "Killed or stopped, the same command resumes: only what is missing is sent.\n"
      "Exit codes: 0 done, 2 refused, 65 the source is damaged, 69 the place does not answer, or a run trains there, "
      "74 disk full\n"
      "or an I/O error, 75 stopped.\n"
      "Examples:\n"
      "  cairn ckpt push runs/mine s3://bucket/prefix/mine\n"
      "  cairn ckpt push runs/mine/checkpoints/step-00001200 /mnt/shared/mine --max-mb-per-s 200");
  const auto fetching =
      declare("fetch", "copy a checkpoint back from there; verifies every byte, repairs what is damaged here", "PLACE",
              "directory or s3://bucket/prefix, for its newest complete step or with /step-NNNNNNNN", "DIR",
              "run folder, or folder of steps", fetch);
  fetching.first->footer(
      "Exit codes: as `cairn ckpt push`.\n"
      "Examples:\n"
      "  cairn ckpt fetch s3://bucket/prefix/mine runs/mine\n"
      "  cairn ckpt fetch /mnt/shared/mine/step-00001200 runs/mine");
}

}  // namespace cairn::tools
