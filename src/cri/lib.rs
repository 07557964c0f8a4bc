//! The container runtime: a narrow trait in our own types, and the CRI v1 client that implements it.
//!
//! A call that times out has an unknown outcome: the caller observes the runtime before it acts again.

mod cache;
mod client;
mod convert;
mod events;
mod exec;
mod images;
mod measured;
mod observation;
mod runtime;
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

use holdfast_core::fault::{Class, Fault};
use holdfast_core::node::collection::DeadContainer;
use holdfast_core::node::leases::Attachments;
use holdfast_core::pod::explain::Fetching;
use holdfast_core::pod::observed::{Container, ObservedPod, RuntimeEvent};
use holdfast_core::serving::Streams;

/// Why a call to the runtime failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", describe(*code, message))]
pub struct RuntimeError {
    /// The class of the failure.
    pub kind: RuntimeErrorKind,
    /// The name of gRPC's status code, if the runtime or the connection to it returned one.
    pub code: Option<&'static str>,
    /// The runtime's message.
    pub message: String,
}

fn describe(code: Option<&str>, message: &str) -> String {
    code.map_or_else(
        || message.to_owned(),
        |code| failure::go_error(code, message),
    )
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
    /// Decides the retry: all pods are notified when the runtime is available again.
    fn class(&self) -> Class {
        match self.kind {
            RuntimeErrorKind::Unavailable => Class::WaitForChange,
            _ => Class::RetryLater,
        }
    }

    /// Drops the code, as the kubelet does for containers that cannot be created or started.
    #[must_use]
    pub fn without_code(self) -> Fault {
        Fault {
            class: self.class(),
            message: self.message,
        }
    }

    /// Formats the text without the code `Unknown`, as the kubelet does for failed pulls.
    #[must_use]
    pub fn without_unknown(&self) -> String {
        match self.code {
            Some("Unknown") => self.message.clone(),
            _ => self.to_string(),
        }
    }
}

/// The class of a failure, by which callers decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeErrorKind {
    /// The object does not exist. For stopping and removing, this is success.
    NotFound,
    /// The runtime cannot be reached.
    Unavailable,
    /// No answer in time: the outcome is unknown.
    Timeout,
    /// The runtime does not implement the call.
    Unimplemented,
    /// The runtime refused the call.
    Failed,
}

/// An image that is present.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// The runtime's id.
    pub id: String,
    /// All digests and tags.
    pub names: Vec<String>,
    /// Size in bytes.
    pub size: u64,
    /// The uid in the image's configuration, if it is numeric.
    pub uid: Option<i64>,
    /// The user name in the image's configuration.
    pub username: String,
    /// Whether the runtime keeps the image for its own use.
    pub pinned: bool,
}

/// All images, and what prevents their removal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageInventory {
    /// The images. The sandbox image is pinned, even if the runtime does not report it as pinned.
    pub images: Vec<Image>,
    /// Ids or names of images that containers use, including exited containers.
    pub in_use: BTreeSet<String>,
    /// A directory on the filesystem with the images.
    pub mountpoint: PathBuf,
}

/// The result of a command in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exec {
    /// Its exit code.
    pub code: i32,
    /// Standard output and error, as far as they fit into the runtime's message.
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

/// The runtime's status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Name and version, for instance `containerd://1.6.20`.
    pub version: String,
    /// Why the runtime is not ready; `None` if it is.
    pub not_ready: Option<String>,
    /// Why the network is not ready; `None` if it is.
    pub network_not_ready: Option<String>,
    /// Its optional features.
    pub features: Features,
}

/// Features that not all runtimes have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Features {
    /// The runtime's name, for instance `containerd`; empty until it has answered.
    pub runtime: String,
    /// The runtime's handlers; the default one has an empty name.
    pub handlers: Vec<Handler>,
    /// Whether `supplementalGroupsPolicy: Strict` is honoured.
    pub strict_groups: bool,
}

/// A handler of the runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Handler {
    /// The name to which RuntimeClasses refer.
    pub name: String,
    /// Whether mounts can be recursively read-only.
    pub recursive_read_only: bool,
    /// Whether pods can have user namespaces.
    pub user_namespaces: bool,
}

impl Features {
    /// Returns the handler with this name; an unknown handler has no features.
    #[must_use]
    pub fn handler(&self, name: &str) -> &Handler {
        /// An unknown handler.
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
    /// Whether it has a sandbox that is ready, or a container that may run.
    pub is_live: bool,
}

/// A running container, and its pod.
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
    /// The runtime's id of the container's sandbox.
    pub sandbox: String,
}

/// The writable layer of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// Size in bytes.
    pub bytes: u64,
    /// Number of files and directories; 0 if the runtime does not count them.
    pub inodes: u64,
    /// A directory on the layer's filesystem; empty if the runtime does not name one.
    pub mountpoint: PathBuf,
}

/// The filesystem with the images, as the runtime reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageFilesystem {
    /// A directory on the filesystem.
    pub mountpoint: PathBuf,
    /// Bytes that the images use.
    pub bytes: u64,
    /// Number of files and directories of the images; `None` if the runtime does not count them.
    pub inodes: Option<u64>,
}

