// cairn ckpt prune RUN --keep RULES: removes the checkpoints that no rule keeps, or with --archive makes them smaller
// where they are. Without --yes it only says which.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

#include "ckpt/archive.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/policy.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "ckpt/run_labels.h"
#include "ckpt/store/posix_backend.h"
#include "runtime/core/unique_handle.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct PruneArgs {
  std::string path, keep;
  std::vector<int64_t> keep_steps, remove_steps;
  std::vector<std::string> step;  // what --keep-step was called once
  int64_t run_steps = 0;
  bool yes = false, leftovers = false, other_hosts = false, archive = false, even_good = false;
};

/// What happened to a checkpoint that no rule keeps.
struct Archived {
  int64_t step = 0, bytes_before = 0, bytes_after = 0;
  std::string left_alone;  // why; else empty
  bool damaged = false;
};

struct ArchivedAll {
  std::vector<Archived> steps;
  std::optional<Error> failed;  // of one of them, which says so; those behind it were not tried
};

/// Compresses each of `steps` where it is. One that shares files with others is left alone: they would lose theirs. So
/// is one that holds a person's files, and a damaged one, and the others are compressed all the same.
Result<ArchivedAll> archive_all(ckpt::PosixBackend& io, const fs::path& dir, const ckpt::Catalog& catalog,
                                const std::vector<int64_t>& steps, bool really) {
  RT_TRY_SET(std::set<int64_t> shared, ckpt::announced_references(io, dir));  // also by what cannot be read
  std::map<int64_t, std::string> damaged;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    shared.insert(info.references.begin(), info.references.end());
    if (!info.references.empty()) shared.insert(info.step);
    if (!info.complete) damaged[info.step] = info.problem;
  }
  ArchivedAll out;
  for (const int64_t step : steps) {
    Archived one{.step = step};
    if (out.failed) {
      one.left_alone = "not tried, for one before it failed";
    } else if (shared.contains(step)) {
      one.left_alone = "it shares files with other steps";
    } else if (const auto problem = damaged.find(step); problem != damaged.end()) {
      one.damaged = true;
      one.left_alone = "it is damaged: " + problem->second;
    } else if (const auto others = ckpt::unnamed_entries(io, dir / ckpt::step_dir_name(step));
               others.ok() && !others.value().empty()) {
      one.left_alone = fmt::format("it holds what is no part of it and would go: {}", fmt::join(others.value(), ", "));
    } else if (really) {
      const Result<ckpt::ArchiveReport> report = [&] {
        ByteProgress progress(fmt::format("of {} compressed", ckpt::step_dir_name(step)));
        return ckpt::archive_checkpoint(io, dir, step,
                                        [&](int64_t done, int64_t total) { progress.show(done, total); });
      }();
      one.damaged = !report.ok() && report.error().code == ErrorCode::kCorrupt;
      if (report.ok()) {
        if (report.value().was_archived) one.left_alone = "it is compressed already";
        one.bytes_before = report.value().bytes_before;
        one.bytes_after = report.value().bytes_after;
      } else if (one.damaged) {
        one.left_alone = "it is damaged: " + report.error().message;
      } else {
        one.left_alone = "failed: " + report.error().message;
        out.failed = report.error();
      }
    }
    out.steps.push_back(std::move(one));
  }
  return out;
}

/// What clean_leftovers would do.
ckpt::CleanReport would_clean(const ckpt::Names& names, const std::function<bool(const ckpt::WriterId&)>& alive) {
  ckpt::CleanReport report;
  for (const std::string& name : names.leftovers) {
    if (std::ranges::find(names.cut_off, name, &ckpt::CutOff::made) != names.cut_off.end()) {
      report.put_back.push_back(name + ": would be put in its place");
    } else if (const std::string why = ckpt::why_left(name, alive); why.empty()) {
      report.removed.push_back(name);
    } else {
      report.left.push_back(fmt::format("{}: {}", name, why));
    }
  }
  return report;
}

void tell_leftovers(const ckpt::CleanReport& cleaned, const std::map<std::string, int64_t>& bytes, bool done) {
  for (const std::string& line : cleaned.put_back) fmt::print("{}\n", line);
  for (const std::string& name : cleaned.removed) {
    const std::optional<ckpt::WorkDir> work = ckpt::parse_work_dir_name(name);
    const bool elsewhere = work && !ckpt::is_of_this_host(work->writer);
    const auto size = bytes.find(name);
    fmt::print("{}: {}, {}{}\n", name, done ? "removed" : "would go",
               format_bytes(size == bytes.end() ? 0 : size->second),
               elsewhere ? fmt::format(", of another host, {}", work->writer.host) : "");
  }
  for (const std::string& name : cleaned.left) fmt::print("left: {}\n", printable(name));
}

