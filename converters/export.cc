#include "converters/export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/plan/save_plan.h"
#include "converters/dual_file.h"
#include "converters/elements.h"
#include "converters/export_plan.h"
#include "converters/family_tensors.h"
#include "converters/hf_folder.h"
#include "converters/safetensors.h"
#include "runtime/core/file_calls.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxThreads = 2;  // files at a time: 80 MiB each
constexpr int64_t kBlockElems = int64_t{1} << 20;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Status write_text(const fs::path& path, std::string_view text) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) return os_error(errno, path.string());
  while (!text.empty()) {
    const ssize_t n = ::write(fd.get(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, path.string());
    text.remove_prefix(static_cast<size_t>(n));
  }
  if (sync_to_disk(fd.get()) != 0) return os_error(errno, path.string());
  return {};
}

class Exporter {
 public:
  Exporter(const CheckpointWeights& source, const fs::path& source_dir, const ExportOptions& options,
           ExportReport& report, ckpt::IoBackend& io, const RecipeDecoder& decode)
      : source_(source), source_dir_(source_dir), options_(options), report_(report), io_(io), decode_(decode) {}

  Status run(const fs::path& target) {
    RT_TRY_SET(plan_, plan_export(io_, source_, source_dir_, target.filename().string(), options_, decode_));
    report_.warnings = plan_.warnings;
    report_.dtype = plan_.output.dtype;
    report_.block_fp8 = options_.block_fp8;
    report_.model_type = plan_.model_type;

    HfWriteOptions write{.max_shard_bytes = options_.max_shard_bytes,
                         .overwrite = options_.overwrite,
                         .threads = kMaxThreads,
                         .cancel = options_.cancel,
                         .progress = options_.progress,
                         .make_io = options_.make_io};
    if (options_.hdf5) {
      write.write_file = [this](const fs::path& path, const std::vector<SafeTensor>& tensors,
                                std::span<const int64_t> indices, const std::function<Status()>& has_room) {
        return write_with_hdf5(path, tensors, indices, has_room);
      };
    }
    RT_TRY_SET(const HfWriteReport written, write_hf_folder(target, plan_.output, opener(), write));
    report_.dir = written.dir;
    report_.tensors = written.tensors;
    report_.parameters = written.parameters;
    report_.data_bytes = written.data_bytes;
    report_.shards = written.shards;
    report_.files_passed = written.texts;
    report_.taken_files = written.taken_files;
    report_.taken_bytes = written.taken_bytes;
    report_.not_finite.insert(report_.not_finite.end(), written.not_finite.begin(), written.not_finite.end());
    if (!report_.not_finite.empty()) report_.warnings.push_back(not_finite_warning(report_.not_finite));
    return {};
  }

 private:
  OpenTensors opener() const {
    return [this](std::span<const int64_t> tensors) -> Result<std::unique_ptr<TensorSource>> {
      return plan_.open(source_dir_, source_, tensors, OutputReads::kInOrder);
    };
  }

  DType dtype_of(int64_t output) const {
    return plan_.outputs[static_cast<size_t>(output)].own_dtype.value_or(report_.dtype);
  }

