#include "converters/export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "converters/dual_file.h"
#include "converters/family.h"
#include "converters/hf_folder.h"
#include "converters/safetensors.h"
#include "converters/strict_json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kBlockElems = int64_t{1} << 20;      // converted and written at a time
constexpr std::string_view kTestedVersion = "4.57.6";  // of transformers; with 5.23.0, docs/converters.md
constexpr float kMaxF16 = 65504.0f;
constexpr std::string_view kSingleHdf5 = "model.h5";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// Rows of a stored tensor (columns of a transposed one) that are rows of a logical tensor.
struct OutputRun {
  int64_t stored = 0, count = 0;
  int64_t source = 0, row = 0;  // index into the source's tensors, its first row
};

/// One tensor of the folder and the logical tensors it is made of.
struct Output {
  std::string name;
  Shape shape;
  bool transpose = false;
  std::vector<OutputRun> runs;  // in the order of the stored rows
};

/// In the order in which shards are filled: embedding, layers by number, final norm, head.
std::vector<Output> outputs_of(const Family& family, const WeightSource& source) {
  const std::vector<Mapping> mappings = tensor_map(family, source.model());
  std::vector<Output> out;
  std::map<std::string, size_t> index;
  for (size_t k = 0; k < mappings.size(); ++k) {
    const Mapping& mapping = mappings[k];
    const auto [at, is_new] = index.emplace(mapping.stored, out.size());
    if (is_new) out.push_back({.name = mapping.stored, .shape = mapping.shape, .transpose = mapping.transpose});
    for (const RowRun& run : row_runs(mapping, source.tensors()[k].shape)) {
      out[at->second].runs.push_back({run.stored, run.count, static_cast<int64_t>(k), run.logical});
    }
  }
  for (Output& output : out) {
    std::ranges::sort(output.runs, {}, &OutputRun::stored);
    int64_t rows = 0;
    for (const OutputRun& run : output.runs) {
      RT_CHECK(run.stored == rows, "{}: rows {} to {} come from nowhere or twice", output.name, rows, run.stored);
      rows += run.count;
    }
  }
  return out;
}

/// Converts floats to `dtype` block by block and hands them on.
Status emit(const Output& tensor, DType dtype, std::span<const float> values, const ByteSink& sink) {
  if (dtype == DType::kF32) return sink(reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  std::vector<uint16_t> block(std::min<int64_t>(kBlockElems, static_cast<int64_t>(values.size())));
  for (size_t at = 0; at < values.size(); at += block.size()) {
    const size_t count = std::min(block.size(), values.size() - at);
    for (size_t k = 0; k < count; ++k) {
      const float x = values[at + k];
      if (dtype == DType::kBf16) {
        block[k] = to_bf16(x).bits;
        continue;
      }
      block[k] = f32_to_f16(x);
      if ((block[k] & 0x7fff) == 0x7c00 && !std::isinf(x)) {
        return Error{ErrorCode::kUnsupported,
                     fmt::format("{}: holds {}, f16 ends at {}; export as bf16 or f32", tensor.name, x, kMaxF16)};
      }
    }
    RT_TRY(sink(reinterpret_cast<const std::byte*>(block.data()), static_cast<int64_t>(count * 2)));
  }
  return {};
}

Status write_tensor(const WeightSource& source, const Output& tensor, DType dtype, const ByteSink& sink) {
  const auto columns_of = [&](const OutputRun& run) {
    const Shape& shape = source.tensors()[run.source].shape;
    return cairn::count_elems(shape) / shape[0];
  };
  std::vector<float> rows;
  if (!tensor.transpose) {
    for (const OutputRun& run : tensor.runs) {
      const int64_t columns = columns_of(run);
      const int64_t rows_a_block = std::max<int64_t>(1, 16 * kBlockElems / columns);
      for (int64_t first = 0; first < run.count; first += rows_a_block) {
        const int64_t n = std::min(run.count - first, rows_a_block);
        rows.resize(n * columns);
        RT_TRY(source.read_rows(run.source, run.row + first, run.row + first + n, rows));
        RT_TRY(emit(tensor, dtype, rows, sink));
      }
    }
    return {};
  }
  std::vector<float> stored(cairn::count_elems(tensor.shape));
  const int64_t inputs = tensor.shape[0], width = tensor.shape[1];
  for (const OutputRun& run : tensor.runs) {
    rows.resize(run.count * inputs);
    RT_TRY(source.read_rows(run.source, run.row, run.row + run.count, rows));
    for (int64_t o = 0; o < run.count; ++o) {
      for (int64_t i = 0; i < inputs; ++i) stored[i * width + run.stored + o] = rows[o * inputs + i];
    }
  }
  return emit(tensor, dtype, stored, sink);
}

/// File name of each output.
using Split = std::vector<std::string>;

std::string shard_name(int64_t index, int64_t count) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// transformers' algorithm: a tensor above the limit is a shard of its own at once; else a shard that would pass the
/// limit is closed first.
Split split_by_size(const std::vector<Output>& outputs, DType dtype, int64_t limit) {
  std::vector<int64_t> shard(outputs.size());
  int64_t count = 0, open_shard = -1, filled = 0;
  for (size_t k = 0; k < outputs.size(); ++k) {
    const int64_t bytes = cairn::count_elems(outputs[k].shape) * dtype_size_bytes(dtype);
    if (bytes > limit) {
      shard[k] = count++;
      continue;
    }
    if (open_shard < 0 || filled + bytes > limit) {
      open_shard = count++;
      filled = 0;
    }
    shard[k] = open_shard;
    filled += bytes;
  }
  Split out;
  for (const int64_t s : shard) out.push_back(count == 1 ? std::string(kSingleFile) : shard_name(s, count));
  return out;
}

/// The split of the folder that was imported, when its index names exactly these tensors and files of safe names.
std::optional<Split> split_by_index(const std::vector<Output>& outputs, const std::string& index) {
  const auto map = parse_index(index);
  if (!map.ok() || map.value().size() != outputs.size()) return std::nullopt;
  Split out;
  for (const Output& output : outputs) {
    const auto file = map.value().find(output.name);
    if (file == map.value().end() || !file->second.starts_with("model") || !file->second.ends_with(".safetensors")) {
      return std::nullopt;
    }
    out.push_back(file->second);
  }
  return out;
}

Status write_text(const fs::path& path, std::string_view text) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd) return os_error(errno, path.string());
  while (!text.empty()) {
    const ssize_t n = ::write(fd.get(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path.string());
    text.remove_prefix(static_cast<size_t>(n));
  }
  if (::fsync(fd.get()) != 0) return os_error(errno, path.string());
  return {};
}

