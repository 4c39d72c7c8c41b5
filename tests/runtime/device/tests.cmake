cairn_tests(runtime/device LINK runtime/core)
