//! The data plane and the DNS server as the rest of this crate uses them.

use std::net::SocketAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tokio_util::sync::CancellationToken;

use holdfast_core::services::{HealthCheck, NodeFacts};
use holdfast_dns::Zone;
use holdfast_kubeapi::cache::Key;

use crate::config::Config;
use crate::plane::{Audited, FlowsLeft, Plane, Records};
use crate::services::{DataPlane, Settings};

/// The port of DNS.
const DNS_PORT: u16 = 53;

fn settings(config: &Config) -> Settings {
    Settings {
        node_port_addresses: config.node_port_addresses.clone(),
        cluster_cidrs: config.cluster_cidrs.clone(),
        service_cidrs: config.service_cidrs.clone(),
        own_addresses: config.dns.clone(),
        masquerade_all: config.masquerade_all,
        masquerade_bit: config.masquerade_bit,
        ..Settings::new(&config.table)
    }
}

/// Opens the data plane. Rules that an earlier process left stay until the first commit.
pub(crate) fn open_plane(config: &Config) -> Result<Box<dyn Plane>, String> {
    match DataPlane::open(settings(config)) {
        Ok(plane) => Ok(Box::new(plane)),
        Err(error) => Err(error.to_string()),
    }
}

/// Removes the rules of the data plane from the kernel.
pub(crate) fn remove_plane(config: &Config) -> Result<(), String> {
    DataPlane::remove(&settings(config)).map_err(|error| error.to_string())
}

impl Plane for DataPlane {
    fn set_node(&mut self, node: NodeFacts) {
        DataPlane::set_node(self, node);
    }

    fn set_service(
        &mut self,
        (namespace, name): &Key,
        service: Option<&Service>,
        slices: &[Arc<EndpointSlice>],
    ) {
        DataPlane::set_service(self, namespace, name, service, slices);
    }

    fn commit(&mut self) -> Result<Option<FlowsLeft>, String> {
        let committed = DataPlane::commit(self).map_err(|error| error.to_string())?;
        Ok(committed.flows_left.map(FlowsLeft))
    }

    fn audit(&mut self) -> Result<Audited, String> {
        let repaired = DataPlane::audit(self).map_err(|error| error.to_string())?;
        let found = repaired.differences;
        Ok(Audited {
            repaired: (!found.is_empty()).then(|| found.join("; ")),
            flows_left: repaired.flows_left.map(FlowsLeft),
        })
    }

    fn health_checks(&self) -> Vec<HealthCheck> {
        DataPlane::health_checks(self)
    }

    fn problems(&self, (namespace, name): &Key) -> Option<String> {
        let problems = DataPlane::problems(self, namespace, name)?;
        let more = match problems.more {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        Some(problems.texts.join("; ") + &more)
    }
}

/// The records of the cluster and the server that answers with them. Clones share the records.
#[derive(Clone)]
pub(crate) struct Dns(Zone);

impl Dns {
    /// Creates the records; `None` if the configuration has no DNS addresses.
    pub(crate) fn new(config: &Config) -> Option<Dns> {
        (!config.dns.is_empty()).then(|| Dns(Zone::new(&config.cluster_domain)))
    }

    /// Answers queries until `stop` is cancelled.
    pub(crate) async fn serve(
        &self,
        config: &Config,
        stop: CancellationToken,
    ) -> Result<(), String> {
        let at = |address: &std::net::IpAddr| SocketAddr::new(*address, DNS_PORT);
        let settings = holdfast_dns::Settings {
            domain: config.cluster_domain.clone(),
            addresses: config.dns.iter().map(at).collect(),
            ..holdfast_dns::Settings::default()
        };
        let served = holdfast_dns::serve(settings, self.0.clone(), stop.cancelled_owned()).await;
        served.map_err(|error| error.to_string())
    }
}

impl Records for Dns {
    fn set_service(
        &self,
        (namespace, name): &Key,
        service: Option<&Service>,
        slices: &[Arc<EndpointSlice>],
    ) {
        self.0.set_service(namespace, name, service, slices);
    }

    fn set_namespace(&self, name: &str, exists: bool) {
        self.0.set_namespace(name, exists);
    }

    fn set_synced(&self) {
        self.0.set_synced();
    }
}
