cairn_tests(ckpt/tensors LINK runtime/core ckpt/store ckpt/format ckpt/persist)
