cairn_tests(runtime/telemetry)
