#include "converters/family_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "ckpt/plan/load_plan.h"
#include "ckpt/store/posix_backend.h"
#include "ckpt/store/uring_backend.h"
#include "ckpt/tensors/box_stream.h"
#include "converters/elements.h"
#include "converters/weights_folder.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

// Memory of one file on its way: windows of the checkpoint, chunks that are being read, a block of a transposed tensor.
constexpr int64_t kWindowBytes = int64_t{32} << 20, kReaderBytes = int64_t{8} << 20;
constexpr int64_t kTransposedElems = int64_t{8} << 20;
constexpr int64_t kBlockElems = int64_t{1} << 20;

/// Each row of what is stored, or each column of each line of a transposed tensor, comes from one run.
void check_runs(const Output& output, int64_t width) {
  std::vector<bool> seen;
  int64_t line = -1;
  const auto check_whole = [&] {
    RT_CHECK(line < 0 || (std::ssize(seen) == width && std::ranges::find(seen, false) == seen.end()),
             "{}: some of {} rows come from nowhere", output.name, width);
  };
  for (const OutputRun& run : output.runs) {
    if (run.line != line) {
      check_whole();
      line = run.line;
      seen.assign(static_cast<size_t>(width), false);
    }
    for (int64_t k = 0; k < run.count; ++k) {
      const int64_t row = run.stored + k * run.stride;
      RT_CHECK(row < width && !seen[static_cast<size_t>(row)], "{}: row {} comes twice, or is none of {}", output.name,
               row, width);
      seen[static_cast<size_t>(row)] = true;
    }
  }
  check_whole();
}

/// The bytes of one file's tensors out of a checkpoint.
class CheckpointTensors final : public TensorSource {
 public:
  static Result<std::unique_ptr<CheckpointTensors>> open(const fs::path& dir, const CheckpointWeights& weights,
                                                         const std::vector<Output>& outputs, DType dtype,
                                                         const BlockFp8& blocks, std::span<const int64_t> tensors,
                                                         OutputReads reads) {
    std::unique_ptr<CheckpointTensors> out(new CheckpointTensors(outputs, dtype, blocks));
    if (reads == OutputReads::kAnywhere) {
      out->io_ = std::make_unique<ckpt::PosixBackend>();  // what is read again lies in the page cache
    } else {
      out->io_ = ckpt::make_best_backend({.depth = 16, .in_flight_bytes = kReaderBytes});
    }
    int64_t chunk = 0;
    RT_TRY(ckpt::check_chunks_fit(weights.manifest(), kWindowBytes, &chunk).with(dir.string()));
    RT_TRY_SET(ckpt::CheckpointReader reader,
               ckpt::CheckpointReader::open(*out->io_, dir, {.window_bytes = std::max(kReaderBytes, chunk)}));
    out->reader_ = std::make_unique<ckpt::CheckpointReader>(std::move(reader));
    out->planner_ = std::make_unique<ckpt::LoadPlanner>(out->reader_->manifest());
    for (const int64_t tensor : tensors) out->plan(tensor, weights);
    if (reads == OutputReads::kAnywhere) return out;
    out->stream_ = std::make_unique<ckpt::BoxStream>(*out->reader_, *out->planner_, out->items_,
                                                     ckpt::StreamOptions{.memory_bytes = kWindowBytes, .ahead = true});
    return out;
  }

  Status fill(int64_t tensor, int64_t first, std::span<std::byte> out) override {
    const Output& output = outputs_[static_cast<size_t>(tensor)];
    if (output.part != OutputPart::kNumbers) {
      if (blocks_of_ != tensor) {
        blocks_.emplace(output.name, output.matrix, shape_,
                        [this, tensor](int64_t from, std::span<float> values) { return floats(tensor, from, values); });
        blocks_of_ = tensor;
      }
      return output.part == OutputPart::kCodes ? blocks_->codes(first, out) : blocks_->scales(first, out);
    }
    const DType dtype = output.own_dtype.value_or(dtype_);
    const int64_t elem = dtype_size_bytes(dtype), count = static_cast<int64_t>(out.size()) / elem;
    if (dtype == DType::kF32) return floats(tensor, first, {reinterpret_cast<float*>(out.data()), size_t(count)});
    scratch_.resize(static_cast<size_t>(kBlockElems));
    for (int64_t at = 0; at < count; at += kBlockElems) {
      const std::span<float> block = std::span(scratch_).first(std::min(kBlockElems, count - at));
      RT_TRY(floats(tensor, first + at, block));
      if (const int64_t bad = from_floats(dtype, block, out.data() + at * elem); bad >= 0) {
        return Error{ErrorCode::kUnsupported, fmt::format("{}: holds {}, f16 ends at {}; export as bf16 or f32",
                                                          output.name, block[bad], kMaxF16)};
      }
    }
    return {};
  }

