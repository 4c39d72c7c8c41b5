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
#include "tests/converters/fixtures.h"
#include "tests/converters/torch_archive.h"

namespace cairn::convert::testing {

struct RawTensor {
  std::string dtype;  // as safetensors names it
  Shape shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

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

inline std::string storage_class(const std::string& dtype) {
  return dtype == "BF16" ? "BFloat16Storage" : dtype == "F16" ? "HalfStorage" : "FloatStorage";
}

inline View whole_view(const RawTensor& tensor, const std::string& key) {
  return {.key = key,
          .storage_class = storage_class(tensor.dtype),
          .count = count_elems(tensor.shape),
          .offset = 0,
          .shape = tensor.shape,
          .strides = dense_strides(tensor.shape)};
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

/// The keys of the dicts around a tensor, and its own.
using DistPath = std::vector<std::string>;

/// A state that dcp.save() gets: what each dict of dicts holds. {} is a flat state dict.
struct DistState {
  std::map<DistPath, RawTensors> parts;
};

inline std::string pickled_size(const Shape& shape) { return "ctorch\nSize\n(" + pickled(shape) + "tR"; }

/// An object of a class with these fields: pickled key, pickled value, ...
inline std::string pickled_object(const std::string& module, const std::string& name, const std::string& fields) {
  return "c" + module + "\n" + name + "\n)\x81}(" + fields + "ub";
}

/// Rows [first, first + count) of dim 0.
inline RawTensor rows_of(const RawTensor& tensor, int64_t first, int64_t count) {
  RawTensor out = tensor;
  const auto row = static_cast<int64_t>(tensor.bytes.size()) / tensor.shape[0];
  out.shape[0] = count;
  out.bytes = tensor.bytes.substr(static_cast<size_t>(first * row), static_cast<size_t>(count * row));
  return out;
}

/// `.metadata` and a .distcp file for each of two ranks, which hold the upper and the lower rows of each tensor.
inline void write_dist(const fs::path& dir, const DistState& state) {
  const std::string module = "torch.distributed.checkpoint.metadata";
  std::string files[2], tensors, storage, paths;
  for (const auto& [path, part] : state.parts) {
    for (const auto& [name, tensor] : part) {
      std::string flat, keys;
      for (const std::string& key : path) {
        flat += key + ".";
        keys += pickled(key);
      }
      flat += name;
      paths += pickled(flat) + "(" + keys + pickled(name) + "t";
      const int64_t rows = tensor.shape.at(0), upper = (rows + 1) / 2;
      std::string chunks;
      for (const auto& [rank, first, count] : {std::tuple(0, int64_t{0}, upper), {1, upper, rows - upper}}) {
        if (count == 0) continue;
        const RawTensor chunk = rows_of(tensor, first, count);
        const std::string bytes = zip({{"archive/data.pkl", "\x80\x02" + pickled(whole_view(chunk, "0")) + "."},
                                       {"archive/data/0", chunk.bytes},
                                       {"archive/version", "3\n"}});
        Shape offsets(tensor.shape.size(), 0);
        offsets[0] = first;
        chunks +=
            pickled_object(module, "ChunkStorageMetadata",
                           pickled("offsets") + pickled_size(offsets) + pickled("sizes") + pickled_size(chunk.shape));
        storage += pickled_object(module, "MetadataIndex",
                                  pickled("fqn") + pickled(flat) + pickled("offset") + pickled_size(offsets));
        storage += pickled_object("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                                  pickled("relative_path") + pickled("__" + std::to_string(rank) + "_0.distcp") +
                                      pickled("offset") + pickled(static_cast<int64_t>(files[rank].size())) +
                                      pickled("length") + pickled(static_cast<int64_t>(bytes.size())));
        files[rank] += bytes;
      }
      const std::string dtype = tensor.dtype == "BF16" ? "bfloat16" : tensor.dtype == "F16" ? "float16" : "float32";
      const std::string properties =
          "ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n)\x81(ctorch\n" + dtype + "\ntb";
      tensors +=
          pickled(flat) + pickled_object(module, "TensorStorageMetadata",
                                         pickled("properties") + properties + pickled("size") +
                                             pickled_size(tensor.shape) + pickled("chunks") + "](" + chunks + "e");
    }
  }
  const std::string root =
      pickled_object(module, "Metadata",
                     pickled("state_dict_metadata") + "}(" + tensors + "u" + pickled("planner_data") + "}(" + paths +
                         "u" + pickled("storage_data") + "}(" + storage + "u");
  spit(dir / ".metadata", "\x80\x02" + root + ".");
  for (const int rank : {0, 1}) spit(dir / ("__" + std::to_string(rank) + "_0.distcp"), files[rank]);
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
