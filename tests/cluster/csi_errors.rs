//! The calls to drivers that fail, are busy, republish or are replaced, with a real containerd.
#![allow(clippy::unwrap_used)]

use crate::driver;
use crate::support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driver::Driver;
use support::{Cluster, condition};

const NAME: &str = "errors.test";

fn pod(name: &str, image: &str, mount: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{{name: v, mountPath: /v{mount}}}]}}], volumes: [{{name: v, persistentVolumeClaim: {{claimName: v}}}}]}}\n---\n"
    )
}

/// A call that failed with a final error is not undone.
fn what_was_refused_is_not_undone(cluster: &Cluster, driver: &Driver, image: &str) {
    driver.fail_calls("stage", true);
    cluster.apply(&pod("refused", image, ""));
    cluster.wait("an event about the refusal", || {
        cluster
            .events("refused")
            .contains("this is refused for good")
    });
    // A cancelled attempt would have to be undone. So the pod is deleted while the retries are seconds apart.
    cluster.wait("the attempts to be seconds apart", || {
        driver.count("stage") > 3
            && cluster
                .holdfast(&["explain", "pod", "refused"])
                .contains("next try in")
    });
    cluster.kubectl(&["delete", "pod", "refused"]);
    assert_eq!(
        (driver.count("publish"), driver.count("unstage")),
        (0, 0),
        "{:?}",
        driver.calls()
    );
    driver.fail_calls("stage", false);
}

/// Neither a socket that does not answer nor a driver that does not answer NodeGetInfo delays the
/// registration of another driver.
fn registered_beside_those_that_hang(cluster: &Cluster, registry: &Path) {
    let silent = registry.join("silent-reg.sock");
    let listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let slow = Driver::new("slow.test", dirs[0].path());
    slow.hang_calls("info", true);
    let slow = slow.run(registry);
    cluster.wait("a call of the slow driver", || {
        slow.driver.count("info") > 0
    });
    let begun = Instant::now();
    let quick = Driver::new("quick.test", dirs[1].path()).run(registry);
    let is_registered = |driver: &Driver| driver.outcome().as_deref() == Some("");
    cluster.wait("the quick driver's registration", || {
        is_registered(&quick.driver)
    });
    let drivers = || {
        let names = "jsonpath={.items[0].spec.drivers[*].name}";
        cluster.kubectl(&["get", "csinodes", "-o", names])
    };
    cluster.wait("the quick driver to be in CSINode", || {
        drivers().contains("quick.test")
    });
    let took = begun.elapsed();
    // The slow one times out after 15 s.
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert!(!drivers().contains("slow.test"));
    slow.driver.hang_calls("info", false);
    cluster.wait("the slow driver to be registered", || {
        is_registered(&slow.driver) && drivers().contains("slow.test")
    });
    drop((slow, quick, listener));
    std::fs::remove_file(silent).unwrap();
    cluster.wait("both drivers to be unregistered", || {
        !drivers().contains("slow.test")
    });
}

