//! `bridge`, `ptp` and `loopback`.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::firewall::reaches;
use super::world::{World, ip, once_up, plugins, versions};

#[test]
fn bridge_adds_checks_and_deletes_in_every_version() {
    for version in versions("bridge") {
        let world = World::new();
        let config = world.config(version, json!({"ipMasq": true}));
        let result = world.ok("bridge", "ADD", &config);
        assert_eq!(result["cniVersion"], version);
        let address = if version < "0.3.0" {
            result["ip4"]["ip"].clone()
        } else {
            result["ips"][0]["address"].clone()
        };
        assert_eq!(address, "10.198.1.2/24", "{version}: {result}");
        let shown = once_up(|| ip(&["-n", &world.container, "addr", "show", "eth0"]));
        assert!(
            shown.contains("10.198.1.2/24") && shown.contains("state UP"),
            "{shown}"
        );
        assert!(ip(&["-n", &world.container, "route"]).contains("default via 10.198.1.1"));
        assert!(ip(&["-n", &world.host, "addr", "show", "br0"]).contains("10.198.1.1/24"));
        let rules = world.ruleset();
        assert!(
            rules.contains("ip saddr 10.198.1.2 ip daddr != 10.198.1.0/24 masquerade"),
            "{rules}"
        );
        assert!(
            reaches(&world.container, "10.198.1.1"),
            "the container reaches its gateway"
        );
        let chained = World::with_previous(&config, &result);
        if version >= "0.4.0" {
            world.ok("bridge", "CHECK", &chained);
            ip(&["-n", &world.container, "addr", "flush", "dev", "eth0"]);
            let refusal = world.refused("bridge", "CHECK", &chained, &[]);
            assert!(
                refusal["msg"].as_str().unwrap().contains("10.198.1.2"),
                "{refusal}"
            );
        }
        for _ in 0..2 {
            world.ok("bridge", "DEL", &chained);
        }
        assert!(world.taken().is_empty(), "{version}");
        assert!(
            !world.ruleset().contains("saddr"),
            "{version}: {}",
            world.ruleset()
        );
        assert!(
            !ip(&["-n", &world.host, "link"]).contains("veth"),
            "the host's end of the pair was deleted"
        );
    }
}

#[test]
fn del_cleans_up_when_the_namespace_was_deleted_or_is_unknown() {
    for netns in ["", "/run/netns/nonexistent"] {
        let world = World::new();
        let config = world.config("1.0.0", json!({"ipMasq": true}));
        world.ok("bridge", "ADD", &config);
        ip(&["netns", "del", &world.container]);
        let output = world.call("bridge", "DEL", &config, &[("CNI_NETNS", netns)]);
        assert!(output.status.success(), "{output:?}");
        assert!(world.taken().is_empty());
        assert!(!world.ruleset().contains("saddr"));
        ip(&["netns", "add", &world.container]);
    }
}

/// The host's links of containers.
fn host_ends(world: &World) -> usize {
    ip(&["-n", &world.host, "link"]).matches("veth").count()
}

#[test]
fn del_without_a_namespace_removes_the_pair_of_a_live_container() {
    for (plugin, netns) in [("bridge", ""), ("ptp", "/run/netns/nonexistent")] {
        let world = World::new();
        let config = world.config("1.0.0", json!({"type": plugin}));
        let other = World::new();
        let second = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
        world.ok(plugin, "ADD", &config);
        world.ok_with(plugin, "ADD", &config, &second);
        assert_eq!(host_ends(&world), 2);
        for _ in 0..2 {
            world.ok_with(plugin, "DEL", &config, &[("CNI_NETNS", netns)]);
            assert_eq!(host_ends(&world), 1, "{plugin}: only the container's pair");
        }
        let links = |namespace: &str| ip(&["-n", namespace, "link"]);
        assert!(!links(&world.container).contains("eth0"));
        assert!(links(&other.container).contains("eth0"));
        assert_eq!(world.taken().len(), 1);
        // The name is free for the next ADD.
        world.ok(plugin, "ADD", &config);
    }
}

