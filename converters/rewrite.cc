#include "converters/rewrite.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>

#include "converters/block_fp8.h"
#include "converters/elements.h"
#include "converters/hf_folder.h"
#include "converters/model_card.h"
#include "converters/safetensors.h"
#include "runtime/json/json.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kBlockElems = int64_t{1} << 20;
constexpr int64_t kMaxKeptBytes = int64_t{256} << 20;
constexpr int64_t kMaxThreads = 4;  // files at a time: 24 MiB each

/// A tensor of the new folder, and where its elements are in the old one.
struct Published {
  std::string name;
  Shape shape;
  const FolderTensor* from = nullptr;
  int64_t first = 0;               // element
  std::optional<DType> own_dtype;  // where it is not that of the others
  OutputPart part = OutputPart::kNumbers;
  Shape matrix;         // of which it is a part
  bool copied = false;  // a part that the old folder has as it is to be
};

/// Each stored tensor once, in the table's order, by the table's names. `one_dtype`: not each in its own. `blocks`:
/// null for none.
std::vector<Published> published_tensors(const HfFolder& folder, bool one_dtype, const BlockFp8* blocks) {
  const std::vector<Mapping> table = tensor_map(folder.family(), folder.model());
  std::vector<Published> out;
  std::set<std::string_view> seen;
  for (size_t k = 0; k < table.size(); ++k) {
    const Mapping &wanted = table[k], &found = folder.mappings()[k];
    const TensorSpec& tensor = folder.tensors()[static_cast<size_t>(wanted.tensor)];
    if (!seen.insert(wanted.stored).second) continue;
    out.push_back({.name = wanted.stored, .shape = wanted.shape, .from = folder.stored()[k].tensor});
    const auto own = folder.own_dtypes().find(tensor.name);
    if (!one_dtype && own != folder.own_dtypes().end()) {
      out.back().own_dtype = own->second;
    } else if (tensor.balances) {
      out.back().own_dtype = DType::kF32;  // as its class keeps it
    }
    if (out.back().from->mxfp4) {  // whose rows are columns of what is published
      RT_CHECK(wanted.transpose && !found.transpose && count_elems(wanted.shape) == count_elems(found.shape),
               "{} cannot be made from {}", wanted.stored, found.stored);
    } else if (found.stored != wanted.stored && found.shape != wanted.shape) {
      // Under another name, in a stack for one: rows that lie together, of a tensor that is published by itself.
      RT_CHECK(wanted.shape == tensor.shape && !wanted.transpose && !found.transpose && found.run == 0,
               "{} cannot be made from {}", wanted.stored, found.stored);
      out.back().first = found.first * column_count(wanted.shape);
    }
    if (blocks == nullptr || !blocks->holds(tensor, wanted)) continue;
    const FolderTensor& from = *out.back().from;
    out.back().part = OutputPart::kCodes;
    out.back().matrix = wanted.shape;
    out.back().copied = from.scale != nullptr && from.stored->dtype == "F8_E4M3" && from.scale->dtype == "F32" &&
                        from.shape == wanted.shape && from.block_rows == blocks->rows &&
                        from.block_columns == blocks->columns;
    Published scales = out.back();
    scales.name += kScaleSuffix;
    scales.shape = blocks->scales_of(wanted.shape);
    scales.part = OutputPart::kScales;
    out.push_back(std::move(scales));
  }
  return out;
}

class FolderTensors final : public TensorSource {
 public:
  FolderTensors(const HfFolder& folder, const std::vector<Published>& tensors, DType dtype, const BlockFp8& blocks)
      : folder_(folder), tensors_(tensors), dtype_(dtype), shape_(blocks) {}

