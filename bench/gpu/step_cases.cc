// Legend: T rows of a micro-batch, H width, N heads, K key/value heads, D head dim, F hidden units, V vocabulary.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/cases.h"
#include "runtime/core/exact_sum.h"
#include "runtime/device/host_numbers.h"

namespace cairn::bench {
namespace {

using kernels::Exec;
using kernels::StateExec;

double real(int64_t count) { return static_cast<double>(count); }
std::string by(int64_t rows, int64_t cols) { return fmt::format("{} x {}", rows, cols); }

/// Cases of one model; `layers` of them are alike.
class Step {
 public:
  explicit Step(const Model& model) : model_(model), d_(model.dims), layers_(real(model.plan.recipe.model.layers)) {}

  std::vector<Case> all() && {
    products();
    attention();
    norms();
    maps();
    ends();
    update();
    return std::move(out_);
  }

 private:
  void add(std::string name, std::string shape, double calls, double bytes, std::function<Order(Arrays&)> make,
           double flops = 0) {
    out_.push_back({std::move(name), std::move(shape), bytes, flops, calls, std::move(make)});
  }

  // --- products
  /// A product's work for its neighbours (kernels::MatmulArgs).
  enum class Fused { kNone, kResidual, kGelu, kGeluGradient, kSums };
  struct Pass {
    std::string name;
    int64_t m, n, k;
    bool trans_a, trans_b;
    DType to;
    bool bias;
    Fused fused = Fused::kNone;
  };
  // x [T, in] -> y [T, out]: y = x W^T, dx = dy W, dW = dy^T x in float. `forward`, `backward`: a step's products that
  // do more; each is measured without it too.
  void linear(const std::string& what, int64_t in, int64_t out, bool bias, double calls, int64_t rows,
              Fused forward = Fused::kNone, Fused backward = Fused::kNone, Fused weight = Fused::kNone) {
    const bool apart = forward == Fused::kResidual;  // the bias then comes with the residual, or by a kernel
    std::vector<Pass> passes = {
        {"forward", rows, out, in, false, true, DType::kBf16, bias && !apart},
        {"input's gradient", rows, in, out, false, false, DType::kBf16, false},
        {"weight's gradient", out, in, rows, true, false, DType::kF32, false},
    };
    const std::pair<Fused, const char*> more[] = {{forward, apart ? " with the residual" : " with gelu"},
                                                  {backward, " with gelu's"},
                                                  {weight, " with the bias'"}};
    std::vector<double> calls_of(3, calls);
    for (size_t k = 0; k < 3; ++k) {
      if (more[k].first == Fused::kNone) continue;
      Pass fused = passes[k];
      fused.name += more[k].second;
      fused.fused = more[k].first;
      fused.bias = k == 0 && bias;
      passes.push_back(fused);
      calls_of.push_back(std::exchange(calls_of[k], 0));
    }
    for (size_t k = 0; k < passes.size(); ++k) product(what, passes[k], calls_of[k]);
  }
  void product(const std::string& what, const Pass& of, double calls) {
    const double result = real(of.m * of.n);
    const bool reads_more = of.fused != Fused::kNone && of.fused != Fused::kSums;
    const double bytes =
        2 * real(of.m * of.k + of.k * of.n) + result * real(dtype_size_bytes(of.to)) + (reads_more ? 2 * result : 0.0);
    add(
        "matmul", fmt::format("{} {}, {} x {} x {}", what, of.name, of.m, of.n, of.k), calls, bytes,
        [of](Arrays& arrays) -> Order {
          kernels::MatmulArgs args{.m = of.m, .n = of.n, .k = of.k};
          args.a = arrays.drawn<bf16>(of.m * of.k);
          args.lda = of.trans_a ? of.m : of.k;
          args.trans_a = of.trans_a;
          args.b = arrays.drawn<bf16>(of.k * of.n);
          args.ldb = of.trans_b ? of.k : of.n;
          args.trans_b = of.trans_b;
          args.c = of.to == DType::kF32 ? DevicePtr<void>(arrays.drawn<float>(of.m * of.n))
                                        : DevicePtr<void>(arrays.drawn<bf16>(of.m * of.n));
          args.ldc = of.n;
          args.ab_dtype = DType::kBf16;
          args.c_dtype = of.to;
          if (of.bias) args.bias = arrays.drawn<bf16>(of.n);
          if (of.fused == Fused::kResidual) args.residual = arrays.drawn<bf16>(of.m * of.n);
          if (of.fused == Fused::kGelu || of.fused == Fused::kGeluGradient) {
            args.map = of.fused == Fused::kGelu ? kernels::MatmulMap::kGeluTanh : kernels::MatmulMap::kGeluTanhGradient;
            args.pre = arrays.drawn<bf16>(of.m * of.n);
          }
          if (of.fused == Fused::kSums) args.sums = arrays.zeros<float>(of.m);
          return [&on = arrays.device().on(), args] { on.matmul(args); };
        },
        2 * real(of.m) * real(of.n) * real(of.k));
  }
  void products() {
    const bool bias = model_.plan.recipe.model.bias;
    const int64_t all_heads = d_.heads * d_.head_dim;
    const bool gelu = model_.plan.recipe.model.activation == Activation::kGeluTanh;
    const Fused sums = bias ? Fused::kSums : Fused::kNone;
    linear("qkv", d_.width, d_.qkv, bias, layers_, d_.rows, Fused::kNone, Fused::kNone, sums);
    linear("out", all_heads, d_.width, bias, layers_, d_.rows, Fused::kResidual, Fused::kNone, sums);
    linear("up", d_.width, d_.ffn_in, bias, layers_, d_.rows, gelu ? Fused::kGelu : Fused::kNone, Fused::kNone, sums);
    linear("down", d_.ffn, d_.width, bias, layers_, d_.rows, Fused::kResidual,
           gelu ? Fused::kGeluGradient : Fused::kNone, sums);
    const int64_t blocks = (d_.rows + d_.logit_rows - 1) / d_.logit_rows;
    linear("head", d_.embed, d_.vocab, false, real(blocks), d_.logit_rows);
    // Logits of several blocks are computed again in the backward pass.
    if (blocks > 1) out_[out_.size() - 3].calls *= 2;
  }

