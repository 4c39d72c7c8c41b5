cairn_tests(runtime/tensor LINK runtime/core TIMEOUT 60)
