// Kernels that the bench's models do not call: other activations and norms, experts, latent heads, other rules of the
// optimizer, copies. Legend: rows and width of the model's stream; X experts.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bench/gpu/cases.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/group_rows.h"
#include "runtime/kernels/matmul.h"

namespace cairn::bench {
namespace {

using kernels::Exec;
using kernels::StateExec;

double real(int64_t count) { return static_cast<double>(count); }

class Others {
 public:
  explicit Others(const Model& model)
      : d_(model.dims),
        rows_(d_.rows),
        width_(d_.width),
        count_(rows_ * width_),
        shape_(fmt::format("{} x {}", rows_, width_)) {}

  std::vector<Case> all() && {
    maps();
    norms();
    attention();
    experts();
    rows();
    losses();
    sinks();
    state();
    adafactor();
    return std::move(out_);
  }

 private:
  void add(std::string name, double bytes, std::function<Order(Arrays&)> make) {
    out_.push_back({std::move(name), shape_, bytes, 0, 0, std::move(make)});
  }

  /// body(exec, a, b, out) over arrays of the stream's size.
  template <typename Body>
  void map(std::string name, int passes, Body body) {
    add(std::move(name), 2 * passes * real(count_), [body, count = count_](Arrays& arrays) -> Order {
      const auto a = arrays.drawn<bf16>(count), b = arrays.drawn<bf16>(count), out = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { body(on, a, b, out); };
    });
  }
  void maps() {
    const int64_t count = count_;
    map("add_scaled", 3,
        [=](const Exec<bf16>& on, auto a, auto b, auto out) { on.add_scaled(a, 0.5f, b, out, count); });
    map("copy", 2, [=](const Exec<bf16>& on, auto a, auto, auto out) { on.copy(a, out, count); });
    map("clear", 1, [=](const Exec<bf16>& on, auto, auto, auto out) { on.clear(out, count); });
    map("scale", 2, [=](const Exec<bf16>& on, auto, auto, auto out) { on.scale(out, 1.0f, count); });
    map("cap", 2, [=](const Exec<bf16>& on, auto, auto, auto out) { on.cap(out, 30.0f, count); });
    map("clip", 2, [=](const Exec<bf16>& on, auto, auto, auto out) { on.clip(out, 8.0f, count); });
    map("clip_backward", 3,
        [=](const Exec<bf16>& on, auto a, auto, auto out) { on.clip_backward(a, out, 8.0f, count); });
#define RT_ACTIVATION(name)                                                                                          \
  map(#name "_forward", 2, [=](const Exec<bf16>& on, auto a, auto, auto out) { on.name##_forward(a, out, count); }); \
  map(#name "_backward", 3,                                                                                          \
      [=](const Exec<bf16>& on, auto a, auto b, auto out) { on.name##_backward(b, a, out, count); });                \
  map(#name "_both", 4, [=](const Exec<bf16>& on, auto a, auto b, auto out) { on.name##_both(a, b, out, count); });
    RT_ACTIVATION(gelu_tanh)
    RT_ACTIVATION(gelu_erf)
    RT_ACTIVATION(gelu_quick)
    RT_ACTIVATION(relu)
    RT_ACTIVATION(relu2)
    RT_ACTIVATION(silu)
#undef RT_ACTIVATION
    const kernels::ClampedGate clamped{.alpha = 1.702f, .limit = 7};
    const int64_t rows = rows_, hidden = d_.width;
    add("clamped_gate_forward", 6 * real(count_), [=](Arrays& arrays) -> Order {
      const auto pre = arrays.drawn<bf16>(2 * count), y = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.clamped_gate_forward(clamped, pre, y, rows, hidden); };
    });
    add("clamped_gate_backward", 10 * real(count_), [=](Arrays& arrays) -> Order {
      const auto pre = arrays.drawn<bf16>(2 * count), dpre = arrays.drawn<bf16>(2 * count),
                 dy = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.clamped_gate_backward(clamped, dy, pre, dpre, rows, hidden); };
    });
    add("dropout", 4 * real(count_), [=, d = d_](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(count), out = arrays.drawn<bf16>(count);
      kernels::DropoutRows of{d.rows, d.width, 0, d.held, d.samples};
      of.sample_keys = arrays.of(std::vector<uint64_t>(static_cast<size_t>(d.samples), 7));
      of.site = kernels::dropout_site(1, 1);
      of.rate = kernels::DropoutRate::of(0.1);
      return [=, &on = arrays.device().on()] { on.dropout(of, x, out); };
    });
  }

  void norms() {
    const kernels::HeadNorm of{rows_, d_.heads, d_.head_dim, 1e-5f};
    const int64_t stride = d_.heads * d_.head_dim, count = rows_ * stride;
    add("head_norm_forward", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(count), y = arrays.drawn<bf16>(count), weight = arrays.drawn<bf16>(of.head_dim);
      return [=, &on = arrays.device().on()] { on.head_norm_forward(of, {x, stride}, weight, nullptr, {y, stride}); };
    });
    add("head_norm_backward", 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(count), dy = arrays.drawn<bf16>(count), dx = arrays.drawn<bf16>(count),
                 weight = arrays.drawn<bf16>(of.head_dim);
      const auto dweight = arrays.zeros<float>(of.head_dim), stats = arrays.zeros<float>(2 * of.rows * of.heads);
      return [=, &on = arrays.device().on()] {
        on.head_norm_backward(of, {dy, stride}, {x, stride}, weight, {dx, stride}, {dweight, nullptr, {}}, stats);
      };
    });
    // Of half of the channels, as of two ranks.
    const kernels::WholeNorm whole{rows_, width_, 2 * width_, 1, 1e-5f, 0};
    const int64_t all = count_, width = width_, rows = rows_;
    add("row_dots", 4 * real(all), [=](Arrays& arrays) -> Order {
      const auto a = arrays.drawn<bf16>(all), b = arrays.drawn<bf16>(all);
      const auto sums = arrays.zeros<float>(rows);
      return [=, &on = arrays.device().on()] {
        on.row_dots({rows, width, 1, rows}, {a, width}, {b, width}, nullptr, 0, sums);
      };
    });
    add("whole_norm_forward", 4 * real(all), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(all), y = arrays.drawn<bf16>(all), weight = arrays.drawn<bf16>(width);
      const auto squares = arrays.of(std::vector<float>(static_cast<size_t>(rows), 2.0f * static_cast<float>(width)));
      return [=, &on = arrays.device().on()] { on.whole_norm_forward(whole, {x, width}, weight, squares, {y, width}); };
    });
    add("whole_norm_backward", 6 * real(all), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(all), dy = arrays.drawn<bf16>(all), dx = arrays.drawn<bf16>(all),
                 weight = arrays.drawn<bf16>(width);
      const auto squares = arrays.of(std::vector<float>(static_cast<size_t>(rows), 2.0f * static_cast<float>(width)));
      const auto dots = arrays.drawn<float>(rows), dweight = arrays.zeros<float>(width);
      return [=, &on = arrays.device().on()] {
        on.whole_norm_backward(whole, {dy, width}, {x, width}, weight, squares, dots, {dx, width},
                               {dweight, nullptr, {}});
      };
    });
  }

