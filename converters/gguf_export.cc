#include "converters/gguf_export.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <utility>

#include "converters/elements.h"
#include "converters/export.h"
#include "converters/family.h"
#include "converters/family_tensors.h"
#include "converters/gguf_model.h"
#include "converters/gguf_vocab.h"
#include "converters/hf_writer.h"
#include "converters/weights_folder.h"
#include "runtime/core/new_file.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlockElems = int64_t{1} << 20;

/// general.file_type.
uint32_t file_type(GgufType type) {
  switch (type) {
    case GgufType::kF32:
      return 0;
    case GgufType::kF16:
      return 1;
    case GgufType::kQ8_0:
      return 7;
    case GgufType::kBf16:
      return 32;
  }
  return 0;
}

GgufType type_of(DType dtype) {
  return dtype == DType::kBf16 ? GgufType::kBf16 : dtype == DType::kF16 ? GgufType::kF16 : GgufType::kF32;
}
DType dtype_of(GgufType type) {
  return type == GgufType::kF32 ? DType::kF32 : type == GgufType::kBf16 ? DType::kBf16 : DType::kF16;
}

class Exporter {
 public:
  Exporter(ckpt::IoBackend& io, const fs::path& source_dir, const fs::path& target, const GgufExportOptions& options,
           const RecipeDecoder& decode, GgufExportReport& report)
      : io_(io), source_dir_(source_dir), target_(target), options_(options), decode_(decode), report_(report) {}

  Status run() {
    RT_TRY(check_target());
    RT_TRY_SET(source_, CheckpointWeights::open(io_, source_dir_, decode_, options_.weights));
    RT_TRY(describe());
    remove_left_files(fs::absolute(target_).parent_path());
    RT_TRY_SET(NewFile file, NewFile::beside(target_));
    RT_TRY(write(file));
    if (options_.overwrite) return file.publish_durably();
    RT_TRY_SET(const bool free, file.publish_if_free(Durable::kYes));
    return free ? Status() : there_already();
  }

 private:
  Status there_already() const {
    return Error{ErrorCode::kInvalidInput, fmt::format("{}: exists; --overwrite replaces it", target_.string())};
  }

