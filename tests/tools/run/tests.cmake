cairn_tests(tools/run)
