//! Garbage collection of images and dead containers: what is removed, what stays, and why. `holdfast gc` shows the
//! result. Follows `pkg/kubelet/images/image_gc_manager.go` and `pkg/kubelet/kuberuntime/kuberuntime_gc.go`. Pure.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::time;

/// How many dead containers are kept (the kubelet's `--maximum-dead-containers` and related flags).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerRules {
    /// Dead instances to keep per container of a pod; negative means unlimited.
    pub each: i32,
    /// Dead containers to keep on the node; negative means unlimited.
    pub all: i32,
    /// Containers created more recently than this are kept.
    pub minimum_age: SignedDuration,
}

impl Default for ContainerRules {
    fn default() -> ContainerRules {
        ContainerRules {
            each: 1,
            all: -1,
            minimum_age: SignedDuration::ZERO,
        }
    }
}

/// A container that has exited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeadContainer {
    /// The container id of the runtime.
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
    /// When the container was created.
    pub created_at: Timestamp,
}

/// State of the pod of a dead container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodState {
    /// The pod runs, or will run again.
    Alive,
    /// All containers of the pod have terminated and will not restart.
    Finished,
    /// This agent does not know the pod.
    Unknown,
}

/// Why an image or a container is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemovalReason {
    /// The disk is fuller than `imageGCHighThresholdPercent`.
    Space,
    /// The image has been unused for longer than `imageMaximumGCAge`.
    Age,
    /// The container has more dead instances than are kept.
    TooManyOfContainer,
    /// The node has more dead containers than are kept.
    TooManyOnNode,
    /// The node is short of disk space, and the pod has finished.
    PodFinished,
}

/// Why an image or a container is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeepReason {
    /// The image is in use by these pods or exited containers.
    InUse(Vec<String>),
    /// The runtime has pinned the image.
    Pinned,
    /// The image or container is younger than its minimum age.
    New,
    /// The disk has enough free space.
    NoNeed,
    /// Removing earlier images in the order frees enough space.
    Enough,
    /// The pod's status and logs come from this container.
    LastOfContainer,
    /// This agent does not know the pod; the container may belong to another client of the runtime.
    UnknownPod,
}

/// Whether an image or a container is removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Decision {
    /// Removed, with the reason.
    #[serde(rename = "goes")]
    Remove(RemovalReason),
    /// Kept, with the reason.
    #[serde(rename = "stays")]
    Keep(KeepReason),
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Decision::Remove(RemovalReason::Space) => "unused, and the disk is too full",
            Decision::Remove(RemovalReason::Age) => "unused for longer than imageMaximumGCAge",
            Decision::Remove(RemovalReason::TooManyOfContainer) => {
                "newer instances of the container have exited"
            }
            Decision::Remove(RemovalReason::TooManyOnNode) => {
                "more dead containers than the node keeps"
            }
            Decision::Remove(RemovalReason::PodFinished) => "its pod has finished",
            Decision::Keep(KeepReason::InUse(by)) => {
                let shown: Vec<&str> = by.iter().take(3).map(String::as_str).collect();
                write!(f, "in use by {}", shown.join(", "))?;
                return match by.len().saturating_sub(shown.len()) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                };
            }
            Decision::Keep(KeepReason::Pinned) => "pinned by the runtime",
            Decision::Keep(KeepReason::New) => "new: younger than its minimum age",
            Decision::Keep(KeepReason::NoNeed) => "unused; the filesystem has enough space",
            Decision::Keep(KeepReason::Enough) => {
                "unused; removing earlier images frees enough space"
            }
            Decision::Keep(KeepReason::LastOfContainer) => "the pod's status and logs depend on it",
            Decision::Keep(KeepReason::UnknownPod) => "its pod is unknown to this agent",
        };
        f.write_str(text)
    }
}

/// An image and the decision about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageDecision {
    /// The image id of the runtime.
    pub id: String,
    /// Tags and digests of the image.
    pub names: Vec<String>,
    /// Size in bytes.
    pub bytes: u64,
    /// When the image was last seen in use; `None` if not since the agent started.
    pub last_used: Option<Timestamp>,
    /// The decision.
    #[serde(rename = "fate")]
    pub decision: Decision,
}

/// A dead container and the decision about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDecision {
    /// The container.
    #[serde(flatten)]
    pub container: DeadContainer,
    /// The decision.
    #[serde(rename = "fate")]
    pub decision: Decision,
}

