//! CSI drivers with a real containerd and a small driver of our own.
#![allow(clippy::unwrap_used)]

use crate::driver;
use crate::support;

use std::time::{Duration, Instant};

use driver::Driver;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::{Cluster, condition};

const NAME: &str = "directories.test";

fn inside(cluster: &Cluster, pod: &str, script: &str) -> String {
    support::inside(cluster, pod, &["busybox", "sh", "-c", script])
}

/// The volume's usage as the driver reports it, and the metrics of calls for it.
fn metrics_describe_the_volume(cluster: &Cluster) {
    let cluster_node = cluster.node_name();
    let path = format!("/api/v1/nodes/{cluster_node}/proxy/stats/summary");
    let mut full = serde_json::Value::Null;
    cluster.wait("the volume's figures", || {
        let summary = cluster.kubectl(&["get", "--raw", &path]);
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let mut volumes = summary["pods"][0]["volume"]
            .as_array()
            .into_iter()
            .flatten();
        full = volumes
            .find(|v| v["pvcRef"]["name"] == "shared")
            .cloned()
            .unwrap_or_default();
        full.is_object()
    });
    assert_eq!(
        (&full["name"], &full["usedBytes"], &full["inodesFree"]),
        (&"v".into(), &700.into(), &3.into()),
        "{full}"
    );
    assert_eq!(full["volumeHealthStats"]["abnormal"], true);
    let metrics = cluster.kubectl(&[
        "get",
        "--raw",
        &format!("/api/v1/nodes/{cluster_node}/proxy/metrics"),
    ]);
    let published = r#"csi_operations_seconds_count{driver_name="directories.test",grpc_status_code="OK",method_name="/csi.v1.Node/NodePublishVolume",migrated="false"}"#;
    assert!(metrics.contains(published), "{metrics}");
    for (sample, least) in [
        (
            r#"storage_operation_duration_seconds_count{migrated="false",operation_name="volume_mount",status="success",volume_plugin="kubernetes.io/csi:directories.test"}"#,
            1,
        ),
        (
            r#"volume_operation_total_seconds_count{plugin_name="kubernetes.io/csi:directories.test",operation_name="overall_volume_mount"}"#,
            1,
        ),
        (
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/csi:directories.test",state="actual_state_of_world"}"#,
            1,
        ),
        (
            r#"volume_manager_total_volumes{plugin_name="kubernetes.io/csi:directories.test",state="desired_state_of_world"}"#,
            1,
        ),
        ("reconstruct_volume_operations_total", 0),
    ] {
        let line = metrics.lines().find_map(|line| line.strip_prefix(sample));
        let value = line.and_then(|value| value.trim().parse::<f64>().ok());
        assert!(
            value.is_some_and(|value| value >= f64::from(least)),
            "{sample}: {metrics}"
        );
    }
    assert!(metrics.contains("kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"shared\"} 700"), "{metrics}");
}

fn metrics_count_the_steps(cluster: &Cluster) {
    let node = cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"]);
    let path = format!("/api/v1/nodes/{node}/proxy/metrics");
    let metrics = cluster.kubectl(&["get", "--raw", &path]);
    for (operation, status, driver) in [
        (
            "verify_controller_attached_volume",
            "fail-unknown",
            "attached.test",
        ),
        (
            "verify_controller_attached_volume",
            "success",
            "attached.test",
        ),
        ("unmount_device", "success", "attached.test"),
        ("unmap_device", "success", NAME),
    ] {
        let sample = format!(
            r#"storage_operation_duration_seconds_count{{migrated="false",operation_name="{operation}",status="{status}",volume_plugin="kubernetes.io/csi:{driver}"}}"#
        );
        assert!(metrics.contains(&sample), "{sample}: {metrics}");
    }
}

