//! Upstream's network policy cases (`test/e2e/network/netpol/network_policy.go`) as data, and properties against a direct reading
//! of the specification.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const TCP: Protocol = Protocol::Tcp;
const UDP: Protocol = Protocol::Udp;
const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const PODS: [&str; 3] = ["a", "b", "c"];

fn address(namespace: usize, pod: usize) -> String {
    format!("10.0.{namespace}.{}", pod + 1)
}

/// The pods a, b and c in the namespaces x, y and z, all on this node, with the ports 80 and 81 of TCP and UDP.
fn world(policies: &[Value]) -> World {
    let mut world = World::default();
    for (n, namespace) in NAMESPACES.iter().enumerate() {
        world.set_namespace(
            namespace,
            Some([("ns".to_owned(), (*namespace).to_owned())].into()),
        );
        for (p, pod) in PODS.iter().enumerate() {
            let port = |number: u16, protocol: &str| json!({"containerPort": number, "protocol": protocol, "name": format!("serve-{number}-{}", protocol.to_lowercase())});
            let object: Pod = serde_json::from_value(json!({
                "metadata": {"namespace": namespace, "name": pod, "labels": {"pod": pod}},
                "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [port(80, "TCP"), port(81, "TCP"), port(80, "UDP"), port(81, "UDP")]}]},
                "status": {"phase": "Running", "podIPs": [{"ip": address(n, p)}]},
            })).unwrap();
            world.set_pod(namespace, pod, Some(PodFacts::of(&object, "n")));
        }
    }
    for (i, policy) in policies.iter().enumerate() {
        let object: NetworkPolicy =
            serde_json::from_value(json!({"spec": policy["spec"]})).unwrap();
        world.set_policy(
            policy["ns"].as_str().unwrap(),
            &format!("p{i}"),
            Some(Policy::of(&object)),
        );
    }
    world
}

/// Whether a chain lets a packet pass; `None` if it decides nothing.
fn passes(
    ruleset: &Ruleset,
    chain: &str,
    peer: IpAddr,
    protocol: Protocol,
    port: u16,
) -> Option<bool> {
    let matches_set = |name: &str| match &ruleset.sets[name] {
        Members::Pods(_, addresses) => addresses.contains(&peer),
        Members::Blocks(_, ranges) => ranges.iter().any(|(a, b)| (*a..=*b).contains(&peer)),
        Members::Ports(ports) => ports
            .iter()
            .any(|p| p.protocol == protocol && (p.first..=p.last).contains(&port)),
    };
    for rule in &ruleset.chains[chain].rules {
        match rule {
            Rule::Allow { peers, ports } => {
                if peers.as_ref().is_none_or(|(_, set)| matches_set(set))
                    && ports.as_ref().is_none_or(|set| matches_set(set))
                {
                    return Some(true);
                }
            }
            Rule::Jump(to) => {
                if let Some(decision) = passes(ruleset, to, peer, protocol, port) {
                    return Some(decision);
                }
            }
            Rule::Drop => return Some(false),
        }
    }
    None
}

/// Whether the first packet of a connection arrives.
fn arrives(ruleset: &Ruleset, from: IpAddr, to: IpAddr, protocol: Protocol, port: u16) -> bool {
    let check = |direction, pod: IpAddr, peer| match ruleset.pods.get(&(direction, pod)) {
        Some(chain) => passes(ruleset, chain, peer, protocol, port).expect("a pod's chain decides"),
        None => true,
    };
    // The packet filter lets a pod reach itself.
    from == to || check(Direction::Egress, from, to) && check(Direction::Ingress, to, from)
}

/// A row of expectations: the sources, the destinations (`*`, `x/*` or `x/a`), the port (0: any) and whether connections arrive.
type Expectation = (&'static str, &'static str, (Protocol, u16), bool);

fn is(pattern: &str, namespace: &str, pod: &str) -> bool {
    match pattern.split_once('/') {
        Some((n, p)) => (n == "*" || n == namespace) && (p == "*" || p == pod),
        None => true,
    }
}