  Status fill(int64_t tensor, int64_t first, std::span<std::byte> out) override {
    const Published& published = tensors_[static_cast<size_t>(tensor)];
    const FolderTensor& from = *published.from;
    if (published.part != OutputPart::kNumbers) return fill_part(tensor, first, out);
    first += published.first;
    const DType dtype = published.own_dtype.value_or(dtype_);
    const int64_t elem = dtype_size_bytes(dtype), count = static_cast<int64_t>(out.size()) / elem;
    if (from.scale == nullptr && from.dtype == safetensors_dtype_name(dtype))
      return from.file->read(*from.stored, first * elem, count * elem, out.data());
    floats_.resize(static_cast<size_t>(kBlockElems));
    for (int64_t at = 0; at < count; at += kBlockElems) {
      const std::span<float> block = std::span(floats_).first(static_cast<size_t>(std::min(kBlockElems, count - at)));
      const auto size = static_cast<int64_t>(block.size());
      RT_TRY(from.mxfp4 ? folder_.weights().read_turned(from, first + at, size, block.data())
                        : folder_.weights().read(from, first + at, size, block.data()));
      if (const int64_t bad = from_floats(dtype, block, out.data() + at * elem); bad >= 0) {
        return Error{ErrorCode::kUnsupported,
                     fmt::format("{}: {} holds {}, f16 ends at {}; convert to bf16 or f32", from.file->path().string(),
                                 from.name, block[static_cast<size_t>(bad)], kMaxF16)};
      }
    }
    return {};
  }

 private:
  Status fill_part(int64_t tensor, int64_t first, std::span<std::byte> out) {
    const Published& published = tensors_[static_cast<size_t>(tensor)];
    const FolderTensor& from = *published.from;
    const bool codes = published.part == OutputPart::kCodes;
    if (published.copied && codes) return folder_.weights().read_codes(from, first, std::ssize(out), out.data());
    if (published.copied) {
      constexpr int64_t kElem = sizeof(float);
      RT_TRY(from.scale_file->read(*from.scale, first * kElem, std::ssize(out), out.data()));
      if (!any_not_finite(DType::kF32, out)) return {};
      return Error{ErrorCode::kCorrupt, fmt::format("{}: {}: found a NaN or an infinity, expected finite scales",
                                                    from.scale_file->path().string(), from.scale->name)};
    }
    if (blocks_of_ != tensor) {
      const auto read = [this, &from, first_of = published.first](int64_t element, std::span<float> values) {
        return folder_.weights().read(from, first_of + element, std::ssize(values), values.data());
      };
      blocks_.emplace(published.name, published.matrix, shape_, read);
      blocks_of_ = tensor;
    }
    return codes ? blocks_->codes(first, out) : blocks_->scales(first, out);
  }

  const HfFolder& folder_;
  const std::vector<Published>& tensors_;
  DType dtype_;
  const BlockFp8& shape_;
  std::optional<BlockTensors> blocks_;  // of this tensor
  int64_t blocks_of_ = -1;
  std::vector<float> floats_;
};

/// The source's config.json in the form that both transformers lines read: its own keys, over them those of the
/// family's table, without what speaks of code or of weights as they were stored.
Result<std::string> clean_config(const HfFolder& folder, DType dtype, const nlohmann::ordered_json& quantisation) {
  RT_TRY_SET(nlohmann::ordered_json out, parse_ordered_json(folder.config_text(), kMaxJsonDepth, JsonNumbers::kPython));
  if (!out.is_object()) return Error{ErrorCode::kInternal, "config.json was an object before"};
  if (!folder.family().architecture.empty()) {
    nlohmann::ordered_json ours = config_from_model(folder.family(), folder.model(), dtype,
                                                    json_or_nothing(folder.config_text(), JsonNumbers::kPython));
    keep_token_ids(folder.config_text(), &ours);
    // The 5.x form of what the table says in the 4.x form would be a second truth.
    for (const char* key : {"rope_parameters"}) {
      if (!ours.contains(key)) out.erase(key);
    }
    for (const auto& [key, value] : ours.items()) out[key] = value;
  }
  for (const char* key : {"dtype", "auto_map", "quantization_config", "_name_or_path"}) out.erase(key);
  out["torch_dtype"] = dtype == DType::kBf16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32";
  out["tie_word_embeddings"] = folder.model().tied_embeddings;
  out["transformers_version"] = written_for(folder.family(), folder.model()).version;
  if (!quantisation.is_null()) out["quantization_config"] = quantisation;
  return python_json_text(out, 2) + "\n";
}

}  // namespace

