-- Llama 3 405B: 405,853,388,800 parameters on 16,384 H100: tp 8 x pp 16 x dp 128, 16 million tokens a step at a context
-- of 8,192, one layer less on the first and the last stage.
-- Numbers: the Llama 3 paper (arXiv 2407.21783), tables 3 and 4. Not here: the stages of batch and context, annealing.
--   cairn plan recipes/published/llama3_405b.lua --world 16384
local T = require "cairn"

local p = T.params {
  data = T.param { "data/llama3_text_document", doc = "Megatron prefix of text tokenised with Llama 3's tokenizer" },
}

local stages = {}
for i = 1, 64 do stages[i] = 2 end
stages[1], stages[64] = 1, 1

return T.recipe {
  name = "llama3-405b",
  seed = 1,
  stop = T.tokens(15.6e12),

  model = T.llama {
    layers = 126, width = 16384, heads = 128, kv_heads = 8, ffn = 53248, context = 8192, vocab = 128256,
    positions = T.rotary { theta = 500000 },
  },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 2048, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 8e-5,
    lr      = T.schedule { T.warmup { over = T.steps(8000) }, T.cosine { to = 8e-7 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, pp = 16, virtual_stages = 4, stages = stages, sequence_parallel = true },
  schedule  = "interleaved",

  checkpoint = T.checkpoint { save = { T.every { steps = 500 } }, keep = { T.last(3) } },
}
