cairn_tests(runtime/pipeline)
