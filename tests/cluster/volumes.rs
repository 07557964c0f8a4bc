//! Volumes with a real containerd: their content, when it changes, and what remains of them.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::time::Duration;

use serde_json::Value;
use support::client::kubectl;
use support::disk::Loop;
use support::{Cluster, condition, inside};

fn pod(name: &str, image: &str, volumes: &str, mounts: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{color: blue}}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  volumes: {volumes}\n  containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: {mounts}}}]\n---\n"
    )
}

fn ready(cluster: &Cluster, pod: &str) -> bool {
    condition(&cluster.pod(pod), "Ready") == "True"
}

/// A pod that waits for an object names it in its status, and starts when the object is created.
fn an_awaited_object_starts_its_pod(cluster: &Cluster, image: &str) {
    let volumes = "[{name: m, configMap: {name: awaited}}]";
    let mounts = "[{name: m, mountPath: /m}]";
    cluster.apply(&pod("two", image, volumes, mounts));
    cluster.wait("a status that explains the wait", || {
        let waiting = &cluster.pod("two")["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["message"] == "volume m cannot be set up; the pod's events have the error"
    });
    // By now the retries are eight seconds apart.
    std::thread::sleep(Duration::from_millis(8500));
    cluster.kubectl(&["create", "configmap", "awaited", "--from-literal=x=y"]);
    let created = std::time::Instant::now();
    // A new pod shows how long a start takes on this machine now.
    cluster.apply(&pod("three", image, "[]", "[]"));
    cluster.wait("the new pod to be ready", || ready(cluster, "three"));
    let new = created.elapsed();
    cluster.wait("the pod to start", || ready(cluster, "two"));
    assert!(
        created.elapsed() < new + Duration::from_secs(6),
        "the pod started by a retry, not because of the ConfigMap"
    );
    cluster.kubectl(&["delete", "pod", "three", "--grace-period=1"]);
}

#[test]
fn volumes_follow_changes_in_the_api() {
    // With this period, only a change notification causes a volume refresh.
    let cluster = Cluster::start_configured("refresh", 34, "{syncFrequency: 1h}");
    let image = support::busybox(&cluster);
    let create = |what: &str| cluster.kubectl(&what.split(' ').collect::<Vec<_>>());
    create("create configmap settings --from-literal=color=blue");
    create("create secret generic keys --from-literal=pin=1111");
    let volumes = "[{name: m, configMap: {name: settings}}, {name: s, secret: {secretName: keys, defaultMode: 0400}}, {name: d, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}, {name: p, projected: {sources: [{configMap: {name: settings, items: [{key: color, path: a/b}]}}, {secret: {name: keys}}, {configMap: {name: late, optional: true}}]}}]";
    let mounts = "[{name: m, mountPath: /m}, {name: s, mountPath: /s}, {name: d, mountPath: /d}, {name: p, mountPath: /p}, {name: m, mountPath: /once, subPath: color}]";
    cluster.apply(&pod("one", &image, volumes, mounts));
    cluster.wait("the pod to be ready", || ready(&cluster, "one"));
    let cat = |path: &str| inside(&cluster, "one", &["cat", path]);
    assert_eq!(
        [
            cat("/m/color"),
            cat("/s/pin"),
            cat("/p/a/b"),
            cat("/p/pin"),
            cat("/once")
        ],
        ["blue", "1111", "blue", "1111", "blue"]
    );
    assert_eq!(
        inside(
            &cluster,
            "one",
            &["busybox", "stat", "-L", "-c", "%a", "/s/pin"]
        ),
        "400"
    );

    cluster.kubectl(&[
        "patch",
        "configmap",
        "settings",
        "--patch",
        r#"{"data": {"color": "green", "size": "big"}}"#,
    ]);
    cluster.wait("the new settings", || {
        cat("/m/color") == "green" && cat("/m/size") == "big" && cat("/p/a/b") == "green"
    });
    assert_eq!(
        cat("/once"),
        "blue",
        "a subPath keeps the content of the container's start"
    );
    cluster.kubectl(&[
        "patch",
        "secret",
        "keys",
        "--patch",
        r#"{"stringData": {"pin": "2222"}}"#,
    ]);
    cluster.wait("the new secret", || {
        cat("/s/pin") == "2222" && cat("/p/pin") == "2222"
    });
    cluster.kubectl(&["label", "pod", "one", "color=red", "--overwrite"]);
    cluster.wait("the new label", || {
        cat("/d/labels").contains("color=\"red\"")
    });
    cluster.kubectl(&["create", "configmap", "late", "--from-literal=late=here"]);
    cluster.wait("the optional object that was created later", || {
        cat("/p/late") == "here"
    });

    // The content of a deleted object remains, an event reports the loss, and the container can restart.
    cluster.kubectl(&["delete", "configmap", "settings"]);
    cluster.wait("an event about the deleted object", || {
        cluster
            .events("one")
            .contains("configmap \"settings\" not found in namespace \"default\"")
    });
    assert_eq!(cat("/m/color"), "green");
    let before = cluster.pod("one")["status"]["containerStatuses"][0]["containerID"].clone();
    let process = support::ctr(&cluster, "k8s.io", &["tasks", "ls"]);
    let id = before
        .as_str()
        .unwrap()
        .rsplit('/')
        .next()
        .unwrap()
        .to_owned();
    let line = process.lines().find(|l| l.contains(&id)).unwrap();
    let pid: i32 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    cluster.wait("the container to be restarted", || {
        let pod = cluster.pod("one");
        pod["status"]["containerStatuses"][0]["restartCount"] == 1
            && condition(&pod, "Ready") == "True"
    });

    an_awaited_object_starts_its_pod(&cluster, &image);

    // A restarted agent applies the changes that it has missed.
    cluster.kill("agent");
    cluster.kubectl(&[
        "patch",
        "configmap",
        "awaited",
        "--patch",
        r#"{"data": {"x": "z"}}"#,
    ]);
    cluster.up();
    cluster.wait("a change from a time without an agent", || {
        inside(&cluster, "two", &["cat", "/m/x"]) == "z"
    });
    let restarts: Vec<Value> = cluster
        .pods()
        .iter()
        .map(|p| p["status"]["containerStatuses"][0]["restartCount"].clone())
        .collect();
    assert_eq!(restarts, [1, 0]);
    cluster.delete_all_and_check();
}

fn claim(name: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}{more}}}\n---\n"
    )
}

