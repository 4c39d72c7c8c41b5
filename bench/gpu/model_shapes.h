#pragma once
// The models that are measured on a GPU, and the micro-batch of each: bench/gpu_all has the same.

#include <cstdint>
#include <string_view>

namespace cairn::bench {

struct ModelShape {
  std::string_view name;
  bool llama;
  int64_t layers, width, heads, kv_heads, head_dim, ffn, context, vocab, samples;
};
// gpt2: Radford et al. 2019. llama3: Dubey et al. 2024, of which 8 layers with their head fill one GPU's memory. tiny:
// for tests.
inline constexpr ModelShape kModelShapes[] = {
    {"gpt2-124m", false, 12, 768, 12, 12, 64, 3072, 1024, 50257, 16},
    {"gpt2-1558m", false, 48, 1600, 25, 25, 64, 6400, 1024, 50257, 8},
    {"llama3-8-layers", true, 8, 4096, 32, 8, 128, 14336, 8192, 128256, 1},
    {"tiny-gpt", false, 2, 32, 2, 2, 16, 64, 16, 130, 2},
    {"tiny-llama", true, 2, 32, 2, 1, 16, 48, 16, 130, 2},
};

}  // namespace cairn::bench
