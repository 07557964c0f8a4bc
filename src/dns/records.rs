//! What the server knows of the cluster, in the smallest form that answers need. 5,000 services take about 2 MiB.
//!
//! Names from the API are kept in lower case, because comparisons ignore the case (Kubernetes DNS specification 1.1.0, 2.1).
//! Objects with names or addresses that DNS cannot express have no records.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};

use holdfast_core::network::Protocol;

use crate::wire::{MAX_LABEL, Name};

/// The protocol of a label of SRV names, such as `_tcp`.
pub(crate) fn protocol_of(label: &[u8]) -> Option<Protocol> {
    let name = label.strip_prefix(b"_")?;
    let mut all = Protocol::ALL.into_iter();
    all.find(|protocol| protocol.name().as_bytes() == name)
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Port {
    /// Empty if the port has no name.
    pub(crate) name: Box<str>,
    pub(crate) protocol: Protocol,
    pub(crate) number: u16,
}

/// Ready endpoints with the same ports.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Group {
    pub(crate) ports: Box<[Port]>,
    /// Sorted addresses of endpoints without a hostname.
    pub(crate) v4: Box<[Ipv4Addr]>,
    pub(crate) v6: Box<[Ipv6Addr]>,
    /// Sorted hostnames with their addresses.
    pub(crate) named: Box<[(Box<str>, IpAddr)]>,
}

