//! Common parts of the tests' plugins and drivers: servers on sockets, with their own threads so that
//! they respond while the test waits, and their registration.

use std::path::{Path, PathBuf};

use holdfast_proto::registration as pb;
use pb::registration_server::{Registration, RegistrationServer};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};

/// Running servers; dropping this stops them and removes their files.
pub struct Servers {
    files: Vec<PathBuf>,
    runtime: Runtime,
}

impl Servers {
    /// Without any server.
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

    /// Removes a file when the servers stop.
    pub fn owns(&mut self, file: &Path) {
        self.files.push(file.into());
    }

    /// Runs a task until the servers stop.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Serves on a socket, which exists when this returns.
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

/// Serves on a socket, replacing an earlier one. The socket exists when this returns.
pub fn serve(socket: &Path, services: Router) -> impl Future<Output = ()> + Send + use<> {
    let _ = std::fs::remove_file(socket);
    let connections = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    async move {
        services.serve_with_incoming(connections).await.unwrap();
    }
}

/// The registration service of a plugin: its info, and a callback that receives the outcome, which is
/// empty for a success.
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
