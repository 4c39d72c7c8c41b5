cairn_tests(runtime/nn)
