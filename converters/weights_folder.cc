#include "converters/weights_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "converters/elements.h"
#include "converters/folder_kinds.h"
#include "converters/quantisation.h"
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

/// The name of a file in a folder or below it, as short as it goes; empty for one that leaves the folder.
std::string name_below(const std::string& name) {
  if (name.find('\\') != name.npos || name.find('\0') != name.npos) return {};
  const fs::path path = fs::path(name).lexically_normal();
  const bool below = !path.empty() && path.is_relative() && path.has_filename() && *path.begin() != ".." && path != ".";
  return below ? path.string() : std::string();
}

/// Memory of the calling thread: reads come in thousands of pieces.
std::byte* scratch(int64_t bytes) {
  thread_local std::vector<std::byte> memory;
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
  return memory.data();
}

Error not_finite(const FolderTensor& tensor, std::string_view place, std::string_view found) {
  return corrupt(fmt::format("{}: {} {}: found {}, expected a finite number", tensor.file->path().string(),
                             tensor.stored->name, place, found));
}

}  // namespace

int64_t row_count(const Shape& shape) {
  const int64_t columns = column_count(shape);
  return columns == 0 ? 0 : count_elems(shape) / columns;
}
int64_t column_count(const Shape& shape) { return shape.size() < 2 ? 1 : shape.back(); }

Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size) {
  RT_TRY_SET(const nlohmann::json index,
             parse_json_strictly(text, "the index", kMaxIndexDepth, 0, JsonNumbers::kPython));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    return corrupt("\"weight_map\" is missing or no object; expected {tensor name: file name}");
  }
  std::map<std::string, std::string> out;
  for (const auto& [name, file] : map->items()) {
    std::string plain = file.is_string() ? name_below(file.get_ref<const std::string&>()) : std::string();
    if (plain.empty()) {
      return corrupt(fmt::format("\"weight_map\".\"{}\" = {}: must be the name of a file in this folder or below it",
                                 name, json_text(file)));
    }
    out[name] = std::move(plain);
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

/// NVIDIA's ModelOpt says how weights are quantised in a file of its own.
Status refuse_side_file(const fs::path& dir, const nlohmann::json& config) {
  constexpr std::string_view kSideFile = "hf_quant_config.json";
  if (!is_plain_file(dir / kSideFile) || config.contains("quantization_config")) return {};
  RT_TRY_SET(const std::string text, read_text_file(dir / kSideFile, kMaxIndexBytes));
  const nlohmann::json side = json_or_nothing(text, JsonNumbers::kPython);
  const auto pointer = nlohmann::json::json_pointer("/quantization/quant_algo");
  const bool named = side.is_object() && side.contains(pointer) && side[pointer].is_string();
  if (side.is_object() && side.contains(pointer) && side[pointer].is_null()) return {};
  return Error{
      ErrorCode::kUnsupported,
      fmt::format("{}: the weights are quantised by NVIDIA's ModelOpt{}, which is not read; take the model that "
                  "they were made from",
                  (dir / kSideFile).string(), named ? fmt::format(" ({})", side[pointer].get<std::string>()) : "")};
}

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
    return named(dir, invalid(fmt::format("{}: has no weights; expected {}, {}, {} or {}", dir.string(), kSingleFile,
                                          kIndexFile, kSingleBin, kBinIndex)));
  }
  for (const auto& file : out.files_) {
    for (const SafeTensor& tensor : file->tensors()) {
      if (out.unlisted_.contains(tensor.name)) continue;
      out.tensors_.push_back({tensor.name, tensor.dtype, tensor.shape, file.get(), &tensor});
    }
  }
  RT_TRY(refuse_side_file(dir, config));
  RT_TRY(join_quantised(config, out.tensors_).with(dir.string()));
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
      std::error_code error;
      const bool link = fs::is_symlink(dir / file, error);
      problems += fmt::format("\n  {}: {}", file,
                              link ? "is a link to nothing, as of a download that was cut off" : "the file is missing");
    }
  }
  if (!problems.empty()) return invalid(fmt::format("{}: names files that are not there:{}", path.string(), problems));
  std::map<std::string, std::string> seen;  // tensor -> file that holds it
  int64_t data_bytes = 0;
  for (const std::string& name : used) {
    RT_TRY_SET(std::unique_ptr<WeightsFile> opened, open_file(dir / name));
    files_.push_back(std::move(opened));
    for (const SafeTensor& tensor : files_.back()->tensors()) {
      const auto listed = map.find(tensor.name);
      if (listed == map.end()) {  // of another model that shares the file
        unlisted_.emplace(tensor.name, name);
        continue;
      }
      data_bytes += tensor.end - tensor.begin;
      if (!seen.emplace(tensor.name, name).second) {
        problems += fmt::format("\n  {}: is in {} and in {}", tensor.name, seen[tensor.name], name);
      } else if (listed->second != name) {
        problems += fmt::format("\n  {}: is in {}, the index says {}", tensor.name, name, listed->second);
      }
    }
  }
  for (const auto& [tensor, file] : map) {
    if (!seen.contains(tensor)) problems += fmt::format("\n  {}: is not in {}, which the index names", tensor, file);
  }
  if (!problems.empty()) return corrupt(fmt::format("{}: does not fit its files:{}", path.string(), problems));
  if (!unlisted_.empty()) {
    const auto& [tensor, file] = *unlisted_.begin();
    warnings_.push_back(fmt::format("{} does not list {} in {}{}: not read", index, tensor, file,
                                    unlisted_.size() > 1 ? fmt::format(" and {} more", unlisted_.size() - 1) : ""));
  }
  if (total_size != 0 && total_size != data_bytes) {
    warnings_.push_back(fmt::format("{}: total_size = {}, the tensors have {} bytes", index, total_size, data_bytes));
  }
  index_ = index;
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
  if (tensor.mxfp4) return read_mxfp4(tensor, row, rows, column, columns, out);
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
  const std::string_view dtype = tensor.scale->dtype == "U8" ? "F8_E8M0" : std::string_view(tensor.scale->dtype);
  const int64_t elem = safetensors_dtype_bits(dtype) / 8;
  std::vector<std::byte> raw(static_cast<size_t>(per_line * elem));
  std::vector<float> scales(static_cast<size_t>(per_line));
  int64_t held = -1;  // line of the scales
  for (int64_t r = 0; r < rows; ++r, out += columns) {
    const int64_t line = (row + r) / tensor.block_rows;
    if (line != held) {
      RT_TRY(tensor.scale_file->read(*tensor.scale, line * per_line * elem, per_line * elem, raw.data()));
      to_floats(dtype, raw.data(), per_line, scales.data());
      held = line;
    }
    for (int64_t c = 0; c < columns;) {
      const int64_t block = (column + c) / tensor.block_columns;
      const int64_t end = std::min(columns, (block + 1) * tensor.block_columns - column);
      const float scale = scales[static_cast<size_t>(block)];
      for (; c < end; ++c) out[c] *= scale;
    }
    const std::span<const float> made(out, static_cast<size_t>(columns));
    if (!any_not_finite(DType::kF32, std::as_bytes(made))) continue;
    const auto bad = std::ranges::find_if(made, [](float x) { return !std::isfinite(x); }) - made.begin();
    std::byte code{};
    RT_TRY(tensor.file->read(*tensor.stored, (row + r) * column_count(tensor.shape) + column + bad, 1, &code));
    const int64_t block = (column + bad) / tensor.block_columns;
    return not_finite(tensor, fmt::format("[{}, {}]", row + r, column + bad),
                      fmt::format("the {} code {:#04x}, times {} of {}", tensor.stored->dtype, static_cast<int>(code),
                                  scales[static_cast<size_t>(block)], tensor.scale->name));
  }
  return {};
}

