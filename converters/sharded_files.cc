#include "converters/sharded_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <set>

#include "converters/foreign_file.h"
#include "converters/safetensors.h"
#include "converters/torch_bin.h"
#include "converters/weights_folder.h"
#include "runtime/core/glob.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRankFiles[] = {"model_optim_rng.pt", "model_rng.pt"};
constexpr std::string_view kStatesSuffix = "_model_states.pt";
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int64_t kMaxRanks = 4096;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// A number of `digits` digits at the front of `text`, which is shortened; -1 when there is none.
int64_t take_number(std::string_view& text, size_t digits) {
  int64_t out = 0;
  if (text.size() < digits) return -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, out);
  if (error != std::errc() || end != text.data() + digits) return -1;
  text.remove_prefix(digits);
  return out;
}

struct RankFile {
  int64_t tensor_rank = 0, stage = 0;
  fs::path path;
};

/// mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_model_states.pt.
std::optional<RankFile> rank_file(const fs::path& entry) {
  const std::string name = entry.filename().string();
  std::string_view rest = name;
  constexpr std::string_view kFront = "mp_rank_";
  if (!rest.starts_with(kFront)) return std::nullopt;
  rest.remove_prefix(kFront.size());
  RankFile out{.tensor_rank = take_number(rest, 2)};
  if (out.tensor_rank < 0) return std::nullopt;
  if (rest == kStatesSuffix) {
    out.path = entry;
    return out;
  }
  if (rest.starts_with('_')) {
    rest.remove_prefix(1);
    out.stage = take_number(rest, 3);
  }
  if (out.stage < 0 || !rest.empty()) return std::nullopt;
  for (const std::string_view file : kRankFiles) {
    if (is_plain_file(entry / file)) out.path = entry / file;
  }
  return out.path.empty() ? std::nullopt : std::optional(out);
}

/// The files of ranks in a folder, or the only .pt file in it: the whole model.
Result<std::vector<RankFile>> rank_files(const fs::path& dir) {
  std::vector<RankFile> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (auto found = rank_file(entry.path())) out.push_back(std::move(*found));
  }
  if (error) return os_error(error.value(), dir.string());
  if (!out.empty()) return out;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".pt" && is_plain_file(entry.path())) out.push_back({.path = entry.path()});
  }
  if (error) return os_error(error.value(), dir.string());
  if (out.size() > 1) out.clear();  // who knows which
  return out;
}

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '\r')) text.pop_back();
  return text;
}

/// Of a name: the older spellings replaced by the table's.
std::string renamed(std::string name, std::span<const Rename> renames) {
  for (const auto& [from, to] : renames) {
    if (const size_t at = name.find(from); at != name.npos) name.replace(at, from.size(), to);
  }
  return name;
}

/// The number after "layers.", and where its digits are; no value for a tensor of no layer.
struct LayerNumber {
  size_t begin = 0, count = 0;
  int64_t value = 0;
};
std::optional<LayerNumber> layer_of(const std::string& name) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  if (at == name.npos) return std::nullopt;
  LayerNumber out{.begin = at + kLayers.size()};
  const char* const begin = name.data() + out.begin;
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), out.value);
  out.count = static_cast<size_t>(end - begin);
  return error == std::errc() ? std::optional(out) : std::nullopt;
}

Join join_of(const Family& family, const std::string& name) {
  for (const JoinRow& row : family.joins) {
    if (matches(row.stored, name)) return row.join;
  }
  return Join::kWhole;
}

int64_t elem_bytes(const SafeTensor& tensor) { return safetensors_dtype_bits(tensor.dtype) / 8; }

}  // namespace

