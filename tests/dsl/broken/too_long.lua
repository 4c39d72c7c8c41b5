local T = require "cairn"
return require("broken.base"):with {
  stop = T.samples "1M",
  optimizer = {
    lr = T.schedule {
      T.warmup { over = T.steps(600) },
      T.cosine { to = 0, over = T.tokens "2B" },
    },
  },
}
