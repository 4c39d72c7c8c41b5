#pragma once
// The decoder once more, in double precision, as plainly as it can be written: no tiles, no fusion, no parallelism, and
// no code shared with what it judges but the draw of dropout masks. Rows are tokens in flat order, row = sample * S +
// position.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/config/model.h"
#include "runtime/kernels/dropout.h"

namespace cairn::nn::testing {

using Matrix = std::vector<std::vector<double>>;             // [rows][width]
using Weights = std::map<std::string, std::vector<double>>;  // by logical name, row-major

class Reference {
 public:
  /// `dropout_keys`: one a sample; without them nothing is dropped.
  Reference(const ModelConfig& model, const Weights& weights, std::vector<uint64_t> dropout_keys = {})
      : m_(model), w_(weights), keys_(std::move(dropout_keys)) {}

  /// As SequenceRows, each [rows] or empty.
  void set_rows(std::vector<int32_t> positions, std::vector<int32_t> starts, std::vector<int32_t> ends) {
    positions_ = std::move(positions);
    starts_ = std::move(starts);
    ends_ = std::move(ends);
  }

  Matrix embed(const std::vector<int32_t>& tokens) const {
    tokens_ = tokens;
    const int64_t width = m_.embed_dim > 0 ? m_.embed_dim : m_.width;
    Matrix x(tokens.size(), std::vector<double>(width));
    for (size_t r = 0; r < tokens.size(); ++r) {
      for (int64_t c = 0; c < width; ++c) x[r][c] = m_.embedding_scale * w_.at("embed.tokens")[tokens[r] * width + c];
    }
    if (width != m_.width) x = linear(x, "embed.project_in");
    if (m_.positions == Positions::kLearned) {
      for (size_t r = 0; r < tokens.size(); ++r) {
        const int64_t row = position_of(r) + m_.position_offset;
        for (int64_t c = 0; c < m_.width; ++c) x[r][c] += w_.at("embed.positions")[row * m_.width + c];
      }
    }
    if (m_.embedding_norm) x = norm(x, "embed.norm");
    drop(x, m_.embedding_dropout, -1, 0);
    return x;
  }

  Matrix layers(Matrix x, int64_t first, int64_t end) const {
    for (int64_t i = first; i < end; ++i) {
      x = layer(std::move(x), i, "layers." + std::to_string(i) + ".");
    }
    return x;
  }

  /// Layer `i`, whose tensors begin with `p`.
  Matrix layer(Matrix x, int64_t i, const std::string& p) const {
    const bool parallel = m_.block == BlockKind::kParallel || m_.block == BlockKind::kParallelShared;
    const Matrix input = x;
    branch(x, x, p, "attn", [&](const Matrix& at) {
      Matrix out = attention(at, p + "attn.", i);
      drop(out, m_.residual_dropout, i, 2);
      return out;
    });
    branch(x, parallel ? input : x, p, "mlp", [&](const Matrix& at) {
      Matrix out = w_.count(p + "moe.router.weight") > 0 ? experts(at, p + "moe.") : mlp(at, p + "mlp.");
      drop(out, m_.residual_dropout, i, 3);
      return out;
    });
    return x;
  }

  Matrix logits(const Matrix& x) const { return logits_of_normed(m_.final_norm ? norm(x, "final_norm") : x); }

  Matrix logits_of_normed(Matrix y) const {
    if (m_.top_query) y = layer(std::move(y), m_.layers, "top_query.");
    if (w_.count("head.project_out.weight") > 0) y = linear(y, "head.project_out");
    Matrix z = linear(y, m_.tied_embeddings ? "embed.tokens" : "head.weight", true);
    for (std::vector<double>& row : z) {
      for (size_t v = 0; v < row.size(); ++v) {
        if (m_.head_bias) row[v] += w_.at("head.bias")[v];
        row[v] = capped(row[v] * m_.logit_scale, m_.logit_cap);
      }
    }
    return z;
  }

  std::vector<double> losses(const Matrix& x, const std::vector<int32_t>& targets) const {
    return losses_of(logits(x), targets);
  }

