-- CodeGeeX-13B: Zheng et al. 2023 (arXiv 2303.17568) on 1,536 Ascend 910, tp 8, ZeRO-2 over groups of 16.
-- 39 layers and the top query layer; documents are packed, and neither attention nor positions reach over their ends.
-- Not here: fp16 with a loss scale (bf16 instead).
--   cairn plan recipes/published/codegeex_13b.lua --world 1536
local T = require "cairn"

local p = T.params {
  data = T.param { "data/code_text_document", doc = "Megatron prefix of code tokenised with GPT-2's BPE and runs of spaces" },
}

return T.recipe {
  name = "codegeex-13b",
  seed = 1,
  stop = T.tokens(850e9),

  model = T.gpt { layers = 39, width = 5120, heads = 40, context = 2048, vocab = 52224, activation = "gelu_quick",
                  top_query = true },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },
  objective = { document_end = 50256 },

  batch     = { samples = 3072, micro = 16 },
  optimizer = T.adamw {
    peak_lr = 1e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.cosine { to = 1e-6 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 2,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, shard = 16 },
  recompute = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 250 } }, keep = { T.last(3) } },
}
