-- BloombergGPT-50B: 50,558,868,480 parameters on 512 A100-40, data parallel alone: ZeRO-3 over groups of 128, four of
-- which hold the same. Source: Wu et al. 2023 (arXiv 2303.17564).
-- As published: ALiBi, the norm behind the embedding, the batch of 1,024 for 7,200 steps and 2,048 from there on, full
-- recomputation, clipping at 0.3, the learning rate cut by hand three times, dropout from step 129,900 on.
-- Different: the length of the cosine and the micro-batch are not published; here the cosine ends with the run, and a
-- rank has its two samples, then its four, as one micro-batch. The run ended at step 146,000; 139,200 was the best.
--   cairn plan recipes/published/bloomberggpt_50b.lua --world 512
local T = require "cairn"

local p = T.params {
  data = T.param { "data/finpile_text_document", doc = "Megatron prefix of text tokenised with their unigram model" },
}

return T.recipe {
  name = "bloomberggpt-50b",
  seed = 1,
  stop = T.steps(146000),

  model = T.gpt {
    layers = 70, width = 7680, heads = 40, context = 2048, vocab = 131072,
    positions = "alibi", embedding_norm = true, init_std = (1 / (3 * 7680)) ^ 0.5,
  },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 1024, micro = 2, phases = { T.phase { T.steps(7200), samples = 2048, micro = 4 } } },
  optimizer = T.adamw {
    peak_lr = 6e-5,
    lr      = T.schedule { T.warmup { over = T.steps(1800) }, T.cosine { to = T.ref "optimizer.peak_lr" * 0.1 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 0.3,
    zero    = 3,
  },
  stages = {
    T.stage { at = T.steps(115500), optimizer = { peak_lr = 4e-5 } },
    T.stage { at = T.steps(129900), optimizer = { peak_lr = 2e-5 },
              model = { embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1 } },
    T.stage { at = T.steps(137100), optimizer = { peak_lr = 1e-5 } },
  },
  precision = "bf16",
  mesh      = T.mesh { shard = 128 },
  recompute = { mode = "full" },

  checkpoint = T.checkpoint {
    save = { T.every { steps = 300 } }, keep = { T.last(3), T.best { metric = "valid_loss" } },
  },
  eval = { at = T.every { steps = 300 } },
}
