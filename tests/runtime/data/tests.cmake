cairn_tests(runtime/data LABELS unit TIMEOUT 300)
