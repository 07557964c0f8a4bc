//! Plugins that stand behind another one: `portmap`, `firewall`, `bandwidth`, `tuning`, `sbr`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::world::{World, inside, ip, versions};

const PATIENCE: Duration = Duration::from_secs(3);

/// A container on a bridge, and its result.
fn bridged(version: &str, extra: Value) -> (World, Value, Value) {
    let world = World::new();
    let config = world.config(version, extra);
    let result = world.ok("bridge", "ADD", &config);
    (world, config, result)
}

/// What a server says that a connection from `namespace` to `to` reaches.
fn heard(namespace: &str, to: &str) -> Option<String> {
    let to: SocketAddr = to.parse().unwrap();
    inside(namespace, || {
        let mut stream = TcpStream::connect_timeout(&to, PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).ok().map(|_| text)
    })
}

/// Says a word to everybody who connects, as long as the test runs.
fn say(namespace: &str, at: &str, word: &'static str) {
    let listener = inside(namespace, || TcpListener::bind(at).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(word.as_bytes());
        }
    });
}

fn mapping(host: u16, container: u16, protocol: &str) -> Value {
    json!({"hostPort": host, "containerPort": container, "protocol": protocol})
}

fn ports(version: &str, previous: &Value, mappings: Value, extra: Value) -> Value {
    let mut config = World::chained(version, "portmap", previous, extra);
    config["runtimeConfig"] = json!({"portMappings": mappings});
    config
}

#[test]
fn ports_of_the_host_lead_to_the_container_in_every_version() {
    for version in versions("bridge").into_iter().filter(|v| *v >= "0.3.0") {
        let (world, config, result) = bridged(version, json!({"hairpinMode": true}));
        say(&world.container, "0.0.0.0:80", "container");
        let chained = ports(
            version,
            &result,
            json!([mapping(8080, 80, "tcp")]),
            json!({"backend": "iptables"}),
        );
        let passed = world.ok("portmap", "ADD", &chained);
        assert_eq!(
            (&passed["ips"], &passed["interfaces"]),
            (&result["ips"], &result["interfaces"]),
            "{version}"
        );
        let says = Some("container".to_owned());
        assert_eq!(
            heard(&world.host, "127.0.0.1:8080"),
            says,
            "{version}: over localhost\n{}",
            world.ruleset()
        );
        assert_eq!(
            heard(&world.host, "10.198.1.1:8080"),
            says,
            "{version}: over an address of the host"
        );
        assert_eq!(
            heard(&world.container, "10.198.1.1:8080"),
            says,
            "{version}: from the container itself"
        );
        if version >= "0.4.0" {
            world.ok("portmap", "CHECK", &chained);
            world.on_host(&["nft", "flush", "chain", "ip", "cni_hostport", "hostports"]);
            let refusal = world.refused("portmap", "CHECK", &chained, &[]);
            assert!(
                refusal["msg"].as_str().unwrap().contains("10.198.1.2"),
                "{refusal}"
            );
        }
        for _ in 0..2 {
            world.ok("portmap", "DEL", &chained);
        }
        assert!(
            !world.ruleset().contains("10.198.1.2"),
            "{version}: {}",
            world.ruleset()
        );
        assert_eq!(heard(&world.host, "127.0.0.1:8080"), None);
        world.ok("bridge", "DEL", &config);
    }
}

