// cairn convert: Hugging Face folders and checkpoints into each other, and folders looked at before a byte is written.
// `cairn import` and `cairn export` are its two directions by themselves.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/store/uring_backend.h"
#include "converters/dist_export.h"
#include "converters/export.h"
#include "converters/folder_kinds.h"
#include "converters/gguf_export.h"
#include "converters/hf_folder.h"
#include "converters/import.h"
#include "converters/rewrite.h"
#include "converters/training_state.h"
#include "dsl/dsl.h"
#include "runtime/core/count_text.h"
#include "runtime/mesh/mesh.h"
#include "runtime/plan/model_tensors.h"
#include "tools/ckpt_places.h"
#include "tools/commands.h"
#include "tools/hub_source.h"
#include "tools/mesh_option.h"
#include "tools/model_source.h"
#include "tools/number_option.h"
#include "tools/run/folder/folder.h"
#include "tools/step_target.h"

namespace cairn::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

enum class Kind { kFolder, kCheckpoint };  // of the source

struct Options {
  std::string verb, from, to, target_kind;            // "hf", "cairn", "dcp", "gguf", or empty: what the source is not
  std::string mesh, name, config;                     // into a checkpoint
  std::string hub_name;                               // of a model that came from a Hub: "name"
  int64_t step = -1;                                  // of a training state; -1: the newest
  std::string dtype, quantize, max_shard_size, like;  // into a folder
  bool hdf5 = false, untie = false, drop_mtp = false, overwrite = false, check = false, ema = false;
  bool weights_only = false, without_tokenizer = false;
};

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// A folder that is both (export --hdf5) is taken for what the target is not.
Result<Kind> kind_of(const Options& options) {
  std::error_code error;
  const fs::path from(options.from);
  RT_TRY_SET(const fs::file_type type, type_of(from));
  if (type == fs::file_type::not_found) {
    return convert::named(from, invalid(fmt::format("{}: there is no such folder", options.from)));
  }
  const bool folder = fs::exists(from / convert::kConfigFile, error);
  const bool checkpoint = fs::exists(from / ckpt::kManifestName, error);
  if (folder && checkpoint) return options.target_kind == "cairn" ? Kind::kFolder : Kind::kCheckpoint;
  return folder ? Kind::kFolder : Kind::kCheckpoint;
}

/// An option that the direction has no use for is a mistake, not a detail.
Status refuse_useless(const Options& options, bool to_cairn) {
  const auto refuse = [&](bool given, std::string_view flag, std::string_view belongs) -> Status {
    if (!given) return {};
    return invalid(fmt::format("{} belongs to a conversion {}; this one goes {}", flag, belongs,
                               to_cairn ? "into a checkpoint" : "into a Hugging Face folder"));
  };
  if (to_cairn) {
    RT_TRY(refuse(!options.dtype.empty(), "--dtype", "into a Hugging Face folder (checkpoints hold float32)"));
    RT_TRY(refuse(!options.quantize.empty(), "--quantize", "into a Hugging Face folder (checkpoints hold float32)"));
    RT_TRY(refuse(!options.max_shard_size.empty(), "--max-shard-size", "into a Hugging Face folder"));
    RT_TRY(refuse(options.hdf5, "--hdf5", "into a Hugging Face folder"));
    RT_TRY(refuse(!options.like.empty(), "--like", "into a Hugging Face folder"));
    RT_TRY(refuse(options.without_tokenizer, "--without-tokenizer", "into a Hugging Face folder"));
  } else {
    RT_TRY(refuse(!options.mesh.empty(), "--mesh", "into a checkpoint"));
    RT_TRY(refuse(!options.name.empty(), "--name", "into a checkpoint"));
    RT_TRY(refuse(!options.config.empty(), "--config", "into a checkpoint"));
    RT_TRY(refuse(options.weights_only, "--weights-only", "into a checkpoint, or one of torch (--to dcp)"));
    RT_TRY(refuse(options.step >= 0, "--step", "into a checkpoint"));
  }
  return {};
}

void tell_warnings(const Options& options, const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) fmt::print(stderr, "cairn {}: warning: {}\n", options.verb, warning);
}

void tell_taken(int64_t files, int64_t bytes) {
  if (files == 0) return;
  fmt::print("{} file{} ({}) were done by an earlier conversion that was cut off; each byte of them was checked\n",
             files, files == 1 ? "" : "s", format_bytes(bytes));
}

/// SRC, or with --step the folder of that step in it.
Result<fs::path> folder_of(const Options& options) {
  fs::path at = options.from;
  if (options.step >= 0) {
    std::error_code error;
    at /= fmt::format("global_step{}", options.step);
    if (!fs::is_directory(at, error)) at = fs::path(options.from) / fmt::format("step-{}", options.step);
    if (!fs::is_directory(at, error)) at = fs::path(options.from) / fmt::format("iter_{:07d}", options.step);
    if (!fs::is_directory(at, error)) {
      return convert::named(at,
                            invalid(fmt::format("{0}: there is no folder global_step{1}, step-{1} or iter_{1:07d} in "
                                                "it; --step N takes one of DeepSpeed's, torchtitan's or "
                                                "Megatron-LM's",
                                                options.from, options.step)));
    }
  }
  return at;
}

