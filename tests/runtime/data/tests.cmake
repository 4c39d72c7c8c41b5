cairn_tests(runtime/data LABELS unit)
