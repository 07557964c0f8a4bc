use super::*;
use serde_json::{Value, json};

fn pod(volume: Value, container: Value) -> Pod {
    let mut c = json!({"name": "c"});
    json_patch::merge(&mut c, &container);
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [c], "volumes": [volume]}}))
        .expect("a pod")
}

fn made(volume: Value, container: Value) -> Result<ResolvedVolume, Problem> {
    let pod = pod(volume, container);
    let volume = pod::spec(&pod).volumes.as_ref().expect("volumes")[0].clone();
    resolve(
        &pod,
        &volume,
        None,
        NodeProperties {
            memory: 1 << 30,
            label: None,
        },
    )
}

#[test]
fn an_empty_dir_has_the_smallest_of_its_limits() {
    let memory = |size: Value, limit: Value| {
        let volume = json!({"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": size}});
        made(volume, json!({"resources": {"limits": limit}})).map(|b| b.source)
    };
    let of = |size: u64| Ok(Source::EmptyDir(Medium::Memory(size)));
    assert_eq!(memory(Value::Null, json!({})), of(1 << 30));
    assert_eq!(memory(json!("64Mi"), json!({})), of(64 << 20));
    assert_eq!(
        memory(json!("64Mi"), json!({"memory": "32Mi"})),
        of(32 << 20)
    );
    assert_eq!(memory(json!("4Gi"), json!({})), of(1 << 30));
    let pages = |medium: &str, requests: Value| {
        made(
            json!({"name": "v", "emptyDir": {"medium": medium}}),
            json!({"resources": {"requests": requests}}),
        )
        .map(|b| b.source)
    };
    assert_eq!(
        pages("HugePages", json!({"hugepages-2Mi": "4Mi"})),
        Ok(Source::EmptyDir(Medium::HugePages(2 << 20)))
    );
    assert_eq!(
        pages("HugePages-1Gi", json!({})),
        Ok(Source::EmptyDir(Medium::HugePages(1 << 30)))
    );
    assert!(
        pages(
            "HugePages",
            json!({"hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi"})
        )
        .is_err_and(|e| e.event_message("v").contains("multiple"))
    );
    // The pod requests huge pages at pod level.
    let volume = json!({"name": "v", "emptyDir": {"medium": "HugePages"}});
    let mut whole = pod(volume, json!({}));
    let amounts = json!({"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "4Mi"}});
    if let Some(spec) = &mut whole.spec {
        spec.resources = serde_json::from_value(amounts).expect("amounts");
    }
    let volume = pod::spec(&whole).volumes.as_ref().expect("volumes")[0].clone();
    let found = resolve(&whole, &volume, None, NodeProperties::default()).map(|b| b.source);
    assert_eq!(found, Ok(Source::EmptyDir(Medium::HugePages(2 << 20))));
    assert!(pages("Tape", json!({})).is_err_and(|e| e.event_message("v").contains("Tape")));
}

fn claimed(volume: Value, phase: &str) -> Claimed {
    let claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "0"}, "spec": {"volumeName": "pv"}, "status": {"phase": phase}});
    let mut spec = json!({"claimRef": {"uid": "0"}});
    json_patch::merge(&mut spec, &volume);
    Claimed {
        claim: serde_json::from_value(claim).expect("a claim"),
        volume: serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec}))
            .expect("a volume"),
        migrated: false,
    }
}