#[test]
fn gc_removes_the_pairs_of_unlisted_attachments() {
    for plugin in ["bridge", "ptp"] {
        let (world, other) = (World::new(), World::new());
        let config = world.config("1.1.0", json!({"type": plugin, "ipMasq": true}));
        let second = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
        world.ok(plugin, "ADD", &config);
        world.ok_with(plugin, "ADD", &config, &second);
        // The same bridge, in another network.
        let mut elsewhere = config.clone();
        elsewhere["name"] = "other".into();
        match plugin {
            "ptp" => elsewhere["ipam"]["subnet"] = "10.198.2.0/24".into(),
            _ => elsewhere["ipam"]["rangeStart"] = "10.198.1.100".into(),
        }
        let third = [&second[..], &[("CNI_IFNAME", "eth1")]].concat();
        world.ok_with(plugin, "ADD", &elsewhere, &third);
        let gc = |keep: Value| {
            let mut gc = config.clone();
            gc["cni.dev/valid-attachments"] = keep;
            world.ok(plugin, "GC", &gc);
            host_ends(&world)
        };
        let [c1, c2] = ["c1", "c2"].map(|id| json!({"containerID": id, "ifname": "eth0"}));
        assert_eq!(gc(json!([c1, c2])), 3, "{plugin}");
        assert_eq!(gc(json!([c2])), 2, "{plugin}");
        assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
        assert!(!world.ruleset().contains("id: c1"), "{}", world.ruleset());
        assert_eq!(gc(json!([])), 1, "{plugin}: the other network's stays");
    }
}

#[test]
fn an_attachment_whose_result_the_runtime_cannot_get_is_removed() {
    let world = World::new();
    // A result of version 0.2.0 needs an address.
    let layer_two = world.config("0.2.0", json!({"ipam": {}, "isDefaultGateway": false}));
    for _ in 0..2 {
        let refusal = world.refused("bridge", "ADD", &layer_two, &[]);
        let text = refusal["msg"].as_str().unwrap();
        assert!(text.contains("address"), "{refusal}");
        assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
        assert_eq!(host_ends(&world), 0);
    }
    // The runtime has stopped and reads no result.
    let config = world.config("1.0.0", json!({"ipMasq": true}));
    let script = "exec \"$0\" >/dev/full";
    let bridge = plugins().join("bridge");
    let mut child = Command::new("ip")
        .args(["netns", "exec", &world.host, "sh", "-c", script])
        .arg(&bridge)
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", "c1")
        .env("CNI_NETNS", world.netns())
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", plugins())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, config.to_string().as_bytes()).unwrap();
    drop(input);
    assert!(!child.wait().unwrap().success());
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
    assert_eq!((host_ends(&world), world.taken().len()), (0, 0));
    assert!(!world.ruleset().contains("saddr"), "{}", world.ruleset());
}

#[test]
fn check_finds_changed_flags_of_the_port() {
    for (key, flag) in [("hairpinMode", "hairpin"), ("portIsolation", "isolated")] {
        for configured in [true, false] {
            let world = World::new();
            let config = world.config("1.0.0", json!({key: configured}));
            let result = world.ok("bridge", "ADD", &config);
            let checked = World::with_previous(&config, &result);
            world.ok("bridge", "CHECK", &checked);
            let port = result["interfaces"][1]["name"].as_str().unwrap();
            let set = |on: bool| {
                let on = if on { "on" } else { "off" };
                world.on_host(&["bridge", "link", "set", "dev", port, flag, on])
            };
            set(!configured);
            let refusal = world.refused("bridge", "CHECK", &checked, &[]);
            let text = refusal["msg"].as_str().unwrap();
            assert!(text.contains(key) && text.contains(port), "{refusal}");
            set(configured);
            world.ok("bridge", "CHECK", &checked);
        }
    }
}