 private:
  /// Boxes of the checkpoint, one behind the other, that make elements [first, first + elems) of an output; of a
  /// transposed one, rows [row, row + rows), which must be turned.
  struct Part {
    int64_t first = 0, elems = 0, item = 0, items = 0;
    int64_t rows = 0, run = 0;  // the first of Output::runs that it is made of
  };

  CheckpointTensors(const std::vector<Output>& outputs, DType dtype, const BlockFp8& blocks)
      : outputs_(outputs), dtype_(dtype), shape_(blocks) {}

  /// Bytes of an item.
  Status copy(int64_t item, int64_t offset, std::span<std::byte> out) {
    if (stream_) return stream_->copy(item, offset, out);
    return ckpt::read_item(*reader_, *planner_, items_[static_cast<size_t>(item)], offset, out);
  }

  void add_item(const CheckpointWeights& weights, int64_t source, const Box& box) {
    const std::string& name = weights.tensors()[source].name;
    items_.push_back(ckpt::stream_item(reader_->manifest(), planner_->find(weights.kind(), name), box));
  }

  void plan(int64_t tensor, const CheckpointWeights& weights) {
    const Output& output = outputs_[static_cast<size_t>(tensor)];
    std::vector<Part>& parts = parts_[tensor];
    if (!output.transpose) {
      int64_t first = 0;
      for (const OutputRun& run : output.runs) {
        const Shape& shape = weights.tensors()[run.source].shape;
        const int64_t columns = column_count(shape);
        for (const Box& box : boxes_of_flat_range(shape, run.row * columns, (run.row + run.count) * columns)) {
          parts.push_back({first, box.count_elems(), static_cast<int64_t>(items_.size()), 1});
          add_item(weights, run.source, box);
          first += box.count_elems();
        }
      }
      return;
    }
    // Stored [in, out], or a stack of such: `at_once` of its rows are columns of each logical tensor.
    const int64_t all = row_count(output.shape), width = output.shape.back();
    const int64_t at_once = std::max<int64_t>(1, kTransposedElems / width);
    for (size_t first = 0, end = 0; first < output.runs.size(); first = end) {
      const int64_t line = output.runs[first].line;
      for (end = first; end < output.runs.size() && output.runs[end].line == line;) ++end;
      const int64_t inputs = (end < output.runs.size() ? output.runs[end].line : all) - line;
      for (int64_t row = 0; row < inputs; row += at_once) {
        const int64_t rows = std::min(at_once, inputs - row);
        parts.push_back({(line + row) * width, rows * width, static_cast<int64_t>(items_.size()),
                         static_cast<int64_t>(end - first), rows, static_cast<int64_t>(first)});
        for (size_t k = first; k < end; ++k) {
          const OutputRun& run = output.runs[k];
          const bool vector = weights.tensors()[run.source].shape.size() == 1;
          add_item(
              weights, run.source,
              vector ? Box{{run.row}, {run.row + run.count}} : Box{{run.row, row}, {run.row + run.count, row + rows}});
        }
      }
    }
  }

  Status floats(int64_t tensor, int64_t first, std::span<float> out) {
    const Output& output = outputs_[static_cast<size_t>(tensor)];
    const std::vector<Part>& parts = parts_.at(tensor);
    auto part = std::upper_bound(parts.begin(), parts.end(), first,
                                 [](int64_t value, const Part& candidate) { return value < candidate.first; });
    for (--part; !out.empty(); ++part) {
      const int64_t skip = first - part->first, n = std::min<int64_t>(part->elems - skip, out.size());
      if (output.transpose) {
        RT_TRY(turn(output, *part));
        std::copy_n(turned_.begin() + skip, n, out.begin());
      } else {
        RT_TRY(copy(part->item, skip * int64_t{sizeof(float)}, std::as_writable_bytes(out.first(n))));
      }
      out = out.subspan(static_cast<size_t>(n));
      first += n;
    }
    return {};
  }

