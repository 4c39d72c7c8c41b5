#include "runtime/inference/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "runtime/comm/thread_world.h"
#include "runtime/kernels/elementwise.h"
#include "runtime/plan/activations.h"
#include "runtime/trainer/work_shapes.h"

namespace cairn::inference {
namespace {

constexpr int64_t kTextRows = 64;  // passes over whole texts come in multiples of this
// Rows of the passes that read a prompt: the largest while it is long, then the smallest that holds the rest.
constexpr int64_t kPromptRows[] = {8, 64, 256};
constexpr size_t kMostPasses = 64;  // whose buffers are kept

/// Where the first `rows` tokens of a sequence stand.
std::vector<int32_t> shaped_positions(int64_t rows, const PromptShape& shape) {
  std::vector<int32_t> out(rows);
  for (int64_t r = 0; r < rows; ++r) {
    out[r] = static_cast<int32_t>(shape.gap >= 0 && r >= shape.prefix ? shape.gap : r);
  }
  return out;
}

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

}  // namespace

Result<Plan> Session::plan_of(const Recipe& trained) {
  if (trained.model.mask == Mask::kBidirectional) {
    return Error{ErrorCode::kUnsupported,
                 "this model's tokens see those to their right (model.mask): it has no next token to compute"};
  }
  // A run of one rank and one sample. How the model was trained (layout, schedule, rates) is not asked for.
  Recipe recipe;
  recipe.name = "inference";
  recipe.seed = trained.seed;
  recipe.model = trained.model;
  recipe.precision = trained.precision;
  recipe.deterministic = trained.deterministic;
  recipe.batch = {.samples = 1, .micro = 1};
  if (recipe.model.mask == Mask::kPrefix) recipe.objective.kind = ObjectiveConfig::Kind::kPrefix;
  RT_TRY_SET(Plan plan, make_plan(recipe, 1));
  plan.recipe.objective = {};  // no targets
  return plan;
}

Result<std::unique_ptr<Session>> Session::make(const Recipe& trained, Machine* machine) {
  RT_TRY_SET(Plan plan, plan_of(trained));
  RankPlan rank = plan.rank(0);
  std::unique_ptr<Session> out(new Session(std::move(plan), std::move(rank), machine));
  if (machine != nullptr) RT_TRY(machine->allow(trainer::forward_shapes(out->plan_, out->rank_)));
  RT_TRY_SET(out->weights_, Buffer::allocate(out->device(), out->rank_.weight_bytes));
  if (machine != nullptr || out->plan_.compute_dtype() != DType::kF32) {
    RT_TRY_SET(out->master_, Buffer::allocate({DeviceKind::kCpu, 0}, out->rank_.flat_elems * 4));
  }
  out->engine_ = comm::ThreadWorld(1).engine(0);
  RT_TRY_SET(out->tp_, out->engine_->group("tp", {0}));
  return out;
}

std::vector<trainer::StateTensor> Session::weights() {
  Buffer& floats = master_.size_bytes() > 0 ? master_ : weights_;
  std::vector<trainer::StateTensor> out;
  for (const StatePiece& piece : rank_.pieces) {
    out.push_back({trainer::StateKind::kWeight, piece.tensor, piece.box, floats.at() + piece.flat_offset * 4,
                   piece.count_elems() * 4, true});
  }
  return out;
}

Status Session::weights_ready() {
  if (master_.size_bytes() == 0) return {};
  const float* const master = master_.as<float>().data();
  const auto rounded = [&](Buffer& to) {
    if (plan_.compute_dtype() == DType::kBf16) {
      kernels::cast(master, to.as<bf16>().data(), rank_.flat_elems);
    } else if (plan_.compute_dtype() == DType::kF16) {
      kernels::cast(master, to.as<f16>().data(), rank_.flat_elems);
    }
  };
  if (machine_ == nullptr) {
    rounded(weights_);
  } else if (plan_.compute_dtype() == DType::kF32) {
    stream_->give(std::span<const std::byte>(master_.as<std::byte>()), weights_.at());
    RT_TRY(stream_->settle());
  } else {
    RT_TRY_SET(Buffer host, Buffer::allocate({DeviceKind::kCpu, 0}, rank_.weight_bytes));
    rounded(host);
    stream_->give(std::span<const std::byte>(host.as<std::byte>()), weights_.at());
    RT_TRY(stream_->settle());
  }
  master_ = Buffer();
  return {};
}

int64_t Session::positions_for(int64_t tokens) const {
  const ModelConfig& model = plan_.recipe.model;
  const int64_t original =
      model.rope.original_context > 0 ? std::min(model.rope.original_context, model.context) : model.context;
  if (model.positions == Positions::kRotary) {
    if (model.rope.scaling == RopeScaling::kLongRope && tokens <= original) return original;
    if (model.rope.scaling == RopeScaling::kDynamic) return std::clamp(tokens, original, model.context);
  }
  return model.context;
}

Result<nn::StageModel*> Session::pass(int64_t samples, int64_t pass_tokens, int64_t positions) {
  if (const auto made = passes_.find({samples, pass_tokens, positions}); made != passes_.end()) {
    return made->second->model.get();
  }
  if (passes_.size() >= kMostPasses) {  // dynamic scaling has angles for each length
    RT_TRY(stream_->settle());
    passes_.clear();
    text_pass_ = nullptr;
  }
  auto made = std::make_unique<Pass>(Pass{.plan = plan_});
  made->plan.recipe.batch.micro = made->plan.recipe.batch.samples = samples;
  made->plan.pass_tokens = pass_tokens;
  made->plan.recipe.model.context = positions;
  made->rank = made->plan.rank(0);
  if (machine_ != nullptr) RT_TRY(machine_->allow(trainer::forward_shapes(made->plan, made->rank)));
  // Memory of its own: a model keeps tables in it that it writes once.
  RT_TRY_SET(made->activations, Buffer::allocate(device(), stage_buffers_bytes(made->plan, made->rank)));
  RT_TRY_SET(made->model, nn::StageModel::make(*stream_, made->plan, made->rank, 0, {.tp = tp_.get()}, weights_.at(),
                                               nullptr, made->activations.all()));
  nn::StageModel* const model = made->model.get();
  passes_[{samples, pass_tokens, positions}] = std::move(made);
  return model;
}

Status Session::check_tokens(std::span<const int32_t> tokens, int64_t most) const {
  const ModelConfig& model = plan_.recipe.model;
  if (tokens.empty() || std::ssize(tokens) > most) {
    return invalid(fmt::format("{} tokens do not fit: the context holds 1 to {}", tokens.size(), most));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= model.vocab) {
      return invalid(fmt::format("token {} is outside the vocabulary of {}", token, model.vocab));
    }
  }
  return {};
}

