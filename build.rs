//! Compiles the two programs of the bundled images (pause and demo) into static binaries. The library embeds them, so
//! that a first try needs no registry. Also names the reflog, from which `holdfast --version` takes the commit, and
//! packs the program's relocations.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the file in which git records every commit and checkout of this working tree; `None` outside of a working
/// tree, as in a package.
fn reflog(manifest_dir: &Path) -> Option<PathBuf> {
    let git = manifest_dir.join(".git");
    // In a linked worktree `.git` is a file that names the directory.
    let dir = match std::fs::read_to_string(&git) {
        Ok(text) => manifest_dir.join(text.strip_prefix("gitdir:")?.trim()),
        Err(_) => git,
    };
    let reflog = dir.join("logs/HEAD");
    if !reflog.is_file() {
        return None;
    }
    // A missing file makes cargo run this script again, so a build without `.git` finds no stale path. The file must not
    // change with a commit, because the whole package is compiled again after this script runs.
    let stable = ["commondir", "description", "config"];
    let stable = stable
        .iter()
        .map(|name| dir.join(name))
        .find(|p| p.is_file())?;
    println!("cargo::rerun-if-changed={}", stable.display());
    Some(reflog)
}

/// Passes the file that has the commit to `main.rs`. Cargo rebuilds only the program when that file changes.
fn name_the_reflog(manifest_dir: &Path, out: &Path) {
    let path = reflog(manifest_dir).unwrap_or_else(|| {
        let none = out.join("no-reflog");
        std::fs::write(&none, "").expect("OUT_DIR is writable");
        none
    });
    println!("cargo::rustc-env=HOLDFAST_REFLOG={}", path.display());
}

/// Packs the relative relocations of the program (`DT_RELR`) where the C library reads that form, since glibc 2.36. Unpacked
/// they take 24 bytes each, which every process reads at its start: 5 MiB of the program and of the RSS of each process.
fn pack_relocations(target: &str) {
    if target != std::env::var("HOST").unwrap_or_default() || !target.ends_with("linux-gnu") {
        return;
    }
    // Without `getconf`, the program is larger and otherwise the same.
    let Ok(answer) = Command::new("getconf").arg("GNU_LIBC_VERSION").output() else {
        return;
    };
    let answer = String::from_utf8_lossy(&answer.stdout);
    let version = answer.trim().strip_prefix("glibc 2.");
    if version.and_then(|minor| minor.parse().ok()) >= Some(36) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

fn main() {
    let env = |name: &str| std::env::var(name).unwrap_or_default();
    let out = PathBuf::from(env("OUT_DIR"));
    name_the_reflog(Path::new(&env("CARGO_MANIFEST_DIR")), &out);
    pack_relocations(&env("TARGET"));
    for program in ["pause", "web"] {
        let source = format!("src/up/images/{program}.rs");
        println!("cargo::rerun-if-changed={source}");
        let mut rustc = Command::new(env("RUSTC"));
        rustc.args([
            "--edition",
            "2024",
            "--crate-type",
            "bin",
            "--target",
            &env("TARGET"),
            "-C",
            "opt-level=s",
            "-C",
            "panic=abort",
        ]);
        rustc.args([
            "-C",
            "strip=symbols",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "relocation-model=static",
        ]);
        if program == "pause" {
            // Without the standard library, libc must be linked explicitly.
            let libraries = [
                "-Wl,-Bstatic",
                "-Wl,--start-group",
                "-lc",
                "-lgcc",
                "-lgcc_eh",
                "-Wl,--end-group",
            ];
            rustc.args(libraries.map(|l| format!("-Clink-arg={l}")));
        }
        let status = rustc.arg("-o").arg(out.join(program)).arg(&source).status();
        assert!(
            matches!(&status, Ok(s) if s.success()),
            "{source} could not be compiled ({status:?}); a static libc is needed (Debian: libc6-dev)"
        );
    }
}
