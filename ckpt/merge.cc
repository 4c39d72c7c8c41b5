#include "ckpt/merge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <set>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/save.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/plan/save_plan.h"
#include "ckpt/stream_save.h"
#include "ckpt/tensors/box_stream.h"
#include "ckpt/tensors/numbers.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostPieceElems = 64 << 10, kPieceDoubles = 512 << 10;  // of one source, of all

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

/// The row-major indices in a tensor of `shape` of a box's elements, from its element `first` on.
void indices_in(const Shape& shape, const Box& box, int64_t first, std::span<int64_t> out) {
  const int64_t dims = box.dims();
  if (dims == 0) {
    std::ranges::fill(out, 0);
    return;
  }
  std::vector<int64_t> at(static_cast<size_t>(dims));
  int64_t left = first;
  for (int64_t d = dims; d-- > 0; left /= box.extent(d)) at[d] = box.lo[d] + left % box.extent(d);
  for (size_t done = 0; done < out.size();) {
    int64_t index = flat_offset(shape, at);
    for (int64_t& last = at[dims - 1]; last < box.hi[dims - 1] && done < out.size(); ++last) out[done++] = index++;
    for (int64_t d = dims - 1; d > 0 && at[d] == box.hi[d]; --d) {
      at[d] = box.lo[d];
      ++at[d - 1];
    }
  }
}

/// One source, read in the order in which the result is written.
struct Input {
  fs::path dir;
  std::unique_ptr<IoBackend> io;
  std::unique_ptr<CheckpointReader> reader;
  std::unique_ptr<LoadPlanner> planner;
  std::vector<StreamItem> items;
  std::unique_ptr<BoxStream> stream;

  const Manifest& manifest() const { return reader->manifest(); }
  int64_t find(const TensorEntry& tensor) const { return planner->find(tensor.kind, tensor.name); }
  std::string name() const {
    return fmt::format("{} step {}", manifest().run.id.empty() ? "?" : manifest().run.id, manifest().step);
  }
};

class Merge {
 public:
  Merge(IoBackend& io, const MergeOptions& options) : io_(io), options_(options), rule_(options.rule) {}

  Result<MergeReport> run(std::span<const fs::path> sources, const fs::path& checkpoints_dir);

 private:
  Status open(std::span<const fs::path> sources);
  Status check() const;
  Manifest skeleton();
  std::string origin() const;
  void open_streams();
  Status load(const std::vector<int64_t>& item_of, DType dtype, int64_t offset, size_t bytes);
  MergePiece piece() const;
  Status look_at_all();
  std::vector<WriterPart> parts();
  Status fill(const TensorEntry& tensor, const Box& box, const std::vector<int64_t>& item_of, int64_t offset,
              std::span<std::byte> out);
  Status merge_piece(const TensorEntry& tensor, const Box& box, const std::vector<int64_t>& item_of, int64_t offset,
                     std::span<std::byte> out);

  const Manifest& last() const { return inputs_.back().manifest(); }
  size_t tensor_index(const TensorEntry& tensor) const { return static_cast<size_t>(&tensor - last().tensors.data()); }
  size_t piece_elems() const { return std::min(kMostPieceElems, kPieceDoubles / inputs_.size() + 1); }

  IoBackend& io_;
  const MergeOptions& options_;
  MergeRule rule_;
  std::vector<Input> inputs_;  // the base first, where the rule has one
  size_t bases_ = 0;           // of them
  SourceMemory memory_;
  std::vector<int64_t> new_index_;            // of the last source's tensors in the result; -1: dropped
  std::vector<TensorMerge> merges_;           // of its weights
  std::vector<int64_t> merge_of_;             // by tensor
  std::vector<std::set<size_t>> not_finite_;  // inputs, by tensor
  std::vector<bool> result_not_finite_;       // by tensor
  int64_t total_bytes_ = 0, done_bytes_ = 0;
  std::vector<std::byte> bytes_;
  std::vector<double> base_, merged_;
  std::vector<std::vector<double>> values_;  // of the sources without the base
  std::vector<int64_t> index_;
};

