//! What `holdfast down` does with the Node of a machine that joined with `holdfast join`. While the agent still runs, it cordons the
//! Node and evicts its pods with the node's own credentials, which NodeRestriction permits. Only an administrator may delete a Node.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::messages;
use super::settings::Dirs;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::{code, connect};
use holdfast_kubeapi::failure::chain;
use holdfast_sys::file;

/// How long the API may take to answer a request.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How long evicted pods may take to stop.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of the file with the Node's name, in bytes; a name has at most 253.
const MAX_NAME: u64 = 1024;
/// Interval at which the remaining pods are listed.
const POLL: Duration = Duration::from_millis(500);

/// The file with the name of the Node of a machine that has joined.
fn name_file(dirs: &Dirs) -> PathBuf {
    dirs.agent().join("node-name")
}

/// The file of a machine whose Node was cordoned by `down`.
fn cordoned_file(dirs: &Dirs) -> PathBuf {
    dirs.agent().join("cordoned")
}

/// Records that this machine has joined as `node`.
pub(super) fn record(dirs: &Dirs, node: &str) -> anyhow::Result<()> {
    Ok(file::replace(&name_file(dirs), node.as_bytes())?)
}

fn forget_cordon(dirs: &Dirs) -> anyhow::Result<()> {
    let path = cordoned_file(dirs);
    file::remove(&path).with_context(|| format!("{} cannot be removed", path.display()))
}

/// Sends a request. The error is a text for the user.
async fn in_time<T>(request: impl Future<Output = Result<T, kube::Error>>) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(API_TIMEOUT, request).await;
    let answer = answer.context("the API does not answer in time")?;
    answer.map_err(|error| anyhow::anyhow!("{}", chain(&error)))
}

async fn set_unschedulable(client: &Client, node: &str, value: bool) -> Result<(), kube::Error> {
    let patch = json!({"spec": {"unschedulable": value.then_some(true)}});
    let api: Api<Node> = Api::all(client.clone());
    let patched = api
        .patch(node, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    patched.map(drop)
}

/// Lets the scheduler use the node again, if `down` has cordoned it. A Node that an administrator cordoned stays cordoned.
pub(super) async fn uncordon(client: &Client, dirs: &Dirs, node: &str) -> anyhow::Result<()> {
    if !cordoned_file(dirs).exists() {
        return Ok(());
    }
    let done = set_unschedulable(client, node, false).await;
    done.map_err(|error| anyhow::anyhow!(messages::not_uncordoned(node, &chain(&error))))?;
    forget_cordon(dirs)
}

/// What `down` does with a pod of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Treatment {
    /// Its controller creates it on another node.
    Evict,
    /// It stops already.
    Wait,
    /// No controller would create it again, so only the removal of the Node deletes it.
    Keep,
    /// A finished pod, or a pod of this node alone (static pods and DaemonSets).
    Ignore,
}

fn treatment(pod: &Pod) -> Treatment {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let owner = pod
        .owner_references()
        .iter()
        .find(|o| o.controller == Some(true));
    let kind = owner.map(|o| o.kind.as_str());
    match kind {
        Some("Node" | "DaemonSet") => Treatment::Ignore,
        // Also a finished one: only its agent removes it from the API.
        _ if pod.metadata.deletion_timestamp.is_some() => Treatment::Wait,
        _ if matches!(phase, Some("Succeeded" | "Failed")) => Treatment::Ignore,
        Some(_) => Treatment::Evict,
        None => Treatment::Keep,
    }
}

/// Requests the eviction of a pod. A disruption budget may refuse it for now (429).
async fn evict(client: &Client, pod: &Pod) -> Result<(), kube::Error> {
    let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}});
    match api
        .create_below::<Value, Value>(&name, "eviction", &eviction)
        .await
    {
        Err(error) if !matches!(code(&error), Some(404 | 429)) => Err(error),
        _ => Ok(()),
    }
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Lists the node's pods with their treatment.
async fn pods(client: &Client, node: &str) -> anyhow::Result<Vec<(Pod, Treatment)>> {
    let which = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let api: Api<Pod> = Api::all(client.clone());
    let listed = in_time(api.list(&which)).await?;
    Ok(listed
        .items
        .into_iter()
        .map(|pod| {
            let treatment = treatment(&pod);
            (pod, treatment)
        })
        .collect())
}

