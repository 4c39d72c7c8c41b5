#include "runtime/inference/session.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/comm/thread_world.h"
#include "runtime/core/random.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/plan/activations.h"

namespace cairn::inference {

Result<std::unique_ptr<Session>> Session::make(const Recipe& trained) {
  if (trained.model.mask != Mask::kCausal) {
    return Error{ErrorCode::kUnsupported,
                 "this model's tokens see those to their right (model.mask): it has no next token to compute"};
  }
  Recipe recipe = trained;
  recipe.mesh = MeshConfig{.dp = 1};
  recipe.batch = {.samples = 1, .micro = 1};
  recipe.optimizer = {};
  RT_TRY_SET(Plan plan, make_plan(recipe, 1));
  RankPlan rank = plan.rank(0);
  std::unique_ptr<Session> out(new Session(std::move(plan), std::move(rank)));
  const Device cpu{DeviceKind::kCpu, 0};
  RT_TRY_SET(out->weights_, Buffer::allocate(cpu, out->rank_.weight_bytes));
  if (out->plan_.compute_dtype() != DType::kF32) {
    RT_TRY_SET(out->master_, Buffer::allocate(cpu, out->rank_.flat_elems * 4));
  }
  RT_TRY_SET(out->activations_, Buffer::allocate(cpu, stage_buffers_bytes(out->plan_, out->rank_)));
  out->engine_ = comm::ThreadWorld(1).engine(0);
  RT_TRY_SET(out->tp_, out->engine_->group("tp", {0}));
  RT_TRY_SET(out->model_, nn::StageModel::make(out->plan_, out->rank_, 0, *out->tp_, out->weights_.data(), nullptr,
                                               out->activations_.as<std::byte>()));
  out->tokens_.resize(recipe.model.context);
  out->targets_.resize(recipe.model.context);
  return out;
}

std::vector<trainer::StateTensor> Session::weights() {
  Buffer& floats = master_.size_bytes() > 0 ? master_ : weights_;
  std::vector<trainer::StateTensor> out;
  for (const StatePiece& piece : rank_.pieces) {
    out.push_back({trainer::StateKind::kWeight, piece.tensor, piece.box, floats.data() + piece.flat_offset * 4,
                   piece.count_elems() * 4, true});
  }
  return out;
}

void Session::weights_ready() {
  if (master_.size_bytes() == 0) return;
  const float* const master = master_.as<float>().data();
  if (plan_.compute_dtype() == DType::kBf16) {
    kernels::cast(master, weights_.as<bf16>().data(), rank_.flat_elems);
  } else {
    kernels::cast(master, weights_.as<f16>().data(), rank_.flat_elems);
  }
}

Status Session::forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  const ModelConfig& model = plan_.recipe.model;
  if (tokens.empty() || static_cast<int64_t>(tokens.size()) > model.context) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} tokens do not fit: the context holds 1 to {}", tokens.size(), model.context)};
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= model.vocab) {
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("token {} is outside the vocabulary of {}", token, model.vocab)};
    }
  }
  // Attention is causal: what stands right of the tokens does not reach them.
  std::fill(std::copy(tokens.begin(), tokens.end(), tokens_.begin()), tokens_.end(), 0);
  std::fill(std::copy(targets.begin(), targets.end(), targets_.begin()), targets_.end(), 0);
  return model_->forward(0, tokens_.data(), targets_.data(), nullptr, nullptr);
}

Result<std::span<const float>> Session::logits(std::span<const int32_t> tokens) {
  const ModelConfig& model = plan_.recipe.model;
  RT_TRY(forward(tokens, {}));
  logits_.resize(model.context * model.vocab);
  RT_TRY(model_->logits(0, logits_));
  return std::span<const float>(logits_.data(), tokens.size() * model.vocab);
}

Result<std::vector<float>> Session::token_losses(std::span<const int32_t> tokens) {
  if (tokens.size() < 2) return Error{ErrorCode::kInvalidInput, "a loss needs at least two tokens"};
  RT_TRY(forward(tokens.first(tokens.size() - 1), tokens.subspan(1)));
  const std::span<const float> losses = model_->token_losses(0).first(tokens.size() - 1);
  return std::vector<float>(losses.begin(), losses.end());
}

int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t index) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (sampling.temperature <= 0) return order[0];
  size_t kept = order.size();
  if (sampling.top_k > 0) kept = std::min(kept, static_cast<size_t>(sampling.top_k));
  std::vector<double> weight(kept);
  double total = 0;
  for (size_t k = 0; k < kept; ++k) {
    weight[k] = std::exp((logits[order[k]] - logits[order[0]]) / sampling.temperature);
    total += weight[k];
  }
  // Nucleus: the fewest most likely tokens whose probabilities reach top_p.
  double nucleus = 0;
  for (size_t k = 0; k < kept && sampling.top_p < 1.0; ++k) {
    nucleus += weight[k];
    if (nucleus >= sampling.top_p * total) {
      kept = k + 1;
      total = nucleus;
      break;
    }
  }
  double left = uniform_at(stream_key(sampling.seed, "sample"), index) * total;
  for (size_t k = 0; k + 1 < kept; ++k) {
    left -= weight[k];
    if (left < 0) return order[k];
  }
  return order[kept - 1];
}

Status generate(Session& session, std::vector<int32_t> tokens, int64_t count, const Sampling& sampling,
                const std::function<void(int32_t)>& on_token) {
  if (tokens.empty()) return Error{ErrorCode::kInvalidInput, "the prompt has no tokens"};
  const auto context = static_cast<size_t>(session.plan().recipe.model.context);
  const int64_t vocab = session.plan().recipe.model.vocab;
  for (int64_t k = 0; k < count; ++k) {
    const size_t seen = std::min(tokens.size(), context);
    RT_TRY_SET(const std::span<const float> logits, session.logits(std::span<const int32_t>(tokens).last(seen)));
    tokens.push_back(sample_token(logits.last(vocab), sampling, k));
    on_token(tokens.back());
  }
  return {};
}

}  // namespace cairn::inference
