// cairn ckpt ls | inspect | verify (reshard: cmd_ckpt_reshard.cc): what lies in a run's checkpoints, and whether it is
// whole.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/verify/verify.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run_folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct CkptArgs {
  std::string path;
  bool tensors = false;
};

/// Names and messages may hold bytes that are no UTF-8.
void print_json(const json& value) { fmt::print("{}\n", value.dump(2, ' ', false, json::error_handler_t::replace)); }

/// RUN/checkpoints, or the folder itself.
Result<fs::path> checkpoints_dir_of(const std::string& path) {
  std::error_code failed;
  const fs::path below = fs::path(path) / "checkpoints";
  if (fs::is_directory(below, failed)) return below;
  if (fs::is_directory(path, failed)) return fs::path(path);
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: no such folder; expected a run folder or a folder of step-NNNNNNNN", path)};
}

double age_s(int64_t created_unix_ms) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count() - created_unix_ms) /
         1e3;
}

/// Days from two on: checkpoints grow older than format_duration is made for.
std::string age_text(int64_t created_unix_ms) {
  constexpr double kDay = 86400;
  const double seconds = std::max(0.0, age_s(created_unix_ms));
  if (seconds >= 2 * kDay) return fmt::format("{:.0f} days", seconds / kDay);
  return telemetry::format_duration(seconds);
}

std::string time_text(int64_t unix_ms) {
  const auto seconds = static_cast<time_t>(unix_ms / 1000);
  std::tm parts{};
  if (gmtime_r(&seconds, &parts) == nullptr) return "?";
  char text[64];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

// --- ls
// ---------------------------------------------------------------------------------------------------------------

struct Leftover {
  std::string name;
  bool alive = false;
};

Leftover leftover_of(const std::string& name) {
  for (const std::string_view prefix : {ckpt::kTmpPrefix, ckpt::kTrashPrefix}) {
    if (const auto work = ckpt::parse_work_dir_name(prefix, name)) return {name, ckpt::may_be_alive(work->writer)};
  }
  return {name, false};
}

Result<int> list(const CkptArgs& args, bool as_json) {
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(args.path));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, dir));
  std::vector<Leftover> leftovers;
  for (const std::string& name : catalog.leftovers) leftovers.push_back(leftover_of(name));
  std::optional<int64_t> newest;
  int64_t bytes = 0;
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) newest = info.step;
    bytes += info.size_bytes;
  }
  if (as_json) {
    json steps = json::array(), rest = json::array();
    for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
      steps.push_back({{"step", info.step},
                       {"dir", info.dir.string()},
                       {"complete", info.complete},
                       {"created_unix_ms", info.created_unix_ms},
                       {"size_bytes", info.size_bytes}});
      if (!info.complete) steps.back()["problem"] = info.problem;
    }
    for (const Leftover& leftover : leftovers) {
      rest.push_back({{"name", leftover.name}, {"writer_alive", leftover.alive}});
    }
    print_json({{"dir", dir.string()},
                {"checkpoints", std::move(steps)},
                {"newest_complete", newest ? json(*newest) : json()},
                {"leftovers", std::move(rest)},
                {"unknown", catalog.unknown}});
    return 0;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  if (catalog.checkpoints.empty()) {
    fmt::print("{}: no checkpoints\n", dir.string());
  } else {
    fmt::print("{}{:<16}{:>14}{:>12}{}   {}\n", color.dim, "step", "age", "size", color.reset, dir.string());
  }
  for (const ckpt::CheckpointInfo& info : catalog.checkpoints) {
    const std::string age = info.created_unix_ms == 0 ? "?" : age_text(info.created_unix_ms);
    fmt::print("{:<16}{:>14}{:>12}   ", info.dir.filename().string(), age, format_bytes(info.size_bytes));
    if (info.complete) {
      fmt::print("{}complete{}{}\n", color.green, color.reset, info.step == newest ? ", the newest" : "");
    } else {
      fmt::print("{}damaged{}: {}\n", color.red, color.reset, info.problem);
    }
  }
  if (catalog.checkpoints.size() > 1) fmt::print("{} in all\n", format_bytes(bytes));
  for (const Leftover& leftover : leftovers) {
    fmt::print("left over: {} ({})\n", leftover.name,
               leftover.alive ? "its writer may be at work" : "its writer is gone; the run's next start removes it");
  }
  for (const std::string& name : catalog.unknown) fmt::print("not ours:  {}\n", name);
  return 0;
}

