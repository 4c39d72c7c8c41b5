#include "converters/import.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/save.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "ckpt/retention/retention.h"
#include "converters/deepspeed.h"
#include "converters/dist_state.h"
#include "converters/foreign_file.h"
#include "converters/hf_folder.h"
#include "converters/megatron_state.h"
#include "converters/source_stream.h"
#include "runtime/core/random.h"
#include "runtime/json/json.h"
#include "runtime/plan/plan.h"
#include "runtime/trainer/checkpoint_hook.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxKeptFileBytes = int64_t{256} << 20;  // a tokenizer.json has some 10 MB
constexpr int64_t kSourceThreads = 2;

std::string clean_name(const std::string& name) {
  std::string out;
  for (const char c : name) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    out += plain ? c : '-';
  }
  if (out.empty()) return "imported";
  return (out[0] == '-' ? "hf" : "") + out.substr(0, 64);
}

}  // namespace

Recipe recipe_for_import(const ModelConfig& model, const MeshConfig& mesh, const std::string& name,
                         const fs::path& hf_dir) {
  Recipe out;
  out.name = clean_name(name);
  out.seed = 1;
  out.stop = {Span::Unit::kSteps, 1};
  out.model = model;
  out.mesh = mesh;
  out.batch = {.samples = mesh.dp, .micro = 1};
  out.optimizer.peak_lr = 1e-5;  // a usual rate to tune on with
  out.optimizer.clip = 1.0;
  if (model.mask == Mask::kPrefix) out.objective.kind = ObjectiveConfig::Kind::kPrefix;  // else no recipe may have it
  out.eval.steps = 1;  // the least that a recipe may say; nothing is evaluated by itself
  std::error_code error;
  if (fs::is_regular_file(hf_dir / "tokenizer.model", error)) {
    out.tokenizer = {TokenizerConfig::Kind::kSentencePiece, fs::absolute(hf_dir / "tokenizer.model", error).string()};
  }
  return out;
}

namespace {

/// One folder of a model's weights, or three of weights and moments: the kinds one behind the other, each with all of
/// the model's tensors.
class KindsSource final : public WeightSource {
 public:
  explicit KindsSource(std::vector<const HfFolder*> folders) : folders_(std::move(folders)) {
    for (const HfFolder* folder : folders_) {
      tensors_.insert(tensors_.end(), folder->tensors().begin(), folder->tensors().end());
    }
  }
  const ModelConfig& model() const override { return folders_.front()->model(); }
  const std::vector<TensorSpec>& tensors() const override { return tensors_; }
  Status read_box(int64_t tensor, const Box& box, std::span<float> out) const override {
    const int64_t each = std::ssize(folders_.front()->tensors());
    return folders_[static_cast<size_t>(tensor / each)]->read_box(tensor % each, box, out);
  }
  int64_t kinds() const { return std::ssize(folders_); }