/// Checks all pairs of pods and ports. Later rows win.
#[track_caller]
fn check(name: &str, policies: &[Value], expected: &[Expectation]) {
    let ruleset = world(policies).ruleset();
    for (from, to) in pairs() {
        for (protocol, port) in [(TCP, 80), (TCP, 81), (UDP, 80), (UDP, 81)] {
            let row = expected
                .iter()
                .rev()
                .find(|(sources, destinations, which, _)| {
                    is(sources, NAMESPACES[from.0], PODS[from.1])
                        && is(destinations, NAMESPACES[to.0], PODS[to.1])
                        && (which.1 == 0 || *which == (protocol, port))
                });
            let expected = from == to || row.is_none_or(|row| row.3);
            let address = |at: (usize, usize)| address(at.0, at.1).parse().unwrap();
            let found = arrives(&ruleset, address(from), address(to), protocol, port);
            let text = |at: (usize, usize)| format!("{}/{}", NAMESPACES[at.0], PODS[at.1]);
            assert_eq!(
                found,
                expected,
                "{name}: {} to {} {protocol:?}:{port}",
                text(from),
                text(to)
            );
        }
    }
}

fn pairs() -> impl Iterator<Item = ((usize, usize), (usize, usize))> {
    let all = || (0..3).flat_map(|n| (0..3).map(move |p| (n, p)));
    all().flat_map(move |from| all().map(move |to| (from, to)))
}

const ANY: (Protocol, u16) = (TCP, 0);

#[test]
fn policies_of_ingress_as_upstream() {
    let a = json!({"matchLabels": {"pod": "a"}});
    let y = json!({"matchLabels": {"ns": "y"}});
    check("no policy", &[], &[]);
    check(
        "deny all",
        &[json!({"ns": "x", "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}})],
        &[("*", "x/*", ANY, false)],
    );
    check(
        "without a spec",
        &[json!({"ns": "x", "spec": null})],
        &[("*", "x/*", ANY, false)],
    );
    check(
        "from pods of the namespace",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"podSelector": {"matchLabels": {"pod": "b"}}}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("x/b", "x/a", ANY, true)],
    );
    check(
        "from a namespace",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"namespaceSelector": y}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("y/*", "x/a", ANY, true)],
    );
    check(
        "from pods or namespaces",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"namespaceSelector": y}, {"podSelector": {"matchLabels": {"pod": "b"}}}]}]}}),
        ],
        &[
            ("*", "x/a", ANY, false),
            ("y/*", "x/a", ANY, true),
            ("x/b", "x/a", ANY, true),
        ],
    );
    check(
        "from pods and namespaces",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"namespaceSelector": y, "podSelector": {"matchLabels": {"pod": "b"}}}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("y/b", "x/a", ANY, true)],
    );
}

#[test]
fn policies_with_expressions_as_upstream() {
    let a = json!({"matchLabels": {"pod": "a"}});
    check(
        "expressions of namespaces and pods",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{
                "namespaceSelector": {"matchExpressions": [{"key": "ns", "operator": "NotIn", "values": ["x"]}]},
                "podSelector": {"matchExpressions": [{"key": "pod", "operator": "In", "values": ["b", "c"]}]},
            }]}]}}),
        ],
        &[
            ("*", "x/a", ANY, false),
            ("y/b", "x/a", ANY, true),
            ("y/c", "x/a", ANY, true),
            ("z/b", "x/a", ANY, true),
            ("z/c", "x/a", ANY, true),
        ],
    );
}