  // --- attention
  void attention() {
    const kernels::AttentionDims dims = attention_dims(d_);
    const int64_t k_at = d_.heads * d_.head_dim, v_at = k_at + d_.kv_heads * d_.head_dim;
    const int64_t qkv = d_.rows * d_.qkv, out = d_.rows * k_at, sums = d_.rows * d_.heads;
    // Scores of the half that a causal mask leaves, then their product with v: four FLOP for each of those and channel.
    const double flops = 2 * real(d_.samples * d_.heads * d_.head_dim) * real(d_.tokens) * real(d_.tokens);
    const std::string shape = fmt::format("{} x {} tokens, {} heads of {}, {} of k and v", d_.samples, d_.tokens,
                                          d_.heads, d_.head_dim, d_.kv_heads);
    add(
        "attention_forward", shape, layers_, 2 * real(qkv + out) + 4 * real(sums),
        [=](Arrays& arrays) -> Order {
          const auto x = arrays.drawn<bf16>(qkv), y = arrays.drawn<bf16>(out);
          const auto logsumexp = arrays.zeros<float>(sums);
          return [=, &on = arrays.device().on()] { on.attention_forward(dims, x, x + k_at, x + v_at, y, logsumexp); };
        },
        flops);
    add(
        "attention_backward", shape, layers_, 2 * real(2 * qkv + 2 * out) + 4 * real(sums),
        [=](Arrays& arrays) -> Order {
          const auto x = arrays.drawn<bf16>(qkv), dx = arrays.drawn<bf16>(qkv), y = arrays.drawn<bf16>(out),
                     dy = arrays.drawn<bf16>(out);
          const auto logsumexp = arrays.zeros<float>(sums),
                     scratch = arrays.zeros<float>(kernels::attention_backward_scratch_elems(dims));
          arrays.device().on().attention_forward(dims, x, x + k_at, x + v_at, y, logsumexp);
          return [=, &on = arrays.device().on()] {
            on.attention_backward(dims, x, x + k_at, x + v_at, y, logsumexp, dy, dx, dx + k_at, dx + v_at, scratch);
          };
        },
        2.5 * flops);
  }

