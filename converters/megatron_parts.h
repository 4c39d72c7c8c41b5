#pragma once
// Inside megatron_state.h: one opening of a folder, and what its readers share. megatron_state.cc sorts tensors and
// reads what common.pt says, megatron_optimizer.cc places the optimizer's state.

#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converters/dist_archives.h"
#include "converters/dist_files.h"
#include "converters/family.h"
#include "converters/megatron_buckets.h"
#include "converters/state_builder.h"

namespace cairn::convert::megatron {

inline constexpr std::string_view kWeightsOnly = "`cairn import --weights-only` takes the model's weights";

/// A stored tensor with where its elements lie.
struct Placed {
  const DistTensor* tensor = nullptr;
  std::vector<FileBox> boxes;
};
/// Master, exp_avg and exp_avg_sq by the key of the weight. A master without a tensor: the weight is
/// it.
using States = std::map<std::string, std::array<Placed, kKinds>>;

/// Flat buckets of one buffer, by kind and number.
struct Buffer {
  std::array<std::map<int64_t, const DistTensor*>, kKinds> buckets;
};
/// Which buffer: optimizer of a chain (0 where there is one), group of data-parallel ranks, number, dtype.
struct BufferKey {
  int64_t chain = 0, group = 0, number = 0;
  std::string dtype;
  auto operator<=>(const BufferKey&) const = default;
};

struct Opening : StateBuilder {
  Opening(TrainingState about, bool only_weights) : StateBuilder(std::move(about), only_weights), archives(dir()) {}

  DistArchives archives;
  DistIndex index;
  nlohmann::json args = nlohmann::json::object();
  Family family;
  ModelConfig model;
  std::map<std::string, const DistTensor*> weights;                    // by key
  std::array<std::map<std::string, const DistTensor*>, kKinds> named;  // the optimizer's, by the weight's key
  std::map<BufferKey, Buffer> buffers;
};

/// Adds the views of a stored tensor to `to`, under the family's names.
Status add_views(const Opening& o, const std::string& key, const std::string& dtype, const Shape& shape,
                 const std::vector<FileBox>& boxes, FlatTensors* to);
/// State that has the names of the weights.
Result<States> read_named(Opening& o);
/// State in buckets. The order of the parameters that fits, and of several that whose masters round to the weights.
Result<States> read_buckets(Opening& o);

}  // namespace cairn::convert::megatron