/// A driver that does not answer blocks only its own pod. The agent waits for the call and undoes its
/// result afterwards.
fn slow_calls_are_waited_for(cluster: &Cluster, driver: &Driver, [slow, quick]: [String; 2]) {
    driver.hang_calls("publish shared-1", true);
    let before = driver.calls().len();
    let volume_calls = || {
        let calls = driver.calls().split_off(before);
        let of_volume = calls.into_iter().filter(|call| {
            call.ends_with(" shared-1") && !call.starts_with("stats") && !call.starts_with("expand")
        });
        of_volume.collect::<Vec<_>>()
    };
    let begun = ["stage shared-1", "publish shared-1"];
    cluster.apply(&slow);
    cluster.wait("the driver to be called", || volume_calls() == begun);
    cluster.kubectl(&["delete", "pod", "slow", "--wait=false"]);
    cluster.apply(&quick);
    cluster.wait(
        "another pod with a volume of the driver to be ready",
        || condition(&cluster.pod("quick"), "Ready") == "True",
    );
    cluster.kubectl(&["delete", "pod", "quick"]);
    assert_eq!(
        volume_calls(),
        begun,
        "no call is reverted before it has finished"
    );
    driver.hang_calls("publish shared-1", false);
    cluster.wait("the slow pod to be removed", || {
        cluster
            .kubectl(&["get", "pod", "slow", "--ignore-not-found"])
            .is_empty()
    });
    let undone = ["unpublish shared-1", "unstage shared-1"];
    let all = [begun, undone].concat();
    cluster.wait("all calls to be reverted", || {
        volume_calls().len() >= all.len()
    });
    assert_eq!(volume_calls(), all);
}

const ATTACHED: &str =
    r#"{"status": {"attached": true, "attachError": null, "attachmentMetadata": {"lun": "7"}}}"#;

/// The name of the only VolumeAttachment.
fn attachment(cluster: &Cluster) -> String {
    let names = "jsonpath={.items[*].metadata.name}";
    cluster.kubectl(&["get", "volumeattachments", "-o", names])
}

/// Writes the attacher's status into the VolumeAttachment.
fn patch_attachment(cluster: &Cluster, status: &str) {
    let name = attachment(cluster);
    cluster.kubectl(&[
        "patch",
        "volumeattachment",
        &name,
        "--subresource=status",
        "--type=merge",
        "--patch",
        status,
    ]);
}

fn patch_finalizers(cluster: &Cluster, finalizers: &str) {
    let (name, patch) = (
        attachment(cluster),
        format!(r#"{{"metadata": {{"finalizers": {finalizers}}}}}"#),
    );
    let patch = ["--type=merge", "--patch", &patch];
    cluster.kubectl(&[&["patch", "volumeattachment", &name], &patch[..]].concat());
}

/// A volume that is not attached, or that is being detached, is not mounted, although pods of this node have used it.
fn what_is_not_attached_is_not_mounted(cluster: &Cluster, driver: &Driver, waiting: &str) {
    let pod = |name: &str| waiting.replace("{name: waiting}", &format!("{{name: {name}}}"));
    let node = |path: &str| {
        let path = format!("jsonpath={{.items[0].status.{path}}}");
        cluster.kubectl(&["get", "nodes", "-o", &path])
    };
    let wait_for_event = |name: &str, what: &str| {
        cluster.wait(what, || cluster.events(name).contains(what));
    };
    assert_eq!(driver.count("stage"), 1);
    patch_finalizers(cluster, r#"["attacher.test/detach"]"#);
    patch_attachment(cluster, r#"{"status": {"attached": false}}"#);
    cluster.apply(&pod("second"));
    wait_for_event("second", "waiting for its attacher");
    // A waiting pod has not mounted the volume: it is unstaged after the last pod that has.
    cluster.kubectl(&["delete", "pod", "waiting"]);
    cluster.wait("the volume to be unstaged", || driver.count("unstage") == 1);
    // The attacher is slow: the VolumeAttachment still shows `attached` while the volume is being detached.
    cluster.kubectl(&["delete", "pod", "second"]);
    cluster.wait("the attachment to be deleted", || {
        let at = "jsonpath={.items[0].metadata.deletionTimestamp}";
        !cluster
            .kubectl(&["get", "volumeattachments", "-o", at])
            .is_empty()
    });
    patch_attachment(cluster, ATTACHED);
    cluster.apply(&pod("third"));
    wait_for_event("third", "is being deleted");
    assert!(!node("volumesAttached").contains("attached.test"));
    let explained = cluster.holdfast(&["explain", "pod", "third"]);
    assert!(explained.contains("is being deleted"), "{explained}");
    assert_eq!(driver.count("stage"), 1, "{:?}", driver.calls());
    let old = cluster.kubectl(&[
        "get",
        "volumeattachments",
        "-o",
        "jsonpath={.items[0].metadata.uid}",
    ]);
    patch_finalizers(cluster, "null");
    cluster.wait("a new attachment of the volume", || {
        let uid = cluster.kubectl(&[
            "get",
            "volumeattachments",
            "-o",
            "jsonpath={.items[*].metadata.uid}",
        ]);
        !uid.is_empty() && uid != old
    });
    patch_attachment(cluster, ATTACHED);
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("third"), "Ready") == "True"
    });
}

