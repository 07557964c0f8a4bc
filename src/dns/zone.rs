//! The records of the cluster, shared between the owner of the watches and the server's tasks.

use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use crate::records::{self, Records};
use crate::wire::Name;

/// The domain of a cluster that does not configure one.
pub(crate) const DEFAULT_DOMAIN: &str = "cluster.local";

/// Records of services and pods. A clone shares the records. Writers hold the lock only to exchange one service.
#[derive(Clone)]
pub struct Zone {
    records: Arc<RwLock<Records>>,
}

impl Zone {
    /// Creates an empty zone. An invalid `domain` becomes `cluster.local`: [`crate::serve`] refuses the setting with its value.
    pub fn new(domain: &str) -> Zone {
        let name = Name::parse(domain).filter(|name| name.wire().len() > 1);
        let name = name.or_else(|| Name::parse(DEFAULT_DOMAIN));
        let name = name.expect("the default domain is a valid name");
        Zone {
            records: Arc::new(RwLock::new(Records::new(name))),
        }
    }

    /// Replaces a service with all its slices; `None` deletes it. The zone keeps neither object.
    pub fn set_service(
        &self,
        namespace: &str,
        name: &str,
        service: Option<&Service>,
        slices: &[Arc<EndpointSlice>],
    ) {
        let compiled = service.and_then(|s| records::Service::compile(s, slices));
        self.write().set_service(namespace, name, compiled);
    }

    /// Names of pods exist only in existing namespaces.
    pub fn set_namespace(&self, name: &str, exists: bool) {
        self.write().set_namespace(name, exists);
    }

    /// Reports that the zone is complete. Before this call, names of the cluster are answered with SERVFAIL, because a client
    /// would cache that a name does not exist.
    pub fn set_synced(&self) {
        self.write().synced = true;
    }

    /// Sets the addresses of `ns.dns.<domain>`.
    pub(crate) fn set_addresses(&self, addresses: Vec<IpAddr>) {
        self.write().addresses = addresses;
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Records> {
        // No writer leaves the records half changed when it panics: each change is one insertion.
        self.records.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Records> {
        self.records.write().unwrap_or_else(PoisonError::into_inner)
    }
}
