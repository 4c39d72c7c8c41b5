-- A small GPT on three sources, one of which is dirty: docs/tour.md makes them, finds the dirt, leaves it out, and ends
-- the run on the best source with a falling rate.
--   cairn train recipes/tour.lua --nproc 2
local T = require "cairn"

return T.recipe {
  name = "tour",
  seed = 1611,
  stop = T.steps(300),

  model     = T.gpt { layers = 2, width = 64, heads = 4, context = 128, vocab = 256 },
  tokenizer = T.bytes,
  data = T.blend {
    sources = {
      T.megatron { prefix = "data/tour/old", name = "old", weight = 60, split = { 95, 5 } },
      T.megatron { prefix = "data/tour/new", name = "new", weight = 20, split = { 95, 5 } },
      T.megatron { prefix = "data/tour/scraped", name = "scraped", weight = 20, split = { 95, 5 } },
    },
  },

  batch     = { samples = 16, micro = 4 },
  optimizer = T.adamw {
    peak_lr = 3e-3,
    lr      = T.schedule { T.warmup { over = T.steps(80) }, T.hold {} },
    clip    = 1.0,
  },
  checkpoint = T.checkpoint { save = { T.every { steps = 100 } }, keep = { T.last(3) } },
  eval = { at = T.every { steps = 100 }, steps = 4 },
}
