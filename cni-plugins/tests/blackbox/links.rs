//! Plugins that give a container a separate link. Kinds of links
//! that this kernel lacks are tested in a virtual machine.

use std::process::Command;

use serde_json::{Value, json};

use super::vm;
use super::world::{World, comes_true, ip, once_up, versions};

/// A host with an interface `phys0` and a peer at the other end, `10.198.4.1`.
fn with_wire() -> (World, World) {
    let (world, far) = (World::new(), World::new());
    ip(&[
        "-n",
        &world.host,
        "link",
        "add",
        "phys0",
        "type",
        "veth",
        "peer",
        "name",
        "wire",
        "netns",
        &far.host,
    ]);
    ip(&["-n", &world.host, "link", "set", "phys0", "up"]);
    ip(&["-n", &far.host, "link", "set", "wire", "up"]);
    ip(&[
        "-n",
        &far.host,
        "addr",
        "add",
        "10.198.4.1/24",
        "dev",
        "wire",
    ]);
    (world, far)
}

fn config(world: &World, version: &str, kind: &str, extra: Value) -> Value {
    let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "subnet": "10.198.4.0/24", "routes": [{"dst": "0.0.0.0/0"}]});
    let mut config = json!({"cniVersion": version, "name": "net", "type": kind, "master": "phys0", "ipam": ipam});
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// Whether a container can reach an address. Retries, because the first packets may be lost.
fn reaches(world: &World, to: &str) -> bool {
    comes_true(|| ping_once(world, to))
}

/// Whether a single ping succeeds.
fn ping_once(world: &World, to: &str) -> bool {
    Command::new("ip")
        .args([
            "netns",
            "exec",
            &world.container,
            "busybox",
            "ping",
            "-c1",
            "-W2",
            to,
        ])
        .output()
        .unwrap()
        .status
        .success()
}

fn link(world: &World) -> String {
    ip(&["-n", &world.container, "-d", "link", "show", "eth0"])
}

/// Tests ADD, CHECK and DEL of a link on `phys0` in every version; `expected` must occur in its description.
fn check_link(kind: &str, extra: Value, expected: &[&str]) {
    for version in versions(kind) {
        let (world, _far) = with_wire();
        let config = config(&world, version, kind, extra.clone());
        let result = world.ok(kind, "ADD", &config);
        let shown = match expected.contains(&"state UP") {
            true => once_up(|| link(&world)),
            false => link(&world),
        };
        for expected in expected {
            assert!(
                shown.contains(expected),
                "{kind} {version}: {expected}: {shown}"
            );
        }
        if version >= "0.3.0" {
            assert_eq!(
                (&result["ips"][0]["address"], &result["ips"][0]["interface"]),
                (&json!("10.198.4.2/24"), &json!(0)),
                "{result}"
            );
            let mac = result["interfaces"][0]["mac"].as_str().unwrap();
            assert!(
                shown.contains(mac) && result["interfaces"].as_array().unwrap().len() == 1,
                "{shown}: {result}"
            );
        }
        assert!(ip(&["-n", &world.container, "route"]).contains("default via 10.198.4.1"));
        if version >= "0.4.0" {
            let after = World::with_previous(&config, &result);
            world.ok(kind, "CHECK", &after);
            ip(&["-n", &world.container, "addr", "flush", "dev", "eth0"]);
            assert!(
                world.refused(kind, "CHECK", &after, &[])["msg"]
                    .as_str()
                    .unwrap()
                    .contains("10.198.4.2")
            );
        }
        if version == "1.1.0" {
            world.ok(kind, "STATUS", &config);
        }
        // ADD for a second container with the same name fails and leaves nothing.
        let refusal = world.refused(kind, "ADD", &config, &[("CNI_CONTAINERID", "c2")]);
        assert!(
            refusal["msg"].as_str().unwrap().contains("already exists"),
            "{refusal}"
        );
        assert_eq!(world.taken().len(), 1);
        // The master may be deleted before the container.
        ip(&["-n", &world.host, "link", "del", "phys0"]);
        for _ in 0..2 {
            world.ok(kind, "DEL", &config);
        }
        assert!(world.taken().is_empty());
        assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
    }
    let (world, _far) = with_wire();
    for (extra, expected) in [
        (json!({"master": "nosuch0"}), "nosuch0"),
        (json!({"mtu": -5}), "MTU"),
        (
            json!({"mode": "odd", "vlanId": 5000}),
            if kind == "vlan" { "5000" } else { "odd" },
        ),
    ] {
        let error = world.refused(kind, "ADD", &config(&world, "1.0.0", kind, extra), &[]);
        assert!(error["msg"].as_str().unwrap().contains(expected), "{error}");
    }
    assert!(world.taken().is_empty() && !ip(&["-n", &world.container, "link"]).contains("eth0"));
    // With the parent in the container's namespace.
    let inner = World::new();
    ip(&[
        "-n",
        &inner.container,
        "link",
        "add",
        "phys0",
        "type",
        "veth",
        "peer",
        "name",
        "wire",
    ]);
    ip(&["-n", &inner.container, "link", "set", "phys0", "up"]);
    let mut own = config(&inner, "1.0.0", kind, extra);
    own["linkInContainer"] = true.into();
    let result = inner.ok(kind, "ADD", &own);
    inner.ok(kind, "CHECK", &World::with_previous(&own, &result));
    inner.ok(kind, "DEL", &own);
}