// --- inspect
// ----------------------------------------------------------------------------------------------------------

struct TensorSum {
  int64_t shards = 0, bytes = 0;
};

Result<int> inspect(const CkptArgs& args, bool as_json) {
  RT_TRY_SET(const fs::path dir, resolve_checkpoint(args.path));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(io, dir));
  std::vector<TensorSum> sums(manifest.tensors.size());
  std::vector<TensorSum> files(manifest.files.size());
  for (const ckpt::ShardEntry& shard : manifest.shards) {
    for (TensorSum* sum : {&sums[shard.tensor], &files[shard.file]}) {
      ++sum->shards;
      sum->bytes += shard.bytes;
    }
  }
  struct KindSum {
    int64_t tensors = 0, elements = 0, shards = 0, bytes = 0;
  };
  std::map<std::string, KindSum> kinds;
  for (size_t t = 0; t < manifest.tensors.size(); ++t) {
    KindSum& sum = kinds[manifest.tensors[t].kind];
    ++sum.tensors;
    sum.elements += count_elems(manifest.tensors[t].shape);
    sum.shards += sums[t].shards;
    sum.bytes += sums[t].bytes;
  }
  int64_t file_bytes = 0;
  for (const ckpt::FileEntry& file : manifest.files) file_bytes += file.size_bytes;

  if (as_json) {
    json out = {{"dir", dir.string()},
                {"format", ckpt::kFormatName},
                {"version", ckpt::kFormatVersion},
                {"step", manifest.step},
                {"samples", manifest.samples},
                {"tokens", manifest.tokens},
                {"created_unix_ms", manifest.created_unix_ms},
                {"run", {{"name", manifest.run.name}, {"id", manifest.run.id}, {"parents", manifest.run.parents}}},
                {"recipe_hash", manifest.recipe_hash},
                {"mesh", mesh_json(manifest.mesh)},
                {"state", json::parse(manifest.state, nullptr, false)},
                {"payload_bytes", ckpt::payload_bytes(manifest)},
                {"file_bytes", file_bytes},
                {"kinds", json::object()},
                {"files", json::array()}};
    for (const auto& [kind, sum] : kinds) {
      out["kinds"][kind] = {
          {"tensors", sum.tensors}, {"elements", sum.elements}, {"shards", sum.shards}, {"bytes", sum.bytes}};
    }
    for (size_t f = 0; f < files.size(); ++f) {
      out["files"].push_back({{"name", manifest.files[f].name},
                              {"size_bytes", manifest.files[f].size_bytes},
                              {"shards", files[f].shards},
                              {"payload_bytes", files[f].bytes}});
    }
    if (args.tensors) {
      out["tensors"] = json::array();
      for (size_t t = 0; t < sums.size(); ++t) {
        const ckpt::TensorEntry& tensor = manifest.tensors[t];
        out["tensors"].push_back({{"name", tensor.name},
                                  {"kind", tensor.kind},
                                  {"dtype", dtype_name(tensor.dtype)},
                                  {"shape", tensor.shape},
                                  {"shards", sums[t].shards},
                                  {"bytes", sums[t].bytes}});
      }
    }
    print_json(out);
    return 0;
  }

  const Palette color = palette_for(STDOUT_FILENO);
  const auto row = [&](const char* word, const std::string& text) {
    fmt::print("{}{:<12}{}{}\n", color.bold, word, color.reset, text);
  };
  row("checkpoint", dir.string());
  row("step", fmt::format("{}, after {} samples = {} tokens", manifest.step, manifest.samples, manifest.tokens));
  row("written", fmt::format("{}, {} ago", time_text(manifest.created_unix_ms), age_text(manifest.created_unix_ms)));
  row("run", fmt::format("{} (id {})", manifest.run.name.empty() ? "?" : manifest.run.name,
                         manifest.run.id.empty() ? "?" : manifest.run.id));
  if (!manifest.run.parents.empty()) row("continues", fmt::format("{}", fmt::join(manifest.run.parents, ", then ")));
  row("recipe", fmt::format("hash {}", manifest.recipe_hash.empty() ? "?" : manifest.recipe_hash));
  row("layout", fmt::format("{} ranks: {}; it loads into any other", manifest.mesh.world, mesh_text(manifest.mesh)));
  row("size", fmt::format("{} of state in {} files of {}", format_bytes(ckpt::payload_bytes(manifest)),
                          manifest.files.size(), format_bytes(file_bytes)));
  for (const auto& [kind, sum] : kinds) {
    row("", fmt::format("{:<12}{:>7} tensors {:>10} elements {:>8} shards {:>12}", kind, sum.tensors,
                        format_count(static_cast<double>(sum.elements)), sum.shards, format_bytes(sum.bytes)));
  }
  row("state", manifest.state);
  if (!args.tensors) {
    fmt::print("--tensors lists every tensor\n");
    return 0;
  }
  size_t name_width = 6, shape_width = 5, kind_width = 4;
  for (const ckpt::TensorEntry& tensor : manifest.tensors) {
    name_width = std::max(name_width, tensor.name.size());
    kind_width = std::max(kind_width, tensor.kind.size());
    shape_width = std::max(shape_width, to_string(tensor.shape).size());
  }
  fmt::print("\n{}{:<{}}  {:<{}}  {:<5}  {:<{}}  {:>6}  {:>10}{}\n", color.dim, "tensor", name_width, "kind",
             kind_width, "dtype", "shape", shape_width, "shards", "bytes", color.reset);
  for (size_t t = 0; t < sums.size(); ++t) {
    const ckpt::TensorEntry& tensor = manifest.tensors[t];
    fmt::print("{:<{}}  {:<{}}  {:<5}  {:<{}}  {:>6}  {:>10}\n", tensor.name, name_width, tensor.kind, kind_width,
               dtype_name(tensor.dtype), to_string(tensor.shape), shape_width, sums[t].shards,
               format_bytes(sums[t].bytes));
  }
  return 0;
}