#[test]
fn ports_have_conditions_addresses_and_sources_of_their_own() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    say(&world.container, "0.0.0.0:80", "container");
    // An address of the host that it is for; a source that it is not for; a second network of the same container.
    ip(&[
        "-n",
        &world.host,
        "addr",
        "add",
        "10.198.9.1/32",
        "dev",
        "lo",
    ]);
    let own = json!([{"hostPort": 8081, "containerPort": 80, "protocol": "tcp", "hostIP": "10.198.9.1"}, {"hostPort": 8082, "containerPort": 80, "protocol": "tcp", "hostIP": "::1"}]);
    world.ok("portmap", "ADD", &ports("1.0.0", &result, own, json!({})));
    assert_eq!(
        heard(&world.host, "10.198.9.1:8081").as_deref(),
        Some("container")
    );
    assert_eq!(
        heard(&world.host, "10.198.1.1:8081"),
        None,
        "not for this address"
    );
    assert_eq!(
        heard(&world.host, "10.198.9.1:8082"),
        None,
        "the other family's"
    );
    let not_localhost = json!({"name": "other", "conditionsV4": ["!", "-d", "127.0.0.0/8"]});
    let second = ports(
        "1.0.0",
        &result,
        json!([mapping(8083, 80, "tcp")]),
        not_localhost,
    );
    world.ok("portmap", "ADD", &second);
    assert_eq!(
        heard(&world.host, "10.198.9.1:8083").as_deref(),
        Some("container")
    );
    assert_eq!(heard(&world.host, "127.0.0.1:8083"), None, "the condition");
    world.ok("portmap", "DEL", &second);
    assert_eq!(
        heard(&world.host, "10.198.9.1:8081").as_deref(),
        Some("container"),
        "DEL of one network leaves the other's"
    );
    // masqAll: the container sees an address of the host.
    let all = ports(
        "1.0.0",
        &result,
        json!([mapping(8084, 80, "tcp")]),
        json!({"masqAll": true}),
    );
    world.ok("portmap", "ADD", &all);
    assert!(
        world.ruleset().contains("ip daddr 10.198.1.2 masquerade"),
        "{}",
        world.ruleset()
    );
    // GC: whoever is not listed goes.
    let mut gc = World::chained("1.1.0", "portmap", &result, json!({}));
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("portmap", "GC", &gc);
    assert!(
        !world.ruleset().contains("10.198.1.2"),
        "{}",
        world.ruleset()
    );
    world.ok("portmap", "STATUS", &gc);
    // Bad input changes nothing.
    let before = world.ruleset();
    for (mappings, extra, expected) in [
        (json!([mapping(0, 80, "tcp")]), json!({}), "hostPort"),
        (json!([mapping(80, 80, "gre")]), json!({}), "gre"),
        (json!([]), json!({"backend": "pf"}), "pf"),
        (json!([]), json!({"markMasqBit": 32}), "markMasqBit"),
        (
            json!([]),
            json!({"markMasqBit": 5, "externalSetMarkChain": "X"}),
            "externalSetMarkChain",
        ),
        (
            json!([]),
            json!({"conditionsV4": ["-m", "owner"]}),
            "conditionsV4",
        ),
        (
            json!([{"hostPort": 80, "containerPort": 80, "protocol": "tcp", "hostIP": "x"}]),
            json!({}),
            "hostIP",
        ),
    ] {
        let refusal = world.refused(
            "portmap",
            "ADD",
            &ports("1.0.0", &result, mappings, extra),
            &[],
        );
        assert!(
            refusal["msg"].as_str().unwrap().contains(expected),
            "{expected}: {refusal}"
        );
    }
    let lone = json!({"cniVersion": "1.0.0", "name": "net", "type": "portmap"});
    assert!(
        world.refused("portmap", "ADD", &lone, &[])["msg"]
            .as_str()
            .unwrap()
            .contains("chained")
    );
    assert_eq!(world.ruleset(), before);
}

#[test]
fn udp_goes_to_the_container_that_has_the_port_now() {
    let (world, config, result) = bridged("1.0.0", json!({}));
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    let second = world.ok_with("bridge", "ADD", &config, &env);
    let receive =
        |world: &World| inside(&world.container, || UdpSocket::bind("0.0.0.0:53").unwrap());
    let (first_socket, second_socket) = (receive(&world), receive(&other));
    for socket in [&first_socket, &second_socket] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let client = inside(&world.host, || UdpSocket::bind("10.198.1.1:4000").unwrap());
    let arrives = |socket: &UdpSocket| {
        client.send_to(b"x", "10.198.1.1:5353").unwrap();
        let mut buffer = [0; 8];
        socket.recv_from(&mut buffer).is_ok()
    };
    let wanted = json!([mapping(5353, 53, "udp")]);
    let one = ports("1.0.0", &result, wanted.clone(), json!({}));
    let two = ports("1.0.0", &second, wanted, json!({}));
    world.ok("portmap", "ADD", &one);
    assert!(arrives(&first_socket), "{}", world.ruleset());
    // The same client and port, another container: the kernel must not remember the first.
    world.ok("portmap", "DEL", &one);
    world.ok_with("portmap", "ADD", &two, &env);
    assert!(
        arrives(&second_socket),
        "the flow went on to the first container"
    );
    world.ok_with("portmap", "DEL", &two, &env);
    assert!(world.call("bridge", "DEL", &config, &env).status.success());
}

