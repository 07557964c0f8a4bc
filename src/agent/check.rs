//! `holdfast agent --check`: reports what a start would do. Changes nothing.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use super::node::credentials;
use super::pod::{sources, static_uids};
use holdfast_config::Config;
use holdfast_core::pod::actions::{self, Health};
use holdfast_core::pod::full_name_of;
use holdfast_core::pod::observed::ObservedPod;
use holdfast_core::pod::probe::Probed;
use holdfast_core::pod::resize::Resizing;
use holdfast_core::pod::{self, resize};
use holdfast_cri::{ListedPod, Runtime as _};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::connect_as;
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::pace::Pace;

/// What a start would do to pods.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Running pods that keep all their containers.
    unchanged: Vec<String>,
    /// Containers of running pods that would be stopped, each with the reason.
    with_stopped_containers: Vec<String>,
    /// Pods that would be started.
    to_start: Vec<String>,
    /// Pods that only the runtime has; they would be stopped.
    to_stop: Vec<String>,
    /// Static pods whose manifest changed: they would be stopped and started under another uid.
    to_replace: Vec<String>,
}

/// Returns the containers of a running pod that a start would stop, with the reason for each. Pure.
fn containers_to_stop(pod: &Pod, observed: &ObservedPod) -> Vec<String> {
    let health = Health {
        probed: &Probed::default(),
        wanted: &resize::wanted(pod),
        resizing: &Resizing {
            actuated: resize::actuated(pod),
            ..Resizing::default()
        },
        stopped_to_restart: &BTreeSet::new(),
    };
    let actions = actions::compute(pod, observed, &health, |_| 0);
    if actions.kill_pod {
        let all = "all containers: the sandbox is no longer usable";
        return vec![format!("{} ({all})", pod::full_name(pod))];
    }
    let reasons = actions.restart_all.iter().chain(&actions.kill);
    reasons
        .map(|kill| format!("{} ({}: {})", pod::full_name(pod), kill.name, kill.message))
        .collect()
}

/// Compares desired pods with running pods. Pure.
fn plan(wanted: &[Pod], running: &[(ListedPod, ObservedPod)]) -> Plan {
    let mut plan = Plan::default();
    for pod in wanted
        .iter()
        .filter(|p| !pod::is_mirror(p) && !pod::is_terminal(p))
    {
        match running.iter().find(|(r, _)| r.uid == pod::uid(pod)) {
            Some((_, observed)) => match containers_to_stop(pod, observed) {
                none if none.is_empty() => plan.unchanged.push(pod::full_name(pod)),
                mut some => plan.with_stopped_containers.append(&mut some),
            },
            None => plan.to_start.push(pod::full_name(pod)),
        }
    }
    for (pod, _) in running
        .iter()
        .filter(|(r, _)| !wanted.iter().any(|w| pod::uid(w) == r.uid))
    {
        let name = full_name_of(&pod.namespace, &pod.name);
        match plan.to_start.iter().position(|started| *started == name) {
            Some(place) => plan.to_replace.push(plan.to_start.remove(place)),
            None => plan.to_stop.push(name),
        }
    }
    for list in [
        &mut plan.unchanged,
        &mut plan.with_stopped_containers,
        &mut plan.to_start,
        &mut plan.to_stop,
        &mut plan.to_replace,
    ] {
        list.sort();
    }
    plan
}