Status sync_folder(const fs::path& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) return os_error(errno, "fsync of " + path.string());
  return {};
}

/// Token ids of the original config: ints, a list of ints, or null; anything else is left out.
void keep_token_ids(const nlohmann::json& original, nlohmann::ordered_json* config) {
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const auto found = original.find(key);
    if (found == original.end()) {
      config->erase(key);  // absent there: the class default holds, as it did
      continue;
    }
    const bool list = found->is_array() &&
                      std::all_of(found->begin(), found->end(), [](const auto& id) { return id.is_number_integer(); });
    if (found->is_number_integer() || found->is_null() || list) (*config)[key] = *found;
  }
}

bool is_export_file(const std::string& name) {
  if (name == kConfigFile || name == kIndexFile || name == kSingleFile) return true;
  if (name.starts_with("model-") && (name.ends_with(".safetensors") || name.ends_with(".h5"))) return true;
  if (name == kSingleHdf5 || name == ckpt::kManifestName || name == ckpt::kTableName) return true;
  return std::find(passed_files().begin(), passed_files().end(), name) != passed_files().end();
}

/// Moves what `from` holds into `to`, which has files already; config.json leaves first and comes last.
Status replace_files(const fs::path& from, const fs::path& to) {
  std::error_code error;
  std::vector<std::string> old_names, new_names;
  for (fs::directory_iterator it(to, error), end; !error && it != end; it.increment(error)) {
    old_names.push_back(it->path().filename().string());
  }
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    new_names.push_back(it->path().filename().string());
  }
  if (error) return os_error(error.value(), to.string());
  const auto config = [](const std::string& name) { return name == kConfigFile; };
  std::stable_partition(old_names.begin(), old_names.end(), config);
  std::stable_partition(new_names.begin(), new_names.end(), [&](const std::string& name) { return !config(name); });
  for (const std::string& name : old_names) {
    if (!is_export_file(name)) continue;
    if (::unlink((to / name).c_str()) != 0) return os_error(errno, (to / name).string());
    if (config(name)) RT_TRY(sync_folder(to));
  }
  for (const std::string& name : new_names) {
    if (config(name)) RT_TRY(sync_folder(to));
    if (::rename((from / name).c_str(), (to / name).c_str()) != 0) return os_error(errno, (to / name).string());
  }
  fs::remove(from, error);
  return sync_folder(to);
}

