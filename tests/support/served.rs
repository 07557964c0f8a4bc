//! What plugins and drivers of the tests have in common: servers at sockets, with threads of their own, so that they
//! answer while the test waits; and how they register.

use std::path::{Path, PathBuf};

use holdfast_proto::registration as pb;
use pb::registration_server::{Registration, RegistrationServer};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};

/// Servers while they run; dropping this ends them and takes their files away.
pub struct Servers {
    files: Vec<PathBuf>,
    runtime: Runtime,
}

impl Servers {
    /// None yet.
    pub fn new() -> Servers {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        Servers {
            files: vec![],
            runtime,
        }
    }

    /// A file goes when they end.
    pub fn owns(&mut self, file: &Path) {
        self.files.push(file.into());
    }

    /// Does something for as long as they run.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Serves at a socket, which is there when this returns.
    pub fn serve(&mut self, socket: &Path, services: Router) {
        self.owns(socket);
        let _inside = self.runtime.enter();
        self.runtime.spawn(serve(socket, services));
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Serves at a socket in place of an earlier one. It is there when this returns.
pub fn serve(socket: &Path, services: Router) -> impl Future<Output = ()> + Send + use<> {
    let _ = std::fs::remove_file(socket);
    let connections = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    async move {
        services.serve_with_incoming(connections).await.unwrap();
    }
}

/// Where a plugin registers with itself: what it says, and what it does when it is told the outcome, which is empty for a
/// success.
pub fn registration<F: Fn(String) + Send + Sync + 'static>(
    plugin: pb::PluginInfo,
    outcome: F,
) -> RegistrationServer<impl Registration> {
    RegistrationServer::new(Registrar { plugin, outcome })
}

struct Registrar<F> {
    plugin: pb::PluginInfo,
    outcome: F,
}

#[tonic::async_trait]
impl<F: Fn(String) + Send + Sync + 'static> Registration for Registrar<F> {
    async fn get_info(
        &self,
        _: Request<pb::InfoRequest>,
    ) -> Result<Response<pb::PluginInfo>, Status> {
        Ok(Response::new(self.plugin.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<pb::RegistrationStatus>,
    ) -> Result<Response<pb::RegistrationStatusResponse>, Status> {
        (self.outcome)(request.into_inner().error);
        Ok(Response::new(pb::RegistrationStatusResponse {}))
    }
}
