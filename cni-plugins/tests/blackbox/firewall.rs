//! `firewall` chained after a bridge.

use std::process::Command;

use serde_json::{Value, json};

use super::chained::bridged;
use super::world::{World, comes_true};

/// Whether `from` can reach `to`. Retries, because the first packets may be lost.
pub fn reaches(from: &str, to: &str) -> bool {
    comes_true(|| ping_once(from, to))
}

/// Whether a single ping from `from` to `to` succeeds.
pub fn ping_once(from: &str, to: &str) -> bool {
    let output = Command::new("ip")
        .args(["netns", "exec", from, "busybox", "ping", "-c1", "-W1", to])
        .output()
        .unwrap();
    output.status.success()
}

#[test]
fn the_firewall_accepts_packets_that_the_host_would_drop() {
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let (world, config, result) = bridged(version, json!({}));
        // A peer beyond the host.
        let far = World::new();
        let far_config = {
            let mut c = far.config(version, json!({"bridge": "br9"}));
            c["ipam"]["subnet"] = "10.198.9.0/24".into();
            c
        };
        let env = [("CNI_CONTAINERID", "far"), ("CNI_NETNS", &*far.netns())];
        world.ok_with("bridge", "ADD", &far_config, &env);
        assert!(reaches(&world.container, "10.198.9.2"));
        world.on_host(&["iptables", "-P", "FORWARD", "DROP"]);
        assert!(
            !ping_once(&world.container, "10.198.9.2"),
            "the host drops it"
        );
        let chained = World::chained(version, "firewall", &result, json!({"backend": "iptables"}));
        let passed = world.ok("firewall", "ADD", &chained);
        assert_eq!(passed["ips"], result["ips"]);
        assert!(
            reaches(&world.container, "10.198.9.2"),
            "{}",
            world.on_host(&["iptables", "-S"])
        );
        assert!(
            !ping_once(&far.container, "10.198.1.2"),
            "only replies are accepted from outside"
        );
        // iptables can read the rules.
        let rules = world.on_host(&["iptables", "-S"]);
        for expected in [
            "-A FORWARD -m comment --comment \"CNI firewall plugin rules\" -j CNI-FORWARD",
            "-A CNI-FORWARD -m comment --comment \"CNI firewall plugin admin overrides\" -j CNI-ADMIN",
            "-A CNI-FORWARD -d 10.198.1.2/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-A CNI-FORWARD -s 10.198.1.2/32 -j ACCEPT",
        ] {
            assert!(rules.contains(expected), "{expected}: {rules}");
        }
        // Rules of the administrator come first.
        world.on_host(&[
            "iptables",
            "-A",
            "CNI-ADMIN",
            "-s",
            "10.198.1.2",
            "-j",
            "DROP",
        ]);
        assert!(!ping_once(&world.container, "10.198.9.2"));
        world.on_host(&["iptables", "-F", "CNI-ADMIN"]);
        world.ok("firewall", "ADD", &chained);
        assert_eq!(
            world.on_host(&["iptables", "-S"]),
            rules,
            "a repeated ADD adds no rules"
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
        // DEL without prevResult also finds its rules.
        let mut bare = chained.clone();
        bare.as_object_mut().unwrap().remove("prevResult");
        world.ok("firewall", "DEL", &bare);
        assert!(!world.on_host(&["iptables", "-S"]).contains("10.198.1.2"));
        // Rules of the reference, which have no owner, are removed by address.
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
fn bridges_are_isolated_from_each_other() {
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
    assert!(reaches(&far.container, "10.198.1.2"));
    world.ok("firewall", "ADD", &policy(&result, "same-bridge"));
    world.ok_with("firewall", "ADD", &policy(&far_result, "same-bridge"), &env);
    assert!(
        !ping_once(&far.container, "10.198.1.2"),
        "{}",
        world.on_host(&["iptables", "-S"])
    );
    assert!(!ping_once(&world.container, "10.198.9.2"));
    assert!(
        reaches(&near.container, "10.198.1.2"),
        "containers of one bridge reach each other"
    );
    let rules = world.on_host(&["iptables", "-S"]);
    world.ok("firewall", "ADD", &policy(&result, "same-bridge"));
    assert_eq!(
        world.on_host(&["iptables", "-S"]),
        rules,
        "a repeated ADD adds no rules"
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
fn concurrent_adds_create_no_rule_twice() {
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
fn del_needs_no_valid_configuration() {
    let (world, _, result) = bridged("1.0.0", json!({}));
    for wrong in [
        json!({"backend": "nonsense"}),
        json!({"backend": "iptables", "ingressPolicy": "nonsense"}),
    ] {
        let right = World::chained("1.0.0", "firewall", &result, json!({"backend": "iptables"}));
        world.ok("firewall", "ADD", &right);
        assert!(world.ruleset().contains("10.198.1.2"));
        let wrong = World::chained("1.0.0", "firewall", &result, wrong);
        assert_eq!(world.refused("firewall", "ADD", &wrong, &[])["code"], 7);
        world.ok("firewall", "DEL", &wrong);
        let rules = world.ruleset();
        assert!(!rules.contains("10.198.1.2"), "{rules}");
    }
    let nameless = World::chained("1.0.0", "vrf", &result, json!({"vrfname": ""}));
    assert_eq!(world.refused("vrf", "ADD", &nameless, &[])["code"], 7);
    world.ok("vrf", "DEL", &nameless);
}
