return {
  mesh = { tp = 3 },
  modell = {},
}
