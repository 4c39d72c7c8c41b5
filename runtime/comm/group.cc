#include "runtime/comm/group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "runtime/comm/call.h"
#include "runtime/comm/parts.h"
#include "runtime/comm/reduce.h"

namespace cairn::comm {
namespace {

class SingleComm final : public Comm {
 public:
  explicit SingleComm(std::string name) : name_(std::move(name)) {}
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  const std::string& name() const override { return name_; }
  Traffic traffic() const override { return {}; }

  Status all_reduce(void*, int64_t count, DType dtype, ReduceOp, std::string_view what) override {
    return check_elems({name_, "all_reduce", what}, count, dtype);
  }
  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp,
                        std::string_view what) override {
    RT_TRY(check_elems({name_, "reduce_scatter", what}, count_per_rank, dtype));
    copy(output, input, count_per_rank * dtype_size_bytes(dtype));
    return {};
  }
  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    RT_TRY(check_elems({name_, "reduce_scatter_add", what}, count_per_rank, dtype));
    RT_TRY(check_tree({name_, "reduce_scatter_add", what}, tree, 1));
    add_ordered(output, &input, 1, 1, count_per_rank, dtype);
    return {};
  }
  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    RT_TRY(check_bytes({name_, "all_gather", what}, bytes_per_rank));
    copy(output, input, bytes_per_rank);
    return {};
  }
  Status broadcast(void*, int64_t bytes, int64_t root, std::string_view what) override {
    RT_TRY(check_bytes({name_, "broadcast", what}, bytes));
    return check_peer({name_, "broadcast", what}, "root", root, 1);
  }
  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    const Site site{name_, "all_to_all", what};
    RT_TRY(check_parts(site, out, 1));
    RT_TRY(check_parts(site, in, 1));
    int64_t sent = 0, expected = 0;
    count_parts(out, {&sent, 1});
    count_parts(in, {&expected, 1});
    if (sent != expected) return sizes_differ(site, 0, sent, expected);
    move_own(out, in);
    return {};
  }
  Status barrier(std::string_view) override { return {}; }

  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    RT_TRY(check_bytes({name_, "isend", what}, bytes));
    RT_TRY(check_peer({name_, "isend", what}, "destination", dst, 1));
    const auto* from = static_cast<const char*>(data);
    messages_.emplace_back(from, from + bytes);
    return {};
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    const Site site{name_, "recv", what};
    RT_TRY(check_bytes(site, bytes));
    RT_TRY(check_peer(site, "source", src, 1));
    if (messages_.empty()) {
      return Error{ErrorCode::kInternal,
                   fmt::format("{}: the only rank waits for a message that it has not sent", site.text())};
    }
    const std::vector<char> message = std::move(messages_.front());
    messages_.pop_front();
    if (static_cast<int64_t>(message.size()) != bytes) {
      return Error{ErrorCode::kInternal, fmt::format("{}: the message has {} bytes, this rank expects {}", site.text(),
                                                     message.size(), bytes)};
    }
    copy(data, message.data(), bytes);
    return {};
  }
  Status wait_sends(std::string_view) override { return {}; }
  Status wait_sends_to(int64_t dst, int64_t, std::string_view what) override {
    return check_peer({name_, "wait_sends_to", what}, "destination", dst, 1);
  }

 private:
  static void copy(void* to, const void* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  const std::string name_;
  std::deque<std::vector<char>> messages_;
};

}  // namespace

std::string Site::text() const { return fmt::format("{}.{}({})", group, op, what); }

std::string group_name(std::string_view axis, const std::vector<int64_t>& world_ranks) {
  constexpr size_t kShown = 8;
  if (world_ranks.size() <= kShown + 1) return fmt::format("{}[{}]", axis, fmt::join(world_ranks, ","));
  return fmt::format("{}[{},...,{}; {} ranks]", axis,
                     fmt::join(world_ranks.begin(), world_ranks.begin() + kShown - 1, ","), world_ranks.back(),
                     world_ranks.size());
}

Status check_group(std::string_view axis, const std::vector<int64_t>& world_ranks, int64_t world_size, int64_t self) {
  const std::string name = group_name(axis, world_ranks);
  std::vector<int64_t> sorted = world_ranks;
  std::ranges::sort(sorted);
  if (sorted.empty() || sorted.front() < 0 || sorted.back() >= world_size) {
    return Error{ErrorCode::kInvalidInput, fmt::format("group {}: needs world ranks of 0 to {}", name, world_size - 1)};
  }
  if (std::ranges::adjacent_find(sorted) != sorted.end()) {
    return Error{ErrorCode::kInvalidInput, fmt::format("group {}: a rank is named twice", name)};
  }
  if (!std::ranges::binary_search(sorted, self)) {
    return Error{ErrorCode::kInvalidInput, fmt::format("group {}: does not hold this rank, {}", name, self)};
  }
  return {};
}

Status check_bytes(const Site& site, int64_t bytes) {
  if (bytes >= 0) return {};
  return Error{ErrorCode::kInvalidInput, fmt::format("{}: size must not be negative, got {}", site.text(), bytes)};
}

Status check_elems(const Site& site, int64_t count, DType dtype) {
  RT_TRY(check_bytes(site, count));
  return check_reducible(dtype).with(site.text());
}

Status check_tree(const Site& site, int64_t tree, int64_t size) {
  if (tree >= 1 && size % tree == 0) return {};
  return Error{ErrorCode::kInvalidInput, fmt::format("{}: trees of {} in a group of {}", site.text(), tree, size)};
}

Status check_peer(const Site& site, std::string_view role, int64_t peer, int64_t size) {
  if (peer >= 0 && peer < size) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: {} must be a group rank 0 to {}, got {}", site.text(), role, size - 1, peer)};
}

std::string describe_call(uint64_t word, uint64_t bytes) {
  constexpr std::string_view kNames[] = {"?",         "all_reduce", "reduce_scatter", "all_gather",
                                         "broadcast", "barrier",    "all_to_all"};
  const uint64_t kind = word & 0xff;
  std::string text = fmt::format("{} of {} bytes", kind < std::size(kNames) ? kNames[kind] : "?", bytes);
  if (kind == static_cast<uint64_t>(CallKind::kAllReduce) || kind == static_cast<uint64_t>(CallKind::kReduceScatter)) {
    text += fmt::format(" ({} {})", dtype_name(static_cast<DType>(word >> 8 & 0xff)),
                        reduce_op_name(static_cast<ReduceOp>(word >> 16 & 0xff)));
  } else if (kind == static_cast<uint64_t>(CallKind::kBroadcast)) {
    text += fmt::format(" from root {}", word >> 24);
  }
  return text;
}

MessageHeader MessageHeader::make(int64_t bytes, uint64_t sequence, std::string_view what) {
  MessageHeader header = {static_cast<uint64_t>(bytes), sequence, {}};
  std::memcpy(header.what, what.data(), std::min(what.size(), sizeof(header.what) - 1));
  return header;
}

std::unique_ptr<Comm> make_single_comm(std::string name) { return std::make_unique<SingleComm>(std::move(name)); }

}  // namespace cairn::comm
