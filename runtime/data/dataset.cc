#include "runtime/data/dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>

#include "runtime/core/count_text.h"
#include "runtime/data/channels.h"
#include "runtime/data/loss_spans.h"
#include "runtime/data/packed.h"
#include "runtime/data/split.h"

namespace cairn::data {

std::string_view larger_validation(DataSource::Kind kind) {
  switch (kind) {
    case DataSource::Kind::kMegatron:
      return "give `split` of T.megatron a greater second part";
    case DataSource::Kind::kInstruct:
      return "give `split` of T.instruct a greater second part";
    case DataSource::Kind::kTokenFile:
      break;
  }
  return "name a longer file in `valid` of T.token_files";
}

namespace {

/// Its parts are cut between documents and packed each for itself.
Status open_instruct(const DataSource& config, int64_t vocab, int64_t seq_len, Dataset::Source* source) {
  RT_TRY_SET(std::shared_ptr<const TokenSource> pair, open_megatron(config.path, OpenOptions{vocab}));
  RT_TRY_SET(LossSpans spans, LossSpans::open(config.path, pair->sequence_count(), pair->token_count()));
  const auto loss = std::make_shared<const LossSpans>(std::move(spans));
  RT_TRY_SET(const auto bounds, split_bounds(config.split, pair->sequence_count()));
  if (bounds[0] == bounds[1])
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: split {} of {} leaves nothing to train on", pair->name(),
                             fmt::join(config.split, ","), count_text(pair->sequence_count(), "document"))};
  const auto part = [&](size_t k) {
    return pack_documents(pair, loss, bounds[k], bounds[k + 1], seq_len, config.overlong);
  };
  RT_TRY_SET(source->train, part(0));
  if (bounds[1] == bounds[2]) return {};
  RT_TRY_SET(source->valid, part(1));
  return {};
}

/// Reads PREFIX.channel of a source that open_instruct() has opened.
Status open_channels(const DataSource& config, int64_t vocab, Dataset* dataset) {
  RT_TRY_SET(const auto pair, open_megatron(config.path, OpenOptions{vocab}));
  RT_TRY_SET(const auto found, DocumentChannels::open(config.path, pair->sequence_count(), pair->token_count()));
  if (!found) return {};
  std::vector<int32_t> number;  // of each of its names
  for (const std::string& name : found->names) {
    const auto known = std::ranges::find(dataset->channels, name);
    number.push_back(static_cast<int32_t>(known - dataset->channels.begin()));
    if (known == dataset->channels.end()) dataset->channels.push_back(name);
  }
  if (std::ssize(dataset->channels) > kMostChannels)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("the sources have {} channels together, at most {} are told apart",
                             dataset->channels.size(), kMostChannels)};
  std::vector<int32_t>& channels = dataset->sources.back().channels;
  for (const uint16_t channel : found->of_document) channels.push_back(number[channel]);
  return {};
}

}  // namespace

Result<Dataset::Source> open_source(const DataSource& config, int64_t vocab, int64_t seq_len) {
  Dataset::Source source;
  source.name = config.name.empty() ? std::filesystem::path(config.path).stem().string() : config.name;
  source.weight = config.weight;
  source.kind = config.kind;
  if (config.kind == DataSource::Kind::kInstruct) {
    RT_TRY(open_instruct(config, vocab, seq_len, &source));
    return source;
  }
  const OpenOptions options{vocab};
  std::shared_ptr<const TokenSource> whole;
  if (config.kind == DataSource::Kind::kMegatron) {
    RT_TRY_SET(whole, open_megatron(config.path, options));
  } else {
    RT_TRY_SET(whole, open_token_file(config.path, config.dtype, options));
  }
  if (!config.valid_path.empty()) {
    if (!config.split.empty())
      return Error{ErrorCode::kInvalidInput, "a validation file and a split are both given; choose one"};
    RT_TRY_SET(source.valid, open_token_file(config.valid_path, config.dtype, options));
  }
  RT_TRY_SET(auto parts, split_source(std::move(whole), config.split));
  source.train = std::move(parts[static_cast<size_t>(Part::kTrain)]);
  if (config.tokens > source.train->token_count())
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: tokens is {}, but the training part has {}; take fewer, or leave the field out for all",
                    source.train->name(), config.tokens, source.train->token_count())};
  if (config.tokens > 0) source.train = slice_tokens(std::move(source.train), 0, config.tokens);
  if (!source.valid) source.valid = std::move(parts[static_cast<size_t>(Part::kValid)]);
  return source;
}