  Status check_target() const {
    std::error_code error;
    const fs::file_type type = fs::symlink_status(target_, error).type();
    if (type == fs::file_type::not_found) return {};
    if (type != fs::file_type::regular && type != fs::file_type::directory) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: is no regular file", target_.string())};
    }
    if (type == fs::file_type::directory) {
      return Error{ErrorCode::kInvalidInput, fmt::format("{}: is a folder\n  expected the name of a file, as in {}",
                                                         target_.string(), (target_ / "model.gguf").string())};
    }
    return options_.overwrite ? Status() : there_already();
  }

  /// Keys and tensors.
  Status describe() {
    RT_TRY_SET(ModelFiles files, gather_model_files(io_, *source_, source_dir_, options_.files, decode_));
    report_.warnings = files.warnings;
    RT_TRY_SET(const Family family, family_for(source_->model(), files.original_type()));
    report_.model_type = family.model_type;
    RT_TRY_SET(report_.architecture, gguf_architecture(family));
    nlohmann::ordered_json config = config_from_model(family, source_->model(), DType::kF32,
                                                      json_or_nothing(files.original_text(), JsonNumbers::kPython));
    keep_token_ids(files.original_text(), &config);
    config["transformers_version"] = written_for(family, source_->model()).version;
    files.settle_token_ids(&config);

    keys_.put("general.architecture", std::string_view(report_.architecture));
    keys_.put("general.type", "model");
    keys_.put("general.name", std::string_view(source_->manifest().run.name));
    const DType own = source_->imported_dtype().value_or(files.origin_dtype.value_or(DType::kF32));
    report_.type = options_.type.value_or(type_of(own));
    keys_.put("general.file_type", file_type(report_.type));
    if (report_.type == GgufType::kQ8_0) keys_.put("general.quantization_version", uint32_t{2});
    RT_TRY_SET(model_, gguf_model(family, *source_, report_.type, keys_));
    report_.warnings.insert(report_.warnings.end(), model_.warnings.begin(), model_.warnings.end());
    if (options_.files.without_tokenizer) {
      keys_.put("tokenizer.ggml.model", "no_vocab");
      return {};
    }
    return put_gguf_vocab(files.files, config, source_->model().vocab, keys_, &report_.warnings);
  }

  Status write(NewFile& file) {
    std::vector<GgufTensor> tensors;
    std::vector<Output> outputs;
    for (const GgufOutput& output : model_.outputs) {
      tensors.push_back(output.tensor);
      outputs.push_back(output.rows);
      total_ += gguf_padded(gguf_bytes(output.tensor.type, count_elems(output.tensor.shape)));
    }
    report_.tensors = std::ssize(tensors);
    report_.parameters = count_parameters(source_->model());
    report_.data_bytes = total_;
    const std::string head = gguf_head(keys_, tensors);
    if (const int error = ::posix_fallocate(file.fd(), 0, std::ssize(head) + total_); error != 0) {
      return os_error(error, target_.string());
    }
    RT_TRY(file.write(head));
    std::vector<int64_t> read;  // those that are logical tensors' rows
    for (int64_t k = 0; k < std::ssize(outputs); ++k) {
      if (!outputs[static_cast<size_t>(k)].runs.empty()) read.push_back(k);
    }
    const BlockFp8 none;
    RT_TRY_SET(const std::unique_ptr<TensorSource> source,
               open_outputs(source_dir_, *source_, outputs, DType::kF32, none, read));
    for (int64_t k = 0; k < std::ssize(outputs); ++k) RT_TRY(write_tensor(file, k, *source));
    if (!report_.not_finite.empty()) report_.warnings.push_back(not_finite_warning(report_.not_finite));
    return file.sync();
  }

  Status write_tensor(NewFile& file, int64_t index, TensorSource& source) {
    const GgufOutput& output = model_.outputs[static_cast<size_t>(index)];
    const GgufTensor& tensor = output.tensor;
    const int64_t elems = count_elems(tensor.shape), columns = column_count(tensor.shape);
    // Whole heads, where their rows change places.
    const int64_t unit = std::max<int64_t>(1, output.pair_rows) * columns;
    const int64_t at_once = output.pair_rows > 0 ? std::max<int64_t>(1, kBlockElems / unit) * unit : kBlockElems;
    bool finite = true;
    int64_t written = 0;
    for (int64_t first = 0; first < elems; first += at_once) {
      if (options_.cancel != nullptr && options_.cancel->load()) {
        return Error{ErrorCode::kStopped, fmt::format("{}: stopped", target_.string())};
      }
      values_.resize(static_cast<size_t>(std::min(at_once, elems - first)));
      if (output.rows.runs.empty()) {
        std::copy_n(output.values.begin() + first, values_.size(), values_.begin());
      } else {
        RT_TRY(source.fill(index, first, std::as_writable_bytes(std::span(values_))));
      }
      if (output.pair_rows > 0) pair_rows(output.pair_rows, columns);
      if (output.plus_one) std::ranges::for_each(values_, [](float& x) { x += 1.0f; });
      finite = finite && !any_not_finite(DType::kF32, std::as_bytes(std::span(values_)));
      RT_TRY(encode(tensor));
      RT_TRY(file.write({reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}));
      written += std::ssize(bytes_);
      done_ += std::ssize(bytes_);
      if (options_.progress) options_.progress(done_, total_);
    }
    if (!finite) report_.not_finite.push_back(tensor.name);
    const auto padding = static_cast<size_t>(gguf_padded(written) - written);
    done_ += static_cast<int64_t>(padding);
    return file.write(std::string(padding, '\0'));
  }

  /// Puts each head's rows of the second half between those of the first.
  void pair_rows(int64_t rows, int64_t columns) {
    other_.resize(values_.size());
    const int64_t half = rows / 2;
    for (int64_t row = 0; row < std::ssize(values_) / columns; ++row) {
      const int64_t head = row / rows, k = row % rows;
      const int64_t to = head * rows + (k < half ? 2 * k : 2 * (k - half) + 1);
      std::copy_n(values_.begin() + row * columns, columns, other_.begin() + to * columns);
    }
    std::swap(values_, other_);
  }

  Status encode(const GgufTensor& tensor) {
    bytes_.resize(static_cast<size_t>(gguf_bytes(tensor.type, std::ssize(values_))));
    const int64_t bad = tensor.type == GgufType::kQ8_0 ? to_q8(values_, bytes_.data())
                                                       : from_floats(dtype_of(tensor.type), values_, bytes_.data());
    if (bad < 0) return {};
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: holds {}, which {} cannot; --dtype bf16 or f32 can", tensor.name,
                             values_[static_cast<size_t>(bad)], gguf_type_name(tensor.type))};
  }

  ckpt::IoBackend& io_;
  const fs::path& source_dir_;
  const fs::path& target_;
  const GgufExportOptions& options_;
  const RecipeDecoder& decode_;
  GgufExportReport& report_;
  std::unique_ptr<CheckpointWeights> source_;
  GgufKeys keys_;
  GgufModel model_;
  std::vector<float> values_, other_;
  std::vector<std::byte> bytes_;
  int64_t done_ = 0, total_ = 0;
};

}  // namespace

Result<GgufExportReport> export_gguf(ckpt::IoBackend& io, const fs::path& checkpoint_dir, const fs::path& target,
                                     const GgufExportOptions& options, const RecipeDecoder& decode) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY(check_apart(checkpoint_dir, target));
  GgufExportReport report{.file = target};
  RT_TRY(Exporter(io, checkpoint_dir, target, options, decode, report).run());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::convert
