//! Hints of services with `service.kubernetes.io/topology-mode: Auto` (KEP-2433): each zone gets endpoints in proportion to the
//! processors of its nodes. Pure.
//!
//! The rules are those of `staging/src/k8s.io/endpointslice/topologycache` (`topologycache.go`, `utils.go`). Upstream computes with
//! floating-point numbers; here, shares are integers in units of one millicore, so that results are exact and repeatable.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, ForZone};
use kube::ResourceExt as _;

use holdfast_core::quantity::Quantity;

use super::ZONE;

/// Nodes with one of these labels usually run no workloads.
const EXCLUDED: [&str; 2] = [
    "node-role.kubernetes.io/control-plane",
    "node-role.kubernetes.io/master",
];
/// The load of an endpoint may exceed the average by 20 % (`overloadThreshold`): the factor as a fraction.
const OVERLOAD: (u128, u128) = (12, 10);

/// The processors of each zone, in millicores. There are at least two zones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Capacities {
    zones: BTreeMap<String, u128>,
    total: u128,
}

/// The attributes of a node that hints depend on; `None` if the node does not count.
pub(super) fn observed(node: &Node) -> Option<(Option<&str>, i64)> {
    let is_excluded = EXCLUDED
        .iter()
        .any(|label| node.labels().contains_key(*label));
    let status = node.status.as_ref();
    let mut conditions = status
        .and_then(|s| s.conditions.as_ref())
        .into_iter()
        .flatten();
    let is_ready = conditions.any(|c| c.type_ == "Ready" && c.status == "True");
    if is_excluded || !is_ready {
        return None;
    }
    let allocatable = status.and_then(|s| s.allocatable.as_ref());
    let processors = allocatable.and_then(|a| a.get("cpu")?.0.parse::<Quantity>().ok());
    let zone = node.labels().get(ZONE).map(String::as_str);
    let zone = zone.filter(|zone| !zone.is_empty());
    Some((zone, processors.map_or(0, Quantity::milli)))
}

impl Capacities {
    /// The processors of the zones of all nodes; `None` if a node's zone or processors are not known, or there is only one zone.
    pub(super) fn of<'a>(nodes: impl Iterator<Item = &'a Node>) -> Option<Capacities> {
        let mut zones = BTreeMap::<String, u128>::new();
        for (zone, processors) in nodes.filter_map(observed) {
            let processors = u128::try_from(processors).ok().filter(|n| *n > 0)?;
            *zones.entry(zone?.to_owned()).or_default() += processors;
        }
        let total = zones.values().sum();
        (zones.len() > 1).then_some(Capacities { zones, total })
    }

    /// The desired number of endpoints of each zone, multiplied by the total of millicores; `None` if there are too few endpoints.
    fn targets(&self, endpoints: u128) -> Option<BTreeMap<&str, u128>> {
        let mut left = endpoints;
        let mut targets = BTreeMap::new();
        for (zone, processors) in &self.zones {
            let desired = processors * endpoints;
            let least = (desired * OVERLOAD.1).div_ceil(self.total * OVERLOAD.0);
            left = left.checked_sub(least)?;
            targets.insert(zone.as_str(), desired.max(least * self.total));
        }
        // Each zone needs at least one endpoint.
        let zones = u128::try_from(self.zones.len());
        zones
            .is_ok_and(|zones| zones <= endpoints)
            .then_some(targets)
    }
}

/// How far a zone is from its target, in units of 1 / `unit`, and how many endpoints it gave or received.
struct Difference {
    left: u128,
    moved: usize,
}

/// The largest difference; of equal ones, that of the first zone.
fn largest(zones: &mut BTreeMap<String, Difference>) -> Option<&mut Difference> {
    zones.values_mut().rev().max_by_key(|zone| zone.left)
}

