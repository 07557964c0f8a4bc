//! Tests that cannot run on this machine: they say that they are skipped, and fail in CI.
#![allow(dead_code)]

use std::io::Write as _;
use std::path::PathBuf;

/// Says why a test is skipped. With `CI=true` the test fails: there everything must run.
pub fn skipped(why: &str) {
    // Written past libtest's capture, which hides what a passing test prints.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "skipped in CI: {why}"
    );
}

/// The programs that `make test` has unpacked below the directory that `variable` names, one for each version. None
/// where they could not be fetched: the test is skipped.
pub fn fetched(variable: &str, program: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::env::var_os(variable)
        .and_then(|dir| std::fs::read_dir(dir).ok())
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join(program))
        .filter(|program| program.is_file())
        .collect();
    found.sort();
    if found.is_empty() {
        skipped(&format!(
            "{variable} names no directory with a newer {program}; `make test` fetches it"
        ));
    }
    found
}
