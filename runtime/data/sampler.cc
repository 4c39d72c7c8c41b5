#include "runtime/data/sampler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace cairn::data {
namespace {

using Kind = OrderChange::Kind;

// Positions beyond this would not be exact as doubles in the blend rule; 2^52 samples are 10^8 years of training.
constexpr int64_t kMaxPosition = int64_t{1} << 52;

// Normalised weights that differ by no more come of the same numbers: 0.1 and 0.2 against 1 and 2.
constexpr double kSameWeight = 1e-12;

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What has a name in the recipe but none in the state was the n-th of a recipe that wrote version 1.
std::string label(const SourceState& source) {
  return source.name.empty() ? fmt::format("number {}", source.stream + 1) : fmt::format("\"{}\"", source.name);
}

std::vector<Era> eras_of(const SourceState& source, int64_t seq_len) {
  if (!source.growth.empty()) return source.growth;
  return {{0, window_count(source.tokens, seq_len), 0}};
}

const Era& era_at(const std::vector<Era>& eras, int64_t k) {
  return eras.size() == 2 && k >= eras[1].k0 ? eras[1] : eras[0];
}

// Share of the windows of the epoch under way that were drawn in it, when there are `windows` of them from now on.
double drawn_share(const SourceState& source, int64_t seq_len, int64_t windows) {
  if (window_count(source.tokens, seq_len) < 1)
    return static_cast<double>(source.taken % windows) / static_cast<double>(windows);
  const Era era = era_at(eras_of(source, seq_len), source.taken);
  const int64_t drawn = (source.taken - era.k0) % era.windows;
  return static_cast<double>(drawn) / static_cast<double>(std::max(era.windows, windows));
}

// The epoch under way ends over the windows that it began with, then there are `windows`. Eras that are over are
// dropped: what comes does not depend on them.
std::vector<Era> grow(const std::vector<Era>& eras, int64_t taken, int64_t windows) {
  const Era now = era_at(eras, taken);
  const int64_t epochs = div_up(taken - now.k0, now.windows);
  std::vector<Era> out;
  if (epochs > 0) out.push_back(now);
  if (epochs == 0 || windows != now.windows)
    out.push_back({now.k0 + epochs * now.windows, windows, now.epoch + epochs});
  if (out.size() == 1 && out[0].k0 == out[0].epoch * out[0].windows) out.clear();  // as if it had never been shorter
  return out;
}

Status check_spec(const Sampler::Spec& spec) {
  if (spec.sources.empty()) return Error{ErrorCode::kInvalidInput, "no data sources to draw samples from"};
  if (spec.sources.size() > static_cast<size_t>(std::numeric_limits<int16_t>::max()))
    return Error{ErrorCode::kInvalidInput, fmt::format("{} data sources, at most 32767", spec.sources.size())};
  if (spec.seq_len < 1)
    return Error{ErrorCode::kInvalidInput, fmt::format("sequence length is {}, expected 1 or more", spec.seq_len)};
  if (std::ranges::all_of(spec.sources, [](const Sampler::Source& source) { return source.weight == 0; }))
    return Error{ErrorCode::kInvalidInput, "every data source has weight 0: there is none to draw samples from"};
  for (const Sampler::Source& source : spec.sources) {
    if (!(source.weight >= 0) || !std::isfinite(source.weight))
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("data source {}: weight is {}, expected 0 or more", source.name, source.weight)};
    if (window_count(source.tokens, spec.seq_len) < 1)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("data source {}: {} tokens, but a sample of sequence length {} needs {}", source.name,
                               source.tokens, spec.seq_len, spec.seq_len + 1)};
  }
  return {};
}

