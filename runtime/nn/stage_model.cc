#include "runtime/nn/stage_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <variant>
#include <vector>

#include "runtime/kernels/elementwise.h"
#include "runtime/nn/attention.h"
#include "runtime/nn/embedding.h"
#include "runtime/nn/head.h"
#include "runtime/nn/mlp.h"
#include "runtime/nn/moe.h"
#include "runtime/nn/rotary.h"
#include "runtime/plan/activations.h"
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

template <typename Real>
struct Slot {
  SavedEmbedding<Real> embedding;  // first stage only
  std::vector<SavedLayer<Real>> layers;
  SavedHead<Real> head;                // last stage only
  std::vector<uint64_t> dropout_keys;  // [B]
  bool drops = false;
};

/// Errors: kInvalidInput naming the first id outside [0, vocab).
Status check_ids(std::string_view what, const int32_t* ids, int64_t count, int64_t vocab) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
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
  Model(const Plan& plan, const RankPlan& rank, const Chunk& chunk, comm::Comm& comm, const Real* weights, float* grads,
        const Buffers& buffers, UseListener* listener)
      : dims_(stage_dims(plan, rank)),
        vocab_(plan.recipe.model.vocab),
        trains_(grads != nullptr),
        parallel_(is_parallel(plan.recipe.model.block)),
        first_layer_(chunk.stage.first_layer),
        listener_(listener),
        tp_(comm, dims_, plan.recipe.mesh.sequence_parallel) {
    const ModelConfig& model = plan.recipe.model;
    const OptimizerConfig& optimizer = plan.recipe.optimizer;
    const Parameters<Real> parameters(plan, rank, weights, grads);
    set_scratch(model, buffers);
    if (chunk.stage.embedding)
      embedding_.emplace(parameters, model, optimizer.embedding_gradient, dims_, tp_, scratch_);
    for (int64_t layer = chunk.stage.first_layer; layer < chunk.stage.end_layer; ++layer) {
      layers_.push_back({Attention<Real>(parameters, model, dims_, layer, tp_, scratch_),
                         make_mlp(parameters, model, layer, buffers)});
    }
    if (chunk.stage.head) head_.emplace(parameters, model, optimizer.z_loss, dims_, tp_, scratch_, buffers);
    for (int64_t slot = 0; slot < chunk.in_flight; ++slot)
      slots_.push_back(make_slot(model, chunk.stage, buffers, slot));
  }

  void set_dropout_keys(int64_t slot, std::span<const uint64_t> keys) override {
    Slot<Real>& saved = slots_.at(slot);
    RT_CHECK(keys.empty() || std::ssize(keys) == dims_.samples, "{} keys for {} samples", keys.size(), dims_.samples);
    saved.drops = !keys.empty();
    std::copy(keys.begin(), keys.end(), saved.dropout_keys.begin());
  }

  Status forward(int64_t slot, const int32_t* tokens, const int32_t* targets, const void* input,
                 void* output) override {
    const Slot<Real>& saved = slot_at(slot);
    scratch_.dropout_keys = saved.drops ? saved.dropout_keys.data() : nullptr;
    Real* first_RH = saved.layers.front().attention.residual.input_RH;
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
      RT_TRY(
          use(kEmbeddingLayer, Pass::kForward, [&] { return embedding_->forward(saved.embedding, tokens, first_RH); }));
    } else {
      RT_CHECK(input != nullptr, "a later stage needs an input");
      std::copy_n(static_cast<const Real*>(input), dims_.local_rows * dims_.width, first_RH);
    }
    if (head_) {
      RT_CHECK(targets != nullptr, "the last stage needs targets");
      RT_TRY(check_ids("target", targets, dims_.rows, vocab_));
    } else {
      RT_CHECK(output != nullptr, "an earlier stage needs an output");
    }

    RT_TRY(forward_layers(saved, head_ ? saved.head.input_RH : static_cast<Real*>(output)));
    if (!head_) return {};
    const TraceScope scope("compute", "head");
    return use(kHeadLayer, Pass::kForward, [&] { return head_->forward(saved.head, targets); });
  }

  Status forward_cached(const int32_t* tokens, const CachedRows& rows) override {
    RT_CHECK(embedding_ && head_ && !trains_ && tp_.comm().size() == 1, "generation needs a whole model on one rank");
    RT_CHECK(std::ssize(rows.position) == dims_.rows && std::ssize(rows.sequence) == dims_.rows, "{} rows of {}",
             rows.position.size(), dims_.rows);
    RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
    const Slot<Real>& saved = slot_at(0);
    scratch_.dropout_keys = nullptr;
    scratch_.cached = &rows;
    Status done = embedding_->forward(saved.embedding, tokens, saved.layers.front().attention.residual.input_RH);
    if (done.ok()) done = forward_layers(saved, saved.head.input_RH);
    scratch_.cached = nullptr;
    head_->forget();
    return done;
  }

  Status cached_logits(int64_t first, int64_t count, std::span<float> out) override {
    RT_CHECK(first >= 0 && count >= 0 && first + count <= dims_.rows, "logits of rows [{}, +{})", first, count);
    RT_CHECK(std::ssize(out) == count * vocab_, "logits [{}, {}] do not fit {} floats", count, vocab_, out.size());
    return head_->logits(slot_at(0).head, first, count, out);
  }

  Status backward(int64_t slot, const int32_t* tokens, const int32_t* targets, const void* doutput, void* dinput,
                  float loss_scale) override {
    const Slot<Real>& saved = slot_at(slot);
    RT_CHECK(trains_, "backward of a model made without gradients");
    scratch_.dropout_keys = saved.drops ? saved.dropout_keys.data() : nullptr;
    if (head_) {
      RT_CHECK(targets != nullptr, "the last stage needs targets");
      const TraceScope scope("compute", "head backward");
      RT_TRY(use(kHeadLayer, Pass::kBackward, [&] { return head_->backward(saved.head, targets, loss_scale); }));
    } else {
      RT_CHECK(doutput != nullptr, "an earlier stage needs the gradient of its output");
      std::copy_n(static_cast<const Real*>(doutput), dims_.local_rows * dims_.width, scratch_.dresidual_RH);
    }
    for (size_t i = layers_.size(); i-- > 0;) {
      const int64_t number = first_layer_ + static_cast<int64_t>(i);
      RT_TRY(use(number, Pass::kBackward, [&]() -> Status {
        {
          const TraceScope scope("compute", "mlp backward", {.layer = number});
          if (const Moe<Real>* moe = std::get_if<Moe<Real>>(&layers_[i].mlp)) {
            RT_TRY(moe->backward(saved.layers[i].moe, loss_scale));
          } else {
            RT_TRY(std::get<Mlp<Real>>(layers_[i].mlp).backward(saved.layers[i].mlp));
          }
        }
        const TraceScope scope("compute", "attention backward", {.layer = number});
        return layers_[i].attention.backward(saved.layers[i].attention);
      }));
    }
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      return use(kEmbeddingLayer, Pass::kBackward, [&] { return embedding_->backward(saved.embedding, tokens); });
    }
    RT_CHECK(dinput != nullptr, "a later stage needs a place for the gradient of its input");
    std::copy_n(scratch_.dresidual_RH, dims_.local_rows * dims_.width, static_cast<Real*>(dinput));
    return {};
  }

  std::span<const float> token_losses(int64_t slot) const override {
    RT_CHECK(head_.has_value(), "losses are on the last stage");
    return {slot_at(slot).head.loss_T, static_cast<size_t>(dims_.rows)};
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

  int64_t boundary_bytes() const override {
    return dims_.local_rows * dims_.width * static_cast<int64_t>(sizeof(Real));
  }

 private:
  /// All layers, from the first one's input to `output_RH`.
  Status forward_layers(const Slot<Real>& saved, Real* output_RH) const {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const SavedLayer<Real>& layer = saved.layers[i];
      Real* next_RH = i + 1 < layers_.size() ? saved.layers[i + 1].attention.residual.input_RH : output_RH;
      const int64_t number = first_layer_ + static_cast<int64_t>(i);
      RT_TRY(use(number, Pass::kForward, [&]() -> Status {
        Real* between_RH = parallel_ ? next_RH : layer.mlp.residual.input_RH;
        {
          const TraceScope scope("compute", "attention", {.layer = number});
          RT_TRY(layers_[i].attention.forward(layer.attention, between_RH));
        }
        const TraceScope scope("compute", "mlp", {.layer = number});
        if (const Moe<Real>* moe = std::get_if<Moe<Real>>(&layers_[i].mlp)) {
          return moe->forward(layer.moe, between_RH, next_RH);
        }
        return std::get<Mlp<Real>>(layers_[i].mlp).forward(layer.mlp, between_RH, next_RH);
      }));
    }
    return {};
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
                                              int64_t layer, const Buffers& buffers) const {
    if (model.moe.experts > 0) return Moe<Real>(parameters, model, dims_, layer, tp_, scratch_, buffers);
    return Mlp<Real>(parameters, model, dims_, layer, tp_, scratch_);
  }

  void set_scratch(const ModelConfig& model, const Buffers& buffers) {
    scratch_.rows_TH = buffers.get<Real>("scratch.rows");
    scratch_.partial_TH = buffers.get<Real>("scratch.partial");
    scratch_.dresidual_RH = buffers.get<Real>("scratch.dresidual");
    scratch_.hidden = buffers.get<Real>("scratch.hidden");
    scratch_.dhidden = buffers.get<Real>("scratch.dhidden");
    scratch_.attention = buffers.get<float>("scratch.attention");
    scratch_.stats.rstd = buffers.get<float>("scratch.rstd");
    if (model.norm == NormKind::kLayerNorm) scratch_.stats.mean = buffers.get<float>("scratch.mean");
    if (is_parallel(model.block) || model.block == BlockKind::kSandwich) {
      scratch_.dbranch_RH = buffers.get<Real>("scratch.dbranch");
    }
    if (has_bias(model, BiasOf::kQkv) || has_bias(model, BiasOf::kMlp)) {
      scratch_.dbias = buffers.get<float>("scratch.dbias");
    }
    if (model.positions == Positions::kRotary) {
      float* table = buffers.get<float>("rotary.table");
      const RotaryAngles angles = rotary_angles(model, dims_.positions);
      kernels::rotary_table(table, 0, dims_.positions, angles.frequencies, angles.factor);
      scratch_.rotary_table = table;
    }
    if (model.positions == Positions::kAlibi) {
      float* slopes = buffers.get<float>("alibi.slopes");
      kernels::alibi_slopes(model.heads, tp_.comm().rank() * dims_.heads, dims_.heads, slopes);
      scratch_.alibi_slopes = slopes;
    }
  }

  Slot<Real> make_slot(const ModelConfig& model, const Stage& stage, const Buffers& buffers, int64_t slot) const {
    Slot<Real> out;
    out.dropout_keys.resize(dims_.samples);
    const auto real = [&](const std::string& name, bool has = true) {
      return has ? buffers.get<Real>(name, slot) : nullptr;
    };
    if (stage.embedding) {
      out.embedding = {.rows_RE = real("embed.rows", dims_.embed != dims_.width),
                       .norm_input_RH = real("embed.input", model.embedding_norm)};
    }
    const bool post = has_post_norms(model.block);
    for (int64_t layer = stage.first_layer; layer < stage.end_layer; ++layer) {
      const std::string prefix = fmt::format("layers.{}.", layer);
      Real* input_RH = real(prefix + "attn.input");
      out.layers.push_back({{.residual = {.input_RH = input_RH, .post_RH = real(prefix + "attn.post", post)},
                             .qk = real(prefix + "attn.qk", model.qk_norm != QkNorm::kNone),
                             .qkv = real(prefix + "attn.qkv"),
                             .out = real(prefix + "attn.out"),
                             .logsumexp_BNS = buffers.get<float>(prefix + "attn.logsumexp", slot)},
                            {},
                            {}});
      const SavedResidual<Real> residual{.input_RH = parallel_ ? input_RH : real(prefix + "mlp.input"),
                                         .post_RH = real(prefix + "mlp.post", post)};
      SavedLayer<Real>& saved = out.layers.back();
      saved.mlp.residual = residual;
      if (model.moe.experts == 0) {
        saved.mlp.pre = real(prefix + "mlp.pre");
        continue;
      }
      saved.moe = {.residual = residual,
                   .probabilities = buffers.get<float>(prefix + "moe.probabilities", slot),
                   .chosen = buffers.get<int32_t>(prefix + "moe.chosen", slot),
                   .weights = buffers.get<float>(prefix + "moe.weights", slot),
                   .pre = real(prefix + "moe.pre")};
    }
    if (stage.head) {
      float* sums = buffers.get<float>("head.sums", slot);
      out.head = {.input_RH = buffers.get<Real>("head.input", slot),
                  .max_T = buffers.get<float>("head.max", slot),
                  .sum_exp_T = sums,
                  .loss_T = sums + dims_.rows};
    }
    return out;
  }

  const Slot<Real>& slot_at(int64_t slot) const {
    RT_CHECK(slot >= 0 && slot < static_cast<int64_t>(slots_.size()), "no slot {} of {}", slot, slots_.size());
    return slots_[slot];
  }

  StageDims dims_;
  int64_t vocab_ = 0;
  bool trains_ = false;
  bool parallel_ = false;  // blocks whose MLP reads attention's input
  int64_t first_layer_ = 0;
  UseListener* listener_ = nullptr;
  TensorParallel<Real> tp_;
  Scratch<Real> scratch_;
  std::optional<Embedding<Real>> embedding_;  // these refer to tp_ and scratch_: a Model does not move
  std::vector<Layer<Real>> layers_;
  std::optional<Head<Real>> head_;
  std::vector<Slot<Real>> slots_;
};

}  // namespace

