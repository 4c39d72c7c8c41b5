local T = require "cairn"
return require("broken.base"):with {
  stop = T.steps(1000),
  optimizer = {
    lr = T.schedule {
      T.warmup { over = T.steps(600) },
      T.hold {},
      T.linear { to = T.ref "optimizer.peak_rl", over = T.steps(100) },
      T.warmup { over = T.samples(1e6) },
      T.cosine { over = T.fraction(1.5) },
    },
    weight_decay = T.ref "optimizer.clip" * 2,
    clip = T.ref "optimizer.weight_decay" + 1,
    eps = T.ref "name" * 2,
  },
}
