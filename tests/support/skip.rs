//! Tests that cannot run on this machine: they report that they are skipped, and fail in CI.
#![allow(dead_code)]

use std::io::Write as _;
use std::path::PathBuf;

/// The variable with the kubeconfig of a real control plane that tests use.
pub const REAL_APISERVER: &str = "HOLDFAST_REAL_APISERVER";

fn is_real() -> bool {
    std::env::var_os(REAL_APISERVER).is_some()
}

/// Reports why a test is skipped. With `CI=true` the test fails, because everything must run there,
/// unless it uses a real control plane.
pub fn skipped(why: &str) {
    // Written to stderr directly: libtest hides the captured output of a passing test.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    assert!(
        is_real() || std::env::var("CI").as_deref() != Ok("true"),
        "skipped in CI: {why}"
    );
}

/// Whether a test that needs root must be skipped; reports why.
pub fn needs_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skipped("the test needs root");
    }
    !is_root
}

/// Whether a test that needs the bundled control plane must be skipped because a real one is used; reports why.
pub fn needs_bundled(why: &str) -> bool {
    if is_real() {
        skipped(&format!("it needs the bundled control plane: {why}"));
    }
    is_real()
}

/// The programs that `make test-all` has unpacked below the directory that `variable` names, one for each
/// version. If there are none, the test reports that it is skipped.
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
            "other versions of {program} ({variable} names none)"
        ));
    }
    found
}