/// The resizer sets the claim's status when the node should expand the volume. If the node cannot, the
/// agent records this in the claim and does not retry until the claim's status changes.
fn a_resize_is_followed_at_the_claim(cluster: &Cluster, driver: &Driver) {
    let turn = r#"{"status": {"allocatedResources": {"storage": "3Mi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}}"#;
    let patch = |kind: &str, more: &[&str], patch: &str| {
        let mut command = vec!["patch", kind, "shared", "--type=merge", "--patch", patch];
        command.extend(more);
        cluster.kubectl(&command);
    };
    let restart_agent = || {
        kill(Pid::from_raw(cluster.pid("agent")), Signal::SIGKILL).unwrap();
        cluster.up();
    };
    let claim_status = || {
        let fields = "jsonpath={.status.capacity.storage} {.status.allocatedResourceStatuses.storage} {.status.conditions[*].type}";
        cluster.kubectl(&["get", "pvc", "shared", "-o", fields])
    };
    driver.fail_calls("expand", true);
    patch("pvc", &["--subresource=status"], turn);
    // The size in the claim's status counts, not the capacity of the volume.
    patch("pv", &[], r#"{"spec": {"capacity": {"storage": "4Mi"}}}"#);
    restart_agent();
    cluster.wait("the claim to show that the resize is infeasible", || {
        claim_status() == "2Mi NodeResizeInfeasible Other NodeResizeError"
    });
    driver.fail_calls("expand", false);
    patch("pvc", &["--subresource=status"], turn);
    restart_agent();
    cluster.wait("the claim to show the new size", || {
        claim_status() == "3Mi  Other"
    });
    let calls = driver.calls();
    assert!(
        !calls.contains(&"expand to 4194304 shared-1".to_owned()),
        "{calls:?}"
    );
    // After a failure the agent retries with a doubling back-off, and does not wait for the next refresh,
    // a minute later.
    let larger = r#"{"status": {"allocatedResources": {"storage": "5Mi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}}"#;
    driver.lose_responses("expand", true);
    patch("pvc", &["--subresource=status"], larger);
    restart_agent();
    let tried = |times: usize| driver.count("expand to 5242880 shared-1") >= times;
    cluster.wait("the first attempt", || tried(1));
    let begun = Instant::now();
    cluster.wait("the fourth attempt", || tried(4));
    let took = begun.elapsed();
    assert!(
        took > Duration::from_secs(3) && took < Duration::from_secs(20),
        "{took:?}"
    );
    driver.lose_responses("expand", false);
    cluster.wait("the claim to show the new size", || {
        claim_status() == "5Mi  Other"
    });
}

/// A new pod does not get its volume before the volume has the size that its claim requires.
fn a_pod_waits_for_the_growth_of_its_volume(cluster: &Cluster, driver: &Driver, pod: &str) {
    let turn = r#"{"status": {"allocatedResources": {"storage": "6Mi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}}"#;
    driver.lose_responses("expand", true);
    let status = "--subresource=status";
    cluster.kubectl(&["patch", "pvc", "shared", status, "--type=merge", "-p", turn]);
    cluster.apply(pod);
    cluster.wait("an event about the failed resize", || {
        cluster.events("grows").contains(
            "MountVolume.Setup failed while expanding volume for volume \"shared\" : Expander.NodeExpand failed to expand the volume : ",
        )
    });
    assert_ne!(condition(&cluster.pod("grows"), "Ready"), "True");
    driver.lose_responses("expand", false);
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("grows"), "Ready") == "True"
    });
    let has = "jsonpath={.status.capacity.storage}";
    assert_eq!(cluster.kubectl(&["get", "pvc", "shared", "-o", has]), "6Mi");
    cluster.kubectl(&["delete", "pod", "grows"]);
}

