cairn_tests(runtime/plan)
