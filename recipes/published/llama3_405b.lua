-- Llama 3 405B: 405,853,388,800 parameters on 16,384 H100-80, tp 8 x pp 16 x dp 128, 16 million tokens a step. Source:
-- Llama Team 2024 (arXiv 2407.21783), tables 3 and 4 and section 3.3.
-- As published: contexts of 8,192 and, with cp 16 and dp 8, of 131,072; interleaving with a layer less on the first
-- and the last stage; gradients and optimizer states sharded, weights not; no recomputation; the order tp, cp, pp, dp.
-- At 8,192 ranks (dp 64, 32 micro-batches) a rank holds half as many activations again, and fits its card by its
-- shards of the gradients alone.
-- Different: the number of stages a rank is not published, here four of two layers; their first and last one had no
-- layer at all, and Cairn wants one. No batch of 4 and 8 million tokens first: an interleaved schedule wants a
-- micro-batch for each of the 16 ranks. The cosine is theirs, of 1,200,000 steps; the run ended after 15.6 of these 20
-- trillion tokens, with a rate annealed to 0. Attention is cut at the ends of documents at 8,192 only: cp does not
-- know of them.
--   cairn plan recipes/published/llama3_405b.lua --world 16384
--   cairn plan recipes/published/llama3_405b.lua --world 8192
--   cairn plan recipes/published/llama3_405b.lua --world 16384 --param context=131072
local T = require "cairn"

local p = T.params {
  context = T.param { 8192, one_of = { 8192, 131072 }, doc = "tokens of a sample" },
  data    = T.param { "data/llama3_text_document", doc = "Megatron prefix of text tokenised with Llama 3's tokenizer" },
}
local long = p.context == 131072

local stages = {}
for i = 1, 64 do stages[i] = 2 end
stages[1], stages[64] = 1, 1

return T.recipe {
  name = "llama3-405b",
  seed = 1,
  stop = T.steps(1200000),

  model = T.llama {
    layers = 126, width = 16384, heads = 128, kv_heads = 8, ffn = 53248, context = p.context, vocab = 128256,
    positions = T.rotary { theta = 500000 },
  },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },
  objective = not long and { document_end = 128001, reset_positions = false } or nil,

  batch     = { samples = long and 128 or 2048, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 8e-5,
    lr      = T.schedule { T.warmup { over = T.steps(8000) }, T.cosine { to = 8e-7 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 2,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 8, cp = long and 16 or 1, pp = 16, order = { "tp", "pp", "dp" },
                       virtual_stages = 4, stages = stages, sequence_parallel = true },
  schedule  = "interleaved",

  checkpoint = T.checkpoint { save = { T.every { steps = 500 } }, keep = { T.last(3) } },
}
