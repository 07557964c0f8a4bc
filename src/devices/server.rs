//! Serves the agent's own sockets: the registration of device plugins, and the podresources API.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use alpha::pod_resources_lister_server::{
    PodResourcesLister as Alpha, PodResourcesListerServer as AlphaServer,
};
use async_trait::async_trait;
use holdfast_proto::deviceplugin as pb;
use holdfast_proto::{podresources as pods, podresources_v1alpha1 as alpha};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use pb::registration_server::RegistrationServer;
use pods::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use tokio::net::UnixListener;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::{Request, Response, Status};

use super::authority::Lenient;
use holdfast_sys::link;

/// Maximum number of concurrent connections of a socket; more wait.
const CONNECTIONS: usize = 64;

/// A plugin that requests its registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registration {
    /// The version of the protocol that the plugin speaks.
    pub version: String,
    /// The name of the plugin's socket in the directory of the agent's socket.
    pub endpoint: String,
    /// The resource of the plugin's devices.
    pub resource: String,
}

/// Registers plugins.
#[async_trait]
pub trait Register: Send + Sync + 'static {
    /// Registers a plugin; the error is returned to the plugin.
    async fn register(&self, registration: Registration) -> Result<(), String>;
}

/// Reports the resources of pods and of the node.
#[async_trait]
pub trait PodResources: Send + Sync + 'static {
    /// Whether another request is accepted now: requests are rate-limited.
    fn admits(&self) -> bool;
    /// Lists all pods.
    async fn list(&self) -> Vec<pods::PodResources>;
    /// Lists all pods in the form of version `v1alpha1`.
    async fn list_v1alpha1(&self) -> Vec<alpha::PodResources>;
    /// Returns one pod, by namespace and name.
    async fn get(&self, namespace: &str, name: &str) -> Option<pods::PodResources>;
    /// Returns the resources for pods on this node.
    async fn allocatable(&self) -> pods::AllocatableResourcesResponse;
}

/// Serves registrations until the process exits.
pub async fn serve_registration(listener: UnixListener, register: Arc<dyn Register>) {
    serve(listener, RegistrationServer::new(Registrar(register))).await;
}

/// Serves both versions of the podresources API until the process exits.
pub async fn serve_pod_resources(listener: UnixListener, resources: Arc<dyn PodResources>) {
    let versions = Versions {
        alpha: AlphaServer::new(Lister(Arc::clone(&resources))),
        v1: PodResourcesListerServer::new(Lister(resources)),
    };
    serve(listener, versions).await;
}

/// The versions of the podresources API. A request's path begins with the package of its service.
#[derive(Clone)]
struct Versions {
    alpha: AlphaServer<Lister>,
    v1: PodResourcesListerServer<Lister>,
}

impl Service<http::Request<Incoming>> for Versions {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Generated services are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        if request.uri().path().starts_with("/v1alpha1.") {
            self.alpha.call(request)
        } else {
            self.v1.call(request)
        }
    }
}

async fn serve<S>(listener: UnixListener, service: S)
where
    S: Service<
            http::Request<Incoming>,
            Response = http::Response<tonic::body::Body>,
            Error = Infallible,
        > + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    let serve = |stream| {
        let service = TowerToHyperService::new(service.clone());
        async move {
            let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(Lenient::new(stream)), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "a connection to a socket of the agent failed");
            }
        }
    };
    link::serve(listener, CONNECTIONS, serve).await;
}

struct Registrar(Arc<dyn Register>);

#[async_trait]
impl pb::registration_server::Registration for Registrar {
    async fn register(
        &self,
        request: Request<pb::RegisterRequest>,
    ) -> Result<Response<pb::Empty>, Status> {
        let request = request.into_inner();
        let registration = Registration {
            version: request.version,
            endpoint: request.endpoint,
            resource: request.resource_name,
        };
        let outcome = self.0.register(registration).await;
        outcome.map_err(Status::unknown)?;
        Ok(Response::new(pb::Empty {}))
    }
}

struct Lister(Arc<dyn PodResources>);

impl Lister {
    fn admit(&self) -> Result<(), Status> {
        if self.0.admits() {
            return Ok(());
        }
        Err(Status::resource_exhausted("rejected by rate limit"))
    }
}

#[async_trait]
impl Alpha for Lister {
    async fn list(
        &self,
        _: Request<alpha::ListPodResourcesRequest>,
    ) -> Result<Response<alpha::ListPodResourcesResponse>, Status> {
        self.admit()?;
        let pod_resources = self.0.list_v1alpha1().await;
        Ok(Response::new(alpha::ListPodResourcesResponse {
            pod_resources,
        }))
    }
}

#[async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<pods::ListPodResourcesRequest>,
    ) -> Result<Response<pods::ListPodResourcesResponse>, Status> {
        self.admit()?;
        let pod_resources = self.0.list().await;
        Ok(Response::new(pods::ListPodResourcesResponse {
            pod_resources,
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<pods::AllocatableResourcesRequest>,
    ) -> Result<Response<pods::AllocatableResourcesResponse>, Status> {
        self.admit()?;
        Ok(Response::new(self.0.allocatable().await))
    }

    async fn get(
        &self,
        request: Request<pods::GetPodResourcesRequest>,
    ) -> Result<Response<pods::GetPodResourcesResponse>, Status> {
        self.admit()?;
        let (name, namespace) = {
            let request = request.into_inner();
            (request.pod_name, request.pod_namespace)
        };
        match self.0.get(&namespace, &name).await {
            Some(pod) => Ok(Response::new(pods::GetPodResourcesResponse {
                pod_resources: Some(pod),
            })),
            None => Err(Status::unknown(format!(
                "pod {name} in namespace {namespace} not found"
            ))),
        }
    }
}
