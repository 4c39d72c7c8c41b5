cairn_tests(runtime/host LINK runtime/core)