  Status turn(const Output& output, const Part& part) {
    if (turned_item_ == part.item) return {};
    const int64_t width = output.shape.back();
    turned_.resize(static_cast<size_t>(part.elems));
    turned_item_ = -1;
    std::vector<float> block;
    for (int64_t k = 0; k < part.items; ++k) {
      const OutputRun& run = output.runs[static_cast<size_t>(part.run + k)];
      const int64_t lines = std::max<int64_t>(1, kBlockElems / part.rows);
      for (int64_t row = 0; row < run.count; row += lines) {
        const int64_t n = std::min(lines, run.count - row);
        block.resize(static_cast<size_t>(n * part.rows));
        RT_TRY(copy(part.item + k, row * part.rows * int64_t{sizeof(float)}, std::as_writable_bytes(std::span(block))));
        float* const to = turned_.data() + run.stored + row * run.stride;
        if (run.stride == 1) {
          transpose_into(block.data(), n, part.rows, to, width);
          continue;
        }
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < part.rows; ++c) to[c * width + r * run.stride] = block[r * part.rows + c];
        }
      }
    }
    turned_item_ = part.item;
    return {};
  }

  const std::vector<Output>& outputs_;
  DType dtype_;
  const BlockFp8& shape_;
  std::optional<BlockTensors> blocks_;  // of this tensor
  int64_t blocks_of_ = -1;
  std::unique_ptr<ckpt::IoBackend> io_;
  std::unique_ptr<ckpt::CheckpointReader> reader_;
  std::unique_ptr<ckpt::LoadPlanner> planner_;
  std::vector<ckpt::StreamItem> items_;
  std::map<int64_t, std::vector<Part>> parts_;
  std::unique_ptr<ckpt::BoxStream> stream_;  // null: by read_item()
  std::vector<float> scratch_, turned_;
  int64_t turned_item_ = -1;  // first item of the part that turned_ holds
};

}  // namespace

std::vector<Output> outputs_of(const Family& family, const WeightSource& source, const BlockFp8* blocks) {
  const std::vector<Mapping> mappings = tensor_map(family, source.model());
  std::vector<Output> out;
  std::map<std::string, size_t> index;
  for (const Mapping& mapping : mappings) {
    const TensorSpec& tensor = source.tensors()[static_cast<size_t>(mapping.tensor)];
    const auto [at, is_new] = index.emplace(mapping.stored, out.size());
    if (is_new) {
      out.push_back({.name = mapping.stored,
                     .shape = mapping.shape,
                     .transpose = mapping.transpose,
                     .own_dtype = tensor.balances ? std::optional(DType::kF32) : std::nullopt});
    }
    std::vector<OutputRun>& runs = out[at->second].runs;
    for (const RowRun& run : row_runs(mapping, tensor.shape)) {
      if (run.stride == 1 || mapping.transpose) {
        runs.push_back({run.stored, run.count, mapping.tensor, run.logical, run.stride, mapping.line});
        continue;
      }
      for (int64_t k = 0; k < run.count; ++k)  // rows between those of others, of heads of one channel
        runs.push_back({run.stored + k * run.stride, 1, mapping.tensor, run.logical + k});
    }
  }
  for (Output& output : out) {
    std::ranges::sort(output.runs, [](const OutputRun& a, const OutputRun& b) {
      return std::pair(a.line, a.stored) < std::pair(b.line, b.stored);
    });
    int64_t rows = 0;
    for (const OutputRun& run : output.runs) rows += run.count;
    check_runs(output, output.transpose ? output.shape.back() : rows);
  }
  if (blocks == nullptr) return out;
  std::vector<Output> parts;
  for (Output& output : out) {
    const int64_t tensor = output.runs.front().source;
    const Mapping& mapping = *std::ranges::lower_bound(mappings, tensor, {}, &Mapping::tensor);
    const bool quantised = blocks->holds(source.tensors()[static_cast<size_t>(tensor)], mapping);
    output.matrix = output.shape;
    if (quantised) output.part = OutputPart::kCodes;
    parts.push_back(std::move(output));
    if (!quantised) continue;
    Output scales = parts.back();
    scales.name += kScaleSuffix;
    scales.shape = blocks->scales_of(scales.matrix);
    scales.part = OutputPart::kScales;
    parts.push_back(std::move(scales));
  }
  return parts;
}

Result<std::unique_ptr<TensorSource>> open_outputs(const fs::path& dir, const CheckpointWeights& weights,
                                                   const std::vector<Output>& outputs, DType dtype,
                                                   const BlockFp8& blocks, std::span<const int64_t> tensors,
                                                   OutputReads reads) {
  RT_TRY_SET(std::unique_ptr<CheckpointTensors> source,
             CheckpointTensors::open(dir, weights, outputs, dtype, blocks, tensors, reads));
  return std::unique_ptr<TensorSource>(std::move(source));
}

}  // namespace cairn::convert
