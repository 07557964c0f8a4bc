//! A node whose CPU manager assigns exclusive CPUs to containers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_core::node::cpus;
use holdfast_core::node::managers::{self, Managers};
use holdfast_core::node::topology::{Cpu, Topology};
use k8s_openapi::api::core::v1::Pod;

use super::World;

impl World {
    /// From its next start the agent assigns exclusive CPUs and keeps the checkpoint below `root`.
    pub fn give_processors(&self, root: &Path) {
        self.state().processors = Some(root.to_owned());
    }

    /// The resource managers of the node; sets the root directory of their checkpoints.
    pub(super) fn managers(&self, root_dir: &mut PathBuf) -> Managers {
        let Some(root) = self.state().processors.clone() else {
            return Managers::default();
        };
        root_dir.clone_from(&root);
        let cpu = |id: u32| {
            let core = Cpu {
                node: 0,
                socket: 0,
                core: id,
                cache: 0,
            };
            (id, core)
        };
        let mut topology = Topology {
            nodes: BTreeMap::from([(0, Default::default())]),
            ..Topology::default()
        };
        topology.cpus.0.extend((0..8).map(cpu));
        let machine = managers::Machine {
            topology: Arc::new(topology),
            ..managers::Machine::default()
        };
        let rules = managers::Rules {
            cpus: Some(cpus::Rules {
                options: Default::default(),
                reserved_milli: 1000,
                reserved: None,
            }),
            ..managers::Rules::default()
        };
        let known = std::fs::read_to_string(root.join(cpus::checkpoint::FILE)).ok();
        let checkpoints = managers::Checkpoints {
            cpus: known,
            memory: None,
        };
        Managers::new(&rules, &machine, &checkpoints).unwrap()
    }

    /// Rule: the CPUs of a pod are in the checkpoint before the agent creates anything of the pod.
    pub(super) fn check_processors(&self, pod: &Pod) {
        let Some(root) = self.state().processors.clone() else {
            return;
        };
        let noted = std::fs::read_to_string(root.join(cpus::checkpoint::FILE));
        let uid = pod.metadata.uid.clone().unwrap();
        if !noted.unwrap_or_default().contains(&uid) {
            let what = format!("{uid} is created before its CPUs are checkpointed");
            self.state().report_violation(what);
        }
    }
}
