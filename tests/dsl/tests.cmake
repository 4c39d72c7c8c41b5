cairn_tests(dsl LINK runtime/core runtime/optim LABELS unit)
