#include "runtime/cuda/tuning/cuda_tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace cairn::cuda {

CudaTuning::CudaTuning(Context& context, Blas& blas, CudaStream& stream, SumRuns sum_runs, int64_t runs)
    : blas_(blas),
      stream_(stream),
      sum_runs_(sum_runs),
      runs_(runs),
      place_{.card = context.card(), .library = blas.version()} {}

void CudaTuning::time_attention(AttentionWays& ways, int64_t library) {
  attention_ = &ways;
  attention_place_ = {.card = place_.card, .library = library};
}

void CudaTuning::keep(const ChosenProduct& choice, bool uses) {
  if (!products_.emplace(std::pair(choice.place, choice.kind), choice.timed).second) return;
  if (uses && choice.place == place_) blas_.use(choice.kind, choice.timed.choice);
}

Status CudaTuning::keep(const ChosenAttention& choice, bool uses) {
  if (!attentions_.emplace(std::pair(choice.place, choice.kind), choice.timed).second) return {};
  if (!uses || attention_ == nullptr || choice.place != attention_place_ || !attention_->allows(choice.kind.shape)) {
    return {};
  }
  return attention_->use(choice.kind, choice.timed.by);
}

Result<bool> CudaTuning::says_off(std::string_view text) const {
  RT_TRY_SET(const TuningChoices choices, decode_choices(text));
  return choices.off;
}

Status CudaTuning::read(std::string_view text, bool uses) {
  RT_TRY_SET(TuningChoices choices, decode_choices(text));
  for (const ChosenProduct& product : choices.products) keep(product, uses);
  for (const ChosenAttention& attention : choices.attention) RT_TRY(keep(attention, uses));
  layouts_.insert(choices.layouts.begin(), choices.layouts.end());
  attention_layouts_.insert(choices.attention_layouts.begin(), choices.attention_layouts.end());
  for (std::string& other : choices.others) {
    if (std::ranges::find(others_, other) == others_.end()) others_.push_back(std::move(other));
  }
  return {};
}

bool CudaTuning::covers(std::string_view layout) const {
  const std::string name(layout);
  const bool attention = attention_ != nullptr && attention_->allows_any();
  return layouts_.contains({place_, name}) && (!attention || attention_layouts_.contains({attention_place_, name}));
}

namespace {

/// Counts the choices for this place, and names the other places.
template <typename Choices, typename Text>
TuningTopic topic_of(const char* what, const TuningPlace& place, const Choices& choices, const Text& text) {
  TuningTopic out{.what = what, .where = text(place)};
  std::set<std::string> others;
  for (const auto& [of, timed] : choices) {
    if (of.first == place) {
      ++out.choices;
    } else {
      others.insert(text(of.first));
    }
  }
  for (const std::string& other : others) out.elsewhere += (out.elsewhere.empty() ? "" : "; ") + other;
  return out;
}

}  // namespace

std::vector<TuningTopic> CudaTuning::topics() const {
  std::vector<TuningTopic> out = {
      topic_of("products", place_, products_, [](const TuningPlace& place) { return cuda::text(place); })};
  if (attention_ == nullptr || (!attention_->allows_any() && attentions_.empty())) return out;
  out.push_back(topic_of("attention", attention_place_, attentions_,
                         [](const TuningPlace& place) { return attention_text(place); }));
  out.back().chosen = chosen_attention();
  return out;
}

std::string CudaTuning::chosen_attention() const {
  std::string out;
  const AttentionShape* last = nullptr;
  for (const auto& [of, timed] : attentions_) {  // passes of a shape side by side
    const AttentionKind& kind = of.second;
    if (of.first != attention_place_ || !attention_->allows(kind.shape)) continue;
    if (last == nullptr || *last != kind.shape) {
      out += fmt::format("{}{}: ", last == nullptr ? "" : "; ", attention_text(kind.shape));
    } else {
      out += ", ";
    }
    last = &kind.shape;
    out += fmt::format("{} by {}", pass_word(kind.pass), by_word(timed.by));
    const char* before = " (";
    for (const auto& [by, us] : timed.us) {
      out += fmt::format("{}{} {:.1f} us", std::exchange(before, ", "), by_word(by), us);
    }
    if (!timed.us.empty()) out += ")";
  }
  return out;
}

std::vector<std::string> CudaTuning::unchosen() const {
  std::vector<std::string> out;
  for (const ProductKind& kind : blas_.unchosen()) out.push_back(encode_kind(place_, kind));
  if (attention_ == nullptr) return out;
  for (const AttentionKind& kind : attention_->unchosen()) out.push_back(encode_kind(attention_place_, kind));
  return out;
}

