use super::*;
use proptest::prelude::*;

fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![(number << 3 | 2) as u8, bytes.len() as u8];
    out.extend_from_slice(bytes);
    out
}

#[test]
fn a_protobuf_deployment_from_kubectl_is_decoded() {
    let container = [field(1, b"web"), field(2, b"img:1"), field(8, b"")].concat();
    let pod_spec = field(2, &container);
    let label = [field(1, b"app"), field(2, b"web")].concat();
    let template = [field(1, &field(11, &label)), field(2, &pod_spec)].concat();
    let selector = field(1, &label);
    // `replicas: 0` is kept (a pointer), `minReadySeconds: 0` is omitted.
    let spec = [
        vec![0x08, 0x00, 0x28, 0x00],
        field(2, &selector),
        field(3, &template),
    ]
    .concat();
    let meta = [field(1, b"web"), field(2, b""), field(8, b"")].concat();
    let object = [field(1, &meta), field(2, &spec), field(3, b"")].concat();
    let type_meta = [field(1, b"apps/v1"), field(2, b"Deployment")].concat();
    let mut raw = b"k8s\0".to_vec();
    raw.extend(field(1, &type_meta));
    raw.extend(field(2, &object));
    assert_eq!(
        decode(&raw).expect("decodes"),
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {
                    "metadata": {"labels": {"app": "web"}},
                    "spec": {"containers": [{"name": "web", "image": "img:1", "resources": {}}]},
                },
            },
            "status": {},
        })
    );
}

#[test]
fn every_message_that_the_schema_refers_to_exists() {
    let special = [
        "string",
        "bytes",
        "bool",
        "int32",
        "int64",
        "double",
        "meta.v1.Time",
        "meta.v1.MicroTime",
        "meta.v1.Duration",
        "resource.Quantity",
        "intstr.IntOrString",
        "meta.v1.FieldsV1",
        "runtime.RawExtension",
    ];
    for (message, fields) in MESSAGES.iter() {
        for field in fields {
            assert!(
                special.contains(&field.kind) || MESSAGES.contains_key(field.kind),
                "{message}: {}",
                field.kind
            );
        }
    }
}

#[test]
fn unknown_and_mistyped_fields_are_reported_with_their_paths() {
    let pod = json!({
        "metadata": {"name": "a", "labels": {"n": 1}},
        "spec": {"nosuch": 1, "containers": [{"name": "c", "livenessProbe": {"httpGet": {"port": 80}}, "imge": "x"}],
                 "volumes": [{"name": "v", "configMap": {"name": "cm"}}]},
    });
    let found = check("v1", "Pod", &pod);
    assert_eq!(found.unknown, ["spec.containers[0].imge", "spec.nosuch"]);
    assert_eq!(
        found.mistyped,
        Some(("metadata.labels.n".into(), "number", "string"))
    );
}

proptest! {
    #[test]
    fn the_decoder_does_not_panic_on_arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let type_meta = [field(1, b"v1"), field(2, b"Pod")].concat();
        let mut raw = b"k8s\0".to_vec();
        raw.extend(field(1, &type_meta));
        raw.push(0x12);
        raw.extend([(bytes.len() & 0x7f) as u8 | 0x80, (bytes.len() >> 7) as u8]);
        raw.extend(bytes);
        let _ = decode(&raw);
    }
}

/// Values that a typed client cannot decode are rejected or normalised.
#[test]
fn stored_objects_can_be_decoded_by_typed_clients() {
    let pod = |spec: Value| json!({"metadata": {"name": "p"}, "spec": spec});
    for (spec, path) in [
        (json!({"priority": 300_000_000_000_i64}), "spec.priority"),
        (json!({"priority": 1.5}), "spec.priority"),
        (
            json!({"activeDeadlineSeconds": u64::MAX}),
            "spec.activeDeadlineSeconds",
        ),
        (json!({"containers": [null]}), "spec.containers[0]"),
        (
            json!({"containers": [{"args": ["a", null]}]}),
            "spec.containers[0].args[1]",
        ),
        (
            json!({"containers": [{"livenessProbe": {"httpGet": {"port": i64::MAX}}}]}),
            "spec.containers[0].livenessProbe.httpGet.port",
        ),
    ] {
        let found = check("v1", "Pod", &pod(spec)).mistyped.expect(path);
        assert_eq!(found.0, path);
    }
    let time = json!({"metadata": {"name": "e"}, "lastTimestamp": "yesterday"});
    assert!(check("v1", "Event", &time).mistyped.is_some());
    let secret = json!({"data": {"k": "no base64!"}});
    assert!(check("v1", "Secret", &secret).mistyped.is_some());

    let mut odd = json!({"metadata": {"name": "p", "labels": null, "annotations": {"a": null}, "creationTimestamp": null},
        "spec": {"hostname": null, "containers": [{"name": "c", "resources": {"limits": {"cpu": null}}}]}});
    assert_eq!(check("v1", "Pod", &odd), Findings::default());
    normalize("v1", "Pod", &mut odd);
    assert_eq!(
        odd,
        json!({"metadata": {"name": "p", "annotations": {"a": ""}},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "0"}}}]}})
    );
    serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(odd).expect("typed");
    let mut folded = json!({"data": {"k": "YWJj\nZGVm\n", "empty": null}});
    assert_eq!(check("v1", "Secret", &folded), Findings::default());
    normalize("v1", "Secret", &mut folded);
    assert_eq!(folded, json!({"data": {"k": "YWJjZGVm", "empty": ""}}));
}
