cairn_tests(runtime/core)
