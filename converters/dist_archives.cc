#include "converters/dist_archives.h"

#include <fmt/format.h>

#include <set>

#include "converters/foreign_file.h"
#include "converters/state_builder.h"
#include "runtime/core/count_text.h"

namespace cairn::convert {

namespace fs = std::filesystem;

Result<std::unique_ptr<TorchValues>> DistArchives::read(const std::string& file, int64_t begin, int64_t bytes) {
  if (open_.size() >= FilePool::kMostOpen && !open_.contains(file)) open_.clear();
  std::shared_ptr<const Fd>& fd = open_[file];
  if (fd == nullptr) {
    const fs::path path = dir_ / file;
    RT_TRY_SET(ForeignFile opened, open_foreign(path));
    fd = std::make_shared<const Fd>(std::move(opened.fd));
  }
  return TorchValues::read_part(fd, dir_ / file, begin, bytes);
}

Result<double> DistArchives::number(const std::string& file, int64_t begin, int64_t bytes) {
  RT_TRY_SET(const std::unique_ptr<TorchValues> values, read(file, begin, bytes));
  return values->number(values->root()).value_or(-1);
}

Result<std::vector<FileBox>> DistArchives::boxes(const DistTensor& tensor, ForeignState* to) {
  std::vector<FileBox> out;
  for (const DistChunk& chunk : tensor.chunks) {
    const fs::path path = dir_ / chunk.file;
    const std::string what = fmt::format("{}, chunk at {}", tensor.name, to_string(chunk.offsets));
    Result<std::unique_ptr<TorchValues>> values = read(chunk.file, chunk.begin, chunk.bytes);
    if (!values.ok()) {
      if (values.error().code != ErrorCode::kCorrupt) return std::move(values).error();
      return refusal(ErrorCode::kCorrupt, what, values.error().message,
                     fmt::format("an archive of torch.save at byte {}, as .metadata says", chunk.begin), kCopyAgain);
    }
    RT_TRY_SET(const TorchTensor found, values.value()->tensor(values.value()->root(), what));
    if (found.shape != chunk.sizes || found.dtype != tensor.dtype) {
      return refusal(ErrorCode::kCorrupt, path.string(),
                     fmt::format("{} is {} {}", what, found.dtype, to_string(found.shape)),
                     fmt::format("{} {}, as .metadata says", tensor.dtype, to_string(chunk.sizes)), kCopyAgain);
    }
    const auto [number, is_new] = numbers_.emplace(chunk.file, -1);
    if (is_new) {
      RT_TRY_SET(number->second, to->files->add(path));
    }
    out.push_back({chunk.offsets, chunk.sizes, number->second, chunk.begin + found.offset});
    to->archives.push_back({path, chunk.begin, chunk.bytes});
  }
  return out;
}

Status DistArchives::check_files(const DistIndex& index) const {
  std::set<std::string> names;
  for (const std::vector<DistTensor>* tensors : {&index.model, &index.others}) {
    for (const DistTensor& tensor : *tensors) {
      for (const DistChunk& chunk : tensor.chunks) names.insert(chunk.file);
    }
  }
  for (const DistValue& value : index.values) names.insert(value.file);
  for (const std::string& name : names) {
    std::error_code error;
    const fs::file_status found = fs::status(dir_ / name, error);
    if (fs::is_regular_file(found)) continue;
    if (error && found.type() != fs::file_type::not_found) return os_error(error.value(), (dir_ / name).string());
    return refusal(ErrorCode::kInvalidInput, (dir_ / name).string(), "is missing",
                   fmt::format("each of the {} that .metadata names", count_text(std::ssize(names), "file")),
                   kCopyAgain);
  }
  return {};
}

}  // namespace cairn::convert