  void attention() {
    const kernels::AttentionDims dims = attention_dims(d_);
    const int64_t k_at = d_.heads * d_.head_dim, kv = d_.kv_heads * d_.head_dim, v_at = k_at + kv;
    const int64_t qkv = rows_ * d_.qkv, out = rows_ * k_at, sums = rows_ * d_.heads, rows = rows_;
    add("attention_backward_sums", 2 * real(2 * qkv + 2 * out), [=, row = d_.qkv](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(qkv), dx = arrays.drawn<bf16>(qkv), y = arrays.drawn<bf16>(out),
                 dy = arrays.drawn<bf16>(out);
      const auto logsumexp = arrays.zeros<float>(sums), dkv = arrays.zeros<float>(rows * row),
                 scratch = arrays.zeros<float>(kernels::attention_backward_scratch_elems(dims));
      arrays.device().on().attention_forward(dims, x, x + k_at, x + v_at, y, logsumexp);
      return [=, &on = arrays.device().on()] {
        on.attention_backward_sums(dims, x, x + k_at, x + v_at, y, logsumexp, dy, dx, dkv + k_at, dkv + v_at, scratch);
      };
    });
    const int64_t tokens = d_.tokens, samples = d_.samples, cache = samples * tokens * kv;
    add("attention_decode", 4 * real(cache), [=](Arrays& arrays) -> Order {
      const auto q = arrays.drawn<bf16>(samples * k_at), next = arrays.drawn<bf16>(samples * k_at),
                 keys = arrays.drawn<bf16>(cache), values = arrays.drawn<bf16>(cache);
      return [=, &on = arrays.device().on()] { on.attention_decode(dims, tokens - 1, tokens, q, keys, values, next); };
    });
    // Heads half of whose channels are a key's of their own, a quarter a shared one's.
    const kernels::LatentHeads of{rows_, d_.heads, d_.head_dim / 2, d_.head_dim / 4, d_.head_dim / 2};
    const int64_t joined = of.heads * (of.nope + of.rope), values = of.heads * of.value;
    const int64_t latent = of.heads * (of.nope + of.value);
    const double bytes = 2 * real(rows_) * real(latent + of.rope + joined + values);
    const auto of_latent = [=](Arrays& arrays, bool join) -> Order {
      const auto kv_rows = arrays.drawn<bf16>(rows * latent), shared = arrays.drawn<bf16>(rows * of.rope),
                 k = arrays.drawn<bf16>(rows * joined), v = arrays.drawn<bf16>(rows * joined);
      return [=, &on = arrays.device().on()] {
        if (join) return on.join_latent_heads(of, kv_rows, {shared, of.rope}, {k, joined}, {v, joined});
        on.split_latent_heads(of, {k, joined}, {v, joined}, kv_rows, {shared, of.rope});
      };
    };
    add("join_latent_heads", bytes, [=](Arrays& arrays) { return of_latent(arrays, true); });
    add("split_latent_heads", bytes, [=](Arrays& arrays) { return of_latent(arrays, false); });
  }

