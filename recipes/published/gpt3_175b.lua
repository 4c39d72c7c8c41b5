-- GPT-3 175B as Megatron-LM trains it: 174,615,846,912 parameters, tp 8 x pp 16 on 1,024 A100-80.
-- Numbers: Megatron-LM's GPT-3 example and Narayanan et al. 2021 (arXiv 2104.04473). Not here: fp16 with a loss scale
-- (bf16 instead) and the ramp of the batch.
--   cairn plan recipes/published/gpt3_175b.lua --world 1024
local T = require "cairn"

local p = T.params {
  data = T.param { "data/gpt3_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "gpt3-175b",
  seed = 1234,
  stop = T.steps(500000),

  model = T.gpt { layers = 96, width = 12288, heads = 96, context = 2048, vocab = 51200, init_std = 0.006 },
  data  = T.megatron { prefix = p.data, split = { 949, 50, 1 } },

  batch     = { samples = 1536, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 6e-5,
    lr      = T.schedule { T.warmup { over = T.fraction(0.001) }, T.cosine { to = 6e-6, over = T.steps(430000) },
                           T.hold {} },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, pp = 16, sequence_parallel = true },
  schedule  = "1f1b",

  checkpoint = T.checkpoint { save = { T.every { steps = 1000 } }, keep = { T.last(3) } },
}
