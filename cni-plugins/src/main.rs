//! The multi-call binary: its name selects the plugin.

use std::path::Path;
use std::process::ExitCode;

use holdfast_cni::{plugins, skel};

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&name)
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or_default()
        .to_owned();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let ("host-local", Some(("audit", rest))) = (
        &*name,
        arguments.split_first().map(|(a, rest)| (a.as_str(), rest)),
    ) {
        return audit(rest);
    }
    if let ("dhcp", Some(("daemon", rest))) = (
        &*name,
        arguments.split_first().map(|(a, rest)| (a.as_str(), rest)),
    ) {
        return match holdfast_cni::dhcp::daemon::run(rest) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("dhcp daemon: {error}");
                ExitCode::FAILURE
            }
        };
    }
    match plugins::find(&name) {
        Some(plugin) => skel::run(plugin),
        None => own(),
    }
}

/// Handles a call by the binary's own name: `install` or the help text.
fn own() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["install", dir] => match install(Path::new(dir)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("holdfast-cni: the plugins cannot be installed in {dir}: {error}");
                ExitCode::FAILURE
            }
        },
        arguments => {
            let help = matches!(arguments, ["--help" | "-h" | "help"]);
            let text = help_text(env!("CARGO_PKG_VERSION"));
            if help {
                println!("{text}")
            } else {
                eprintln!("{text}")
            }
            ExitCode::from(if help { 0 } else { 2 })
        }
    }
}

/// The help of this version.
fn help_text(version: &str) -> String {
    format!(
        "holdfast-cni {version}: CNI plugins in one binary; the name under which it is called selects the plugin.\n\nPlugins: {}\n\nUsage:\n  holdfast-cni install DIR   copy the binary to DIR (such as /opt/cni/bin) and link these names to it,\n                             replacing existing plugins",
        plugins::names().collect::<Vec<_>>().join(", ")
    )
}

/// Runs `host-local audit`.
fn audit(arguments: &[String]) -> ExitCode {
    match holdfast_cni::ipam::audit::run(arguments) {
        Ok((text, well)) => {
            println!("{text}");
            ExitCode::from(u8::from(!well))
        }
        Err(error) => {
            eprintln!("host-local audit: {error}");
            ExitCode::from(2)
        }
    }
}

/// Installs all plugins into a directory. Each file is renamed into
/// place, so that running plugins continue and none is ever missing.
fn install(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let fresh = dir.join(format!(".holdfast-cni.{}", std::process::id()));
    std::fs::copy("/proc/self/exe", &fresh)?;
    std::fs::rename(&fresh, dir.join("holdfast-cni"))?;
    for name in plugins::names() {
        std::os::unix::fs::symlink("holdfast-cni", &fresh)?;
        std::fs::rename(&fresh, dir.join(name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_the_plugins() {
        insta::assert_snapshot!("help", help_text("1.2.3"));
    }
}
