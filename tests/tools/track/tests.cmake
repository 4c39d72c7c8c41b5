cairn_tests(tools/track)