 private:
  std::vector<const HfFolder*> folders_;
  std::vector<TensorSpec> tensors_;
};

/// Lists what every rank of the plan would save of the first `kinds` kinds of state, in files of about `file_bytes`;
/// `boxes` gets the box of each shard, in the tensors of a KindsSource.
std::vector<ckpt::WriterPart> lay_out(const Plan& plan, int64_t kinds, int64_t file_bytes,
                                      std::vector<SourceBox>* boxes) {
  std::vector<ckpt::WriterPart> out;
  const ckpt::StateIndex index(plan);
  const StateKinds state = plan.state_kinds();
  const auto tensors = std::ssize(plan.tensors);
  for (int64_t r = 0; r < plan.mesh.world(); ++r) {
    ckpt::WriterPart part;
    int64_t filled = 0;
    const RankPlan rank = plan.rank(r);
    for (int64_t kind = 0; kind < kinds; ++kind) {
      for (const StatePiece& piece : rank.pieces) {
        const auto of = static_cast<StateKind>(kind);
        if (!piece.primary || !state.shape_of(of, plan.tensors[static_cast<size_t>(piece.tensor)])) continue;
        const int64_t bytes = piece.count_elems() * int64_t{sizeof(float)};
        if (!part.shards.empty() && filled + bytes > file_bytes) {
          out.push_back(std::exchange(part, {}));
          filled = 0;
        }
        filled += bytes;
        part.shards.push_back(
            {.tensor = index.at(kind, piece.tensor), .lo = piece.box.lo, .hi = piece.box.hi, .bytes = bytes});
        boxes->push_back({kind * tensors + piece.tensor, piece.box});
      }
    }
    if (!part.shards.empty()) out.push_back(std::move(part));
  }
  for (size_t k = 0; k < out.size(); ++k)
    out[k].file_name = ckpt::shard_file_name(static_cast<int64_t>(k), static_cast<int64_t>(out.size()));
  return out;
}

/// All that decides the bytes of the checkpoint's files.
uint64_t key_of(const std::string& identity, const ckpt::Manifest& skeleton, std::span<const ckpt::WriterPart> parts,
                std::span<const std::string> contents) {
  std::string text = "import\n" + identity;
  for (const std::string& content : contents) text += ckpt::hash_to_hex(ckpt::hash_bytes(content)) + "\n";
  for (const ckpt::WriterPart& part : parts) {
    text += part.file_name + "\n";
    for (const ckpt::ShardData& shard : part.shards) {
      const ckpt::TensorEntry& tensor = skeleton.tensors[static_cast<size_t>(shard.tensor)];
      text += fmt::format("{} {} {}\n", tensor.kind, tensor.name, to_string(Box{shard.lo, shard.hi}));
    }
  }
  return std::max<uint64_t>(1, ckpt::hash_bytes(text));
}

}  // namespace

namespace {

/// The source of an import: one folder, or the folders of a training state.
struct Import {
  std::vector<const HfFolder*> kinds;
  std::filesystem::path source;         // for the name
  const ForeignState* state = nullptr;  // null: only weights, at step 0
  std::string identity;                 // text that changes when a file of the source does
};

Status check_target(const fs::path& source, const fs::path& checkpoints_dir, int64_t step_number, bool replace) {
  std::error_code ignored;
  if (const fs::path step = checkpoints_dir / ckpt::step_dir_name(step_number); fs::equivalent(source, step, ignored)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: the source would be replaced; name another folder", source.string())};
  }
  if (fs::exists(checkpoints_dir / ckpt::kManifestName, ignored)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: is a checkpoint; name a folder for {} to be in",
                                                       checkpoints_dir.string(), ckpt::step_dir_name(step_number))};
  }
  if (const fs::path step = checkpoints_dir / ckpt::step_dir_name(step_number);
      !replace && fs::exists(step / ckpt::kManifestName, ignored)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: exists already; --overwrite replaces it, or name another folder", step.string())};
  }
  return {};
}

/// The position of a state: everything but the order of the data.
trainer::TrainPosition position_of(const ForeignState& state, uint64_t seed) {
  trainer::TrainPosition out{
      .step = state.step, .samples = state.samples, .tokens = state.tokens, .lr = state.optimizer.peak_lr};
  out.loss = std::numeric_limits<double>::quiet_NaN();
  out.loss_scale = state.loss_scale;
  out.past.moments_from = state.step - state.loss_scale.skipped - state.adam_step;
  out.seed = seed;
  return out;
}

nlohmann::json foreign_json(const ForeignState& state) {
  nlohmann::json out = state.kept;
  out["program"] = state.about.program;
  out["version"] = state.about.version;
  out["layout"] = state.about.layout;
  out["step"] = state.step;
  out["samples"] = state.samples;
  out["skipped_steps"] = state.about.skipped;
  out["adam_step"] = state.adam_step;
  return out;
}

