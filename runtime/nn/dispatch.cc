#include "runtime/nn/dispatch.h"

#include <algorithm>

namespace cairn::nn {

static_assert(sizeof(kernels::GroupRows) == kGroupRowsBytes);

template <typename Real>
Dispatch<Real>::Dispatch(const kernels::Exec<Real>& on, const StageDims& dims, comm::Comm* ep, const Buffers& buffers)
    : on_(on),
      dims_(dims),
      ep_(ep),
      sent_CH_(alone() ? nullptr : buffers.get<Real>(buffer::kMoeSent)),
      sent_numbers_C_(alone() ? nullptr : buffers.get<float>(buffer::kMoeSentNumbers)),
      row_weights_P_(alone() ? nullptr : buffers.get<float>(buffer::kMoeRowWeights)),
      row_dots_P_(alone() ? nullptr : buffers.get<float>(buffer::kMoeRowDots)),
      places_(dims.places_groups && on.places_groups
                  ? buffers.get<int32_t>(buffer::kMoeGroups).template as<kernels::GroupRows>()
                  : nullptr),
      placed_counts_X_(places_ ? buffers.get<float>(buffer::kMoeBalance) : nullptr),
      rows_of_Tk_(buffers.get<int32_t>(buffer::kMoeRowsOf)),
      sent_at_(dims.experts + 1),
      own_counts_(on.stream, dims.experts),
      counts_(on.stream, dims.ep * dims.experts),
      told_(static_cast<size_t>(dims.ep * dims.experts)),
      arrivals_at_(dims.ep * dims.local_experts),
      next_(dims.experts) {
  RT_CHECK(dims.ep == (ep == nullptr ? 1 : ep->size()), "experts over {} ranks in a group of {}", dims.ep,
           ep == nullptr ? 1 : ep->size());
  groups_.reserve(dims.local_experts * dims.expert_sources);
  out_.reserve(dims.experts + dims.ep * dims.local_experts);
  in_.reserve(dims.experts + dims.ep * dims.local_experts);
}

template <typename Real>
Status Dispatch<Real>::begin(DevicePtr<const int32_t> chosen, DevicePtr<int32_t> counts, std::span<int32_t> kept,
                             std::string_view what) {
  const int64_t choices = dims_.rows * dims_.choices;
  if (places_) {
    on_.group_choices({choices, dims_.experts, kExpertRowsAlign}, chosen, places_, placed_counts_X_, rows_of_Tk_);
    return {};
  }
  RT_CHECK(std::ssize(kept) == kept_counts(dims_), "{} counts are kept of {}", kept.size(), kept_counts(dims_));
  on_.count_choices(chosen, choices, own_counts_.room());
  RT_TRY(on_.stream.settle());
  const std::span<const int32_t> own_counts = own_counts_.read();
  std::ranges::copy(own_counts, kept.begin());
  if (!alone()) {
    const DevicePtr<int32_t> own = counts + ep_->rank() * dims_.experts;
    on_.copy_ints(on_.stream.give(own_counts), own, dims_.experts);
    RT_TRY(ep_->all_gather(own, counts, dims_.experts * static_cast<int64_t>(sizeof(int32_t)), what));
    on_.ints_to_host(counts, counts_.room());
    RT_TRY(on_.stream.settle());
    std::ranges::copy(counts_.read(), kept.begin() + dims_.experts);
  }
  place(chosen, kept);
  return {};
}

template <typename Real>
void Dispatch<Real>::begin_again(DevicePtr<const int32_t> chosen, std::span<const int32_t> kept) {
  if (places_) {
    on_.group_choices({dims_.rows * dims_.choices, dims_.experts, kExpertRowsAlign}, chosen, places_, placed_counts_X_,
                      rows_of_Tk_);
    return;
  }
  place(chosen, kept);
}

template <typename Real>
void Dispatch<Real>::place(DevicePtr<const int32_t> chosen, std::span<const int32_t> kept) {
  for (int64_t e = 0; e < dims_.experts; ++e) sent_at_[e + 1] = sent_at_[e] + kept[static_cast<size_t>(e)];
  std::ranges::copy(kept.subspan(static_cast<size_t>(dims_.experts)), told_.begin());
  place_groups();
  // Each expert's rows in the order of tokens.
  for (int64_t e = 0; e < dims_.experts; ++e) next_[e] = alone() ? groups_[e].first : sent_at_[e];
  on_.place_choices(chosen, dims_.rows * dims_.choices, next_, rows_of_Tk_);
}

template <typename Real>
void Dispatch<Real>::place_groups() {
  const int64_t sources = dims_.expert_sources, ranks_of_group = dims_.ep / sources;
  groups_.clear();
  int64_t at = 0;
  for (int64_t e = 0; e < dims_.local_experts; ++e) {
    for (int64_t source = 0; source < sources; ++source) {
      int64_t rows = 0;
      for (int64_t r = source * ranks_of_group; r < (source + 1) * ranks_of_group; ++r) {
        arrivals_at_[r * dims_.local_experts + e] = at + rows;
        rows += alone() ? choices_of(e) : count_of(r, e);
      }
      const int64_t padded = (rows + kExpertRowsAlign - 1) / kExpertRowsAlign * kExpertRowsAlign;
      groups_.push_back({e, source, at, rows, padded});
      at += padded;
    }
  }
  RT_CHECK(at <= dims_.expert_rows, "{} rows of experts, the plan has room for {}", at, dims_.expert_rows);
}

template <typename Real>
template <typename T>
Status Dispatch<Real>::exchange(DevicePtr<T> sent, DevicePtr<T> rows, int64_t width, bool to_experts,
                                std::string_view what) {
  out_.clear();
  in_.clear();
  const auto row_bytes = width * static_cast<int64_t>(sizeof(T));
  const auto add = [&](bool outgoing, int64_t peer, DevicePtr<T> data, int64_t count) {
    outgoing ? out_.push_back(comm::OutPart::of(peer, data, count * row_bytes))
             : in_.push_back(comm::InPart::of(peer, data, count * row_bytes));
  };
  for (int64_t r = 0; r < dims_.ep; ++r) {
    const int64_t first = sent_at_[r * dims_.local_experts], end = sent_at_[(r + 1) * dims_.local_experts];
    add(to_experts, r, sent + first * width, end - first);
    for (int64_t e = 0; e < dims_.local_experts; ++e) {
      add(!to_experts, r, rows + arrivals_at_[r * dims_.local_experts + e] * width, count_of(r, e));
    }
  }
  return ep_->all_to_all(out_, in_, what);
}

template <typename Real>
Status Dispatch<Real>::to_experts(DevicePtr<const Real> tokens_TH, DevicePtr<const float> weights,
                                  DevicePtr<Real> rows_PH, std::string_view what) {
  const int64_t width = dims_.width;
  const DevicePtr<Real> placed = alone() ? rows_PH : sent_CH_;
  on_.rows_to_experts(tokens_TH, rows_of_Tk_, dims_.rows, dims_.choices, width, placed);
  if (weights) on_.scale_expert_rows(placed, rows_of_Tk_, weights, dims_.rows * dims_.choices, width);
  if (!alone()) RT_TRY(exchange(sent_CH_, rows_PH, width, true, what));
  if (places_) on_.clear_padding(places(), dims_.experts, width, rows_PH);
  for (const Group& group : groups_) {
    on_.clear(rows_PH + (group.first + group.filled) * width, (group.rows - group.filled) * width);
  }
  return {};
}

template <typename Real>
Status Dispatch<Real>::to_tokens(DevicePtr<Real> rows_PH, DevicePtr<const float> weights, DevicePtr<Real> tokens_TH,
                                 std::string_view what) {
  if (!alone()) RT_TRY(exchange(sent_CH_, rows_PH, dims_.width, false, what));
  on_.rows_to_tokens(alone() ? rows_PH : sent_CH_, rows_of_Tk_, weights, dims_.rows, dims_.choices, dims_.width,
                     tokens_TH);
  return {};
}

template <typename Real>
Status Dispatch<Real>::dot_and_scale(DevicePtr<Real> a, DevicePtr<Real> b, DevicePtr<const float> weights,
                                     int64_t width, DevicePtr<float> dots, std::string_view what) {
  if (alone()) {
    on_.dot_and_scale_rows(a, b, rows_of_Tk_, weights, dims_.rows, dims_.choices, width, dots);
    return {};
  }
  const int64_t choices = dims_.rows * dims_.choices;
  on_.scatter_floats(weights, rows_of_Tk_, choices, sent_numbers_C_);
  on_.clear_floats(row_weights_P_, used_rows());  // of padding
  RT_TRY(exchange(sent_numbers_C_, row_weights_P_, 1, true, what));
  on_.dot_and_scale_rows(a, b, nullptr, row_weights_P_, used_rows(), 1, width, row_dots_P_);
  RT_TRY(exchange(sent_numbers_C_, row_dots_P_, 1, false, what));
  on_.gather_floats(sent_numbers_C_, rows_of_Tk_, choices, dots);
  return {};
}

template class Dispatch<float>;
template class Dispatch<bf16>;
template class Dispatch<f16>;

}  // namespace cairn::nn
