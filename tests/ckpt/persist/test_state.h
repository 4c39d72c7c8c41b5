#pragma once
// A small state to save: tensors of several dtypes and shapes, cut into boxes over some files, with contents that are a
// function of the seed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "runtime/core/random.h"

namespace cairn::ckpt::testing {

/// Memory as the slots of a snapshot have it: from it a save may write in place.
template <class T>
struct PageAllocator {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{4096})); }
  void deallocate(T* memory, size_t) { ::operator delete (memory, std::align_val_t{4096}); }
  bool operator==(const PageAllocator&) const = default;
};
using PageBytes = std::vector<std::byte, PageAllocator<std::byte>>;

struct TestState {
  Manifest skeleton;
  std::vector<std::vector<std::byte>> tensors;  // whole tensors, by index
  std::vector<PageBytes> boxes;                 // what the parts point into
  std::vector<WriterPart> parts;
};

/// Bytes of a box of a row-major tensor.
inline std::vector<std::byte> cut(const std::vector<std::byte>& whole, const Shape& shape, const Box& box,
                                  int64_t elem_bytes) {
  std::vector<std::byte> out;
  std::vector<int64_t> at = box.lo;
  while (true) {
    const int64_t from = flat_offset(shape, at) * elem_bytes;
    const int64_t row = (shape.empty() ? 1 : box.extent(box.dims() - 1)) * elem_bytes;
    out.insert(out.end(), whole.begin() + from, whole.begin() + from + row);
    int64_t d = box.dims() - 2;
    for (; d >= 0; --d) {
      if (++at[d] < box.hi[d]) break;
      at[d] = box.lo[d];
    }
    if (d < 0) return out;
  }
}

struct TensorSpec {
  std::string name, kind;
  DType dtype;
  Shape shape;
  int64_t cuts;  // boxes along the first dim, dealt round the files
};

inline std::vector<TensorSpec> small_specs() {
  return {{"embed.weight", "weight", DType::kF32, {37, 24}, 3},
          {"embed.weight", "exp_avg", DType::kF32, {37, 24}, 3},
          {"norm.weight", "weight", DType::kBf16, {24}, 1},
          {"proj.weight", "weight", DType::kBf16, {96, 51}, 2},
          {"proj.weight", "exp_avg_sq", DType::kF32, {96, 51}, 4},
          {"scale", "weight", DType::kF32, {}, 1},
          {"half", "weight", DType::kF16, {5, 2, 3}, 2}};
}

inline TestState make_state(int64_t step, uint64_t seed, int64_t files = 2,
                            const std::vector<TensorSpec>& specs = small_specs()) {
  TestState state;
  Manifest& m = state.skeleton;
  m.step = step;
  m.samples = step * 8;
  m.tokens = step * 8 * 128;
  m.created_unix_ms = 1'700'000'000'000 + step;
  m.run = {"test", "run-1", {"run-0"}};
  m.recipe = R"({"model":{"layers":2}})";
  m.recipe_hash = "abc";
  m.mesh = {2, 1, 1, 1, 2, "bf16"};
  m.state = R"({"loss":2.5,"seed":7})";
  m.metrics = {{"loss", 2.5}};
  m.writer = {"test 1", "here"};
  for (int64_t f = 0; f < files; ++f) state.parts.push_back({shard_file_name(f, files), {}});
  size_t boxes = 0;
  for (const TensorSpec& spec : specs) boxes += static_cast<size_t>(spec.cuts);
  state.boxes.reserve(boxes);
  int64_t deal = 0;
  for (const TensorSpec& spec : specs) {
    const auto index = static_cast<int64_t>(m.tensors.size());
    m.tensors.push_back({spec.name, spec.kind, spec.dtype, spec.shape});
    const int64_t elem = dtype_size_bytes(spec.dtype);
    std::vector<std::byte> whole(static_cast<size_t>(count_elems(spec.shape) * elem));
    const uint64_t key = stream_key(seed, spec.kind + "/" + spec.name);
    for (size_t i = 0; i < whole.size(); i += 8) {
      const uint64_t word = mix64(key + i);
      std::memcpy(whole.data() + i, &word, std::min<size_t>(8, whole.size() - i));
    }
    for (int64_t c = 0; c < spec.cuts; ++c) {
      Box box = Box::whole(spec.shape);
      if (!spec.shape.empty()) {
        box.lo[0] = spec.shape[0] * c / spec.cuts;
        box.hi[0] = spec.shape[0] * (c + 1) / spec.cuts;
      }
      const std::vector<std::byte> bytes = cut(whole, spec.shape, box, elem);
      state.boxes.emplace_back(bytes.begin(), bytes.end());
      ShardData data;
      data.tensor = index;
      data.lo = box.lo;
      data.hi = box.hi;
      data.data = state.boxes.back().data();
      data.bytes = static_cast<int64_t>(state.boxes.back().size());
      state.parts[static_cast<size_t>(deal++ % files)].shards.push_back(std::move(data));
    }
    state.tensors.push_back(std::move(whole));
  }
  return state;
}

