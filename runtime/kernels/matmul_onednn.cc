#include <fmt/format.h>
#include <omp.h>

#include <dnnl.hpp>
#include <string>
#include <unordered_map>

#include "runtime/core/check.h"
#include "runtime/core/random.h"
#include "runtime/kernels/matmul_impl.h"

namespace cairn::kernels {
namespace {

using dnnl::memory;

/// Everything of a call but its pointers, and the number of threads, which oneDNN bakes into a primitive.
struct Key {
  int64_t m, n, k, lda, ldb, ldc;
  bool trans_a, trans_b, accumulate, bias;
  DType ab_dtype, c_dtype;
  int threads;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0;
    for (const int64_t x : {key.m, key.n, key.k, key.lda, key.ldb, key.ldc, static_cast<int64_t>(key.threads)}) {
      h = mix64(h ^ static_cast<uint64_t>(x));
    }
    const unsigned flags = key.trans_a | key.trans_b << 1 | key.accumulate << 2 | key.bias << 3 |
                           static_cast<unsigned>(key.ab_dtype) << 4 | static_cast<unsigned>(key.c_dtype) << 12;
    return mix64(h ^ flags);
  }
};

/// A primitive with its memory objects: a call only changes their pointers.
struct Product {
  dnnl::matmul primitive;
  memory a, b, c, bias;
  std::unordered_map<int, memory> args;
};

memory::data_type onednn_dtype(DType dtype) {
  RT_CHECK(dtype == DType::kF32 || dtype == DType::kBf16, "matmul of dtype {}", dtype_name(dtype));
  return dtype == DType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
}

dnnl::engine& cpu_engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

Product make_product(const Key& key) {
  const memory::data_type ab = onednn_dtype(key.ab_dtype);
  using Dims = memory::dims;
  const memory::desc a({key.m, key.k}, ab, key.trans_a ? Dims{1, key.lda} : Dims{key.lda, 1});
  const memory::desc b({key.k, key.n}, ab, key.trans_b ? Dims{1, key.ldb} : Dims{key.ldb, 1});
  const memory::desc c({key.m, key.n}, onednn_dtype(key.c_dtype), Dims{key.ldc, 1});
  const memory::desc bias = key.bias ? memory::desc(Dims{1, key.n}, ab, memory::format_tag::ab) : memory::desc();
  dnnl::primitive_attr attr;
  if (key.accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attr.set_post_ops(ops);
  }
  dnnl::engine& engine = cpu_engine();
  const dnnl::matmul::desc desc = key.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  Product product;
  product.primitive = dnnl::matmul(dnnl::matmul::primitive_desc(desc, attr, engine));
  product.a = memory(a, engine, nullptr);
  product.b = memory(b, engine, nullptr);
  product.c = memory(c, engine, nullptr);
  product.args = {{DNNL_ARG_SRC, product.a}, {DNNL_ARG_WEIGHTS, product.b}, {DNNL_ARG_DST, product.c}};
  if (key.bias) {
    product.bias = memory(bias, engine, nullptr);
    product.args.insert({DNNL_ARG_BIAS, product.bias});
  }
  return product;
}

}  // namespace

std::string describe(const MatmulArgs& args) {
  return fmt::format("matmul C[{},{}] {} = A[{},{}]{} B[{},{}]{} {} (lda {}, ldb {}, ldc {}{}{})", args.m, args.n,
                     dtype_name(args.c_dtype), args.m, args.k, args.trans_a ? " transposed" : "", args.k, args.n,
                     args.trans_b ? " transposed" : "", dtype_name(args.ab_dtype), args.lda, args.ldb, args.ldc,
                     args.accumulate ? ", accumulate" : "", args.bias != nullptr ? ", bias" : "");
}

Status matmul_onednn(const MatmulArgs& args) {
  // Per thread: ranks may be threads, and a primitive's memory objects hold this call's pointers.
  thread_local std::unordered_map<Key, Product, KeyHash> products;
  thread_local dnnl::stream stream(cpu_engine());
  const Key key{args.m,
                args.n,
                args.k,
                args.lda,
                args.ldb,
                args.ldc,
                args.trans_a,
                args.trans_b,
                args.accumulate,
                args.bias != nullptr,
                args.ab_dtype,
                args.c_dtype,
                omp_get_max_threads()};
  try {
    auto found = products.find(key);
    if (found == products.end()) found = products.emplace(key, make_product(key)).first;
    Product& product = found->second;
    product.a.set_data_handle(const_cast<void*>(args.a));  // NOLINT: oneDNN has no read-only memory; it only reads A
    product.b.set_data_handle(const_cast<void*>(args.b));
    product.c.set_data_handle(args.c);
    if (args.bias != nullptr) product.bias.set_data_handle(const_cast<void*>(args.bias));
    product.primitive.execute(stream, product.args);
    stream.wait();
  } catch (const dnnl::error& e) {
    return Error{ErrorCode::kUnsupported, fmt::format("{}: oneDNN refuses it on this machine: {} (status {})",
                                                      describe(args), e.what(), static_cast<int>(e.status))};
  }
  return {};
}

}  // namespace cairn::kernels