Status Merge::open(std::span<const fs::path> sources) {
  if (rule_.weights.empty()) rule_.weights.assign(sources.size(), 1);
  RT_TRY(check_merge_rule(rule_, sources.size()));
  const std::string_view method = merge_method_name(rule_.method);
  if (needs_base(rule_.method) && options_.base.empty())
    return invalid(fmt::format("{} merges what checkpoints have learned since a base: name the base", method));
  if (!needs_base(rule_.method) && !options_.base.empty())
    return invalid(fmt::format("{} reads no base; leave it out", method));
  std::vector<fs::path> dirs(sources.begin(), sources.end());
  if (!options_.base.empty()) {
    dirs.insert(dirs.begin(), options_.base);
    bases_ = 1;
  }
  const auto count = static_cast<int64_t>(dirs.size());
  int64_t largest = 0;
  for (const fs::path& dir : dirs) {
    RT_TRY_SET(const Manifest manifest, read_manifest(io_, dir));
    largest = std::max(largest, largest_chunk(manifest));
  }
  RT_TRY_SET(memory_, memory_of_sources(options_.memory_bytes, count, largest, fmt::format("a merge of {}", count)));
  for (const fs::path& dir : dirs) {
    Input input{.dir = dir};
    if (options_.make_io) input.io = options_.make_io();
    IoBackend& own = input.io ? *input.io : io_;
    RT_TRY_SET(CheckpointReader reader,
               CheckpointReader::open(own, dir,
                                      {.window_bytes = memory_.reader_bytes,
                                       .open_files = std::max<int64_t>(1, 2 * kOpenReadFiles / count)}));
    input.reader = std::make_unique<CheckpointReader>(std::move(reader));
    input.planner = std::make_unique<LoadPlanner>(input.manifest());
    inputs_.push_back(std::move(input));
  }
  values_.resize(inputs_.size() - bases_);
  return {};
}

Status Merge::check() const {
  const fs::path& dir = inputs_.back().dir;
  const std::vector<TensorEntry> weights = weights_of(last());
  if (weights.empty()) return invalid(fmt::format("{}: has no weights", dir.string()));
  for (const TensorEntry& tensor : weights) {
    if (is_float(tensor.dtype)) continue;
    return invalid(
        fmt::format("{}: weight {} is of {}, which has no mean", dir.string(), tensor.name, dtype_name(tensor.dtype)));
  }
  for (const Input& input : inputs_) {
    if (&input == &inputs_.back()) continue;
    Manifest only;
    only.tensors = weights_of(input.manifest());
    RT_TRY(check_tensors(only, weights).with(fmt::format("{} against {}", input.dir.string(), dir.string())));
  }
  if (options_.moments == Moments::kLast && !has_moments(last())) {
    return invalid(
        fmt::format("{}: weights only: there are no moments to take and to train on with; leave them out, or "
                    "name a checkpoint that has some last",
                    dir.string()));
  }
  return {};
}

/// "average of a step 3 x 0.5, b step 4 x 0.5", "ties of a step 3 x 1, b step 4 x 1 on c step 2 (density 0.2, 0.2)"
std::string Merge::origin() const {
  const bool mean = rule_.method == MergeMethod::kLinear && rule_.normalize;
  double total = 0;
  for (const double weight : rule_.weights) total += weight;
  std::vector<std::string> of, notes;
  for (size_t i = 0; i < values_.size(); ++i) {
    const double weight = rule_.method == MergeMethod::kSlerp ? (i == 0 ? 1 - rule_.t : rule_.t)
                          : mean                              ? rule_.weights[i] / total
                                                              : rule_.weights[i];
    of.push_back(fmt::format("{} x {:.6g}", inputs_[bases_ + i].name(), weight));
  }
  if (reads_density(rule_.method)) notes.push_back(fmt::format("density {:.6g}", fmt::join(rule_.densities, ", ")));
  if (draws(rule_.method)) notes.push_back(fmt::format("seed {}", rule_.seed));
  if (bases_ > 0 && rule_.lambda != 1) notes.push_back(fmt::format("lambda {:.6g}", rule_.lambda));
  if (rule_.normalize != normalizes(rule_.method))
    notes.push_back(rule_.normalize ? "divided by the weights" : "not divided by the weights");
  return fmt::format("{} of {}{}{}", mean ? "average" : merge_method_name(rule_.method), fmt::join(of, ", "),
                     bases_ > 0 ? " on " + inputs_.front().name() : "",
                     notes.empty() ? "" : fmt::format(" ({})", fmt::join(notes, "; ")));
}

