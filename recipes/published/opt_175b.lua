-- OPT-175B as it was run: 174,604,468,224 parameters on 992 A100-80, tp 8 x dp 124. Source: Zhang et al. 2022 (arXiv
-- 2205.01068) and the launcher in facebookresearch/metaseq.
-- As published: no pipeline; fully sharded, with the weights kept after forward; one micro-batch of 8 a step, so that
-- the two million tokens are 992 sequences; full recomputation with the inputs kept split over tp; fp16 with a loss
-- scale that begins at 4; ReLU; positions from row 2 on.
-- Different: Cairn keeps fp32 masters of the weights (they had none), and the window of the loss scale stays as it is
-- (theirs halved and doubled with the scale). The rates and the clipping that were set by hand are not here.
--   cairn plan recipes/published/opt_175b.lua --world 992
local T = require "cairn"

local p = T.params {
  data = T.param { "data/opt_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

return T.recipe {
  name = "opt-175b",
  seed = 1,
  stop = T.tokens(300e9),

  model = T.gpt {
    layers = 96, width = 12288, heads = 96, context = 2048, vocab = 50272, activation = "relu",
    position_offset = 2, init_std = 0.006, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 992, micro = 8 },
  optimizer = T.adamw {
    peak_lr = 1.2e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.linear { to = 1.2e-5 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 3,
    keep_after_forward = true,
  },
  precision  = "fp16",
  loss_scale = { initial = 4, window = 256, hysteresis = 1, min = 2 ^ -5 },
  mesh       = T.mesh { tp = 8 },
  recompute  = { mode = "full", distribute = true },

  checkpoint = T.checkpoint { save = { T.every { steps = 2000 } }, keep = { T.last(3) } },
}
