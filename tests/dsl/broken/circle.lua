return require "broken.circle_b"
