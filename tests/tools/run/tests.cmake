cairn_tests(tools/run LINK tools/run/agent)
