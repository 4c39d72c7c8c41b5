#include "runtime/data_parallel/data_parallel.h"

#include <algorithm>
#include <utility>

#include "runtime/comm/call_group.h"
#include "runtime/core/check.h"

namespace cairn::data_parallel {
namespace {

comm::Comm& shard_of(const comm::RankGroups& groups, const Bucket& bucket) {
  return bucket.experts ? *groups.expert_shard : *groups.shard;
}

comm::Comm& replica_of(const comm::RankGroups& groups, const Bucket& bucket) {
  return bucket.experts ? *groups.expert_replica : *groups.replica;
}

}  // namespace

DataParallel::DataParallel(Stream& stream, const Plan& plan, const RankPlan& rank, const comm::RankGroups& groups,
                           const Memory& memory)
    : on_(kernels::exec_on<float>(stream)),
      plan_(plan),
      rank_(rank),
      groups_(groups),
      memory_(memory),
      elem_bytes_(dtype_size_bytes(plan.compute_dtype())),
      passed_(rank.units.size(), 0),
      open_units_(rank.buckets.size(), 0),
      weights_of_(std::max(rank.buckets.size(), rank.units.size()), 0),
      grads_from_(rank.units.size(), 0),
      unwritten_(rank.tensors.size(), 0),
      lane_(stream, plan.recipe.optimizer.overlap && stream.device().kind == DeviceKind::kCpu) {
  const auto fits = [&](const comm::Comm* shard, const comm::Comm* replica, bool experts) {
    const int64_t size = plan.shard_size(experts);
    return shard->size() == size && replica->size() * size == plan.replicas(experts);
  };
  RT_CHECK(fits(groups.shard, groups.replica, false), "groups of {} and {} ranks for shards of {} among {}",
           groups.shard->size(), groups.replica->size(), plan.shard_size(), plan.replicas(false));
  RT_CHECK(plan.mesh.ep() == 1 || fits(groups.expert_shard, groups.expert_replica, true),
           "groups for experts' shards of {} among {}", plan.shard_size(true), plan.replicas(true));
  if (rank.scattered_weights) {
    train_uses_ = unit_uses(rank, schedule_actions(plan.schedule(), rank.at.pp));
    evaluate_uses_ = unit_uses(rank, forward_actions(plan.schedule(), rank.at.pp));
  }
  const bool over_kv = std::ranges::any_of(rank.tensors, [](const LocalTensor& local) { return local.sum_over_kv; });
  RT_CHECK(!over_kv || (groups.kv != nullptr && groups.kv->size() == plan.kv_copies()),
           "no group of the {} ranks that hold the same key/value heads", plan.kv_copies());
}

void DataParallel::begin_pass(bool training) {
  uses_ = training ? &train_uses_ : &evaluate_uses_;
  next_use_ = next_gather_ = 0;
  if (!training) return;
  if (rank_.scattered_grads) {
    on_.clear_floats(memory_.sums, rank_.grad_elems());
  } else {
    const std::vector<kernels::ElemRun> runs = added_to({0, rank_.flat_elems});
    on_.clear_floats_of_runs(memory_.sums, on_.stream.give(std::span<const kernels::ElemRun>(runs)), std::ssize(runs));
  }
  std::fill(passed_.begin(), passed_.end(), 0);
  std::fill(open_units_.begin(), open_units_.end(), 0);
  for (const Unit& unit : rank_.units) {
    for (int64_t b = unit.first_bucket; b < unit.end_bucket; ++b) ++open_units_[b];
  }
}

std::span<const LocalTensor> DataParallel::tensors_in(FlatRange range) const {
  const auto from = [&](int64_t offset) {
    return std::partition_point(rank_.tensors.begin(), rank_.tensors.end(),
                                [&](const LocalTensor& local) { return local.offset < offset; });
  };
  return {from(range.begin), from(range.end)};
}

std::vector<kernels::ElemRun> DataParallel::added_to(FlatRange range) {
  std::vector<kernels::ElemRun> out;
  int64_t done = range.begin;
  const auto take = [&](int64_t end) {
    if (end > done) out.push_back({done - range.begin, end - done});
  };
  for (const LocalTensor& local : tensors_in(range)) {
    // Matrices of projections and of the vocabulary: who else writes their gradients asks (Parameter::unwritten).
    // Norms of heads have two dimensions too, and only add. Experts may see no rows.
    const TensorSpec& spec = plan_.tensors[local.tensor];
    if (!spec.decay || spec.cut == TensorCut::kReplicated || spec.expert >= 0) continue;
    unwritten_[&local - rank_.tensors.data()] = 1;
    take(local.offset);
    done = local.offset + count_elems(local.shape);
  }
  take(range.end);
  return out;
}

void DataParallel::fill_unwritten(const Unit& unit) {
  for (const LocalTensor& local : tensors_in(unit.range)) {
    if (std::exchange(unwritten_[&local - rank_.tensors.data()], 0) == 0) continue;
    on_.clear_floats(memory_.used_grads() + local.grad_at, count_elems(local.shape));
  }
}

Status DataParallel::begin_use(int64_t layer, nn::Pass pass) {
  for (const int64_t unit : rank_.units_of(layer)) {
    RT_TRY(prepare_weights(unit));
    if (pass == nn::Pass::kBackward && rank_.scattered_grads) RT_TRY(prepare_grads(unit));
  }
  return {};
}

Status DataParallel::prepare_weights(int64_t unit) {
  if (!rank_.scattered_weights) {
    for (int64_t b = rank_.units[unit].first_bucket; b < rank_.units[unit].end_bucket; ++b) {
      if (weights_of_[b] != 0) RT_TRY(lane_.wait(std::exchange(weights_of_[b], 0)));
    }
    return {};
  }
  const size_t now = next_use_++;
  RT_CHECK(now < uses_->size() && (*uses_)[now].unit == unit, "use {} is of unit {}, the plan has another", now, unit);
  if (next_gather_ <= now) gather_unit((*uses_)[next_gather_++]);
  RT_TRY(lane_.wait(weights_of_[unit]));
  // The next one is gathered meanwhile, unless it takes the memory of this one.
  if (next_gather_ == now + 1 && next_gather_ < uses_->size() &&
      rank_.units[(*uses_)[now + 1].unit].weight_slot != rank_.units[unit].weight_slot) {
    gather_unit((*uses_)[next_gather_++]);
  }
  return {};
}

void DataParallel::gather_unit(const UnitUse& use) {
  if (!use.gather) return;
  weights_of_[use.unit] = lane_.submit([this, &unit = rank_.units[use.unit]]() -> Status {
    comm::CallGroup together;
    for (int64_t b = unit.first_bucket; b < unit.end_bucket; ++b) {
      const Bucket& bucket = rank_.buckets[b];
      RT_TRY(shard_of(groups_, bucket)
                 .all_gather(memory_.weights + bucket.shard_offset * elem_bytes_,
                             memory_.gathered + (unit.weight_at + bucket.range.begin - unit.range.begin) * elem_bytes_,
                             bucket.shard.size() * elem_bytes_, "weights of a layer"));
    }
    return together.end();
  });
}

Status DataParallel::prepare_grads(int64_t unit_index) {
  const Unit& unit = rank_.units[unit_index];
  if (passed_[unit_index] % unit.uses != 0) return {};  // the other use has begun to fill it
  RT_TRY(lane_.wait(grads_from_[unit.grad_slot]));
  for (const kernels::ElemRun& run : added_to(unit.range)) {
    on_.clear_floats(memory_.slots + unit.grad_at + run.begin, run.count);
  }
  on_.clear_floats(memory_.slots + unit.source_grads_at, (plan_.expert_sources() - 1) * unit.experts.size());
  return {};
}

Status DataParallel::end_use(int64_t layer, nn::Pass pass) {
  if (pass != nn::Pass::kBackward) return {};
  for (const int64_t index : rank_.units_of(layer)) {
    const Unit& unit = rank_.units[index];
    const int64_t passed = ++passed_[index], all = plan_.micro_batches * unit.uses;
    if (rank_.scattered_grads) {
      if (passed % unit.uses != 0) continue;
      fill_unwritten(unit);
      if (plan_.layout_free()) RT_TRY(sum_partial_of(unit));
      add_unit(unit, passed == all);
      continue;
    }
    if (passed != all) continue;
    fill_unwritten(unit);
    for (int64_t b = unit.end_bucket; b-- > unit.first_bucket;) {
      if (--open_units_[b] == 0) reduce_bucket(rank_.buckets[b]);
    }
  }
  return {};
}

void DataParallel::reduce_bucket(const Bucket& bucket) {
  if (plan_.mesh.replicas() == 1) return;
  lane_.submit([this, &bucket]() -> Status {
    const DevicePtr<float> shard = memory_.sums + bucket.shard.begin;
    RT_TRY(shard_of(groups_, bucket)
               .reduce_scatter(memory_.sums + bucket.range.begin, shard, bucket.shard.size(), DType::kF32,
                               comm::ReduceOp::kSum, "gradient bucket"));
    return replica_of(groups_, bucket)
        .all_reduce(shard, bucket.shard.size(), DType::kF32, comm::ReduceOp::kSum, "gradient bucket");
  });
}

void DataParallel::add_unit(const Unit& unit, bool last) {
  grads_from_[unit.grad_slot] = lane_.submit([this, &unit, last]() -> Status {
    for (int64_t b = unit.end_bucket; b-- > unit.first_bucket;) {
      const Bucket& bucket = rank_.buckets[b];
      RT_TRY(add_bucket(unit, bucket));
      if (last) {
        RT_TRY(replica_of(groups_, bucket)
                   .all_reduce(memory_.sums + bucket.shard_offset, bucket.shard.size(), DType::kF32,
                               comm::ReduceOp::kSum, "gradient shard"));
      }
    }
    return {};
  });
}

// Replicas are numbered in the order of the batch, and so are the ranks of an ep group: the replicas that hold the same
// experts follow one another, so source by source and replica by replica is the order of the batch again.
Status DataParallel::add_bucket(const Unit& unit, const Bucket& bucket) {
  const DevicePtr<float> shard = memory_.sums + bucket.shard_offset;
  const int64_t sources = bucket.experts ? plan_.expert_sources() : 1;
  // The ranks of cp are neighbours among the replicas, each with a subtree of a micro-batch's tokens.
  const int64_t tree = plan_.token_parts() > 1 ? plan_.mesh.cp() : 1;
  for (int64_t source = 0; source < sources; ++source) {
    const DevicePtr<const float> grads =
        memory_.slots + (source == 0 ? unit.grad_at + bucket.range.begin - unit.range.begin
                                     : unit.source_grads_at + (source - 1) * unit.experts.size() + bucket.range.begin -
                                           unit.experts.begin);
    RT_TRY(shard_of(groups_, bucket)
               .reduce_scatter_add(grads, shard, bucket.shard.size(), DType::kF32, tree, "gradients of a layer"));
  }
  return {};
}

Status DataParallel::finish() {
  RT_TRY(lane_.wait_all());
  for (size_t u = 0; u < rank_.units.size(); ++u) {
    RT_CHECK(passed_[u] == plan_.micro_batches * rank_.units[u].uses, "unit {} went back {} times in {} micro-batches",
             u, passed_[u], plan_.micro_batches);
  }
  if (!plan_.layout_free()) {
    RT_TRY(sum_partial(&LocalTensor::sum_over_tp, groups_.tp, "gradients of replicated tensors"));
  }
  RT_TRY(sum_partial(&LocalTensor::sum_over_kv, groups_.kv, "gradients of shared key/value heads"));
  return sum_table_copies();
}

template <typename ForRuns>
Status DataParallel::sum_runs(const ForRuns& for_runs, comm::Comm* group, comm::ReduceOp op, std::string_view what) {
  const DevicePtr<float> begin = memory_.partial;
  DevicePtr<float> end = begin;
  for_runs([&](DevicePtr<float> run, int64_t elems) {
    on_.copy_floats(run, end, elems);
    end += elems;
  });
  if (end == begin) return {};
  RT_CHECK(end - begin <= rank_.partial_elems, "{} partial gradients, the plan has {}", end - begin,
           rank_.partial_elems);
  RT_TRY(group->all_reduce(begin, end - begin, DType::kF32, op, what));
  DevicePtr<const float> from = begin;
  for_runs([&](DevicePtr<float> run, int64_t elems) {
    on_.copy_floats(from, run, elems);
    from += elems;
  });
  return {};
}

Status DataParallel::sum_partial(bool LocalTensor::*partial, comm::Comm* group, std::string_view what) {
  const auto for_runs = [&](const auto& body) {
    for (const LocalTensor& local : rank_.tensors) {
      if (!(local.*partial)) continue;
      for (const FlatRange& part : rank_.shards_of(local)) body(memory_.sums + part.begin, part.size());
    }
  };
  return sum_runs(for_runs, group, comm::ReduceOp::kSum, what);
}

// Before the micro-batch joins the others: a sum over micro-batches first would be another order for another tp.
Status DataParallel::sum_partial_of(const Unit& unit) {
  const auto for_runs = [&](const auto& body) {
    for (const LocalTensor& local : tensors_in(unit.range)) {
      if (local.sum_over_tp) body(memory_.slots + local.grad_at, count_elems(local.shape));
    }
  };
  return sum_runs(for_runs, groups_.tp, comm::ReduceOp::kTreeSum, "gradients of replicated tensors");
}

Status DataParallel::sum_table_copies() {
  std::vector<const LocalTensor*> copies;  // two on one rank with deterministic = "layout"
  for (const LocalTensor& local : rank_.tensors) {
    if (plan_.tensors[local.tensor].name == "embed.tokens") copies.push_back(&local);
  }
  if (copies.size() == 2) {
    // Their buckets are their own, and cut alike.
    const std::vector<FlatRange> first = rank_.shards_of(*copies[0]), second = rank_.shards_of(*copies[1]);
    RT_CHECK(first.size() == second.size(), "{} and {} shards of a tied embedding", first.size(), second.size());
    for (size_t k = 0; k < first.size(); ++k) {
      const DevicePtr<float> a = memory_.sums + first[k].begin, b = memory_.sums + second[k].begin;
      on_.add_to(a, b, first[k].size());
      on_.copy_floats(a, b, first[k].size());
    }
    return {};
  }
  if (groups_.embedding == nullptr || !plan_.has_table_copy()) return {};
  const LocalTensor* tied = copies.front();
  const int64_t end = tied->offset + count_elems(tied->shape);
  for (const Bucket& bucket : rank_.buckets) {  // they are its own, and cut alike on both stages
    if (bucket.range.begin < tied->offset || bucket.range.begin >= end) continue;
    const int64_t at = rank_.scattered_grads ? bucket.shard_offset : bucket.shard.begin;
    RT_TRY(groups_.embedding->all_reduce(memory_.sums + at, bucket.shard.size(), DType::kF32, comm::ReduceOp::kSum,
                                         "gradient of the tied embedding"));
  }
  return {};
}

Status DataParallel::spread_weights(const MakeWeights& make, std::function<Status()> whole) {
  const bool gathers = !rank_.scattered_weights && groups_.shard->size() > 1;
  if (!make && !gathers) return whole();
  for (size_t b = 0; b < rank_.buckets.size(); ++b) {
    const comm::Lane::Ticket ticket = lane_.submit([this, make, gathers, &bucket = rank_.buckets[b]]() -> Status {
      if (make) make(lane_.stream(), bucket);
      if (!gathers) return {};
      return shard_of(groups_, bucket)
          .all_gather(memory_.weights + bucket.shard.begin * elem_bytes_,
                      memory_.weights + bucket.range.begin * elem_bytes_, bucket.shard.size() * elem_bytes_,
                      "updated weights");
    });
    if (!rank_.scattered_weights) weights_of_[b] = ticket;  // else the gather of a unit comes behind all of these
  }
  lane_.submit(std::move(whole));
  return {};
}

}  // namespace cairn::data_parallel