Result<ImportReport> import_from(ckpt::IoBackend& io, const Import& from, const fs::path& checkpoints_dir,
                                 const ImportOptions& options, const RecipeEncoder& encode) {
  const auto start = std::chrono::steady_clock::now();
  const HfFolder* const folder = from.kinds.front();
  const fs::path& hf_dir = folder->dir();
  const fs::path plain = (from.source / "").lexically_normal().parent_path();
  const std::string name = options.run_name.empty() ? plain.filename().string() : options.run_name;
  ImportReport report;
  report.recipe = recipe_for_import(folder->model(), options.mesh, name, hf_dir);
  if (from.state != nullptr) {
    const OptimizerConfig& to = from.state->optimizer;
    OptimizerConfig& mine = report.recipe.optimizer;
    mine.beta1 = to.beta1;
    mine.beta2 = to.beta2;
    mine.eps = to.eps;
    mine.weight_decay = to.weight_decay;
    if (to.peak_lr > 0) mine.peak_lr = to.peak_lr;
    mine.clip = to.clip;
    report.recipe.precision = from.state->about.dtype == "BF16"  ? Precision::kBf16
                              : from.state->about.dtype == "F16" ? Precision::kF16
                                                                 : Precision::kF32;
    report.recipe.stop = {Span::Unit::kSteps, static_cast<double>(from.state->step + 1)};
  }
  const int64_t world = std::max<int64_t>(1, options.mesh.tp * options.mesh.cp * options.mesh.pp * options.mesh.dp);
  RT_TRY_SET(const Plan plan, make_plan(report.recipe, world));
  RT_CHECK(plan.tensors.size() == folder->tensors().size(), "the plan has {} tensors", plan.tensors.size());

  const KindsSource source(from.kinds);
  std::vector<SourceBox> boxes;
  std::vector<ckpt::WriterPart> parts = lay_out(plan, source.kinds(), options.file_bytes, &boxes);
  SourceStream stream(source, boxes, {.window_bytes = options.memory_bytes / 4, .threads = kSourceThreads});
  int64_t box = 0, planned_bytes = 0;
  int64_t total_bytes = 0;
  for (const ckpt::WriterPart& part : parts) {
    for (const ckpt::ShardData& shard : part.shards) total_bytes += shard.bytes;
  }
  for (ckpt::WriterPart& part : parts) {
    for (ckpt::ShardData& shard : part.shards) {
      shard.fill = [&, box, before = planned_bytes](int64_t offset, std::span<std::byte> out) -> Status {
        RT_TRY(stream.copy(box, offset, out));
        const bool last = before + offset + static_cast<int64_t>(out.size()) == total_bytes;
        if (last && from.state != nullptr) RT_TRY(from.state->files->check_unchanged());
        if (options.progress) options.progress(before + offset + static_cast<int64_t>(out.size()), total_bytes);
        return {};
      };
      ++box;
      planned_bytes += shard.bytes;
    }
  }

  const RecipeText recipe = encode(report.recipe);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  ckpt::RunText run{.run_name = report.recipe.name, .recipe_json = recipe.json, .recipe_hash = recipe.hash};
  run.run_id = fmt::format("import-{:016x}", mix64(static_cast<uint64_t>(nanoseconds) ^ mix64(::getpid())));
  ckpt::Manifest skeleton = ckpt::manifest_skeleton(plan, run);
  if (from.state == nullptr) skeleton.tensors.resize(plan.tensors.size());  // the weights come first; no moments
  skeleton.created_unix_ms = nanoseconds / 1'000'000;
  nlohmann::json imported = {{"model_type", folder->family().model_type},
                             {"dtype", dtype_name(folder->dtype())},
                             {"empty_files", nlohmann::json::array()}};
  for (const auto& [name, dtype] : folder->own_dtypes()) imported["dtypes"][name] = dtype_name(dtype);

  std::vector<std::string> contents;
  contents.reserve(folder->kept_files().size());  // shards point into it
  for (const std::string& file : folder->kept_files()) {
    RT_TRY_SET(std::string text, read_text_file(hf_dir / file, kMaxKeptFileBytes));
    ++report.files_kept;
    if (text.empty()) {  // a tensor has at least one element
      imported["empty_files"].push_back(file);
      continue;
    }
    const auto size = static_cast<int64_t>(text.size());
    contents.push_back(std::move(text));
    skeleton.tensors.push_back({file, std::string(kFileKind), DType::kU8, {size}});
    parts[0].shards.push_back({.tensor = static_cast<int64_t>(skeleton.tensors.size()) - 1,
                               .lo = {0},
                               .hi = {size},
                               .data = reinterpret_cast<const std::byte*>(contents.back().data()),
                               .bytes = size});
  }
  nlohmann::json state = nlohmann::json::object();
  if (from.state != nullptr) {
    ckpt::put_position(position_of(*from.state, report.recipe.seed), skeleton);
    state = json_or_nothing(skeleton.state);
    imported["foreign"] = foreign_json(*from.state);
  }
  state["imported"] = std::move(imported);
  skeleton.state = json_text(state);
  ckpt::SaveOptions save;
  save.fill_bytes = options.memory_bytes / 4;
  save.replace_existing = options.replace;
  save.cancel = options.cancel;
  save.resume_key = key_of(from.identity, skeleton, parts, contents);
  save.commit_bytes = int64_t{1} << 30;
  RT_TRY_SET(save.resume_from, ckpt::find_unfinished(io, checkpoints_dir, skeleton.step, save.resume_key,
                                                     ckpt::may_be_alive, &report.cleaned));
  RT_TRY_SET(ckpt::SaveReport saved, ckpt::save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts, save));
  report.dir = saved.dir;
  report.dtype = folder->dtype();
  report.tensors = static_cast<int64_t>(plan.tensors.size());
  report.parameters = plan.parameters;
  report.payload_bytes = saved.payload_bytes;
  report.taken_files = saved.taken_files;
  report.taken_bytes = saved.taken_bytes;
  report.ranks = world;
  report.warnings = folder->warnings();
  report.moments = from.state != nullptr;
  report.step = from.state == nullptr ? 0 : from.state->step;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace

Result<ImportReport> import_hf(ckpt::IoBackend& io, const fs::path& hf_dir, const fs::path& checkpoints_dir,
                               const ImportOptions& options, const RecipeEncoder& encode) {
  RT_TRY(check_target(hf_dir, checkpoints_dir, 0, options.replace));
  RT_TRY_SET(const std::unique_ptr<HfFolder> folder,
             HfFolder::open(hf_dir, {.untie = options.untie, .drop_mtp = options.drop_mtp}));
  for (const auto& file : folder->weights().files()) RT_TRY(file->verify());
  return import_from(io, {.kinds = {folder.get()}, .source = hf_dir, .identity = folder->identity()}, checkpoints_dir,
                     options, encode);
}

bool is_imported_state(const TrainingState& state, bool weights_only) {
  // Files of model ranks without an optimizer are weights (sharded_files.h), and so are boxes (dist_files.h).
  if (state.program == "DeepSpeed") return state.layout != "ZeRO-0" || !state.optimizer.empty();
  const bool boxes = state.program == "torch.distributed.checkpoint" ||
                     (state.program == "Megatron-LM" && state.layout == "torch_dist");
  return boxes && state.problems.empty() && (weights_only || !state.optimizer.empty());
}

namespace {

Result<ForeignState> open_foreign_state(const TrainingState& state, const fs::path& config, bool weights_only) {
  if (state.program == "DeepSpeed") return open_deepspeed(state, weights_only);
  const bool megatron = state.program == "Megatron-LM";
  std::string text;
  if (!megatron || is_plain_file(config / kConfigFile)) {
    RT_TRY_SET(text, read_text_file(config / kConfigFile, kMaxKeptFileBytes));
  }
  if (megatron) {  // a folder of another family has the tokenizer's files
    const nlohmann::json json = json_or_nothing(text);
    const bool of_megatron = json_string(json, "model_type") == "megatron_gpt";
    return open_megatron_state(state, weights_only, of_megatron ? json : nlohmann::json());
  }
  return open_dist_state(state, weights_only, json_or_nothing(text));
}

}  // namespace

