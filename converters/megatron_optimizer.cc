#include <fmt/format.h>

#include <algorithm>

#include "converters/elements.h"
#include "converters/megatron_parts.h"
#include "converters/pickle_reader.h"
#include "converters/safetensors.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"

namespace cairn::convert::megatron {
namespace {

/// The blocks of a tensor of `shape` whose stored form is a grid of them with the elements of a block as the last dim.
Result<std::vector<FileBox>> boxes_of_blocks(const DistTensor& stored, const std::vector<FileBox>& chunks,
                                             const Shape& shape, int64_t elem_bytes) {
  const Shape& grid = stored.shape;
  Shape block(shape.size(), 1);
  bool fits = grid.size() == shape.size() + 1;
  for (size_t d = 0; d < shape.size() && fits; ++d) {
    fits = grid[d] > 0 && shape[d] % grid[d] == 0;
    if (fits) block[d] = shape[d] / grid[d];
  }
  if (!fits || grid.back() != count_elems(block)) {
    return refusal(ErrorCode::kCorrupt, stored.name, fmt::format("is {}", to_string(grid)),
                   fmt::format("{}, as the weight, or a grid of its blocks", to_string(shape)), kWeightsOnly);
  }
  std::vector<FileBox> out;
  for (const FileBox& chunk : chunks) {
    const int64_t each = chunk.sizes.back();
    const int64_t blocks = each == 0 ? 0 : count_elems(chunk.sizes) / each;
    for (int64_t k = 0; k < blocks; ++k) {
      FileBox box{.offsets = Shape(shape.size(), 0), .sizes = block, .file = chunk.file};
      int64_t rest = k;
      for (size_t d = shape.size(); d-- > 0;) {
        box.offsets[d] = (chunk.offsets[d] + rest % chunk.sizes[d]) * block[d];
        rest /= chunk.sizes[d];
      }
      box.offset = chunk.offset + k * each * elem_bytes;
      box.first = chunk.offsets.back();
      box.count = each;
      out.push_back(std::move(box));
    }
  }
  return out;
}

int64_t elem_bytes(const DistTensor& tensor) { return safetensors_dtype_bits(tensor.dtype) / 8; }

Status check_float(const DistTensor& tensor) {
  if (is_float_dtype(tensor.dtype)) return {};
  return refusal(ErrorCode::kUnsupported, tensor.name, fmt::format("is {}", tensor.dtype),
                 "F32, BF16 or F16: halves of masters and moments of eight bits are not read", kWeightsOnly);
}

/// A number of the arguments that counts ranks.
int64_t ranks_of(const Opening& o, const char* name) {
  return std::clamp<int64_t>(json_count(o.args, name, 1), 1, 1 << 20);
}

/// The elements of a bucket, in the order of their places.
struct Bucket {
  std::vector<FileBox> chunks;
  int64_t elem_bytes = 0, length = 0;
  std::string dtype;
};

using Buckets = std::array<std::vector<Bucket>, kKinds>;

/// Adds where elements [begin, begin + box.elems) of a bucket lie, which are those of a box of a weight.
void add_stretch(const Bucket& bucket, int64_t begin, const ParameterBox& of, std::vector<FileBox>* out) {
  const int64_t end = begin + count_elems(of.sizes);
  auto chunk = std::ranges::upper_bound(bucket.chunks, begin, {}, [](const FileBox& c) { return c.offsets[0]; });
  if (chunk != bucket.chunks.begin()) --chunk;
  for (; chunk != bucket.chunks.end() && chunk->offsets[0] < end; ++chunk) {
    const int64_t lo = std::max(begin, chunk->offsets[0]), hi = std::min(end, chunk->offsets[0] + chunk->sizes[0]);
    if (hi <= lo) continue;
    out->push_back({.offsets = of.offsets,
                    .sizes = of.sizes,
                    .file = chunk->file,
                    .offset = chunk->offset + (lo - chunk->offsets[0]) * bucket.elem_bytes,
                    .first = lo - begin,
                    .count = hi - lo});
  }
}

Result<Buckets> open_buckets(Opening& o, const BufferKey& key, const Buffer& buffer) {
  const std::string place =
      fmt::format("{}: optimizer state of ranks {}, buffer {}", o.dir().string(), key.group, key.number);
  Buckets out;
  for (size_t kind = 0; kind < kKinds; ++kind) {
    int64_t next = 0;
    for (const auto& [number, tensor] : buffer.buckets[kind]) {
      RT_TRY(check_float(*tensor));
      const bool shaped = tensor->shape.size() == 1 && number == next++;
      if (!shaped ||
          (kind > 0 && (!buffer.buckets[0].contains(number) || buffer.buckets[0].at(number)->shape != tensor->shape))) {
        return refusal(ErrorCode::kCorrupt, place,
                       fmt::format("bucket {} of {} is {}", number, kind == 0 ? "masters" : kMoments[kind - 1],
                                   to_string(tensor->shape)),
                       "buckets from 0 on, each of one length in masters and moments", kCopyAgain);
      }
      Bucket bucket{.elem_bytes = elem_bytes(*tensor), .length = tensor->shape[0], .dtype = tensor->dtype};
      RT_TRY_SET(bucket.chunks, o.archives.boxes(*tensor, &o.out));
      std::ranges::sort(bucket.chunks, {}, [](const FileBox& chunk) { return chunk.offsets[0]; });
      out[kind].push_back(std::move(bucket));
    }
    if (out[kind].size() != out[0].size()) {
      return refusal(ErrorCode::kCorrupt, place,
                     fmt::format("has {} of {} and {} of masters", out[kind].size(), kMoments[kind - 1], out[0].size()),
                     "as many buckets of each", kCopyAgain);
    }
  }
  return out;
}

class BucketReader {
 public:
  explicit BucketReader(Opening& o) : o_(o) {
    for (const auto& [key, tensor] : o.weights) shapes_[key] = tensor->shape;
    ranks_ = {.tp = ranks_of(o, "tensor_model_parallel_size"),
              .pp = ranks_of(o, "pipeline_model_parallel_size"),
              .ep = ranks_of(o, "expert_model_parallel_size"),
              .layers = o.model.layers,
              .experts = o.model.moe.experts,
              .gated = json_flag(o.args, "swiglu")};
    if (ranks_.experts == 0) ranks_.ep = 1;
  }

