-- BLOOM-176B: 176,247,271,424 parameters on 384 A100-80, tp 4 x pp 12 x dp 8. Source: the run's own script and README
-- (bigscience-workshop/bigscience, train/tr11-176B-ml) and Le Scao et al. 2022 (arXiv 2211.05100).
-- As published: ALiBi, the norm behind the embedding, embedding and head as a layer each where stages are balanced,
-- the ramp, micro-batches of 1 until the batch reaches 784 samples and of 2 from there on, full recomputation, ZeRO-1,
-- gradients summed in fp32. The vocabulary is counted with its padding, as they do; the tokenizer has 250,680.
-- Different: one source in place of the mix of 46 languages and code. The run ended after 366 of the 451 billion
-- tokens that it was planned for. Dropout is the README's; the configuration published with the weights says 0.
--   cairn plan recipes/published/bloom_176b.lua --world 384
local T = require "cairn"

local p = T.params {
  data = T.param { "data/roots_text_document", doc = "Megatron prefix of text tokenised with BLOOM's BPE" },
}

return T.recipe {
  name = "bloom-176b",
  seed = 42,
  stop = T.samples(220e6),

  model = T.gpt {
    layers = 70, width = 14336, heads = 112, context = 2048, vocab = 250880,
    positions = "alibi", embedding_norm = true, init_std = 0.0048,
    embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data  = T.megatron { prefix = p.data, split = { 949, 50, 1 } },

  batch = {
    samples = 2048, micro = 1,
    ramp    = T.ramp { from = 192, by = 16, over = T.samples(9765625) },
    phases  = { T.phase { T.samples(math.ceil(9765625 * 37 / 116)), micro = 2 } },  -- 192 + 37 x 16 = 784
  },
  optimizer = T.adamw {
    peak_lr = 6e-5,
    lr      = T.schedule { T.warmup { over = T.samples(183105) },
                           T.cosine { to = 6e-6, over = T.samples(200e6 - 183105) }, T.hold {} },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = 4, pp = 12, embedding_weight = 1, head_weight = 1 },
  schedule  = "1f1b",
  recompute = { mode = "full" },

  checkpoint = T.checkpoint {
    save = { T.every { steps = 100 } },
    keep = { T.last(4), T.fractions(10), T.at { steps = { 85000 } } },
  },
  eval = { at = T.every { steps = 1000 }, steps = 1 },
}
