// cairn ckpt edit SRC --to DST_RUN: the weights of a checkpoint as those of a model with other layers or another
// vocabulary.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ckpt/edit.h"
#include "ckpt/persist/read.h"
#include "ckpt/plan/partial.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/uring_backend.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/plan/plan.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kMostLayers = 1 << 16;

struct EditArgs {
  std::string source, target, layers, new_rows = "mean";
  int64_t vocab = 0;
  uint64_t memory_bytes = 256 << 20;
  bool overwrite = false;
};

/// "0..7,4..11": layers in the order that they are named in.
Result<std::vector<int64_t>> layers_of(const std::string& text) {
  std::vector<int64_t> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    at = end + 1;
    const size_t dots = part.find("..");
    const std::optional<int64_t> first = number_of<int64_t>(part.substr(0, dots)),
                                 last = dots == std::string::npos ? first : number_of<int64_t>(part.substr(dots + 2));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostLayers) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("--layers: '{}': expected layers from 0, as 0..7,4..11 or 0,2,4", printable(part))};
    }
    for (int64_t layer = *first; layer <= *last; ++layer) out.push_back(layer);
    if (std::ssize(out) > kMostLayers)
      return Error{ErrorCode::kInvalidInput, fmt::format("--layers: more than {} layers", kMostLayers)};
  }
  return out;
}

/// The checkpoint's recipe with the edited model.
Result<dsl::LoadedRecipe> edited_recipe(const ckpt::Manifest& manifest, const ckpt::ModelEdit& edit) {
  dsl::LoadedRecipe out;
  RT_TRY_SET(out.recipe, dsl::decode_recipe(manifest.recipe));
  RT_TRY_SET(out.recipe.model, ckpt::edited_model(out.recipe.model, edit));
  if (!edit.layers.empty()) out.recipe.mesh.stages.clear();  // layers of each stage, by the old number of layers
  const std::vector<dsl::Diagnostic> problems = dsl::check_recipe(out.recipe, manifest.mesh.world);
  if (!problems.empty()) {
    std::string text = "the recipe cannot have the edited model:";
    for (const dsl::Diagnostic& problem : problems) {
      text += fmt::format("\n  {}", problem.message);
      if (!problem.detail.empty()) text += fmt::format("\n    {}", problem.detail);
    }
    return Error{ErrorCode::kInvalidInput,
                 text + "\nwhere it is the layout, `cairn ckpt reshard` makes another one first"};
  }
  out.canonical_json = dsl::encode_recipe(out.recipe);
  out.hash_hex = dsl::recipe_hash(out.canonical_json);
  return out;
}

