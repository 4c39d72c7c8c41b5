-- The scaling family of Narayanan et al. 2021 (arXiv 2104.04473), table 1: 1.7 billion to a trillion parameters on 32
-- to 3,072 A100-80. Source: the table, and Megatron-LM's scripts of it (examples/academic_paper_scripts/sc21).
-- As published: layout, batch, micro-batch, interleaving, full recomputation, fp16 with a fixed loss scale, Megatron's
-- dropout.
-- Different: they ran 500 steps; here the tokens of their estimates, 300 billion, and 450 for the largest.
--   cairn plan recipes/published/megatron_gpt.lua --param size=1.7b --world 32
--   cairn plan recipes/published/megatron_gpt.lua --param size=1t --world 3072
local T = require "cairn"

local p = T.params {
  size = T.param { "1.7b", one_of = { "1.7b", "3.6b", "7.5b", "18b", "39b", "76b", "145b", "310b", "530b", "1t" },
                   doc = "row of the table" },
  data = T.param { "data/gpt_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

--                  layers  width  heads  tp  pp  virtual  batch  micro    world
local sizes = {
  ["1.7b"] = {        24,   2304,    24,   1,  1,       1,   512,    16 },  --   32
  ["3.6b"] = {        30,   3072,    32,   2,  1,       1,   512,    16 },  --   64
  ["7.5b"] = {        36,   4096,    32,   4,  1,       1,   512,    16 },  --  128
  ["18b"]  = {        40,   6144,    48,   8,  1,       1,  1024,     8 },  --  256
  ["39b"]  = {        48,   8192,    64,   8,  2,       1,  1536,     4 },  --  512
  ["76b"]  = {        60,  10240,    80,   8,  4,       3,  1792,     2 },  -- 1024
  ["145b"] = {        80,  12288,    96,   8,  8,       2,  2304,     2 },  -- 1536
  ["310b"] = {        96,  16384,   128,   8, 16,       2,  2160,     1 },  -- 1920
  ["530b"] = {       105,  20480,   128,   8, 35,       3,  2520,     1 },  -- 2520
  ["1t"]   = {       128,  25600,   160,   8, 64,       1,  3072,     1 },  -- 3072
}
local s = sizes[p.size]

return T.recipe {
  name = "megatron-gpt-" .. p.size,
  seed = 1234,
  stop = T.tokens(p.size == "1t" and 450e9 or 300e9),

  model = T.gpt {
    layers = s[1], width = s[2], heads = s[3], context = 2048, vocab = 51200,
    embedding_dropout = 0.1, attention_dropout = 0.1, residual_dropout = 0.1,
  },
  data  = T.megatron { prefix = p.data, split = { 969, 30, 1 } },

  batch     = { samples = s[7], micro = s[8] },
  optimizer = T.adamw {
    peak_lr = 1e-4,
    lr      = T.schedule { T.warmup { over = T.fraction(0.01) }, T.cosine { to = 1e-5 } },
    betas   = { 0.9, 0.999 },
    weight_decay = 0.01,
    clip    = 1.0,
  },
  precision  = "fp16",
  loss_scale = { initial = 8192, window = 0 },
  mesh       = T.mesh { tp = s[4], pp = s[5], virtual_stages = s[6] },
  schedule   = s[6] > 1 and "interleaved" or "1f1b",
  recompute  = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 1000 } }, keep = { T.last(3) } },
}
