cairn_tests(ckpt/format LINK runtime/core TIMEOUT 120)