Status check_growth(const SourceState& source, int64_t seq_len) {
  const std::vector<Era>& eras = source.growth;
  bool good = eras.size() <= 2;
  for (const Era& era : eras)
    good = good && era.k0 >= 0 && era.k0 <= kMaxPosition && era.windows >= 1 && era.epoch >= 0;
  if (good && !eras.empty()) {
    good = eras[0].k0 <= source.taken && eras.back().windows == window_count(source.tokens, seq_len);
    if (eras.size() == 2) {
      const int64_t samples = eras[1].k0 - eras[0].k0;
      good = good && samples > 0 && samples % eras[0].windows == 0 &&
             eras[1].epoch - eras[0].epoch == samples / eras[0].windows;
    }
  }
  if (good) return {};
  return Error{ErrorCode::kCorrupt,
               fmt::format("sampler state: growth of source {} contradicts itself or its {} tokens", label(source),
                           source.tokens)};
}

Status check_state(const SamplerState& state) {
  const auto corrupt = [](std::string what) { return Error{ErrorCode::kCorrupt, "sampler state: " + std::move(what)}; };
  if (state.seq_len < 1) return corrupt(fmt::format("seq_len is {}", state.seq_len));
  if (state.base_position < 0 || state.base_position > state.position || state.position > kMaxPosition)
    return corrupt(fmt::format("position is {}, of its stage {}", state.position, state.base_position));
  if (state.skipped < 0 || state.skipped > state.position)
    return corrupt(fmt::format("{} of {} positions are skipped", state.skipped, state.position));
  int64_t stream = -1, sum = 0;
  double weights = 0;
  const bool first_stage = state.base_position == 0;
  std::set<std::string> names;
  for (const SourceState& source : state.sources) {
    if (source.stream <= stream || source.stream > kMaxPosition)
      return corrupt(fmt::format("stream {} behind stream {}", source.stream, stream));
    stream = source.stream;
    if (source.base_taken < 0 || (first_stage && source.base_taken != 0) || source.base_taken > source.taken ||
        source.taken > kMaxPosition || source.taken > std::numeric_limits<int64_t>::max() / state.seq_len ||
        source.tokens < 0 || (!source.retired() && source.tokens > 0 && window_count(source.tokens, state.seq_len) < 1))
      return corrupt(fmt::format("source {} has taken {} samples, {} before its stage, of {} tokens", label(source),
                                 source.taken, source.base_taken, source.tokens));
    sum += source.taken - source.base_taken;
    if (sum > kMaxPosition) break;
    if (!source.name.empty() && !names.insert(source.name).second)
      return corrupt(fmt::format("two sources are named {}", label(source)));
    if (!(source.weight >= 0) || !std::isfinite(source.weight) ||
        (source.retired() && source.taken != source.base_taken))
      return corrupt(fmt::format("source {} has weight {} and took {} samples in its stage", label(source),
                                 source.weight, source.taken - source.base_taken));
    weights += source.weight;
    RT_TRY(check_growth(source, state.seq_len));
  }
  if (state.position - state.base_position != sum)
    return corrupt(fmt::format("{} positions of this stage, but its sources have taken {} samples",
                               state.position - state.base_position, sum));
  if (!state.sources.empty() && !(weights > 0)) return corrupt("no source is drawn from");
  return {};
}

// The content hashes of the present sources, each read when first asked for.
class Contents {
 public:
  explicit Contents(const Sampler::Spec& spec) : spec_(spec) {}

  /// 0: not known.
  Result<uint64_t> of(size_t source, int64_t tokens) {
    const Sampler::Source& now = spec_.sources[source];
    if (!now.content || tokens > now.tokens) return uint64_t{0};
    const auto key = std::pair(source, tokens);
    if (const auto it = known_.find(key); it != known_.end()) return it->second;
    Result<uint64_t> read = now.content(tokens);
    if (!read.ok()) return std::move(read).error().with(fmt::format("data source {}", now.name));
    return known_[key] = read.value();
  }

  /// Whether the saved tokens are the first ones of the present source. The reading of version 1, which did not save
  /// how many there were, is "all of them, and no others".
  Result<bool> begins_with(size_t source, const SourceState& saved) {
    if (saved.content == 0) return saved.fingerprint == spec_.sources[source].fingerprint;
    RT_TRY_SET(const uint64_t content, of(source, saved.tokens));
    return content == saved.content;
  }

 private:
  const Sampler::Spec& spec_;
  std::map<std::pair<size_t, int64_t>, uint64_t> known_;
};