Status Session::check_shape(std::span<const int32_t> tokens, const PromptShape& shape) const {
  if (shape.plain()) return {};
  const ModelConfig& model = plan_.recipe.model;
  if (model.mask != Mask::kPrefix) return invalid("a prompt with a prefix is for a model with model.mask = prefix");
  if (shape.prefix < 0 || shape.prefix > std::ssize(tokens)) {
    return invalid(fmt::format("a prefix of {} tokens in a prompt of {}", shape.prefix, tokens.size()));
  }
  if (shape.gap >= shape.prefix) {
    return invalid(fmt::format("a gap at position {} of a prefix of {} tokens", shape.gap, shape.prefix));
  }
  return {};
}

Status Session::forward(std::span<const int32_t> tokens, std::span<const int32_t> targets, const PromptShape& shape,
                        const nn::SequenceRows& parted) {
  RT_TRY(check_tokens(tokens, plan_.recipe.model.context));
  RT_TRY(check_shape(tokens, shape));
  const int64_t positions = positions_for(std::ssize(tokens));
  const int64_t rows = std::min(positions, (std::ssize(tokens) + kTextRows - 1) / kTextRows * kTextRows);
  RT_TRY_SET(text_pass_, pass(1, rows, positions));
  // Behind a prefix attention is causal: what stands right of the tokens does not reach them.
  tokens_.assign(rows, 0);
  targets_.assign(rows, 0);
  std::copy(tokens.begin(), tokens.end(), tokens_.begin());
  std::copy(targets.begin(), targets.end(), targets_.begin());
  if (!parted.empty()) {
    std::vector<int32_t> at(parted.positions.begin(), parted.positions.end());
    std::vector<int32_t> starts(parted.starts.begin(), parted.starts.end());
    for (auto r = static_cast<int32_t>(tokens.size()); r < rows; ++r) {  // each sees itself
      if (!at.empty()) at.push_back(0);
      if (!starts.empty()) starts.push_back(r);
    }
    text_pass_->set_sequences(0, {.positions = at, .starts = starts, .ends = {}});
  } else if (shape.plain()) {
    text_pass_->set_sequences(0, {});
  } else {
    const std::vector<int32_t> ends(rows, static_cast<int32_t>(shape.prefix)), at = shaped_positions(rows, shape);
    text_pass_->set_sequences(0, {.positions = at, .starts = {}, .ends = ends});
  }
  return text_pass_->forward(0, tokens_.data(), targets_.data(), nullptr, nullptr);
}

