//! Interoperability: our plugins delete what the reference
//! plugins have created and the reverse, and podman can use ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::portmap::{fetch, serve_word};
use super::world::{World, ip, plugins};

/// The directory of the distribution's reference plugins.
fn reference() -> PathBuf {
    let dir = PathBuf::from("/usr/lib/cni");
    assert!(
        dir.join("bridge").is_file(),
        "containernetworking-plugins is needed (make test installs it)"
    );
    dir
}

/// The chain of plugins, in a version that Debian's plugins support.
fn chain(world: &World) -> Vec<Value> {
    let of = |plugin: &str, extra: Value| {
        let mut config = json!({"cniVersion": "1.0.0", "name": "net", "type": plugin});
        for (key, value) in extra.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    };
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}, {"hostPort": 8053, "containerPort": 53, "protocol": "udp"}]);
    let limits = json!({"ingressRate": 8_000_000, "ingressBurst": 80_000, "egressRate": 8_000_000, "egressBurst": 80_000});
    vec![
        world.config("1.0.0", json!({"ipMasq": true})),
        of("portmap", json!({"runtimeConfig": {"portMappings": ports}})),
        of("firewall", json!({"backend": "iptables"})),
        of("bandwidth", limits),
        of(
            "tuning",
            json!({"mtu": 1400, "dataDir": world.data.path().join("tuning")}),
        ),
    ]
}

fn add(world: &World, bin: &Path, chain: &[Value]) -> Value {
    let mut result = Value::Null;
    for config in chain {
        let mut config = config.clone();
        if !result.is_null() {
            config["prevResult"] = result;
        }
        let plugin = bin.join(config["type"].as_str().unwrap());
        result = world.ok_with(
            plugin.to_str().unwrap(),
            "ADD",
            &config,
            &[("CNI_PATH", bin.to_str().unwrap())],
        );
    }
    result
}

fn del(world: &World, bin: &Path, chain: &[Value], result: &Value) {
    for config in chain.iter().rev() {
        let plugin = bin.join(config["type"].as_str().unwrap());
        world.ok_with(
            plugin.to_str().unwrap(),
            "DEL",
            &World::with_previous(config, result),
            &[("CNI_PATH", bin.to_str().unwrap())],
        );
    }
}

#[test]
fn networks_of_the_reference_pass_check_until_damaged() {
    let world = World::new();
    let chain = chain(&world);
    let result = add(&world, &reference(), &chain);
    let check = |config: &Value| {
        let plugin = config["type"].as_str().unwrap();
        world.call(plugin, "CHECK", &World::with_previous(config, &result), &[])
    };
    for config in &chain {
        let output = check(config);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}: {stdout}", config["type"]);
    }
    // Delete one of the two port rules, then the rules that jump to the chains, then the masquerading rule.
    let rules = world.on_host(&["iptables-save", "-t", "nat"]);
    let leading = |l: &&str| l.starts_with("-A CNI-DN-") && l.contains("-j DNAT");
    let rule = rules.lines().find(leading).unwrap().replacen("-A", "-D", 1);
    let change = |what: &str| {
        let words: Vec<&str> = what.split_whitespace().collect();
        world.on_host(&[&["iptables", "-t", "nat"], &words[..]].concat());
    };
    let refused = |config: &Value| !check(config).status.success();
    change(&rule);
    assert!(refused(&chain[1]), "CHECK fails without {rule}");
    change(&rule.replacen("-D", "-A", 1));
    assert!(!refused(&chain[1]), "CHECK succeeds with {rule} again");
    change("-F CNI-HOSTPORT-DNAT");
    assert!(
        refused(&chain[1]),
        "CHECK fails if no rule jumps to the container's chain"
    );
    change("-F POSTROUTING");
    assert!(refused(&chain[0]), "CHECK fails without masquerading");
    // DEL removes the remaining rules.
    del(&world, &plugins(), &chain, &result);
    let rules = world.on_host(&["iptables-save"]);
    assert!(
        !rules.contains("10.198.1.2") && !rules.contains("CNI-DN-"),
        "{rules}"
    );
}

