#include "converters/weights_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "converters/elements.h"
#include "converters/safetensors.h"
#include "converters/torch_bin.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;
constexpr int64_t kMaxIndexDepth = 32;
constexpr int64_t kBlockBytes = int64_t{4} << 20;  // of a stored tensor in memory at a time
constexpr int64_t kPieceBytes = 4096;              // shorter pieces of rows are read with what lies between them

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\\') == name.npos &&
         name.find('\0') == name.npos;
}

/// Memory of the calling thread: reads come in thousands of pieces.
std::byte* scratch(int64_t bytes) {
  thread_local std::vector<std::byte> memory;
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
  return memory.data();
}

/// How scaled weights are stored.
struct Scheme {
  std::string suffix;                         // of the scale's name, after the weight's
  int64_t block_rows = 0, block_columns = 0;  // 0: not by blocks
};

Result<Scheme> blocks_of(Scheme scheme, const nlohmann::json& blocks, std::string_view what) {
  if (blocks.is_null()) return scheme;
  const auto whole = [](const nlohmann::json& n) { return n.is_number_integer() && n >= 1 && n <= (1 << 30); };
  if (!blocks.is_array() || blocks.size() != 2 || !whole(blocks[0]) || !whole(blocks[1])) {
    return invalid(fmt::format("{} must be two sizes or null, got {}", what, blocks.dump()));
  }
  scheme.block_rows = blocks[0].get<int64_t>();
  scheme.block_columns = blocks[1].get<int64_t>();
  return scheme;
}

/// Nothing: the weights are stored as they are.
Result<std::optional<Scheme>> scheme_of(const nlohmann::json& config) {
  const auto found = config.is_object() ? config.find("quantization_config") : config.end();
  if (!config.is_object() || found == config.end() || found->is_null()) return std::optional<Scheme>();
  const nlohmann::json& quant = *found;
  if (!quant.is_object() || !quant.contains("quant_method") || !quant["quant_method"].is_string()) {
    return invalid("quantization_config must be an object with a quant_method");
  }
  const std::string method = quant["quant_method"];
  if (method == "fp8") {
    const nlohmann::json blocks = quant.value("weight_block_size", nlohmann::json{128, 128});  // the class default
    RT_TRY_SET(Scheme scheme, blocks_of({"_scale_inv"}, blocks, "quantization_config.weight_block_size"));
    return std::optional(std::move(scheme));
  }
  if (method == "fbgemm_fp8") return std::optional(Scheme{"_scale"});
  if (method == "compressed-tensors") {
    const nlohmann::json format = quant.value("format", nlohmann::json());
    if (format == "float-quantized" || format == "naive-quantized") {
      Scheme scheme{"_scale"};
      const nlohmann::json groups = quant.value("config_groups", nlohmann::json::object());
      for (const auto& group : groups) {
        const auto weights = group.is_object() ? group.find("weights") : group.end();
        if (!group.is_object() || weights == group.end() || !weights->is_object()) continue;
        RT_TRY_SET(scheme, blocks_of(scheme, weights->value("block_structure", nlohmann::json()),
                                     "quantization_config: block_structure"));
      }
      return std::optional(std::move(scheme));
    }
    return unsupported(
        fmt::format("quantization_config: compressed-tensors in format {} cannot be read here; known: "
                    "\"float-quantized\" (fp8); use the folder that it was made from",
                    format.dump()));
  }
  return unsupported(
      fmt::format("quantization_config: quant_method \"{}\" cannot be read here; known: fp8, fbgemm_fp8, "
                  "compressed-tensors; use the folder that it was made from",
                  method));
}

/// The blocks for which a scale of this shape stands; nothing when it does not fit the weight.
std::optional<std::pair<int64_t, int64_t>> blocks_for(const Scheme& scheme, const Shape& weight, const Shape& scale) {
  const int64_t rows = row_count(weight), columns = column_count(weight);
  if (count_elems(scale) == 1) return std::pair(rows, columns);
  if (scale == Shape{rows, 1} || scale == Shape{rows}) return std::pair(int64_t{1}, columns);
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  if (scheme.block_rows > 0 && scale == Shape{blocks(rows, scheme.block_rows), blocks(columns, scheme.block_columns)}) {
    return std::pair(scheme.block_rows, scheme.block_columns);
  }
  return std::nullopt;
}

