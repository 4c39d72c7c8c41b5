#pragma once
// The files of a training state of DeepSpeed, made by hand in any layout: what deepspeed.h reads.
// Source: DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, stage3.py.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/shape.h"
#include "tests/converters/torch_archive.h"

namespace cairn::convert::testing {

struct Drawn {
  std::string name;
  Shape shape;
  std::array<std::vector<float>, 3> kinds;
};

inline std::string bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

/// An archive under way: pickled tensors, each with a storage of its own.
struct ArchiveText {
  std::vector<Entry> storages;
  std::string tensor(const std::string& raw, const Shape& shape, const char* storage_class = "FloatStorage",
                     int64_t elem = 4) {
    const std::string key = fmt::format("{}", storages.size());
    storages.push_back({"m/data/" + key, raw});
    return pickled(View{.key = key,
                        .storage_class = storage_class,
                        .count = std::ssize(raw) / elem,
                        .shape = shape,
                        .strides = dense_strides(shape)});
  }
  std::string floats(const std::vector<float>& values, Shape shape = {}) {
    if (shape.empty()) shape = {std::ssize(values)};
    return tensor(bytes_of(values), shape);
  }
  /// The archive with this pickle.
  std::string file_of(const std::string& text) const {
    std::vector<Entry> all = {{"m/data.pkl", text}, {"m/version", "3\n"}};
    all.insert(all.end(), storages.begin(), storages.end());
    return zip(all);
  }
};

inline std::string dict(const std::string& items) { return "}(" + items + "u"; }
inline std::string list(const std::string& items) { return "](" + items + "e"; }

struct Layout {
  int stage = 2;
  int64_t world = 1, padding = 0;
  bool elastic = false;
  std::vector<std::vector<size_t>> groups;  // of the drawn tensors
};

/// `patch`: what becomes of the pickle.
template <class Patch>
std::string model_file(const std::vector<Drawn>& tensors, const Layout& layout, int64_t step, const Patch& patch) {
  ArchiveText out;
  std::string module, shapes;
  for (const Drawn& one : tensors) {
    if (layout.stage < 3) module += pickled(one.name) + out.floats(one.kinds[0], one.shape);
  }
  for (const std::vector<size_t>& group : layout.groups) {
    std::string of_group;
    for (const size_t k : group) of_group += pickled(tensors[k].name) + pickled(tensors[k].shape);
    shapes += dict(of_group);
  }
  return out.file_of(patch(pickle(
      pickled("module") + dict(module) + pickled("param_shapes") + list(shapes) + pickled("global_steps") +
      pickled(step) + pickled("global_samples") + pickled(step * 4) + pickled("skipped_steps") + pickled(int64_t{0}) +
      pickled("dp_world_size") + pickled(layout.world) + pickled("ds_version") + pickled("0.19.8"))));
}
inline std::string model_file(const std::vector<Drawn>& tensors, const Layout& layout, int64_t step) {
  return model_file(tensors, layout, step, [](std::string text) { return text; });
}

/// A rank's part of a group: in ZeRO-2 a part of one buffer, in ZeRO-3 its share of each tensor.
inline std::vector<float> part_of(const std::vector<Drawn>& tensors, const Layout& layout,
                                  const std::vector<size_t>& group, size_t kind, int64_t rank) {
  std::vector<float> all;
  const int64_t world = layout.world;
  if (layout.stage == 3) {
    for (const size_t k : group) {
      const std::vector<float>& whole = tensors[k].kinds[kind];
      const int64_t share = (std::ssize(whole) + world - 1) / world;
      for (int64_t at = rank * share; at < (rank + 1) * share; ++at) {
        all.push_back(at < std::ssize(whole) ? whole[static_cast<size_t>(at)] : 0.0f);
      }
    }
    return all;
  }
  for (size_t p = 0; p < group.size(); ++p) {
    const std::vector<float>& whole = tensors[group[p]].kinds[kind];
    all.insert(all.end(), whole.begin(), whole.end());
    if (p + 1 < group.size()) all.insert(all.end(), static_cast<size_t>(layout.padding), -7.0f);
  }
  const int64_t used = std::ssize(all), share = (used + 2 * world - 1) / (2 * world) * 2;
  all.resize(static_cast<size_t>(share * world), -9.0f);
  const int64_t begin = rank * share;
  int64_t end = begin + share;
  if (kind == 0 || layout.elastic) end = std::clamp(used, begin, end);  // padding at the end is kept by rigid moments
  return {all.begin() + begin, all.begin() + end};
}

template <class Patch>
std::string rank_file(const std::vector<Drawn>& tensors, const Layout& layout, int64_t rank, int64_t updates,
                      const Patch& patch) {
  ArchiveText out;
  std::string masters, states, elastic, paddings, counts, slices;
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    const std::vector<size_t>& group = layout.groups[g];
    masters += out.floats(part_of(tensors, layout, group, 0, rank));
    const std::string state = dict(pickled("step") + pickled(updates) + pickled("exp_avg") +
                                   out.floats(part_of(tensors, layout, group, 1, rank)) + pickled("exp_avg_sq") +
                                   out.floats(part_of(tensors, layout, group, 2, rank)));
    states += pickled(static_cast<int64_t>(g)) + state;
    elastic += state;
    std::string of_group;
    for (size_t p = 0; p < group.size(); ++p) of_group += pickled(p + 1 < group.size() ? layout.padding : int64_t{0});
    paddings += list(of_group);
    counts += pickled(layout.world);
  }
  const std::string rigid = dict(pickled("state") + dict(states) + pickled("param_groups") + list(""));
  std::string state = pickled("zero_stage") + pickled(int64_t{layout.stage});
  if (layout.stage == 3) {
    std::string said;
    for (size_t g = 0; g < layout.groups.size(); ++g) {
      said += dict(pickled("partition_count") + pickled(layout.world) + pickled("partition_rank") + pickled(rank));
    }
    if (layout.elastic) state += pickled("ds_zero_partition_groups") + list(said);  // newer files have it
    state += pickled("partition_count") + pickled(layout.world) + pickled("fp32_flat_groups") + list(masters) +
             pickled("optimizer_state_dict") + rigid;
  } else {
    state += pickled("partition_count") + list(counts) + pickled("single_partition_of_fp32_groups") + list(masters) +
             pickled("param_alignment_paddings") + list(paddings) + pickled("base_optimizer_state") +
             (layout.elastic ? list(elastic) : rigid);
  }
  return out.file_of(patch(pickle(pickled("optimizer_state_dict") + dict(state))));
}
inline std::string rank_file(const std::vector<Drawn>& tensors, const Layout& layout, int64_t rank, int64_t updates) {
  return rank_file(tensors, layout, rank, updates, [](std::string text) { return text; });
}

}  // namespace cairn::convert::testing
