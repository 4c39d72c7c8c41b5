cairn_tests(tools/launch)