/// Which addresses a service's name has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Target {
    Cluster(Box<[IpAddr]>),
    /// Those of the endpoints.
    Headless,
    /// The wire form of an external name.
    External(Box<[u8]>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Service {
    pub(crate) target: Target,
    /// Ports of the service, not of its endpoints.
    pub(crate) ports: Box<[Port]>,
    pub(crate) groups: Box<[Group]>,
}

impl Service {
    /// Reads a service with its slices. `None` if the service has no records: an external name that is an address, as in
    /// CoreDNS, or no specification.
    pub(crate) fn compile(service: &core::Service, slices: &[Arc<EndpointSlice>]) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        if spec.type_.as_deref() == Some("ExternalName") {
            let name = spec.external_name.as_deref()?;
            if name.is_empty() || name.parse::<IpAddr>().is_ok() {
                return None;
            }
            return Some(Service {
                target: Target::External(Name::parse(name)?.wire().into()),
                ports: Box::default(),
                groups: Box::default(),
            });
        }
        let single = spec.cluster_ip.as_slice();
        let addresses = match spec.cluster_ips.as_deref() {
            Some(all) if !all.is_empty() => all,
            _ => single,
        };
        let target = if addresses.iter().any(|a| a == "None") {
            Target::Headless
        } else {
            Target::Cluster(addresses.iter().filter_map(|a| a.parse().ok()).collect())
        };
        let ports = spec.ports.iter().flatten();
        let ports = ports.filter_map(|p| port(p.name.as_deref(), p.protocol.as_deref(), p.port));
        Some(Service {
            target,
            ports: ports.collect(),
            groups: groups(slices),
        })
    }

    /// The addresses with PTR records: the cluster's addresses, endpoints of headless services (specification 2.4.3), and
    /// endpoints with a hostname.
    fn reverse(&self) -> Vec<IpAddr> {
        let mut all = match &self.target {
            Target::Cluster(addresses) => addresses.to_vec(),
            _ => Vec::new(),
        };
        for group in &self.groups {
            if self.target == Target::Headless {
                all.extend(group.v4.iter().map(|ip| IpAddr::V4(*ip)));
                all.extend(group.v6.iter().map(|ip| IpAddr::V6(*ip)));
            }
            all.extend(group.named.iter().map(|(_, ip)| *ip));
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}

fn port(name: Option<&str>, protocol: Option<&str>, number: i32) -> Option<Port> {
    Some(Port {
        name: name.unwrap_or_default().to_ascii_lowercase().into(),
        protocol: Protocol::parse(protocol)?,
        number: u16::try_from(number).ok()?,
    })
}

/// The ready endpoints of all slices, grouped by ports. Slices of one service mostly have the same ports.
fn groups(slices: &[Arc<EndpointSlice>]) -> Box<[Group]> {
    struct Open {
        ports: Vec<Port>,
        v4: Vec<Ipv4Addr>,
        v6: Vec<Ipv6Addr>,
        named: Vec<(Box<str>, IpAddr)>,
    }
    let mut open: Vec<Open> = Vec::new();
    for slice in slices {
        let ports = slice.ports.iter().flatten();
        let mut ports: Vec<Port> = ports.filter_map(endpoint_port).collect();
        ports.sort();
        ports.dedup();
        let at = open.iter().position(|group| group.ports == ports);
        let at = at.unwrap_or_else(|| {
            open.push(Open {
                ports,
                v4: Vec::new(),
                v6: Vec::new(),
                named: Vec::new(),
            });
            open.len() - 1
        });
        let group = &mut open[at];
        for endpoint in slice.endpoints.iter().flatten().filter(|e| is_ready(e)) {
            let hostname = endpoint.hostname.as_deref().filter(|h| is_label(h));
            for address in endpoint.addresses.iter().filter_map(|a| a.parse().ok()) {
                match (hostname, address) {
                    (Some(host), ip) => group.named.push((host.to_ascii_lowercase().into(), ip)),
                    (None, IpAddr::V4(ip)) => group.v4.push(ip),
                    (None, IpAddr::V6(ip)) => group.v6.push(ip),
                }
            }
        }
    }
    let closed = open.into_iter().map(|mut group| {
        group.v4.sort_unstable();
        group.v4.dedup();
        group.v6.sort_unstable();
        group.v6.dedup();
        group.named.sort_unstable();
        group.named.dedup();
        Group {
            ports: group.ports.into(),
            v4: group.v4.into(),
            v6: group.v6.into(),
            named: group.named.into(),
        }
    });
    closed.collect()
}

fn endpoint_port(p: &EndpointPort) -> Option<Port> {
    port(p.name.as_deref(), p.protocol.as_deref(), p.port?)
}

/// An absent condition means ready. `publishNotReadyAddresses` needs no case: the slice controller then sets `ready`.
fn is_ready(endpoint: &Endpoint) -> bool {
    let conditions = endpoint.conditions.as_ref();
    conditions.and_then(|c| c.ready).unwrap_or(true)
}

fn is_label(text: &str) -> bool {
    (1..=MAX_LABEL).contains(&text.len()) && !text.contains('.')
}

/// What makes a namespace's name exist: the Namespace, or a service that arrived before the Namespace.
#[derive(Default)]
struct Namespace {
    exists: bool,
    services: u32,
}

/// All records of the cluster. The keys are labels in wire form and lower case.
pub(crate) struct Records {
    pub(crate) zone: Name,
    /// By name and namespace, so that a key is a part of a question's bytes.
    services: HashMap<Arc<[u8]>, Service>,
    namespaces: HashMap<Box<[u8]>, Namespace>,
    reverse: HashMap<IpAddr, Vec<Arc<[u8]>>>,
    /// The server's own addresses: `ns.dns.<zone>`.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether the caches have been filled, so that absence is known.
    pub(crate) synced: bool,
    /// The SOA's serial number: the number of changes.
    pub(crate) serial: u32,
}

impl Records {
    pub(crate) fn new(zone: Name) -> Records {
        Records {
            zone: zone.lowercase(),
            services: HashMap::new(),
            namespaces: HashMap::new(),
            reverse: HashMap::new(),
            addresses: Vec::new(),
            synced: false,
            serial: 1,
        }
    }

    /// Replaces a service; `None` deletes it. A name that is not a label is ignored.
    pub(crate) fn set_service(&mut self, namespace: &str, name: &str, service: Option<Service>) {
        let (Some(mut key), Some(space)) = (wire_label(name), wire_label(namespace)) else {
            return;
        };
        key.extend_from_slice(&space);
        let old = self.services.remove_entry(key.as_slice());
        if old.is_none() && service.is_none() {
            return;
        }
        self.serial = self.serial.wrapping_add(1);
        let presence = self.namespaces.entry(space.as_slice().into()).or_default();
        match (&old, &service) {
            (None, Some(_)) => presence.services += 1,
            (Some(_), None) => presence.services -= 1,
            _ => {}
        }
        self.drop_unused_namespace(&space);
        let key: Arc<[u8]> = match old {
            Some((key, service)) => {
                self.forget_addresses(&key, &service);
                key
            }
            None => key.into(),
        };
        let Some(service) = service else { return };
        for address in service.reverse() {
            self.reverse
                .entry(address)
                .or_insert_with(|| Vec::with_capacity(1))
                .push(key.clone());
        }
        self.services.insert(key, service);
    }

    fn forget_addresses(&mut self, key: &Arc<[u8]>, service: &Service) {
        for address in service.reverse() {
            if let Some(owners) = self.reverse.get_mut(&address) {
                owners.retain(|owner| owner != key);
                if owners.is_empty() {
                    self.reverse.remove(&address);
                }
            }
        }
    }

    pub(crate) fn set_namespace(&mut self, name: &str, exists: bool) {
        let Some(space) = wire_label(name) else {
            return;
        };
        self.namespaces
            .entry(space.as_slice().into())
            .or_default()
            .exists = exists;
        self.drop_unused_namespace(&space);
    }

    fn drop_unused_namespace(&mut self, space: &[u8]) {
        if self
            .namespaces
            .get(space)
            .is_some_and(|n| !n.exists && n.services == 0)
        {
            self.namespaces.remove(space);
        }
    }

    /// Whether a namespace's name exists. `label` is in wire form.
    pub(crate) fn has_namespace(&self, label: &[u8]) -> bool {
        self.namespaces.contains_key(label)
    }

    /// The service of the labels of its name and namespace, in wire form.
    pub(crate) fn service(&self, key: &[u8]) -> Option<&Service> {
        self.services.get(key)
    }

    /// The services with PTR records for an address.
    pub(crate) fn owners(&self, address: &IpAddr) -> impl Iterator<Item = (&[u8], &Service)> {
        let owners = self.reverse.get(address).into_iter().flatten();
        owners.filter_map(|key| Some((&**key, self.services.get(key)?)))
    }
}

/// A label in wire form and lower case.
fn wire_label(text: &str) -> Option<Vec<u8>> {
    if !is_label(text) {
        return None;
    }
    let mut label = vec![u8::try_from(text.len()).ok()?];
    label.extend(text.bytes().map(|b| b.to_ascii_lowercase()));
    Some(label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(value: serde_json::Value) -> Arc<EndpointSlice> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn compiled(
        service: serde_json::Value,
        slices: &[Arc<EndpointSlice>],
    ) -> Option<super::Service> {
        Service::compile(&serde_json::from_value(service).unwrap(), slices)
    }

    #[test]
    fn what_dns_cannot_express_has_no_records() {
        for spec in [
            json!({"type": "ExternalName"}),
            json!({"type": "ExternalName", "externalName": ""}),
            json!({"type": "ExternalName", "externalName": "192.0.2.1"}),
            json!({"type": "ExternalName", "externalName": "a..b"}),
            json!({"type": "ExternalName", "externalName": "x".repeat(70)}),
            json!({"type": "ExternalName", "externalName": "x.".repeat(150)}),
        ] {
            assert_eq!(compiled(json!({"spec": spec}), &[]), None, "{spec}");
        }
        assert_eq!(compiled(json!({}), &[]), None);
        let odd = compiled(
            json!({"spec": {"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "nonsense", ""],
                "ports": [{"port": 80}, {"port": 70000}, {"port": -1}, {"port": 81, "protocol": "QUIC"}]}}),
            &[slice(json!({"addressType": "FQDN", "metadata": {}, "endpoints": [{"addresses": ["example.com"]}]}))],
        )
        .unwrap();
        assert_eq!(
            odd.target,
            Target::Cluster(["10.0.0.1".parse().unwrap()].into())
        );
        assert_eq!(odd.ports.len(), 1);
        assert_eq!(odd.groups.iter().map(|g| g.v4.len()).sum::<usize>(), 0);
    }

    #[test]
    fn slices_with_equal_ports_are_one_group_of_ready_endpoints() {
        let with = |ports: serde_json::Value, endpoints: serde_json::Value| {
            slice(
                json!({"addressType": "IPv4", "metadata": {}, "ports": ports, "endpoints": endpoints}),
            )
        };
        let http = json!([{"name": "http", "port": 80}]);
        let service = compiled(
            json!({"spec": {"clusterIP": "None"}}),
            &[
                with(
                    http.clone(),
                    json!([
                        {"addresses": ["10.0.0.2"], "conditions": {"ready": true}},
                        {"addresses": ["10.0.0.3"], "conditions": {"ready": false}},
                        {"addresses": ["10.0.0.4"], "hostname": "Db-0"},
                    ]),
                ),
                with(
                    http,
                    json!([{"addresses": ["10.0.0.2"]}, {"addresses": ["10.0.0.1"]}]),
                ),
                with(json!([]), json!([{"addresses": ["10.0.0.9"]}])),
            ],
        )
        .unwrap();
        assert_eq!(service.target, Target::Headless);
        assert_eq!(service.groups.len(), 2);
        let v4: Vec<String> = service.groups[0].v4.iter().map(|i| i.to_string()).collect();
        assert_eq!(v4, ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(&*service.groups[0].named[0].0, "db-0");
    }

    #[test]
    fn deleted_services_leave_nothing() {
        let mut records = Records::new(Name::parse("cluster.local").unwrap());
        let service = compiled(
            json!({"spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}]}}),
            &[],
        );
        let address = "10.0.0.1".parse().unwrap();
        records.set_service("Default", "web", service.clone());
        records.set_service("default", "web", service.clone());
        records.set_service("default", "api", service.clone());
        assert_eq!(records.owners(&address).count(), 2);
        assert!(records.has_namespace(b"\x07default"));
        records.set_service("default", "web", None);
        records.set_service("default", "web", None);
        records.set_service("default", "other", None);
        assert_eq!(records.owners(&address).count(), 1);
        assert!(records.has_namespace(b"\x07default"));
        records.set_service("default", "api", None);
        assert!(!records.has_namespace(b"\x07default"));
        assert!(records.reverse.is_empty() && records.services.is_empty());
        records.set_namespace("default", true);
        records.set_service("default", "a", service.clone());
        records.set_service("default", "a", None);
        assert!(records.has_namespace(b"\x07default"));
        records.set_namespace("default", false);
        assert!(records.namespaces.is_empty());
        for name in ["", "a.b", &"x".repeat(64)] {
            records.set_service("default", name, service.clone());
        }
        assert!(records.services.is_empty() && records.namespaces.is_empty());
    }
}
