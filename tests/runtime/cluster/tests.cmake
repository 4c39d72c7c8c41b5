cairn_tests(runtime/cluster LINK runtime/core LABELS unit TIMEOUT 60)
