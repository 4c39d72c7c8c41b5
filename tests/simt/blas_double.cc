#include "tests/simt/blas_double.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/core/random.h"

namespace cairn::simt {

struct BlasDouble::Product {
  int compute = 0, scale = 0;
  int32_t op_a = cuda::kOpNone, op_b = cuda::kOpNone;
  uint32_t epilogue = cuda::kEpilogueNone;
  void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_ld = 0;

  bool biases() const { return epilogue == cuda::kEpilogueBias || epilogue == cuda::kEpilogueGeluAuxBias; }
  bool gelu() const { return epilogue == cuda::kEpilogueGeluAux || epilogue == cuda::kEpilogueGeluAuxBias; }
  bool gelu_gradient() const { return epilogue == cuda::kEpilogueGeluGradient; }
  bool sums() const { return epilogue == cuda::kEpilogueSumsOfB; }
  bool has_aux() const { return gelu() || gelu_gradient(); }
};

struct BlasDouble::Layout {
  int type = 0;
  int64_t rows = 0, cols = 0, ld = 0;

  int64_t elem_bytes() const { return type == cuda::kTypeF32 ? 4 : 2; }
  int64_t bytes() const { return ((cols - 1) * ld + rows) * elem_bytes(); }
  float at(const void* data, int64_t i) const {
    if (type == cuda::kTypeF32) return static_cast<const float*>(data)[i];
    if (type == cuda::kTypeBf16) return to_f32(static_cast<const bf16*>(data)[i]);
    return to_f32(static_cast<const f16*>(data)[i]);
  }
  void put(void* data, int64_t i, float x) const {
    if (type == cuda::kTypeF32) {
      static_cast<float*>(data)[i] = x;
    } else if (type == cuda::kTypeBf16) {
      static_cast<bf16*>(data)[i] = to_bf16(x);
    } else {
      static_cast<f16*>(data)[i] = to_f16(x);
    }
  }
};

struct BlasDouble::Wish {
  uint64_t workspace = 0;
  uint32_t reductions = ~0u;  // the library's default: any
  uint32_t align[4] = {256, 256, 256, 256};
};

struct BlasDouble::Call {
  const Product& product;
  const Layout &a, &b, &c, &d;
  float alpha, beta;
  const void *at_a, *at_b, *at_c;
  void* at_d;
  const cuda::BlasAlgorithm* algorithm;
  void* workspace;
  int64_t workspace_bytes;
  StreamDouble::Stream stream;
};

namespace {

using cuda::BlasAlgorithm;
using cuda::BlasChoice;

BlasDouble* current = nullptr;

/// Of op(matrix): rows, then columns.
std::pair<int64_t, int64_t> shape(const BlasDouble::Layout& of, int32_t op) {
  return op == cuda::kOpNone ? std::pair{of.rows, of.cols} : std::pair{of.cols, of.rows};
}

bool fit(const BlasDouble::Product& p, const BlasDouble::Layout& a, const BlasDouble::Layout& b,
         const BlasDouble::Layout& c, const BlasDouble::Layout& d) {
  const auto [m, k] = shape(a, p.op_a);
  const auto [k_of_b, n] = shape(b, p.op_b);
  for (const BlasDouble::Layout* const of : {&a, &b, &c, &d}) {
    if (of->rows <= 0 || of->cols <= 0 || of->ld < of->rows) return false;
  }
  return k == k_of_b && c.rows == m && c.cols == n && d.rows == m && d.cols == n && c.type == d.type && c.ld == d.ld;
}

/// Stands for all that an algorithm was chosen for.
uint64_t kind_of(const BlasDouble::Product& p, const BlasDouble::Layout& a, const BlasDouble::Layout& b,
                 const BlasDouble::Layout& c) {
  uint64_t out = mix64(static_cast<uint64_t>(p.op_a * 2 + p.op_b) << 16 | p.epilogue);
  out = mix64(out ^ static_cast<uint64_t>(p.aux_ld));
  for (const BlasDouble::Layout* const of : {&a, &b, &c}) {
    for (const int64_t number : {static_cast<int64_t>(of->type), of->rows, of->cols, of->ld}) {
      out = mix64(out ^ static_cast<uint64_t>(number));
    }
  }
  return out;
}

/// Where the input of an activation is, and how far its rows are apart, as the library wants it.
bool aux_fits(const BlasDouble::Product& p, const BlasDouble::Layout& d) {
  return !p.has_aux() ||
         (p.aux != nullptr && reinterpret_cast<uintptr_t>(p.aux) % 16 == 0 && p.aux_ld % 8 == 0 && p.aux_ld >= d.rows);
}

float gelu(float x, float* slope) {
  const double root = std::sqrt(2 / std::numbers::pi), u = root * (x + 0.044715 * x * x * x), t = std::tanh(u);
  *slope = static_cast<float>(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x));
  return static_cast<float>(0.5 * x * (1 + t));
}

/// The alignment that the library may rely on, from the address that it is shown when it chooses.
uint64_t alignment(const void* at) {
  return at == nullptr ? 1 : std::min<uint64_t>(16, uint64_t{1} << std::countr_zero(reinterpret_cast<uintptr_t>(at)));
}

template <typename T>
int make(void** out, T value) {
  return current->cuda().plain_call([&] {
    *out = new T(std::move(value));
    current->count(1);
    return 0;
  });
}
template <typename T>
int give_back(void* of) {
  const int refused = current->cuda().plain_call([] { return 0; });
  delete static_cast<T*>(of);
  current->count(-1);
  return refused;
}
template <typename T>
int take(T& member, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return kBlasInvalid;
  std::memcpy(&member, value, bytes);
  return 0;
}

struct Handle {};

cuda::BlasApi table() {
  using Product = BlasDouble::Product;
  using Layout = BlasDouble::Layout;
  using Wish = BlasDouble::Wish;
  cuda::BlasApi out;
  out.create = [](void** handle) { return make(handle, Handle{}); };
  out.destroy = &give_back<Handle>;
  out.create_product = [](void** product, int compute, int scale) {
    Product made;
    made.compute = compute;
    made.scale = scale;
    return make(product, made);
  };
  out.destroy_product = &give_back<Product>;
  out.set_product = [](void* product, int attribute, const void* value, size_t bytes) {
    return current->cuda().plain_call([&] {
      auto& of = *static_cast<Product*>(product);
      switch (attribute) {
        case cuda::kProductOpA:
          return take(of.op_a, value, bytes);
        case cuda::kProductOpB:
          return take(of.op_b, value, bytes);
        case cuda::kProductEpilogue:
          return take(of.epilogue, value, bytes);
        case cuda::kProductBias:
          return take(of.bias, value, bytes);
        case cuda::kProductAux:
          return take(of.aux, value, bytes);
        case cuda::kProductAuxLd:
          return take(of.aux_ld, value, bytes);
        default:
          return kBlasInvalid;
      }
    });
  };
  out.create_layout = [](void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    return make(layout, Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld});
  };
  out.destroy_layout = &give_back<Layout>;
  out.create_wish = [](void** wish) { return make(wish, Wish{}); };
  out.destroy_wish = &give_back<Wish>;
  out.set_wish = [](void* wish, int attribute, const void* value, size_t bytes) {
    return current->cuda().plain_call([&] {
      auto& of = *static_cast<Wish*>(wish);
      if (attribute == cuda::kWishWorkspace) return take(of.workspace, value, bytes);
      if (attribute == cuda::kWishReductions) return take(of.reductions, value, bytes);
      if (attribute < cuda::kWishAlignA || attribute > cuda::kWishAlignD) return kBlasInvalid;
      return take(of.align[attribute - cuda::kWishAlignA], value, bytes);
    });
  };
  out.choose = [](void* handle, void* product, void* a, void* b, void* c, void* d, void* wish, int wanted,
                  BlasChoice* choices, int* found) {
    return current->cuda().plain_call([&] {
      if (handle == nullptr || wanted < 1) return kBlasInvalid;
      return current->choose(*static_cast<Product*>(product), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
                             *static_cast<Layout*>(c), *static_cast<Layout*>(d), *static_cast<Wish*>(wish), wanted,
                             choices, *found);
    });
  };
  out.multiply = [](void* handle, void* product, const void* alpha, const void* a, void* a_layout, const void* b,
                    void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                    const BlasAlgorithm* algorithm, void* workspace, size_t workspace_bytes, CUstream_st* stream) {
    if (handle == nullptr || algorithm == nullptr) return kBlasInvalid;
    return current->multiply({*static_cast<Product*>(product), *static_cast<Layout*>(a_layout),
                              *static_cast<Layout*>(b_layout), *static_cast<Layout*>(c_layout),
                              *static_cast<Layout*>(d_layout), *static_cast<const float*>(alpha),
                              *static_cast<const float*>(beta), a, b, c, d, algorithm, workspace,
                              static_cast<int64_t>(workspace_bytes), stream});
  };
  out.version = [] { return current->version(); };
  out.status_name = [](int) { return "CUBLAS_STATUS_OF_DOUBLE"; };
  return out;
}

}  // namespace

