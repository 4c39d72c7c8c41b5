cairn_tests(ckpt/plan)
