cairn_tests(runtime/text)
