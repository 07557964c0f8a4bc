//! The state of one pod as the runtime reports it. All lists are sorted newest first.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ContainerState {
    /// Created but not started.
    Created,
    /// The process is running.
    Running,
    /// The process has exited.
    Exited,
    /// The runtime does not know the state.
    Unknown,
}

/// One instance of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The id in the runtime.
    pub id: String,
    /// The name in the pod spec.
    pub name: String,
    /// The id of the sandbox that the container is in.
    pub sandbox: String,
    /// The restart count: the number of earlier instances.
    pub attempt: u32,
    /// The state according to the runtime.
    pub state: ContainerState,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// When it exited.
    pub finished_at: Option<Timestamp>,
    /// The exit code. Meaningful only if the container has exited.
    pub exit_code: i32,
    /// The runtime's reason for the exit, for example `OOMKilled`.
    pub reason: String,
    /// Details of the exit, including the termination message.
    pub message: String,
    /// The image as the runtime reports it: its name, if it has one.
    pub image: String,
    /// The image's id or digest.
    pub image_ref: String,
    /// The hash of the container's definition at its creation.
    pub hash: Option<String>,
    /// The user of the container's first process, if the runtime reports it.
    pub user: Option<User>,
    /// The stop signal in the API's spelling, if the runtime reports it.
    pub stop_signal: Option<String>,
    /// For an exited container, the file of its termination message in the container's directory, if the runtime
    /// reports it. The kubelet gives these files random names.
    #[serde(default)]
    pub message_file: Option<String>,
}

impl Container {
    /// Whether the container's process is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state == ContainerState::Running
    }
}

/// The identity of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User id.
    pub uid: i64,
    /// Group id.
    pub gid: i64,
    /// Ids of supplementary groups.
    pub groups: Vec<i64>,
}

/// One sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The id in the runtime.
    pub id: String,
    /// The number of earlier sandboxes.
    pub attempt: u32,
    /// Whether containers can be started in it.
    pub ready: bool,
    /// When it was created.
    pub created_at: Timestamp,
    /// Its addresses; empty on the host network.
    pub ips: Vec<String>,
    /// Whether it is on the host network.
    pub host_network: bool,
    /// The runtime handler of the sandbox. Empty for the default one.
    #[serde(default)]
    pub handler: String,
}

/// The kind of an event about a sandbox or a container. Events of one id arrive in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum EventKind {
    /// Creation.
    Created,
    /// Start.
    Started,
    /// A stop, or an event of unknown type.
    Stopped,
    /// Deletion.
    Deleted,
}

/// An event of the runtime about a sandbox or a container (CRI's `GetContainerEvents`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeEvent {
    /// The uid of the pod that it belongs to.
    pub pod: String,
    /// The id of the sandbox or the container.
    pub id: String,
    /// The kind of the event.
    pub kind: EventKind,
}

/// One pod according to the runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedPod {
    /// Sandboxes, newest first.
    pub sandboxes: Vec<Sandbox>,
    /// Containers, newest first.
    pub containers: Vec<Container>,
}

impl ObservedPod {
    /// The newest instance of a container.
    #[must_use]
    pub fn newest(&self, name: &str) -> Option<&Container> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// Whether the newest instance of a container runs.
    #[must_use]
    pub fn runs(&self, name: &str) -> bool {
        let newest = self.newest(name);
        newest.is_some_and(Container::is_running)
    }

    /// The newest instance, and the newest exited one before it. Instances that were created but never started are
    /// skipped, as they have no exit.
    #[must_use]
    pub fn latest_two(&self, name: &str) -> (Option<&Container>, Option<&Container>) {
        let mut of = self.containers.iter().filter(|c| c.name == name);
        (of.next(), of.find(|c| c.state == ContainerState::Exited))
    }

    /// The newest instance that was started, and the newest exited one before it.
    pub(crate) fn latest_two_started(
        &self,
        name: &str,
    ) -> (Option<&Container>, Option<&Container>) {
        let is_started = |c: &&Container| c.state != ContainerState::Created;
        let all = self.containers.iter().filter(|c| c.name == name);
        let mut of = all.filter(is_started);
        (of.next(), of.find(|c| c.state == ContainerState::Exited))
    }

    /// Containers that may have a process.
    pub fn live(&self) -> impl Iterator<Item = &Container> {
        self.containers
            .iter()
            .filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
    }

    /// Whether the runtime has nothing of the pod.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sandboxes.is_empty() && self.containers.is_empty()
    }

    /// Sorts everything newest first. Attempts decide before creation times, as clocks are sometimes set back.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_at)));
        let sandboxes: BTreeMap<&str, u32> = self
            .sandboxes
            .iter()
            .map(|s| (s.id.as_str(), s.attempt))
            .collect();
        // Containers of a removed sandbox are older than those of existing ones.
        let age = |c: &Container| {
            let sandbox = sandboxes.get(c.sandbox.as_str()).copied();
            std::cmp::Reverse((sandbox, c.attempt, c.created_at))
        };
        self.containers.sort_by_key(age);
    }

    /// A fingerprint that changes whenever a listing shows another state.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let sandboxes = self
            .sandboxes
            .iter()
            .map(|s| (s.id.as_str(), u8::from(s.ready)));
        let containers = self
            .containers
            .iter()
            .map(|c| (c.id.as_str(), (c.state as u8).saturating_add(10)));
        fingerprint(sandboxes.chain(containers))
    }
}

/// The order-independent fingerprint of ids and states.
#[must_use]
pub fn fingerprint<'a>(entries: impl Iterator<Item = (&'a str, u8)>) -> u64 {
    entries.fold(0, |sum, (id, state)| {
        let hash = crate::digest::fnv64(id.bytes().chain([state]));
        sum.wrapping_add(mixed(hash))
    })
}

/// Distributes every input bit over the whole hash (the finaliser of SplitMix64). Without this, hashes of neighbouring
/// states differ by small multiples of one number, and two changes can cancel out in the sum.
fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_simultaneous_changes_always_change_the_fingerprint() {
        let of = |n: u32, m: u32, state: ContainerState| {
            let ids = [format!("ctr{n:04}"), format!("ctr{m:04}")];
            fingerprint(ids.iter().map(|id| (id.as_str(), 10 + state as u8)))
        };
        for n in 0..60 {
            for m in 0..n {
                let (running, exited) = (ContainerState::Running, ContainerState::Exited);
                assert_ne!(of(n, m, running), of(n, m, exited), "{n} and {m}");
            }
        }
    }
}