Result<fs::path> pointed_folder(const fs::path& dir) {
  fs::path at = dir;
  for (const char* pointer : {"latest_checkpointed_iteration.txt", "latest"}) {
    if (!is_plain_file(dir / pointer)) continue;
    RT_TRY_SET(const std::string text, read_text_file(dir / pointer, 256));
    const std::string name = trimmed(text);
    const bool digits = !name.empty() && name.find_first_not_of("0123456789") == name.npos;
    const bool plain = !name.empty() && name.find('/') == name.npos && name != "." && name != "..";
    if (plain) at = dir / (digits && pointer != std::string_view("latest") ? fmt::format("iter_{:0>7}", name) : name);
    std::error_code error;
    if (!plain || !fs::is_directory(at, error)) {
      return invalid(fmt::format("{}: says \"{}\", and {} is no folder", (dir / pointer).string(), name, at.string()));
    }
    break;
  }
  return at;
}

Result<fs::path> find_sharded_files(const fs::path& dir) {
  RT_TRY_SET(const fs::path at, pointed_folder(dir));
  RT_TRY_SET(const std::vector<RankFile> files, rank_files(at));
  return files.empty() ? fs::path() : at;
}

Result<std::unique_ptr<ShardedFiles>> ShardedFiles::open(const fs::path& dir, const Family& family,
                                                         const ModelConfig& model) {
  RT_TRY_SET(const std::vector<RankFile> found, rank_files(dir));
  int64_t ranks = 0, stages = 0;
  for (const RankFile& file : found) {
    ranks = std::max(ranks, file.tensor_rank + 1);
    stages = std::max(stages, file.stage + 1);
  }
  if (ranks * stages > kMaxRanks || std::ssize(found) != ranks * stages) {
    return invalid(fmt::format("{}: has {} files of ranks, expected {} tensor-parallel ranks x {} stages", dir.string(),
                               found.size(), ranks, stages));
  }
  std::unique_ptr<ShardedFiles> out(new ShardedFiles());
  out->path_ = dir;
  int64_t first_layer = 0;
  std::set<std::string> names;
  for (int64_t stage = 0; stage < stages; ++stage) {
    std::map<std::string, Joined> here;
    int64_t layers = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto file =
          std::ranges::find_if(found, [&](const RankFile& f) { return f.tensor_rank == rank && f.stage == stage; });
      if (file == found.end()) {
        return invalid(
            fmt::format("{}: the file of tensor-parallel rank {}, stage {} is missing", dir.string(), rank, stage));
      }
      RT_TRY_SET(std::unique_ptr<TorchBinFile> opened, TorchBinFile::open(file->path, Pickle::kTraining));
      out->files_.push_back(std::move(opened));
      for (const SafeTensor& tensor : out->files_.back()->tensors()) {
        std::string name = renamed(tensor.name, family.renames);
        if (auto layer = layer_of(name)) {
          layers = std::max(layers, layer->value + 1);
          name.replace(layer->begin, layer->count, std::to_string(layer->value + first_layer));
        }
        if (is_ignored_tensor(family, name)) continue;
        here[name].parts.push_back({out->files_.back().get(), &tensor});
      }
    }
    for (auto& [name, joined] : here) {
      if (std::ssize(joined.parts) != ranks) {
        return invalid(fmt::format("{}: {} is in the files of {} of {} tensor-parallel ranks", dir.string(), name,
                                   joined.parts.size(), ranks));
      }
      if (!names.insert(name).second) return invalid(fmt::format("{}: {} is in two stages", dir.string(), name));
      joined.join = join_of(family, name);
      if (joined.join == Join::kGatedRows && !is_gated(model.activation)) joined.join = Join::kRows;
      RT_TRY(out->add(name, std::move(joined), model).with(dir.string()));
    }
    first_layer += layers;
  }
  return out;
}

