cairn_tests(tools/run TIMEOUT 120)
