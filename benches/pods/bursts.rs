//! Bursts of pods: pods with a sidecar compared with pods with two containers, and short pods as in Jobs.

use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{PostParams, WatchEvent, WatchParams};
use serde_json::{Value, json};

use holdfast_cri::{CriClient, Runtime as _};

use crate::paper::Paper;
use crate::{create, create_all, delete, floor_burst, floor_create, floor_delete, p50, prepare};

/// Number of pods that start at once.
const AT_ONCE: usize = 20;
/// Number of rounds, which alternate.
const ROUNDS: usize = 3;
/// Number of short pods of a Job.
const SHORT: usize = 60;

/// The results, in seconds.
pub struct Bursts {
    /// 20 pods with a sidecar and a container, created at once, until all are ready; the median.
    pub with_sidecar: f64,
    /// The same for pods with two containers.
    pub with_two: f64,
    /// 60 short pods, 20 at a time, until all have succeeded; the median.
    pub short: f64,
    /// The same sandboxes and containers by bare calls, each until its container has exited; the median.
    pub floor_short: f64,
    /// 6 short pods with a sidecar, 3 at a time.
    pub short_with_sidecar: f64,
}

impl Bursts {
    /// Prints the results.
    pub fn print(&self) {
        println!(
            "{AT_ONCE} pods at once, until all are ready, p50: {:.2} s with a sidecar and a container, {:.2} s with two containers, ratio {:.2} (mark: ≤ 1.1).",
            self.with_sidecar,
            self.with_two,
            self.with_sidecar / self.with_two
        );
        println!(
            "As a Job: {SHORT} short pods, {AT_ONCE} at a time, p50: {:.1} s, floor {:.1} s, ratio {:.2}; 6 with a sidecar, 3 at a time: {:.1} s (the kubelet on a real control plane: 13 s and 9 s; marks: half of it).",
            self.short,
            self.floor_short,
            self.short / self.floor_short,
            self.short_with_sidecar
        );
    }
}

/// A pod with these commands as containers; with `sidecar`, the first one is a sidecar.
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

/// Runs until SIGTERM, and then exits at once.
const SERVE: &str = "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done";

/// Returns the time until [`AT_ONCE`] pods are ready.
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

/// Returns the time that these pods take when `at_a_time` of them run concurrently.
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

/// Pods per second when many start at once; medians.
pub struct Rates {
    /// Through the control plane and the agent.
    pub ours: f64,
    /// By bare calls.
    pub floor: f64,
    /// By the control plane alone, with a simulated node.
    pub control: f64,
}

impl Rates {
    /// Pods per second if the bare calls and the control plane worked one after the other.
    pub fn floor_and_control(&self) -> f64 {
        1.0 / (1.0 / self.floor + 1.0 / self.control)
    }
}

/// Measures the rates alternately, because a single burst is accurate only to a tenth on a shared machine.
pub async fn at_once(
    api: &Api<Pod>,
    (runtime, paper): (&CriClient, &Paper),
    count: usize,
    kind: &str,
) -> Rates {
    let (mut rates, mut floors, mut controls) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        floors.push(floor_burst(runtime, count, &format!("floor-{kind}-{round}")).await);
        let names: Vec<String> = (0..count).map(|i| format!("{kind}-{round}-{i}")).collect();
        rates.push(count as f64 / create(api, &names).await.as_secs_f64());
        delete(api, &names).await;
        // Sandboxes of the last round are removed a little after their pods.
        tokio::time::sleep(Duration::from_secs(2)).await;
        controls.push(count as f64 / paper.burst(&names).await);
    }
    Rates {
        ours: p50(rates),
        floor: p50(floors),
        control: p50(controls),
    }
}

/// The floor of a Job: the same number of sandboxes and containers by bare calls, [`AT_ONCE`] of them concurrently. A
/// slot is free when its container has exited. Exited containers are removed meanwhile, as the agent does.
async fn floor_job(runtime: &CriClient, image: &str, round: usize) -> f64 {
    let prepared: Vec<_> = (0..SHORT)
        .map(|i| {
            let (mut pod, dir) = prepare(&format!("floor-short-{round}-{i}"));
            let container = &mut pod.spec.as_mut().unwrap().containers[0];
            container.image = Some(image.to_owned());
            container.command = Some(["busybox", "sh", "-c", "true"].map(Into::into).into());
            (pod, dir)
        })
        .collect();
    let (removals, mut to_remove) = tokio::sync::mpsc::channel(SHORT);
    let begun = Instant::now();
    let lives = async {
        futures::stream::iter(&prepared)
            .for_each_concurrent(AT_ONCE, |(pod, dir)| async {
                let made = floor_create(runtime, pod, dir).await;
                // The runtime refuses this call once the container has exited.
                while runtime.reopen_log(&made.container).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(25)).await;
                }
                removals.send(made).await.unwrap();
            })
            .await;
        drop(removals);
        begun.elapsed().as_secs_f64()
    };
    let removed = async {
        let mut under_way = futures::stream::FuturesUnordered::new();
        loop {
            tokio::select! {
                made = to_remove.recv() => match made {
                    Some(made) => under_way.push(async move { floor_delete(runtime, &made).await }),
                    None => break,
                },
                Some(()) = under_way.next() => {}
            }
        }
        while under_way.next().await.is_some() {}
    };
    let (took, ()) = tokio::join!(lives, removed);
    took
}

/// Measures all bursts.
pub async fn measure(api: &Api<Pod>, runtime: &CriClient, image: &str) -> Bursts {
    let (mut with_sidecar, mut with_two) = (vec![], vec![]);
    for round in 0..ROUNDS {
        with_two.push(until_ready(api, image, &format!("two-{round}"), false).await);
        with_sidecar.push(until_ready(api, image, &format!("sidecar-{round}"), true).await);
    }
    let (mut shorts, mut floors) = (vec![], vec![]);
    for round in 0..ROUNDS {
        floors.push(floor_job(runtime, image, round).await);
        let name = |i| format!("short-{round}-{i}");
        let short = (0..SHORT).map(|i| pod(&name(i), image, &["true"], false));
        shorts.push(as_a_job(api, short.collect(), AT_ONCE).await);
    }
    let beside = |i| pod(&format!("beside-{i}"), image, &[SERVE, "true"], true);
    Bursts {
        with_sidecar: p50(with_sidecar),
        with_two: p50(with_two),
        short: p50(shorts),
        floor_short: p50(floors),
        short_with_sidecar: as_a_job(api, (0..6).map(beside).collect(), 3).await,
    }
}
