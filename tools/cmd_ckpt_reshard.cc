// cairn ckpt reshard SRC DST_RUN --mesh ...: the newest complete step of a run, or a step, into another layout.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ckpt/persist/read.h"
#include "ckpt/plan/partial.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/reshard.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/uring_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"
#include "runtime/plan/recipe_rules.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/mesh_option.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct ReshardArgs {
  std::string source, target, mesh;
  int zero = -1;  // as it was
  uint64_t memory_bytes = 256 << 20;
  std::string compress = "off";
  bool weights_only = false, overwrite = false;
};

/// Weights of a Hugging Face folder that were never trained: their recipe is a stand-in that `cairn import` has made.
bool is_import(const ckpt::Manifest& manifest) {
  const auto state = json_or_nothing(manifest.state);
  return manifest.step == 0 && state.is_object() && state.contains("imported");
}

/// The recipe of the checkpoint, for the new mesh. `notes`: what else had to change with it.
Recipe recipe_for(Recipe recipe, const MeshConfig& mesh, int zero, bool imported, std::vector<std::string>* notes) {
  recipe.mesh.tp = mesh.tp;
  recipe.mesh.dp = mesh.dp;
  recipe.mesh.ep = mesh.ep;
  recipe.mesh.cp = mesh.cp;
  if (recipe.mesh.pp != mesh.pp && recipe.mesh.virtual_stages > 1) {
    notes->push_back(
        fmt::format("schedule {} was for pp = {}; it is 1f1b now", schedule_name(recipe.schedule), recipe.mesh.pp));
    recipe.schedule = PipelineKind::k1F1B;
    recipe.mesh.virtual_stages = 1;
    recipe.mesh.micro_batch_group = 0;
  }
  if (recipe.mesh.pp != mesh.pp && !recipe.mesh.stages.empty()) {
    recipe.mesh.stages.clear();
    notes->push_back(fmt::format("mesh.stages was for pp = {}; the layers are balanced over {} now", recipe.mesh.pp,
                                 count_text(mesh.pp, "stage")));
  }
  recipe.mesh.pp = mesh.pp;
  if (recipe.mesh.sequence_parallel && mesh.tp == 1) {
    recipe.mesh.sequence_parallel = false;
    notes->push_back("mesh.sequence_parallel is off now: with tp = 1 there is nothing to split");
  }
  if (zero >= 0) recipe.optimizer.zero = zero;
  if (imported && recipe.batch.samples % std::max<int64_t>(1, mesh.dp) != 0) {
    recipe.batch.samples = mesh.dp;  // nobody has chosen one yet: an import says one sample for each replica
    notes->push_back(fmt::format("batch.samples is {} now, one for each replica, as an import has it", mesh.dp));
  }
  const std::vector<Mistake> mistakes = find_mistakes(recipe, wanted_world(mesh));
  if (std::any_of(mistakes.begin(), mistakes.end(), [](const Mistake& m) { return m.field == "mesh.shard"; })) {
    notes->push_back(
        fmt::format("mesh.shard was {}; all {} replicas are one shard group now", recipe.mesh.shard, mesh.dp));
    recipe.mesh.shard = 0;
  }
  if (recipe.optimizer.keep_after_forward && recipe.optimizer.zero < 3) {
    recipe.optimizer.keep_after_forward = false;
    notes->push_back("optimizer.keep_after_forward is off now: it is for ZeRO-3");
  }
  return recipe;
}

