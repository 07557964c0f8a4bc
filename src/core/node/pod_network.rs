//! The CNI configuration of a joined node follows the Node's pod range: which range the configuration gets, and when it may change.
//! Pure. As kindnet does for its nodes, the configuration is composed of a template and the range (`cmd/kindnetd/cni.go`).
//!
//! A range changes if the Node was deleted and created again. Pods that run keep their addresses, and their leases keep others from
//! them, so the configuration changes only while no address of the network is reserved.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::routes::pod_ranges;

/// Where a configuration has its range.
const SUBNET: &str = "/plugins/0/ipam/ranges/0/0/subnet";

/// What the decision depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The range in the configuration; `None` without a configuration.
    pub configured: Option<Ipv4Net>,
    /// The addresses that are reserved for pods.
    pub leases: Vec<IpAddr>,
    /// The addresses of the network's bridge.
    pub gateways: Vec<IpNet>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The network has the Node's range, or the Node has none yet.
    Settled,
    /// Write the configuration with this range.
    Write(Ipv4Net),
    /// Remove these addresses from the bridge: they belong to an earlier range, which another node may have now.
    RemoveGateways(Vec<IpNet>),
    /// Pods have addresses of another range, and would lose their gateway.
    Blocked {
        /// The Node's range.
        wanted: Ipv4Net,
        /// One of the addresses.
        address: IpAddr,
        /// The number of reserved addresses.
        leases: usize,
    },
}

/// The IPv4 range of a Node's pods; `None` until the control plane has assigned one.
#[must_use]
pub fn ipv4_range(node: &Node) -> Option<Ipv4Net> {
    let ranges = pod_ranges(node).into_iter();
    ranges
        .filter_map(|range| match range {
            IpNet::V4(range) => Some(range),
            IpNet::V6(_) => None,
        })
        .next()
}

/// Decides the next step for the network of a node with the range `wanted`.
#[must_use]
pub fn next_step(wanted: Option<Ipv4Net>, facts: &Facts) -> Step {
    let Some(wanted) = wanted else {
        return Step::Settled;
    };
    let mut leases = facts.leases.iter();
    let address = match facts.configured == Some(wanted) {
        true => leases.find(|address| !IpNet::V4(wanted).contains(*address)),
        false => leases.next(),
    };
    let blocked = address.map(|address| Step::Blocked {
        wanted,
        address: *address,
        leases: facts.leases.len(),
    });
    match (facts.configured, blocked) {
        // Without a configuration, the runtime cannot even stop pods.
        (None, _) => Step::Write(wanted),
        (_, Some(blocked)) => blocked,
        (Some(configured), None) if configured != wanted => Step::Write(wanted),
        (Some(_), None) => {
            let is_earlier = |gateway: &&IpNet| match gateway {
                IpNet::V4(gateway) => gateway.trunc() != wanted,
                IpNet::V6(_) => false,
            };
            let earlier: Vec<IpNet> = facts.gateways.iter().filter(is_earlier).copied().collect();
            match earlier.is_empty() {
                true => Step::Settled,
                false => Step::RemoveGateways(earlier),
            }
        }
    }
}

/// The configuration of a template for a range. Returns `None` if the template's first plugin has no IPAM.
#[must_use]
pub fn compose(template: &Value, range: Ipv4Net) -> Option<Value> {
    let mut configuration = template.clone();
    let ipam = configuration.pointer_mut("/plugins/0/ipam")?;
    let fields = ipam.as_object_mut()?;
    fields.insert("ranges".into(), json!([[{"subnet": range}]]));
    Some(configuration)
}

