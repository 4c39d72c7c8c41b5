cairn_tests(runtime/dlrm LABELS unit)