Result<std::span<const float>> Session::logits(std::span<const int32_t> tokens, const PromptShape& shape) {
  const ModelConfig& model = plan_.recipe.model;
  RT_TRY(forward(tokens, {}, shape));
  logits_.resize(tokens_.size() * model.vocab);
  RT_TRY(text_pass_->logits(0, logits_));
  return std::span<const float>(logits_.data(), tokens.size() * model.vocab);
}

Result<std::vector<float>> Session::token_losses(std::span<const int32_t> tokens) {
  if (tokens.size() < 2) return invalid("a loss needs at least two tokens");
  return token_losses(tokens.first(tokens.size() - 1), tokens.subspan(1));
}

Result<std::vector<float>> Session::token_losses(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                                                 const nn::SequenceRows& rows) {
  RT_CHECK(targets.size() == tokens.size(), "{} targets of {} tokens", targets.size(), tokens.size());
  RT_TRY(forward(tokens, targets, {}, rows));
  std::vector<float> losses(tokens_.size());
  text_pass_->token_losses(0, losses);
  RT_TRY(stream_->settle());
  losses.resize(tokens.size());
  return losses;
}

Status Session::make_cache(int64_t sequences, int64_t capacity) {
  const ModelConfig& model = plan_.recipe.model;
  if (sequences < 1 || capacity < 1 || capacity > model.context) {
    return invalid(
        fmt::format("a cache of {} sequences of {} tokens; the context holds {}", sequences, capacity, model.context));
  }
  cache_ = {.sequences = sequences, .capacity = capacity, .row_elems = cached_elems(model)};
  const int64_t elems = attention_layers(model) * sequences * capacity * cache_.row_elems;
  const int64_t bytes = elems * dtype_size_bytes(plan_.compute_dtype());
  keys_ = Buffer();
  values_ = Buffer();
  RT_TRY_SET(keys_, Buffer::allocate(device(), bytes));
  cache_.key_memory = keys_.at();
  if (!has_mla(model)) {  // a latent vector is key and value
    RT_TRY_SET(values_, Buffer::allocate(device(), bytes));
    cache_.value_memory = values_.at();
  }
  lengths_.assign(sequences, 0);
  gaps_.assign(sequences, -1);
  return {};
}

Status Session::feed(int64_t sequence, std::span<const int32_t> tokens, Rows wanted) {
  const auto count = std::ssize(tokens);
  int64_t rows = kPromptRows[0];
  for (const int64_t size : kPromptRows) {
    if (rows < count) rows = size;
  }
  std::vector<int32_t> ids(rows, 0), sequences(rows, static_cast<int32_t>(sequence)), places(rows, -1);
  for (int64_t r = 0; r < std::min(rows, count); ++r) {
    ids[r] = tokens[r];
    places[r] = static_cast<int32_t>(lengths_[sequence] + r);
  }
  RT_TRY_SET(nn::StageModel* const model, pass(1, rows, positions_for(cache_.capacity)));
  RT_TRY(model->forward_cached(ids.data(), {.cache = &cache_,
                                            .sequence = sequences,
                                            .place = places,
                                            .position = {},
                                            .ends = {},
                                            .cache_rows = {},
                                            .from_start = lengths_[sequence] == 0}));
  lengths_[sequence] += std::min(rows, count);
  const auto vocab = static_cast<size_t>(plan_.recipe.model.vocab);
  if (wanted == Rows::kEach) {
    const size_t before = logits_.size(), made = static_cast<size_t>(std::min(rows, count));
    logits_.resize(before + made * vocab);
    RT_TRY(model->cached_logits(0, static_cast<int64_t>(made), std::span(logits_).subspan(before)));
  }
  if (count > rows) {
    RT_TRY(stream_->settle());  // a device has taken what this pass gave it
    return feed(sequence, tokens.subspan(rows), wanted);
  }
  if (wanted == Rows::kEach) return {};
  logits_.resize(vocab);
  return model->cached_logits(count - 1, 1, logits_);
}

