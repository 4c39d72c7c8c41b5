cairn_tests(runtime/json)
