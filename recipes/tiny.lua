-- The smallest run that learns something: bytes of text, one process, seconds on one core.
--   cairn data tokenize TEXT --out data/kjv_text_document && cairn train recipes/tiny.lua
local T = require "cairn"

return T.recipe {
  name = "tiny",
  seed = 1337,
  stop = T.steps(60),

  model     = T.gpt { layers = 2, width = 64, heads = 4, context = 64, vocab = 256 },
  tokenizer = T.bytes,
  data      = T.megatron { prefix = "data/kjv_text_document", split = { 95, 5 } },

  batch     = { samples = 8, micro = 8 },
  optimizer = T.adamw {
    peak_lr = 3e-3,
    lr      = T.schedule { T.warmup { over = T.steps(10) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    clip    = 1.0,
  },

  checkpoint = T.checkpoint { save = { T.every { steps = 20 } }, keep = { T.last(2) } },
  eval       = { at = T.every { steps = 20 }, steps = 4 },
}
