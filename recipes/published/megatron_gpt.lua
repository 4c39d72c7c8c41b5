-- The scaling family of Narayanan et al. 2021 (arXiv 2104.04473), table 1: 1.7 billion to a trillion parameters.
-- Vocabulary 51,200, context 2,048; each size with the layout and the batch of the paper.
--   cairn plan recipes/published/megatron_gpt.lua --param size=1t --world 3072
local T = require "cairn"

local p = T.params {
  size = T.param { "1.7b", one_of = { "1.7b", "3.6b", "7.5b", "18b", "39b", "76b", "145b", "310b", "530b", "1t" },
                   doc = "row of the table" },
  data = T.param { "data/gpt_text_document", doc = "Megatron prefix of text tokenised with GPT-2's BPE" },
}

--                  layers  width  heads  tp  pp  virtual  batch  micro
local sizes = {
  ["1.7b"] = {        24,   2304,    24,   1,  1,       1,   512,    16 },
  ["3.6b"] = {        30,   3072,    32,   2,  1,       1,   512,    16 },
  ["7.5b"] = {        36,   4096,    32,   4,  1,       1,   512,    16 },
  ["18b"]  = {        40,   6144,    48,   8,  1,       1,  1024,     8 },
  ["39b"]  = {        48,   8192,    64,   8,  2,       1,  1536,     4 },
  ["76b"]  = {        60,  10240,    80,   8,  4,       3,  1792,     2 },
  ["145b"] = {        80,  12288,    96,   8,  8,       2,  2304,     2 },
  ["310b"] = {        96,  16384,   128,   8, 16,       2,  2160,     1 },
  ["530b"] = {       105,  20480,   128,   8, 35,       3,  2520,     1 },
  ["1t"]   = {       128,  25600,   160,   8, 64,       1,  3072,     1 },
}
local s = sizes[p.size]

return T.recipe {
  name = "megatron-gpt-" .. p.size,
  seed = 1234,
  stop = T.tokens(300e9),

  model = T.gpt { layers = s[1], width = s[2], heads = s[3], context = 2048, vocab = 51200, init_std = 0.006 },
  data  = T.megatron { prefix = p.data, split = { 949, 50, 1 } },

  batch     = { samples = s[7], micro = s[8] },
  optimizer = T.adamw {
    peak_lr = 1e-4,
    lr      = T.schedule { T.warmup { over = T.fraction(0.01) }, T.cosine { to = 1e-5 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
  },
  precision = "bf16",
  mesh      = T.mesh { tp = s[4], pp = s[5], virtual_stages = s[6] },
  schedule  = s[6] > 1 and "interleaved" or "1f1b",

  checkpoint = T.checkpoint { save = { T.every { steps = 1000 } }, keep = { T.last(3) } },
}
