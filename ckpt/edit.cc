#include "ckpt/edit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/stream_save.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/tensors/numbers.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kPieceElems = 64 << 10;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// Layers of the result that are in `list`, by the layers they come from.
std::vector<int64_t> moved(const std::vector<int64_t>& list, const std::vector<int64_t>& from) {
  std::vector<int64_t> out;
  for (size_t k = 0; k < from.size(); ++k) {
    if (std::ranges::find(list, from[k]) != list.end()) out.push_back(static_cast<int64_t>(k));
  }
  return out;
}

/// The source's name of a weight of the result.
std::string source_name(const TensorSpec& tensor, const ModelEdit& edit) {
  if (tensor.layer < 0 || edit.layers.empty()) return tensor.name;
  const std::string prefix = fmt::format("layers.{}.", tensor.layer);
  RT_CHECK(tensor.name.starts_with(prefix), "{} is of layer {}", tensor.name, tensor.layer);
  return fmt::format("layers.{}.{}", edit.layers[static_cast<size_t>(tensor.layer)], tensor.name.substr(prefix.size()));
}

/// Whether a file of an import states the model's shape, which has changed.
bool describes_the_model(const TensorEntry& file) {
  return file.name == "config.json" || file.name.ends_with(".index.json");
}

class Edit {
 public:
  Edit(CheckpointReader& reader, const ModelEdit& edit, const Plan& target, const EditOptions& options)
      : reader_(reader), planner_(reader.manifest()), edit_(edit), target_(target), options_(options) {}

  Status check();
  Manifest skeleton(const RunText& run);
  Status find_means(int64_t window_bytes);
  std::vector<WriterPart> parts(int64_t window_bytes);
  int64_t new_rows() const { return new_rows_; }

 private:
  /// A shard of the result: the first `old_bytes` are the stream's item, the rest new rows.
  struct Filled {
    int64_t item = -1, old_bytes = 0;
    Box box;
    const TensorEntry* tensor = nullptr;
    std::string name;
  };
  const Manifest& source() const { return reader_.manifest(); }
  void add(WriterPart& part, int64_t tensor, int64_t from, const Box& box);
  Status fill(const Filled& shard, int64_t offset, std::span<std::byte> out);

  CheckpointReader& reader_;
  LoadPlanner planner_;
  const ModelEdit& edit_;
  const Plan& target_;
  const EditOptions& options_;
  std::vector<int64_t> from_;  // of the plan's tensors: the source's
  Manifest skeleton_;
  std::map<std::string, std::vector<double>, std::less<>> new_values_;  // of a new row, by tensor
  std::vector<StreamItem> items_;
  std::vector<std::unique_ptr<Filled>> shards_;
  std::unique_ptr<BoxStream> stream_;
  int64_t new_rows_ = 0, done_bytes_ = 0, total_bytes_ = 0;
};

/// Finds the source of every weight.
Status Edit::check() {
  for (const TensorSpec& tensor : target_.tensors) {
    const std::string name = source_name(tensor, edit_);
    const int64_t from = planner_.find(kWeightKind, name);
    if (from < 0)
      return invalid(fmt::format("weight {} of the result would come from {}, which is missing", tensor.name, name));
    const Shape& had = source().tensors[static_cast<size_t>(from)].shape;
    Shape without_rows = tensor.shape, had_without = had;
    if (tensor.vocab_rows && !had.empty()) without_rows[0] = had_without[0] = 0;
    if (without_rows != had_without) {
      return invalid(fmt::format("weight {} is of {} in the result, and {} of the source is of {}", tensor.name,
                                 to_string(tensor.shape), name, to_string(had)));
    }
    if (tensor.vocab_rows) new_rows_ = std::max(new_rows_, tensor.shape[0] - had[0]);
    from_.push_back(from);
  }
  return {};
}

Manifest Edit::skeleton(const RunText& run) {
  RunText text = run;
  text.parents = source().run.parents;
  if (!source().run.id.empty()) text.parents.push_back(source().run.id);
  skeleton_ = manifest_skeleton(target_, text);
  skeleton_.step = source().step;
  skeleton_.samples = source().samples;
  skeleton_.tokens = source().tokens;
  skeleton_.state = "{}";
  skeleton_.origin = fmt::format("edit of {} step {}", source().run.id.empty() ? "?" : source().run.id, source().step);
  if (!edit_.layers.empty()) skeleton_.origin += fmt::format(", layers {}", fmt::join(edit_.layers, " "));
  if (edit_.vocab > 0) skeleton_.origin += fmt::format(", vocab {}", edit_.vocab);
  skeleton_.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  skeleton_.tensors = state_tensors(target_.tensors, StateKinds::weights_alone());
  for (size_t t = 0; t < skeleton_.tensors.size(); ++t)
    skeleton_.tensors[t].dtype = source().tensors[static_cast<size_t>(from_[t])].dtype;
  for (const TensorEntry& entry : source().tensors) {
    if (!is_state_kind(entry.kind) && !describes_the_model(entry)) skeleton_.tensors.push_back(entry);
  }
  return skeleton_;
}