#[test]
fn ipv6_ports_lead_to_the_container() {
    let ranges = |world: &World| json!({"ipam": {"type": "host-local", "dataDir": world.data.path(), "ranges": [[{"subnet": "10.198.5.0/24"}], [{"subnet": "fd00:198:5::/64"}]]}});
    let world = World::new();
    let config = world.config("1.1.0", ranges(&world));
    let result = world.ok("bridge", "ADD", &config);
    say(&world.container, "[::]:80", "container");
    let chained = ports(
        "1.1.0",
        &result,
        json!([mapping(8080, 80, "tcp")]),
        json!({}),
    );
    world.ok("portmap", "ADD", &chained);
    assert_eq!(
        heard(&world.host, "[fd00:198:5::1]:8080").as_deref(),
        Some("container"),
        "{}",
        world.ruleset()
    );
    assert_eq!(
        heard(&world.host, "10.198.5.1:8080").as_deref(),
        Some("container")
    );
    world.ok("portmap", "CHECK", &chained);
    world.ok("portmap", "DEL", &chained);
    assert!(
        !world.ruleset().contains("fd00:198:5::2"),
        "{}",
        world.ruleset()
    );
}

/// Whether `from` reaches `to`.
fn pings(from: &str, to: &str) -> bool {
    let output = Command::new("ip")
        .args(["netns", "exec", from, "busybox", "ping", "-c1", "-W1", to])
        .output()
        .unwrap();
    output.status.success()
}

#[test]
fn the_firewall_lets_pass_what_the_host_would_drop() {
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let (world, config, result) = bridged(version, json!({}));
        // Somebody beyond the host.
        let far = World::new();
        let far_config = {
            let mut c = far.config(version, json!({"bridge": "br9"}));
            c["ipam"]["subnet"] = "10.198.9.0/24".into();
            c
        };
        let env = [("CNI_CONTAINERID", "far"), ("CNI_NETNS", &*far.netns())];
        world.ok_with("bridge", "ADD", &far_config, &env);
        assert!(pings(&world.container, "10.198.9.2"));
        world.on_host(&["iptables", "-P", "FORWARD", "DROP"]);
        assert!(!pings(&world.container, "10.198.9.2"), "the host drops it");
        let chained = World::chained(version, "firewall", &result, json!({"backend": "iptables"}));
        let passed = world.ok("firewall", "ADD", &chained);
        assert_eq!(passed["ips"], result["ips"]);
        assert!(
            pings(&world.container, "10.198.9.2"),
            "{}",
            world.on_host(&["iptables", "-S"])
        );
        assert!(
            !pings(&far.container, "10.198.1.2"),
            "only answers may come in"
        );
        // iptables sees its own rules.
        let rules = world.on_host(&["iptables", "-S"]);
        for expected in [
            "-A FORWARD -m comment --comment \"CNI firewall plugin rules\" -j CNI-FORWARD",
            "-A CNI-FORWARD -m comment --comment \"CNI firewall plugin admin overrides\" -j CNI-ADMIN",
            "-A CNI-FORWARD -d 10.198.1.2/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-A CNI-FORWARD -s 10.198.1.2/32 -j ACCEPT",
        ] {
            assert!(rules.contains(expected), "{expected}: {rules}");
        }
        // The administrator's word counts first.
        world.on_host(&[
            "iptables",
            "-A",
            "CNI-ADMIN",
            "-s",
            "10.198.1.2",
            "-j",
            "DROP",
        ]);
        assert!(!pings(&world.container, "10.198.9.2"));
        world.on_host(&["iptables", "-F", "CNI-ADMIN"]);
        world.ok("firewall", "ADD", &chained);
        assert_eq!(
            world.on_host(&["iptables", "-S"]),
            rules,
            "again is nothing new"
        );
        world.ok("firewall", "CHECK", &chained);
        world.on_host(&[
            "iptables",
            "-D",
            "CNI-FORWARD",
            "-s",
            "10.198.1.2/32",
            "-j",
            "ACCEPT",
        ]);
        assert!(
            world.refused("firewall", "CHECK", &chained, &[])["msg"]
                .as_str()
                .unwrap()
                .contains("10.198.1.2")
        );
        // DEL without prevResult finds its rules, too.
        let mut bare = chained.clone();
        bare.as_object_mut().unwrap().remove("prevResult");
        world.ok("firewall", "DEL", &bare);
        assert!(!world.on_host(&["iptables", "-S"]).contains("10.198.1.2"));
        // What the reference wrote, which has no owner, goes by its addresses.
        world.on_host(&[
            "iptables",
            "-A",
            "CNI-FORWARD",
            "-s",
            "10.198.1.2/32",
            "-j",
            "ACCEPT",
        ]);
        world.ok("firewall", "DEL", &chained);
        assert!(!world.on_host(&["iptables", "-S"]).contains("10.198.1.2"));
        world.ok("bridge", "DEL", &config);
        assert!(
            world
                .call("bridge", "DEL", &far_config, &env)
                .status
                .success()
        );
    }
}