Result<std::string> CudaTuning::choose(const std::string& work) {
  std::function<Result<uint64_t>(const void*, int64_t)> sums;
  if (sum_runs_ != nullptr) sums = [this](const void* first, int64_t bytes) { return sum(first, bytes); };
  for (const ProductKind& kind : blas_.unchosen()) {
    if (encode_kind(place_, kind) != work) continue;
    RT_TRY_SET(const TimedProduct timed,
               blas_.time(stream_, kind, stream_.blas_workspace(), {.sum = sums, .runs = runs_}));
    return encode_choice(ChosenProduct{.place = place_, .kind = kind, .timed = timed});
  }
  if (attention_ != nullptr) {
    for (const AttentionKind& kind : attention_->unchosen()) {
      if (encode_kind(attention_place_, kind) != work) continue;
      RT_TRY_SET(TimedAttention timed, attention_->time(stream_, kind, {.sum = sums, .runs = runs_}));
      return encode_choice(ChosenAttention{.place = attention_place_, .kind = kind, .timed = std::move(timed)});
    }
  }
  return Error{ErrorCode::kInternal, fmt::format("no such work was asked for: {}", work)};
}

Status CudaTuning::use(const std::string& choice) {
  RT_TRY_SET(const Choice of, decode_choice(choice));
  if (const auto* const attention = std::get_if<ChosenAttention>(&of)) {
    used_attention_.insert(attention->place);
    return keep(*attention, /*uses=*/true);
  }
  const auto& product = std::get<ChosenProduct>(of);
  used_.insert(product.place);
  keep(product, /*uses=*/true);
  return {};
}

std::string CudaTuning::text(std::string_view layout, bool off) const {
  TuningChoices out{
      .off = off, .products = {}, .attention = {}, .layouts = {}, .attention_layouts = {}, .others = others_};
  for (const auto& [of, timed] : products_) {
    out.products.push_back({.place = of.first, .kind = of.second, .timed = timed});
  }
  for (const auto& [of, timed] : attentions_) {
    out.attention.push_back({.place = of.first, .kind = of.second, .timed = timed});
  }
  const auto covered = [&](std::set<CoveredLayout> layouts, const std::set<TuningPlace>& places) {
    if (!layout.empty()) {
      for (const TuningPlace& place : places) layouts.insert({place, std::string(layout)});
    }
    return std::vector<CoveredLayout>(layouts.begin(), layouts.end());
  };
  std::set<TuningPlace> places = used_, attention_places = used_attention_;
  places.insert(place_);
  if (attention_ != nullptr && attention_->allows_any()) attention_places.insert(attention_place_);
  out.layouts = covered(layouts_, places);
  out.attention_layouts = covered(attention_layouts_, attention_places);
  return encode_choices(out);
}

Result<uint64_t> CudaTuning::sum(const void* first, int64_t bytes) {
  constexpr int64_t kWord = 4, kNumber = sizeof(uint64_t);
  // Words begin at multiples of four bytes; a number of two at either end is left out.
  const auto at = (reinterpret_cast<uintptr_t>(first) + kWord - 1) / kWord * kWord;
  const int64_t words = (reinterpret_cast<intptr_t>(first) + bytes - static_cast<intptr_t>(at)) / kWord;
  // In the kernels' memory: a table of one run, its sum, those of its chunks. A run is as long as the room allows.
  constexpr int64_t kTable = (sizeof(WordRun) + kNumber - 1) / kNumber * kNumber;
  const int64_t most = (stream_.scratch_bytes() - kTable - kNumber) / kNumber * kSumChunkWords;
  uint64_t out = 0;
  for (int64_t done = 0; done < words;) {
    const int64_t count = std::min(words - done, most);
    if (count <= 0) return Error{ErrorCode::kInternal, "no memory for a checksum of a product"};
    auto* const room =
        static_cast<std::byte*>(stream_.scratch(kTable + kNumber * (1 + sum_chunks(count)), "a checksum of a product"));
    if (room == nullptr) return stream_.status().error();
    const WordRun run{.words = reinterpret_cast<const float*>(at) + done, .count = count, .first_chunk = 0};
    auto* const sums = reinterpret_cast<uint64_t*>(room + kTable);
    uint64_t found = 0;
    stream_.copy(room, &run, sizeof(run), kToDevice);  // the host has read it when that returns
    stream_.keep(
        sum_runs_(stream_.handle(), reinterpret_cast<const WordRun*>(room), 1, sum_chunks(count), sums + 1, sums),
        "a checksum of a product");
    stream_.copy(&found, sums, kNumber, kToHost);
    RT_TRY(stream_.settle());
    out = out * 31 + found;
    done += count;
  }
  return out;
}

}  // namespace cairn::cuda