#[test]
fn networks_of_the_reference_are_removed() {
    let world = World::new();
    let chain = chain(&world);
    let result = add(&world, &reference(), &chain);
    let rules = world.on_host(&["iptables-save"]);
    assert!(
        rules.contains("CNI-DN-") && rules.matches("10.198.1.2").count() > 4,
        "{rules}"
    );
    // As after an upgrade: other binaries, the same containers.
    del(&world, &plugins(), &chain, &result);
    let rules = world.on_host(&["iptables-save"]);
    assert!(
        !rules.contains("10.198.1.2") && !rules.contains("CNI-DN-"),
        "{rules}"
    );
    assert!(world.taken().is_empty());
    let links = ip(&["-n", &world.host, "link"]);
    assert!(!links.contains("bwp") && !links.contains("veth"), "{links}");
    // The next container uses only our plugins, on the reference's bridge, with the next address.
    let result = add(&world, &plugins(), &chain);
    assert_eq!(result["ips"][0]["address"], "10.198.1.3/24");
    del(&world, &plugins(), &chain, &result);
    assert!(
        !world.ruleset().contains("10.198.1.3"),
        "{}",
        world.ruleset()
    );
}

/// With the backend `iptables`, the reference's DEL finds our rules in any version. Without it, versions before 1.6 do not.
#[test]
fn the_reference_removes_our_rules_in_the_tables_of_iptables() {
    let world = World::new();
    let mut chain = chain(&world);
    chain[0]["ipMasqBackend"] = "iptables".into();
    chain[1]["backend"] = "iptables".into();
    let ranges = json!([[{"subnet": "10.198.1.0/24"}], [{"subnet": "fd00:198:1::/64"}]]);
    chain[0]["ipam"] =
        json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges});
    let rules = || {
        let of = |program: &str| world.on_host(&[program]);
        format!("{}{}", of("iptables-save"), of("ip6tables-save"))
    };
    for (ours, other) in [(plugins(), reference()), (plugins(), plugins())] {
        let result = add(&world, &ours, &chain);
        for config in &chain {
            let plugin = config["type"].as_str().unwrap();
            world.ok(plugin, "CHECK", &World::with_previous(config, &result));
        }
        let made = rules();
        let address = result["ips"][0]["address"]
            .as_str()
            .unwrap()
            .replace("/24", "");
        for text in [
            format!(
                "-s {address}/32 -m comment --comment \"name: \\\"net\\\" id: \\\"c1\\\"\" -j CNI-"
            ),
            "! -d 224.0.0.0/4 -m comment".to_owned(),
            "! -d ff00::/8 -m comment".to_owned(),
            format!("-j DNAT --to-destination {address}:80"),
            "-j DNAT --to-destination [fd00:198:1::".to_owned(),
            "-m conntrack --ctstate DNAT --ctorigdstport 8080 -j MASQUERADE".to_owned(),
            "-m multiport --dports 8053".to_owned(),
        ] {
            assert!(made.contains(&text), "{text}\n{made}");
        }
        assert!(!made.contains("incompatible"), "{made}");
        serve_word(&world.container, &format!("{address}:80"), "container");
        assert_eq!(
            fetch(&world.host, "10.198.1.1:8080").as_deref(),
            Some("container"),
            "{made}"
        );
        del(&world, &other, &chain, &result);
        let left = rules();
        let of_container = ["10.198.1.", "fd00:198:1", "CNI-DN-", "CNI-SN-", "id: "];
        let found = of_container.map(|text| left.contains(text));
        assert_eq!(found, [false; 5], "{other:?}: {left}");
        assert!(world.taken().is_empty());
        let own = world.ruleset();
        assert!(!own.contains("cni_hostport") && !own.contains("cni_plugins_masquerade"));
    }
}