#[test]
fn bridges_are_kept_apart() {
    let (world, config, result) = bridged("1.0.0", json!({}));
    let far = World::new();
    let far_config = {
        let mut c = world.config("1.0.0", json!({"bridge": "br9", "name": "far"}));
        c["ipam"]["subnet"] = "10.198.9.0/24".into();
        c
    };
    let env = [("CNI_CONTAINERID", "far"), ("CNI_NETNS", &*far.netns())];
    let far_result = world.ok_with("bridge", "ADD", &far_config, &env);
    let near = World::new();
    let near_env = [("CNI_CONTAINERID", "near"), ("CNI_NETNS", &*near.netns())];
    world.ok_with("bridge", "ADD", &config, &near_env);
    let policy = |previous: &Value, policy: &str| {
        World::chained(
            "1.0.0",
            "firewall",
            previous,
            json!({"ingressPolicy": policy}),
        )
    };
    assert!(pings(&far.container, "10.198.1.2"));
    world.ok("firewall", "ADD", &policy(&result, "same-bridge"));
    world.ok_with("firewall", "ADD", &policy(&far_result, "same-bridge"), &env);
    assert!(
        !pings(&far.container, "10.198.1.2"),
        "{}",
        world.on_host(&["iptables", "-S"])
    );
    assert!(!pings(&world.container, "10.198.9.2"));
    assert!(pings(&near.container, "10.198.1.2"), "within the bridge");
    let rules = world.on_host(&["iptables", "-S"]);
    world.ok("firewall", "ADD", &policy(&result, "same-bridge"));
    assert_eq!(
        world.on_host(&["iptables", "-S"]),
        rules,
        "again is nothing new"
    );
    world.ok("firewall", "CHECK", &policy(&result, "same-bridge"));
    world.refused("firewall", "CHECK", &policy(&result, "isolated"), &[]);
    world.ok("firewall", "ADD", &policy(&result, "isolated"));
    assert!(
        world
            .on_host(&["iptables", "-S"])
            .contains("-A CNI-ISOLATION-STAGE-1 -i br0 -o br0")
    );
    world.ok("firewall", "CHECK", &policy(&result, "isolated"));
    let error = world.refused("firewall", "ADD", &policy(&result, "none"), &[]);
    assert!(
        error["msg"].as_str().unwrap().contains("ingressPolicy"),
        "{error}"
    );
    assert!(
        world
            .call("bridge", "DEL", &config, &near_env)
            .status
            .success()
    );
    assert!(
        world
            .call("bridge", "DEL", &far_config, &env)
            .status
            .success()
    );
}

#[test]
fn firewalls_of_many_containers_at_once_have_no_rule_twice() {
    let world = World::new();
    let results: Vec<Value> = (0..20)
        .map(|i| {
            json!({"interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": "/x"}], "ips": [{"address": format!("10.1.1.{}/24", i + 2), "interface": 1}]})
        })
        .collect();
    std::thread::scope(|scope| {
        for (i, result) in results.iter().enumerate() {
            let world = &world;
            scope.spawn(move || {
                let id = format!("c{i}");
                let config = World::chained(
                    "1.0.0",
                    "firewall",
                    result,
                    json!({"ingressPolicy": "same-bridge"}),
                );
                world.ok_with("firewall", "ADD", &config, &[("CNI_CONTAINERID", &id)]);
            });
        }
    });
    let rules = world.on_host(&["iptables", "-S"]);
    let mut lines: Vec<&str> = rules.lines().filter(|l| l.starts_with("-A")).collect();
    let all = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!((lines.len(), all), (all, 40 + 3 + 4), "{rules}");
}

