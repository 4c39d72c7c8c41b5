local T = require "cairn"
local wide = { width = "6K" }

return T.recipe {
  name = 12,
  seed = -1,
  stop = 2000,
  model = T.gpt {
    layers = 2.5,
    width = wide,
    heads = T.every { steps = 2 },
    context = "1Q",
    vocab = "50B",
    bias = "yes",
  },
  data = "data/text",
  batch = { 32, micro = { 4 } },
  optimizer = T.adamw { peak_lr = 1e-3, betas = { 0.9 }, lr = { T.warmup { over = 100 } } },
  checkpoint = T.checkpoint { save = { T.every { steps = 1, minutes = 2 }, T.last(3) }, keep = 3 },
  restart = { deadline = "two minutes", backoff = "5m" },
  eval = { at = T.every { minutes = 5 } },
}
