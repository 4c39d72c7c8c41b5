cairn_tests(runtime/optim/walk)
