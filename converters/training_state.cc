#include "converters/training_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "converters/foreign_file.h"
#include "converters/pickle_tree.h"
#include "converters/sharded_files.h"
#include "converters/torch_archive.h"
#include "runtime/core/count_text.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
using Id = PickleTree::Id;
using Kind = PickleTree::Kind;
using Dict = PickleTree::Dict;
constexpr Id kNothing = PickleTree::kNothing;

constexpr size_t kMostNames = 4096;
constexpr int64_t kMaxTextBytes = int64_t{1} << 20, kMaxMetadataBytes = int64_t{256} << 20;

/// Any class is kept as a name: what a trainer's client saved may hold anything.
const PickleTree::Policy kValues{
    .of = "training state", .max_bytes = int64_t{64} << 20, .max_values = size_t{8} << 20, .persistent = true};
const PickleTree::Policy kMetadata{.of = ".metadata", .max_bytes = kMaxMetadataBytes, .max_values = size_t{32} << 20};

constexpr std::string_view kAlwaysLost[] = {"random states",
                                            "the order of the data: the recipe's own order begins at sample 0",
                                            "gradients that were accumulated and not yet applied"};

/// Names in a folder, sorted.
std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end && out.size() < kMostNames;
       it.increment(error)) {
    out.push_back(it->path().filename().string());
  }
  std::ranges::sort(out);
  return out;
}

bool any_matches(const std::vector<std::string>& names, std::string_view pattern) {
  return std::ranges::any_of(names, [&](const std::string& name) { return matches(pattern, name); });
}

/// The number that follows `front` in `name`; -1 without one.
int64_t number_after(std::string_view name, std::string_view front) {
  const size_t at = name.find(front);
  if (at == name.npos) return -1;
  int64_t out = -1;
  const char* begin = name.data() + at + front.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), out);
  return error == std::errc() && end != begin ? out : -1;
}

/// A pickle in an archive of torch.save, as values.
struct Values {
  TorchArchive archive;
  std::string pickle;  // the tree points into it
  std::optional<PickleTree> tree;
  const Dict* root = nullptr;

  Id find(std::string_view key) const { return tree->find(*root, key); }
  /// A number, or a tensor of one number; -1 for anything else.
  double number(Id id) const;
  int64_t integer(std::string_view key) const {
    const Id id = find(key);
    return id != kNothing && tree->kind(id) == Kind::kInt ? tree->integer(id, key).value() : -1;
  }
  std::string text(std::string_view key) const {
    const Id id = find(key);
    return id != kNothing && tree->kind(id) == Kind::kString ? printable(tree->string(id, key).value()) : "";
  }
  const Dict* dict(Id id) const {
    return id != kNothing && tree->kind(id) == Kind::kDict ? tree->dict(id, "").value() : nullptr;
  }
  const std::vector<Id>* items(Id id) const {
    const bool sequence = id != kNothing && (tree->kind(id) == Kind::kTuple || tree->kind(id) == Kind::kList);
    return sequence ? tree->items(id, "").value() : nullptr;
  }
  /// The storage that a tensor is a view of: its five parts, or null for what is no tensor.
  const std::vector<Id>* storage_of(Id id) const;
  std::string dtype_of(Id id) const;
};

constexpr std::pair<std::string_view, std::string_view> kStorages[] = {
    {"FloatStorage", "F32"}, {"HalfStorage", "F16"}, {"BFloat16Storage", "BF16"}, {"DoubleStorage", "F64"}};

const std::vector<Id>* Values::storage_of(Id id) const {
  for (int depth = 0; depth < 4 && id != kNothing && tree->kind(id) == Kind::kObject; ++depth) {
    const PickleTree::Object* object = tree->object(id, "").value();
    const std::vector<Id>* arguments = items(object->arguments);
    if (arguments == nullptr || arguments->empty()) return nullptr;
    if (tree->kind(arguments->front()) == Kind::kPersistent) return tree->persistent(arguments->front(), "").value();
    id = arguments->front();  // _rebuild_parameter of a tensor
  }
  return nullptr;
}

