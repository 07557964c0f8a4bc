//! Chained plugins: `bandwidth`, `tuning`, `sbr`.

use std::net::UdpSocket;
use std::time::Duration;

use serde_json::{Value, json};

use super::firewall::reaches;
use super::world::{World, inside, ip, once_up, versions};

/// Maximum time for a connection; a connection without a target is refused immediately.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A container on a bridge, with its configuration and result.
pub fn bridged(version: &str, extra: Value) -> (World, Value, Value) {
    let world = World::new();
    let config = world.config(version, extra);
    let result = world.ok("bridge", "ADD", &config);
    (world, config, result)
}

/// containerd sends this burst if none is configured. The reference uses the value literally.
#[test]
fn a_burst_set_by_the_reference_passes_check() {
    let (world, _, result) = bridged("1.1.0", json!({}));
    let mut requested = World::chained("1.1.0", "bandwidth", &result, json!({}));
    requested["runtimeConfig"] =
        json!({"bandwidth": {"IngressRate": 8_000_000, "IngressBurst": u32::MAX}});
    let passed = world.ok("bandwidth", "ADD", &requested);
    let checked = World::with_previous(&requested, &passed);
    world.ok("bandwidth", "CHECK", &checked);
    let veth = result["interfaces"][1]["name"].as_str().unwrap();
    let change = |limit: &str| {
        let words =
            format!("tc qdisc change dev {veth} root tbf rate 8mbit burst 100000 limit {limit}");
        world.on_host(&words.split_whitespace().collect::<Vec<_>>());
    };
    // The limit of the queue: 25 ms at the rate, plus the whole burst.
    change("536895911");
    world.ok("bandwidth", "CHECK", &checked);
    change("536895912");
    world.refused("bandwidth", "CHECK", &checked, &[]);
}

