cairn_tests(runtime/evaluation LINK runtime/trainer)