/// A driver that mounts nothing unregisters while a pod uses its volume. The pod gets no events while
/// it runs. When it is deleted, its other volumes are undone nevertheless.
fn gone_with_a_volume(cluster: &Cluster, driver: &Driver, image: &str, registry: &Path) {
    const GONE: &str = "gone.test";
    let dir = tempfile::tempdir().unwrap();
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {GONE}}}\nspec: {{attachRequired: false}}\n---\n{}{}",
        volume(
            "a-gone",
            "ReadWriteOnce",
            &format!("csi: {{driver: {GONE}, volumeHandle: gone-1, volumeAttributes: {{unmounted: ''}}}}")
        ),
        volume(
            "kept",
            "ReadWriteOnce",
            &format!("csi: {{driver: {NAME}, volumeHandle: kept-1}}")
        ),
    ));
    let gone = Driver::new(GONE, dir.path()).run(registry);
    cluster.apply(&pod("both", image, "").replace(
        "volumes: [{name: v, persistentVolumeClaim: {claimName: v}}]",
        "volumes: [{name: v, persistentVolumeClaim: {claimName: a-gone}}, {name: w, persistentVolumeClaim: {claimName: kept}}, {name: unused, configMap: {name: nosuch}}]",
    ).replace(
        "volumeMounts: [{name: v, mountPath: /v}]",
        "volumeMounts: [{name: v, mountPath: /v}, {name: w, mountPath: /w}]",
    ));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("both"), "Ready") == "True"
    });
    let refreshes = || {
        let published = driver.count("publish kept-1");
        cluster.wait("some refreshes", || {
            driver.count("publish kept-1") > published + 2
        });
    };
    // As a privileged pod leaves it, with a mountPropagation of Bidirectional.
    let uid = cluster.pod("both")["metadata"]["uid"].clone();
    let agent = cluster
        .data()
        .join("agent/pods")
        .join(uid.as_str().unwrap());
    let nested = agent.join("volumes/kubernetes.io~csi/kept/mount/nested");
    std::fs::create_dir(&nested).unwrap();
    let (none, flags) = (None::<&str>, nix::mount::MsFlags::empty());
    nix::mount::mount(none, &nested, Some("tmpfs"), flags, none).unwrap();
    // The volume has no mount that the agent could check.
    refreshes();
    assert_eq!(gone.driver.count("publish gone-1"), 1);
    drop(gone);
    refreshes();
    assert_eq!(cluster.events("both").matches("FailedMount").count(), 0);
    cluster.kubectl(&["delete", "pod", "both", "--wait=false"]);
    cluster.wait("the other volume to be unstaged", || {
        driver.count("unstage kept-1") == 1
    });
    assert_eq!(cluster.pods().len(), 1);
    let again = Driver::new(GONE, dir.path()).run(registry);
    cluster.wait("the pod to be removed", || cluster.pods().is_empty());
    cluster.wait("the pod's volume to be unstaged", || {
        again.driver.count("unstage gone-1") == 1
    });
}

/// A driver that fails to unstage delays neither the pod that had the volume nor the next one. The
/// agent retries, also after a restart. A driver that does not answer does not delay the pod either.
fn a_volume_that_stays_staged_blocks_no_pod(cluster: &Cluster, driver: &Driver, image: &str) {
    let named = |name: &str| {
        cluster.apply(&pod(name, image, ""));
        cluster.wait("the pod to be ready", || {
            condition(&cluster.pod(name), "Ready") == "True"
        });
    };
    let delete = |name: &str| {
        let begun = Instant::now();
        cluster.kubectl(&["delete", "pod", name]);
        assert!(
            begun.elapsed() < Duration::from_secs(15),
            "{name} was removed after {:?}",
            begun.elapsed()
        );
    };
    let counted = || ["stage v-1", "unstage v-1"].map(|call| driver.count(call));
    let staging = cluster
        .data()
        .join("agent/plugins/kubernetes.io/csi")
        .join(NAME);
    let is_staged = || std::fs::read_dir(&staging).is_ok_and(|mut dirs| dirs.next().is_some());
    driver.hang_calls("unstage", true);
    named("first");
    delete("first");
    assert!(is_staged());
    driver.hang_calls("unstage", false);
    cluster.wait("the volume to be unstaged", || !is_staged());
    let [staged, _] = counted();
    driver.fail_calls("unstage", true);
    named("first");
    delete("first");
    assert!(is_staged());
    // The volume may be unstaged already: the next pod stages it again.
    named("second");
    assert_eq!(counted()[0], staged + 2, "{:?}", driver.calls());
    delete("second");
    let [_, before] = counted();
    cluster.wait("the next call of the driver", || counted()[1] > before);
    cluster.kill("agent");
    driver.fail_calls("unstage", false);
    let [_, before] = counted();
    cluster.up();
    cluster.wait("the next agent to unstage the volume", || !is_staged());
    assert_eq!(counted(), [staged + 2, before + 1], "{:?}", driver.calls());
}