#[test]
fn bandwidth_limits_received_and_sent_traffic() {
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
        assert!(reaches(&world.container, "10.198.1.1"), "traffic passes");
        // Packets from the container pass the limited link.
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
    // Without limits in the configuration the runtime's request applies; containerd's "no burst" means none.
    let (world, _, result) = bridged("1.1.0", json!({}));
    let mut requested = World::chained("1.1.0", "bandwidth", &result, json!({}));
    assert_eq!(
        world.ok("bandwidth", "ADD", &requested)["interfaces"],
        result["interfaces"],
        "without limits, ADD changes nothing"
    );
    requested["runtimeConfig"] = json!({"bandwidth": {"IngressRate": 8_000_000, "IngressBurst": u32::MAX, "EgressRate": 8_000_000, "EgressBurst": u32::MAX}});
    world.ok("bandwidth", "ADD", &requested);
    let veth = result["interfaces"][1]["name"].as_str().unwrap();
    let shown = tc(&world, &["qdisc", "show", "dev", veth]);
    assert!(shown.contains("burst 100000b"), "{shown}");
    let mut gc = requested.clone();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
    world.ok("bandwidth", "GC", &gc);
    assert!(ip(&["-n", &world.host, "link"]).contains("bwp"));
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("bandwidth", "GC", &gc);
    assert!(!ip(&["-n", &world.host, "link"]).contains("bwp"), "GC");
    // Chained after ptp; a burst of 4 GiB is rejected.
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
        "no ifb device without an egress limit"
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
    // A link without a peer cannot be limited.
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
    // Invalid input, and no limits.
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
fn tuning_sets_sysctls_and_properties_and_restores_them() {
    for version in versions("bridge").into_iter().filter(|v| *v >= "0.3.0") {
        let (world, _, result) = bridged(version, json!({}));
        let data = world.data.path().join("tuning");
        let wanted = json!({"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net/ipv4/conf/all/log_martians": "1"}, "dataDir": data,
            "mac": "c2:11:22:33:44:55", "promisc": true, "mtu": 1400, "allmulti": true, "txQLen": 20000});
        let chained = World::chained(version, "tuning", &result, wanted);
        let settings = || once_up(|| ip(&["-n", &world.container, "-d", "link", "show", "eth0"]));
        let before = settings();
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
        assert_eq!(settings(), before, "DEL restores the settings");
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 0);
        // If the namespace was removed, DEL deletes the stored properties, too.
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
    // The sources of properties, and invalid values.
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
        String::from_utf8_lossy(&output.stdout).contains("occurs twice"),
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
fn tuning_sets_the_mtu_of_both_ends() {
    let (world, config, result) = bridged("1.0.0", json!({}));
    let host_end = result["interfaces"][1]["name"].as_str().unwrap();
    let mtu = |namespace: &str, link: &str| {
        let shown = ip(&["-n", namespace, "-j", "link", "show", link]);
        serde_json::from_str::<Value>(&shown).unwrap()[0]["mtu"].clone()
    };
    let both = || [mtu(&world.container, "eth0"), mtu(&world.host, host_end)];
    let data = world.data.path().join("tuning");
    let chained = |mtu: u32| {
        let wanted = json!({"mtu": mtu, "dataDir": data});
        World::chained("1.0.0", "tuning", &result, wanted)
    };
    for wanted in [1300, 4000] {
        world.ok("tuning", "ADD", &chained(wanted));
        assert_eq!(both(), [wanted, wanted]);
        world.ok("tuning", "CHECK", &chained(wanted));
        world.ok("tuning", "DEL", &chained(wanted));
        assert_eq!(both(), [1500, 1500], "DEL restores both");
    }
    // A datagram of more than the MTU arrives in fragments. The container's end would drop a packet of the bridge's first MTU.
    world.ok("tuning", "ADD", &chained(1300));
    let bind = |namespace: &str, at: &str| inside(namespace, || UdpSocket::bind(at).unwrap());
    let receiver = bind(&world.container, "10.198.1.2:4000");
    receiver.set_read_timeout(Some(CONNECT_TIMEOUT)).unwrap();
    let sender = bind(&world.host, "10.198.1.1:4000");
    sender.send_to(&[7; 1400], "10.198.1.2:4000").unwrap();
    assert_eq!(receiver.recv(&mut [0; 2000]).unwrap(), 1400);
    // A link that the chain does not list stays.
    let mut unlisted = chained(1200);
    unlisted["prevResult"]["interfaces"][1]["name"] = "other".into();
    world.ok("tuning", "ADD", &unlisted);
    assert_eq!(both(), [1200, 1300]);
    world.ok("bridge", "DEL", &config);
}

/// `ip netns exec` gives each call a separate mount namespace, so that no other test sees the allowlist.
#[test]
fn the_allowlist_restricts_the_sysctls_of_new_containers() {
    let (world, _, result) = bridged("1.1.0", json!({}));
    let script = world.data.path().join("tuning");
    let plugin = super::world::plugins().join("tuning");
    let call = |verb: &str, list: &str, key: &str| {
        let text = format!(
            "#!/bin/sh\nset -e\nmount -t tmpfs none /etc\nmkdir -p /etc/cni/tuning\ncat > /etc/cni/tuning/allowlist.conf << 'END'\n{list}\nEND\nexec {}\n",
            plugin.display()
        );
        std::fs::write(&script, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).unwrap();
        let wanted = json!({"sysctl": {key: "1"}, "dataDir": world.data.path()});
        let config = World::chained("1.1.0", "tuning", &result, wanted);
        let output = world.call(script.to_str().unwrap(), verb, &config, &[]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text)
    };
    let filter = "net.ipv4.conf.IFNAME.arp_filter";
    let ignore = "net.ipv4.conf.IFNAME.arp_ignore";
    let list = r"^net\.ipv4\.conf\.IFNAME\.arp_f[a-z_]*$";
    let set = || {
        let path = "/proc/sys/net/ipv4/conf/eth0";
        let of = |name: &str| {
            let path = format!("{path}/{name}");
            ip(&["netns", "exec", &world.container, "cat", &path])
        };
        [of("arp_filter"), of("arp_ignore")].map(|text| text.trim() == "1")
    };
    let (refused, text) = call("ADD", list, ignore);
    assert!(!refused && text.contains(ignore), "{text}");
    assert_eq!(set(), [false, false]);
    let (accepted, text) = call("ADD", list, filter);
    assert!(accepted, "{text}");
    assert_eq!(set(), [true, false]);
    assert!(!call("STATUS", list, ignore).0 && call("STATUS", list, filter).0);
    // The list is for new containers.
    assert!(call("CHECK", "^nothing", filter).0);
    assert!(call("DEL", "^nothing", filter).0);
    let (refused, text) = call("ADD", "(", filter);
    assert!(!refused && text.contains("regular expression"), "{text}");
}

#[test]
fn packets_leave_by_the_interface_of_their_source_address() {
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
        main.contains("default via 10.198.1.1 dev eth0") && !main.contains("net1"),
        "only packets from an address of net1 leave by net1: {main}"
    );
    world.ok_with("sbr", "CHECK", &chained, &env);
    assert!(reaches(&world.container, "10.198.9.1"));
    for _ in 0..2 {
        assert!(world.call("sbr", "DEL", &chained, &env).status.success());
    }
    assert!(!ip(&["-n", &world.container, "rule"]).contains("10.198.9.2"));
    assert!(
        world.call("sbr", "CHECK", &chained, &env).stdout.len() > 2,
        "CHECK reports the missing rule"
    );
    assert_eq!(result["cniVersion"], "1.0.0");
}