fn volume(name: &str, node: &str, source: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: by-hand, capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: {name}}}, nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [{node}]}}]}}]}}}}, {source}}}\n---\n"
    )
}

/// A pod with another fsGroup changes the group of shared files, and a pod that requests another
/// filesystem than the disk has fails. Events report both.
fn events_name_other_failures(
    cluster: &Cluster,
    node: &str,
    [directory, other]: [&str; 2],
    disk: &Loop,
) {
    let sharer = directory.replace("{name: directory,", "{name: sharer,");
    cluster.apply(&sharer.replace("4242", "4343"));
    cluster.wait("an event about the other group", || {
        let events = cluster.events("sharer");
        events.contains("requested fsGroup is 4343, but the volume directory has GID 4242")
    });
    let source = format!("local: {{path: '{}', fsType: xfs}}", disk.device);
    cluster.apply(&format!(
        "{}{}{other}",
        volume("other", node, &source),
        claim("other", ", storageClassName: by-hand")
    ));
    cluster.wait("an event about the volume", || {
        let format =
            "jsonpath={range .items[*]}{.involvedObject.name} {.reason}: {.message}{\"\\n\"}{end}";
        let events = cluster.kubectl(&["get", "events", "-o", format]);
        let prefix = "other FailedMountOnFilesystemMismatch: ";
        let mut lines = events.lines();
        lines.any(|line| line.starts_with(prefix) && line.contains("type ext4"))
    });
    cluster.kubectl(&["delete", "pod", "sharer", "other"]);
}

/// A ReadWriteOncePod claim is denied to a second pod until the first pod is deleted.
fn a_claim_for_one_pod_passes_on(cluster: &Cluster, image: &str, volumes: &str, at: &str) {
    cluster.apply(&claim("single", "").replace("ReadWriteOnce]", "ReadWriteOncePod]"));
    cluster.apply(&pod("holder", image, volumes, at));
    cluster.wait("the holder to be ready", || ready(cluster, "holder"));
    cluster.apply(&pod("heir", image, volumes, at));
    cluster.wait("an event about the claim in use", || {
        cluster
            .events("heir")
            .contains("already in use by another pod")
    });
    cluster.kubectl(&["delete", "pod", "holder"]);
    cluster.wait("the heir to be ready", || ready(cluster, "heir"));
}