/// The training state of another program that SRC is, if it is one whose optimizer an import takes.
Result<std::optional<convert::TrainingState>> state_of(const Options& options) {
  RT_TRY_SET(const fs::path at, folder_of(options));
  RT_TRY_SET(std::optional<convert::TrainingState> state, convert::look_at_training_state(at));
  if (!state || !convert::is_imported_state(*state, options.weights_only)) {
    const bool of_torch = state && (state->program == "torch.distributed.checkpoint" || state->layout == "torch_dist");
    if (of_torch && !state->problems.empty()) {
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: is a training state of {} that cannot be read:\n  {}", state->folder.string(),
                               state->program, fmt::join(state->problems, "\n  "))};
    }
    if (of_torch && (options.step >= 0 || !options.config.empty())) {
      return invalid(
          fmt::format("{}: has no optimizer's state\n  expected one beside the weights\n"
                      "  --weights-only takes the weights, at step 0",
                      state->folder.string()));
    }
    if (options.step >= 0 || options.weights_only || !options.config.empty()) {
      return invalid(fmt::format(
          "{}: is no training state of DeepSpeed, Megatron-LM's torch_dist or torch.distributed.checkpoint; --config, "
          "--step and --weights-only are for one",
          options.from));
    }
    return std::optional<convert::TrainingState>();
  }
  return state;
}

/// The folder with config.json for a training state: as given, or where the state is.
fs::path config_of(const Options& options, const convert::TrainingState& state) {
  if (!options.config.empty()) return options.config;
  for (const fs::path& dir : {fs::path(options.from), state.folder}) {
    std::error_code error;
    if (fs::exists(dir / convert::kConfigFile, error)) return dir;
  }
  return options.from;
}

Result<int> to_checkpoint(const Options& options, const std::optional<convert::TrainingState>& state, bool as_json) {
  convert::ImportOptions import;
  if (!options.mesh.empty()) {
    RT_TRY_SET(import.mesh, parse_mesh(options.mesh));
  }
  import.untie = options.untie;
  import.drop_mtp = options.drop_mtp;
  import.replace = options.overwrite;
  import.run_name = options.name.empty() ? options.hub_name : options.name;
  import.weights_only = options.weights_only;
  if (state) import.config = config_of(options, *state);
  import.cancel = &stop_on_signals();
  RT_TRY(check_outside_checkpoints(options.to));
  RT_TRY(check_not_beside_checkpoints(options.to));
  RT_TRY_SET(const RunLock lock, lock_run_of(options.to));
  RT_TRY_SET(const std::unique_ptr<ckpt::Place> target, ckpt::open_directory_place({.path = options.to}));
  RT_TRY_SET(const std::string owner, run_of_target(*target));
  if (!owner.empty()) {
    return invalid(
        fmt::format("{} has the checkpoints of run {}, whose retention would count this one; choose another folder",
                    options.to, owner));
  }
  const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
  const auto encode = [](const Recipe& recipe) {
    const std::string text = dsl::encode_recipe(recipe);
    return convert::RecipeText{text, dsl::recipe_hash(text)};
  };
  Result<convert::ImportReport> done = [&] {
    ByteProgress progress("written");
    import.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total);
  };
  if (state) return convert::import_state(*io, *state, options.from, options.to, import, encode);
  return convert::import_hf(*io, options.from, options.to, import, encode);
}
();
RT_TRY_SET(const convert::ImportReport report, std::move(done));
tell_warnings(options, report.warnings);
if (as_json) {
  json out = {{"checkpoint", report.dir.string()},
              {"parameters", report.parameters},
              {"tensors", report.tensors},
              {"bytes", report.payload_bytes},
              {"files_kept", report.files_kept},
              {"dtype_of_source", dtype_name(report.dtype)},
              {"mesh",
               {{"tp", import.mesh.tp},
                {"pp", import.mesh.pp},
                {"dp", import.mesh.dp},
                {"ep", import.mesh.ep},
                {"cp", import.mesh.cp}}},
              {"taken_files", report.taken_files},
              {"taken_bytes", report.taken_bytes},
              {"cleaned", report.cleaned},
              {"seconds", report.seconds},
              {"warnings", report.warnings}};
  if (state) {
    out["from"] = report.from;
    out["lost"] = report.lost;
    out["step"] = report.step;
  }
  if (report.moments) {
    out["samples"] = report.samples;
    out["tokens"] = report.tokens;
    out["adam_step"] = report.adam_step;
  }
  print_json(std::move(out));
  return 0;
}
tell_taken(report.taken_files, report.taken_bytes);
fmt::print("{}: {} parameters in {}, {} for {}; {} kept; {:.1f} s\n", report.dir.string(),
           format_count(static_cast<double>(report.parameters)), count_text(report.tensors, "tensor"),
           format_bytes(report.payload_bytes), count_text(report.ranks, "rank"), count_text(report.files_kept, "file"),
           report.seconds);
if (!state) return 0;
fmt::print("  from {}: {}\n", report.from,
           report.moments
               ? fmt::format("weights, exp_avg, exp_avg_sq; step {}, {}, {} of the optimizer's own", report.step,
                             report.samples > 0 ? count_text(report.samples, "sample")
                                                : count_text(report.tokens, "token"),
                             count_text(report.adam_step, "update"))
               : "only weights, at step 0");
for (const std::string& line : report.lost) fmt::print("  left behind: {}\n", line);
return 0;
}