#[test]
fn a_claimed_volume_has_the_name_and_options_of_its_persistent_volume() {
    let of = |source: Value, volume: Value, container: Value| {
        let mut v = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        json_patch::merge(&mut v, &volume);
        let pod = pod(v, container);
        let volume = pod::spec(&pod).volumes.as_ref().expect("volumes")[0].clone();
        resolve(
            &pod,
            &volume,
            Some(&claimed(source, "Bound")),
            NodeProperties {
                memory: 0,
                label: Some("u:r:t:s0"),
            },
        )
    };
    let nfs = of(
        json!({"nfs": {"server": "fd00::1", "path": "/x"}, "mountOptions": ["hard"]}),
        json!({"persistentVolumeClaim": {"readOnly": true}}),
        json!({}),
    )
    .expect("fine");
    assert_eq!(
        (
            nfs.name.as_str(),
            &nfs.source,
            nfs.read_only,
            nfs.options.len()
        ),
        (
            "pv",
            &Source::Nfs {
                device: "[fd00::1]:/x".into()
            },
            true,
            1
        )
    );
    let local = json!({"local": {"path": "/dev/x"}, "volumeMode": "Block"});
    assert!(
        of(
            local.clone(),
            json!({}),
            json!({"volumeDevices": [{"name": "v", "devicePath": "/dev/y"}]})
        )
        .expect("fine")
        .block
    );
    assert!(
        of(
            local,
            json!({}),
            json!({"volumeMounts": [{"name": "v", "mountPath": "/y"}]})
        )
        .is_err_and(|e| e.event_message("v").contains("volumeMode Block"))
    );
    assert!(
        of(
            json!({"hostPath": {"path": "/x"}, "claimRef": {"uid": "9"}}),
            json!({}),
            json!({})
        )
        .is_err_and(|e| e.event_message("v").contains("another claim"))
    );
    // The claim is exclusive and the containers' label is known, so the mount is labelled.
    let disk = json!({"fc": {"wwids": ["w"]}, "accessModes": ["ReadWriteOncePod"], "mountOptions": ["noatime"]});
    let context = json!({"securityContext": {"seLinuxOptions": {"level": "s0:c1,c2"}}, "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let labelled = of(disk.clone(), json!({}), context).expect("fine");
    assert_eq!(labelled.options, ["noatime", "context=\"u:r:t:s0:c1,c2\""]);
    assert!(
        !labelled.is_relabelled()
            && of(disk, json!({}), json!({}))
                .expect("fine")
                .is_relabelled()
    );
    assert!(
        of(json!({"cephfs": {"monitors": []}}), json!({}), json!({})).is_err_and(|e| {
            let message = e.event_message("v");
            message.contains("no volume plugin matched") && message.contains("does not support")
        })
    );
    let is_rejected = |e: Problem| {
        let (message, reason) = (e.event_message("v"), e.reason());
        let mut words = "no volume plugin matched|deprecated|example.test/x|CSI".split('|');
        reason == "FailedMount" && words.all(|word| message.contains(word))
    };
    let flex = json!({"flexVolume": {"driver": "example.test/x"}});
    assert!(of(flex.clone(), json!({}), json!({})).is_err_and(is_rejected));
    let mut inline = json!({"name": "v"});
    json_patch::merge(&mut inline, &flex);
    assert!(made(inline, json!({})).is_err_and(is_rejected));
}

#[test]
fn unusable_claims_are_rejected_with_the_cause() {
    let volume = |v: Value| serde_json::from_value::<Volume>(v).expect("a volume");
    let by_claim = volume(json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}));
    let p = pod(json!({"name": "v"}), json!({}));
    assert_eq!(
        check_claim(&p, &by_claim, &claimed(json!({}), "Bound").claim),
        Ok("pv".into())
    );
    assert_eq!(
        check_claim(&p, &by_claim, &claimed(json!({}), "Pending").claim),
        Err(Problem::Claim(
            "error processing PVC n/c: PVC is not bound".into()
        ))
    );
    let ephemeral = volume(json!({"name": "v", "ephemeral": {}}));
    assert!(
        check_claim(&p, &ephemeral, &claimed(json!({}), "Bound").claim)
            .is_err_and(|e| e.event_message("v").contains("(pod is not owner)"))
    );
}

#[test]
fn a_failed_step_names_the_persistent_volume() {
    let source = json!({"local": {"path": "/x"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "host", "operator": "In", "values": ["a"]}]}]}}});
    let node = |name: &str| {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"host": name}}}))
            .expect("a node")
    };
    let mut claimed = claimed(source, "Bound");
    assert_eq!(check_node_affinity(&claimed, Some(&node("a"))), Ok(()));
    assert_eq!(check_node_affinity(&claimed, None), Ok(()));
    let problem =
        check_node_affinity(&claimed, Some(&node("b"))).expect_err("it is on another node");
    assert_eq!(
        problem.event_message("v"),
        "MountVolume.NodeAffinity check failed for volume \"pv\" : no matching NodeSelectorTerms"
    );
    assert_eq!(problem.reason(), "FailedMount");
    claimed.volume.spec.as_mut().expect("a spec").volume_mode = Some("Block".into());
    let problem =
        check_node_affinity(&claimed, Some(&node("b"))).expect_err("it is on another node");
    // The only problem of a block device with this reason.
    assert_eq!(problem.reason(), "FailedMount");
    assert_eq!(
        Problem::step_failed("MapVolume.MapPodDevice", "no").reason(),
        "FailedMapVolume"
    );
    assert_eq!(
        Problem::step_failed("MountVolume.MountDevice", "no").event_message("pv"),
        "MountVolume.MountDevice failed for volume \"pv\" : no"
    );
}

