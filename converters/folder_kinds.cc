#include "converters/folder_kinds.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "ckpt/format/names.h"
#include "converters/foreign_file.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
using Patterns = std::vector<std::string_view>;

constexpr size_t kMostNames = 4096;
constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;

/// Names in a folder; those of folders end with a slash, and links to nothing with " ->".
using Names = std::set<std::string>;

struct Kind {
  Patterns any, all;  // one of the first exists, and each of the others
  // The name and the remedy: {dir} is the folder, {found} the name that was found, {model} the folder of a model in
  // it.
  std::string_view is, way_on;
};

constexpr std::string_view kMerge =
    "adapters are not read: merge it with peft (PeftModel.from_pretrained, merge_and_unload, save_pretrained), and "
    "give "
    "the folder of the merged model";
constexpr std::string_view kRename =
    "where it is one dict of the model's tensors, name it pytorch_model.bin and copy config.json beside it";

/// The first row that fits names the folder.
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kKinds = {
      {{"snapshots/"}, {}, "is the hub's cache of one model", "give the snapshot in it: {model}"},
      {{"models--*/"}, {}, "is the hub's cache of models", "give the snapshot of one: {model}"},
      {{"*.incomplete", "*.safetensors ->", "*.bin ->", "config.json ->"},
       {},
       "is a download that was cut off: {found} is not complete",
       "download it again; `hf download` resumes"},
      {{"pytorch_model.bin/", "model.safetensors/"},
       {},
       "its {found} is a folder, as zero_to_fp32.py of DeepSpeed makes when it is given a file's name",
       "copy config.json and the tokenizer's files into {dir}/{found} and give that folder"},
      {{"model_world_size_*_rank_*.pt"},
       {},
       "is a checkpoint of verl, in FSDP's shards",
       "python -m verl.model_merger merge --backend fsdp --local_dir {dir} --target_dir OUT"},
      {{"pytorch_model_fsdp_*/", "pytorch_model_fsdp.bin"},
       {},
       "is a checkpoint of accelerate, in FSDP's shards",
       "accelerate merge-weights {dir}/{found} OUT, then copy config.json into OUT"},
      {{"zero_to_fp32.py", "global_step*/", "*zero_pp_rank_*", "mp_rank_*_model_states.pt", "*_optim_states.pt"},
       {},
       "is a checkpoint of DeepSpeed ({found})",
       "`cairn import {dir} CHECKPOINTS --config HF_DIR` takes it, with the optimizer's state; or python "
       "zero_to_fp32.py "
       "{dir} OUT, a script that DeepSpeed writes beside it, makes OUT/pytorch_model.bin: copy config.json into OUT"},
      {{"latest_universal"},
       {},
       "is a universal checkpoint of DeepSpeed ({found})",
       "`cairn import {dir} CHECKPOINTS --config HF_DIR` takes it, with the optimizer's state"},
      {{"layer_*-model_*states.pt"},
       {},
       "is a checkpoint of DeepSpeed, of a pipeline ({found})",
       "let DeepSpeed load it and save the model's state dict as pytorch_model.bin, and copy config.json beside it"},
      {{"latest_checkpointed_iteration.txt", "iter_*/", "mp_rank_*/", "common.pt"},
       {},
       "is a checkpoint of Megatron-LM ({found})",
       "write a config.json of model_type megatron_gpt into it (docs/training-states.md), or convert it with Megatron "
       "Bridge"},
      {{".metadata", "*.distcp", "__*.metadata"},
       {},
       "is a checkpoint of torch.distributed.checkpoint, as torchtitan and FSDP write ({found})",
       "`cairn import {dir} CHECKPOINTS --config HF_DIR` takes it, with the optimizer's state; or copy the model's "
       "config.json into it where its tensors have the names of a Hugging Face model"},
      {{"*.gguf", "*.ggml"},
       {},
       "holds GGUF, the weights of llama.cpp ({found})",
       "take the model that it was made from, or load it with transformers (gguf_file=\"{found}\") and "
       "save_pretrained"},
      {{"consolidated.*.pth"},
       {},
       "holds Meta's own files of Llama ({found})",
       "convert them with transformers' convert_llama_weights_to_hf.py, or take the model from the hub"},
      {{"consolidated*.safetensors"},
       {"params.json"},
       "holds Mistral's own files ({found})",
       "take the files of the same model with config.json and model*.safetensors"},
      {{"weights.npz", "weights.*.safetensors", "*.npz"},
       {},
       "holds weights of MLX ({found})",
       "take the model that it was made from, or save it with mlx_lm.fuse --de-quantize as model.safetensors"},
      {{"checkpoint_metadata.json"},
       {},
       "is a checkpoint of Nanotron",
       "convert it with its examples/llama/convert_nanotron_to_hf.py"},
      {{"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process_*/"},
       {},
       "is a checkpoint of Orbax, of JAX ({found})",
       "save the model as safetensors there"},
      {{"lit_model.pth*"},
       {},
       "is a checkpoint of LitGPT ({found})",
       "litgpt convert_from_litgpt {dir} OUT makes OUT/model.pth, one dict of the Hugging Face model's tensors: name "
       "it pytorch_model.bin and copy config.json beside it"},
      {{"model_weights/", "*.nemo", "model_config.yaml"},
       {},
       "is a model of NeMo ({found})",
       "convert it with NeMo's or Megatron Bridge's exporter to Hugging Face"},
      {{"model-rank-*-part-*.safetensors"},
       {},
       "holds vLLM's sharded state ({found})",
       "take the model that it was made from"},
      {{"model_index.json"},
       {},
       "is a pipeline of diffusers, no language model",
       "give the folder of a language model"},
      {{"*.engine", "rank*.safetensors"},
       {},
       "is a model of TensorRT-LLM ({found})",
       "take the model that it was made from"},
      {{"openvino_*.xml", "openvino_*.bin"},
       {},
       "holds a model of OpenVINO ({found})",
       "take the model that it was made from"},
      {{"*vocabulary.json", "*vocabulary.txt"},
       {"model.bin"},
       "is a model of CTranslate2 (model.bin, {found})",
       "take the model that it was made from"},
      {{"flax_model*.msgpack", "tf_model*.h5", "*.onnx", "modelopt_state*.pth"},
       {},
       "holds weights of another program only ({found})",
       "load the model with transformers (from_flax, from_tf) or there, and save_pretrained as safetensors"},
      {{"*.ckpt"},
       {},
       "is a checkpoint of Lightning ({found})",
       "save its state_dict by torch.save as pytorch_model.bin, and copy config.json beside it"},
      {{"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"},
       {},
       "",
       ""},
      {{"model*.safetensors", "pytorch_model*.bin", "diffusion_pytorch_model*", "*.safetensors"},
       {},
       "has weights by another name: {found}",
       "name the file model.safetensors or pytorch_model.bin, or several files by an index, and have config.json "
       "beside "
       "it"},
      {{"*.pt", "*.pth", "*.bin"}, {}, "has a file of torch, {found}, by another name", kRename},
      {{"*/ model"}, {}, "has no model itself; {model} has one", "give that folder"},
  };
  return kKinds;
}