/// The result's manifest without files and shards; fills in where its tensors come from.
Manifest Merge::skeleton() {
  Manifest out = last();
  out.files.clear();
  out.shards.clear();
  out.writer = {};
  out.extra = "{}";     // no agent has saved it
  out.metrics.clear();  // of the sources, not of what comes out
  out.created_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  out.origin = origin();
  const auto add_parent = [&](const Input& input) {
    const std::string& id = input.manifest().run.id;
    std::vector<std::string>& parents = out.run.parents;
    if (!id.empty() && std::find(parents.begin(), parents.end(), id) == parents.end()) parents.push_back(id);
  };
  for (size_t i = bases_; i < inputs_.size(); ++i) add_parent(inputs_[i]);
  if (bases_ > 0) add_parent(inputs_.front());
  out.run.id = options_.run_id;
  if (!options_.run_name.empty()) out.run.name = options_.run_name;
  if (options_.moments == Moments::kDrop) {
    out.state = "{}";
    out.tensors.clear();
  }
  new_index_.assign(last().tensors.size(), -1);
  for (size_t t = 0; t < last().tensors.size(); ++t) {
    if (options_.moments == Moments::kDrop) {
      if (is_moment(last().tensors[t])) continue;
      out.tensors.push_back(last().tensors[t]);
      new_index_[t] = std::ssize(out.tensors) - 1;
    } else {
      new_index_[t] = static_cast<int64_t>(t);
    }
  }
  return out;
}

void Merge::open_streams() {
  for (Input& input : inputs_) {
    input.stream =
        std::make_unique<BoxStream>(*input.reader, *input.planner, input.items,
                                    StreamOptions{.memory_bytes = memory_.window_bytes, .ahead = input.io != nullptr});
  }
}

/// The same elements of every input, as doubles.
Status Merge::load(const std::vector<int64_t>& item_of, DType dtype, int64_t offset, size_t bytes) {
  const size_t elems = bytes / static_cast<size_t>(dtype_size_bytes(dtype));
  bytes_.resize(bytes);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    std::vector<double>& into = i < bases_ ? base_ : values_[i - bases_];
    into.resize(elems);
    RT_TRY(inputs_[i].stream->copy(item_of[i], offset, bytes_));
    to_doubles(dtype, bytes_, into);
  }
  return {};
}

MergePiece Merge::piece() const { return {.base = base_, .sources = values_, .index = index_}; }

/// Shows every weight whole to its rule, as often as the rule wants to see it.
Status Merge::look_at_all() {
  const int passes = TensorMerge::passes(rule_.method);
  merge_of_.assign(last().tensors.size(), -1);
  for (const TensorEntry& tensor : last().tensors) {
    if (!is_weight(tensor)) continue;
    for (Input& input : inputs_) {
      const StreamItem whole = stream_item(input.manifest(), input.find(tensor), Box::whole(tensor.shape));
      input.items.insert(input.items.end(), static_cast<size_t>(passes), whole);
    }
  }
  if (passes > 0) open_streams();
  std::vector<int64_t> item_of(inputs_.size(), 0);
  for (const TensorEntry& tensor : last().tensors) {
    if (!is_weight(tensor)) continue;
    const int64_t elems = count_elems(tensor.shape), elem_bytes = dtype_size_bytes(tensor.dtype);
    merge_of_[tensor_index(tensor)] = std::ssize(merges_);
    TensorMerge& merge = merges_.emplace_back(rule_, tensor.name, elems);
    for (int pass = 0; pass < passes; ++pass) {
      for (int64_t at = 0; at < elems; at += static_cast<int64_t>(piece_elems())) {
        if (options_.cancel != nullptr && *options_.cancel) return Error{ErrorCode::kStopped, "stopped"};
        const int64_t n = std::min(elems - at, static_cast<int64_t>(piece_elems()));
        RT_TRY(load(item_of, tensor.dtype, at * elem_bytes, static_cast<size_t>(n * elem_bytes)));
        index_.resize(static_cast<size_t>(n));
        for (int64_t e = 0; e < n; ++e) index_[static_cast<size_t>(e)] = at + e;
        merge.look(pass, piece());
      }
      merge.end_pass(pass);
      for (int64_t& item : item_of) ++item;
    }
  }
  for (Input& input : inputs_) {
    input.stream.reset();
    input.items.clear();
  }
  return {};
}

Status Merge::merge_piece(const TensorEntry& tensor, const Box& box, const std::vector<int64_t>& item_of,
                          int64_t offset, std::span<std::byte> out) {
  RT_TRY(load(item_of, tensor.dtype, offset, out.size()));
  merged_.resize(values_.front().size());
  index_.resize(merged_.size());
  indices_in(tensor.shape, box, offset / dtype_size_bytes(tensor.dtype), index_);
  const size_t t = tensor_index(tensor);
  merges_[static_cast<size_t>(merge_of_[t])].merge(piece(), merged_);
  from_doubles(tensor.dtype, merged_, out);
  if (all_finite(merged_)) return {};
  result_not_finite_[t] = true;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!all_finite(i < bases_ ? base_ : values_[i - bases_])) not_finite_[t].insert(i);
  }
  return {};
}

