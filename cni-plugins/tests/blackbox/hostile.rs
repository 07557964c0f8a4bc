//! Malformed configurations and environments: each call gets
//! one well-formed answer, and a rejected call changes nothing.

use serde_json::{Value, json};

use super::world::{World, ip};

/// Replacement values for a field.
fn bad_values() -> Vec<Value> {
    let deep = (0..64).fold(json!(1), |inner, _| json!([inner]));
    vec![
        Value::Null,
        json!(true),
        json!(-1),
        json!(4_294_967_296_u64),
        serde_json::from_str("1e300").unwrap(),
        json!(""),
        json!("../../etc/passwd"),
        json!("a\u{0}b"),
        json!("\u{1f4a5} \"';`$(reboot)%s\n"),
        json!("x".repeat(2000)),
        json!([]),
        json!([null, [], {}, "x", -1]),
        json!({"a": {"b": [1]}}),
        deep,
    ]
}

/// The paths of all fields of a value, as JSON pointers.
fn paths(value: &Value, prefix: &str, into: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), v)).collect(),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .map(|(i, v)| (i.to_string(), v))
            .collect(),
        _ => vec![],
    };
    for (key, child) in children {
        let path = format!("{prefix}/{}", key.replace('~', "~0").replace('/', "~1"));
        paths(child, &path, into);
        into.push(path);
    }
}

/// The state that a rejected call must not change. Excludes the carrier of links, which changes over time.
fn state(world: &World) -> String {
    let links = |namespace: &str| {
        let links: Vec<Value> =
            serde_json::from_str(&ip(&["-n", namespace, "-j", "-d", "addr"])).unwrap();
        let keep = |link: &Value| {
            let addresses: Vec<&Value> = link["addr_info"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|a| a["scope"] == "global")
                .map(|a| &a["local"])
                .collect();
            json!([
                link["ifname"],
                link["address"],
                link["mtu"],
                link["master"],
                link["promiscuity"],
                link["ifalias"],
                addresses
            ])
        };
        json!(links.iter().map(keep).collect::<Vec<_>>()).to_string()
            + &ip(&["-n", namespace, "rule"])
    };
    format!(
        "{}\n{}\n{}\n{:?}",
        links(&world.host),
        links(&world.container),
        world.ruleset(),
        world.taken()
    )
}

