-- Llama 2 70B: 68,976,648,192 parameters. Source: Touvron et al. 2023 (arXiv 2307.09288).
-- As published: the architecture, the batch of 4 million tokens, the rates.
-- Different: the layout is not published; this one is ours, for A100-80.
--   cairn plan recipes/published/llama2_70b.lua --world 512
local T = require "cairn"

local p = T.params {
  data = T.param { "data/llama_text_document", doc = "Megatron prefix of text tokenised with Llama's SentencePiece" },
}

return T.recipe {
  name = "llama2-70b",
  seed = 1,
  stop = T.tokens(2e12),

  model = T.llama { layers = 80, width = 8192, heads = 64, kv_heads = 8, ffn = 28672, context = 4096, vocab = 32000 },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 1024, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 1.5e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.cosine { to = 1.5e-5 } },
    betas   = { 0.9, 0.95 },
    eps     = 1e-5,
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, pp = 4, sequence_parallel = true },
  schedule  = "1f1b",

  checkpoint = T.checkpoint { save = { T.every { steps = 500 } }, keep = { T.last(3) } },
}