Result<int> to_folder(const Options& options, Kind kind, bool as_json) {
  convert::ExportOptions to{
      .overwrite = options.overwrite, .like = options.like, .hdf5 = options.hdf5, .cancel = &stop_on_signals()};
  if (!options.dtype.empty()) {
    RT_TRY_SET(to.dtype, parse_dtype(options.dtype).with("--dtype"));
  }
  if (!options.max_shard_size.empty()) {
    RT_TRY_SET(to.max_shard_bytes, convert::parse_size(options.max_shard_size).with("--max-shard-size"));
  }
  if (options.quantize == "q8_0") return invalid("--quantize q8_0 belongs to --to gguf; a Hugging Face folder has fp8");
  to.block_fp8 = options.quantize == "fp8";
  if (options.ema) to.weights = convert::WeightsOf::kAverage;
  if (kind == Kind::kFolder && options.ema)
    return invalid("--ema is for checkpoints; a Hugging Face folder has one set of weights");
  if (kind == Kind::kFolder && options.hdf5)
    return invalid("--hdf5 is for a checkpoint's weights; import the folder, then export it");
  if (kind == Kind::kFolder && options.without_tokenizer)
    return invalid("--without-tokenizer is for a checkpoint's weights; a folder keeps its files");
  if (kind == Kind::kFolder && !options.like.empty())
    return invalid("--like is for a checkpoint's weights; a folder stays of its own family");
  for (const auto& [flag, set] : {std::pair("--untie", options.untie), {"--drop-mtp", options.drop_mtp}}) {
    if (kind == Kind::kCheckpoint && set)
      return invalid(fmt::format("{} is for a Hugging Face folder as source", flag));
  }
  fs::path from = options.from;
  if (kind == Kind::kCheckpoint) {
    RT_TRY_SET(from, resolve_source(options.from));
  }
  to.without_tokenizer = options.without_tokenizer;
  to.trained_tokenizer = [&](const ckpt::Manifest& manifest) { return trained_tokenizer(from, manifest); };
  const fs::path around = checkpoint_around(options.to);
  std::error_code unknown;  // a folder that is a checkpoint too may be replaced, and what lies in the source is told so
  if (!around.empty() && !fs::equivalent(around, options.to, unknown) && !fs::equivalent(around, from, unknown))
    RT_TRY(check_outside_checkpoints(options.to));
  Result<convert::ExportReport> done = [&]() -> Result<convert::ExportReport> {
    ByteProgress progress("written");
    to.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    if (kind == Kind::kFolder)
      return convert::rewrite_hf(from, options.to, {.to = to, .untie = options.untie, .drop_mtp = options.drop_mtp});
    const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
    return unless_removed({from}, convert::export_hf(*io, from, options.to, to, dsl::decode_recipe));
  }();
  RT_TRY_SET(const convert::ExportReport report, std::move(done));
  tell_warnings(options, report.warnings);
  if (as_json) {
    print_json({{kind == Kind::kFolder ? "source" : "checkpoint", from.string()},
                {"folder", report.dir.string()},
                {"model_type", report.model_type},
                {"dtype", dtype_name(report.dtype)},
                {"quantize", report.block_fp8 ? json("fp8") : json()},
                {"parameters", report.parameters},
                {"tensors", report.tensors},
                {"bytes", report.data_bytes},
                {"shards", report.shards},
                {"files_passed", report.files_passed},
                {"linked", report.linked},
                {"taken_files", report.taken_files},
                {"taken_bytes", report.taken_bytes},
                {"not_finite", report.not_finite},
                {"seconds", report.seconds},
                {"warnings", report.warnings}});
    return 0;
  }
  tell_taken(report.taken_files, report.taken_bytes);
  fmt::print("{} -> {}: {}, {} parameters in {}, {} {} in {}; {}; {:.1f} s\n", from.string(), report.dir.string(),
             report.model_type, format_count(static_cast<double>(report.parameters)),
             count_text(report.tensors, "tensor"), format_bytes(report.data_bytes), dtype_text(report),
             count_text(report.shards, "file"), count_text(report.files_passed, "other file"), report.seconds);
  return 0;
}

/// Refuses options that a target has no use for.
using Given = std::pair<const char*, bool>;
Status refuse_given(const Options& options, std::initializer_list<Given> useless, std::string_view why) {
  const Given of_no_target_here[] = {{"--max-shard-size", !options.max_shard_size.empty()},
                                     {"--hdf5", options.hdf5},
                                     {"--mesh", !options.mesh.empty()},
                                     {"--name", !options.name.empty()},
                                     {"--config", !options.config.empty()},
                                     {"--step", options.step >= 0},
                                     {"--untie", options.untie},
                                     {"--drop-mtp", options.drop_mtp}};
  std::vector<Given> all(useless);
  all.insert(all.end(), std::begin(of_no_target_here), std::end(of_no_target_here));
  for (const auto& [flag, given] : all) {
    if (given) return invalid(fmt::format("{} has no meaning with --to {}: {}", flag, options.target_kind, why));
  }
  return {};
}

