#include "runtime/optim/walk/state_walk.h"

#include <set>

#include "runtime/core/word_sums.h"
#include "tests/runtime/optim/rank_memory.h"

using namespace cairn;
using namespace cairn::optim;
using namespace cairn::testing;
using Pieces = StateWalk::Pieces;

namespace {

Recipe with(Recipe recipe, OptimizerKind kind, double ema = 0) {
  recipe.optimizer.kind = kind;
  recipe.optimizer.ema = ema;
  return recipe;
}

std::vector<float> values(std::span<const float> from) { return {from.begin(), from.end()}; }

uint64_t sum_of(std::span<const float> of) {
  return word_sums_plain(reinterpret_cast<const std::byte*>(of.data()), std::ssize(of));
}

std::vector<uint64_t> sums_of(const std::vector<std::span<float>>& tensors) {
  std::vector<uint64_t> out;
  for (const std::span<float> tensor : tensors) out.push_back(sum_of(tensor));
  return out;
}

/// Writes all of a block's arrays that are there, from what it reads.
void write_block(const StateBlock& block) {
  for (const auto array :
       {&kernels::StateArrays::master, &kernels::StateArrays::exp_avg, &kernels::StateArrays::exp_avg_sq}) {
    if (!(block.to.*array)) continue;
    float* const to = address_of(block.to.*array);
    const float* const from = address_of(block.from.*array);
    for (int64_t i = 0; i < block.count; ++i) to[i] = 2 * from[i] + address_of(block.grad)[i];
  }
}

}  // namespace

