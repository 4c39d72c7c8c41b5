#include "runtime/comm/chain_comm.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "runtime/comm/group.h"
#include "runtime/comm/reduce.h"

namespace cairn::comm {
namespace {

constexpr int64_t kLeastBytes = 64 << 10;   // of an operation; below, one exchange of all is sooner done
constexpr int64_t kPieceBytes = 256 << 10;  // long enough for a network, short enough for all hosts to be at work

/// A part of a sum: this member's share of its host's work.
struct Item {
  int64_t host = 0;           // where the sum is wanted, on the member that stands where this one does
  int64_t at = 0, bytes = 0;  // of that member's part
};

class ChainComm final : public Comm {
 public:
  explicit ChainComm(ChainGroups groups)
      : flat_(std::move(groups.flat)),
        host_(std::move(groups.host)),
        lane_(std::move(groups.lane)),
        hosts_(lane_->size()),
        here_(lane_->rank()),
        members_(host_->size()),
        self_(host_->rank()) {}

  int64_t rank() const override { return flat_->rank(); }
  int64_t size() const override { return flat_->size(); }
  const std::string& name() const override { return flat_->name(); }
  Traffic traffic() const override {
    Traffic out = flat_->traffic();
    count(out.all_reduce, chained_.all_reduce);
    count(out.reduce_scatter, chained_.reduce_scatter);
    count(out.all_gather, chained_.all_gather);
    return out;
  }

  Status all_reduce(void* data, int64_t count, DType dtype, ReduceOp op, std::string_view what) override {
    const int64_t elem = dtype_size_bytes(dtype);
    if (!chains(dtype, op) || count * elem < kLeastBytes) return flat_->all_reduce(data, count, dtype, op, what);
    chained_.all_reduce.add(count * elem);
    auto* const bytes = static_cast<char*>(data);
    const auto slice = [&](int64_t member) { return count * member / members_ * elem; };
    const int64_t own = slice(self_ + 1) - slice(self_), longest = (count + members_ - 1) / members_ * elem;
    std::vector<Item> items;
    for (int64_t at = 0; at < longest; at += kPieceBytes) {
      items.push_back({.at = at, .bytes = std::clamp<int64_t>(own - at, 0, kPieceBytes)});
    }
    const auto input = [&](const Item& item, int64_t member) {
      const int64_t length = slice(member + 1) - slice(member);
      return Piece{bytes + slice(member) + std::min(item.at, length),
                   std::clamp<int64_t>(length - item.at, 0, kPieceBytes)};
    };
    const Sum sum{.dtype = dtype, .everywhere = true};
    RT_TRY(walk(Work{std::move(items), input, bytes + slice(self_), sum, what}));
    // Each member of the host has the sum of its slice.
    std::vector<OutPart> out;
    std::vector<InPart> in;
    for (int64_t member = 0; member < members_; ++member) {
      if (member == self_) continue;
      out.push_back({member, bytes + slice(self_), own});
      in.push_back({member, bytes + slice(member), slice(member + 1) - slice(member)});
    }
    return host_->all_to_all(out, in, what);
  }

  Status reduce_scatter(const void* input, void* output, int64_t count_per_rank, DType dtype, ReduceOp op,
                        std::string_view what) override {
    if (!chains(dtype, op) || !pays(count_per_rank, dtype)) {
      return flat_->reduce_scatter(input, output, count_per_rank, dtype, op, what);
    }
    return scatter(input, output, count_per_rank, {.dtype = dtype}, what);
  }

  Status reduce_scatter_add(const void* input, void* output, int64_t count_per_rank, DType dtype, int64_t tree,
                            std::string_view what) override {
    const bool trees_fit = tree > 0 && members_ % tree == 0;
    if (!chains(dtype, ReduceOp::kSum) || !trees_fit || !pays(count_per_rank, dtype)) {
      return flat_->reduce_scatter_add(input, output, count_per_rank, dtype, tree, what);
    }
    return scatter(input, output, count_per_rank, {.dtype = dtype, .tree = tree, .added = true}, what);
  }

  Status all_gather(const void* input, void* output, int64_t bytes_per_rank, std::string_view what) override {
    if (bytes_per_rank * size() < kLeastBytes) return flat_->all_gather(input, output, bytes_per_rank, what);
    chained_.all_gather.add(bytes_per_rank);
    auto* const all = static_cast<char*>(output);
    const auto chunk = [&](int64_t host, int64_t member) { return all + (host * members_ + member) * bytes_per_rank; };
    if (input != chunk(here_, self_)) std::memcpy(chunk(here_, self_), input, static_cast<size_t>(bytes_per_rank));
    std::vector<OutPart> out;
    std::vector<InPart> in;
    for (int64_t host = 0; host < hosts_; ++host) {
      if (host == here_) continue;
      out.push_back({host, chunk(here_, self_), bytes_per_rank});
      in.push_back({host, chunk(host, self_), bytes_per_rank});
    }
    RT_TRY(lane_->all_to_all(out, in, what));
    out.clear(), in.clear();
    for (int64_t member = 0; member < members_; ++member) {
      if (member == self_) continue;
      for (int64_t host = 0; host < hosts_; ++host) {
        out.push_back({member, chunk(host, self_), bytes_per_rank});
        in.push_back({member, chunk(host, member), bytes_per_rank});
      }
    }
    return host_->all_to_all(out, in, what);
  }

