local T = require "cairn"
return require("broken.base"):with {
  model = T.llama {
    layers = 4, width = 96, heads = 12, kv_heads = 2, context = 64, vocab = 257,
    positions = "alibi",
  },
  objective = {
    kind = "infill",
    gmask_token = 257,
    mask_token = 250, start_token = 251,
    mask_windows = 9,
  },
  mesh = T.replace { tp = 4 },
}