/// A valid configuration with all fields, for every plugin that this kernel supports.
fn configurations(world: &World) -> Vec<Value> {
    let ranges = json!([[{"subnet": "10.198.1.0/24", "rangeStart": "10.198.1.10", "rangeEnd": "10.198.1.200", "gateway": "10.198.1.1"}]]);
    let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges, "routes": [{"dst": "0.0.0.0/0", "gw": "10.198.1.1", "mtu": 1400, "priority": 5}]});
    let fixed = json!({"type": "static", "addresses": [{"address": "10.198.1.5/24", "gateway": "10.198.1.1"}], "routes": [{"dst": "10.0.0.0/8"}], "dns": {"nameservers": ["192.0.2.1"]}});
    let dns =
        json!({"nameservers": ["192.0.2.1"], "domain": "d", "search": ["s"], "options": ["o"]});
    let previous = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": world.netns(), "mac": "c2:11:22:33:44:55"}],
        "ips": [{"address": "10.198.1.5/24", "gateway": "10.198.1.1", "interface": 1}], "routes": [{"dst": "0.0.0.0/0"}], "dns": dns});
    let chained = |mut config: Value| {
        config["prevResult"] = previous.clone();
        config
    };
    let mut all = vec![
        json!({"type": "bridge", "bridge": "br0", "isGateway": true, "isDefaultGateway": true, "forceAddress": false, "ipMasq": true, "ipMasqBackend": "nftables",
            "mtu": 1400, "hairpinMode": true, "promiscMode": false, "vlan": 0, "vlanTrunk": [], "preserveDefaultVlan": false, "macspoofchk": true, "enabledad": false,
            "disableContainerInterface": false, "portIsolation": true, "dns": dns, "ipam": ipam, "args": {"cni": {"mac": "c2:11:22:33:44:55", "ips": []}},
            "runtimeConfig": {"mac": "c2:11:22:33:44:55", "ips": ["10.198.1.20"], "ipRanges": []}}),
        json!({"type": "ptp", "ipMasq": true, "mtu": 1400, "dns": dns, "ipam": ipam}),
        json!({"type": "ptp", "ipam": fixed}),
        json!({"type": "macvlan", "master": "wire0", "mode": "bridge", "mtu": 1400, "mac": "c2:11:22:33:44:55", "bcqueuelen": 100, "linkInContainer": false, "ipam": ipam}),
        json!({"type": "tap", "multiQueue": true, "mtu": 1400, "mac": "c2:11:22:33:44:55", "owner": 1, "group": 1, "ipam": ipam}),
        json!({"type": "loopback"}),
        chained(
            json!({"type": "portmap", "backend": "nftables", "snat": true, "masqAll": false, "markMasqBit": 5, "conditionsV4": ["ip saddr 192.0.2.0/24"], "conditionsV6": [],
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"}]}}),
        ),
        chained(
            json!({"type": "firewall", "backend": "iptables", "iptablesAdminChainName": "CNI-ADMIN", "ingressPolicy": "same-bridge"}),
        ),
        chained(
            json!({"type": "bandwidth", "ingressRate": 8000, "ingressBurst": 8000, "runtimeConfig": {"bandwidth": {"egressRate": 8000, "egressBurst": 8000}}}),
        ),
        chained(
            json!({"type": "tuning", "sysctl": {"net.ipv4.conf.lo.arp_filter": "0"}, "mac": "c2:11:22:33:44:55", "promisc": true, "mtu": 1400, "txQLen": 5,
            "allmulti": true, "dataDir": world.data.path().join("tuning"), "args": {"cni": {"mtu": 1300}}}),
        ),
        chained(
            json!({"type": "sbr", "table": 200, "gateways": ["10.198.1.1"], "addSourceHints": true}),
        ),
        json!({"type": "host-device", "device": "wire0", "ipam": ipam}),
        json!({"type": "vlan", "master": "nosuch", "vlanId": 5, "ipam": ipam}),
        chained(json!({"type": "vrf", "vrfname": "blue", "table": 5})),
    ];
    for config in &mut all {
        config["cniVersion"] = "1.0.0".into();
        config["name"] = "net".into();
    }
    all
}

/// Calls ADD and returns whether it succeeded. In either case the answer must be well-formed.
fn is_accepted(world: &World, config: &Value, what: &str) -> bool {
    let plugin = config["type"].as_str().unwrap();
    let output = world.call(plugin, "ADD", config, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    let answer: Value = serde_json::from_str(&text).unwrap_or_else(|e| {
        panic!(
            "{plugin} {what}: {e}: {text:.300} {}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    if output.status.success() {
        assert!(
            answer.get("cniVersion").is_some() && answer.get("code").is_none(),
            "{plugin} {what}: {text:.300}"
        );
    } else {
        assert_eq!(output.status.code(), Some(1), "{plugin} {what}: {output:?}");
        let message = answer["msg"].as_str().unwrap_or_default();
        assert!(
            answer["code"].as_u64().is_some_and(|c| c > 0) && !message.is_empty(),
            "{plugin} {what}: {text:.300}"
        );
        assert!(
            message.len() < 5000,
            "{plugin} {what}: the message repeats the input: {} bytes",
            message.len()
        );
    }
    output.status.success()
}

/// Calls DEL. It may fail, but with a well-formed answer.
fn end(world: &World, config: &Value, what: &str) {
    let output = world.call(config["type"].as_str().unwrap(), "DEL", config, &[]);
    assert!(
        matches!(output.status.code(), Some(0 | 1)),
        "{what}: DEL: {output:?}"
    );
}

/// Replaces a field by each of the values. Rejected configurations change nothing.
fn test_bad_values(world: &World, good: &Value, path: &str) {
    let with_bad_value = |bad_value: Value| {
        let mut config = good.clone();
        *config.pointer_mut(path).unwrap() = bad_value;
        config
    };
    let what =
        |config: &Value| format!("{path} = {:.60}", config.pointer(path).unwrap().to_string());
    let mut refused = vec![];
    for config in bad_values().into_iter().map(with_bad_value) {
        if is_accepted(world, &config, &what(&config)) {
            end(world, &config, &what(&config));
            // An accepted ADD may leave state that DEL does not know, such as a link.
            let _ = std::process::Command::new("ip")
                .args(["-n", &world.container, "link", "del", "eth0"])
                .output();
        } else {
            refused.push(config);
        }
    }
    // Repeat all rejected configurations and compare the state once. If it differs, repeat with a comparison for each.
    let before = state(world);
    assert!(
        !refused
            .iter()
            .any(|config| is_accepted(world, config, &what(config))),
        "{path}: a refused configuration was accepted later"
    );
    if state(world) != before {
        let all: Vec<String> = refused.iter().map(what).collect();
        assert_eq!(
            state(world),
            before,
            "{}: changed by one of {all:#?}",
            good["type"]
        );
    }
    refused
        .iter()
        .for_each(|config| end(world, config, &what(config)));
}

#[test]
fn arbitrary_values_of_fields_are_handled() {
    let worlds: Vec<World> = configurations(&World::new())
        .iter()
        .map(|_| World::new())
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        loop {
            let place = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(world) = worlds.get(place) else {
                break;
            };
            ip(&[
                "-n",
                &world.host,
                "link",
                "add",
                "wire0",
                "type",
                "veth",
                "peer",
                "name",
                "wire1",
            ]);
            let good = configurations(world).swap_remove(place);
            // The first call creates the bridge and the tables.
            is_accepted(world, &good, "the valid configuration");
            end(world, &good, "the valid configuration");
            let mut all = vec![];
            paths(&good, "", &mut all);
            all.retain(|path| path != "/type");
            all.iter()
                .for_each(|path| test_bad_values(world, &good, path));
            // Only some fields get megabytes, because reading them takes long.
            for path in all.iter().step_by(7) {
                let before = state(world);
                let mut config = good.clone();
                *config.pointer_mut(path).unwrap() = "x".repeat(1 << 20).into();
                if !is_accepted(world, &config, path) {
                    assert_eq!(state(world), before, "{path}: a value of a megabyte");
                }
                end(world, &config, path);
                let _ = std::process::Command::new("ip")
                    .args(["-n", &world.container, "link", "del", "eth0"])
                    .output();
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn malformed_names_are_refused() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    let before = state(&world);
    for (key, values) in [
        (
            "CNI_IFNAME",
            vec![
                ".",
                "..",
                "a/b",
                "a:b",
                "a b",
                "a\tb",
                "sixteen-bytes-ok",
                "../../../x",
            ],
        ),
        (
            "CNI_CONTAINERID",
            vec!["../x", "a/b", " ", "-a", ".", "a b", "a\nb", "\u{1f4a5}"],
        ),
        ("CNI_COMMAND", vec!["add", "ADD ", "ADD;DEL", "../ADD"]),
        ("CNI_ARGS", vec!["=", "a", "a=b=c", ";;", "MAC=nonsense"]),
        (
            "CNI_NETNS",
            vec![
                "/etc/passwd",
                "/dev/null",
                "/nonexistent",
                "relative",
                "/proc/1/ns/mnt",
            ],
        ),
    ] {
        for value in values {
            let refusal = world.refused("bridge", "ADD", &config, &[(key, value)]);
            assert!(
                refusal["code"].as_u64().is_some_and(|c| c > 0),
                "{key}={value:?}: {refusal}"
            );
            assert_eq!(state(&world), before, "{key}={value:?}");
        }
    }
    for input in [
        "",
        "{",
        "null",
        "[]",
        "\"x\"",
        "{\"cniVersion\":\"1.0.0\"",
        "\u{0}",
        &"[".repeat(100_000),
    ] {
        let output = world.call_with("bridge", "ADD", input, &[]);
        let answer: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{input:.20}: {e}: {output:?}"));
        assert_eq!(answer["code"], 6, "{input:.20}: {answer}");
    }
}
