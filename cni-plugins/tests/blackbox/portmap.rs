//! `portmap` chained after a bridge.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

use serde_json::{Value, json};

use super::chained::{CONNECT_TIMEOUT, bridged};
use super::world::{World, inside, ip, versions};

/// The data that a connection from `namespace` to `to` receives.
pub fn fetch(namespace: &str, to: &str) -> Option<String> {
    let to: SocketAddr = to.parse().unwrap();
    inside(namespace, || {
        let mut stream = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).ok()?;
        stream.set_read_timeout(Some(CONNECT_TIMEOUT)).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).ok().map(|_| text)
    })
}

/// Runs a server that sends `word` on each connection, until the test ends.
pub fn serve_word(namespace: &str, at: &str, word: &'static str) {
    let listener = inside(namespace, || TcpListener::bind(at).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(word.as_bytes());
        }
    });
}

/// Runs a server that sends the source address of each connection, until the test ends.
fn serve_source(namespace: &str, at: &str) {
    let listener = inside(namespace, || TcpListener::bind(at).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let source = stream.peer_addr().unwrap().ip().to_string();
            let _ = stream.write_all(source.as_bytes());
        }
    });
}

/// Two containers on the bridge of one host, and a machine outside. The second container has the address 10.198.1.3, the
/// machine 10.198.77.2, and the host is 10.198.77.1 for the machine.
struct Neighbours {
    world: World,
    result: Value,
    other: World,
    outside: World,
}

impl Neighbours {
    fn new() -> Neighbours {
        // Without the hairpin mode, br_netfilter keeps a container from its own host port.
        let (world, config, result) = bridged("1.0.0", json!({"hairpinMode": true}));
        let (other, outside) = (World::new(), World::new());
        let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
        world.ok_with("bridge", "ADD", &config, &env);
        let wire = "link add out0 type veth peer name wire netns";
        let words: Vec<&str> = ["-n", &world.host]
            .into_iter()
            .chain(wire.split(' '))
            .chain([&*outside.host])
            .collect();
        ip(&words);
        for (namespace, link, address) in [
            (&world.host, "out0", "10.198.77.1/24"),
            (&outside.host, "wire", "10.198.77.2/24"),
        ] {
            ip(&["-n", namespace, "addr", "add", address, "dev", link]);
            ip(&["-n", namespace, "link", "set", link, "up"]);
        }
        let via = ["route", "add", "10.198.1.0/24", "via", "10.198.77.1"];
        ip(&[&["-n", &outside.host][..], &via].concat());
        let neighbours = Neighbours {
            world,
            result,
            other,
            outside,
        };
        neighbours.filter_bridged_packets(false);
        neighbours
    }

    /// Whether packets between ports of a bridge pass the rules, if the kernel has br_netfilter.
    fn filter_bridged_packets(&self, on: bool) {
        let set = format!(
            "f=/proc/sys/net/bridge/bridge-nf-call-iptables; test ! -e $f || echo {} > $f",
            u8::from(on)
        );
        self.world.on_host(&["sh", "-c", &set]);
    }
}

#[test]
fn neighbours_reach_host_ports_and_others_are_known_by_their_addresses() {
    test_sources("nftables");
}

#[test]
fn sources_are_the_same_with_rules_in_the_tables_of_iptables() {
    test_sources("iptables");
}