Status ShardedFiles::add(const std::string& name, Joined joined, const ModelConfig& model) {
  const SafeTensor& first = *joined.parts.front().tensor;
  for (const Part& part : joined.parts) {
    if (part.tensor->shape != first.shape || part.tensor->dtype != first.dtype) {
      return invalid(fmt::format("{}: {} {} in {}, {} {} in {}", name, first.dtype, to_string(first.shape),
                                 joined.parts.front().file->path().string(), part.tensor->dtype,
                                 to_string(part.tensor->shape), part.file->path().string()));
    }
  }
  SafeTensor out = first;
  out.name = name;
  const auto ranks = std::ssize(joined.parts);
  const size_t dim = joined.join == Join::kColumns ? 1 : 0;
  if (joined.join != Join::kWhole) {
    if (first.shape.size() <= dim || (joined.join == Join::kGatedRows && first.shape[0] % 2 != 0)) {
      return invalid(fmt::format("{}: {} cannot be a rank's part of it", name, to_string(first.shape)));
    }
    out.shape[dim] *= ranks;
    if (joined.join == Join::kVocabRows) out.shape[0] = std::min(out.shape[0], model.vocab);
  }
  out.begin = 0;
  out.end = count_elems(out.shape) * elem_bytes(out);
  tensors_.push_back(std::move(out));
  joined_.push_back(std::move(joined));
  return {};
}

Status ShardedFiles::read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  const auto index = static_cast<size_t>(&tensor - tensors_.data());
  RT_CHECK(index < tensors_.size() && offset >= 0 && bytes >= 0 && offset + bytes <= tensor.end, "{} [{}, +{})",
           tensor.name, offset, bytes);
  const Joined& joined = joined_[index];
  const Shape& part_shape = joined.parts.front().tensor->shape;
  const int64_t elem = elem_bytes(tensor), columns = column_count(tensor.shape), part_rows = row_count(part_shape),
                part_columns = column_count(part_shape);
  RT_CHECK(offset % elem == 0 && bytes % elem == 0, "{}: [{}, +{}) cuts elements", tensor.name, offset, bytes);
  const int64_t end = (offset + bytes) / elem;
  for (int64_t at = offset / elem; at < end;) {
    const int64_t row = at / columns, column = at % columns;
    int64_t part = 0, from = at, run = end - at;  // elements [from, from + run) of that part
    switch (joined.join) {
      case Join::kWhole:
        break;
      case Join::kRows:
      case Join::kVocabRows:
        part = row / part_rows;
        from = at - part * part_rows * columns;
        run = (part + 1) * part_rows * columns - at;
        break;
      case Join::kColumns:
        part = column / part_columns;
        from = row * part_columns + column % part_columns;
        run = part_columns - column % part_columns;
        break;
      case Join::kGatedRows: {
        const int64_t half = row_count(tensor.shape) / 2, part_half = part_rows / 2;
        const int64_t in_half = row % half;
        part = in_half / part_half;
        from = (row / half * part_half + in_half % part_half) * columns + column;
        run = (part_half - in_half % part_half) * columns - column;
        break;
      }
    }
    run = std::min(run, end - at);
    const Part& source = joined.parts[static_cast<size_t>(part)];
    RT_TRY(source.file->read(*source.tensor, from * elem, run * elem, out));
    out += run * elem;
    at += run;
  }
  return {};
}

std::vector<fs::path> ShardedFiles::paths() const {
  std::vector<fs::path> out;
  for (const auto& file : files_) out.push_back(file->path());
  return out;
}

Status ShardedFiles::verify() const {
  for (const auto& file : files_) RT_TRY(file->verify());
  std::vector<std::byte> one(kBlockBytes), other(kBlockBytes);
  for (size_t k = 0; k < tensors_.size(); ++k) {
    if (joined_[k].join != Join::kWhole) continue;
    const Part& first = joined_[k].parts.front();
    for (const Part& part : joined_[k].parts) {
      for (int64_t at = 0; at < first.tensor->end && &part != &first; at += kBlockBytes) {
        const int64_t count = std::min(kBlockBytes, first.tensor->end - at);
        RT_TRY(first.file->read(*first.tensor, at, count, one.data()));
        RT_TRY(part.file->read(*part.tensor, at, count, other.data()));
        if (std::memcmp(one.data(), other.data(), static_cast<size_t>(count)) == 0) continue;
        return Error{ErrorCode::kCorrupt,
                     fmt::format("{}: {} and {} hold different copies of it; every rank should have the same",
                                 tensors_[k].name, first.file->path().string(), part.file->path().string())};
      }
    }
  }
  return {};
}

}  // namespace cairn::convert
