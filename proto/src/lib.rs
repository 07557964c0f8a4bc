//! Generated gRPC types, in a separate package so that they compile once.
//!
//! The messages are plain values and may be used anywhere. Only the crates `holdfast-cri`, `holdfast-csi`,
//! `holdfast-devices` and `holdfast-probes` use the clients and servers.

pub mod failure;
pub mod socket;

/// CRI v1 (`runtime.v1`): the protocol of containerd and CRI-O.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// The gRPC health checking protocol (`grpc.health.v1`), for gRPC probes.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// containerd's own events (`containerd.services.events.v1`), for versions whose CRI has none.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod containerd {
    tonic::include_proto!("containerd.services.events.v1");
}

/// containerd's content store (`containerd.services.content.v1`), for the progress of pulls.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod content {
    tonic::include_proto!("containerd.services.content.v1");
}

/// containerd's tasks (`containerd.services.tasks.v1`), for tasks that CRI does not know, and for commands with input.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod tasks {
    tonic::include_proto!("containerd.services.tasks.v1");
}

/// containerd's own containers (`containerd.services.containers.v1`), for their OCI specs.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod containers {
    tonic::include_proto!("containerd.services.containers.v1");
}

/// The Container Storage Interface (`csi.v1`), the node's side.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// The registration of plugins (`pluginregistration`).
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// Device plugins (`v1beta1`): their registration, and the calls to them.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// The pod resources API (`v1`): the node's resources that containers have.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod podresources {
    tonic::include_proto!("v1");
}

/// Drivers of dynamic resource allocation (`v1`): the calls to them.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// Drivers of dynamic resource allocation: the previous version of the calls, `v1beta1`.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod dra_v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// Two protocols whose package is named after the version.
#[allow(clippy::all, clippy::pedantic, missing_docs)]
mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
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
