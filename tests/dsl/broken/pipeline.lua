local T = require "cairn"
return T.recipe {
  name = "pipeline", stop = T.steps(1), batch = { samples = 12, micro = 1 },
  model = T.gpt { layers = 8, width = 64, heads = 4, context = 64, vocab = 65 },
  data = T.token_files { train = "t.bin", dtype = "uint16" },
  optimizer = T.adamw { peak_lr = 1e-3 },
  mesh = T.mesh {
    pp = 4,
    dp = 1,
    tp = 2,
    sequence_parallel = true,
    virtual_stages = 3,
    micro_batch_group = 2,
    stages = { 2, 2, 2, 3 },
    head_weight = 1,
  },
  schedule = "zb-v",
  recompute = {
    mode = "full",
    layers = 9,
    distribute = true,
  },
}