std::string Values::dtype_of(Id id) const {
  const std::vector<Id>* storage = storage_of(id);
  if (storage == nullptr || tree->kind((*storage)[1]) != Kind::kName) return {};
  const PickleTree::Name name = tree->name((*storage)[1], "").value();
  for (const auto& [theirs, ours] : kStorages) {
    if (name.name == theirs) return std::string(ours);
  }
  return {};
}

double Values::number(Id id) const {
  if (id == kNothing) return -1;
  if (tree->kind(id) == Kind::kInt || tree->kind(id) == Kind::kFloat) return tree->number(id, "").value();
  const std::vector<Id>* storage = storage_of(id);
  if (storage == nullptr || dtype_of(id) != "F32" || tree->kind((*storage)[2]) != Kind::kString) return -1;
  const ZipEntry* entry = archive.storage(tree->string((*storage)[2], "").value());
  if (entry == nullptr || entry->bytes != sizeof(float)) return -1;
  char raw[sizeof(float)];
  if (!archive.read_at(entry->offset, raw).ok()) return -1;
  float out = 0;
  std::memcpy(&out, raw, sizeof out);
  return std::isfinite(out) ? static_cast<double>(out) : -1.0;
}

Result<std::unique_ptr<Values>> read_values(const fs::path& path) {
  auto out = std::make_unique<Values>();
  RT_TRY_SET(out->archive, TorchArchive::open(path));
  Result<std::string> pickle = out->archive.pickle();
  if (!pickle.ok()) return std::move(pickle).error().with(path.string());
  out->pickle = std::move(pickle).value();
  const std::string place = fmt::format("{}: {}", path.string(), out->archive.pickle_name());
  Result<PickleTree> tree = PickleTree::read(out->pickle, kValues);
  if (!tree.ok()) return std::move(tree).error().with(place);
  out->tree = std::move(tree).value();
  RT_TRY_SET(out->root, out->tree->dict(out->tree->root(), place));
  return out;
}

void measure(TrainingState* state) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(state->folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code of_entry;
    if (!it->is_regular_file(of_entry)) continue;
    ++state->files;
    state->bytes += static_cast<int64_t>(it->file_size(of_entry));
  }
}

// --- DeepSpeed ------------------------------------------------------------------------------------------------------

constexpr std::string_view kOptimizerFile = "*_optim_states.pt", kModelFile = "*_model_states.pt";

/// Sizes of the model: `param_shapes` of its file, else the tensors in `module` (ZeRO-0 has no shapes).
void count_tensors(const Values& model, TrainingState* state) {
  std::set<std::string_view> names;
  const auto count = [&](const Dict& shapes) {
    for (const auto& [name, size] : shapes) {
      if (model.tree->kind(name) != Kind::kString) continue;
      if (!names.insert(model.tree->string(name, "").value()).second) continue;
      const Result<Shape> shape = model.tree->shape(size, "");
      if (!shape.ok()) continue;
      int64_t elements = 1;
      for (const int64_t extent : shape.value()) {
        if (__builtin_mul_overflow(elements, extent, &elements)) elements = 0;
      }
      ++state->tensors;
      state->elements += elements;
    }
  };
  const Id shapes = model.find("param_shapes");
  if (const std::vector<Id>* groups = model.items(shapes); groups != nullptr) {
    for (const Id group : *groups) {
      if (const Dict* of_group = model.dict(group); of_group != nullptr) count(*of_group);
    }
  } else if (const Dict* all = model.dict(shapes); all != nullptr) {
    count(*all);
  }
  const Dict* module = model.dict(model.find("module"));
  if (module == nullptr) return;
  for (const auto& [name, value] : *module) {
    const std::vector<Id>* storage = model.storage_of(value);
    if (storage == nullptr) continue;
    if (state->dtype.empty()) state->dtype = model.dtype_of(value);
    if (names.empty() && model.tree->kind((*storage)[4]) == Kind::kInt) {
      ++state->tensors;
      state->elements += model.tree->integer((*storage)[4], "").value();
    }
  }
}

/// Names and count of one parameter's state: {"step": 3, "exp_avg": tensor, ...}.
void look_at_moments(const Values& file, Id of_parameter, TrainingState* state) {
  const Dict* one = file.dict(of_parameter);
  if (one == nullptr || !state->optimizer.empty()) return;
  for (const auto& [key, value] : *one) {
    if (file.tree->kind(key) != Kind::kString) continue;
    const std::string name = printable(file.tree->string(key, "").value());
    if (name == "step") {
      state->adam_step = file.number(value);
    } else {
      state->optimizer.push_back(name);
    }
  }
}

