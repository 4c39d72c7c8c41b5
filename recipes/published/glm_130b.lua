-- GLM-130B: 128,697,794,560 parameters on 768 A100-40, tp 4 x pp 8 x dp 24. Source: Zeng et al. 2022 (arXiv
-- 2210.02414) and the log of the run (THUDM/GLM-130B, logs/main-log-en.md).
-- As published: blank infilling (30 % [MASK] in four windows of 512, 70 % [gMASK]), DeepNorm, GEGLU, rotary positions,
-- a second source with 5 % of the samples, the ramp, embedding and head as a layer each where stages are balanced,
-- recomputation with the inputs kept split over tp, ZeRO-1, fp16, the shrunk gradient of the embedding.
-- Different: the second source is infilled as the first is; its instructions had a loss on their answers alone. What
-- was changed by hand under way is not here: the shrinking (0.1 to 1 and back), half the rate, skipped samples. The
-- cosine ends at 405 billion tokens, the run ended at 400.
--   cairn plan recipes/published/glm_130b.lua --world 768
local T = require "cairn"

local p = T.params {
  text         = T.param { "data/glm_text_document", doc = "Megatron prefix of text tokenised with icetk" },
  instructions = T.param { "data/glm_instructions_document", doc = "the same, of prompts with their answers" },
}

return T.recipe {
  name = "glm-130b",
  seed = 1,
  stop = T.samples(197753905),

  model = T.gpt {
    layers = 70, width = 12288, heads = 96, ffn = 32768, context = 2048, vocab = 150528,
    positions = T.rotary {}, activation = "geglu", mask = "prefix",
    block = "deep_norm", residual_scale = (2 * 70) ^ 0.5, init = "deep_norm", init_std = 0.0052,
    embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data = T.blend { sources = {
    T.megatron { prefix = p.text, weight = 95, name = "text" },
    T.megatron { prefix = p.instructions, weight = 5, name = "instructions" },
  } },
  objective = {
    kind = "infill", gmask_share = 0.7, mask_windows = 4,
    mask_token = 150000, gmask_token = 150001, start_token = 150004, end_token = 150005,  -- behind icetk's 150,000
  },

  batch = { samples = 4224, micro = 1, ramp = T.ramp { from = 192, by = 24, over = T.samples(5493164) } },
  optimizer = T.adamw {
    peak_lr = 8e-5,
    lr      = T.schedule { T.warmup { over = T.samples(1098632) },
                           T.cosine { to = 8e-6, over = T.samples(197753905 - 1098632) } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
    embedding_gradient = 0.1,
  },
  precision  = "fp16",
  loss_scale = { initial = 65536, window = 2000, hysteresis = 2, min = 1 },
  mesh       = T.mesh { tp = 4, pp = 8, embedding_weight = 1, head_weight = 1 },
  schedule   = "1f1b",
  recompute  = { mode = "full", distribute = true },

  checkpoint = T.checkpoint { save = { T.every { steps = 100 } }, keep = { T.last(3) } },
}
