cairn_tests(ckpt/format LINK runtime/core)