  /// Index into the source's tensors for each tensor of the file when each is one logical tensor as it is, all of them:
  /// then the file can be a checkpoint's only one.
  std::optional<std::vector<int64_t>> logical_tensors(std::span<const int64_t> indices) const {
    if (report_.dtype != DType::kF32 || indices.size() != source_.tensors().size()) return std::nullopt;
    std::vector<int64_t> out;
    for (const int64_t index : indices) {
      const Output& output = plan_.outputs[static_cast<size_t>(index)];
      if (output.transpose || output.runs.size() != 1 || dtype_of(index) != DType::kF32) return std::nullopt;
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
    if (source_.kind() != ckpt::kWeightKind || m.files.size() != 1 || m.files[0].step >= 0 ||
        m.shards.size() != tensors.size() || !fs::equivalent(there, source_dir_ / m.files[0].name, error) || error) {
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
  Status write_with_hdf5(const fs::path& path, const std::vector<SafeTensor>& tensors, std::span<const int64_t> indices,
                         const std::function<Status()>& has_room) {
    const auto logical = logical_tensors(indices);
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
    RT_TRY(has_room());
    std::vector<DualTensor> dual;
    for (size_t k = 0; k < tensors.size(); ++k) {
      dual.push_back({.name = tensors[k].name,
                      .dataset = logical ? source_.tensors()[(*logical)[k]].name : "",
                      .dtype = dtype_of(indices[k]),
                      .shape = tensors[k].shape});
    }
    const int64_t step = source_.manifest().step;
    RT_TRY_SET(const std::unique_ptr<TensorSource> source, opener()(indices));
    std::vector<std::byte> block(static_cast<size_t>(kBlockElems) * sizeof(float));
    RT_TRY_SET(DualReport written,
               write_dual(path, dual, {{"format", "pt"}}, step, [&](size_t k, const ByteSink& sink) -> Status {
                 const int64_t bytes = tensors[k].end - tensors[k].begin, elem = dtype_size_bytes(dtype_of(indices[k]));
                 bool finite = true;
                 for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(block.size())) {
                   const auto n = std::min<int64_t>(bytes - at, static_cast<int64_t>(block.size()));
                   const std::span<std::byte> part = std::span(block).first(static_cast<size_t>(n));
                   RT_TRY(source->fill(indices[k], at / elem, part));
                   finite = finite && !any_not_finite(dtype_of(indices[k]), part);
                   RT_TRY(sink(block.data(), n));
                 }
                 if (!finite) report_.not_finite.push_back(tensors[k].name);
                 return {};
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
  ckpt::IoBackend& io_;
  const RecipeDecoder& decode_;
  ExportPlan plan_;
};

}  // namespace

Result<ExportReport> export_hf(ckpt::IoBackend& io, const fs::path& checkpoint_dir, const fs::path& hf_dir,
                               const ExportOptions& options, const RecipeDecoder& decode) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY(check_export_dtype(options.dtype));
  if (options.block_fp8 && options.hdf5)
    return invalid("--quantize: HDF5 has no numbers of eight bits; without --hdf5");
  RT_TRY(check_apart(checkpoint_dir, hf_dir));
  RT_TRY(check_hf_target(hf_dir, options.overwrite));
  RT_TRY_SET(const std::unique_ptr<CheckpointWeights> source,
             CheckpointWeights::open(io, checkpoint_dir, decode, options.weights));
  ExportReport report;
  RT_TRY(Exporter(*source, checkpoint_dir, options, report, io, decode).run(hf_dir));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

std::string not_finite_warning(const std::vector<std::string>& tensors) {
  constexpr size_t kNamed = 5;
  const std::span named = std::span(tensors).first(std::min(tensors.size(), kNamed));
  return fmt::format("{} tensor{} NaN or infinity: {}{}", tensors.size(), tensors.size() == 1 ? " holds" : "s hold",
                     fmt::join(named, ", "),
                     tensors.size() > kNamed ? fmt::format(" and {} more", tensors.size() - kNamed) : "");
}

std::string dtype_text(const ExportReport& report) { return dtype_text(report.dtype, report.block_fp8); }

std::string dtype_text(DType dtype, bool block_fp8) {
  return fmt::format("{}{}", block_fp8 ? "fp8 in blocks, the rest " : "", dtype_name(dtype));
}

Status check_export_dtype(const std::optional<DType>& dtype) {
  if (!dtype || *dtype == DType::kF32 || *dtype == DType::kBf16 || *dtype == DType::kF16) return {};
  return invalid(fmt::format("dtype {}: weights are exported as f32, bf16 or f16", dtype_name(*dtype)));
}

/// Token ids of the original config: ints, a list of ints, or null; anything else is left out.
void keep_token_ids(const std::string& original, nlohmann::ordered_json* config) {
  const auto parsed = parse_json_strictly(original, "the kept config", 32, 0, JsonNumbers::kPython);
  if (!parsed.ok() || !parsed.value().is_object()) return;
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const auto found = parsed.value().find(key);
    if (found == parsed.value().end()) {
      // Absent there: the class default holds, as it did; of another class null, for its default may be out of range.
      if (json_field(parsed.value(), "model_type") == (*config)["model_type"]) config->erase(key);
      continue;
    }
    const bool list = found->is_array() &&
                      std::all_of(found->begin(), found->end(), [](const auto& id) { return id.is_number_integer(); });
    if (found->is_number_integer() || found->is_null() || list) (*config)[key] = *found;
  }
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
