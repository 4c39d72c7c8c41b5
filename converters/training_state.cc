#include "converters/training_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "converters/deepspeed.h"
#include "converters/dist_state.h"
#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "converters/pickle_tree.h"
#include "converters/sharded_files.h"
#include "converters/torch_values.h"
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

constexpr size_t kMostNames = 4096, kMostKinds = 16;
constexpr int64_t kMaxTextBytes = int64_t{1} << 20, kMaxMetadataBytes = int64_t{256} << 20;

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

/// -1 for what is no number.
double number_or_none(const TorchValues& values, Id id) { return values.number(id).value_or(-1); }
int64_t integer_or_none(const TorchValues& values, std::string_view key) {
  return values.integer(values.find(key)).value_or(-1);
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
void count_tensors(const TorchValues& model, TrainingState* state) {
  std::set<std::string_view> names;
  const auto count = [&](const Dict& shapes) {
    for (const auto& [name, size] : shapes) {
      if (model.tree().kind(name) != Kind::kString) continue;
      if (!names.insert(model.tree().string(name, "").value()).second) continue;
      const Result<Shape> shape = model.tree().shape(size, "");
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
    if (!model.is_tensor(value)) continue;
    if (state->dtype.empty()) state->dtype = model.dtype_of(value);
    if (const int64_t elements = model.storage_elems(value); names.empty() && elements >= 0) {
      ++state->tensors;
      state->elements += elements;
    }
  }
}

/// Names and count of one parameter's state: {"step": 3, "exp_avg": tensor, ...}.
void look_at_moments(const TorchValues& file, Id of_parameter, TrainingState* state) {
  const Dict* one = file.dict(of_parameter);
  if (one == nullptr || !state->optimizer.empty()) return;
  for (const auto& [key, value] : *one) {
    const std::string name = printable(file.text(key));
    if (name == "step") {
      state->adam_step = number_or_none(file, value);
    } else if (!name.empty()) {
      state->optimizer.push_back(name);
    }
  }
}

/// The state of the first parameter in a torch optimizer's state_dict, which a wrapper may hold under a key.
Id first_state(const TorchValues& file, Id optimizer) {
  for (const char* key : {"optimizer_state_dict", "optimizer"}) {  // DeepSpeed's, Megatron-LM's
    if (const Id inner = file.get(optimizer, key); file.dict(inner) != nullptr) optimizer = inner;
  }
  const Dict* states = file.dict(file.get(optimizer, "state"));
  return states == nullptr || states->empty() ? kNothing : states->front().second;
}

/// A rank's optimizer file of ZeRO-1 to 3.
void look_at_zero(const TorchValues& file, int64_t* stage, int64_t* partitions, TrainingState* state) {
  const Id optimizer = file.find("optimizer_state_dict");
  if (file.dict(optimizer) == nullptr) {
    const Dict* keys = file.dict(file.root());
    state->problems.push_back(
        fmt::format("{}: has no optimizer_state_dict, found {}; expected a file of DeepSpeed's ZeRO",
                    file.archive().path().string(), count_text(keys == nullptr ? 0 : std::ssize(*keys), "key")));
    return;
  }
  *stage = zero_stage(file);
  const Id count = file.get(optimizer, "partition_count");
  if (const std::vector<Id>* groups = file.items(count); groups != nullptr) {
    for (const Id group : *groups) *partitions = std::max(*partitions, file.integer(group).value_or(-1));
  } else {
    *partitions = file.integer(count).value_or(-1);
  }
  const Id base = file.get(optimizer, "base_optimizer_state");
  if (const std::vector<Id>* groups = file.items(base); groups != nullptr) {  // elastic
    if (!groups->empty()) look_at_moments(file, groups->front(), state);
  } else {
    look_at_moments(file, first_state(file, base != kNothing ? base : file.get(optimizer, "optimizer_state_dict")),
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

void look_at_model(const TorchValues& model, TrainingState* state) {
  state->version = printable(model.text(model.find("ds_version")));
  state->step = integer_or_none(model, "global_steps");
  state->samples = integer_or_none(model, "global_samples");
  state->skipped = integer_or_none(model, "skipped_steps");
  state->data_ranks = std::max<int64_t>(0, integer_or_none(model, "dp_world_size"));
  state->model_ranks = std::max<int64_t>(0, integer_or_none(model, "mp_world_size"));
  count_tensors(model, state);
}

/// `what` of a file that could be read, else a problem that says why it could not.
template <typename What>
void with_values(const fs::path& path, TrainingState* state, const What& what) {
  const Result<std::unique_ptr<TorchValues>> values = TorchValues::read(path);
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
  std::set<std::string> tied;  // names of tensors that others hold
  if (!model_files.empty()) {
    with_values(dir / model_files.front(), &out, [&](const TorchValues& model) {
      look_at_model(model, &out);
      if (const Dict* shared = model.dict(model.find("shared_params")); shared != nullptr) {
        for (const auto& [name, of] : *shared) tied.insert(model.text(name));
      }
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
                [&](const TorchValues& file) { look_at_zero(file, &stage, &partitions, &out); });
    out.layout = stage < 0 ? "ZeRO" : fmt::format("ZeRO-{}", stage);
    out.data_ranks = std::max(out.data_ranks, partitions);
    find_missing(optimizer_files, out.data_ranks, &out);
  }
  if (universal) {
    out.layout = "a universal checkpoint";
    std::vector<std::string> tensors = names_in(dir / "zero");
    std::erase_if(tensors, [&](const std::string& name) { return tied.contains(name); });
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
    if (of_optimizer || name.find("train_state.") != name.npos) continue;
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
int64_t argument(const TorchValues& common, std::string_view name) {
  const Dict* fields = common.state(common.find("args"));
  return fields == nullptr ? -1 : common.integer(common.tree().find(*fields, name)).value_or(-1);
}

void look_at_common(const TorchValues& common, TrainingState* state) {
  state->step = integer_or_none(common, "iteration");
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
      with_values(dir / "common.pt", &out, [&](const TorchValues& common) { look_at_common(common, &out); });
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
  with_values(first, &out, [&](const TorchValues& rank) {
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

/// Where training stood, of a state whose optimizer an import takes.
void look_at_numbers(TrainingState* state) {
  const Result<std::string> pickle = read_text_file(state->folder / ".metadata", kMaxMetadataBytes);
  const Result<DistIndex> index = pickle.ok() ? read_dist_index(pickle.value()) : Result<DistIndex>(pickle.error());
  if (!index.ok()) return;  // an import says what is wrong
  const auto take_kind = [&](const std::string& saved) {
    if (!is_optimizer_key(saved)) return;
    const std::optional<DistStateKey> key = dist_state_key(saved);
    const std::string kind = printable(key ? key->kind : saved.substr(saved.rfind('.') + 1));
    if (kind == "step" || std::ranges::count(state->optimizer, kind) > 0) return;
    if (state->optimizer.size() < kMostKinds) state->optimizer.push_back(kind);
  };
  for (const std::vector<DistTensor>* tensors : {&index.value().model, &index.value().others}) {
    for (const DistTensor& tensor : *tensors) take_kind(tensor.name);
  }
  for (const DistValue& value : index.value().values) take_kind(value.name);
  if (state->optimizer.empty()) return;
  bool named = false, numbered = false;
  for (const std::vector<DistTensor>* tensors : {&index.value().model, &index.value().others}) {
    for (const DistTensor& tensor : *tensors) {
      const std::optional<DistStateKey> key = dist_state_key(tensor.name);
      (key && key->is_numbered() ? numbered : named) |= key.has_value();
      if (state->dtype.empty() && !key && is_float_dtype(tensor.dtype)) state->dtype = tensor.dtype;
    }
  }
  if (numbered) state->layout += ", an optimizer's state without names";
  if (!numbered && !named) state->layout += kOtherForm;
  const Result<DistPosition> at = dist_position(state->folder, index.value());
  if (!at.ok()) return;  // an import says it
  state->adam_step = at.value().adam_step;
  const bool counted = state->adam_step >= 0 && state->adam_step <= 1e15;
  state->step = at.value().step >= 0 || !counted ? at.value().step : static_cast<int64_t>(state->adam_step);
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
    const bool pattern = row.name.find('*') != row.name.npos;  // a file is looked for itself: `names` may be cut
    if (pattern ? !any_matches(names, row.name) : !is_plain_file(dir / row.name)) continue;
    TrainingState out{.program = "torch.distributed.checkpoint", .layout = std::string(row.layout), .folder = dir};
    if (row.problem.empty()) {
      look_at_metadata(dir / ".metadata", &out);
      look_at_numbers(&out);
    } else {
      out.problems.emplace_back(row.problem);
    }
    return out;
  }
  return std::nullopt;
}

/// Whether the optimizer's state comes along (deepspeed.h and dist_state.h refuse the rest by name).
bool takes_optimizer(const TrainingState& state) {
  const bool whole = state.layout.find("universal") != std::string::npos || state.model_ranks <= 1;
  const bool known = state.program == "DeepSpeed"     ? whole
                     : state.program == "Megatron-LM" ? state.layout == "torch_dist"
                                                      : state.program == "torch.distributed.checkpoint";
  std::set kinds(state.optimizer.begin(), state.optimizer.end());
  kinds.erase("fp32_param");  // Megatron's masters
  return known && state.layout.find(", ") == std::string::npos &&
         kinds == std::set<std::string>{"exp_avg", "exp_avg_sq"};
}

void say_what_is_kept(TrainingState* state) {
  if (takes_optimizer(*state)) {
    const bool deepspeed = state->program == "DeepSpeed";
    const bool megatron = state->program == "Megatron-LM";
    state->kept.push_back(fmt::format("the weights{}{}", deepspeed || megatron ? ", from the float masters" : "",
                                      megatron ? "" : " (the model's config.json: --config DIR)"));
    state->kept.push_back(
        fmt::format("the optimizer's state ({}) and its own count of updates", fmt::join(state->optimizer, ", ")));
    state->kept.emplace_back(deepspeed || megatron ? "the step, the samples that were taken, the loss scale"
                                                   : "the step, the tokens that were seen where it says them");
  } else {
    if (state->program != "DeepSpeed")
      state->kept.emplace_back("the weights, where the model's config.json is beside them");
    if (!state->optimizer.empty()) {
      state->lost.push_back(fmt::format("the optimizer's state ({}) and its count of steps: an import begins at step 0",
                                        fmt::join(state->optimizer, ", ")));
    }
  }
  for (const std::string_view line : kAlwaysLost) state->lost.emplace_back(line);
}

/// The folder FRONTN, or FRONTN_universal, of the highest N; empty: none.
std::string newest_step(const std::vector<std::string>& names, std::string_view front) {
  std::string out;
  int64_t newest = -1;
  for (const std::string& name : names) {
    const int64_t step = name.starts_with(front) ? number_after(name, front) : -1;
    if (step < 0 || step < newest) continue;
    newest = step;
    out = name;
  }
  return out;
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
  std::vector<std::string> names = names_in(at);
  std::optional<TrainingState> out = look_at_deepspeed(at, names);
  if (const std::string newest = newest_step(names, "global_step");
      !out && at == dir && !newest.empty()) {  // `latest` was lost
    at = dir / newest;
    names = names_in(at);
    out = look_at_deepspeed(at, names);
  }
  if (!out) out = look_at_megatron(at, names);
  if (!out) out = look_at_torch(at, names);
  if (const std::string newest = newest_step(names, "step-"); !out && at == dir && !newest.empty()) {  // torchtitan's
    at = dir / newest;
    out = look_at_torch(at, names_in(at));
  }
  if (!out) return out;
  measure(&*out);
  say_what_is_kept(&*out);
  return out;
}

}  // namespace cairn::convert
