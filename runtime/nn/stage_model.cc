#include "runtime/nn/stage_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <variant>
#include <vector>

#include "runtime/nn/attention.h"
#include "runtime/nn/embedding.h"
#include "runtime/nn/head.h"
#include "runtime/nn/mlp.h"
#include "runtime/nn/moe.h"
#include "runtime/nn/mtp.h"
#include "runtime/nn/rotary.h"
#include "runtime/nn/rounded.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/telemetry/trace.h"

namespace cairn::nn {
namespace {

using telemetry::TraceScope;

template <typename Real>
struct Layer {
  Attention<Real> attention;
  std::variant<Mlp<Real>, Moe<Real>> mlp;
};

template <typename Real>
struct SavedLayer {
  SavedAttention<Real> attention;
  SavedMlp<Real> mlp;
  SavedMoe<Real> moe;  // in its place
};

/// Where a layer keeps what its forward leaves, by how long it is needed (runtime/plan/activations.h).
template <typename Real>
struct LayerBuffers {
  /// One of the three: a copy for each micro-batch in flight, one for each between the halves of its backward, or one
  /// for all layers. None: the model has no such buffer.
  template <typename T>
  struct Kept {
    Copies<T> kept;
    bool until_late = false;
    Copies<T> shared;
    DevicePtr<T> at(int64_t slot, int64_t late) const {
      if (until_late ? late >= 0 : static_cast<bool>(kept)) return kept.at(until_late ? late : slot);
      return shared ? shared.at(0) : DevicePtr<T>();
    }
  };
  RecomputeMode mode = RecomputeMode::kNone;
  Copies<Real> input;        // of the layer; of this rank's part of it when distributed
  Copies<Real> whole_input;  // shared; only when distributed
  Kept<Real> qk, qkv, latent, out, attn_post, attn_normed, mlp_input, mlp_post, mlp_normed, pre, moe_pre, shared_pre;
  Kept<float> logsumexp, attn_stats, attn_post_stats, mlp_stats, mlp_post_stats, probabilities, weights, log_sums,
      shared_gate;
  Kept<int32_t> chosen, counts;
  Copies<Real> attn_dlatent, attn_dout, mlp_dout, mlp_dpre;  // for each micro-batch between the halves of its backward
  DevicePtr<Real> output;  // shared: what a layer that is computed again puts out, for nobody
};

/// Of a module that predicts a further token, what one micro-batch leaves for its backward pass; its layer's is with
/// the others.
template <typename Real>
struct SavedModule {
  DevicePtr<Real> embedded_RH;
  SavedHead<Real> head;
  TokensAhead tokens;
};

/// The two ends of such a module.
template <typename Real>
struct Module {
  MtpInput<Real> input;
  Head<Real> head;
};

template <typename Real>
struct Slot {
  SavedEmbedding<Real> embedding;          // first stage only
  SavedHead<Real> head;                    // last stage only
  std::vector<SavedModule<Real>> modules;  // there too
  DevicePtr<Real> final_norm_input_RH;     // last stage with a top query layer
  std::vector<uint64_t> dropout_keys;      // [B]
  bool drops = false;
  std::vector<int32_t> positions, starts, ends;  // [T] where `rows` says so
  std::vector<float> weights;                    // [T] too
  std::vector<int64_t> cache_rows;               // [T] of a cached pass
  SequenceRows rows;                             // views of them
  std::unique_ptr<int32_t[]> host_counts;        // [layers, Dispatch::kept_counts()], where there are experts
  /// [X] of the layers up to here, in the backward of all; on the device where that places experts' rows. None: they
  /// are not counted.
  std::vector<float> choices;
  DevicePtr<float> placed_choices;
};

/// Errors: kInvalidInput naming the first id outside [least, vocab).
Status check_ids(std::string_view what, const int32_t* ids, int64_t count, int64_t vocab, int32_t least = 0) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < least || ids[i] >= vocab) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("{} {} at position {} of the micro-batch is not in [0, model.vocab = {}); was the data "
                               "tokenized for another vocabulary?",
                               what, ids[i], i, vocab)};
    }
  }
  return {};
}

template <typename Real>
class Model final : public StageModel {
 public:
  Model(Stream& stream, const Plan& plan, const RankPlan& rank, const Chunk& chunk, const comm::RankGroups& groups,
        DevicePtr<const Real> weights, DevicePtr<float> grads, const Buffers& buffers, UseListener* listener)
      : on_(kernels::exec_on<Real>(stream)),
        dims_(stage_dims(plan, rank)),
        vocab_(plan.recipe.model.vocab),
        trains_(static_cast<bool>(grads)),
        parallel_(is_parallel(plan.recipe.model.block)),
        shares_norm_(plan.recipe.model.block == BlockKind::kParallelShared),
        counts_choices_(balances_over_layers(plan.recipe.model)),
        first_layer_(chunk.stage.first_layer),
        listener_(listener),
        tp_(on_, *groups.tp, dims_, plan.recipe.mesh.sequence_parallel,
            buffers.copies<float>(buffer::kScratchSums).first),
        cp_(on_, dims_, groups.cp, buffers) {
    const ModelConfig& model = plan.recipe.model;
    const OptimizerConfig& optimizer = plan.recipe.optimizer;
    const Parameters<Real> parameters(on_, plan, rank, weights, grads,
                                      listener == nullptr ? std::span<uint8_t>() : listener->unwritten());
    set_scratch(model, buffers);
    for (int64_t layer = chunk.stage.first_layer; layer < chunk.stage.end_layer; ++layer) {
      if (has_experts(model, layer) && !dispatch_) dispatch_.emplace(on_, dims_, groups.ep, buffers);
    }
    const int64_t modules = chunk.stage.head ? plan.mtp_depth() : 0;
    if (modules > 0 && has_experts(model, model.layers) && !dispatch_)
      dispatch_.emplace(on_, dims_, groups.ep, buffers);
    if (chunk.stage.embedding)
      embedding_.emplace(parameters, model, optimizer.embedding_gradient, dims_, tp_, scratch_);
    const auto add_layer = [&](int64_t layer, int64_t late) {
      layers_.push_back({Attention<Real>(parameters, model, dims_, layer, tp_, cp_, scratch_),
                         make_mlp(parameters, model, layer, buffers)});
      buffers_.push_back(layer_buffers(plan, chunk, layer, late, buffers));
    };
    for (int64_t layer = chunk.stage.first_layer; layer < chunk.stage.end_layer; ++layer) add_layer(layer, chunk.late);
    body_layers_ = layers_.size();
    if (chunk.stage.head && model.top_query) {
      final_norm_.emplace(parameters, "final_norm", model);
      add_layer(model.layers, 0);
    }
    if (chunk.stage.head)
      head_.emplace(parameters, model, "final_norm", optimizer.z_loss, dims_, tp_, scratch_, buffers);
    for (int64_t k = 0; k < modules; ++k) {
      const std::string prefix = layer_prefix(model, model.layers + k);
      modules_.push_back({MtpInput<Real>(parameters, model, prefix, dims_, tp_, scratch_, buffers),
                          Head<Real>(parameters, model, prefix + "norm", 0, dims_, tp_, scratch_, buffers)});
      add_layer(model.layers + k, 0);
    }
    module_loss_ = modules > 0 ? static_cast<float>(model.mtp.loss / static_cast<double>(modules)) : 0;
    if (modules > 0) dhidden_RH_ = buffers.get<Real>(buffer::kMtpDhidden);
    for (int64_t slot = 0; slot < chunk.in_flight; ++slot)
      slots_.push_back(make_slot(model, chunk.stage, buffers, slot));
  }

