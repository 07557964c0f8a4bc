//! The node's own cgroups: limits for all pods and for QoS classes, and reservations for the system and for Kubernetes
//! (`pkg/kubelet/cm/qos_container_manager_linux.go`, `node_container_manager_linux.go`). Changes by other programs in
//! these cgroups, or in those of pods, are reverted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::time::Instant;

use super::ledger::LedgerHandle;
use super::{limits, size};
use crate::events::{Events, Kind};
use crate::pod::table::PodTable;
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::capacity;
use holdfast_core::node::cgroup_tree::{
    Group, PIDS, Rules, Supply, tree, with_allocated_resources,
};
use holdfast_core::pod;
use holdfast_core::pod::cgroup_values::{RestoredCgroup, Values};
use holdfast_core::pod::resources::Amounts;
use holdfast_core::quantity::Quantity;
use holdfast_host::{HostError, PodHost};
use holdfast_sys::machine::Machine;
use holdfast_sys::meter;

/// Collects changes for this time, as many pods may start or stop together.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Interval between updates without a change: the pod table lacks a granted resize until the API has it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(60);
/// Back-off after a cgroup could not be set.
const RETRY: Doubling = Doubling::new(Duration::from_secs(5), Duration::from_secs(60));
/// Back-off between reports of the same failure.
const REPORT_BACKOFF: Doubling = Doubling::new(Duration::from_secs(60), Duration::from_secs(3600));
/// After this time without a change by another program, a further change of the same file is reported again.
const REPORT_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// What setting the values of cgroups uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub machine: Arc<Machine>,
    /// The resources that pods may use on this node.
    pub allocatable: Amounts,
    pub host: Arc<dyn PodHost>,
    pub events: Events,
    pub ledger: LedgerHandle,
    pub table: watch::Receiver<PodTable>,
}

/// Applies the values, and reverts changes by other programs.
pub(super) async fn run(parts: &Parts) {
    tokio::join!(apply(parts), revert_changes(parts));
}

fn supply(parts: &Parts) -> Supply {
    let config = &parts.config;
    let mut capacity = capacity::capacity(&size(&parts.machine), limits(config));
    let (pids, _) = meter::processes();
    let pids = i64::try_from(pids).unwrap_or(i64::MAX);
    capacity.insert(PIDS.to_owned(), Quantity::from_units(pids));
    Supply {
        capacity,
        reserved: config.reserved.clone(),
        allocatable: parts.allocatable.clone(),
    }
}

/// The messages for events about a cgroup: for success and for failure. `None` for
/// the cgroup of a QoS class, which has no events.
fn event_messages(config: &Config, group: &Group) -> Option<(String, String)> {
    let rules = &config.enforcement;
    match group {
        Group::Pods | Group::Root if rules.limits_pods || *group == Group::Root => {
            let names = config.cgroup_root.split('/');
            let names = names.filter(|part| !part.is_empty());
            let all = (*group == Group::Pods).then_some("kubepods");
            let names: Vec<&str> = names.chain(all).collect();
            if names.is_empty() {
                return None;
            }
            Some((
                "Updated Node Allocatable limit across pods".to_owned(),
                format!("Failed to update Node Allocatable Limits {:?}", names),
            ))
        }
        Group::Reserved(name) => {
            let reserved = |whose: &str, rule: &Option<_>| {
                let rule: &holdfast_core::node::cgroup_tree::Reserved = rule.as_ref()?;
                (rule.cgroup == *name).then(|| {
                    let part = if rule.compressible_only {
                        " Compressible"
                    } else {
                        ""
                    };
                    let lower = whose.to_lowercase();
                    (
                        format!("Updated limits on {lower} reserved cgroup {name}"),
                        format!(
                            "Failed to enforce {whose} Reserved{part} Cgroup Limits on {name:?}"
                        ),
                    )
                })
            };
            reserved("System", &rules.system).or_else(|| reserved("Kube", &rules.kube))
        }
        Group::Pods | Group::Root | Group::Burstable | Group::BestEffort => None,
    }
}

/// The last report about a cgroup.
struct LastReport {
    /// The failure; `None` after a success.
    error: Option<HostError>,
    at: Instant,
    backoff: Doubling,
    again: Duration,
}