#[test]
fn an_unattached_volume_is_reported_as_the_waiting_step() {
    for (step, reason) in [
        ("MountVolume.WaitForAttach", "FailedMount"),
        ("MapVolume.WaitForAttach", "FailedMapVolume"),
    ] {
        let problem = Problem::Unattached {
            step,
            why: "no".into(),
            is_full: true,
        };
        assert_eq!(problem.reason(), reason);
        assert_eq!(
            problem.event_message("pv"),
            format!("{step} failed for volume \"pv\" : no")
        );
    }
}

#[test]
fn an_operation_in_progress_is_reported_and_is_no_failure() {
    let set_up = Problem::later("w");
    let waits = Problem::under_way("w".into());
    for (problem, reason, step, is_under_way) in [
        (set_up.clone(), "FailedMount", "MountVolume.SetUp", false),
        (waits.clone(), "FailedMount", "MountVolume.SetUp", true),
        (
            set_up.of_device(),
            "FailedMapVolume",
            "MapVolume.SetUpDevice",
            false,
        ),
        (
            waits.of_device(),
            "FailedMapVolume",
            "MapVolume.SetUpDevice",
            true,
        ),
    ] {
        assert_eq!(problem.reason(), reason);
        let text = format!("{step} failed for volume \"pv\" : w");
        assert_eq!(
            (problem.event_message("pv"), problem.to_string()),
            (text, "w".into())
        );
        assert_eq!(problem.is_under_way(), is_under_way);
    }
}

#[test]
fn a_mapped_device_is_reported_with_its_map_paths() {
    let of = |source: Value| {
        let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let pod = pod(
            volume,
            json!({"volumeDevices": [{"name": "v", "devicePath": "/d"}]}),
        );
        let volume = pod::spec(&pod).volumes.as_ref().expect("volumes")[0].clone();
        let mut spec = json!({"volumeMode": "Block"});
        json_patch::merge(&mut spec, &source);
        let resolved = resolve(
            &pod,
            &volume,
            Some(&claimed(spec, "Bound")),
            NodeProperties::default(),
        );
        resolved.expect("a device").mapped(Path::new("/r"), "u")
    };
    let global = |place: &str| {
        format!("MapVolume.MapPodDevice succeeded for volume \"pv\" globalMapPath \"{place}\"")
    };
    let own = |plugin: &str| {
        format!(
            "MapVolume.MapPodDevice succeeded for volume \"pv\" volumeMapPath \"/r/pods/u/volumeDevices/{plugin}\""
        )
    };
    for (source, place, plugin) in [
        (
            json!({"csi": {"driver": "d", "volumeHandle": "h"}}),
            "/r/plugins/kubernetes.io/csi/volumeDevices/pv/dev",
            "kubernetes.io~csi",
        ),
        (
            json!({"local": {"path": "/dev/x"}}),
            "/r/plugins/kubernetes.io~local-volume/volumeDevices/pv",
            "kubernetes.io~local-volume",
        ),
        (
            json!({"iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.x", "lun": 0}}),
            "/r/plugins/kubernetes.io/iscsi/volumeDevices/iface-default/10.0.0.1:3260-iqn.x-lun-0",
            "kubernetes.io~iscsi",
        ),
    ] {
        assert_eq!(of(source), [global(place), own(plugin)]);
    }
}

#[test]
fn mount_options_come_from_the_annotation_or_the_spec() {
    let of = |source: Value, annotations: Value| {
        let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let pod = pod(volume, json!({}));
        let volume = pod::spec(&pod).volumes.as_ref().expect("volumes")[0].clone();
        let mut claimed = claimed(source, "Bound");
        claimed.volume.metadata.annotations = serde_json::from_value(annotations).expect("a map");
        resolve(&pod, &volume, Some(&claimed), NodeProperties::default())
    };
    let named = json!({"volume.beta.kubernetes.io/mount-options": "soft,,noatime"});
    let nfs = json!({"nfs": {"server": "s", "path": "/x"}, "mountOptions": ["hard"]});
    let options = |annotations: Value| of(nfs.clone(), annotations).map(|made| made.options);
    assert_eq!(options(json!({})), Ok(vec!["hard".to_owned()]));
    assert_eq!(
        options(named.clone()),
        Ok(vec!["soft".to_owned(), "noatime".to_owned()])
    );
    let host = |options: Value| json!({"hostPath": {"path": "/x"}, "mountOptions": options});
    assert!(of(host(json!([])), json!({})).is_ok());
    for refused in [
        of(host(json!(["ro"])), json!({})),
        of(host(json!([])), named),
    ] {
        assert_eq!(
            refused.expect_err("a rejection").event_message("v"),
            "MountVolume.MountOptionSupport check failed for volume \"pv\" : mount options are not supported for this volume type"
        );
    }
}
