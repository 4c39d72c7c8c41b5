cairn_tests(runtime/optim/after)
