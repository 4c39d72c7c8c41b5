#include "runtime/comm/exact_comm.h"

#include <fmt/format.h>

#include <cmath>
#include <span>
#include <utility>

#include "runtime/comm/group.h"
#include "runtime/comm/reduce.h"
#include "runtime/core/check.h"

namespace cairn::comm {
namespace {

class ExactComm : public Comm {
 public:
  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) final {
    RT_TRY(check_elems({name(), "all_reduce", what}, count, dtype));
    if (op != ReduceOp::kMax && dtype != DType::kI64) {
      if (op != ReduceOp::kSum || dtype != DType::kF64) {
        return refuse("all_reduce", what, fmt::format("a {} of {}", reduce_op_name(op), dtype_name(dtype)));
      }
      const double limit = 0x1p53 / static_cast<double>(size());
      for (const double x : std::span(static_cast<const double*>(data), static_cast<size_t>(count))) {
        if (std::isfinite(x) && (std::trunc(x) != x || std::abs(x) >= limit)) {
          return refuse("all_reduce", what, fmt::format("{}, which is no integer below {}", x, limit));
        }
      }
    }
    return reduce(data, count, dtype, op, what);
  }

  Status reduce_scatter(const void*, void*, int64_t, DType, ReduceOp, std::string_view what) final {
    return refuse("reduce_scatter", what);
  }
  Status reduce_scatter_add(const void*, void*, int64_t, DType, int64_t, std::string_view what) final {
    return refuse("reduce_scatter_add", what);
  }
  Status all_gather(const void*, void*, int64_t, std::string_view what) final { return refuse("all_gather", what); }
  Status all_to_all(std::span<const OutPart>, std::span<const InPart>, std::string_view what) final {
    return refuse("all_to_all", what);
  }
  Status isend(const void*, int64_t, int64_t, std::string_view what) final { return refuse("isend", what); }
  Status recv(void*, int64_t, int64_t, std::string_view what) final { return refuse("recv", what); }
  Status wait_sends(std::string_view what) final { return refuse("wait_sends", what); }
  Status wait_sends_to(int64_t, int64_t, std::string_view what) final { return refuse("wait_sends_to", what); }

 private:
  virtual Status reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) = 0;

  Status refuse(std::string_view op, std::string_view what, std::string_view why = "not for exact groups") const {
    RT_CHECK(false, "{}: {} (Engine::exact_group)", Site{name(), op, what}.text(), why);
    return {};
  }
};

class FlatComm final : public ExactComm {
 public:
  explicit FlatComm(std::unique_ptr<Comm> inner) : inner_(std::move(inner)) {}
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  Traffic traffic() const override { return inner_->traffic(); }
  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    return inner_->broadcast(data, bytes, root, what);
  }
  Status barrier(std::string_view what) override { return inner_->barrier(what); }

 private:
  Status reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    return inner_->all_reduce(data, count, dtype, op, what);
  }
  const std::unique_ptr<Comm> inner_;
};

class HostsComm final : public ExactComm {
 public:
  HostsComm(std::string name, int64_t rank, HostsGroups groups)
      : name_(std::move(name)), rank_(rank), groups_(std::move(groups)) {}
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return std::ssize(groups_.host_of); }
  const std::string& name() const override { return name_; }
  Traffic traffic() const override { return traffic_; }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    const Site site{name_, "broadcast", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "root", root, size()));
    traffic_.broadcast.add(root == rank_ ? bytes : 0);
    const int64_t host = groups_.host_of[root];
    const bool here = host == groups_.host_of[rank_];
    if (here) RT_TRY(groups_.host->broadcast(data, bytes, groups_.rank_on_host[root], what));
    if (groups_.between) RT_TRY(groups_.between->broadcast(data, bytes, host, what));
    return here ? Status() : groups_.host->broadcast(data, bytes, 0, what);
  }

  Status barrier(std::string_view what) override {
    RT_TRY(groups_.host->barrier(what));
    if (groups_.between) RT_TRY(groups_.between->barrier(what));
    return groups_.host->barrier(what);
  }

 private:
  Status reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const int64_t bytes = count * dtype_size_bytes(dtype);
    traffic_.all_reduce.add(bytes);
    RT_TRY(groups_.host->all_reduce(data, count, dtype, op, what));
    if (groups_.between) RT_TRY(groups_.between->all_reduce(data, count, dtype, op, what));
    return groups_.host->broadcast(data, bytes, 0, what);
  }

  const std::string name_;
  const int64_t rank_;
  const HostsGroups groups_;
  Traffic traffic_;
};

}  // namespace

Result<std::unique_ptr<Comm>> Engine::exact_group(std::string_view axis, const std::vector<int64_t>& world_ranks) {
  RT_TRY_SET(auto made, group(axis, world_ranks));
  return make_exact_comm(std::move(made));
}

std::unique_ptr<Comm> make_exact_comm(std::unique_ptr<Comm> inner) {
  return std::make_unique<FlatComm>(std::move(inner));
}

std::unique_ptr<Comm> make_hosts_comm(std::string name, int64_t rank, HostsGroups groups) {
  return std::make_unique<HostsComm>(std::move(name), rank, std::move(groups));
}

}  // namespace cairn::comm
