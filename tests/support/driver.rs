//! A small CSI driver that keeps its volumes in directories, and registers as drivers do.
#![allow(dead_code, reason = "each test needs a part of it")]

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_proto::csi as pb;
use holdfast_proto::registration::PluginInfo;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use pb::node_server::{Node, NodeServer};
use pb::node_service_capability::{Rpc, Type, rpc};
use pb::volume_capability::AccessType;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::support::served::{Servers, registration};

#[derive(Default)]
struct State {
    /// The calls, in order.
    calls: Vec<String>,
    /// Calls that take effect and then fail as if the response was lost.
    lost: BTreeSet<String>,
    /// Calls that never return.
    hung: BTreeSet<String>,
    /// Calls that fail with InvalidArgument and have no effect.
    refused: BTreeSet<String>,
    /// The volume context and the secrets of the last NodePublishVolume, and the outcome of the registration.
    context: HashMap<String, String>,
    secrets: HashMap<String, String>,
    outcome: Option<String>,
    /// The maximum number of volumes on this node, if it is not the initial 7.
    volume_limit: Option<i64>,
}

#[derive(Clone)]
pub struct Driver {
    name: &'static str,
    dir: PathBuf,
    state: Arc<Mutex<State>>,
}

/// The driver while it runs; dropping this stops it and removes its sockets.
pub struct Running {
    pub driver: Driver,
    _servers: Servers,
}

