-- GPT-2 of 124 million parameters, the shape that bench/ measures.
-- Hyper-parameters follow nanoGPT's train_gpt2.py: 0.5M tokens a step, 600k steps, cosine from 6e-4 to 6e-5.
local T = require "cairn"

local p = T.params {
  data    = T.param { "data/openwebtext_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
  horizon = T.param { 600000, min = 1, doc = "optimizer steps" },
}

return T.recipe {
  name = "gpt2-124m",
  seed = 1337,
  stop = T.steps(p.horizon),

  model = T.gpt { layers = 12, width = 768, heads = 12, context = 1024, vocab = 50257 },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 480, micro = 12 },
  optimizer = T.adamw {
    peak_lr = 6e-4,
    lr      = T.schedule { T.warmup { over = T.fraction(1 / 300) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",

  checkpoint = T.checkpoint {
    save = { T.every { steps = 1000 }, T.every { minutes = 30 } },
    keep = { T.last(3) },
  },
  eval = { at = T.every { steps = 1000 }, steps = 20 },
}
