// cairn ckpt reshard SRC DST_RUN --mesh ...: the newest complete step of a run, or a step, into another layout.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/persist/read.h"
#include "ckpt/reshard.h"
#include "ckpt/store/uring_backend.h"
#include "dsl/dsl.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/run_folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kMaxExtent = int64_t{1} << 20;  // of an axis: far beyond any machine, far from overflow

struct ReshardArgs {
  std::string source, target, mesh;
  int zero = -1;  // as it was
  uint64_t memory_bytes = 256 << 20;
  bool overwrite = false;
};

struct MeshSizes {
  int64_t tp = 1, pp = 1, dp = 1;
};

/// "tp=1,pp=2,dp=2", any order; an axis that is not named has size 1.
Result<MeshSizes> parse_mesh(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--mesh {}: {}; expected for example tp=2,pp=1,dp=4 (an axis not named is 1)", text, why)};
  };
  MeshSizes out;
  bool seen[3] = {};
  for (std::string_view rest = text; !rest.empty() || rest.data() == text.data();) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) return refuse(fmt::format("\"{}\" is no axis=size", part));
    const std::string_view axis = part.substr(0, equals), number = part.substr(equals + 1);
    const int at = axis == "tp" ? 0 : axis == "pp" ? 1 : axis == "dp" ? 2 : -1;
    if (at < 0) return refuse(fmt::format("there is no axis \"{}\"", axis));
    if (seen[at]) return refuse(fmt::format("{} is given twice", axis));
    seen[at] = true;
    int64_t& size = at == 0 ? out.tp : at == 1 ? out.pp : out.dp;
    const auto [end, failed] = std::from_chars(number.data(), number.data() + number.size(), size);
    if (failed != std::errc() || end != number.data() + number.size() || size < 1 || size > kMaxExtent)
      return refuse(fmt::format("{} = \"{}\" is no size from 1 to {}", axis, number, kMaxExtent));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
    if (rest.empty()) return refuse("it ends with a comma");
  }
  return out;
}

/// The recipe of the checkpoint, for the new mesh. `notes`: what else had to change with it.
Recipe recipe_for(Recipe recipe, const MeshSizes& mesh, int zero, std::vector<std::string>* notes) {
  recipe.mesh.tp = mesh.tp;
  recipe.mesh.dp = mesh.dp;
  if (recipe.mesh.pp != mesh.pp && recipe.schedule == PipelineKind::kInterleaved) {
    notes->push_back(fmt::format("schedule interleaved was for pp = {}; it is 1f1b now", recipe.mesh.pp));
    recipe.schedule = PipelineKind::k1F1B;
    recipe.mesh.virtual_stages = 1;
  }
  if (recipe.mesh.pp != mesh.pp && !recipe.mesh.stages.empty()) {
    recipe.mesh.stages.clear();
    notes->push_back(fmt::format("mesh.stages was for pp = {}; the layers are balanced over {} stages now",
                                 recipe.mesh.pp, mesh.pp));
  }
  recipe.mesh.pp = mesh.pp;
  if (recipe.mesh.sequence_parallel && mesh.tp == 1) {
    recipe.mesh.sequence_parallel = false;
    notes->push_back("mesh.sequence_parallel is off now: with tp = 1 there is nothing to split");
  }
  if (zero >= 0) recipe.optimizer.zero = zero;
  return recipe;
}

std::atomic<bool> stop_asked{false};

/// The first SIGINT or SIGTERM ends the copy in good order, the second one at once.
void watch_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_asked.store(true, std::memory_order_relaxed); };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

