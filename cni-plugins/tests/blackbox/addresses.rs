//! `host-local` and `static`.

use serde_json::{Value, json};

use super::world::{World, ip, versions};

#[test]
fn host_local_allocates_requested_addresses_and_refuses_unavailable_ones() {
    let world = World::new();
    let config = world.config("1.0.0", json!({}));
    let asked = world.call(
        "host-local",
        "ADD",
        &config,
        &[("CNI_ARGS", "IgnoreUnknown=1;IP=10.198.1.77")],
    );
    let result: Value = serde_json::from_slice(&asked.stdout).unwrap();
    assert_eq!(result["ips"][0]["address"], "10.198.1.77/24", "{result}");
    let cases = [
        ("c2", "IP=10.198.1.77", "not available"),
        ("c3", "IP=10.198.1.1", "gateway"),
        (
            "c4",
            "IP=192.168.0.1",
            "failed to allocate all requested IPs",
        ),
        ("c1", "", "duplicate allocation"),
        ("c5", "X=1", "unknown args"),
    ];
    for (container, args, expected) in cases {
        let refusal = world.refused(
            "host-local",
            "ADD",
            &config,
            &[("CNI_CONTAINERID", container), ("CNI_ARGS", args)],
        );
        assert!(
            refusal["msg"].as_str().unwrap().contains(expected),
            "{args}: {refusal}"
        );
    }
    assert_eq!(world.taken(), ["10.198.1.77"]);
}

#[test]
fn a_relative_data_directory_is_refused() {
    let world = World::new();
    let mut config = world.config("1.0.0", json!({}));
    config["ipam"]["dataDir"] = json!("../networks");
    ip(&[
        "-n",
        &world.container,
        "link",
        "add",
        "eth0",
        "type",
        "veth",
    ]);
    let tuning = json!({"cniVersion": "1.0.0", "name": "net", "type": "tuning", "mtu": 1400, "dataDir": "tuning"});
    let tuning = World::with_previous(&tuning, &json!({"cniVersion": "1.0.0", "ips": []}));
    for (plugin, config, value) in [
        ("host-local", &config, "../networks"),
        ("tuning", &tuning, "tuning"),
    ] {
        let refusal = world.refused(plugin, "ADD", config, &[]);
        let message = refusal["msg"].as_str().unwrap();
        for part in ["dataDir", value, "absolute path"] {
            assert!(message.contains(part), "{part}: {refusal}");
        }
        assert_eq!(refusal["code"], 7, "{refusal}");
    }
}

