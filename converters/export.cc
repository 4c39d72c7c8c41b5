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
#include <set>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/retention/catalog.h"
#include "converters/block_fp8.h"
#include "converters/dual_file.h"
#include "converters/elements.h"
#include "converters/family.h"
#include "converters/family_tensors.h"
#include "converters/hf_folder.h"
#include "converters/model_card.h"
#include "converters/safetensors.h"
#include "converters/tokenizer_files.h"
#include "runtime/core/file_calls.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxThreads = 2;  // files at a time: 80 MiB each
constexpr int64_t kBlockElems = int64_t{1} << 20;
constexpr int64_t kMaxKeptBytes = int64_t{256} << 20;

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
    RT_TRY(gather_files());
    // A model that came from Hugging Face goes back as what it was, where several families could hold it.
    const auto kept = files_.find(std::string(kConfigFile));
    const std::string original_text = kept == files_.end() ? "" : kept->second;
    const nlohmann::json original = json_or_nothing(original_text, JsonNumbers::kPython);
    const bool readable = original.is_object() && original.contains("model_type") && original["model_type"].is_string();
    RT_TRY_SET(const Family family,
               family_for(source_.model(), readable ? original["model_type"].get<std::string>() : ""));
    const DType trained = options_.block_fp8 ? DType::kBf16 : DType::kF32;
    const DType dtype = options_.dtype.value_or(source_.imported_dtype().value_or(origin_dtype_.value_or(trained)));
    report_.dtype = dtype == DType::kF64 ? DType::kF32 : dtype;
    report_.model_type = family.model_type;
    if (!options_.like.empty() && readable && original["model_type"] != family.model_type) {
      report_.warnings.push_back(fmt::format("{} is of type {}, which cannot hold this model: exported as {}",
                                             options_.like.string(), original["model_type"].get<std::string>(),
                                             family.model_type));
    }
    if (family.own_code) report_.warnings.push_back(own_code_warning(family));
    nlohmann::ordered_json config = config_from_model(family, source_.model(), report_.dtype, original);
    keep_token_ids(original_text, &config);
    const WrittenFor written_line = written_for(family, source_.model());
    config["transformers_version"] = written_line.version;
    settle_token_ids(&config);
    if (!written_line.warning.empty()) report_.warnings.push_back(written_line.warning);
    if (options_.block_fp8) {
      RT_TRY(check_block_fp8(family));
      blocks_ = BlockFp8::like(original);
      config["quantization_config"] = blocks_.config();
      report_.block_fp8 = true;
    }
    outputs_ = outputs_of(family, source_, options_.block_fp8 ? &blocks_ : nullptr);
    if (!options_.dtype) {  // what nothing has trained leaves as it came
      const std::map<std::string, DType> own = source_.imported_dtypes();
      for (Output& tensor : outputs_) {
        const auto found = own.find(source_.tensors()[tensor.runs.front().source].name);
        if (found != own.end()) tensor.own_dtype = found->second;
      }
    }

    HfOutput output{.dtype = report_.dtype};
    for (const Output& tensor : outputs_)
      output.tensors.push_back({tensor.name, tensor.shape, tensor.own_dtype, tensor.part});
    if (const auto index = files_.find(std::string(kIndexFile)); index != files_.end())
      output.split = split_of_index(output.tensors, index->second);
    for (auto& [name, text] : files_) {
      if (name != kConfigFile && name != kIndexFile) output.texts[name] = std::move(text);
    }
    output.texts[std::string(kConfigFile)] = json_text(config, 2) + "\n";
    output.texts[std::string(kCardFile)] = model_card(card_of(target));
    RT_TRY_SET(output.source, ckpt::encode_manifest(source_.manifest()));
    output.source += source_.kind();

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
    RT_TRY_SET(const HfWriteReport written, write_hf_folder(target, output, opener(), write));
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
      return open_outputs(source_dir_, source_, outputs_, report_.dtype, blocks_, tensors);
    };
  }

  ModelCard card_of(const fs::path& target) const {
    const ckpt::Manifest& m = source_.manifest();
    ModelCard card{.name = target.filename().string(),
                   .model_type = report_.model_type,
                   .dtype = dtype_text(report_),
                   .parameters = count_parameters(source_.model())};
    card.lineage.push_back(fmt::format("run `{}` (id `{}`), step {}, {} samples and {} tokens seen", m.run.name,
                                       m.run.id, m.step, m.samples, m.tokens));
    if (source_.kind() != ckpt::kWeightKind) {
      card.lineage.push_back(
          fmt::format("the moving average of its weights, decay {}", source_.recipe().optimizer.ema));
    }
    card.lineage.push_back(fmt::format("recipe hash `{}`", m.recipe_hash));
    if (!m.origin.empty()) card.lineage.push_back(m.origin);
    for (auto parent = m.run.parents.rbegin(); parent != m.run.parents.rend(); ++parent)
      card.lineage.push_back(fmt::format("continues the run with id `{}`", *parent));
    return card;
  }

  Status take_files_of(const fs::path& folder) {
    std::vector<std::string> names = passed_files_in(folder);
    std::error_code error;
    if (fs::exists(fs::symlink_status(folder / kConfigFile, error))) names.emplace_back(kConfigFile);
    for (const std::string& name : names) {
      RT_TRY(check_inside(folder, name));
      RT_TRY_SET(files_[name], read_text_file(folder / name, kMaxKeptBytes));
    }
    return {};
  }

  /// The folder of a recipe's init.path. Empty: nowhere.
  static fs::path find_init(const std::string& path, const fs::path& checkpoint) {
    std::error_code error;
    for (const fs::path& place : places_of(path, checkpoint)) {
      if (fs::is_directory(place, error)) return place;
    }
    return {};
  }

  /// Of the Hugging Face folder that a run began with, or that the run began with which it began with, and so on: what
  /// fine-tuning does not change, and the dtype.
  Status take_files_of_origin() {
    constexpr int kMostRuns = 16;
    InitConfig init = source_.recipe().init;
    fs::path at = source_dir_;
    for (int run = 0; run < kMostRuns && !init.path.empty(); ++run) {
      const fs::path found = find_init(init.path, at);
      if (found.empty()) {
        report_.warnings.push_back(fmt::format(
            "the model began with {}, which is not there any more: its tokenizer, generation settings, token "
            "ids and dtype are not exported; --like FOLDER takes them from another copy of it",
            init.path));
        return {};
      }
      std::error_code error;
      if (fs::is_regular_file(found / kConfigFile, error)) {
        RT_TRY(take_files_of(found));
        if (const auto folder = HfFolder::inspect(found); folder.ok()) origin_dtype_ = folder.value()->dtype();
        return {};
      }
      const fs::path checkpoints = fs::is_directory(found / "checkpoints", error) ? found / "checkpoints" : found;
      at = found;
      if (!fs::exists(found / ckpt::kManifestName, error)) {
        const Result<ckpt::CheckpointInfo> newest = ckpt::newest_complete(io_, checkpoints);
        if (!newest.ok() && newest.error().code == ErrorCode::kCorrupt) return newest.error();
        if (!newest.ok()) return {};  // nothing to be learnt from
        at = newest.value().dir;
      }
      const auto weights = CheckpointWeights::open(io_, at, decode_);
      if (!weights.ok()) return {};
      for (const std::string& name : weights.value()->files()) {
        if (!is_passed_file(name) && name != kConfigFile) continue;
        RT_TRY_SET(files_[name], weights.value()->file(name));
      }
      origin_dtype_ = weights.value()->imported_dtype();
      if (!files_.empty()) return {};
      init = weights.value()->recipe().init;
    }
    return {};
  }

  /// Takes what the checkpoint keeps, or what lies beside it, or the files of what the run began with. Returns whether
  /// the model came with them: they are its own whatever the recipe says.
  Result<bool> take_own_files() {
    for (const std::string& name : source_.files()) {
      if (!is_passed_file(name) && name != kConfigFile && name != kIndexFile) continue;
      RT_TRY_SET(files_[name], source_.file(name));
    }
    // Of a checkpoint that is a Hugging Face folder these lie beside it.
    if (source_.files().empty()) RT_TRY(take_files_of(source_dir_));
    const bool own = !files_.empty();
    if (!own) RT_TRY(take_files_of_origin());
    for (const std::string& name : source_.empty_files()) {
      if (is_passed_file(name)) files_[name] = "";
    }
    return own;
  }

  Status gather_files() {
    if (options_.like.empty()) {
      RT_TRY_SET(const bool own, take_own_files());
      if (!own && !options_.without_tokenizer) RT_TRY(take_recipe_tokenizer());
    } else {
      RT_TRY(take_files_of(options_.like));
      if (!files_.contains(std::string(kConfigFile))) RT_TRY(take_tokenizer_of_folder());
    }
    if (options_.without_tokenizer)
      std::erase_if(files_, [](const auto& file) { return is_tokenizer_file(file.first); });
    const std::string of = (options_.like.empty() ? source_dir_ : options_.like).string();
    for (const auto& [name, content] : files_) {
      Status readable = check_passed_file(name, content);
      if (readable.ok()) continue;
      Error error = std::move(readable).error().with(of);
      error.message += "; --like FOLDER takes another copy of these files";
      if (is_tokenizer_file(name)) error.message += ", --without-tokenizer leaves those of the tokenizer out";
      return error;
    }
    return {};
  }

  /// --like FOLDER that has no config.json.
  Status take_tokenizer_of_folder() {
    const TokenizerConfig tokenizer = tokenizer_in(options_.like);
    if (tokenizer.kind == TokenizerConfig::Kind::kNone) {
      return invalid(fmt::format(
          "{} has neither {} nor a tokenizer; expected a Hugging Face folder, or one with tokenizer.json or "
          "tokenizer.model",
          options_.like.string(), kConfigFile));
    }
    files_.clear();
    RT_TRY_SET([[maybe_unused]] const bool own, take_own_files());
    RT_TRY_SET(const text::TokenizerHashes found, text::tokenizer_hashes(tokenizer));
    if (tokenizer.kind == source_.recipe().tokenizer.kind) {
      for (const text::TokenizerChange& one : text::tokenizer_changes(tokenizer.path, trained_tokenizer(), found)) {
        report_.warnings.push_back(
            fmt::format("{} is not the file that the run was trained with: {}", one.path, change_text(one)));
      }
    }
    return use_tokenizer(tokenizer);
  }

  text::TokenizerHashes trained_tokenizer() const {
    return options_.trained_tokenizer ? options_.trained_tokenizer(source_.manifest()) : text::TokenizerHashes{};
  }

  /// The hashes of the tokenizer among files_, of the recipe's kind.
  text::TokenizerHashes hashes_of_kept() const {
    const bool hf = source_.recipe().tokenizer.kind == TokenizerConfig::Kind::kHf;
    const auto of = [&](const char* name) {
      const auto kept = files_.find(name);
      return kept == files_.end() ? std::string() : kept->second;
    };
    text::BesideFiles beside;
    for (const char* name : text::kBesideNames) *beside.find(name) = of(name);
    return text::tokenizer_hashes(of(hf ? "tokenizer.json" : "tokenizer.model"), beside);
  }

  /// Takes the tokenizer of a model that was trained from scratch, or with another tokenizer than that of the folder
  /// that it began with.
  Status take_recipe_tokenizer() {
    TokenizerConfig tokenizer = source_.recipe().tokenizer;
    const bool of_origin = std::ranges::any_of(files_, [](const auto& file) { return is_tokenizer_file(file.first); });
    if (tokenizer.kind == TokenizerConfig::Kind::kNone) {
      if (of_origin) return {};
      report_.warnings.push_back(
          "no tokenizer is exported, for the recipe names none; --like FOLDER takes its files from a folder");
      if (const int64_t end = source_.recipe().objective.document_end; end >= 0)
        tokenizer_ = TokenizerFiles{.eos = {end}};
      return {};
    }
    if (!tokenizer.path.empty()) {
      const text::TokenizerHashes trained = trained_tokenizer(), kept = hashes_of_kept();
      const auto is_kept = [&](const text::TokenizerHashes& other) {
        return !kept.file.empty() && kept.file == other.file && text::tokenizer_changes("", kept, other).empty();
      };
      if (is_kept(trained)) return {};
      Result<FoundTokenizer> found = find_tokenizer(tokenizer, source_dir_, trained);
      if (!found.ok()) {
        Error error = std::move(found).error();
        error.message += "; --like FOLDER takes another copy, --without-tokenizer leaves it out";
        return error;
      }
      if (is_kept(found.value().hashes)) return {};
      tokenizer = found.value().tokenizer;
      if (trained.file.empty()) {
        report_.warnings.push_back(fmt::format(
            "{} is exported as the tokenizer; no lineage.jsonl of the run says whether it is the file of the training",
            tokenizer.path));
      }
    }
    if (of_origin) {
      report_.warnings.push_back(
          fmt::format("the recipe's tokenizer is exported in place of that of {}", source_.recipe().init.path));
    }
    return use_tokenizer(tokenizer);
  }

  Status use_tokenizer(const TokenizerConfig& tokenizer) {
    const ModelConfig& model = source_.model();
    RT_TRY_SET(TokenizerFiles made, tokenizer_files(tokenizer, model.context, source_.recipe().objective.document_end));
    if (made.vocab > model.vocab) {
      return invalid(fmt::format(
          "{}: the tokenizer has {} ids, the model {} rows: they do not belong together; --like FOLDER names another "
          "one, --without-tokenizer leaves it out",
          tokenizer.path.empty() ? "bytes" : tokenizer.path, made.vocab, model.vocab));
    }
    std::erase_if(files_, [](const auto& file) { return is_tokenizer_file(file.first); });
    files_.merge(made.files);
    report_.warnings.insert(report_.warnings.end(), made.warnings.begin(), made.warnings.end());
    tokenizer_ = std::move(made);
    return {};
  }

  /// Writes the ids of a tokenizer that was taken: in config.json and in what generation reads.
  void settle_token_ids(nlohmann::ordered_json* config) {
    constexpr const char* kGeneration = "generation_config.json";
    if (!tokenizer_) return;
    const auto id = [](int64_t one) { return one < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(one); };
    const std::vector<int64_t>& ends = tokenizer_->eos;
    const std::pair<const char*, nlohmann::ordered_json> ids[] = {
        {"bos_token_id", id(tokenizer_->bos)},
        {"eos_token_id", ends.size() > 1 ? nlohmann::ordered_json(ends) : id(ends.empty() ? -1 : ends[0])},
        {"pad_token_id", id(tokenizer_->pad)}};
    auto generation = parse_ordered_json(files_.contains(kGeneration) ? files_[kGeneration] : "{}", kMaxJsonDepth,
                                         JsonNumbers::kPython);
    RT_CHECK(generation.ok() && generation.value().is_object(), "{} was not checked", kGeneration);
    nlohmann::ordered_json generates = std::move(generation).value();
    for (const auto& [key, value] : ids) {
      (*config)[key] = value;
      generates.erase(key);
      if (!value.is_null()) generates[key] = value;
    }
    if (generates.empty()) return;
    generates["transformers_version"] = (*config)["transformers_version"];
    files_[kGeneration] = python_json_text(generates, 2) + "\n";
  }

  DType dtype_of(int64_t output) const {
    return outputs_[static_cast<size_t>(output)].own_dtype.value_or(report_.dtype);
  }

  /// Index into the source's tensors for each tensor of the file when each is one logical tensor as it is, all of them:
  /// then the file can be a checkpoint's only one.
  std::optional<std::vector<int64_t>> logical_tensors(std::span<const int64_t> indices) const {
    if (report_.dtype != DType::kF32 || indices.size() != source_.tensors().size()) return std::nullopt;
    std::vector<int64_t> out;
    for (const int64_t index : indices) {
      const Output& output = outputs_[static_cast<size_t>(index)];
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
  std::optional<DType> origin_dtype_;  // of the folder that the run began with
  const ExportOptions& options_;
  ExportReport& report_;
  ckpt::IoBackend& io_;
  const RecipeDecoder& decode_;
  BlockFp8 blocks_;
  std::vector<Output> outputs_;
  std::map<std::string, std::string> files_;
  std::optional<TokenizerFiles> tokenizer_;  // that is exported as the recipe's; none: what the files say
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

std::string dtype_text(const ExportReport& report) {
  return fmt::format("{}{}", report.block_fp8 ? "fp8 in blocks, the rest " : "", dtype_name(report.dtype));
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
