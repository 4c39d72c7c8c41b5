local T = require "cairn"
return require("broken.base"):with {
  model = T.llama {
    layers = 4,
    width = 96,
    heads = 12,
    kv_heads = 5,
    ffn = 250,
    head_dim = 7,
    context = 64,
    vocab = 257,
  },
  mesh = T.replace { tp = 4 },
}
