//! What is counted as it happens, under the kubelet's names (kubelet spec, chapter 18).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use kube::ResourceExt as _;
use tokio::time::Instant;

use crate::core::lock::lock;
use crate::core::node::shutdown::Times;
use crate::core::pod;
use crate::core::pod::resize::{Asked, Infeasible};
use crate::core::serving::exposition::{Family, Page, Registry};
use crate::core::volume::selinux::{self, Admission, Admissions};

mod families;

pub use families::family;
use families::*;

/// The size of an image as metrics show it.
fn size_class(bytes: u64) -> &'static str {
    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;
    let classes = [
        (10 * MB, "0-10MB"),
        (100 * MB, "10MB-100MB"),
        (500 * MB, "100MB-500MB"),
        (GB, "500MB-1GB"),
        (5 * GB, "1GB-5GB"),
        (10 * GB, "5GB-10GB"),
        (20 * GB, "10GB-20GB"),
        (30 * GB, "20GB-30GB"),
        (40 * GB, "30GB-40GB"),
        (60 * GB, "40GB-60GB"),
        (100 * GB, "60GB-100GB"),
    ];
    classes
        .into_iter()
        .find(|(most, _)| bytes <= *most)
        .map_or("GT100GB", |(_, name)| name)
}

/// How long a pod's start took, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct PodStart {
    /// Since the agent saw it first.
    pub seen: f64,
    /// Since it was created.
    pub created: f64,
    /// What of it went into images.
    pub images: f64,
    /// Whether it has storage of its own, whose time is not ours.
    pub stateful: bool,
    /// Whether it has a network of its own.
    pub network: bool,
}

/// A probe of a container.
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    /// The container, its pod's namespace and name, the pod's uid.
    pub of: [&'a str; 4],
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'a str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'a str,
    /// How long the answer took.
    pub took: Duration,
}

/// What was done with a volume.
#[derive(Debug, Clone, Copy)]
pub struct VolumeOperation<'a> {
    /// `volume_mount`, for instance.
    pub name: &'a str,
    /// Its plugin, of a driver's volume with the driver.
    pub plugin: &'a str,
    /// Whether a driver has taken over its kind.
    pub is_migrated: bool,
    /// Whether it failed.
    pub has_failed: bool,
    /// How long it took.
    pub took: Duration,
}

/// The volumes of a pod, each by its plugin.
#[derive(Debug, Clone, Default)]
pub struct PodVolumes {
    /// Those that it is to have; `N/A` for one whose plugin is not known yet.
    pub desired: Vec<String>,
    /// Those that are set up.
    pub actual: Vec<String>,
}

fn seconds(at: Timestamp) -> f64 {
    at.as_duration().as_secs_f64()
}

/// What is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    /// The volumes of pods, by uid.
    volumes: Mutex<BTreeMap<String, PodVolumes>>,
    /// The labels that volumes are wanted with.
    labels: Mutex<Admissions>,
    /// Pods that are gone and have left something, and those of them of which it could not be removed.
    orphans: Mutex<(usize, usize)>,
    /// When the node was to be registered first, and when it was, in seconds since 1970.
    registration: Mutex<(Option<f64>, Option<f64>)>,
    own: Mutex<Registry>,
    probes: Mutex<Registry>,
    /// The uids of pods with probes, by namespace and name.
    probed: Mutex<BTreeMap<(String, String), BTreeSet<String>>>,
    /// When the machine was shut down last, or is now.
    shutdown: Mutex<Times>,
}

impl Metrics {
    fn with(&self, work: impl FnOnce(&mut Registry)) {
        work(&mut lock(&self.own));
    }

    /// Counts.
    pub fn count(&self, family: Family, labels: &[&str], by: u64) {
        self.with(|r| r.count(family, labels, by));
    }

    /// Observes.
    pub fn observe(&self, family: Family, bounds: &'static [f64], labels: &[&str], value: f64) {
        self.with(|r| r.observe(family, bounds, labels, value));
    }

    /// A pod runs.
    pub fn pod_started(&self, start: PodStart) {
        self.with(|r| {
            r.observe(POD_START, POD_STARTS, &[], start.seen);
            r.observe(POD_START_TOTAL, POD_STARTS, &[], start.created);
            let without_images = (start.created - start.images).max(0.0);
            if !start.stateful {
                r.observe(POD_START_SLI, POD_STARTS, &[], without_images);
            }
            if start.network && r.get(FIRST_NETWORK).is_none() {
                r.set(FIRST_NETWORK, without_images);
            }
        });
    }

