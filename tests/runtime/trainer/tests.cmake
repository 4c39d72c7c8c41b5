cairn_tests(runtime/trainer LABELS parity TIMEOUT 900)