/// The values of a new row of each table that grows.
Status Edit::find_means(int64_t window_bytes) {
  std::vector<std::pair<const TensorSpec*, const TensorEntry*>> grown;
  for (size_t t = 0; t < target_.tensors.size(); ++t) {
    const TensorSpec& tensor = target_.tensors[t];
    const TensorEntry& from = source().tensors[static_cast<size_t>(from_[t])];
    if (!tensor.vocab_rows || tensor.shape[0] <= from.shape[0]) continue;
    new_values_[tensor.name].assign(static_cast<size_t>(count_elems(from.shape) / from.shape[0]), 0);
    if (edit_.new_rows == NewRows::kZero) continue;
    grown.emplace_back(&tensor, &from);
    items_.push_back(stream_item(source(), from_[t], Box::whole(from.shape)));
  }
  if (grown.empty()) return {};
  BoxStream stream(reader_, planner_, items_, {.memory_bytes = window_bytes, .ahead = options_.source_io != nullptr});
  std::vector<std::byte> bytes;
  std::vector<double> values;
  for (size_t k = 0; k < grown.size(); ++k) {
    const auto& [tensor, from] = grown[k];
    std::vector<double>& mean = new_values_[tensor->name];
    const int64_t elems = count_elems(from->shape), size = dtype_size_bytes(from->dtype);
    for (int64_t at = 0; at < elems; at += kPieceElems) {
      if (options_.cancel != nullptr && *options_.cancel) return Error{ErrorCode::kStopped, "stopped"};
      const int64_t n = std::min(kPieceElems, elems - at);
      bytes.resize(static_cast<size_t>(n * size));
      values.resize(static_cast<size_t>(n));
      RT_TRY(stream.copy(static_cast<int64_t>(k), at * size, bytes));
      to_doubles(from->dtype, bytes, values);
      for (int64_t e = 0; e < n; ++e) mean[static_cast<size_t>((at + e) % std::ssize(mean))] += values[e];
    }
    for (double& value : mean) value /= static_cast<double>(from->shape[0]);
  }
  items_.clear();
  return {};
}

void Edit::add(WriterPart& part, int64_t tensor, int64_t from, const Box& box) {
  const TensorEntry& entry = skeleton_.tensors[static_cast<size_t>(tensor)];
  const int64_t size = dtype_size_bytes(entry.dtype), bytes = box.count_elems() * size;
  auto shard = std::make_unique<Filled>(Filled{.box = box, .name = entry.name});
  shard->tensor = &source().tensors[static_cast<size_t>(from)];
  Box old = box;
  if (box.dims() > 0) old.hi[0] = std::min(old.hi[0], std::max(old.lo[0], shard->tensor->shape[0]));
  shard->old_bytes = old.count_elems() * size;
  if (shard->old_bytes > 0) {
    shard->item = std::ssize(items_);
    items_.push_back(stream_item(source(), from, std::move(old)));
  }
  total_bytes_ += bytes;
  part.shards.push_back({.tensor = tensor,
                         .lo = box.lo,
                         .hi = box.hi,
                         .bytes = bytes,
                         .fill = [this, filled = shard.get()](int64_t offset, std::span<std::byte> out) {
                           return fill(*filled, offset, out);
                         }});
  shards_.push_back(std::move(shard));
}