/// One file of GGUF.
Result<int> to_gguf(const Options& options, bool as_json) {
  RT_TRY(refuse_given(options, {{"--weights-only", options.weights_only}},
                      "the weights of a checkpoint are written to one file"));
  if (options.quantize == "fp8") return invalid("--quantize fp8 has no meaning with --to gguf; q8_0 has");
  if (!options.quantize.empty() && !options.dtype.empty()) {
    return invalid("--dtype and --quantize: one of them says what matrices become");
  }
  convert::GgufExportOptions to{.overwrite = options.overwrite, .cancel = &stop_on_signals()};
  if (options.quantize == "q8_0") to.type = convert::GgufType::kQ8_0;
  if (options.dtype == "f32") to.type = convert::GgufType::kF32;
  if (options.dtype == "f16") to.type = convert::GgufType::kF16;
  if (options.dtype == "bf16") to.type = convert::GgufType::kBf16;
  if (options.ema) to.weights = convert::WeightsOf::kAverage;
  std::error_code error;
  if (fs::exists(fs::path(options.from) / convert::kConfigFile, error) &&
      !fs::exists(fs::path(options.from) / ckpt::kManifestName, error)) {
    return invalid(
        fmt::format("{}: is a Hugging Face folder\n  expected a checkpoint or a run folder\n"
                    "  `cairn import {} CHECKPOINTS` makes one",
                    options.from, options.from));
  }
  RT_TRY_SET(const fs::path from, resolve_source(options.from));
  RT_TRY(check_outside_checkpoints(options.to));
  to.files = {.like = options.like, .without_tokenizer = options.without_tokenizer};
  to.files.trained_tokenizer = [&](const ckpt::Manifest& manifest) { return trained_tokenizer(from, manifest); };
  Result<convert::GgufExportReport> done = [&] {
    ByteProgress progress("written");
    to.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
    return unless_removed({from}, convert::export_gguf(*io, from, options.to, to, dsl::decode_recipe));
  }();
  RT_TRY_SET(const convert::GgufExportReport report, std::move(done));
  tell_warnings(options, report.warnings);
  if (as_json) {
    print_json({{"checkpoint", from.string()},
                {"file", report.file.string()},
                {"model_type", report.model_type},
                {"architecture", report.architecture},
                {"type", gguf_type_name(report.type)},
                {"parameters", report.parameters},
                {"tensors", report.tensors},
                {"bytes", report.data_bytes},
                {"not_finite", report.not_finite},
                {"seconds", report.seconds},
                {"warnings", report.warnings}});
    return 0;
  }
  fmt::print("{} -> {}: {} as GGUF's {}, {} parameters in {}, {} {}; {:.1f} s\n", from.string(), report.file.string(),
             report.model_type, report.architecture, format_count(static_cast<double>(report.parameters)),
             count_text(report.tensors, "tensor"), format_bytes(report.data_bytes), gguf_type_name(report.type),
             report.seconds);
  return 0;
}

