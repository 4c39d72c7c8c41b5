cairn_tests(ckpt/retention LINK runtime/core ckpt/store ckpt/format ckpt/persist)