Result<std::span<const float>> Session::resume(int64_t sequence, int64_t kept, std::span<const int32_t> tokens) {
  RT_CHECK(sequence >= 0 && sequence < cache_.sequences, "sequence {} of {}", sequence, cache_.sequences);
  RT_CHECK(kept >= 0 && kept <= lengths_[sequence], "{} kept tokens of {}", kept, lengths_[sequence]);
  RT_TRY(check_tokens(tokens, cache_.capacity - kept));
  if (gaps_[sequence] >= 0) return invalid("a text with a gap is read as a whole");
  lengths_[sequence] = kept;
  logits_.clear();
  RT_TRY(feed(sequence, tokens, Rows::kEach));
  return std::span<const float>(logits_);
}

Status Session::feed_shaped(int64_t sequence, std::span<const int32_t> tokens, const PromptShape& shape) {
  const int64_t count = std::ssize(tokens), rows = (count + kTextRows - 1) / kTextRows * kTextRows;
  std::vector<int32_t> ids(rows, 0), places(rows, -1);
  const std::vector<int32_t> sequences(rows, static_cast<int32_t>(sequence)),
      ends(rows, static_cast<int32_t>(shape.prefix)), positions = shaped_positions(rows, shape);
  std::copy(tokens.begin(), tokens.end(), ids.begin());
  std::iota(places.begin(), places.begin() + count, 0);
  RT_TRY_SET(nn::StageModel* const model, pass(1, rows, positions_for(cache_.capacity)));
  RT_TRY(model->forward_cached(ids.data(), {.cache = &cache_,
                                            .sequence = sequences,
                                            .place = places,
                                            .position = positions,
                                            .ends = ends,
                                            .cache_rows = {},
                                            .from_start = true}));
  lengths_[sequence] = count;
  gaps_[sequence] = shape.gap;
  logits_.resize(plan_.recipe.model.vocab);
  return model->cached_logits(count - 1, 1, logits_);
}

Result<std::span<const float>> Session::start(int64_t sequence, std::span<const int32_t> tokens,
                                              const PromptShape& shape) {
  RT_CHECK(sequence >= 0 && sequence < cache_.sequences, "sequence {} of {}", sequence, cache_.sequences);
  RT_TRY(check_tokens(tokens, cache_.capacity));
  RT_TRY(check_shape(tokens, shape));
  lengths_[sequence] = 0;
  gaps_[sequence] = -1;
  RT_TRY(shape.plain() ? feed(sequence, tokens) : feed_shaped(sequence, tokens, shape));
  return std::span<const float>(logits_);
}

Result<std::span<const float>> Session::next(std::span<const int32_t> tokens) {
  const int64_t rows = cache_.sequences;
  RT_CHECK(std::ssize(tokens) == rows, "{} tokens for {} sequences", tokens.size(), rows);
  std::vector<int32_t> ids(rows, 0), sequences(rows), places(rows, -1), positions(rows, 0);
  for (int64_t r = 0; r < rows; ++r) {
    sequences[r] = static_cast<int32_t>(r);
    if (tokens[r] < 0) continue;
    RT_TRY(check_tokens(tokens.subspan(r, 1), 1));
    if (lengths_[r] >= cache_.capacity) {
      return invalid(fmt::format("sequence {} is full: its cache holds {} tokens", r, cache_.capacity));
    }
    ids[r] = tokens[r];
    places[r] = static_cast<int32_t>(lengths_[r]++);
    positions[r] = gaps_[r] >= 0 ? static_cast<int32_t>(gaps_[r]) : places[r];
  }
  RT_TRY_SET(nn::StageModel* const model, pass(rows, 1, positions_for(cache_.capacity)));
  RT_TRY(model->forward_cached(ids.data(), {.cache = &cache_,
                                            .sequence = sequences,
                                            .place = places,
                                            .position = positions,
                                            .ends = {},
                                            .cache_rows = {},
                                            .from_start = false}));
  logits_.resize(rows * plan_.recipe.model.vocab);
  RT_TRY(model->cached_logits(0, rows, logits_));
  return std::span<const float>(logits_);
}

}  // namespace cairn::inference
