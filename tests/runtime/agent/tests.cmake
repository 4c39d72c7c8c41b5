cairn_tests(runtime/agent LINK runtime/core LABELS unit SERIAL)
