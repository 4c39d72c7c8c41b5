cairn_tests(ckpt/hook LINK ckpt TIMEOUT 120)
