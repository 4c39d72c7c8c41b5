cairn_tests(ckpt/copy LINK runtime/core runtime/device)
