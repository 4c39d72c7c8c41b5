#pragma once
// The global order of training samples and its resumable state.
//
// Position p = 0, 1, 2, ... of the run is a sample; step s trains on exactly the next B_s positions from P_s on that
// are not skipped. The sample depends on the seed, the sources with their content, the weights and the sequence length,
// and on the positions at which these changed. It depends on nothing else: not on world size, any parallel degree, the
// micro-batch, or the length of the run.
//
// The saved position is that of the last APPLIED optimizer step: peek() looks ahead without moving, advance() is called
// once the step is done. So a crash between reading and stepping loses nothing and repeats nothing.
//
// Sampler::resume applies rules to data that changed since the state was saved. They depend on the saved state and the
// present data alone: every rank comes to the same order, and resuming where nothing changed changes nothing.
//
// Cost: O(sources) a sample for the blend, about 10 hash mixes for the permutation; memory O(sources). All ranks
// compute the complete global batch, identically. Threads: none of its own; one object per thread.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/skipped_positions.h"
#include "runtime/core/result.h"
#include "runtime/data/order.h"

namespace cairn::data {

/// Windows of a source from its sample `k0` on: `windows` to an epoch, the first of which has number `epoch`.
struct Era {
  int64_t k0 = 0;
  int64_t windows = 0;
  int64_t epoch = 0;
  bool operator==(const Era&) const = default;
};

/// What is kept of a source.
struct SourceState {
  std::string name;        // as in the recipe; empty: from a state of version 1, which had no names
  int64_t stream = 0;      // takes the source's place in order_key(): its index when the run began, else the next free
  int64_t taken = 0;       // samples consumed by applied steps
  int64_t base_taken = 0;  // of them, before the present blend stage
  int64_t tokens = 0;      // of the training part; 0: not known (version 1)
  uint64_t content = 0;    // content_hash() of them; 0: not known
  uint64_t fingerprint = 0;  // TokenSource::fingerprint() where the content is not known, else 0
  double weight = 0;         // normalised to sum 1 over the sources drawn from; 0: retired, or not drawn from yet
  std::vector<Era> growth;   // two at most, for a source that grew; empty: {0, window_count(tokens, seq_len), 0}
  /// Left the recipe, or has weight 0 there; resumes behind `taken` when it comes back.
  bool retired() const { return weight == 0; }
  bool operator==(const SourceState&) const = default;
};

/// What a checkpoint keeps. Some 80 bytes a source as JSON, global, written once and not per rank.
struct SamplerState {
  int64_t position = 0;  // samples consumed by applied steps, those that were skipped too
  int64_t skipped = 0;   // of them
  uint64_t seed = 0;
  int64_t seq_len = 0;               // L: inputs a sample
  int64_t base_position = 0;         // where the present blend stage began
  std::vector<SourceState> sources;  // by stream
  bool operator==(const SamplerState&) const = default;
};

/// Of a state as JSON: what a snapshot's position (64 KiB) has room for beside the rest.
inline constexpr size_t kMaxStateBytes = 48 << 10;

/// One JSON object of order version 2 (docs/format.md, state.sampler); hashes as 16 hex digits, doubles so that they
/// read back bit for bit.
std::string to_json(const SamplerState& state);

/// That a state fits, however long the run: what may start may also be started again. Errors: kInvalidInput.
Status check_state_fits(SamplerState state);

/// Reads versions 1 and 2. Strict: every field there, of its type, no other. Errors: kCorrupt naming the field;
/// kInvalidInput for a version that this build does not know.
Result<SamplerState> sampler_state_from_json(std::string_view json);

/// One sample of the order.
struct SampleRef {
  int64_t position = 0;
  int32_t source = 0;  // index in the present Spec
  int64_t k = 0;       // sample number within its source
  int64_t start = 0;   // first token; inputs are [start, start + L), targets one further
  bool operator==(const SampleRef&) const = default;
};

/// A difference between a saved order and the present data.
struct OrderChange {
  enum class Kind { kSeed, kSeqLen, kWeights, kAdded, kRemoved, kReturned, kGrown, kReplaced } kind;
  std::string source;         // its name; empty for seed, sequence length and weights
  std::string before, after;  // what differs, short; may be empty
  double repeats = 0;         // share of the samples left in the epochs under way that were drawn in them already
  std::string text;           // a sentence for a person
};

class Sampler {
 public:
  struct Source {
    std::string name;
    int64_t tokens = 0;  // of the training part
    uint64_t fingerprint = 0;
    double weight = 1.0;  // 0: not drawn from yet
    /// content_hash() of the first so many tokens, at most `tokens`. None: known by the fingerprint alone.
    std::function<Result<uint64_t>(int64_t first_tokens)> content;
  };
  struct Spec {
    uint64_t seed = 0;
    int64_t seq_len = 0;
    std::vector<Source> sources;
    SkippedPositions skip;  // from the position on at which the sampler stands
  };