  Result<States> run() {
    RT_TRY(check_ranks());
    for (const auto& [key, buffer] : o_.buffers) {
      RT_TRY_SET(Buckets made, open_buckets(o_, key, buffer));
      buckets_.emplace(key, std::move(made));
    }
    std::vector<States> fitting;
    std::string why;
    for (const bool fused : {false, true}) {
      for (const bool grouped : {false, true}) {
        if (grouped && ranks_.experts == 0) continue;
        ranks_.fused_norms = fused;
        ranks_.grouped = grouped;
        Result<States> states = place();
        if (!states.ok() && states.error().code == ErrorCode::kUnsupported) return std::move(states).error();
        if (!states.ok()) {
          if (why.empty()) why = states.error().message;
          continue;
        }
        if (!std::ranges::any_of(fitting, [&](const States& other) { return same(other, states.value()); })) {
          fitting.push_back(std::move(states).value());
        }
      }
    }
    if (fitting.empty()) {
      return refusal(ErrorCode::kUnsupported, o_.dir().string(),
                     fmt::format("its buckets (dp_reshardable) are not those of the model: {}", why),
                     "parameters in an order that Megatron-Core's layers have",
                     fmt::format("save it with --dist-ckpt-optim-fully-reshardable; {}", kWeightsOnly));
    }
    if (fitting.size() == 1) return std::move(fitting.front());
    return decide(std::move(fitting));
  }

 private:
  Status check_ranks() const {
    std::string wrong;
    if (ranks_.pp > 1) wrong = fmt::format("buckets of {} pipeline stages", ranks_.pp);
    const int64_t expert_tp = json_count(o_.args, "expert_tensor_parallel_size", ranks_.tp);
    if (ranks_.experts > 0 && expert_tp != ranks_.tp) wrong = "experts that are cut among other ranks than the rest";
    if (ranks_.experts > 0 && ranks_.ep > 1 && ranks_.tp > 1) wrong = "experts that are divided and cut among ranks";
    if (wrong.empty()) return {};
    return refusal(ErrorCode::kUnsupported, o_.dir().string(), fmt::format("has {} (dp_reshardable)", wrong),
                   "one stage; experts either divided or cut",
                   fmt::format("save it with --dist-ckpt-optim-fully-reshardable; {}", kWeightsOnly));
  }