#[test]
fn sbr_keeps_configured_routes_in_the_main_table() {
    let env = [("CNI_IFNAME", "net1")];
    let ranges = json!([[{"subnet": "10.198.9.0/24"}], [{"subnet": "fd00:198:9::/64"}]]);
    let added = |extra: Value| {
        let (world, _, _) = bridged("1.0.0", json!({}));
        let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges});
        let second = json!({"bridge": "br9", "name": "second", "ipam": ipam});
        let second = world.config("1.0.0", second);
        let other = world.ok_with("bridge", "ADD", &second, &env);
        let chained = World::chained("1.0.0", "sbr", &other, extra);
        world.ok_with("sbr", "ADD", &chained, &env);
        world.ok_with("sbr", "CHECK", &chained, &env);
        (world, chained)
    };
    let routes = |world: &World| {
        ["-4", "-6"].map(|family| {
            ip(&[
                "-n",
                &world.container,
                family,
                "route",
                "show",
                "dev",
                "net1",
            ])
        })
    };
    // Routes to the interface's networks stay, but not those through gateways.
    let (world, _) = added(json!({"addSourceHints": true}));
    let [v4, v6] = routes(&world);
    assert!(
        v4.contains("10.198.9.0/24") && v4.contains("src 10.198.9.2") && !v4.contains("default"),
        "{v4}"
    );
    assert!(
        v6.contains("fd00:198:9::/64")
            && v6.contains("src fd00:198:9::2")
            && !v6.contains("default"),
        "{v6}"
    );
    // A table with a configured number is filled by others: the plugin adds rules for it and keeps the routes.
    let (world, chained) = added(json!({"table": 5001}));
    let [v4, v6] = routes(&world);
    assert!(
        v4.contains("default via 10.198.9.1") && v6.contains("default via fd00:198:9::1"),
        "{v4}{v6}"
    );
    for (family, address) in [("-4", "10.198.9.2"), ("-6", "fd00:198:9::2")] {
        let rules = || ip(&["-n", &world.container, family, "rule"]);
        assert!(
            rules().contains(&format!("from {address} lookup 5001")),
            "{}",
            rules()
        );
    }
    world.ok_with("sbr", "DEL", &chained, &env);
    assert!(!ip(&["-n", &world.container, "rule"]).contains("5001"));
    world.refused("sbr", "CHECK", &chained, &env);
}