/// A folder of torch.distributed.checkpoint.
Result<int> to_dcp(const Options& options, bool as_json) {
  RT_TRY(refuse_given(options,
                      {{"--dtype", !options.dtype.empty()},
                       {"--quantize", !options.quantize.empty()},
                       {"--like", !options.like.empty()},
                       {"--without-tokenizer", options.without_tokenizer},
                       {"--ema", options.ema},
                       {"--overwrite", options.overwrite}},
                      "the whole state of a checkpoint is written to an empty folder, as float32"));
  RT_TRY_SET(const fs::path from, resolve_source(options.from));
  RT_TRY(check_outside_checkpoints(options.to));
  convert::DistExportOptions to{.weights_only = options.weights_only, .cancel = &stop_on_signals()};
  Result<convert::DistExportReport> done = [&] {
    ByteProgress progress("written");
    to.progress = [&](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    const std::unique_ptr<ckpt::IoBackend> io = ckpt::make_best_backend();
    return unless_removed({from}, convert::export_dist(*io, from, options.to, to, dsl::decode_recipe));
  }();
  RT_TRY_SET(const convert::DistExportReport report, std::move(done));
  tell_warnings(options, report.warnings);
  if (as_json) {
    print_json({{"checkpoint", from.string()},
                {"folder", report.dir.string()},
                {"model_type", report.model_type},
                {"parameters", report.parameters},
                {"tensors", report.tensors},
                {"bytes", report.data_bytes},
                {"files", report.files},
                {"moments", report.moments},
                {"step", report.step},
                {"adam_step", report.adam_step},
                {"seconds", report.seconds},
                {"warnings", report.warnings}});
    return 0;
  }
  fmt::print("{} -> {}: {}, {} parameters in {}, {} in {}; {:.1f} s\n", from.string(), report.dir.string(),
             report.model_type, format_count(static_cast<double>(report.parameters)),
             count_text(report.tensors, "tensor"), format_bytes(report.data_bytes), count_text(report.files, "file"),
             report.seconds);
  fmt::print("  for torch.distributed.checkpoint: {}\n",
             report.moments ? fmt::format("weights, exp_avg, exp_avg_sq, settings; step {}, {} of the optimizer's own",
                                          report.step, count_text(report.adam_step, "update"))
                            : "only weights");
  return 0;
}

// --- --check ---------------------------------------------------------------------------------------------------------

/// "rows 36:72, transposed", "as it is".
std::string transform_text(const convert::Mapping& mapping, const Shape& logical, const Shape& stored) {
  if (mapping.only_row >= 0) return "one of the rows";
  const std::vector<convert::RowRun> runs = convert::row_runs(mapping, logical);
  std::string out;
  if (runs.size() > 1) {
    out = fmt::format("{} runs of rows, from row {}", runs.size(), runs[0].stored);
  } else if (logical != stored && !(mapping.transpose && count_elems(logical) == count_elems(stored))) {
    out =
        fmt::format("{} {}:{}", mapping.transpose ? "columns" : "rows", runs[0].stored, runs[0].stored + runs[0].count);
  }
  if (mapping.transpose) out += out.empty() ? "transposed" : ", transposed";
  return out.empty() ? "as it is" : out;
}

/// The numbers of layers as `*`, so that layers that are alike are one line.
std::string pattern_of(std::string_view name) {
  std::string out;
  for (size_t k = 0; k < name.size();) {
    const size_t end = std::min(name.find('.', k), name.size());
    const std::string_view part = name.substr(k, end - k);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    out += number ? "*" : part;
    if (end < name.size()) out += '.';
    k = end + 1;
  }
  return out;
}

struct MappedTensor {
  std::string logical, stored, file, found, dtype, transform;
  Shape shape;
};

std::vector<MappedTensor> mapped_tensors(const convert::HfFolder& folder) {
  std::vector<MappedTensor> out;
  for (size_t k = 0; k < folder.mappings().size(); ++k) {
    const convert::NamedTensor& stored = folder.stored()[k];
    const convert::Mapping& mapping = folder.mappings()[k];
    const TensorSpec& spec = folder.tensors()[static_cast<size_t>(mapping.tensor)];
    MappedTensor tensor{.logical = spec.name, .stored = stored.name, .shape = spec.shape};
    if (stored.tensor != nullptr) {
      tensor.file = stored.tensor->file_name();
      tensor.found = stored.tensor->name;
      tensor.dtype = stored.tensor->stored->dtype;
    }
    tensor.transform = transform_text(mapping, spec.shape, mapping.shape);
    out.push_back(std::move(tensor));
  }
  return out;
}

json check_json(const convert::HfFolder& folder, const std::vector<MappedTensor>& mapped) {
  json tensors = json::array(), problems = json::array();
  for (const MappedTensor& tensor : mapped) {
    tensors.push_back({{"logical", tensor.logical},
                       {"shape", tensor.shape},
                       {"stored", tensor.stored},
                       {"name_in_file", tensor.found},
                       {"file", tensor.file},
                       {"dtype", tensor.dtype},
                       {"transform", tensor.transform}});
  }
  for (const convert::TensorProblem& problem : folder.problems()) {
    problems.push_back({{"kind", convert::problem_name(problem.kind)},
                        {"file", problem.file},
                        {"tensor", problem.tensor},
                        {"found", problem.found},
                        {"expected", problem.expected},
                        {"message", problem.text()}});
  }
  return {{"folder", folder.dir().string()},
          {"ok", folder.problems().empty()},
          {"model_type", folder.family().model_type},
          {"architecture", folder.family().architecture},
          {"parameters", count_parameters(folder.model())},
          {"dtype", dtype_name(folder.dtype())},
          {"tied_embeddings", folder.model().tied_embeddings},
          {"checkpoint_bytes", count_parameters(folder.model()) * int64_t{sizeof(float)}},
          {"tensors", std::move(tensors)},
          {"problems", std::move(problems)},
          {"ignored", folder.ignored()},
          {"files_kept", folder.kept_files()},
          {"not_read", folder.not_read()},
          {"warnings", folder.warnings()}};
}

void print_mapping(const std::vector<MappedTensor>& mapped) {
  struct Line {
    std::string text;
    int64_t count = 0;
    std::set<std::string> files;
  };
  std::vector<Line> lines;
  std::map<std::string, size_t> index;
  for (const MappedTensor& tensor : mapped) {
    const std::string text = fmt::format("{} {} <- {} ({}{})", pattern_of(tensor.logical), to_string(tensor.shape),
                                         pattern_of(tensor.stored), tensor.dtype.empty() ? "missing" : tensor.dtype,
                                         ", " + tensor.transform);
    const auto [at, is_new] = index.emplace(text, lines.size());
    if (is_new) lines.push_back({text});
    ++lines[at->second].count;
    if (!tensor.file.empty()) lines[at->second].files.insert(tensor.file);
  }
  for (const Line& line : lines) {
    fmt::print("  {}{}{}\n", line.text, line.count > 1 ? fmt::format(" x {}", line.count) : "",
               line.files.size() == 1 ? fmt::format(", {}", *line.files.begin())
               : line.files.empty()   ? ""
                                      : fmt::format(", {} files", line.files.size()));
  }
}

json state_json(const convert::TrainingState& state) {
  const auto known = [](int64_t n) { return n < 0 ? json(nullptr) : json(n); };
  return {{"program", state.program},
          {"version", state.version},
          {"layout", state.layout},
          {"folder", state.folder.string()},
          {"step", known(state.step)},
          {"samples", known(state.samples)},
          {"skipped_steps", known(state.skipped)},
          {"data_ranks", state.data_ranks},
          {"model_ranks", state.model_ranks},
          {"tensors", state.tensors},
          {"elements", state.elements},
          {"dtype", state.dtype},
          {"files", state.files},
          {"bytes", state.bytes},
          {"optimizer", state.optimizer},
          {"adam_step", state.adam_step < 0 ? json(nullptr) : json(state.adam_step)},
          {"kept", state.kept},
          {"lost", state.lost},
          {"problems", state.problems}};
}

void print_state(const convert::TrainingState& state) {
  std::string of_step = state.step < 0 ? "" : fmt::format(", step {}", state.step);
  if (state.samples >= 0) of_step += fmt::format(", {} samples", state.samples);
  if (state.skipped > 0) of_step += fmt::format(", {} skipped", count_text(state.skipped, "step"));
  fmt::print("{}: a training state of {}{}: {}{}\n", state.folder.string(), state.program,
             state.version.empty() ? "" : " " + state.version, state.layout, of_step);
  std::string ranks;
  if (state.data_ranks > 0) ranks += fmt::format(", {}", count_text(state.data_ranks, "data-parallel rank"));
  if (state.model_ranks > 0) ranks += fmt::format(" x {}", count_text(state.model_ranks, "model rank"));
  if (state.data_ranks == 0 && !ranks.empty()) ranks = ", " + ranks.substr(3);
  fmt::print("  {}, {}{}\n", count_text(state.files, "file"), format_bytes(state.bytes), ranks);
  if (state.tensors > 0) {
    fmt::print(
        "  {}{}{}\n", count_text(state.tensors, "tensor"),
        state.elements > 0 ? fmt::format(", {} parameters", format_count(static_cast<double>(state.elements))) : "",
        state.dtype.empty() ? "" : fmt::format(", trained in {}", state.dtype));
  }
  if (!state.optimizer.empty()) {
    fmt::print("  optimizer: {}{}\n", fmt::join(state.optimizer, ", "),
               state.adam_step < 0 ? "" : fmt::format(", its own step {}", state.adam_step));
  }
  for (const std::string& line : state.kept) fmt::print("  an import takes: {}\n", line);
  for (const std::string& line : state.lost) fmt::print("  an import leaves: {}\n", line);
  for (const std::string& problem : state.problems) fmt::print("  problem: {}\n", problem);
}

/// Opens the state as an import would, all but the writing: the masters are compared too.
Result<int> check_state(const Options& options, const convert::TrainingState& state, bool as_json) {
  const fs::path config = config_of(options, state);
  const convert::ImportOptions import{
      .untie = options.untie, .drop_mtp = options.drop_mtp, .weights_only = options.weights_only};
  const Result<convert::OpenedState> opened = convert::open_state(state, config, import);
  if (as_json) {
    json out = {{"folder", options.from}, {"ok", opened.ok()}, {"training_state", state_json(state)}};
    if (!opened.ok()) out["message"] = opened.error().message;
    if (opened.ok()) {
      out["model_type"] = opened.value().weights->family().model_type;
      out["warnings"] = opened.value().state.notes;
    }
    print_json(std::move(out));
    return opened.ok() ? 0 : kRefused;
  }
  if (!opened.ok()) return opened.error();
  for (const std::string& note : opened.value().state.notes) fmt::print("  note: {}\n", note);
  const convert::HfFolder& folder = *opened.value().weights;
  for (const std::string& warning : folder.warnings()) fmt::print("  warning: {}\n", warning);
  const int64_t kinds = opened.value().exp_avg == nullptr ? 1 : 3;
  fmt::print("  it imports, as the {} model of {}: {} as a checkpoint\n", folder.family().model_type,
             opened.value().state.config.empty() ? (config / convert::kConfigFile).string() : "its own arguments",
             format_bytes(kinds * count_parameters(folder.model()) * int64_t{sizeof(float)}));
  return 0;
}

Result<int> check(const Options& options, bool as_json) {
  RT_TRY_SET(const fs::path at, folder_of(options));
  Result<std::optional<convert::TrainingState>> looked = convert::look_at_training_state(at);
  const std::optional<convert::TrainingState> state = looked.ok() ? looked.value() : std::nullopt;
  if (state && !as_json) print_state(*state);
  if (state && convert::is_imported_state(*state, options.weights_only)) return check_state(options, *state, as_json);
  Result<std::unique_ptr<convert::HfFolder>> opened =
      convert::HfFolder::inspect(at, {.untie = options.untie, .drop_mtp = options.drop_mtp});
  if (!opened.ok() && state && as_json) {
    print_json({{"folder", options.from},
                {"ok", false},
                {"training_state", state_json(*state)},
                {"message", opened.error().message}});
    return kRefused;
  }
  if (!opened.ok()) return looked.ok() ? std::move(opened).error() : std::move(looked).error();
  const convert::HfFolder& folder = *opened.value();
  const ModelConfig& model = folder.model();
  const std::vector<MappedTensor> mapped = mapped_tensors(folder);
  const int code = folder.problems().empty() ? 0 : kRefused;
  if (as_json) {
    json out = check_json(folder, mapped);
    if (state) out["training_state"] = state_json(*state);
    if (!looked.ok()) out["warnings"].push_back(looked.error().message);
    print_json(std::move(out));
    return code;
  }
  fmt::print("{}: {} ({}), {} parameters, {}\n", options.from, folder.family().model_type, folder.family().architecture,
             format_count(static_cast<double>(count_parameters(model))), dtype_name(folder.dtype()));
  fmt::print("  {}, width {}, {} of {} ({} key/value), ffn {}, vocabulary {}, context {}, {} head\n",
             count_text(model.layers, "layer"), model.width, count_text(model.heads, "head"), model.head_dim,
             model.kv_heads, model.ffn, model.vocab, model.context, model.tied_embeddings ? "tied" : "own");
  if (model.moe.experts > 0) {
    fmt::print("  {} of {} in {}, {} a token, {} hidden units beside them\n", count_text(model.moe.experts, "expert"),
               expert_ffn(model), count_text(expert_layers(model), "layer"), model.moe.top_k, shared_ffn(model));
  }
  if (model.mtp.depth > 0) {
    fmt::print("  {} behind them that guess{} further tokens\n", count_text(model.mtp.depth, "layer"),
               model.mtp.depth == 1 ? "es" : "");
  }
  print_mapping(mapped);
  if (!folder.ignored().empty()) fmt::print("  left out: {}\n", fmt::join(folder.ignored(), ", "));
  fmt::print("  kept beside the weights: {}\n", fmt::join(folder.kept_files(), ", "));
  for (const std::string& warning : folder.warnings()) fmt::print("  warning: {}\n", warning);
  if (!looked.ok()) fmt::print("  warning: {}\n", looked.error().message);  // of a trainer's state beside the weights
  if (folder.problems().empty() && !folder.not_read().empty()) {
    fmt::print("  its tensors convert; whether it is the same model depends on what was not read: {}\n",
               fmt::join(folder.not_read(), ", "));
    return code;
  }
  if (folder.problems().empty()) {
    fmt::print("  it converts: {} as a checkpoint\n", format_bytes(count_parameters(model) * int64_t{sizeof(float)}));
    return code;
  }
  fmt::print("  it does not convert; {} stand{} in the way:\n", count_text(std::ssize(folder.problems()), "thing"),
             folder.problems().size() == 1 ? "s" : "");
  for (const std::string& line : convert::problem_lines(folder.problems())) fmt::print("    {}\n", line);
  return code;
}

Result<int> run(Options options, bool as_json) {
  if (options.check && !options.to.empty()) return invalid("--check writes nothing: give the folder alone");
  if (!options.check && options.to.empty())
    return invalid("where to? give a second folder, or --check to look at the first");
  const bool no_run = options.check || options.verb == "import";
  RT_TRY_SET(const HubFolder from, hub_folder(options.from, no_run ? hub::Bare::kUnlessPath : hub::Bare::kNever));
  options.from = from.path.string();
  options.hub_name = from.model;
  if (options.check) return check(options, as_json);
  if (options.target_kind == "dcp") return to_dcp(options, as_json);
  if (options.target_kind == "gguf") return to_gguf(options, as_json);
  if (options.target_kind != "hf") {
    std::error_code error;
    const bool checkpoint = fs::exists(fs::path(options.from) / ckpt::kManifestName, error);
    std::optional<convert::TrainingState> state;
    if (!checkpoint) {
      RT_TRY_SET(state, state_of(options));
    }
    if (state) {
      RT_TRY(refuse_useless(options, true));
      return to_checkpoint(options, state, as_json);
    }
  }
  RT_TRY_SET(const Kind kind, kind_of(options));
  const bool to_cairn = options.target_kind.empty() ? kind == Kind::kFolder : options.target_kind == "cairn";
  RT_TRY(refuse_useless(options, to_cairn));
  if (!to_cairn) return to_folder(options, kind, as_json);
  if (kind == Kind::kCheckpoint) {
    return convert::named(
        options.from,
        invalid(fmt::format("{}: is no Hugging Face folder (no config.json); into a checkpoint of another "
                            "layout: cairn ckpt reshard",
                            options.from)));
  }
  return to_checkpoint(options, std::nullopt, as_json);
}

void add_import_options(CLI::App& command, Options& options) {
  command.add_option(
      "--mesh", options.mesh,
      "layout of the shards, as tp=1,pp=2,dp=2,ep=2; what is not named is 1 (any layout loads into any other)");
  command.add_option("--name", options.name, "name of the run; default: the folder's");
  command.add_option("--config", options.config,
                     "of a training state: the folder with the model's config.json and tokenizer; default: SRC");
  command.add_option("--step", options.step, "of a training state: global_stepN, step-N or iter_N, not the newest")
      ->type_name("N")
      ->transform(whole_number(0));
  command.add_flag("--weights-only", options.weights_only, "of a training state: only its weights, at step 0");
}

void add_export_options(CLI::App& command, Options& options) {
  command
      .add_option("--dtype", options.dtype, "of the weights; default: that of the source, f32 of a trained checkpoint")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command
      .add_option(
          "--quantize", options.quantize,
          "fp8: the layers' matrices in blocks of 128 x 128 numbers of eight bits, as DeepSeek-V3 is published; "
          "the rest in --dtype, by default bf16 of a trained checkpoint; with --to gguf, q8_0: matrices in groups of "
          "32 "
          "numbers of eight bits")
      ->check(CLI::IsMember({"fp8", "q8_0"}));
  command.add_option("--max-shard-size", options.max_shard_size,
                     "of a file: 5GB, 200MB; default: the source's split, 5GB");
  command.add_option("--like", options.like,
                     "a Hugging Face folder: its family, token ids, tokenizer and generation files (of a model that "
                     "began as it); or a folder with a tokenizer only");
  command.add_flag("--without-tokenizer", options.without_tokenizer, "leave the tokenizer's files out");
  command.add_flag("--ema", options.ema, "the moving average of the weights that the checkpoint holds");
  command.add_flag("--hdf5", options.hdf5, "each weights file is HDF5 too, with a second name: model.h5");
}

void add_shared_options(CLI::App& command, Options& options, bool folder_source, Session& session) {
  if (folder_source) {
    command.add_flag("--untie", options.untie, "keep an embedding and a head that differ though the config ties them");
    command.add_flag("--drop-mtp", options.drop_mtp, "leave out the layers that predict further tokens");
  }
  command.add_flag("--overwrite", options.overwrite, "replace the model or the step that is there");
  add_json_flag(command, session);
}

void act(CLI::App& command, const std::shared_ptr<Options>& options, Session& session) {
  command.final_callback(
      [options, &session] { session.action = [options, &session] { return run(*options, session.json); }; });
}

}  // namespace

