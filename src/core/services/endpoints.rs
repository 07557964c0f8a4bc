//! The endpoints of a service, from its EndpointSlices.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, EndpointPort, EndpointSlice};

use super::facts::{LABEL_HEADLESS, PortFacts, Problems, is_special};
use super::rules::Target;
use crate::network::{Family, Protocol};

/// The clients for which an endpoint is meant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Hints {
    /// The zones; empty without a hint.
    pub zones: Vec<Arc<str>>,
    /// The names of nodes; empty without a hint.
    pub nodes: Vec<Arc<str>>,
}

/// An endpoint of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndpointFacts {
    pub address: IpAddr,
    /// The name of the node; `None` for endpoints that are no pods.
    pub node: Option<Arc<str>>,
    pub hints: Option<Arc<Hints>>,
    pub is_ready: bool,
    pub is_serving: bool,
    pub is_terminating: bool,
}

/// A port of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SlicePort {
    name: String,
    protocol: Protocol,
    port: u16,
}

/// A slice.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SliceFacts {
    family: Family,
    ports: Vec<SlicePort>,
    endpoints: Vec<EndpointFacts>,
}

/// All slices of a service, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Slices(Vec<SliceFacts>);

/// An endpoint with its target for one port of the service.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortEndpoint<'a> {
    pub target: Target,
    pub facts: &'a EndpointFacts,
}

/// Names of nodes and zones, each stored once for all services.
#[derive(Debug, Default)]
pub(super) struct Names {
    all: BTreeSet<Arc<str>>,
    /// The number of names at which unused ones are removed.
    limit: usize,
}

impl Names {
    fn share(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.all.get(name) {
            return known.clone();
        }
        if self.all.len() >= self.limit {
            self.all.retain(|name| Arc::strong_count(name) > 1);
            self.limit = self.all.len().saturating_mul(2).max(1000);
        }
        let name: Arc<str> = name.into();
        self.all.insert(name.clone());
        name
    }

    fn hints(&mut self, hints: &EndpointHints) -> Option<Hints> {
        let zones = hints.for_zones.as_deref().unwrap_or_default();
        let nodes = hints.for_nodes.as_deref().unwrap_or_default();
        if zones.is_empty() && nodes.is_empty() {
            return None;
        }
        Some(Hints {
            zones: zones.iter().map(|zone| self.share(&zone.name)).collect(),
            nodes: nodes.iter().map(|node| self.share(&node.name)).collect(),
        })
    }
}

fn slice_port(port: &EndpointPort, problems: &mut Problems) -> Option<SlicePort> {
    // A port without number means all ports, which services cannot use (`endpointSliceCache` of `pkg/proxy`).
    let number = port.port?;
    let read = u16::try_from(number).ok().filter(|number| *number > 0);
    let protocol = Protocol::parse(port.protocol.as_deref());
    let (Some(port_number), Some(protocol)) = (read, protocol) else {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        problems.add(format!(
            "port {number}/{protocol} of a slice is skipped: not a number from 1 to 65535 with TCP, UDP or SCTP"
        ));
        return None;
    };
    Some(SlicePort {
        name: port.name.clone().unwrap_or_default(),
        protocol,
        port: port_number,
    })
}

