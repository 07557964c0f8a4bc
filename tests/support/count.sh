#!/usr/bin/env bash
# Runs the given command, which is a `cargo test`, and ends with the numbers of tests that passed and failed, and with what
# `make test-all` tests besides.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
awk -v seconds=$SECONDS '
    /^test result: / { passed += $4; failed += $6 }
    match($0, /skipped: /) { left[substr($0, RSTART + RLENGTH)]++; skipped++ }
    END {
        printf "\n%d tests passed and %d failed in %d min %d s.\n", passed, failed, seconds / 60, seconds % 60
        fflush()
        if (skipped) print skipped " checks are left to `make test-all`:"
        fflush()
        for (why in left) print "  " left[why] "  " why | "sort -k2"
    }' "$log"
exit "$status"
