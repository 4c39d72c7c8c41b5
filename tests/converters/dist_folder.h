#pragma once
// The files of a checkpoint of torch.distributed.checkpoint, made by hand: any tensors in any boxes, any values.
// Source: pytorch torch/distributed/checkpoint/{metadata,filesystem}.py.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/shape.h"
#include "tests/converters/torch_archive.h"

namespace cairn::convert::testing {

struct RawTensor {
  std::string dtype;  // as safetensors names it
  Shape shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

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

/// The keys of the dicts around a tensor, and its own.
using DistPath = std::vector<std::string>;

/// A state that dcp.save() gets: what each dict of dicts holds. {} is a flat state dict.
struct DistState {
  std::map<DistPath, RawTensors> parts;
  std::map<std::string, std::string> values = {};  // what is no tensor: a pickle
  /// Boxes of a tensor, each of a file __N_0.distcp. Empty: rank 0 has the upper rows, rank 1 the lower ones.
  std::function<std::vector<std::pair<Box, int>>(const Shape& shape)> cut = {};
};

inline std::string pickled_size(const Shape& shape) { return "ctorch\nSize\n(" + pickled(shape) + "tR"; }

/// An object of a class with these fields: pickled key, pickled value, ...
inline std::string pickled_object(const std::string& module, const std::string& name, const std::string& fields) {
  return "c" + module + "\n" + name + "\n)\x81}(" + fields + "ub";
}

/// Copies a box out of a dense tensor.
inline RawTensor box_of(const RawTensor& tensor, const Box& box) {
  RawTensor out{.dtype = tensor.dtype, .shape = {}, .bytes = {}};
  int64_t elems = 1;
  for (const int64_t extent : tensor.shape) elems *= extent;
  const size_t elem = tensor.bytes.size() / static_cast<size_t>(elems);
  for (size_t d = 0; d < box.lo.size(); ++d) out.shape.push_back(box.hi[d] - box.lo[d]);
  for (Shape at = box.lo;;) {
    out.bytes += tensor.bytes.substr(static_cast<size_t>(flat_offset(tensor.shape, at)) * elem, elem);
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.hi[d - 1]) {
      at[d - 1] = box.lo[d - 1];
      --d;
    }
    if (d == 0) return out;
  }
}

/// By name: `.metadata` and a .distcp file for each rank that has boxes.
inline std::map<std::string, std::string> dist_files_of(const DistState& state) {
  const std::string module = "torch.distributed.checkpoint.metadata";
  std::map<int, std::string> files;
  std::string tensors, storage, paths;
  const auto put = [&](const std::string& fqn, const std::string& offset, int rank, const std::string& bytes) {
    storage += pickled_object(module, "MetadataIndex", pickled("fqn") + pickled(fqn) + pickled("offset") + offset);
    storage += pickled_object("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                              pickled("relative_path") + pickled("__" + std::to_string(rank) + "_0.distcp") +
                                  pickled("offset") + pickled(static_cast<int64_t>(files[rank].size())) +
                                  pickled("length") + pickled(static_cast<int64_t>(bytes.size())));
    files[rank] += bytes;
  };
  const auto halves = [](const Shape& shape) {
    std::vector<std::pair<Box, int>> out;
    Box upper = Box::whole(shape), lower = upper;
    if (shape.empty()) return std::vector<std::pair<Box, int>>{{upper, 0}};
    upper.hi[0] = lower.lo[0] = (shape[0] + 1) / 2;
    out.emplace_back(upper, 0);
    if (lower.lo[0] < lower.hi[0]) out.emplace_back(lower, 1);
    return out;
  };
  for (const auto& [path, part] : state.parts) {
    for (const auto& [name, tensor] : part) {
      std::string flat, keys;
      for (const std::string& key : path) {
        flat += key + ".";
        keys += pickled(key);
      }
      flat += name;
      paths += pickled(flat) + "(" + keys + pickled(name) + "t";
      std::string chunks;
      for (const auto& [box, rank] : state.cut ? state.cut(tensor.shape) : halves(tensor.shape)) {
        const RawTensor chunk = box_of(tensor, box);
        chunks +=
            pickled_object(module, "ChunkStorageMetadata",
                           pickled("offsets") + pickled_size(box.lo) + pickled("sizes") + pickled_size(chunk.shape));
        put(flat, pickled_size(box.lo), rank,
            zip({{"archive/data.pkl", "\x80\x02" + pickled(whole_view(chunk, "0")) + "."},
                 {"archive/data/0", chunk.bytes},
                 {"archive/version", "3\n"}}));
      }
      const std::string dtype = tensor.dtype == "C64"    ? "complex64"
                                : tensor.dtype == "BF16" ? "bfloat16"
                                : tensor.dtype == "F16"  ? "float16"
                                                         : "float32";
      const std::string properties =
          "ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n)\x81(ctorch\n" + dtype + "\ntb";
      tensors +=
          pickled(flat) + pickled_object(module, "TensorStorageMetadata",
                                         pickled("properties") + properties + pickled("size") +
                                             pickled_size(tensor.shape) + pickled("chunks") + "](" + chunks + "e");
    }
  }
  for (const auto& [name, value] : state.values) {
    tensors += pickled(name) + "c" + module + "\nBytesStorageMetadata\n)\x81";
    put(name, "N", 0, zip({{"archive/data.pkl", "\x80\x02" + value + "."}, {"archive/version", "3\n"}}));
  }
  const std::string root =
      pickled_object(module, "Metadata",
                     pickled("state_dict_metadata") + "}(" + tensors + "u" + pickled("planner_data") + "}(" + paths +
                         "u" + pickled("storage_data") + "}(" + storage + "u");
  std::map<std::string, std::string> out = {{".metadata", "\x80\x02" + root + "."}};
  for (auto& [rank, bytes] : files) out["__" + std::to_string(rank) + "_0.distcp"] = std::move(bytes);
  return out;
}

}  // namespace cairn::convert::testing