#[test]
fn drivers_get_only_the_necessary_calls() {
    let cluster = Cluster::start_configured("csi-errors", 96, "{syncFrequency: 2s}");
    let image = support::busybox(&cluster);
    let dir = tempfile::tempdir().unwrap();
    let registry = cluster.data().join("agent/plugins_registry");
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {NAME}}}\nspec: {{attachRequired: false, requiresRepublish: true}}\n---\napiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: v}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: v}}, csi: {{driver: {NAME}, volumeHandle: v-1}}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: v}}\nspec: {{storageClassName: '', accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    ));
    let first = Driver::new(NAME, dir.path()).run(&registry);
    let driver = first.driver.clone();
    cluster.wait("the registration", || driver.outcome().is_some());

    registered_beside_those_that_hang(&cluster, &registry);
    what_was_refused_is_not_undone(&cluster, &driver, &image);
    gone_with_a_volume(&cluster, &driver, &image, &registry);
    a_volume_that_stays_staged_blocks_no_pod(&cluster, &driver, &image);

    // The volume is republished regularly, and staged once. Its subpaths are unmounted before the driver is called.
    let staged = driver.count("stage");
    cluster.apply(&pod("one", &image, ", subPath: a/b"));
    cluster.wait("the pod to be ready", || ready("one"));
    cluster.wait("the volume to be republished", || {
        driver.count("publish v-1") > 3
    });
    assert_eq!(driver.count("stage"), staged + 1, "{:?}", driver.calls());
    let unstaged = driver.count("unstage v-1");
    cluster.apply(&pod("two", &image, ""));
    cluster.wait("the second pod to be ready", || ready("two"));
    assert_eq!(driver.count("stage"), staged + 1, "{:?}", driver.calls());
    cluster.kubectl(&["delete", "pod", "one"]);
    assert_eq!(
        (driver.count("busy"), driver.count("unstage v-1")),
        (0, unstaged),
        "{:?}",
        driver.calls()
    );

    // A driver that is being replaced has two sockets for a while. It stays registered when the older
    // socket is removed.
    let later = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(registry.join("later")).unwrap();
    let second = Driver::new(NAME, later.path()).run(&registry.join("later"));
    cluster.wait("the second registration", || {
        second.driver.outcome().is_some()
    });
    drop(first);
    let published = second.driver.count("publish");
    cluster.wait("a call of the second driver", || {
        second.driver.count("publish") > published
    });
    cluster.kubectl(&["delete", "pod", "two"]);
    cluster.wait("the volume to be unstaged", || {
        second.driver.count("unstage") == 1
    });
    cluster.assert_clean();
}

/// A PersistentVolume and its claim.
fn volume(name: &str, mode: &str, source: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [{mode}], claimRef: {{namespace: default, name: {name}}}, {source}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', accessModes: [{mode}], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    )
}

/// A driver's volume of an unknown pod, without its `vol_data.json`.
struct Unknown {
    pod: PathBuf,
    outside: tempfile::TempDir,
}

impl Unknown {
    fn mount(cluster: &Cluster) -> Unknown {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("canary"), "alive").unwrap();
        let pod = cluster
            .data()
            .join("agent/pods/2f8c1d3e-0000-4000-8000-000000000000");
        let place = pod.join("volumes/kubernetes.io~csi/lost/mount");
        std::fs::create_dir_all(&place).unwrap();
        let bind = nix::mount::MsFlags::MS_BIND;
        nix::mount::mount(
            Some(outside.path()),
            &place,
            None::<&str>,
            bind,
            None::<&str>,
        )
        .unwrap();
        Unknown { pod, outside }
    }
}

