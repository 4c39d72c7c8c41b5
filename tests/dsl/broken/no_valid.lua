local T = require "cairn"
return require("broken.base"):with {
  data = T.blend {
    sources = T.map({ "web", "books", "other/web" }, function(name)
      return T.megatron { prefix = "data/" .. name }
    end),
  },
}
