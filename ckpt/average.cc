#include "ckpt/average.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/tensors/numbers.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

bool is_weight(const TensorEntry& tensor) { return tensor.kind == kWeightKind; }
bool is_moment(const TensorEntry& tensor) { return is_state_kind(tensor.kind) && !is_weight(tensor); }  // or an average

std::vector<TensorEntry> weights_of(const Manifest& manifest) {
  std::vector<TensorEntry> out;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(out), is_weight);
  return out;
}

bool all_finite(std::span<const double> values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

/// One source, read in the order in which the result is written.
struct Input {
  std::unique_ptr<IoBackend> io;
  std::unique_ptr<CheckpointReader> reader;
  std::unique_ptr<LoadPlanner> planner;
  std::vector<StreamItem> items;
  std::unique_ptr<BoxStream> stream;
  double share = 0;
  std::string text;  // "run-a step 40 x 0.25"
};

}  // namespace

Result<AverageReport> average_checkpoints(IoBackend& io, std::span<const AverageSource> sources,
                                          const fs::path& checkpoints_dir, const AverageOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  if (sources.size() < 2)
    return invalid(fmt::format("an average is of two checkpoints or more, got {}", sources.size()));
  double total_weight = 0;
  for (const AverageSource& source : sources) {
    if (!std::isfinite(source.weight) || source.weight <= 0)
      return invalid(fmt::format("{}: weight {} is no positive number", source.dir.string(), source.weight));
    total_weight += source.weight;
  }
  if (!std::isfinite(total_weight)) return invalid("the sum of the weights is too large for a double");
  const auto count = static_cast<int64_t>(sources.size());
  int64_t largest = 0;
  for (const AverageSource& source : sources) {
    RT_TRY_SET(const Manifest manifest, read_manifest(io, source.dir));
    largest = std::max(largest, largest_chunk(manifest));
  }
  RT_TRY_SET(const SourceMemory memory,
             memory_of_sources(options.memory_bytes, count, largest, fmt::format("an average of {}", count)));
  std::vector<Input> inputs(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    Input& input = inputs[i];
    if (options.make_io) input.io = options.make_io();
    IoBackend& own = input.io ? *input.io : io;
    RT_TRY_SET(CheckpointReader reader,
               CheckpointReader::open(own, sources[i].dir,
                                      {.window_bytes = memory.reader_bytes,
                                       .open_files = std::max<int64_t>(1, 2 * kOpenReadFiles / count)}));
    input.reader = std::make_unique<CheckpointReader>(std::move(reader));
    const Manifest& manifest = input.reader->manifest();
    input.planner = std::make_unique<LoadPlanner>(manifest);
    input.share = sources[i].weight / total_weight;
    input.text =
        fmt::format("{} step {} x {:.6g}", manifest.run.id.empty() ? "?" : manifest.run.id, manifest.step, input.share);
  }
  const Manifest& last = inputs.back().reader->manifest();
  const std::vector<TensorEntry> weights = weights_of(last);
  if (weights.empty()) return invalid(fmt::format("{}: has no weights", sources.back().dir.string()));
  for (const TensorEntry& tensor : weights) {
    if (is_float(tensor.dtype)) continue;
    return invalid(fmt::format("{}: weight {} is of {}, which has no mean", sources.back().dir.string(), tensor.name,
                               dtype_name(tensor.dtype)));
  }
  for (size_t i = 0; i + 1 < inputs.size(); ++i) {
    Manifest only;
    only.tensors = weights_of(inputs[i].reader->manifest());
    RT_TRY(check_tensors(only, weights)
               .with(fmt::format("{} against {}", sources[i].dir.string(), sources.back().dir.string())));
  }

  if (options.moments == Moments::kLast && !has_moments(last)) {
    return invalid(
        fmt::format("{}: weights only: there are no moments to take and to train on with; leave them out, or "
                    "name a checkpoint that has some last",
                    sources.back().dir.string()));
  }

  AverageReport report;
  Manifest skeleton = last;
  skeleton.files.clear();
  skeleton.shards.clear();
  skeleton.writer = {};
  skeleton.extra = "{}";     // no agent has saved it
  skeleton.metrics.clear();  // of the sources, not of what comes out
  skeleton.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  skeleton.origin = "average of ";
  for (const Input& input : inputs) skeleton.origin += (&input == inputs.data() ? "" : ", ") + input.text;
  for (const Input& input : inputs) {
    const std::string& id = input.reader->manifest().run.id;
    std::vector<std::string>& parents = skeleton.run.parents;
    if (!id.empty() && std::find(parents.begin(), parents.end(), id) == parents.end()) parents.push_back(id);
  }
  skeleton.run.id = options.run_id;
  if (!options.run_name.empty()) skeleton.run.name = options.run_name;
  std::vector<int64_t> new_index(last.tensors.size(), -1);
  if (options.moments == Moments::kDrop) {
    skeleton.state = "{}";
    skeleton.tensors.clear();
    for (size_t t = 0; t < last.tensors.size(); ++t) {
      if (is_moment(last.tensors[t])) continue;
      new_index[t] = static_cast<int64_t>(skeleton.tensors.size());
      skeleton.tensors.push_back(last.tensors[t]);
    }
  } else {
    for (size_t t = 0; t < last.tensors.size(); ++t) new_index[t] = static_cast<int64_t>(t);
  }
  report.averaged_tensors = static_cast<int64_t>(weights.size());

  constexpr size_t kPieceElems = 64 << 10;
  int64_t total_bytes = 0, done_bytes = 0;
  std::vector<std::byte> bytes;
  std::vector<double> values, sums;
  std::vector<std::vector<bool>> not_finite(last.tensors.size());  // sources, of tensors that have such elements
  const auto mean = [&](const TensorEntry& tensor, const std::vector<int64_t>& item_of, int64_t offset,
                        std::span<std::byte> out) -> Status {
    const size_t elems = out.size() / static_cast<size_t>(dtype_size_bytes(tensor.dtype));
    bytes.resize(out.size());
    values.resize(elems);
    sums.assign(elems, 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      RT_TRY(inputs[i].stream->copy(item_of[i], offset, bytes));
      to_doubles(tensor.dtype, bytes, values);
      for (size_t e = 0; e < elems; ++e) sums[e] += inputs[i].share * values[e];
    }
    from_doubles(tensor.dtype, sums, out);
    if (all_finite(sums)) return {};
    std::vector<bool>& from = not_finite[static_cast<size_t>(&tensor - last.tensors.data())];
    from.resize(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (from[i]) continue;
      RT_TRY(inputs[i].stream->copy(item_of[i], offset, bytes));  // again: it is in the window still, mostly
      to_doubles(tensor.dtype, bytes, values);
      from[i] = !all_finite(values);
    }
    return {};
  };
  const auto fill = [&](const TensorEntry& tensor, const std::vector<int64_t>& item_of, int64_t offset,
                        std::span<std::byte> out) -> Status {
    if (!is_weight(tensor)) {
      RT_TRY(inputs.back().stream->copy(item_of.back(), offset, out));
    } else {
      const size_t piece = kPieceElems * static_cast<size_t>(dtype_size_bytes(tensor.dtype));
      for (size_t at = 0; at < out.size(); at += piece) {
        RT_TRY(mean(tensor, item_of, offset + static_cast<int64_t>(at),
                    out.subspan(at, std::min(piece, out.size() - at))));
      }
    }
    done_bytes += static_cast<int64_t>(out.size());
    if (options.progress) options.progress(done_bytes, total_bytes);
    return {};
  };

  std::vector<WriterPart> parts;
  for (size_t f = 0; f < last.files.size(); ++f) {
    WriterPart part;
    std::vector<const ShardEntry*> shards;
    for (const ShardEntry& shard : last.shards) {
      if (shard.file == static_cast<int64_t>(f) && new_index[static_cast<size_t>(shard.tensor)] >= 0)
        shards.push_back(&shard);
    }
    std::sort(shards.begin(), shards.end(),
              [](const ShardEntry* a, const ShardEntry* b) { return a->offset < b->offset; });
    for (const ShardEntry* shard : shards) {
      const TensorEntry& tensor = last.tensors[static_cast<size_t>(shard->tensor)];
      std::vector<int64_t> item_of(inputs.size(), -1);
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (!is_weight(tensor) && i + 1 < inputs.size()) continue;
        item_of[i] = static_cast<int64_t>(inputs[i].items.size());
        inputs[i].items.push_back(
            stream_item(inputs[i].reader->manifest(), inputs[i].planner->find(tensor.kind, tensor.name), shard->box));
      }
      total_bytes += shard->bytes;
      part.shards.push_back({.tensor = new_index[static_cast<size_t>(shard->tensor)],
                             .lo = shard->box.lo,
                             .hi = shard->box.hi,
                             .bytes = shard->bytes,
                             .fill = [&fill, &tensor, item_of](int64_t offset, std::span<std::byte> out) {
                               return fill(tensor, item_of, offset, out);
                             }});
    }
    if (!part.shards.empty()) parts.push_back(std::move(part));
  }
  for (size_t p = 0; p < parts.size(); ++p)
    parts[p].file_name = shard_file_name(static_cast<int64_t>(p), static_cast<int64_t>(parts.size()));
  for (Input& input : inputs) {
    input.stream =
        std::make_unique<BoxStream>(*input.reader, *input.planner, input.items,
                                    StreamOptions{.memory_bytes = memory.window_bytes, .ahead = input.io != nullptr});
  }

  SaveOptions save;
  save.fill_bytes = payload_share(options.memory_bytes) / 8;
  save.chunk_bytes = int64_t{64} << 10;
  while (save.chunk_bytes < int64_t{4} << 20 && save.chunk_bytes * 2 <= save.fill_bytes / 4) save.chunk_bytes *= 2;
  save.replace_existing = options.replace_existing;
  save.cancel = options.cancel;
  RT_TRY_SET(SaveReport saved, save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts, save));
  report.dir = std::move(saved.dir);
  report.manifest = std::move(saved.manifest);
  for (size_t t = 0; t < not_finite.size(); ++t) {
    if (not_finite[t].empty()) continue;
    NotFinite& one = report.not_finite.emplace_back(NotFinite{last.tensors[t].name, {}});
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (not_finite[t][i]) one.sources.push_back(i);
    }
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace cairn::ckpt