/// The kinds of a file by itself.
const std::vector<Kind>& file_kinds() {
  static const std::vector<Kind> kKinds = {
      {{"GGUF magic", "*.gguf"},
       {},
       "is GGUF, the weights of llama.cpp",
       "take the model that it was made from, or load it with transformers (gguf_file=) and save_pretrained"},
      {{"adapter_*"}, {}, "is of a PEFT adapter", kMerge},
      {{"config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin"},
       {},
       "is a file of a model's folder",
       "give the folder, with config.json in it"},
      {{"*.nemo"}, {}, "is an archive of NeMo", "convert it with NeMo's exporter to Hugging Face"},
      {{"*.npz"}, {}, "is a file of numpy or MLX", "save the model as safetensors, with config.json beside it"},
      {{"*.pt", "*.pth", "*.bin", "*.ckpt"}, {}, "is a file of torch", kRename},
      {{"*"}, {}, "is a file", "give the folder of a model, with config.json and model.safetensors in it"},
  };
  return kKinds;
}

const std::vector<Kind>& tokenizer_kinds() {
  constexpr std::string_view kSave =
      "AutoTokenizer.from_pretrained(\"{dir}\").save_pretrained(\"{dir}\") of transformers writes a tokenizer.json";
  static const std::vector<Kind> kKinds = {
      {{"tokenizer.json", "tokenizer.model"}, {}, "", ""},
      {{"snapshots/"}, {}, "is the hub's cache of one model", "give the snapshot in it: {model}"},
      {{"models--*/"}, {}, "is the hub's cache of models", "give the snapshot of one: {model}"},
      {{"spiece.model", "sentencepiece*.model"},
       {},
       "has a SentencePiece model by another name",
       "give the file: {dir}/{found}"},
      {{"tekken.json"}, {}, "has Mistral's tokenizer tekken.json, which is not read", kSave},
      {{"*.tiktoken"}, {}, "has tiktoken's ranks, {found}, which are not read", kSave},
      {{"vocab.json"}, {"merges.txt"}, "has vocab.json and merges.txt and no tokenizer.json", kSave},
      {{"vocab.txt"}, {}, "has a vocabulary of WordPiece, which is not read", "give another tokenizer"},
  };
  return kKinds;
}

