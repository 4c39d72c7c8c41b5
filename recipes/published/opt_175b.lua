-- OPT-175B: Zhang et al. 2022 (arXiv 2205.01068) on 992 A100-80, tp 8 without a pipeline.
-- Not here: two rows of the position table that its offset skips (24,576 parameters), fully sharded parameters (ZeRO-1
-- instead, which takes more memory than those machines had), fp16, and the rates set by hand.
--   cairn plan recipes/published/opt_175b.lua --world 1024
local T = require "cairn"

local p = T.params {
  data = T.param { "data/opt_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "opt-175b",
  seed = 1,
  stop = T.tokens(300e9),

  model = T.gpt { layers = 96, width = 12288, heads = 96, context = 2048, vocab = 50272, activation = "relu",
                  init_std = 0.006 },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 1024, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 1.2e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.linear { to = 1.2e-5 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8 },

  checkpoint = T.checkpoint { save = { T.every { steps = 2000 } }, keep = { T.last(3) } },
}