#[test]
fn macvlans_have_their_own_addresses_and_macs() {
    check_link(
        "macvlan",
        json!({"mode": "private", "mtu": 1400}),
        &["macvlan", "mode private", "mtu 1400", "state UP"],
    );
    let (world, _far) = with_wire();
    let plain = config(
        &world,
        "1.1.0",
        "macvlan",
        json!({"runtimeConfig": {"mac": "c2:11:22:33:44:66"}}),
    );
    let result = world.ok_with(
        "macvlan",
        "ADD",
        &plain,
        &[("CNI_ARGS", "IgnoreUnknown=1;MAC=c2:11:22:33:44:55")],
    );
    assert_eq!(result["interfaces"][0]["mac"], "c2:11:22:33:44:66");
    assert!(
        reaches(&world, "10.198.4.1"),
        "the peer of the link answers"
    );
    world.ok("macvlan", "STATUS", &plain);
    // STATUS reports links that the kernel does not support.
    for kind in ["vlan", "ipvlan", "dummy", "vrf"] {
        let config = config(&world, "1.1.0", kind, json!({"vrfname": "blue"}));
        let known = Command::new("ip")
            .args([
                "-n",
                &world.host,
                "link",
                "add",
                "probe0",
                "link",
                "phys0",
                "type",
                kind,
                "table",
                "5",
            ])
            .output()
            .unwrap();
        if String::from_utf8_lossy(&known.stderr).contains("Unknown device type") {
            assert_eq!(
                world.refused(kind, "STATUS", &config, &[])["code"],
                50,
                "{kind}"
            );
        }
    }
    let mut gc = plain.clone();
    gc["cni.dev/valid-attachments"] = json!([]);
    world.ok("macvlan", "GC", &gc);
    assert!(world.taken().is_empty());
    world.ok("macvlan", "DEL", &plain);
    // Without a master, the plugin uses the interface of the default route; without addresses, the link is only set up.
    ip(&[
        "-n",
        &world.host,
        "addr",
        "add",
        "10.198.4.9/24",
        "dev",
        "phys0",
    ]);
    let mut bare = plain.clone();
    bare.as_object_mut().unwrap().remove("master");
    bare["ipam"] = json!({});
    let error = world.refused("macvlan", "ADD", &bare, &[]);
    assert!(
        error["msg"].as_str().unwrap().contains("default route"),
        "{error}"
    );
    ip(&[
        "-n",
        &world.host,
        "route",
        "add",
        "default",
        "via",
        "10.198.4.1",
    ]);
    let result = world.ok("macvlan", "ADD", &bare);
    assert!(
        result.get("ips").is_none() && once_up(|| link(&world)).contains("state UP"),
        "{result}"
    );
    world.ok("macvlan", "CHECK", &World::with_previous(&bare, &result));
    let error = world.refused(
        "macvlan",
        "ADD",
        &config(&world, "1.0.0", "macvlan", json!({"mtu": 9000})),
        &[],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("from 0 to 1500"),
        "{error}"
    );
}