/// The state of the first parameter in a torch optimizer's state_dict, which a wrapper may hold under a key.
Id first_state(const Values& file, Id optimizer) {
  const Dict* dict = file.dict(optimizer);
  for (const char* key : {"optimizer_state_dict", "optimizer"}) {  // DeepSpeed's, Megatron-LM's
    const Dict* inner = dict == nullptr ? nullptr : file.dict(file.tree->find(*dict, key));
    if (inner != nullptr) dict = inner;
  }
  if (dict == nullptr) return kNothing;
  const Dict* states = file.dict(file.tree->find(*dict, "state"));
  return states == nullptr || states->empty() ? kNothing : states->front().second;
}

int64_t stage_of(const Values& file, Id stage) {
  if (stage == kNothing) return -1;
  if (file.tree->kind(stage) == Kind::kInt) return file.tree->integer(stage, "").value();
  if (file.tree->kind(stage) != Kind::kObject) return -1;
  const std::vector<Id>* arguments = file.items(file.tree->object(stage, "").value()->arguments);
  const bool one = arguments != nullptr && arguments->size() == 1 && file.tree->kind((*arguments)[0]) == Kind::kInt;
  return one ? file.tree->integer((*arguments)[0], "").value() : -1;
}

/// A rank's optimizer file of ZeRO-1 to 3.
void look_at_zero(const Values& file, int64_t* stage, int64_t* partitions, TrainingState* state) {
  const Dict* dict = file.dict(file.find("optimizer_state_dict"));
  if (dict == nullptr) {
    state->problems.push_back(
        fmt::format("{}: has no optimizer_state_dict, found {}; expected a file of DeepSpeed's ZeRO",
                    file.archive.path().string(), count_text(std::ssize(*file.root), "key")));
    return;
  }
  *stage = stage_of(file, file.tree->find(*dict, "zero_stage"));
  const Id count = file.tree->find(*dict, "partition_count");
  if (const std::vector<Id>* groups = file.items(count); groups != nullptr) {
    for (const Id group : *groups) *partitions = std::max(*partitions, static_cast<int64_t>(file.number(group)));
  } else {
    *partitions = static_cast<int64_t>(file.number(count));
  }
  const Id base = file.tree->find(*dict, "base_optimizer_state");
  if (const std::vector<Id>* groups = file.items(base); groups != nullptr) {  // elastic
    if (!groups->empty()) look_at_moments(file, groups->front(), state);
  } else {
    look_at_moments(file, first_state(file, base != kNothing ? base : file.tree->find(*dict, "optimizer_state_dict")),
                    state);
  }
}

/// Checks that each data-parallel rank of each model rank has its file.
void find_missing(const std::vector<std::string>& optimizer_files, int64_t partitions, TrainingState* state) {
  std::map<int64_t, std::set<int64_t>> ranks;  // by model rank
  std::string_view front;
  for (const std::string& name : optimizer_files) {
    ranks[number_after(name, "mp_rank_")].insert(number_after(name, "zero_pp_rank_"));
    front = std::string_view(name).substr(0, name.find("zero_pp_rank_"));
  }
  for (const auto& [model_rank, here] : ranks) {
    for (int64_t rank = 0; rank < partitions; ++rank) {
      if (here.contains(rank)) continue;
      state->problems.push_back(
          fmt::format("rank {}'s file is missing: {}zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt\n"
                      "    expected {} optimizer files (partition_count), found {}\n"
                      "    copy the file here, or save again",
                      rank, front, rank, model_rank, partitions * std::ssize(ranks), optimizer_files.size()));
      if (state->problems.size() >= 8) return;
    }
  }
}

void look_at_model(const Values& model, TrainingState* state) {
  state->version = model.text("ds_version");
  state->step = model.integer("global_steps");
  state->samples = model.integer("global_samples");
  state->skipped = model.integer("skipped_steps");
  state->data_ranks = std::max<int64_t>(0, model.integer("dp_world_size"));
  state->model_ranks = std::max<int64_t>(0, model.integer("mp_world_size"));
  count_tensors(model, state);
}

