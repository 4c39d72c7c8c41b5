-- Megatron-Turing NLG 530B: 529,600,819,200 parameters, tp 8 x pp 35, a replica of 280 A100-80 and 8 to 12 of them.
-- Numbers: Smith et al. 2022 (arXiv 2201.11990). Not here: the ramp of the batch from 32 to 1,920.
--   cairn plan recipes/published/mt_nlg_530b.lua --world 2240
local T = require "cairn"

local p = T.params {
  data = T.param { "data/mt_nlg_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "mt-nlg-530b",
  seed = 1234,
  stop = T.tokens(270e9),

  model = T.gpt { layers = 105, width = 20480, heads = 128, context = 2048, vocab = 51200, init_std = 4e-3 },
  data  = T.megatron { prefix = p.data, split = { 98, 2 } },

  batch     = { samples = 1920, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 5e-5,
    lr      = T.schedule { T.warmup { over = T.tokens(1e9) }, T.cosine { to = 5e-6 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, pp = 35 },
  schedule  = "1f1b",

  checkpoint = T.checkpoint { save = { T.every { steps = 200 } }, keep = { T.last(3) } },
}