fn test_sources(backend: &str) {
    let all = Neighbours::new();
    let (world, inner, outer) = (&all.world, &all.other.container, &all.outside.host);
    serve_source(&world.container, "0.0.0.0:80");
    let mappings = json!([
        mapping(8080, 80, "tcp"),
        mapping(80, 80, "tcp"),
        mapping(8053, 53, "udp")
    ]);
    let of = |mappings: Value, extra: Value| {
        let mut config = ports("1.0.0", &all.result, mappings, extra);
        config["backend"] = backend.into();
        config
    };
    let own = of(mappings, json!({}));
    world.ok("portmap", "ADD", &own);
    world.ok("portmap", "CHECK", &own);
    // Destination NAT of another program, such as a service proxy.
    world.on_host(&[
        "nft",
        "add table ip proxy; add chain ip proxy prerouting { type nat hook prerouting priority dstnat; }
        add rule ip proxy prerouting tcp dport 9090 dnat to 10.198.1.2:80",
    ]);
    for filtered in [false, true] {
        all.filter_bridged_packets(filtered);
        for (from, to, source) in [
            // The answer must pass the host, or else the neighbour gets it from an unknown address.
            (inner, "10.198.1.1:8080", "10.198.1.1"),
            (inner, "10.198.77.1:80", "10.198.1.1"),
            (&world.container, "10.198.1.1:8080", "10.198.1.1"),
            (inner, "10.198.1.2:80", "10.198.1.3"),
            (outer, "10.198.77.1:8080", "10.198.77.2"),
            (outer, "10.198.1.2:80", "10.198.77.2"),
            (outer, "10.198.77.1:9090", "10.198.77.2"),
        ] {
            assert_eq!(
                fetch(from, to).as_deref(),
                Some(source),
                "{to} with packets within the bridge filtered: {filtered}\n{}",
                world.ruleset()
            );
        }
    }
    world.ok("portmap", "DEL", &own);
    // masqAll is about forwarded connections, too.
    let mappings = json!([mapping(8080, 80, "tcp")]);
    let masked = of(mappings.clone(), json!({"masqAll": true}));
    world.ok("portmap", "ADD", &masked);
    world.ok("portmap", "CHECK", &masked);
    for (to, source) in [
        ("10.198.77.1:8080", "10.198.1.1"),
        ("10.198.1.2:80", "10.198.77.2"),
        ("10.198.77.1:9090", "10.198.77.2"),
    ] {
        assert_eq!(fetch(outer, to).as_deref(), Some(source), "masqAll: {to}");
    }
    world.ok("portmap", "DEL", &masked);
    // Without source NAT, the source stays, even with masqAll.
    let extra = json!({"snat": false, "masqAll": true});
    let plain = of(mappings, extra);
    world.ok("portmap", "ADD", &plain);
    world.ok("portmap", "CHECK", &plain);
    let source = fetch(outer, "10.198.77.1:8080");
    assert_eq!(source.as_deref(), Some("10.198.77.2"));
    let rules = world.ruleset();
    assert!(!rules.contains("masquerade\n") && !rules.contains("masquerade comment"));
    world.ok("portmap", "DEL", &plain);
    let rules = world.ruleset();
    for text in ["10.198.1.2 ", "CNI-DN-", "CNI-SN-"] {
        let own = rules
            .lines()
            .find(|l| l.contains(text) && !l.contains("9090"));
        assert_eq!(own, None, "{text}");
    }
}

#[test]
fn destination_nat_of_other_programs_comes_first() {
    let all = Neighbours::new();
    let (world, outer) = (&all.world, &all.outside.host);
    serve_word(&world.container, "0.0.0.0:80", "ours");
    serve_word(&all.other.container, "0.0.0.0:80", "foreign");
    let mappings = json!([mapping(8080, 80, "tcp")]);
    let own = ports("1.0.0", &all.result, mappings, json!({}));
    let foreign = "add table ip foreign; add chain ip foreign prerouting { type nat hook prerouting priority dstnat; }
        add chain ip foreign output { type nat hook output priority -100; }
        add rule ip foreign prerouting tcp dport 8080 dnat to 10.198.1.3:80
        add rule ip foreign output tcp dport 8080 dnat to 10.198.1.3:80";
    let iptables =
        "iptables -t nat -A PREROUTING -p tcp --dport 8080 -j DNAT --to-destination 10.198.1.3:80
        iptables -t nat -A OUTPUT -p tcp --dport 8080 -j DNAT --to-destination 10.198.1.3:80";
    let reached = || {
        let of = |namespace: &str| fetch(namespace, "10.198.77.1:8080").unwrap_or_default();
        [of(outer), of(&world.host)]
    };
    for (add, delete) in [
        (
            ["nft", foreign].to_vec(),
            ["nft", "delete table ip foreign"].to_vec(),
        ),
        (
            ["sh", "-c", iptables].to_vec(),
            ["iptables", "-t", "nat", "-F"].to_vec(),
        ),
    ] {
        // Whichever was there first.
        world.on_host(&add);
        world.ok("portmap", "ADD", &own);
        assert_eq!(reached(), ["foreign"; 2], "{}", world.ruleset());
        world.on_host(&delete);
        assert_eq!(reached(), ["ours"; 2], "{}", world.ruleset());
        world.on_host(&add);
        assert_eq!(reached(), ["foreign"; 2], "{}", world.ruleset());
        world.on_host(&delete);
        world.ok("portmap", "DEL", &own);
    }
}