#[test]
fn claims_are_bound_mounted_kept_and_released() {
    let cluster = Cluster::start("claims", 35);
    let image = support::busybox(&cluster);
    let node = cluster.node_name();
    let of = |name: &str| format!("[{{name: v, persistentVolumeClaim: {{claimName: {name}}}}}]");
    let at = "[{name: v, mountPath: /v}]";
    let get = |kind: &str, name: &str, path: &str| {
        cluster.kubectl(&[
            "get",
            kind,
            name,
            "--ignore-not-found",
            "-o",
            &format!("jsonpath={{{path}}}"),
        ])
    };

    // A claim without a class gets a directory of this machine, once it has a consumer.
    cluster.apply(&claim("data", ""));
    cluster.wait("the claim to wait", || {
        cluster.events("data").contains("WaitForFirstConsumer")
    });
    cluster.apply(&pod("first", &image, &of("data"), at));
    cluster.wait("the first pod to be ready", || ready(&cluster, "first"));
    inside(
        &cluster,
        "first",
        &["busybox", "sh", "-c", "echo kept > /v/note"],
    );
    let made = get("pvc", "data", ".spec.volumeName");
    let directory = get("pv", &made, ".spec.hostPath.path");
    assert_eq!(
        std::fs::read_to_string(format!("{directory}/note")).unwrap(),
        "kept\n"
    );
    let listed = cluster.kubectl(&["get", "pvc", "data"]);
    assert!(
        listed.contains("Bound") && listed.contains("RWO") && listed.contains("standard"),
        "{listed}"
    );
    // A claim in use stays until its last pod is deleted.
    cluster.apply(&pod("second", &image, &of("data"), at));
    cluster.wait("the second pod to be ready", || ready(&cluster, "second"));
    cluster.kubectl(&["delete", "pvc", "data", "--wait=false"]);
    cluster.kubectl(&["delete", "pod", "first"]);
    assert_eq!(inside(&cluster, "second", &["cat", "/v/note"]), "kept");
    assert!(
        cluster
            .kubectl(&["get", "pvc", "data"])
            .contains("Terminating")
    );
    cluster.kubectl(&["delete", "pod", "second"]);
    cluster.wait("the claim to be deleted", || {
        get("pvc", "data", ".metadata.name").is_empty()
    });
    cluster.wait("the claim's volume to be deleted", || {
        get("pv", &made, ".metadata.name").is_empty()
    });
    assert!(!std::path::Path::new(&directory).exists());

    // Manually created volumes: a directory with a group, a device with and without a filesystem.
    let (dir, disk, raw) = (tempfile::tempdir().unwrap(), Loop::new(), Loop::new());
    std::fs::write(dir.path().join("old"), "x").unwrap();
    cluster.apply(&format!(
        "{}{}{}{}{}{}",
        volume(
            "directory",
            &node,
            &format!("local: {{path: '{}'}}", dir.path().display())
        ),
        volume(
            "disk",
            &node,
            &format!("local: {{path: '{}'}}", disk.device)
        ),
        volume(
            "raw",
            &node,
            &format!("volumeMode: Block, local: {{path: '{}'}}", raw.device)
        ),
        claim("directory", ", storageClassName: by-hand"),
        claim("disk", ", storageClassName: by-hand"),
        claim("raw", ", storageClassName: by-hand, volumeMode: Block"),
    ));
    let user = |name: &str| {
        pod(name, &image, &of(name), at).replace(
            "  volumes:",
            "  securityContext: {runAsUser: 1000, fsGroup: 4242}\n  volumes:",
        )
    };
    cluster.apply(&user("directory"));
    cluster.apply(&user("disk"));
    cluster.apply(&pod(
        "reader",
        &image,
        "[{name: v, persistentVolumeClaim: {claimName: disk, readOnly: true}}]",
        at,
    ));
    cluster.apply(&pod(
        "raw",
        &image,
        &of("raw"),
        "[], volumeDevices: [{name: v, devicePath: /dev/raw}]",
    ));
    for name in ["directory", "disk", "reader", "raw"] {
        cluster.wait(&format!("{name} to run"), || ready(&cluster, name));
    }
    assert_eq!(
        inside(
            &cluster,
            "directory",
            &[
                "busybox",
                "sh",
                "-c",
                "echo more >> /v/old; stat -c %g:%a /v/old; stat -c %g:%a /v"
            ]
        ),
        "4242:664\n4242:2775"
    );
    inside(
        &cluster,
        "disk",
        &["busybox", "sh", "-c", "echo here > /v/file"],
    );
    assert_eq!(
        inside(
            &cluster,
            "reader",
            &[
                "busybox",
                "sh",
                "-c",
                "cat /v/file; touch /v/x 2>/dev/null || echo refused"
            ]
        ),
        "here\nrefused"
    );
    assert!(
        inside(
            &cluster,
            "disk",
            &["busybox", "grep", " /v ", "/proc/mounts"]
        )
        .contains("ext4")
    );
    assert_eq!(
        inside(
            &cluster,
            "raw",
            &[
                "busybox",
                "sh",
                "-c",
                "echo block > /dev/raw && head -c 5 /dev/raw"
            ]
        ),
        "block"
    );
    events_name_other_failures(&cluster, &node, [&user("directory"), &user("other")], &disk);
    // The device stays mounted while a pod uses it, even if another pod is deleted.
    cluster.kubectl(&["delete", "pod", "reader"]);
    assert_eq!(inside(&cluster, "disk", &["cat", "/v/file"]), "here");
    cluster.kubectl(&["delete", "pod", "disk", "directory", "raw"]);
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours: Vec<&str> = table
        .lines()
        .filter(|l| l.contains("/holdfast-t-claims/") && l.contains("local-volume"))
        .collect();
    let whole_name = format!(" {} ", disk.device);
    assert!(!table.contains(&whole_name) && ours.is_empty(), "{ours:?}");
    // A device with data is never formatted.
    cluster.apply(&user("disk"));
    cluster.wait("the disk's pod to be ready", || ready(&cluster, "disk"));
    assert_eq!(inside(&cluster, "disk", &["cat", "/v/file"]), "here");

    a_claim_for_one_pod_passes_on(&cluster, &image, &of("single"), at);
    // An ephemeral claim, memory with a size limit, huge pages, and a missing claim, which an event names.
    let template = "[{name: v, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}}}}]";
    cluster.apply(&pod("short", &image, template, at));
    cluster.apply(&pod(
        "memory",
        &image,
        "[{name: v, emptyDir: {medium: Memory, sizeLimit: 8Mi}}, {name: p, emptyDir: {medium: HugePages-2Mi}}]",
        "[{name: v, mountPath: /v}, {name: p, mountPath: /p}]",
    ));
    cluster.apply(&pod("lost", &image, &of("nosuch"), at));
    for name in ["short", "memory"] {
        cluster.wait(&format!("{name} to run"), || ready(&cluster, name));
    }
    let mounts = inside(&cluster, "memory", &["cat", "/proc/mounts"]);
    assert!(
        mounts
            .lines()
            .any(|l| l.contains(" /v ") && l.contains("size=8192k")),
        "{mounts}"
    );
    assert!(
        mounts
            .lines()
            .any(|l| l.contains(" /p hugetlbfs") && l.contains("pagesize=2M")),
        "{mounts}"
    );
    assert!(!get("pvc", "short-v", ".spec.volumeName").is_empty());
    cluster.wait("an event that names the missing claim", || {
        cluster
            .events("lost")
            .contains("persistentvolumeclaim \"nosuch\" not found")
    });
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    cluster.wait("the short-lived claim to be deleted", || {
        get("pvc", "short-v", ".metadata.name").is_empty()
    });
    cluster.assert_clean();
    cluster.kubectl(&["delete", "pvc", "--all"]);
    assert!(cluster.kubectl(&["get", "pv", "disk"]).contains("Released"));
}