// --- verify
// -----------------------------------------------------------------------------------------------------------

/// What to check: a step folder, or the newest committed step. Not the newest complete one: whoever asks whether a
/// run's checkpoint is whole wants to hear that its newest is not.
Result<fs::path> step_to_verify(const std::string& path) {
  std::error_code failed;
  fs::path asked = fs::path(path).lexically_normal();
  if (!asked.has_filename()) asked = asked.parent_path();  // "step-00000010/"
  if (fs::exists(asked / ckpt::kManifestName, failed)) return asked;
  if (ckpt::parse_step_dir_name(asked.filename().string()) && fs::is_directory(asked, failed)) return asked;
  RT_TRY_SET(const fs::path dir, checkpoints_dir_of(path));
  ckpt::PosixBackend io;
  RT_TRY_SET(const ckpt::Catalog catalog, ckpt::list_checkpoints(io, dir));
  if (catalog.checkpoints.empty()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: no checkpoint (step-NNNNNNNN) in it", dir.string())};
  }
  return catalog.checkpoints.back().dir;
}

Result<int> verify(const CkptArgs& args, bool as_json) {
  constexpr int kDamaged = 65;
  RT_TRY_SET(const fs::path dir, step_to_verify(args.path));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  ckpt::VerifyOptions options;
  Result<ckpt::VerifyReport> checked = [&] {
    ByteProgress progress("verified");
    options.progress = [&](int64_t done, int64_t total) { progress.show(done, total); };
    return ckpt::verify_checkpoint(*io, dir, options);
  }();
  RT_TRY_SET(const ckpt::VerifyReport report, std::move(checked));
  const double gb_per_s = report.seconds > 0 ? static_cast<double>(report.bytes) / report.seconds / 1e9 : 0;
  if (as_json) {
    json damages = json::array();
    for (const ckpt::Damage& damage : report.damages) {
      damages.push_back({{"file", damage.file},
                         {"shard", damage.shard},
                         {"chunk", damage.chunk},
                         {"offset", damage.offset},
                         {"bytes", damage.bytes},
                         {"message", damage.message}});
    }
    print_json({{"dir", dir.string()},
                {"whole", report.whole()},
                {"damages", std::move(damages)},
                {"files", report.files},
                {"shards", report.shards},
                {"chunks", report.chunks},
                {"bytes", report.bytes},
                {"seconds", report.seconds}});
    return report.whole() ? 0 : kDamaged;
  }
  const Palette color = palette_for(STDOUT_FILENO);
  for (const ckpt::Damage& damage : report.damages) fmt::print("{}\n", damage.message);
  if (static_cast<int64_t>(report.damages.size()) >= options.max_damages) {
    fmt::print("the search ended after {} places\n", report.damages.size());
  }
  fmt::print("{}: {}{}{}; {} files, {} shards, {} chunks, {} in {} ({:.2f} GB/s)\n", dir.string(),
             report.whole() ? color.green : color.red,
             report.whole() ? std::string("whole")
                            : fmt::format("damaged in {} {}", report.damages.size(),
                                          report.damages.size() == 1 ? "place" : "places"),
             color.reset, report.files, report.shards, report.chunks, format_bytes(report.bytes),
             telemetry::format_duration(report.seconds), gb_per_s);
  return report.whole() ? 0 : kDamaged;
}

}  // namespace

