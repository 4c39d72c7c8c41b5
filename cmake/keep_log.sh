#!/bin/sh
# keep_log.sh COMPILER ARGS... -o OBJECT ...: runs the compiler and leaves what it says in OBJECT.log. Of one that fails
# it is printed.
object=
before=
for argument in "$@"; do
  if [ "$before" = -o ]; then object=$argument; fi
  before=$argument
done
if "$@" >"$object.log" 2>&1; then exit 0; else status=$?; fi
cat "$object.log" >&2
exit $status
