//! The plugins as black boxes: executed as a runtime does, in network namespaces of the test's own, the
//! result checked on the wire format and in the kernel. `CNI_BIN` points the suite at another directory.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

/// A directory with the plugins under their names.
fn plugins() -> PathBuf {
    if let Some(dir) = std::env::var_os("CNI_BIN") {
        return dir.into();
    }
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_holdfast-cni"));
    let dir = binary.with_file_name("cni-links");
    std::fs::create_dir_all(&dir).unwrap();
    for name in holdfast_cni::plugins::NAMES {
        match std::os::unix::fs::symlink(&binary, dir.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => panic!("{error}"),
            _ => {}
        }
    }
    dir
}

fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().expect("iproute2 is installed (make test does that)");
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Two namespaces, a "host" in which the plugins run and a "container"; gone when dropped.
struct World {
    host: String,
    container: String,
    data: tempfile::TempDir,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl World {
    fn new() -> World {
        assert!(Command::new("ip").arg("-V").output().is_ok(), "iproute2 is needed");
        let id = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let world = World { host: format!("hfh-{id}"), container: format!("hfc-{id}"), data: tempfile::tempdir().unwrap() };
        for name in [&world.host, &world.container] {
            ip(&["netns", "add", name]);
        }
        ip(&["-n", &world.host, "link", "set", "lo", "up"]);
        world
    }

    fn netns(&self) -> String {
        format!("/var/run/netns/{}", self.container)
    }

    fn config(&self, version: &str, extra: Value) -> Value {
        let mut config = json!({"cniVersion": version, "name": "net", "type": "bridge", "bridge": "br0", "isDefaultGateway": true,
            "ipam": {"type": "host-local", "dataDir": self.data.path(), "subnet": "10.198.1.0/24"}});
        for (key, value) in extra.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    fn call(&self, plugin: &str, verb: &str, config: &Value, env: &[(&str, &str)]) -> Output {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host]).arg(plugins().join(plugin));
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", "c1").env("CNI_NETNS", self.netns()).env("CNI_IFNAME", "eth0");
        command.env("CNI_PATH", plugins()).envs(env.iter().copied());
        for (key, value) in env.iter().filter(|(_, v)| v.is_empty()) {
            let _ = value;
            command.env_remove(key);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(config.to_string().as_bytes());
        child.wait_with_output().unwrap()
    }

    fn ok(&self, plugin: &str, verb: &str, config: &Value) -> Value {
        let output = self.call(plugin, verb, config, &[]);
        assert!(output.status.success(), "{plugin} {verb}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    fn refused(&self, plugin: &str, verb: &str, config: &Value, env: &[(&str, &str)]) -> Value {
        let output = self.call(plugin, verb, config, env);
        assert!(!output.status.success(), "{plugin} {verb} succeeded: {}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice(&output.stdout).expect("one JSON document")
    }

    fn with_previous(config: &Value, result: &Value) -> Value {
        let mut config = config.clone();
        config["prevResult"] = result.clone();
        config
    }

    fn taken(&self) -> Vec<String> {
        let dir = std::fs::read_dir(self.data.path().join("net"));
        dir.into_iter().flatten().flatten().map(|e| e.file_name().into_string().unwrap()).filter(|n| n.parse::<std::net::IpAddr>().is_ok()).collect()
    }

    fn masquerading(&self) -> String {
        let output = Command::new("ip")
            .args(["netns", "exec", &self.host, "nft", "list", "ruleset"])
            .output()
            .expect("nftables is installed (make test does that)");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for name in [&self.host, &self.container] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

#[test]
fn bridge_adds_checks_and_deletes_in_every_version() {
    for version in VERSIONS {
        let world = World::new();
        let config = world.config(version, json!({"ipMasq": true}));
        let result = world.ok("bridge", "ADD", &config);
        assert_eq!(result["cniVersion"], version);
        let address = if version < "0.3.0" { result["ip4"]["ip"].clone() } else { result["ips"][0]["address"].clone() };
        assert_eq!(address, "10.198.1.2/24", "{version}: {result}");
        let shown = ip(&["-n", &world.container, "addr", "show", "eth0"]);
        assert!(shown.contains("10.198.1.2/24") && shown.contains("state UP"), "{shown}");
        assert!(ip(&["-n", &world.container, "route"]).contains("default via 10.198.1.1"));
        assert!(ip(&["-n", &world.host, "addr", "show", "br0"]).contains("10.198.1.1/24"));
        let rules = world.masquerading();
        assert!(rules.contains("ip saddr 10.198.1.2 ip daddr != 10.198.1.0/24 masquerade"), "{rules}");
        let ping = ["netns", "exec", &world.container, "busybox", "ping", "-c1", "-W2", "10.198.1.1"];
        assert!(ip(&ping).contains("1 packets received"), "the container reaches its gateway");
        let chained = World::with_previous(&config, &result);
        if version >= "0.4.0" {
            world.ok("bridge", "CHECK", &chained);
            ip(&["-n", &world.container, "addr", "flush", "dev", "eth0"]);
            let refusal = world.refused("bridge", "CHECK", &chained, &[]);
            assert!(refusal["msg"].as_str().unwrap().contains("10.198.1.2"), "{refusal}");
        }
        for _ in 0..2 {
            world.ok("bridge", "DEL", &chained);
        }
        assert!(world.taken().is_empty(), "{version}");
        assert!(!world.masquerading().contains("saddr"), "{version}: {}", world.masquerading());
        assert!(!ip(&["-n", &world.host, "link"]).contains("veth"), "the host's end is gone");
    }
}

#[test]
fn del_cleans_up_when_the_namespace_is_gone_or_unknown() {
    for netns in ["", "/var/run/netns/nonexistent"] {
        let world = World::new();
        let config = world.config("1.0.0", json!({"ipMasq": true}));
        world.ok("bridge", "ADD", &config);
        ip(&["netns", "del", &world.container]);
        let output = world.call("bridge", "DEL", &config, &[("CNI_NETNS", netns)]);
        assert!(output.status.success(), "{output:?}");
        assert!(world.taken().is_empty());
        assert!(!world.masquerading().contains("saddr"));
        ip(&["netns", "add", &world.container]);
    }
}

#[test]
fn a_failed_add_leaves_nothing() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    world.ok("bridge", "ADD", &config);
    // The same interface again is an error and does not disturb the first.
    let refusal = world.refused("bridge", "ADD", &config, &[("CNI_CONTAINERID", "c2")]);
    assert!(refusal["msg"].as_str().unwrap().contains("already exists"), "{refusal}");
    assert_eq!(world.taken().len(), 1);
    // A bridge address that conflicts.
    ip(&["-n", &world.host, "link", "add", "br1", "type", "bridge"]);
    ip(&["-n", &world.host, "addr", "add", "10.1.1.1/24", "dev", "br1"]);
    let other = world.config("1.0.0", json!({"bridge": "br1"}));
    let refusal = world.refused("bridge", "ADD", &other, &[("CNI_CONTAINERID", "c3"), ("CNI_IFNAME", "eth1")]);
    assert!(refusal["msg"].as_str().unwrap().contains("forceAddress"), "{refusal}");
    assert_eq!(world.taken().len(), 1, "the address was given back");
    let links = ip(&["-n", &world.host, "link"]);
    assert_eq!(links.matches("master br1").count(), 0, "{links}");
}

#[test]
fn many_containers_at_once_get_different_addresses() {
    let world = World::new();
    let config = world.config("1.0.0", json!({"ipMasq": true}));
    let names: Vec<String> = (0..20).map(|i| format!("{}-{i}", world.container)).collect();
    for name in &names {
        ip(&["netns", "add", name]);
    }
    std::thread::scope(|scope| {
        let calls: Vec<_> = names
            .iter()
            .map(|name| {
                let (world, config) = (&world, &config);
                scope.spawn(move || {
                    let netns = format!("/var/run/netns/{name}");
                    world.call("bridge", "ADD", config, &[("CNI_CONTAINERID", name), ("CNI_NETNS", &netns)])
                })
            })
            .collect();
        for call in calls {
            let output = call.join().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    });
    assert_eq!(world.taken().len(), 20);
    let rules = world.masquerading();
    assert_eq!((rules.matches("masquerade comment").count(), rules.matches("goto masq_checks").count()), (20, 1), "{rules}");
    // GC keeps what is listed and nothing else.
    let mut gc = world.config("1.1.0", json!({"ipMasq": true}));
    let keep = json!([{"containerID": names[3], "ifname": "eth0"}]);
    world.ok("bridge", "GC", &gc);
    assert_eq!(world.taken().len(), 20, "a missing list says nothing");
    gc["cni.dev/valid-attachments"] = keep;
    world.ok("bridge", "GC", &gc);
    assert_eq!(world.taken().len(), 1);
    assert_eq!(world.masquerading().matches("masquerade comment").count(), 1);
    for name in &names {
        ip(&["netns", "del", name]);
    }
}

#[test]
fn dual_stack_layer_two_and_exhaustion() {
    let world = World::new();
    let ranges =
        json!({"ipam": {"type": "host-local", "dataDir": world.data.path(), "ranges": [[{"subnet": "10.198.2.0/30"}], [{"subnet": "fd42::/64"}]]}});
    let config = world.config("1.1.0", ranges);
    let result = world.ok("bridge", "ADD", &config);
    assert_eq!((result["ips"].as_array().unwrap().len(), result["routes"].as_array().unwrap().len()), (2, 2), "{result}");
    let shown = ip(&["-n", &world.container, "-6", "addr", "show", "eth0"]);
    assert!(shown.contains("fd42::2/64") && !shown.contains("tentative"), "no waiting for duplicates: {shown}");
    let status = world.refused("host-local", "STATUS", &config, &[]);
    assert_eq!(status["code"], 50, "{status}");
    let full = world.refused("host-local", "ADD", &config, &[("CNI_CONTAINERID", "c9")]);
    assert!(full["msg"].as_str().unwrap().contains("no IP addresses available in range set: 10.198.2.1-10.198.2.2"), "{full}");
    let layer_two = World::new();
    let config = layer_two.config("1.0.0", json!({"ipam": {}, "isDefaultGateway": false}));
    let result = layer_two.ok("bridge", "ADD", &config);
    assert!(result.get("ips").is_none(), "{result}");
    layer_two.ok("bridge", "CHECK", &World::with_previous(&config, &result));
}

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
fn loopback_goes_up_and_down() {
    let world = World::new();
    for version in VERSIONS {
        let config = json!({"cniVersion": version, "name": "lo", "type": "loopback"});
        let result = world.ok("loopback", "ADD", &config);
        assert!(result.to_string().contains("127.0.0.1/8"), "{result}");
        assert!(ip(&["-n", &world.container, "link", "show", "lo"]).contains("LOOPBACK,UP"));
        world.ok("loopback", "DEL", &config);
        assert!(!ip(&["-n", &world.container, "link", "show", "lo"]).contains("LOOPBACK,UP"));
    }
}

#[test]
fn the_protocol_is_kept_to_the_letter() {
    let world = World::new();
    let good = world.config("1.0.0", json!({}));
    let with = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        config
    };
    let missing = world.refused("bridge", "ADD", &good, &[("CNI_CONTAINERID", ""), ("CNI_NETNS", "")]);
    assert_eq!(missing["code"], 4);
    assert!(missing["msg"].as_str().unwrap().contains("[CNI_CONTAINERID,CNI_NETNS]"), "{missing}");
    let long = "x".repeat(1 << 20);
    let cases: Vec<(&str, Value, Vec<(&str, &str)>, u64)> = vec![
        ("FROB", good.clone(), vec![], 4),
        ("ADD", good.clone(), vec![("CNI_CONTAINERID", "../x")], 4),
        ("ADD", good.clone(), vec![("CNI_IFNAME", "a/b")], 4),
        ("ADD", good.clone(), vec![("CNI_IFNAME", "sixteen-bytes-ok")], 4),
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
        ("ADD", with("vlan", json!(5)), vec![], 2),
        ("ADD", json!("text"), vec![], 6),
        ("ADD", good.clone(), vec![("CNI_NETNS", "/proc/self/ns/net")], 8),
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
    assert!(!ip(&["-n", &world.host, "link"]).contains("veth"), "nothing was changed");
    let version = world.call("bridge", "VERSION", &json!(null), &[]);
    let version: Value = serde_json::from_slice(&version.stdout).unwrap();
    assert_eq!(version["supportedVersions"].as_array().unwrap().len(), 7);
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
    for version in VERSIONS {
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

#[test]
fn ptp_leads_everything_over_a_line_to_the_host() {
    for version in VERSIONS {
        let world = World::new();
        let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "subnet": "10.198.2.0/24", "routes": [{"dst": "0.0.0.0/0"}]});
        let config = world.config(version, json!({"type": "ptp", "ipMasq": true, "mtu": 1400, "ipam": ipam, "dns": {"nameservers": ["192.0.2.53"]}}));
        let result = world.ok("ptp", "ADD", &config);
        assert_eq!(result["dns"]["nameservers"][0], "192.0.2.53");
        if version >= "0.3.0" {
            assert_eq!((&result["ips"][0]["address"], &result["ips"][0]["interface"]), (&json!("10.198.2.2/24"), &json!(1)), "{version}: {result}");
            assert_eq!(result["interfaces"][1]["name"], "eth0");
        }
        let shown = ip(&["-n", &world.container, "addr", "show", "eth0"]);
        assert!(shown.contains("10.198.2.2/24") && shown.contains("mtu 1400") && shown.contains("state UP"), "{shown}");
        let routes = ip(&["-n", &world.container, "route"]);
        for expected in ["default via 10.198.2.1 dev eth0", "10.198.2.0/24 via 10.198.2.1 dev eth0", "10.198.2.1 dev eth0 scope link"] {
            assert!(routes.contains(expected), "{expected}: {routes}");
        }
        assert!(ip(&["-n", &world.host, "route"]).contains("10.198.2.2 dev veth"));
        assert!(world.masquerading().contains("10.198.2.2"));
        let ping = ["netns", "exec", &world.container, "busybox", "ping", "-c1", "-W2", "10.198.2.1"];
        assert!(Command::new("ip").args(ping).output().unwrap().status.success(), "the host answers");
        if version >= "0.4.0" {
            let with = World::with_previous(&config, &result);
            world.ok("ptp", "CHECK", &with);
            ip(&["-n", &world.host, "route", "del", "10.198.2.2"]);
            assert!(world.refused("ptp", "CHECK", &with, &[])["msg"].as_str().unwrap().contains("10.198.2.2"));
        }
        world.ok("ptp", "DEL", &World::with_previous(&config, &result));
        world.ok("ptp", "DEL", &config);
        assert!(world.taken().is_empty() && !world.masquerading().contains("10.198.2.2"));
        assert!(!ip(&["-n", &world.host, "link"]).contains("veth"), "nothing is left");
    }
    // Both families, without waiting for anybody who might have the address too.
    let world = World::new();
    let ranges = json!([[{"subnet": "10.198.3.0/24"}], [{"subnet": "fd00:198:3::/64"}]]);
    let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]});
    let config = world.config("1.1.0", json!({"type": "ptp", "ipam": ipam}));
    let begun = std::time::Instant::now();
    let result = world.ok("ptp", "ADD", &config);
    assert!(begun.elapsed() < std::time::Duration::from_millis(900), "{:?}", begun.elapsed());
    let routes = ip(&["-n", &world.container, "-6", "route"]);
    assert!(routes.contains("default via fd00:198:3::1") && routes.contains("fd00:198:3::/64 via fd00:198:3::1"), "{routes}");
    assert!(ip(&["-n", &world.host, "-6", "route"]).contains("fd00:198:3::2 dev veth"));
    let ping = ["netns", "exec", &world.container, "busybox", "ping", "-6", "-c1", "-W2", "fd00:198:3::1"];
    assert!(Command::new("ip").args(ping).output().unwrap().status.success(), "the host answers");
    // Two containers reach each other over the host.
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    let second = world.call("ptp", "ADD", &config, &env);
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stdout));
    let ping = ["netns", "exec", &world.container, "busybox", "ping", "-c1", "-W2", "10.198.3.3"];
    assert!(Command::new("ip").args(ping).output().unwrap().status.success(), "the other answers");
    assert!(world.call("ptp", "DEL", &config, &env).status.success());
    world.ok("ptp", "STATUS", &config);
    let mut gone = config.clone();
    gone["cni.dev/valid-attachments"] = json!([]);
    world.ok("ptp", "GC", &gone);
    assert!(world.taken().is_empty(), "{result}");
    // An address without a gateway leads nowhere, and leaves nothing.
    let lone = json!({"type": "static", "addresses": [{"address": "10.198.4.2/24"}]});
    let world = World::new();
    let error = world.refused("ptp", "ADD", &world.config("1.0.0", json!({"type": "ptp", "ipam": lone})), &[]);
    assert!(error["msg"].as_str().unwrap().contains("no gateway"), "{error}");
    assert!(!ip(&["-n", &world.host, "link"]).contains("veth"));
}
