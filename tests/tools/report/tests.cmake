cairn_tests(tools/report)
