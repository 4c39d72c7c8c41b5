return require("broken.base"):with {
  model = { layers = 6, context = 1001 },
  batch = { micro = 1, samples = 10 },
  mesh = {
    tp = 4,
    pp = 8,
    dp = 3,
    sequence_parallel = true,
    stages = { 1, 2, 3 },
  },
}
