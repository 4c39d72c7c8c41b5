-- Not broken: what the others derive from.
local T = require "cairn"

return T.recipe {
  name = "neox-20b",
  seed = 1234,
  stop = T.steps(150000),

  model = T.gpt {
    layers = 44,
    width = 6144,
    heads = 64,
    context = 2048,
    vocab = T.vocab { size = 50277 },
    positions = T.rotary { theta = 10000 },
    tied_embeddings = false,
  },
  data = T.megatron { prefix = "data/pile_text_document", split = { 995, 4, 1 } },
  batch = { samples = 1536, micro = 4 },
  optimizer = T.adamw {
    peak_lr = 0.97e-4,
    lr = T.schedule {
      T.warmup { over = T.fraction(0.01) },
      T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 },
    },
    betas = { 0.9, 0.95 },
    zero = 1,
  },
  mesh = T.mesh { pp = 4, tp = 2 },
  eval = { at = T.every { steps = 1000 }, steps = 10 },
}
