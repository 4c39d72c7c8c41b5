-- The Llama shape in small: rmsnorm, rotary, swiglu, no bias, untied, two query heads for each key and value head.
--   cairn train recipes/llama_tiny.lua
local T = require "cairn"

return require("recipes.tiny"):with {
  name  = "llama-tiny",
  model = T.llama { layers = 2, width = 64, heads = 4, kv_heads = 2, context = 64, vocab = 256 },
}
