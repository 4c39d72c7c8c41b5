-- Megatron-Turing NLG 530B: 529,600,819,200 parameters, tp 8 x pp 35, a replica of 280 A100-80. Source: Smith et al.
-- 2022 (arXiv 2201.11990).
-- As published: 35 stages of three layers, the batch from 32 by 32 to 1,920 over 12 billion tokens, a cosine that ends
-- at 340 billion (the run ended at 270), full recomputation, bf16. Times were published for 8, 10 and 12 replicas at
-- the full batch; the cluster had 16. 10 and 12 do not divide the ramp's 32 samples, so those plans leave it out.
-- Different: whether the run split optimizer states, and its dropout, are not published; here ZeRO-1 and none.
--   cairn plan recipes/published/mt_nlg_530b.lua --world 2240
--   cairn plan recipes/published/mt_nlg_530b.lua --world 2800 --set batch.ramp-
--   cairn plan recipes/published/mt_nlg_530b.lua --world 3360 --set batch.ramp-
--   cairn plan recipes/published/mt_nlg_530b.lua --world 4480
local T = require "cairn"

local p = T.params {
  data = T.param { "data/mt_nlg_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "mt-nlg-530b",
  seed = 1234,
  stop = T.tokens(340e9),

  model = T.gpt { layers = 105, width = 20480, heads = 128, context = 2048, vocab = 51200, init_std = 4e-3 },
  data  = T.megatron { prefix = p.data, split = { 98, 2 } },

  batch     = { samples = 1920, micro = 1, ramp = T.ramp { from = 32, by = 32, over = T.tokens(12e9) } },
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
  recompute = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 200 } }, keep = { T.last(3) } },
}