/// That nothing proved is left behind what goes.
void warn_of_good(const ckpt::Catalog& catalog, const std::vector<ckpt::Fate>& fates) {
  std::optional<int64_t> good;
  for (size_t k = 0; k < fates.size(); ++k) {
    const ckpt::CheckpointInfo& info = catalog.checkpoints[k];
    if (!info.complete || info.label != ckpt::Label::kGood) continue;
    if (fates[k].stays) return;
    good = info.step;
  }
  if (good) fmt::print(stderr, "warning: step {} is the last good checkpoint, and goes\n", *good);
}

Result<int> prune(const PruneArgs& args, bool as_json) {
  if (!args.step.empty()) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("--step {0}: say --keep-step {0} for it to stay with what the rules keep, or --remove-step "
                    "{0} to remove it and no others",
                    args.step[0])};
  }
  const bool by_rules = !args.keep.empty() || !args.keep_steps.empty(), by_name = !args.remove_steps.empty();
  if (by_name && (by_rules || args.archive)) {
    return Error{ErrorCode::kInvalidInput,
                 "--remove-step removes these steps and no others: give it without --keep, --keep-step and --archive"};
  }
  if (args.archive && !by_rules) {
    return Error{ErrorCode::kInvalidInput,
                 "--archive compresses what no rule keeps: say what stays as it is, for example --keep 'last(3)'"};
  }
  if (!by_rules && !by_name && !args.leftovers) {
    return Error{ErrorCode::kInvalidInput,
                 "say what stays, for example --keep 'last(3), every(1000)', or --keep-step 1200, or what goes: "
                 "--remove-step 1200; --leftovers alone removes only what dead saves have left"};
  }
  if (args.other_hosts && !args.leftovers) {
    return Error{ErrorCode::kInvalidInput,
                 "--other-hosts is about what dead saves and removals have left: give --leftovers too"};
  }
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(args.path));
  ckpt::PosixBackend io;
  RunLock lock;
  if (args.yes) {
    RT_TRY_SET(lock, lock_run_of(dir));
  }
  ckpt::RetentionPolicy policy;
  if (by_rules) {
    std::vector<Keep> rules;
    if (!args.keep.empty()) {
      RT_TRY_SET(rules, ckpt::parse_keep(args.keep));
    }
    policy = ckpt::retention_policy(rules, args.run_steps);
    policy.keep_steps = args.keep_steps;
    policy.even_good = args.even_good;
  }
  ckpt::CatalogCache cache;
  ckpt::Catalog catalog;
  std::vector<ckpt::Fate> fates;
  std::vector<int64_t> unkept;
  const auto look = [&]() -> Status {
    RT_TRY_SET(catalog, ckpt::list_checkpoints(io, dir, &cache));
    const ckpt::Labels again = ckpt::label_from_metrics(io, dir, catalog);
    if (args.yes && !again.empty()) RT_TRY(ckpt::write_labels(io, dir, again));  // what is removed relies on them
    for (const auto& [flag, steps] :
         {std::pair("--keep-step", &args.keep_steps), {"--remove-step", &args.remove_steps}}) {
      for (const int64_t step : *steps) {
        if (std::ranges::find(catalog.checkpoints, step, &ckpt::CheckpointInfo::step) == catalog.checkpoints.end())
          return Error{ErrorCode::kInvalidInput, fmt::format("{} {}: {} has no such step", flag, step, dir.string())};
      }
    }
    if (by_name) {
      Result<std::vector<ckpt::Fate>> planned =
          ckpt::plan_removal(catalog.checkpoints, {args.remove_steps.begin(), args.remove_steps.end()}, args.even_good);
      if (!planned.ok()) return std::move(planned).error().with(dir.string());
      fates = std::move(planned).value();
    } else if (by_rules) {
      RT_TRY_SET(fates, ckpt::plan_retention(catalog.checkpoints, policy));
    }
    if (!args.archive) ckpt::spare_referenced(io, dir, fates);
    for (const ckpt::Fate& fate : fates) {  // what steps that cannot be read say, and saves at work
      if (fate.stays && std::ranges::find(args.remove_steps, fate.step) != args.remove_steps.end())
        return Error{ErrorCode::kInvalidInput, fmt::format("{}: step {} stays: {}", dir.string(), fate.step, fate.why)};
    }
    unkept.clear();
    for (const ckpt::Fate& fate : fates) {
      if (!fate.stays) unkept.push_back(fate.step);
    }
    return {};
  };
  RT_TRY(look());
  warn_of_good(catalog, fates);
  // Before all else: the rest may need the room.
  std::vector<std::string> of_archives;  // and what a killed archiving of these steps has left, asked for or not
  if (args.archive && !args.leftovers) {
    std::vector<int64_t> whole;
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
      if (info.complete && std::ranges::find(unkept, info.step) != unkept.end()) whole.push_back(info.step);
    }
    of_archives = ckpt::left_by_saves_of(io, dir, catalog.leftovers, whole);
  }
  const auto alive = [&](const ckpt::WriterId& writer) {
    if (args.leftovers) return ckpt::may_be_alive(writer) && !(args.other_hosts && !ckpt::is_of_this_host(writer));
    return std::ranges::none_of(
        of_archives, [&](const std::string& name) { return ckpt::parse_work_dir_name(name)->writer == writer; });
  };
  const bool cleans = args.leftovers || !of_archives.empty();
  ckpt::CleanReport cleaned;
  std::map<std::string, int64_t> leftover_bytes;
  if (cleans) {
    RT_TRY_SET(const ckpt::Names names, ckpt::list_names(io, dir));
    for (const std::string& name : names.leftovers) leftover_bytes[name] = ckpt::bytes_lying_there(io, dir / name);
    cleaned = would_clean(names, alive);
    if (args.yes) {
      RT_TRY_SET(cleaned, ckpt::clean_leftovers(io, dir, alive));
      RT_TRY(look());  // a step may have been put back
    }
    if (!args.leftovers) cleaned.left.clear();
  }
  ckpt::RetentionReport removed;
  ArchivedAll archived;
  if (args.archive) {
    RT_TRY_SET(archived, archive_all(io, dir, catalog, unkept, args.yes));
  } else if (args.yes && (by_rules || by_name)) {
    RT_TRY_SET(removed, by_name ? ckpt::remove_steps(io, dir, unkept, ckpt::this_writer())
                                : ckpt::apply_retention(io, dir, policy, ckpt::this_writer()));
    for (ckpt::Fate& fate : fates) {
      if (!fate.stays && std::ranges::find(removed.needed, fate.step) != removed.needed.end())
        fate = {fate.step, true, "another checkpoint or a save at work refers to it"};
    }
  }
  int64_t kept_bytes = 0, freed_bytes = 0;
  const auto size_of = [&](int64_t step) {
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
      if (info.step == step) return info.size_bytes;
    }
    return int64_t{0};
  };
  const std::set<int64_t> gone(removed.removed.begin(), removed.removed.end());
  const bool removes = (by_rules || by_name) && !args.archive;
  const bool did_remove = args.yes && removes;
  for (const ckpt::Fate& fate : fates) {
    const bool stays = fate.stays || args.archive || (did_remove && !gone.contains(fate.step));
    (stays ? kept_bytes : freed_bytes) += size_of(fate.step);
  }
  for (const Archived& one : archived.steps) {
    kept_bytes -= one.bytes_before - one.bytes_after;
    freed_bytes += one.bytes_before - one.bytes_after;
  }
  const bool damaged = args.yes && std::ranges::any_of(archived.steps, &Archived::damaged);
  const int code = by_name && !removed.needed.empty() ? 69
                   : archived.failed                  ? archived.failed->exit_code()
                   : !removed.problems.empty()        ? 74
                   : damaged                          ? 65
                                                      : 0;
  if (as_json) {
    json list = json::array();
    for (const ckpt::Fate& fate : fates) {
      list.push_back(
          {{"step", fate.step}, {"stays", fate.stays}, {"why", fate.why}, {"size_bytes", size_of(fate.step)}});
    }
    json out = {{"dir", dir.string()},         {"done", args.yes},           {"checkpoints", std::move(list)},
                {"kept_bytes", kept_bytes},    {"freed_bytes", freed_bytes}, {"removed", removed.removed},
                {"problems", removed.problems}};
    if (archived.failed) out["problems"].push_back(archived.failed->message);
    if (args.archive) {
      json done = json::array();
      for (const Archived& one : archived.steps) {
        done.push_back({{"step", one.step},
                        {"bytes_before", one.bytes_before},
                        {"bytes_after", one.bytes_after},
                        {"left_alone", one.left_alone}});
      }
      out["archived"] = std::move(done);
    }
    if (cleans) {
      int64_t bytes = 0;
      for (const std::string& name : cleaned.removed) bytes += leftover_bytes[name];
      out["leftovers"] = {{"put_back", cleaned.put_back},
                          {args.yes ? "removed" : "would_go", cleaned.removed},
                          {"left", cleaned.left},
                          {"freed_bytes", bytes}};
    }
    print_json(out);
    // The one object says it too.
    if (archived.failed) fmt::print(stderr, "cairn ckpt prune: {}\n", printable(archived.failed->message, true));
    return code;
  }
  tell_leftovers(cleaned, leftover_bytes, args.yes);
  const Palette color = palette_for(STDOUT_FILENO);
  for (const Archived& one : archived.steps) {
    const std::string name = ckpt::step_dir_name(one.step);
    if (!one.left_alone.empty()) {
      fmt::print("{:<16}{:>12}   left alone: {}\n", name, format_bytes(size_of(one.step)), printable(one.left_alone));
    } else if (args.yes) {
      fmt::print("{:<16}{:>12}   compressed to {}\n", name, format_bytes(one.bytes_before),
                 format_bytes(one.bytes_after));
    } else {
      fmt::print("{:<16}{:>12}   would be compressed\n", name, format_bytes(size_of(one.step)));
    }
  }
  if (args.archive && !args.yes) fmt::print("nothing was touched: --yes does it\n");
  for (const ckpt::Fate& fate : fates) {
    if (args.archive && !fate.stays) continue;
    const char* word = fate.stays ? "stays" : !args.yes ? "would go" : gone.contains(fate.step) ? "removed" : "failed";
    fmt::print("{:<16}{:>12}   {}{}{}: {}\n", ckpt::step_dir_name(fate.step), format_bytes(size_of(fate.step)),
               fate.stays ? color.green : color.red, word, color.reset, printable(fate.why));
  }
  for (const std::string& problem : removed.problems) fmt::print("not removed: {}\n", problem);
  if (removes) {
    fmt::print("{} {}, {} stay{}\n", format_bytes(freed_bytes), args.yes ? "freed" : "would be freed",
               format_bytes(kept_bytes), args.yes ? "" : "; nothing was removed: --yes does it");
  }
  if (archived.failed) return *archived.failed;
  return code;
}

}  // namespace

