-- DeepSeek-V3: 671,026,419,200 parameters on 2,048 H800-80, pp 16 x dp 128, ep 64, 14.8 trillion tokens. Source:
-- DeepSeek-AI 2024 (arXiv 2412.19437), sections 3.2, 4.2 and the published config.json.
-- As published: latent attention, 256 experts and one for every token behind three dense layers, 8 of 4 of 8 groups,
-- biases that balance the choice, no tensor parallelism, ZeRO-1, batches from 3,072 to 15,360 samples over the first 469
-- billion tokens, the schedule of rates without its last two steps.
-- Different: the module that predicts a second token, with its loss, is left out (its parameters are not counted above);
-- the schedule is 1f1b where theirs is DualPipe, which hides the traffic of experts; bf16 where theirs has fp8;
-- the loss that balances experts is of a micro-batch, theirs of a sequence, which are the same here; biases move until
-- the end, theirs for 14.3 trillion tokens. The recipe recomputes whole layers, where theirs keep more in 8 bits.
--   cairn plan recipes/published/deepseek_v3.lua --world 2048
local T = require "cairn"

local p = T.params {
  data = T.param { "data/deepseek_text_document", doc = "Megatron prefix of text tokenised with DeepSeek-V3's tokenizer" },
}

local dense = { 0, 1, 2 }

return T.recipe {
  name = "deepseek-v3",
  seed = 1,
  stop = T.tokens(14.8e12),

  model = T.llama {
    layers = 61, width = 7168, heads = 128, ffn = 18432, context = 4096, vocab = 129280,
    positions = T.rotary { pairs = "interleaved" }, norm_eps = 1e-6, init_std = 0.006, init = "plain",
    mla = { kv_rank = 512, q_rank = 1536, nope_dim = 128, rope_dim = 64, value_dim = 128 },
    moe = T.moe { experts = 256, top_k = 8, ffn = 2048, dense_layers = dense, shared_experts = 1, router = "sigmoid",
                  groups = 8, groups_per_token = 4, scale = 2.5, bias_rate = 0.001, aux_loss = 0.0001 },
  },
  data = T.megatron { prefix = p.data, split = { 999, 1 } },

  batch     = { samples = 15360, micro = 1, ramp = T.ramp { from = 3072, by = 128 * 8, over = T.tokens(469e9) } },
  optimizer = T.adamw {
    peak_lr = 2.2e-4,
    lr      = T.schedule { T.warmup { over = T.steps(2000) }, T.hold { over = T.tokens(10e12) },
                           T.cosine { to = 2.2e-5 } },
    betas   = { 0.9, 0.95 },
    weight_decay = 0.1,
    clip    = 1.0,
    zero    = 1,
  },
  precision = "bf16",
  mesh      = T.mesh { pp = 16, ep = 64 },
  schedule  = "1f1b",
  recompute = { mode = "full" },

  checkpoint = T.checkpoint { save = { T.every { steps = 500 } }, keep = { T.last(3) } },
}
