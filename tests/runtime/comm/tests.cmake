cairn_tests(runtime/comm LINK runtime/core LABELS unit SERIAL)
