cairn_tests(ckpt/hook LINK ckpt)