/// On a host with containers of the reference, a container that we connect may be disconnected by the reference, too.
#[test]
fn next_to_containers_of_the_reference_the_reference_removes_our_rules() {
    let (world, other) = (World::new(), World::new());
    let mut chain = chain(&world);
    let ranges = json!([[{"subnet": "10.198.1.0/24"}], [{"subnet": "fd00:198:1::/64"}]]);
    chain[0]["ipam"] =
        json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges});
    add(&world, &reference(), &chain);
    let rules = || {
        let of = |program: &str| world.on_host(&[program]);
        let all = format!("{}{}", of("iptables-save"), of("ip6tables-save"));
        let mut lines: Vec<String> = all.lines().map(Into::into).collect();
        lines.retain(|l| l.starts_with("-A") && !l.contains("CNI-HOSTPORT-SNAT"));
        lines.sort();
        lines
    };
    let before = rules();
    let (netns, theirs) = (other.netns(), reference());
    let second = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*netns)];
    let own_ports = json!([{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}, {"hostPort": 8054, "containerPort": 53, "protocol": "sctp"}]);
    chain[1]["runtimeConfig"]["portMappings"] = own_ports;
    let mut result = Value::Null;
    for config in &chain {
        let config = World::with_previous(config, &result);
        result = world.ok_with(config["type"].as_str().unwrap(), "ADD", &config, &second);
    }
    let address = result["ips"][0]["address"].as_str().unwrap();
    assert_eq!(address, "10.198.1.3/24");
    assert_eq!(
        rules().iter().filter(|l| l.contains("10.198.1.3")).count(),
        9,
        "{:#?}",
        rules()
    );
    for config in chain.iter().rev() {
        let config = World::with_previous(config, &result);
        let plugin = theirs.join(config["type"].as_str().unwrap());
        let env = [&second[..], &[("CNI_PATH", theirs.to_str().unwrap())]].concat();
        world.ok_with(plugin.to_str().unwrap(), "DEL", &config, &env);
    }
    assert_eq!(rules(), before);
    let own = world.ruleset();
    assert!(!own.contains("cni_hostport") && !own.contains("cni_plugins_masquerade"));
}

#[test]
fn rules_of_the_reference_are_removed_without_the_result_of_add() {
    let world = World::new();
    let chain = chain(&world);
    add(&world, &reference(), &chain);
    del(&world, &plugins(), &chain, &Value::Null);
    let rules = world.on_host(&["iptables-save"]);
    let none = ["10.198.1.2", "CNI-DN-", "id: "].map(|text| rules.contains(text));
    assert_eq!(none, [false; 3], "{rules}");
}

/// The reference writes no alias, so the result of ADD identifies its pair.
#[test]
fn pairs_of_the_reference_are_removed_without_a_namespace() {
    let world = World::new();
    let chain = chain(&world);
    let result = add(&world, &reference(), &chain);
    // Another container's link that got the name of the pair.
    let mut stale = result.clone();
    stale["interfaces"][1]["mac"] = "02:00:00:00:00:01".into();
    let bridge = |previous: &Value| {
        let config = World::with_previous(&chain[0], previous);
        world.ok_with("bridge", "DEL", &config, &[("CNI_NETNS", "")]);
        ip(&["-n", &world.host, "link"]).matches("veth").count()
    };
    assert_eq!(bridge(&stale), 1);
    assert_eq!(bridge(&result), 0);
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
}

#[test]
fn the_reference_can_remove_our_networks() {
    let world = World::new();
    let mut chain = chain(&world);
    // Debian's version does not know the tables of these two; it removes everything else.
    chain.remove(1);
    chain[0]["ipMasq"] = false.into();
    let result = add(&world, &plugins(), &chain);
    del(&world, &reference(), &chain, &result);
    let rules = world.on_host(&["iptables-save"]);
    assert!(!rules.contains("10.198.1.2"), "{rules}");
    assert!(world.taken().is_empty());
    let links = ip(&["-n", &world.host, "link"]);
    assert!(!links.contains("bwp") && !links.contains("veth"), "{links}");
    // Our host-local sees the reference's reservations.
    let theirs = reference();
    let second = add(&world, &theirs, &chain);
    assert_eq!(
        second["ips"][0]["address"], "10.198.1.3/24",
        "the reference allocates the address after our last"
    );
    let refusal = world.refused("host-local", "ADD", &chain[0], &[]);
    assert!(
        refusal["msg"]
            .as_str()
            .unwrap()
            .contains("duplicate allocation"),
        "{refusal}"
    );
    del(&world, &theirs, &chain, &second);
    world.ok("host-local", "ADD", &chain[0]);
}