fn failed(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

fn is_mounted(path: &Path) -> bool {
    // The path of the agent's directory may contain a link.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    std::fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .lines()
        .any(|l| l.split(' ').nth(4) == path.to_str())
}

impl Driver {
    pub fn new(name: &'static str, dir: &Path) -> Driver {
        Driver {
            name,
            dir: dir.into(),
            state: Arc::default(),
        }
    }

    /// Runs the driver: its own socket next to its volumes, and one in the plugin registry directory.
    pub fn run(self, registry: &Path) -> Running {
        let own = self.dir.join("csi.sock");
        let plugin = PluginInfo {
            r#type: "CSIPlugin".into(),
            name: self.name.into(),
            endpoint: own.display().to_string(),
            supported_versions: vec!["1.9.0".into()],
        };
        let state = Arc::clone(&self.state);
        let record_outcome = move |error| state.lock().unwrap().outcome = Some(error);
        let mut servers = Servers::new();
        let node = NodeServer::new(self.clone());
        servers.serve(&own, Server::builder().add_service(node));
        servers.serve(
            &registry.join(format!("{}-reg.sock", self.name)),
            Server::builder().add_service(registration(plugin, record_outcome)),
        );
        Running {
            driver: self,
            _servers: servers,
        }
    }

    /// The number of calls that begin with `call`.
    pub fn count(&self, call: &str) -> usize {
        self.state
            .lock()
            .unwrap()
            .calls
            .iter()
            .filter(|c| c.starts_with(call))
            .count()
    }

    pub fn calls(&self) -> Vec<String> {
        self.state.lock().unwrap().calls.clone()
    }

    /// The volume context and the secrets of the last NodePublishVolume.
    pub fn received(&self) -> (HashMap<String, String>, HashMap<String, String>) {
        let state = self.state.lock().unwrap();
        (state.context.clone(), state.secrets.clone())
    }

    /// The outcome of its registration: empty for a success.
    pub fn outcome(&self) -> Option<String> {
        self.state.lock().unwrap().outcome.clone()
    }

    /// Sets the maximum number of volumes on this node.
    pub fn set_volume_limit(&self, volume_limit: i64) {
        self.state.lock().unwrap().volume_limit = Some(volume_limit);
    }

    /// Makes responses of this call get lost, until it is called again with `false`.
    pub fn lose_responses(&self, call: &str, lose: bool) {
        let mut state = self.state.lock().unwrap();
        if lose {
            _ = state.lost.insert(call.into())
        } else {
            _ = state.lost.remove(call)
        }
    }

    /// Makes this call fail with InvalidArgument, until it is called again with `false`.
    pub fn fail_calls(&self, call: &str, refuse: bool) {
        let mut state = self.state.lock().unwrap();
        if refuse {
            _ = state.refused.insert(call.into())
        } else {
            _ = state.refused.remove(call)
        }
    }

    /// Records a call. Then the call fails, or waits while such calls hang.
    async fn record_call(&self, call: &str, volume: &str) -> Result<(), Status> {
        self.record(call, volume);
        if self.state.lock().unwrap().refused.contains(call) {
            return Err(Status::invalid_argument("this is refused for good"));
        }
        let (call, of_volume) = (call.to_owned(), format!("{call} {volume}"));
        let is_hung = || {
            let state = self.state.lock().unwrap();
            state.hung.contains(&call) || state.hung.contains(&of_volume)
        };
        while is_hung() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// A volume with a subpath mount is busy, as with a driver of block devices.
    fn not_busy(&self, volume: &str) -> Result<(), Status> {
        let part = format!("{}/", self.dir.join(volume).display());
        let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(failed)?;
        if table
            .lines()
            .any(|l| l.contains(&part) && l.contains("/volume-subpaths/"))
        {
            self.record("busy", volume);
            return Err(Status::internal("the device is busy"));
        }
        Ok(())
    }

    /// Makes this call hang, until it is called again with `false`. The call may be limited to one volume:
    /// `publish v-1`.
    pub fn hang_calls(&self, call: &str, hang: bool) {
        let mut state = self.state.lock().unwrap();
        if hang {
            _ = state.hung.insert(call.into())
        } else {
            _ = state.hung.remove(call)
        }
    }

    fn record(&self, call: &str, volume: &str) {
        self.state
            .lock()
            .unwrap()
            .calls
            .push(format!("{call} {volume}"));
    }

    fn answer<T>(&self, call: &str, value: T) -> Result<Response<T>, Status> {
        if self.state.lock().unwrap().lost.contains(call) {
            return Err(Status::deadline_exceeded("the answer was lost"));
        }
        Ok(Response::new(value))
    }

    fn bind(from: &Path, to: &Path, read_only: bool) -> Result<(), Status> {
        std::fs::create_dir_all(to).map_err(failed)?;
        if is_mounted(to) {
            return Ok(());
        }
        mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).map_err(failed)?;
        if read_only {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(None::<&str>, to, None::<&str>, flags, None::<&str>).map_err(failed)?;
        }
        Ok(())
    }

    fn unbind(path: &Path) -> Result<(), Status> {
        if is_mounted(path) {
            umount2(path, MntFlags::UMOUNT_NOFOLLOW).map_err(failed)?;
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Node for Driver {
    async fn node_get_info(
        &self,
        _: Request<pb::NodeGetInfoRequest>,
    ) -> Result<Response<pb::NodeGetInfoResponse>, Status> {
        if self.state.lock().unwrap().hung.contains("info") {
            self.record_call("info", "").await?;
        }
        let topology = pb::Topology {
            segments: HashMap::from([("topology.test/zone".to_owned(), "here".to_owned())]),
        };
        Ok(Response::new(pb::NodeGetInfoResponse {
            node_id: "node-of-test".into(),
            max_volumes_per_node: self.state.lock().unwrap().volume_limit.unwrap_or(7),
            accessible_topology: Some(topology),
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<pb::NodeGetCapabilitiesResponse>, Status> {
        let able = |what: rpc::Type| pb::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc {
                r#type: what as i32,
            })),
        };
        let capabilities = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::GetVolumeStats,
        ]
        .map(able)
        .into();
        Ok(Response::new(pb::NodeGetCapabilitiesResponse {
            capabilities,
        }))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<pb::NodeGetVolumeStatsResponse>, Status> {
        self.record("stats", &request.into_inner().volume_id);
        let bytes = pb::VolumeUsage {
            available: 300,
            total: 1000,
            used: 700,
            unit: pb::volume_usage::Unit::Bytes as i32,
        };
        let inodes = pb::VolumeUsage {
            available: 3,
            total: 10,
            used: 7,
            unit: pb::volume_usage::Unit::Inodes as i32,
        };
        let condition = pb::VolumeCondition {
            abnormal: true,
            message: "worn".into(),
        };
        self.answer(
            "stats",
            pb::NodeGetVolumeStatsResponse {
                usage: vec![bytes, inodes],
                volume_condition: Some(condition),
            },
        )
    }

    async fn node_expand_volume(
        &self,
        request: Request<pb::NodeExpandVolumeRequest>,
    ) -> Result<Response<pb::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let bytes = request.capacity_range.map_or(0, |c| c.required_bytes);
        self.record(&format!("expand to {bytes}"), &request.volume_id);
        if self.state.lock().unwrap().refused.contains("expand") {
            return Err(Status::out_of_range("no room for that"));
        }
        self.answer(
            "expand",
            pb::NodeExpandVolumeResponse {
                capacity_bytes: bytes,
            },
        )
    }

    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Result<Response<pb::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record_call("stage", &request.volume_id).await?;
        let volume = self.dir.join(&request.volume_id);
        std::fs::create_dir_all(&volume).map_err(failed)?;
        Driver::bind(&volume, Path::new(&request.staging_target_path), false)?;
        self.answer("stage", pb::NodeStageVolumeResponse {})
    }

    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Result<Response<pb::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record_call("unstage", &request.volume_id).await?;
        self.not_busy(&request.volume_id)?;
        Driver::unbind(Path::new(&request.staging_target_path))?;
        self.answer("unstage", pb::NodeUnstageVolumeResponse {})
    }

    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Result<Response<pb::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record_call("publish", &request.volume_id).await?;
        {
            let mut state = self.state.lock().unwrap();
            state.context = request.volume_context.clone();
            state.secrets = request.secrets.clone();
        }
        if let Some(AccessType::Block(_)) = request
            .volume_capability
            .as_ref()
            .and_then(|c| c.access_type.as_ref())
        {
            let target = Path::new(&request.target_path);
            std::fs::File::create(target).map_err(failed)?;
            if !is_mounted(target) {
                let device = Path::new(&request.volume_context["device"]);
                mount(
                    Some(device),
                    target,
                    None::<&str>,
                    MsFlags::MS_BIND,
                    None::<&str>,
                )
                .map_err(failed)?;
            }
            return self.answer("publish", pb::NodePublishVolumeResponse {});
        }
        if request.volume_context.contains_key("unmounted") {
            std::fs::create_dir_all(&request.target_path).map_err(failed)?;
            return self.answer("publish", pb::NodePublishVolumeResponse {});
        }
        let source = if request.staging_target_path.is_empty() {
            let own = self.dir.join(&request.volume_id);
            std::fs::create_dir_all(&own).map_err(failed)?;
            own
        } else {
            PathBuf::from(&request.staging_target_path)
        };
        Driver::bind(&source, Path::new(&request.target_path), request.readonly)?;
        self.answer("publish", pb::NodePublishVolumeResponse {})
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<pb::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record_call("unpublish", &request.volume_id).await?;
        self.not_busy(&request.volume_id)?;
        Driver::unbind(Path::new(&request.target_path))?;
        let _ = std::fs::remove_dir(&request.target_path)
            .or_else(|_| std::fs::remove_file(&request.target_path));
        self.answer("unpublish", pb::NodeUnpublishVolumeResponse {})
    }
}
