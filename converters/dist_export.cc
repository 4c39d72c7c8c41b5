#include "converters/dist_export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "ckpt/plan/save_plan.h"
#include "ckpt/position.h"
#include "converters/block_fp8.h"
#include "converters/family.h"
#include "converters/family_tensors.h"
#include "converters/hf_folder.h"
#include "converters/hf_writer.h"
#include "converters/torch_writer.h"
#include "converters/weights_folder.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"
#include "runtime/optim/lr_schedule.h"
#include "runtime/optim/rules/groups.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
namespace p = pickles;

constexpr const char* kMetadata = ".metadata";
constexpr const char* kMetadataTemporary = ".metadata.tmp";
constexpr const char* kMarker = ".cairn-export";  // from before the first part until .metadata exists
constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFilesModule = "torch.distributed.checkpoint.filesystem";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// Where a chunk or a value lies.
struct Stored {
  std::string file;
  TorchWriter::Place place;
};

/// The pickle of `.metadata`, entry by entry.
class Metadata {
 public:
  struct Chunk {
    Shape offsets, sizes;
    Stored at;
  };
  /// `path`: the keys of the dicts that the value was saved in.
  void add_tensor(const std::string& key, std::pair<std::string, std::string> path, std::string_view dtype,
                  const Shape& shape, const std::vector<Chunk>& chunks) {
    std::string list, strides;
    Shape stride(shape.size(), 1);
    for (size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
    for (const int64_t one : stride) strides += p::integer(one);
    for (size_t k = 0; k < chunks.size(); ++k) {
      list += object(kMetadataModule, "ChunkStorageMetadata",
                     p::text("offsets") + p::size(chunks[k].offsets) + p::text("sizes") + p::size(chunks[k].sizes));
      put(key, p::size(chunks[k].offsets), p::integer(static_cast<int64_t>(k)), chunks[k].at);
    }
    const std::string format = p::name(kMetadataModule, "_MEM_FORMAT_ENCODING") + p::tuple(p::integer(0)) + "R";
    const std::string properties =
        p::object(kMetadataModule, "TensorProperties",
                  p::tuple(p::name("torch", dtype) + p::name("torch.serialization", "_get_layout") +
                           p::tuple(p::text("torch.strided")) + "R" + p::boolean(false) + format + p::boolean(false) +
                           p::tuple(strides)));
    tensors_ += p::text(key) + object(kMetadataModule, "TensorStorageMetadata",
                                      p::text("properties") + properties + p::text("size") + p::size(shape) +
                                          p::text("chunks") + p::list(list));
    add_path(key, path);
  }
  void add_value(const std::string& key, std::pair<std::string, std::string> path, const Stored& at) {
    tensors_ += p::text(key) + p::object(kMetadataModule, "BytesStorageMetadata", "");
    put(key, std::string(p::kNone), std::string(p::kNone), at);
    add_path(key, path);
  }
  std::string pickle() const {
    return p::whole(object(kMetadataModule, "Metadata",
                           p::text("state_dict_metadata") + p::dict(tensors_) + p::text("planner_data") +
                               p::dict(paths_) + p::text("storage_data") + p::dict(storage_) + p::text("storage_meta") +
                               std::string(p::kNone) + p::text("version") + p::text("1.0.0")));
  }

 private:
  static std::string object(std::string_view module, std::string_view name, std::string_view fields) {
    return p::object(module, name, p::dict(fields));
  }
  void put(const std::string& key, const std::string& offset, const std::string& index, const Stored& at) {
    storage_ += object(kMetadataModule, "MetadataIndex",
                       p::text("fqn") + p::text(key) + p::text("offset") + offset + p::text("index") + index);
    storage_ += object(kFilesModule, "_StorageInfo",
                       p::text("relative_path") + p::text(at.file) + p::text("offset") + p::integer(at.place.begin) +
                           p::text("length") + p::integer(at.place.bytes) + p::text("transform_descriptors") +
                           std::string(p::kNone));
  }
  void add_path(const std::string& key, const std::pair<std::string, std::string>& path) {
    paths_ += p::text(key) + p::tuple(p::text(path.first) + p::text(path.second));
  }

  std::string tensors_, paths_, storage_;
};

/// .distcp files of rank 0, numbered.
class DistcpFiles {
 public:
  DistcpFiles(fs::path dir, int64_t file_bytes) : dir_(std::move(dir)), most_(file_bytes) {}
  Result<Stored> add(std::string_view pickle, std::span<const std::byte> storage) {
    if (!writer_ || writer_->bytes() >= most_) {
      RT_TRY(finish());
      name_ = fmt::format("__0_{}.distcp", count_++);
      RT_TRY_SET(TorchWriter made, TorchWriter::create(dir_ / name_));
      writer_.emplace(std::move(made));
    }
    RT_TRY_SET(const TorchWriter::Place place, writer_->add(pickle, storage));
    return Stored{name_, place};
  }
  Status finish() {
    if (writer_) RT_TRY(writer_->finish());
    writer_.reset();
    return {};
  }
  int64_t count() const { return count_; }