std::string mesh_text(const ckpt::MeshInfo& mesh) {
  return fmt::format("tp {} x pp {} x dp {}, zero {}, {}", mesh.tp, mesh.pp, mesh.dp, mesh.zero, mesh.precision);
}

json mesh_json(const ckpt::MeshInfo& mesh) {
  return {{"tp", mesh.tp},     {"pp", mesh.pp},       {"dp", mesh.dp},
          {"zero", mesh.zero}, {"world", mesh.world}, {"precision", mesh.precision}};
}

ByteProgress::ByteProgress(std::string verb) : verb_(std::move(verb)), line_(STDERR_FILENO) {}

void ByteProgress::show(int64_t done_bytes, int64_t total_bytes) {
  const auto now = Clock::now();
  const auto since = [&](Clock::time_point t) { return std::chrono::duration<double>(now - t).count(); };
  const bool due = since(kept_) >= 10;
  if (!due && since(shown_) < 0.1 && !(line_.terminal() && done_bytes == total_bytes)) return;
  const double rate = since(start_) > 0 ? static_cast<double>(done_bytes) / since(start_) : 0;
  const double left_s = rate > 0 ? static_cast<double>(total_bytes - done_bytes) / rate : 0;
  line_.show(
      fmt::format("{} {} of {} ({:.0f} %), {:.2f} GB/s, {} left", verb_, format_bytes(done_bytes),
                  format_bytes(total_bytes),
                  100.0 * static_cast<double>(done_bytes) / static_cast<double>(std::max<int64_t>(1, total_bytes)),
                  rate / 1e9, telemetry::format_duration(left_s)),
      due);
  shown_ = now;
  if (due) kept_ = now;
}

void add_ckpt(CLI::App& app, Session& session) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "look at checkpoints, check them, change their layout");
  ckpt->require_subcommand(1);
  const auto declare = [&](const char* name, const char* what, const char* path_what,
                           Result<int> (*action)(const CkptArgs&, bool)) {
    CLI::App* command = ckpt->add_subcommand(name, what);
    const auto args = std::make_shared<CkptArgs>();
    command->add_option("PATH", args->path, path_what)->required();
    add_json_flag(*command, session);
    command->callback([args, action, &session] {
      session.action = [args, action, &session] { return action(*args, session.json); };
    });
    return std::pair(command, args);
  };
  declare("ls", "steps, ages, sizes, and whether each is complete", "run folder or folder of steps", list);
  const auto [look, args] = declare("inspect", "who wrote a checkpoint, where it stands, what is in it",
                                    "step folder, or run folder for its newest complete step", inspect);
  look->add_flag("--tensors", args->tensors, "list every tensor");
  declare("verify", "read every byte and compare it with its checksum; exit code 65 when damaged",
          "step folder, or run folder for its newest step", verify);
  add_ckpt_reshard(*ckpt, session);
  add_ckpt_copy(*ckpt, session);
}

}  // namespace cairn::tools