class Exporter {
 public:
  Exporter(const CheckpointWeights& source, const fs::path& source_dir, const ExportOptions& options,
           ExportReport& report)
      : source_(source), source_dir_(source_dir), options_(options), report_(report) {}

  Status run(const fs::path& into) {
    RT_TRY(gather_files());
    const nlohmann::json original = original_config();
    const std::string preferred = original.is_object() ? original.value("model_type", "") : "";
    RT_TRY_SET(const Family family, family_for(source_.model(), preferred));
    const DType dtype = options_.dtype.value_or(source_.imported_dtype().value_or(DType::kF32));
    report_.dtype = dtype == DType::kF64 ? DType::kF32 : dtype;
    report_.model_type = family.model_type;
    RT_TRY(write_weights(family, into));
    for (const auto& [name, text] : files_) {
      if (name == kConfigFile || name == kIndexFile) continue;
      RT_TRY(write_text(into / name, text));
      ++report_.files_passed;
    }
    nlohmann::ordered_json config = config_from_model(family, source_.model(), report_.dtype, original);
    if (original.is_object()) keep_token_ids(original, &config);
    config["transformers_version"] = kTestedVersion;
    return write_text(into / kConfigFile, config.dump(2) + "\n");
  }

 private:
  /// The config.json that was imported; null when there is none, or none that can be read.
  nlohmann::json original_config() const {
    const auto file = files_.find(std::string(kConfigFile));
    if (file == files_.end()) return nullptr;
    Result<nlohmann::json> parsed = parse_json_strictly(file->second, "the kept config", 32);
    return parsed.ok() && parsed.value().is_object() ? std::move(parsed).value() : nlohmann::json();
  }

  Status gather_files() {
    const std::set<std::string_view> known(passed_files().begin(), passed_files().end());
    for (const std::string& name : source_.files()) {
      if (!known.contains(name) && name != kConfigFile && name != kIndexFile) continue;
      RT_TRY_SET(files_[name], source_.file(name));
    }
    if (source_.files().empty()) {  // of a checkpoint that is a Hugging Face folder these lie beside it
      std::error_code error;
      for (const std::string_view name : passed_files()) {
        if (!fs::is_regular_file(source_dir_ / name, error)) continue;
        RT_TRY_SET(files_[std::string(name)], read_text_file(source_dir_ / name, int64_t{256} << 20));
      }
      if (fs::is_regular_file(source_dir_ / kConfigFile, error)) {
        RT_TRY_SET(files_[std::string(kConfigFile)], read_text_file(source_dir_ / kConfigFile, int64_t{256} << 20));
      }
    }
    for (const std::string& name : source_.empty_files()) {
      if (known.contains(name)) files_[name] = "";
    }
    const TokenizerConfig& tokenizer = source_.recipe().tokenizer;
    if (tokenizer.kind == TokenizerConfig::Kind::kSentencePiece && !files_.contains("tokenizer.model")) {
      Result<std::string> model = read_text_file(tokenizer.path, int64_t{256} << 20);
      if (model.ok()) {
        files_["tokenizer.model"] = std::move(model).value();
      } else {
        report_.warnings.push_back("the tokenizer is not exported: " + model.error().message);
      }
    }
    return {};
  }

  Status write_weights(const Family& family, const fs::path& into) {
    const std::vector<Output> outputs = outputs_of(family, source_);
    std::optional<Split> kept;
    const auto index = files_.find(std::string(kIndexFile));
    if (options_.max_shard_bytes == 0 && index != files_.end()) kept = split_by_index(outputs, index->second);
    const int64_t limit = options_.max_shard_bytes > 0 ? options_.max_shard_bytes : kDefaultShardBytes;
    const Split split = kept ? *std::move(kept) : split_by_size(outputs, report_.dtype, limit);

    std::map<std::string, std::vector<SafeTensor>> shards;
    std::map<std::string_view, const Output*> by_name;
    nlohmann::json weight_map = nlohmann::json::object();  // sorted keys
    for (size_t k = 0; k < outputs.size(); ++k) {
      const Output& output = outputs[k];
      by_name[output.name] = &output;
      weight_map[output.name] = split[k];
      const int64_t elems = cairn::count_elems(output.shape);
      report_.parameters += elems;
      report_.data_bytes += elems * dtype_size_bytes(report_.dtype);
      shards[split[k]].push_back(
          {.name = output.name, .dtype = std::string(safetensors_dtype_name(report_.dtype)), .shape = output.shape});
    }
    report_.tensors = static_cast<int64_t>(outputs.size());
    report_.shards = static_cast<int64_t>(shards.size());
    for (auto& [file, tensors] : shards) {
      if (options_.hdf5) {
        RT_TRY(write_with_hdf5(into / file, tensors, by_name));
        continue;
      }
      RT_TRY(write_safetensors(into / file, std::move(tensors), {{"format", "pt"}},
                               [&](const SafeTensor& tensor, const ByteSink& sink) {
                                 return write_tensor(source_, *by_name[tensor.name], report_.dtype, sink);
                               }));
    }
    if (shards.size() == 1 && shards.contains(std::string(kSingleFile))) return {};
    const nlohmann::json written = {
        {"metadata", {{"total_parameters", report_.parameters}, {"total_size", report_.data_bytes}}},
        {"weight_map", std::move(weight_map)}};
    return write_text(into / kIndexFile, written.dump(2) + "\n");
  }

