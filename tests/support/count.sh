#!/usr/bin/env bash
# Runs each argument as a command, a `cargo test`, all at the same time. Shows the output of the first as it comes, and then
# that of the others. Ends with the numbers of tests that passed and failed, and with what `make test-all` tests besides.
set -ufo pipefail
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
others=()
for command in "${@:2}"; do
    $command >"$logs/$((${#others[@]} + 2))" 2>&1 &
    others+=($!)
done
$1 2>&1 | tee "$logs/1"
status=${PIPESTATUS[0]}
for other in "${others[@]}"; do
    wait "$other" || status=$?
done
set +f
tail -q -n +1 "$logs"/[2-9] 2>/dev/null
cat "$logs"/* | awk -v seconds=$SECONDS '
    /^test result: / { passed += $4; failed += $6 }
    match($0, /skipped: /) { left[substr($0, RSTART + RLENGTH)]++; skipped++ }
    END {
        printf "\n%d tests passed and %d failed in %d min %d s.\n", passed, failed, seconds / 60, seconds % 60
        fflush()
        if (skipped) print skipped " checks are left to `make test-all`:"
        fflush()
        for (why in left) print "  " left[why] "  " why | "sort -k2"
    }'
exit "$status"