#[test]
fn destinations_can_be_excluded_from_masquerading() {
    let world = World::new();
    let except = json!(["10.244.0.0/16", "fd00::/56", "10.96.0.0/12"]);
    let config = world.config("1.0.0", json!({"ipMasq": true, "ipMasqExcept": except}));
    world.ok("bridge", "ADD", &config);
    let rules = world.ruleset();
    let is_complete = |line: &str| {
        let parts = [
            "saddr 10.198.1.2 ",
            "daddr != 10.244.0.0/16 ",
            "daddr != 10.96.0.0/12 ",
            "masquerade",
        ];
        parts.iter().all(|part| line.contains(part)) && !line.contains("fd00")
    };
    assert!(rules.lines().any(is_complete), "{rules}");
    world.ok("bridge", "DEL", &config);
    assert!(!world.ruleset().contains("saddr"));
    let wrong = world.config("1.0.0", json!({"ipMasq": true, "ipMasqExcept": ["10.244"]}));
    let refusal = world.refused("bridge", "ADD", &wrong, &[]);
    let text = refusal["msg"].as_str().unwrap();
    assert!(text.contains("ipMasqExcept \"10.244\""), "{refusal}");
    assert!(world.taken().is_empty(), "nothing was allocated");
}

#[test]
fn a_failed_add_leaves_nothing_behind() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    world.ok("bridge", "ADD", &config);
    // ADD for an existing interface fails and does not change it.
    let refusal = world.refused("bridge", "ADD", &config, &[("CNI_CONTAINERID", "c2")]);
    assert!(
        refusal["msg"].as_str().unwrap().contains("already exists"),
        "{refusal}"
    );
    assert_eq!(world.taken().len(), 1);
    // ADD for the same attachment in another namespace fails as well: the address belongs to the first.
    let elsewhere = World::new();
    let refusal = world.refused(
        "bridge",
        "ADD",
        &config,
        &[("CNI_NETNS", &elsewhere.netns())],
    );
    assert!(
        refusal["msg"]
            .as_str()
            .unwrap()
            .contains("duplicate allocation"),
        "{refusal}"
    );
    assert_eq!(world.taken(), ["10.198.1.2"]);
    // A conflicting address on the bridge.
    ip(&["-n", &world.host, "link", "add", "br1", "type", "bridge"]);
    ip(&[
        "-n",
        &world.host,
        "addr",
        "add",
        "10.1.1.1/24",
        "dev",
        "br1",
    ]);
    let other = world.config("1.0.0", json!({"bridge": "br1"}));
    let refusal = world.refused(
        "bridge",
        "ADD",
        &other,
        &[("CNI_CONTAINERID", "c3"), ("CNI_IFNAME", "eth1")],
    );
    assert!(
        refusal["msg"].as_str().unwrap().contains("forceAddress"),
        "{refusal}"
    );
    assert_eq!(world.taken().len(), 1, "the address was released");
    let links = ip(&["-n", &world.host, "link"]);
    assert_eq!(links.matches("master br1").count(), 0, "{links}");
}

#[test]
fn concurrent_containers_get_different_addresses() {
    let world = World::new();
    let config = world.config("1.0.0", json!({"ipMasq": true}));
    let names: Vec<String> = (0..20)
        .map(|i| format!("{}-{i}", world.container))
        .collect();
    for name in &names {
        ip(&["netns", "add", name]);
    }
    std::thread::scope(|scope| {
        let calls: Vec<_> = names
            .iter()
            .map(|name| {
                let (world, config) = (&world, &config);
                scope.spawn(move || {
                    let netns = format!("/run/netns/{name}");
                    world.call(
                        "bridge",
                        "ADD",
                        config,
                        &[("CNI_CONTAINERID", name), ("CNI_NETNS", &netns)],
                    )
                })
            })
            .collect();
        for call in calls {
            let output = call.join().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stdout)
            );
        }
    });
    assert_eq!(world.taken().len(), 20);
    let rules = world.ruleset();
    assert_eq!(
        (
            rules.matches("masquerade comment").count(),
            rules.matches("goto masq_checks").count()
        ),
        (20, 1),
        "{rules}"
    );
    // GC keeps only the listed attachments.
    let mut gc = world.config("1.1.0", json!({"ipMasq": true}));
    let keep = json!([{"containerID": names[3], "ifname": "eth0"}]);
    world.ok("bridge", "GC", &gc);
    assert_eq!(world.taken().len(), 20, "no list, nothing to release");
    gc["cni.dev/valid-attachments"] = keep;
    world.ok("bridge", "GC", &gc);
    assert_eq!(world.taken().len(), 1);
    assert_eq!(world.ruleset().matches("masquerade comment").count(), 1);
    for name in &names {
        ip(&["netns", "del", name]);
    }
}

