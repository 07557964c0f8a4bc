//! The multi-call binary: its name decides which plugin it is.

use std::process::ExitCode;

use holdfast_cni::{plugins, skel};

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&name).file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
    match plugins::find(&name) {
        Some(plugin) => skel::run(plugin),
        None => {
            eprintln!(
                "holdfast-cni {}: call it as one of: {}. Make links of those names to it in the runtime's CNI directory, for instance:\n  ln -s holdfast-cni /opt/cni/bin/bridge",
                env!("CARGO_PKG_VERSION"),
                plugins::NAMES.join(", ")
            );
            ExitCode::from(2)
        }
    }
}