  static bool same(const States& a, const States& b) {
    return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
      return x.first == y.first &&
             std::ranges::equal(x.second[0].boxes, y.second[0].boxes, [](const FileBox& p, const FileBox& q) {
               return p.offsets == q.offsets && p.file == q.file && p.offset == q.offset && p.count == q.count;
             });
    });
  }

  /// With experts on ranks of their own there are two optimizers: of all else, and of the experts.
  Result<States> place() {
    States out;
    for (const auto& [key, buckets] : buckets_) {
      const bool divided = ranks_.ep > 1 && (key.chain > 0 || key.number > 0);
      const int64_t rank = key.group;
      RT_TRY_SET(const std::vector<RankParameter> parameters,
                 rank_parameters(shapes_, ranks_, divided ? 0 : rank % ranks_.tp, 0, divided ? rank : 0, divided));
      std::vector<int64_t> lengths;
      for (const Bucket& bucket : buckets[0]) lengths.push_back(bucket.length);
      RT_TRY_SET(const std::vector<BucketPlace> places, place_in_buckets(parameters, lengths));
      for (size_t k = 0; k < parameters.size(); ++k) {
        if (parameters[k].copy) continue;
        int64_t begin = places[k].begin;
        for (const ParameterBox& box : parameters[k].boxes) {
          const DistTensor* const weight = o_.weights.at(box.key);
          for (size_t kind = 0; kind < kKinds; ++kind) {
            Placed& placed = out[box.key][kind];
            placed.tensor = weight;
            add_stretch(buckets[kind][static_cast<size_t>(places[k].bucket)], begin, box, &placed.boxes);
          }
          begin += count_elems(box.sizes);
        }
      }
    }
    return out;
  }

  /// Chooses the order whose masters round to the weights.
  Result<States> decide(std::vector<States> fitting) {
    std::vector<States> round;
    Status first;
    for (States& states : fitting) {
      ForeignState one;
      one.about = o_.out.about;
      one.files = o_.out.files;
      one.weights = std::make_unique<FlatTensors>(o_.dir(), o_.out.files);
      for (const auto& [key, placed] : states) {
        RT_TRY(add_views(o_, key, "F32", placed[0].tensor->shape, placed[0].boxes, one.weights.get()));
      }
      one.model_copy = std::move(o_.out.model_copy);
      const Status fits = check_masters(one);
      o_.out.model_copy = std::move(one.model_copy);
      if (fits.ok()) round.push_back(std::move(states));
      if (!fits.ok() && first.ok()) first = fits;
    }
    if (round.size() == 1) return std::move(round.front());
    if (round.empty()) return std::move(first).error();
    return refusal(ErrorCode::kUnsupported, o_.dir().string(),
                   fmt::format("{} orders of the parameters in its buckets round to the weights", round.size()), "one",
                   fmt::format("save it with --dist-ckpt-optim-fully-reshardable; {}", kWeightsOnly));
  }

  Opening& o_;
  std::map<std::string, Shape> shapes_;
  MegatronRanks ranks_;
  std::map<BufferKey, Buckets> buckets_;
};

}  // namespace

Result<States> read_named(Opening& o) {
  States out;
  for (size_t kind = 0; kind < kKinds; ++kind) {
    for (const auto& [key, tensor] : o.named[kind]) {
      const auto weight = o.weights.find(key);
      if (weight == o.weights.end()) {
        return refusal(ErrorCode::kCorrupt, o.dir().string(),
                       fmt::format("has optimizer state of {} and no weight of that name", printable(key)),
                       "a weight for each", kWeightsOnly);
      }
      RT_TRY(check_float(*tensor));
      RT_TRY_SET(std::vector<FileBox> boxes, o.archives.boxes(*tensor, &o.out));
      if (tensor->shape != weight->second->shape) {
        RT_TRY_SET(boxes, boxes_of_blocks(*tensor, boxes, weight->second->shape, elem_bytes(*tensor)));
      }
      out[key][kind] = {tensor, std::move(boxes)};
    }
  }
  for (const auto& [key, placed] : out) {
    for (size_t kind = 1; kind < kKinds; ++kind) {
      if (placed[kind].tensor != nullptr) continue;
      return refusal(ErrorCode::kCorrupt, o.dir().string(),
                     fmt::format("{} of {} is missing", kMoments[kind - 1], printable(key)),
                     "exp_avg and exp_avg_sq of each", kWeightsOnly);
    }
  }
  return out;
}

Result<States> read_buckets(Opening& o) { return BucketReader(o).run(); }

}  // namespace cairn::convert::megatron