/// `what` of a file that could be read, else a problem that says why it could not.
template <typename What>
void with_values(const fs::path& path, TrainingState* state, const What& what) {
  const Result<std::unique_ptr<Values>> values = read_values(path);
  if (values.ok()) {
    what(*values.value());
  } else {
    state->problems.push_back(values.error().message + "\n    copy the file again, or save again");
  }
}

std::optional<TrainingState> look_at_deepspeed(const fs::path& dir, const std::vector<std::string>& names) {
  TrainingState out{.program = "DeepSpeed", .folder = dir};
  std::vector<std::string> optimizer_files, model_files;
  for (const std::string& name : names) {
    if (matches(kOptimizerFile, name)) optimizer_files.push_back(name);
    if (matches(kModelFile, name) && !name.starts_with("layer_")) model_files.push_back(name);
  }
  const bool universal = std::ranges::binary_search(names, std::string("zero")) && fs::is_directory(dir / "zero");
  const bool pipeline = any_matches(names, "layer_*-model_*states.pt");
  const bool experts = any_matches(names, "*expert_*_model_states.pt") || any_matches(names, "expp_rank_*");
  if (optimizer_files.empty() && model_files.empty() && !universal && !pipeline) return std::nullopt;
  if (!model_files.empty()) {
    with_values(dir / model_files.front(), &out, [&](const Values& model) {
      look_at_model(model, &out);
      if (optimizer_files.empty() && !universal) {  // ZeRO-0 keeps torch's own state beside the weights
        look_at_moments(model, first_state(model, model.find("optimizer")), &out);
      }
    });
  } else if (!universal) {
    out.problems.push_back(
        fmt::format("*_model_states.pt is missing: found {}, expected the model's file beside them\n"
                    "    copy it here, or save again",
                    count_text(std::ssize(optimizer_files), "optimizer file")));
  }
  out.layout = "ZeRO-0";
  if (!optimizer_files.empty()) {
    int64_t stage = -1, partitions = -1;
    with_values(dir / optimizer_files.front(), &out,
                [&](const Values& file) { look_at_zero(file, &stage, &partitions, &out); });
    out.layout = stage < 0 ? "ZeRO" : fmt::format("ZeRO-{}", stage);
    out.data_ranks = std::max(out.data_ranks, partitions);
    find_missing(optimizer_files, out.data_ranks, &out);
  }
  if (universal) {
    out.layout = "a universal checkpoint";
    const std::vector<std::string> tensors = names_in(dir / "zero");
    out.tensors = std::ranges::count_if(
        tensors, [&](const std::string& name) { return is_plain_file(dir / "zero" / name / "fp32.pt"); });
    for (const std::string& name : tensors) {
      for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
        const bool here = is_plain_file(dir / "zero" / name / (std::string(moment) + ".pt"));
        if (here && !std::ranges::count(out.optimizer, moment)) out.optimizer.emplace_back(moment);
        if (!here && is_plain_file(dir / "zero" / name / "fp32.pt")) {
          out.problems.push_back(
              fmt::format("zero/{}/{}.pt is missing: found fp32.pt beside it, expected both\n"
                          "    copy the file here, or convert again with ds_to_universal",
                          name, moment));
        }
      }
    }
  } else if (pipeline) {
    out.layout += ", a pipeline";
  }
  if (experts) out.layout += ", with experts";
  return out;
}

// --- Megatron-LM and torch ------------------------------------------------------------------------------------------