#[test]
fn drivers_register_and_volumes_are_staged_published_and_removed() {
    let cluster = Cluster::start("csi", 38);
    let image = support::busybox(&cluster);
    let (dir, root) = (tempfile::tempdir().unwrap(), cluster.data().join("agent"));
    let registry = root.join("plugins_registry");
    let pod = |name: &str, volume: &str, more: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, {more} containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, {volume}}}]}}\n---\n"
        )
    };
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    let volume = |name: &str, source: &str| {
        format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: {name}}}, {source}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
        )
    };
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "login",
        "--from-literal=user=me",
    ]);
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {NAME}}}\nspec: {{attachRequired: false, podInfoOnMount: true, volumeLifecycleModes: [Persistent, Ephemeral], fsGroupPolicy: File, tokenRequests: [{{audience: vault}}]}}\n---\n{}{}",
        volume("shared", &format!("csi: {{driver: {NAME}, volumeHandle: shared-1, nodePublishSecretRef: {{namespace: default, name: login}}, volumeAttributes: {{color: blue}}}}")),
        volume("elsewhere", "csi: {driver: attached.test, volumeHandle: e}"),
    ));
    // A pod that is created before its driver waits, names the driver in an event, and starts upon the registration.
    let by_claim = "persistentVolumeClaim: {claimName: shared}";
    cluster.apply(&pod(
        "one",
        by_claim,
        "securityContext: {runAsUser: 1000, fsGroup: 4242},",
    ));
    cluster.wait("an event about the missing driver", || {
        cluster.events("one").contains(&format!(
            "driver name {NAME} not found in the list of registered CSI drivers"
        ))
    });
    let running = Driver::new(NAME, dir.path()).run(&registry);
    let driver = running.driver.clone();
    cluster.wait("the registration", || {
        driver.outcome().as_deref() == Some("")
    });
    cluster.wait("the pod to be ready", || ready("one"));
    cluster.wait("the driver to be in CSINode", || {
        let node = cluster.kubectl(&["get", "csinodes", "-o", "jsonpath={.items[0].spec.drivers}"]);
        node.contains(NAME)
            && node.contains("node-of-test")
            && node.contains("topology.test/zone")
            && node.contains('7')
    });
    cluster.wait("the node's annotation and label", || {
        let node = cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[0].metadata}"]);
        node.contains("csi.volume.kubernetes.io/nodeid") && node.contains("topology.test/zone")
    });
    assert_eq!(
        inside(
            &cluster,
            "one",
            "echo hello > /v/file && stat -c %g /v/file /v"
        ),
        "4242\n4242"
    );
    assert_eq!(
        std::fs::read_to_string(dir.path().join("shared-1/file")).unwrap(),
        "hello\n"
    );
    let (context, secrets) = driver.received();
    assert_eq!(
        (
            context["color"].as_str(),
            context["csi.storage.k8s.io/pod.name"].as_str(),
            secrets["user"].as_str()
        ),
        ("blue", "one", "me")
    );
    assert!(context["csi.storage.k8s.io/serviceAccount.tokens"].contains("vault"));

    metrics_describe_the_volume(&cluster);

    // A second pod: staged once, published twice; undone in the reverse order.
    cluster.apply(&pod("two", by_claim, ""));
    cluster.wait("the second pod to be ready", || ready("two"));
    assert_eq!(inside(&cluster, "two", "cat /v/file"), "hello");
    cluster.kubectl(&["delete", "pod", "one"]);
    assert_eq!(
        (driver.count("unpublish"), driver.count("unstage")),
        (1, 0),
        "{:?}",
        driver.calls()
    );
    // A restarted agent recovers its state and publishes nothing again.
    let published = driver.count("publish");
    // Meanwhile the controller has expanded the volume, but not its filesystem.
    cluster.kubectl(&[
        "patch",
        "pv",
        "shared",
        "--type=merge",
        "--patch",
        r#"{"spec": {"capacity": {"storage": "2Mi"}}}"#,
    ]);
    let pending = r#"{"status": {"conditions": [{"type": "FileSystemResizePending", "status": "True"}, {"type": "Other", "status": "True"}]}}"#;
    cluster.kubectl(&[
        "patch",
        "pvc",
        "shared",
        "--subresource=status",
        "--type=merge",
        "--patch",
        pending,
    ]);
    kill(Pid::from_raw(cluster.pid("agent")), Signal::SIGKILL).unwrap();
    cluster.up();
    cluster.wait("the filesystem to grow", || {
        driver.count("expand to 2097152 shared-1") > 0
    });
    let claim = || {
        cluster.kubectl(&[
            "get",
            "pvc",
            "shared",
            "-o",
            "jsonpath={.status.capacity.storage} {.status.conditions[*].type}",
        ])
    };
    cluster.wait("the claim to show the new size", || claim() == "2Mi Other");
    cluster.wait("the event about the new size", || {
        cluster.events("two").contains("FileSystemResizeSuccessful")
    });
    a_resize_is_followed_at_the_claim(&cluster, &driver);
    let published = published + 1;
    a_pod_waits_for_the_growth_of_its_volume(&cluster, &driver, &pod("grows", by_claim, ""));
    cluster.kubectl(&["delete", "pod", "two"]);
    cluster.wait("the volume to be unstaged", || driver.count("unstage") == 1);
    assert_eq!(driver.count("publish"), published, "{:?}", driver.calls());

    // Inline volumes are created and deleted with their pod.
    cluster.apply(&pod(
        "inline",
        &format!("csi: {{driver: {NAME}, volumeAttributes: {{size: small}}}}"),
        "",
    ));
    cluster.wait("the inline volume's pod to be ready", || ready("inline"));
    assert_eq!(driver.received().0["csi.storage.k8s.io/ephemeral"], "true");
    cluster.kubectl(&["delete", "pod", "inline"]);

    // Lost responses: the call is repeated, and everything is undone in the end.
    for call in ["stage", "publish"] {
        driver.lose_responses(call, true);
        cluster.apply(&pod("unlucky", by_claim, ""));
        let before = driver.count(call);
        cluster.wait("a failing call", || driver.count(call) > before);
        cluster.wait("an event about the error", || {
            cluster.events("unlucky").contains("the answer was lost")
        });
        driver.lose_responses(call, false);
        cluster.wait("the pod to be ready", || ready("unlucky"));
        cluster.kubectl(&["delete", "pod", "unlucky"]);
    }
    for call in ["unpublish", "unstage"] {
        cluster.apply(&pod("stuck", by_claim, ""));
        cluster.wait("the pod to be ready", || ready("stuck"));
        driver.lose_responses(call, true);
        cluster.kubectl(&["delete", "pod", "stuck", "--wait=false"]);
        let before = driver.count(call);
        cluster.wait("a retry of the call", || {
            driver.count(call) > before + 1 || (before == 0 && driver.count(call) > 1)
        });
        let is_there = || {
            !cluster
                .kubectl(&["get", "pod", "stuck", "--ignore-not-found"])
                .is_empty()
        };
        // The pod's deletion waits for the unpublish call only, because it concerns this pod alone.
        if call == "unpublish" {
            assert!(
                is_there(),
                "the pod stays until the driver has unpublished the volume"
            );
            driver.lose_responses(call, false);
        }
        cluster.wait("the pod to be removed", || !is_there());
        if call == "unstage" {
            let before = driver.count(call);
            driver.lose_responses(call, false);
            cluster.wait("the volume to be unstaged", || driver.count(call) > before);
        }
    }
    // A raw device of a driver.
    let disk = support::disk::Loop::new();
    let raw = format!(
        "volumeMode: Block, csi: {{driver: {NAME}, volumeHandle: raw-1, volumeAttributes: {{device: '{}'}}}}",
        disk.device
    );
    cluster.apply(&volume("raw", &raw).replace(
        "spec: {storageClassName: '', accessModes",
        "spec: {volumeMode: Block, storageClassName: '', accessModes",
    ));
    cluster.apply(
        &pod("raw", "persistentVolumeClaim: {claimName: raw}", "").replace(
            "volumeMounts: [{name: v, mountPath: /v}]",
            "volumeDevices: [{name: v, devicePath: /dev/raw}]",
        ),
    );
    cluster.wait("the pod with a device to be ready", || ready("raw"));
    cluster.wait("the event about the device", || {
        let events = cluster.events("raw");
        let has_event = |place: &str| {
            events.contains(&format!(
                "MapVolume.MapPodDevice succeeded for volume \"raw\" {place}"
            ))
        };
        has_event("globalMapPath \"") && has_event("volumeMapPath \"")
    });
    assert_eq!(
        inside(
            &cluster,
            "raw",
            "echo block > /dev/raw && head -c 5 /dev/raw"
        ),
        "block"
    );
    cluster.kubectl(&["delete", "pod", "raw"]);

    let inline = format!("csi: {{driver: {NAME}}}");
    slow_calls_are_waited_for(
        &cluster,
        &driver,
        [pod("slow", by_claim, ""), pod("quick", &inline, "")],
    );
    // The agent waits until the volume is attached; the test plays the attacher.
    let (other, other_dir) = ("attached.test", tempfile::tempdir().unwrap());
    // The driver's volume limit may change; the agent queries it every ten minutes.
    cluster.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {other}}}\nspec: {{attachRequired: true, nodeAllocatableUpdatePeriodSeconds: 600}}\n"
    ));
    let attached = Driver::new(other, other_dir.path()).run(&registry);
    cluster.wait("the other driver", || {
        attached.driver.outcome().as_deref() == Some("")
    });
    cluster.apply(&pod(
        "waiting",
        "persistentVolumeClaim: {claimName: elsewhere}",
        "",
    ));
    cluster.wait("an event about the missing attachment", || {
        cluster
            .events("waiting")
            .contains("volume is not attached yet: VolumeAttachment csi-")
    });
    let attachment = || attachment(&cluster);
    assert_eq!(attached.driver.count("stage"), 0);
    attached.driver.set_volume_limit(3);
    let failure = r#"{"status": {"attached": false, "attachError": {"message": "no room in the rack", "errorCode": 8}}}"#;
    patch_attachment(&cluster, failure);
    cluster.wait("an event about the failed attachment", || {
        let events = cluster.events("waiting");
        events.contains("FailedAttachVolume")
            && events.contains(
                "AttachVolume.Attach failed for volume \"elsewhere\" : no room in the rack",
            )
    });
    // The driver was full, so the agent queries its volume limit again.
    cluster.wait("the driver's new limit", || {
        let list = cluster.kubectl(&["get", "csinodes", "-o", "jsonpath={.items[0].spec.drivers}"]);
        list.contains(r#""count":3"#)
    });
    cluster.wait("an event with the attacher's error", || {
        cluster
            .events("waiting")
            .contains("of driver attached.test: no room in the rack")
    });
    // Before the mount the Node lists the volume as in use, so that it is not detached.
    let in_use = || {
        cluster
            .kubectl(&[
                "get",
                "nodes",
                "-o",
                "jsonpath={.items[0].status.volumesInUse}",
            ])
            .contains("kubernetes.io/csi/attached.test^e")
    };
    cluster.wait("the volume to be in use", in_use);
    patch_attachment(&cluster, ATTACHED);
    cluster.wait("the pod to be ready", || ready("waiting"));
    cluster.wait("the node's status to list the attachment", || {
        cluster
            .kubectl(&[
                "get",
                "nodes",
                "-o",
                "jsonpath={.items[0].status.volumesAttached}",
            ])
            .contains("kubernetes.io/csi/attached.test^e")
    });
    let waiting = pod(
        "waiting",
        "persistentVolumeClaim: {claimName: elsewhere}",
        "",
    );
    what_is_not_attached_is_not_mounted(&cluster, &attached.driver, &waiting);
    cluster.kubectl(&["delete", "pod", "third"]);
    cluster.wait("the attachment to be deleted", || attachment().is_empty());
    cluster.wait("the volume not to be in use any more", || !in_use());
    metrics_count_the_steps(&cluster);

    // A driver that unregisters is removed from the CSINode, and may return.
    drop((running, attached));
    cluster.wait("the driver to be unregistered", || {
        !cluster
            .kubectl(&["get", "csinodes", "-o", "jsonpath={.items[0].spec.drivers}"])
            .contains(NAME)
    });
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    let devices = root.join("plugins/kubernetes.io/csi/volumeDevices");
    for place in [devices.join("raw"), devices.join("publish/raw")] {
        assert!(!place.exists(), "{}", place.display());
    }
    let staged: Vec<_> = std::fs::read_dir(root.join("plugins/kubernetes.io/csi").join(NAME))
        .unwrap()
        .collect();
    assert!(staged.is_empty(), "{staged:?}");
    cluster.assert_clean();
}
