//! `host-local` and `static`.

use serde_json::{Value, json};

use super::world::{World, ip, versions};

#[test]
fn host_local_gives_requested_addresses_and_refuses_what_it_cannot() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    let asked = world.call("host-local", "ADD", &config, &[("CNI_ARGS", "IgnoreUnknown=1;IP=10.198.1.77")]);
    let result: Value = serde_json::from_slice(&asked.stdout).unwrap();
    assert_eq!(result["ips"][0]["address"], "10.198.1.77/24", "{result}");
    let cases = [
        ("c2", "IP=10.198.1.77", "not available"),
        ("c3", "IP=10.198.1.1", "gateway"),
        ("c4", "IP=192.168.0.1", "failed to allocate all requested IPs"),
        ("c1", "", "duplicate allocation"),
        ("c5", "X=1", "unknown args"),
    ];
    for (container, args, expected) in cases {
        let refusal = world.refused("host-local", "ADD", &config, &[("CNI_CONTAINERID", container), ("CNI_ARGS", args)]);
        assert!(refusal["msg"].as_str().unwrap().contains(expected), "{args}: {refusal}");
    }
    assert_eq!(world.taken(), ["10.198.1.77"]);
}

#[test]
fn static_addresses_come_from_the_place_that_counts() {
    let world = World::new();
    let config = |version: &str, ipam: Value, more: Value| {
        let mut config = json!({"cniVersion": version, "name": "net", "type": "static", "ipam": ipam});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    };
    let own = json!({"type": "static", "addresses": [{"address": "10.10.0.1/24", "gateway": "10.10.0.254"}, {"address": "3ffe:ffff:0:1ff::1/64"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.10.5.1"}], "dns": {"nameservers": ["8.8.8.8"], "domain": "example.test"}});
    for version in versions("static") {
        let result = world.ok("static", "ADD", &config(version, own.clone(), json!({})));
        if version < "0.3.0" {
            assert_eq!(
                (&result["ip4"]["ip"], &result["ip4"]["gateway"], &result["ip6"]["ip"]),
                (&json!("10.10.0.1/24"), &json!("10.10.0.254"), &json!("3ffe:ffff:0:1ff::1/64"))
            );
        } else {
            assert_eq!(
                (&result["ips"][0]["address"], &result["ips"][0]["gateway"]),
                (&json!("10.10.0.1/24"), &json!("10.10.0.254")),
                "{version}: {result}"
            );
            assert_eq!((&result["routes"][1]["gw"], &result["dns"]["domain"]), (&json!("10.10.5.1"), &json!("example.test")));
        }
        world.ok("static", "DEL", &config(version, own.clone(), json!({})));
    }
    // The runtime's wish over args, those over CNI_ARGS and the configuration, which are added up.
    let addresses = |config: &Value, env: &[(&str, &str)]| {
        let output = world.call("static", "ADD", config, env);
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(output.status.success(), "{result}");
        result["ips"]
            .as_array()
            .unwrap()
            .iter()
            .map(|ip| format!("{} {}", ip["address"].as_str().unwrap(), ip["gateway"].as_str().unwrap_or("-")))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let one = json!({"type": "static", "addresses": [{"address": "10.10.0.1/24"}]});
    let args = [("CNI_ARGS", "IP=10.11.0.1/24,10.10.0.2/24;GATEWAY=10.10.0.254")];
    assert_eq!(addresses(&config("1.0.0", one.clone(), json!({})), &args), "10.10.0.1/24 10.10.0.254, 10.11.0.1/24 -, 10.10.0.2/24 10.10.0.254");
    let asked = json!({"args": {"cni": {"ips": ["10.12.0.1/24"]}}});
    assert_eq!(addresses(&config("1.0.0", one.clone(), asked.clone()), &args), "10.12.0.1/24 -");
    let mut wished = asked.clone();
    wished["runtimeConfig"] = json!({"ips": ["10.13.0.1/24"]});
    assert_eq!(addresses(&config("1.0.0", one.clone(), wished.clone()), &args), "10.13.0.1/24 -");
    wished.as_object_mut().unwrap().insert("ipam".into(), Value::Null);
    assert_eq!(
        addresses(&wished.as_object().map(|w| config("1.0.0", Value::Null, json!(w))).unwrap(), &[]),
        "10.13.0.1/24 -",
        "no ipam is needed then"
    );
    // What is wrong is named with its place.
    let two = json!({"type": "static", "addresses": [{"address": "10.10.0.1/24"}, {"address": "10.10.1.1/24"}]});
    for (config, env, expected) in [
        (config("0.2.0", two, json!({})), &[][..], "more than 1 address"),
        (config("1.0.0", Value::Null, json!({})), &[], "missing 'ipam' key"),
        (config("1.0.0", json!({"addresses": [{"address": "10.10.0.1"}]}), json!({})), &[], "ipam.addresses"),
        (config("1.0.0", one.clone(), json!({"runtimeConfig": {"ips": ["10.10.0.256/24"]}})), &[], "runtimeConfig.ips"),
        (config("1.0.0", one.clone(), json!({"args": {"cni": {"ips": ["x"]}}})), &[], "args.cni.ips"),
        (config("1.0.0", one.clone(), json!({})), &[("CNI_ARGS", "IP=10.10.0.1")], "CNI_ARGS IP"),
        (config("1.0.0", one.clone(), json!({})), &[("CNI_ARGS", "GATEWAY=here")], "CNI_ARGS GATEWAY"),
    ] {
        let error = world.refused("static", "ADD", &config, env);
        assert!(error["msg"].as_str().unwrap().contains(expected), "{error}");
    }
    // CHECK compares with what there was; STATUS and GC have nothing to keep.
    let base = config("1.1.0", one, json!({}));
    let result = world.ok("static", "ADD", &base);
    world.ok("static", "CHECK", &World::with_previous(&base, &result));
    let mut other = result.clone();
    other["ips"][0]["address"] = "10.10.0.9/24".into();
    world.refused("static", "CHECK", &World::with_previous(&base, &other), &[]);
    world.ok("static", "STATUS", &base);
    world.ok("static", "GC", &base);

    // As the IPAM of a network.
    let bridged = world.config("1.0.0", json!({"isDefaultGateway": false, "ipam": {"type": "static", "addresses": [{"address": "10.10.0.7/24", "gateway": "10.10.0.1"}], "routes": [{"dst": "0.0.0.0/0"}]}}));
    let result = world.ok("bridge", "ADD", &bridged);
    assert_eq!(result["ips"][0]["address"], "10.10.0.7/24", "{result}");
    assert!(ip(&["-n", &world.container, "addr", "show", "eth0"]).contains("10.10.0.7/24"));
    assert!(ip(&["-n", &world.container, "route"]).contains("default via 10.10.0.1"));
    world.ok("bridge", "DEL", &bridged);
}
