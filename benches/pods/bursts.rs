//! Bursts of pods: with a sidecar beside pods with two containers, and short pods as Jobs make them.

use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{PostParams, WatchEvent, WatchParams};
use serde_json::{Value, json};

use crate::{create_all, delete, p50};

/// How many pods start at once.
const AT_ONCE: usize = 20;
/// How often, taking turns.
const ROUNDS: usize = 3;

/// What was measured, in seconds.
pub struct Bursts {
    /// 20 pods with a sidecar and a container, created at once, until all are ready; the median.
    pub with_sidecar: f64,
    /// The same of pods with two containers.
    pub with_two: f64,
    /// 60 short pods, 20 at a time, until all have succeeded.
    pub short: f64,
    /// 6 short pods with a sidecar, 3 at a time.
    pub short_with_sidecar: f64,
}

impl Bursts {
    /// Prints what was measured.
    pub fn print(&self) {
        println!(
            "{AT_ONCE} pods at once, until all are ready, p50: {:.2} s with a sidecar and a container, {:.2} s with two containers, ratio {:.2} (mark: ≤ 1.1).",
            self.with_sidecar,
            self.with_two,
            self.with_sidecar / self.with_two
        );
        println!(
            "As a Job: 60 short pods, 20 at a time: {:.1} s; 6 with a sidecar, 3 at a time: {:.1} s (the kubelet on a real control plane: 13 s and 9 s; marks: half of it).",
            self.short, self.short_with_sidecar
        );
    }
}

/// A pod with these commands as containers, the first one as a sidecar or not.
fn pod(name: &str, image: &str, commands: &[&str], sidecar: bool) -> Pod {
    let container = |(i, command): (usize, &&str)| json!({"name": format!("c{i}"), "image": image, "command": ["busybox", "sh", "-c", command]});
    let mut containers: Vec<Value> = commands.iter().enumerate().map(container).collect();
    let mut spec = json!({"terminationGracePeriodSeconds": 1, "dnsPolicy": "Default", "restartPolicy": "Never"});
    if sidecar {
        let mut first = containers.remove(0);
        first["restartPolicy"] = json!("Always");
        spec["initContainers"] = json!([first]);
    }
    spec["containers"] = json!(containers);
    let pod = json!({"metadata": {"name": name, "labels": {"bench": "1"}}, "spec": spec});
    serde_json::from_value(pod).unwrap()
}

/// Runs until it is told to end, and ends then at once.
const SERVE: &str = "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done";

/// How long so many pods take until all are ready.
async fn until_ready(api: &Api<Pod>, image: &str, kind: &str, sidecar: bool) -> f64 {
    let made = |i: usize| {
        let name = format!("{kind}-{i}");
        pod(&name, image, &[SERVE, SERVE], sidecar)
    };
    let pods: Vec<Pod> = (0..AT_ONCE).map(made).collect();
    let took = create_all(api, &pods).await;
    let names: Vec<String> = (0..AT_ONCE).map(|i| format!("{kind}-{i}")).collect();
    delete(api, &names).await;
    took.as_secs_f64()
}

/// Creates a pod and waits until it has succeeded.
async fn to_its_end(api: &Api<Pod>, pod: Pod) {
    let name = pod.metadata.name.clone().unwrap();
    api.create(&PostParams::default(), &pod).await.unwrap();
    let own = WatchParams::default().fields(&format!("metadata.name={name}"));
    let mut events = api.watch(&own, "0").await.unwrap().boxed();
    loop {
        let next = tokio::time::timeout(Duration::from_secs(180), events.try_next());
        let event = next
            .await
            .expect("in time")
            .unwrap()
            .expect("the watch goes on");
        if let WatchEvent::Added(pod) | WatchEvent::Modified(pod) = event
            && pod.status.and_then(|s| s.phase).as_deref() == Some("Succeeded")
        {
            return;
        }
    }
}

/// How long `count` short pods take, of which so many run at a time.
async fn as_a_job(api: &Api<Pod>, pods: Vec<Pod>, at_a_time: usize) -> f64 {
    let names: Vec<String> = pods
        .iter()
        .filter_map(|p| p.metadata.name.clone())
        .collect();
    let begun = Instant::now();
    futures::stream::iter(pods)
        .for_each_concurrent(at_a_time, |pod| to_its_end(api, pod))
        .await;
    let took = begun.elapsed().as_secs_f64();
    delete(api, &names).await;
    took
}

/// Measures all of them.
pub async fn measure(api: &Api<Pod>, image: &str) -> Bursts {
    let (mut with_sidecar, mut with_two) = (vec![], vec![]);
    for round in 0..ROUNDS {
        with_two.push(until_ready(api, image, &format!("two-{round}"), false).await);
        with_sidecar.push(until_ready(api, image, &format!("sidecar-{round}"), true).await);
    }
    let short = (0..60).map(|i| pod(&format!("short-{i}"), image, &["true"], false));
    let beside = |i| pod(&format!("beside-{i}"), image, &[SERVE, "true"], true);
    Bursts {
        with_sidecar: p50(with_sidecar),
        with_two: p50(with_two),
        short: as_a_job(api, short.collect(), 20).await,
        short_with_sidecar: as_a_job(api, (0..6).map(beside).collect(), 3).await,
    }
}
