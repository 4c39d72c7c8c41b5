#include "runtime/data/objective.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "runtime/core/check.h"
#include "runtime/core/random.h"

namespace cairn::data {
namespace {

/// Draws in a row from one key.
class Draws {
 public:
  explicit Draws(uint64_t key) : key_(key) {}
  double uniform() { return uniform_at(key_, next_++); }
  /// Uniform on [low, high].
  int64_t integer(int64_t low, int64_t high) {
    const auto span = static_cast<double>(high - low + 1);
    return std::min(high, low + static_cast<int64_t>(uniform() * span));
  }
  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[integer(0, static_cast<int64_t>(i) - 1)]);
  }

 private:
  uint64_t key_;
  uint64_t next_ = 0;
};

/// The rows of one sequence.
struct Rows {
  std::span<int32_t> inputs, targets, positions, starts, ends;

  Rows part(int64_t first, int64_t count) const {
    return {inputs.subspan(first, count), targets.subspan(first, count), positions.subspan(first, count),
            starts.subspan(first, count), ends.subspan(first, count)};
  }
};

void part_documents(const ObjectiveConfig& objective, const Rows& rows) {
  int32_t start = 0;
  for (size_t t = 0; t < rows.inputs.size(); ++t) {
    const auto at = static_cast<int32_t>(t);
    if (objective.reset_positions) rows.positions[t] = at - start;
    if (objective.reset_attention) rows.starts[t] = start;
    if (rows.inputs[t] != objective.document_end) continue;
    if (!objective.document_loss) rows.targets[t] = kNoTarget;
    start = at + 1;
  }
}

void open_prefix(const Rows& rows, Draws& draws) {
  const auto tokens = std::ssize(rows.inputs);
  const int64_t prefix = draws.integer(1, std::max<int64_t>(1, tokens - 1));
  for (int64_t t = 0; t < tokens; ++t) {
    rows.ends[t] = static_cast<int32_t>(std::max(prefix, t + 1));
    if (t < prefix - 1) rows.targets[t] = kNoTarget;  // the row sees its target
  }
}

/// What a window has in common: part A of `context` rows, and where it begins in the sequence.
void see_context(const Rows& rows, int64_t first, int64_t context) {
  for (int64_t t = 0; t < std::ssize(rows.inputs); ++t) {
    rows.starts[t] = static_cast<int32_t>(first);
    rows.ends[t] = static_cast<int32_t>(first + std::max(context, t + 1));
    if (t < context) rows.targets[t] = kNoTarget;
  }
}

void take_end(const ObjectiveConfig& objective, const Rows& rows, int64_t first, Draws& draws) {
  const std::vector<int32_t> text(rows.inputs.begin(), rows.inputs.end() - 1);
  const auto tokens = std::ssize(text);
  const int64_t taken = std::max<int64_t>(1, draws.integer(tokens / 5, tokens)), kept = tokens - taken;
  rows.inputs[kept] = static_cast<int32_t>(objective.gmask_token);
  rows.inputs[kept + 1] = static_cast<int32_t>(objective.start_token);
  std::copy(text.begin() + kept, text.end() - 1, rows.inputs.begin() + kept + 2);
  std::copy(text.begin() + kept, text.end(), rows.targets.begin() + kept + 1);
  std::iota(rows.positions.begin(), rows.positions.end(), 0);
  see_context(rows, first, kept + 1);
}

/// A span's length: Poisson(3), given that it is 1 to 39.
int64_t span_length(Draws& draws) {
  constexpr double kMean = 3;
  constexpr int kLongest = 39;
  static const std::array<double, kLongest> kUpTo = [] {  // probabilities added up
    std::array<double, kLongest> out{};
    double mass = std::exp(-kMean), sum = 0;
    for (int length = 1; length <= kLongest; ++length) out[length - 1] = sum += mass *= kMean / length;
    for (double& p : out) p /= sum;
    return out;
  }();
  return std::upper_bound(kUpTo.begin(), kUpTo.end() - 1, draws.uniform()) - kUpTo.begin() + 1;
}

/// Lengths of the spans of a window of `tokens` rows: about 0.15 of them, one span alone now and then, and so few that
/// text is left before each span.
std::vector<int64_t> span_lengths(int64_t tokens, Draws& draws) {
  constexpr double kShare = 0.15, kOneSpan = 0.02;
  const bool one = draws.uniform() < kOneSpan;
  std::vector<int64_t> out;
  int64_t sum = 0;
  do {
    const int64_t marks = std::ssize(out) + 1;
    const int64_t room = tokens - 2 * marks - marks - sum;  // its text, and one token between spans
    if (room < 1) break;
    out.push_back(std::min(span_length(draws), room));
    sum += out.back();
  } while (!one && sum < static_cast<int64_t>(kShare * static_cast<double>(tokens)));
  draws.shuffle(out);
  return out;
}