/// What garbage collection would remove now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The node's name.
    pub node: String,
    /// When the state was read.
    pub at: Timestamp,
    /// A directory on the image filesystem.
    pub filesystem: String,
    /// Capacity of the filesystem in bytes.
    pub capacity_bytes: u64,
    /// Available bytes.
    pub available_bytes: u64,
    /// Usage in percent above which images are removed; 100 disables it.
    pub high_percent: u8,
    /// Usage in percent at which removal stops.
    pub low_percent: u8,
    /// Bytes to be freed now.
    pub wanted_bytes: u64,
    /// Total size in bytes of the images to be removed. Layers shared with other images are not freed.
    pub frees_bytes: u64,
    /// The images, in order of removal.
    pub images: Vec<ImageDecision>,
    /// The dead containers, newest first.
    pub containers: Vec<ContainerDecision>,
    /// Errors of failed removals, by image or container id.
    #[serde(default, skip_serializing_if = "Failures::is_empty")]
    pub failures: Failures,
}

/// Errors of failed removals, by image or container id.
pub type Failures = BTreeMap<String, String>;

/// Decides about each dead container. If the node is short of disk space (`disk_pressure`), containers of finished pods
/// are also removed. The last instance of each container of a live pod is always kept, because the pod's status comes
/// from it.
#[must_use]
pub fn decide_containers(
    mut dead: Vec<DeadContainer>,
    rules: ContainerRules,
    pod_state: impl Fn(&str) -> PodState,
    disk_pressure: bool,
    now: Timestamp,
) -> Vec<ContainerDecision> {
    dead.sort_by_key(|c| std::cmp::Reverse((c.created_at, c.attempt, c.id.clone())));
    let mut seen: BTreeMap<(String, String), i32> = BTreeMap::new();
    let mut kept = 0;
    let decision = |container: DeadContainer| {
        let key = (container.uid.clone(), container.name.clone());
        let newer = seen.entry(key).or_default();
        let index = *newer;
        *newer = newer.saturating_add(1);
        let pod_state = pod_state(&container.uid);
        let is_new = now.duration_since(container.created_at) < rules.minimum_age;
        let decision = match pod_state {
            PodState::Unknown => Decision::Keep(KeepReason::UnknownPod),
            PodState::Alive if index == 0 => Decision::Keep(KeepReason::LastOfContainer),
            PodState::Finished if disk_pressure => Decision::Remove(RemovalReason::PodFinished),
            _ if is_new => Decision::Keep(KeepReason::New),
            _ if rules.each >= 0 && index >= rules.each => {
                Decision::Remove(RemovalReason::TooManyOfContainer)
            }
            _ if rules.all >= 0 && kept >= rules.all => {
                Decision::Remove(RemovalReason::TooManyOnNode)
            }
            _ => Decision::Keep(KeepReason::LastOfContainer),
        };
        if matches!(decision, Decision::Keep(_)) {
            kept = kept.saturating_add(1);
        }
        ContainerDecision {
            container,
            decision,
        }
    };
    dead.into_iter().map(decision).collect()
}

fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        large if large >= 1024.0 => format!("{:.1} GiB", large / 1024.0),
        small => format!("{small:.1} MiB"),
    }
}

fn ago(now: Timestamp, then: Option<Timestamp>) -> String {
    let Some(then) = then else {
        return "not since the agent started".into();
    };
    let passed = now.duration_since(then).unsigned_abs();
    format!(
        "{} ago",
        time::shown(std::time::Duration::from_secs(passed.as_secs()))
    )
}

impl Report {
    /// The word for the outcome, and whether it counts as removed.
    fn outcome(&self, id: &str, decision: &Decision, done: bool) -> (&'static str, bool) {
        match decision {
            Decision::Keep(_) => ("stays", false),
            Decision::Remove(_) if self.failures.contains_key(id) => ("failed", false),
            Decision::Remove(_) if done => ("removed", true),
            Decision::Remove(_) => ("goes", true),
        }
    }

    /// Suffix with the error, if the removal failed.
    fn failure(&self, id: &str) -> String {
        let why = self.failures.get(id);
        why.map(|why| format!("; removal failed: {why}"))
            .unwrap_or_default()
    }
}