  /// Index into the source's tensors for each tensor of the file when each is one logical tensor as it is, all of them:
  /// then the file can be a checkpoint's only one.
  std::optional<std::vector<int64_t>> logical_tensors(const std::vector<SafeTensor>& tensors,
                                                      const std::map<std::string_view, const Output*>& by_name) const {
    if (report_.dtype != DType::kF32 || tensors.size() != source_.tensors().size()) return std::nullopt;
    std::vector<int64_t> out;
    for (const SafeTensor& tensor : tensors) {
      const Output& output = *by_name.at(tensor.name);
      if (output.transpose || output.runs.size() != 1) return std::nullopt;
      out.push_back(output.runs[0].source);
    }
    return out;
  }

  /// Whether the checkpoint's own file is the one that would be written: made by an earlier export of this kind.
  bool source_has(const std::string& file, const std::vector<SafeTensor>& tensors,
                  const std::vector<int64_t>& logical) const {
    const ckpt::Manifest& m = source_.manifest();
    std::error_code error;
    const fs::path there = source_dir_ / file;
    if (m.files.size() != 1 || m.files[0].step >= 0 || m.shards.size() != tensors.size() ||
        !fs::equivalent(there, source_dir_ / m.files[0].name, error) || error) {
      return false;
    }
    const Result<SafetensorsFile> opened = SafetensorsFile::open(there);
    if (!opened.ok() || opened.value().header().tensors.size() != tensors.size()) return false;
    std::map<std::string_view, const SafeTensor*> found;
    for (const SafeTensor& tensor : opened.value().header().tensors) found[tensor.name] = &tensor;
    std::map<std::string_view, int64_t> offset;  // of the logical tensors
    for (const ckpt::ShardEntry& shard : m.shards) offset[m.tensors[shard.tensor].name] = shard.offset;
    for (size_t k = 0; k < tensors.size(); ++k) {
      const auto it = found.find(tensors[k].name);
      const auto at = offset.find(source_.tensors()[logical[k]].name);
      if (it == found.end() || at == offset.end() || it->second->dtype != tensors[k].dtype ||
          it->second->shape != tensors[k].shape ||
          opened.value().header().data_offset + it->second->begin != at->second) {
        return false;
      }
    }
    return true;
  }

  /// One file for both kinds of readers, under a name for each. Where the family stores logical tensors as they are and
  /// there is one file of f32, the folder is a checkpoint as well, and exporting that one writes no weights at all.
  Status write_with_hdf5(const fs::path& path, const std::vector<SafeTensor>& tensors,
                         const std::map<std::string_view, const Output*>& by_name) {
    const auto logical = logical_tensors(tensors, by_name);
    const fs::path second = fs::path(path).replace_extension(".h5");
    const auto name_twice = [&]() -> Status {
      if (::link(path.c_str(), second.c_str()) != 0) return os_error(errno, "second name " + second.string());
      return {};
    };
    if (logical && source_has(path.filename().string(), tensors, *logical) &&
        ::link((source_dir_ / path.filename()).c_str(), path.c_str()) == 0) {  // else: another file system
      report_.linked = true;
      RT_TRY(name_twice());
      return write_manifest(path.parent_path(), source_.manifest());
    }
    std::vector<DualTensor> dual;
    for (size_t k = 0; k < tensors.size(); ++k) {
      dual.push_back({.name = tensors[k].name,
                      .dataset = logical ? source_.tensors()[(*logical)[k]].name : "",
                      .dtype = report_.dtype,
                      .shape = tensors[k].shape});
    }
    const int64_t step = source_.manifest().step;
    RT_TRY_SET(DualReport written,
               write_dual(path, dual, {{"format", "pt"}}, step, [&](size_t k, const ByteSink& sink) {
                 return write_tensor(source_, *by_name.at(tensors[k].name), report_.dtype, sink);
               }));
    RT_TRY(name_twice());
    if (!logical) return {};
    ckpt::Manifest manifest = source_.manifest();
    manifest.tensors.clear();
    for (const DualTensor& tensor : dual)
      manifest.tensors.push_back({tensor.dataset, "weight", tensor.dtype, tensor.shape});
    manifest.files = {{second.filename().string(), written.file_bytes, written.rest_hash}};
    manifest.shards = std::move(written.shards);
    manifest.mesh = {.precision = manifest.mesh.precision};
    manifest.origin = fmt::format("export of step {} of run {}", step, manifest.run.id);
    return write_manifest(path.parent_path(), manifest);
  }