/// With ReadWriteOncePod, a pod holds its volume until the driver has unpublished it, even if the agent
/// restarts and the pod is force-deleted.
fn alone_until_undone(cluster: &Cluster, driver: &Driver, [one, two]: [String; 2]) {
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    cluster.apply(&one);
    cluster.wait("the pod to be ready", || ready("one"));
    driver.fail_calls("unpublish", true);
    cluster.kubectl(&["delete", "pod", "one", "--force", "--grace-period=0"]);
    cluster.wait("the refusal", || driver.count("unpublish vol-4") > 0);
    cluster.kill("agent");
    let unknown = Unknown::mount(cluster);
    let before = driver.count("unpublish vol-4");
    cluster.up();
    cluster.apply(&two);
    cluster.wait("an event about the second pod", || {
        cluster
            .events("two")
            .contains("already in use by another pod")
    });
    assert_eq!(driver.count("publish vol-4"), 1, "{:?}", driver.calls());
    // The agent retries the cleanup of the first pod, which blocks nothing else.
    cluster.wait("the next calls of the driver", || {
        driver.count("unpublish vol-4") > before + 2
    });
    cluster.wait_quietly("other leftovers to be removed", || !unknown.pod.exists());
    for (sample, value) in [
        ("kubelet_orphan_pod_cleaned_volumes_errors", 1.0),
        ("force_cleaned_failed_volume_operations_total", 1.0),
        ("force_cleaned_failed_volume_operation_errors_total", 0.0),
    ] {
        cluster.wait(sample, || cluster.metric(sample) == Some(value));
    }
    assert!(unknown.outside.path().join("canary").exists());
    driver.fail_calls("unpublish", false);
    let repaired_at = Instant::now();
    cluster.wait("the second pod to be ready", || ready("two"));
    // By then the retries are some seconds apart, not a minute.
    assert!(
        repaired_at.elapsed() < Duration::from_secs(40),
        "{:?}",
        repaired_at.elapsed()
    );

    // A pod that stops normally passes the volume on immediately.
    let three = two.replace("{name: two}", "{name: three}");
    cluster.apply(&three);
    cluster.wait("an event about the third pod", || {
        cluster.events("three").matches("already in use").count() > 0
    });
    cluster.kubectl(&["delete", "pod", "two"]);
    cluster.wait("the third pod to be ready", || ready("three"));
    cluster.kubectl(&["delete", "pod", "three"]);
}

/// A driver that exits during NodeStageVolume may have staged the volume: the agent unstages it when
/// the driver returns.
fn cut_off_in_staging(
    cluster: &Cluster,
    first: driver::Running,
    (pod, name): (&str, &'static str),
    registry: &Path,
) {
    let (driver, dir) = (first.driver.clone(), tempfile::tempdir().unwrap());
    driver.hang_calls("stage", true);
    cluster.apply(pod);
    cluster.wait("a call to stage the volume", || {
        driver.count("stage vol-3") > 0
    });
    drop(first);
    cluster.wait("an event about the failure", || {
        cluster.events("cut").contains("code = Unavailable")
    });
    cluster.kubectl(&["delete", "pod", "cut", "--wait=false"]);
    let second = Driver::new(name, dir.path()).run(registry);
    cluster.wait("the volume to be unstaged", || {
        second.driver.count("unstage vol-3") == 1
    });
    cluster.wait("the pod to be removed", || cluster.pods().is_empty());
}

/// A driver whose limit the agent queries periodically, with an in-tree volume that is migrated to it
/// and two of its own.
fn objects(name: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {name}}}\nspec: {{attachRequired: false, nodeAllocatableUpdatePeriodSeconds: 10}}\n---\n{}{}{}",
        volume(
            "old",
            "ReadWriteOnce",
            "awsElasticBlockStore: {volumeID: 'aws://here/vol-1', fsType: ext4}"
        ),
        volume(
            "cut",
            "ReadWriteOnce",
            &format!("csi: {{driver: {name}, volumeHandle: vol-3}}")
        ),
        volume(
            "alone",
            "ReadWriteOncePod",
            &format!("csi: {{driver: {name}, volumeHandle: vol-4}}")
        ),
    )
}

