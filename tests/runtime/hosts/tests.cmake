cairn_tests(runtime/hosts LABELS unit)
