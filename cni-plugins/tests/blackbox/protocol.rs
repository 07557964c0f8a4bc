//! Environment, configuration, versions, errors.

use std::path::Path;

use serde_json::{Value, json};

use super::world::{World, ip};

#[test]
fn the_protocol_follows_the_specification() {
    let world = World::new();
    let good = world.config("1.0.0", json!({}));
    let with = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        config
    };
    let missing = world.refused(
        "bridge",
        "ADD",
        &good,
        &[("CNI_CONTAINERID", ""), ("CNI_NETNS", "")],
    );
    assert_eq!(missing["code"], 4);
    assert!(
        missing["msg"]
            .as_str()
            .unwrap()
            .contains("[CNI_CONTAINERID,CNI_NETNS]"),
        "{missing}"
    );
    let long = "x".repeat(1 << 20);
    let cases: Vec<(&str, Value, Vec<(&str, &str)>, u64)> = vec![
        ("FROB", good.clone(), vec![], 4),
        ("ADD", good.clone(), vec![("CNI_CONTAINERID", "../x")], 4),
        ("ADD", good.clone(), vec![("CNI_IFNAME", "a/b")], 4),
        (
            "ADD",
            good.clone(),
            vec![("CNI_IFNAME", "sixteen-bytes-ok")],
            4,
        ),
        ("ADD", with("name", json!("../../etc")), vec![], 7),
        ("ADD", with("name", json!("")), vec![], 7),
        ("ADD", with("name", json!(long)), vec![], 7),
        ("ADD", with("cniVersion", json!("9.9.9")), vec![], 1),
        ("CHECK", with("cniVersion", json!("0.3.1")), vec![], 1),
        ("GC", good.clone(), vec![], 1),
        ("CHECK", good.clone(), vec![], 7),
        ("ADD", with("bridge", json!("br/0")), vec![], 7),
        ("ADD", with("mtu", json!("big")), vec![], 6),
        ("ADD", with("isGateway", json!(1)), vec![], 6),
        ("ADD", with("ipam", json!([1])), vec![], 6),
        ("ADD", with("ipam", json!({"type": "../bridge"})), vec![], 7),
        ("ADD", with("ipam", json!({"type": "nosuch"})), vec![], 999),
        ("ADD", with("promiscMode", json!(true)), vec![], 0),
        ("ADD", with("ipMasqBackend", json!("other")), vec![], 7),
        ("ADD", with("vlan", json!(4095)), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{"minID": 5}])), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{"maxID": 5}])), vec![], 7),
        (
            "ADD",
            with("vlanTrunk", json!([{"minID": -5, "maxID": 3}])),
            vec![],
            7,
        ),
        (
            "ADD",
            with("vlanTrunk", json!([{"minID": 9, "maxID": 3}])),
            vec![],
            7,
        ),
        ("ADD", with("vlanTrunk", json!([{"id": 5000}])), vec![], 7),
        ("ADD", with("vlanTrunk", json!([{}])), vec![], 7),
        ("ADD", json!("text"), vec![], 6),
        (
            "ADD",
            good.clone(),
            vec![("CNI_NETNS", "/proc/self/ns/net")],
            8,
        ),
        ("ADD", good.clone(), vec![("CNI_NETNS", "/etc/passwd")], 8),
    ];
    for (verb, config, env, code) in cases {
        if code == 0 {
            let hairpin = {
                let mut config = config.clone();
                config["hairpinMode"] = true.into();
                config
            };
            assert_eq!(world.refused("bridge", verb, &hairpin, &env)["code"], 7);
            continue;
        }
        let refusal = world.refused("bridge", verb, &config, &env);
        assert_eq!(refusal["code"], code, "{verb} {env:?}: {refusal}");
    }
    assert!(world.taken().is_empty());
    assert!(!Path::new("/etc/lock").exists());
    assert!(
        !ip(&["-n", &world.host, "link"]).contains("veth"),
        "refused calls change nothing"
    );
    let version = world.call("bridge", "VERSION", &json!(null), &[]);
    let version: Value = serde_json::from_slice(&version.stdout).unwrap();
    assert_eq!(version["supportedVersions"].as_array().unwrap().len(), 7);
}

#[test]
fn every_verb_names_its_missing_parameters() {
    let world = World::new();
    let all = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    let without: Vec<(&str, &str)> = all.iter().map(|name| (*name, "")).collect();
    for (verb, version, needed) in [
        ("ADD", "0.1.0", &all[..]),
        ("CHECK", "0.4.0", &all),
        (
            "DEL",
            "0.1.0",
            &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"],
        ),
        ("GC", "1.1.0", &["CNI_PATH"]),
        ("STATUS", "1.1.0", &["CNI_PATH"]),
    ] {
        let refusal = world.refused("bridge", verb, &world.config(version, json!({})), &without);
        assert_eq!(refusal["code"], 4);
        let message = refusal["msg"].as_str().unwrap();
        for name in all {
            assert_eq!(
                message.contains(name),
                needed.contains(&name),
                "{verb}: {message}"
            );
        }
    }
    // A configuration without a version means the oldest. For an unknown version, the error lists the supported ones.
    let mut config = world.config("1.0.0", json!({}));
    config.as_object_mut().unwrap().remove("cniVersion");
    assert_eq!(world.ok("bridge", "ADD", &config)["cniVersion"], "0.1.0");
    world.ok("bridge", "DEL", &config);
    config["cniVersion"] = "0.3.2".into();
    let refusal = world.refused("bridge", "ADD", &config, &[]);
    assert!(
        refusal["code"] == 1 && refusal["details"].as_str().unwrap().contains("0.3.2"),
        "{refusal}"
    );
    // Without a verb, the plugin prints its name and versions.
    let about = world.call("bridge", "", &config, &[("CNI_COMMAND", "")]);
    assert!(
        about.status.success()
            && String::from_utf8_lossy(&about.stderr)
                .contains("CNI protocol versions supported: 0.1.0"),
        "{about:?}"
    );
    // Keys match regardless of case.
    let loud = json!({"CNIVersion": "1.0.0", "NAME": "net", "TYPE": "bridge", "Bridge": "br0", "ISDEFAULTGATEWAY": true, "IPAM": config["ipam"]});
    let result = world.ok("bridge", "ADD", &loud);
    assert_eq!(result["routes"][0]["dst"], "0.0.0.0/0", "{result}");
    world.ok("bridge", "DEL", &loud);
}
