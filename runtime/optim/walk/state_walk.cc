#include "runtime/optim/walk/state_walk.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "runtime/core/check.h"
#include "runtime/core/word_sums.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/parallel.h"

namespace cairn::optim {
namespace {

constexpr size_t kBlocksAhead = 2;  // of banks on a disk: that are on their way while one is updated

float* advanced(float* array, int64_t by) { return array == nullptr ? nullptr : array + by; }

kernels::StateArrays advanced(const kernels::StateArrays& state, int64_t by) {
  return {advanced(state.master, by), advanced(state.exp_avg, by), advanced(state.exp_avg_sq, by),
          advanced(state.ema, by)};
}

const std::byte* bytes_of(const float* values) { return reinterpret_cast<const std::byte*>(values); }

std::span<std::byte> area_of(float* values, int64_t count) {
  return std::as_writable_bytes(std::span(values, static_cast<size_t>(count)));
}

std::vector<std::span<std::byte>> areas_of(const kernels::StateArrays& state, int64_t count) {
  std::vector<std::span<std::byte>> out;
  for (float* values : {state.master, state.exp_avg, state.exp_avg_sq, state.ema}) {
    if (values != nullptr) out.push_back(area_of(values, count));
  }
  return out;
}

/// Before this process writes memory that it shares and may not have touched: a page that is first read is mapped
/// together with its neighbours, one that is first written alone, and that takes longer than the writing.
void map_pages(const std::byte* area, int64_t bytes) {
  constexpr int64_t kMappedAtOnce = int64_t{64} << 10;  // Linux' fault_around_bytes
  kernels::parallel_elements(bytes, [=](int64_t at, int64_t end) {
    for (; at < end; at += kMappedAtOnce) static_cast<void>(*static_cast<const volatile std::byte*>(area + at));
  });
}

void copy_elements(const float* from, float* to, int64_t count) {
  kernels::parallel_elements(count, [=](int64_t i, int64_t end) { std::copy(from + i, from + end, to + i); });
}

}  // namespace

float* kernels::StateArrays::*member_of(StateKind kind) {
  switch (kind) {
    case StateKind::kWeight:
      return &kernels::StateArrays::master;
    case StateKind::kExpAvg:
      return &kernels::StateArrays::exp_avg;
    case StateKind::kExpAvgSq:
      return &kernels::StateArrays::exp_avg_sq;
    case StateKind::kEma:
      return &kernels::StateArrays::ema;
    case StateKind::kExpAvgSqRow:
    case StateKind::kExpAvgSqCol:
      break;
  }
  RT_CHECK(false, "kind {} is no array", static_cast<int>(kind));
}

std::vector<int64_t> overwrite_turns(const Plan& plan, const RankPlan& rank) {
  std::vector<bool> balances;  // of the primary pieces
  for (const StatePiece& piece : rank.pieces) {
    if (piece.primary) balances.push_back(plan.tensors[piece.tensor].balances);
  }
  const size_t pieces = balances.size(), in_arrays = static_cast<size_t>(rank.saved_arrays) * pieces;
  const auto sums = std::count_if(rank.sums.begin(), rank.sums.end(), [](const SumPiece& sum) { return sum.primary; });
  std::vector<int64_t> out(in_arrays + static_cast<size_t>(sums));
  int64_t turn = 0;
  const auto take_pieces = [&](bool balancing) {
    for (size_t piece = 0; piece < pieces; ++piece) {
      if (balances[piece] != balancing) continue;
      for (size_t at = piece; at < in_arrays; at += pieces) out[at] = turn;
      ++turn;
    }
  };
  take_pieces(true);
  for (size_t at = in_arrays; at < out.size(); ++at) out[at] = turn++;
  take_pieces(false);
  return out;
}

StateWalk::StateWalk(const Plan& plan, const RankPlan& rank, Arrays arrays)
    : plan_(plan),
      rank_(rank),
      arrays_(std::move(arrays)),
      summed_(arrays_.gate == nullptr),
      reads_peers_(arrays_.peer_copies.has_value()) {
  for (const StateKind kind : plan.state_kinds().arrays()) members_.push_back(member_of(kind));
  for (const StatePiece& piece : rank.pieces) {
    saved_before_.push_back(saved_pieces_);
    saved_pieces_ += piece.primary ? 1 : 0;
  }
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved_pieces_, "a bank with {} of {} pieces", bank.size(), saved_pieces_);
  }
  sums_.resize(overwrite_turns(plan, rank).size());
  for (float* kernels::StateArrays::*const array : members_) {
    if (array == &kernels::StateArrays::ema) continue;
    for (const StatePiece& piece : rank.pieces) {
      if (!piece.primary) copies_.push_back(arrays_.private_state.*array + piece.state_offset);
    }
  }
  for (const SumPiece& piece : rank.sums) {
    if (!piece.primary) copies_.push_back(arrays_.private_sums + piece.state_offset);
  }
  if (!reads_peers_) return;
  std::sort(arrays_.peer_copies->begin(), arrays_.peer_copies->end(), [](const PeerCopy& a, const PeerCopy& b) {
    return std::tie(a.copy, a.offset) < std::tie(b.copy, b.offset);
  });
}