  void experts() {
    const int64_t tokens = rows_, width = width_, experts = 8, choices = 2, all = tokens * choices;
    const kernels::RouterDims of{.tokens = tokens, .experts = experts, .choices = choices};
    add("route_forward", 4 * real(tokens * (2 * experts + 2 * choices + 1)), [=](Arrays& arrays) -> Order {
      const auto logits = arrays.drawn<float>(tokens * experts), weights = arrays.zeros<float>(all),
                 log_sums = arrays.zeros<float>(tokens);
      const auto chosen = arrays.zeros<int32_t>(all);
      return [=, &on = arrays.device().on()] { on.route_forward(of, logits, chosen, weights, log_sums); };
    });
    add("route_backward", real(tokens * (6 * experts + 8 * choices)), [=](Arrays& arrays) -> Order {
      const auto scores = arrays.drawn<float>(tokens * experts), dweights = arrays.drawn<float>(all),
                 balance = arrays.drawn<float>(experts);
      const auto chosen = arrays.numbers(all, experts);
      const auto dlogits = arrays.drawn<bf16>(tokens * experts);
      return [=, &on = arrays.device().on()] {
        on.route_backward(of, scores, chosen, dweights, {balance, nullptr, 0}, dlogits);
      };
    });
    add("count_choices", 4 * real(all), [=](Arrays& arrays) -> Order {
      const auto chosen = arrays.numbers(all, experts);
      const auto counts = std::make_shared<HostNumbers<int32_t>>(arrays.device().stream(), experts);
      return [=, &on = arrays.device().on()] { on.count_choices(chosen, all, counts->room()); };
    });
    add("place_choices", 8 * real(all), [=](Arrays& arrays) -> Order {
      const auto chosen = arrays.numbers(all, experts);
      const auto rows_of = arrays.zeros<int32_t>(all);
      return [=, &on = arrays.device().on()] {
        std::vector<int64_t> next(static_cast<size_t>(experts));
        on.place_choices(chosen, all, next, rows_of);
      };
    });
    add("group_choices", 8 * real(all), [=](Arrays& arrays) -> Order {
      const auto chosen = arrays.numbers(all, experts);
      const auto rows_of = arrays.zeros<int32_t>(all);
      const auto groups = arrays.of(std::vector<kernels::GroupRows>(static_cast<size_t>(experts + 1)));
      const auto counts = arrays.zeros<float>(experts);
      return [=, &on = arrays.device().on()] { on.group_choices({all, experts, 32}, chosen, groups, counts, rows_of); };
    });
    /// Each choice has a row of its own.
    const auto places = [=](Arrays& arrays) {
      std::vector<int32_t> host(static_cast<size_t>(all));
      for (int64_t k = 0; k < all; ++k) host[static_cast<size_t>(k)] = static_cast<int32_t>(all - 1 - k);
      return arrays.of(host);
    };
    add("rows_to_experts", 2 * real(tokens * width + all * width), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<bf16>(tokens * width), to = arrays.drawn<bf16>(all * width);
      const auto rows_of = places(arrays);
      return [=, &on = arrays.device().on()] { on.rows_to_experts(from, rows_of, tokens, choices, width, to); };
    });
    add("rows_to_tokens", 2 * real(tokens * width + all * width), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<bf16>(all * width), to = arrays.drawn<bf16>(tokens * width);
      const auto rows_of = places(arrays);
      const auto factors = arrays.drawn<float>(all);
      return [=, &on = arrays.device().on()] { on.rows_to_tokens(from, rows_of, factors, tokens, choices, width, to); };
    });
    const auto one_group = [=](Arrays& arrays) {
      using kernels::GroupRows;
      return arrays.of(std::vector<GroupRows>{{0, all, all, 0}, {all, 0, 0, GroupRows::tiles_of(all)}});
    };
    add("fill_groups", 2 * real(all * width), [=](Arrays& arrays) -> Order {
      const DevicePtr<const bf16> from = arrays.drawn<bf16>(width);
      const auto groups = one_group(arrays);
      const auto rows = arrays.drawn<bf16>(all * width);
      return [=, &on = arrays.device().on()] { on.fill_groups(groups, all, {&from, 1}, width, rows); };
    });
    add("add_rows_of_groups", 2 * real(all * width), [=](Arrays& arrays) -> Order {
      const DevicePtr<float> sums = arrays.zeros<float>(width);
      const auto groups = one_group(arrays);
      const auto rows = arrays.drawn<bf16>(all * width);
      return [=, &on = arrays.device().on()] { on.add_rows_of_groups(groups, all, rows, width, width, {&sums, 1}); };
    });
    add("dot_and_scale_rows", 6 * real(all * width), [=](Arrays& arrays) -> Order {
      const auto a = arrays.drawn<bf16>(all * width), b = arrays.drawn<bf16>(all * width);
      const auto rows_of = places(arrays);
      const auto factors = arrays.drawn<float>(all), dots = arrays.zeros<float>(all);
      return [=, &on = arrays.device().on()] {
        on.dot_and_scale_rows(a, b, rows_of, factors, tokens, choices, width, dots);
      };
    });
    add("scale_expert_rows", 4 * real(all * width), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<bf16>(all * width);
      const auto rows_of = places(arrays);
      const auto factors = arrays.drawn<float>(all);
      return [=, &on = arrays.device().on()] { on.scale_expert_rows(x, rows_of, factors, all, width); };
    });
    products_of_experts(experts, all);
    add("gate_rows", 4 * real(tokens * width), [=](Arrays& arrays) -> Order {
      const auto gates = arrays.drawn<float>(tokens);
      const auto x = arrays.drawn<bf16>(tokens * width);
      return [=, &on = arrays.device().on()] { on.gate_rows(gates, x, tokens, width); };
    });
    add("gate_backward", 10 * real(tokens), [=](Arrays& arrays) -> Order {
      const auto gates = arrays.drawn<float>(tokens), dgates = arrays.drawn<float>(tokens);
      const auto dlogits = arrays.drawn<bf16>(tokens);
      return [=, &on = arrays.device().on()] { on.gate_backward(gates, dgates, dlogits, tokens); };
    });
  }

  /// Products of experts with equal numbers of rows, in one launch and by cuBLASLt one by one: forward, and sums over
  /// rows, as gradients of weights are.
  void products_of_experts(int64_t experts, int64_t all) {
    const int64_t n = 2 * width_, k = width_, rows = all / experts;
    const double bytes = 2 * (real(all * (n + k)) + real(experts * n * k)), flops = 2 * real(all) * real(n) * real(k);
    for (const bool sums : {false, true}) {
      const auto products = [=](Arrays& arrays) {
        const auto x = arrays.drawn<bf16>(all * k), y = arrays.drawn<bf16>(all * n);
        const auto weights = arrays.drawn<bf16>(sums ? 0 : experts * n * k);
        const auto gradients = arrays.drawn<float>(sums ? experts * n * k : 0);
        kernels::MatmulGroups out{.products = {}, .ends = {}, .most_rows = rows, .all_rows = all, .places = nullptr};
        for (int64_t expert = 0; expert < experts; ++expert) {
          kernels::MatmulArgs of;
          if (sums) {  // gradients [k, n]
            of = {.m = k,
                  .n = n,
                  .k = rows,
                  .a = x,
                  .lda = k,
                  .trans_a = true,
                  .b = y,
                  .ldb = n,
                  .ab_dtype = DType::kBf16};
            of.c = gradients + expert * n * k;
            of.ldc = n;
            of.c_dtype = DType::kF32;
          } else {
            of = {.m = rows, .n = n, .k = k, .a = x, .lda = k, .ldb = k, .trans_b = true, .ab_dtype = DType::kBf16};
            of.b = weights + expert * n * k;
            of.c = y;
            of.ldc = n;
            of.c_dtype = DType::kBf16;
          }
          out.products.push_back(of);
          out.ends.push_back(out.products.size());
        }
        return out;
      };
      const std::string shape = fmt::format("{} experts of {} x {} x {}{}", experts, rows, k, n, sums ? ", sums" : "");
      const double moved = sums ? bytes + 2 * real(experts * n * k) : bytes;
      out_.push_back({"matmul_groups", shape, moved, flops, 0, [=](Arrays& arrays) -> Order {
                        kernels::MatmulGroups groups = products(arrays);
                        std::vector<kernels::GroupRows> places;
                        for (int64_t expert = 0; expert <= experts; ++expert) {
                          const int64_t here = expert < experts ? rows : 0;
                          places.push_back({expert * rows, here, here, expert * kernels::GroupRows::tiles_of(rows)});
                        }
                        groups.places = arrays.of(places);
                        return [=, &on = arrays.device().on()] { on.matmul_groups(groups); };
                      }});
      out_.push_back({"matmul of each expert", shape, moved, flops, 0, [=](Arrays& arrays) -> Order {
                        const kernels::MatmulGroups groups = products(arrays);
                        return [=, &on = arrays.device().on()] {
                          for (int64_t expert = 0; expert < experts; ++expert) {
                            kernels::MatmulArgs of = groups.products[static_cast<size_t>(expert)];
                            const int64_t first = expert * rows;
                            of.a = of.a.as<const bf16>() + first * of.lda;
                            if (sums) of.b = of.b.as<const bf16>() + first * of.ldb;
                            if (!sums) of.c = of.c.as<bf16>() + first * of.ldc;
                            on.matmul(of);
                          }
                        };
                      }});
    }
  }

  void rows() {
    const int64_t rows = rows_, width = width_, count = count_;
    add("copy_rows", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<bf16>(2 * count), to = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.copy_rows(from, 2 * width, to, width, rows, width); };
    });
    add("round_rows", 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<float>(count);
      const auto to = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.round_rows(from, width, to, width, rows, width); };
    });
    add("scatter_rows", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<bf16>(count), to = arrays.drawn<bf16>(count);
      std::vector<int64_t> host(static_cast<size_t>(rows));
      for (int64_t r = 0; r < rows; ++r) host[static_cast<size_t>(r)] = rows - 1 - r;
      const auto places = arrays.of(host);
      return [=, &on = arrays.device().on()] { on.scatter_rows(from, width, places, rows, width, to); };
    });
    add("to_floats", 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<bf16>(count);
      const auto to = arrays.drawn<float>(count);
      return [=, &on = arrays.device().on()] { on.to_floats(from, to, count); };
    });
    add("from_floats", 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto from = arrays.drawn<float>(count);
      const auto to = arrays.drawn<bf16>(count);
      return [=, &on = arrays.device().on()] { on.from_floats(from, to, count); };
    });
    const kernels::TableRange table{0, d_.vocab, width};
    const double looked_up = real(distinct_ids(rows, table.count) * width);
    add("embedding_backward_parts", 2 * real(count) + 8 * looked_up, [=](Arrays& arrays) -> Order {
      const auto ids = arrays.ids(rows, table.count);
      const auto dout = arrays.drawn<bf16>(count);
      const auto dtable = arrays.drawn<float>(table.count * width);
      return [=, &on = arrays.device().on()] { on.embedding_backward_parts(ids, rows, 2, table, dout, dtable, 1); };
    });
    add("positions_look_up", 2 * real(count + d_.tokens * width), [=, d = d_](Arrays& arrays) -> Order {
      const auto weights = arrays.drawn<bf16>(d.tokens * width), out = arrays.drawn<bf16>(count);
      const kernels::RowPositions at{nullptr, 0, d.held, d.samples};
      return [=, &on = arrays.device().on()] { on.positions_look_up(weights, at, rows, width, out); };
    });
    add("add_to", 12 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count), y = arrays.drawn<float>(count);
      return [=, &on = arrays.device().on()] { on.add_to(x, y, count); };
    });
    add("copy_floats", 8 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count), y = arrays.drawn<float>(count);
      return [=, &on = arrays.device().on()] { on.copy_floats(x, y, count); };
    });
    add("copy_ints", 8 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.zeros<int32_t>(count), y = arrays.zeros<int32_t>(count);
      return [=, &on = arrays.device().on()] { on.copy_ints(x, y, count); };
    });
    const auto with_places = [=](Arrays& arrays, bool gather) -> Order {
      const auto from = arrays.drawn<float>(count), to = arrays.drawn<float>(count);
      std::vector<int32_t> host(static_cast<size_t>(count));
      for (int64_t k = 0; k < count; ++k) host[static_cast<size_t>(k)] = static_cast<int32_t>(count - 1 - k);
      const auto places = arrays.of(host);
      return [=, &on = arrays.device().on()] {
        if (gather) return on.gather_floats(from, places, count, to);
        on.scatter_floats(from, places, count, to);
      };
    };
    add("gather_floats", 12 * real(count), [=](Arrays& arrays) { return with_places(arrays, true); });
    add("scatter_floats", 12 * real(count), [=](Arrays& arrays) { return with_places(arrays, false); });
  }

  /// Of a vocabulary that is cut over two ranks.
  void losses() {
    const int64_t rows = rows_, block = d_.logit_rows, cols = d_.vocab / 2;
    add("row_sums", 2 * real(block * cols), [=](Arrays& arrays) -> Order {
      const auto targets = arrays.numbers(block, cols);
      const auto logits = arrays.drawn<bf16>(block * cols);
      const auto max = arrays.zeros<float>(block), sums = arrays.zeros<float>(block),
                 target = arrays.zeros<float>(block);
      return [=, &on = arrays.device().on()] {
        on.row_sums({block, cols, cols, 0, targets}, logits, max, sums, target);
      };
    });
    add("cross_entropy_backward", 4 * real(block * cols), [=](Arrays& arrays) -> Order {
      const auto targets = arrays.numbers(block, cols);
      const auto logits = arrays.drawn<bf16>(block * cols);
      const auto max = arrays.drawn<float>(block), sums = arrays.drawn<float>(block),
                 scale = arrays.drawn<float>(block);
      return [=, &on = arrays.device().on()] {
        on.cross_entropy_backward({block, cols, cols, 0, targets}, logits, max, sums, scale, 0, 0);
      };
    });
    add("join_maxima", 12 * real(rows), [=](Arrays& arrays) -> Order {
      const auto maxima = arrays.drawn<float>(2 * rows), max = arrays.zeros<float>(rows);
      return [=, &on = arrays.device().on()] { on.join_maxima(maxima, 2, rows, max); };
    });
    add("rescale_sums", 28 * real(rows), [=](Arrays& arrays) -> Order {
      const auto maxima = arrays.drawn<float>(2 * rows), max = arrays.drawn<float>(rows),
                 sums = arrays.drawn<float>(2 * rows);
      return [=, &on = arrays.device().on()] { on.rescale_sums(maxima, max, 2, 2, rows, sums); };
    });
    add("row_losses", 20 * real(rows), [=](Arrays& arrays) -> Order {
      const auto targets = arrays.numbers(rows, 100);
      const auto max = arrays.drawn<float>(rows), sums = arrays.drawn<float>(rows), loss = arrays.drawn<float>(rows);
      return [=, &on = arrays.device().on()] { on.row_losses(targets, max, sums, rows, loss); };
    });
    add("row_scales", 12 * real(rows), [=](Arrays& arrays) -> Order {
      const auto targets = arrays.numbers(rows, 100);
      const auto weights = arrays.drawn<float>(rows), scale = arrays.zeros<float>(rows);
      return [=, &on = arrays.device().on()] { on.row_scales(targets, weights, 1.0f, rows, scale); };
    });
  }

  void sinks() {
    const int64_t heads = d_.heads, rows = rows_;
    add("sink_gradients", 8 * real(rows * heads), [=](Arrays& arrays) -> Order {
      const auto sinks = arrays.drawn<float>(heads), logsumexp = arrays.drawn<float>(rows * heads),
                 deltas = arrays.drawn<float>(rows * heads), dsinks = arrays.zeros<float>(heads);
      return [=, &on = arrays.device().on()] {
        kernels::AttentionDims dims{.batch = 1, .tokens = rows, .heads = heads, .kv_heads = heads};
        dims.sinks = sinks;
        on.sink_gradients(dims, logsumexp, deltas, dsinks);
      };
    });
  }

  /// State's arrays of `count_` floats and a clip.
  struct Held {
    kernels::StateArrays arrays;
    DevicePtr<float> grad;
    kernels::AdamwArgs args{.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
  };
  static Held held(Arrays& arrays, int64_t count) {
    Held out{{arrays.drawn<float>(count), arrays.drawn<float>(count), arrays.zeros<float>(count), nullptr},
             arrays.drawn<float>(count)};
    out.args.clip = arrays.of(std::vector<kernels::Clip>{{.grad_scale = 1}});
    return out;
  }

  static kernels::AdamRun run_of(const Held& of, int64_t count) {
    return {.args = of.args, .grad = of.grad, .from = of.arrays, .to = of.arrays, .count = count};
  }

  void state() {
    const int64_t count = count_;
    add("lamb_moments_of_runs", 24 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::AdamRun run = run_of(held(arrays, count), count);
      const auto partials = arrays.zeros<double>(kernels::norm_chunks(count) * kernels::TensorNorms::kWords);
      return [=, &state = arrays.device().state()] { state.lamb_moments_of_runs({&run, 1}, partials); };
    });
    const int64_t parts = kernels::norm_chunks(count) * kernels::TensorNorms::kWords;
    add("add_norms_of_runs", 8 * real(parts), [=](Arrays& arrays) -> Order {
      const kernels::NormRun run{.count = count};
      const auto partials = arrays.zeros<double>(parts), words = arrays.zeros<double>(kernels::TensorNorms::kWords);
      return [=, &state = arrays.device().state()] { state.add_norms_of_runs({&run, 1}, partials, words); };
    });
    add("lamb_step_of_runs", 16 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::AdamRun run = run_of(held(arrays, count), count);
      const auto words = arrays.of(std::vector<double>(kernels::TensorNorms::kWords, 1.0));
      return [=, &state = arrays.device().state()] { state.lamb_step_of_runs({&run, 1}, words); };
    });
    add("ema_of_runs", 12 * real(count), [=](Arrays& arrays) -> Order {
      const auto weight = arrays.drawn<float>(count), average = arrays.drawn<float>(count);
      const kernels::EmaRun run{.weight = weight, .from = average, .to = average, .count = count};
      return [=, &state = arrays.device().state()] { state.ema_of_runs(0.99, {&run, 1}); };
    });
    add("scale_heads_of_runs", 8 * real(count), [=](Arrays& arrays) -> Order {
      const auto factors = arrays.of(std::vector<float>{1, 1}), clipped = arrays.of(std::vector<float>{1});
      const auto clip = arrays.of(std::vector<kernels::Clip>(1));
      const kernels::HeadRun run{arrays.drawn<float>(count), factors, 0, count, count / 2 + 1, DType::kF32, nullptr};
      return [=, &state = arrays.device().state()] { state.scale_heads_of_runs({&run, 1}, clipped, clip); };
    });
    add("clear_floats", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count);
      return [=, &state = arrays.device().state()] { state.clear_floats(x, count); };
    });
    add("clear_floats_of_runs", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count);
      const auto runs = arrays.of(std::vector<kernels::ElemRun>{{0, count / 2}, {count / 2, count - count / 2}});
      return [=, &on = arrays.device().on()] { on.clear_floats_of_runs(x.as<float>(), runs, 2); };
    });
    add("fill_doubles", 8 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.zeros<double>(count);
      return [=, &state = arrays.device().state()] { state.fill_doubles(1, x, count); };
    });
    add("copy_state", 8 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count), y = arrays.drawn<float>(count);
      return [=, &state = arrays.device().state()] { state.copy_state(x, y, count); };
    });
    add("copy_summed", 12 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count), y = arrays.drawn<float>(count);
      const auto sums = std::make_shared<HostNumbers<uint64_t>>(arrays.device().stream(), 1);
      return [=, &state = arrays.device().state()] { state.copy_summed(x, y, count, {sums->room(), 0}); };
    });
    add("put_weights", 6 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count);
      const auto weights = arrays.drawn<bf16>(count);
      return [=, &state = arrays.device().state()] {
        state.put_weights(x, count, DType::kBf16, DevicePtr<void>(weights));
      };
    });
    add("count_not_finite", 4 * real(count), [=](Arrays& arrays) -> Order {
      const auto x = arrays.drawn<float>(count);
      const auto found = std::make_shared<HostNumbers<int64_t>>(arrays.device().stream(), 1);
      return [=, &state = arrays.device().state()] { state.count_not_finite(x, count, found->room()); };
    });
  }

  void adafactor() {
    const int64_t count = count_, rows = rows_, cols = width_;
    struct Matrix {
      kernels::MatrixRun run;
      kernels::AdafactorFactors factors;
    };
    const auto matrix = [=](Arrays& arrays) {
      Matrix out;
      out.run = {arrays.drawn<float>(count), arrays.of(std::vector<kernels::Clip>{{.grad_scale = 1}}), 0, count, cols};
      out.factors = {arrays.drawn<float>(rows), arrays.drawn<float>(cols)};
      return out;
    };
    add("adafactor_squares_of_runs", 4 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::SquaresRun run{matrix(arrays).run, arrays.zeros<double>(rows), arrays.zeros<double>(cols)};
      return [=, &state = arrays.device().state()] { state.adafactor_squares_of_runs({&run, 1}); };
    });
    const auto run_of = [=](Arrays& arrays) {
      const Matrix of = matrix(arrays);
      const kernels::StateArrays state{.master = arrays.drawn<float>(count)};
      return kernels::AdafactorRun{.matrix = of.run, .factors = of.factors, .from = state, .to = state, .decay = 0.1f};
    };
    add("adafactor_norms_of_runs", 8 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::AdafactorRun run = run_of(arrays);
      const auto partials = arrays.zeros<double>(kernels::norm_chunks(count) * kernels::TensorNorms::kWords);
      return [=, &state = arrays.device().state()] { state.adafactor_norms_of_runs({&run, 1}, partials); };
    });
    add("adafactor_step_of_runs", 12 * real(count), [=](Arrays& arrays) -> Order {
      const kernels::AdafactorRun run = run_of(arrays);
      const auto rates = arrays.of(std::vector<float>{1e-4f});
      return [=, &state = arrays.device().state()] { state.adafactor_step_of_runs({&run, 1}, rates); };
    });
  }

  const StageDims& d_;
  const int64_t rows_, width_, count_;
  const std::string shape_;
  std::vector<Case> out_;
};

}  // namespace

std::vector<Case> other_cases(const Model& model) { return Others(model).all(); }

const std::vector<std::string_view>& not_measured() {
  static const std::vector<std::string_view> names = {
      // A few numbers, so a launch.
      "clip_by_norm", "balance_bias", "note_not_finite", "clear_padding", "adafactor_factors_of_tensors",
      "adafactor_rates", "head_factors",
      // The host computes them, or they go to the host.
      "rotary_table", "alibi_slopes", "draw_weights", "floats_to_host", "ints_to_host", "rows_to_host",
      "doubles_to_host",
      // Others that are measured, by another name, or one behind the other.
      "put_first_weights", "adafactor_moments", "adafactor_rates_of_runs"};
  return names;
}

}  // namespace cairn::bench