Result<ExportReport> rewrite_hf(const fs::path& source, const fs::path& target, const RewriteOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY(check_export_dtype(options.to.dtype));
  std::error_code error;
  if (fs::equivalent(source, target, error) && !error) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: the source would be replaced; name another folder", source.string())};
  }
  RT_TRY(check_hf_target(target, options.to.overwrite));
  RT_TRY_SET(const std::unique_ptr<HfFolder> folder,
             HfFolder::open(source, {.untie = options.untie, .drop_mtp = options.drop_mtp}));
  for (const auto& file : folder->weights().files()) RT_TRY(file->verify());

  ExportReport report;
  report.dtype = options.to.dtype.value_or(folder->dtype() == DType::kF64 ? DType::kF32 : folder->dtype());
  report.model_type = folder->family().model_type;
  report.warnings = folder->warnings();
  if (folder->family().own_code) report.warnings.push_back(own_code_warning(folder->family()));
  if (WrittenFor line = written_for(folder->family(), folder->model()); !line.warning.empty())
    report.warnings.push_back(std::move(line.warning));
  HfOutput output{.dtype = report.dtype};
  const BlockFp8 blocks = BlockFp8::like(json_or_nothing(folder->config_text(), JsonNumbers::kPython));
  nlohmann::ordered_json quantisation;
  if (options.to.block_fp8) {
    RT_TRY(check_block_fp8(folder->family()));
    quantisation = blocks.config();
    report.block_fp8 = true;
  }
  const std::vector<Published> tensors =
      published_tensors(*folder, options.to.dtype.has_value(), options.to.block_fp8 ? &blocks : nullptr);
  for (const Published& tensor : tensors)
    output.tensors.push_back({tensor.name, tensor.shape, tensor.own_dtype, tensor.part});
  for (const std::string& name : folder->kept_files()) {
    RT_TRY_SET(std::string text, read_text_file(source / name, kMaxKeptBytes));
    if (name == kIndexFile) {
      output.split = split_of_index(output.tensors, text);
    } else if (name != kConfigFile) {
      output.texts[name] = std::move(text);
    }
  }
  RT_TRY_SET(output.texts[std::string(kConfigFile)], clean_config(*folder, report.dtype, quantisation));
  std::string& card = output.texts[std::string(kCardFile)];
  if (is_plain_file(source / kCardFile)) {  // the model's own stays with it
    RT_TRY(check_inside(source, kCardFile));
    RT_TRY_SET(card, read_text_file(source / kCardFile, kMaxKeptBytes));
  } else {
    card = model_card(
        {.name = fs::absolute(target / "", error).lexically_normal().parent_path().filename().string(),
         .model_type = report.model_type,
         .dtype = dtype_text(report),
         .parameters = count_parameters(folder->model()),
         .lineage = {fmt::format("converted from the folder `{}`, whose weights are {}",
                                 fs::absolute(source / "", error).lexically_normal().parent_path().filename().string(),
                                 dtype_name(folder->dtype()))}});
  }
  output.source = folder->identity();
  const OpenTensors open = [&](std::span<const int64_t>) -> Result<std::unique_ptr<TensorSource>> {
    return std::unique_ptr<TensorSource>(std::make_unique<FolderTensors>(*folder, tensors, report.dtype, blocks));
  };
  RT_TRY_SET(const HfWriteReport written, write_hf_folder(target, output, open,
                                                          {.max_shard_bytes = options.to.max_shard_bytes,
                                                           .overwrite = options.to.overwrite,
                                                           .threads = kMaxThreads,
                                                           .cancel = options.to.cancel,
                                                           .progress = options.to.progress,
                                                           .make_io = options.to.make_io}));
  report.dir = written.dir;
  report.tensors = written.tensors;
  report.parameters = written.parameters;
  report.data_bytes = written.data_bytes;
  report.shards = written.shards;
  report.files_passed = written.texts;
  report.taken_files = written.taken_files;
  report.taken_bytes = written.taken_bytes;
  report.not_finite = written.not_finite;
  if (!report.not_finite.empty()) report.warnings.push_back(not_finite_warning(report.not_finite));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::convert
