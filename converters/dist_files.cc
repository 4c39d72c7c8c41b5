#include "converters/dist_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "converters/flat_tensors.h"
#include "converters/foreign_file.h"
#include "converters/safetensors.h"
#include "converters/sharded_files.h"
#include "converters/weights_folder.h"
#include "runtime/core/glob.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetadataFile = ".metadata";
constexpr int64_t kMaxMetadataBytes = int64_t{256} << 20;

Error corrupt(std::string message) { return Error{ErrorCode::kCorrupt, std::move(message)}; }

/// State of an optimizer, as Megatron-LM and torch name it, and programs around them.
bool is_optimizer_state(std::string_view name) {
  const std::string plain = without_wrappers(name);
  const std::string_view first = std::string_view(plain).substr(0, plain.find('.'));
  return first.starts_with("optim") || first.starts_with("chained_");
}

int64_t elem_bytes(const std::string& dtype) { return safetensors_dtype_bits(dtype) / 8; }

std::string renamed(std::string name, std::span<const Rename> renames) {
  for (const auto& [from, to] : renames) {
    if (const size_t at = name.find(from); at != name.npos) name.replace(at, from.size(), to);
  }
  return name;
}

}  // namespace

Result<fs::path> find_dist_files(const fs::path& dir) {
  RT_TRY_SET(const fs::path at, pointed_folder(dir));
  return is_plain_file(at / kMetadataFile) ? at : fs::path();
}

Result<std::vector<DistView>> views_of(const DistTensor& tensor, const Family& family, const ModelConfig& model) {
  std::vector<DistView> out;
  const auto add = [&](const std::string& stored, Shape shape, int64_t layer) {
    std::string name = renamed(stored, family.dist_renames);
    if (is_ignored_tensor(family, name)) return;
    for (const JoinRow& row : family.joins) {
      if (row.join == Join::kVocabRows && matches(row.stored, name) && !shape.empty()) {
        shape[0] = std::min(shape[0], model.vocab);
      }
    }
    out.push_back({std::move(name), std::move(shape), layer});
  };
  const std::string_view rest =
      std::string_view(tensor.name).substr(std::min(family.stacked.size(), tensor.name.size()));
  const bool stacked = !family.stacked.empty() && tensor.name.starts_with(family.stacked) && !rest.empty() &&
                       (rest.front() < '0' || rest.front() > '9') && !tensor.shape.empty();
  if (!stacked) {
    add(tensor.name, tensor.shape, -1);
    return out;
  }
  if (tensor.shape[0] > model.layers) {
    return corrupt(
        fmt::format("{} is {}, the layers of a model of {}", tensor.name, to_string(tensor.shape), model.layers));
  }
  const Shape of_layer(tensor.shape.begin() + 1, tensor.shape.end());
  for (int64_t layer = 0; layer < tensor.shape[0]; ++layer) {
    add(fmt::format("{}{}.{}", family.stacked, layer, rest), of_layer, layer);
  }
  return out;
}

Result<std::unique_ptr<DistFiles>> DistFiles::open(const fs::path& dir, const Family& family,
                                                   const ModelConfig& model) {
  const fs::path metadata = dir / kMetadataFile;
  RT_TRY_SET(const std::string pickle, read_text_file(metadata, kMaxMetadataBytes));
  Result<std::vector<DistTensor>> read = read_dist_metadata(pickle);
  if (!read.ok()) return std::move(read).error().with(metadata.string());
  std::unique_ptr<DistFiles> out(new DistFiles());
  out->path_ = dir;
  std::map<std::string, std::shared_ptr<const Fd>> files;
  for (DistTensor& tensor : read.value()) {
    if (is_optimizer_state(tensor.name) || is_passed_dtype(tensor.dtype)) continue;
    Stored stored;
    for (const DistChunk& chunk : tensor.chunks) {
      const fs::path path = dir / chunk.file;
      std::shared_ptr<const Fd>& fd = files[chunk.file];
      if (fd == nullptr) {
        RT_TRY_SET(ForeignFile opened, open_foreign(path));
        fd = std::make_shared<const Fd>(std::move(opened.fd));
        out->paths_.push_back(path);
      }
      const std::string what = fmt::format("tensor {}, chunk at {}", tensor.name, to_string(chunk.offsets));
      Result<std::unique_ptr<TorchBinFile>> part = TorchBinFile::open_tensor(fd, path, chunk.begin, chunk.bytes);
      if (!part.ok()) return std::move(part).error().with(what);
      const SafeTensor& found = part.value()->tensors().front();
      if (found.shape != chunk.sizes || found.dtype != tensor.dtype) {
        return corrupt(fmt::format("{}: {}: is {} {}, {} says {} {}", path.string(), what, found.dtype,
                                   to_string(found.shape), kMetadataFile, tensor.dtype, to_string(chunk.sizes)));
      }
      stored.chunks.push_back(std::move(part).value());
    }
    stored.tensor = std::move(tensor);
    out->stored_.push_back(std::move(stored));
  }
  for (size_t k = 0; k < out->stored_.size(); ++k) {
    const DistTensor& tensor = out->stored_[k].tensor;
    Result<std::vector<DistView>> views = views_of(tensor, family, model);
    if (!views.ok()) return std::move(views).error().with(metadata.string());
    for (DistView& view : views.value()) {
      const int64_t bytes = count_elems(view.shape) * elem_bytes(tensor.dtype);
      const int64_t first = view.layer < 0 ? 0 : view.layer * (count_elems(tensor.shape) / tensor.shape[0]);
      out->tensors_.push_back({.name = std::move(view.name),
                               .dtype = tensor.dtype,
                               .shape = std::move(view.shape),
                               .begin = 0,
                               .end = bytes});
      out->views_.push_back({k, first});
    }
  }
  return out;
}

Status DistFiles::read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const {
  const auto index = static_cast<size_t>(&tensor - tensors_.data());
  RT_CHECK(index < tensors_.size() && offset >= 0 && bytes >= 0 && offset + bytes <= tensor.end, "{} [{}, +{})",
           tensor.name, offset, bytes);
  const Stored& stored = stored_[views_[index].stored];
  const int64_t elem = elem_bytes(tensor.dtype);
  RT_CHECK(offset % elem == 0 && bytes % elem == 0, "{}: [{}, +{}) cuts elements", tensor.name, offset, bytes);
  const int64_t end = views_[index].first + (offset + bytes) / elem;
  size_t k = 0;
  for (int64_t at = views_[index].first + offset / elem; at < end;) {
    BoxRun run;
    for (size_t tried = 0; run.count == 0; ++tried, k += run.count == 0 ? 1 : 0) {  // most runs go on in the next chunk
      RT_CHECK(tried < stored.chunks.size(), "{}: no chunk holds element {}", tensor.name, at);
      k %= stored.chunks.size();
      const DistChunk& chunk = stored.tensor.chunks[k];
      run = run_in_box(chunk.offsets, chunk.sizes, stored.tensor.shape, at);
    }
    const int64_t count = std::min(run.count, end - at);
    const TorchBinFile& file = *stored.chunks[k];
    RT_TRY(file.read(file.tensors().front(), run.from * elem, count * elem, out));
    out += count * elem;
    at += count;
  }
  return {};
}

Status DistFiles::verify() const {
  for (const Stored& stored : stored_) {
    for (const auto& chunk : stored.chunks) RT_TRY(chunk->verify().with(stored.tensor.name));
  }
  return {};
}

}  // namespace cairn::convert
