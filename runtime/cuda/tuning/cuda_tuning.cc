#include "runtime/cuda/tuning/cuda_tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cairn::cuda {

CudaTuning::CudaTuning(Context& context, Blas& blas, CudaStream& stream, SumRuns sum_runs, int64_t runs)
    : blas_(blas),
      stream_(stream),
      sum_runs_(sum_runs),
      runs_(runs),
      place_{.card = context.card(), .library = blas.version()} {}

void CudaTuning::keep(const ChosenProduct& choice, bool uses) {
  if (!products_.emplace(std::pair(choice.place, choice.kind), choice.timed).second) return;
  if (uses && choice.place == place_) blas_.use(choice.kind, choice.timed.choice);
}

Result<bool> CudaTuning::says_off(std::string_view text) const {
  RT_TRY_SET(const TuningChoices choices, decode_choices(text));
  return choices.off;
}

Status CudaTuning::read(std::string_view text, bool uses) {
  RT_TRY_SET(TuningChoices choices, decode_choices(text));
  for (const ChosenProduct& product : choices.products) keep(product, uses);
  layouts_.insert(choices.layouts.begin(), choices.layouts.end());
  for (std::string& other : choices.others) {
    if (std::ranges::find(others_, other) == others_.end()) others_.push_back(std::move(other));
  }
  return {};
}

int64_t CudaTuning::choices() const {
  return std::ranges::count_if(products_, [&](const auto& one) { return one.first.first == place_; });
}

std::string CudaTuning::elsewhere() const {
  std::set<std::string> places;
  for (const auto& [of, timed] : products_) {
    if (of.first != place_) places.insert(cuda::text(of.first));
  }
  std::string out;
  for (const std::string& place : places) out += (out.empty() ? "" : "; ") + place;
  return out;
}

std::vector<std::string> CudaTuning::unchosen() const {
  std::vector<std::string> out;
  for (const ProductKind& kind : blas_.unchosen()) out.push_back(encode_kind(place_, kind));
  return out;
}

Result<std::string> CudaTuning::choose(const std::string& work) {
  for (const ProductKind& kind : blas_.unchosen()) {
    if (encode_kind(place_, kind) != work) continue;
    ProductTiming how{.sum = {}, .runs = runs_};
    if (sum_runs_ != nullptr) how.sum = [this](const void* first, int64_t bytes) { return sum(first, bytes); };
    RT_TRY_SET(const TimedProduct timed, blas_.time(stream_, kind, stream_.blas_workspace(), how));
    return encode_choice({.place = place_, .kind = kind, .timed = timed});
  }
  return Error{ErrorCode::kInternal, fmt::format("no such product was asked for: {}", work)};
}

Status CudaTuning::use(const std::string& choice) {
  RT_TRY_SET(const ChosenProduct of, decode_choice(choice));
  used_.insert(of.place);
  keep(of, /*uses=*/true);
  return {};
}

std::string CudaTuning::text(std::string_view layout, bool off) const {
  TuningChoices out{.off = off, .products = {}, .layouts = {}, .others = others_};
  for (const auto& [of, timed] : products_) {
    out.products.push_back({.place = of.first, .kind = of.second, .timed = timed});
  }
  std::set<CoveredLayout> layouts = layouts_;
  if (!layout.empty()) {
    layouts.insert({place_, std::string(layout)});
    for (const TuningPlace& place : used_) layouts.insert({place, std::string(layout)});
  }
  out.layouts.assign(layouts.begin(), layouts.end());
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