/// The report as text. `done` is whether the removals have been carried out.
#[must_use]
pub fn text(report: &Report, done: bool) -> String {
    let mut text = String::new();
    let free = report.available_bytes.saturating_mul(100);
    let free = free.checked_div(report.capacity_bytes).unwrap_or(free);
    let used = 100_u64.saturating_sub(free);
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{}: {used}% of {} in use at {}; images are removed from {}% on, down to {}%",
        report.node,
        size(report.capacity_bytes),
        report.filesystem,
        report.high_percent,
        report.low_percent,
    );
    let missing = report.wanted_bytes.saturating_sub(report.frees_bytes);
    if missing > 0 {
        let _ = writeln!(
            text,
            "{} short: remove other files, or enlarge the filesystem",
            size(missing)
        );
    }
    let removed = match done {
        true => "removed",
        false => "would be removed",
    };
    write_images(report, done, removed, &mut text);
    write_containers(report, done, removed, &mut text);
    text
}

fn write_images(report: &Report, done: bool, removed: &str, text: &mut String) {
    let images = &report.images;
    let gone = images
        .iter()
        .filter(|i| report.outcome(&i.id, &i.decision, done).1);
    let (count, bytes) = gone.fold((0_u64, 0_u64), |(n, bytes), image| {
        (n.saturating_add(1), bytes.saturating_add(image.bytes))
    });
    let _ = writeln!(
        text,
        "\nimages: {count} of {} {removed}, {}",
        images.len(),
        size(bytes)
    );
    for image in images {
        let (what, _) = report.outcome(&image.id, &image.decision, done);
        let name = image.names.first().unwrap_or(&image.id);
        let used = ago(report.at, image.last_used);
        let (bytes, decision) = (size(image.bytes), &image.decision);
        let failure = report.failure(&image.id);
        let _ = writeln!(
            text,
            "  {what:<8}{bytes:>11}  {name}: {decision} (used: {used}){failure}"
        );
    }
}