#[test]
fn a_host_device_moves_into_the_container_and_back() {
    for by in ["device", "hwaddr"] {
        let (world, _far) = with_wire();
        let mac = ip(&["-n", &world.host, "link", "show", "phys0"])
            .split("link/ether ")
            .nth(1)
            .unwrap()[..17]
            .to_owned();
        let mut config = config(&world, "1.0.0", "host-device", json!({}));
        config[by] = if by == "device" {
            "phys0".into()
        } else {
            mac.clone().into()
        };
        let result = world.ok("host-device", "ADD", &config);
        assert_eq!(result["interfaces"][0]["mac"], mac, "{result}");
        assert!(
            !ip(&["-n", &world.host, "link"]).contains("phys0")
                && once_up(|| link(&world)).contains("state UP")
        );
        assert!(reaches(&world, "10.198.4.1"));
        world.ok(
            "host-device",
            "CHECK",
            &World::with_previous(&config, &result),
        );
        for _ in 0..2 {
            world.ok("host-device", "DEL", &config);
        }
        assert!(
            ip(&["-n", &world.host, "link"]).contains("phys0"),
            "the device has its own name again"
        );
        assert!(world.taken().is_empty());
    }
    let (world, _far) = with_wire();
    for (extra, expected) in [
        (json!({}), "specify either"),
        (json!({"device": "nosuch0"}), "nosuch0"),
        (json!({"hwaddr": "00:00:5e:00:53:01"}), "00:00:5e:00:53:01"),
        (json!({"kernelpath": "/etc"}), "/sys/devices"),
        (json!({"pciBusID": "../../etc"}), "PCI"),
        (
            json!({"runtimeConfig": {"deviceID": "ffff:ff:1f.7"}}),
            "ffff:ff:1f.7",
        ),
    ] {
        let error = world.refused(
            "host-device",
            "ADD",
            &config(&world, "1.0.0", "host-device", extra),
            &[],
        );
        assert!(error["msg"].as_str().unwrap().contains(expected), "{error}");
    }
    // If the move fails, the device is unchanged.
    ip(&[
        "-n",
        &world.container,
        "link",
        "add",
        "eth0",
        "type",
        "bridge",
    ]);
    let error = world.refused(
        "host-device",
        "ADD",
        &config(&world, "1.0.0", "host-device", json!({"device": "phys0"})),
        &[],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("already"),
        "{error}"
    );
    let shown = ip(&["-n", &world.host, "link", "show", "phys0"]);
    assert!(shown.contains("UP") && !shown.contains("alias"), "{shown}");
    ip(&["-n", &world.container, "link", "del", "eth0"]);
    // If IPAM fails, the device is moved back.
    let full = json!({"device": "phys0", "ipam": {"type": "nosuch"}});
    world.refused(
        "host-device",
        "ADD",
        &config(&world, "1.0.0", "host-device", full),
        &[],
    );
    assert!(ip(&["-n", &world.host, "link"]).contains("phys0"));
    // Addresses are released even without a namespace.
    let mut lost = config(&world, "1.0.0", "host-device", json!({"device": "phys0"}));
    world.ok("host-device", "ADD", &lost);
    assert!(
        world
            .call("host-device", "DEL", &lost, &[("CNI_NETNS", "")])
            .status
            .success()
    );
    assert!(world.taken().is_empty());
    lost["device"] = Value::Null;
    world.ok("host-device", "DEL", &lost);
}