impl Slices {
    /// Parses slices. Slices of other address types, such as FQDN, and slices with the label of headless services are ignored:
    /// kube-proxy's informers exclude the latter (`cmd/kube-proxy/app/server.go`), while DNS answers with their addresses.
    pub(super) fn parse(
        slices: &[Arc<EndpointSlice>],
        names: &mut Names,
        problems: &mut Problems,
    ) -> Slices {
        let is_headless = |slice: &EndpointSlice| {
            let labels = slice.metadata.labels.as_ref();
            labels.is_some_and(|labels| labels.contains_key(LABEL_HEADLESS))
        };
        let slices = slices.iter().map(Arc::as_ref);
        let mut sorted: Vec<&EndpointSlice> = slices.filter(|slice| !is_headless(slice)).collect();
        sorted.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
        let mut all = vec![];
        for slice in sorted {
            let family = match slice.address_type.as_str() {
                "IPv4" => Family::V4,
                "IPv6" => Family::V6,
                _ => continue,
            };
            let ports = slice.ports.as_deref().unwrap_or_default();
            let ports: Vec<SlicePort> = ports
                .iter()
                .filter_map(|port| slice_port(port, problems))
                .collect();
            let listed = slice.endpoints.as_deref().unwrap_or_default();
            let mut endpoints = Vec::with_capacity(listed.len());
            // Neighbours often have equal hints.
            let mut last: Option<(&EndpointHints, Option<Arc<Hints>>)> = None;
            for endpoint in listed {
                let Some(address) = address(endpoint, family, problems) else {
                    continue;
                };
                let hints = match (&endpoint.hints, &last) {
                    (None, _) => None,
                    (Some(hints), Some((known, shared))) if *known == hints => shared.clone(),
                    (Some(hints), _) => {
                        let shared = names.hints(hints).map(Arc::new);
                        last = Some((hints, shared.clone()));
                        shared
                    }
                };
                let conditions = endpoint.conditions.as_ref();
                endpoints.push(EndpointFacts {
                    address,
                    node: endpoint.node_name.as_deref().map(|name| names.share(name)),
                    hints,
                    is_ready: conditions.is_none_or(|c| c.ready != Some(false)),
                    is_serving: conditions.is_none_or(|c| c.serving != Some(false)),
                    is_terminating: conditions.is_some_and(|c| c.terminating == Some(true)),
                });
            }
            all.push(SliceFacts {
                family,
                ports,
                endpoints,
            });
        }
        Slices(all)
    }

    /// The endpoints for a port of the service, in the order of their targets. A target in several slices counts once; if one of
    /// them is on `node`, that one counts (`addEndpoints` in `pkg/proxy/endpointslicecache.go`).
    pub(super) fn of_port<'a>(
        &'a self,
        port: &PortFacts,
        family: Family,
        node: &str,
    ) -> Vec<PortEndpoint<'a>> {
        let mut all: BTreeMap<Target, &EndpointFacts> = BTreeMap::new();
        for slice in self.0.iter().filter(|slice| slice.family == family) {
            let matching = slice
                .ports
                .iter()
                .filter(|p| p.name == port.name && p.protocol == port.protocol);
            for slice_port in matching {
                for facts in &slice.endpoints {
                    let target = Target {
                        address: facts.address,
                        port: slice_port.port,
                    };
                    let is_local = facts.node.as_deref() == Some(node);
                    if is_local {
                        all.insert(target, facts);
                    } else {
                        all.entry(target).or_insert(facts);
                    }
                }
            }
        }
        let endpoints = all.into_iter();
        endpoints
            .map(|(target, facts)| PortEndpoint { target, facts })
            .collect()
    }

    /// The number of ready endpoints on `node`, for health checks (`LocalReadyEndpoints`). An address counts once.
    pub(super) fn local_ready(&self, node: &str) -> usize {
        let all = self.0.iter().flat_map(|slice| &slice.endpoints);
        let local = all.filter(|e| e.is_ready && e.node.as_deref() == Some(node));
        local.map(|e| e.address).collect::<BTreeSet<_>>().len()
    }
}

/// The address of an endpoint. Only the first one counts, as its field's comment in the API says.
fn address(endpoint: &Endpoint, family: Family, problems: &mut Problems) -> Option<IpAddr> {
    let text = endpoint.addresses.first()?;
    let address = match text.parse::<IpAddr>() {
        Ok(address) if Family::of(address) == family => address,
        _ => {
            let kind = match family {
                Family::V4 => "IPv4",
                Family::V6 => "IPv6",
            };
            problems.add(format!(
                "endpoint {text:?} is skipped: not an {kind} address"
            ));
            return None;
        }
    };
    if is_special(address) {
        problems.add(format!(
            "endpoint {text:?} is skipped: it must not be a loopback, link-local, multicast or unspecified address"
        ));
        return None;
    }
    Some(address)
}