  static Status write_manifest(const fs::path& folder, const ckpt::Manifest& manifest) {
    RT_TRY_SET(const ckpt::ManifestFiles files, ckpt::encode_manifest_files(manifest));
    RT_TRY(write_text(folder / ckpt::kTableName, files.table));
    return write_text(folder / ckpt::kManifestName, files.json);
  }

  const CheckpointWeights& source_;
  const fs::path& source_dir_;
  const ExportOptions& options_;
  ExportReport& report_;
  std::map<std::string, std::string> files_;
};

}  // namespace

Result<ExportReport> export_hf(ckpt::IoBackend& io, const fs::path& checkpoint_dir, const fs::path& hf_dir,
                               const ExportOptions& options, const RecipeDecoder& decode) {
  const auto start = std::chrono::steady_clock::now();
  if (options.dtype && *options.dtype != DType::kF32 && *options.dtype != DType::kBf16 &&
      *options.dtype != DType::kF16) {
    return invalid(fmt::format("dtype {}: weights are exported as f32, bf16 or f16", dtype_name(*options.dtype)));
  }
  std::error_code error;
  const fs::path target = (fs::absolute(hf_dir, error) / "").lexically_normal().parent_path();
  const bool exists = fs::exists(target, error);
  if (exists && !fs::is_directory(target, error)) return invalid(target.string() + ": is there and is no folder");
  const bool empty = !exists || fs::is_empty(target, error);
  if (error) return os_error(error.value(), target.string());
  if (!empty && !options.overwrite) {
    return invalid(fmt::format("{}: is not empty; name another folder, or give --overwrite to replace the model in it",
                               target.string()));
  }
  RT_TRY_SET(const std::unique_ptr<CheckpointWeights> source, CheckpointWeights::open(io, checkpoint_dir, decode));
  fs::create_directories(target.parent_path(), error);
  if (error) return os_error(error.value(), target.parent_path().string());
  const fs::path work = target.parent_path() / fmt::format(".{}.tmp-{}", target.filename().string(), ::getpid());
  fs::remove_all(work, error);
  if (!fs::create_directory(work, error)) return os_error(error.value(), work.string());

  ExportReport report;
  const auto publish = [&]() -> Status {
    RT_TRY(Exporter(*source, checkpoint_dir, options, report).run(work));
    RT_TRY(sync_folder(work));
    if (!empty) return replace_files(work, target);
    // A folder takes the name of an empty one, or of none, in one step.
    if (::rename(work.c_str(), target.c_str()) != 0) return os_error(errno, target.string());
    return sync_folder(target.parent_path());
  };
  Status done = publish();
  if (!done.ok()) {
    fs::remove_all(work, error);
    return std::move(done).error();
  }
  report.dir = target;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

Result<int64_t> parse_size(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit = text.substr(error == std::errc() ? end - text.data() : 0);
  int64_t factor = 0;
  if (unit.empty() || unit == "B") factor = 1;
  if (unit == "KB") factor = 1000;
  if (unit == "MB") factor = 1000'000;
  if (unit == "GB") factor = 1000'000'000;
  if (unit == "TB") factor = 1000'000'000'000;
  if (error != std::errc() || number < 1 || factor == 0 || __builtin_mul_overflow(number, factor, &number)) {
    return invalid(fmt::format("\"{}\" is no size; expected a whole number and KB, MB, GB or TB, such as 5GB", text));
  }
  return number;
}

}  // namespace cairn::convert