 private:
  fs::path dir_;
  int64_t most_;
  std::optional<TorchWriter> writer_;
  std::string name_;
  int64_t count_ = 0;
};

bool is_part(const std::string& name) { return matches("__0_*.distcp", name) || name == kMetadataTemporary; }

class Exporter {
 public:
  Exporter(ckpt::IoBackend& io, const fs::path& source_dir, const fs::path& target, const DistExportOptions& options,
           const RecipeDecoder& decode, DistExportReport& report)
      : io_(io),
        source_dir_(source_dir),
        target_(target),
        options_(options),
        decode_(decode),
        report_(report),
        files_(target, options.file_bytes) {}

  Status run() {
    RT_TRY(open());
    RT_TRY(take_folder());
    Status done = write();
    std::error_code error;
    if (fs::symlink_status(target_ / kMetadata, error).type() == fs::file_type::not_found) {
      if (done.ok()) done = invalid(fmt::format("{}: {} is gone", target_.string(), kMetadata));
      remove_parts();
    } else if (!done.ok()) {
      return std::move(done).with("the checkpoint is whole and stays; whether it outlasts a power cut is not known");
    }
    fs::remove(target_ / kMarker, error);
    if (error) {
      report_.warnings.push_back(fmt::format("{}: {}; remove it", (target_ / kMarker).string(), error.message()));
    }
    return done;
  }