// The saved source (index in the state) that each present one is: the one of its name; else one of the same content,
// drawn from rather than retired; else one that it is longer than. States of version 1 have no names: of those, what
// is left over alone on either side is a pair.
Result<std::vector<std::optional<size_t>>> match(const Sampler::Spec& spec, const SamplerState& saved,
                                                 Contents& contents) {
  std::vector<std::optional<size_t>> found(spec.sources.size());
  std::vector<bool> claimed(saved.sources.size());
  const auto pair = [&](size_t i, size_t j) { found[i] = j, claimed[j] = true; };
  for (size_t j = 0; j < saved.sources.size(); ++j)
    for (size_t i = 0; i < found.size() && !saved.sources[j].name.empty(); ++i)
      if (!found[i] && !claimed[j] && saved.sources[j].name == spec.sources[i].name) pair(i, j);
  for (const bool whole : {true, false}) {
    for (const bool retired : {false, true}) {
      for (size_t j = 0; j < saved.sources.size(); ++j) {
        const SourceState& source = saved.sources[j];
        for (size_t i = 0; i < found.size(); ++i) {
          if (found[i] || claimed[j] || source.retired() != retired) continue;
          if (source.content != 0 && whole != (source.tokens == spec.sources[i].tokens)) continue;
          RT_TRY_SET(const bool same, contents.begins_with(i, source));
          if (same) pair(i, j);
        }
      }
    }
  }
  std::optional<size_t> alone;
  int64_t nameless = 0;
  for (size_t j = 0; j < saved.sources.size(); ++j)
    if (!claimed[j] && !saved.sources[j].retired() && saved.sources[j].name.empty()) alone = j, ++nameless;
  if (nameless == 1 && std::count(found.begin(), found.end(), std::nullopt) == 1)
    pair(static_cast<size_t>(std::find(found.begin(), found.end(), std::nullopt) - found.begin()), *alone);
  return found;
}

std::string percent(double share) { return fmt::format("{:.0f} %", std::ceil(share * 100)); }

// What the present data makes of a saved state.
struct Reconciled {
  SamplerState state;
  std::vector<size_t> state_of_source;  // for each source of the Spec
  std::vector<OrderChange> changes;
};

void change_seed(uint64_t seed, Reconciled& out) {
  SamplerState& state = out.state;
  if (state.seed == seed) return;
  double repeats = 0;
  for (const SourceState& source : state.sources) {
    if (source.retired() || source.tokens == 0) continue;
    const int64_t windows = era_at(eras_of(source, state.seq_len), source.taken).windows;
    repeats += source.weight * drawn_share(source, state.seq_len, windows);
  }
  out.changes.push_back(
      {Kind::kSeed, "", fmt::format("{}", state.seed), fmt::format("{}", seed), repeats,
       fmt::format("seed of the order {} -> {}: new permutations from sample {} on; some {} of the samples left in the "
                   "epochs under way were drawn in them already",
                   state.seed, seed, state.position, percent(repeats))});
  state.seed = seed;
}

void change_seq_len(int64_t seq_len, Reconciled& out) {
  SamplerState& state = out.state;
  if (state.seq_len == seq_len) return;
  double repeats = 0;
  for (SourceState& source : state.sources) {
    if (!source.retired() && source.tokens != 0) {
      const int64_t windows = era_at(eras_of(source, state.seq_len), source.taken).windows;
      repeats += source.weight * drawn_share(source, state.seq_len, windows);
    }
    source.taken = div_up(source.taken * state.seq_len, seq_len);
    source.base_taken = source.taken;
    source.growth.clear();
  }
  out.changes.push_back(
      {Kind::kSeqLen, "", fmt::format("{}", state.seq_len), fmt::format("{}", seq_len), repeats,
       fmt::format("sequence length {} -> {}: windows are cut anew from sample {} on, sample numbers of the sources "
                   "scaled to the tokens consumed; some {} of the samples left in the epochs under way were drawn in "
                   "them already",
                   state.seq_len, seq_len, state.position, percent(repeats))});
  state.base_position = state.position;
  state.seq_len = seq_len;
}