  /// At position 0. Errors: kInvalidInput for no sources, or none to draw from, seq_len < 1, a weight that is negative
  /// or not finite, or a source shorter than seq_len + 1 tokens; those of Source::content.
  static Result<Sampler> make(const Spec& spec);

  /// What resume() would change, all of it; empty when the order goes on as it was. A source that was renamed or
  /// stored otherwise, its tokens unchanged, is none. Errors: as resume().
  static Result<std::vector<OrderChange>> changes(const Spec& spec, const SamplerState& state);

  /// At a saved position, with the data as it is now. Sources are matched by name, then by content, never by place.
  /// - Weights changed, sources added or removed: a new blend stage begins at this position, which makes up for nothing
  ///   of the past. A removed source's place is kept; an added one begins at its first sample. Weight 0 is as removed.
  /// - A source grew (the tokens it had are the first ones now): the epoch under way ends over the old windows.
  /// - A source changed otherwise: its next sample number is drawn from the new windows.
  /// - Another seed: new permutations for the sample numbers to come. Another seq_len: sample numbers are scaled so
  /// that
  ///   the tokens consumed stay, rounded up.
  /// Whether a change is wanted is for the caller to ask before (changes()).
  /// Errors: also kCorrupt when the state contradicts itself.
  static Result<Sampler> resume(const Spec& spec, const SamplerState& state);

  const SamplerState& state() const { return state_; }
  int64_t position() const { return state_.position; }
  /// Samples that applied steps have trained on: positions that were not skipped.
  int64_t trained() const { return state_.position - state_.skipped; }

  /// The next `count` samples that are not skipped. Moves nothing.
  std::vector<SampleRef> peek(int64_t count) const;

  /// Passes over its source before a sample of peek(), whole ones.
  int64_t epoch_of(const SampleRef& sample) const;

  /// Counts the next `count` samples that are not skipped as trained on. (Also a way to any later position from 0.)
  void advance(int64_t count);

  /// Passes over source `source` of the Spec so far, for display.
  double epochs(int64_t source) const;

 private:
  /// A source that is drawn from.
  struct Drawn {
    size_t state = 0;    // index in state_.sources
    int32_t source = 0;  // index in the Spec
    std::vector<Era> eras;
  };
  Sampler(SamplerState state, const std::vector<size_t>& state_of_source, SkippedPositions skip);
  /// Draws from the state's position on until `count` samples are not skipped; `visit(position, drawn, k, skipped)`.
  template <typename Visit>
  void draw(int64_t count, Visit visit) const;
  const Drawn& drawn_of(int64_t source) const;

  SamplerState state_;
  SkippedPositions skip_;
  std::vector<Drawn> drawn_;  // by stream: the order in which ties of the blend fall
  std::vector<double> weights_;
};

/// The samples of a step for rounds of `slice` = micro * dp: where they do not divide (batch.uneven), the step's first
/// sample stands behind the last one as often as it takes. Those count in no loss: no_targets().
std::vector<SampleRef> fill_rounds(std::span<const SampleRef> step, int64_t slice);

/// The samples of one micro-step on one data-parallel rank: samples [a * micro * dp + dp_rank * micro, + micro) of the
/// step's. RT_CHECKs that the step's size is a whole number of micro * dp: fill_rounds() makes it so.
std::span<const SampleRef> micro_batch_samples(std::span<const SampleRef> step, int64_t dp, int64_t dp_rank,
                                               int64_t micro, int64_t accumulation_step);

}  // namespace cairn::data
