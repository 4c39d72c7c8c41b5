cairn_tests(runtime/optim)