    /// A worker has done a turn for its pod.
    pub fn worked(&self, operation: &str, took: Duration) {
        self.with(|r| r.observe(WORKER, USUAL, &[operation], took.as_secs_f64()));
    }

    /// A status has reached the API, so long after it was wanted.
    pub fn status_written(&self, took: Duration) {
        self.with(|r| r.observe(STATUS, STATUSES, &[], took.as_secs_f64()));
    }

    /// A sandbox was made, or not.
    pub fn sandbox(&self, handler: &str, own_users: bool, refused: bool, took: Duration) {
        self.with(|r| {
            if own_users {
                r.count(USER_NAMESPACES, &[], 1);
                r.count(USER_NAMESPACES_ERRORS, &[], u64::from(refused));
            }
            r.observe(SANDBOX, USUAL, &[handler], took.as_secs_f64());
            r.count(SANDBOX_ERRORS, &[handler], u64::from(refused));
            r.count(STARTED_PODS, &[], 1);
            r.count(STARTED_PODS_ERRORS, &[], u64::from(refused));
        });
    }

    /// A container was started, or failed for this reason.
    pub fn container_started(&self, kind: &str, failed: Option<&str>) {
        self.with(|r| {
            r.count(STARTED, &[kind], 1);
            if let Some(code) = failed {
                r.count(STARTED_ERRORS, &[kind, code], 1);
            }
        });
    }

    /// A pod's status changes: containers that end with it are counted, each once.
    pub fn containers_ended(&self, before: Option<&PodStatus>, now: &PodStatus) {
        type List = fn(&PodStatus) -> &Option<Vec<ContainerStatus>>;
        let lists: [(&str, List); 3] = [
            ("init_container", |s| &s.init_container_statuses),
            ("container", |s| &s.container_statuses),
            ("ephemeral_container", |s| &s.ephemeral_container_statuses),
        ];
        let end = |c: &ContainerStatus| c.state.as_ref().and_then(|s| s.terminated.clone());
        for (kind, list) in lists {
            let had_ended = |name: &str| {
                let mut known = before.and_then(|b| list(b).as_ref()).into_iter().flatten();
                known.any(|c| c.name == name && end(c).is_some())
            };
            for container in list(now).iter().flatten() {
                if let Some(end) = end(container).filter(|_| !had_ended(&container.name)) {
                    let labels = [
                        kind,
                        &end.exit_code.to_string(),
                        end.reason.as_deref().unwrap_or_default(),
                    ];
                    self.with(|r| r.count(TERMINATED, &labels, 1));
                }
            }
        }
    }

    /// A container is to have other resources than before.
    pub fn resize_asked(&self, asked: &[Asked]) {
        self.with(|r| {
            for asked in asked {
                let labels = [asked.resource, asked.of, asked.operation];
                r.count(RESIZES, &labels, 1);
            }
        });
    }

    /// A resize that waited for room has got it.
    pub fn deferred_resize_accepted(&self, trigger: &str) {
        self.with(|r| r.count(DEFERRED_ACCEPTED, &[trigger], 1));
    }

    /// A pod cannot have other sizes while it runs: a manager forbids it, or the node is too small.
    pub fn resize_infeasible(&self, cause: Infeasible) {
        self.with(|r| r.count(INFEASIBLE, &[cause.detail()], 1));
    }

    /// So many pods came back under the uid of one that had to end first.
    pub fn pods_restarted(&self, is_static: bool, count: u64) {
        let labels = [if is_static { "true" } else { "" }];
        self.with(|r| r.count(RESTARTED, &labels, count));
    }

    /// So many pods were found that only the runtime has.
    pub fn pods_orphaned(&self, count: u64) {
        self.with(|r| r.count(ORPHANED, &[], count));
    }

    /// A pod's containers were resized, or could not be.
    pub fn resized(&self, done: bool, took: Duration) {
        let labels = [if done { "true" } else { "false" }];
        let took = took.as_secs_f64() * 1000.0;
        self.with(|r| r.observe(RESIZE_MS, RESIZING, &labels, took));
    }

    /// A container is to have so many images as volumes.
    pub fn image_volumes(&self, count: u64) {
        self.with(|r| r.count(IMAGE_VOLUMES, &[], count));
    }

    /// It was created with them.
    pub fn image_volumes_mounted(&self, count: u64) {
        self.with(|r| r.count(IMAGE_VOLUMES_MOUNTED, &[], count));
    }

