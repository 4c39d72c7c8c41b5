#include "runtime/nn/stage_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "runtime/kernels/elementwise.h"
#include "runtime/nn/attention.h"
#include "runtime/nn/embedding.h"
#include "runtime/nn/head.h"
#include "runtime/nn/mlp.h"
#include "runtime/plan/activations.h"

namespace cairn::nn {
namespace {

template <typename Real>
struct Layer {
  Attention<Real> attention;
  Mlp<Real> mlp;
};

template <typename Real>
struct SavedLayer {
  SavedAttention<Real> attention;
  SavedMlp<Real> mlp;
};

template <typename Real>
struct Slot {
  std::vector<SavedLayer<Real>> layers;
  SavedHead<Real> head;  // last stage only
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
        const Buffers& buffers)
      : dims_(stage_dims(plan, rank)),
        vocab_(plan.recipe.model.vocab),
        trains_(grads != nullptr),
        tp_(comm, dims_, plan.recipe.mesh.sequence_parallel) {
    const ModelConfig& model = plan.recipe.model;
    const Parameters<Real> parameters(plan, rank, weights, grads);
    set_scratch(model, buffers);
    if (chunk.stage.embedding) embedding_.emplace(parameters, dims_, tp_, scratch_);
    for (int64_t layer = chunk.stage.first_layer; layer < chunk.stage.end_layer; ++layer) {
      layers_.push_back({Attention<Real>(parameters, model, dims_, layer, tp_, scratch_),
                         Mlp<Real>(parameters, model, dims_, layer, tp_, scratch_)});
    }
    if (chunk.stage.head) head_.emplace(parameters, model, dims_, tp_, scratch_, buffers);
    for (int64_t slot = 0; slot < chunk.in_flight; ++slot) slots_.push_back(make_slot(chunk.stage, buffers, slot));
  }

  Status forward(int64_t slot, const int32_t* tokens, const int32_t* targets, const void* input,
                 void* output) override {
    const Slot<Real>& saved = slot_at(slot);
    Real* first_RH = saved.layers.front().attention.input_RH;
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
      RT_TRY(embedding_->forward(tokens, first_RH));
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
    return head_ ? head_->forward(saved.head, targets) : Status{};
  }

  Status forward_cached(const int32_t* tokens, const CachedRows& rows) override {
    RT_CHECK(embedding_ && head_ && !trains_ && tp_.comm().size() == 1, "generation needs a whole model on one rank");
    RT_CHECK(std::ssize(rows.position) == dims_.rows && std::ssize(rows.sequence) == dims_.rows, "{} rows of {}",
             rows.position.size(), dims_.rows);
    RT_TRY(check_ids("token", tokens, dims_.rows, vocab_));
    const Slot<Real>& saved = slot_at(0);
    scratch_.cached = &rows;
    Status done = embedding_->forward(tokens, saved.layers.front().attention.input_RH);
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
    if (head_) {
      RT_CHECK(targets != nullptr, "the last stage needs targets");
      RT_TRY(head_->backward(saved.head, targets, loss_scale));
    } else {
      RT_CHECK(doutput != nullptr, "an earlier stage needs the gradient of its output");
      std::copy_n(static_cast<const Real*>(doutput), dims_.local_rows * dims_.width, scratch_.dresidual_RH);
    }
    for (size_t i = layers_.size(); i-- > 0;) {
      RT_TRY(layers_[i].mlp.backward(saved.layers[i].mlp));
      RT_TRY(layers_[i].attention.backward(saved.layers[i].attention));
    }
    if (embedding_) {
      RT_CHECK(tokens != nullptr, "the first stage needs tokens");
      return embedding_->backward(tokens);
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
  Status forward_layers(const Slot<Real>& saved, Real* output_RH) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const SavedLayer<Real>& layer = saved.layers[i];
      Real* next_RH = i + 1 < layers_.size() ? saved.layers[i + 1].attention.input_RH : output_RH;
      RT_TRY(layers_[i].attention.forward(layer.attention, layer.mlp.input_RH));
      RT_TRY(layers_[i].mlp.forward(layer.mlp, next_RH));
    }
    return {};
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
    if (model.bias) scratch_.dbias = buffers.get<float>("scratch.dbias");
    if (model.positions == Positions::kRotary) {
      float* table = buffers.get<float>("rotary.table");
      kernels::rotary_table(table, 0, model.context, dims_.head_dim, model.rope_theta);
      scratch_.rotary_table = table;
    }
  }

  Slot<Real> make_slot(const Stage& stage, const Buffers& buffers, int64_t slot) const {
    Slot<Real> out;
    for (int64_t layer = stage.first_layer; layer < stage.end_layer; ++layer) {
      const std::string prefix = fmt::format("layers.{}.", layer);
      const auto real = [&](const char* name) { return buffers.get<Real>(prefix + name, slot); };
      out.layers.push_back({{.input_RH = real("attn.input"),
                             .qkv = real("attn.qkv"),
                             .out = real("attn.out"),
                             .logsumexp_BNS = buffers.get<float>(prefix + "attn.logsumexp", slot)},
                            {.input_RH = real("mlp.input"), .pre = real("mlp.pre")}});
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
                                                     std::span<std::byte> activations) {
  const ModelConfig& model = plan.recipe.model;
  if (tp.size() != plan.mesh.tp() || tp.rank() != rank.at.tp) {
    return Error{ErrorCode::kInternal, fmt::format("group {} makes this rank {} of {}, the plan {} of {}", tp.name(),
                                                   tp.rank(), tp.size(), rank.at.tp, plan.mesh.tp())};
  }
  if (model.positions == Positions::kRotary && model.head_dim % 2 != 0) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("rotary positions turn pairs: model.head_dim must be even, got {}", model.head_dim)};
  }
  RT_TRY_SET(const Buffers buffers, Buffers::lay_out(plan, rank, activations));
  if (plan.compute_dtype() == DType::kBf16) {
    return std::unique_ptr<StageModel>(std::make_unique<Model<bf16>>(
        plan, rank, rank.chunks.at(chunk), tp, static_cast<const bf16*>(weights), grads, buffers));
  }
  return std::unique_ptr<StageModel>(std::make_unique<Model<float>>(
      plan, rank, rank.chunks.at(chunk), tp, static_cast<const float*>(weights), grads, buffers));
}

}  // namespace cairn::nn