/// A filesystem that never answers, like one whose server is down.
struct Dead {
    dir: tempfile::TempDir,
    _answers: std::fs::File,
}

impl Dead {
    fn mount() -> Dead {
        use std::os::fd::AsRawFd as _;
        let dir = tempfile::tempdir().unwrap();
        let answers = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            answers.as_raw_fd()
        );
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(
            Some("dead"),
            dir.path(),
            Some("fuse"),
            none,
            Some(options.as_str()),
        )
        .unwrap();
        Dead {
            dir,
            _answers: answers,
        }
    }
}

impl Drop for Dead {
    fn drop(&mut self) {
        // Pending calls then fail.
        let _ = nix::mount::umount2(
            self.dir.path(),
            nix::mount::MntFlags::MNT_FORCE | nix::mount::MntFlags::MNT_DETACH,
        );
    }
}

#[test]
fn pods_above_their_disk_limits_are_evicted() {
    let cluster = Cluster::start("evict", 37);
    let image = support::busybox(&cluster);
    let pod_with_limit = |name: &str, limit: &str, volumes: &str, target: &str| {
        pod(name, &image, volumes, "[{name: v, mountPath: /v}]")
            .replace("command: [busybox, sleep, '10000']", &format!("command: [busybox, sh, -c, 'mkdir -p /tmp; busybox dd if=/dev/zero of={target} bs=1M count=8; sleep 10000'], resources: {{limits: {{{limit}}}}}"))
    };
    let empty = "[{name: v, emptyDir: {}}]";
    cluster.apply(&pod_with_limit(
        "volume",
        "",
        "[{name: v, emptyDir: {sizeLimit: 2Mi}}]",
        "/v/large",
    ));
    cluster.apply(&pod_with_limit(
        "whole",
        "ephemeral-storage: 4Mi",
        empty,
        "/v/large",
    ));
    cluster.apply(&pod_with_limit(
        "layer",
        "ephemeral-storage: 4Mi",
        empty,
        "/tmp/large",
    ));
    cluster.apply(&pod_with_limit(
        "modest",
        "ephemeral-storage: 100Mi",
        "[{name: v, emptyDir: {sizeLimit: 100Mi}}]",
        "/v/large",
    ));
    let status = |name: &str| cluster.pod(name)["status"].clone();
    for (name, message) in [
        (
            "volume",
            "Usage of EmptyDir volume \"v\" exceeds the limit \"2Mi\". ",
        ),
        (
            "whole",
            "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. ",
        ),
        (
            "layer",
            "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. ",
        ),
    ] {
        cluster.wait(&format!("{name} to be evicted"), || {
            status(name)["phase"] == "Failed"
        });
        let now = status(name);
        assert_eq!(
            (now["reason"].as_str(), now["message"].as_str()),
            (Some("Evicted"), Some(message)),
            "{now:#}"
        );
        cluster.wait("the event about the eviction", || {
            cluster
                .events(name)
                .contains(&format!("Warning Evicted {}", message.trim()))
        });
        assert_eq!(condition(&cluster.pod(name), "DisruptionTarget"), "");
    }
    cluster.wait("the pod below its limits to be ready", || {
        ready(&cluster, "modest")
    });
    cluster.delete_all_and_check();
}

