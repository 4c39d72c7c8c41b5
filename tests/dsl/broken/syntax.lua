local T = require "cairn"

return T.recipe {
  name = "tiny"
  seed = 1,
}