/// Counts what `.metadata` lists: tensors of the model with their elements, and names of the optimizer's state.
void count_metadata(const PickleTree& tree, TrainingState* state) {
  const Result<const Dict*> metadata = tree.fields(tree.root(), "Metadata", "the result");
  const Id tensors = metadata.ok() ? tree.find(*metadata.value(), "state_dict_metadata") : kNothing;
  if (tensors == kNothing || tree.kind(tensors) != Kind::kDict) {
    state->problems.push_back(".metadata lists no tensors: it is not torch's; save again");
    return;
  }
  for (const auto& [key, value] : *tree.dict(tensors, "").value()) {
    if (tree.kind(key) != Kind::kString || tree.kind(value) != Kind::kObject) continue;
    if (tree.object(value, "").value()->of.name != "TensorStorageMetadata") continue;
    const std::string_view name = tree.string(key, "").value();
    bool of_optimizer = name.starts_with("optimizer.") || name.starts_with("optim.") || name.starts_with("chained_");
    for (const std::string_view kind : {"exp_avg", "exp_avg_sq", "fp32_param"}) {
      if (name.find(fmt::format(".{}.", kind)) == name.npos && !name.ends_with(fmt::format(".{}", kind))) continue;
      of_optimizer = true;
      if (!std::ranges::count(state->optimizer, kind)) state->optimizer.emplace_back(kind);
    }
    if (of_optimizer) continue;
    const Result<const Dict*> fields = tree.fields(value, "TensorStorageMetadata", "");
    const Id size = fields.ok() ? tree.find(*fields.value(), "size") : kNothing;
    const Result<Shape> shape = size == kNothing ? Result<Shape>(Shape{}) : tree.shape(size, "");
    int64_t elements = 1;
    for (const int64_t extent : shape.ok() ? shape.value() : Shape{0}) {
      if (__builtin_mul_overflow(elements, extent, &elements)) elements = 0;
    }
    ++state->tensors;
    state->elements += elements;
  }
}

void look_at_metadata(const fs::path& path, TrainingState* state) {
  const Result<std::string> pickle = read_text_file(path, kMaxMetadataBytes);
  if (!pickle.ok()) {
    state->problems.push_back(pickle.error().message);
    return;
  }
  const Result<PickleTree> tree = PickleTree::read(pickle.value(), kMetadata);
  if (tree.ok()) {
    count_metadata(tree.value(), state);
  } else {
    state->problems.push_back(
        fmt::format("{}: {}\n    copy the file again, or save again", path.string(), tree.error().message));
  }
}

/// `args.NAME` of Megatron-LM's common state; -1 without it.
int64_t argument(const Values& common, std::string_view name) {
  const Id args = common.find("args");
  if (args == kNothing || common.tree->kind(args) != Kind::kObject) return -1;
  const Dict* fields = common.dict(common.tree->object(args, "").value()->state);
  const Id value = fields == nullptr ? kNothing : common.tree->find(*fields, name);
  return value == kNothing || common.tree->kind(value) != Kind::kInt ? -1 : common.tree->integer(value, "").value();
}

void look_at_common(const Values& common, TrainingState* state) {
  state->step = common.integer("iteration");
  state->samples = argument(common, "consumed_train_samples");
  state->skipped = -1;  // Megatron counts samples, not steps
  const int64_t tp = argument(common, "tensor_model_parallel_size"),
                pp = argument(common, "pipeline_model_parallel_size");
  if (tp > 0 && pp > 0) state->model_ranks = tp * pp;
  if (const int64_t dp = argument(common, "data_parallel_size"); dp > 0) state->data_ranks = dp;
}

