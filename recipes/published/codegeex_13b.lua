-- CodeGeeX-13B: 12,873,943,040 parameters on 1,536 Ascend 910 of 32 GB, tp 8 x dp 192. Source: Zheng et al. 2023
-- (arXiv 2303.17568) and THUDM/CodeGeeX (codegeex/mindspore).
-- As published: 39 layers and the top query layer, documents packed so that neither attention nor positions reach over
-- their ends, ZeRO-2 over groups of 16, one micro-batch of 16 a step, recomputation, fp16, a cosine over 200,000
-- steps; the run ended after 850 billion tokens, at two thirds of them. The vocabulary is counted with its padding, as
-- they do.
-- Different: the initial weights are GPT-2's; theirs are not published.
--   cairn plan recipes/published/codegeex_13b.lua --world 1536
local T = require "cairn"

local p = T.params {
  data = T.param { "data/code_text_document", doc = "Megatron prefix of code, GPT-2's BPE with runs of spaces" },
}

return T.recipe {
  name = "codegeex-13b",
  seed = 1,
  stop = T.steps(200000),

  model = T.gpt {
    layers = 39, width = 5120, heads = 40, context = 2048, vocab = 52224, activation = "gelu_quick", top_query = true,
    embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data  = T.megatron { prefix = p.data, split = { 999, 1 } },
  objective = { document_end = 50256 },

  batch     = { samples = 3072, micro = 16 },
  optimizer = T.adamw {
    peak_lr = 1e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.cosine { to = 1e-6 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 2,
  },
  precision  = "fp16",
  loss_scale = { initial = 2 ^ 32, window = 1000, hysteresis = 1, min = 1 },
  mesh       = T.mesh { tp = 8, shard = 16 },
  recompute  = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 250 } }, keep = { T.last(3) } },
}