#[test]
fn bandwidth_limits_what_a_container_receives_and_sends() {
    let tc = |world: &World, args: &[&str]| world.on_host(&[&["tc"], args].concat());
    for version in versions("bridge").into_iter().filter(|v| *v >= "0.3.0") {
        let (world, config, result) = bridged(version, json!({}));
        let limits = json!({"ingressRate": 8_000_000, "ingressBurst": 80_000, "egressRate": 16_000_000, "egressBurst": 160_000});
        let chained = World::chained(version, "bandwidth", &result, limits);
        let passed = world.ok("bandwidth", "ADD", &chained);
        let veth = result["interfaces"][1]["name"].as_str().unwrap();
        let interfaces = passed["interfaces"].as_array().unwrap();
        let ifb = interfaces.last().unwrap()["name"].as_str().unwrap();
        assert_eq!((interfaces.len(), ifb.len()), (4, 15), "{passed}");
        assert!(ifb.starts_with("bwp"));
        let shown = tc(&world, &["qdisc", "show", "dev", veth]);
        assert!(
            shown.contains("tbf 1: root")
                && shown.contains("rate 8Mbit")
                && shown.contains("qdisc ingress"),
            "{shown}"
        );
        let shown = tc(&world, &["qdisc", "show", "dev", ifb]);
        assert!(
            shown.contains("rate 16Mbit") && shown.contains("burst 20000b"),
            "{shown}"
        );
        let filter = tc(&world, &["filter", "show", "dev", veth, "ingress"]);
        assert!(
            filter.contains(&format!("Redirect to device {ifb}")),
            "{filter}"
        );
        assert!(pings(&world.container, "10.198.1.1"), "it still talks");
        // What it sends passes the limit.
        let sent = tc(&world, &["-s", "qdisc", "show", "dev", ifb]);
        assert!(!sent.contains("Sent 0 bytes"), "{sent}");
        if version >= "0.4.0" {
            world.ok("bandwidth", "CHECK", &chained);
            tc(
                &world,
                &[
                    "qdisc", "change", "dev", veth, "root", "tbf", "rate", "1mbit", "burst",
                    "10kb", "latency", "25ms",
                ],
            );
            world.refused("bandwidth", "CHECK", &chained, &[]);
        }
        for _ in 0..2 {
            world.ok("bandwidth", "DEL", &chained);
        }
        assert!(!ip(&["-n", &world.host, "link"]).contains("bwp"));
        world.ok("bridge", "DEL", &config);
    }
    // The runtime's wish counts where nothing stands at the top; a burst that means none is no burst.
    let (world, _, result) = bridged("1.1.0", json!({}));
    let mut wished = World::chained("1.1.0", "bandwidth", &result, json!({}));
    assert_eq!(
        world.ok("bandwidth", "ADD", &wished)["interfaces"],
        result["interfaces"],
        "no limits, nothing done"
    );
    wished["runtimeConfig"] = json!({"bandwidth": {"IngressRate": 8_000_000, "IngressBurst": u32::MAX, "EgressRate": 8_000_000, "EgressBurst": u32::MAX}});
    world.ok("bandwidth", "ADD", &wished);
    let veth = result["interfaces"][1]["name"].as_str().unwrap();
    let shown = tc(&world, &["qdisc", "show", "dev", veth]);
    assert!(shown.contains("burst 100000b"), "{shown}");
    let mut gc = wished.clone();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
    world.ok("bandwidth", "GC", &gc);
    assert!(ip(&["-n", &world.host, "link"]).contains("bwp"));
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("bandwidth", "GC", &gc);
    assert!(!ip(&["-n", &world.host, "link"]).contains("bwp"), "GC");
    // Behind ptp, and a burst that no number holds.
    let line = World::new();
    let config = line.config("1.0.0", json!({"type": "ptp"}));
    let ends = line.ok("ptp", "ADD", &config);
    let limits = World::chained(
        "1.0.0",
        "bandwidth",
        &ends,
        json!({"ingressRate": 8_000_000, "ingressBurst": 80_000}),
    );
    line.ok("bandwidth", "ADD", &limits);
    assert!(
        tc(
            &line,
            &[
                "qdisc",
                "show",
                "dev",
                ends["interfaces"][0]["name"].as_str().unwrap()
            ]
        )
        .contains("rate 8Mbit")
    );
    assert!(
        !ip(&["-n", &line.host, "link"]).contains("bwp"),
        "nothing for what it sends"
    );
    let huge = World::chained(
        "1.0.0",
        "bandwidth",
        &ends,
        json!({"egressRate": 8_000_000, "egressBurst": 8_u64 * u64::from(u32::MAX)}),
    );
    assert!(
        line.refused("bandwidth", "ADD", &huge, &[])["msg"]
            .as_str()
            .unwrap()
            .contains("4 GiB")
    );
    // A link without another end cannot be limited.
    ip(&["-n", &line.container, "link", "del", "eth0"]);
    ip(&[
        "-n",
        &line.container,
        "link",
        "add",
        "eth0",
        "type",
        "bridge",
    ]);
    let error = line.refused("bandwidth", "ADD", &limits, &[]);
    assert!(error["msg"].as_str().unwrap().contains("veth"), "{error}");
    // Bad input, and nothing to limit.
    let error = world.refused(
        "bandwidth",
        "ADD",
        &World::chained("1.1.0", "bandwidth", &result, json!({"ingressRate": 8})),
        &[],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("ingressBurst"),
        "{error}"
    );
    let mut none = result.clone();
    none["interfaces"] = json!([]);
    world.refused(
        "bandwidth",
        "ADD",
        &World::chained(
            "1.1.0",
            "bandwidth",
            &none,
            json!({"ingressRate": 8000, "ingressBurst": 80_000}),
        ),
        &[],
    );
    world.refused(
        "bandwidth",
        "ADD",
        &World::chained("0.2.0", "bandwidth", &result, json!({})),
        &[],
    );
}