/// As in the reference: the name, then the MAC, then the path, then the PCI address.
#[test]
fn the_first_of_several_device_identifiers_is_used() {
    let (world, far) = with_wire();
    let host = &world.host;
    let pair = "link add phys1 type veth peer name wire1 netns";
    let words = ["-n", host].into_iter().chain(pair.split(' '));
    ip(&words.chain([&*far.host]).collect::<Vec<_>>());
    let other = ip(&["-n", host, "-br", "link", "show", "phys1"]);
    let mac = other.split_whitespace().nth(2).unwrap();
    let (path, address) = ("/sys/devices/nosuch", "0000:ff:1f.7");
    for (extra, moved) in [
        (
            json!({"device": "phys0", "hwaddr": mac, "kernelpath": path, "pciBusID": address}),
            "phys0",
        ),
        (
            json!({"hwaddr": mac, "kernelpath": path, "pciBusID": address}),
            "phys1",
        ),
    ] {
        let config = config(&world, "1.0.0", "host-device", extra);
        world.ok("host-device", "ADD", &config);
        let left = ip(&["-n", host, "link"]);
        assert!(!left.contains(moved), "{moved}: {left}");
        world.ok("host-device", "DEL", &config);
        assert!(ip(&["-n", host, "link"]).contains(moved));
    }
    let both = json!({"kernelpath": path, "pciBusID": address});
    let config = config(&world, "1.0.0", "host-device", both);
    let error = world.refused("host-device", "ADD", &config, &[]);
    assert!(error["msg"].as_str().unwrap().contains(path), "{error}");
}