Names names_of(const fs::path& dir) {
  Names out;
  std::error_code error, of_entry;
  for (fs::directory_iterator it(dir, error), end; !error && it != end && out.size() < kMostNames;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    const fs::file_status status = fs::status(it->path(), of_entry);
    out.insert(name + (fs::is_directory(status) ? "/" : fs::exists(status) ? "" : " ->"));
  }
  // The files that `hf download` keeps elsewhere until a file is complete: with --local-dir, and of a snapshot.
  for (const fs::path& cache : {dir / ".cache" / "huggingface" / "download", dir / ".." / ".." / "blobs"}) {
    if (cache.filename() == "blobs" && fs::absolute(dir, error).parent_path().filename() != "snapshots") continue;
    for (fs::directory_iterator it(cache, error), end; !error && it != end && out.size() < kMostNames;
         it.increment(error)) {
      if (it->path().extension() == ".incomplete") out.insert(it->path().filename().string());
    }
  }
  return out;
}

bool has_config(const fs::path& dir) { return is_plain_file(dir / "config.json"); }

/// The snapshot that refs/main names, else the first one.
fs::path snapshot_of(const fs::path& cache) {
  std::error_code error;
  const Result<std::string> ref = read_text_file(cache / "refs" / "main", 256);
  if (ref.ok()) {
    const std::string hash = ref.value().substr(0, ref.value().find_last_not_of(" \r\n") + 1);
    if (!hash.empty() && hash.find('/') == hash.npos && fs::is_directory(cache / "snapshots" / hash, error))
      return cache / "snapshots" / hash;
  }
  for (const std::string& name : names_of(cache / "snapshots")) {
    if (name.ends_with('/')) return cache / "snapshots" / name.substr(0, name.size() - 1);
  }
  return cache / "snapshots";
}

/// The folder of a model within this one.
fs::path model_in(const fs::path& dir, const Names& names) {
  if (names.contains("snapshots/")) return snapshot_of(dir);
  fs::path out;
  for (const std::string& name : names) {
    if (!name.ends_with('/')) continue;
    const fs::path below = dir / name.substr(0, name.size() - 1);
    if (name.starts_with("models--")) return snapshot_of(below);
    if (out.empty() && has_config(below)) out = below;
  }
  return out;
}

std::optional<std::string> find_kind(const std::vector<Kind>& kinds, const fs::path& dir, const Names& names,
                                     const fs::path& model) {
  const auto find = [&](std::string_view pattern) -> const std::string* {
    const auto found = std::ranges::find_if(names, [&](const std::string& name) { return matches(pattern, name); });
    return found == names.end() ? nullptr : &*found;
  };
  for (const Kind& kind : kinds) {
    const std::string* found = nullptr;
    for (const std::string_view pattern : kind.any) {
      if (found == nullptr) found = find(pattern);
    }
    if (found == nullptr || !std::ranges::all_of(kind.all, find)) continue;
    if (kind.is.empty()) return std::nullopt;
    std::string name = *found;
    if (name.ends_with('/')) name.pop_back();
    if (name.ends_with(" ->")) name.resize(name.size() - 3);
    const std::string text = fmt::format("{{}}: {}; {}", kind.is, kind.way_on);
    return fmt::format(fmt::runtime(text), dir.string(), fmt::arg("dir", dir.string()), fmt::arg("found", name),
                       fmt::arg("model", model.string()));
  }
  return std::nullopt;
}