  // --- norms: forward, and again in backward; one before each branch and one at the end
  void norms() {
    const bool rms = model_.plan.recipe.model.norm == NormKind::kRmsNorm;
    const int64_t rows = d_.rows, width = d_.width, count = rows * width;
    const kernels::NormRows of{rows, width, 1e-5f, 0};
    const double forward = 4 * layers_ + 2, backward = 2 * layers_ + 1;
    if (rms) {
      add("rms_norm_forward", by(rows, width), forward, 4 * real(count), [=](Arrays& arrays) -> Order {
        const auto x = arrays.drawn<bf16>(count), y = arrays.drawn<bf16>(count), weight = arrays.drawn<bf16>(width);
        const auto rstd = arrays.zeros<float>(rows);
        return [=, &on = arrays.device().on()] { on.rms_norm_forward(of, x, weight, y, rstd); };
      });
      add("rms_norm_backward", by(rows, width), backward, 6 * real(count), [=](Arrays& arrays) -> Order {
        const auto x = arrays.drawn<bf16>(count), dy = arrays.drawn<bf16>(count), dx = arrays.drawn<bf16>(count),
                   weight = arrays.drawn<bf16>(width);
        const auto rstd = arrays.drawn<float>(rows), dweight = arrays.zeros<float>(width);
        return [=, &on = arrays.device().on()] {
          on.rms_norm_backward(of, dy, x, weight, rstd, dx, {dweight, nullptr, {}});
        };
      });
      return;
    }
    add("layer_norm_forward", by(rows, width), forward, 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(count), y = arrays.drawn<bf16>(count), weight = arrays.drawn<bf16>(width),
                 bias = arrays.drawn<bf16>(width);
      const auto mean = arrays.zeros<float>(rows), rstd = arrays.zeros<float>(rows);
      return [=, &on = arrays.device().on()] { on.layer_norm_forward(of, x, weight, bias, y, mean, rstd); };
    });
    add("layer_norm_backward", by(rows, width), backward, 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(count), dy = arrays.drawn<bf16>(count), dx = arrays.drawn<bf16>(count),
                 weight = arrays.drawn<bf16>(width);
      const auto mean = arrays.drawn<float>(rows), rstd = arrays.drawn<float>(rows),
                 dweight = arrays.zeros<float>(width), dbias = arrays.zeros<float>(width);
      return [=, &on = arrays.device().on()] {
        on.layer_norm_backward(of, dy, x, weight, mean, rstd, dx, {dweight, dbias, {}});
      };
    });
  }

