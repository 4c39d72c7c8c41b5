-- Fine-tuning a model of Hugging Face on conversations; docs/chat.md goes through it.
--   tools/chat_joins.py models/llama > joins.json
--   cairn data chat chats.jsonl --out data/chats --tokenizer models/llama --chat joins.json
--   cairn train recipes/chat.lua --param folder=models/llama --nproc 2
--   cairn export runs/chat tuned-llama
-- The sizes are those of TinyLlama 1.1B; another folder's stand in its config.json, and the start reports a difference.
local T = require "cairn"

local p = T.params {
  folder = T.param { "models/llama", doc = "folder with config.json, the weights and tokenizer.json" },
  data   = T.param { "data/chats", doc = "prefix of a set that `cairn data chat` made with the folder's tokenizer" },
}

return T.recipe {
  name = "chat",
  seed = 1,
  stop = T.steps(500),  -- T.epochs(3) with the set in its place: it is read to count samples

  model = T.llama {
    layers = 22, width = 2048, heads = 32, kv_heads = 4, ffn = 5632, context = 2048, vocab = 32000,
    positions = T.rotary { theta = 10000 }, norm_eps = 1e-5, tied_embeddings = false,
  },
  init      = T.hf(p.folder),
  tokenizer = T.hf_tokenizer(p.folder .. "/tokenizer.json"),

  data  = T.instruct { prefix = p.data, split = { 95, 5 } },
  batch = { samples = 16, micro = 1 },
  optimizer = T.adamw {
    peak_lr = 1e-5,
    lr = T.schedule { T.warmup { over = T.fraction(0.03) }, T.cosine { to = 0 } },
    weight_decay = 0.0,
    clip = 1.0,
    zero = 1,
  },
  precision  = "bf16",
  checkpoint = T.checkpoint { save = { T.every { steps = 100 } }, keep = { T.last(2) } },
  eval       = { at = T.every { steps = 50 }, steps = 4 },
}