std::string first_bytes(const fs::path& path) {
  const Result<ForeignFile> file = open_foreign(path);
  std::string out(64, '\0');
  if (!file.ok()) return {};
  const ssize_t n = ::pread(file.value().fd.get(), out.data(), out.size(), 0);
  out.resize(static_cast<size_t>(std::max<ssize_t>(0, n)));
  return out;
}

/// "IQ== 0", a token in base64 and its rank, is how each line of tiktoken's files begins.
bool is_tiktoken(std::string_view head) {
  const std::string_view line = head.substr(0, head.find('\n'));
  const size_t space = line.find(' ');
  return line.size() < head.size() && space != line.npos && space > 0 && space % 4 == 0 && space + 1 < line.size() &&
         line.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=") == space &&
         line.substr(space + 1).find_first_not_of("0123456789") == line.npos;
}

}  // namespace

std::optional<std::string> foreign_kind(const fs::path& path) {
  std::error_code error;
  const fs::path plain = (path / "").lexically_normal().parent_path();
  if (fs::is_directory(path, error)) {
    Names names = names_of(path);
    const bool own = names.contains(std::string(ckpt::kManifestName)) || names.contains("checkpoints/") ||
                     names.contains("run.json") ||
                     std::ranges::any_of(names, [](const auto& name) { return name.starts_with("step-"); });
    if (own) return std::nullopt;
    if (const Status alone = check_no_adapter(plain); !alone.ok()) return alone.error().message;
    const fs::path model = model_in(plain, names);
    if (!model.empty()) names.insert("/ model");
    return find_kind(kinds(), plain, names, model);
  }
  if (fs::exists(path, error)) {
    Names names = {path.filename().string()};
    if (first_bytes(path).starts_with("GGUF")) names.insert("GGUF magic");
    return find_kind(file_kinds(), path, names, {});
  }
  const std::string text = path.string();
  if (std::ranges::count(text, '/') == 1 && text.front() != '/' && text.front() != '.' && text.back() != '/' &&
      !fs::exists(path.parent_path(), error)) {
    return fmt::format("{}: no such folder; a model of the hub is downloaded first: hf download {} --local-dir {}",
                       text, text, path.filename().string());
  }
  return std::nullopt;
}

std::optional<std::string> foreign_tokenizer(const fs::path& path) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  const fs::path file = folder ? path / "tokenizer.model" : path;
  if ((!folder || !is_plain_file(path / "tokenizer.json")) && is_plain_file(file) && is_tiktoken(first_bytes(file))) {
    return fmt::format(
        "{}: has tiktoken's ranks, not a SentencePiece model; AutoTokenizer.from_pretrained of transformers reads the "
        "published folder, and its save_pretrained writes a tokenizer.json",
        file.string());
  }
  if (!folder) return std::nullopt;
  const fs::path plain = (path / "").lexically_normal().parent_path();
  const Names names = names_of(path);
  return find_kind(tokenizer_kinds(), plain, names, model_in(plain, names));
}

Error named(const fs::path& path, Error other) {
  if (auto kind = foreign_kind(path)) return Error{ErrorCode::kUnsupported, std::move(*kind)};
  return other;
}

Status check_no_adapter(const fs::path& dir) {
  std::error_code error;
  for (const char* name : {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}) {
    if (!fs::exists(fs::symlink_status(dir / name, error))) continue;
    const Result<std::string> text = read_text_file(dir / "adapter_config.json", kMaxConfigBytes);
    const nlohmann::json config = json_or_nothing(text.ok() ? text.value() : std::string(), JsonNumbers::kPython);
    std::string what;
    for (const auto& [key, words] : {std::pair("peft_type", "of type"), {"base_model_name_or_path", "for"}}) {
      if (!config.is_object() || !config.contains(key) || !config[key].is_string()) continue;
      what += fmt::format(" {} {}", words, config[key].get<std::string>());
    }
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: is a PEFT adapter{}, which changes what the model beside it computes; {}; to use the "
                             "model without it, move the adapter's files away",
                             (dir / name).string(), what, kMerge)};
  }
  return {};
}

}  // namespace cairn::convert