#[test]
fn dual_stack_layer_two_and_exhaustion() {
    let world = World::new();
    let ranges = json!({"ipam": {"type": "host-local", "dataDir": world.data.path(), "ranges": [[{"subnet": "10.198.2.0/30"}], [{"subnet": "fd42::/64"}]]}});
    let config = world.config("1.1.0", ranges);
    let result = world.ok("bridge", "ADD", &config);
    assert_eq!(
        (
            result["ips"].as_array().unwrap().len(),
            result["routes"].as_array().unwrap().len()
        ),
        (2, 2),
        "{result}"
    );
    let shown = ip(&["-n", &world.container, "-6", "addr", "show", "eth0"]);
    assert!(
        shown.contains("fd42::2/64") && !shown.contains("tentative"),
        "duplicate address detection is off: {shown}"
    );
    let status = world.refused("host-local", "STATUS", &config, &[]);
    assert_eq!(status["code"], 50, "{status}");
    let full = world.refused("host-local", "ADD", &config, &[("CNI_CONTAINERID", "c9")]);
    assert!(
        full["msg"]
            .as_str()
            .unwrap()
            .contains("no IP addresses available in range set: 10.198.2.1-10.198.2.2"),
        "{full}"
    );
    let layer_two = World::new();
    let config = layer_two.config("1.0.0", json!({"ipam": {}, "isDefaultGateway": false}));
    let result = layer_two.ok("bridge", "ADD", &config);
    assert!(result.get("ips").is_none(), "{result}");
    layer_two.ok("bridge", "CHECK", &World::with_previous(&config, &result));
}

/// Passes if `act` takes less than 0.9 s longer than `like` in at least one of five tries. An
/// unwanted wait takes at least 1 s every time, while a busy machine is slow only occasionally.
fn fast_once<T>(like: impl Fn() -> Duration, act: impl Fn() -> (Duration, T)) -> T {
    let mut tries = (0..5).map(|_| (like(), act()));
    let fast = tries.find(|(like, (took, _))| took.saturating_sub(*like).as_millis() < 900);
    fast.expect("the call waits for no other call").1.1
}

