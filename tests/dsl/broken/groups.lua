local T = require "cairn"
return T.recipe {
  name = "groups", stop = T.steps(1), batch = { samples = 14, micro = 1 },
  model = T.gpt { layers = 8, width = 64, heads = 4, context = 64, vocab = 65 },
  data = T.token_files { train = "t.bin", dtype = "uint16" },
  optimizer = T.adamw { peak_lr = 1e-3 },
  mesh = T.mesh {
    pp = 4,
    dp = 1,
    virtual_stages = 2,
    micro_batch_group = 6,
    stages = { 1, 1, 1, 1, 1, 1, 1, 3 },
  },
  schedule = "interleaved",
  recompute = {
    distribute = true,
  },
}