#[test]
fn policies_of_ports_as_upstream() {
    let a = json!({"matchLabels": {"pod": "a"}});
    let y = json!({"matchLabels": {"ns": "y"}});
    check(
        "a port",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"namespaceSelector": y}], "ports": [{"port": 81}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("y/*", "x/a", (TCP, 81), true)],
    );
    check(
        "stacked policies",
        &[
            json!({"ns": "x", "spec": {"podSelector": {}, "ingress": []}}),
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"ports": [{"port": 80, "protocol": "UDP"}]}]}}),
        ],
        &[("*", "x/*", ANY, false), ("*", "x/a", (UDP, 80), true)],
    );
    check(
        "allow all wins over deny",
        &[
            json!({"ns": "x", "spec": {"podSelector": {}, "ingress": []}}),
            json!({"ns": "x", "spec": {"podSelector": {}, "ingress": [{}]}}),
        ],
        &[],
    );
    check(
        "a named port, and one that no pod has",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"ports": [{"port": "serve-81-tcp"}, {"port": "nothing"}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("*", "x/a", (TCP, 81), true)],
    );
    check(
        "only a port that no pod has",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"ports": [{"port": "nothing"}, {"port": "serve-80-udp", "protocol": "TCP"}]}]}}),
        ],
        &[("*", "x/a", ANY, false)],
    );
    check(
        "a range of ports",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"ports": [{"port": 81, "endPort": 90}]}]}}),
        ],
        &[("*", "x/a", ANY, false), ("*", "x/a", (TCP, 81), true)],
    );
    check(
        "a protocol without a port",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"ports": [{"protocol": "UDP"}]}]}}),
        ],
        &[
            ("*", "x/a", ANY, false),
            ("*", "x/a", (UDP, 80), true),
            ("*", "x/a", (UDP, 81), true),
        ],
    );
}

#[test]
fn policies_of_egress_as_upstream() {
    let a = json!({"matchLabels": {"pod": "a"}});
    check(
        "deny all egress",
        &[json!({"ns": "x", "spec": {"podSelector": {}, "policyTypes": ["Egress"]}})],
        &[("x/*", "*", ANY, false)],
    );
    check(
        "both directions",
        &[json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Ingress", "Egress"]}})],
        &[("*", "x/a", ANY, false), ("x/a", "*", ANY, false)],
    );
    check(
        "to a named port of a namespace",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Egress"], "egress": [{"to": [{"namespaceSelector": {"matchLabels": {"ns": "y"}}}], "ports": [{"port": "serve-80-tcp"}]}]}}),
        ],
        &[("x/a", "*", ANY, false), ("x/a", "y/*", (TCP, 80), true)],
    );
    check(
        "to a named port anywhere, or UDP 81",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "serve-80-tcp"}, {"port": 81, "protocol": "UDP"}]}]}}),
        ],
        &[
            ("x/a", "*", ANY, false),
            ("x/a", "*", (TCP, 80), true),
            ("x/a", "*", (UDP, 81), true),
        ],
    );
    check(
        "egress without types restricts ingress, too",
        &[json!({"ns": "x", "spec": {"podSelector": a, "egress": [{}]}})],
        &[("*", "x/a", ANY, false)],
    );
}

#[test]
fn policies_of_blocks_as_upstream() {
    let a = json!({"matchLabels": {"pod": "a"}});
    let block = json!([{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.1.0/24"]}}]);
    check(
        "a block with an exception",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Egress"], "egress": [{"to": block}]}}),
        ],
        &[("x/a", "y/*", ANY, false)],
    );
    check(
        "the exception of one policy is allowed by another one",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Egress"], "egress": [{"to": block}]}}),
            json!({"ns": "x", "spec": {"podSelector": a, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "10.0.1.2/32"}}]}]}}),
        ],
        &[("x/a", "y/*", ANY, false), ("x/a", "y/b", ANY, true)],
    );
    check(
        "from a block, and a named port to a block allows nothing",
        &[
            json!({"ns": "x", "spec": {"podSelector": a, "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.2.1/32"}}]}]}}),
            json!({"ns": "x", "spec": {"podSelector": {"matchLabels": {"pod": "b"}}, "policyTypes": ["Egress"], "egress": [{"to": block, "ports": [{"port": "serve-80-tcp"}]}]}}),
        ],
        &[
            ("*", "x/a", ANY, false),
            ("z/a", "x/a", ANY, true),
            ("x/b", "*", ANY, false),
        ],
    );
}