  // --- what a layer does beside
  void maps() {
    const ModelConfig& m = model_.plan.recipe.model;
    const int64_t rows = d_.rows, count = rows * d_.width, hidden = rows * d_.ffn;
    add("add", by(rows, d_.width), 2 * layers_, 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto a = arrays.drawn<bf16>(count), b = arrays.drawn<bf16>(count), out = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.add(a, b, out, count); };
    });
    // Without calls: fused products do it, where cuBLASLt has them.
    if (m.bias) {
      add("add_bias", by(rows, d_.width), 0, 4 * real(count), [=, width = d_.width](Arrays& arrays) -> Order {
        const auto x = arrays.drawn<bf16>(count), bias = arrays.drawn<bf16>(width);
        return [=, &on = arrays.device().on()] { on.add_bias(x, bias, rows, width); };
      });
      for (const int64_t width : {d_.width, d_.qkv, d_.ffn_in}) {
        add("bias_backward", by(rows, width), 0, 2 * real(rows * width), [=](Arrays& arrays) -> Order {
          const auto dy = arrays.drawn<bf16>(rows * width);
          const auto dbias = arrays.zeros<float>(width);
          return [=, &on = arrays.device().on()] { on.bias_backward(dy, dbias, rows, width, {}); };
        });
      }
    }
    if (m.activation == Activation::kSwiGlu) {
      add("gated_forward", by(rows, d_.ffn), 2 * layers_, 6 * real(hidden), [=, ffn = d_.ffn](Arrays& arrays) -> Order {
        const auto pre = arrays.drawn<bf16>(2 * hidden), y = arrays.drawn<bf16>(hidden);
        return [=, &on = arrays.device().on()] { on.gated_forward(kernels::Gate::kSilu, pre, y, rows, ffn); };
      });
      add("gated_backward", by(rows, d_.ffn), layers_, 10 * real(hidden), [=, ffn = d_.ffn](Arrays& arrays) -> Order {
        const auto pre = arrays.drawn<bf16>(2 * hidden), dpre = arrays.drawn<bf16>(2 * hidden),
                   dy = arrays.drawn<bf16>(hidden);
        return [=, &on = arrays.device().on()] { on.gated_backward(kernels::Gate::kSilu, dy, pre, dpre, rows, ffn); };
      });
    } else {
      add("gelu_tanh_forward", by(rows, d_.ffn), layers_, 4 * real(hidden), [=](Arrays& arrays) -> Order {
        const auto x = arrays.drawn<bf16>(hidden), y = arrays.drawn<bf16>(hidden);
        return [=, &on = arrays.device().on()] { on.gelu_tanh_forward(x, y, hidden); };
      });
      add("gelu_tanh_both", by(rows, d_.ffn), 0, 8 * real(hidden), [=](Arrays& arrays) -> Order {
        const auto x = arrays.drawn<bf16>(hidden), dy = arrays.drawn<bf16>(hidden), y = arrays.drawn<bf16>(hidden);
        return [=, &on = arrays.device().on()] { on.gelu_tanh_both(x, dy, y, hidden); };
      });
    }
    if (m.positions == Positions::kRotary) {
      const int64_t turning = (d_.heads + d_.kv_heads) * d_.head_dim;
      const kernels::RotaryDims of{.rows = rows,
                                   .tokens = d_.tokens,
                                   .heads = d_.heads + d_.kv_heads,
                                   .head_dim = d_.head_dim,
                                   .stride = d_.qkv,
                                   .turning = d_.head_dim};
      add("rotary", by(rows, turning), 2 * layers_, 4 * real(rows * turning) + 4 * real(d_.tokens * d_.head_dim),
          [=, qkv = d_.qkv](Arrays& arrays) -> Order {
            const auto x = arrays.drawn<bf16>(rows * qkv);
            const auto table = arrays.drawn<float>(of.tokens * of.head_dim);
            return [=, &on = arrays.device().on()] { on.rotary(of, x, table, false); };
          });
    }
  }

  // --- embedding and head
  void ends() {
    const ModelConfig& m = model_.plan.recipe.model;
    const int64_t rows = d_.rows, width = d_.embed, count = rows * width;
    const kernels::TableRange table{0, d_.vocab, width};
    const double looked_up = real(distinct_ids(rows, table.count) * width);  // of the table
    add("embedding_forward", by(rows, width), 1, 2 * real(count) + 2 * looked_up, [=](Arrays& arrays) -> Order {
      const auto ids = arrays.ids(rows, table.count);
      const auto weights = arrays.drawn<bf16>(table.count * width), out = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.embedding_forward(ids, rows, table, weights, out); };
    });
    // A row of the table is read, added to and written.
    add("embedding_backward", by(rows, width), 1, 2 * real(count) + 8 * looked_up, [=](Arrays& arrays) -> Order {
      const auto ids = arrays.ids(rows, table.count);
      const auto dout = arrays.drawn<bf16>(count);
      const auto dtable = arrays.drawn<float>(table.count * width);
      return [=, &on = arrays.device().on()] { on.embedding_backward(ids, rows, table, dout, dtable, 1); };
    });
    if (m.positions == Positions::kLearned) {
      const kernels::RowPositions at{nullptr, 0, d_.held, d_.samples};
      const int64_t tokens = d_.tokens;
      add("positions_forward", by(rows, width), 1, 4 * real(count) + 2 * real(tokens * width),
          [=](Arrays& arrays) -> Order {
            const auto x = arrays.drawn<bf16>(count), weights = arrays.drawn<bf16>(tokens * width);
            return [=, &on = arrays.device().on()] { on.positions_forward(x, weights, at, rows, width); };
          });
      add("positions_backward", by(rows, width), 1, 2 * real(count) + 8 * real(tokens * width),
          [=](Arrays& arrays) -> Order {
            const auto dout = arrays.drawn<bf16>(count);
            const auto dtable = arrays.drawn<float>(tokens * width);
            return [=, &on = arrays.device().on()] { on.positions_backward(dout, dtable, at, rows, width); };
          });
    }
    const int64_t block = d_.logit_rows, cols = d_.vocab, valid = m.vocab;
    const double blocks = real((rows + block - 1) / block);
    add("cross_entropy", by(block, cols), blocks, 4 * real(block * cols), [=](Arrays& arrays) -> Order {
      const auto targets = arrays.numbers(block, valid);
      const auto logits = arrays.drawn<bf16>(block * cols);
      const auto max = arrays.zeros<float>(block), sums = arrays.zeros<float>(block),
                 scale = arrays.zeros<float>(block), loss = arrays.zeros<float>(block);
      return [=, &on = arrays.device().on()] {
        on.cross_entropy({block, cols, valid, 0, targets}, logits, 1.0f, 0, max, sums, scale, loss);
      };
    });
  }

  // --- the update of all parameters, a part of them at a time here
  void update() {
    const int64_t all = model_.plan.parameters, count = std::min<int64_t>(all, int64_t{1} << 26);
    const double calls = real(all) / real(count);
    add("add_squares_of_runs", fmt::format("{}", count), calls, 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count);
      const auto runs = arrays.of(std::vector<kernels::ElemRun>{{0, count}});
      const auto words = arrays.of(std::vector<double>(ExactSum::kWords));
      return [=, &state = arrays.device().state()] { state.add_squares_of_runs(x, runs, 1, words); };
    });
    add("adamw_of_runs", fmt::format("{}", count), calls, 30 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::StateArrays of{arrays.drawn<float>(count), arrays.drawn<float>(count), arrays.zeros<float>(count),
                                    nullptr};
      const auto grad = arrays.drawn<float>(count);
      const auto low = arrays.drawn<bf16>(count);
      kernels::AdamwArgs args{.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
      args.clip = arrays.of(std::vector<kernels::Clip>{{.grad_scale = 1}});
      const kernels::AdamRun run{.args = args,
                                 .grad = grad,
                                 .from = of,
                                 .to = of,
                                 .dtype = DType::kBf16,
                                 .weights = DevicePtr<void>(low),
                                 .count = count};
      return [=, &state = arrays.device().state()] { state.adamw_of_runs({&run, 1}); };
    });
  }

  const Model& model_;
  const StageDims& d_;
  const double layers_;
  std::vector<Case> out_;
};

}  // namespace

std::vector<Case> step_cases(const Model& model) { return Step(model).all(); }

Case memory_case(int64_t bytes) {
  const int64_t count = bytes / 4;
  return {"copy", fmt::format("{} bytes", 2 * count), 4 * real(count), 0, 0, [=](Arrays& arrays) -> Order {
            const auto from = arrays.drawn<bf16>(count), to = arrays.drawn<bf16>(count);
            return [=, &on = arrays.device().on()] { on.copy(from, to, count); };
          }};
}

Case product_case(int64_t side) {
  return {"matmul",
          fmt::format("{0} x {0} x {0}", side),
          6 * real(side * side),
          2 * real(side) * real(side) * real(side),
          0,
          [=](Arrays& arrays) -> Order {
            kernels::MatmulArgs args{.m = side, .n = side, .k = side};
            args.a = arrays.drawn<bf16>(side * side);
            args.b = arrays.drawn<bf16>(side * side);
            args.c = arrays.drawn<bf16>(side * side);
            args.lda = args.ldb = args.ldc = side;
            args.trans_b = true;
            args.ab_dtype = args.c_dtype = DType::kBf16;
            return [=, &on = arrays.device().on()] { on.matmul(args); };
          }};
}

}  // namespace cairn::bench
