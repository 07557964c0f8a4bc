//! Tests that cannot run on this machine: they say that they are skipped, and fail in CI.
#![allow(dead_code)]

use std::io::Write as _;
use std::path::PathBuf;

/// The variable with the kubeconfig of a real control plane that tests are to use.
pub const REAL_APISERVER: &str = "HOLDFAST_REAL_APISERVER";

fn is_real() -> bool {
    std::env::var_os(REAL_APISERVER).is_some()
}

/// Says why a test is skipped. With `CI=true` the test fails: there everything must run, unless a real control plane is used.
pub fn skipped(why: &str) {
    // Written past libtest's capture, which hides what a passing test prints.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    assert!(
        is_real() || std::env::var("CI").as_deref() != Ok("true"),
        "skipped in CI: {why}"
    );
}

/// Whether a test that needs the bundled control plane must be skipped, as a real one is used; says why it needs it.
pub fn needs_bundled(why: &str) -> bool {
    if is_real() {
        skipped(&format!("it needs the bundled control plane: {why}"));
    }
    is_real()
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