Result<Dataset> open_dataset(const DataConfig& config, int64_t vocab, int64_t seq_len) {
  Dataset dataset;
  for (const DataSource& one : config.sources) {
    auto source = open_source(one, vocab, seq_len);
    if (!source.ok())
      return std::move(source).error().with(fmt::format("data source {}", one.name.empty() ? one.path : one.name));
    for (const Dataset::Source& other : dataset.sources)
      if (other.name == source.value().name)
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("two data sources are named \"{}\" ({}, {}); give one a name of its own", other.name,
                                 other.train->name(), source.value().train->name())};
    dataset.sources.push_back(std::move(source).value());
    if (one.kind == DataSource::Kind::kInstruct)
      RT_TRY(open_channels(one, vocab, &dataset).with("data source " + dataset.sources.back().name));
  }
  return dataset;
}

Result<int64_t> epoch_samples(const DataConfig& config, int64_t vocab, int64_t seq_len) {
  const DataSource* drawn = nullptr;
  for (const DataSource& one : config.sources) {
    if (one.weight == 0) continue;
    if (drawn != nullptr)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("an epoch is a pass over one source, and samples are drawn from \"{}\" and \"{}\"; say "
                               "how many, as T.samples(n)",
                               drawn->name, one.name)};
    drawn = &one;
  }
  if (drawn == nullptr) return Error{ErrorCode::kInvalidInput, "no source has a weight to be drawn by"};
  auto source = open_source(*drawn, vocab, seq_len);
  if (!source.ok()) return std::move(source).error().with(fmt::format("data source {}", drawn->name));
  const int64_t samples = window_count(source.value().train->token_count(), seq_len);
  if (samples < 1)
    return Error{ErrorCode::kInvalidInput, fmt::format("data source {}: {} tokens are no sample of {}", drawn->name,
                                                       source.value().train->token_count(), seq_len)};
  return samples;
}

Result<Sampler::Spec> sampler_spec(const Dataset& dataset, const Recipe& recipe) {
  Sampler::Spec spec;
  spec.seed = recipe.data.seed != 0 ? recipe.data.seed : recipe.seed;
  spec.seq_len = recipe.model.context;
  RT_TRY_SET(spec.skip, SkippedPositions::parse(recipe.batch.skip).with("batch.skip"));
  for (const Dataset::Source& source : dataset.sources) {
    const TokenSource& train = *source.train;
    spec.sources.push_back({source.name, train.token_count(), train.fingerprint(), source.weight,
                            [&train](int64_t first_tokens) { return content_hash(train, first_tokens); }});
  }
  return spec;
}

namespace {

/// The channels of the rows of sample `i`.
Status load_channels(const Dataset::Source& source, const TokenSource& tokens, int64_t start, int64_t seq_len, size_t i,
                     MicroBatch* out) {
  RT_TRY_SET(const std::vector<DocumentPart> parts, tokens.documents(start, seq_len));
  for (const DocumentPart& part : parts) {
    const int64_t row = static_cast<int64_t>(i) * seq_len + part.at - start;
    std::fill_n(out->channels.begin() + row, part.end - part.begin,
                source.channels.at(static_cast<size_t>(part.document)));
  }
  return {};
}

}  // namespace