#[test]
fn options_of_the_other_backend_are_refused() {
    let (world, _, result) = bridged("1.1.0", json!({}));
    let before = world.ruleset();
    let of = |extra: Value| ports("1.1.0", &result, json!([mapping(8080, 80, "tcp")]), extra);
    for (extra, named) in [
        (
            json!({"backend": "nftables", "conditionsV4": ["-s", "192.0.2.0/24"]}),
            "conditionsV4",
        ),
        (
            json!({"backend": "iptables", "conditionsV4": ["ip saddr 192.0.2.0/24"]}),
            "conditionsV4",
        ),
        (
            json!({"backend": "nftables", "externalSetMarkChain": "X"}),
            "externalSetMarkChain",
        ),
        (
            json!({"conditionsV4": ["-i", "eth0"], "conditionsV6": ["iifname", "eth0"]}),
            "conditionsV6",
        ),
    ] {
        for verb in ["ADD", "CHECK", "STATUS"] {
            let refusal = world.refused("portmap", verb, &of(extra.clone()), &[]);
            assert_eq!(refusal["code"], 7, "{verb}: {refusal}");
            assert!(
                refusal["msg"].as_str().unwrap().contains(named),
                "{refusal}"
            );
        }
        world.ok("portmap", "DEL", &of(extra));
    }
    assert_eq!(world.ruleset(), before);
    for extra in [
        json!({"backend": "nftables", "conditionsV4": ["iifname", "!=", "eth9"]}),
        json!({"backend": "iptables", "conditionsV4": ["!", "-i", "eth9"]}),
    ] {
        world.ok("portmap", "ADD", &of(extra.clone()));
        world.ok("portmap", "DEL", &of(extra));
    }
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
fn host_ports_reach_the_container_in_every_version() {
    let all = versions("bridge").into_iter().filter(|v| *v >= "0.3.0");
    for (version, backend) in all.zip(["nftables", "iptables"].into_iter().cycle()) {
        let (world, config, result) = bridged(version, json!({"hairpinMode": true}));
        serve_word(&world.container, "0.0.0.0:80", "container");
        let chained = ports(
            version,
            &result,
            json!([mapping(8080, 80, "tcp")]),
            json!({"backend": backend}),
        );
        let passed = world.ok("portmap", "ADD", &chained);
        assert_eq!(
            (&passed["ips"], &passed["interfaces"]),
            (&result["ips"], &result["interfaces"]),
            "{version}"
        );
        let word = Some("container".to_owned());
        assert_eq!(
            fetch(&world.host, "127.0.0.1:8080"),
            word,
            "{version}: over localhost\n{}",
            world.ruleset()
        );
        assert_eq!(
            fetch(&world.host, "10.198.1.1:8080"),
            word,
            "{version}: over an address of the host"
        );
        assert_eq!(
            fetch(&world.container, "10.198.1.1:8080"),
            word,
            "{version}: from the container itself"
        );
        if version >= "0.4.0" {
            world.ok("portmap", "CHECK", &chained);
            let flush = match backend {
                "nftables" => ["nft", "flush chain ip cni_hostport hostports"].to_vec(),
                _ => ["iptables", "-t", "nat", "-F", "CNI-HOSTPORT-DNAT"].to_vec(),
            };
            world.on_host(&flush);
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
        assert_eq!(fetch(&world.host, "127.0.0.1:8080"), None);
        world.ok("bridge", "DEL", &config);
    }
}

#[test]
fn ports_have_their_own_conditions_addresses_and_sources() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    serve_word(&world.container, "0.0.0.0:80", "container");
    // A mapping for one host address; a source that the conditions exclude; a second network of the same container.
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
        fetch(&world.host, "10.198.9.1:8081").as_deref(),
        Some("container")
    );
    assert_eq!(
        fetch(&world.host, "10.198.1.1:8081"),
        None,
        "the mapping is for another host address"
    );
    assert_eq!(
        fetch(&world.host, "10.198.9.1:8082"),
        None,
        "the mapping is for the other address family"
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
        fetch(&world.host, "10.198.9.1:8083").as_deref(),
        Some("container")
    );
    assert_eq!(fetch(&world.host, "127.0.0.1:8083"), None, "source denied");
    world.ok("portmap", "DEL", &second);
    assert_eq!(
        fetch(&world.host, "10.198.9.1:8081").as_deref(),
        Some("container"),
        "DEL of one network keeps the mappings of the other"
    );
    // masqAll: the container sees an address of the host as source.
    let all = ports(
        "1.0.0",
        &result,
        json!([mapping(8084, 80, "tcp")]),
        json!({"masqAll": true}),
    );
    world.ok("portmap", "ADD", &all);
    let rules = world.ruleset();
    assert!(
        rules.contains("ip daddr 10.198.1.2 ct status dnat"),
        "{rules}"
    );
    // GC removes attachments that are not listed.
    let mut gc = World::chained("1.1.0", "portmap", &result, json!({}));
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("portmap", "GC", &gc);
    assert!(
        !world.ruleset().contains("10.198.1.2"),
        "{}",
        world.ruleset()
    );
    world.ok("portmap", "STATUS", &gc);
    // Invalid input changes nothing.
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

/// Newer versions of the reference mark their nftables rules with the container's id alone.
#[test]
fn rules_of_the_reference_in_nftables_pass_check_and_are_removed() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    let nft = |commands: &str| world.on_host(&["nft", commands]);
    nft("add table ip cni_hostport; add chain ip cni_hostport hostports; add chain ip cni_hostport hostip_hostports
         add chain ip cni_hostport prerouting { type nat hook prerouting priority dstnat; }
         add rule ip cni_hostport prerouting fib daddr type local jump hostports
         add chain ip cni_hostport masquerading { type nat hook postrouting priority srcnat; }");
    let own = ports(
        "1.0.0",
        &result,
        json!([mapping(8080, 80, "tcp")]),
        json!({}),
    );
    let add = |chain: &str, rule: &str| {
        nft(&format!(
            "add rule ip cni_hostport {chain} {rule} comment \"c1\""
        ))
    };
    // A rule for another network of the same container.
    add("hostports", "tcp dport 8080 dnat to 10.198.2.9:80");
    for from in ["10.198.1.2", "127.0.0.1"] {
        add(
            "masquerading",
            &format!("ip saddr {from} ip daddr 10.198.1.2 masquerade"),
        );
    }
    world.refused("portmap", "CHECK", &own, &[]);
    add("hostports", "tcp dport 8080 dnat to 10.198.1.2:80");
    world.ok("portmap", "CHECK", &own);
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    world.refused("portmap", "CHECK", &own, &env);
    world.ok("portmap", "DEL", &own);
    assert!(
        !world.ruleset().contains("10.198.1.2"),
        "{}",
        world.ruleset()
    );
}

/// The reference deletes every rule of these chains whose comment is the container's id (`unforwardPorts`).
#[test]
fn rules_in_nftables_have_the_comments_that_the_reference_expects() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    let mappings = json!([mapping(8080, 80, "tcp"), mapping(8053, 53, "udp")]);
    let own = ports("1.0.0", &result, mappings, json!({}));
    let second = ports(
        "1.0.0",
        &result,
        json!([mapping(8081, 80, "tcp")]),
        json!({"name": "other"}),
    );
    let rules = || -> Vec<Value> {
        let list = [
            "nft",
            "--json",
            "--handle",
            "list",
            "table",
            "ip",
            "cni_hostport",
        ];
        let all: Value = serde_json::from_str(&world.on_host(&list)).unwrap();
        let all = all["nftables"].as_array().unwrap().iter();
        let chains = ["hostports", "hostip_hostports", "masquerading"];
        let in_them = |r: &&Value| chains.iter().any(|c| r["chain"] == *c);
        all.map(|entry| entry["rule"].clone())
            .filter(|r| in_them(&r))
            .collect()
    };
    world.ok("portmap", "ADD", &own);
    world.ok("portmap", "ADD", &second);
    let made = rules();
    assert_eq!(made.len(), 4 + 3, "{made:#?}");
    assert!(made.iter().all(|r| r["comment"] == "c1"), "{made:#?}");
    // Our DEL nevertheless distinguishes networks.
    world.ok("portmap", "DEL", &second);
    assert_eq!(rules().len(), 4);
    world.ok("portmap", "CHECK", &own);
    for rule in rules() {
        let handle = rule["handle"].to_string();
        let chain = rule["chain"].as_str().unwrap();
        let delete = [
            "nft",
            "delete",
            "rule",
            "ip",
            "cni_hostport",
            chain,
            "handle",
            &handle,
        ];
        world.on_host(&delete);
    }
    world.ok("portmap", "DEL", &own);
}