/// Evicts the node's pods and waits until they have stopped. Returns the names of those that stay.
async fn evict_all(client: &Client, node: &str) -> anyhow::Result<Vec<String>> {
    let deadline = tokio::time::Instant::now() + EVICTION_TIMEOUT;
    loop {
        let pods = pods(client, node).await?;
        let leaves = |t: Treatment| matches!(t, Treatment::Evict | Treatment::Wait);
        let is_late = tokio::time::Instant::now() > deadline;
        if is_late || !pods.iter().any(|(_, t)| leaves(*t)) {
            let stay = pods.iter().filter(|(_, t)| *t != Treatment::Ignore);
            return Ok(stay.map(|(pod, _)| full_name(pod)).collect());
        }
        for (pod, _) in pods.iter().filter(|(_, t)| *t == Treatment::Evict) {
            in_time(evict(client, pod)).await?;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// A machine that leaves its cluster.
pub(super) struct Leaving {
    node: String,
    admin: Option<PathBuf>,
    /// What `down` reports about the node.
    reports: Vec<String>,
}

impl Leaving {
    /// Reads whether this machine has joined; `None` if not. `admin` is the kubeconfig of an administrator.
    pub(super) fn read(dirs: &Dirs, admin: Option<PathBuf>) -> anyhow::Result<Option<Leaving>> {
        let path = name_file(dirs);
        let node = file::read_text_if_there(&path, MAX_NAME)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        Ok(node.map(|node| Leaving {
            node,
            admin,
            reports: vec![],
        }))
    }

    /// Cordons the node and evicts its pods. A failure is reported and does not keep the machine from stopping.
    pub(super) async fn drain(&mut self, dirs: &Dirs, agent_runs: bool) {
        match self.try_drain(dirs, agent_runs).await {
            Ok(stay) if stay.is_empty() => {}
            Ok(stay) => self.reports.push(messages::pods_stay(&self.node, &stay)),
            Err(error) => {
                let why = format!("{error:#}");
                self.reports.push(messages::not_drained(&self.node, &why));
            }
        }
    }

    async fn try_drain(&self, dirs: &Dirs, agent_runs: bool) -> anyhow::Result<Vec<String>> {
        let client = connect(&dirs.agent().join("kubeconfig")).await?;
        let api: Api<Node> = Api::all(client.clone());
        let Some(node) = in_time(api.get_opt(&self.node)).await? else {
            return Ok(vec![]);
        };
        if node
            .spec
            .is_none_or(|spec| spec.unschedulable != Some(true))
        {
            in_time(set_unschedulable(&client, &self.node, true)).await?;
            file::replace(&cordoned_file(dirs), b"")?;
        }
        // Without the agent, evicted pods would stay Terminating.
        match agent_runs {
            true => evict_all(&client, &self.node).await,
            false => Ok(vec![]),
        }
    }

    /// Removes the Node, whose agent has stopped. Returns the lines for the user.
    pub(super) async fn finish(mut self, dirs: &Dirs) -> Vec<String> {
        let Some(admin) = self.admin.take() else {
            self.reports.push(messages::node_stays(&self.node));
            return self.reports;
        };
        let report = match self.delete_node(&admin).await {
            Ok(()) => messages::node_removed(&self.node),
            Err(error) => messages::node_not_removed(&self.node, &format!("{error:#}")),
        };
        self.reports.push(report);
        // A Node that is created again is not cordoned.
        if let Err(error) = forget_cordon(dirs) {
            self.reports.push(format!("{error:#}"));
        }
        self.reports
    }

    async fn delete_node(&self, admin: &Path) -> anyhow::Result<()> {
        let api: Api<Node> = Api::all(connect(admin).await?);
        in_time(async {
            match api.delete(&self.node, &DeleteParams::default()).await {
                Err(error) if code(&error) != Some(404) => Err(error),
                _ => Ok(()),
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_with_a_controller_are_evicted() {
        let owned = |kind: &str| json!({"ownerReferences": [{"apiVersion": "v1", "kind": kind, "name": "o", "uid": "u", "controller": true}]});
        let deleted = {
            let mut metadata = owned("ReplicaSet");
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            metadata
        };
        let cases = [
            (owned("ReplicaSet"), "Running", Treatment::Evict),
            (owned("Job"), "Pending", Treatment::Evict),
            (owned("Job"), "Succeeded", Treatment::Ignore),
            (owned("DaemonSet"), "Running", Treatment::Ignore),
            (owned("Node"), "Running", Treatment::Ignore),
            (deleted.clone(), "Running", Treatment::Wait),
            (deleted, "Failed", Treatment::Wait),
            (json!({}), "Running", Treatment::Keep),
            (json!({}), "Failed", Treatment::Ignore),
        ];
        for (metadata, phase, expected) in cases {
            let pod = json!({"metadata": metadata, "status": {"phase": phase}});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            assert_eq!(treatment(&pod), expected, "{metadata} {phase}");
        }
    }
}