/// Checks everything that a start needs and returns a report for people. Returns an error if the start
/// would fail, or if the report cannot be completed.
pub async fn run(config: &Config) -> anyhow::Result<String> {
    let mut report = format!(
        "The configuration is valid: node {:?}, runtime {}.\n",
        config.node_name, config.runtime_endpoint
    );
    for field in &config.not_honoured {
        // Writing to a String cannot fail.
        let _ = writeln!(
            report,
            "Warning: {field} is read but not honoured by this version."
        );
    }
    for what in &config.unread {
        let _ = writeln!(report, "Warning: {what}.");
    }
    let runtime = super::assembly::runtime(config, None).map_err(anyhow::Error::msg)?;
    let version = runtime.version().await.map_err(|e| {
        anyhow::anyhow!(
            "the container runtime at {} does not answer: {e}",
            config.runtime_endpoint
        )
    })?;
    let _ = writeln!(report, "The runtime answers: {version}.");
    let unlisted = |e| anyhow::anyhow!("cannot list the runtime's pods: {e}");
    let mut running = vec![];
    for pod in runtime.list().await.map_err(unlisted)? {
        let observed = runtime.observe(&pod.uid).await.map_err(unlisted)?;
        running.push((pod, observed));
    }
    let statics = static_uids::of_observed(&running);
    let mut wanted: Vec<Pod> = sources::read_once(config, statics).map_err(anyhow::Error::msg)?;
    let _ = writeln!(report, "Static pods: {}.", wanted.len());
    match &config.kubeconfig {
        None => report.push_str("No kubeconfig: only static pods would run.\n"),
        Some(path) if config.bootstrap_kubeconfig.is_some() && !path.exists() => {
            report.push_str("The kubeconfig does not exist yet: the agent would first request a certificate with the bootstrap kubeconfig.\n");
            return Ok(report);
        }
        Some(path) => {
            let own = credentials::own_pair(config);
            let client = connect_as(path, own, None, Pace::default()).await?;
            let ours = ListParams::default().fields(&format!("spec.nodeName={}", config.node_name));
            let listed = Api::<Pod>::all(client)
                .list(&ours)
                .await
                .map_err(|e| anyhow::anyhow!("the apiserver does not answer: {}", chain(&e)))?;
            let _ = writeln!(
                report,
                "The apiserver answers: {} pods are bound to this node.",
                listed.items.len()
            );
            wanted.extend(listed.items);
        }
    }
    let plan = plan(&wanted, &running);
    for (what, pods) in [
        ("would keep running", &plan.unchanged),
        (
            "would keep running with restarted containers",
            &plan.with_stopped_containers,
        ),
        (
            "would be replaced under another uid: their manifests have changed since they started",
            &plan.to_replace,
        ),
        ("would be started", &plan.to_start),
        (
            "would be stopped: the runtime has them, but no source defines them",
            &plan.to_stop,
        ),
    ] {
        let names = if pods.is_empty() {
            String::new()
        } else {
            format!(": {}", pods.join(", "))
        };
        let _ = writeln!(report, "{} pods {what}{names}", pods.len());
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Container;
    use serde_json::json;

    use super::*;
    use holdfast_core::pod::container_hash;
    use holdfast_core::pod::observed::{self, ContainerState, Sandbox};

    /// A pod with one running container.
    fn running(hash: &str) -> ObservedPod {
        let at = jiff::Timestamp::UNIX_EPOCH;
        ObservedPod {
            sandboxes: vec![Sandbox {
                id: "s".into(),
                attempt: 0,
                ready: true,
                created_at: at,
                ips: vec!["10.0.0.1".into()],
                host_network: false,
                handler: String::new(),
            }],
            containers: vec![observed::Container {
                id: "i".into(),
                name: "c".into(),
                sandbox: "s".into(),
                attempt: 0,
                state: ContainerState::Running,
                created_at: at,
                started_at: Some(at),
                finished_at: None,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                image: String::new(),
                image_ref: String::new(),
                hash: Some(hash.into()),
                user: None,
                stop_signal: None,
                message_file: None,
            }],
        }
    }

    #[test]
    fn the_plan_keeps_starts_and_stops_pods() {
        let pod = |uid: &str, phase: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": &uid[..1], "namespace": "n", "uid": uid}, "status": {"phase": phase},
                "spec": {"containers": [{"name": "c", "image": "i:2"}]}})).expect("a pod")
        };
        let listed = |uid: &str, image: &str| {
            let of = Container {
                name: "c".into(),
                image: Some(image.into()),
                ..Container::default()
            };
            let pod = ListedPod {
                uid: uid.into(),
                name: uid[..1].into(),
                namespace: "n".into(),
                fingerprint: 0,
                is_live: true,
            };
            (pod, running(&container_hash(&of)))
        };
        let plan = plan(
            &[
                pod("a", "Running"),
                pod("b", "Pending"),
                pod("c", "Succeeded"),
                pod("e", "Running"),
                pod("f2", "Pending"),
            ],
            &[
                listed("a", "i:2"),
                listed("c", "i:2"),
                listed("d", "i:2"),
                listed("e", "i:1"),
                listed("f1", "i:2"),
            ],
        );
        assert_eq!(
            plan,
            Plan {
                unchanged: vec!["a_n".into()],
                to_start: vec!["b_n".into()],
                to_stop: vec!["d_n".into()],
                with_stopped_containers: vec![
                    "e_n (c: Container c definition changed, will be restarted)".into()
                ],
                to_replace: vec!["f_n".into()],
            }
        );
    }
}
