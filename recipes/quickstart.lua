-- What tools/quickstart trains: a byte-level GPT on the King James Bible, on 8 ranks in every kind of parallelism.
--   cairn train recipes/quickstart.lua --nproc 8
local T = require "cairn"

return T.recipe {
  name = "quickstart",
  seed = 1611,
  stop = T.steps(1500),

  -- One token a byte; padding of the vocabulary to a multiple of tp is added by itself.
  model     = T.gpt { layers = 4, width = 128, heads = 4, context = 128, vocab = 256 },
  tokenizer = T.bytes,
  data      = T.megatron { prefix = "data/kjv_text_document", split = { 95, 5 } },

  batch     = { samples = 16, micro = 2 },  -- dp = 2: four micro-batches a step for the two-stage pipeline
  optimizer = T.adamw {
    peak_lr = 3e-3,
    lr      = T.schedule { T.warmup { over = T.steps(50) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },

  mesh     = T.mesh { tp = 2, pp = 2, dp = 2, sequence_parallel = true },
  schedule = "1f1b",

  checkpoint = T.checkpoint {
    save     = { T.every { steps = 100 } },
    keep     = { T.last(3) },
    snapshot = T.every { steps = 1 },  -- what a killed rank restarts from
  },
  eval = { at = T.every { steps = 250 }, steps = 8 },
}
