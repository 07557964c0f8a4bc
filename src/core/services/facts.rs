//! The facts of a Service that its rules depend on. Invalid values are skipped with a reason, as the API server of another
//! version may have let them pass.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};

use crate::network::{Family, Protocol};

/// The maximum number of ports of a service; the ports after them are skipped.
const MAX_PORTS: usize = 1000;
/// The maximum number of reasons that are kept for a service.
const MAX_PROBLEMS: usize = 10;
/// The time for which a client keeps its endpoint if the Service does not say it (`DefaultClientIPServiceAffinitySeconds`).
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;
/// The label of a Service that another implementation serves (`apis.LabelServiceProxyName` of kube-proxy).
const LABEL_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of a headless Service and of its slices, which kube-proxy's informers exclude.
pub(super) const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";

/// Why values of a service were skipped; sentences for the author of the service, and how many more there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    /// The first reasons.
    pub texts: Vec<String>,
    /// The number of reasons after them.
    pub more: usize,
}

impl Problems {
    pub(super) fn add(&mut self, text: String) {
        if self.texts.contains(&text) {
            return;
        }
        if self.texts.len() < MAX_PROBLEMS {
            self.texts.push(text);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }

    /// Whether nothing was skipped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }
}

/// A port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortFacts {
    /// The name; may be empty.
    pub name: String,
    pub protocol: Protocol,
    pub port: u16,
    /// The node port; `None` if the service has none.
    pub node_port: Option<u16>,
}

/// The clients that may use the addresses of a load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Sources {
    pub networks: Vec<IpNet>,
    /// Whether an invalid network was skipped: a family without networks then allows no client instead of every client.
    pub has_invalid: bool,
}

/// A service that needs rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ServiceFacts {
    pub ports: Vec<PortFacts>,
    pub cluster_addresses: Vec<IpAddr>,
    pub external_addresses: Vec<IpAddr>,
    /// Addresses of the load balancer whose packets reach the node untranslated (`ipMode: VIP`).
    pub balancer_addresses: Vec<IpAddr>,
    pub sources: Option<Sources>,
    /// The seconds for which a client keeps its endpoint; `None` without session affinity.
    pub affinity: Option<u32>,
    pub is_internal_local: bool,
    pub is_external_local: bool,
    pub health_check_node_port: Option<u16>,
    /// When the service was created, in seconds since 1970; the older of two services keeps a contested address.
    pub created: i64,
    pub problems: Problems,
}

fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port > 0)
}

/// Whether an address can be that of an endpoint or an external address (`ValidateNonSpecialIP` of
/// `pkg/apis/core/validation`): translating to addresses of the loopback interface would open local services.
pub(super) fn is_special(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    };
    address.is_unspecified() || address.is_loopback() || address.is_multicast() || link_local
}

/// Addresses of a field without duplicates and special ones.
fn addresses<'a>(
    field: &str,
    texts: impl Iterator<Item = &'a str>,
    problems: &mut Problems,
) -> Vec<IpAddr> {
    let mut seen = BTreeSet::new();
    let mut all = vec![];
    for text in texts.filter(|text| !text.is_empty()) {
        match text.parse::<IpAddr>() {
            Ok(address) if is_special(address) => problems.add(format!(
                "{field} {text:?} is skipped: it must not be a loopback, link-local, multicast or unspecified address"
            )),
            Ok(address) => {
                if seen.insert(address) {
                    all.push(address);
                }
            }
            Err(_) => problems.add(format!("{field} {text:?} is skipped: not an IP address")),
        }
    }
    all
}

fn ports(spec: &ServiceSpec, problems: &mut Problems) -> Vec<PortFacts> {
    let listed = spec.ports.as_deref().unwrap_or_default();
    if let Some(rest) = listed.len().checked_sub(MAX_PORTS).filter(|rest| *rest > 0) {
        problems.add(format!(
            "the last {rest} of {} ports are skipped: a service can have {MAX_PORTS} ports",
            listed.len()
        ));
    }
    let mut names = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    let mut node_ports = BTreeSet::new();
    let mut all = vec![];
    for listed in listed.iter().take(MAX_PORTS) {
        let ServicePort { port, .. } = listed;
        let name = listed.name.clone().unwrap_or_default();
        let Some(protocol) = Protocol::parse(listed.protocol.as_deref()) else {
            let protocol = listed.protocol.as_deref().unwrap_or_default();
            problems.add(format!(
                "port {port} is skipped: the protocol {protocol:?} is not TCP, UDP or SCTP"
            ));
            continue;
        };
        let Some(number) = port_number(*port) else {
            problems.add(format!(
                "port {port} is skipped: not a number from 1 to 65535"
            ));
            continue;
        };
        if !names.insert((name.clone(), protocol)) {
            problems.add(format!(
                "port {port} is skipped: another port has the name {name:?} and the same protocol"
            ));
            continue;
        }
        if !numbers.insert((protocol, number)) {
            problems.add(format!(
                "port {port} named {name:?} is skipped: the number is a duplicate"
            ));
            continue;
        }
        let wanted = listed.node_port.filter(|port| *port != 0);
        let mut node_port = wanted.and_then(port_number);
        if let Some(wanted) = wanted
            && !node_port.is_some_and(|port| node_ports.insert((protocol, port)))
        {
            node_port = None;
            problems.add(format!(
                "node port {wanted} is skipped: a duplicate, or not a number from 1 to 65535"
            ));
        }
        all.push(PortFacts {
            name,
            protocol,
            port: number,
            node_port,
        });
    }
    all
}