/// A number for activations, which only kernels that compute in eight bits need.
bool is_activation_scale(std::string_view name) {
  for (const std::string_view leaf : {".input_scale", ".input_scale_ub", ".activation_scale", ".activation_scale_inv",
                                      ".output_scale", ".k_scale", ".v_scale", ".q_scale"}) {
    if (name.ends_with(leaf)) return true;
  }
  return false;
}

}  // namespace

int64_t row_count(const Shape& shape) {
  const int64_t columns = column_count(shape);
  return columns == 0 ? 0 : count_elems(shape) / columns;
}
int64_t column_count(const Shape& shape) { return shape.size() < 2 ? 1 : shape.back(); }

Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size) {
  RT_TRY_SET(const nlohmann::json index, parse_json_strictly(text, "the index", kMaxIndexDepth));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    return corrupt("\"weight_map\" is missing or no object; expected {tensor name: file name}");
  }
  std::map<std::string, std::string> out;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !is_plain_name(file.get_ref<const std::string&>())) {
      return corrupt(fmt::format("\"weight_map\".\"{}\" = {}: must be the name of a file in this folder", name,
                                 file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
    }
    out[name] = file.get<std::string>();
  }
  if (out.empty()) return corrupt("\"weight_map\" is empty");
  if (total_size != nullptr) {
    *total_size = 0;
    const auto metadata = index.find("metadata");
    if (metadata != index.end() && metadata->is_object() && metadata->contains("total_size") &&
        (*metadata)["total_size"].is_number_integer()) {
      *total_size = (*metadata)["total_size"].get<int64_t>();
    }
  }
  return out;
}

namespace {

Result<std::unique_ptr<WeightsFile>> open_file(const fs::path& path) {
  if (path.extension() == ".bin") {
    RT_TRY_SET(std::unique_ptr<TorchBinFile> file, TorchBinFile::open(path));
    return std::unique_ptr<WeightsFile>(std::move(file));
  }
  RT_TRY_SET(SafetensorsFile file, SafetensorsFile::open(path));
  return std::unique_ptr<WeightsFile>(std::make_unique<SafetensorsFile>(std::move(file)));
}

}  // namespace

Result<WeightsFolder> WeightsFolder::open(const fs::path& dir, const nlohmann::json& config) {
  WeightsFolder out;
  bool found = false;
  for (const auto& [single, index] : {std::pair(kSingleFile, kIndexFile), std::pair(kSingleBin, kBinIndex)}) {
    if (found) break;
    if (is_plain_file(dir / single)) {
      if (is_plain_file(dir / index)) {
        out.warnings_.push_back(
            fmt::format("both {} and {} are there: the single file is read, as transformers does", single, index));
      }
      RT_TRY_SET(std::unique_ptr<WeightsFile> file, open_file(dir / single));
      out.files_.push_back(std::move(file));
      found = true;
    } else if (is_plain_file(dir / index)) {
      RT_TRY(out.open_index(dir, index));
      found = true;
    }
  }
  if (!found) {
    return invalid(fmt::format("{}: has no weights; expected {}, {}, {} or {}", dir.string(), kSingleFile, kIndexFile,
                               kSingleBin, kBinIndex));
  }
  for (const auto& file : out.files_) {
    for (const SafeTensor& tensor : file->tensors())
      out.tensors_.push_back({tensor.name, tensor.dtype, tensor.shape, file.get(), &tensor});
  }
  RT_TRY(out.settle_scales(config).with(dir.string()));
  out.tell_strays(dir);
  return out;
}

WeightsFolder WeightsFolder::of(std::unique_ptr<WeightsFile> file) {
  WeightsFolder out;
  for (const SafeTensor& tensor : file->tensors())
    out.tensors_.push_back({tensor.name, tensor.dtype, tensor.shape, file.get(), &tensor});
  out.files_.push_back(std::move(file));
  return out;
}

bool WeightsFolder::has_weights(const fs::path& dir) {
  const std::string_view names[] = {kSingleFile, kIndexFile, kSingleBin, kBinIndex};
  return std::ranges::any_of(names, [&](std::string_view name) { return is_plain_file(dir / name); });
}

