//! The container runtime: a narrow trait in our own types, and the CRI v1 client behind it.
//!
//! A call that times out has an unknown outcome: the caller observes before it acts again.

mod client;
mod convert;
mod events;
mod exec;
mod images;
mod measured;
mod observation;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use holdfast_proto::{cri as pb, failure};
use tokio::sync::mpsc;

pub use client::CriClient;
pub use exec::{ExecProcess, PreparedExec, Stdio, Tasks};
pub use measured::Report;

use crate::core::fault::{Class, Fault};
use crate::core::node::collection::DeadContainer;
use crate::core::node::leases::Attachments;
use crate::core::pod::explain::Fetching;
use crate::core::pod::observed::{Container, ObservedPod, RuntimeEvent};
use crate::core::serving::Streams;

/// Why a call to the runtime failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", told(*code, message))]
pub struct RuntimeError {
    /// What kind of failure.
    pub kind: RuntimeErrorKind,
    /// The name of gRPC's status code, where the runtime or the connection to it gave one.
    pub code: Option<&'static str>,
    /// The runtime's message.
    pub message: String,
}

fn told(code: Option<&str>, message: &str) -> String {
    code.map_or_else(|| message.to_owned(), |code| failure::told(code, message))
}

impl From<RuntimeError> for Fault {
    fn from(error: RuntimeError) -> Fault {
        Fault {
            class: error.class(),
            message: error.to_string(),
        }
    }
}

impl RuntimeError {
    /// What it means for the next try: that the runtime is back is told to all pods.
    fn class(&self) -> Class {
        match self.kind {
            RuntimeErrorKind::Unavailable => Class::WaitForNews,
            _ => Class::RetryLater,
        }
    }

    /// The same without the code, as the kubelet shows containers that cannot be made or started.
    #[must_use]
    pub fn without_code(self) -> Fault {
        Fault {
            class: self.class(),
            message: self.message,
        }
    }

    /// The text without a code that says nothing, as the kubelet shows failed pulls.
    #[must_use]
    pub fn without_unknown(&self) -> String {
        match self.code {
            Some("Unknown") => self.message.clone(),
            _ => self.to_string(),
        }
    }
}

/// What a failure means for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeErrorKind {
    /// There is no such object; for stopping and removing that is success.
    NotFound,
    /// The runtime cannot be reached.
    Unavailable,
    /// No answer in time: the outcome is unknown.
    Timeout,
    /// The runtime does not know the call.
    Unimplemented,
    /// The runtime refused.
    Failed,
}

/// An image that is present.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// The runtime's id.
    pub id: String,
    /// All its names.
    pub names: Vec<String>,
    /// Bytes.
    pub size: u64,
    /// The uid that its configuration names.
    pub uid: Option<i64>,
    /// The user name that its configuration names.
    pub username: String,
    /// The runtime keeps it for itself.
    pub pinned: bool,
}

/// All images, and what speaks against removing them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stock {
    /// The images. The sandboxes' own is pinned, also where the runtime does not say so.
    pub images: Vec<Image>,
    /// Ids or names of images that containers use, those that have ended included.
    pub in_use: BTreeSet<String>,
    /// A directory on the filesystem with the images.
    pub mountpoint: PathBuf,
}

/// What a command in a container came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exec {
    /// Its exit code.
    pub code: i32,
    /// Standard output and error, as much as a message of the runtime holds.
    pub output: String,
}

/// Credentials for one registry.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(redacted)")
    }
}

/// What the runtime says about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// `containerd://1.6.20`.
    pub version: String,
    /// Why it is not ready, if it is not.
    pub not_ready: Option<String>,
    /// Why the network is not ready, if it is not.
    pub network_not_ready: Option<String>,
    /// What it can do.
    pub features: Features,
}

/// What a runtime can do beyond what all can.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Features {
    /// Its own name, for instance `containerd`; empty until it has answered.
    pub runtime: String,
    /// Its handlers; the default one has an empty name.
    pub handlers: Vec<Handler>,
    /// Whether `supplementalGroupsPolicy: Strict` is honoured.
    pub strict_groups: bool,
}

