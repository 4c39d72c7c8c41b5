-- Llama 3 70B: 70,553,706,496 parameters. Source: Llama Team 2024 (arXiv 2407.21783), table 3.
-- As published: the architecture, the tokens.
-- Different: batch, rates and layout are those of our Llama 2 70B, with the same tokens a step.
--   cairn plan recipes/published/llama3_70b.lua --world 1024
local T = require "cairn"

return require("published.llama2_70b"):with {
  name  = "llama3-70b",
  stop  = T.tokens(15e12),
  model = { context = 8192, vocab = 128256, positions = T.rotary { theta = 500000 } },
  batch = { samples = 512 },
}