#[test]
fn a_hanging_mount_blocks_only_its_own_pod() {
    let cluster = Cluster::start("hung", 36);
    let image = support::busybox(&cluster);
    let dead = Dead::mount();
    let path = dead.dir.path().display().to_string();
    // More of them than the agent has blocking threads.
    let volumes: Vec<String> = ["v", "v1", "v2", "v3"]
        .map(|name| format!("{{name: {name}, hostPath: {{path: '{path}', type: Directory}}}}"))
        .to_vec();
    let stuck = |n: usize| {
        pod(
            &format!("stuck-{n}"),
            &image,
            &format!("[{}]", volumes.join(", ")),
            "[{name: v, mountPath: /v}]",
        )
    };
    cluster.apply(&(0..20).map(stuck).collect::<String>());
    let why = |name: &str| {
        cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    cluster.wait("a status about the waiting volume", || {
        why("stuck-7").contains("cannot be set up; the pod's events have the error")
    });
    cluster.apply(&pod(
        "free",
        &image,
        "[{name: v, emptyDir: {}}]",
        "[{name: v, mountPath: /v}]",
    ));
    let begun = std::time::Instant::now();
    cluster.wait("another pod to be ready", || ready(&cluster, "free"));
    cluster.kubectl(&["delete", "pod", "free"]);
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "the pod was not delayed: {:?}",
        begun.elapsed()
    );
    // The pods can be deleted, and hanging operations finish once the filesystem is unmounted.
    cluster.kubectl(&["delete", "pod", "stuck-0", "stuck-1"]);
    drop(dead);
    std::fs::create_dir_all(&path).unwrap();
    cluster.wait("a blocked pod to be ready", || ready(&cluster, "stuck-2"));
    cluster.delete_all_and_check();
    std::fs::remove_dir(&path).unwrap();
}

