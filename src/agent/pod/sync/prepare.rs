//! Steps 5 and 7: the pod's cgroup and directories, its runtime handler and its user namespace.

use std::borrow::Cow;
use std::sync::Arc;

use tokio::sync::watch;

use super::{Asset, Job, Result, Setup};
use crate::node::ledger::LedgerHandle;
use holdfast_config::Config;
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::cri_config;
use holdfast_core::pod::dns::Resolver;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::memory_qos::MemoryQos;
use holdfast_core::pod::resize;
use holdfast_core::pod::resources::Amounts;
use holdfast_core::pod::users::Mappings;
use holdfast_core::pod::worker::Outcome;
use holdfast_cri::Features;
use holdfast_host::PodHost;
use holdfast_sys::machine::Machine;

/// What the node's settings for CRI messages are derived from.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub machine: Arc<Machine>,
    /// The resources that pods may use on this node.
    pub allocatable: Amounts,
    /// Whether containers may swap.
    pub swaps: bool,
    pub host: Arc<dyn PodHost>,
    pub ledger: LedgerHandle,
    /// DNS settings for pods.
    pub resolver: watch::Sender<Arc<Resolver>>,
    /// The features that the runtime last reported.
    pub features: watch::Sender<Features>,
}

impl Job {
    /// Prepares a sandbox: determines its settings, and creates cgroup and directories.
    pub(super) async fn prepare(&self) -> Result<(Outcome, Option<Asset>)> {
        let (handler, users) = self.runtime_isolation().await?;
        let cgroup_parent = self.ensure_cgroup_and_directories().await?;
        let setup = Arc::new(Setup {
            cgroup_parent,
            handler,
            users,
        });
        self.tools.setup.send_replace(Some(Arc::clone(&setup)));
        Ok((Outcome::Done, Some(Asset::Setup(setup))))
    }

    /// Repairs the cgroup and the directories of a pod that has a sandbox.
    pub(super) async fn upkeep(&self) -> Result<(Outcome, Option<Asset>)> {
        // Read first, as the settings are available even if the repair fails.
        let setup = self.setup().await?.map(Asset::Setup);
        let kept = self.ensure_cgroup_and_directories().await;
        let outcome = kept.map_or_else(Outcome::from, |_| Outcome::Done);
        Ok((outcome, setup))
    }

    /// The settings of the pod's containers, as [`Job::prepare`] determined them for the sandbox. For a sandbox of an
    /// earlier agent, the runtime and the pod's directory have them. Nothing is resolved again: a deleted RuntimeClass,
    /// or a runtime without user namespaces, must not prevent restarts in a running pod.
    pub(super) async fn setup(&self) -> std::result::Result<Option<Arc<Setup>>, Fault> {
        let known = self.tools.setup.borrow().clone();
        let sandbox = self.observed.sandboxes.first().filter(|s| s.ready);
        let (None, Some(sandbox)) = (&known, sandbox) else {
            return Ok(known);
        };
        let (host, pod) = (&self.parts().host, &self.pod);
        let users = match pod::spec(pod).host_users {
            Some(false) => Some(host.user_mappings(pod).await?),
            _ => None,
        };
        let setup = Arc::new(Setup {
            cgroup_parent: host.cgroup_parent(pod),
            handler: sandbox.handler.clone(),
            users,
        });
        self.tools.setup.send_replace(Some(Arc::clone(&setup)));
        Ok(Some(setup))
    }

    /// Creates the pod's cgroup and directories if they are missing. Returns the cgroup.
    async fn ensure_cgroup_and_directories(&self) -> std::result::Result<String, Fault> {
        let (parts, pod) = (self.parts(), &self.pod);
        // Keeps the actuated size: a pending resize changes it later, after checking the usage.
        let owed = self.resizing.needs_cgroup_resize(&resize::wanted(pod));
        let sized = self.resizing.cgroup.as_ref().filter(|_| owed);
        let sized = sized.map_or(Cow::Borrowed(&**pod), |c| Cow::Owned(resize::with(pod, c)));
        let make_cgroup = parts.host.ensure_cgroup(&sized, self.has_cpu_limit());
        let make_cgroup = self.count_cgroup("create", make_cgroup);
        let cgroup_parent = self
            .log()
            .step(Step::Cgroup, "", make_cgroup)
            .await
            .map_err(|error| {
                let what = "unable to ensure pod container exists";
                self.emit_warning("FailedCreatePodContainer", what, error)
            })?;
        let make_directories = parts.host.make_directories(pod);
        self.log()
            .step(Step::Directories, "", make_directories)
            .await
            .map_err(|error| {
                self.emit_warning("Failed", "error making pod data directories", error)
            })?;
        Ok(cgroup_parent)
    }