Result<std::unique_ptr<StageModel>> StageModel::make(const Plan& plan, const RankPlan& rank, int64_t chunk,
                                                     comm::Comm& tp, void* weights, float* grads,
                                                     std::span<std::byte> activations, UseListener* listener) {
  if (tp.size() != plan.mesh.tp() || tp.rank() != rank.at.tp) {
    return Error{ErrorCode::kInternal, fmt::format("group {} makes this rank {} of {}, the plan {} of {}", tp.name(),
                                                   tp.rank(), tp.size(), rank.at.tp, plan.mesh.tp())};
  }
  RT_TRY_SET(const Buffers buffers, Buffers::lay_out(plan, rank, activations));
  if (plan.compute_dtype() == DType::kBf16) {
    return std::unique_ptr<StageModel>(std::make_unique<Model<bf16>>(
        plan, rank, rank.chunks.at(chunk), tp, static_cast<const bf16*>(weights), grads, buffers, listener));
  }
  if (plan.compute_dtype() == DType::kF16) {
    return std::unique_ptr<StageModel>(std::make_unique<Model<f16>>(
        plan, rank, rank.chunks.at(chunk), tp, static_cast<const f16*>(weights), grads, buffers, listener));
  }
  return std::unique_ptr<StageModel>(std::make_unique<Model<float>>(
      plan, rank, rank.chunks.at(chunk), tp, static_cast<const float*>(weights), grads, buffers, listener));
}

}  // namespace cairn::nn
