local base = require "broken.circle"
return base
