return require("broken.base"):with {
  optimizer = { zero = 0 },
  mesh = { shard = 8 },
}
