cairn_tests(ckpt/copy LINK runtime/core runtime/tensor TIMEOUT 120)
