// cairn ckpt verify PATH...: every byte against its checksum.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/verify/verify.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run/agent/copies.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// What to check: a step folder, or the newest committed step. Not the newest complete one: whoever asks whether a
/// run's checkpoint is whole wants to hear that its newest is not.
Result<fs::path> step_to_verify(const std::string& path) {
  fs::path asked = fs::path(path).lexically_normal();
  if (!asked.has_filename()) asked = asked.parent_path();  // "step-00000010/"
  RT_TRY_SET(const fs::file_type type, type_of(asked));
  RT_TRY_SET(const fs::file_type manifest, type_of(asked / ckpt::kManifestName));
  if (manifest != fs::file_type::not_found) return asked;
  if (ckpt::parse_step_dir_name(asked.filename().string()) && type == fs::file_type::directory) return asked;
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(path));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, dir));
  if (catalog.checkpoints.empty()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no checkpoint (step-NNNNNNNN) in it", dir.string())};
  }
  return catalog.checkpoints.back().dir;
}

struct VerifyArgs {
  std::vector<std::string> paths;
  bool all = false, no_structure = false;
};

/// Which folder has the name at this moment: a step may go while it is read, or another save take its place.
std::optional<std::pair<dev_t, ino_t>> identity_of(const fs::path& dir) {
  struct stat info {};
  if (::stat(dir.c_str(), &info) != 0) return std::nullopt;
  return std::pair(info.st_dev, info.st_ino);
}

json to_json(const fs::path& dir, const ckpt::VerifyReport& report) {
  json damages = json::array();
  for (const ckpt::Damage& damage : report.damages) {
    damages.push_back({{"file", damage.file},
                       {"shard", damage.shard},
                       {"chunk", damage.chunk},
                       {"offset", damage.offset},
                       {"bytes", damage.bytes},
                       {"message", damage.message}});
    if (!damage.tensor.empty()) {
      damages.back()["kind"] = damage.kind;
      damages.back()["tensor"] = damage.tensor;
    }
  }
  return {{"dir", dir.string()},   {"whole", report.whole()},  {"damages", std::move(damages)},
          {"files", report.files}, {"shards", report.shards},  {"chunks", report.chunks},
          {"bytes", report.bytes}, {"seconds", report.seconds}};
}

void tell(const fs::path& dir, const ckpt::VerifyReport& report, int64_t max_damages) {
  const Palette color = palette_for(STDOUT_FILENO);
  const double gb_per_s = report.seconds > 0 ? static_cast<double>(report.bytes) / report.seconds / 1e9 : 0;
  std::map<std::string, int64_t> chunks_of;  // damaged, by tensor
  for (const ckpt::Damage& damage : report.damages) {
    fmt::print("{}\n", printable(damage.message));
    if (!damage.tensor.empty()) ++chunks_of[damage.kind + " " + damage.tensor];
  }
  if (static_cast<int64_t>(report.damages.size()) >= max_damages)
    fmt::print("the search ended after {}\n", count_text(report.damages.size(), "place"));
  if (report.damages.size() > 1) {
    for (const auto& [tensor, count] : chunks_of)
      fmt::print("damaged tensor: {} ({})\n", printable(tensor), count_text(count, "place"));
  }
  fmt::print("{}: {}{}{}; {}, {}, {}, {} in {} ({:.2f} GB/s)\n", dir.string(), report.whole() ? color.green : color.red,
             report.whole() ? std::string("whole")
                            : fmt::format("damaged in {} {}", report.damages.size(),
                                          report.damages.size() == 1 ? "place" : "places"),
             color.reset, count_text(report.files, "file"), count_text(report.shards, "shard"),
             count_text(report.chunks, "chunk"), format_bytes(report.bytes), telemetry::format_duration(report.seconds),
             gb_per_s);
}

/// What whoever has heard the verdict does next, of one folder of checkpoints.
struct Advice {
  std::optional<int64_t> sound;  // the newest step whose every byte is sound
  std::string text;
};