#[test]
fn static_addresses_come_from_the_source_with_precedence() {
    let world = World::new();
    let config = |version: &str, ipam: Value, more: Value| {
        let mut config =
            json!({"cniVersion": version, "name": "net", "type": "static", "ipam": ipam});
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
                (
                    &result["ip4"]["ip"],
                    &result["ip4"]["gateway"],
                    &result["ip6"]["ip"]
                ),
                (
                    &json!("10.10.0.1/24"),
                    &json!("10.10.0.254"),
                    &json!("3ffe:ffff:0:1ff::1/64")
                )
            );
        } else {
            assert_eq!(
                (&result["ips"][0]["address"], &result["ips"][0]["gateway"]),
                (&json!("10.10.0.1/24"), &json!("10.10.0.254")),
                "{version}: {result}"
            );
            assert_eq!(
                (&result["routes"][1]["gw"], &result["dns"]["domain"]),
                (&json!("10.10.5.1"), &json!("example.test"))
            );
        }
        world.ok("static", "DEL", &config(version, own.clone(), json!({})));
    }
    // Precedence: the runtime's request, args, then CNI_ARGS combined with the configuration.
    let addresses = |config: &Value, env: &[(&str, &str)]| {
        let output = world.call("static", "ADD", config, env);
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(output.status.success(), "{result}");
        result["ips"]
            .as_array()
            .unwrap()
            .iter()
            .map(|ip| {
                format!(
                    "{} {}",
                    ip["address"].as_str().unwrap(),
                    ip["gateway"].as_str().unwrap_or("-")
                )
            })
            .collect::<Vec<_>>()
            .join(", ")
    };
    let one = json!({"type": "static", "addresses": [{"address": "10.10.0.1/24"}]});
    let args = [(
        "CNI_ARGS",
        "IP=10.11.0.1/24,10.10.0.2/24;GATEWAY=10.10.0.254",
    )];
    assert_eq!(
        addresses(&config("1.0.0", one.clone(), json!({})), &args),
        "10.10.0.1/24 10.10.0.254, 10.11.0.1/24 -, 10.10.0.2/24 10.10.0.254"
    );
    let asked = json!({"args": {"cni": {"ips": ["10.12.0.1/24"]}}});
    assert_eq!(
        addresses(&config("1.0.0", one.clone(), asked.clone()), &args),
        "10.12.0.1/24 -"
    );
    let mut requested = asked.clone();
    requested["runtimeConfig"] = json!({"ips": ["10.13.0.1/24"]});
    assert_eq!(
        addresses(&config("1.0.0", one.clone(), requested.clone()), &args),
        "10.13.0.1/24 -"
    );
    requested
        .as_object_mut()
        .unwrap()
        .insert("ipam".into(), Value::Null);
    assert_eq!(
        addresses(
            &requested
                .as_object()
                .map(|w| config("1.0.0", Value::Null, json!(w)))
                .unwrap(),
            &[]
        ),
        "10.13.0.1/24 -",
        "addresses in the runtimeConfig need no ipam"
    );
    // Errors name the invalid field.
    let two = json!({"type": "static", "addresses": [{"address": "10.10.0.1/24"}, {"address": "10.10.1.1/24"}]});
    for (config, env, expected) in [
        (
            config("0.2.0", two, json!({})),
            &[][..],
            "more than 1 address",
        ),
        (
            config("1.0.0", Value::Null, json!({})),
            &[],
            "missing 'ipam' key",
        ),
        (
            config(
                "1.0.0",
                json!({"addresses": [{"address": "10.10.0.1"}]}),
                json!({}),
            ),
            &[],
            "ipam.addresses",
        ),
        (
            config(
                "1.0.0",
                one.clone(),
                json!({"runtimeConfig": {"ips": ["10.10.0.256/24"]}}),
            ),
            &[],
            "runtimeConfig.ips",
        ),
        (
            config(
                "1.0.0",
                one.clone(),
                json!({"args": {"cni": {"ips": ["x"]}}}),
            ),
            &[],
            "args.cni.ips",
        ),
        (
            config("1.0.0", one.clone(), json!({})),
            &[("CNI_ARGS", "IP=10.10.0.1")],
            "CNI_ARGS IP",
        ),
        (
            config("1.0.0", one.clone(), json!({})),
            &[("CNI_ARGS", "GATEWAY=here")],
            "CNI_ARGS GATEWAY",
        ),
    ] {
        let error = world.refused("static", "ADD", &config, env);
        assert!(error["msg"].as_str().unwrap().contains(expected), "{error}");
    }
    // CHECK compares with prevResult; STATUS and GC have no state.
    let base = config("1.1.0", one, json!({}));
    let result = world.ok("static", "ADD", &base);
    world.ok("static", "CHECK", &World::with_previous(&base, &result));
    let mut other = result.clone();
    other["ips"][0]["address"] = "10.10.0.9/24".into();
    world.refused("static", "CHECK", &World::with_previous(&base, &other), &[]);
    world.ok("static", "STATUS", &base);
    world.ok("static", "GC", &base);

    // As the IPAM plugin of a network.
    let bridged = world.config("1.0.0", json!({"isDefaultGateway": false, "ipam": {"type": "static", "addresses": [{"address": "10.10.0.7/24", "gateway": "10.10.0.1"}], "routes": [{"dst": "0.0.0.0/0"}]}}));
    let result = world.ok("bridge", "ADD", &bridged);
    assert_eq!(result["ips"][0]["address"], "10.10.0.7/24", "{result}");
    assert!(ip(&["-n", &world.container, "addr", "show", "eth0"]).contains("10.10.0.7/24"));
    assert!(ip(&["-n", &world.container, "route"]).contains("default via 10.10.0.1"));
    world.ok("bridge", "DEL", &bridged);
}