/// One handler of a runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Handler {
    /// The name that RuntimeClasses refer to.
    pub name: String,
    /// Whether mounts can be read-only with all below them.
    pub recursive_read_only: bool,
    /// Whether pods can have user namespaces.
    pub user_namespaces: bool,
}

impl Features {
    /// The handler of a name, one that can do nothing if it is not known.
    #[must_use]
    pub fn handler(&self, name: &str) -> &Handler {
        /// What is not known.
        static NONE: Handler = Handler {
            name: String::new(),
            recursive_read_only: false,
            user_namespaces: false,
        };
        let known = self.handlers.iter().find(|h| h.name == name);
        known.unwrap_or(&NONE)
    }
}

/// A listed pod: its identity and the fingerprint of its states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedPod {
    /// The uid.
    pub uid: String,
    /// The name.
    pub name: String,
    /// The namespace.
    pub namespace: String,
    /// See [`ObservedPod::fingerprint`].
    pub fingerprint: u64,
    /// It has a sandbox that is ready, or a container that may run.
    pub is_live: bool,
}

/// A container that runs, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningContainer {
    /// The runtime's id.
    pub id: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid.
    pub uid: String,
    /// The container's name.
    pub name: String,
    /// The restart count.
    pub attempt: u32,
    /// The runtime's id of its sandbox.
    pub sandbox: String,
}

/// What a container has written outside of volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// Bytes.
    pub bytes: u64,
    /// Files and directories; 0 where the runtime does not count them.
    pub inodes: u64,
    /// A directory on the filesystem that it lies on; empty where the runtime does not say.
    pub mountpoint: PathBuf,
}

/// What the runtime says of the filesystem with its images.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageFilesystem {
    /// A directory on it.
    pub mountpoint: PathBuf,
    /// The bytes of the images.
    pub bytes: u64,
    /// Their files and directories, where the runtime counts them.
    pub inodes: Option<u64>,
}