std::span<float> StateWalk::at_peer(int64_t copy, int64_t begin, int64_t bank) const {
  const std::vector<PeerCopy>& all = *arrays_.peer_copies;
  const auto next = std::partition_point(all.begin(), all.end(), [&](const PeerCopy& part) {
    return part.copy < copy || (part.copy == copy && part.offset <= begin * 4);
  });
  RT_CHECK(next != all.begin(), "no peer has copy {}", copy);
  const PeerCopy& part = *std::prev(next);
  const int64_t inside = begin * 4 - part.offset;
  RT_CHECK(part.copy == copy && inside < part.bytes, "no peer has element {} of copy {}", begin, copy);
  return {reinterpret_cast<float*>(part.banks[bank] + inside), static_cast<size_t>((part.bytes - inside) / 4)};
}

void StateWalk::bring_copy(int64_t copy, int64_t bank) const {
  const std::vector<PeerCopy>& all = *arrays_.peer_copies;
  auto part = std::partition_point(all.begin(), all.end(), [&](const PeerCopy& p) { return p.copy < copy; });
  for (; part != all.end() && part->copy == copy; ++part) {
    copy_elements(reinterpret_cast<const float*>(part->banks[bank]), copies_[copy] + part->offset / 4, part->bytes / 4);
  }
}

void StateWalk::bring_peer_copies(int64_t bank) {
  for (int64_t copy = 0; copy < std::ssize(copies_); ++copy) bring_copy(copy, bank);
  reads_peers_ = false;
}

std::pair<kernels::StateArrays, int64_t> StateWalk::private_run(const StatePiece& piece, int64_t begin, int64_t count,
                                                                int64_t bank) const {
  if (!reads_peers_) return {advanced(arrays_.private_state, piece.state_offset + begin), count};
  kernels::StateArrays state;
  int64_t run = count, copy = index_of(piece) - saved_before_[index_of(piece)];
  for (float* kernels::StateArrays::*const array : members_) {
    if (array == &kernels::StateArrays::ema) continue;
    const std::span<float> there = at_peer(copy, begin, bank);
    state.*array = there.data();
    run = std::min(run, std::ssize(there));
    copy += private_pieces();
  }
  return {state, run};
}

StateBlock StateWalk::block_of(const StatePiece& piece, int64_t saved, int64_t begin, int64_t count) const {
  return {.piece = &piece,
          .saved = saved,
          .begin = begin,
          .count = count,
          .grad = arrays_.grads + rank_.grad_offset(piece) + begin,
          .weight = rank_.weight_offset(piece) + begin};
}

std::vector<StateBlock> StateWalk::cut(int64_t from, int64_t to, Pieces pieces) const {
  const bool balancing = pieces == Pieces::kBalancing, waits = pieces != Pieces::kReadOnly && arrays_.gate != nullptr;
  std::vector<StateBlock> out;
  for (const StatePiece& piece : rank_.pieces) {
    if (plan_.tensors[piece.tensor].balances != balancing) continue;
    const int64_t saved = piece.primary ? saved_before_[index_of(piece)] : -1, elems = piece.count_elems();
    const int64_t longest = arrays_.pager != nullptr ? arrays_.pager->block_bytes() / 4
                            : waits && saved >= 0    ? arrays_.gate->block_bytes() / 4
                                                     : std::max<int64_t>(1, elems);
    for (int64_t begin = 0; begin < elems; begin += longest) {
      StateBlock& block = out.emplace_back(block_of(piece, saved, begin, std::min(longest, elems - begin)));
      if (saved < 0) continue;
      block.from = advanced(arrays_.banks[from][saved], begin);
      block.to = advanced(arrays_.banks[to][saved], begin);
    }
  }
  return out;
}

void StateWalk::for_blocks(int64_t from, int64_t to, const std::function<void(const StateBlock&)>& body,
                           Pieces pieces) const {
  Pager* const pager = arrays_.pager;
  CopyGate* const gate = pieces == Pieces::kReadOnly ? nullptr : arrays_.gate;
  const std::vector<StateBlock> blocks = cut(from, to, pieces);
  size_t fetched = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (; pager != nullptr && fetched < std::min(blocks.size(), b + 1 + kBlocksAhead); ++fetched) {
      if (blocks[fetched].saved >= 0) fetch(blocks[fetched]);
    }
    const StateBlock& block = blocks[b];
    if (block.saved >= 0) {
      if (gate != nullptr) gate->wait(areas_of(block.to, block.count));
      body(block);
      if (pager != nullptr) release(block);
      continue;
    }
    for (int64_t at = block.begin, end = at + block.count; at < end;) {
      const auto [state, run] = private_run(*block.piece, at, end - at, from);
      StateBlock part = block_of(*block.piece, -1, at, run);
      part.from = state;
      part.to = advanced(arrays_.private_state, block.piece->state_offset + at);
      body(part);
      if (pager != nullptr && reads_peers_) pager->release(areas_of(state, run), false);
      at += run;
    }
  }
}

