local T = require "cairn"
local p = T.params {
  peak = T.param { 1e-4, min = 0, max = 1, doc = "peak learning rate" },
  shape = T.param { "cosine", one_of = { "cosine", "hold" } },
}
return require("broken.base"):with { name = "lr-" .. p.shape, optimizer = { peak_lr = p.peak } }
