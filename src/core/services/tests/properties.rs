//! Random sequences of changes lead to the same tables as a planner that sees only their result.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// A change of a service, or of the node's zone.
#[derive(Debug, Clone)]
enum Step {
    Set(usize, Box<Service>, Vec<Arc<EndpointSlice>>),
    Delete(usize),
    Zone(Option<&'static str>),
    Commit,
}

fn ports() -> impl Strategy<Value = Json> {
    let port = (0..3_u16, 0..3_u16, any::<bool>()).prop_map(|(number, node_port, is_udp)| {
        let protocol = if is_udp { "UDP" } else { "TCP" };
        // Few numbers, so that services want the same ones.
        let node_port = if node_port == 0 { 0 } else { 30_000 + node_port };
        json!({"name": format!("p{number}"), "port": 80 + number, "protocol": protocol, "nodePort": node_port})
    });
    vec(port, 0..4).prop_map(Json::Array)
}

fn a_service() -> impl Strategy<Value = Service> {
    let policies = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let kinds = prop_oneof![
        Just("ClusterIP"),
        Just("NodePort"),
        Just("LoadBalancer"),
        Just("ExternalName")
    ];
    let addresses = (1..4_u8, vec(1..3_u8, 0..3), any::<bool>());
    (ports(), policies, kinds, addresses, 0..3_u8).prop_map(
        |(ports, (internal, external, affinity, ranges), kind, (address, externals, dual), day)| {
            let policy = |is_local| if is_local { "Local" } else { "Cluster" };
            let mut cluster = vec![format!("10.96.0.{address}")];
            cluster.extend(dual.then(|| format!("fd96::{address}")));
            let spec = json!({
                "type": kind, "ports": ports, "clusterIP": cluster[0], "clusterIPs": cluster,
                "externalIPs": externals.iter().map(|n| format!("198.51.100.{n}")).collect::<Vec<_>>(),
                "internalTrafficPolicy": policy(internal), "externalTrafficPolicy": policy(external),
                "sessionAffinity": if affinity { "ClientIP" } else { "None" },
                "loadBalancerSourceRanges": if ranges { json!(["10.0.0.0/8"]) } else { Json::Null },
            });
            service_with("any", spec, json!({
                "metadata": {"creationTimestamp": format!("2026-01-0{}T00:00:00Z", day + 1)},
                "status": {"loadBalancer": {"ingress": [{"ip": format!("203.0.113.{day}")}]}},
            }))
        },
    )
}

fn slices() -> impl Strategy<Value = Vec<Arc<EndpointSlice>>> {
    let one = (1..5_u8, 0..3_u8, any::<bool>(), any::<bool>(), 0..3_u8);
    let one_slice = (vec(one, 0..6), any::<bool>()).prop_map(|(endpoints, is_v6)| {
        let endpoints: Vec<Json> = endpoints.into_iter().map(|(last, node, ready, serving, zone)| {
            let address = if is_v6 { format!("fd44::{last}") } else { format!("10.244.0.{last}") };
            let node = ["here", "there", "elsewhere"][usize::from(node)];
            let zones = match zone { 0 => json!([]), 1 => json!([{"name": "a"}]), _ => json!([{"name": "b"}]) };
            json!({"addresses": [address], "nodeName": node, "hints": {"forZones": zones},
                "conditions": {"ready": ready, "serving": serving || ready, "terminating": !ready}})
        }).collect();
        let ports: Vec<Json> = (0..3).flat_map(|n| ["TCP", "UDP"].map(|protocol| json!({"name": format!("p{n}"), "port": 8080 + n, "protocol": protocol}))).collect();
        (ports, endpoints)
    });
    vec(one_slice, 0..3).prop_map(|all| {
        let slices = all.into_iter().enumerate();
        slices
            .map(|(n, (ports, endpoints))| {
                slice_with(&format!("s{n}"), Json::Array(ports), Json::Array(endpoints))
            })
            .collect()
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..4_usize, a_service(), slices()).prop_map(|(n, service, slices)| Step::Set(n, Box::new(service), slices)),
        2 => (0..4_usize).prop_map(Step::Delete),
        1 => prop_oneof![Just(None), Just(Some("a")), Just(Some("b"))].prop_map(Step::Zone),
        3 => Just(Step::Commit),
    ];
    vec(step, 1..30)
}

/// The tables that a planner fills from empty ones.
fn filled(planner: &Planner) -> Tables {
    let of_family = |family| {
        let mut operations = vec![];
        planner.for_each_part(family, |part| operations.extend(part));
        let mut kernel = Kernel::default();
        kernel.apply(operations);
        (family, kernel)
    };
    Family::ALL.into_iter().map(of_family).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_changes_lead_to_the_tables_of_a_fresh_start(steps in steps()) {
        let (mut planner, mut tables) = (planner(), Tables::new());
        let mut last: BTreeMap<usize, (Service, Vec<Arc<EndpointSlice>>)> = BTreeMap::new();
        let mut zone = node().zone;
        for step in steps {
            match step {
                Step::Set(n, service, slices) => {
                    planner.set_service("default", &format!("s{n}"), Some(&service), &slices);
                    last.insert(n, (*service, slices));
                }
                Step::Delete(n) => {
                    planner.set_service("default", &format!("s{n}"), None, &[]);
                    last.remove(&n);
                }
                Step::Zone(name) => {
                    zone = name.map(str::to_owned);
                    planner.set_node(NodeFacts { zone: zone.clone(), ..node() });
                }
                Step::Commit => {
                    apply(&mut planner, &mut tables);
                }
            }
        }
        apply(&mut planner, &mut tables);
        // What the planner would write into empty tables is what the changes have led to.
        for (family, kernel) in filled(&planner) {
            prop_assert_eq!(&kernel, &tables[&family]);
        }
        let mut fresh = super::planner();
        fresh.set_node(NodeFacts { zone, ..node() });
        for (n, (service, slices)) in last.iter().rev() {
            fresh.set_service("default", &format!("s{n}"), Some(service), slices);
        }
        take_changes(&mut fresh);
        for (family, kernel) in filled(&fresh) {
            prop_assert_eq!(kernel.shown(), tables[&family].shown());
        }
    }

    #[test]
    fn places_change_only_where_they_must(current in vec(0..30_u8, 0..20), wanted in vec(0..30_u8, 0..20)) {
        let target = |n: u8| Target { address: [10, 0, 0, n].into(), port: 80 };
        let sorted = |all: Vec<u8>| -> Vec<Target> {
            let set: std::collections::BTreeSet<u8> = all.into_iter().collect();
            set.into_iter().map(target).collect()
        };
        let mut current = sorted(current);
        current.reverse();
        let wanted = sorted(wanted);
        let places = super::super::diff::assign(&current, wanted.clone());
        let mut again = places.clone();
        again.sort();
        prop_assert_eq!(&again, &wanted);
        for (at, target) in current.iter().enumerate().filter(|(at, _)| *at < wanted.len()) {
            prop_assert!(!wanted.contains(target) || places[at] == *target);
        }
    }
}
