cairn_tests(runtime/cluster LINK runtime/core runtime/http LABELS unit)
# Starts etcd; without the program it says so.
set_tests_properties(runtime/cluster/etcd_test PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