/// With fake buses: `ip netns exec` gives each call a separate mount namespace, so that no other test sees them.
#[test]
fn devices_are_found_by_their_bus_ids() {
    let (world, _far) = with_wire();
    let script = world.data.path().join("host-device");
    let buses = "mount -t tmpfs none /sys/bus && cd /sys/bus
mkdir -p pci/devices/0000:00:05.0/virtio3/net/phys0 auxiliary/devices/mlx5_core.sf.4/net/phys0 pci/devices/0000:00:06.0 pci/drivers/vfio-pci
ln -s ../../drivers/vfio-pci pci/devices/0000:00:06.0/driver";
    let text = format!(
        "#!/bin/sh\nset -e\n{buses}\nexec {} \"$@\"\n",
        super::world::plugins().join("host-device").display()
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let plugin = script.to_str().unwrap();
    let named = |id: &str| {
        config(
            &world,
            "1.1.0",
            "host-device",
            json!({"capabilities": {"deviceID": true}, "runtimeConfig": {"deviceID": id}}),
        )
    };
    // The link of a virtio device is one directory further down; a subfunction is on the auxiliary bus.
    for id in ["0000:00:05.0", "mlx5_core.sf.4"] {
        let result = world.ok(plugin, "ADD", &named(id));
        assert!(!world.taken().is_empty(), "{id}: {result}");
        assert!(!ip(&["-n", &world.host, "link"]).contains("phys0"), "{id}");
        world.ok(plugin, "CHECK", &World::with_previous(&named(id), &result));
        world.ok(plugin, "DEL", &named(id));
        assert!(ip(&["-n", &world.host, "link"]).contains("phys0"), "{id}");
    }
    // A device with a user-space driver has no link, but the container gets its addresses.
    let driven = named("0000:00:06.0");
    let by_address = json!({"device": "phys0", "pciBusID": "0000:00:06.0"});
    let both = config(&world, "1.1.0", "host-device", by_address);
    for driven in [both, driven] {
        let result = world.ok(plugin, "ADD", &driven);
        let interface = json!({"name": "eth0", "sandbox": world.netns()});
        assert_eq!(result["interfaces"], json!([interface]), "{result}");
        assert_eq!(result["ips"][0]["interface"], 0, "{result}");
        world.ok(plugin, "CHECK", &World::with_previous(&driven, &result));
        world.ok(plugin, "DEL", &driven);
        assert!(world.taken().is_empty());
    }
    let error = world.refused(plugin, "ADD", &named("0000:00:07.0"), &[]);
    assert!(
        error["msg"].as_str().unwrap().contains("0000:00:07.0"),
        "{error}"
    );
    // STATUS is called before any container exists.
    let mut unnamed = named("");
    world.ok(plugin, "STATUS", &unnamed);
    unnamed["capabilities"] = json!({});
    world.refused(plugin, "STATUS", &unnamed, &[]);
}

#[test]
fn taps_have_the_configured_options() {
    let world = World::new();
    let config = config(
        &world,
        "1.1.0",
        "tap",
        json!({"multiQueue": true, "mtu": 1400, "mac": "c2:11:22:33:44:77", "owner": 1000, "group": 1000}),
    );
    let result = world.ok("tap", "ADD", &config);
    let shown = ip(&["-n", &world.container, "-d", "tuntap"]);
    assert!(
        shown.contains("eth0: tap multi_queue vnet_hdr persist")
            && shown.contains("user 1000 group 1000"),
        "{shown}"
    );
    assert!(
        link(&world).contains("mtu 1400") && link(&world).contains("c2:11:22:33:44:77"),
        "{}",
        link(&world)
    );
    assert_eq!(result["ips"][0]["address"], "10.198.4.2/24");
    world.ok("tap", "CHECK", &World::with_previous(&config, &result));
    for _ in 0..2 {
        world.ok("tap", "DEL", &config);
    }
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth0") && world.taken().is_empty());
    let env = [("CNI_ARGS", "IgnoreUnknown=1;MAC=c2:11:22:33:44:88")];
    world.ok_with("tap", "ADD", &config, &env);
    assert!(
        link(&world).contains("c2:11:22:33:44:88"),
        "{}",
        link(&world)
    );
    world.ok("tap", "DEL", &config);
    let error = world.refused(
        "tap",
        "ADD",
        &config_with(&config, json!({"bridge": "nosuch"})),
        &[],
    );
    assert!(error["msg"].as_str().unwrap().contains("nosuch"), "{error}");
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth0") && world.taken().is_empty());
}

fn config_with(config: &Value, extra: Value) -> Value {
    let mut config = config.clone();
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn plugins_work_on_a_kernel_with_all_modules() {
    let modules = [
        "veth",
        "bridge",
        "8021q",
        "ipvlan",
        "dummy",
        "vrf",
        "nf_tables",
        "nft_chain_nat",
        "nft_masq",
        "nft_compat",
    ];
    vm::run(
        "links::kernel_inside",
        &modules,
        &[
            "/usr/sbin/ip",
            "/usr/sbin/nft",
            env!("CARGO_BIN_EXE_holdfast-cni"),
        ],
    );
}

#[test]
fn del_succeeds_on_a_kernel_without_nftables() {
    vm::run(
        "links::bare_kernel_inside",
        &["veth", "bridge"],
        &["/usr/sbin/ip", env!("CARGO_BIN_EXE_holdfast-cni")],
    );
}

#[test]
#[ignore = "runs in a virtual machine"]
fn bare_kernel_inside() {
    assert!(vm::is_inside(), "this test runs in a virtual machine only");
    let world = World::new();
    let plain = world.config("1.1.0", json!({}));
    let result = world.ok("bridge", "ADD", &plain);
    // The configuration or the kernel may have changed since ADD.
    let wants = config_with(&plain, json!({"ipMasq": true, "macspoofchk": true}));
    let refusal = world.refused("bridge", "ADD", &wants, &[("CNI_IFNAME", "eth1")]);
    assert!(
        refusal["msg"].as_str().unwrap().contains("nftables"),
        "{refusal}"
    );
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth1"));
    assert_eq!(world.refused("bridge", "STATUS", &wants, &[])["code"], 50);
    let chained = |plugin: &str| {
        World::chained(
            "1.1.0",
            plugin,
            &result,
            json!({"cni.dev/valid-attachments": []}),
        )
    };
    for plugin in ["portmap", "firewall"] {
        world.ok(plugin, "DEL", &chained(plugin));
        world.ok(plugin, "GC", &chained(plugin));
        assert_eq!(
            world.refused(plugin, "STATUS", &chained(plugin), &[])["code"],
            50
        );
    }
    world.ok("bridge", "DEL", &wants);
    assert!(world.taken().is_empty());
    assert!(!ip(&["-n", &world.container, "link"]).contains("eth0"));
}

#[test]
#[ignore = "runs in a virtual machine"]
fn kernel_inside() {
    assert!(vm::is_inside(), "this test runs in a virtual machine only");
    check_link(
        "vlan",
        json!({"vlanId": 77, "mtu": 1400}),
        &["vlan protocol 802.1Q id 77", "mtu 1400"],
    );
    check_link("ipvlan", json!({"mode": "l3"}), &["ipvlan", "mode l3"]);
    ipvlan_behind_another();
    dummies();
    vrfs();
    bridge_vlans();
}

fn ipvlan_behind_another() {
    let (world, _far) = with_wire();
    let previous = json!({"interfaces": [{"name": "phys0"}], "ips": [{"address": "10.198.4.7/24", "gateway": "10.198.4.1", "interface": 0}]});
    let config = World::chained("1.0.0", "ipvlan", &previous, json!({}));
    let result = world.ok("ipvlan", "ADD", &config);
    assert_eq!(result["ips"][0]["address"], "10.198.4.7/24");
    assert!(reaches(&world, "10.198.4.1"));
    let error = world.refused(
        "ipvlan",
        "ADD",
        &World::chained("1.0.0", "ipvlan", &json!({"interfaces": []}), json!({})),
        &[("CNI_IFNAME", "eth1")],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("addresses"),
        "{error}"
    );
}

fn dummies() {
    for version in versions("bridge") {
        let world = World::new();
        let config = config(&world, version, "dummy", json!({}));
        let result = world.ok("dummy", "ADD", &config);
        assert!(link(&world).contains("dummy"));
        ip(&["-n", &world.container, "link", "set", "lo", "up"]);
        assert!(reaches(&world, "10.198.4.2"));
        if version >= "0.4.0" {
            world.ok("dummy", "CHECK", &World::with_previous(&config, &result));
        }
        world.ok("dummy", "DEL", &config);
        assert!(
            world.taken().is_empty() && !ip(&["-n", &world.container, "link"]).contains("eth0")
        );
        assert!(
            world.refused(
                "dummy",
                "ADD",
                &config_with(&config, json!({"ipam": {}})),
                &[]
            )["msg"]
                .as_str()
                .unwrap()
                .contains("IPAM")
        );
    }
}

fn vrfs() {
    let world = World::new();
    let ranges = json!([[{"subnet": "10.198.6.0/24"}], [{"subnet": "fd00:198:6::/64"}]]);
    let bridge = world.config(
        "1.0.0",
        json!({"ipam": {"type": "host-local", "dataDir": world.data.path(), "ranges": ranges}}),
    );
    let result = world.ok("bridge", "ADD", &bridge);
    let config = World::chained(
        "1.0.0",
        "vrf",
        &result,
        json!({"vrfname": "blue", "table": 1001}),
    );
    world.ok("vrf", "ADD", &config);
    let shown = ip(&["-n", &world.container, "-d", "addr", "show", "eth0"]);
    assert!(
        shown.contains("master blue")
            && shown.contains("10.198.6.2/24")
            && shown.contains("fd00:198:6::2/64"),
        "{shown}"
    );
    let routes = ip(&["-n", &world.container, "route", "show", "table", "1001"]);
    assert!(
        routes.contains("default via 10.198.6.1") && routes.contains("10.198.6.0/24"),
        "{routes}"
    );
    assert!(
        ip(&[
            "-n",
            &world.container,
            "-6",
            "route",
            "show",
            "table",
            "1001"
        ])
        .contains("default via fd00:198:6::1")
    );
    world.ok("vrf", "CHECK", &config);
    let error = world.refused(
        "vrf",
        "ADD",
        &config_with(&config, json!({"table": 7})),
        &[],
    );
    assert!(error["msg"].as_str().unwrap().contains("1001"), "{error}");
    for _ in 0..2 {
        world.ok("vrf", "DEL", &config);
    }
    assert!(!ip(&["-n", &world.container, "link"]).contains("blue"));
    assert!(
        world.refused("vrf", "CHECK", &config, &[])["msg"]
            .as_str()
            .unwrap()
            .contains("blue")
    );
    for wrong in ["", "a/b", "sixteen-bytes-ok"] {
        assert_eq!(
            world.refused(
                "vrf",
                "ADD",
                &config_with(&config, json!({"vrfname": wrong})),
                &[]
            )["code"],
            7,
            "{wrong}"
        );
    }
}

fn bridge_vlans() {
    let world = World::new();
    let config = world.config(
        "1.0.0",
        json!({"vlan": 100, "vlanTrunk": [{"id": 101}, {"minID": 200, "maxID": 202}]}),
    );
    let result = world.ok("bridge", "ADD", &config);
    assert_eq!(result["interfaces"][3]["name"], "br0.100", "{result}");
    assert!(reaches(&world, "10.198.1.1"), "the gateway is in the VLAN");
    world.ok("bridge", "CHECK", &World::with_previous(&config, &result));
    // A container in another VLAN of the bridge cannot reach it.
    let other = World::new();
    let env = [("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &*other.netns())];
    let mut elsewhere = world.config("1.0.0", json!({"vlan": 300, "isDefaultGateway": false}));
    world.ok_with("bridge", "ADD", &elsewhere, &env);
    assert!(!ping_once(&other, "10.198.1.1") && !ping_once(&other, "10.198.1.2"));
    assert!(
        world
            .call("bridge", "DEL", &elsewhere, &env)
            .status
            .success()
    );
    elsewhere["vlan"] = 100.into();
    world.ok_with("bridge", "ADD", &elsewhere, &env);
    assert!(reaches(&other, "10.198.1.2"), "the same VLAN");
    assert!(
        world
            .call("bridge", "DEL", &elsewhere, &env)
            .status
            .success()
    );
    world.ok("bridge", "DEL", &config);
    // A bridge without VLAN filtering is not changed.
    ip(&["-n", &world.host, "link", "add", "plain0", "type", "bridge"]);
    let error = world.refused(
        "bridge",
        "ADD",
        &world.config("1.0.0", json!({"vlan": 5, "bridge": "plain0"})),
        &[],
    );
    assert!(
        error["msg"].as_str().unwrap().contains("vlan_filtering 1"),
        "{error}"
    );
}

#[test]
fn packets_with_another_source_mac_are_dropped() {
    let world = World::new();
    let config = world.config("1.0.0", json!({"macspoofchk": true}));
    let result = world.ok("bridge", "ADD", &config);
    assert!(reaches(&world, "10.198.1.1"));
    world.ok("bridge", "CHECK", &World::with_previous(&config, &result));
    let change = "link set eth0 address c2:66:66:66:66:66".split(' ');
    let inside = ["-n", &world.container].into_iter();
    ip(&inside.chain(change).collect::<Vec<_>>());
    assert!(
        !ping_once(&world, "10.198.1.1"),
        "packets from another MAC address pass: {}",
        world.ruleset()
    );
    assert!(
        world
            .call("bridge", "DEL", &config, &[("CNI_NETNS", "")])
            .status
            .success()
    );
    assert!(
        !world.ruleset().contains("cni-br-iface"),
        "{}",
        world.ruleset()
    );
}
