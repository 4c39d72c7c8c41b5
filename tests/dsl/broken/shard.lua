return require("broken.base"):with {
  optimizer = { keep_after_forward = true },
  mesh = {
    shard = 3,
  },
}