/// A driver that serves migrated in-tree volumes, whose limit changes and which exits during a call.
#[test]
fn migrated_volumes_new_limits_and_volumes_of_unknown_state() {
    const EBS: &str = "ebs.csi.aws.com";
    let cluster = Cluster::start("csi-state", 95);
    let image = support::busybox(&cluster);
    let dir = tempfile::tempdir().unwrap();
    let registry = cluster.data().join("agent/plugins_registry");
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    let csi_node_field = |path: &str| {
        let path = format!("jsonpath={{.items[0].{path}}}");
        cluster.kubectl(&["get", "csinodes", "-o", &path])
    };
    // Attachers and the scheduler see immediately which in-tree plugins are migrated.
    assert_eq!(
        csi_node_field(r"metadata.annotations.storage\.alpha\.kubernetes\.io/migrated-plugins"),
        holdfast_core::volume::migrated::PLUGINS.join(",")
    );
    let of = |name: &str, source: &str| {
        pod(name, &image, "").replace("persistentVolumeClaim: {claimName: v}", source)
    };
    let by_claim = |name: &str, claim: &str| {
        of(
            name,
            &format!("persistentVolumeClaim: {{claimName: {claim}}}"),
        )
    };
    cluster.apply(&objects(EBS));
    let first = Driver::new(EBS, dir.path()).run(&registry);
    let driver = first.driver.clone();
    cluster.wait("the driver's limit", || {
        csi_node_field("spec.drivers").contains(r#""count":7"#)
    });
    driver.set_volume_limit(9);
    cluster.apply(&format!(
        "{}{}",
        by_claim("claimed", "old"),
        of("inline", "awsElasticBlockStore: {volumeID: vol-2}")
    ));
    cluster.wait("pods to be ready", || ready("claimed") && ready("inline"));
    let published = ["vol-1", "vol-2"].map(|volume| driver.count(&format!("publish {volume}")));
    assert_eq!(published, [1, 1]);
    cluster.kubectl(&["delete", "pod", "claimed", "inline"]);
    cluster.wait("volumes to be unstaged", || driver.count("unstage") == 2);

    // The CSIDriver requests this query every ten seconds.
    cluster.wait("the driver's new limit", || {
        csi_node_field("spec.drivers").contains(r#""count":9"#)
    });

    alone_until_undone(
        &cluster,
        &driver,
        ["one", "two"].map(|name| by_claim(name, "alone")),
    );

    cut_off_in_staging(&cluster, first, (&by_claim("cut", "cut"), EBS), &registry);
    cluster.assert_clean();
}

/// If the scheduler binds a pod to a node that cannot attach its volume, the pod fails, so that its
/// controller creates another one (KEP-4876). The test plays the attacher.
#[test]
fn a_pod_fails_at_the_volume_attachment_limit() {
    const FULL: &str = "full.test";
    let cluster = Cluster::start("csi-full", 97);
    let image = support::busybox(&cluster);
    let dir = tempfile::tempdir().unwrap();
    let registry = cluster.data().join("agent/plugins_registry");
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {FULL}}}\nspec: {{attachRequired: true, nodeAllocatableUpdatePeriodSeconds: 600}}\n---\n{}",
        volume(
            "v",
            "ReadWriteOnce",
            &format!("csi: {{driver: {FULL}, volumeHandle: full-1}}")
        ),
    ));
    let full = Driver::new(FULL, dir.path()).run(&registry);
    cluster.wait("the registration", || full.driver.outcome().is_some());
    full.driver.set_volume_limit(3);
    cluster.apply(&pod("over", &image, ""));
    let begun = Instant::now();
    let attachments = || cluster.kubectl(&["get", "volumeattachments", "-o", "name"]);
    cluster.wait("the attachment", || !attachments().trim().is_empty());
    let status = r#"{"status": {"attached": false, "attachError": {"message": "no room in the rack", "errorCode": 8}}}"#;
    let patch = ["--subresource=status", "--type=merge", "-p", status];
    cluster.kubectl(&[&["patch", attachments().trim()], &patch[..]].concat());
    let failed = || cluster.pod("over")["status"]["phase"] == "Failed";
    // Until then its attacher may find capacity.
    while begun.elapsed() < Duration::from_secs(115) {
        assert!(!failed(), "{}", cluster.pod("over"));
        std::thread::sleep(Duration::from_secs(1));
    }
    cluster.wait("the pod to fail", failed);
    let status = &cluster.pod("over")["status"];
    assert_eq!(status["reason"], "VolumeAttachmentLimitExceeded");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.starts_with(
            "Pod was rejected: Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[v], unattached volumes=[v],"
        ),
        "{message}"
    );
    let drivers = cluster.kubectl(&["get", "csinodes", "-o", "jsonpath={.items[0].spec.drivers}"]);
    assert!(drivers.contains(r#""count":3"#), "{drivers}");
    assert_eq!(full.driver.count("stage"), 0);
    cluster.delete_finished();
    cluster.wait("the attachment to be deleted", || {
        attachments().trim().is_empty()
    });
    cluster.assert_clean();
}