/// Files of the target's ranks; rank 0 has the files of an import too.
std::vector<WriterPart> Edit::parts(int64_t window_bytes) {
  const StateKinds kinds = StateKinds::weights_alone();
  const StateIndex index(target_.tensors, kinds);
  std::vector<WriterPart> out;
  for (int64_t rank = 0; rank < target_.mesh.world(); ++rank) {
    WriterPart part{shard_file_name(rank, target_.mesh.world()), {}};
    for (const SlotShard& shard : slot_layout(target_, rank, kinds).shards)
      add(part, index.at(shard.kind, shard.tensor), from_[static_cast<size_t>(shard.tensor)], shard.box);
    for (int64_t t = index.size(); rank == 0 && t < std::ssize(skeleton_.tensors); ++t) {
      const TensorEntry& file = skeleton_.tensors[static_cast<size_t>(t)];
      add(part, t, planner_.find(file.kind, file.name), Box::whole(file.shape));
    }
    if (!part.shards.empty()) out.push_back(std::move(part));
  }
  stream_ = std::make_unique<BoxStream>(
      reader_, planner_, items_, StreamOptions{.memory_bytes = window_bytes, .ahead = options_.source_io != nullptr});
  return out;
}

Status Edit::fill(const Filled& shard, int64_t offset, std::span<std::byte> out) {
  const int64_t old = std::clamp<int64_t>(shard.old_bytes - offset, 0, std::ssize(out));
  if (old > 0) RT_TRY(stream_->copy(shard.item, offset, out.first(static_cast<size_t>(old))));
  if (old < std::ssize(out)) {
    const std::vector<double>& row = new_values_.at(shard.name);
    const int64_t size = dtype_size_bytes(shard.tensor->dtype);
    const int64_t columns = shard.box.dims() > 1 ? shard.box.extent(1) : 1,
                  lo = shard.box.dims() > 1 ? shard.box.lo[1] : 0;
    std::vector<double> values(static_cast<size_t>((std::ssize(out) - old) / size));
    for (int64_t e = 0; e < std::ssize(values); ++e)
      values[static_cast<size_t>(e)] = row[static_cast<size_t>(lo + ((offset + old) / size + e) % columns)];
    from_doubles(shard.tensor->dtype, values, out.subspan(static_cast<size_t>(old)));
  }
  done_bytes_ += std::ssize(out);
  if (options_.progress) options_.progress(done_bytes_, total_bytes_);
  return {};
}

}  // namespace

Result<ModelConfig> edited_model(const ModelConfig& model, const ModelEdit& edit) {
  ModelConfig out = model;
  if (edit.vocab > 0) out.vocab = edit.vocab;
  if (edit.layers.empty()) return out;
  for (const int64_t layer : edit.layers) {
    if (layer < 0 || layer >= model.layers)
      return invalid(fmt::format("layer {}: the model has layers 0 to {}", layer, model.layers - 1));
  }
  if (model.attention_scale_by_layer)
    return Error{ErrorCode::kUnsupported,
                 "model.attention_scale_by_layer: a layer would compute something else in another place"};
  out.layers = std::ssize(edit.layers);
  out.moe.dense_layers = moved(model.moe.dense_layers, edit.layers);
  out.nope_layers = moved(model.nope_layers, edit.layers);
  // An empty list of these means all layers.
  out.window_layers = moved(model.window_layers, edit.layers);
  if (!model.window_layers.empty() && out.window_layers.empty()) out.sliding_window = 0;
  out.chunk_layers = moved(model.chunk_layers, edit.layers);
  if (!model.chunk_layers.empty() && out.chunk_layers.empty()) out.attention_chunk = 0;
  return out;
}

Result<EditReport> edit_checkpoint(IoBackend& io, const fs::path& source_dir, const fs::path& checkpoints_dir,
                                   const ModelEdit& edit, const Plan& target, RunText run, const EditOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  int64_t largest = 0;
  {
    RT_TRY_SET(const Manifest manifest, read_manifest(io, source_dir));
    largest = largest_chunk(manifest);
  }
  RT_TRY_SET(const SourceMemory memory, memory_of_sources(options.memory_bytes, 1, largest, "an edit"));
  IoBackend& own = options.source_io != nullptr ? *options.source_io : io;
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(own, source_dir, {.window_bytes = memory.reader_bytes}));
  Edit work(reader, edit, target, options);
  RT_TRY(work.check().with(source_dir.string()));
  Manifest skeleton = work.skeleton(run);
  RT_TRY(work.find_means(memory.window_bytes));
  const std::vector<WriterPart> parts = work.parts(memory.window_bytes);
  RT_TRY_SET(SaveReport saved,
             save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts,
                             stream_save(options.memory_bytes, options.replace_existing, options.cancel)));
  return EditReport{.dir = std::move(saved.dir),
                    .manifest = std::move(saved.manifest),
                    .tensors = std::ssize(target.tensors),
                    .new_rows = std::max<int64_t>(0, work.new_rows()),
                    .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

}  // namespace cairn::ckpt