/// Our GC, for containers that the reference has attached: only one of this network is valid.
#[test]
fn gc_collects_networks_of_the_reference_for_deleted_containers() {
    let world = World::new();
    let theirs = reference();
    let path = [("CNI_PATH", theirs.to_str().unwrap())];
    let mut ports = 8080..;
    let mut connect = |network: &str, container: &str| {
        let mut of = chain(&world);
        of.truncate(2);
        let port = ports.next().unwrap();
        of[0]["bridge"] = format!("br-{network}").into();
        of[1]["runtimeConfig"]["portMappings"] =
            json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
        let mut result = Value::Null;
        for config in &mut of {
            config["name"] = network.into();
            if !result.is_null() {
                config["prevResult"] = result;
            }
            let plugin = theirs.join(config["type"].as_str().unwrap());
            let interface = format!("{network}0");
            let who = [("CNI_CONTAINERID", container), ("CNI_IFNAME", &interface)];
            let env = [&path[..], &who].concat();
            result = world.ok_with(plugin.to_str().unwrap(), "ADD", config, &env);
        }
        of
    };
    let gone = connect("net", "gone");
    // All containers share a namespace in this test, so each needs another interface name.
    ip(&[
        "-n",
        &world.container,
        "link",
        "set",
        "net0",
        "name",
        "old0",
    ]);
    connect("net", "kept");
    connect("other", "gone");
    let lines = || -> Vec<String> {
        let rules = world.on_host(&["iptables-save", "-t", "nat"]);
        let named = |l: &&str| l.contains("name: \\\"") || l.contains("name: \"");
        rules.lines().filter(named).map(Into::into).collect()
    };
    let before = lines();
    let of = |rules: &[String], network: &str, container: &str| {
        let both = |l: &&String| l.contains(network) && l.contains(container);
        rules.iter().filter(both).count()
    };
    let all = |rules: &[String]| {
        [("net", "gone"), ("net", "kept"), ("other", "gone")].map(|(n, c)| of(rules, n, c))
    };
    assert!(all(&before).iter().all(|n| *n >= 3), "{before:#?}");
    for config in &gone {
        let mut gc = json!({"cniVersion": "1.1.0"});
        for key in ["name", "type", "ipMasq", "ipam", "bridge"] {
            gc[key] = config[key].clone();
        }
        gc["cni.dev/valid-attachments"] = json!([{"containerID": "kept", "ifname": "net0"}]);
        world.ok(gc["type"].as_str().unwrap(), "GC", &gc);
    }
    let left = lines();
    let [gone, kept, other] = all(&before);
    assert!(gone > 0);
    assert_eq!(all(&left), [0, kept, other], "{left:#?}");
}

struct Podman {
    world: World,
    dir: tempfile::TempDir,
}

