#pragma once
// The recipe's data as it is used in a run: sources opened and split, micro-batches as int32 tensors, and the fixed
// validation batches. Opening reads headers and samples of the content, no tokens in bulk.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/data/sampler.h"
#include "runtime/data/token_file.h"

namespace cairn::data {

struct Dataset {
  struct Source {
    std::string name;  // unique within the set
    double weight = 1.0;
    std::unique_ptr<TokenSource> train;
    std::unique_ptr<TokenSource> valid;  // null: none
    DataSource::Kind kind = DataSource::Kind::kMegatron;
    std::vector<int32_t> channels;  // of each document of the file, in Dataset::channels; empty: it has none
  };
  std::vector<Source> sources;
  std::vector<std::string> channels;  // of all sources, by name; those of one name are one
};

/// How a source of that kind gets a larger validation part, by the fields that its kind has.
std::string_view larger_validation(DataSource::Kind kind);

/// One source, opened and cut as open_dataset() does it, but for channels; without the name in front of an error.
/// `seq_len`: tokens of a sample, to which instruction data is packed.
Result<Dataset::Source> open_source(const DataSource& config, int64_t vocab, int64_t seq_len);

/// Opens every source and cuts train and validation parts (split.h); a token file with a valid_path has that as its
/// validation part and no other; DataSource::tokens limits the training part. `vocab`: tokens beyond it are errors when
/// read. Errors: those of open_megatron, open_token_file and split_source, in front of them the source's name;
/// kInvalidInput for two sources of one name, or for more tokens than a training part has.
Result<Dataset> open_dataset(const DataConfig& config, int64_t vocab, int64_t seq_len);

/// Samples of one pass over the training part of the source that is drawn from. Errors: kInvalidInput for several such
/// sources; those of opening it.
Result<int64_t> epoch_samples(const DataConfig& config, int64_t vocab, int64_t seq_len);

/// What Sampler::make, changes and resume need, for as long as `dataset`, of this recipe, is there: they read from it.
/// Errors: those of SkippedPositions::parse.
Result<Sampler::Spec> sampler_spec(const Dataset& dataset, const Recipe& recipe);

/// m samples of L tokens, row-major: inputs [m, L], targets [m, L] (targets[i][j] = inputs[i][j + 1], and the token
/// after the window at the end), sources [m].
struct MicroBatch {
  int64_t samples = 0;  // m
  int64_t seq_len = 0;  // L
  std::vector<int32_t> inputs, targets;
  std::vector<int32_t> sources;
  // [m, L] or empty; filled by load_samples() where a source of the set has rows of its own, and by apply_objective()
  // (objective.h), which see. nn::SequenceRows says what they mean.
  std::vector<int32_t> positions, starts, ends;
  std::vector<uint8_t> apart;     // [m] or empty: whether a sample came with rows, which no objective changes
  std::vector<int32_t> counts;    // [m, L] or empty (loss_weights.h): tokens that count in the row's document, if its
                                  // source weighs by sample, else 0
  std::vector<uint8_t> repeats;   // [m, L] or empty (repeats.h): rows that count in no loss
  std::vector<int32_t> channels;  // [m, L] or empty: the channel of the row's document; -1: none
};

enum class DataPart { kTrain, kValid };

/// Reads the samples' tokens, and what they have beside them. `out` is reused: no allocation once it has its size.
/// Errors: as TokenSource::read.
Status load_samples(const Dataset& dataset, DataPart part, std::span<const SampleRef> samples, int64_t seq_len,
                    MicroBatch* out);

/// The losses of samples [first, m) do not count: fill_rounds() (sampler.h) has put them there.
void no_targets(MicroBatch* batch, int64_t first);

/// The validation batches: for ever the same windows, so that losses of different steps, layouts and runs compare.
/// Windows of L + 1 tokens in file order from the start of each source's validation part; sources are blended by
/// weight with the training rule, and one that has no windows left leaves the contest. No window comes twice.
class ValidationSet {
 public:
  /// At most `max_batches` whole batches of `batch_samples`. Errors: kInvalidInput when no source has a validation
  /// part, or all windows together do not fill one batch.
  static Result<ValidationSet> make(const Dataset& dataset, int64_t seq_len, int64_t batch_samples,
                                    int64_t max_batches);

  int64_t batches() const { return static_cast<int64_t>(samples_.size()) / batch_samples_; }
  /// SampleRef::start counts from the start of the validation part; load with DataPart::kValid.
  std::span<const SampleRef> batch(int64_t index) const;

 private:
  std::vector<SampleRef> samples_;
  int64_t batch_samples_ = 1;
};

}  // namespace cairn::data
