cairn_tests(ckpt/verify LINK runtime/core ckpt/store ckpt/format ckpt/persist)
