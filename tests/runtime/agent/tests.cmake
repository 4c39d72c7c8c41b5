cairn_tests(runtime/agent LINK runtime/core LABELS unit TIMEOUT 120 SERIAL)