  Status broadcast(void* data, int64_t bytes, int64_t root, std::string_view what) override {
    return flat_->broadcast(data, bytes, root, what);
  }
  Status all_to_all(std::span<const OutPart> out, std::span<const InPart> in, std::string_view what) override {
    return flat_->all_to_all(out, in, what);
  }
  Status barrier(std::string_view what) override { return flat_->barrier(what); }
  Status isend(const void* data, int64_t bytes, int64_t dst, std::string_view what) override {
    return flat_->isend(data, bytes, dst, what);
  }
  Status recv(void* data, int64_t bytes, int64_t src, std::string_view what) override {
    return flat_->recv(data, bytes, src, what);
  }
  Status wait_sends(std::string_view what) override { return flat_->wait_sends(what); }
  Status wait_sends_to(int64_t dst, int64_t may_stay, std::string_view what) override {
    return flat_->wait_sends_to(dst, may_stay, what);
  }

 private:
  struct Piece {
    const char* data;
    int64_t bytes;
  };
  struct Sum {
    DType dtype = DType::kF32;
    int64_t tree = 1;
    bool added = false;       // to what the output holds
    bool everywhere = false;  // each host wants each sum; else the item's alone
  };

  static void count(Volume& to, const Volume& more) { to.bytes += more.bytes, to.calls += more.calls; }
  /// Folded in their own type, so that a sum under way is one of their kind.
  bool chains(DType dtype, ReduceOp op) const {
    return saves_ && op == ReduceOp::kSum && (dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kI64);
  }
  bool pays(int64_t count_per_rank, DType dtype) const {
    return count_per_rank * size() * dtype_size_bytes(dtype) >= kLeastBytes;
  }

  /// The sums of one operation: what each item is made of, and where those go that are wanted here.
  template <typename Input>
  struct Work {
    std::vector<Item> items;
    Input input;   // (item, member): what this rank adds to the sum of that member of its host
    char* output;  // an item goes to output + item.at
    Sum sum;
    std::string_view what;

    int64_t count() const { return std::ssize(items); }
    const Item& item(int64_t i) const { return items[static_cast<size_t>(i)]; }
  };

  Status scatter(const void* input, void* output, int64_t count, const Sum& sum, std::string_view what) {
    const int64_t chunk = count * dtype_size_bytes(sum.dtype);
    chained_.reduce_scatter.add(chunk * size());
    std::vector<Item> items;  // by turns for each host, so that none waits long for its own
    for (int64_t at = 0; at < chunk; at += kPieceBytes) {
      for (int64_t host = 0; host < hosts_; ++host) {
        items.push_back({.host = host, .at = at, .bytes = std::min(chunk - at, kPieceBytes)});
      }
    }
    const auto of_member = [&](const Item& item, int64_t member) {
      return Piece{static_cast<const char*>(input) + (item.host * members_ + member) * chunk + item.at, item.bytes};
    };
    return walk(Work{std::move(items), of_member, static_cast<char*>(output), sum, what});
  }

  /// All items, along the hosts.
  ///
  /// Sums come back late: at item i a host waits for that of item i - late_, when it is through with its own part of
  /// all items before. So no more than late_ + 1 are ever under way to it, and the last host has memory for as many.
  /// What sums begin with goes to the first host late_ items early, so that the last host's messages to it come in the
  /// order in which it waits for them.
  template <typename Input>
  Status walk(const Work<Input>& work) {
    memory_.resize(static_cast<size_t>((members_ + ring_) * kPieceBytes));
    for (int64_t i = 0; i < late_; ++i) RT_TRY(begin(work, i));
    for (int64_t i = 0; i < work.count() + late_; ++i) {
      RT_TRY(begin(work, i + late_));
      if (i < work.count()) RT_TRY(add(work, i));
      if (i >= late_) RT_TRY(finish(work, work.item(i - late_)));
    }
    return lane_->wait_sends(work.what);
  }