Status WeightsFolder::read_codes(const FolderTensor& tensor, int64_t first, int64_t count, std::byte* out) const {
  RT_TRY(tensor.file->read(*tensor.stored, first, count, out));
  const std::span codes(out, static_cast<size_t>(count));
  const auto nan =
      std::ranges::find_if(codes, [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; });
  if (nan == codes.end()) return {};
  const int64_t at = first + (nan - codes.begin()), width = column_count(tensor.shape);
  return not_finite(tensor, fmt::format("[{}, {}]", at / width, at % width),
                    fmt::format("the {} code {:#04x}", tensor.stored->dtype, static_cast<int>(*nan)));
}

Status WeightsFolder::read_mxfp4(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                 float* out) const {
  constexpr int64_t kBytes = kMxfp4Group / 2;  // of a group
  const int64_t groups = column_count(tensor.shape) / kMxfp4Group;
  int64_t begin = column / kMxfp4Group, end = (column + columns + kMxfp4Group - 1) / kMxfp4Group;  // groups
  // As read_rect does: short pieces with their whole rows, many at a time.
  const bool whole = (end - begin) * kBytes < kPieceBytes;
  if (whole) begin = 0, end = groups;
  const int64_t line = end - begin;
  const int64_t at_once = whole ? std::clamp<int64_t>(kBlockBytes / (line * kMxfp4Group * 4), 1, rows) : 1;
  std::vector<std::byte> codes(static_cast<size_t>(at_once * line * kBytes)),
      scales(static_cast<size_t>(at_once * line));
  std::vector<float> floats(static_cast<size_t>(at_once * line * kMxfp4Group));
  for (int64_t done = 0; done < rows; done += at_once) {
    const int64_t n = std::min(at_once, rows - done), first = (row + done) * groups + begin;
    RT_TRY(tensor.file->read(*tensor.stored, first * kBytes, n * line * kBytes, codes.data()));
    RT_TRY(tensor.scale_file->read(*tensor.scale, first, n * line, scales.data()));
    if (const int64_t bad = from_mxfp4(codes.data(), scales.data(), n * line, floats.data()); bad >= 0) {
      const int64_t group = bad / kMxfp4Group, at = row + done + group / line, outputs = tensor.shape[1];
      return not_finite(
          tensor,
          fmt::format("[{}, {}, {}], number {}", at / outputs, at % outputs, begin + group % line, bad % kMxfp4Group),
          fmt::format("the code {:#04x}, times the scale {:#04x} of {}",
                      static_cast<int>(codes[static_cast<size_t>(bad / 2)]),
                      static_cast<int>(scales[static_cast<size_t>(group)]), tensor.scale->name));
    }
    for (int64_t r = 0; r < n; ++r) {
      std::copy_n(floats.data() + ((r * line - begin) * kMxfp4Group + column), columns, out + (done + r) * columns);
    }
  }
  return {};
}

Status WeightsFolder::read_turned(const FolderTensor& tensor, int64_t first, int64_t count, float* out) const {
  RT_CHECK(tensor.shape.size() == 3, "{} is {}", tensor.name, to_string(tensor.shape));
  constexpr int64_t kElems = kBlockBytes / int64_t{sizeof(float)};
  const int64_t rows = tensor.shape[1], columns = tensor.shape[2];
  std::vector<float> block;
  for (const Box& box : boxes_of_flat_range({tensor.shape[0], columns, rows}, first, first + count)) {
    const int64_t wide = box.extent(1), high = box.extent(2);  // of columns and rows of the stack
    const int64_t at_once = std::clamp<int64_t>(kElems / wide, 1, high);
    block.resize(static_cast<size_t>(at_once * wide));
    for (int64_t expert = box.lo[0]; expert < box.hi[0]; ++expert, out += wide * high) {
      for (int64_t row = 0; row < high; row += at_once) {
        const int64_t n = std::min(at_once, high - row);
        RT_TRY(read_rect(tensor, expert * rows + box.lo[2] + row, n, box.lo[1], wide, block.data()));
        transpose_into(block.data(), n, wide, out + row, high);
      }
    }
  }
  return {};
}

}  // namespace cairn::convert
