//! What the runtime says about one pod, in our own types. Newest first everywhere.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ContainerState {
    /// Created, not started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// One instance of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// By which the runtime knows it.
    pub id: String,
    /// The name in the pod spec.
    pub name: String,
    /// The sandbox it lives in.
    pub sandbox: String,
    /// How many instances came before it: the restart count.
    pub attempt: u32,
    /// What it does, as far as the runtime knows.
    pub state: ContainerState,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// How it ended.
    pub exit_code: i32,
    /// Why it ended, in the runtime's word, for instance `OOMKilled`.
    pub reason: String,
    /// More about the end, the termination message included.
    pub message: String,
    /// The image in the words of the runtime, a name where it has one.
    pub image: String,
    /// The image's id or digest.
    pub image_ref: String,
    /// The hash of the definition it was made from.
    pub hash: Option<String>,
    /// As whom its first process was started, where the runtime says so.
    pub user: Option<User>,
    /// The signal that asks it to end, where the runtime says so, as the API spells it.
    pub stop_signal: Option<String>,
    /// Of an ended one: the file of its termination message in the pod's directory of the container, where the runtime
    /// says so. The kubelet gives these files random names.
    #[serde(default)]
    pub message_file: Option<String>,
}

impl Container {
    /// Whether its process runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state == ContainerState::Running
    }
}

/// Whom a process runs as.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User.
    pub uid: i64,
    /// Group.
    pub gid: i64,
    /// The supplementary groups.
    pub groups: Vec<i64>,
}

/// One sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// By which the runtime knows it.
    pub id: String,
    /// How many came before it.
    pub attempt: u32,
    /// Whether it can hold containers.
    pub ready: bool,
    /// When it was created.
    pub created_at: Timestamp,
    /// Its addresses; empty on the host network.
    pub ips: Vec<String>,
    /// Whether it is on the host network.
    pub host_network: bool,
    /// The runtime's handler that it was made with; empty for the default one.
    #[serde(default)]
    pub handler: String,
}

/// What happens to a sandbox or a container, in the order in which it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum EventKind {
    /// It was made.
    Created,
    /// It runs.
    Started,
    /// It has ended, or something that this program does not know has happened to it.
    Stopped,
    /// It was removed.
    Deleted,
}

/// What the runtime tells of a sandbox or a container (CRI's `GetContainerEvents`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeEvent {
    /// The uid of the pod that it belongs to.
    pub pod: String,
    /// By which the runtime knows the sandbox or the container.
    pub id: String,
    /// What has happened to it.
    pub kind: EventKind,
}

/// One pod as the runtime has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedPod {
    /// Newest first.
    pub sandboxes: Vec<Sandbox>,
    /// Newest first.
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

    /// The newest instance, and the newest before it that has ended. One that was made and never started
    /// says nothing about how the container went before.
    #[must_use]
    pub fn latest_two(&self, name: &str) -> (Option<&Container>, Option<&Container>) {
        let mut of = self.containers.iter().filter(|c| c.name == name);
        (of.next(), of.find(|c| c.state == ContainerState::Exited))
    }

    /// Containers that may have a process.
    pub fn live(&self) -> impl Iterator<Item = &Container> {
        self.containers
            .iter()
            .filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
    }

    /// Whether nothing of the pod is left in the runtime.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sandboxes.is_empty() && self.containers.is_empty()
    }

    /// Puts everything in order, newest first. Attempts say which is newer: clocks are set back at times.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_at)));
        let sandboxes: BTreeMap<&str, u32> = self
            .sandboxes
            .iter()
            .map(|s| (s.id.as_str(), s.attempt))
            .collect();
        // What ran in a sandbox that is gone ran before.
        let age = |c: &Container| {
            let sandbox = sandboxes.get(c.sandbox.as_str()).copied();
            std::cmp::Reverse((sandbox, c.attempt, c.created_at))
        };
        self.containers.sort_by_key(age);
    }

    /// A number that changes whenever a state does: what a listing can see.
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
        let hash = crate::core::digest::fnv64(id.bytes().chain([state]));
        sum.wrapping_add(mixed(hash))
    })
}

/// Spreads every bit over all (the finaliser of SplitMix64). Hashes of neighbouring states differ by
/// little multiples of one number otherwise, and two changes at once can cancel out in the sum.
fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_changes_at_once_never_cancel_out() {
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
