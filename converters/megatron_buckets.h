#pragma once
// Where Megatron-Core's distributed optimizer keeps each parameter, in the form dp_reshardable: flat buckets without
// names. A rank's parameters lie there in the reverse of their order in the model, each at a multiple of 64 elements; a
// bucket ends behind a parameter. The order differs between the two kinds of layers that Megatron builds, so a reader
// tries both. Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

/// How ranks divide the model, and what its arguments say of the order.
struct MegatronRanks {
  int64_t tp = 1, pp = 1, ep = 1;
  int64_t layers = 0, experts = 0;
  bool gated = false;        // fc1 has gate and up, of which a rank has a part each
  bool fused_norms = false;  // a norm is a part of the projection behind it (Transformer Engine)
  bool grouped = false;      // the experts' first projections come before their second ones
};

/// A part of a parameter, dense, in the coordinates of the stored tensor `key`: [layer, rows, columns] of a stack.
struct ParameterBox {
  std::string key;
  Shape offsets, sizes;
};
/// One parameter of a rank: its boxes lie one behind the other.
struct RankParameter {
  std::vector<ParameterBox> boxes;
  int64_t elems = 0;
  bool copy = false;  // of what the first tensor-parallel rank has too
};

/// The parameters of a rank in the order of its model, without experts that are divided among ranks, or only these.
/// `shapes`: of the stored tensors of the model. Errors: kUnsupported for sizes that the ranks do not divide.
Result<std::vector<RankParameter>> rank_parameters(const std::map<std::string, Shape>& shapes,
                                                   const MegatronRanks& ranks, int64_t tp_rank, int64_t pp_rank,
                                                   int64_t ep_rank, bool divided_experts);

/// The place of a parameter: bucket and first element there.
struct BucketPlace {
  int64_t bucket = 0, begin = 0;
};
/// `lengths`: elements of each bucket without padding at its end. Errors: kCorrupt where the parameters do not end as
/// the buckets do.
Result<std::vector<BucketPlace>> place_in_buckets(const std::vector<RankParameter>& parameters,
                                                  const std::vector<int64_t>& lengths);

}  // namespace cairn::convert
