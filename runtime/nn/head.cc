#include "runtime/nn/head.h"

#include <algorithm>
#include <utility>

#include "runtime/nn/tree_sum.h"

namespace cairn::nn {

template <typename Real>
Head<Real>::Head(const Parameters<Real>& parameters, const ModelConfig& model, const std::string& norm, double z_loss,
                 const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                 const Buffers& buffers)
    : on_(parameters.on()),
      dims_(dims),
      project_{parameters.get_optional("head.project_out.weight"), {}, dims.embed, dims.width, &on_},
      projection_{model.tied_embeddings ? parameters.table_at_end() : parameters.get("head.weight"),
                  parameters.get_optional("head.bias"), dims.vocab, dims.embed, &on_},
      logit_scale_(static_cast<float>(model.logit_scale)),
      logit_cap_(static_cast<float>(model.logit_cap)),
      tp_(tp.with_width(dims.embed)),
      scratch_(scratch),
      logits_(buffers.get<Real>(buffer::kHeadLogits)),
      local_max_(buffers.copies<float>(buffer::kHeadLocalMax).first),
      part_sums_(buffers.copies<float>(buffer::kHeadPartSums).first),
      scale_(buffers.get<float>(buffer::kHeadScale)),
      weight_sums_(buffers.copies<float>(buffer::kHeadWeightSums).first),
      z_loss_(static_cast<float>(z_loss)) {
  if (model.final_norm && !model.top_query) norm_.emplace(parameters, norm, model);
}

template <typename Real>
void Head<Real>::norm_rows(const SavedHead<Real>& saved, DevicePtr<Real> out_RH) const {
  if (norm_) {
    norm_->forward(saved.input_RH, out_RH, scratch_.stats, dims_.local_rows);
  } else {
    on_.copy(saved.input_RH, out_RH, dims_.local_rows * dims_.width);
  }
}

template <typename Real>
Status Head<Real>::input_rows(const SavedHead<Real>& saved) const {
  DevicePtr<Real> rows_RE = tp_.local(scratch_.rows_TH);
  norm_rows(saved, project_.weight ? scratch_.partial_TH : rows_RE);
  if (project_.weight) project_.forward(scratch_.partial_TH, rows_RE, dims_.embed, dims_.local_rows);
  if (logit_scale_ != 1.0f) on_.scale(rows_RE, logit_scale_, dims_.local_rows * dims_.embed);
  return tp_.gather(scratch_.rows_TH, "head.in");
}

template <typename Real>
void Head<Real>::input_gradient(const SavedHead<Real>& saved, DevicePtr<Real> dinput_RE,
                                DevicePtr<const Real> dnormed_also_RH) {
  const StageDims& d = dims_;
  if (logit_scale_ != 1.0f) on_.scale(dinput_RE, logit_scale_, d.local_rows * d.embed);
  DevicePtr<Real> dnormed_RH = dinput_RE;
  if (project_.weight) {
    DevicePtr<Real> scratch_RH = scratch_.rows_TH;  // first the norm's output again, then its gradient
    norm_rows(saved, scratch_RH);
    project_.backward_weight(dinput_RE, d.embed, scratch_RH, d.local_rows);
    dnormed_RH = scratch_RH;
    project_.backward_input(dinput_RE, d.embed, dnormed_RH, false, d.local_rows);
  }
  if (dnormed_also_RH) on_.add(dnormed_RH, dnormed_also_RH, dnormed_RH, d.local_rows * d.width);
  if (norm_) {
    norm_->backward(dnormed_RH, saved.input_RH, scratch_.stats, scratch_.dresidual_RH, d.local_rows);
  } else {
    on_.copy(dnormed_RH, scratch_.dresidual_RH, d.local_rows * d.width);
  }
}

template <typename Real>
void Head<Real>::compute_logits(int64_t begin, int64_t count) const {
  projection_.forward(scratch_.rows_TH + begin * dims_.embed, logits_, dims_.vocab, count);
  if (logit_cap_ > 0) on_.cap(logits_, logit_cap_, count * dims_.vocab);
}

template <typename Real>
void Head<Real>::weight_gradient(DevicePtr<const Real> dlogits, int64_t begin, int64_t count,
                                 DevicePtr<float> sum) const {
  const StageDims& d = dims_;
  const DevicePtr<const Real> x = scratch_.rows_TH + begin * d.embed;
  if (d.all_token_parts == 1) {
    if (projection_.bias) on_.bias_backward(dlogits, projection_.bias.grad, count, d.vocab, TreeParts{});
    return projection_.backward_weight(dlogits, d.vocab, x, count);
  }
  const int64_t part_rows = d.rows / d.held.parts, parts = count / part_rows;
  if (sum) {
    projection_.weight_sum(dlogits, d.vocab, x, count, parts, sum);
  } else {
    projection_.backward_weight(dlogits, d.vocab, x, count, parts);
  }
  if (!projection_.bias) return;
  for (int64_t part = 0; part < parts; ++part) {
    const DevicePtr<float> bias = scratch_.stats.parts.sums + (begin / part_rows + part) * d.vocab;
    on_.clear_floats(bias, d.vocab);
    on_.bias_backward(dlogits + part * part_rows * d.vocab, bias, part_rows, d.vocab, TreeParts{});
  }
}

template <typename Real>
Status Head<Real>::join_parts(const SavedHead<Real>& saved, DevicePtr<float> max_PT, DevicePtr<float> sums_PT) const {
  const StageDims& d = dims_;
  const int64_t part_rows = d.vocab / d.parts, valid_rows = projection_.weight.valid_rows;
  on_.join_maxima(max_PT, d.parts, d.rows, saved.max_T);
  comm::Comm& comm = tp_.comm();
  if (comm.size() > 1) {
    RT_TRY(comm.all_reduce(saved.max_T, d.rows, DType::kF32, comm::ReduceOp::kMax, "head.max"));
  }
  const int64_t filled = std::min(d.parts, (valid_rows + part_rows - 1) / part_rows);  // the others: padding only
  on_.rescale_sums(max_PT, saved.max_T, d.parts, filled, d.rows, sums_PT);
  join_sums(on_, sums_PT, d.parts, d.rows);
  if (sums_PT != saved.sum_exp_T) on_.copy_floats(sums_PT, saved.sum_exp_T, d.rows);
  if (comm.size() > 1) {
    RT_TRY(comm.all_reduce(saved.sum_exp_T, 2 * d.rows, DType::kF32, tp_.sum_op(), "head.sums"));
  }
  return {};
}

// On a CPU two visits cost the same, and forward() has the losses sooner.
template <typename Real>
bool Head<Real>::in_one_visit(const LossRows& of) const {
  return by_backward_ && !of.weights_T && on_.stream.device().kind != DeviceKind::kCpu && !local_max_ &&
         dims_.logit_rows == dims_.rows && logit_cap_ == 0;
}

template <typename Real>
Status Head<Real>::forward(const SavedHead<Real>& saved, const LossRows& of) {
  const StageDims& d = dims_;
  const Parameter<Real>& vocab = projection_.weight;
  const DevicePtr<float> max_PT = local_max_ ? local_max_ : saved.max_T;
  const DevicePtr<float> sums_PT = part_sums_ ? part_sums_ : saved.sum_exp_T;
  const DevicePtr<float> target_T = saved.loss_T;
  const int64_t part_rows = d.vocab / d.parts;
  held_ = nullptr;
  RT_TRY(input_rows(saved));
  if (in_one_visit(of)) {
    compute_logits(0, d.rows);
    held_ = saved.input_RH;
    return {};
  }
  on_.clear_floats(target_T, d.rows);
  for (int64_t begin = 0; begin < d.rows; begin += d.logit_rows) {
    const int64_t count = std::min(d.logit_rows, d.rows - begin);
    compute_logits(begin, count);
    for (int64_t part = 0; part < d.parts; ++part) {
      const DevicePtr<const Real> logits = logits_ + part * part_rows;
      const int64_t valid = std::clamp<int64_t>(vocab.valid_rows - part * part_rows, 0, part_rows);
      const int64_t at = part * d.rows + begin;
      on_.row_sums({count, d.vocab, valid, vocab.first_row + part * part_rows, of.targets_T + begin}, logits,
                   max_PT + at, sums_PT + at, target_T + begin);
    }
  }
  if (d.logit_rows == d.rows) held_ = saved.input_RH;

  // The sums were taken against each part's own maximum, so one pass over the logits was enough.
  if (local_max_) RT_TRY(join_parts(saved, max_PT, sums_PT));
  on_.row_losses(of.targets_T, saved.max_T, saved.sum_exp_T, d.rows, target_T);
  return {};
}

template <typename Real>
Status Head<Real>::backward(const SavedHead<Real>& saved, const LossRows& of, float loss_scale,
                            DevicePtr<const Real> dnormed_RH) {
  const StageDims& d = dims_;
  const Parameter<Real>& vocab = projection_.weight;
  const bool once = in_one_visit(of);
  if (!once) on_.row_scales(of.targets_T, of.weights_T, loss_scale, d.rows, scale_);
  const bool held = held_ == saved.input_RH;
  held_ = nullptr;  // overwritten below
  RT_TRY(input_rows(saved));
  const auto backward_rows = [&](int64_t begin, DevicePtr<float> weight_sum) {
    const int64_t count = std::min(d.logit_rows, d.rows - begin);
    if (!held) compute_logits(begin, count);
    DevicePtr<Real> dlogits = logits_;
    const kernels::LogitRows rows{count, d.vocab, vocab.valid_rows, vocab.first_row, of.targets_T + begin};
    if (once) {
      on_.cross_entropy(rows, dlogits, loss_scale, z_loss_, saved.max_T, saved.sum_exp_T, scale_, saved.loss_T);
    } else {
      on_.cross_entropy_backward(rows, dlogits, saved.max_T + begin, saved.sum_exp_T + begin, scale_ + begin, z_loss_,
                                 logit_cap_);
    }
    weight_gradient(dlogits, begin, count, weight_sum);
    projection_.backward_input_partial(dlogits, d.vocab, tp_.partial(scratch_.partial_TH, begin), count);
  };
  if (weight_sums_) {
    const int64_t elems = d.vocab * d.embed;
    const DevicePtr<const float> sum =
        tree_sum(on_, {d.rows / d.logit_rows, weight_sums_}, elems,
                 [&](int64_t block, DevicePtr<float> part) { backward_rows(block * d.logit_rows, part); });
    if (vocab.unwritten != nullptr && std::exchange(*vocab.unwritten, 0) != 0) on_.clear_floats(vocab.grad, elems);
    on_.add_to(vocab.grad, sum, elems);
  } else {
    for (int64_t begin = 0; begin < d.rows; begin += d.logit_rows) backward_rows(begin, nullptr);
  }
  if (projection_.bias && d.all_token_parts > 1) {
    const DevicePtr<float> sums = scratch_.stats.parts.sums;
    join_sums(on_, sums, d.held.parts, d.vocab);
    on_.add_to(projection_.bias.grad, sums, d.vocab);
  }
  RT_TRY(tp_.reduce_sum(scratch_.partial_TH, "head.din"));
  input_gradient(saved, tp_.local(scratch_.partial_TH), dnormed_RH);
  return {};
}

template <typename Real>
Status Head<Real>::logits(const SavedHead<Real>& saved, int64_t first, int64_t wanted, std::span<float> out) {
  const StageDims& d = dims_;
  const int64_t vocab = projection_.weight.valid_rows;
  const bool held = held_ == saved.input_RH;
  if (!held) RT_TRY(input_rows(saved));
  for (int64_t done = 0; done < wanted;) {
    const int64_t count = std::min(d.logit_rows, wanted - done);
    if (!held) {
      held_ = nullptr;
      compute_logits(first + done, count);
    }
    on_.rows_to_host(logits_ + (held ? first + done : 0) * d.vocab, d.vocab, count, vocab,
                     out.subspan(static_cast<size_t>(done * vocab), static_cast<size_t>(count * vocab)));
    done += count;
  }
  return on_.stream.settle();
}

template class Head<float>;
template class Head<bf16>;
template class Head<f16>;

}  // namespace cairn::nn
