//! Compiles the two programs of the bundled images (pause and demo) into static binaries, which the
//! library embeds: a first try needs no registry.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let env = |name: &str| std::env::var(name).unwrap_or_default();
    let out = PathBuf::from(env("OUT_DIR"));
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
            // Without the standard library nothing else asks for libc.
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
