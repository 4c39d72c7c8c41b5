local T = require "cairn"

local layers = 2

return T.recipe {
  name = "x",
  model = T.gpt {
    layers = layrs,
  },
}
