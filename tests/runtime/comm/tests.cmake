cairn_tests(runtime/comm LINK runtime/core LABELS unit TIMEOUT 120 SERIAL)
