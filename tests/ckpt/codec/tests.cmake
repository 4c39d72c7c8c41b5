cairn_tests(ckpt/codec LINK runtime/core)