void add_convert(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>(Options{.verb = "convert"});
  CLI::App* command = app.add_subcommand(
      "convert", "convert between Hugging Face folders and checkpoints, either way; --check: look first");
  command
      ->add_option(
          "SRC", options->from,
          "a Hugging Face folder (safetensors or pytorch_model.bin), a checkpoint, or a run folder; or a model of the "
          "Hub, hf://ORG/NAME@REVISION")
      ->required();
  command->add_option("DST", options->to, "folder to make; for a checkpoint: step-00000000 is written in it");
  command
      ->add_option(
          "--to", options->target_kind,
          "hf: a Hugging Face folder; cairn: a checkpoint; dcp: a checkpoint of torch.distributed.checkpoint "
          "for FSDP2, by Hugging Face's names, with optimizer; gguf: one file for llama.cpp; default: what SRC "
          "is not")
      ->check(CLI::IsMember({"hf", "cairn", "dcp", "gguf"}));
  command->add_flag(
      "--check", options->check,
      "write nothing (files of a model of the Hub go to its cache): family, parameters, what maps where, what is "
      "missing, extra or oddly shaped");
  add_import_options(*command, *options);
  add_export_options(*command, *options);
  add_shared_options(*command, *options, true, session);
  command->footer(
      "Bounded memory whatever the model's size. Killed or stopped, nothing half-made has the target's name; the same\n"
      "command resumes from the files that are complete, after checking every byte of them.\n"
      "Exit codes: 0 done, or --check: it converts, 2 refused, 65 the source is damaged, 69 no Hub answers, 74 disk "
      "full or an I/O error, "
      "75 stopped.\n"
      "Examples:\n  cairn convert --check HF_DIR\n  cairn convert HF_DIR checkpoints --mesh tp=2,pp=2\n"
      "  cairn convert runs/a HF_DIR --dtype bf16\n  cairn convert HF_DIR OTHER --to hf --dtype f16 --max-shard-size "
      "2GB");
  act(*command, options, session);
}

