cairn_tests(runtime/http LABELS unit)