std::optional<TrainingState> look_at_megatron(const fs::path& dir, const std::vector<std::string>& names) {
  TrainingState out{.program = "Megatron-LM", .folder = dir};
  const bool metadata = is_plain_file(dir / ".metadata");
  std::string backend;
  if (is_plain_file(dir / "metadata.json")) {
    const Result<std::string> text = read_text_file(dir / "metadata.json", kMaxTextBytes);
    const nlohmann::json json = json_or_nothing(text.ok() ? text.value() : std::string());
    const auto found = json.is_object() ? json.find("sharded_backend") : json.end();
    if (json.is_object() && found != json.end() && found->is_string()) backend = printable(found->get<std::string>());
  }
  if (!backend.empty()) {
    out.layout = backend;
    if (backend == "torch_dist" && !metadata) {
      out.problems.emplace_back(
          "torch_dist without .metadata: the save was not finished, or the file was not copied\n"
          "    copy it here, or take an older step");
    }
    if (backend == "zarr") {
      out.problems.emplace_back(
          "zarr, which Megatron-LM wrote before 2024, is not read\n"
          "    load it with that Megatron-LM and save it with --ckpt-format torch_dist");
    }
    if (is_plain_file(dir / "common.pt")) {
      with_values(dir / "common.pt", &out, [&](const Values& common) { look_at_common(common, &out); });
    }
    if (metadata) look_at_metadata(dir / ".metadata", &out);
    return out;
  }
  fs::path first;
  for (const std::string& name : names) {
    if (!name.starts_with("mp_rank_") || !is_plain_file(dir / name / "model_optim_rng.pt")) continue;
    if (first.empty()) first = dir / name / "model_optim_rng.pt";
    ++out.model_ranks;
  }
  if (first.empty()) return std::nullopt;
  out.layout = "legacy files of ranks";
  const int64_t found = out.model_ranks;
  with_values(first, &out, [&](const Values& rank) {
    look_at_common(rank, &out);
    look_at_moments(rank, first_state(rank, rank.find("optimizer")), &out);
    if (is_plain_file(first.parent_path() / "distrib_optim.pt")) out.optimizer.emplace_back("in distrib_optim.pt");
  });
  if (out.model_ranks != found) {
    out.problems.push_back(
        fmt::format("found the files of {}, expected {} (tensor x pipeline ranks in args)\n"
                    "    copy the others here",
                    count_text(found, "rank"), out.model_ranks));
  }
  return out;
}

/// Layouts of torch.distributed.checkpoint that a name gives away. The first row that fits counts.
struct TorchLayout {
  std::string_view name, layout, problem;  // no problem: `.metadata` is read
};
constexpr TorchLayout kTorchLayouts[] = {
    {".metadata", "boxes of tensors in .distcp files", ""},
    {"__*.metadata", "saved without coordination",
     "each rank wrote a .metadata of its own and none wrote the common one\n"
     "    save again without no_dist, from all ranks"},
    {"*.distcp", "boxes of tensors in .distcp files",
     ".metadata is missing: the save was not finished, or the file was not copied\n"
     "    copy it here, or take an older step"},
    {"shard-*-model-*-of-*.safetensors", "boxes of tensors in safetensors files",
     "such shards are not read\n"
     "    consolidate them (HuggingFaceStorageWriter with enable_consolidation), and give the folder above"}};

std::optional<TrainingState> look_at_torch(const fs::path& dir, const std::vector<std::string>& names) {
  for (const TorchLayout& row : kTorchLayouts) {
    if (!any_matches(names, row.name)) continue;
    TrainingState out{.program = "torch.distributed.checkpoint", .layout = std::string(row.layout), .folder = dir};
    if (row.problem.empty()) {
      look_at_metadata(dir / ".metadata", &out);
    } else {
      out.problems.emplace_back(row.problem);
    }
    return out;
  }
  return std::nullopt;
}

void say_what_is_kept(TrainingState* state) {
  if (state->program != "DeepSpeed")
    state->kept.emplace_back("the weights, where the model's config.json is beside them");
  if (!state->optimizer.empty()) {
    state->lost.push_back(fmt::format("the optimizer's state ({}) and its count of steps: an import begins at step 0",
                                      fmt::join(state->optimizer, ", ")));
  }
  for (const std::string_view line : kAlwaysLost) state->lost.emplace_back(line);
}

}  // namespace

Result<std::optional<TrainingState>> look_at_training_state(const fs::path& dir) {
  std::error_code error;
  if (!fs::is_directory(dir, error)) return std::optional<TrainingState>();
  fs::path at = dir;
  if (is_plain_file(dir / "latest_universal")) {
    RT_TRY_SET(std::string text, read_text_file(dir / "latest_universal", 256));
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    at = dir / fs::path(text).filename();
    if (text.empty() || !fs::is_directory(at, error)) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{}: says \"{}\", and {} is no folder", (dir / "latest_universal").string(),
                               printable(text), at.string())};
    }
  } else {
    RT_TRY_SET(at, pointed_folder(dir));
  }
  const std::vector<std::string> names = names_in(at);
  std::optional<TrainingState> out = look_at_deepspeed(at, names);
  if (!out) out = look_at_megatron(at, names);
  if (!out) out = look_at_torch(at, names);
  if (!out) return out;
  measure(&*out);
  say_what_is_kept(&*out);
  return out;
}

}  // namespace cairn::convert