#[test]
fn tuning_sets_sysctls_and_properties_and_gives_them_back() {
    for version in versions("bridge").into_iter().filter(|v| *v >= "0.3.0") {
        let (world, _, result) = bridged(version, json!({}));
        let data = world.data.path().join("tuning");
        let wanted = json!({"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net/ipv4/conf/all/log_martians": "1"}, "dataDir": data,
            "mac": "c2:11:22:33:44:55", "promisc": true, "mtu": 1400, "allmulti": true, "txQLen": 20000});
        let chained = World::chained(version, "tuning", &result, wanted);
        let before = ip(&["-n", &world.container, "-d", "link", "show", "eth0"]);
        let passed = world.ok("tuning", "ADD", &chained);
        assert_eq!(
            passed["interfaces"][2]["mac"], "c2:11:22:33:44:55",
            "{version}: {passed}"
        );
        let shown = ip(&["-n", &world.container, "-d", "link", "show", "eth0"]);
        for expected in [
            "c2:11:22:33:44:55",
            "PROMISC",
            "mtu 1400",
            "ALLMULTI",
            "qlen 20000",
        ] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
        let read = |path: &str| {
            ip(&[
                "netns",
                "exec",
                &world.container,
                "cat",
                &format!("/proc/sys/net/ipv4/conf/{path}"),
            ])
        };
        assert_eq!(
            (
                read("eth0/arp_filter").trim(),
                read("all/log_martians").trim()
            ),
            ("1", "1")
        );
        if version >= "0.4.0" {
            let after = World::with_previous(&chained, &passed);
            world.ok("tuning", "CHECK", &after);
            ip(&["-n", &world.container, "link", "set", "eth0", "mtu", "1300"]);
            assert!(
                world.refused("tuning", "CHECK", &after, &[])["msg"]
                    .as_str()
                    .unwrap()
                    .contains("mtu is 1300")
            );
        }
        for _ in 0..2 {
            world.ok("tuning", "DEL", &chained);
        }
        assert_eq!(
            ip(&["-n", &world.container, "-d", "link", "show", "eth0"]),
            before,
            "as it was"
        );
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 0);
        // With the namespace gone what was kept goes too.
        world.ok("tuning", "ADD", &chained);
        let gone = world.call(
            "tuning",
            "DEL",
            &chained,
            &[("CNI_NETNS", "/run/netns/nonexistent")],
        );
        assert!(gone.status.success());
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 0);
    }
    // From where properties come, and what is refused.
    let (world, _, result) = bridged("1.0.0", json!({}));
    let data = world.data.path().join("tuning");
    let mac = |extra: Value, env: &[(&str, &str)]| {
        let mut config = World::chained(
            "1.0.0",
            "tuning",
            &result,
            json!({"dataDir": data, "mac": "c2:00:00:00:00:01"}),
        );
        for (key, value) in extra.as_object().unwrap() {
            config[key] = value.clone();
        }
        world.ok_with("tuning", "ADD", &config, env)["interfaces"][2]["mac"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let env = [("CNI_ARGS", "IgnoreUnknown=true;MAC=c2:00:00:00:00:02")];
    assert_eq!(mac(json!({}), &[]), "c2:00:00:00:00:01");
    assert_eq!(mac(json!({}), &env), "c2:00:00:00:00:02");
    assert_eq!(
        mac(json!({"runtimeConfig": {"mac": "c2:00:00:00:00:03"}}), &env),
        "c2:00:00:00:00:03"
    );
    let both = json!({"runtimeConfig": {"mac": "c2:00:00:00:00:03"}, "args": {"cni": {"mac": "c2:00:00:00:00:04", "sysctl": {"net.ipv4.conf.all.arp_filter": "0"}}}});
    assert_eq!(mac(both, &env), "c2:00:00:00:00:04");
    let twice = World::chained("1.0.0", "tuning", &result, json!({}))
        .to_string()
        .replacen(
            '{',
            r#"{"sysctl": {"net.ipv4.ip_forward": "0", "net.ipv4.ip_forward": "1"}, "#,
            1,
        );
    let output = world.call_with("tuning", "ADD", &twice, &[]);
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("stands twice"),
        "{output:?}"
    );
    for (extra, expected) in [
        (
            json!({"sysctl": {"kernel.hostname": "x"}}),
            "kernel.hostname",
        ),
        (
            json!({"sysctl": {"net/../kernel/hostname": "x"}}),
            "kernel/hostname",
        ),
        (json!({"sysctl": {"net.ipv4.nonsense": "1"}}), "nonsense"),
        (
            json!({"sysctl": {"net.ipv4.ip_forward": 1}}),
            "must be a string",
        ),
        (json!({"mac": "nonsense"}), "nonsense"),
    ] {
        let error = world.refused(
            "tuning",
            "ADD",
            &World::chained("1.0.0", "tuning", &result, extra),
            &[],
        );
        assert!(error["msg"].as_str().unwrap().contains(expected), "{error}");
    }
}