void take_spans(const ObjectiveConfig& objective, const Rows& rows, int64_t first, Draws& draws) {
  const std::vector<int64_t> lengths = span_lengths(std::ssize(rows.inputs), draws);
  const auto spans = std::ssize(lengths);
  const int64_t tokens = std::ssize(rows.inputs) - 2 * spans;
  const int64_t kept = tokens - std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const std::vector<int32_t> text(rows.inputs.begin(), rows.inputs.begin() + tokens);
  std::vector<int64_t> before(spans);  // kept tokens before each span, but for one between spans
  for (int64_t& count : before) count = draws.integer(0, kept - spans + 1);
  std::sort(before.begin(), before.end());

  std::vector<int64_t> begins(spans), places(spans);  // of each span in the text; of its mask in part A
  int64_t read = 0, written = 0;
  for (int64_t s = 0; s < spans; ++s) {
    const int64_t keep = before[s] + s - (written - s);  // of `written`, s are masks
    std::copy_n(text.begin() + read, keep, rows.inputs.begin() + written);
    read += keep, written += keep;
    begins[s] = read, places[s] = written;
    rows.inputs[written++] = static_cast<int32_t>(objective.mask_token);
    read += lengths[s];
  }
  std::copy(text.begin() + read, text.end(), rows.inputs.begin() + written);
  const int64_t context = written + tokens - read;
  std::iota(rows.positions.begin(), rows.positions.begin() + context, 0);

  std::vector<int64_t> order(spans);
  std::iota(order.begin(), order.end(), 0);
  draws.shuffle(order);
  int64_t at = context;
  for (const int64_t s : order) {
    const auto span = text.begin() + begins[s];
    rows.inputs[at] = static_cast<int32_t>(objective.start_token);
    std::copy_n(span, lengths[s], rows.inputs.begin() + at + 1);
    std::copy_n(span, lengths[s], rows.targets.begin() + at);
    rows.targets[at + lengths[s]] = static_cast<int32_t>(objective.end_token);
    std::fill_n(rows.positions.begin() + at, lengths[s] + 1, static_cast<int32_t>(places[s]));
    at += lengths[s] + 1;
  }
  RT_CHECK(at == std::ssize(rows.inputs), "{} of {} rows", at, rows.inputs.size());
  see_context(rows, first, context);
}

void take_away(const ObjectiveConfig& objective, const Rows& rows, Draws& draws) {
  if (draws.uniform() < objective.gmask_share) return take_end(objective, rows, 0, draws);
  const int64_t window = std::ssize(rows.inputs) / objective.mask_windows;
  for (int64_t w = 0; w < objective.mask_windows; ++w) {
    take_spans(objective, rows.part(w * window, window), w * window, draws);
  }
}

}  // namespace

bool changes_rows(const ObjectiveConfig& objective) {
  return objective.kind != ObjectiveConfig::Kind::kNextToken || objective.document_end >= 0;
}

void apply_objective(const ObjectiveConfig& objective, uint64_t seed, int64_t sequence_tokens,
                     std::span<const SampleRef> samples, MicroBatch* batch) {
  if (!changes_rows(objective)) return;
  using Kind = ObjectiveConfig::Kind;
  const size_t total = batch->inputs.size();
  const bool infill = objective.kind == Kind::kInfill, documents = objective.document_end >= 0;
  const bool apart = !batch->apart.empty();  // then load_samples() has filled both
  const auto sized = [&](std::vector<int32_t>& rows, bool used) { rows.resize(used ? total : 0); };
  sized(batch->positions, apart || infill || (documents && objective.reset_positions));
  sized(batch->starts, apart || infill || (documents && objective.reset_attention));
  sized(batch->ends, objective.kind != Kind::kNextToken);
  const int64_t pieces = batch->seq_len / sequence_tokens;
  const uint64_t key = stream_key(seed, "objective");
  for (int64_t i = 0; i < batch->samples; ++i) {
    if (apart && batch->apart[i] != 0) continue;
    const uint64_t of_sample = mix64(key + static_cast<uint64_t>(samples[i].position));
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t first = (i * pieces + p) * sequence_tokens;
      const auto part = [&](std::vector<int32_t>& rows) {
        return rows.empty() ? std::span<int32_t>() : std::span(rows).subspan(first, sequence_tokens);
      };
      const Rows rows{part(batch->inputs), part(batch->targets), part(batch->positions), part(batch->starts),
                      part(batch->ends)};
      Draws draws(mix64(of_sample + static_cast<uint64_t>(p)));
      if (documents) part_documents(objective, rows);
      if (objective.kind == Kind::kPrefix) open_prefix(rows, draws);
      if (infill) take_away(objective, rows, draws);
    }
  }
}

}  // namespace cairn::data