#[test]
fn ptp_routes_all_traffic_through_the_host() {
    for version in versions("bridge") {
        let world = World::new();
        let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "subnet": "10.198.2.0/24", "routes": [{"dst": "0.0.0.0/0"}]});
        let config = world.config(version, json!({"type": "ptp", "ipMasq": true, "mtu": 1400, "ipam": ipam, "dns": {"nameservers": ["192.0.2.53"]}}));
        let result = world.ok("ptp", "ADD", &config);
        assert_eq!(result["dns"]["nameservers"][0], "192.0.2.53");
        if version >= "0.3.0" {
            assert_eq!(
                (&result["ips"][0]["address"], &result["ips"][0]["interface"]),
                (&json!("10.198.2.2/24"), &json!(1)),
                "{version}: {result}"
            );
            assert_eq!(result["interfaces"][1]["name"], "eth0");
        }
        let shown = once_up(|| ip(&["-n", &world.container, "addr", "show", "eth0"]));
        assert!(
            shown.contains("10.198.2.2/24")
                && shown.contains("mtu 1400")
                && shown.contains("state UP"),
            "{shown}"
        );
        let routes = ip(&["-n", &world.container, "route"]);
        for expected in [
            "default via 10.198.2.1 dev eth0",
            "10.198.2.0/24 via 10.198.2.1 dev eth0 src 10.198.2.2",
            "10.198.2.1 dev eth0 scope link src 10.198.2.2",
        ] {
            assert!(routes.contains(expected), "{expected}: {routes}");
        }
        assert!(ip(&["-n", &world.host, "route"]).contains("10.198.2.2 dev veth"));
        assert!(world.ruleset().contains("10.198.2.2"));
        assert!(reaches(&world.container, "10.198.2.1"), "the host replies");
        if version >= "0.4.0" {
            let with = World::with_previous(&config, &result);
            world.ok("ptp", "CHECK", &with);
            ip(&["-n", &world.host, "route", "del", "10.198.2.2"]);
            assert!(
                world.refused("ptp", "CHECK", &with, &[])["msg"]
                    .as_str()
                    .unwrap()
                    .contains("10.198.2.2")
            );
        }
        world.ok("ptp", "DEL", &World::with_previous(&config, &result));
        world.ok("ptp", "DEL", &config);
        assert!(world.taken().is_empty() && !world.ruleset().contains("10.198.2.2"));
        assert!(
            !ip(&["-n", &world.host, "link"]).contains("veth"),
            "DEL removes the pair"
        );
    }
    // Both families, without waiting for duplicate address detection.
    let ranges = json!([[{"subnet": "10.198.3.0/24"}], [{"subnet": "fd00:198:3::/64"}]]);
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let add = |ranges: &Value, routes: &Value| {
        let world = World::new();
        let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges, "routes": routes});
        let config = world.config("1.1.0", json!({"type": "ptp", "ipam": ipam}));
        let begun = Instant::now();
        let result = world.ok("ptp", "ADD", &config);
        (begun.elapsed(), (world, config, result))
    };
    let of_one = (json!([ranges[0]]), json!([routes[0]]));
    let (world, config, result) =
        fast_once(|| add(&of_one.0, &of_one.1).0, || add(&ranges, &routes));
    let routes = ip(&["-n", &world.container, "-6", "route"]);
    assert!(
        routes.contains("default via fd00:198:3::1")
            && routes.contains("fd00:198:3::/64 via fd00:198:3::1 dev eth0 src fd00:198:3::2"),
        "{routes}"
    );
    assert!(ip(&["-n", &world.host, "-6", "route"]).contains("fd00:198:3::2 dev veth"));
    assert!(
        reaches(&world.container, "fd00:198:3::1"),
        "the host replies"
    );
    // Two containers reach each other through the host.
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    let second = world.call("ptp", "ADD", &config, &env);
    assert!(
        second.status.success(),
        "{}",
        String::from_utf8_lossy(&second.stdout)
    );
    assert!(reaches(&world.container, "10.198.3.3"), "the peer replies");
    assert!(world.call("ptp", "DEL", &config, &env).status.success());
    world.ok("ptp", "STATUS", &config);
    let mut gone = config.clone();
    gone["cni.dev/valid-attachments"] = json!([]);
    world.ok("ptp", "GC", &gone);
    assert!(world.taken().is_empty(), "{result}");
    // An address without a gateway is an error, and nothing remains.
    let lone = json!({"type": "static", "addresses": [{"address": "10.198.4.2/24"}]});
    let world = World::new();
    let error = world.refused(
        "ptp",
        "ADD",
        &world.config("1.0.0", json!({"type": "ptp", "ipam": lone})),
        &[],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("no gateway"),
        "{error}"
    );
    assert!(!ip(&["-n", &world.host, "link"]).contains("veth"));
}
#[test]
fn loopback_goes_up_and_down() {
    let world = World::new();
    for version in versions("bridge") {
        let config = json!({"cniVersion": version, "name": "lo", "type": "loopback"});
        let result = world.ok("loopback", "ADD", &config);
        assert!(result.to_string().contains("127.0.0.1/8"), "{result}");
        assert!(ip(&["-n", &world.container, "link", "show", "lo"]).contains("LOOPBACK,UP"));
        world.ok("loopback", "DEL", &config);
        assert!(!ip(&["-n", &world.container, "link", "show", "lo"]).contains("LOOPBACK,UP"));
    }
}