/// How many endpoints each zone gives to others, and how many each zone receives. A target is the desired number of a zone's
/// endpoints in units of 1 / `unit` (`getGivingAndReceivingZones`).
fn balance(
    targets: &BTreeMap<&str, u128>,
    existing: &BTreeMap<String, u128>,
    unit: u128,
) -> [BTreeMap<String, usize>; 2] {
    let (mut too_many, mut too_few) = (BTreeMap::new(), BTreeMap::new());
    // Zones without processors keep no endpoint.
    let zones: BTreeSet<&str> = existing
        .keys()
        .map(String::as_str)
        .chain(targets.keys().copied())
        .collect();
    for zone in zones {
        let has = existing.get(zone).copied().unwrap_or_default() * unit;
        let target = targets.get(zone).copied().unwrap_or_default();
        let list = match has > target {
            true => &mut too_many,
            false => &mut too_few,
        };
        let left = has.abs_diff(target);
        list.insert(zone.to_owned(), Difference { left, moved: 0 });
    }
    while let (Some(giver), Some(receiver)) = (largest(&mut too_many), largest(&mut too_few)) {
        let is_small = giver.left < unit && receiver.left < unit;
        if is_small || giver.left * 2 < unit || receiver.left * 2 < unit {
            break;
        }
        for zone in [giver, receiver] {
            zone.moved += 1;
            // Less than a half more than it needs is the end of a zone's part.
            zone.left = zone.left.saturating_sub(unit);
        }
    }
    [too_many, too_few].map(|zones| {
        zones
            .into_iter()
            .map(|(name, zone)| (name, zone.moved))
            .collect()
    })
}