#[test]
fn facts_of_pods() {
    let facts = |change: Value| {
        let mut pod = json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 80}, {"name": "big", "containerPort": 70_000}]}],
                "initContainers": [{"name": "s", "restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 1, "protocol": "UDP"}]},
                    {"name": "i", "ports": [{"name": "init", "containerPort": 2}]}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": "nonsense"}]},
        });
        json_merge(&mut pod, &change);
        PodFacts::of(&serde_json::from_value(pod).unwrap(), "n")
    };
    let running = facts(json!({}));
    assert_eq!(
        running.addresses,
        [
            "10.0.0.1".parse::<IpAddr>().unwrap(),
            "fd00::1".parse().unwrap()
        ]
    );
    assert!(running.is_local);
    assert_eq!(
        running.ports,
        BTreeMap::from([
            ("web".to_owned(), vec![(TCP, 80)]),
            ("side".to_owned(), vec![(UDP, 1)])
        ])
    );
    assert!(!facts(json!({"spec": {"nodeName": "m"}})).is_local);
    for hidden in [
        json!({"status": {"phase": "Succeeded"}}),
        json!({"status": {"phase": "Failed"}}),
        json!({"spec": {"hostNetwork": true}}),
    ] {
        assert!(facts(hidden.clone()).addresses.is_empty(), "{hidden}");
    }
}

fn json_merge(target: &mut Value, change: &Value) {
    match (target, change) {
        (Value::Object(target), Value::Object(change)) => {
            for (key, value) in change {
                json_merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (target, change) => *target = change.clone(),
    }
}

/// Applies operations as a packet filter would, which refuses dangling references.
fn apply(ruleset: &mut Ruleset, operations: &[Operation]) {
    for operation in operations {
        match operation.clone() {
            Operation::CreateSet(name, members) => {
                assert!(ruleset.sets.insert(name, members).is_none())
            }
            Operation::ChangeSet {
                name,
                now,
                removed,
                added,
            } => {
                let Some(Members::Pods(_, addresses)) = ruleset.sets.get_mut(&name) else {
                    panic!("no set {name}")
                };
                assert!(removed.iter().all(|a| addresses.remove(a)));
                assert!(added.iter().all(|a| addresses.insert(*a)));
                assert_eq!(ruleset.sets[&name], now);
            }
            Operation::CreateChain(name) => {
                let empty = Chain {
                    direction: Direction::Ingress,
                    policy: String::new(),
                    rules: vec![],
                };
                assert!(ruleset.chains.insert(name, empty).is_none());
            }
            Operation::SetRules(name, chain) => {
                for target in chain.rules.iter().flat_map(Rule::references) {
                    assert!(
                        ruleset.sets.contains_key(target) || ruleset.chains.contains_key(target),
                        "{target} is missing"
                    );
                }
                assert!(ruleset.chains.insert(name, chain).is_some());
            }
            Operation::Release(direction, address, chain) => {
                assert_eq!(ruleset.pods.remove(&(direction, address)), Some(chain))
            }
            Operation::Restrict(direction, address, chain) => {
                assert!(ruleset.chains.contains_key(&chain));
                assert_eq!(ruleset.pods.insert((direction, address), chain), None);
            }
            Operation::EmptyChain(name) => ruleset.chains.get_mut(&name).unwrap().rules.clear(),
            Operation::DeleteChain(name) => {
                assert!(ruleset.chains.remove(&name).unwrap().rules.is_empty());
                assert!(
                    !references(ruleset).contains(name.as_str())
                        && !ruleset.pods.values().any(|c| *c == name)
                );
            }
            Operation::DeleteSet(name) => {
                assert!(ruleset.sets.remove(&name).is_some());
                assert!(!references(ruleset).contains(name.as_str()));
            }
        }
    }
}

fn references(ruleset: &Ruleset) -> BTreeSet<&str> {
    ruleset
        .chains
        .values()
        .flat_map(|c| c.rules.iter().flat_map(Rule::references))
        .collect()
}

fn selectors() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({})),
        prop::sample::select(PODS.to_vec()).prop_map(|pod| json!({"matchLabels": {"pod": pod}})),
        prop::sample::select(PODS.to_vec()).prop_map(|pod| json!({"matchExpressions": [{"key": "pod", "operator": "NotIn", "values": [pod]}]})),
    ]
}