    /// A lifecycle hook over HTTPS was answered over plain HTTP.
    pub fn hook_in_plain_http(&self) {
        self.with(|r| r.count(HOOKS_IN_PLAIN_HTTP, &[], 1));
    }

    /// A sleep hook was ended before its time.
    pub fn sleep_cut(&self) {
        self.with(|r| r.count(SLEEPS_CUT, &[], 1));
    }

    /// So many renewals of the client's certificate, or of the server's, have failed.
    pub fn renewals_failed(&self, client: bool, by: u64) {
        let of = if client {
            CLIENT_RENEWALS
        } else {
            SERVER_RENEWALS
        };
        self.with(|r| r.count(of, &[], by));
    }

    /// The podresources API was asked in its version `v1alpha1`, of which the kubelet counts requests of any kind only.
    pub fn pod_resources_v1alpha1(&self) {
        let [all, ..] = POD_RESOURCES;
        self.with(|r| r.count(all, &["v1alpha1"], 1));
    }

    /// The podresources API was asked: `list`, `get` or `get_allocatable`.
    pub fn pod_resources(&self, verb: &str, found: bool) {
        self.with(|r| {
            for family in POD_RESOURCES {
                let of = family.name.rsplit_once("requests_").map(|(_, of)| of);
                if of == Some("total") || of == Some(verb) {
                    r.count(family, &["v1"], 1);
                }
            }
            r.count(POD_RESOURCES_ERRORS, &["v1"], u64::from(!found));
        });
    }

    /// The node is to be registered, at `now`.
    pub fn node_registering(&self, now: Timestamp) {
        lock(&self.registration).0.get_or_insert(seconds(now));
    }

    /// The node was not known to the API and is registered now. The machine and the agent have started then.
    pub fn node_registered(&self, now: Timestamp, machine: Timestamp, agent: Timestamp) {
        let mut registration = lock(&self.registration);
        let (Some(tried), None) = *registration else {
            return;
        };
        registration.1 = Some(seconds(now));
        self.with(|r| {
            r.set(STARTUP_BEFORE, seconds(agent) - seconds(machine));
            r.set(STARTUP_TRIED, tried - seconds(agent));
            r.set(STARTUP_REGISTERED, seconds(now) - tried);
        });
    }

    /// The node is ready. How long that took is told of a node that was registered anew, and once.
    pub fn node_ready(&self, now: Timestamp, machine: Timestamp) {
        let Some(registered) = lock(&self.registration).1 else {
            return;
        };
        self.with(|r| {
            if r.get(STARTUP).is_none() {
                r.set(STARTUP_READY, seconds(now) - registered);
                r.set(STARTUP, seconds(now) - seconds(machine));
            }
        });
    }

    /// A pod was not taken.
    pub fn rejected(&self, reason: &str) {
        self.with(|r| r.count(REJECTED, &[reason], 1));
    }

    /// A pod was ended for another.
    pub fn preempted(&self, signal: &str) {
        self.with(|r| r.count(PREEMPTED, &[signal], 1));
    }

    /// A pod was ended for what it used.
    pub fn evicted(&self, signal: &str) {
        self.with(|r| r.count(EVICTED, &[signal], 1));
    }

    /// The machine is shut down, or was the last time.
    pub fn shut_down(&self, times: Times) {
        *lock(&self.shutdown) = times;
    }

    /// When the machine was shut down last, as far as that is known.
    pub fn shutdown(&self) -> Times {
        *lock(&self.shutdown)
    }

    /// A pod was chosen to go by figures that are so old.
    pub fn eviction_decided(&self, signal: &str, age: Duration) {
        self.with(|r| r.observe(EVICTION_AGE, USUAL, &[signal], age.as_secs_f64()));
    }

    /// An image of so many bytes was pulled.
    pub fn pulled(&self, bytes: u64, took: Duration) {
        self.with(|r| r.observe(PULLED, PULLS, &[size_class(bytes)], took.as_secs_f64()));
    }

    /// An image was removed, for `space` or for `age`.
    pub fn collected(&self, reason: &str) {
        self.with(|r| r.count(COLLECTED, &[reason], 1));
    }

    /// Something was done with a volume, or not.
    pub fn volume(&self, operation: VolumeOperation<'_>) {
        let status = match operation.has_failed {
            true => "fail-unknown",
            false => "success",
        };
        let migrated = match operation.is_migrated {
            true => "true",
            false => "false",
        };
        let labels = [migrated, operation.name, status, operation.plugin];
        self.with(|r| r.observe(STORAGE, STORING, &labels, operation.took.as_secs_f64()));
    }