Result<int> reshard(const ReshardArgs& args, bool as_json) {
  RT_TRY_SET(const MeshSizes mesh, parse_mesh(args.mesh));
  if (args.memory_bytes > uint64_t{1} << 50) {
    return Error{ErrorCode::kInvalidInput, fmt::format("--memory {}: at most 1 PiB", args.memory_bytes)};
  }
  RT_TRY_SET(const fs::path source, resolve_checkpoint(args.source));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(*io, source));
  Result<Recipe> stored = dsl::decode_recipe(manifest.recipe);
  if (!stored.ok()) return std::move(stored).error().with(fmt::format("recipe in {}", source.string()));

  std::vector<std::string> notes;
  dsl::LoadedRecipe loaded;
  loaded.recipe = recipe_for(std::move(stored).value(), mesh, args.zero, &notes);
  const int64_t world = mesh.tp * mesh.pp * mesh.dp;
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world);
  if (!problems.empty()) {
    std::string text = fmt::format("the run of {} cannot have the mesh {}:", source.string(), args.mesh);
    for (const dsl::Diagnostic& problem : problems) {
      text += fmt::format("\n  {}", problem.message);
      if (!problem.detail.empty()) text += fmt::format("\n    {}", problem.detail);
      if (!problem.accepted.empty()) text += fmt::format("\n    possible: {}", problem.accepted);
    }
    return Error{ErrorCode::kInvalidInput, std::move(text)};
  }
  loaded.canonical_json = dsl::encode_recipe(loaded.recipe);
  loaded.hash_hex = dsl::recipe_hash(loaded.canonical_json);
  RT_TRY_SET(const Plan plan, make_plan(loaded.recipe, world));

  const fs::path target(args.target);
  std::error_code failed;
  if (const fs::path parent = source.parent_path(); fs::equivalent(parent, target / "checkpoints", failed) && !failed) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is the run that {} belongs to; give a folder of its own",
                                                       target.string(), source.string())};
  }
  if (fs::exists(target / "recipe.resolved.json", failed) && !args.overwrite) {
    RT_TRY_SET(const std::string there, read_text_file(target / "recipe.resolved.json"));
    if (there != loaded.canonical_json) {
      return Error{
          ErrorCode::kInvalidInput,
          fmt::format("{} is a run with another recipe (`cairn diff` tells how it differs); give a new folder, "
                      "or --overwrite",
                      target.string())};
    }
  }
  RT_TRY_SET(RunFolder folder, RunFolder::open(target, loaded.recipe.name));  // nobody trains in it meanwhile

  watch_signals();
  ckpt::ReshardOptions options;
  options.memory_bytes = static_cast<int64_t>(args.memory_bytes);
  options.replace_existing = args.overwrite;
  options.cancel = &stop_asked;
  Result<ckpt::ReshardReport> done = [&] {
    ByteProgress progress("written");
    options.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return ckpt::reshard_checkpoint(*io, source, folder.checkpoints(), plan,
                                    {.run_name = manifest.run.name.empty() ? loaded.recipe.name : manifest.run.name,
                                     .run_id = folder.id(),
                                     .recipe_json = loaded.canonical_json,
                                     .recipe_hash = loaded.hash_hex},
                                    options);
  }();
  RT_TRY_SET(const ckpt::ReshardReport report, std::move(done));
  RT_TRY(folder.write_recipe(loaded));

  const double gb_per_s = report.seconds > 0 ? static_cast<double>(report.payload_bytes) / report.seconds / 1e9 : 0;
  if (as_json) {
    const json out = {{"source", source.string()},
                      {"dir", report.dir.string()},
                      {"run_id", report.manifest.run.id},
                      {"parents", report.manifest.run.parents},
                      {"step", report.manifest.step},
                      {"from", mesh_json(report.from)},
                      {"to", mesh_json(report.manifest.mesh)},
                      {"recipe_hash", loaded.hash_hex},
                      {"payload_bytes", report.payload_bytes},
                      {"files", report.manifest.files.size()},
                      {"seconds", report.seconds},
                      {"notes", notes}};
    fmt::print("{}\n", out.dump(2, ' ', false, json::error_handler_t::replace));
    return 0;
  }
  for (const std::string& note : notes) fmt::print("{}\n", note);
  fmt::print("{}: step {}, {} -> {}; {} in {} files, {} ({:.2f} GB/s), every chunk verified on the way\n",
             report.dir.string(), report.manifest.step, mesh_text(report.from), mesh_text(report.manifest.mesh),
             format_bytes(report.payload_bytes), report.manifest.files.size(),
             telemetry::format_duration(report.seconds), gb_per_s);
  fmt::print("go on with: cairn resume {}\n", target.string());
  return 0;
}

}  // namespace

void add_ckpt_reshard(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("reshard", "write a checkpoint in the layout of another mesh, as a new run");
  const auto args = std::make_shared<ReshardArgs>();
  command->add_option("SRC", args->source, "step folder, or run folder for its newest complete step")->required();
  command->add_option("DST_RUN", args->target, "the new run's folder")->required();
  command->add_option("--mesh", args->mesh, "the new layout, as tp=1,pp=2,dp=2; what is not named is 1")
      ->required()
      ->type_name("SIZES");
  command->add_option("--zero", args->zero, "0, or 1: optimizer states split over dp (default: as it was)")
      ->type_name("0|1")
      ->check(CLI::IsMember({0, 1}));
  command->add_option("--memory", args->memory_bytes, "what the copy may take, as 256MiB (default) or 4GiB")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(true));
  command->add_flag("--overwrite", args->overwrite, "replace the step or the recipe of a run that is there");
  add_json_flag(*command, session);
  command->callback([args, &session] { session.action = [args, &session] { return reshard(*args, session.json); }; });
}

}  // namespace cairn::tools