BlasDouble::BlasDouble(StreamDouble& cuda) : cuda_(cuda), api_(table()) {
  RT_CHECK(current == nullptr, "two doubles of cuBLASLt at a time");
  current = this;
}
BlasDouble::~BlasDouble() { current = nullptr; }

int BlasDouble::choose(const Product& p, const Layout& a, const Layout& b, const Layout& c, const Layout& d,
                       const Wish& wish, int wanted, cuda::BlasChoice* choices, int& found) {
  ++choices_;
  if (cuda_.captures()) misuse("an algorithm is asked for in a capture");
  if (wish.reductions != cuda::kOrderedSums) misuse("an algorithm that may sum in any order");
  found = 0;
  if (!fit(p, a, b, c, d)) return kBlasInvalid;
  if (!aux_fits(p, d)) {
    misuse("an activation whose input is not where it may be");
    return kBlasInvalid;
  }
  const bool known = (a.type == cuda::kTypeF32 || a.type == cuda::kTypeBf16 || a.type == cuda::kTypeF16) &&
                     a.type == b.type && (c.type == a.type || c.type == cuda::kTypeF32);
  if (!p.biases() && !p.has_aux() && !p.sums() && p.epilogue != cuda::kEpilogueNone) return kBlasNotSupported;
  if (!known || p.compute != cuda::kComputeF32 || p.scale != cuda::kTypeF32) return 0;
  if (is_refused_ && is_refused_(p.epilogue)) return kBlasNotSupported;
  for (; found < std::min(wanted, static_cast<int>(proposals_.size())); ++found) {
    cuda::BlasChoice& choice = choices[found];
    choice = {};
    choice.algorithm.data[0] = kind_of(p, a, b, c);
    choice.algorithm.data[1] = choice.workspace_bytes = std::min<uint64_t>(wish.workspace, 1024);
    for (int i = 0; i < 4; ++i) choice.algorithm.data[2 + i] = wish.align[i];
    choice.algorithm.data[6] = alignment(p.bias);
    choice.algorithm.data[7] = static_cast<uint64_t>(found);
  }
  return 0;
}

