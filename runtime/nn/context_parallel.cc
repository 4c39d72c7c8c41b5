#include "runtime/nn/context_parallel.h"

namespace cairn::nn {

template <typename Real>
ContextParallel<Real>::ContextParallel(const kernels::Exec<Real>& on, const StageDims& dims, comm::Comm* cp,
                                       const Buffers& buffers)
    : on_(on), dims_(dims), cp_(cp), width_(2 * dims.kv_heads * dims.head_dim) {
  RT_CHECK(dims.cp == (cp == nullptr ? 1 : cp->size()), "tokens over {} ranks in a group of {}", dims.cp,
           cp == nullptr ? 1 : cp->size());
  if (dims.cp == 1) return;
  exchanged_ = buffers.get<Real>(buffer::kCpExchanged);
  if (in_parts()) {
    dkv_sums_ = buffers.get<float>(buffer::kCpDkv);
    return;
  }
  kv_ = buffers.get<Real>(buffer::kCpKv);
  dkv_ = buffers.get<Real>(buffer::kCpDkv);
}

template <typename Real>
void ContextParallel<Real>::reorder(bool to_tokens, DevicePtr<Real> exchanged, DevicePtr<Real> tokens) const {
  const int64_t sequence = dims_.held.tokens, chunk = dims_.tokens / 2, elems = chunk * width_;
  for (int64_t rank = 0; rank < dims_.cp; ++rank) {
    const TokenRuns held = TokenRuns::of_rank(sequence, dims_.cp, rank);
    for (int64_t b = 0; b < dims_.samples; ++b) {
      for (const int64_t begin : {held.first, held.second}) {
        const DevicePtr<Real> at = tokens + (b * sequence + begin) * width_;
        to_tokens ? on_.copy(exchanged, at, elems) : on_.copy(at, exchanged, elems);
        exchanged += elems;
      }
    }
  }
}

template <typename Real>
Status ContextParallel<Real>::gather(DevicePtr<const Real> kv, int64_t stride, DevicePtr<const Real>* all,
                                     std::string_view what) const {
  const DevicePtr<Real> own = exchanged_ + cp_->rank() * dims_.rows * width_;
  on_.copy_rows(kv, stride, own, width_, dims_.rows, width_);
  RT_TRY(cp_->all_gather(own, exchanged_, dims_.rows * width_ * static_cast<int64_t>(sizeof(Real)), what));
  if (!in_parts()) reorder(true, exchanged_, kv_);
  *all = in_parts() ? exchanged_ : kv_;
  return {};
}

template <typename Real>
Status ContextParallel<Real>::reduce(DevicePtr<Real> dkv, int64_t stride, std::string_view what) const {
  if (in_parts()) {
    const int64_t elems = dims_.rows * width_;
    const DevicePtr<float> sums = dkv_sums_ + cp_->rank() * elems;
    RT_TRY(cp_->reduce_scatter(dkv_sums_, sums, elems, DType::kF32, comm::ReduceOp::kTreeSum, what));
    on_.round_rows(sums, width_, dkv, stride, dims_.rows, width_);
    return {};
  }
  reorder(false, exchanged_, dkv_);
  const DevicePtr<Real> own = exchanged_ + cp_->rank() * dims_.rows * width_;
  RT_TRY(cp_->reduce_scatter(exchanged_, own, dims_.rows * width_, DTypeOf<Real>::value, comm::ReduceOp::kSum, what));
  on_.copy_rows(own, width_, dkv, stride, dims_.rows, width_);
  return {};
}

template class ContextParallel<float>;
template class ContextParallel<bf16>;
template class ContextParallel<f16>;

}  // namespace cairn::nn