/// Sound steps below the damaged ones are looked for, from the newest down, as a start does: `verdicts` says what is
/// known already.
Result<Advice> advise(const fs::path& folder, const std::map<int64_t, bool>& verdicts, ckpt::IoBackend& io,
                      const std::function<Result<ckpt::VerifyReport>(const fs::path& dir)>& check) {
  const fs::path run = folder.filename() == "checkpoints" ? folder.parent_path() : fs::path();
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, folder));
  Advice out;
  std::vector<int64_t> damaged;
  for (auto info = catalog.checkpoints.rbegin(); info != catalog.checkpoints.rend() && !out.sound; ++info) {
    const auto known = verdicts.find(info->step);
    bool sound = known != verdicts.end() && known->second;
    if (known == verdicts.end() && info->complete) {
      const Result<ckpt::VerifyReport> report = check(info->dir);
      sound = report.ok() && report.value().whole();
    }
    if (sound) {
      out.sound = info->step;
    } else {
      damaged.push_back(info->step);
    }
  }
  const bool newest_is_sound = damaged.empty();
  if (out.sound && newest_is_sound) {
    out.text = fmt::format(
        "the newest step, {}, is sound: a start resumes from it. A damaged older one is removed by the "
        "run's rules in time, or by `cairn ckpt prune {} --remove-step N`",
        *out.sound, (run.empty() ? folder : run).string());
  } else if (out.sound) {
    out.text = fmt::format(
        "step {} is sound: the next start of the run passes over the damaged one{} above it and goes "
        "on from there, unless shared memory of this machine holds a newer one",
        *out.sound, damaged.size() == 1 ? "" : "s");
  } else {
    out.text =
        "no sound step is left here, and a start is refused: bring one from a copy, or begin anew in another folder";
  }
  const Result<std::string> recipe = run.empty() ? Result<std::string>(os_error(ENOENT, "run")) : recipe_of_run(run);
  const Result<Recipe> decoded = recipe.ok() ? dsl::decode_recipe(recipe.value()) : Result<Recipe>(recipe.error());
  if (!decoded.ok() || newest_is_sound) return out;
  for (const CopyTo& to : decoded.value().checkpoint.copy_to) {
    const std::string place = place_of_run(to, run);
    out.text += fmt::format(
        "\n  a copy may be whole: `cairn ckpt fetch {0}/{1} {2}` brings it and repairs what "
        "is damaged here (`cairn ckpt ls {0}` lists what is there)",
        place, ckpt::step_dir_name(damaged.front()), run.string());
  }
  return out;
}