fn peers() -> impl Strategy<Value = Value> {
    let namespaces = prop_oneof![
        Just(json!({})),
        prop::sample::select(NAMESPACES.to_vec()).prop_map(|ns| json!({"matchLabels": {"ns": ns}})),
    ];
    prop_oneof![
        selectors().prop_map(|s| json!({"podSelector": s})),
        namespaces.clone().prop_map(|s| json!({"namespaceSelector": s})),
        (namespaces, selectors()).prop_map(|(n, p)| json!({"namespaceSelector": n, "podSelector": p})),
        (0_u8..4, 8_u8..=32).prop_map(|(third, length)| json!({"ipBlock": {"cidr": format!("10.0.{third}.1/{length}"), "except": [format!("10.0.{third}.2/32")]}})),
    ]
}

fn ports() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"port": 80})),
        Just(json!({"port": 80, "endPort": 90, "protocol": "UDP"})),
        Just(json!({"port": "serve-81-tcp"})),
        Just(json!({"port": "nothing"})),
        Just(json!({"protocol": "UDP"})),
    ]
}

fn policies() -> impl Strategy<Value = Value> {
    let rules = |field: &'static str| {
        let rule = (
            prop::collection::vec(peers(), 0..3),
            prop::collection::vec(ports(), 0..3),
        );
        prop::collection::vec(
            rule.prop_map(move |(peers, ports)| json!({field: peers, "ports": ports})),
            0..3,
        )
    };
    let types = prop::sample::select(vec![
        json!(["Ingress"]),
        json!(["Egress"]),
        json!(["Ingress", "Egress"]),
        json!(null),
    ]);
    (prop::sample::select(NAMESPACES.to_vec()), selectors(), rules("from"), rules("to"), types)
        .prop_map(|(ns, pods, ingress, egress, types)| json!({"ns": ns, "spec": {"podSelector": pods, "ingress": ingress, "egress": egress, "policyTypes": types}}))
}

/// The specification, read directly: whether a policy's rules allow a connection between two pods.
mod reading {
    use super::*;

    fn selects(selector: &Value, label: &str, value: &str) -> bool {
        let one = selector["matchLabels"][label]
            .as_str()
            .is_none_or(|v| v == value);
        let not = selector["matchExpressions"][0]["values"][0]
            .as_str()
            .is_none_or(|v| v != value);
        one && not
    }

    fn has_peer(peer: &Value, own: &str, (namespace, pod): (&str, &str), address: &str) -> bool {
        if let Some(cidr) = peer["ipBlock"]["cidr"].as_str() {
            let (base, length) = cidr.split_once('/').unwrap();
            let number = |a: &str| u32::from(a.parse::<std::net::Ipv4Addr>().unwrap());
            let except = peer["ipBlock"]["except"][0].as_str().unwrap();
            return (number(base) ^ number(address)) >> (32 - length.parse::<u32>().unwrap()) == 0
                && format!("{address}/32") != except;
        }
        let in_namespace = match &peer["namespaceSelector"] {
            Value::Null => namespace == own,
            selector => selects(selector, "ns", namespace),
        };
        in_namespace && (peer["podSelector"].is_null() || selects(&peer["podSelector"], "pod", pod))
    }

    fn has_port(entry: &Value, is_pod: bool, protocol: Protocol, port: u16) -> bool {
        let wanted = if entry["protocol"] == "UDP" { UDP } else { TCP };
        wanted == protocol
            && match &entry["port"] {
                Value::Null => true,
                Value::String(name) => is_pod && name == "serve-81-tcp" && port == 81,
                number => {
                    let first = number.as_u64().unwrap();
                    (first..=entry["endPort"].as_u64().unwrap_or(first)).contains(&u64::from(port))
                }
            }
    }

