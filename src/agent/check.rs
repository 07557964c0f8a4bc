//! `holdfast agent --check`: what a start would do, without starting. Nothing is changed.

use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;

use super::pod::sources;
use crate::config::Config;
use crate::core::pod;
use crate::cri::{CriClient, ListedPod, Runtime as _};
use crate::kubeapi::client::{chain, connect};

/// What a start would do to pods.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// They run and go on.
    kept: Vec<String>,
    /// They are started.
    started: Vec<String>,
    /// The runtime has them, and nobody wants them: they are ended.
    ended: Vec<String>,
}

/// Compares what is wanted with what runs. Pure.
fn plan(wanted: &[Pod], running: &[ListedPod]) -> Plan {
    let mut plan = Plan::default();
    for pod in wanted
        .iter()
        .filter(|p| !pod::is_mirror(p) && !pod::is_terminal(p))
    {
        let there = running.iter().any(|r| r.uid == pod::uid(pod));
        if there {
            plan.kept.push(pod::full_name(pod))
        } else {
            plan.started.push(pod::full_name(pod))
        }
    }
    for pod in running
        .iter()
        .filter(|r| !wanted.iter().any(|w| pod::uid(w) == r.uid))
    {
        plan.ended.push(format!("{}_{}", pod.name, pod.namespace));
    }
    for list in [&mut plan.kept, &mut plan.started, &mut plan.ended] {
        list.sort();
    }
    plan
}

/// Looks at everything that a start needs; the answer is a report for people. An error is what would stop the start, or
/// what makes it impossible to say.
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
    let runtime = CriClient::new(&config.runtime_endpoint, config.runtime_timeout, None)
        .map_err(anyhow::Error::msg)?;
    let version = runtime.version().await.map_err(|e| {
        anyhow::anyhow!(
            "the container runtime at {} does not answer: {e}",
            config.runtime_endpoint
        )
    })?;
    let _ = writeln!(report, "The runtime answers: {version}.");
    let mut wanted: Vec<Pod> = sources::once(config).map_err(anyhow::Error::msg)?;
    let _ = writeln!(report, "Static pods: {}.", wanted.len());
    match &config.kubeconfig {
        None => report.push_str("No kubeconfig: only static pods would run.\n"),
        Some(path) if config.bootstrap_kubeconfig.is_some() && !path.exists() => {
            report.push_str("There is no kubeconfig yet: a certificate would be asked for with the bootstrap kubeconfig first.\n");
            return Ok(report);
        }
        Some(path) => {
            let client = connect(path).await?;
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
    let running = runtime
        .list()
        .await
        .map_err(|e| anyhow::anyhow!("the runtime's pods cannot be listed: {e}"))?;
    let plan = plan(&wanted, &running);
    for (what, pods) in [
        ("would go on undisturbed", &plan.kept),
        ("would be started", &plan.started),
        (
            "would be ended: the runtime has them and nobody wants them",
            &plan.ended,
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
    use super::*;
    use serde_json::json;

    #[test]
    fn pods_are_kept_started_or_ended() {
        let pod = |name: &str, phase: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "status": {"phase": phase}})).expect("a pod")
        };
        let listed = |name: &str| ListedPod {
            uid: name.into(),
            name: name.into(),
            namespace: "n".into(),
            fingerprint: 0,
        };
        let plan = plan(
            &[
                pod("a", "Running"),
                pod("b", "Pending"),
                pod("c", "Succeeded"),
            ],
            &[listed("a"), listed("c"), listed("d")],
        );
        assert_eq!(
            plan,
            Plan {
                kept: vec!["a_n".into()],
                started: vec!["b_n".into()],
                ended: vec!["d_n".into()]
            }
        );
    }
}
