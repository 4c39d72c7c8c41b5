cairn_tests(runtime/inference)
