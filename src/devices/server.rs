//! What the agent serves on sockets of its own: the registration of device plugins, and the podresources API.

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
use crate::sys::link;

/// How many connections a socket has at once; more wait.
const CONNECTIONS: usize = 64;

/// A plugin that wants to be registered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registration {
    /// The version of the protocol that it speaks.
    pub version: String,
    /// The name of its socket in the directory of the agent's.
    pub endpoint: String,
    /// The resource that it has devices of.
    pub resource: String,
}

/// Registers plugins.
#[async_trait]
pub trait Register: Send + Sync + 'static {
    /// Registers one; the error is told to it.
    async fn register(&self, registration: Registration) -> Result<(), String>;
}

/// Knows which container has what.
#[async_trait]
pub trait PodResources: Send + Sync + 'static {
    /// Whether one more question is answered now: there are so many a second.
    fn admits(&self) -> bool;
    /// All pods.
    async fn list(&self) -> Vec<pods::PodResources>;
    /// All pods, as the API's version `v1alpha1` has them.
    async fn list_v1alpha1(&self) -> Vec<alpha::PodResources>;
    /// One pod, by namespace and name.
    async fn get(&self, namespace: &str, name: &str) -> Option<pods::PodResources>;
    /// What there is for pods.
    async fn allocatable(&self) -> pods::AllocatableResourcesResponse;
}

/// Serves registrations until the process ends.
pub async fn serve_registration(listener: UnixListener, register: Arc<dyn Register>) {
    serve(listener, RegistrationServer::new(Registrar(register))).await;
}

/// Serves the podresources API, in both of its versions, until the process ends.
pub async fn serve_pod_resources(listener: UnixListener, resources: Arc<dyn PodResources>) {
    let versions = Versions {
        alpha: AlphaServer::new(Lister(Arc::clone(&resources))),
        v1: PodResourcesListerServer::new(Lister(resources)),
    };
    serve(listener, versions).await;
}

/// The podresources API's versions. A path begins with the package of its service.
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
                tracing::debug!(%error, "a connection to a socket of the agent has broken");
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