  static std::vector<double> losses_of(const Matrix& z, const std::vector<int32_t>& targets) {
    std::vector<double> out;
    for (size_t r = 0; r < z.size(); ++r) {
      double sum = 0;
      for (const double v : z[r]) sum += std::exp(v - z[r][0]);
      out.push_back(targets[r] < 0 ? 0.0 : std::log(sum) + z[r][0] - z[r][targets[r]]);
    }
    return out;
  }

  /// Of the modules behind the model, from its last layer's output for the tokens that were embedded last: by module
  /// the loss of each row, 0 where it guesses nothing.
  std::vector<std::vector<double>> further_losses(const Matrix& x, const std::vector<int32_t>& targets) const {
    std::vector<std::vector<double>> out;
    Matrix hidden = norm(x, "final_norm");
    const int64_t rows = std::ssize(targets);
    for (int64_t k = 0; k < m_.mtp.depth; ++k) {
      const std::string p = "mtp." + std::to_string(k) + ".";
      Matrix ahead(rows, std::vector<double>(m_.width));
      std::vector<int32_t> guessed(rows, -1);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t left = m_.context - 1 - r % m_.context;  // rows behind this one in its sample
        const int64_t token = left >= k + 1 ? tokens_[r + k + 1] : 0;
        for (int64_t c = 0; c < m_.width; ++c) ahead[r][c] = w_.at("embed.tokens")[token * m_.width + c];
        if (left < k + 1) continue;
        const bool whole = std::all_of(&targets[r], &targets[r + k + 1], [](int32_t t) { return t >= 0; });
        if (whole) guessed[r] = targets[r + k + 1];
      }
      Matrix joined = norm(ahead, p + "embed_norm");
      const Matrix rest = norm(hidden, p + "hidden_norm");
      for (int64_t r = 0; r < rows; ++r) joined[r].insert(joined[r].end(), rest[r].begin(), rest[r].end());
      hidden = norm(layer(linear(joined, p + "project"), m_.layers + k, p), p + "norm");
      out.push_back(losses_of(logits_of_normed(hidden), guessed));
    }
    return out;
  }

