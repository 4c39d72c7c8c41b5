-- Fine-tuning a model of Hugging Face: the weights of a folder, a run of its own from step 0.
--   cairn data tokenize notes.txt --out data/notes --tokenizer models/llama --documents blank-line --eod
--   cairn train recipes/finetune_llama.lua --param folder=models/llama --nproc 2
--   cairn generate --from runs/finetune-llama --prompt "..."
--   cairn export runs/finetune-llama tuned-llama
-- The sizes are those of TinyLlama 1.1B; another folder's stand in its config.json, and what differs is told.
local T = require "cairn"

local p = T.params {
  folder = T.param { "models/llama", doc = "folder with config.json, the weights and tokenizer.json" },
  data   = T.param { "data/notes", doc = "prefix of a Megatron pair, tokenized with the folder's tokenizer" },
}

return T.recipe {
  name = "finetune-llama",
  seed = 1,
  stop = T.steps(500),

  model = T.llama {
    layers = 22, width = 2048, heads = 32, kv_heads = 4, ffn = 5632, context = 1024, vocab = 32000,
    positions = T.rotary { theta = 10000 }, norm_eps = 1e-5, tied_embeddings = false,
  },
  init      = T.hf(p.folder),
  tokenizer = T.hf_tokenizer(p.folder .. "/tokenizer.json"),

  data  = T.megatron { prefix = p.data, split = { 95, 5 } },
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