#[test]
fn a_kill_during_a_mount_or_unmount_leaks_nothing() {
    let cluster = Cluster::start("mount-kill", 41);
    let image = support::busybox(&cluster);
    let node = cluster.node_name();
    let disk = Loop::new();
    cluster.kubectl(&["create", "configmap", "map", "--from-literal=key=value"]);
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "keys",
        "--from-literal=key=value",
    ]);
    cluster.apply(&format!(
        "{}{}",
        volume(
            "disk",
            &node,
            &format!("local: {{path: '{}'}}", disk.device)
        ),
        claim("disk", ", storageClassName: by-hand")
    ));
    let volumes = "[{name: d, persistentVolumeClaim: {claimName: disk}}, {name: m, configMap: {name: map}}, {name: s, secret: {secretName: keys}}, {name: t, emptyDir: {medium: Memory}}, {name: e, emptyDir: {}}]";
    let mounts = "[{name: d, mountPath: /d}, {name: d, mountPath: /sub, subPath: one/two}, {name: m, mountPath: /m}, {name: m, mountPath: /key, subPath: key}, {name: s, mountPath: /s}, {name: t, mountPath: /t}, {name: e, mountPath: /e, subPath: x}]";
    let die_after = |milliseconds: u64| {
        std::thread::sleep(Duration::from_millis(milliseconds));
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(cluster.pid("agent")),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
        cluster.up();
    };
    // From before the first mount to after the last: a start takes about 300 ms here, a stop less.
    for round in 0..14 {
        let name = format!("pod-{round}");
        cluster.apply(&pod(&name, &image, volumes, mounts));
        die_after(round * 25);
        cluster.wait("the pod to be ready", || ready(&cluster, &name));
        assert_eq!(
            inside(
                &cluster,
                &name,
                &[
                    "busybox",
                    "sh",
                    "-c",
                    "cat /m/key /s/key /key; echo x >> /d/rounds; wc -l < /d/rounds"
                ]
            ),
            format!("valuevaluevalue{}", round + 1)
        );
        cluster.kubectl(&["delete", "pod", &name, "--wait=false"]);
        die_after(round * 15);
        cluster.wait("the pod to be removed", || cluster.pods().is_empty());
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let left: Vec<&str> = table
            .lines()
            .filter(|l| l.contains("/holdfast-t-mount-kill/agent/"))
            .collect();
        assert!(left.is_empty(), "round {round}: {left:?}");
        // The runtime may finish its own cleanup a moment later.
        cluster.wait_quietly(&format!("no leftovers in round {round}"), || {
            cluster.leftovers_known().is_empty()
        });
    }
    cluster.down();
    cluster.wait_quietly("no leftovers after `down`", || {
        cluster.leftovers().is_empty()
    });
}

/// The filesystem type at a mount point.
fn mounted(path: &std::path::Path) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut lines = table.lines();
    let line = lines.find(|l| l.split(' ').nth(4) == path.to_str())?;
    let (_, kind) = line.split_once(" - ")?;
    Some(kind.split(' ').next()?.to_owned())
}

fn unmounts_are_counted(cluster: &Cluster) {
    for (plugin, count) in [
        ("configmap", 1.0),
        ("secret", 1.0),
        // Including the token of the service account.
        ("projected", 2.0),
        ("downward-api", 1.0),
        ("empty-dir", 2.0),
        ("local-volume", 1.0),
    ] {
        let sample = format!(
            "storage_operation_duration_seconds_count{{migrated=\"false\",operation_name=\"volume_unmount\",status=\"success\",volume_plugin=\"kubernetes.io/{plugin}\"}}"
        );
        cluster.wait(&sample, || cluster.metric(&sample) == Some(count));
    }
}

