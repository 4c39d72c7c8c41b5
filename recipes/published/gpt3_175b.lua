-- GPT-3 175B as Megatron-LM trains it: 174,615,846,912 parameters on 1,024 A100-80, tp 8 x pp 16 x dp 8. Source:
-- Narayanan et al. 2021 (arXiv 2104.04473), section 5.1, and Megatron-LM's example of it (examples/gpt3).
-- As published: the batch from 16 by 16 to 1,536 over 12 billion tokens, fp16 with Megatron's loss scale and dropout,
-- full recomputation, optimizer states on every replica. OpenAI's own layout is not published.
--   cairn plan recipes/published/gpt3_175b.lua --world 1024
local T = require "cairn"

local p = T.params {
  data = T.param { "data/gpt3_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "gpt3-175b",
  seed = 1234,
  stop = T.steps(500000),

  model = T.gpt {
    layers = 96, width = 12288, heads = 96, context = 2048, vocab = 51200, init_std = 0.006,
    embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data  = T.megatron { prefix = p.data, split = { 949, 50, 1 } },

  batch     = { samples = 1536, micro = 1, ramp = T.ramp { from = 16, by = 16, over = T.samples(5859375) } },
  optimizer = T.adamw {
    peak_lr = 6e-5,
    lr      = T.schedule { T.warmup { over = T.steps(430) }, T.cosine { to = 6e-6, over = T.steps(429570) },
                           T.hold {} },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
  },
  precision  = "fp16",
  loss_scale = { initial = 2 ^ 32, window = 1000, hysteresis = 2, min = 1 },
  mesh       = T.mesh { tp = 8, pp = 16 },
  schedule   = "1f1b",
  recompute  = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 10000 } }, keep = { T.last(3) } },
  eval = { at = T.every { steps = 1000 }, steps = 10 },
}