fn sources(spec: &ServiceSpec, problems: &mut Problems) -> Option<Sources> {
    let listed = spec.load_balancer_source_ranges.as_deref()?;
    if listed.is_empty() {
        return None;
    }
    let mut sources = Sources::default();
    let mut seen = BTreeSet::new();
    for text in listed {
        match text.trim().parse::<IpNet>() {
            Ok(net) => {
                if seen.insert(net.trunc()) {
                    sources.networks.push(net.trunc());
                }
            }
            Err(_) => {
                sources.has_invalid = true;
                problems.add(format!(
                    "loadBalancerSourceRanges {text:?} is skipped: not a network such as 10.0.0.0/8"
                ));
            }
        }
    }
    Some(sources)
}

/// The session affinity of `newBaseServiceInfo` in `pkg/proxy/serviceport.go`.
fn affinity(spec: &ServiceSpec) -> Option<u32> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref();
    let seconds = config.and_then(|c| c.client_ip.as_ref()?.timeout_seconds);
    let seconds = seconds.and_then(|s| u32::try_from(s).ok());
    Some(
        seconds
            .filter(|s| *s > 0)
            .unwrap_or(DEFAULT_AFFINITY_SECONDS),
    )
}

impl ServiceFacts {
    /// Parses a Service. Returns `None` if it needs no rules: it is headless, an ExternalName, without address yet, or served by
    /// another implementation (`ShouldSkipService` in `pkg/proxy/util`).
    pub(super) fn parse(service: &Service) -> Option<ServiceFacts> {
        let labels = service.metadata.labels.as_ref();
        let has_label = |name: &str| labels.is_some_and(|labels| labels.contains_key(name));
        let spec = service.spec.as_ref()?;
        let kind = spec.type_.as_deref().unwrap_or("ClusterIP");
        if has_label(LABEL_PROXY_NAME) || has_label(LABEL_HEADLESS) || kind == "ExternalName" {
            return None;
        }
        let first = spec.cluster_ip.as_deref().unwrap_or_default();
        if first.is_empty() || first == "None" {
            return None;
        }
        let mut problems = Problems::default();
        let all = spec.cluster_ips.as_deref().unwrap_or_default();
        let listed: Vec<&str> = match all {
            [] => vec![first],
            all => all.iter().map(String::as_str).collect(),
        };
        let cluster_addresses = addresses("clusterIP", listed.into_iter(), &mut problems);
        let external = spec.external_ips.as_deref().unwrap_or_default();
        let external_addresses = addresses(
            "externalIP",
            external.iter().map(String::as_str),
            &mut problems,
        );
        let status = service.status.as_ref();
        let ingress = status
            .and_then(|s| s.load_balancer.as_ref()?.ingress.as_deref())
            .unwrap_or_default();
        // With `ipMode: Proxy` the balancer translates, so packets to its address must reach it.
        let untranslated = ingress
            .iter()
            .filter(|i| i.ip_mode.as_deref().is_none_or(|mode| mode == "VIP"));
        let balancer_addresses = addresses(
            "the load balancer's address",
            untranslated.filter_map(|i| i.ip.as_deref()),
            &mut problems,
        );
        let is_balancer = kind == "LoadBalancer";
        let accepts_external = is_balancer || kind == "NodePort" || !external.is_empty();
        let is_external_local =
            accepts_external && spec.external_traffic_policy.as_deref() == Some("Local");
        let health_check = spec.health_check_node_port.and_then(port_number);
        let created = service.metadata.creation_timestamp.as_ref();
        Some(ServiceFacts {
            ports: ports(spec, &mut problems),
            cluster_addresses,
            external_addresses,
            balancer_addresses,
            sources: sources(spec, &mut problems),
            affinity: affinity(spec),
            is_internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
            is_external_local,
            health_check_node_port: health_check.filter(|_| is_balancer && is_external_local),
            created: created.map_or(i64::MAX, |time| time.0.as_second()),
            problems,
        })
    }

    /// Whether a port accepts connections from outside of the cluster (`ExternallyAccessible`).
    pub(super) fn is_external(&self, port: &PortFacts, family: Family) -> bool {
        let of_family = |all: &[IpAddr]| all.iter().any(|a| Family::of(*a) == family);
        port.node_port.is_some()
            || of_family(&self.external_addresses)
            || of_family(&self.balancer_addresses)
    }
}
