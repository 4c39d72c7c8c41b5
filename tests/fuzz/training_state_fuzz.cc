// Input: the first byte chooses the program, the layout and the file; the rest are patches of its pickle
// (tests/fuzz/target.h), of torch.distributed.checkpoint and Megatron-LM also of a rank's file. A state that is still
// taken has tensors that lie in its files.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "converters/deepspeed.h"
#include "converters/dist_state.h"
#include "converters/megatron_state.h"
#include "runtime/core/check.h"
#include "tests/converters/deepspeed_state.h"
#include "tests/converters/dist_folder.h"
#include "tests/fuzz/target.h"

using namespace cairn;
using namespace cairn::convert;
using namespace cairn::convert::testing;

namespace {

namespace fs = std::filesystem;

/// Removed when the program ends.
struct Folder {
  fs::path path = fs::temp_directory_path() / fmt::format("training-state-fuzz-{}", ::getpid());
  Folder() { fs::create_directories(path); }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

std::vector<Drawn> small_tensors() {
  std::vector<Drawn> out;
  for (const Shape& shape : {Shape{3, 2}, Shape{5}, Shape{2, 2}}) {
    Drawn one{fmt::format("w{}", out.size()), shape, {}};
    for (std::vector<float>& kind : one.kinds) kind.assign(static_cast<size_t>(count_elems(shape)), 0.5f);
    out.push_back(std::move(one));
  }
  return out;
}

void read_all(const FlatTensors& file) {
  for (const SafeTensor& tensor : file.tensors()) {
    RT_CHECK(tensor.end < 1 << 20, "{} of {} bytes", tensor.name, tensor.end);
    std::string bytes(static_cast<size_t>(tensor.end), '\0');
    const Status read = file.read(tensor, 0, tensor.end, reinterpret_cast<std::byte*>(bytes.data()));
    RT_CHECK(read.ok(), "{}: {}", tensor.name, read.error().message);
  }
}

template <class Patch>
void write_deepspeed(const fs::path& folder, const std::vector<Drawn>& tensors, uint8_t form, const Patch& patch) {
  const Layout layout{
      .stage = (form & 1) != 0 ? 3 : 2, .world = 2, .elastic = (form & 2) != 0, .groups = {{1, 0}, {2}}};
  const bool model = (form & 4) != 0;
  const char* const model_name =
      layout.stage == 3 ? "zero_pp_rank_0_mp_rank_00_model_states.pt" : "mp_rank_00_model_states.pt";
  write(folder / model_name, model ? model_file(tensors, layout, 5, patch) : model_file(tensors, layout, 5));
  for (int64_t rank = 0; rank < layout.world; ++rank) {
    write(folder / fmt::format("zero_pp_rank_{}_mp_rank_00_optim_states.pt", rank),
          rank == 1 && !model ? rank_file(tensors, layout, rank, 5, patch) : rank_file(tensors, layout, rank, 5));
  }
}

template <class Patch>
void write_torch(const fs::path& folder, const std::vector<Drawn>& tensors, std::string_view patched,
                 const Patch& patch) {
  DistState state;
  const auto raw = [](const std::vector<float>& values, const Shape& shape) {
    return RawTensor{"F32", shape, bytes_of(values)};
  };
  for (const Drawn& one : tensors) {
    state.parts[{"model"}][one.name] = raw(one.kinds[0], one.shape);
    for (size_t k = 1; k < one.kinds.size(); ++k) {
      state.parts[{"optimizer"}][fmt::format("state.{}.{}", one.name, k == 1 ? "exp_avg" : "exp_avg_sq")] =
          raw(one.kinds[k], one.shape);
    }
    state.parts[{"optimizer"}][fmt::format("state.{}.step", one.name)] = raw({5}, {});
    state.values[fmt::format("optimizer.param_groups.{}.lr", one.name)] = pickled(int64_t{1});
  }
  for (auto& [name, text] : dist_files_of(state)) write(folder / name, name == patched ? patch(text) : text);
}

/// One layer's norm and a table of tokens, with state by name or in a bucket.
template <class Patch>
void write_megatron(const fs::path& folder, bool buckets, std::string_view patched, const Patch& patch) {
  const auto raw = [](int64_t count, const Shape& shape) {
    return RawTensor{"F32", shape, bytes_of(std::vector<float>(static_cast<size_t>(count), 0.5f))};
  };
  DistState state;
  RawTensors& tensors = state.parts[{}];
  const std::pair<const char*, Shape> weights[] = {
      {"embedding.word_embeddings.weight", {4, 2}},
      {"decoder.layers.self_attention.linear_qkv.layer_norm_weight", {1, 2}}};
  for (const auto& [name, shape] : weights) {
    tensors[name] = raw(count_elems(shape), shape);
    for (const char* kind : {"param", "exp_avg", "exp_avg_sq"}) {
      if (!buckets) tensors[fmt::format("optimizer.state.{}.{}", kind, name)] = raw(count_elems(shape), shape);
    }
  }
  for (const char* kind : {"param", "exp_avg", "exp_avg_sq"}) {
    if (!buckets) break;
    tensors[fmt::format("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.{}", kind)] =
        raw(72, {72});
  }
  std::string args;
  for (const auto& [name, value] : {std::pair("hidden_size", 2),
                                    {"num_layers", 1},
                                    {"num_attention_heads", 1},
                                    {"padded_vocab_size", 4},
                                    {"seq_length", 2},
                                    {"tensor_model_parallel_size", 1}}) {
    args += pickled(name) + pickled(int64_t{value});
  }
  const std::string groups = "](}(" + pickled("step") + pickled(int64_t{5}) + "ue";
  const std::string common =
      pickle(pickled("args") + pickled_object("argparse", "Namespace", args) + pickled("iteration") +
             pickled(int64_t{5}) + pickled("optimizer") + "}(" + pickled("param_groups") + groups + "u");
  std::map<std::string, std::string> files = dist_files_of(state);
  files["common.pt"] = zip({{"common/data.pkl", common}, {"common/version", "3\n"}});
  files["metadata.json"] = R"({"sharded_backend": "torch_dist"})";
  for (auto& [name, text] : files) write(folder / name, name == patched ? patch(text) : text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  static const std::vector<Drawn> tensors = small_tensors();
  if (size == 0) return 0;
  for (const auto& entry : fs::directory_iterator(folder.path)) fs::remove(entry.path());
  const auto patch = [&](std::string text) { return fuzz::patched(std::move(text), fuzz::Feed(data + 1, size - 1)); };
  const bool torch = (data[0] & 8) != 0, megatron = (data[0] & 16) != 0;
  if (megatron) {
    constexpr std::string_view kFiles[] = {".metadata", "common.pt", "__0_0.distcp", ".metadata"};
    write_megatron(folder.path, torch, kFiles[data[0] & 3], patch);
  } else if (torch) {
    write_torch(folder.path, tensors, (data[0] & 4) != 0 ? "__0_0.distcp" : ".metadata", patch);
  } else {
    write_deepspeed(folder.path, tensors, data[0], patch);
  }
  const auto state = look_at_training_state(folder.path);
  if (!state.ok() || !state.value()) return 0;
  const auto opened = state.value()->program == "DeepSpeed" ? open_deepspeed(*state.value(), false)
                      : state.value()->program == "Megatron-LM"
                          ? open_megatron_state(*state.value(), false, {})
                          : open_dist_state(*state.value(), false, nlohmann::json::object());
  if (!opened.ok()) {
    RT_CHECK(opened.error().message.size() > 20, "refused without a word");
    return 0;
  }
  read_all(*opened.value().weights);
  read_all(*opened.value().exp_avg);
  read_all(*opened.value().exp_avg_sq);
  return 0;
}