/// The range of a configuration.
#[must_use]
pub fn range_of(configuration: &Value) -> Option<Ipv4Net> {
    configuration.pointer(SUBNET)?.as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Ipv4Net {
        text.parse().expect("a range")
    }

    fn facts(configured: &str, leases: &[&str], gateways: &[&str]) -> Facts {
        Facts {
            configured: configured.parse().ok(),
            leases: leases
                .iter()
                .map(|a| a.parse().expect("an address"))
                .collect(),
            gateways: gateways
                .iter()
                .map(|a| a.parse().expect("an address"))
                .collect(),
        }
    }

    #[test]
    fn the_configuration_changes_while_no_address_is_reserved() {
        let (old, new) = ("10.244.1.0/24", "10.244.3.0/24");
        let blocked = |address: &str, leases| Step::Blocked {
            wanted: net(new),
            address: address.parse().expect("an address"),
            leases,
        };
        let gateway = |text: &str| Step::RemoveGateways(vec![text.parse().expect("an address")]);
        let cases = [
            (
                "the first range",
                facts("", &[], &[]),
                Step::Write(net(new)),
            ),
            (
                "the same range",
                facts(new, &["10.244.3.2"], &["10.244.3.1/24", "fd00::1/64"]),
                Step::Settled,
            ),
            (
                "another one",
                facts(old, &[], &["10.244.1.1/24"]),
                Step::Write(net(new)),
            ),
            (
                "pods run",
                facts(old, &["10.244.1.2", "10.244.1.3"], &[]),
                blocked("10.244.1.2", 2),
            ),
            (
                "a lost configuration",
                facts("", &["10.244.1.2"], &[]),
                Step::Write(net(new)),
            ),
            (
                "a pod that started meanwhile",
                facts(new, &["10.244.3.2", "10.244.1.2"], &["10.244.1.1/24"]),
                blocked("10.244.1.2", 2),
            ),
            (
                "the bridge of the earlier range",
                facts(new, &[], &["10.244.1.1/24", "fd00::1/64"]),
                gateway("10.244.1.1/24"),
            ),
            (
                "a range with another length",
                facts("10.244.3.0/25", &["10.244.3.2"], &[]),
                blocked("10.244.3.2", 1),
            ),
        ];
        for (what, facts, expected) in cases {
            assert_eq!(next_step(Some(net(new)), &facts), expected, "{what}");
            assert_eq!(
                next_step(None, &facts),
                Step::Settled,
                "{what}, without a range"
            );
        }
    }

    #[test]
    fn steps_lead_to_the_range_of_the_node() {
        let (old, new) = (net("10.244.1.0/24"), net("10.244.3.0/24"));
        let mut facts = facts("10.244.1.0/24", &["10.244.1.2"], &["10.244.1.1/24"]);
        assert!(matches!(next_step(Some(new), &facts), Step::Blocked { .. }));
        assert_eq!(facts.configured, Some(old));
        facts.leases.clear();
        for _ in 0..2 {
            match next_step(Some(new), &facts) {
                Step::Write(range) => facts.configured = Some(range),
                Step::RemoveGateways(gone) => facts.gateways.retain(|g| !gone.contains(g)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(next_step(Some(new), &facts), Step::Settled);
        assert!(facts.configured == Some(new) && facts.gateways.is_empty());
    }

    #[test]
    fn a_template_gets_the_range() {
        let template = json!({"name": "n", "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}, {"type": "portmap"}]});
        let range = net("10.244.1.0/24");
        let configuration = compose(&template, range).expect("a configuration");
        assert_eq!(range_of(&configuration), Some(range));
        let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}]]});
        assert_eq!(configuration["plugins"][0]["ipam"], ipam);
        assert_eq!(configuration["plugins"][1], template["plugins"][1]);
        assert_eq!(range_of(&template), None);
        for broken in [json!({}), json!({"plugins": [{"ipam": 7}]})] {
            assert_eq!(compose(&broken, range), None, "{broken}");
        }
    }

    #[test]
    fn the_ipv4_range_of_a_node_is_used() {
        let of = |spec: Value| {
            let node = json!({"metadata": {"name": "n"}, "spec": spec});
            ipv4_range(&serde_json::from_value(node).expect("a Node"))
        };
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({"podCIDRs": ["fd00::/64"]})), None);
        let both = json!({"podCIDRs": ["fd00::/64", "10.244.3.0/24"]});
        assert_eq!(of(both), Some(net("10.244.3.0/24")));
    }
}