 private:
  Status open() {
    const WeightsOf kinds[] = {WeightsOf::kTraining, WeightsOf::kFirstMoment, WeightsOf::kSecondMoment};
    RT_TRY_SET(kinds_[0], CheckpointWeights::open(io_, source_dir_, decode_, kinds[0]));
    const ckpt::Manifest& manifest = kinds_[0]->manifest();
    const OptimizerKind optimizer = kinds_[0]->recipe().optimizer.kind;
    report_.moments = !options_.weights_only && ckpt::has_moments(manifest);
    if (!options_.weights_only && !report_.moments) {
      report_.warnings.emplace_back("the checkpoint has no optimizer state: only weights are written");
    }
    if (report_.moments && optimizer != OptimizerKind::kAdamW) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("{}: its optimizer is not AdamW, and its state means something else to torch's\n"
                               "  expected a checkpoint of a run with T.adamw\n"
                               "  `--weights-only` writes the weights",
                               source_dir_.string())};
    }
    for (size_t k = 1; k < 3 && report_.moments; ++k) {
      RT_TRY_SET(kinds_[k], CheckpointWeights::open(io_, source_dir_, decode_, kinds[k]));
    }
    RT_TRY_SET(position_, ckpt::position_of(manifest));
    report_.step = position_.step;
    report_.adam_step = std::max<int64_t>(
        0, position_.step - position_.loss_scale.skipped - position_.guards.skipped - position_.past.moments_from);
    for (const std::string& name : kinds_[0]->files()) {
      if (!is_passed_file(name) && name != kConfigFile) continue;
      RT_TRY_SET(texts_[name], kinds_[0]->file(name));
    }
    const nlohmann::json original = json_or_nothing(texts_[std::string(kConfigFile)], JsonNumbers::kPython);
    const bool typed = original.is_object() && original.contains("model_type") && original["model_type"].is_string();
    RT_TRY_SET(const Family family,
               family_for(kinds_[0]->model(), typed ? original["model_type"].get<std::string>() : ""));
    report_.model_type = family.model_type;
    texts_[std::string(kConfigFile)] =
        json_text(config_from_model(family, kinds_[0]->model(), DType::kF32, original), 2) + "\n";
    outputs_ = outputs_of(family, *kinds_[0], nullptr);
    head_name_ = head_name(family);
    return report_.moments ? settle_rates() : Status();
  }

  optim::TensorRates rates_of(const OutputRun& run) const {
    return optim::rates_of(kinds_[0]->recipe().optimizer, kinds_[0]->tensors()[static_cast<size_t>(run.source)]);
  }

  /// The rate and the decay of each output, with the groups of the recipe.
  Status settle_rates() {
    for (const Output& output : outputs_) {
      const optim::TensorRates rates = rates_of(output.runs.front());
      for (const OutputRun& run : output.runs) {
        const optim::TensorRates other = rates_of(run);
        if (other.lr == rates.lr && other.weight_decay == rates.weight_decay) continue;
        const auto name = [&](const OutputRun& of) {
          return kinds_[0]->tensors()[static_cast<size_t>(of.source)].name;
        };
        return Error{
            ErrorCode::kUnsupported,
            fmt::format("{}: optimizer.groups trains {} and {} differently, and {} of the family {} holds both\n"
                        "  expected one rate and one decay for all that a stored tensor holds\n"
                        "  `--weights-only` writes the weights",
                        source_dir_.string(), name(output.runs.front()), name(run), output.name, report_.model_type)};
      }
      rates_.push_back(rates);
    }
    return {};
  }

  /// Locks the target, empty but for what an export that was cut off has left.
  Status take_folder() {
    std::error_code error;
    fs::create_directories(target_, error);
    if (error) return os_error(error.value(), target_.string());
    lock_ = Fd(::open(target_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!lock_) return os_error(errno, target_.string());
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && !is_missing_call(errno)) {
      if (errno != EWOULDBLOCK) return os_error(errno, target_.string());
      return invalid(fmt::format("{}: another process exports into it", target_.string()));
    }
    std::vector<std::string> names;
    for (fs::directory_iterator it(target_, error), end; !error && it != end; it.increment(error)) {
      names.push_back(it->path().filename().string());
    }
    if (error) return os_error(error.value(), target_.string());
    if (std::ranges::count(names, kMetadata) > 0) {
      return invalid(fmt::format("{}: has a checkpoint of torch already; name another folder", target_.string()));
    }
    const bool ours = std::ranges::count(names, kMarker) > 0;
    for (const std::string& name : names) {
      if (ours && (name == kMarker || is_part(name) || texts_.contains(name))) continue;
      return invalid(fmt::format("{}: is not empty (it has {}); name another folder", target_.string(), name));
    }
    remove_parts();
    if (!ours) RT_TRY(write_text(kMarker, "An export of cairn that is not finished, or was cut off.\n"));
    RT_TRY(io_.sync_dir(target_));
    const Status named = io_.sync_dir(fs::absolute(target_ / "").parent_path().parent_path());
    if (!named.ok()) {
      report_.warnings.push_back(
          fmt::format("{}: its own name may not outlast a power cut: {}", target_.string(), named.error().message));
    }
    return {};
  }

  void remove_parts() {
    std::error_code ignored;
    std::vector<fs::path> parts;
    for (const auto& entry : fs::directory_iterator(target_, ignored)) {
      const std::string name = entry.path().filename().string();
      if (is_part(name) || texts_.contains(name)) parts.push_back(entry.path());
    }
    for (const fs::path& part : parts) fs::remove(part, ignored);
  }

  Status write() {
    int64_t elems = 0;
    for (const Output& output : outputs_) elems += count_elems(output.shape);
    report_.tensors = std::ssize(outputs_);
    report_.parameters = count_parameters(kinds_[0]->model());
    total_bytes_ = elems * int64_t{sizeof(float)} * (report_.moments ? 3 : 1);
    for (size_t k = 0; k < (report_.moments ? 3 : 1); ++k) RT_TRY(write_kind(k));
    if (report_.moments) {
      RT_TRY(write_settings());
      RT_TRY(write_position());
    }
    RT_TRY(files_.finish());
    report_.files = files_.count();
    report_.data_bytes = total_bytes_;
    for (const auto& [name, text] : texts_) RT_TRY(write_text(name, text));
    RT_TRY(io_.sync_dir(target_));
    RT_TRY(write_text(kMetadataTemporary, metadata_.pickle()));
    RT_TRY(io_.rename(target_ / kMetadataTemporary, target_ / kMetadata));
    return io_.sync_dir(target_);
  }

  Status write_text(const std::string& name, std::string_view text) {
    const fs::path path = target_ / name;
    const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd) return os_error(errno, path.string());
    if (write_fully(fd.get(), text) != std::ssize(text) || sync_to_disk(fd.get()) != 0) {
      return os_error(errno, path.string());
    }
    return {};
  }

  /// Chunks of whole rows, each an archive.
  Status write_kind(size_t kind) {
    static constexpr std::array<std::string_view, 3> kSuffixes = {"", ".exp_avg", ".exp_avg_sq"};
    std::vector<int64_t> all(outputs_.size());
    std::iota(all.begin(), all.end(), int64_t{0});
    const BlockFp8 none;
    RT_TRY_SET(const std::unique_ptr<TensorSource> source,
               open_outputs(source_dir_, *kinds_[kind], outputs_, DType::kF32, none, all));
    std::vector<std::byte> block;
    for (const int64_t k : all) {
      const Output& output = outputs_[static_cast<size_t>(k)];
      const int64_t rows = output.shape[0], elems = count_elems(output.shape), row = elems / rows;
      const int64_t at_once = std::clamp<int64_t>(options_.chunk_bytes / (row * int64_t{sizeof(float)}), 1, rows);
      std::vector<Metadata::Chunk> chunks;
      for (int64_t first = 0; first < rows; first += at_once) {
        if (options_.cancel != nullptr && options_.cancel->load()) {
          return Error{ErrorCode::kStopped, fmt::format("{}: stopped", target_.string())};
        }
        const int64_t count = std::min(at_once, rows - first);
        block.resize(static_cast<size_t>(count * row) * sizeof(float));
        RT_TRY(source->fill(k, first * row, block));
        Metadata::Chunk chunk{.offsets = Shape(output.shape.size(), 0), .sizes = output.shape};
        chunk.offsets[0] = first;
        chunk.sizes[0] = count;
        RT_TRY_SET(chunk.at, files_.add(p::whole(p::tensor("FloatStorage", chunk.sizes)), block));
        chunks.push_back(std::move(chunk));
        done_bytes_ += std::ssize(block);
        if (options_.progress) options_.progress(done_bytes_, total_bytes_);
      }
      const std::string name = kind == 0 ? output.name : fmt::format("state.{}{}", output.name, kSuffixes[kind]);
      const std::string top = kind == 0 ? "model" : "optimizer";
      metadata_.add_tensor(fmt::format("{}.{}", top, name), {top, name}, "float32", output.shape, chunks);
      if (kind == 0 && is_tied_embedding(output)) {  // a module's state dict has the head too
        metadata_.add_tensor("model." + head_name_, {"model", head_name_}, "float32", output.shape, chunks);
      }
    }
    return {};
  }

  bool is_tied_embedding(const Output& output) const {
    const bool has_head = std::ranges::any_of(outputs_, [&](const Output& o) { return o.name == head_name_; });
    return kinds_[0]->model().tied_embeddings && !has_head &&
           kinds_[0]->tensors()[static_cast<size_t>(output.runs.front().source)].name == "embed.tokens";
  }

  Status write_value(const std::string& top, const std::string& name, const std::string& value) {
    RT_TRY_SET(const Stored at, files_.add(p::whole(value), {}));
    metadata_.add_value(fmt::format("{}.{}", top, name), {top, name}, at);
    return {};
  }

  /// A tensor of one number.
  template <class T>
  Status write_number(const std::string& top, const std::string& name, std::string_view dtype,
                      std::string_view storage_class, T number) {
    RT_TRY_SET(const Stored at,
               files_.add(p::whole(p::tensor(storage_class, {})), std::as_bytes(std::span(&number, 1))));
    metadata_.add_tensor(fmt::format("{}.{}", top, name), {top, name}, dtype, {}, {{{}, {}, at}});
    return {};
  }

  double next_rate() const {
    const Recipe& recipe = kinds_[0]->recipe();
    if (recipe.stop.unit != Span::Unit::kSteps) return position_.lr;
    return optim::learning_rate(recipe, position_.step + 1, static_cast<int64_t>(recipe.stop.value), position_.past);
  }

  Status write_settings() {
    const OptimizerConfig& of = kinds_[0]->recipe().optimizer;
    const double rate = next_rate();
    const std::string none(p::kNone);
    std::map<std::string, Stored> written;  // equal values once
    for (size_t k = 0; k < outputs_.size(); ++k) {
      const Output& output = outputs_[k];
      RT_TRY(write_number("optimizer", fmt::format("state.{}.step", output.name), "float32", "FloatStorage",
                          static_cast<float>(report_.adam_step)));
      const std::pair<std::string_view, std::string> settings[] = {
          {"lr", p::real(rate * rates_[k].lr)},
          {"initial_lr", p::real(of.peak_lr * rates_[k].lr)},
          {"betas", p::tuple(p::real(of.beta1) + p::real(of.beta2))},
          {"eps", p::real(of.eps)},
          {"weight_decay", p::real(rates_[k].weight_decay)},
          {"amsgrad", p::boolean(false)},
          {"maximize", p::boolean(false)},
          {"foreach", none},
          {"capturable", p::boolean(false)},
          {"differentiable", p::boolean(false)},
          {"fused", none},
          {"decoupled_weight_decay", p::boolean(true)}};
      for (const auto& [name, value] : settings) {
        if (!written.contains(value)) {
          RT_TRY_SET(written[value], files_.add(p::whole(value), {}));
        }
        const std::string key = fmt::format("param_groups.{}.{}", output.name, name);
        metadata_.add_value("optimizer." + key, {"optimizer", key}, written[value]);
      }
    }
    return {};
  }

  Status write_position() {
    RT_TRY(write_number("train_state", "step", "int32", "IntStorage", static_cast<int32_t>(position_.step)));
    RT_TRY(write_number("train_state", "ntokens_seen", "int64", "LongStorage", position_.tokens));
    return write_value("lr_scheduler", "last_epoch", p::integer(position_.step));
  }

  ckpt::IoBackend& io_;
  const fs::path& source_dir_;
  const fs::path& target_;
  const DistExportOptions& options_;
  const RecipeDecoder& decode_;
  DistExportReport& report_;
  DistcpFiles files_;
  Metadata metadata_;
  Fd lock_;
  std::array<std::unique_ptr<CheckpointWeights>, 3> kinds_;
  trainer::TrainPosition position_;
  std::map<std::string, std::string> texts_;
  std::vector<Output> outputs_;
  std::string head_name_;
  std::vector<optim::TensorRates> rates_;  // of each of outputs_; without moments none
  int64_t done_bytes_ = 0, total_bytes_ = 0;
};

}  // namespace

Result<DistExportReport> export_dist(ckpt::IoBackend& io, const fs::path& checkpoint_dir, const fs::path& target,
                                     const DistExportOptions& options, const RecipeDecoder& decode) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY(check_apart(checkpoint_dir, target));
  DistExportReport report{.dir = target};
  RT_TRY(Exporter(io, checkpoint_dir, target, options, decode, report).run());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::convert