  /// Sum of the losses from the input of layer `first` on, with what balances experts; earlier layers' choices are
  /// those of the last run. A module's losses weigh as if every row had one.
  double loss_from(const Matrix& x, int64_t first, const std::vector<int32_t>& targets) const {
    balance_ = 0;
    double sum = 0;
    const Matrix last = layers(x, first, m_.layers);
    for (const double loss : losses(last, targets)) sum += loss;
    const auto tokens = static_cast<double>(m_.context), depth = static_cast<double>(m_.mtp.depth);
    double guessing = tokens;  // rows of a sample
    if (m_.mtp.depth > 0) {
      for (const std::vector<double>& module : further_losses(last, targets)) {
        guessing -= 1;
        for (const double loss : module) sum += loss * m_.mtp.loss / depth * tokens / guessing;
      }
    }
    return sum + balance_ + balance();
  }

  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) const {
    return loss_from(embed(tokens), 0, targets);
  }

 private:
  /// x becomes what the layer makes of it and of a branch f that reads `input`.
  template <typename F>
  void branch(Matrix& x, const Matrix& input, const std::string& p, const std::string& name, const F& f) const {
    const std::string before = p + (m_.block == BlockKind::kParallelShared ? "attn" : name) + "_norm";
    const bool bare = m_.block == BlockKind::kPostNorm || m_.block == BlockKind::kOutNorm;
    const Matrix read = bare ? input : norm(input, before);
    Matrix out = f(read);
    if (m_.block == BlockKind::kSandwich || m_.block == BlockKind::kOutNorm) out = norm(out, p + name + "_out_norm");
    for (std::vector<double>& row : out) {
      for (double& v : row) v *= m_.branch_scale;
    }
    if (m_.block == BlockKind::kDeepNorm) {
      x = read;
      for (std::vector<double>& row : x) {
        for (double& v : row) v *= m_.residual_scale;
      }
    }
    add(x, out);
    if (m_.block == BlockKind::kPostNorm) x = norm(x, before);
  }

  /// 0 or 1 / (1 - rate) for element `c` of row `row` of the sample of row r.
  double factor(double rate, size_t r, int64_t layer, uint64_t place, uint64_t row, int64_t c) const {
    if (keys_.empty() || rate == 0) return 1;
    float out = 0;
    const uint64_t key = kernels::dropout_row_key(keys_[r / m_.context], kernels::dropout_site(layer, place), row);
    kernels::dropout_factors(key, c, 1, kernels::DropoutRate::of(rate), &out);
    return out == 0 ? 0 : 1 / (1 - rate);
  }

  void drop(Matrix& x, double rate, int64_t layer, uint64_t place) const {
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t c = 0; c < x[r].size(); ++c) {
        x[r][c] *= factor(rate, r, layer, place, r % m_.context, static_cast<int64_t>(c));
      }
    }
  }

  static void add(Matrix& x, const Matrix& y) {
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t c = 0; c < x[r].size(); ++c) x[r][c] += y[r][c];
    }
  }

  Matrix linear(const Matrix& x, const std::string& name, bool bare_name = false) const {
    const std::vector<double>& weight = w_.at(bare_name ? name : name + ".weight");
    const size_t in = x[0].size(), out = weight.size() / in;
    const auto bias = w_.find(name + ".bias");
    Matrix y(x.size(), std::vector<double>(out));
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t o = 0; o < out; ++o) {
        double sum = bias == w_.end() ? 0 : bias->second[o];
        for (size_t i = 0; i < in; ++i) sum += x[r][i] * weight[o * in + i];
        y[r][o] = sum;
      }
    }
    return y;
  }

  Matrix norm(const Matrix& x, const std::string& name) const {
    Matrix y = x;
    for (std::vector<double>& row : y) {
      const auto n = static_cast<double>(row.size());
      double mean = 0, square = 0;
      if (m_.norm == NormKind::kLayerNorm) {
        for (const double v : row) mean += v / n;
      }
      for (const double v : row) square += (v - mean) * (v - mean) / n;
      for (size_t c = 0; c < row.size(); ++c) {
        row[c] = (row[c] - mean) / std::sqrt(square + m_.norm_eps);
        if (m_.norm_weight) row[c] *= factor_of(name + ".weight", c);
        if (m_.norm == NormKind::kLayerNorm && m_.norm_weight && m_.norm_bias) row[c] += w_.at(name + ".bias")[c];
      }
    }
    return y;
  }

  static double capped(double x, double cap) { return cap > 0 ? cap * std::tanh(x / cap) : x; }

  double factor_of(const std::string& weight, size_t c) const {
    return w_.at(weight)[c] + (m_.norm_plus_one ? 1.0 : 0.0);
  }

  static bool named(const std::vector<int64_t>& layers, int64_t layer) {
    return std::find(layers.begin(), layers.end(), layer) != layers.end();
  }

  bool windowed(int64_t layer) const {
    bool out = m_.sliding_window > 0 && m_.window_layers.empty();
    for (const int64_t l : m_.window_layers) out = out || l == layer;
    return out;
  }

  /// Angle of pair i at position 1, for the scalings that a formula of one line gives.
  double frequency(int64_t layer, int64_t i, double dims) const {
    const RopeConfig& rope = m_.rope;
    if (m_.window_rope_theta > 0 && windowed(layer)) {
      return std::pow(m_.window_rope_theta, -2.0 * static_cast<double>(i) / dims);
    }
    const double original = static_cast<double>(rope.original_context > 0 ? rope.original_context : m_.context);
    double base = m_.rope_theta;
    if (rope.scaling == RopeScaling::kDynamic && m_.context > original) {
      base *= std::pow(rope.factor * m_.context / original - (rope.factor - 1), dims / (dims - 2));
    }
    const double out = std::pow(base, -2.0 * static_cast<double>(i) / dims);
    return rope.scaling == RopeScaling::kLinear ? out / rope.factor : out;
  }

  /// The channels that turn are `first` and those behind it, of heads of `width` channels.
  void rotate(Matrix& x, int64_t heads, int64_t layer, int64_t width, int64_t first = 0) const {
    for (const int64_t l : m_.nope_layers) {
      if (l == layer) return;
    }
    const int64_t dims = m_.rope.dims > 0 ? m_.rope.dims : width - first;
    const bool interleaved = m_.rope.pairs == RotaryPairs::kInterleaved;
    for (size_t r = 0; r < x.size(); ++r) {
      const auto position = static_cast<double>(position_of(r));
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < dims / 2; ++i) {
          const double angle = position * frequency(layer, i, static_cast<double>(dims));
          double& a = x[r][h * width + first + (interleaved ? 2 * i : i)];
          double& b = x[r][h * width + first + (interleaved ? 2 * i + 1 : i + dims / 2)];
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = b * std::cos(angle) + a * std::sin(angle);
          a = turned;
        }
      }
    }
  }

  void norm_qk(Matrix& x, const std::string& name) const {
    for (std::vector<double>& row : x) {
      const size_t size = m_.qk_norm == QkNorm::kWhole ? row.size() : static_cast<size_t>(m_.head_dim);
      for (size_t first = 0; first < row.size(); first += size) {
        const size_t weights = m_.qk_norm == QkNorm::kHeadLayerNorm ? first : 0;
        const bool shared = m_.qk_norm == QkNorm::kSharedLayerNorm;
        double mean = 0, square = 0;
        for (size_t i = 0; i < size && (shared || m_.qk_norm == QkNorm::kHeadLayerNorm); ++i) {
          mean += row[first + i] / static_cast<double>(size);
        }
        for (size_t i = 0; i < size; ++i) square += std::pow(row[first + i] - mean, 2) / static_cast<double>(size);
        for (size_t i = 0; i < size; ++i) {
          const double factor = m_.qk_norm == QkNorm::kL2 ? 1.0 : factor_of(name + ".weight", weights + i);
          row[first + i] = (row[first + i] - mean) * factor / std::sqrt(square + m_.norm_eps);
          if (shared) row[first + i] += w_.at(name + ".bias")[i];
        }
      }
    }
  }

  /// ALiBi's slope by the recursive definition of the paper's code.
  static double slope(int64_t heads, int64_t head) {
    const double levels = std::log2(static_cast<double>(heads));
    if (levels == std::floor(levels)) {
      const double ratio = std::pow(2.0, -std::pow(2.0, -(levels - 3)));
      return std::pow(ratio, head + 1);
    }
    const int64_t closest = int64_t{1} << static_cast<int64_t>(std::floor(levels));
    return head < closest ? slope(closest, head) : slope(2 * closest, 2 * (head - closest));
  }

  /// What ALiBi adds to the score of a key.
  double added(int64_t head, size_t row, int64_t key, double scale) const {
    if (m_.alibi == AlibiForm::kDistance) {
      return slope(m_.heads, head) * static_cast<double>(key - static_cast<int64_t>(row) % m_.context);
    }
    const auto rounded = [](double x) { return static_cast<double>(to_f32(to_bf16(static_cast<float>(x)))); };
    const int64_t position = key - (starts_.empty() ? 0 : starts_[row]);
    return scale * rounded(rounded(slope(m_.heads, head)) * static_cast<double>(position));
  }

  int64_t position_of(size_t row) const {
    return positions_.empty() ? static_cast<int64_t>(row) % m_.context : positions_[row];
  }

  bool sees(int64_t layer, size_t row, int64_t key) const {
    const int64_t query = static_cast<int64_t>(row) % m_.context;
    if (!starts_.empty() && key < starts_[row]) return false;
    if (!ends_.empty() && key < ends_[row]) return true;
    if (windowed(layer) && key <= query - m_.sliding_window) return false;
    if (m_.attention_chunk > 0 && (m_.chunk_layers.empty() || named(m_.chunk_layers, layer))) {
      const int64_t start = starts_.empty() ? 0 : starts_[row];
      if ((key - start) / m_.attention_chunk != (query - start) / m_.attention_chunk) return false;
    }
    return m_.mask == Mask::kBidirectional || key <= query;
  }

  static Matrix columns(const Matrix& x, int64_t first, int64_t count) {
    Matrix out;
    for (const std::vector<double>& row : x) out.emplace_back(row.begin() + first, row.begin() + first + count);
    return out;
  }

  Matrix latent_norm(Matrix x, const std::string& name) const {
    for (std::vector<double>& row : x) {
      double square = 0;
      for (const double v : row) square += v * v / static_cast<double>(row.size());
      for (size_t c = 0; c < row.size(); ++c) row[c] *= factor_of(name + ".weight", c) / std::sqrt(square + 1e-6);
    }
    return x;
  }

  /// q, k [rows, N, nope + rope] and v [rows, N, value] of multi-head latent attention.
  void from_latents(const Matrix& x, const std::string& p, int64_t layer, Matrix& q, Matrix& k, Matrix& v) const {
    const MlaConfig& mla = m_.mla;
    const int64_t own = mla.nope_dim + mla.value_dim, key = mla.nope_dim + mla.rope_dim;
    q = mla.q_rank > 0 ? linear(latent_norm(linear(x, p + "q_a"), p + "q_a_norm"), p + "q_b") : linear(x, p + "q");
    const Matrix a = linear(x, p + "kv_a");
    Matrix shared = columns(a, mla.kv_rank, mla.rope_dim);
    const Matrix kv = linear(latent_norm(columns(a, 0, mla.kv_rank), p + "kv_a_norm"), p + "kv_b");
    rotate(q, m_.heads, layer, key, mla.nope_dim);
    rotate(shared, 1, layer, mla.rope_dim);
    k.assign(x.size(), {});
    v.assign(x.size(), {});
    for (size_t r = 0; r < x.size(); ++r) {
      for (int64_t h = 0; h < m_.heads; ++h) {
        const auto from = kv[r].begin() + h * own;
        k[r].insert(k[r].end(), from, from + mla.nope_dim);
        k[r].insert(k[r].end(), shared[r].begin(), shared[r].end());
        v[r].insert(v[r].end(), from + mla.nope_dim, from + own);
      }
    }
  }

  void from_stream(const Matrix& x, const std::string& p, int64_t layer, Matrix& q, Matrix& k, Matrix& v) const {
    Matrix asks = x;  // what the queries are made of
    if (m_.top_query && layer == m_.layers) {
      for (size_t r = 0; r < x.size(); ++r) {
        for (int64_t c = 0; c < m_.width; ++c) {
          asks[r][c] = w_.at("top_query.positions")[position_of(r) * m_.width + c];
        }
      }
    }
    q = linear(asks, p + "q"), k = linear(x, p + "k"), v = linear(x, p + "v");
    for (Matrix* x : {&q, &k, &v}) {
      for (std::vector<double>& row : *x) {
        for (double& value : row) value = m_.clip_qkv > 0 ? std::clamp(value, -m_.clip_qkv, m_.clip_qkv) : value;
      }
    }
    const bool l2 = m_.qk_norm == QkNorm::kL2;
    if (m_.qk_norm != QkNorm::kNone && !l2) {
      norm_qk(q, p + "q_norm");
      norm_qk(k, p + "k_norm");
    }
    if (m_.positions == Positions::kRotary) {
      rotate(q, m_.heads, layer, m_.head_dim);
      rotate(k, m_.kv_heads, layer, m_.head_dim);
    }
    const bool turned = !named(m_.nope_layers, layer);
    if (l2 && turned) norm_qk(q, ""), norm_qk(k, "");  // behind the rotation, as Llama 4's code has it
    const bool in_all = m_.temperature_form == TemperatureForm::kMinistral3;
    for (size_t r = 0; r < q.size() && m_.temperature_scale > 0 && (in_all || !turned); ++r) {
      const auto count = static_cast<double>(position_of(r) + (in_all ? 0 : 1));
      const double steps = std::floor(count / static_cast<double>(m_.temperature_floor));
      for (double& value : q[r]) value *= 1 + m_.temperature_scale * std::log(1 + steps);
    }
  }

  Matrix attention(const Matrix& x, const std::string& p, int64_t layer) const {
    Matrix q, k, v;
    m_.mla.kv_rank > 0 ? from_latents(x, p, layer, q, k, v) : from_stream(x, p, layer, q, k, v);
    const int64_t value = m_.mla.kv_rank > 0 ? m_.mla.value_dim : m_.head_dim;
    double scale = m_.attention_scale > 0 ? m_.attention_scale : 1 / std::sqrt(static_cast<double>(m_.head_dim));
    if (m_.attention_scale_by_layer) scale /= static_cast<double>(layer + 1);
    Matrix out(x.size(), std::vector<double>(m_.heads * value, 0));
    for (size_t r = 0; r < x.size(); ++r) {
      const int64_t query = static_cast<int64_t>(r) % m_.context;
      const size_t first = r - query;
      for (int64_t h = 0; h < m_.heads; ++h) {
        const int64_t kv_head = h * m_.kv_heads / m_.heads, kv = kv_head * m_.head_dim;
        std::vector<double> p_row(m_.context, 0);
        double sum = m_.attention_sinks ? std::exp(w_.at(p + "sinks")[h]) : 0;
        for (int64_t s = 0; s < m_.context; ++s) {
          if (!sees(layer, r, s)) continue;
          double score = 0;
          for (int64_t i = 0; i < m_.head_dim; ++i) score += q[r][h * m_.head_dim + i] * k[first + s][kv + i];
          score = capped(score * scale, m_.score_cap);
          if (m_.positions == Positions::kAlibi) score += added(h, r, s, scale);
          p_row[s] = std::exp(score);
          sum += p_row[s];
        }
        for (int64_t s = 0; s < m_.context; ++s) {
          const auto row = static_cast<uint64_t>(h * m_.context) + query;
          const double kept = factor(m_.attention_dropout, r, layer, 1, row, s);
          for (int64_t i = 0; i < value; ++i) {
            out[r][h * value + i] += kept * p_row[s] / sum * v[first + s][kv_head * value + i];
          }
        }
      }
    }
    return linear(out, p + "o");
  }

  /// Of the gate where there is one.
  double activate(double x) const {
    switch (m_.activation) {
      case Activation::kGeluTanh:
      case Activation::kGeGluTanh:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case Activation::kGeluErf:
      case Activation::kGeGlu:
        return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case Activation::kGeluQuick:
      case Activation::kQuickGeGlu:
        return x / (1 + std::exp(-1.702 * x));
      case Activation::kRelu:
      case Activation::kReGlu:
        return x > 0 ? x : 0;
      case Activation::kRelu2:
      case Activation::kReGlu2:
        return x > 0 ? x * x : 0;
      case Activation::kSilu:
      case Activation::kSwiGlu:
        return x / (1 + std::exp(-x));
      case Activation::kSwiGluClamp:
        x = std::min(x, m_.swiglu_limit);
        return x / (1 + std::exp(-m_.swiglu_alpha * x));
    }
    return 0;
  }

  /// What the gate's value is multiplied with.
  double factor_of_gate(double up) const {
    if (m_.activation != Activation::kSwiGluClamp) return up;
    return std::clamp(up, -m_.swiglu_limit, m_.swiglu_limit) + 1;
  }

  /// The experts of a token, the best first, from their scores and biases.
  std::vector<int64_t> choose(const std::vector<double>& scores, const std::string& p) const {
    const MoeConfig& moe = m_.moe;
    std::vector<double> merits = scores;
    if (const auto bias = w_.find(p + "router.bias"); bias != w_.end()) {
      for (size_t e = 0; e < merits.size(); ++e) merits[e] += bias->second[e];
    }
    const int64_t size = moe.experts / moe.groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < moe.groups; ++g) {
      std::vector<double> of(merits.begin() + g * size, merits.begin() + (g + 1) * size);
      std::sort(of.rbegin(), of.rend());
      groups.emplace_back(-(of[0] + (moe.router == RouterKind::kSigmoid && size > 1 ? of[1] : 0)), g);
    }
    std::sort(groups.begin(), groups.end());
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t g = 0; g < moe.groups_per_token; ++g) {
      const int64_t group = groups[g].second;
      for (int64_t e = group * size; e < (group + 1) * size; ++e) order.emplace_back(-merits[e], e);
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> out;
    for (int64_t j = 0; j < moe.top_k; ++j) out.push_back(order[j].second);
    return out;
  }

  /// And each layer's shares and probabilities, and the loss that keeps logits small, summed over tokens.
  Matrix experts(const Matrix& x, const std::string& p) const {
    const MoeConfig& moe = m_.moe;
    Matrix logits = linear(x, p + "router.weight", true), out(x.size(), std::vector<double>(m_.width, 0));
    if (moe.router_bias) {
      for (std::vector<double>& row : logits) {
        for (size_t e = 0; e < row.size(); ++e) row[e] += w_.at(p + "router.logit_bias")[e];
      }
    }
    if (w_.count(p + "shared.up.weight") > 0) out = mlp(x, p + "shared.");
    if (moe.shared_gate) {
      const Matrix gate = linear(x, p + "shared_gate");
      for (size_t r = 0; r < x.size(); ++r) {
        for (double& v : out[r]) v /= 1 + std::exp(-gate[r][0]);
      }
    }
    std::vector<double> chosen(moe.experts, 0), probability(moe.experts, 0);
    for (size_t r = 0; r < x.size(); ++r) {
      std::vector<double> scores;
      double sum = 0, all = 0;
      for (const double v : logits[r]) sum += std::exp(v);
      for (const double v : logits[r]) {
        scores.push_back(moe.router == RouterKind::kSigmoid ? 1 / (1 + std::exp(-v)) : std::exp(v) / sum);
        all += scores.back();
      }
      balance_ += moe.z_loss * std::log(sum) * std::log(sum);
      for (int64_t e = 0; e < moe.experts; ++e) probability[e] += scores[e] / all;
      const std::vector<int64_t> order = choose(scores, p);
      double kept = 0;
      for (const int64_t e : order) kept += scores[e];
      for (const int64_t e : order) {
        chosen[e] += 1.0 / static_cast<double>(x.size());
        const double weight = moe.scale * (moe.renormalise ? scores[e] / kept : scores[e]);
        Matrix read = {x[r]};
        for (double& v : read[0]) v *= moe.scale_input ? weight : 1;
        const Matrix y = mlp(read, p + "experts." + std::to_string(e) + ".");
        for (int64_t c = 0; c < m_.width; ++c) out[r][c] += (moe.scale_input ? 1 : weight) * y[0][c];
      }
    }
    routed_[p] = {chosen, probability};
    return out;
  }

  /// Summed over tokens.
  double balance() const {
    const MoeConfig& moe = m_.moe;
    double sum = 0;
    for (int64_t e = 0; e < moe.experts; ++e) {
      double of_layers = 0, chosen = 0, probability = 0;
      for (const auto& [layer, of] : routed_) {
        of_layers += of.first[e] * of.second[e];
        chosen += of.first[e] / static_cast<double>(routed_.size());
        probability += of.second[e] / static_cast<double>(routed_.size());
      }
      sum += moe.aux_scope == AuxScope::kModel ? chosen * probability : of_layers;
    }
    return moe.aux_loss * static_cast<double>(moe.experts) * sum;
  }

  Matrix mlp(const Matrix& x, const std::string& p) const {
    Matrix up = linear(x, p + "up");
    const bool gated = w_.count(p + "gate.weight") > 0;
    const Matrix gate = gated ? linear(x, p + "gate") : Matrix{};
    for (size_t r = 0; r < up.size(); ++r) {
      for (size_t c = 0; c < up[r].size(); ++c) {
        up[r][c] = gated ? activate(gate[r][c]) * factor_of_gate(up[r][c]) : activate(up[r][c]);
      }
    }
    return linear(up, p + "down");
  }

  ModelConfig m_;
  const Weights& w_;
  std::vector<uint64_t> keys_;
  std::vector<int32_t> positions_, starts_, ends_;
  mutable std::vector<int32_t> tokens_;  // embedded last
  mutable double balance_ = 0;
  mutable std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> routed_;  // of each layer
};

}  // namespace cairn::nn::testing