  /// The sum of item i is added to what this rank has, and the first host needs that.
  template <typename Input>
  bool begins_here(const Work<Input>& work, int64_t i) const {
    return work.sum.added && here_ > 0 && i < work.count() && work.item(i).host == here_;
  }
  template <typename Input>
  Status begin(const Work<Input>& work, int64_t i) {
    if (!begins_here(work, i)) return {};
    return lane_->isend(work.output + work.item(i).at, work.item(i).bytes, 0, work.what);
  }

  /// This host's part of item i, to what comes from the host before; on to the next one, or where it is wanted.
  template <typename Input>
  Status add(const Work<Input>& work, int64_t i) {
    const Item& item = work.item(i);
    const Sum& sum = work.sum;
    std::vector<OutPart> out;
    std::vector<InPart> in;
    std::vector<const void*> parts;
    for (int64_t member = 0; member < members_; ++member) {
      const Piece piece = work.input(item, member);
      if (member == self_) {
        parts.push_back(piece.data);
        continue;
      }
      out.push_back({member, piece.data, piece.bytes});
      in.push_back({member, memory_.data() + member * kPieceBytes, item.bytes});
      parts.push_back(in.back().data);
    }
    RT_TRY(host_->all_to_all(out, in, work.what));
    if (item.bytes == 0) return {};
    RT_TRY(free_room(work, i));
    char* const room = memory_.data() + (members_ + i % ring_) * kPieceBytes;
    if (here_ > 0) {
      RT_TRY(lane_->recv(room, item.bytes, here_ - 1, work.what));
    } else if (sum.added && item.host > 0) {
      RT_TRY(lane_->recv(room, item.bytes, item.host, work.what));
    } else if (sum.added) {
      std::memcpy(room, work.output + item.at, static_cast<size_t>(item.bytes));
    }
    const int64_t elems = item.bytes / dtype_size_bytes(sum.dtype);
    if (here_ == 0 && !sum.added) {
      reduce_ordered(room, parts.data(), members_, elems, sum.dtype, ReduceOp::kSum);
    } else {
      add_ordered(room, parts.data(), members_, sum.tree, elems, sum.dtype);
    }
    if (here_ == last_ && wanted_here(work, item)) {
      std::memcpy(work.output + item.at, room, static_cast<size_t>(item.bytes));
    }
    const int64_t to = next_of(work, item);
    return to < 0 ? Status() : lane_->isend(room, item.bytes, to, work.what);
  }

  /// Back along the chain where all hosts want a sum, else straight from its end.
  template <typename Input>
  Status finish(const Work<Input>& work, const Item& item) {
    if (item.bytes == 0 || here_ == last_ || !wanted_here(work, item)) return {};
    char* const to = work.output + item.at;
    RT_TRY(lane_->recv(to, item.bytes, work.sum.everywhere ? here_ + 1 : last_, work.what));
    return work.sum.everywhere && here_ > 0 ? lane_->isend(to, item.bytes, here_ - 1, work.what) : Status();
  }

  template <typename Input>
  bool wanted_here(const Work<Input>& work, const Item& item) const {
    return item.host == here_ || work.sum.everywhere;
  }
  /// The host to which the sum goes from here when this one's part is in it; -1: it stays.
  template <typename Input>
  int64_t next_of(const Work<Input>& work, const Item& item) const {
    if (item.bytes == 0) return -1;
    if (here_ < last_) return here_ + 1;
    if (work.sum.everywhere) return here_ - 1;
    return item.host == here_ ? -1 : item.host;
  }

  /// Until the message that was sent from the room of item i before is gone.
  template <typename Input>
  Status free_room(const Work<Input>& work, int64_t i) {
    const int64_t before = i - ring_;
    if (before < 0) return {};
    const int64_t to = next_of(work, work.item(before));
    if (to < 0) return {};
    int64_t newer = 0;
    for (int64_t k = before + 1; k < i; ++k) newer += next_of(work, work.item(k)) == to ? 1 : 0;
    for (int64_t k = before + 1; k <= i && to == 0; ++k) newer += begins_here(work, k + late_) ? 1 : 0;
    return lane_->wait_sends_to(to, newer, work.what);
  }

  const std::unique_ptr<Comm> flat_, host_, lane_;
  const int64_t hosts_, here_, members_, self_;
  const int64_t last_ = hosts_ - 1, late_ = 2 * hosts_, ring_ = late_ + 2;
  // A mesh puts members (hosts - 1) / hosts times a sum's bytes on a host's network, the chain once, in more steps.
  const bool saves_ = 2 * members_ * last_ >= 3 * hosts_;
  std::vector<char> memory_;  // a piece of each member, and the rooms of sums under way
  Traffic chained_;
};

}  // namespace

std::unique_ptr<Comm> make_chain_comm(ChainGroups groups) { return std::make_unique<ChainComm>(std::move(groups)); }

}  // namespace cairn::comm