/// GC of rules that newer versions of the reference have left in nftables, using libcni's result cache.
/// `ip netns exec` gives the call a separate mount namespace, so that no other test sees the directory.
#[test]
fn gc_collects_rules_of_the_reference_in_nftables_for_known_attachments() {
    let (world, _, _) = bridged("1.0.0", json!({}));
    let nft = |commands: &str| world.on_host(&["nft", commands]);
    nft(
        "add table ip cni_hostport; add chain ip cni_hostport hostports
         add chain ip cni_hostport hostip_hostports; add chain ip cni_hostport masquerading",
    );
    for (chain, id) in [
        ("hostports", "gone"),
        ("hostip_hostports", "gone"),
        ("masquerading", "gone"),
        ("hostports", "kept"),
        ("hostports", "elsewhere"),
    ] {
        nft(&format!(
            "add rule ip cni_hostport {chain} tcp dport 1 accept comment \"{id}\""
        ));
    }
    nft("add rule ip cni_hostport hostports tcp dport 1 accept");
    let script = world.data.path().join("portmap");
    let plugin = super::world::plugins().join("portmap");
    let gc = |known: &[(&str, &str)]| {
        let mut text = "#!/bin/sh\nset -e\nmount -t tmpfs none /var/lib\nmkdir -p /var/lib/cni/results\ncd /var/lib/cni/results\n".to_owned();
        for (network, id) in known {
            let told = json!({"containerId": id, "ifName": "eth0", "networkName": network});
            text += &format!("echo '{told}' > {network}-{id}-eth0\n");
        }
        text += &format!("exec {}\n", plugin.display());
        std::fs::write(&script, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).unwrap();
        let keep = json!([{"containerID": "kept", "ifname": "eth0"}]);
        let config = json!({"cniVersion": "1.1.0", "name": "net", "type": "portmap", "cni.dev/valid-attachments": keep});
        world.ok(script.to_str().unwrap(), "GC", &config);
        world.ruleset()
    };
    let before = world.ruleset();
    assert_eq!(before.matches("\"gone\"").count(), 3, "{before}");
    assert_eq!(
        gc(&[]),
        before,
        "GC without known attachments removes nothing"
    );
    assert_eq!(
        gc(&[("other", "elsewhere")]),
        before,
        "GC keeps rules of another runtime"
    );
    let after = gc(&[("net", "kept"), ("other", "elsewhere")]);
    let left = before.lines().filter(|l| !l.contains("\"gone\""));
    assert_eq!(after, left.map(|l| format!("{l}\n")).collect::<String>());
}