Status Merge::fill(const TensorEntry& tensor, const Box& box, const std::vector<int64_t>& item_of, int64_t offset,
                   std::span<std::byte> out) {
  if (!is_weight(tensor)) {
    RT_TRY(inputs_.back().stream->copy(item_of.back(), offset, out));
  } else {
    const size_t piece = piece_elems() * static_cast<size_t>(dtype_size_bytes(tensor.dtype));
    for (size_t at = 0; at < out.size(); at += piece) {
      RT_TRY(merge_piece(tensor, box, item_of, offset + static_cast<int64_t>(at),
                         out.subspan(at, std::min(piece, out.size() - at))));
    }
  }
  done_bytes_ += static_cast<int64_t>(out.size());
  if (options_.progress) options_.progress(done_bytes_, total_bytes_);
  return {};
}

/// Files as the last source has them; each shard is computed as it is written.
std::vector<WriterPart> Merge::parts() {
  std::vector<WriterPart> out;
  for (size_t f = 0; f < last().files.size(); ++f) {
    std::vector<const ShardEntry*> shards;
    for (const ShardEntry& shard : last().shards) {
      if (shard.file == static_cast<int64_t>(f) && new_index_[static_cast<size_t>(shard.tensor)] >= 0)
        shards.push_back(&shard);
    }
    std::ranges::sort(shards, {}, &ShardEntry::offset);
    WriterPart part;
    for (const ShardEntry* shard : shards) {
      const TensorEntry& tensor = last().tensors[static_cast<size_t>(shard->tensor)];
      std::vector<int64_t> item_of(inputs_.size(), -1);
      for (size_t i = 0; i < inputs_.size(); ++i) {
        if (!is_weight(tensor) && i + 1 < inputs_.size()) continue;
        item_of[i] = std::ssize(inputs_[i].items);
        inputs_[i].items.push_back(stream_item(inputs_[i].manifest(), inputs_[i].find(tensor), shard->box));
      }
      total_bytes_ += shard->bytes;
      part.shards.push_back({.tensor = new_index_[static_cast<size_t>(shard->tensor)],
                             .lo = shard->box.lo,
                             .hi = shard->box.hi,
                             .bytes = shard->bytes,
                             .fill = [this, &tensor, shard, item_of](int64_t offset, std::span<std::byte> bytes) {
                               return fill(tensor, shard->box, item_of, offset, bytes);
                             }});
    }
    if (!part.shards.empty()) out.push_back(std::move(part));
  }
  for (size_t p = 0; p < out.size(); ++p)
    out[p].file_name = shard_file_name(static_cast<int64_t>(p), static_cast<int64_t>(out.size()));
  return out;
}

Result<MergeReport> Merge::run(std::span<const fs::path> sources, const fs::path& checkpoints_dir) {
  const auto start = std::chrono::steady_clock::now();
  RT_TRY(open(sources));
  RT_TRY(check());
  not_finite_.resize(last().tensors.size());
  result_not_finite_.resize(last().tensors.size());
  Manifest skeleton = this->skeleton();
  RT_TRY(look_at_all());
  const std::vector<WriterPart> parts = this->parts();
  open_streams();

  RT_TRY_SET(SaveReport saved,
             save_checkpoint(io_, checkpoints_dir, std::move(skeleton), parts,
                             stream_save(options_.memory_bytes, options_.replace_existing, options_.cancel)));
  MergeReport report{
      .dir = std::move(saved.dir), .manifest = std::move(saved.manifest), .merged_tensors = std::ssize(merges_)};
  for (size_t t = 0; t < not_finite_.size(); ++t) {
    if (!result_not_finite_[t]) continue;
    NotFinite& one = report.not_finite.emplace_back(NotFinite{last().tensors[t].name, {}});
    for (const size_t i : not_finite_[t]) one.sources.push_back(inputs_[i].dir);
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace

Result<MergeReport> merge_checkpoints(IoBackend& io, std::span<const fs::path> sources, const fs::path& checkpoints_dir,
                                      const MergeOptions& options) {
  return Merge(io, options).run(sources, checkpoints_dir);
}

}  // namespace cairn::ckpt