fn write_containers(report: &Report, done: bool, removed: &str, text: &mut String) {
    let all = &report.containers;
    let is_gone = |c: &&ContainerDecision| report.outcome(&c.container.id, &c.decision, done).1;
    let count = all.iter().filter(is_gone).count();
    let _ = writeln!(
        text,
        "\ndead containers: {count} of {} {removed}",
        all.len()
    );
    for ContainerDecision {
        container,
        decision,
    } in all
    {
        let (what, _) = report.outcome(&container.id, decision, done);
        let DeadContainer {
            namespace,
            pod,
            name,
            attempt,
            ..
        } = container;
        let made = ago(report.at, Some(container.created_at));
        let failure = report.failure(&container.id);
        let _ = writeln!(
            text,
            "  {what:<8}{namespace}/{pod} {name} #{attempt}: {decision} (created {made}){failure}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a time")
    }

    fn dead(uid: &str, name: &str, attempt: u32) -> DeadContainer {
        DeadContainer {
            id: format!("{uid}-{name}-{attempt}"),
            namespace: "n".into(),
            pod: uid.into(),
            uid: uid.into(),
            name: name.into(),
            attempt,
            created_at: at(100 + i64::from(attempt)),
        }
    }

    fn going(decisions: &[ContainerDecision]) -> Vec<(&str, RemovalReason)> {
        let going = decisions.iter().filter_map(|f| match f.decision {
            Decision::Remove(why) => Some((f.container.id.as_str(), why)),
            Decision::Keep(_) => None,
        });
        going.collect()
    }

    fn pod_state(uid: &str) -> PodState {
        match uid {
            "alive" => PodState::Alive,
            "done" => PodState::Finished,
            _ => PodState::Unknown,
        }
    }

    /// The containers that are removed, out of three dead instances of one container in each of three pods.
    fn gone(rules: ContainerRules, disk_pressure: bool, now: i64) -> Vec<String> {
        let of = |uid| (0..3).map(move |attempt| dead(uid, "c", attempt));
        let all = of("alive").chain(of("done")).chain(of("else")).collect();
        let decisions = decide_containers(all, rules, pod_state, disk_pressure, at(now));
        let going = going(&decisions).into_iter();
        going.map(|(id, why)| format!("{id} {why:?}")).collect()
    }

    #[test]
    fn dead_containers_are_removed_by_age_and_number() {
        let rules = ContainerRules::default();
        let many = ["done-c-1", "alive-c-1", "done-c-0", "alive-c-0"]
            .map(|id| format!("{id} TooManyOfContainer"));
        assert_eq!(gone(rules, false, 1000), many);
        let older = ContainerRules {
            minimum_age: SignedDuration::from_secs(10),
            ..rules
        };
        assert_eq!(gone(older, false, 110), many[2..]);
        let any = ContainerRules { each: -1, ..rules };
        assert_eq!(gone(any, false, 1000), [""; 0]);
        let none = ContainerRules { all: 0, ..any };
        assert_eq!(
            gone(none, false, 1000),
            ["done-c-2", "done-c-1", "alive-c-1", "done-c-0", "alive-c-0"]
                .map(|id| format!("{id} TooManyOnNode"))
        );
        assert_eq!(
            gone(rules, true, 1000),
            [
                "done-c-2 PodFinished",
                "done-c-1 PodFinished",
                "alive-c-1 TooManyOfContainer",
                "done-c-0 PodFinished",
                "alive-c-0 TooManyOfContainer"
            ]
        );
    }

    fn image(name: &str, last_used: Option<i64>, decision: Decision) -> ImageDecision {
        ImageDecision {
            id: format!("sha256:{name}"),
            names: vec![name.into()],
            bytes: 3 << 20,
            last_used: last_used.map(at),
            decision,
        }
    }

    /// A report with each decision.
    fn report() -> Report {
        let by = ["a", "b", "c", "d"].map(|name| format!("pod n/{name}"));
        let remove = Decision::Remove;
        let keep = Decision::Keep;
        let container = |uid: &str, attempt, decision| ContainerDecision {
            container: dead(uid, "c", attempt),
            decision,
        };
        Report {
            node: "node".into(),
            at: at(1000),
            filesystem: "/images".into(),
            capacity_bytes: 100 << 30,
            available_bytes: 10 << 30,
            high_percent: 85,
            low_percent: 80,
            wanted_bytes: 10 << 30,
            frees_bytes: 6 << 20,
            images: vec![
                image("old", Some(940), remove(RemovalReason::Space)),
                image("older", None, remove(RemovalReason::Age)),
                image("web", Some(1000), keep(KeepReason::InUse(by.into()))),
                image(
                    "db",
                    Some(1000),
                    keep(KeepReason::InUse(vec!["pod n/a".into()])),
                ),
                image("pause", None, keep(KeepReason::Pinned)),
                image("new", None, keep(KeepReason::New)),
                image("fine", Some(10), keep(KeepReason::NoNeed)),
                image("spared", Some(10), keep(KeepReason::Enough)),
            ],
            containers: vec![
                container("alive", 3, keep(KeepReason::LastOfContainer)),
                container("alive", 2, remove(RemovalReason::TooManyOfContainer)),
                container("alive", 1, remove(RemovalReason::TooManyOnNode)),
                container("done", 0, remove(RemovalReason::PodFinished)),
                container("else", 0, keep(KeepReason::UnknownPod)),
            ],
            failures: Failures::new(),
        }
    }

    #[test]
    fn a_report_gives_the_reason_for_each_removed_or_kept_object() {
        let report = report();
        insta::assert_snapshot!("would_be_removed", text(&report, false));
        let json = serde_json::to_string(&report).expect("JSON");
        assert!(json.contains(r#""fate":{"goes":"Space"}"#), "{json}");
        let read: Report = serde_json::from_str(&json).expect("the same");
        assert_eq!(read, report);
        let busy = |id: &str| (id.to_owned(), "the runtime is busy".to_owned());
        let report = Report {
            failures: Failures::from(["sha256:old", "done-c-0"].map(busy)),
            ..report
        };
        insta::assert_snapshot!("removed", text(&report, true));
    }

    #[test]
    fn a_report_without_images_and_containers_is_short() {
        let report = Report {
            wanted_bytes: 0,
            frees_bytes: 0,
            images: vec![],
            containers: vec![],
            ..report()
        };
        insta::assert_snapshot!("nothing_to_remove", text(&report, false));
    }

    proptest! {
        /// With any rules, a live pod keeps the last instance of each container, and no container of an unknown pod is
        /// removed.
        #[test]
        fn containers_that_a_status_depends_on_are_kept(each in -1..3, all in -1..5, disk_pressure: bool, count in 0_u32..4) {
            let containers = ["alive", "else"].into_iter().flat_map(|uid| (0..count).map(move |n| dead(uid, "c", n)));
            let rules = ContainerRules { each, all, ..ContainerRules::default() };
            let decisions = decide_containers(containers.collect(), rules, pod_state, disk_pressure, at(1000));
            for (id, _) in going(&decisions) {
                prop_assert!(id.starts_with("alive") && !id.ends_with(&format!("-{}", count - 1)), "{}", id);
            }
        }
    }
}
