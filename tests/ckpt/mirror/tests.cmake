cairn_tests(ckpt/mirror LINK runtime/core ckpt/store ckpt/format ckpt/persist ckpt/retention ckpt/verify)