// The present tokens of a source that was there before, its windows and what changed in them.
Status take_up(const Sampler::Source& now, size_t index, Contents& contents, int64_t saved_seq_len, SourceState& source,
               Reconciled& out) {
  const int64_t position = out.state.position, seq_len = out.state.seq_len;
  const int64_t windows = window_count(now.tokens, seq_len);
  RT_TRY_SET(const bool prefix, contents.begins_with(index, source));
  if (!prefix) {
    const double repeats = drawn_share(source, seq_len, windows);
    const std::string before = source.tokens == 0 ? "" : fmt::format("{} tokens", source.tokens);
    out.changes.push_back(
        {Kind::kReplaced, now.name, before, fmt::format("{} tokens", now.tokens), repeats,
         fmt::format("data source \"{}\": its tokens are not those that it began with ({}{} now); from sample {} on "
                     "the new ones are drawn, and up to {} of those left in the epoch under way may have been drawn in "
                     "it already",
                     now.name, before.empty() ? "" : before + ", ", now.tokens, position, percent(repeats))});
    source.growth.clear();
  } else if (source.tokens != 0 && source.tokens < now.tokens) {
    const bool same_windows = saved_seq_len == seq_len && window_count(source.tokens, seq_len) >= 1;
    out.changes.push_back(
        {Kind::kGrown, now.name, fmt::format("{} tokens", source.tokens), fmt::format("{} tokens", now.tokens), 0,
         fmt::format("data source \"{}\": grew from {} tokens to {}{}", now.name, source.tokens, now.tokens,
                     same_windows ? "; the epoch under way ends over the old ones, then all are drawn" : "")});
    if (same_windows) source.growth = grow(eras_of(source, seq_len), source.taken, windows);
  }
  source.name = now.name;
  source.tokens = now.tokens;
  RT_TRY_SET(source.content, contents.of(index, now.tokens));
  source.fingerprint = source.content == 0 ? now.fingerprint : 0;
  return {};
}

// Weights of the sources in order of their streams, so that a recipe in another order has the same bits; a new blend
// stage when they, or the sources, are others.
void blend(const Sampler::Spec& spec, bool other_sources, Reconciled& out) {
  SamplerState& state = out.state;
  std::vector<double> given(state.sources.size());
  for (size_t i = 0; i < spec.sources.size(); ++i) given[out.state_of_source[i]] = spec.sources[i].weight;
  double sum = 0, stayed = 0, stayed_before = 0;
  for (size_t j = 0; j < given.size(); ++j) {
    sum += given[j];
    if (given[j] == 0 || state.sources[j].weight == 0) continue;
    stayed += given[j];
    stayed_before += state.sources[j].weight;
  }
  std::vector<std::string> before, after, both;
  for (size_t j = 0; j < given.size(); ++j) {
    const SourceState& source = state.sources[j];
    if (given[j] == 0 || source.weight == 0) continue;
    const double was = source.weight / stayed_before, is = given[j] / stayed;
    if (std::abs(was - is) <= kSameWeight * was) continue;
    before.push_back(fmt::format("{} {:.6g}", source.name, source.weight));
    after.push_back(fmt::format("{} {:.6g}", source.name, given[j] / sum));
    both.push_back(fmt::format("{} {:.6g} -> {:.6g}", source.name, source.weight, given[j] / sum));
  }
  if (both.empty() && !other_sources) return;
  if (!both.empty()) {
    constexpr size_t kNamed = 8;
    const std::string more = both.size() > kNamed ? fmt::format(" and {} more", both.size() - kNamed) : "";
    if (both.size() > kNamed) before.resize(kNamed), after.resize(kNamed), both.resize(kNamed);
    out.changes.push_back(
        {Kind::kWeights, "", fmt::format("{}{}", fmt::join(before, ", "), more),
         fmt::format("{}{}", fmt::join(after, ", "), more), 0,
         fmt::format("blend weights from sample {} on: {}{}", state.position, fmt::join(both, ", "), more)});
  }
  state.base_position = state.position;
  for (size_t j = 0; j < given.size(); ++j) {
    SourceState& source = state.sources[j];
    source.base_taken = source.taken;
    source.weight = given[j] / sum;
  }
}

