#include "runtime/comm/traced_engine.h"

#include <functional>
#include <utility>
#include <vector>

#include "runtime/telemetry/trace.h"

namespace cairn::comm {
namespace {

using telemetry::TraceArgs;
using telemetry::TraceScope;

class TracedComm final : public Comm {
 public:
  explicit TracedComm(std::unique_ptr<Comm> inner)
      : inner_(std::move(inner)),
        sent_(static_cast<size_t>(inner_->size())),
        received_(static_cast<size_t>(inner_->size())) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  Traffic traffic() const override { return inner_->traffic(); }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const TraceScope scope("comm", "all_reduce", args(count * dtype_size_bytes(dtype), what));
    return inner_->all_reduce(data, count, dtype, op, what);
  }
  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    const TraceScope scope("comm", "reduce_scatter", args(size() * count_per_rank * dtype_size_bytes(dtype), what));
    return inner_->reduce_scatter(input, output, count_per_rank, dtype, op, what);
  }
  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const TraceScope scope("comm", "reduce_scatter", args(size() * count_per_rank * dtype_size_bytes(dtype), what));
    return inner_->reduce_scatter_add(input, output, count_per_rank, dtype, tree, what);
  }
  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    const TraceScope scope("comm", "all_gather", args(bytes_per_rank, what));
    return inner_->all_gather(input, output, bytes_per_rank, what);
  }
  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const TraceScope scope("comm", "broadcast", args(bytes, what));
    return inner_->broadcast(data, bytes, root, what);
  }
  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    int64_t bytes = 0;
    for (const OutPart& part : out) bytes += part.bytes;
    const TraceScope scope("comm", "all_to_all", args(bytes, what));
    return inner_->all_to_all(out, in, what);
  }
  Status barrier(std::string_view what) override {
    const TraceScope scope("comm", "barrier", args(0, what));
    return inner_->barrier(what);
  }
  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    TraceArgs told = args(bytes, what);
    told.flow_begins = true;
    if (dst >= 0 && dst < size()) told.flow = flow(rank(), dst, sent_[static_cast<size_t>(dst)]++);
    const TraceScope scope("comm", "isend", told);
    return inner_->isend(data, bytes, dst, what);
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    TraceArgs told = args(bytes, what);
    if (src >= 0 && src < size()) told.flow = flow(src, rank(), received_[static_cast<size_t>(src)]++);
    const TraceScope scope("comm", "recv", told);
    return inner_->recv(data, bytes, src, what);
  }
  Status wait_sends(std::string_view what) override {
    const TraceScope scope("comm", "wait_sends", args(-1, what));
    return inner_->wait_sends(what);
  }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    const TraceScope scope("comm", "wait_sends", args(-1, what));
    return inner_->wait_sends_to(dst, may_stay, what);
  }

 private:
  TraceArgs args(int64_t bytes, std::string_view what) const {
    return {.bytes = bytes, .group = inner_->name(), .what = what};
  }
  /// The same at both ends: a group's name is the same on all its members, and messages of a pair keep their order.
  uint64_t flow(int64_t src, int64_t dst, uint64_t sequence) const {
    const uint64_t pair =
        std::hash<std::string>{}(inner_->name()) ^ static_cast<uint64_t>(src) << 20 ^ static_cast<uint64_t>(dst) << 40;
    return (pair + sequence + 1) * 0x9E3779B97F4A7C15u | 1;
  }

  const std::unique_ptr<Comm> inner_;
  std::vector<uint64_t> sent_, received_;  // messages, by peer
};

class TracedEngine final : public Engine {
 public:
  explicit TracedEngine(Engine& inner) : inner_(inner) {}
  int64_t world_rank() const override { return inner_.world_rank(); }
  int64_t world_size() const override { return inner_.world_size(); }
  bool keeps_rank_order() const override { return inner_.keeps_rank_order(); }
  Result<std::unique_ptr<Comm>> group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    return traced(inner_.group(axis, world_ranks));
  }
  Result<std::unique_ptr<Comm>> exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks) override {
    return traced(inner_.exact_group(axis, world_ranks));
  }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void give_up(ErrorCode code, std::string_view reason) override { inner_.give_up(code, reason); }
  void at(int64_t step, std::string_view phase) override { inner_.at(step, phase); }

 private:
  static Result<std::unique_ptr<Comm>> traced(Result<std::unique_ptr<Comm>> made) {
    if (!made.ok() || made.value()->size() == 1) return made;  // one rank moves nothing
    return std::unique_ptr<Comm>(std::make_unique<TracedComm>(std::move(made).value()));
  }
  Engine& inner_;
};

}  // namespace

std::unique_ptr<Engine> make_traced_engine(Engine& inner) { return std::make_unique<TracedEngine>(inner); }

}  // namespace cairn::comm
