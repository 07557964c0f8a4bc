//! Connects the resource managers ([`holdfast_core::node::managers`]) to the machine: reads its topology and the
//! checkpoints at startup, and writes the checkpoints. `binding` binds containers to what the managers assign.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;

use holdfast_config::Config;
use holdfast_core::node::cpus::checkpoint as cpus;
use holdfast_core::node::managers::{Checkpoints, Machine, Managers};
use holdfast_core::node::memory::{checkpoint as memory, set_aside};
use holdfast_sys::{file, machine, topology};

/// Size limit of a checkpoint, in bytes.
const MAX_CHECKPOINT_SIZE: u64 = 16 << 20;

fn read(root: &Path, name: &str) -> anyhow::Result<Option<String>> {
    let path = root.join(name);
    file::read_text_if_there(&path, MAX_CHECKPOINT_SIZE)
        .with_context(|| format!("cannot read {}", path.display()))
}

/// Creates the configured managers, with the assignments that an earlier agent or a kubelet stored.
pub fn start(config: &Config) -> anyhow::Result<Managers> {
    let machine = match config.managers.pins_containers() || config.managers.alignment.is_some() {
        false => Machine::default(),
        true => Machine {
            topology: Arc::new(topology::read(Path::new(topology::SYSTEM))),
            set_aside: set_aside(
                &super::size(&machine::Machine::read(&config.root_dir)),
                super::limits(config),
            ),
        },
    };
    let checkpoints = Checkpoints {
        cpus: read(&config.root_dir, cpus::FILE)?,
        memory: read(&config.root_dir, memory::FILE)?,
    };
    let managers = Managers::new(&config.managers, &machine, &checkpoints);
    let managers = managers
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("in {}", config.root_dir.display()))?;
    save(&config.root_dir, &managers.checkpoints())?;
    Ok(managers)
}

/// Writes the checkpoints. Blocking.
pub fn save(root: &Path, checkpoints: &[(&'static str, String)]) -> anyhow::Result<()> {
    for (name, text) in checkpoints {
        let path = root.join(name);
        file::replace(&path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