Result<int> edit_of(const fs::path& source, const EditArgs& args, bool as_json) {
  RT_TRY_SET(const int64_t memory, memory_option(args.memory_bytes));
  ckpt::ModelEdit edit{.vocab = args.vocab,
                       .new_rows = args.new_rows == "zero" ? ckpt::NewRows::kZero : ckpt::NewRows::kMean};
  if (!args.layers.empty()) {
    RT_TRY_SET(edit.layers, layers_of(args.layers));
  }
  if (edit.layers.empty() && edit.vocab == 0)
    return Error{ErrorCode::kInvalidInput, "nothing to edit: give --layers, --vocab, or both"};
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend(), source_io = ckpt::make_best_backend();
  RT_TRY_SET(const ckpt::Manifest manifest, ckpt::read_manifest(*io, source));
  Result<dsl::LoadedRecipe> edited = edited_recipe(manifest, edit);
  if (!edited.ok()) return std::move(edited).error().with(source.string());
  const dsl::LoadedRecipe& recipe = edited.value();
  RT_TRY_SET(const Plan plan, make_plan(recipe.recipe, manifest.mesh.world));
  const fs::path target(args.target);
  if (is_step_of(source, target)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{} is the run that {} belongs to; give a folder of its own",
                                                       target.string(), source.string())};
  }
  const std::string name = manifest.run.name.empty() ? recipe.recipe.name : manifest.run.name;
  RT_TRY_SET(const std::unique_ptr<TargetRun> run,
             TargetRun::open(target, recipe, name, manifest.step, args.overwrite));
  RT_TRY_SET(const std::vector<std::string> cleaned, run->clean(*io, std::nullopt));
  ckpt::EditOptions options{.memory_bytes = memory,
                            .replace_existing = args.overwrite,
                            .cancel = &stop_on_signals(),
                            .source_io = source_io.get()};
  Result<ckpt::EditReport> done = [&] {
    ByteProgress progress("written");
    options.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return ckpt::edit_checkpoint(*io, source, run->folder().checkpoints(), edit, plan,
                                 {.run_name = name,
                                  .run_id = run->folder().id(),
                                  .recipe_json = recipe.canonical_json,
                                  .recipe_hash = recipe.hash_hex},
                                 options);
  }();
  RT_TRY_SET(const ckpt::EditReport report, std::move(done));
  RT_TRY(run->keep());
  const std::string next = ckpt::how_to_begin_from(run->newer() ? report.dir : target);
  if (as_json) {
    print_json({{"source", source.string()},
                {"dir", report.dir.string()},
                {"run_id", report.manifest.run.id},
                {"parents", report.manifest.run.parents},
                {"origin", report.manifest.origin},
                {"step", report.manifest.step},
                {"layers", recipe.recipe.model.layers},
                {"vocab", recipe.recipe.model.vocab},
                {"new_rows", report.new_rows},
                {"tensors", report.tensors},
                {"payload_bytes", ckpt::payload_bytes(report.manifest)},
                {"cleaned", cleaned},
                {"seconds", report.seconds}});
    return 0;
  }
  for (const std::string& one : cleaned) fmt::print("removed {}, left by a writer that died\n", one);
  fmt::print("{}: {}; {}, a vocabulary of {}; {}, {} in {}\nweights only, from which no run resumes: {}\n",
             report.dir.string(), report.manifest.origin, count_text(recipe.recipe.model.layers, "layer"),
             recipe.recipe.model.vocab, count_text(report.tensors, "weight"),
             format_bytes(ckpt::payload_bytes(report.manifest)), telemetry::format_duration(report.seconds), next);
  return 0;
}

}  // namespace

void add_ckpt_edit(CLI::App& ckpt, Session& session) {
  CLI::App* command = ckpt.add_subcommand("edit", "other layers or another vocabulary, as a new run");
  const auto args = std::make_shared<EditArgs>();
  command->add_option("SRC", args->source, "step folder, or run folder for its newest complete step")->required();
  command->add_option("--to", args->target, "the new run's folder")->required()->type_name("DST_RUN");
  command
      ->add_option("--layers", args->layers,
                   "layers of SRC, from 0, in their new order: 0..7,4..11 repeats, 0,2,4 drops")
      ->type_name("LIST");
  command->add_option("--vocab", args->vocab, "rows of embedding and head; fewer than before cuts the last ones off")
      ->type_name("N")
      ->transform(whole_number(1, int64_t{1} << 31));
  command->add_option("--new-rows", args->new_rows, "mean: of the old rows (default). zero")
      ->type_name("mean|zero")
      ->check(CLI::IsMember({"mean", "zero"}));
  command->add_option("--memory", args->memory_bytes, "what it may take (default 256MiB)")
      ->type_name("SIZE")
      ->transform(size_in_bytes());
  command->add_flag("--overwrite", args->overwrite,
                    "replace the step or the recipe of a run that exists, or write a step below its newest");
  add_json_flag(*command, session);
  command->footer(
      "Weights only, each kept one with the same bits; the recipe has the new model. The layout is that of SRC.\n"
      "Exit codes: 0 done, 2 refused, 65 the source is damaged, 74 disk full or an I/O error, 75 stopped.\nExamples:\n "
      " "
      "cairn ckpt edit runs/base --vocab 32064 --to runs/more-tokens\n"
      "  cairn ckpt edit runs/base --layers 0..23,8..31 --to runs/deeper\n"
      "  cairn ckpt edit runs/base --layers 0..3,28..31 --to runs/draft");
  command->callback([args, &session] {
    session.action = [args, &session]() -> Result<int> {
      RT_TRY_SET(const fs::path source, resolve_checkpoint(args->source));
      return unless_removed({source}, edit_of(source, *args, session.json));
    };
  });
}

}  // namespace cairn::tools