#[test]
fn a_failed_add_removes_only_its_own_rules() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    world.on_host(&[
        "nft",
        "add table ip cni_hostport; add chain ip cni_hostport hostports
        add chain ip cni_hostport prerouting; add chain ip cni_hostport masquerading
        add rule ip cni_hostport masquerading jump hostports
        add chain ip cni_hostport entry { type filter hook forward priority 0; }
        add rule ip cni_hostport entry jump masquerading
        add rule ip cni_hostport hostports tcp dport 22 accept",
    ]);
    let before = world.ruleset();
    let own = ports(
        "1.0.0",
        &result,
        json!([mapping(8080, 80, "tcp")]),
        json!({}),
    );
    // The kernel rejects NAT rules in a chain that is reachable from the forward hook.
    world.refused("portmap", "ADD", &own, &[]);
    assert_eq!(world.ruleset(), before);
}

/// The state of the reference's table before any packets needed masquerading.
#[test]
fn a_table_of_the_reference_without_masquerading_is_completed() {
    let (world, _, result) = bridged("1.0.0", json!({"hairpinMode": true}));
    serve_word(&world.container, "0.0.0.0:80", "container");
    world.on_host(&[
        "nft",
        "add table ip cni_hostport; add chain ip cni_hostport hostports
        add chain ip cni_hostport prerouting { type nat hook prerouting priority dstnat; }
        add rule ip cni_hostport prerouting fib daddr type local jump hostports
        add chain ip cni_hostport output { type nat hook output priority -100; }
        add rule ip cni_hostport output fib daddr type local jump hostports",
    ]);
    let own = ports(
        "1.0.0",
        &result,
        json!([mapping(8080, 80, "tcp")]),
        json!({}),
    );
    world.ok("portmap", "ADD", &own);
    world.ok("portmap", "CHECK", &own);
    assert_eq!(
        fetch(&world.host, "127.0.0.1:8080").as_deref(),
        Some("container"),
        "{}",
        world.ruleset()
    );
}