  void set_dropout_keys(int64_t slot, std::span<const uint64_t> keys) override {
    Slot<Real>& saved = slots_.at(slot);
    RT_CHECK(keys.empty() || std::ssize(keys) == dims_.samples, "{} keys for {} samples", keys.size(), dims_.samples);
    saved.drops = !keys.empty();
    std::copy(keys.begin(), keys.end(), saved.dropout_keys.begin());
  }

  void set_sequences(int64_t slot, const SequenceRows& rows) override {
    Slot<Real>& saved = slots_.at(slot);
    const auto keep = [&]<typename Number>(std::span<const Number> given, int64_t count, std::vector<Number>& kept) {
      RT_CHECK(given.empty() || std::ssize(given) == count, "{} of {} rows", given.size(), count);
      kept.assign(given.begin(), given.end());
      return std::span<const Number>(kept);
    };
    saved.rows = {keep(rows.positions, dims_.rows, saved.positions),
                  keep(rows.starts, dims_.samples * dims_.held.tokens, saved.starts),
                  keep(rows.ends, dims_.rows, saved.ends), keep(rows.weights, dims_.rows, saved.weights)};
    for (const int32_t position : saved.positions) {
      RT_CHECK(position >= 0 && position < dims_.positions, "position {} of {}", position, dims_.positions);
    }
  }

  Status forward(int64_t slot, const int32_t* tokens, const int32_t* targets, DevicePtr<const void> input,
                 DevicePtr<void> output) override {
    use_slot(slot);
    DevicePtr<Real> first_RH = input_place(0, slot);
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
      RT_TRY(use(kEmbeddingLayer, Pass::kForward,
                 [&] { return embedding_->forward(slot_at(slot).embedding, give(tokens), first_RH); }));
    } else {
      RT_CHECK(static_cast<bool>(input), "a later stage needs an input");
      on_.copy(input.template as<const Real>(), first_RH, stream_elems());
    }
    if (embedding_) clear_choices(slot);
    if (!embedding_) RT_TRY(take_choices(slot, input));
    if (head_) {
      RT_CHECK(targets != nullptr, "the last stage needs targets");
      RT_TRY(check_ids("target", targets, dims_.rows, vocab_, kNoTarget));
      RT_CHECK(tokens != nullptr || modules_.empty(), "modules that predict further tokens read tokens");
    } else {
      RT_CHECK(static_cast<bool>(output), "an earlier stage needs an output");
    }