Status WeightsFolder::open_index(const fs::path& dir, std::string_view index) {
  const fs::path path = dir / index;
  RT_TRY_SET(const std::string text, read_text_file(path, kMaxIndexBytes));
  int64_t total_size = 0;
  auto parsed = parse_index(text, &total_size);
  if (!parsed.ok()) return std::move(parsed).error().with(path.string());
  const std::map<std::string, std::string> map = std::move(parsed).value();
  const std::string_view extension = index == kBinIndex ? ".bin" : ".safetensors";
  std::set<std::string> used;
  std::string problems;
  for (const auto& [tensor, file] : map) {
    if (!used.insert(file).second) continue;
    if (!file.ends_with(extension)) {
      problems += fmt::format("\n  {}: is no {} file", file, extension);
    } else if (!is_plain_file(dir / file)) {
      problems += fmt::format("\n  {}: the file is missing", file);
    }
  }
  if (!problems.empty()) return invalid(fmt::format("{}: names files that are not there:{}", path.string(), problems));
  std::map<std::string, std::string> seen;  // tensor -> file that holds it
  int64_t data_bytes = 0;
  for (const std::string& name : used) {
    RT_TRY_SET(std::unique_ptr<WeightsFile> opened, open_file(dir / name));
    files_.push_back(std::move(opened));
    for (const SafeTensor& tensor : files_.back()->tensors()) {
      data_bytes += tensor.end - tensor.begin;
      const auto listed = map.find(tensor.name);
      if (!seen.emplace(tensor.name, name).second) {
        problems += fmt::format("\n  {}: is in {} and in {}", tensor.name, seen[tensor.name], name);
      } else if (listed == map.end()) {
        problems += fmt::format("\n  {}: is in {}, the index does not list it", tensor.name, name);
      } else if (listed->second != name) {
        problems += fmt::format("\n  {}: is in {}, the index says {}", tensor.name, name, listed->second);
      }
    }
  }
  for (const auto& [tensor, file] : map) {
    if (!seen.contains(tensor)) problems += fmt::format("\n  {}: is not in {}, which the index names", tensor, file);
  }
  if (!problems.empty()) return corrupt(fmt::format("{}: does not fit its files:{}", path.string(), problems));
  if (total_size != 0 && total_size != data_bytes) {
    warnings_.push_back(fmt::format("{}: total_size = {}, the tensors have {} bytes", index, total_size, data_bytes));
  }
  index_ = index;
  return {};
}

Status WeightsFolder::settle_scales(const nlohmann::json& config) {
  RT_TRY_SET(const std::optional<Scheme> scheme, scheme_of(config));
  std::map<std::string_view, const FolderTensor*> by_name;
  for (const FolderTensor& tensor : tensors_) by_name[tensor.name] = &tensor;
  std::set<std::string> used;  // names of scales that have their weight
  std::vector<FolderTensor> settled;
  std::string problems;
  for (const FolderTensor& tensor : tensors_) {
    if (!is_fp8_dtype(tensor.dtype)) continue;
    const auto place = [&] { return fmt::format("\n  {}: {} {}", tensor.file_name(), tensor.name, tensor.dtype); };
    if (!scheme) {
      problems += place() + ": config.json has no quantization_config that says how it is scaled";
      continue;
    }
    const auto scale = by_name.find(tensor.name + scheme->suffix);
    if (scale == by_name.end()) {
      problems += place() + fmt::format(": its scale {}{} is missing", tensor.name, scheme->suffix);
      continue;
    }
    const FolderTensor& found = *scale->second;
    const auto blocks = blocks_for(*scheme, tensor.shape, found.shape);
    if (!blocks || (!is_float_dtype(found.dtype) && found.dtype != "F8_E8M0")) {
      problems += place() + fmt::format(" {}: its scale {} {} {} does not fit (weight blocks: {} x {})",
                                        to_string(tensor.shape), found.name, found.dtype, to_string(found.shape),
                                        scheme->block_rows, scheme->block_columns);
      continue;
    }
    used.insert(found.name);
    FolderTensor scaled = tensor;
    scaled.dtype = "F32";
    scaled.scale_file = found.file;
    scaled.scale = found.stored;
    std::tie(scaled.block_rows, scaled.block_columns) = *blocks;
    settled.push_back(std::move(scaled));
  }
  if (!problems.empty()) return invalid("weights of eight bits without usable scales:" + problems);
  if (!scheme) return {};
  quantised_ = !settled.empty();
  for (const FolderTensor& tensor : tensors_) {
    if (is_fp8_dtype(tensor.dtype) || used.contains(tensor.name) || is_activation_scale(tensor.name)) continue;
    settled.push_back(tensor);
  }
  tensors_ = std::move(settled);
  return {};
}