void add_ckpt_prune(CLI::App& ckpt, Session& session) {
  CLI::App* command =
      ckpt.add_subcommand("prune", "remove the checkpoints that no rule keeps; says which unless --yes");
  const auto args = std::make_shared<PruneArgs>();
  command->add_option("PATH", args->path, "run folder or folder of steps")->required();
  command
      ->add_option("--keep", args->keep,
                   "rules, as in a recipe: last(n), every(steps or time), best(metric, n), at(steps), within(time), "
                   "fractions(n); what any of them keeps stays")
      ->type_name("RULES");
  command->add_option("--keep-step", args->keep_steps, "this step stays too; repeatable")
      ->type_name("N")
      ->transform(whole_number(0, int64_t{1} << 50))
      ->expected(1)
      ->take_all();
  command
      ->add_option("--remove-step", args->remove_steps,
                   "this step goes, and no others; repeatable. Not the newest complete one, nor what others refer to")
      ->type_name("N")
      ->transform(whole_number(0, int64_t{1} << 50))
      ->expected(1)
      ->take_all();
  command->add_option("--step", args->step)->expected(1)->take_all()->group("");  // refused, with both names
  command->add_option("--run-steps", args->run_steps, "length of the whole run, for fractions(n)")
      ->type_name("N")
      ->transform(whole_number(1, int64_t{1} << 50));
  command->add_flag("--leftovers", args->leftovers, "also what dead saves and removals have left");
  command->add_flag("--other-hosts", args->other_hosts,
                    "with --leftovers: also what writers of other hosts have left; you know that they are gone");
  command->add_flag("--archive", args->archive,
                    "what no rule keeps is not removed but compressed where it is, without loss; any command reads it");
  command->add_flag("--even-good", args->even_good,
                    "the newest good checkpoint, and the next that may prove good, go too where no rule keeps them");
  command->add_flag("--yes", args->yes, "do it; without it nothing is touched");
  add_json_flag(*command, session);
  command->footer(
      "The newest complete checkpoint always stays, and so does every step that a kept one refers to. The newest good "
      "one,\n"
      "and the next that may prove good, stay without --even-good. A run in training is refused.\n"
      "Exit codes: 0 done, 2 refused, 65 a step is damaged, 69 the run is in training, 74 an I/O error.\nExamples:\n  "
      "cairn ckpt prune runs/gpt2 --keep 'last(3), every(1000)'\n"
      "  cairn ckpt prune runs/gpt2 --keep 'best(loss, 2)' --keep-step 1200 --yes\n"
      "  cairn ckpt prune runs/gpt2 --remove-step 1200 --yes\n"
      "  cairn ckpt prune runs/gpt2 --keep 'last(1)' --archive --yes\n"
      "  cairn ckpt prune runs/gpt2 --leftovers --other-hosts --yes");
  command->callback([args, &session] { session.action = [args, &session] { return prune(*args, session.json); }; });
}

}  // namespace cairn::tools