    /// Whether the pod's cgroup limits CPU time: not if a container has exclusive CPUs, which it may use completely.
    pub(super) fn has_cpu_limit(&self) -> bool {
        let pinning = self.parts().ledger.pinning();
        let has_own = pinning.borrow().pod_has_own_cpus(pod::uid(&self.pod));
        !has_own
    }

    /// Resolves the pod's runtime handler and the id mappings of its user namespace.
    async fn runtime_isolation(&self) -> Result<(String, Option<Mappings>)> {
        let (parts, pod) = (self.parts(), &self.pod);
        let spec = pod::spec(pod);
        let handler = match spec.runtime_class_name.as_deref().filter(|n| !n.is_empty()) {
            None => String::new(),
            Some(class) => parts.api.runtime_handler(class).await.map_err(|e| {
                self.no_sandbox(Fault::later(format!(
                    "failed to get RuntimeClass {class:?}: {e}"
                )))
            })?,
        };
        if spec.host_users != Some(false) {
            return Ok((handler, None));
        }
        if !parts
            .settings
            .features
            .borrow()
            .handler(&handler)
            .user_namespaces
        {
            let which = if handler.is_empty() {
                "runtime".to_owned()
            } else {
                format!("RuntimeClass handler {handler:?}")
            };
            let why = format!(
                "can't set `spec.hostUsers: false`, {which} does not support user namespaces"
            );
            return Err(self.no_sandbox(Fault::later(why)).into());
        }
        let users = parts.host.user_mappings(pod).await;
        let users = users.map_err(|e| self.no_sandbox(e))?;
        Ok((handler, Some(users)))
    }

    /// The node's settings for the pod's CRI messages.
    pub(super) async fn node(&self) -> std::result::Result<cri_config::Node, Fault> {
        let setup = self.setup().await?;
        let setup =
            setup.ok_or_else(|| Fault::later("the pod has no cgroup and directories yet"))?;
        Ok(node_config(&self.parts().settings, &self.pod, &setup))
    }
}

/// The rules of memory QoS, and the memory that is allocatable to pods in
/// bytes. `None` without memory QoS or cgroup v2.
fn memory_qos(parts: &Parts) -> Option<(MemoryQos, u64)> {
    let rules = parts.config.enforcement.memory;
    let rules = rules.filter(|_| parts.machine.cgroup_v2)?;
    let bytes = parts.allocatable.get("memory").map_or(0, |q| q.units());
    Some((rules, u64::try_from(bytes).unwrap_or(0)))
}

pub(super) fn node_config(
    parts: &Parts,
    pod: &k8s_openapi::api::core::v1::Pod,
    setup: &Setup,
) -> cri_config::Node {
    let (config, machine) = (&parts.config, &parts.machine);
    cri_config::Node {
        resolver: parts.resolver.borrow().clone(),
        cgroup_parent: setup.cgroup_parent.clone(),
        log_directory: parts.host.log_directory(pod).display().to_string(),
        seccomp_root: config.root_dir.join("seccomp").display().to_string(),
        seccomp_default: config.seccomp_default,
        memory: machine.memory,
        memory_qos: memory_qos(parts),
        cpu_period: config.cpu_period,
        page_sizes: machine.huge_pages.iter().map(|(size, _)| *size).collect(),
        group_oom: machine.cgroup_v2 && !config.single_process_oom_kill,
        swap: machine.swap.map(|bytes| cri_config::Swap {
            bytes: if parts.swaps { bytes } else { 0 },
            unified: machine.cgroup_v2,
        }),
        masked: machine.thermal.clone(),
        recursive_read_only: parts
            .features
            .borrow()
            .handler(&setup.handler)
            .recursive_read_only,
        handler: setup.handler.clone(),
        users: setup.users.clone(),
        pinning: parts.ledger.pinning().borrow().clone(),
    }
}