TEST_SUITE("runtime/optim/walk/state_walk") {
  TEST_CASE("blocks are the pieces that a rank updates, with the places of their state, gradients and weights") {
    const Plan plan = make_plan(balanced_recipe(), 2).value();
    for (const int64_t r : {0, 1}) {
      RankMemory memory(plan, r, 2);
      StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
      std::set<const StatePiece*> seen;
      int64_t balancing = 0, saved = 0, kept = 0;
      for (const Pieces pieces : {Pieces::kTrained, Pieces::kBalancing}) {
        const StatePiece* last = nullptr;
        walk.for_blocks(
            1, 0,
            [&](const StateBlock& block) {
              const StatePiece& piece = *block.piece;
              CHECK(seen.insert(&piece).second);
              CHECK(last < &piece);
              last = &piece;
              CHECK(plan.tensors[piece.tensor].balances == (pieces == Pieces::kBalancing));
              balancing += pieces == Pieces::kBalancing ? 1 : 0;
              CHECK(block.begin == 0);
              CHECK(block.count == piece.count_elems());
              CHECK(block.grad == memory.arrays.grads + piece.flat_offset);
              CHECK(block.weight == piece.flat_offset);
              CHECK((block.saved >= 0) == piece.primary);
              CHECK(walk.sums_of(block, 0, 2).sums.size() == (piece.primary ? 2 : 0));
              if (piece.primary) {
                ++saved;
                CHECK(block.from.exp_avg == memory.arrays.banks[1][block.saved].exp_avg);
                CHECK(block.to.exp_avg_sq == memory.arrays.banks[0][block.saved].exp_avg_sq);
              } else {
                ++kept;
                CHECK(block.from.master == memory.arrays.private_state.master + piece.state_offset);
                CHECK(block.to.exp_avg == memory.arrays.private_state.exp_avg + piece.state_offset);
              }
            },
            pieces);
      }
      CHECK(seen.size() == memory.rank.pieces.size());
      CHECK(balancing > 0);
      CHECK(saved > 0);
      CHECK(kept > 0);
    }
  }

  TEST_CASE("turns of overwriting: biases that balance, sums of whole tensors, then piece by piece all its arrays") {
    for (const Recipe& recipe :
         {with(balanced_recipe(), OptimizerKind::kAdamW), with(balanced_recipe(), OptimizerKind::kAdafactor, 0.9),
          with(small_recipe(), OptimizerKind::kAdafactor)}) {
      const Plan plan = make_plan(recipe, 2).value();
      const RankPlan rank = plan.rank(0);
      std::vector<int64_t> balancing, trained;  // tensors, as banks have them
      int64_t pieces = 0, sums = 0;
      for (const StatePiece& piece : rank.pieces) {
        if (piece.primary) (plan.tensors[piece.tensor].balances ? balancing : trained).push_back(pieces++);
      }
      for (const SumPiece& piece : rank.sums) sums += piece.primary ? 1 : 0;
      std::vector<int64_t> want(static_cast<size_t>(rank.saved_arrays * pieces + sums));
      int64_t turn = 0;
      const auto all_arrays = [&](int64_t piece) {
        for (int64_t array = 0; array < rank.saved_arrays; ++array) want[array * pieces + piece] = turn;
        ++turn;
      };
      for (const int64_t piece : balancing) all_arrays(piece);
      for (int64_t k = 0; k < sums; ++k) want[rank.saved_arrays * pieces + k] = turn++;
      for (const int64_t piece : trained) all_arrays(piece);
      CHECK(overwrite_turns(plan, rank) == want);
      CHECK((sums > 0) == (recipe.optimizer.kind == OptimizerKind::kAdafactor));
      CHECK(trained.size() > 3);
    }
  }

  TEST_CASE("a copied bank is waited for block by block, just before a block is written, and not to look at it") {
    const Plan plan = make_plan(balanced_recipe(), 2).value();
    RankMemory memory(plan, 0, 1);
    std::vector<std::span<const float>> waited;
    RecordingGate gate(40, [&](std::span<const float> area) { waited.push_back(area); });
    memory.arrays.gate = &gate;
    StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
    int64_t blocks = 0, longest_private = 0;
    walk.for_blocks(0, 0, [&](const StateBlock& block) {
      CHECK(walk.sums_of(block, 0, 1).sums.empty());
      if (block.saved < 0) {
        CHECK(waited.empty());
        longest_private = std::max(longest_private, block.count);
        return;
      }
      ++blocks;
      CHECK(block.count <= 40);
      REQUIRE(waited.size() == 3);
      size_t array = 0;
      for (const DevicePtr<float> at : {block.to.master, block.to.exp_avg, block.to.exp_avg_sq}) {
        CHECK(waited[array].data() == address_of(at));
        CHECK(std::ssize(waited[array++]) == block.count);
      }
      waited.clear();
    });
    CHECK(blocks > std::ssize(memory.arrays.banks[0]));
    CHECK(longest_private > 40);
    walk.for_blocks(
        0, 0, [](const StateBlock&) {}, Pieces::kReadOnly);
    CHECK(waited.empty());
  }

  TEST_CASE("batches have all blocks that may be overwritten together, cut between chunks, each waited for once") {
    // Without a copy, one whose blocks are larger than all state, smaller, and smaller than a chunk.
    const Plan plan = make_plan(with(balanced_recipe(), OptimizerKind::kAdamW), 2).value();
    for (const int64_t at_once : {int64_t{0}, int64_t{1} << 40, int64_t{500}, int64_t{40}}) {
      CAPTURE(at_once);
      RankMemory memory(plan, 0, 1);
      std::vector<std::span<const float>> waited;
      RecordingGate gate(at_once, [&](std::span<const float> area) { waited.push_back(area); });
      if (at_once > 0) memory.arrays.gate = &gate;
      StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
      std::map<const StatePiece*, int64_t> reached;
      int64_t batches = 0, blocks = 0, saved_elems = 0, last_elems = at_once;
      const auto take = [&](std::span<const StateBlock> batch) {
        ++batches;
        CHECK(last_elems >= at_once);  // only the last one is short
        int64_t elems = 0;
        size_t area = 0;
        for (const StateBlock& block : batch) {
          ++blocks;
          CHECK(reached[block.piece] == block.begin);
          reached[block.piece] += block.count;
          if (block.saved < 0) continue;
          elems += block.count;
          if (at_once == 0) continue;
          for (const DevicePtr<float> at : {block.to.master, block.to.exp_avg, block.to.exp_avg_sq}) {
            REQUIRE(area < waited.size());
            CHECK(waited[area].data() == address_of(at));
            CHECK(std::ssize(waited[area++]) == block.count);
          }
        }
        CHECK(area == waited.size());
        waited.clear();
        saved_elems += elems;
        last_elems = elems;
        if (at_once > 0) CHECK(elems < at_once + std::min(at_once, kernels::kStateChunk));
      };
      walk.for_batches(0, 0, take);
      const int64_t most = at_once == 0 ? 1 : (saved_elems + at_once - 1) / at_once;
      CHECK(batches <= most);
      CHECK(batches >= (most + 1) / 2);
      int64_t balancing = 0;
      for (const StatePiece& piece : memory.rank.pieces) {
        if (plan.tensors[piece.tensor].balances) {
          ++balancing;
        } else {
          CHECK(reached[&piece] == piece.count_elems());
        }
      }
      CHECK(balancing > 0);
      last_elems = at_once;
      walk.for_batches(0, 0, take, Pieces::kBalancing);
      for (const StatePiece& piece : memory.rank.pieces) CHECK(reached[&piece] == piece.count_elems());
      // A second pass is behind the copy: it has the same pieces uncut and waits for none.
      for (const Pieces again : {Pieces::kTrainedAgain, Pieces::kBalancingAgain}) {
        batches = 0;
        reached.clear();
        walk.for_batches(
            0, 0,
            [&](std::span<const StateBlock> batch) {
              ++batches;
              for (const StateBlock& block : batch) reached[block.piece] += block.count;
            },
            again);
        CHECK(batches == 1);
        for (const StatePiece& piece : memory.rank.pieces) {
          const bool wanted = plan.tensors[piece.tensor].balances == (again == Pieces::kBalancingAgain);
          CHECK(reached[&piece] == (wanted ? piece.count_elems() : 0));
        }
      }
      CHECK(waited.empty());
    }
  }

  TEST_CASE("banks on a disk: two blocks are fetched ahead, a block that is done with is stored, its source dropped") {
    const Plan plan = make_plan(small_recipe(), 2).value();
    for (const int64_t to : {1, 0}) {
      CAPTURE(to);
      RankMemory memory(plan, 0, 2);
      WalkLog log;
      RecordingPager pager(log, 100);
      memory.arrays.pager = &pager;
      const char* const kinds[] = {"w", "m", "v"};
      const size_t pieces = memory.arrays.banks[0].size();
      for (const size_t bank : {0, 1}) {
        for (size_t t = 0; t < memory.saved[bank].size(); ++t) {
          log.name(std::to_string(bank) + kinds[t / pieces] + std::to_string(t % pieces), memory.saved[bank][t]);
        }
      }
      StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
      std::vector<StateBlock> seen;
      walk.for_blocks(0, to, [&](const StateBlock& block) {
        seen.push_back(block);
        CHECK(block.count <= 100);
        log.add("update");
      });
      // The same from the blocks.
      const auto arrays = [&](std::vector<std::string>* lines, const char* what, const kernels::StateArrays& state,
                              int64_t count) {
        for (const DevicePtr<float> at : {state.master, state.exp_avg, state.exp_avg_sq})
          lines->push_back(what + log.text(at, count));
      };
      std::vector<std::string> want;
      const auto fetch = [&](size_t b) {
        if (b >= seen.size() || seen[b].saved < 0) return;
        arrays(&want, "fetch ", seen[b].from, seen[b].count);
        if (to != 0) arrays(&want, "fetch ", seen[b].to, seen[b].count);
      };
      fetch(0);
      fetch(1);
      for (size_t b = 0; b < seen.size(); ++b) {
        fetch(b + 2);
        want.emplace_back("update");
        if (seen[b].saved < 0) continue;
        arrays(&want, "store ", seen[b].to, seen[b].count);
        if (to != 0) arrays(&want, "drop ", seen[b].from, seen[b].count);
      }
      CHECK(log.lines == want);
      CHECK(std::count(want.begin(), want.end(), "unnamed") == 0);
      CHECK(seen.size() > 2 * pieces);
      CHECK(seen[0].count == 100);
    }
  }

  TEST_CASE("private state is read at its peers and written where it belongs, in blocks that end where a run does") {
    const Plan plan = make_plan(with(balanced_recipe(), OptimizerKind::kAdamW, 0.9), 2).value();
    RankMemory memory(plan, 1, 3);
    memory.put_at_peer(3, 70);
    WalkLog log;
    RecordingPager pager(log, 1 << 20);
    memory.arrays.pager = &pager;
    std::vector<std::vector<float>> there;
    for (const auto& banks : memory.at_peer) {
      there.push_back(values(banks[2]));
      log.name("peer", banks[2]);
    }
    StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
    REQUIRE(walk.reads_peers());
    std::map<const StatePiece*, int64_t> reached;
    std::vector<std::string> read;
    int64_t most = 0;
    const auto update = [&](const StateBlock& block) {
      CHECK(reached[block.piece] == block.begin);
      reached[block.piece] += block.count;
      write_block(block);
      if (block.saved >= 0) return;
      most = std::max(most, block.count);
      for (const DevicePtr<float> at : {block.from.master, block.from.exp_avg, block.from.exp_avg_sq})
        read.push_back("drop " + log.text(at, block.count));
    };
    walk.for_blocks(2, 1, update);
    walk.for_blocks(2, 1, update, Pieces::kBalancing);
    for (const StatePiece& piece : memory.rank.pieces) CHECK(reached[&piece] == piece.count_elems());
    CHECK(most == 70);
    std::erase_if(log.lines, [](const std::string& line) { return line.find("peer") == std::string::npos; });
    CHECK(log.lines == read);  // of a peer's bank on a disk: read, and not written
    REQUIRE(memory.copies.size() > 3);
    size_t copy = 0;
    for (int64_t array = 0; array < 3; ++array) {
      for (const StatePiece& piece : memory.rank.pieces) {
        if (piece.primary) continue;
        CHECK(values(memory.at_peer[copy][2]) == there[copy]);
        std::vector<float> want = there[copy];
        for (size_t i = 0; i < want.size(); ++i) want[i] = 2 * want[i] + memory.grads[piece.flat_offset + i];
        CHECK(values(memory.copies[copy++]) == want);
      }
    }
    CHECK(copy == memory.copies.size());

    walk.leave_peers();
    log.lines.clear();
    walk.for_blocks(1, 2, [&](const StateBlock& block) {
      if (block.saved >= 0) return;
      CHECK(block.from.master == block.to.master);
      CHECK(block.count == block.piece->count_elems());
    });
    CHECK(std::none_of(log.lines.begin(), log.lines.end(),
                       [](const std::string& line) { return line.find("peer") != std::string::npos; }));
  }

  TEST_CASE("sums of whole tensors go from bank to bank with their checksums; private ones come from their peers") {
    const Plan plan = make_plan(with(small_recipe(), OptimizerKind::kAdafactor), 2).value();
    for (const int64_t r : {0, 1}) {
      for (const bool at_peer : {true, false}) {
        CAPTURE(r);
        CAPTURE(at_peer);
        RankMemory memory(plan, r, 3);
        const auto of_sums = [&](int64_t bank) {
          return std::span(memory.saved[bank]).subspan(memory.rank.saved_arrays * memory.arrays.banks[0].size());
        };
        const auto own = std::span(memory.copies).last(memory.rank.sums.size() - of_sums(0).size());
        if (at_peer) memory.put_at_peer(3, 5);
        std::vector<std::vector<float>> want;  // in the order of RankPlan::sums
        size_t saved = 0, kept = memory.copies.size() - own.size();
        for (const SumPiece& piece : memory.rank.sums) {
          want.push_back(values(piece.primary ? of_sums(2)[saved++]
                                : at_peer     ? memory.at_peer[kept++][2]
                                              : memory.copies[kept++]));
        }
        StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
        int64_t next = 0;
        walk.for_sums(2, 1, [&](int64_t k, DevicePtr<const float> source, DevicePtr<float> target) {
          const float* const from = address_of(source);
          float* const to = address_of(target);
          CHECK(k == next++);
          for (size_t i = 0; i < want[k].size(); ++i) {
            CHECK(from[i] == want[k][i]);
            to[i] = want[k][i] = 3 * from[i];
          }
        });
        CHECK(next == std::ssize(memory.rank.sums));
        walk.sum_up_sums(1);
        saved = kept = 0;
        REQUIRE(memory.stream->settle().ok());
        const std::vector<uint64_t> all = walk.sums();
        const std::span<const uint64_t> sums = std::span(all).last(of_sums(1).size());
        for (size_t k = 0; k < want.size(); ++k) {
          const bool primary = memory.rank.sums[k].primary;
          if (primary) CHECK(sums[saved] == sum_of(of_sums(1)[saved]));
          CHECK(values(primary ? of_sums(1)[saved++] : own[kept++]) == want[k]);
        }
        CHECK(saved + kept == want.size());
        CHECK((r == 0 ? saved : kept) > 0);
      }
    }
  }

  TEST_CASE("peer copies that are brought are all where they belong, and are read there from then on") {
    const Plan plan = make_plan(with(small_recipe(), OptimizerKind::kAdafactor), 2).value();
    RankMemory memory(plan, 1, 2);
    memory.put_at_peer(2, 9);
    StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
    walk.bring_peer_copies(1);
    CHECK_FALSE(walk.reads_peers());
    REQUIRE(memory.copies.size() > 3);
    for (size_t copy = 0; copy < memory.copies.size(); ++copy) {
      CHECK(values(memory.copies[copy]) == values(memory.at_peer[copy][1]));
    }
    walk.for_blocks(1, 1, [](const StateBlock& block) { CHECK(block.from.master == block.to.master); });
  }

  TEST_CASE("weights are made of the masters of a bank and of private ones, which may still be at their peers") {
    const Plan plan = make_plan(balanced_recipe(), 2).value();
    for (const bool at_peer : {true, false}) {
      CAPTURE(at_peer);
      RankMemory memory(plan, 0, 2);
      if (at_peer) memory.put_at_peer(2, 33);
      StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
      for (const Bucket& bucket : memory.rank.buckets) walk.make_weights(*memory.stream, 1, bucket);
      size_t saved = 0, kept = 0;
      for (const StatePiece& piece : memory.rank.pieces) {
        const std::span<float> master = piece.primary ? memory.saved[1][saved++]
                                        : at_peer     ? memory.at_peer[kept++][1]
                                                      : memory.copies[kept++];
        const auto* const weights = memory.weights.data() + piece.flat_offset;
        CHECK(values(master) == std::vector<float>(weights, weights + piece.count_elems()));
      }
      CHECK(saved > 0);
      CHECK(kept > 0);
      CHECK(walk.reads_peers() == at_peer);
    }
  }

  TEST_CASE("the checksums of a walk are those of whole arrays, in however many blocks they were written") {
    const Plan plan = make_plan(with(balanced_recipe(), OptimizerKind::kAdamW, 0.9), 2).value();
    RankMemory memory(plan, 0, 2);
    WalkLog log;
    RecordingPager pager(log, 48);
    memory.arrays.pager = &pager;
    StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
    for (const int64_t to : {1, 0, 0}) {  // sums of an update before are of no use
      for (const Pieces pieces : {Pieces::kBalancing, Pieces::kTrained}) {
        walk.for_blocks(
            0, to,
            [&](const StateBlock& block) {
              write_block(block);
              walk.sum_up(block);
              if (block.saved < 0) return;
              float* const ema = address_of(block.to.ema);
              for (int64_t i = 0; i < block.count; ++i) ema[i] = address_of(block.from.ema)[i] + 1;
              walk.on().copy_summed(block.to.ema, block.to.ema, block.count, walk.sums_of(block, 3, 1));
            },
            pieces);
      }
      REQUIRE(memory.stream->settle().ok());
      CHECK(walk.sums() == sums_of(memory.saved[to]));
    }
    RecordingGate gate(48, [](std::span<const float>) {});
    memory.arrays.pager = nullptr;
    memory.arrays.gate = &gate;
    StateWalk copied(*memory.stream, plan, memory.rank, memory.arrays);
    copied.for_blocks(0, 0, [&](const StateBlock& block) { copied.sum_up(block); });
    const std::vector<uint64_t> none = copied.sums();
    CHECK(std::ranges::all_of(none, [](uint64_t sum) { return sum == 0; }));
  }

  TEST_CASE("a step that is skipped takes the saved state into the other bank as it is, with its checksums") {
    const Plan plan = make_plan(with(small_recipe(), OptimizerKind::kAdafactor, 0.9), 2).value();
    for (const int64_t to : {1, 0}) {
      CAPTURE(to);
      RankMemory memory(plan, 0, 2);
      memory.put_at_peer(2, 50);
      std::vector<std::vector<float>> want;
      for (const std::span<float> tensor : memory.saved[0]) want.push_back(values(tensor));
      StateWalk walk(*memory.stream, plan, memory.rank, memory.arrays);
      walk.keep(0, to);
      REQUIRE(memory.stream->settle().ok());
      CHECK(walk.sums() == sums_of(memory.saved[to]));
      for (size_t t = 0; t < want.size(); ++t) CHECK(values(memory.saved[to][t]) == want[t]);
      for (size_t copy = 0; copy < memory.copies.size(); ++copy) {
        CHECK(values(memory.copies[copy]) == values(memory.at_peer[copy][0]));
      }
      CHECK_FALSE(walk.reads_peers());
    }
  }
}
