cairn_tests(ckpt/store LINK runtime/core)