void add_import(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>(Options{.verb = "import", .target_kind = "cairn"});
  CLI::App* command = app.add_subcommand(
      "import",
      "convert a Hugging Face folder, or a training state of DeepSpeed or FSDP, to a checkpoint of any layout");
  command
      ->add_option("hf_dir", options->from,
                   "folder with config.json and weights, or the folder of a training state; or a model of the Hub, "
                   "ORG/NAME@REVISION")
      ->required();
  command
      ->add_option("checkpoints", options->to,
                   "folder for checkpoints; step-00000000 is written in it, of a training state its own step")
      ->required();
  add_import_options(*command, *options);
  add_shared_options(*command, *options, true, session);
  command->footer(
      "Exit codes: as `cairn convert`, and 69 also: the folder is of a run in training.\n"
      "Examples:\n"
      "  cairn import HF_DIR runs/base/checkpoints --mesh tp=2,pp=2\n"
      "  cairn import Qwen/Qwen3-0.6B runs/qwen/checkpoints\n"
      "  cairn import DEEPSPEED_DIR runs/mine/checkpoints --config HF_DIR\n"
      "  cairn import TORCHTITAN_DIR/checkpoint runs/mine/checkpoints --config HF_DIR --step 1000");
  act(*command, options, session);
}

void add_export(CLI::App& app, Session& session) {
  auto options = std::make_shared<Options>(Options{.verb = "export", .target_kind = "hf"});
  CLI::App* command = app.add_subcommand(
      "export",
      "convert a checkpoint of any layout to a Hugging Face folder, to GGUF, or for torch.distributed.checkpoint");
  command->add_option("checkpoint", options->from, "a checkpoint, or a run folder: its newest complete one")
      ->required();
  command
      ->add_option("hf_dir", options->to,
                   "folder to make: config.json, safetensors, tokenizer files; with --to gguf a file")
      ->required();
  command
      ->add_option("--to", options->target_kind,
                   "hf: a Hugging Face folder; gguf: one file for llama.cpp; dcp: a checkpoint of "
                   "torch.distributed.checkpoint for FSDP2, by Hugging Face's names, with optimizer; default: hf")
      ->check(CLI::IsMember({"hf", "dcp", "gguf"}));
  command->add_flag("--weights-only", options->weights_only, "with --to dcp: without the optimizer's state");
  add_export_options(*command, *options);
  add_shared_options(*command, *options, false, session);
  command->footer(
      "Exit codes: as `cairn convert`.\n"
      "Examples:\n"
      "  cairn export runs/mine HF_DIR\n"
      "  cairn export runs/mine model.gguf --to gguf --quantize q8_0\n"
      "  cairn export runs/mine DCP_DIR --to dcp\n"
      "  cairn export runs/mine/checkpoints/step-00001200 HF_DIR --dtype bf16 --max-shard-size 2GB");
  act(*command, options, session);
}

}  // namespace cairn::tools