    /// A volume is there, so long after its pod asked for it first.
    pub fn volume_ready(&self, plugin: &str, took: Duration) {
        let labels = [plugin, "overall_volume_mount"];
        self.with(|r| r.observe(STORAGE_TOTAL, STORING, &labels, took.as_secs_f64()));
    }

    /// So many volumes stood on the disk when the agent started, and of so many it cannot be told what they are.
    pub fn reconstructed(&self, volumes: u64, unknown: u64) {
        self.with(|r| {
            r.count(RECONSTRUCTED, &[], volumes);
            r.count(RECONSTRUCTED_ERRORS, &[], unknown);
            r.count(FORCE_CLEANED, &[], 0);
            r.count(FORCE_CLEANED_ERRORS, &[], 0);
        });
    }

    /// So many volumes of which it cannot be told what they are were cleared up for a pod that is gone, or could not be.
    pub fn force_cleaned(&self, volumes: u64, has_failed: bool) {
        self.with(|r| {
            r.count(FORCE_CLEANED, &[], volumes);
            r.count(
                FORCE_CLEANED_ERRORS,
                &[],
                if has_failed { volumes } else { 0 },
            );
        });
    }

    /// Pods that are gone have left something: how many, and of how many it could not be removed yet.
    pub fn orphans(&self, found: usize, failed: usize) {
        *lock(&self.orphans) = (found, failed);
    }

    /// How many pods that are gone had left something at the last look, and of how many it could not be removed yet.
    #[must_use]
    pub fn orphaned(&self) -> (usize, usize) {
        *lock(&self.orphans)
    }

    /// What a pod has of volumes now.
    pub fn pod_has_volumes(&self, uid: &str, volumes: PodVolumes) {
        lock(&self.volumes).insert(uid.to_owned(), volumes);
    }

    /// A pod's volumes are given back.
    pub fn pod_has_no_volumes(&self, uid: &str) {
        lock(&self.volumes).remove(uid);
        lock(&self.labels).forget(uid);
    }

    /// A pod's containers need several labels for one volume, of this access mode.
    pub fn several_labels(&self, access_mode: &str, is_error: bool) {
        let family = SELINUX_POD[usize::from(!is_error)];
        self.with(|r| r.add(family, &[access_mode], 1.0));
    }

    /// A pod wants a volume of this plugin and access mode with a label, or without one. Where the label has to be the one
    /// that other pods have it with, it is an error if it is not.
    pub fn labelled(
        &self,
        uid: &str,
        volume: &str,
        label: Option<&str>,
        [plugin, access_mode]: [&str; 2],
    ) -> Admission {
        let is_strict = access_mode == selinux::ALONE;
        let admission = lock(&self.labels).admit(volume, uid, label, is_strict);
        let family = match &admission {
            Admission::New if label.is_some() => SELINUX_ADMITTED,
            Admission::Conflict(_) => SELINUX_VOLUME[usize::from(!is_strict)],
            Admission::New | Admission::Same => return admission,
        };
        self.with(|r| r.add(family, &[plugin, access_mode], 1.0));
        admission
    }

    /// How many volumes there are, by state and plugin.
    #[must_use]
    pub fn volumes(&self) -> BTreeMap<(&'static str, String), usize> {
        let mut all = BTreeMap::new();
        for pod in lock(&self.volumes).values() {
            let desired = pod.desired.iter().map(|p| ("desired_state_of_world", p));
            let actual = pod.actual.iter().map(|p| ("actual_state_of_world", p));
            for (state, plugin) in desired.chain(actual) {
                *all.entry((state, plugin.clone())).or_default() += 1;
            }
        }
        all
    }

    /// A driver has answered a call, with gRPC's code.
    pub fn csi(&self, driver: &str, method: &str, code: &str, took: Duration) {
        let method = format!("/csi.v1.Node/{method}");
        let labels = [driver, code, &method, "false"];
        self.with(|r| r.observe(CSI, STORING, &labels, took.as_secs_f64()));
    }

    /// A device plugin wants to be registered.
    pub fn device_plugin_registered(&self, resource: &str) {
        self.with(|r| r.count(DEVICE_PLUGINS, &[resource], 1));
    }

    /// A device plugin was asked for what a container needs, and has answered or not.
    pub fn device_allocated(&self, resource: &str, took: Duration) {
        self.with(|r| r.observe(DEVICE_ALLOCATION, USUAL, &[resource], took.as_secs_f64()));
    }

