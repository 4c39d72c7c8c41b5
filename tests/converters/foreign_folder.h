#pragma once
// Folders as other programs write them, made from tensors in memory: one model as safetensors, as pytorch_model.bin and
// as a checkpoint of torch.distributed.checkpoint, under whatever names a test wants.

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "converters/safetensors.h"
#include "tests/converters/dist_folder.h"
#include "tests/converters/fixtures.h"
#include "tests/converters/torch_archive.h"

namespace cairn::convert::testing {

/// The tensors of a fixture in safetensors, however many files it has.
inline RawTensors raw_tensors(const fs::path& dir) {
  RawTensors out;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    const auto file = SafetensorsFile::open(entry.path());
    REQUIRE_OK(file);
    for (const SafeTensor& t : file.value().tensors()) {
      RawTensor tensor{t.dtype, t.shape, std::string(static_cast<size_t>(t.end - t.begin), '\0')};
      REQUIRE(file.value().read(t, 0, t.end - t.begin, reinterpret_cast<std::byte*>(tensor.bytes.data())).ok());
      out[t.name] = std::move(tensor);
    }
  }
  return out;
}

/// The same tensors under other names.
inline RawTensors renamed(const RawTensors& tensors, const std::function<std::string(const std::string&)>& name) {
  RawTensors out;
  for (const auto& [old, tensor] : tensors) out[name(old)] = tensor;
  return out;
}

/// One tensor of several of one shape: with one more dim in front, as torch.stack makes it.
inline RawTensor stacked(const std::vector<RawTensor>& parts) {
  RawTensor out = parts.front();
  out.shape.insert(out.shape.begin(), static_cast<int64_t>(parts.size()));
  for (size_t k = 1; k < parts.size(); ++k) out.bytes += parts[k].bytes;
  return out;
}

/// One below the other, as torch.cat makes it.
inline RawTensor joined(const RawTensor& above, const RawTensor& below) {
  RawTensor out = above;
  out.shape[0] += below.shape[0];
  out.bytes += below.bytes;
  return out;
}

inline void write_safetensors_file(const fs::path& path, const RawTensors& tensors) {
  std::vector<SafeTensor> list;
  for (const auto& [name, t] : tensors) list.push_back({.name = name, .dtype = t.dtype, .shape = t.shape});
  REQUIRE(write_safetensors(path, list, {{"format", "pt"}}, [&](const SafeTensor& t, const ByteSink& sink) {
            const std::string& bytes = tensors.at(t.name).bytes;
            return sink(reinterpret_cast<const std::byte*>(bytes.data()), static_cast<int64_t>(bytes.size()));
          }).ok());
}

inline void write_bin_file(const fs::path& path, const RawTensors& tensors) {
  std::vector<Entry> entries = {{"m/data.pkl", ""}};
  std::string items;
  for (const auto& [name, tensor] : tensors) {
    const std::string key = std::to_string(entries.size());
    entries.push_back({"m/data/" + key, tensor.bytes});
    items += pickled(name) + pickled(whole_view(tensor, key));
  }
  entries[0].data = pickle(items);
  spit(path, zip(entries));
}

// --- torch.distributed.checkpoint --------------------------------------------------------------------------------

/// Rows [first, first + count) of dim 0.
inline RawTensor rows_of(const RawTensor& tensor, int64_t first, int64_t count) {
  RawTensor out = tensor;
  const auto row = static_cast<int64_t>(tensor.bytes.size()) / tensor.shape[0];
  out.shape[0] = count;
  out.bytes = tensor.bytes.substr(static_cast<size_t>(first * row), static_cast<size_t>(count * row));
  return out;
}

inline void write_dist(const fs::path& dir, const DistState& state) {
  for (const auto& [name, bytes] : dist_files_of(state)) spit(dir / name, bytes);
}

/// A folder of that one format beside the fixture's config.json.
enum class Format { kSafetensors, kBin, kDist };
inline constexpr std::pair<Format, const char*> kFormats[] = {
    {Format::kSafetensors, "safetensors"}, {Format::kBin, "bin"}, {Format::kDist, "torch.distributed.checkpoint"}};

inline void write_folder(const fs::path& dir, const fs::path& fixture, Format format, const RawTensors& tensors) {
  fs::remove_all(dir);
  fs::create_directories(dir);
  fs::copy(fixture / "config.json", dir);
  switch (format) {
    case Format::kSafetensors:
      return write_safetensors_file(dir / "model.safetensors", tensors);
    case Format::kBin:
      return write_bin_file(dir / "pytorch_model.bin", tensors);
    case Format::kDist:
      return write_dist(dir, {{{{}, tensors}}});
  }
}

}  // namespace cairn::convert::testing