inline SaveOptions small_options() {
  SaveOptions options;
  options.chunk_bytes = 4096;
  options.writer = WriterId{"test", 1, 1, 1};
  return options;
}

/// A state worth coding, in a few chunks: numbers with few exponents. Of step 13 on the moments are others than of step
/// 12, the weights are not.
inline TestState cold_state(int64_t step) {
  const std::vector<TensorSpec> specs = {
      {"embed.weight", "weight", DType::kF32, {48, 200}, 2}, {"embed.weight", "exp_avg", DType::kF32, {48, 200}, 2},
      {"proj.weight", "weight", DType::kBf16, {40, 257}, 1}, {"flat.weight", "exp_avg_sq", DType::kF32, {20'001}, 1},
      {"norm.weight", "weight", DType::kF32, {24}, 1},       {"scale", "weight", DType::kF32, {}, 1}};
  TestState state = make_state(step, 1, 2, specs);
  const TestState other = make_state(step, static_cast<uint64_t>(step), 2, specs);
  size_t box = 0;
  for (size_t t = 0; t < specs.size(); ++t) {
    const bool changes = step > 12 && specs[t].kind != "weight";
    const auto tame = [&](auto& bytes) {
      const auto elem = static_cast<size_t>(dtype_size_bytes(specs[t].dtype));
      for (size_t i = elem - 1; i < bytes.size(); i += elem) bytes[i] = std::byte{0x3c} | (bytes[i] & std::byte{0x81});
    };
    if (changes) state.tensors[t] = other.tensors[t];
    tame(state.tensors[t]);
    for (int64_t c = 0; c < specs[t].cuts; ++c, ++box) {
      if (changes) std::copy(other.boxes[box].begin(), other.boxes[box].end(), state.boxes[box].begin());
      tame(state.boxes[box]);
    }
  }
  return state;
}

inline Result<SaveReport> save(IoBackend& io, const std::filesystem::path& dir, const TestState& state,
                               SaveOptions options = small_options()) {
  return save_checkpoint(io, dir, state.skeleton, state.parts, options);
}

/// Reads all shards and compares them with the state: empty when equal, else what differs.
inline std::string compare(IoBackend& io, const std::filesystem::path& dir, const TestState& state,
                           const ReadOptions& options = {}) {
  Result<CheckpointReader> reader = CheckpointReader::open(io, dir, options);
  if (!reader.ok()) return reader.error().message;
  const Manifest& m = reader.value().manifest();
  if (m.tensors != state.skeleton.tensors || m.step != state.skeleton.step) return "other tensors or step";
  for (size_t s = 0; s < m.shards.size(); ++s) {
    const ShardEntry& shard = m.shards[s];
    const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
    std::vector<std::byte> bytes(static_cast<size_t>(shard.bytes));
    if (Status read = reader.value().read_shard(static_cast<int64_t>(s), bytes); !read.ok())
      return read.error().message;
    if (bytes !=
        cut(state.tensors[static_cast<size_t>(shard.tensor)], tensor.shape, shard.box, dtype_size_bytes(tensor.dtype)))
      return describe_shard(m, shard) + " differs";
  }
  return {};
}

}  // namespace cairn::ckpt::testing
