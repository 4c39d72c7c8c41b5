cairn_tests(ckpt/snapshot LINK runtime/core ckpt/plan ckpt/format)