Status load_samples(const Dataset& dataset, DataPart part, std::span<const SampleRef> samples, int64_t seq_len,
                    MicroBatch* out) {
  out->samples = static_cast<int64_t>(samples.size());
  out->seq_len = seq_len;
  const auto total = static_cast<size_t>(out->samples * seq_len);
  out->inputs.resize(total);
  out->targets.resize(total);
  out->sources.resize(samples.size());
  const bool apart = std::ranges::any_of(dataset.sources, [](const auto& source) { return source.train->has_rows(); });
  out->positions.resize(apart ? total : 0);
  out->starts.resize(apart ? total : 0);
  out->apart.assign(apart ? samples.size() : 0, 0);
  out->channels.assign(dataset.channels.empty() ? 0 : total, -1);
  for (size_t i = 0; i < samples.size(); ++i) {
    const SampleRef& sample = samples[i];
    const Dataset::Source& source = dataset.sources.at(static_cast<size_t>(sample.source));
    const TokenSource* tokens = part == DataPart::kTrain ? source.train.get() : source.valid.get();
    RT_CHECK(tokens != nullptr, "source {} has no such part", source.name);
    // Inputs and targets overlap but for one token at either end: read L for the inputs, shift, read the last one.
    int32_t* inputs = out->inputs.data() + static_cast<int64_t>(i) * seq_len;
    int32_t* targets = out->targets.data() + static_cast<int64_t>(i) * seq_len;
    RT_TRY(tokens->read(sample.start + 1, seq_len, targets));
    RT_TRY(tokens->read(sample.start, 1, inputs));
    std::memcpy(inputs + 1, targets, static_cast<size_t>(seq_len - 1) * sizeof(int32_t));
    out->sources[i] = sample.source;
    if (!apart) continue;
    int32_t* positions = out->positions.data() + static_cast<int64_t>(i) * seq_len;
    int32_t* starts = out->starts.data() + static_cast<int64_t>(i) * seq_len;
    out->apart[i] = tokens->has_rows() ? 1 : 0;
    if (tokens->has_rows()) {
      RT_TRY(tokens->rows(sample.start, seq_len, targets, positions, starts));
      if (!source.channels.empty()) RT_TRY(load_channels(source, *tokens, sample.start, seq_len, i, out));
    } else {
      std::iota(positions, positions + seq_len, 0);
      std::fill_n(starts, seq_len, 0);
    }
  }
  return {};
}

void no_targets(MicroBatch* batch, int64_t first) {
  std::fill(batch->targets.begin() + first * batch->seq_len, batch->targets.end(), kNoTarget);
}

Result<ValidationSet> ValidationSet::make(const Dataset& dataset, int64_t seq_len, int64_t batch_samples,
                                          int64_t max_batches) {
  RT_CHECK(seq_len >= 1 && batch_samples >= 1 && max_batches >= 0, "{} {} {}", seq_len, batch_samples, max_batches);
  std::vector<int32_t> index;  // of the sources that have a validation part
  std::vector<double> weights;
  std::vector<int64_t> taken, left;
  double sum = 0;
  int64_t windows = 0;
  for (size_t i = 0; i < dataset.sources.size(); ++i) {
    const Dataset::Source& source = dataset.sources[i];
    const int64_t n = source.valid ? window_count(source.valid->token_count(), seq_len) : 0;
    if (n == 0 || source.weight == 0) continue;
    index.push_back(static_cast<int32_t>(i));
    weights.push_back(source.weight);
    sum += source.weight;
    left.push_back(n);
    windows += n;
  }
  for (double& weight : weights) weight /= sum;
  taken.assign(index.size(), 0);
  if (max_batches > 0 && windows < batch_samples) {
    std::set<std::string_view> remedies;
    for (const Dataset::Source& source : dataset.sources) remedies.insert(larger_validation(source.kind));
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("the validation parts hold {} of {} tokens, one batch needs {}; {}, or take a "
                             "smaller batch",
                             count_text(windows, "window"), seq_len + 1, batch_samples, fmt::join(remedies, ", "))};
  }
  ValidationSet set;
  set.batch_samples_ = batch_samples;
  const int64_t total = std::min(max_batches, windows / batch_samples) * batch_samples;
  set.samples_.reserve(static_cast<size_t>(total));
  for (int64_t position = 0; position < total; ++position) {
    const int64_t draw = blend_next(weights, taken, position, left);
    const auto s = static_cast<size_t>(draw);
    set.samples_.push_back({position, index[s], taken[s], taken[s] * seq_len});
    ++taken[s];
    --left[s];
  }
  return set;
}

std::span<const SampleRef> ValidationSet::batch(int64_t index) const {
  RT_CHECK(index >= 0 && index < batches(), "validation batch {} of {}", index, batches());
  return std::span(samples_).subspan(static_cast<size_t>(index * batch_samples_), static_cast<size_t>(batch_samples_));
}

}  // namespace cairn::data