Result<int> reshard_of(const fs::path& source, const ReshardArgs& args, bool as_json) {
  RT_TRY_SET(const MeshConfig mesh, parse_mesh(args.mesh));
  RT_TRY_SET(const int64_t memory, memory_option(args.memory_bytes));
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(*io, source));
  Result<Recipe> stored = dsl::decode_recipe(manifest.recipe);
  if (!stored.ok()) return std::move(stored).error().with(fmt::format("recipe in {}", source.string()));

  RT_TRY_SET(const trainer::TrainPosition position, ckpt::position_of(manifest).with(source.string()));

  std::vector<std::string> notes;
  dsl::LoadedRecipe loaded;
  loaded.recipe = recipe_for(std::move(stored).value(), mesh, args.zero, is_import(manifest), &notes);
  const int64_t world = wanted_world(mesh);
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(loaded.recipe, world, position.past);
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
  RT_TRY_SET(const Plan plan, make_plan(loaded.recipe, world, position.past));

  const fs::path target(args.target);
  if (is_step_of(source, target)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is the run that {} belongs to; give a folder of its own",
                                                       target.string(), source.string())};
  }
  RT_TRY_SET(const std::unique_ptr<TargetRun> run,
             TargetRun::open(target, loaded, loaded.recipe.name, manifest.step, args.overwrite));
  RunFolder& folder = run->folder();
  // What one that was killed has left there takes as much space as this one needs.
  RT_TRY_SET(const std::vector<std::string> cleaned, run->clean(*io, manifest.step));
  for (const std::string& name : cleaned) notes.push_back(fmt::format("removed {}, left by a writer that died", name));

  ckpt::ReshardOptions options;
  options.memory_bytes = memory;
  options.replace_existing = args.overwrite;
  options.weights_only = args.weights_only;
  if (args.compress == "zstd") options.codec = ckpt::Codec::kShuffleZstd;
  options.cancel = &stop_on_signals();
  const std::unique_ptr<ckpt::IoBackend> source_io = ckpt::make_best_backend();
  options.source_io = source_io.get();
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
  RT_TRY(run->keep());
  if (run->newer()) {
    notes.push_back(
        fmt::format("`cairn resume {}` resumes from step {}, which is newer", target.string(), *run->newer()));
  }

  const double gb_per_s =
      report.seconds > 0 ? static_cast<double>(report.payload_bytes - report.taken_bytes) / report.seconds / 1e9 : 0;
  if (as_json) {
    const json out = {{"source", source.string()},
                      {"dir", report.dir.string()},
                      {"run_id", report.manifest.run.id},
                      {"parents", report.manifest.run.parents},
                      {"step", report.manifest.step},
                      {"weights_only", !ckpt::has_moments(report.manifest)},
                      {"from", mesh_json(report.from)},
                      {"to", mesh_json(report.manifest.mesh)},
                      {"recipe_hash", loaded.hash_hex},
                      {"payload_bytes", report.payload_bytes},
                      {"files", report.manifest.files.size()},
                      {"read_bytes", report.read_bytes},
                      {"taken_files", report.taken_files},
                      {"taken_bytes", report.taken_bytes},
                      {"cleaned", report.cleaned},
                      {"seconds", report.seconds},
                      {"notes", notes}};
    print_json(out);
    return 0;
  }
  for (const std::string& note : notes) fmt::print("{}\n", note);
  for (const std::string& name : report.cleaned)
    fmt::print("removed {}, which an earlier reshard had left unfinished\n", name);
  if (report.taken_files > 0) {
    fmt::print("{} of {} ({}) were done by an earlier reshard that was cut off; each byte of them was checked\n",
               report.taken_files, count_text(report.manifest.files.size(), "file"), format_bytes(report.taken_bytes));
  }
  fmt::print("{}: step {}, {} -> {}; {} in {}, {} ({:.2f} GB/s), every chunk verified on the way\n",
             report.dir.string(), report.manifest.step, mesh_text(report.from), mesh_text(report.manifest.mesh),
             format_bytes(report.payload_bytes), count_text(report.manifest.files.size(), "file"),
             telemetry::format_duration(report.seconds), gb_per_s);
  const int64_t written = report.payload_bytes - report.taken_bytes;
  if (static_cast<double>(report.read_bytes) > 1.02 * static_cast<double>(written)) {
    fmt::print(
        "{} were read for these {}: a chunk is read whole, once for each stretch of the target that a part of it "
        "goes to; more --memory makes the stretches longer\n",
        format_bytes(report.read_bytes), format_bytes(written));
  }
  if (!ckpt::has_moments(report.manifest)) {
    fmt::print("weights only, from which no run resumes; a new one can begin with them: {}\n",
               ckpt::how_to_begin_from(run->newer() ? report.dir : target));
  } else if (!run->newer()) {
    fmt::print("resume with: cairn resume {}\n", target.string());
  }
  return 0;
}

Result<int> reshard(const ReshardArgs& args, bool as_json) {
  RT_TRY_SET(const fs::path source, resolve_checkpoint(args.source));
  return unless_removed({source}, reshard_of(source, args, as_json));
}

}  // namespace

void add_ckpt_reshard(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("reshard", "write a checkpoint in the layout of another mesh, as a new run");
  const auto args = std::make_shared<ReshardArgs>();
  command->add_option("SRC", args->source, "step folder, or run folder for its newest complete step")->required();
  command->add_option("DST_RUN", args->target, "the new run's folder")->required();
  command->add_option("--mesh", args->mesh, "the new layout, as tp=1,pp=2,dp=2,ep=2; what is not named is 1")
      ->required()
      ->type_name("SIZES");
  command->add_option("--zero", args->zero, "what is split over dp: 0 to 3 (default: as it was)")
      ->type_name("0|1|2|3")
      ->check(CLI::IsMember({0, 1, 2, 3}));
  command->add_flag("--weights-only", args->weights_only,
                    "leave the optimizer's state and the average of the weights behind");
  command
      ->add_option("--memory", args->memory_bytes, "what the copy may take, as 256MiB (default) or 4GiB; 8MiB at least")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command->add_option("--compress", args->compress, "zstd: smaller files for cold storage (default: off)")
      ->type_name("off|zstd")
      ->check(CLI::IsMember({"off", "zstd"}));
  command->add_flag("--overwrite", args->overwrite,
                    "replace the step or the recipe of a run that is there, or write a step below its newest");
  add_json_flag(*command, session);
  command->footer(
      "Reads and writes overlap, each chunk is verified on the way, nothing temporary is written. Killed or stopped, "
      "the\n"
      "target has no half-made step; the same command resumes from the files that are complete.\n"
      "Exit codes: 0 done, 2 refused, 65 the source is damaged, 74 disk full or an I/O error, 75 stopped.\nExamples:\n "
      " cairn ckpt reshard runs/gpt2 runs/gpt2-tp4 --mesh tp=4,dp=2\n"
      "  cairn ckpt reshard runs/gpt2/checkpoints/step-00001200 runs/one --mesh tp=1 --memory 64MiB\n"
      "  cairn ckpt reshard runs/gpt2 runs/small --mesh tp=1 --weights-only");
  command->callback([args, &session] { session.action = [args, &session] { return reshard(*args, session.json); }; });
}

}  // namespace cairn::tools