    RT_TRY(forward_layers(slot, head_ ? body_output(slot) : output.template as<Real>()));
    if (!head_) {
      give_choices(slot, output);
      return {};
    }
    return use(kHeadLayer, Pass::kForward, [&]() -> Status {
      RT_TRY(forward_top_query(slot));
      {
        const TraceScope scope("compute", "head");
        RT_TRY(with_logits(*head_).forward(slot_at(slot).head, loss_rows_of(slot, targets)));
      }
      for (size_t k = 0; k < modules_.size(); ++k) RT_TRY(forward_module(k, slot, tokens, targets));
      return {};
    });
  }

  Status forward_cached(const int32_t* tokens, const CachedRows& rows) override {
    RT_CHECK(embedding_ && head_ && !trains_ && tp_.comm().size() == 1, "generation needs a whole model on one rank");
    RT_CHECK(std::ssize(rows.place) == dims_.rows && std::ssize(rows.sequence) == dims_.rows, "{} rows of {}",
             rows.place.size(), dims_.rows);
    RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
    use_slot(0);
    CachedRows placed = rows;
    place_cached(&placed);
    Status done = embedding_->forward(slot_at(0).embedding, give(tokens), input_place(0, 0));
    if (done.ok()) done = forward_layers(0, body_output(0));
    if (done.ok()) done = forward_top_query(0);
    scratch_.cached = nullptr;
    head_->forget();
    return done;
  }

  Status cached_logits(int64_t first, int64_t count, std::span<float> out) override {
    RT_CHECK(first >= 0 && count >= 0 && first + count <= dims_.rows, "logits of rows [{}, +{})", first, count);
    RT_CHECK(std::ssize(out) == count * vocab_, "logits [{}, {}] do not fit {} floats", count, vocab_, out.size());
    return head_->logits(slot_at(0).head, first, count, out);
  }

  Status backward(int64_t slot, const int32_t* tokens, const int32_t* targets, DevicePtr<const void> doutput,
                  DevicePtr<void> dinput, float loss_scale) override {
    return backward_input(slot, -1, tokens, targets, doutput, dinput, loss_scale);
  }

  Status backward_input(int64_t slot, int64_t late, const int32_t* tokens, const int32_t* targets,
                        DevicePtr<const void> doutput, DevicePtr<void> dinput, float loss_scale) override {
    RT_CHECK(trains_, "backward of a model made without gradients");
    use_slot(slot);
    if (head_) {
      RT_CHECK(targets != nullptr, "the last stage needs targets");
      if (cp_.on()) RT_TRY(add_choices_over_cp(slot));  // a micro-batch's rows lie on all of them
      RT_TRY(use(kHeadLayer, Pass::kBackward, [&]() -> Status {
        DevicePtr<const Real> dhidden_RH;
        for (size_t k = modules_.size(); k-- > 0;) {
          RT_TRY(backward_module(k, slot, dhidden_RH, loss_scale));
          dhidden_RH = dhidden_RH_;
        }
        {
          const TraceScope scope("compute", "head backward");
          RT_TRY(with_logits(*head_).backward(slot_at(slot).head, loss_rows_of(slot, targets), loss_scale, dhidden_RH));
        }
        return backward_top_query(slot, loss_scale);
      }));
    } else {
      RT_CHECK(static_cast<bool>(doutput), "an earlier stage needs the gradient of its output");
      on_.copy(doutput.template as<const Real>(), scratch_.dresidual_RH, stream_elems());
      RT_TRY(take_choices(slot, doutput));
    }
    for (size_t i = body_layers_; i-- > 0;) {
      const Pass pass = late < 0 ? Pass::kBackward : Pass::kBackwardInput;
      RT_TRY(use(number_of(i), pass, [&] { return layer_backward(i, slot, late, loss_scale); }));
    }
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      return use(kEmbeddingLayer, Pass::kBackward,
                 [&] { return embedding_->backward(slot_at(slot).embedding, give(tokens)); });
    }
    RT_CHECK(static_cast<bool>(dinput), "a later stage needs a place for the gradient of its input");
    on_.copy(scratch_.dresidual_RH, dinput.template as<Real>(), stream_elems());
    give_choices(slot, dinput);
    return {};
  }

  Status backward_weight(int64_t slot, int64_t late) override {
    use_slot(slot);
    for (size_t i = body_layers_; i-- > 0;) {
      RT_TRY(use(number_of(i), Pass::kBackward, [&]() -> Status {
        const SavedLayer<Real> saved = saved_layer(i, slot, late);
        if (buffers_[i].whole_input) RT_TRY(gather_input(i, slot));
        if (const Mlp<Real>* mlp = std::get_if<Mlp<Real>>(&layers_[i].mlp)) {  // experts' backwards are not split
          const TraceScope scope("compute", "mlp weights", {.layer = number_of(i)});
          RT_TRY(mlp->backward_weight(saved.mlp, late_mlp_at(i, late)));
        }
        const TraceScope scope("compute", "attention weights", {.layer = number_of(i)});
        return layers_[i].attention.backward_weight(saved.attention, buffers_[i].attn_dout.at(late));
      }));
    }
    return {};
  }

  void leave_losses(bool by_backward) override {
    if (head_) head_->leave_losses(by_backward);
    for (Module<Real>& module : modules_) module.head.leave_losses(by_backward);
  }

  void token_losses(int64_t slot, std::span<float> losses) const override {
    RT_CHECK(head_.has_value(), "losses are on the last stage");
    RT_CHECK(std::ssize(losses) == loss_rows(), "{} losses of {} rows", losses.size(), loss_rows());
    const Slot<Real>& saved = slot_at(slot);
    const auto rows = static_cast<size_t>(dims_.rows);
    on_.floats_to_host(saved.head.loss_T, losses.first(rows));
    for (size_t k = 0; k < saved.modules.size(); ++k) {
      on_.floats_to_host(saved.modules[k].head.loss_T, losses.subspan((k + 1) * rows, rows));
    }
  }

  void note_ruined_losses(int64_t slot, bool first, DevicePtr<double> found) const override {
    const Slot<Real>& saved = slot_at(slot);
    on_.note_not_finite(saved.head.loss_T, dims_.rows, first, found);
    for (const auto& module : saved.modules) on_.note_not_finite(module.head.loss_T, dims_.rows, false, found);
  }

  Status logits(int64_t slot, std::span<float> out) override {
    RT_CHECK(head_.has_value(), "logits are on the last stage");
    if (tp_.comm().size() != 1) {
      return Error{ErrorCode::kUnsupported,
                   fmt::format("whole logits need mesh.tp = 1, this model has {}", tp_.comm().size())};
    }
    RT_CHECK(static_cast<int64_t>(out.size()) == dims_.rows * vocab_, "logits [{}, {}] do not fit {} floats",
             dims_.rows, vocab_, out.size());
    return head_->logits(slot_at(slot).head, 0, dims_.rows, out);
  }

  void note_max_scores(DevicePtr<float> scores) override {
    scratch_.scored_heads = dims_.heads * tp_.comm().size();
    scratch_.max_scores = scores + tp_.comm().rank() * dims_.heads;
  }

  int64_t rows() const override { return dims_.rows; }
  int64_t loss_rows() const override { return dims_.rows * (1 + std::ssize(modules_)); }
  int64_t boundary_bytes() const override {
    return choices_at() + (counts_choices_ ? dims_.experts * static_cast<int64_t>(sizeof(float)) : 0);
  }

 private:
  /// Where the choices stand in a boundary tensor: behind its rows.
  int64_t choices_at() const { return stream_elems() * static_cast<int64_t>(sizeof(Real)); }
  void clear_choices(int64_t slot) {
    std::ranges::fill(slots_[slot].choices, 0.0f);
    if (slots_[slot].placed_choices) on_.clear_floats(slots_[slot].placed_choices, dims_.experts);
  }
  void give_choices(int64_t slot, DevicePtr<void> boundary) const {
    const Slot<Real>& of = slots_[slot];
    if (of.placed_choices) on_.copy_floats(of.placed_choices, choices_of(boundary), dims_.experts);
    if (of.choices.empty()) return;
    on_.copy_floats(on_.stream.give(std::span<const float>(of.choices)), choices_of(boundary), dims_.experts);
  }
  Status take_choices(int64_t slot, DevicePtr<const void> boundary) {
    Slot<Real>& of = slots_[slot];
    if (of.placed_choices) on_.copy_floats(choices_of(boundary), of.placed_choices, dims_.experts);
    if (of.choices.empty()) return {};
    on_.floats_to_host(choices_of(boundary), of.choices);
    return on_.stream.settle();
  }
  Status add_choices_over_cp(int64_t slot) {
    Slot<Real>& of = slots_[slot];
    const DevicePtr<float> choices = of.placed_choices ? of.placed_choices : DevicePtr<float>(of.choices.data());
    if (!of.placed_choices && of.choices.empty()) return {};
    return cp_.comm().all_reduce(choices, dims_.experts, DType::kF32, comm::ReduceOp::kSum, "choices of experts");
  }
  template <typename Void>
  auto choices_of(DevicePtr<Void> boundary) const {
    using Float = std::conditional_t<std::is_const_v<Void>, const float, float>;
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    return (boundary.template as<Byte>() + choices_at()).template as<Float>();
  }

  /// Ids of a micro-batch for the device.
  DevicePtr<const int32_t> give(const int32_t* ids) const {
    return on_.stream.give(std::span<const int32_t>(ids, static_cast<size_t>(dims_.rows)));
  }
  /// Numbers of the host for the device; null when there are none.
  template <typename T>
  DevicePtr<const T> give_some(std::span<const T> numbers) const {
    return numbers.empty() ? nullptr : on_.stream.give(numbers);
  }

  LossRows loss_rows_of(int64_t slot, const int32_t* targets) const {
    return {give(targets), give_some(slot_at(slot).rows.weights)};
  }

  /// The rows of a cached pass are those at work.
  void place_cached(CachedRows* rows) {
    Slot<Real>& slot = slots_[0];
    slot.positions.clear();
    slot.cache_rows.clear();
    for (int64_t r = 0; r < dims_.rows; ++r) {
      slot.positions.push_back(std::max(0, rows->position_of(r)));  // of padding any
      slot.cache_rows.push_back(rows->place[r] < 0 ? -1 : rows->sequence[r] * rows->cache->capacity + rows->place[r]);
    }
    rows->cache_rows = on_.stream.give(std::span<const int64_t>(slot.cache_rows));
    scratch_.dropout_keys = nullptr;
    scratch_.positions = on_.stream.give(std::span<const int32_t>(slot.positions));
    scratch_.starts = nullptr;
    scratch_.ends = give_some(rows->ends);
    scratch_.cached = rows;
  }

  /// The layers of the stage, from the first one's input to `output_RH`.
  Status forward_layers(int64_t slot, DevicePtr<Real> output_RH) {
    for (size_t i = 0; i < body_layers_; ++i) {
      // A distributed input stands where the next one will: attention is done with it by then, but in parallel blocks.
      DevicePtr<Real> next_RH = i + 1 < body_layers_ ? input_place(i + 1, slot) : output_RH;
      const bool in_place = parallel_ && next_RH == input_place(i, slot);
      DevicePtr<Real> out_RH = in_place ? buffers_[i].output : next_RH;
      RT_TRY(use(number_of(i), Pass::kForward, [&] { return layer_forward(i, slot, out_RH); }));
      if (in_place) on_.copy(out_RH, next_RH, stream_elems());
    }
    return {};
  }

  Status layer_forward(size_t i, int64_t slot, DevicePtr<Real> out_RH) {
    const SavedLayer<Real> saved = saved_layer(i, slot, -1);
    if (buffers_[i].whole_input) keep_own_part(i, slot);
    DevicePtr<Real> between_RH = parallel_ ? out_RH : saved.mlp.residual.input_RH;
    {
      const TraceScope scope("compute", "attention", {.layer = number_of(i)});
      RT_TRY(layers_[i].attention.forward(saved.attention, between_RH));
    }
    const TraceScope scope("compute", "mlp", {.layer = number_of(i)});
    if (const Moe<Real>* moe = std::get_if<Moe<Real>>(&layers_[i].mlp)) {
      RT_TRY(moe->forward(saved.moe, between_RH, out_RH));
      if (const DevicePtr<float> placed = slots_[slot].placed_choices) {
        moe->add_choices(placed);
      } else {
        moe->add_choices(std::span<float>(slots_[slot].choices));
      }
      return {};
    }
    return std::get<Mlp<Real>>(layers_[i].mlp).forward(saved.mlp, between_RH, out_RH);
  }

  /// Where the last stage's layers put what the final norm reads.
  DevicePtr<Real> body_output(int64_t slot) const {
    return final_norm_ ? slot_at(slot).final_norm_input_RH : slot_at(slot).head.input_RH;
  }

  /// Final norm and top query layer, where the model has one: to the head's input.
  Status forward_top_query(int64_t slot) {
    if (!final_norm_) return {};
    final_norm_->forward(body_output(slot), input_place(body_layers_, slot), scratch_.stats, dims_.local_rows);
    return layer_forward(body_layers_, slot, slot_at(slot).head.input_RH);
  }

  Status backward_top_query(int64_t slot, float loss_scale) const {
    if (!final_norm_) return {};
    RT_TRY(layer_backward(body_layers_, slot, -1, loss_scale));
    final_norm_->forward(body_output(slot), tp_.local(scratch_.rows_TH), scratch_.stats,
                         dims_.local_rows);  // for its statistics
    final_norm_->backward(scratch_.dresidual_RH, body_output(slot), scratch_.stats, scratch_.dresidual_RH,
                          dims_.local_rows);
    return {};
  }

  /// A module's layer stands behind the body's.
  size_t layer_of_module(size_t k) const { return body_layers_ + k; }

  /// The rows behind the last norm of the module before, or of the model: in scratch.partial.
  DevicePtr<const Real> hidden_before(size_t k, int64_t slot) const {
    const Slot<Real>& saved = slot_at(slot);
    if (k == 0) {
      head_->norm_rows(saved.head, scratch_.partial_TH);
    } else {
      modules_[k - 1].head.norm_rows(saved.modules[k - 1].head, scratch_.partial_TH);
    }
    return scratch_.partial_TH;
  }

  /// The buffer of logits is `mine`: no other head finds its own there.
  Head<Real>& with_logits(Head<Real>& mine) {
    if (&mine != &*head_) head_->forget();
    for (Module<Real>& module : modules_) {
      if (&module.head != &mine) module.head.forget();
    }
    return mine;
  }

  Status forward_module(size_t k, int64_t slot, const int32_t* tokens, const int32_t* targets) {
    SavedModule<Real>& saved = slots_[static_cast<size_t>(slot)].modules[k];
    saved.tokens.set(tokens, targets, dims_.rows, dims_.tokens, static_cast<int64_t>(k));
    {
      const TraceScope scope("compute", "further token");
      RT_TRY(modules_[k].input.look_up(give(saved.tokens.inputs.data()), saved.embedded_RH));
      modules_[k].input.forward(saved.embedded_RH, hidden_before(k, slot), input_place(layer_of_module(k), slot));
    }
    RT_TRY(layer_forward(layer_of_module(k), slot, saved.head.input_RH));
    const TraceScope scope("compute", "head");
    return with_logits(modules_[k].head).forward(saved.head, {give(saved.tokens.targets.data()), nullptr});
  }

  /// `dhidden_RH`: the gradient of its last norm's output from the module behind, null when there is none. Its own goes
  /// into dhidden_RH_. Fewer rows of a sequence have targets, and the losses of a module count as much as all of them.
  Status backward_module(size_t k, int64_t slot, DevicePtr<const Real> dhidden_RH, float loss_scale) {
    const SavedModule<Real>& saved = slot_at(slot).modules[k];
    const int64_t with_target = dims_.tokens - static_cast<int64_t>(k) - 1;
    {
      const TraceScope scope("compute", "head backward");
      const float weight =
          loss_scale * module_loss_ * static_cast<float>(dims_.tokens) / static_cast<float>(with_target);
      RT_TRY(with_logits(modules_[k].head)
                 .backward(saved.head, {give(saved.tokens.targets.data()), nullptr}, weight, dhidden_RH));
    }
    RT_TRY(layer_backward(layer_of_module(k), slot, -1, loss_scale));
    const TraceScope scope("compute", "further token backward");
    return modules_[k].input.backward(give(saved.tokens.inputs.data()), saved.embedded_RH, hidden_before(k, slot),
                                      dhidden_RH_);
  }

  /// Runs `body`, which uses the tensors of `layer`.
  template <typename Body>
  Status use(int64_t layer, Pass pass, const Body& body) const {
    if (listener_ == nullptr) return body();
    RT_TRY(listener_->begin_use(layer, pass));
    RT_TRY(body());
    return listener_->end_use(layer, pass);
  }

  std::variant<Mlp<Real>, Moe<Real>> make_mlp(const Parameters<Real>& parameters, const ModelConfig& model,
                                              int64_t layer, const Buffers& buffers) {
    if (has_experts(model, layer))
      return Moe<Real>(parameters, model, dims_, layer, tp_, cp_, *dispatch_, scratch_, buffers);
    return Mlp<Real>(parameters, model, dims_, layer, tp_, scratch_);
  }

  void set_scratch(const ModelConfig& model, const Buffers& buffers) {
    scratch_.rows_TH = buffers.get<Real>(buffer::kScratchRows);
    scratch_.partial_TH = buffers.get<Real>(buffer::kScratchPartial);
    scratch_.dresidual_RH = buffers.get<Real>(buffer::kScratchDresidual);
    scratch_.hidden = buffers.get<Real>(buffer::kScratchHidden);
    scratch_.dhidden = buffers.get<Real>(buffer::kScratchDhidden);
    if (has_mla(model)) {
      scratch_.latents = buffers.get<Real>(buffer::kScratchLatents);
      scratch_.dlatents = buffers.get<Real>(buffer::kScratchDlatents);
    }
    scratch_.attention = buffers.get<float>(buffer::kScratchAttention);
    scratch_.stats.rstd = buffers.get<float>(buffer::kScratchRstd);
    if (model.norm == NormKind::kLayerNorm) scratch_.stats.mean = buffers.get<float>(buffer::kScratchMean);
    if (dims_.row_trees()) scratch_.stats.parts = {dims_.row_parts, buffers.get<float>(buffer::kScratchRowSums)};
    if (dims_.all_token_parts > 1) scratch_.token_parts = {dims_.held.parts, scratch_.stats.parts.sums};
    if (has_branch_gradient(model)) scratch_.dbranch_RH = buffers.get<Real>(buffer::kScratchDbranch);
    if (has_bias(model, BiasOf::kQkv) || has_bias(model, BiasOf::kMlp)) {
      scratch_.dbias = buffers.get<float>(buffer::kScratchDbias);
    }
    if (model.positions == Positions::kRotary) {
      scratch_.rotary_table = fill_rotary_table(model, buffers.get<float>(buffer::kRotaryTable), false);
    }
    if (model.window_rope_theta > 0) {
      scratch_.window_rotary_table = fill_rotary_table(model, buffers.get<float>(buffer::kWindowRotaryTable), true);
    }
    if (model.temperature_scale > 0) {
      scratch_.temperature_table = fill_temperature_table(model, buffers.get<float>(buffer::kTemperatureTable));
    }
    if (model.attention_sinks) scratch_.sinks = buffers.get<float>(buffer::kSinks);
    if (model.positions == Positions::kAlibi) {
      DevicePtr<float> slopes = buffers.get<float>(buffer::kAlibiSlopes);
      on_.alibi_slopes(model.heads, tp_.comm().rank() * dims_.heads, dims_.heads, slopes);
      scratch_.alibi_slopes = slopes;
    }
  }

  /// Tables by position have every position, and not those of this rank's tokens in their order.
  bool whole_tables() const { return dims_.held.whole() || dims_.positions > dims_.held.count; }

  DevicePtr<const float> fill_rotary_table(const ModelConfig& model, DevicePtr<float> table, bool window) const {
    const TokenRuns& held = dims_.held;
    const RotaryAngles angles = rotary_angles(model, held.whole() ? dims_.positions : held.tokens, window);
    if (whole_tables()) {
      on_.rotary_table(table, 0, dims_.positions, angles.frequencies, angles.factor);
      return table;
    }
    const int64_t run = held.part_tokens() / 2;
    for (int64_t at = 0; at < held.count; at += run) {
      on_.rotary_table(table + at * rotary_dims(model), held.position(at), run, angles.frequencies, angles.factor);
    }
    return table;
  }

  /// Runs of positions with one factor each.
  DevicePtr<const float> fill_temperature_table(const ModelConfig& model, DevicePtr<float> table) const {
    const std::vector<float> still(static_cast<size_t>(model.head_dim / 2));  // frequencies
    const TokenRuns& held = dims_.held;
    const int64_t run = whole_tables() ? dims_.positions : held.part_tokens() / 2;
    const int64_t count = whole_tables() ? dims_.positions : held.count;
    for (int64_t at = 0; at < count;) {
      const int64_t position = whole_tables() ? at : held.position(at);
      const int64_t same = model.temperature_floor - temperature_count(model, position) % model.temperature_floor;
      const int64_t rows = std::min(same, run - at % run);
      double factor = query_temperature(model, position);
      if (model.temperature_form == TemperatureForm::kMinistral3) factor = rounded<Real>(factor);  // as its class does
      on_.rotary_table(table + at * model.head_dim, position, rows, still, factor);
      at += rows;
    }
    return table;
  }

  LayerBuffers<Real> layer_buffers(const Plan& plan, const Chunk& chunk, int64_t layer, int64_t late,
                                   const Buffers& buffers) const {
    LayerBuffers<Real> out;
    out.mode = layer_recompute(plan, chunk.stage, layer);
    const std::string prefix = layer_prefix(plan.recipe.model, layer);
    const auto own = [&](const char* name) { return buffers.copies<Real>(prefix + name); };
    const auto kept = [&]<typename T>(const char* name, T, bool recomputed_and_read_late) {
      return typename LayerBuffers<Real>::template Kept<T>{buffers.copies<T>(prefix + name),
                                                           recomputed_and_read_late && late > 0,
                                                           buffers.copies<T>(std::string("shared.") + name)};
    };
    const bool full = out.mode == RecomputeMode::kFull, core = out.mode != RecomputeMode::kNone;
    const bool dense = !has_experts(plan.recipe.model, layer);
    const KeptNorms norms = kept_norms(plan);
    out.input = own(buffer::kAttnInput);
    if (full) out.whole_input = buffers.copies<Real>(buffer::shared(buffer::kAttnInput));
    out.qk = kept(buffer::kAttnQk, Real{}, false);
    out.qkv = kept(buffer::kAttnQkv, Real{}, full);
    out.latent = kept(buffer::kAttnLatent, Real{}, full && has_mla(plan.recipe.model));
    out.out = kept(buffer::kAttnOut, Real{}, core);
    out.logsumexp = kept(buffer::kAttnLogsumexp, float{}, false);
    out.attn_post = kept(buffer::kAttnPost, Real{}, false);
    out.attn_normed = kept(buffer::kAttnNormed, Real{}, full && norms.attention);
    out.attn_stats = kept(buffer::kAttnStats, float{}, false);
    out.attn_post_stats = kept(buffer::kAttnPostStats, float{}, false);
    out.mlp_normed = kept(buffer::kMlpNormed, Real{}, full && dense && norms.mlp);
    out.mlp_stats = kept(buffer::kMlpStats, float{}, false);
    out.mlp_post_stats = kept(buffer::kMlpPostStats, float{}, false);
    out.mlp_input = kept(buffer::kMlpInput, Real{}, full && dense);
    out.mlp_post = kept(buffer::kMlpPost, Real{}, false);
    out.pre = kept(buffer::kMlpPre, Real{}, full && dense);
    out.probabilities = kept(buffer::kMoeProbabilities, float{}, false);
    out.chosen = kept(buffer::kMoeChosen, int32_t{}, false);
    out.weights = kept(buffer::kMoeWeights, float{}, false);
    out.counts = kept(buffer::kMoeCounts, int32_t{}, false);
    out.log_sums = kept(buffer::kMoeLogSums, float{}, false);
    out.moe_pre = kept(buffer::kMoePre, Real{}, false);
    out.shared_pre = kept(buffer::kMoeSharedPre, Real{}, false);
    out.shared_gate = kept(buffer::kMoeSharedGate, float{}, false);
    out.attn_dlatent = own(buffer::kAttnDlatent);
    out.attn_dout = own(buffer::kAttnDout);
    out.mlp_dout = own(buffer::kMlpDout);
    out.mlp_dpre = own(buffer::kMlpDpre);
    if (const Copies<Real> output = buffers.copies<Real>(buffer::shared(buffer::kOutput))) out.output = output.at(0);
    return out;
  }

  Slot<Real> make_slot(const ModelConfig& model, const Stage& stage, const Buffers& buffers, int64_t slot) const {
    Slot<Real> out;
    out.dropout_keys.resize(dims_.samples);
    if (dispatch_) {
      const int64_t counts = std::ssize(layers_) * Dispatch<Real>::kept_counts(dims_);
      out.host_counts = std::make_unique<int32_t[]>(static_cast<size_t>(counts));
    }
    if (counts_choices_ && trains_) {
      if (dims_.places_groups && on_.places_groups) {
        out.placed_choices = buffers.get<float>(layer_prefix(model, stage.first_layer) + buffer::kMoeChoices, slot);
      } else {
        out.choices.resize(static_cast<size_t>(dims_.experts));
      }
    }
    const auto real = [&](const std::string& name, bool has) {
      return has ? buffers.get<Real>(name, slot) : DevicePtr<Real>();
    };
    if (stage.embedding) {
      out.embedding = {.rows_RE = real(buffer::kEmbedRows, dims_.embed != dims_.width),
                       .norm_input_RH = real(buffer::kEmbedInput, model.embedding_norm)};
    }
    if (stage.head) {
      out.final_norm_input_RH = real(buffer::kTopQueryNormInput, model.top_query);
      const auto head = [&](const std::string& prefix) {
        const DevicePtr<float> sums = buffers.get<float>(prefix + buffer::kHeadSums, slot);
        return SavedHead<Real>{.input_RH = buffers.get<Real>(prefix + buffer::kHeadInput, slot),
                               .max_T = buffers.get<float>(prefix + buffer::kHeadMax, slot),
                               .sum_exp_T = sums,
                               .loss_T = sums + dims_.rows};
      };
      out.head = head("");
      for (int64_t k = 0; k < std::ssize(modules_); ++k) {
        const std::string prefix = layer_prefix(model, model.layers + k);
        out.modules.push_back({.embedded_RH = buffers.get<Real>(prefix + buffer::kMtpEmbedded, slot),
                               .head = head(prefix),
                               .tokens = {}});
      }
    }
    return out;
  }

  const Slot<Real>& slot_at(int64_t slot) const {
    RT_CHECK(slot >= 0 && slot < std::ssize(slots_), "no slot {} of {}", slot, slots_.size());
    return slots_[slot];
  }

  /// The dropout keys and rows of the micro-batch in `slot` are those at work.
  void use_slot(int64_t slot) {
    const Slot<Real>& saved = slot_at(slot);
    scratch_.dropout_keys = saved.drops ? on_.stream.give(std::span<const uint64_t>(saved.dropout_keys)) : nullptr;
    scratch_.positions = give_some(saved.rows.positions);
    scratch_.starts = give_some(saved.rows.starts);
    scratch_.ends = give_some(saved.rows.ends);
  }

  /// The model's number of this stage's i-th layer; the top query layer or the modules' come right after the last
  /// stage's.
  int64_t number_of(size_t i) const { return first_layer_ + static_cast<int64_t>(i); }

  int64_t stream_elems() const { return dims_.local_rows * dims_.width; }

  /// Where a layer's forward finds its input.
  DevicePtr<Real> input_place(size_t layer, int64_t slot) const {
    const LayerBuffers<Real>& b = buffers_[layer];
    return b.whole_input ? b.whole_input.at(0) : b.input.at(slot);
  }

  /// `late` -1: not between the halves of a backward.
  SavedLayer<Real> saved_layer(size_t layer, int64_t slot, int64_t late) const {
    const LayerBuffers<Real>& b = buffers_[layer];
    DevicePtr<Real> input_RH = input_place(layer, slot);
    const Slot<Real>& of = slot_at(slot);
    const SavedResidual<Real> of_attention{.input_RH = input_RH,
                                           .post_RH = b.attn_post.at(slot, late),
                                           .normed_RH = b.attn_normed.at(slot, late),
                                           .stats = b.attn_stats.at(slot, late),
                                           .post_stats = b.attn_post_stats.at(slot, late)};
    const SavedResidual<Real> residual{.input_RH = parallel_ ? input_RH : b.mlp_input.at(slot, late),
                                       .post_RH = b.mlp_post.at(slot, late),
                                       .normed_RH = shares_norm_ ? of_attention.normed_RH : b.mlp_normed.at(slot, late),
                                       .stats = shares_norm_ ? of_attention.stats : b.mlp_stats.at(slot, late),
                                       .post_stats = b.mlp_post_stats.at(slot, late)};
    return {{.residual = of_attention,
             .qk = b.qk.at(slot, late),
             .qkv = b.qkv.at(slot, late),
             .latents = {b.latent.at(slot, late),
                         late >= 0 && b.attn_dlatent ? b.attn_dlatent.at(late) : DevicePtr<Real>()},
             .out = b.out.at(slot, late),
             .logsumexp_BNS = b.logsumexp.at(slot, late)},
            {.residual = residual, .pre = b.pre.at(slot, late)},
            {.residual = residual,
             .probabilities = b.probabilities.at(slot, late),
             .log_sums = b.log_sums.at(slot, late),
             .chosen = b.chosen.at(slot, late),
             .weights = b.weights.at(slot, late),
             .counts = b.counts.at(slot, late),
             .pre = b.moe_pre.at(slot, late),
             .shared_pre = b.shared_pre.at(slot, late),
             .shared_gate = b.shared_gate.at(slot, late),
             .host_counts = host_counts(layer, slot),
             .choices = of.choices,
             .placed_choices = of.placed_choices}};
  }

  std::span<int32_t> host_counts(size_t layer, int64_t slot) const {
    const Slot<Real>& of = slot_at(slot);
    if (of.host_counts == nullptr) return {};
    const auto each = static_cast<size_t>(Dispatch<Real>::kept_counts(dims_));
    return {of.host_counts.get() + layer * each, each};
  }

  LateMlp<Real> late_mlp_at(size_t layer, int64_t late) const {
    return {buffers_[layer].mlp_dout.at(late), buffers_[layer].mlp_dpre.at(late)};
  }

  // A distributed input: each tp rank keeps an equal part of the elements that all of them have.
  void keep_own_part(size_t layer, int64_t slot) const {
    const LayerBuffers<Real>& b = buffers_[layer];
    const int64_t part = stream_elems() / tp_.comm().size();
    on_.copy(b.whole_input.at(0) + tp_.comm().rank() * part, b.input.at(slot), part);
  }
  Status gather_input(size_t layer, int64_t slot) const {
    const LayerBuffers<Real>& b = buffers_[layer];
    const int64_t part = stream_elems() / tp_.comm().size();
    return tp_.comm().all_gather(b.input.at(slot), b.whole_input.at(0), part * sizeof(Real), "input kept in parts");
  }

  Status mlp_backward(size_t layer, const SavedLayer<Real>& saved, int64_t late, float loss_scale) const {
    const TraceScope scope("compute", "mlp backward", {.layer = number_of(layer)});
    const Layer<Real>& l = layers_[layer];
    if (const Moe<Real>* moe = std::get_if<Moe<Real>>(&l.mlp)) return moe->backward(saved.moe, loss_scale);
    const Mlp<Real>& mlp = std::get<Mlp<Real>>(l.mlp);
    if (late < 0) return mlp.backward(saved.mlp, nullptr);
    const LateMlp<Real> late_mlp = late_mlp_at(layer, late);
    return mlp.backward(saved.mlp, &late_mlp);
  }

  /// `late` -1: whole, else its first half.
  Status layer_backward(size_t layer, int64_t slot, int64_t late, float loss_scale) const {
    const SavedLayer<Real> saved = saved_layer(layer, slot, late);
    RT_TRY(recompute(layer, slot, saved));
    RT_TRY(mlp_backward(layer, saved, late, loss_scale));
    const Layer<Real>& l = layers_[layer];
    const TraceScope scope("compute", "attention backward", {.layer = number_of(layer)});
    return l.attention.backward(saved.attention, late < 0 ? DevicePtr<Real>() : buffers_[layer].attn_dout.at(late));
  }

  /// What the layer's forward did not leave for the backward to come.
  Status recompute(size_t layer, int64_t slot, const SavedLayer<Real>& saved) const {
    const LayerBuffers<Real>& b = buffers_[layer];
    const Layer<Real>& l = layers_[layer];
    if (b.mode == RecomputeMode::kNone) return {};
    const TraceScope scope("compute", "recompute", {.layer = number_of(layer)});
    if (b.mode == RecomputeMode::kSelective) {
      return l.attention.recompute_core(saved.attention);
    }
    if (b.whole_input) RT_TRY(gather_input(layer, slot));
    DevicePtr<Real> between_RH = parallel_ ? b.output : saved.mlp.residual.input_RH;
    RT_TRY(l.attention.forward(saved.attention, between_RH));
    if (const Moe<Real>* moe = std::get_if<Moe<Real>>(&l.mlp)) return moe->forward(saved.moe, between_RH, b.output);
    return std::get<Mlp<Real>>(l.mlp).recompute(saved.mlp);
  }

  const kernels::Exec<Real> on_;
  StageDims dims_;
  int64_t vocab_ = 0;
  bool trains_ = false;
  bool parallel_ = false;        // blocks whose MLP reads attention's input
  bool shares_norm_ = false;     // and attention's norm of it
  bool counts_choices_ = false;  // of experts, over all layers, at the end of each boundary tensor
  int64_t first_layer_ = 0;
  UseListener* listener_ = nullptr;
  TensorParallel<Real> tp_;
  ContextParallel<Real> cp_;
  Scratch<Real> scratch_;
  std::optional<Dispatch<Real>> dispatch_;    // with experts
  std::optional<Embedding<Real>> embedding_;  // these refer to the above: a Model does not move
  std::vector<Layer<Real>> layers_;
  size_t body_layers_ = 0;                // of layers_; behind them are the top query layer or the modules' layers
  std::optional<Norm<Real>> final_norm_;  // before the top query layer; else it is the head's
  std::optional<Head<Real>> head_;
  std::vector<Module<Real>> modules_;        // that predict further tokens
  float module_loss_ = 0;                    // weight of the mean loss of each
  DevicePtr<Real> dhidden_RH_;               // the gradient of the rows that a module reads
  std::vector<LayerBuffers<Real>> buffers_;  // of the layers
  std::vector<Slot<Real>> slots_;
};

}  // namespace

