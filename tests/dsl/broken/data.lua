local T = require "cairn"
return require("broken.base"):with {
  data = T.blend {
    seeds = 3,
    sources = {
      T.megatron { prefix = "a/text_document", weight = -1 },
      T.megatron { prefx = "b/text_document" },
      T.megatron { prefix = "c", split = { 0, 1 } },
      T.token_files { train = "d.bin", dtype = "u16" },
      "e.bin",
    },
  },
}
