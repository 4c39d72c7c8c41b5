cairn_tests(tools/planner)