#[test]
fn a_bridge_has_the_configured_options() {
    let world = World::new();
    let port = |result: &Value| -> Value {
        let name = result["interfaces"][1]["name"].as_str().unwrap();
        let shown = Command::new("bridge")
            .args(["-n", &world.host, "-d", "-j", "link", "show", "dev", name])
            .output()
            .unwrap();
        serde_json::from_slice::<Value>(&shown.stdout).unwrap()[0].clone()
    };
    let bridge = |what: &str| ip(&["-n", &world.host, "-d", "link", "show", what]);
    // Hairpin mode and isolation, on and off.
    for on in [true, false] {
        let config = world.config(
            "1.0.0",
            json!({"hairpinMode": on, "portIsolation": on, "mtu": 1400}),
        );
        let result = world.ok("bridge", "ADD", &config);
        assert_eq!(
            (&port(&result)["hairpin"], &port(&result)["isolated"]),
            (&json!(on), &json!(on)),
            "{}",
            port(&result)
        );
        assert!(ip(&["-n", &world.container, "link", "show", "eth0"]).contains("mtu 1400"));
        world.ok("bridge", "DEL", &config);
    }
    // The bridge keeps its MAC address when ports come and go, even without IP addresses.
    let mac = |name: &str| bridge(name).split("link/ether ").nth(1).unwrap()[..17].to_owned();
    for (name, extra) in [
        ("br0", json!({})),
        (
            "br1",
            json!({"bridge": "br1", "ipam": {}, "isDefaultGateway": false}),
        ),
    ] {
        let config = world.config("1.0.0", extra);
        let result = world.ok("bridge", "ADD", &config);
        let before = mac(name);
        assert_eq!(result["interfaces"][0]["mac"], before);
        world.ok("bridge", "DEL", &config);
        assert_eq!(mac(name), before);
    }
    // The container's MAC address: each source takes precedence over the ones before.
    let args = [("CNI_ARGS", "IgnoreUnknown=true;MAC=c2:11:22:33:44:01")];
    for (extra, expected) in [
        (json!({}), "c2:11:22:33:44:01"),
        (
            json!({"args": {"cni": {"mac": "c2:11:22:33:44:02"}}}),
            "c2:11:22:33:44:02",
        ),
        (
            json!({"args": {"cni": {"mac": "c2:11:22:33:44:02"}}, "runtimeConfig": {"mac": "c2:11:22:33:44:03"}}),
            "c2:11:22:33:44:03",
        ),
    ] {
        let config = world.config("1.0.0", extra);
        let result = world.ok_with("bridge", "ADD", &config, &args);
        assert_eq!(result["interfaces"][2]["mac"], expected);
        assert!(ip(&["-n", &world.container, "link", "show", "eth0"]).contains(expected));
        world.ok("bridge", "DEL", &config);
    }
    // A container whose interface stays down, and one with duplicate address detection.
    let down = world.config(
        "1.0.0",
        json!({"ipam": {}, "isDefaultGateway": false, "disableContainerInterface": true}),
    );
    world.ok("bridge", "ADD", &down);
    assert!(ip(&["-n", &world.container, "link", "show", "eth0"]).contains("state DOWN"));
    world.ok("bridge", "DEL", &down);
}

