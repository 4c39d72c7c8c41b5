#pragma once
// The optimizer's memory of one rank of a tiny model, each array of each saved piece on its own, all filled with
// numbers that differ; and what records how it is walked.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/optim/walk/state_walk.h"

namespace cairn::testing {

inline Recipe small_recipe() {
  Recipe r;
  r.name = "small";
  r.stop = {Span::Unit::kSteps, 4};
  r.model = {.layers = 1, .width = 16, .heads = 2, .kv_heads = 2, .head_dim = 8, .ffn = 24, .context = 4, .vocab = 17};
  r.batch = {.samples = 4, .micro = 1};
  r.optimizer.bucket = 2000;  // parts of tensors
  r.optimizer.zero = 0;       // replicas keep what others save
  return r;
}

/// With biases that balance experts.
inline Recipe balanced_recipe() {
  Recipe r = small_recipe();
  r.model.activation = Activation::kSwiGlu;
  r.model.bias = false;
  r.model.moe = {.experts = 4, .top_k = 2, .bias_rate = 0.01};
  return r;
}

class RankMemory {
 public:
  RankMemory(const Plan& plan, int64_t world_rank, int64_t banks) : rank(plan.rank(world_rank)) {
    const StateKinds kinds = plan.state_kinds();
    weights = make(rank.weight_bytes / 4 + 1);
    grads = make(rank.grad_bytes / 4);
    arrays.weights = DevicePtr(weights.data()).as<std::byte>();
    arrays.grads = DevicePtr(grads.data());
    arrays.work = DevicePtr(work_.emplace_back(rank.work_bytes() / 8 + 1).data()).as<std::byte>();
    for (int64_t bank = 0; bank < banks; ++bank) {
      auto& tensors = saved.emplace_back();
      auto& states = arrays.banks.emplace_back();
      for (const StateKind kind : kinds.arrays()) {
        size_t k = 0;
        for (const StatePiece& piece : rank.pieces) {
          if (!piece.primary) continue;
          tensors.push_back(make(piece.count_elems()));
          if (k == states.size()) states.emplace_back();
          states[k++].*optim::member_of(kind) = DevicePtr(tensors.back().data());
        }
      }
      auto& sums = arrays.bank_sums.emplace_back();
      for (const SumPiece& piece : rank.sums) {
        if (!piece.primary) continue;
        tensors.push_back(make(piece.count()));
        sums.emplace_back(tensors.back().data());
      }
    }
    for (const StateKind kind : kinds.without(StateKind::kEma).arrays()) {
      const std::span<float> array = make(rank.private_elems);
      arrays.private_state.*optim::member_of(kind) = DevicePtr(array.data());
      for (const StatePiece& piece : rank.pieces) {
        if (!piece.primary) copies.push_back(array.subspan(piece.state_offset, piece.count_elems()));
      }
    }
    const std::span<float> sums = make(rank.private_sums);
    arrays.private_sums = DevicePtr(sums.data());
    for (const SumPiece& piece : rank.sums) {
      if (!piece.primary) copies.push_back(sums.subspan(piece.state_offset, piece.count()));
    }
  }
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  /// All that this rank keeps of others, at a peer with `banks` banks, in runs of `run` elements at most. What is here
  /// is of no use then.
  void put_at_peer(int64_t banks, int64_t run) {
    auto& parts = arrays.peer_copies.emplace();
    at_peer.resize(copies.size());
    for (size_t copy = copies.size(); copy-- > 0;) {  // in no order that anybody may rely on
      for (int64_t bank = 0; bank < banks; ++bank) at_peer[copy].push_back(make(std::ssize(copies[copy])));
      std::fill(copies[copy].begin(), copies[copy].end(), -1e30f);
      for (int64_t at = 0; at < std::ssize(copies[copy]); at += run) {
        PeerCopy& part = parts.emplace_back();
        part.copy = static_cast<int64_t>(copy);
        part.offset = at * 4;
        part.bytes = std::min(run, std::ssize(copies[copy]) - at) * 4;
        for (const std::span<float> bank : at_peer[copy]) {
          part.banks.push_back(reinterpret_cast<std::byte*>(&bank[static_cast<size_t>(at)]));
        }
      }
    }
  }

  const std::unique_ptr<Stream> stream = make_cpu_stream();
  const RankPlan rank;
  optim::Arrays arrays;
  std::span<float> weights, grads;                     // of the arrays
  std::vector<std::vector<std::span<float>>> saved;    // by bank, in its order
  std::vector<std::span<float>> copies;                // of what others save, in the order of PeerCopy::copy
  std::vector<std::vector<std::span<float>>> at_peer;  // of each copy, by bank

 private:
  std::span<float> make(int64_t count) {
    std::vector<float>& out = owned_.emplace_back(static_cast<size_t>(count));
    for (float& value : out) value = 1e-4f * static_cast<float>(++made_ % 99991);
    return out;
  }
  std::list<std::vector<float>> owned_;
  std::list<std::vector<double>> work_;
  int64_t made_ = 0;
};

/// What a walk does, one line each: areas by the names that were given to memory.
class WalkLog {
 public:
  void name(const std::string& what, std::span<const float> memory) { named_.emplace_back(what, memory); }
  void add(std::string line) { lines.push_back(std::move(line)); }
  /// "m0[16,32)": elements of named memory.
  std::string text(std::span<const float> area) const {
    const float* const at = area.data();
    for (const auto& [what, memory] : named_) {
      if (at < memory.data() || at >= memory.data() + memory.size()) continue;
      const auto begin = at - memory.data();
      return what + "[" + std::to_string(begin) + "," + std::to_string(begin + std::ssize(area)) + ")";
    }
    return "unnamed";
  }
  std::string text(DevicePtr<const float> at, int64_t count) const {
    return text(std::span(address_of(at), static_cast<size_t>(count)));
  }
  std::string text(DeviceBytes area) const { return text(area.first.as<const float>(), area.size / 4); }
  std::vector<std::string> lines;

 private:
  std::vector<std::pair<std::string, std::span<const float>>> named_;
};

class RecordingPager final : public Pager {
 public:
  RecordingPager(WalkLog& log, int64_t block_elems) : log_(log), block_elems_(block_elems) {}
  int64_t block_bytes() const override { return block_elems_ * 4; }
  void fetch(std::span<const DeviceBytes> areas) override {
    for (const DeviceBytes& area : areas) log_.add("fetch " + log_.text(area));
  }
  void release(std::span<const DeviceBytes> areas, bool written) override {
    for (const DeviceBytes& area : areas) log_.add((written ? "store " : "drop ") + log_.text(area));
  }

 private:
  WalkLog& log_;
  int64_t block_elems_;
};

class RecordingGate final : public CopyGate {
 public:
  explicit RecordingGate(int64_t block_elems, std::function<void(std::span<const float>)> on_wait)
      : block_elems_(block_elems), on_wait_(std::move(on_wait)) {}
  int64_t block_bytes() const override { return block_elems_ * 4; }
  void order_after_copy(Stream&, std::span<const DeviceBytes> areas) override {
    for (const DeviceBytes& area : areas)
      on_wait_({address_of(area.first.as<const float>()), static_cast<size_t>(area.size / 4)});
  }
  int64_t waited_ns() const override { return 0; }

 private:
  int64_t block_elems_;
  std::function<void(std::span<const float>)> on_wait_;
};

}  // namespace cairn::testing