/// The runtime and its images. Stopping and removing an object that does not exist succeeds.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// Returns the runtime's status; fails if the runtime cannot be reached.
    async fn status(&self) -> Result<RuntimeStatus, RuntimeError>;
    /// Whether the runtime creates cgroups through systemd; `None` if it does not report this.
    async fn systemd_cgroups(&self) -> Result<Option<bool>, RuntimeError>;
    /// Sets the CIDRs of this node's pods, one for each address family, separated by commas. Some runtimes generate
    /// their CNI configuration from them.
    async fn set_pod_cidrs(&self, _cidrs: &str) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Returns the networks in which host-local leases addresses to the runtime's sandboxes, and the ids of all
    /// sandboxes.
    async fn attachments(&self) -> Result<Attachments, RuntimeError> {
        Ok(Attachments::default())
    }
    /// Lists all pods.
    async fn list(&self) -> Result<Vec<ListedPod>, RuntimeError>;
    /// Observes one pod in full.
    async fn observe(&self, uid: &str) -> Result<ObservedPod, RuntimeError>;
    /// Observes one container; `None` if it does not exist. `sandbox` is the id of its sandbox, which a container's
    /// status does not name.
    async fn container(&self, id: &str, sandbox: &str) -> Result<Option<Container>, RuntimeError>;
    /// Creates and starts a sandbox; returns its id.
    async fn run_sandbox(
        &self,
        config: pb::PodSandboxConfig,
        handler: &str,
    ) -> Result<String, RuntimeError>;
    /// Returns the addresses of a sandbox; empty on the host network.
    async fn sandbox_ips(&self, id: &str) -> Result<Vec<String>, RuntimeError>;
    /// Stops a sandbox and releases its addresses.
    async fn stop_sandbox(&self, id: &str) -> Result<(), RuntimeError>;
    /// Removes a sandbox and its containers.
    async fn remove_sandbox(&self, id: &str) -> Result<(), RuntimeError>;
    /// Creates a container; returns its id.
    async fn create_container(
        &self,
        sandbox: &str,
        config: pb::ContainerConfig,
        sandbox_config: pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError>;
    /// Starts a container.
    async fn start_container(&self, id: &str) -> Result<(), RuntimeError>;
    /// Stops a container: its stop signal, then SIGKILL after `grace` seconds.
    async fn stop_container(&self, id: &str, grace: i64) -> Result<(), RuntimeError>;
    /// Changes the resources of a running container.
    async fn update_container(
        &self,
        id: &str,
        resources: pb::LinuxContainerResources,
    ) -> Result<(), RuntimeError>;
    /// Sets the total resources of a sandbox's containers, for runtimes that size the sandbox by them. Most runtimes
    /// answer `Unimplemented`.
    async fn update_sandbox(
        &self,
        id: &str,
        sizes: pb::LinuxPodSandboxConfig,
    ) -> Result<(), RuntimeError>;
    /// Returns the memory in use by a container, in bytes.
    async fn memory_in_use(&self, id: &str) -> Result<u64, RuntimeError>;
    /// Runs a command in a container until it exits, or for at most `timeout`.
    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Option<Duration>,
    ) -> Result<Exec, RuntimeError>;
    /// Returns containerd's own services for commands with input; `None` if the runtime has none.
    fn tasks(&self) -> Option<Tasks> {
        None
    }
    /// Prepares a command in a container; returns the URL at which the runtime starts it.
    async fn exec_url(
        &self,
        id: &str,
        command: &[String],
        streams: Streams,
    ) -> Result<String, RuntimeError>;
    /// Prepares an attachment to a container's own streams; returns its URL.
    async fn attach_url(&self, id: &str, streams: Streams) -> Result<String, RuntimeError>;
    /// Prepares connections to ports of a sandbox; returns their URL. `ports` is empty if the client names them later.
    async fn forward_url(&self, sandbox: &str, ports: &[i32]) -> Result<String, RuntimeError>;
    /// Returns the writable layers of running containers, by pod uid and container.
    async fn layers(&self) -> Result<BTreeMap<(String, String), Layer>, RuntimeError>;
    /// Lists the running containers.
    async fn running(&self) -> Result<Vec<RunningContainer>, RuntimeError>;
    /// Reopens a container's log after the old file was renamed.
    async fn reopen_log(&self, id: &str) -> Result<(), RuntimeError>;
    /// Writes a running container's state to a file; a zero timeout means the runtime's own.
    async fn checkpoint(&self, id: &str, path: &str, timeout: Duration)
    -> Result<(), RuntimeError>;
    /// Lists the exited containers of pods.
    async fn dead_containers(&self) -> Result<Vec<DeadContainer>, RuntimeError> {
        Ok(vec![])
    }
    /// Removes a container.
    async fn remove_container(&self, id: &str) -> Result<(), RuntimeError>;
    /// Gets an image by name or id.
    async fn image(&self, name: &str) -> Result<Option<Image>, RuntimeError>;
    /// Lists all images.
    async fn images(&self) -> Result<Vec<Image>, RuntimeError>;
    /// Lists all images, and which of them are in use.
    async fn image_inventory(&self) -> Result<ImageInventory, RuntimeError>;
    /// Returns the filesystem with the images.
    async fn image_filesystem(&self) -> Result<ImageFilesystem, RuntimeError> {
        Ok(ImageFilesystem::default())
    }
    /// Removes an image by its id.
    async fn remove_image(&self, id: &str) -> Result<(), RuntimeError>;
    /// Returns the progress of all current pulls. `Unimplemented` if the runtime does not report it.
    async fn fetching(&self) -> Result<Fetching, RuntimeError>;
    /// Pulls an image for the pod of this sandbox configuration; returns the image's id.
    async fn pull(
        &self,
        name: &str,
        credentials: Option<Credentials>,
        sandbox: &pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError>;
    /// Streams events of pods' sandboxes and containers until the stream breaks; some runtimes report only exits.
    /// `Unimplemented` if the runtime has no events.
    async fn events(&self) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError>;
}