#[test]
fn an_existing_bridge_accepts_no_router_advertisements() {
    let world = World::new();
    let bridge = |what: &str| ip(&["-n", &world.host, "-d", "link", "show", what]);
    let promiscuous = world.config("1.0.0", json!({"bridge": "br2", "promiscMode": true}));
    let result = world.ok("bridge", "ADD", &promiscuous);
    assert!(bridge("br2").contains("PROMISC"));
    let with = World::with_previous(&promiscuous, &result);
    world.ok("bridge", "CHECK", &with);
    let off = ["-n", &world.host, "link", "set", "br2", "promisc", "off"];
    ip(&off);
    let error = world.refused("bridge", "CHECK", &with, &[]);
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("no longer promiscuous"),
        "{error}"
    );
    let accept_ra = |name: &str| {
        world
            .on_host(&["cat", &format!("/proc/sys/net/ipv6/conf/{name}/accept_ra")])
            .trim()
            .to_owned()
    };
    assert_eq!(accept_ra("br2"), "0");
    world.ok("bridge", "DEL", &promiscuous);
    // With forceAddress, the bridge's address is replaced.
    ip(&["-n", &world.host, "link", "add", "br3", "type", "bridge"]);
    ip(&[
        "-n",
        &world.host,
        "addr",
        "add",
        "10.1.1.1/24",
        "dev",
        "br3",
    ]);
    let force = world.config("1.0.0", json!({"bridge": "br3", "forceAddress": true}));
    world.ok("bridge", "ADD", &force);
    assert_eq!(
        accept_ra("br3"),
        "0",
        "also on a bridge that already existed"
    );
    let shown = ip(&["-n", &world.host, "addr", "show", "br3"]);
    assert!(
        shown.contains("10.198.1.1/24") && !shown.contains("10.1.1.1"),
        "{shown}"
    );
    // A link of another kind is not a bridge.
    ip(&[
        "-n",
        &world.host,
        "link",
        "add",
        "fake0",
        "type",
        "veth",
        "peer",
        "name",
        "fake1",
    ]);
    let error = world.refused(
        "bridge",
        "ADD",
        &world.config("1.0.0", json!({"bridge": "fake0"})),
        &[("CNI_IFNAME", "eth1")],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("not a bridge"),
        "{error}"
    );
}

#[test]
fn routes_have_the_attributes_from_ipam() {
    let world = World::new();
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.198.1.9", "mtu": 1300, "advmss": 1200, "priority": 77},
        {"dst": "10.8.0.0/16", "table": 42}, {"dst": "10.7.0.0/16", "scope": 253}, {"dst": "10.6.0.0/16", "gw": "10.198.1.6"}, {"dst": "10.6.0.0/16", "gw": "10.198.1.7"}]);
    let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "subnet": "10.198.1.0/24", "routes": routes});
    let config = world.config(
        "1.1.0",
        json!({"isDefaultGateway": false, "isGateway": true, "ipam": ipam}),
    );
    let result = world.ok("bridge", "ADD", &config);
    assert_eq!(
        result["routes"], routes,
        "the result has the routes of the configuration"
    );
    let main = ip(&["-n", &world.container, "route"]);
    for expected in [
        "default via 10.198.1.1",
        "10.9.0.0/16 via 10.198.1.9 dev eth0 metric 77 mtu 1300 advmss 1200",
        "10.7.0.0/16 dev eth0 scope link",
        "10.6.0.0/16 via 10.198.1.6",
    ] {
        assert!(main.contains(expected), "{expected}: {main}");
    }
    assert!(
        ip(&["-n", &world.container, "route", "show", "table", "42"])
            .contains("10.8.0.0/16 via 10.198.1.1")
    );
    let with = World::with_previous(&config, &result);
    world.ok("bridge", "CHECK", &with);
    // Another gateway is another route.
    let other = "route replace 10.9.0.0/16 via 10.198.1.8 metric 77";
    ip(&[
        &["-n", &*world.container][..],
        &other.split(' ').collect::<Vec<_>>(),
    ]
    .concat());
    let error = world.refused("bridge", "CHECK", &with, &[]);
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("10.9.0.0/16 via 10.198.1.9"),
        "{error}"
    );
}
