local T = require "cairn"

local function model(width)
  return T.gtp { width = width }
end

return T.recipe { name = "x", model = model(64) }
