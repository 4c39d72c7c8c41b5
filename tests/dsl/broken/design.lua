return require("broken.base"):with {
  modle = { layers = 40 },
  model = { heads = 62, positions = "rotory" },
  optimizer = {
    peak_lr = "fast",
    weight_deacy = 0.1,
  },
  batch = { samples = 1500 },
}