Result<Reconciled> reconcile(const Sampler::Spec& spec, const SamplerState& saved) {
  RT_TRY(check_spec(spec));
  RT_TRY(check_state(saved));
  Contents contents(spec);
  RT_TRY_SET(const auto matched, match(spec, saved, contents));
  Reconciled out;
  out.state = saved;
  SamplerState& state = out.state;
  // Version 1 does not say how many tokens a source had; where the fingerprint is the same, they are as many.
  for (size_t i = 0; i < matched.size(); ++i) {
    if (!matched[i] || state.sources[*matched[i]].tokens != 0) continue;
    SourceState& source = state.sources[*matched[i]];
    if (source.fingerprint == spec.sources[i].fingerprint) source.tokens = spec.sources[i].tokens;
  }
  change_seed(spec.seed, out);
  change_seq_len(spec.seq_len, out);

  bool other_sources = false;
  std::vector<bool> present(saved.sources.size());
  double sum = 0;
  for (const Sampler::Source& source : spec.sources) sum += source.weight;
  for (size_t i = 0; i < spec.sources.size(); ++i) {
    const Sampler::Source& now = spec.sources[i];
    const std::string weight = fmt::format("weight {:.6g}", now.weight / sum);
    if (matched[i]) {
      SourceState& source = state.sources[*matched[i]];
      present[*matched[i]] = true;
      if (source.retired() && now.weight > 0) {
        other_sources = true;
        const std::string back = source.taken == 0
                                     ? std::string("no longer of weight 0")
                                     : fmt::format("back after {} samples, behind which it resumes", source.taken);
        out.changes.push_back({Kind::kReturned, now.name, "", weight, 0,
                               fmt::format("data source \"{}\": {}; {} of the blend from sample {} on", now.name, back,
                                           weight, state.position)});
      } else if (!source.retired() && now.weight == 0) {
        other_sources = true;
        out.changes.push_back(
            {Kind::kRemoved, now.name, fmt::format("weight {:.6g}", source.weight), weight, 0,
             fmt::format("data source \"{}\": weight 0, not drawn from after its {} samples; it would "
                         "resume behind them",
                         now.name, source.taken)});
      }
      RT_TRY(take_up(now, i, contents, saved.seq_len, source, out));
      out.state_of_source.push_back(*matched[i]);
      continue;
    }
    other_sources = other_sources || now.weight > 0;
    SourceState added;
    added.name = now.name;
    added.stream = state.sources.empty() ? 0 : state.sources.back().stream + 1;
    added.tokens = now.tokens;
    RT_TRY_SET(added.content, contents.of(i, now.tokens));
    if (added.content == 0) added.fingerprint = now.fingerprint;
    out.changes.push_back({Kind::kAdded, now.name, "", weight, 0,
                           now.weight == 0
                               ? fmt::format("data source \"{}\": added with weight 0: not drawn from yet", now.name)
                               : fmt::format("data source \"{}\": added, {} of the blend from sample {} on", now.name,
                                             weight, state.position)});
    out.state_of_source.push_back(state.sources.size());
    state.sources.push_back(std::move(added));
  }
  for (size_t j = 0; j < saved.sources.size(); ++j) {
    const SourceState& source = saved.sources[j];
    if (present[j] || source.retired()) continue;
    other_sources = true;
    out.changes.push_back({Kind::kRemoved, source.name.empty() ? label(source) : source.name,
                           fmt::format("weight {:.6g}", source.weight), "", 0,
                           fmt::format("data source {}: removed after {} samples; it would resume behind them",
                                       label(source), source.taken)});
  }
  blend(spec, other_sources, out);
  return out;
}

}  // namespace

Sampler::Sampler(SamplerState state, const std::vector<size_t>& state_of_source, SkippedPositions skip)
    : state_(std::move(state)), skip_(std::move(skip)) {
  for (size_t i = 0; i < state_of_source.size(); ++i) {
    const SourceState& source = state_.sources[state_of_source[i]];
    drawn_.push_back({state_of_source[i], static_cast<int32_t>(i), eras_of(source, state_.seq_len)});
  }
  std::sort(drawn_.begin(), drawn_.end(), [](const Drawn& a, const Drawn& b) { return a.state < b.state; });
  for (const Drawn& one : drawn_) weights_.push_back(state_.sources[one.state].weight);
}

