cairn_tests(dsl LINK runtime/core LABELS unit TIMEOUT 120)