void StateWalk::for_sums(int64_t from, int64_t to, const std::function<void(int64_t, const float*, float*)>& body) {
  int64_t saved = 0, copy = rank_.private_arrays * private_pieces();
  for (int64_t k = 0; k < std::ssize(rank_.sums); ++k) {
    const SumPiece& piece = rank_.sums[k];
    if (!piece.primary) {
      if (reads_peers_) bring_copy(copy, from);
      body(k, copies_[copy], copies_[copy]);
      ++copy;
      continue;
    }
    float* const target = arrays_.bank_sums[to][saved];
    if (arrays_.gate != nullptr) {
      const std::array area = {area_of(target, piece.count())};
      arrays_.gate->wait(area);
    }
    body(k, arrays_.bank_sums[from][saved], target);
    if (summed_) sums_[std::ssize(members_) * saved_pieces_ + saved] = word_sums(bytes_of(target), piece.count());
    ++saved;
  }
}

void StateWalk::fetch(const StateBlock& block) const {
  std::vector<std::span<std::byte>> areas = areas_of(block.from, block.count);
  if (block.to.master != block.from.master) {  // a page that is not there is read before its first byte can be written
    const std::vector<std::span<std::byte>> written = areas_of(block.to, block.count);
    areas.insert(areas.end(), written.begin(), written.end());
  }
  arrays_.pager->fetch(areas);
}

void StateWalk::release(const StateBlock& block) const {
  arrays_.pager->release(areas_of(block.to, block.count), true);
  if (block.to.master != block.from.master) arrays_.pager->release(areas_of(block.from, block.count), false);
}

void StateWalk::note_sum(const StateBlock& block, int64_t array, uint64_t sums) {
  if (!summed(block)) return;
  uint64_t& sum = sums_[array * saved_pieces_ + block.saved];
  sum = add_word_sums(block.begin == 0 ? 0 : sum, shift_word_sums(sums, block.begin));
}

void StateWalk::note_sums(const StateBlock& block) {
  if (!summed(block)) return;
  for (int64_t array = 0; array < std::ssize(members_); ++array) {
    if (members_[array] == &kernels::StateArrays::ema) continue;
    note_sum(block, array, word_sums(bytes_of(block.to.*members_[array]), block.count));
  }
}

void StateWalk::keep(int64_t from, int64_t to) {
  if (reads_peers_) bring_peer_copies(from);
  if (arrays_.gate != nullptr && from == to) return;  // it is where it is
  const auto copy = [](const float* source, float* target, int64_t count) {
    if (target != source) std::copy_n(source, count, target);
    return word_sums(bytes_of(target), count);
  };
  int64_t k = 0;
  for (const StatePiece& piece : rank_.pieces) {
    if (!piece.primary) continue;
    for (int64_t array = 0; array < std::ssize(members_); ++array) {
      sums_[array * saved_pieces_ + k] =
          copy(arrays_.banks[from][k].*members_[array], arrays_.banks[to][k].*members_[array], piece.count_elems());
    }
    ++k;
  }
  int64_t at = 0;
  for (const SumPiece& piece : rank_.sums) {
    if (!piece.primary) continue;
    sums_[std::ssize(members_) * saved_pieces_ + at] =
        copy(arrays_.bank_sums[from][at], arrays_.bank_sums[to][at], piece.count());
    ++at;
  }
}

void StateWalk::put_weights(const float* master, int64_t weight, int64_t count) const {
  switch (plan_.compute_dtype()) {
    case DType::kBf16:
      return kernels::cast(master, static_cast<bf16*>(arrays_.weights) + weight, count);
    case DType::kF16:
      return kernels::cast(master, static_cast<f16*>(arrays_.weights) + weight, count);
    default:
      return copy_elements(master, static_cast<float*>(arrays_.weights) + weight, count);
  }
}

void StateWalk::make_weights(int64_t bank, const Bucket& bucket) const {
  const auto from = [&](int64_t flat) {
    return std::partition_point(rank_.pieces.begin(), rank_.pieces.end(),
                                [&](const StatePiece& piece) { return piece.flat_offset < flat; });
  };
  const int64_t elem_bytes = dtype_size_bytes(plan_.compute_dtype());
  const auto put = [&](const float* master, int64_t at, int64_t count) {
    map_pages(static_cast<const std::byte*>(arrays_.weights) + at * elem_bytes, count * elem_bytes);
    put_weights(master, at, count);
  };
  for (const StatePiece& piece : std::span(from(bucket.range.begin), from(bucket.range.end))) {
    const int64_t weight = rank_.weight_offset(piece), count = piece.count_elems();
    if (piece.primary) {
      put(arrays_.banks[bank][saved_before_[index_of(piece)]].master, weight, count);
      continue;
    }
    for (int64_t at = 0; at < count;) {
      const auto [state, run] = private_run(piece, at, count - at, bank);
      put(state.master, weight + at, run);
      at += run;
    }
  }
}

}  // namespace cairn::optim