/// Sets the hints of the ready endpoints of a service and an address type. Sets none if an endpoint has no zone, or too few
/// endpoints exist for a fair distribution: then clients use all endpoints.
pub(super) fn set_hints(mut endpoints: Vec<&mut Endpoint>, capacities: &Capacities) {
    endpoints.retain(|e| e.conditions.as_ref().and_then(|c| c.ready) != Some(false));
    // Hints do not depend on the order of pods.
    endpoints.sort_by(|a, b| a.addresses.cmp(&b.addresses));
    let Ok(count) = u128::try_from(endpoints.len()) else {
        return;
    };
    let Some(targets) = capacities.targets(count) else {
        return;
    };
    let zones: Option<Vec<String>> = endpoints.iter().map(|e| e.zone.clone()).collect();
    let Some(zones) = zones else {
        return;
    };
    let mut existing = BTreeMap::<String, u128>::new();
    for zone in &zones {
        *existing.entry(zone.clone()).or_default() += 1;
    }
    let [mut giving, mut receiving] = balance(&targets, &existing, capacities.total);
    for (endpoint, own) in endpoints.into_iter().zip(zones) {
        let mut zone = own;
        if let Some(left) = giving.get_mut(&zone).filter(|left| **left > 0)
            && let Some((receiver, needs)) = receiving.iter_mut().find(|(_, needs)| **needs > 0)
        {
            (*left, *needs) = (*left - 1, *needs - 1);
            zone.clone_from(receiver);
        }
        endpoint.hints = Some(EndpointHints {
            for_nodes: None,
            for_zones: Some(vec![ForZone { name: zone }]),
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(zone: &str, processors: &str, change: Value) -> Node {
        let mut node = json!({"metadata": {"name": "n", "labels": {ZONE: zone}},
            "status": {"allocatable": {"cpu": processors}, "conditions": [{"type": "Ready", "status": "True"}]}});
        json_patch::merge(&mut node, &change);
        serde_json::from_value(node).expect("a Node")
    }

    fn capacities(zones: &[(&str, &str)]) -> Option<Capacities> {
        let nodes: Vec<Node> = zones.iter().map(|(z, p)| node(z, p, json!({}))).collect();
        Capacities::of(nodes.iter())
    }

    /// Endpoints in zones; a `-` before the zone is an endpoint that is not ready.
    fn endpoints(zones: &str) -> Vec<Endpoint> {
        let all = zones.split_whitespace().enumerate().map(|(number, zone)| {
            let ready = !zone.starts_with('-');
            let zone = zone.trim_start_matches('-');
            let endpoint = json!({"addresses": [format!("10.0.0.{}", 100 + number)], "zone": Some(zone).filter(|z| *z != "?"),
                "conditions": {"ready": ready}});
            serde_json::from_value(endpoint).expect("an endpoint")
        });
        all.collect()
    }

    fn hinted(zones: &str, capacities: &Capacities) -> String {
        let mut all = endpoints(zones);
        set_hints(all.iter_mut().collect(), capacities);
        let hints = all.iter().map(|e| match &e.hints {
            Some(hints) => hints.for_zones.as_ref().expect("zones")[0].name.clone(),
            None => "none".to_owned(),
        });
        hints.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn zones_get_endpoints_in_proportion_to_their_processors() {
        let even = [("a", "1"), ("b", "1")];
        let uneven = [("a", "1"), ("b", "2"), ("c", "3")];
        for (zones, given, expected) in [
            (&even[..], "a b", "a b"),
            (&even, "a a", "b a"),
            (&even, "a a a b", "b a a b"),
            (&even, "a b -b", "a b none"),
            // A difference of less than one endpoint is left alone.
            (&even, "a a a a b b b", "a a a a b b b"),
            // An endpoint in a zone without nodes serves a zone with some.
            (&even, "a z", "a b"),
            // The endpoint of a zone would have more than 1.2 times the average load, or a zone is not known.
            (&even, "a a b", "none none none"),
            (&even, "a", "none"),
            (&even, "a ?", "none none"),
            (&uneven, "a b c", "none none none"),
            (&uneven, "a a b b c c", "c a b b c c"),
            (&uneven, "a a a a a a", "b b c c c a"),
        ] {
            let capacities = capacities(zones).expect("zones");
            assert_eq!(hinted(given, &capacities), expected, "{given:?} {zones:?}");
        }
    }

    /// The rules of `SetNodes` of upstream.
    #[test]
    fn all_ready_nodes_must_have_a_zone_and_processors() {
        assert!(capacities(&[]).is_none());
        assert!(capacities(&[("a", "1"), ("a", "2")]).is_none(), "one zone");
        assert!(capacities(&[("a", "1"), ("", "2"), ("b", "1")]).is_none());
        assert!(capacities(&[("a", "1"), ("b", "0")]).is_none());
        let two = capacities(&[("a", "1"), ("b", "500m"), ("a", "1")]).expect("zones");
        let expected = BTreeMap::from([("a".to_owned(), 2000), ("b".to_owned(), 500)]);
        assert_eq!((two.zones, two.total), (expected, 2500));
        let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
        let control =
            json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
        for change in [unready, control] {
            let nodes = [
                node("a", "1", json!({})),
                node("b", "1", json!({})),
                node("", "0", change),
            ];
            assert!(
                Capacities::of(nodes.iter()).is_some(),
                "a node that does not count"
            );
        }
    }

    /// No zone has less than the overload threshold allows, and each endpoint keeps its zone if that is enough.
    #[test]
    fn distributions_are_fair_and_move_few_endpoints() {
        let capacities = capacities(&[("a", "2"), ("b", "3"), ("c", "4")]).expect("zones");
        for seed in 0_usize..200 {
            let count = 9 + seed % 40;
            let zones = (0..count).map(|i| ["a", "b", "c"][(seed * 7 + i * i + i * seed / 3) % 3]);
            let given: Vec<&str> = zones.collect();
            let hints = hinted(&given.join(" "), &capacities);
            let hints: Vec<&str> = hints.split(' ').collect();
            let Some(targets) = capacities.targets(count as u128) else {
                assert!(hints.iter().all(|h| *h == "none"), "{given:?}");
                continue;
            };
            for (zone, target) in targets {
                let has = hints.iter().filter(|h| **h == zone).count() as u128;
                let difference = (has * capacities.total).abs_diff(target);
                assert!(
                    difference < capacities.total,
                    "{zone} of {given:?}: {hints:?}"
                );
            }
        }
    }
}