namespace {

/// A setting that no recipe may have stays at its default: a manifest with it could not be read again.
void keep_in_range(ForeignState* state) {
  const OptimizerConfig usual;
  OptimizerConfig& of = state->optimizer;
  const auto keep = [&](const char* name, double* value, double otherwise, bool fits) {
    if (fits) return;
    state->notes.push_back(fmt::format("its {} is {}, which no recipe may have: {}", name, *value,
                                       otherwise == 0 ? "left out" : fmt::format("{} is taken", otherwise)));
    *value = otherwise;
  };
  keep("eps", &of.eps, usual.eps, of.eps > 0 && of.eps <= 1);
  keep("beta1", &of.beta1, usual.beta1, of.beta1 >= 0 && of.beta1 < 1);
  keep("beta2", &of.beta2, usual.beta2, of.beta2 >= 0 && of.beta2 < 1);
  keep("weight_decay", &of.weight_decay, usual.weight_decay, of.weight_decay >= 0 && of.weight_decay <= 10);
  keep("lr", &of.peak_lr, 0, of.peak_lr >= 0 && std::isfinite(of.peak_lr));
  keep("clip", &of.clip, 0, of.clip >= 0 && of.clip <= 1e9);
}

}  // namespace

Result<OpenedState> open_state(const TrainingState& state, const fs::path& config, const ImportOptions& options) {
  OpenedState out;
  if (state.program != "Megatron-LM" && !is_plain_file(config / kConfigFile)) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: has no config.json: {} saves none, and without it the tensors have no meaning\n"
                             "  expected the model's config.json (and its tokenizer) there\n"
                             "  give the Hugging Face folder that training began with: --config DIR",
                             config.string(), state.program)};
  }
  RT_TRY_SET(out.state, open_foreign_state(state, config, options.weights_only));
  keep_in_range(&out.state);
  std::future<Status> verified = std::async(std::launch::async, [&] { return verify_archives(out.state); });
  const Status rounds = check_masters(out.state);
  RT_TRY(verified.get());  // a damaged file explains masters that differ
  RT_TRY(rounds);
  const HfOptions hf{.untie = options.untie, .drop_mtp = options.drop_mtp};
  RT_TRY_SET(out.weights, HfFolder::open_with(config, std::move(out.state.weights), hf, out.state.config));
  if (out.state.exp_avg == nullptr) return out;
  if (out.weights->has_unit_head()) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: rows of this model's head are divided by their lengths, and moments cannot be\n"
                             "  expected a model whose head is used as it is stored\n"
                             "  `cairn import --weights-only` takes the weights",
                             config.string())};
  }
  RT_TRY_SET(out.exp_avg, HfFolder::open_with(config, std::move(out.state.exp_avg), hf, out.state.config));
  RT_TRY_SET(out.exp_avg_sq, HfFolder::open_with(config, std::move(out.state.exp_avg_sq), hf, out.state.config));
  return out;
}

Result<ImportReport> import_state(ckpt::IoBackend& io, const TrainingState& state, const fs::path& source,
                                  const fs::path& checkpoints_dir, const ImportOptions& options,
                                  const RecipeEncoder& encode) {
  RT_TRY(check_target(source, checkpoints_dir, options.weights_only ? 0 : std::max<int64_t>(0, state.step),
                      options.replace));
  const fs::path config = !options.config.empty() ? options.config : source;
  RT_TRY_SET(const OpenedState opened, open_state(state, config, options));
  Import from{.kinds = {opened.weights.get()}, .source = source, .identity = opened.weights->identity()};
  if (opened.exp_avg != nullptr) {
    from.kinds.insert(from.kinds.end(), {opened.exp_avg.get(), opened.exp_avg_sq.get()});
    from.state = &opened.state;
  }
  RT_TRY_SET(ImportReport report, import_from(io, from, checkpoints_dir, options, encode));
  report.from = fmt::format("{}{}{}, {}", state.program, state.version.empty() ? "" : " ", state.version, state.layout);
  report.samples = opened.state.samples;
  report.tokens = opened.state.tokens;
  report.adam_step = opened.state.adam_step;
  report.lost = state.lost;
  report.warnings.insert(report.warnings.end(), opened.state.notes.begin(), opened.state.notes.end());
  return report;
}

}  // namespace cairn::convert