/// A pod `one` with a volume of every kind that the agent sets up, and a local one. It exits when `/e/end` exists.
fn pod_of_every_kind(cluster: &Cluster, image: &str, node: &str, local: &std::path::Path) {
    cluster.kubectl(&["create", "configmap", "map", "--from-literal=key=value"]);
    let secret = "create secret generic keys --from-literal=key=value";
    cluster.kubectl(&secret.split(' ').collect::<Vec<_>>());
    let source = format!("local: {{path: '{}'}}", local.display());
    cluster.apply(&volume("disk", node, &source));
    cluster.apply(&claim("disk", ", storageClassName: by-hand"));
    let volumes = "[{name: m, configMap: {name: map}}, {name: s, secret: {secretName: keys}}, {name: p, projected: {sources: [{secret: {name: keys}}]}}, {name: w, downwardAPI: {items: [{path: key, fieldRef: {fieldPath: metadata.name}}]}}, {name: e, emptyDir: {}}, {name: t, emptyDir: {medium: Memory}}, {name: l, persistentVolumeClaim: {claimName: disk}}]";
    let mounts = ["m", "s", "p", "w", "e", "t", "l"]
        .map(|v| format!("{{name: {v}, mountPath: /{v}}}"))
        .join(", ");
    let one = pod(
        "one",
        image,
        volumes,
        &format!(
            "[{{name: t, mountPath: /m/in/side}}, {{name: t, mountPath: /s/in}}, {mounts}, {{name: e, mountPath: /sub, subPath: a/b}}]"
        ),
    );
    cluster.apply(&one.replace("spec:\n", "spec:\n  restartPolicy: Never\n").replace(
        "[busybox, sleep, '10000']",
        "[busybox, sh, -c, 'echo said; echo x > /e/file; echo x > /t/file; echo x > /l/file; until [ -e /e/end ]; do sleep 0.1; done']",
    ));
}

/// A pod's volumes have the kubelet's paths, for backup agents, `kubectl debug node`, or a kubelet that
/// takes over. They are removed when the pod has terminated, even if its object remains.
#[test]
fn volumes_use_the_kubelets_paths_and_are_removed_after_the_pod() {
    let cluster = Cluster::start("layout", 92);
    let image = support::busybox(&cluster);
    let local = tempfile::tempdir().unwrap();
    let node = cluster.node_name();
    pod_of_every_kind(&cluster, &image, &node, local.path());
    cluster.wait("the pod to be ready", || ready(&cluster, "one"));
    let uid = cluster.kubectl(&["get", "pod", "one", "-o", "jsonpath={.metadata.uid}"]);
    let dir = cluster.data().join("agent/pods").join(&uid);
    let place =
        |plugin: &str, name: &str| dir.join(format!("volumes/kubernetes.io~{plugin}/{name}"));
    cluster.wait_quietly("the files of the pod", || {
        place("local-volume", "disk").join("file").exists()
    });
    for (plugin, name, file, content, kind) in [
        ("configmap", "m", "key", "value", None),
        ("secret", "s", "key", "value", Some("tmpfs")),
        ("projected", "p", "key", "value", Some("tmpfs")),
        ("downward-api", "w", "key", "one", Some("tmpfs")),
        ("empty-dir", "e", "file", "x\n", None),
        ("empty-dir", "t", "file", "x\n", Some("tmpfs")),
    ] {
        let place = place(plugin, name);
        assert_eq!(
            std::fs::read_to_string(place.join(file)).unwrap(),
            content,
            "{plugin}"
        );
        assert_eq!(mounted(&place).as_deref(), kind, "{plugin}");
    }
    assert!(mounted(&place("local-volume", "disk")).is_some());
    assert!(!cluster.data().join("agent/memory").exists());

    std::fs::write(place("empty-dir", "e").join("end"), "").unwrap();
    cluster.wait("the pod to succeed", || {
        cluster.pod("one")["status"]["phase"] == "Succeeded"
    });
    let left = || {
        let plugins = std::fs::read_dir(dir.join("volumes")).unwrap().flatten();
        let volumes = plugins.flat_map(|p| std::fs::read_dir(p.path()).unwrap().flatten());
        volumes.map(|v| v.path()).collect::<Vec<_>>()
    };
    cluster.wait_quietly("the pod's volumes to be removed", || left().is_empty());
    assert!(
        dir.join("containers").exists(),
        "other files remain until the pod is deleted"
    );
    let log = || kubectl(&cluster, &["logs", "one"]).output().unwrap();
    assert_eq!(log().stdout, b"said\n");
    let file = std::fs::read_to_string(local.path().join("file"));
    assert_eq!(file.unwrap(), "x\n");
    unmounts_are_counted(&cluster);
    // A restarted agent has nothing to do for the pod.
    cluster.kill("agent");
    cluster.up();
    cluster.wait("the pod's log again", || log().stdout == b"said\n");
    cluster.kubectl(&["delete", "pod", "one"]);
    cluster.wait_quietly("no leftovers", || cluster.leftovers().is_empty());
}