#[test]
fn what_comes_from_an_address_leaves_by_its_interface() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    let second = {
        let mut c = world.config("1.0.0", json!({"bridge": "br9", "name": "second"}));
        c["ipam"]["subnet"] = "10.198.9.0/24".into();
        c
    };
    let env = [("CNI_IFNAME", "net1")];
    let other = world.ok_with("bridge", "ADD", &second, &env);
    let chained = World::chained("1.0.0", "sbr", &other, json!({}));
    world.ok_with("sbr", "ADD", &chained, &env);
    let rules = ip(&["-n", &world.container, "rule"]);
    assert!(rules.contains("from 10.198.9.2 lookup 100"), "{rules}");
    let own = ip(&["-n", &world.container, "route", "show", "table", "100"]);
    assert!(
        own.contains("default via 10.198.9.1 dev net1") && own.contains("10.198.9.0/24 dev net1"),
        "{own}"
    );
    let main = ip(&["-n", &world.container, "route"]);
    assert!(
        main.contains("default via 10.198.1.1 dev eth0")
            && !main.contains("default via 10.198.9.1"),
        "{main}"
    );
    world.ok_with("sbr", "CHECK", &chained, &env);
    assert!(pings(&world.container, "10.198.9.1"));
    for _ in 0..2 {
        assert!(world.call("sbr", "DEL", &chained, &env).status.success());
    }
    assert!(!ip(&["-n", &world.container, "rule"]).contains("10.198.9.2"));
    assert!(
        world.call("sbr", "CHECK", &chained, &env).stdout.len() > 2,
        "it is missed"
    );
    assert_eq!(result["cniVersion"], "1.0.0");
}
