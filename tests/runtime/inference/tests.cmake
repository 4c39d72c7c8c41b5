cairn_tests(runtime/inference LINK runtime/trainer)
