cairn_tests(runtime/nn TIMEOUT 300)