    /// A request to an apiserver was answered; without a code it was not.
    pub fn requested(&self, method: &str, host: &str, code: Option<u16>, took: Duration) {
        let code = code.map_or_else(|| "<error>".to_owned(), |c| c.to_string());
        self.with(|r| {
            r.count(CLIENT, &[&code, method, host], 1);
            let labels = [host, method];
            r.observe(CLIENT_SECONDS, REQUESTS, &labels, took.as_secs_f64());
        });
    }

    /// A command or port is served over a WebSocket.
    pub fn websocket(&self, what: &str) {
        self.with(|r| r.count(WEBSOCKETS, &[what], 1));
    }

    /// A step of a pod's life has ended: `done`, `failed` or `dropped`.
    pub fn step(&self, step: &str, result: &str, took: Duration) {
        self.with(|r| r.observe(STEPS, STEP, &[step, result], took.as_secs_f64()));
    }

    /// A call to the runtime has ended.
    pub fn runtime(&self, operation: &str, refused: bool, took: Duration) {
        self.with(|r| {
            r.count(RUNTIME_TOTAL, &[operation], 1);
            r.count(RUNTIME_ERRORS, &[operation], u64::from(refused));
            r.observe(RUNTIME_SECONDS, RUNTIME, &[operation], took.as_secs_f64());
        });
    }

    /// Work on a pod with so many containers begins, so long after the agent saw it first.
    pub fn pod_begun(&self, containers: usize, after: f64) {
        self.with(|r| {
            r.observe(CONTAINERS, COUNTS, &[], containers as f64);
            r.observe(WORKER_START, USUAL, &[], after);
        });
    }

    /// Waits until a pod's cgroup is made (`create`), changed (`update`) or removed (`destroy`).
    pub async fn cgroup<T>(&self, operation: &str, work: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let done = work.await;
        let took = begun.elapsed().as_secs_f64();
        self.with(|r| r.observe(CGROUPS, USUAL, &[operation], took));
        done
    }

    /// The runtime's pods were listed, at `now` in seconds since 1970.
    pub fn listed(&self, now: f64, took: Duration, since_last: Option<Duration>) {
        self.with(|r| {
            r.set(LISTED, now);
            r.observe(RELIST, USUAL, &[], took.as_secs_f64());
            if let Some(since) = since_last {
                r.observe(INTERVAL, USUAL, &[], since.as_secs_f64());
            }
        });
    }

    /// Counts a request over HTTP, and that it is being answered until what this gives is dropped. `server` is `readwrite`
    /// or `readonly`.
    pub fn http(
        self: &Arc<Self>,
        method: &'static str,
        path: &'static str,
        server: &'static str,
        long: bool,
    ) -> Answering {
        let long = if long { "true" } else { "false" };
        let labels = [method, path, server, long];
        self.with(|r| {
            r.count(HTTP, &labels, 1);
            r.add(HTTP_NOW, &labels, 1.0);
        });
        Answering {
            metrics: Arc::clone(self),
            labels,
            begun: Instant::now(),
        }
    }

    /// A probe has an answer. How long it took counts where it did not fail, as in the kubelet.
    pub fn probed(&self, probe: Probe<'_>) {
        let [container, namespace, pod, uid] = probe.of;
        let labels = [container, namespace, pod, uid, probe.kind, probe.result];
        let mut probes = lock(&self.probes);
        probes.count(PROBES, &labels, 1);
        let key = (namespace.to_owned(), pod.to_owned());
        let mut probed = lock(&self.probed);
        probed.entry(key).or_default().insert(uid.to_owned());
        if probe.result != "failed" {
            let labels = [container, namespace, pod, probe.kind];
            probes.observe(PROBE_SECONDS, USUAL, &labels, probe.took.as_secs_f64());
        }
    }

    /// A pod is gone: so is what was counted of its probes.
    pub fn gone(&self, pod: &Pod) {
        let mut probes = lock(&self.probes);
        probes.forget(PROBES, &[("pod_uid", pod::uid(pod))]);
        let key = (pod.namespace().unwrap_or_default(), pod.name_any());
        let mut probed = lock(&self.probed);
        // How long they took is known by the name alone, and a newer pod may have it already.
        if let Some(uids) = probed.get_mut(&key) {
            uids.remove(pod::uid(pod));
            if !uids.is_empty() {
                return;
            }
        }
        probed.remove(&key);
        let of = [("namespace", key.0.as_str()), ("pod", &key.1)];
        probes.forget(PROBE_SECONDS, &of);
    }

