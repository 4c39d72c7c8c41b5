local T = require "cairn"

return T.recipe {
  model = T.gpt {
    layers = 2,
    width = 64,
  },
  batch = {},
  optimiser = T.adamw { peak_lr = 1e-3 },
  eval = {
    T.every { steps = 20 },
  },
  tp = 2,
}