int BlasDouble::multiply(const Call& of) {
  const auto& chosen = of.algorithm->data;
  if (!fit(of.product, of.a, of.b, of.c, of.d) || chosen[0] != kind_of(of.product, of.a, of.b, of.c)) {
    return kBlasInvalid;
  }
  const void* const places[] = {of.at_a, of.at_b, of.at_c, of.at_d};
  const Layout* const layouts[] = {&of.a, &of.b, &of.c, &of.d};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(places[i]) % chosen[2 + i] != 0) return kBlasInvalid;
    if (static_cast<uint64_t>(layouts[i]->ld * layouts[i]->elem_bytes()) % chosen[2 + i] != 0) return kBlasInvalid;
    if (!cuda_.holds(places[i], layouts[i]->bytes())) return kBlasInvalid;
  }
  if (of.workspace_bytes < static_cast<int64_t>(chosen[1])) return kBlasInvalid;
  if (chosen[1] > 0) {
    if (!cuda_.holds(of.workspace, of.workspace_bytes)) return kBlasInvalid;
    const auto owner = [&] {
      const std::lock_guard lock(mutex_);
      return workspaces_.try_emplace(of.workspace, of.stream).first->second;
    }();
    if (owner != of.stream) misuse("two streams share memory for products");
  }
  const bool biased = of.product.biases();
  const int64_t aux_bytes = ((of.d.cols - 1) * of.product.aux_ld + of.d.rows) * of.d.elem_bytes();
  if (of.product.has_aux() && (!aux_fits(of.product, of.d) || !cuda_.holds(of.product.aux, aux_bytes))) {
    return kBlasInvalid;
  }
  if (biased && !cuda_.holds(of.product.bias, of.d.rows * of.d.elem_bytes())) return kBlasInvalid;
  if (of.product.sums() && !cuda_.holds(of.product.bias, of.d.cols * of.d.elem_bytes())) return kBlasInvalid;
  if (reinterpret_cast<uintptr_t>(of.product.bias) % chosen[6] != 0) return kBlasInvalid;
  if (of.at_c != of.at_d && refuses_other_c_) return kBlasNotSupported;
  if (chosen[7] >= proposals_.size()) return kBlasInvalid;
  const Proposal& proposal = proposals_[chosen[7]];
  if (proposal.refused) return kBlasNotSupported;
  const int64_t number = [&] {
    const std::lock_guard lock(mutex_);
    return ++multiplied_[chosen[7]];
  }();
  const float noise = proposal.unsteady && number % 2 == 0 ? 1.0f : 0.0f;
  const float beside = proposal.unsteady_beside && number % 2 == 0 ? 1.0f : 0.0f;
  const int64_t depth = shape(of.a, of.product.op_a).second;
  const Ordered ordered{.kind = Ordered::Kind::kProduct,
                        .numbers = {of.d.rows, of.d.cols, depth, of.a.type, of.d.type, of.product.op_a, of.product.op_b,
                                    of.product.epilogue, of.beta != 0 ? 1 : 0}};
  const auto work = [product = of.product, a = of.a, b = of.b, d = of.d, alpha = of.alpha, beta = of.beta,
                     at_a = of.at_a, at_b = of.at_b, at_c = of.at_c, at_d = of.at_d, biased, workspace = of.workspace,
                     spoilt = chosen[1], backwards = chosen[7] > 0, noise, beside] {
    if (spoilt > 0) std::memset(workspace, 0xff, spoilt);
    const int64_t k = shape(a, product.op_a).second;
    for (int64_t col = 0; col < d.cols; ++col) {
      if (product.sums()) {
        float sum = 0;
        for (int64_t i = 0; i < k; ++i)
          sum += b.at(at_b, product.op_b == cuda::kOpNone ? i + col * b.ld : col + i * b.ld);
        d.put(product.bias, col, sum + beside);
      }
      for (int64_t row = 0; row < d.rows; ++row) {
        float sum = 0;
        for (int64_t n = 0; n < k; ++n) {
          const int64_t i = backwards ? k - 1 - n : n;
          const float left = a.at(at_a, product.op_a == cuda::kOpNone ? row + i * a.ld : i + row * a.ld);
          const float right = b.at(at_b, product.op_b == cuda::kOpNone ? i + col * b.ld : col + i * b.ld);
          sum += left * right;
        }
        const int64_t at = row + col * d.ld;
        float out = alpha * sum + noise;
        if (beta != 0) out += beta * d.at(at_c, at);  // with 0 it is not read
        if (biased) out += d.at(product.bias, row);
        const int64_t aux_at = row + col * product.aux_ld;
        float slope = 0;
        if (product.gelu()) {
          d.put(product.aux, aux_at, out + beside);
          out = gelu(out, &slope);
        } else if (product.gelu_gradient()) {
          gelu(d.at(product.aux, aux_at), &slope);
          out *= slope;
        }
        d.put(at_d, at, out);
      }
    }
  };
  int error = cuda_.launch(of.stream, work, ordered);
  for (int64_t piece = 1; piece < proposal.work && error == 0; ++piece) error = cuda_.launch(of.stream, [] {});
  return error;
}

}  // namespace cairn::simt