    /// Writes what is counted of the agent, or of probes.
    pub fn write(&self, probes: bool, page: &mut Page) {
        let of = if probes { &self.probes } else { &self.own };
        lock(of).write(page);
    }
}

/// A request over HTTP that is being answered.
#[derive(Debug)]
pub struct Answering {
    metrics: Arc<Metrics>,
    labels: [&'static str; 4],
    begun: Instant,
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.metrics.with(|r| {
            r.add(HTTP_NOW, &self.labels, -1.0);
            let took = self.begun.elapsed().as_secs_f64();
            r.observe(HTTP_SECONDS, USUAL, &self.labels, took);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(metrics: &Metrics) -> String {
        let mut page = Page::default();
        metrics.write(false, &mut page);
        page.into_text()
    }

    #[test]
    fn a_container_ends_once() {
        let status = |state: serde_json::Value| -> PodStatus {
            let containers = serde_json::json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}]});
            serde_json::from_value(containers).expect("a status")
        };
        let ended = serde_json::json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        let (runs, ended) = (status(serde_json::json!({"running": {}})), status(ended));
        let metrics = Metrics::default();
        metrics.containers_ended(None, &runs);
        assert!(!written(&metrics).contains("terminated_containers"));
        for before in [&runs, &ended, &ended] {
            metrics.containers_ended(Some(before), &ended);
        }
        let line = "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"137\",reason=\"OOMKilled\"} 1\n";
        assert!(written(&metrics).contains(line), "{}", written(&metrics));
    }

    #[test]
    fn the_start_of_a_node_is_told_once_and_only_where_it_is_new() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let metrics = Metrics::default();
        metrics.node_ready(at(50), at(10));
        assert!(!written(&metrics).contains("node_startup"));
        metrics.node_registering(at(30));
        metrics.node_registering(at(33));
        metrics.node_registered(at(35), at(10), at(28));
        metrics.node_ready(at(42), at(10));
        metrics.node_ready(at(99), at(10));
        let text = written(&metrics);
        for (part, seconds) in [
            ("pre_kubelet_", 18),
            ("pre_registration_", 2),
            ("registration_", 5),
            ("post_registration_", 7),
            ("", 32),
        ] {
            let line = format!("kubelet_node_startup_{part}duration_seconds {seconds}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[test]
    fn a_request_is_in_flight_until_it_is_answered() {
        let metrics = Arc::new(Metrics::default());
        let now = |count: u8| {
            format!(
                "kubelet_http_inflight_requests{{method=\"GET\",path=\"pods\",server_type=\"readwrite\",long_running=\"false\"}} {count}\n"
            )
        };
        let answering = metrics.http("GET", "pods", "readwrite", false);
        assert!(written(&metrics).contains(&now(1)), "{}", written(&metrics));
        drop(answering);
        assert!(written(&metrics).contains(&now(0)));
    }

    #[test]
    fn the_end_of_a_pod_leaves_the_probes_of_a_newer_one_of_its_name() {
        let metrics = Metrics::default();
        let pod = |uid: &str| -> Pod {
            let metadata = serde_json::json!({"namespace": "n", "name": "p", "uid": uid});
            serde_json::from_value(serde_json::json!({ "metadata": metadata })).expect("a pod")
        };
        let probed = |uid: &str| {
            metrics.probed(Probe {
                of: ["c", "n", "p", uid],
                kind: "Liveness",
                result: "successful",
                took: Duration::from_millis(3),
            });
        };
        let count = || {
            let mut page = Page::default();
            metrics.write(true, &mut page);
            let text = page.into_text();
            let line = text
                .lines()
                .find(|l| l.starts_with("prober_probe_duration_seconds_count"));
            line.and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
        };
        probed("old");
        probed("new");
        metrics.gone(&pod("old"));
        assert_eq!(count(), Some(2), "a newer pod of this name is probed");
        probed("new");
        assert_eq!(count(), Some(3));
        metrics.gone(&pod("new"));
        assert_eq!(count(), None);
        // One that was never probed leaves nothing, and takes nothing away.
        probed("third");
        metrics.gone(&pod("fourth"));
        assert_eq!(count(), Some(1));
    }

    #[test]
    fn images_are_of_a_size() {
        let classes = [0, 10 << 20, (10 << 20) + 1, 2 << 30, 200 << 30].map(size_class);
        assert_eq!(
            classes,
            ["0-10MB", "0-10MB", "10MB-100MB", "1GB-5GB", "GT100GB"]
        );
    }
}
