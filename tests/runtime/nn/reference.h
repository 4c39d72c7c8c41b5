#pragma once
// The decoder once more, in double precision, as plainly as it can be written: no tiles, no fusion, no parallelism, and
// no code shared with what it judges but the draw of dropout masks. Rows are tokens in flat order, row = sample * S + position.

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/kernels/dropout.h"

namespace cairn::nn::testing {

using Matrix = std::vector<std::vector<double>>;             // [rows][width]
using Weights = std::map<std::string, std::vector<double>>;  // by logical name, row-major

class Reference {
 public:
  /// `dropout_keys`: one a sample; without them nothing is dropped.
  Reference(const ModelConfig& model, const Weights& weights, std::vector<uint64_t> dropout_keys = {})
      : m_(model), w_(weights), keys_(std::move(dropout_keys)) {}

  Matrix embed(const std::vector<int32_t>& tokens) const {
    Matrix x(tokens.size(), std::vector<double>(m_.width));
    for (size_t r = 0; r < tokens.size(); ++r) {
      for (int64_t h = 0; h < m_.width; ++h) {
        x[r][h] = w_.at("embed.tokens")[tokens[r] * m_.width + h];
        if (m_.positions == Positions::kLearned) {
          x[r][h] += w_.at("embed.positions")[static_cast<int64_t>(r) % m_.context * m_.width + h];
        }
      }
    }
    drop(x, m_.embedding_dropout, -1, 0);
    return x;
  }

  Matrix layers(Matrix x, int64_t first, int64_t end) const {
    for (int64_t i = first; i < end; ++i) {
      const std::string p = "layers." + std::to_string(i) + ".";
      Matrix branch = attention(norm(x, p + "attn_norm"), p + "attn.", i);
      drop(branch, m_.residual_dropout, i, 2);
      add(x, branch);
      branch = mlp(norm(x, p + "mlp_norm"), p + "mlp.");
      drop(branch, m_.residual_dropout, i, 3);
      add(x, branch);
    }
    return x;
  }

  Matrix logits(const Matrix& x) const {
    return linear(norm(x, "final_norm"), m_.tied_embeddings ? "embed.tokens" : "head", m_.tied_embeddings);
  }

  std::vector<double> losses(const Matrix& x, const std::vector<int32_t>& targets) const {
    const Matrix z = logits(x);
    std::vector<double> out;
    for (size_t r = 0; r < z.size(); ++r) {
      double sum = 0;
      for (const double v : z[r]) sum += std::exp(v - z[r][0]);
      out.push_back(std::log(sum) + z[r][0] - z[r][targets[r]]);
    }
    return out;
  }

  /// Sum of the losses from the input of layer `first` on.
  double loss_from(const Matrix& x, int64_t first, const std::vector<int32_t>& targets) const {
    double sum = 0;
    for (const double loss : losses(layers(x, first, m_.layers), targets)) sum += loss;
    return sum;
  }

  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) const {
    return loss_from(embed(tokens), 0, targets);
  }

 private:
  /// 0 or 1 / (1 - rate) for element `c` of row `row` of the sample of row r.
  double factor(double rate, size_t r, int64_t layer, uint64_t place, uint64_t row, int64_t c) const {
    if (keys_.empty() || rate == 0) return 1;
    float out = 0;
    const uint64_t key =
        kernels::dropout_row_key(keys_[r / m_.context], kernels::dropout_site(layer, place), row);
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
        row[c] = (row[c] - mean) / std::sqrt(square + m_.norm_eps) * w_.at(name + ".weight")[c];
        if (m_.norm == NormKind::kLayerNorm) row[c] += w_.at(name + ".bias")[c];
      }
    }
    return y;
  }

  void rotate(Matrix& x, int64_t heads) const {
    const int64_t half = m_.head_dim / 2;
    for (size_t r = 0; r < x.size(); ++r) {
      const auto position = static_cast<double>(static_cast<int64_t>(r) % m_.context);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const double angle = position * std::pow(m_.rope_theta, -2.0 * static_cast<double>(i) / m_.head_dim);
          double& a = x[r][h * m_.head_dim + i];
          double& b = x[r][h * m_.head_dim + i + half];
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = b * std::cos(angle) + a * std::sin(angle);
          a = turned;
        }
      }
    }
  }

  Matrix attention(const Matrix& x, const std::string& p, int64_t layer) const {
    Matrix q = linear(x, p + "q"), k = linear(x, p + "k"), v = linear(x, p + "v");
    if (m_.positions == Positions::kRotary) {
      rotate(q, m_.heads);
      rotate(k, m_.kv_heads);
    }
    Matrix out(x.size(), std::vector<double>(m_.heads * m_.head_dim, 0));
    for (size_t r = 0; r < x.size(); ++r) {
      const size_t first = r / m_.context * m_.context;
      for (int64_t h = 0; h < m_.heads; ++h) {
        const int64_t kv = h * m_.kv_heads / m_.heads * m_.head_dim;
        std::vector<double> p_row;
        double sum = 0;
        for (size_t s = first; s <= r; ++s) {
          double score = 0;
          for (int64_t i = 0; i < m_.head_dim; ++i) score += q[r][h * m_.head_dim + i] * k[s][kv + i];
          p_row.push_back(std::exp(score / std::sqrt(static_cast<double>(m_.head_dim))));
          sum += p_row.back();
        }
        for (size_t s = first; s <= r; ++s) {
          const auto row = static_cast<uint64_t>(h * m_.context) + r - first;
          const double kept = factor(m_.attention_dropout, r, layer, 1, row, static_cast<int64_t>(s - first));
          for (int64_t i = 0; i < m_.head_dim; ++i) {
            out[r][h * m_.head_dim + i] += kept * p_row[s - first] / sum * v[s][kv + i];
          }
        }
      }
    }
    return linear(out, p + "o");
  }

  double activate(double x) const {
    switch (m_.activation) {
      case Activation::kGeluTanh:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case Activation::kGeluErf:
        return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case Activation::kRelu:
        return x > 0 ? x : 0;
      case Activation::kSwiGlu:
        return x / (1 + std::exp(-x));  // of the gate
    }
    return 0;
  }

  Matrix mlp(const Matrix& x, const std::string& p) const {
    Matrix up = linear(x, p + "up");
    const bool gated = m_.activation == Activation::kSwiGlu;
    const Matrix gate = gated ? linear(x, p + "gate") : Matrix{};
    for (size_t r = 0; r < up.size(); ++r) {
      for (size_t c = 0; c < up[r].size(); ++c) {
        up[r][c] = gated ? activate(gate[r][c]) * up[r][c] : activate(up[r][c]);
      }
    }
    return linear(up, p + "down");
  }

  ModelConfig m_;
  const Weights& w_;
  std::vector<uint64_t> keys_;
};

}  // namespace cairn::nn::testing