#[test]
fn udp_reaches_the_container_that_has_the_port_now() {
    let (world, config, result) = bridged("1.0.0", json!({}));
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    let second = world.ok_with("bridge", "ADD", &config, &env);
    let receive =
        |world: &World| inside(&world.container, || UdpSocket::bind("0.0.0.0:53").unwrap());
    let (first_socket, second_socket) = (receive(&world), receive(&other));
    for socket in [&first_socket, &second_socket] {
        socket.set_read_timeout(Some(CONNECT_TIMEOUT)).unwrap();
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
    // The same client and port, but another container: the kernel must not use the old flow.
    world.ok("portmap", "DEL", &one);
    world.ok_with("portmap", "ADD", &two, &env);
    assert!(
        arrives(&second_socket),
        "the flow still reaches the first container"
    );
    world.ok_with("portmap", "DEL", &two, &env);
    assert!(world.call("bridge", "DEL", &config, &env).status.success());
}

#[test]
fn ipv6_ports_reach_the_container() {
    let ranges = |world: &World| json!({"ipam": {"type": "host-local", "dataDir": world.data.path(), "ranges": [[{"subnet": "10.198.5.0/24"}], [{"subnet": "fd00:198:5::/64"}]]}});
    let world = World::new();
    let config = world.config("1.1.0", ranges(&world));
    let result = world.ok("bridge", "ADD", &config);
    serve_word(&world.container, "[::]:80", "container");
    let chained = ports(
        "1.1.0",
        &result,
        json!([mapping(8080, 80, "tcp")]),
        json!({}),
    );
    world.ok("portmap", "ADD", &chained);
    assert_eq!(
        fetch(&world.host, "[fd00:198:5::1]:8080").as_deref(),
        Some("container"),
        "{}",
        world.ruleset()
    );
    assert_eq!(
        fetch(&world.host, "10.198.5.1:8080").as_deref(),
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
