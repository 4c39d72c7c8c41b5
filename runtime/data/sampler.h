#pragma once
// The global order of training samples and its resumable state.
//
// Position p = 0, 1, 2, ... of the run is a sample; step s trains on exactly the positions [P_s, P_s + B_s). Which
// sample that is depends on the seed, the ordered sources with their content, the weights and the sequence length, and
// on nothing else: not on world size, any parallel degree, the micro-batch, or how long the run is meant to be.
//
// The saved position is that of the last APPLIED optimizer step: peek() looks ahead without moving, advance() is called
// once the step is done. So a crash between reading and stepping loses nothing and repeats nothing.
//
// Cost: O(sources) a sample for the blend, about 10 hash mixes for the permutation; memory O(sources). All ranks
// compute the whole global batch, identically. Threads: none of its own; one object per thread.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/data/order.h"

namespace cairn::data {

/// What a checkpoint keeps. A few integers a source, global, written once and not per rank.
struct SamplerState {
  int64_t position = 0;        // samples consumed by applied steps
  std::vector<int64_t> taken;  // of them, per source; sums to position
  uint64_t seed = 0;
  std::vector<uint64_t> fingerprints;  // content of each source
  int64_t seq_len = 0;                 // L: inputs a sample
  std::vector<double> weights;         // normalised to sum 1
  int32_t order_version = kOrderVersion;
  bool operator==(const SamplerState&) const = default;
};

/// One JSON object, keys in the order of the struct; fingerprints as 16 hex digits, doubles so that they read back
/// bit for bit.
std::string to_json(const SamplerState& state);

/// Strict: every field there, of its type, no other. Errors: kCorrupt naming the field.
Result<SamplerState> sampler_state_from_json(std::string_view json);

/// One sample of the order.
struct SampleRef {
  int64_t position = 0;
  int32_t source = 0;
  int64_t k = 0;      // sample number within its source
  int64_t start = 0;  // first token; inputs are [start, start + L), targets one further
  bool operator==(const SampleRef&) const = default;
};

class Sampler {
 public:
  struct Source {
    std::string name;  // for messages
    int64_t tokens = 0;
    uint64_t fingerprint = 0;
    double weight = 1.0;
  };
  struct Spec {
    uint64_t seed = 0;
    int64_t seq_len = 0;
    std::vector<Source> sources;
  };

  /// At position 0. Errors: kInvalidInput for no sources, seq_len < 1, a weight that is not positive and finite, or a
  /// source shorter than seq_len + 1 tokens.
  static Result<Sampler> make(const Spec& spec);

  /// At a saved position. Errors: also kInvalidInput when seed, seq_len, number of sources, a fingerprint, a weight or
  /// the order version differ from the state's, naming the field, the saved and the present value; kCorrupt when the
  /// state contradicts itself.
  static Result<Sampler> resume(const Spec& spec, const SamplerState& state);

  const SamplerState& state() const { return state_; }
  int64_t position() const { return state_.position; }

  /// The samples of the next `count` positions. Moves nothing.
  std::vector<SampleRef> peek(int64_t count) const;

  /// Counts the next `count` positions as trained on. (Also a way to any later position from 0.)
  void advance(int64_t count);

  /// Passes over source `s` so far, for display.
  double epochs(int64_t source) const;

 private:
  explicit Sampler(SamplerState state) : state_(std::move(state)) {}
  int64_t next_source(const std::vector<int64_t>& taken, int64_t draws) const;

  SamplerState state_;
  std::vector<int64_t> windows_;  // per source
};

/// The samples of one micro-step on one data-parallel rank: samples [a * micro * dp + dp_rank * micro, + micro) of the
/// step's. RT_CHECKs that the step's size is a whole number of micro * dp: the plan refuses others before a run.
std::span<const SampleRef> micro_batch_samples(std::span<const SampleRef> step, int64_t dp, int64_t dp_rank,
                                               int64_t micro, int64_t accumulation_step);

}  // namespace cairn::data
