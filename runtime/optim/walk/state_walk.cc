#include "runtime/optim/walk/state_walk.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "runtime/core/check.h"

namespace cairn::optim {
namespace {

constexpr size_t kBlocksAhead = 2;  // of banks on a disk: that are on their way while one is updated

DevicePtr<float> advanced(DevicePtr<float> array, int64_t by) { return array ? array + by : array; }

kernels::StateArrays advanced(const kernels::StateArrays& state, int64_t by) {
  return {advanced(state.master, by), advanced(state.exp_avg, by), advanced(state.exp_avg_sq, by),
          advanced(state.ema, by)};
}

DeviceBytes area_of(DevicePtr<float> values, int64_t count) { return {values.as<std::byte>(), count * 4}; }

std::vector<DeviceBytes> areas_of(const kernels::StateArrays& state, int64_t count) {
  std::vector<DeviceBytes> out;
  for (const DevicePtr<float> values : {state.master, state.exp_avg, state.exp_avg_sq, state.ema}) {
    if (values) out.push_back(area_of(values, count));
  }
  return out;
}

using Pieces = StateWalk::Pieces;

bool balances(Pieces pieces) { return pieces == Pieces::kBalancing || pieces == Pieces::kBalancingAgain; }
/// Whether what is done to them comes behind the copy.
bool follows_copy(Pieces pieces) { return pieces == Pieces::kTrained || pieces == Pieces::kBalancing; }

}  // namespace

DevicePtr<float> kernels::StateArrays::*member_of(StateKind kind) {
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

StateWalk::StateWalk(Stream& stream, const Plan& plan, const RankPlan& rank, Arrays arrays)
    : on_(kernels::state_exec_on(stream)),
      plan_(plan),
      rank_(rank),
      arrays_(std::move(arrays)),
      summed_(arrays_.gate == nullptr),
      reads_peers_(arrays_.peer_copies.has_value()),
      sums_(stream, std::ssize(overwrite_turns(plan, rank))) {
  for (const StateKind kind : plan.state_kinds().arrays()) members_.push_back(member_of(kind));
  for (const StatePiece& piece : rank.pieces) {
    saved_before_.push_back(saved_pieces_);
    saved_pieces_ += piece.primary ? 1 : 0;
  }
  for (const auto& bank : arrays_.banks) {
    RT_CHECK(std::ssize(bank) == saved_pieces_, "a bank with {} of {} pieces", bank.size(), saved_pieces_);
  }
  for (DevicePtr<float> kernels::StateArrays::*const array : members_) {
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

std::pair<DevicePtr<float>, int64_t> StateWalk::at_peer(int64_t copy, int64_t begin, int64_t bank) const {
  const std::vector<PeerCopy>& all = *arrays_.peer_copies;
  const auto next = std::partition_point(all.begin(), all.end(), [&](const PeerCopy& part) {
    return part.copy < copy || (part.copy == copy && part.offset <= begin * 4);
  });
  RT_CHECK(next != all.begin(), "no peer has copy {}", copy);
  const PeerCopy& part = *std::prev(next);
  const int64_t inside = begin * 4 - part.offset;
  RT_CHECK(part.copy == copy && inside < part.bytes, "no peer has element {} of copy {}", begin, copy);
  return {DevicePtr(part.banks[bank] + inside).as<float>(), (part.bytes - inside) / 4};
}

void StateWalk::bring_copy(int64_t copy, int64_t bank) const {
  const std::vector<PeerCopy>& all = *arrays_.peer_copies;
  auto part = std::partition_point(all.begin(), all.end(), [&](const PeerCopy& p) { return p.copy < copy; });
  for (; part != all.end() && part->copy == copy; ++part) {
    on_.copy_state(DevicePtr(part->banks[bank]).as<const float>(), copies_[copy] + part->offset / 4, part->bytes / 4);
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
  for (DevicePtr<float> kernels::StateArrays::*const array : members_) {
    if (array == &kernels::StateArrays::ema) continue;
    const auto [there, elems] = at_peer(copy, begin, bank);
    state.*array = there;
    run = std::min(run, elems);
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

StateBlock StateWalk::saved_block(const StatePiece& piece, int64_t begin, int64_t count, int64_t from,
                                  int64_t to) const {
  const int64_t saved = saved_before_[index_of(piece)];
  StateBlock block = block_of(piece, saved, begin, count);
  block.from = advanced(arrays_.banks[from][saved], begin);
  block.to = advanced(arrays_.banks[to][saved], begin);
  return block;
}

StateBlock StateWalk::private_block(const StatePiece& piece, int64_t begin, int64_t count, int64_t from) const {
  const auto [state, run] = private_run(piece, begin, count, from);
  StateBlock block = block_of(piece, -1, begin, run);
  block.from = state;
  block.to = advanced(arrays_.private_state, piece.state_offset + begin);
  return block;
}

int64_t StateWalk::most_at_once() const {
  if (arrays_.gate == nullptr) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(1, arrays_.gate->block_bytes() / 4);
}

std::vector<StateBlock> StateWalk::cut(int64_t from, int64_t to, Pieces pieces) const {
  const bool balancing = balances(pieces), waits = follows_copy(pieces);
  const int64_t at_once = most_at_once(), in_chunks = std::max(at_once / kernels::kStateChunk, int64_t{1});
  std::vector<StateBlock> out;
  for (const StatePiece& piece : rank_.pieces) {
    if (plan_.tensors[piece.tensor].balances != balancing) continue;
    const int64_t elems = piece.count_elems();
    const int64_t longest = arrays_.pager != nullptr ? arrays_.pager->block_bytes() / 4
                            : waits && piece.primary ? std::min(at_once, in_chunks * kernels::kStateChunk)
                                                     : std::max<int64_t>(1, elems);
    for (int64_t begin = 0; begin < elems; begin += std::min(longest, elems - begin)) {
      const int64_t count = std::min(longest, elems - begin);
      out.push_back(piece.primary ? saved_block(piece, begin, count, from, to) : block_of(piece, -1, begin, count));
    }
  }
  return out;
}

void StateWalk::for_blocks(int64_t from, int64_t to, const std::function<void(const StateBlock&)>& body,
                           Pieces pieces) const {
  Pager* const pager = arrays_.pager;
  CopyGate* const gate = follows_copy(pieces) ? arrays_.gate : nullptr;
  const std::vector<StateBlock> blocks = cut(from, to, pieces);
  size_t fetched = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (; pager != nullptr && fetched < std::min(blocks.size(), b + 1 + kBlocksAhead); ++fetched) {
      if (blocks[fetched].saved >= 0) fetch(blocks[fetched]);
    }
    const StateBlock& block = blocks[b];
    if (block.saved >= 0) {
      if (gate != nullptr) gate->order_after_copy(on_.stream, areas_of(block.to, block.count));
      body(block);
      if (pager != nullptr) release(block);
      continue;
    }
    for (int64_t at = block.begin, end = at + block.count; at < end;) {
      const StateBlock part = private_block(*block.piece, at, end - at, from);
      body(part);
      if (pager != nullptr && reads_peers_) pager->release(areas_of(part.from, part.count), false);
      at += part.count;
    }
  }
}

void StateWalk::for_batches(int64_t from, int64_t to, const std::function<void(std::span<const StateBlock>)>& body,
                            Pieces pieces) const {
  if (arrays_.pager != nullptr) {
    return for_blocks(
        from, to,
        [&](const StateBlock& block) {
          body({&block, 1});
        },
        pieces);
  }
  CopyGate* const gate = follows_copy(pieces) ? arrays_.gate : nullptr;
  const int64_t most = gate != nullptr ? most_at_once() : std::numeric_limits<int64_t>::max();
  const int64_t chunk = std::min(most, kernels::kStateChunk);
  std::vector<StateBlock> batch;
  std::vector<DeviceBytes> written;
  int64_t room = most;
  const auto send = [&] {
    if (batch.empty()) return;
    if (gate != nullptr) gate->order_after_copy(on_.stream, written);
    body(batch);
    batch.clear();
    written.clear();
    room = most;
  };
  for (const StatePiece& piece : rank_.pieces) {
    if (plan_.tensors[piece.tensor].balances != balances(pieces)) continue;
    for (int64_t begin = 0, elems = piece.count_elems(); begin < elems; begin += batch.back().count) {
      const int64_t left = elems - begin;
      if (!piece.primary) {
        batch.push_back(private_block(piece, begin, left, from));
        continue;
      }
      if (room <= 0) send();
      // Cut between chunks, behind what there is room for.
      const int64_t count = left <= room ? left : std::min(left, (room + chunk - 1) / chunk * chunk);
      batch.push_back(saved_block(piece, begin, count, from, to));
      if (gate == nullptr) continue;
      const std::vector<DeviceBytes> areas = areas_of(batch.back().to, count);
      written.insert(written.end(), areas.begin(), areas.end());
      room -= count;
    }
  }
  send();
}

void StateWalk::for_sums(int64_t from, int64_t to, const ForSum& body) const {
  std::vector<DeviceBytes> written;
  int64_t saved = 0, copy = rank_.private_arrays * private_pieces();
  for (int64_t k = 0; k < std::ssize(rank_.sums); ++k) {
    const SumPiece& piece = rank_.sums[k];
    if (!piece.primary) {
      if (reads_peers_) bring_copy(copy, from);
      body(k, copies_[copy], copies_[copy]);
      ++copy;
      continue;
    }
    const DevicePtr<float> target = arrays_.bank_sums[to][saved];
    written.push_back(area_of(target, piece.count()));
    body(k, arrays_.bank_sums[from][saved], target);
    ++saved;
  }
  if (arrays_.gate != nullptr) arrays_.gate->order_after_copy(on_.stream, written);
}

void StateWalk::sum_up_sums(int64_t to) {
  if (!summed_) return;
  int64_t saved = 0;
  for (const SumPiece& piece : rank_.sums) {
    if (!piece.primary) continue;
    const DevicePtr<float> target = arrays_.bank_sums[to][saved];
    on_.copy_summed(target, target, piece.count(), {place_of_sum(saved)});
    ++saved;
  }
}

void StateWalk::fetch(const StateBlock& block) const {
  std::vector<DeviceBytes> areas = areas_of(block.from, block.count);
  if (block.to.master != block.from.master) {  // a page that is not there is read before its first byte can be written
    const std::vector<DeviceBytes> written = areas_of(block.to, block.count);
    areas.insert(areas.end(), written.begin(), written.end());
  }
  arrays_.pager->fetch(areas);
}

void StateWalk::release(const StateBlock& block) const {
  arrays_.pager->release(areas_of(block.to, block.count), true);
  if (block.to.master != block.from.master) arrays_.pager->release(areas_of(block.from, block.count), false);
}

kernels::BlockSums StateWalk::sums_of(const StateBlock& block, int64_t first_array, int64_t count) {
  if (!summed_ || block.saved < 0) return {};
  return {places(block.saved, first_array, count), block.begin};
}

void StateWalk::sum_up(const StateBlock& block) {
  if (!summed_ || block.saved < 0) return;
  for (int64_t array = 0; array < std::ssize(members_); ++array) {
    if (members_[array] == &kernels::StateArrays::ema) continue;
    const DevicePtr<float> written = block.to.*members_[array];
    on_.copy_summed(written, written, block.count, sums_of(block, array, 1));
  }
}

std::vector<uint64_t> StateWalk::sums() const {
  std::vector<uint64_t> out(static_cast<size_t>(sums_.size()));
  if (!summed_) return out;
  const std::span<const uint64_t> noted = sums_.read();
  const auto pieces = static_cast<size_t>(saved_pieces_), in_arrays = pieces * members_.size();
  for (size_t k = 0; k < in_arrays; ++k) out[k] = noted[k % pieces * members_.size() + k / pieces];
  std::copy(noted.begin() + static_cast<std::ptrdiff_t>(in_arrays), noted.end(),
            out.begin() + static_cast<std::ptrdiff_t>(in_arrays));
  return out;
}

void StateWalk::keep(int64_t from, int64_t to) {
  if (reads_peers_) bring_peer_copies(from);
  if (arrays_.gate != nullptr && from == to) return;  // it is where it is
  for (int64_t k = 0, piece = 0; piece < std::ssize(rank_.pieces); ++piece) {
    if (!rank_.pieces[piece].primary) continue;
    for (int64_t array = 0; array < std::ssize(members_); ++array) {
      on_.copy_summed(arrays_.banks[from][k].*members_[array], arrays_.banks[to][k].*members_[array],
                      rank_.pieces[piece].count_elems(), {places(k, array, 1)});
    }
    ++k;
  }
  int64_t at = 0;
  for (const SumPiece& piece : rank_.sums) {
    if (!piece.primary) continue;
    on_.copy_summed(arrays_.bank_sums[from][at], arrays_.bank_sums[to][at], piece.count(), {place_of_sum(at)});
    ++at;
  }
}

DevicePtr<std::byte> StateWalk::weights_at(int64_t weight) const {
  return arrays_.weights + weight * dtype_size_bytes(plan_.compute_dtype());
}

void StateWalk::put_weights(const StateBlock& block) const {
  on_.put_weights(block.to.master, block.count, plan_.compute_dtype(), weights_at(block.weight));
}

void StateWalk::make_weights(Stream& stream, int64_t bank, const Bucket& bucket) const {
  const kernels::StateExec on = kernels::state_exec_on(stream);
  const auto from = [&](int64_t flat) {
    return std::partition_point(rank_.pieces.begin(), rank_.pieces.end(),
                                [&](const StatePiece& piece) { return piece.flat_offset < flat; });
  };
  const auto put = [&](DevicePtr<const float> master, int64_t at, int64_t count) {
    on.put_first_weights(master, count, plan_.compute_dtype(), weights_at(at));
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