impl Podman {
    fn new() -> Podman {
        let podman = Podman {
            world: World::new(),
            dir: tempfile::tempdir().unwrap(),
        };
        let path = podman.dir.path();
        for dir in [
            "net.d",
            "rootfs/bin",
            "rootfs/etc",
            "rootfs/proc",
            "rootfs/sys",
            "rootfs/dev",
            "rootfs/tmp",
            "rootfs/run",
        ] {
            std::fs::create_dir_all(path.join(dir)).unwrap();
        }
        std::fs::copy("/bin/busybox", path.join("rootfs/bin/busybox")).unwrap();
        for name in ["sh", "nc", "ip", "sleep"] {
            std::os::unix::fs::symlink("busybox", path.join("rootfs/bin").join(name)).unwrap();
        }
        let ipam = json!({"type": "host-local", "dataDir": path.join("networks"), "ranges": [[{"subnet": "10.198.7.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]});
        let network = json!({"cniVersion": "0.4.0", "name": "hfnet", "plugins": [
            {"type": "bridge", "bridge": "br7", "isGateway": true, "ipMasq": true, "hairpinMode": true, "capabilities": {"ips": true}, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall", "backend": "iptables"},
            {"type": "tuning", "dataDir": path.join("tuning")}]});
        std::fs::write(path.join("net.d/50-hfnet.conflist"), network.to_string()).unwrap();
        let settings = format!(
            "[network]\nnetwork_backend=\"cni\"\ncni_plugin_dirs=[{:?}]\nnetwork_config_dir={:?}\n[engine]\nruntime=\"runc\"\ncgroup_manager=\"cgroupfs\"\nevents_logger=\"none\"\n",
            plugins(),
            path.join("net.d")
        );
        std::fs::write(path.join("containers.conf"), settings).unwrap();
        podman
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let path = self.dir.path();
        let mut command = Command::new("nsenter");
        // Not through `ip netns exec`, which hides the cgroups.
        command
            .arg(format!("--net=/run/netns/{}", self.world.host))
            .args(["podman", "--storage-driver", "vfs", "--root"])
            .arg(path.join("root"));
        command
            .arg("--runroot")
            .arg(path.join("run"))
            .args(arguments)
            .env("CONTAINERS_CONF", path.join("containers.conf"));
        command
            .output()
            .expect("podman and nsenter are installed (make test installs them)")
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "podman {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        self.run(&["rm", "--force", "--all", "--time", "0"]);
    }
}

#[test]
fn podman_uses_the_plugins() {
    let podman = Podman::new();
    let rootfs = podman.dir.path().join("rootfs");
    let limits = [
        "--ulimit",
        "nofile=1024:1024",
        "--ulimit",
        "nproc=1024:1024",
    ];
    let server = "while true; do echo hello | nc -l -p 80; done";
    let start = [
        "run",
        "--detach",
        "--name",
        "c1",
        "--net",
        "hfnet",
        "--ip",
        "10.198.7.77",
        "--mac-address",
        "c2:11:22:33:44:55",
        "-p",
        "8080:80",
    ];
    let command = ["--rootfs", rootfs.to_str().unwrap(), "sh", "-c", server];
    podman.ok(&[&start[..], &limits, &command].concat());
    let shown = podman.ok(&["exec", "c1", "ip", "addr", "show", "eth0"]);
    assert!(
        shown.contains("10.198.7.77/24") && shown.contains("c2:11:22:33:44:55"),
        "{shown}"
    );
    let mut received = String::new();
    for _ in 0..50 {
        received = String::from_utf8(
            Command::new("ip")
                .args([
                    "netns",
                    "exec",
                    &podman.world.host,
                    "busybox",
                    "nc",
                    "-w",
                    "2",
                    "127.0.0.1",
                    "8080",
                ])
                .output()
                .unwrap()
                .stdout,
        )
        .unwrap();
        if !received.is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(received, "hello\n", "{}", podman.world.ruleset());
    podman.ok(&["network", "disconnect", "--force", "hfnet", "c1"]);
    podman.ok(&["network", "connect", "hfnet", "c1"]);
    podman.ok(&["restart", "--time", "0", "c1"]);
    podman.ok(&["rm", "--force", "--time", "0", "c1"]);
    let rules = podman.world.ruleset();
    assert!(!rules.contains("10.198.7."), "{rules}");
    let left = std::fs::read_dir(podman.dir.path().join("networks/hfnet"))
        .unwrap()
        .flatten();
    assert_eq!(
        left.filter(|e| e.file_name().to_string_lossy().starts_with("10."))
            .count(),
        0
    );
    assert!(!ip(&["-n", &podman.world.host, "link"]).contains("veth"));
}
