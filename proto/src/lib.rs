//! Generated gRPC types, in a separate package so that they compile once.
//!
//! `generated` is made from the protocol files next to it by `make proto`, and committed: who builds the product
//! builds neither a parser of protocol files nor a generator. `tests/walls/generated.rs` fails if the two differ.
//!
//! The messages are plain values and may be used anywhere. Only the crates `holdfast-cri`, `holdfast-csi`,
//! `holdfast-devices` and `holdfast-probes` use the clients and servers.

pub mod failure;
pub mod socket;

/// CRI v1 (`runtime.v1`): the protocol of containerd and CRI-O.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod cri {
    include!("../generated/runtime.v1.rs");
}

/// The gRPC health checking protocol (`grpc.health.v1`), for gRPC probes.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod health {
    include!("../generated/grpc.health.v1.rs");
}

/// containerd's own events (`containerd.services.events.v1`), for versions whose CRI has none.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod containerd {
    include!("../generated/containerd.services.events.v1.rs");
}

/// containerd's content store (`containerd.services.content.v1`), for the progress of pulls.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod content {
    include!("../generated/containerd.services.content.v1.rs");
}

/// containerd's tasks (`containerd.services.tasks.v1`), for tasks that CRI does not know, and for commands with input.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod tasks {
    include!("../generated/containerd.services.tasks.v1.rs");
}

/// containerd's own containers (`containerd.services.containers.v1`), for their OCI specs.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod containers {
    include!("../generated/containerd.services.containers.v1.rs");
}

/// The Container Storage Interface (`csi.v1`), the node's side.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod csi {
    include!("../generated/csi.v1.rs");
}

/// The registration of plugins (`pluginregistration`).
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod registration {
    include!("../generated/pluginregistration.rs");
}

/// Device plugins (`v1beta1`): their registration, and the calls to them.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod deviceplugin {
    include!("../generated/v1beta1.rs");
}

/// The pod resources API (`v1`): the node's resources that containers have.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod podresources {
    include!("../generated/v1.rs");
}

/// Drivers of dynamic resource allocation (`v1`): the calls to them.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod dra {
    include!("../generated/k8s.io.kubelet.pkg.apis.dra.v1.rs");
}

/// Drivers of dynamic resource allocation: the previous version of the calls, `v1beta1`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod dra_v1beta1 {
    include!("../generated/k8s.io.kubelet.pkg.apis.dra.v1beta1.rs");
}

/// Two protocols whose package is named after the version.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
mod v1alpha1 {
    include!("../generated/v1alpha1.rs");
}

/// Health reports of drivers of dynamic resource allocation (`v1alpha1`, KEP-4680).
pub mod dra_health {
    pub use super::v1alpha1::{
        DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
        NodeWatchResourcesResponse, dra_resource_health_client, dra_resource_health_server,
    };
}

/// The first version of the pod resources API (`v1alpha1`): the devices of the containers of each pod.
pub mod podresources_v1alpha1 {
    pub use super::v1alpha1::{
        ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
        PodResources, pod_resources_lister_client, pod_resources_lister_server,
    };
}