#[test]
fn host_local_reads_old_records_and_accepts_requests_from_every_source() {
    let world = World::new();
    let resolv = world.data.path().join("resolv.conf");
    std::fs::write(&resolv, "# c\nnameserver 192.0.2.1\n nameserver 192.0.2.2\ndomain a.test\nsearch a b\noptions ndots:5\n").unwrap();
    let ranges = json!([[{"subnet": "10.198.1.0/28"}, {"subnet": "10.198.2.0/28"}], [{"subnet": "fd00:198:1::/64"}]]);
    let ipam = json!({"type": "host-local", "dataDir": world.data.path(), "ranges": ranges, "resolvConf": resolv, "routes": [{"dst": "0.0.0.0/0"}]});
    let config = world.config("1.0.0", json!({"ipam": ipam}));
    let addresses = |result: &Value| {
        result["ips"]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| i["address"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    // The first call succeeds, and the result contains all of resolv.conf.
    let result = world.ok("host-local", "ADD", &config);
    assert_eq!(addresses(&result), ["10.198.1.2/28", "fd00:198:1::2/64"]);
    assert_eq!(
        result["dns"],
        json!({"nameservers": ["192.0.2.1", "192.0.2.2"], "domain": "a.test", "search": ["a", "b"], "options": ["ndots:5"]})
    );
    assert!(result.get("interfaces").is_none());
    // A second interface of the container has separate addresses.
    let second = world.ok_with("host-local", "ADD", &config, &[("CNI_IFNAME", "eth1")]);
    assert_eq!(addresses(&second), ["10.198.1.3/28", "fd00:198:1::3/64"]);
    world.ok("host-local", "DEL", &config);
    assert_eq!(
        world.taken().len(),
        2,
        "the addresses of eth1 remain allocated"
    );
    assert!(
        world
            .call("host-local", "DEL", &config, &[("CNI_IFNAME", "eth1")])
            .status
            .success()
    );
    // Old records contain no interface; white space is ignored.
    std::fs::write(world.data.path().join("net/10.198.1.9"), " c1 \n").unwrap();
    std::fs::write(world.data.path().join("net/10.198.1.8"), "c1\r\neth0\n").unwrap();
    world.ok("host-local", "DEL", &config);
    assert_eq!(
        world.taken(),
        ["10.198.1.9"],
        "DEL releases the interface's own address first"
    );
    world.ok("host-local", "DEL", &config);
    assert!(world.taken().is_empty());
    // Requested addresses, with and without a prefix, one for each set.
    for request in [
        json!({"runtimeConfig": {"ips": ["10.198.2.5", "fd00:198:1::99/64"]}}),
        json!({"args": {"cni": {"ips": ["10.198.2.5/28", "fd00:198:1::99"]}}}),
    ] {
        let mut requested = config.clone();
        requested
            .as_object_mut()
            .unwrap()
            .extend(request.as_object().unwrap().clone());
        assert_eq!(
            addresses(&world.ok("host-local", "ADD", &requested)),
            ["10.198.2.5/28", "fd00:198:1::99/64"]
        );
        world.ok("host-local", "DEL", &requested);
    }
    // Ranges in runtimeConfig come first.
    let mut injected = config.clone();
    injected["runtimeConfig"] =
        json!({"ipRanges": [[{"Subnet": "10.198.3.0/28", "RangeStart": "10.198.3.7"}]]});
    assert_eq!(
        addresses(&world.ok("host-local", "ADD", &injected))[0],
        "10.198.3.7/28"
    );
    world.ok("host-local", "DEL", &injected);
    // DEL works with invalid ranges.
    world.ok("host-local", "ADD", &config);
    let mut broken = config.clone();
    broken["ipam"]["ranges"] = json!([[{"subnet": "10.198.1.1/28"}]]);
    assert_eq!(world.refused("host-local", "ADD", &broken, &[])["code"], 7);
    world.ok("host-local", "DEL", &broken);
    assert!(world.taken().is_empty());
    // Several addresses of a family need a version that supports them.
    let mut old = config.clone();
    old["cniVersion"] = "0.2.0".into();
    assert_eq!(addresses(&world.ok("host-local", "ADD", &config)).len(), 2);
    old["ipam"]["ranges"] = json!([[{"subnet": "10.198.1.0/28"}], [{"subnet": "10.198.2.0/28"}]]);
    assert!(
        world.refused("host-local", "ADD", &old, &[])["msg"]
            .as_str()
            .unwrap()
            .contains("more than 1 address")
    );
}

#[test]
fn an_audit_compares_addresses_with_the_interfaces() {
    let (world, other) = (World::new(), World::new());
    let config = world.config("1.0.0", json!({}));
    world.ok("bridge", "ADD", &config);
    world.ok_with(
        "bridge",
        "ADD",
        &config,
        &[("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &other.netns())],
    );
    let audit = |more: &[&str]| {
        let output = std::process::Command::new(super::world::plugins().join("host-local"))
            .arg("audit")
            .arg("--data-dir")
            .arg(world.data.path())
            .args(more)
            .output();
        let output = output.unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    let (well, table) = audit(&[]);
    assert!(well && table.matches("used").count() == 2, "{table}");
    // Another program has given one container the other's address.
    ip(&[
        "-n",
        &other.container,
        "addr",
        "add",
        "10.198.1.2/24",
        "dev",
        "eth0",
    ]);
    let (well, table) = audit(&["--mend"]);
    let row = |table: &str, address: &str| {
        table
            .lines()
            .find(|l| l.contains(address))
            .unwrap_or_default()
            .to_owned()
    };
    assert!(
        !well && row(&table, "10.198.1.2").contains("allocated twice: also on an interface of c2"),
        "{table}"
    );
    ip(&[
        "-n",
        &other.container,
        "addr",
        "del",
        "10.198.1.2/24",
        "dev",
        "eth0",
    ]);
    // And has removed that container's own address.
    ip(&["-n", &other.container, "addr", "flush", "dev", "eth0"]);
    let (well, table) = audit(&["--mend"]);
    let starting = row(&table, "10.198.1.3").contains("starting: its ADD may still be");
    assert!(
        well && starting,
        "the address was reserved a moment ago: {table}"
    );
    assert_eq!(world.taken().len(), 2);
    let (well, table) = audit(&["--mend", "--older-than=0"]);
    assert!(
        well && row(&table, "10.198.1.3")
            .contains("released: eth0 of its container does not have it"),
        "{table}"
    );
    assert_eq!(world.taken(), ["10.198.1.2"]);
    assert!(!audit(&["--older-than", "x"]).0);
    assert!(
        world
            .call(
                "bridge",
                "DEL",
                &config,
                &[("CNI_CONTAINERID", "c2"), ("CNI_NETNS", &other.netns())]
            )
            .status
            .success()
    );
}
