return require("broken.base"):with {
  model = { layers = 0, norm_eps = 0 / 0, init_std = -0.02, norm = "rms" },
  optimizer = {
    peak_lr = 1 / 0,
    betas = { 0.9, 1.5 },
    zero = 4,
  },
  precision = "fp8",
  schedule = "1F1B",
  mesh = {
    tp = 0,
    order = { "tp", "pp", "pp" },
  },
  restart = { max_restarts = -1 },
}
