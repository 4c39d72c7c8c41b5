#include "runtime/data/sampler.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace cairn::data {
namespace {

// Positions beyond this would not be exact as doubles in the blend rule; 2^52 samples are 10^8 years of training.
constexpr int64_t kMaxPosition = int64_t{1} << 52;

Error differs(std::string_view field, const std::string& saved, const std::string& now, std::string_view advice) {
  return Error{ErrorCode::kInvalidInput,
               fmt::format("cannot resume the data order: {} was {} when the checkpoint was saved and is {} now; {}",
                           field, saved, now, advice)};
}

}  // namespace

Result<Sampler> Sampler::make(const Spec& spec) {
  if (spec.sources.empty()) return Error{ErrorCode::kInvalidInput, "no data sources to draw samples from"};
  if (spec.sources.size() > static_cast<size_t>(std::numeric_limits<int16_t>::max()))
    return Error{ErrorCode::kInvalidInput, fmt::format("{} data sources, at most 32767", spec.sources.size())};
  if (spec.seq_len < 1)
    return Error{ErrorCode::kInvalidInput, fmt::format("sequence length is {}, expected 1 or more", spec.seq_len)};
  SamplerState state;
  state.seed = spec.seed;
  state.seq_len = spec.seq_len;
  state.taken.assign(spec.sources.size(), 0);
  double sum = 0;
  for (const Source& source : spec.sources) {
    if (!(source.weight > 0) || !std::isfinite(source.weight))
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("data source {}: weight is {}, expected more than 0", source.name, source.weight)};
    sum += source.weight;
  }
  std::vector<int64_t> windows;
  for (const Source& source : spec.sources) {
    windows.push_back(window_count(source.tokens, spec.seq_len));
    if (windows.back() < 1)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("data source {}: {} tokens, but a sample of sequence length {} needs {}", source.name,
                               source.tokens, spec.seq_len, spec.seq_len + 1)};
    state.weights.push_back(source.weight / sum);
    state.fingerprints.push_back(source.fingerprint);
  }
  Sampler sampler(std::move(state));
  sampler.windows_ = std::move(windows);
  return sampler;
}

Result<Sampler> Sampler::resume(const Spec& spec, const SamplerState& saved) {
  RT_TRY_SET(Sampler sampler, make(spec));
  const SamplerState& now = sampler.state_;
  if (saved.order_version != now.order_version)
    return differs("the order version", fmt::format("{}", saved.order_version), fmt::format("{}", now.order_version),
                   "resume with a build of that version");
  if (saved.seed != now.seed)
    return differs("the seed", fmt::format("{}", saved.seed), fmt::format("{}", now.seed), "set it back");
  if (saved.seq_len != now.seq_len)
    return differs("the sequence length", fmt::format("{}", saved.seq_len), fmt::format("{}", now.seq_len),
                   "set it back");
  const size_t sources = now.taken.size();
  if (saved.fingerprints.size() != sources)
    return differs("the number of sources", fmt::format("{}", saved.fingerprints.size()), fmt::format("{}", sources),
                   "give the same list of sources");
  if (saved.taken.size() != sources || saved.weights.size() != sources)
    return Error{ErrorCode::kCorrupt, fmt::format("sampler state: {} fingerprints, but {} taken and {} weights",
                                                  sources, saved.taken.size(), saved.weights.size())};
  int64_t sum = 0;
  for (size_t i = 0; i < sources; ++i) {
    const std::string which = fmt::format("of source {} ({})", i, spec.sources[i].name);
    if (saved.fingerprints[i] != now.fingerprints[i])
      return differs("the content fingerprint " + which, fmt::format("{:016x}", saved.fingerprints[i]),
                     fmt::format("{:016x}", now.fingerprints[i]),
                     "the files changed (or their order, or the split); bring the same data back");
    if (saved.weights[i] != now.weights[i])
      return differs("the normalised weight " + which, fmt::format("{}", saved.weights[i]),
                     fmt::format("{}", now.weights[i]), "set it back");
    if (saved.taken[i] < 0 || saved.taken[i] > kMaxPosition || sum > kMaxPosition)
      return Error{ErrorCode::kCorrupt, fmt::format("sampler state: taken[{}] is {}", i, saved.taken[i])};
    sum += saved.taken[i];
  }
  if (saved.position != sum || sum > kMaxPosition)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("sampler state: position is {}, but taken sums to {}", saved.position, sum)};
  sampler.state_ = saved;
  return sampler;
}

int64_t Sampler::next_source(const std::vector<int64_t>& taken, int64_t draws) const {
  return taken.size() == 1 ? 0 : blend_next(state_.weights, taken, draws);
}

std::vector<SampleRef> Sampler::peek(int64_t count) const {
  RT_CHECK(count >= 0 && state_.position <= kMaxPosition - count, "{} samples at {}", count, state_.position);
  std::vector<SampleRef> samples(static_cast<size_t>(count));
  std::vector<int64_t> taken = state_.taken;
  for (int64_t i = 0; i < count; ++i) {
    SampleRef& sample = samples[static_cast<size_t>(i)];
    sample.position = state_.position + i;
    const int64_t source = next_source(taken, sample.position);
    sample.source = static_cast<int32_t>(source);
    sample.k = taken[static_cast<size_t>(source)]++;
    const int64_t n = windows_[static_cast<size_t>(source)];
    const uint64_t key = order_key(state_.seed, static_cast<uint64_t>(source), static_cast<uint64_t>(sample.k / n));
    sample.start = permute(n, key, sample.k % n) * state_.seq_len;
  }
  return samples;
}

void Sampler::advance(int64_t count) {
  RT_CHECK(count >= 0 && state_.position <= kMaxPosition - count, "{} samples at {}", count, state_.position);
  for (int64_t i = 0; i < count; ++i) {
    ++state_.taken[static_cast<size_t>(next_source(state_.taken, state_.position))];
    ++state_.position;
  }
}

double Sampler::epochs(int64_t source) const {
  const auto s = static_cast<size_t>(source);
  return static_cast<double>(state_.taken.at(s)) / static_cast<double>(windows_.at(s));
}

std::span<const SampleRef> micro_batch_samples(std::span<const SampleRef> step, int64_t dp, int64_t dp_rank,
                                               int64_t micro, int64_t accumulation_step) {
  const auto total = static_cast<int64_t>(step.size());
  RT_CHECK(dp >= 1 && micro >= 1 && total % (micro * dp) == 0, "a step of {} samples, micro {} x dp {}", total, micro,
           dp);
  const int64_t first = (accumulation_step * dp + dp_rank) * micro;
  RT_CHECK(dp_rank >= 0 && dp_rank < dp && accumulation_step >= 0 && first + micro <= total,
           "rank {} of {}, micro-step {} of a step of {} samples", dp_rank, dp, accumulation_step, total);
  return step.subspan(static_cast<size_t>(first), static_cast<size_t>(micro));
}

}  // namespace cairn::data