/// Reports changes in the state of a cgroup: the first success, a failure, and with back-off the same failure.
fn report_change(
    parts: &Parts,
    reports: &mut HashMap<String, LastReport>,
    group: &Group,
    error: Option<&HostError>,
) {
    let key = format!("{group:?}");
    let now = Instant::now();
    let last = reports.get_mut(&key);
    let is_known = last.as_ref().is_some_and(|t| t.error.as_ref() == error);
    let mut backoff = match last {
        Some(last) if is_known && (error.is_none() || now - last.at < last.again) => return,
        Some(last) if is_known => last.backoff,
        _ => REPORT_BACKOFF,
    };
    let first = !reports.contains_key(&key);
    let again = backoff.pause();
    let config = &parts.config;
    let event = |kind, message: String| {
        let reason = match kind {
            Kind::Normal => "NodeAllocatableEnforced",
            Kind::Warning => "FailedNodeAllocatableEnforcement",
        };
        parts.events.node(&config.node_name, kind, reason, message);
    };
    match (event_messages(config, group), error) {
        (messages, Some(error)) => {
            tracing::warn!(
                %error,
                ?group,
                "setting a cgroup of the node failed: pods may get more or less than they request; retrying"
            );
            if let Some((_, failure)) = messages {
                event(Kind::Warning, format!("{failure}: {error}"));
            }
        }
        (Some((success, _)), None) => event(Kind::Normal, success),
        (None, None) if first => {}
        (None, None) => tracing::info!(?group, "setting the cgroup of the node succeeded"),
    }
    let error = error.cloned();
    let new_report = LastReport {
        error,
        at: now,
        backoff,
        again,
    };
    reports.insert(key, new_report);
}

/// Applies the values of all cgroups, again whenever pods start or stop.
async fn apply(parts: &Parts) {
    let mut table = parts.table.clone();
    let supply = supply(parts);
    let rules: &Rules = &parts.config.enforcement;
    let (mut reports, mut pauses) = (HashMap::new(), RETRY);
    loop {
        let alive = {
            let table = table.borrow_and_update();
            let pods = table.iter().map(|known| &known.pod);
            pods.filter(|pod| !pod::is_terminal(pod)).cloned().collect()
        };
        let alive = with_allocated_resources(alive, &parts.ledger.pods().await);
        let alive = alive.iter().map(|p| &**p);
        let alive: Vec<&Pod> = alive.collect();
        let wanted: Vec<(Group, Values)> = tree(&supply, rules, &alive);
        let answers = parts.host.apply_tree(&wanted).await;
        let mut failed = false;
        for ((group, _), answer) in wanted.iter().zip(&answers) {
            failed |= answer.is_err();
            report_change(parts, &mut reports, group, answer.as_ref().err());
        }
        if !failed {
            pauses.reset();
        }
        let again = failed.then(|| Instant::now() + pauses.pause());
        tokio::select! {
            biased;
            Ok(()) = table.changed() => tokio::time::sleep(DEBOUNCE).await,
            () = tokio::time::sleep(REFRESH_INTERVAL) => {}
            () = async { match again { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {}
        }
    }
}

/// Reverts changes by other programs. Repeated changes are reported once.
async fn revert_changes(parts: &Parts) {
    let mut reported: HashMap<(String, String), Instant> = HashMap::new();
    loop {
        for mended in parts.host.restore_cgroups().await {
            let RestoredCgroup {
                cgroup,
                changes,
                error,
            } = mended;
            let now = Instant::now();
            reported.retain(|_, at| now - *at < REPORT_AGAIN_AFTER);
            let what = changes.iter().map(ToString::to_string);
            let what: Vec<String> = what.collect();
            let files = changes.into_iter().map(|change| change.file);
            let files: Vec<String> = match files.collect::<Vec<_>>() {
                none if none.is_empty() => vec![String::new()],
                files => files,
            };
            let mut is_new = false;
            for file in files {
                is_new |= reported.insert((cgroup.clone(), file), now).is_none();
            }
            let what = match what.join(", ") {
                none if none.is_empty() => "the cgroup was removed".to_owned(),
                what => what,
            };
            match (is_new, error) {
                (true, Some(error)) => {
                    tracing::warn!(
                        cgroup,
                        what,
                        error,
                        "another process changed a cgroup, and restoring it failed"
                    );
                }
                (true, None) => {
                    tracing::warn!(
                        cgroup,
                        what,
                        "another process changed a cgroup; the agent restores it now and after further changes"
                    );
                }
                (false, error) => {
                    tracing::debug!(
                        cgroup,
                        what,
                        error,
                        "another process changed a cgroup again"
                    );
                }
            }
        }
    }
}