/// The runtime and its images. Stopping and removing what is not there succeeds.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// Its state; an error if it cannot be reached.
    async fn status(&self) -> Result<RuntimeStatus, RuntimeError>;
    /// Whether it makes cgroups through systemd; `None` if it cannot say.
    async fn systemd_cgroups(&self) -> Result<Option<bool>, RuntimeError>;
    /// Tells it the addresses of this node's pods, one CIDR a family, separated by commas. Some runtimes write their
    /// CNI configuration by it.
    async fn tell_pod_cidrs(&self, _cidrs: &str) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// The networks in which host-local leases addresses to its sandboxes, and the ids of all sandboxes.
    async fn attachments(&self) -> Result<Attachments, RuntimeError> {
        Ok(Attachments::default())
    }
    /// All pods.
    async fn list(&self) -> Result<Vec<ListedPod>, RuntimeError>;
    /// One pod in full.
    async fn observe(&self, uid: &str) -> Result<ObservedPod, RuntimeError>;
    /// One container of a sandbox, which it is told as it does not say itself; nothing where it does not have it.
    async fn container(&self, id: &str, sandbox: &str) -> Result<Option<Container>, RuntimeError>;
    /// Makes a sandbox; the answer is its id.
    async fn run_sandbox(
        &self,
        config: pb::PodSandboxConfig,
        handler: &str,
    ) -> Result<String, RuntimeError>;
    /// The addresses of a sandbox, empty on the host network.
    async fn sandbox_ips(&self, id: &str) -> Result<Vec<String>, RuntimeError>;
    /// Stops a sandbox and gives its addresses back.
    async fn stop_sandbox(&self, id: &str) -> Result<(), RuntimeError>;
    /// Removes a sandbox and its containers.
    async fn remove_sandbox(&self, id: &str) -> Result<(), RuntimeError>;
    /// Makes a container; the answer is its id.
    async fn create_container(
        &self,
        sandbox: &str,
        config: pb::ContainerConfig,
        sandbox_config: pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError>;
    /// Starts a container.
    async fn start_container(&self, id: &str) -> Result<(), RuntimeError>;
    /// Stops a container: SIGTERM, and SIGKILL after `grace` seconds.
    async fn stop_container(&self, id: &str, grace: i64) -> Result<(), RuntimeError>;
    /// Gives a running container other resources.
    async fn update_container(
        &self,
        id: &str,
        resources: pb::LinuxContainerResources,
    ) -> Result<(), RuntimeError>;
    /// Tells the runtime what a sandbox's containers have together, for runtimes that size it by that.
    /// `Unimplemented` by most.
    async fn update_sandbox(
        &self,
        id: &str,
        sizes: pb::LinuxPodSandboxConfig,
    ) -> Result<(), RuntimeError>;
    /// The bytes of memory that a container uses.
    async fn memory_in_use(&self, id: &str) -> Result<u64, RuntimeError>;
    /// Runs a command in a container; without `timeout` until it ends.
    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Option<Duration>,
    ) -> Result<Exec, RuntimeError>;
    /// containerd's own services for commands with input; `None` if the runtime cannot have them.
    fn tasks(&self) -> Option<Tasks> {
        None
    }
    /// Prepares a command in a container; the answer is the URL at which the runtime lets it begin.
    async fn exec_url(
        &self,
        id: &str,
        command: &[String],
        streams: Streams,
    ) -> Result<String, RuntimeError>;
    /// The same for an attachment to a container's own streams.
    async fn attach_url(&self, id: &str, streams: Streams) -> Result<String, RuntimeError>;
    /// The same for connections to ports of a sandbox; none for those that are named later.
    async fn forward_url(&self, sandbox: &str, ports: &[i32]) -> Result<String, RuntimeError>;
    /// What running containers have written outside of volumes, by pod and container.
    async fn layers(&self) -> Result<BTreeMap<(String, String), Layer>, RuntimeError>;
    /// The containers that run.
    async fn running(&self) -> Result<Vec<RunningContainer>, RuntimeError>;
    /// Makes the runtime open a container's log anew, after the old one was moved aside.
    async fn reopen_log(&self, id: &str) -> Result<(), RuntimeError>;
    /// Writes a running container's state to a file; a timeout of zero is the runtime's own.
    async fn checkpoint(&self, id: &str, path: &str, timeout: Duration)
    -> Result<(), RuntimeError>;
    /// The containers of pods that have ended.
    async fn dead_containers(&self) -> Result<Vec<DeadContainer>, RuntimeError> {
        Ok(vec![])
    }
    /// Removes a container.
    async fn remove_container(&self, id: &str) -> Result<(), RuntimeError>;
    /// An image by name or id.
    async fn image(&self, name: &str) -> Result<Option<Image>, RuntimeError>;
    /// All images.
    async fn images(&self) -> Result<Vec<Image>, RuntimeError>;
    /// All images, and what uses them.
    async fn stock(&self) -> Result<Stock, RuntimeError>;
    /// The filesystem with the images.
    async fn image_filesystem(&self) -> Result<ImageFilesystem, RuntimeError> {
        Ok(ImageFilesystem::default())
    }
    /// Removes an image by its id.
    async fn remove_image(&self, id: &str) -> Result<(), RuntimeError>;
    /// What it is fetching just now, over all pulls. `Unimplemented` where it cannot say.
    async fn fetching(&self) -> Result<Fetching, RuntimeError>;
    /// Pulls an image for a pod, which is told by the message that its sandbox is made from; the answer is the image's id.
    async fn pull(
        &self,
        name: &str,
        credentials: Option<Credentials>,
        sandbox: &pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError>;
    /// What happens to sandboxes and containers of pods, until the stream breaks; some runtimes tell of ends alone.
    /// `Unimplemented` where the runtime has no events.
    async fn events(&self) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError>;
}
