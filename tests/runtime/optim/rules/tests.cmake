cairn_tests(runtime/optim/rules)