Result<Sampler> Sampler::make(const Spec& spec) {
  SamplerState none;
  none.seed = spec.seed;
  none.seq_len = std::max<int64_t>(spec.seq_len, 1);  // the check of the spec comes first
  return resume(spec, none);
}

Result<std::vector<OrderChange>> Sampler::changes(const Spec& spec, const SamplerState& state) {
  RT_TRY_SET(Reconciled now, reconcile(spec, state));
  return std::move(now.changes);
}

Result<Sampler> Sampler::resume(const Spec& spec, const SamplerState& state) {
  RT_TRY_SET(Reconciled now, reconcile(spec, state));
  return Sampler(std::move(now.state), now.state_of_source, spec.skip);
}

template <typename Visit>
void Sampler::draw(int64_t count, Visit visit) const {
  RT_CHECK(count >= 0 && state_.position <= kMaxPosition - count - SkippedPositions::kMost, "{} samples at {}", count,
           state_.position);
  std::vector<int64_t> taken;
  for (const Drawn& one : drawn_)
    taken.push_back(state_.sources[one.state].taken - state_.sources[one.state].base_taken);
  for (int64_t position = state_.position; count > 0; ++position) {
    const auto next = static_cast<size_t>(blend_next(weights_, taken, position - state_.base_position));
    const bool skipped = skip_.holds(position);
    visit(position, drawn_[next], state_.sources[drawn_[next].state].base_taken + taken[next], skipped);
    ++taken[next];
    if (!skipped) --count;
  }
}

std::vector<SampleRef> Sampler::peek(int64_t count) const {
  std::vector<SampleRef> samples;
  draw(count, [&](int64_t position, const Drawn& drawn, int64_t k, bool skipped) {
    if (skipped) return;
    const Era& era = era_at(drawn.eras, k);
    const int64_t epochs = (k - era.k0) / era.windows, index = (k - era.k0) % era.windows;
    const auto stream = static_cast<uint64_t>(state_.sources[drawn.state].stream);
    const uint64_t key = order_key(state_.seed, stream, static_cast<uint64_t>(era.epoch + epochs));
    samples.push_back({position, drawn.source, k, permute(era.windows, key, index) * state_.seq_len});
  });
  return samples;
}

void Sampler::advance(int64_t count) {
  draw(count, [this](int64_t position, const Drawn& drawn, int64_t, bool skipped) {
    state_.position = position + 1;
    if (skipped) ++state_.skipped;
    ++state_.sources[drawn.state].taken;
  });
}

const Sampler::Drawn& Sampler::drawn_of(int64_t source) const {
  const auto drawn = std::ranges::find(drawn_, source, &Drawn::source);
  RT_CHECK(drawn != drawn_.end(), "source {} of {}", source, drawn_.size());
  return *drawn;
}

int64_t Sampler::epoch_of(const SampleRef& sample) const {
  const Era& era = era_at(drawn_of(sample.source).eras, sample.k);
  return era.epoch + (sample.k - era.k0) / era.windows;
}

double Sampler::epochs(int64_t source) const {
  const Drawn& drawn = drawn_of(source);
  const int64_t taken = state_.sources[drawn.state].taken;
  const Era& era = era_at(drawn.eras, taken);
  return static_cast<double>(era.epoch) + static_cast<double>(taken - era.k0) / static_cast<double>(era.windows);
}

std::vector<SampleRef> fill_rounds(std::span<const SampleRef> step, int64_t slice) {
  RT_CHECK(!step.empty() && slice >= 1, "{} samples in rounds of {}", step.size(), slice);
  std::vector<SampleRef> out(step.begin(), step.end());
  out.resize((step.size() + static_cast<size_t>(slice) - 1) / static_cast<size_t>(slice) * static_cast<size_t>(slice),
             step.front());
  return out;
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