Result<std::unique_ptr<StageModel>> StageModel::make(Stream& stream, const Plan& plan, const RankPlan& rank,
                                                     int64_t chunk, const comm::RankGroups& groups,
                                                     DevicePtr<const void> weights, DevicePtr<float> grads,
                                                     DeviceBytes activations, UseListener* listener) {
  const comm::Comm& tp = *groups.tp;
  if (tp.size() != plan.mesh.tp() || tp.rank() != rank.at.tp) {
    return Error{ErrorCode::kInternal, fmt::format("group {} makes this rank {} of {}, the plan {} of {}", tp.name(),
                                                   tp.rank(), tp.size(), rank.at.tp, plan.mesh.tp())};
  }
  const int64_t ep = groups.ep == nullptr ? 1 : groups.ep->size();
  if (ep != plan.mesh.ep() || (groups.ep != nullptr && groups.ep->rank() != rank.expert_part)) {
    return Error{ErrorCode::kInternal, fmt::format("a group of {} ranks for mesh.ep = {}", ep, plan.mesh.ep())};
  }
  const int64_t cp = groups.cp == nullptr ? 1 : groups.cp->size();
  if (cp != plan.mesh.cp() || (groups.cp != nullptr && groups.cp->rank() != rank.at.cp)) {
    return Error{ErrorCode::kInternal, fmt::format("a group of {} ranks for mesh.cp = {}", cp, plan.mesh.cp())};
  }
  RT_TRY_SET(const Buffers buffers, Buffers::lay_out(plan, rank, activations));
  const auto made = [&]<typename Real>(Real) {
    return std::unique_ptr<StageModel>(std::make_unique<Model<Real>>(
        stream, plan, rank, rank.chunks.at(chunk), groups, weights.as<const Real>(), grads, buffers, listener));
  };
  switch (plan.compute_dtype()) {
    case DType::kBf16:
      return made(bf16());
    case DType::kF16:
      return made(f16());
    default:
      return made(0.0f);
  }
}

}  // namespace cairn::nn