Result<int> verify(const VerifyArgs& args, bool as_json) {
  constexpr int kDamaged = 65;
  std::vector<fs::path> dirs;
  for (const std::string& path : args.paths) {
    if (!args.all) {
      RT_TRY_SET(fs::path dir, step_to_verify(path));
      dirs.push_back(std::move(dir));
      continue;
    }
    RT_TRY_SET(const fs::path dir, checkpoints_dir_of(path));
    ckpt::PosixBackend io;
    RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_unlabelled(io, dir));
    if (catalog.checkpoints.empty()) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: no checkpoint (step-NNNNNNNN) in it", dir.string())};
    }
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) dirs.push_back(info.dir);
  }
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  bool whole = true, all_removed = true;
  std::map<fs::path, std::map<int64_t, bool>> verdicts;  // by folder: step -> sound
  std::optional<Error> refused;                          // nothing is known of that one; the others are looked at
  json all = json::array();
  for (const fs::path& dir : dirs) {
    ckpt::VerifyOptions options;
    options.structure = !args.no_structure;
    const auto check = [&] {
      ByteProgress progress("verified");
      options.progress = [&](int64_t done, int64_t total) { progress.show(done, total); };
      return ckpt::verify_checkpoint(*io, dir, options);
    };
    auto before = identity_of(dir);
    Result<ckpt::VerifyReport> checked = check();
    for (auto now = identity_of(dir); now && now != before && !(checked.ok() && checked.value().whole());
         now = identity_of(dir)) {
      before = now;
      checked = check();
    }
    if (!(checked.ok() && checked.value().whole()) && is_gone(dir)) {
      Error removed = removed_meanwhile(dir);
      if (dirs.size() == 1) return removed;
      all.push_back({{"dir", dir.string()}, {"whole", nullptr}, {"problem", removed.message}});
      if (!as_json) fmt::print("{}: was removed meanwhile, as the retention of a run at work does\n", dir.string());
      if (!args.all && !refused) refused = std::move(removed);  // it was asked for by name
      continue;
    }
    if (!checked.ok() && dirs.size() > 1 &&
        (ckpt::is_refused(checked.error()) || checked.error().code == ErrorCode::kUnsupported)) {
      all.push_back({{"dir", dir.string()}, {"whole", nullptr}, {"problem", checked.error().message}});
      if (!as_json) fmt::print("{}: not read: {}\n", dir.string(), printable(checked.error().message));
      if (!refused) refused = checked.error();
      continue;
    }
    RT_TRY_SET(const ckpt::VerifyReport report, std::move(checked));
    whole = whole && report.whole();
    all_removed = false;
    if (const std::optional<int64_t> step = ckpt::parse_step_dir_name(dir.filename().string()))
      verdicts[fs::absolute(dir).lexically_normal().parent_path()][*step] = report.whole();
    if (as_json) {
      all.push_back(to_json(dir, report));
    } else {
      tell(dir, report, options.max_damages);
    }
  }
  json next = json::array();
  for (const auto& [folder, known] : verdicts) {
    if (std::all_of(known.begin(), known.end(), [](const auto& one) { return one.second; })) continue;
    RT_TRY_SET(const Advice advice, advise(folder, known, *io, [&](const fs::path& dir) {
                 ByteProgress progress("verified");
                 ckpt::VerifyOptions options{.max_damages = 1, .structure = !args.no_structure};
                 options.progress = [&](int64_t done, int64_t total) { progress.show(done, total); };
                 return ckpt::verify_checkpoint(*io, dir, options);
               }));
    next.push_back({{"folder", folder.string()},
                    {"sound_step", advice.sound ? json(*advice.sound) : json()},
                    {"text", advice.text}});
    if (!as_json) fmt::print("what to do: {}\n", printable(advice.text, true));
  }
  if (!as_json && whole && !refused && !all_removed) fmt::print("nothing to do\n");
  if (as_json && !next.empty() && dirs.size() == 1 && !args.all) all[0]["next"] = next[0];
  if (as_json && dirs.size() == 1 && !args.all) print_json(all[0]);
  if (as_json && (dirs.size() != 1 || args.all))
    print_json({{"whole", whole && !refused}, {"checkpoints", std::move(all)}, {"next", std::move(next)}});
  if (whole && refused) {
    if (!as_json) return *refused;
    fmt::print(stderr, "cairn ckpt verify: {}\n", printable(refused->message, true));  // the one object says it too
    return refused->exit_code();
  }
  return whole ? 0 : kDamaged;
}

}  // namespace

void add_ckpt_verify(CLI::App& ckpt, Session& session) {
  CLI::App* command =
      ckpt.add_subcommand("verify", "read every byte and compare it with its checksum; exit code 65 when damaged");
  const auto args = std::make_shared<VerifyArgs>();
  command->add_option("PATH", args->paths, "step folders, or run folders for their newest steps")
      ->required()
      ->expected(1, -1);
  command->add_flag("--all", args->all, "every step of the run folders given");
  command->add_flag("--no-structure", args->no_structure, "checksums alone; do not open the files with libhdf5");
  add_json_flag(*command, session);
  command->footer(
      "Ends with what to do: where a step is damaged, older ones are read until a sound one is found.\n"
      "Exit codes: 0 undamaged, 65 damaged (each place is named: file, tensor, box, chunk, bytes), 2 no such "
      "checkpoint,\n"
      "or a newer build's, 74 one could not be read (a right or a limit of the system), 69 a step was removed\n"
      "meanwhile by a run at work (--all reports it and continues); of several 65 comes first.\n"
      "Examples:\n  cairn ckpt verify runs/gpt2\n  cairn ckpt verify runs/gpt2 --all\n"
      "  cairn ckpt verify runs/gpt2/checkpoints/step-00001200 --json");
  command->callback([args, &session] { session.action = [args, &session] { return verify(*args, session.json); }; });
}

}  // namespace cairn::tools