void WeightsFolder::tell_strays(const fs::path& dir) {
  std::set<std::string> used;
  for (const auto& file : files_) used.insert(file->path().filename().string());
  std::error_code error;
  std::vector<std::string> stray;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool weights = (name.starts_with("model") && name.ends_with(".safetensors")) ||
                         (name.starts_with("pytorch_model") && name.ends_with(".bin"));
    if (weights && !used.contains(name)) stray.push_back(name);
  }
  std::sort(stray.begin(), stray.end());
  for (const std::string& name : stray) warnings_.push_back(fmt::format("{}: nothing names this file, not read", name));
}

Status WeightsFolder::read(const FolderTensor& tensor, int64_t first, int64_t count, float* out) const {
  if (tensor.scale != nullptr) {
    const int64_t columns = column_count(tensor.shape);
    for (const Box& box : boxes_of_flat_range({row_count(tensor.shape), columns}, first, first + count)) {
      RT_TRY(read_rect(tensor, box.lo[0], box.extent(0), box.lo[1], box.extent(1), out));
      out += box.count_elems();
    }
    return {};
  }
  const std::string& dtype = tensor.stored->dtype;
  const int64_t elem = safetensors_dtype_bits(dtype) / 8;
  if (dtype == "F32")
    return tensor.file->read(*tensor.stored, first * elem, count * elem, reinterpret_cast<std::byte*>(out));
  for (int64_t at = 0; at < count;) {
    const int64_t n = std::min(count - at, kBlockBytes / elem);
    std::byte* block = scratch(kBlockBytes);
    RT_TRY(tensor.file->read(*tensor.stored, (first + at) * elem, n * elem, block));
    to_floats(dtype, block, n, out + at);
    at += n;
  }
  return {};
}

Status WeightsFolder::read_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                float* out) const {
  const int64_t width = column_count(tensor.shape);
  RT_CHECK(row >= 0 && rows >= 0 && row + rows <= row_count(tensor.shape) && column >= 0 && columns >= 0 &&
               column + columns <= width,
           "{}: rows {}+{}, columns {}+{} of {}", tensor.name, row, rows, column, columns, to_string(tensor.shape));
  if (tensor.scale == nullptr && columns == width) return read(tensor, row * width, rows * columns, out);
  const std::string& dtype = tensor.stored->dtype;
  const int64_t elem = safetensors_dtype_bits(dtype) / 8;
  // Long pieces by themselves; short ones with their whole rows, many rows at a time.
  const bool whole = columns == width || columns * elem < kPieceBytes;
  const int64_t from = whole ? 0 : column, line = whole ? width : columns;
  const int64_t at_once = whole ? std::max<int64_t>(1, kBlockBytes / (line * elem)) : 1;
  for (int64_t done = 0; done < rows; done += at_once) {
    const int64_t n = std::min(at_once, rows - done);
    std::byte* block = scratch(n * line * elem);
    RT_TRY(tensor.file->read(*tensor.stored, ((row + done) * width + from) * elem, n * line * elem, block));
    for (int64_t r = 0; r < n; ++r)
      to_floats(dtype, block + (r * line + column - from) * elem, columns, out + (done + r) * columns);
  }
  if (tensor.scale == nullptr) return {};
  return scale_rect(tensor, row, rows, column, columns, out);
}

Status WeightsFolder::scale_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                 float* out) const {
  const int64_t per_line = (column_count(tensor.shape) + tensor.block_columns - 1) / tensor.block_columns;
  const int64_t elem = safetensors_dtype_bits(tensor.scale->dtype) / 8;
  std::vector<std::byte> raw(static_cast<size_t>(per_line * elem));
  std::vector<float> scales(static_cast<size_t>(per_line));
  int64_t held = -1;  // line of the scales
  for (int64_t r = 0; r < rows; ++r, out += columns) {
    const int64_t line = (row + r) / tensor.block_rows;
    if (line != held) {
      RT_TRY(tensor.scale_file->read(*tensor.scale, line * per_line * elem, per_line * elem, raw.data()));
      to_floats(tensor.scale->dtype, raw.data(), per_line, scales.data());
      held = line;
    }
    for (int64_t c = 0; c < columns; ++c) out[c] *= scales[static_cast<size_t>((column + c) / tensor.block_columns)];
  }
  return {};
}

}  // namespace cairn::convert
