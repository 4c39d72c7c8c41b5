-- Experts over two of two data-parallel ranks, a router with biases as DeepSeek-V3's, a shared expert.
--   cairn train recipes/experts_tiny.lua             two processes, each with four of the eight experts of a layer
--   cairn train recipes/experts_tiny.lua --set mesh.cp=2 --nproc 4    and sequences over two ranks each
local T = require "cairn"

return require("recipes.tiny"):with {
  name  = "experts-tiny",
  model = T.llama {
    layers = 2, width = 64, heads = 4, kv_heads = 2, ffn = 96, context = 64, vocab = 256,
    moe = T.moe { experts = 8, top_k = 2, router = "sigmoid", shared_experts = 1, bias_rate = 0.001, aux_loss = 0.0001 },
  },
  batch     = { samples = 8, micro = 2 },
  optimizer = { zero = 1 },
  mesh      = T.mesh { dp = 2, ep = 2 },
}
