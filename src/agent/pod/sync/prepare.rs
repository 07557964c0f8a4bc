//! Steps 5 and 7: the pod's cgroup and directories, and how the runtime is to isolate it.

use std::borrow::Cow;
use std::sync::Arc;

use super::{Asset, Job, Result};
use crate::agent::Context;
use crate::core::fault::Fault;
use crate::core::pod;
use crate::core::pod::cri_config;
use crate::core::pod::journal::Step;
use crate::core::pod::memory_qos::MemoryQos;
use crate::core::pod::resize;
use crate::core::pod::users::Mappings;
use crate::core::pod::worker::Outcome;

/// What sandboxes and containers of the pod are made with.
pub struct Setup {
    /// Its cgroup in the driver's spelling; empty where pods have none.
    cgroup_parent: String,
    /// The runtime's handler; empty for the default one.
    pub handler: String,
    /// The ids of its user namespace, if it has one.
    users: Option<Mappings>,
}

impl Job {
    /// Before a sandbox is made: what it is made with, and the cgroup and directories that it needs.
    pub(super) async fn prepare(&self) -> Result<(Outcome, Option<Asset>)> {
        let (handler, users) = self.isolation().await?;
        let cgroup_parent = self.keep_in_order().await?;
        let setup = Arc::new(Setup {
            cgroup_parent,
            handler,
            users,
        });
        self.tools.setup.send_replace(Some(Arc::clone(&setup)));
        Ok((Outcome::Done, Some(Asset::Setup(setup))))
    }

    /// Keeps the cgroup and the directories of a pod that has a sandbox.
    pub(super) async fn upkeep(&self) -> Result<(Outcome, Option<Asset>)> {
        // It is known also where the upkeep fails.
        let setup = self.setup().await?.map(Asset::Setup);
        let kept = self.keep_in_order().await;
        let outcome = kept.map_or_else(Outcome::from, |_| Outcome::Done);
        Ok((outcome, setup))
    }

    /// What the pod's containers are made with: what [`Job::prepare`] found for its sandbox. Where an earlier agent made that,
    /// the runtime and the pod's directory have it. Nothing is looked up again: a RuntimeClass that was deleted since, or a
    /// runtime that no longer has user namespaces, keeps no container of a running pod from starting again.
    pub(super) async fn setup(&self) -> std::result::Result<Option<Arc<Setup>>, Fault> {
        let known = self.tools.setup.borrow().clone();
        let sandbox = self.observed.sandboxes.first().filter(|s| s.ready);
        let (None, Some(sandbox)) = (&known, sandbox) else {
            return Ok(known);
        };
        let (host, pod) = (&self.context().host, &self.pod);
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

    /// Makes the pod's cgroup and directories, where they are missing. The answer is the cgroup.
    async fn keep_in_order(&self) -> std::result::Result<String, Fault> {
        let (context, pod) = (self.context(), &self.pod);
        // A resize brings it to another size, and looks before at what is used.
        let owed = self.resizing.owes_cgroup(&resize::wanted(pod));
        let sized = self.resizing.cgroup.as_ref().filter(|_| owed);
        let sized = sized.map_or(Cow::Borrowed(&**pod), |c| Cow::Owned(resize::with(pod, c)));
        let make_cgroup = context.host.ensure_cgroup(&sized, self.cpu_limit());
        let make_cgroup = self.count_cgroup("create", make_cgroup);
        let cgroup_parent = self
            .log()
            .step(Step::Cgroup, "", make_cgroup)
            .await
            .map_err(|error| {
                let what = "unable to ensure pod container exists";
                self.warned("FailedCreatePodContainer", what, error)
            })?;
        let make_directories = context.host.make_directories(pod);
        self.log()
            .step(Step::Directories, "", make_directories)
            .await
            .map_err(|error| self.warned("Failed", "error making pod data directories", error))?;
        Ok(cgroup_parent)
    }

    /// Whether the pod's cgroup limits its CPU time: a container with processors for itself may use all of them.
    pub(super) fn cpu_limit(&self) -> bool {
        let pinning = self.context().ledger.pinning();
        let has_own = pinning.borrow().pod_has_own_cpus(pod::uid(&self.pod));
        !has_own
    }

    /// The runtime's handler that the pod asks for, and its user namespace's ids.
    async fn isolation(&self) -> Result<(String, Option<Mappings>)> {
        let (context, pod) = (self.context(), &self.pod);
        let spec = pod::spec(pod);
        let handler = match spec.runtime_class_name.as_deref().filter(|n| !n.is_empty()) {
            None => String::new(),
            Some(class) => context.api.runtime_handler(class).await.map_err(|e| {
                self.no_sandbox(Fault::later(format!(
                    "failed to get RuntimeClass {class:?}: {e}"
                )))
            })?,
        };
        if spec.host_users != Some(false) {
            return Ok((handler, None));
        }
        if !context.features.borrow().handler(&handler).user_namespaces {
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
        let users = context.host.user_mappings(pod).await;
        let users = users.map_err(|e| self.no_sandbox(e))?;
        Ok((handler, Some(users)))
    }

    /// What the node is for the pod's messages to the runtime.
    pub(super) async fn node(&self) -> std::result::Result<cri_config::Node, Fault> {
        let setup = self.setup().await?;
        let setup =
            setup.ok_or_else(|| Fault::later("the pod has no cgroup and directories yet"))?;
        Ok(node_config(self.context(), &self.pod, &setup))
    }
}

/// How memory is protected and throttled, with what pods may have of it.
fn memory_qos(context: &Context) -> Option<(MemoryQos, u64)> {
    let rules = context.config.enforcement.memory;
    let rules = rules.filter(|_| context.machine.cgroup_v2)?;
    let allocatable = context.allocatable();
    let bytes = allocatable.get("memory").map_or(0, |q| q.units());
    Some((rules, u64::try_from(bytes).unwrap_or(0)))
}

pub(super) fn node_config(
    context: &Context,
    pod: &k8s_openapi::api::core::v1::Pod,
    setup: &Setup,
) -> cri_config::Node {
    let (config, machine) = (&context.config, &context.machine);
    cri_config::Node {
        resolver: context.resolver.borrow().clone(),
        cgroup_parent: setup.cgroup_parent.clone(),
        log_directory: context.host.log_directory(pod).display().to_string(),
        seccomp_root: config.root_dir.join("seccomp").display().to_string(),
        seccomp_default: config.seccomp_default,
        memory: machine.memory,
        memory_qos: memory_qos(context),
        cpu_period: config.cpu_period,
        page_sizes: machine.huge_pages.iter().map(|(size, _)| *size).collect(),
        group_oom: machine.cgroup_v2 && !config.single_process_oom_kill,
        swap: machine.swap.map(|bytes| cri_config::Swap {
            bytes: if context.swaps() { bytes } else { 0 },
            unified: machine.cgroup_v2,
        }),
        masked: machine.thermal.clone(),
        recursive_read_only: context
            .features
            .borrow()
            .handler(&setup.handler)
            .recursive_read_only,
        handler: setup.handler.clone(),
        users: setup.users.clone(),
        pinning: context.ledger.pinning().borrow().clone(),
    }
}
