cairn_tests(runtime/hub LABELS unit)