    /// Whether the policies let the pod `own` talk with `peer` in a direction.
    pub fn allows(
        policies: &[Value],
        direction: &str,
        own: (usize, usize),
        peer: (usize, usize),
        protocol: Protocol,
        port: u16,
    ) -> bool {
        let (namespace, pod) = (NAMESPACES[own.0], PODS[own.1]);
        let (rules, peers) = if direction == "Ingress" {
            ("ingress", "from")
        } else {
            ("egress", "to")
        };
        let restricts = |p: &&Value| {
            let spec = &p["spec"];
            let is_typed = match spec["policyTypes"].as_array() {
                Some(types) => types.iter().any(|t| t == direction),
                None => direction == "Ingress" || !spec["egress"].as_array().unwrap().is_empty(),
            };
            p["ns"] == namespace && is_typed && selects(&spec["podSelector"], "pod", pod)
        };
        let of_pod: Vec<&Value> = policies.iter().filter(restricts).collect();
        let address = address(peer.0, peer.1);
        let allowed = |rule: &Value| {
            let (all, ports) = (
                rule[peers].as_array().unwrap(),
                rule["ports"].as_array().unwrap(),
            );
            let by = |peer_of_rule: &Value| {
                let is_pod = direction == "Ingress" || peer_of_rule["ipBlock"].is_null();
                has_peer(
                    peer_of_rule,
                    namespace,
                    (NAMESPACES[peer.0], PODS[peer.1]),
                    &address,
                ) && (ports.is_empty() || ports.iter().any(|p| has_port(p, is_pod, protocol, port)))
            };
            all.iter().any(by)
                || all.is_empty()
                    && (ports.is_empty() || ports.iter().any(|p| has_port(p, true, protocol, port)))
        };
        of_pod.is_empty()
            || of_pod
                .iter()
                .any(|p| p["spec"][rules].as_array().unwrap().iter().any(allowed))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rulesets_decide_as_the_specification(policies in prop::collection::vec(policies(), 0..5)) {
        let ruleset = world(&policies).ruleset();
        let parse = |at: (usize, usize)| address(at.0, at.1).parse().unwrap();
        for (from, to) in pairs().filter(|(from, to)| from != to) {
            for (protocol, port) in [(TCP, 80), (TCP, 81), (UDP, 80), (UDP, 85)] {
                let expected = reading::allows(&policies, "Egress", from, to, protocol, port) && reading::allows(&policies, "Ingress", to, from, protocol, port);
                prop_assert_eq!(arrives(&ruleset, parse(from), parse(to), protocol, port), expected, "{:?} to {:?} {:?}:{}", from, to, protocol, port);
            }
        }
    }

    #[test]
    fn operations_lead_from_any_ruleset_to_any_other(
        before in prop::collection::vec(policies(), 0..4), after in prop::collection::vec(policies(), 0..4),
        gone in prop::collection::vec((0_usize..3, 0_usize..3), 0..4),
    ) {
        let current = world(&before).ruleset();
        let mut world = world(&after);
        for (n, p) in gone {
            world.set_pod(NAMESPACES[n], PODS[p], None);
        }
        let desired = world.ruleset();
        let mut now = current.clone();
        apply(&mut now, &diff(&current, &desired));
        prop_assert_eq!(&now, &desired);
        prop_assert_eq!(diff(&now, &desired), vec![]);
    }
}

#[test]
fn a_new_pod_changes_elements_only() {
    let allow = json!({"ns": "x", "spec": {"podSelector": {"matchLabels": {"pod": "a"}}, "ingress": [{"from": [{"namespaceSelector": {}}]}]}});
    let mut world = world(&[allow]);
    let before = world.ruleset();
    let pod = PodFacts {
        addresses: vec!["10.0.9.9".parse().unwrap()],
        ..PodFacts::default()
    };
    assert!(world.set_pod("y", "new", Some(pod.clone())));
    assert!(
        !world.set_pod("y", "new", Some(pod)),
        "an equal pod changes nothing"
    );
    let operations = diff(&before, &world.ruleset());
    assert!(
        matches!(&operations[..], [Operation::ChangeSet { removed, added, .. }] if removed.is_empty() && added.len() == 1),
        "{operations:?}"
    );
}
