//! A driver of dynamic resources whose devices are CDI devices that set a variable. It registers through a socket in the
//! directory of registrations, and serves at the same one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use holdfast_proto::dra as pb;
use holdfast_proto::registration as reg;
use pb::dra_plugin_server::{DraPlugin, DraPluginServer};
use reg::registration_server::{Registration, RegistrationServer};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The kind of its CDI devices.
const KIND: &str = "holdfast.test/thing";

#[derive(Default)]
struct Inner {
    calls: Mutex<Vec<String>>,
    /// What it says to every call to give back, if that is not to succeed.
    refusal: Mutex<Option<String>>,
}

#[derive(Clone)]
pub struct Driver {
    name: &'static str,
    inner: Arc<Inner>,
}

/// The driver while it runs; dropping it ends it and takes its socket and its CDI devices away.
pub struct Running {
    files: [PathBuf; 2],
    _runtime: tokio::runtime::Runtime,
}

impl Drop for Running {
    fn drop(&mut self) {
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Driver {
    pub fn new(name: &'static str) -> Driver {
        Driver {
            name,
            inner: Arc::default(),
        }
    }

    /// What was asked, in order.
    pub fn calls(&self) -> Vec<String> {
        self.inner.calls.lock().unwrap().clone()
    }

    /// Claims cannot be given back from now on, or can again.
    pub fn refuse(&self, why: Option<&str>) {
        *self.inner.refusal.lock().unwrap() = why.map(ToOwned::to_owned);
    }

    /// Runs it, with its CDI devices described where runtimes look.
    pub fn run(&self, registry: &Path) -> Running {
        let cdi = PathBuf::from("/var/run/cdi");
        std::fs::create_dir_all(&cdi).unwrap();
        let spec = cdi.join(format!("holdfast-test-{}.json", std::process::id()));
        let device =
            serde_json::json!({"name": "a", "containerEdits": {"env": ["THING=of the driver"]}});
        let text = serde_json::json!({"cdiVersion": "0.5.0", "kind": KIND, "devices": [device]});
        std::fs::write(&spec, text.to_string()).unwrap();
        let socket = registry.join(format!("{}-reg.sock", self.name));
        let _ = std::fs::remove_file(&socket);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (driver, path) = (self.clone(), socket.clone());
        runtime.spawn(async move {
            let listener = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
            let serve = Server::builder()
                .add_service(DraPluginServer::new(driver.clone()))
                .add_service(RegistrationServer::new(driver));
            serve.serve_with_incoming(listener).await.unwrap();
        });
        Running {
            files: [socket, spec],
            _runtime: runtime,
        }
    }

    fn note(&self, call: &str, claims: &[pb::Claim]) {
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        let mut calls = self.inner.calls.lock().unwrap();
        calls.push(format!("{call} {}", names.join(" ")));
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<pb::NodePrepareResourcesRequest>,
    ) -> Result<Response<pb::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.note("prepare", &claims);
        let device = pb::Device {
            request_names: vec!["thing".into()],
            pool_name: "pool".into(),
            device_name: "a".into(),
            cdi_device_ids: vec![format!("{KIND}=a")],
            share_id: None,
        };
        let prepared = |claim: pb::Claim| {
            let answer = pb::NodePrepareResourceResponse {
                devices: vec![device.clone()],
                error: String::new(),
            };
            (claim.uid, answer)
        };
        let claims = claims.into_iter().map(prepared).collect();
        Ok(Response::new(pb::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<pb::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<pb::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.note("unprepare", &claims);
        let error = self.inner.refusal.lock().unwrap().clone();
        let answer = pb::NodeUnprepareResourceResponse {
            error: error.unwrap_or_default(),
        };
        let claims = claims.into_iter().map(|c| (c.uid, answer.clone()));
        let claims = claims.collect();
        Ok(Response::new(pb::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(
        &self,
        _: Request<reg::InfoRequest>,
    ) -> Result<Response<reg::PluginInfo>, Status> {
        Ok(Response::new(reg::PluginInfo {
            r#type: "DRAPlugin".into(),
            name: self.name.into(),
            endpoint: String::new(),
            supported_versions: vec!["v1.DRAPlugin".into(), "v1beta1.DRAPlugin".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        let error = request.into_inner().error;
        let mut calls = self.inner.calls.lock().unwrap();
        calls.push(format!("outcome {error:?}"));
        Ok(Response::new(reg::RegistrationStatusResponse {}))
    }
}
