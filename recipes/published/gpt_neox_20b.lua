-- GPT-NeoX-20B: 20,554,567,680 parameters on 96 A100-40, tp 2 x pp 4 x dp 12, so that a replica is a node. Source:
-- Black et al. 2022 (arXiv 2204.06745) and EleutherAI/gpt-neox, configs/20B.yml.
-- As published, all of it. The vocabulary is counted with its padding to 128 x tp, as they do; the tokenizer has
-- 50,257. The paper rounds the batch up to 1,538; 12 replicas x 32 micro-batches x 4 are 1,536.
--   cairn plan recipes/published/gpt_neox_20b.lua --world 96
local T = require "cairn"

local p = T.params {
  data = T.param { "data/pile_20B_tokenizer_text_document", doc = "Megatron prefix of the Pile, tokenised" },
}

return T.recipe {
  name = "gpt-neox-20b",
  seed = 1234,
  stop = T.steps(150000),

  model = T.gpt {
    layers = 44, width = 6144, heads = 64, context = 2048, vocab = 50432,
    positions = T.rotary { fraction = 0.25 }, block = "parallel", tied_embeddings = false, init = "small_wang",
  },
  data  = T.megatron { prefix = p.data, split = { 995, 4, 1 } },

  batch     = { samples = 1536, micro = 4 },
  optimizer = T.adamw {
    peak_lr = 0.97e-4,
    lr      = T.schedule { T.warmup { over = T.fraction(0.01) }, T.cosine { to = 0.97e-5 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.01,
    clip    = 1.0,
    zero    = 1,
  },
  precision  = "fp16",
  loss_scale = { initial = 2 ^ 12, window = 1000, hysteresis = 2, min = 1 },
  mesh       = T.mesh { tp = 2, pp = 4, order = { "tp", "pp", "dp" } },
  schedule   = "1f1b",
  recompute  = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 500 } }, keep = { T.last(3) } },
  eval = { at = T.every { steps = 1000 }, steps = 10 },
}
