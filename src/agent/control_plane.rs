//! The agent's connections to the apiserver, and the clients and caches that use them.

use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::runtime::watcher;

use super::node::credentials;
use super::node::standalone::NoApi;
use super::{KubeNodes, Metrics, NodeApi};
use holdfast_config::Config;
use holdfast_kubeapi::answers::Answers;
use holdfast_kubeapi::client::connect_as;
use holdfast_kubeapi::measured::Report;
use holdfast_kubeapi::pace::Pace;
use holdfast_kubeapi::pods::{KubePods, PodApi};
use holdfast_kubeapi::reviews::{KubeReviews, Reviews};
use holdfast_kubeapi::{Api, Cache};
use holdfast_sealed as sealed;
use holdfast_sealed::{Keeper, SealedApi};

/// The connections to the apiserver. Heartbeats use a separate connection, so that pod traffic cannot make the node
/// appear dead. Token and access reviews use another, so that invalid bearer tokens cannot delay pod workers.
pub(super) struct Connections {
    pub client: Client,
    heartbeat: Client,
    /// Counts the answers that all connections receive.
    answers: Answers,
    pub reviews: Arc<dyn Reviews>,
}

impl Connections {
    /// Reads the kubeconfig at `path`. Sends no request.
    pub(super) async fn open(
        config: &Config,
        path: &Path,
        metrics: &Arc<Metrics>,
        keeper: Option<&Keeper>,
    ) -> anyhow::Result<Connections> {
        let (counted, confirmed) = (Arc::clone(metrics), keeper.cloned());
        let answers = Answers::default();
        let noted = answers.clone();
        let report: Report = Arc::new(move |method, host, code, took| {
            counted.api_request(method, host, code, took);
            noted.record(code);
            if let (Some(keeper), Some(200..300)) = (&confirmed, code) {
                keeper.confirm();
            }
        });
        let connect = |pace| {
            let own = credentials::own_pair(config);
            connect_as(path, own, Some(Arc::clone(&report)), pace)
        };
        Ok(Connections {
            answers,
            reviews: Arc::new(KubeReviews(connect(Pace::default()).await?)),
            heartbeat: connect(Pace::default()).await?,
            client: connect(Pace::new(config.api_pace)).await?,
        })
    }
}

/// The API as the agent uses it.
pub(super) struct ControlPlane {
    pub api: Arc<dyn PodApi>,
    /// The pods bound to this node; `None` without an apiserver.
    pub pods: Option<Cache<Pod>>,
    pub nodes: Option<Arc<dyn NodeApi>>,
}

impl ControlPlane {
    /// Uses these connections. If there is a keeper, the API's answers are stored for an offline start.
    pub(super) fn new(
        connections: Connections,
        node_name: &str,
        keeper: Option<&Keeper>,
    ) -> ControlPlane {
        let Connections {
            client,
            heartbeat,
            answers,
            ..
        } = connections;
        let only_ours = watcher::Config::default().fields(&format!("spec.nodeName={node_name}"));
        let pods: Cache<Pod> = Cache::start(Api::all(client.clone()), only_ours);
        let api: Arc<dyn PodApi> = Arc::new(KubePods::new(client, answers));
        ControlPlane {
            api: match keeper {
                Some(kept) => keep(api, kept, &pods),
                None => api,
            },
            pods: Some(pods),
            nodes: Some(Arc::new(KubeNodes(heartbeat))),
        }
    }

    /// No apiserver: only static pods run.
    pub(super) fn none() -> ControlPlane {
        ControlPlane {
            api: Arc::new(NoApi),
            pods: None,
            nodes: None,
        }
    }
}

/// Wraps the API so that its answers are stored for an offline start, and stores the pods.
fn keep(api: Arc<dyn PodApi>, keeper: &Keeper, pods: &Cache<Pod>) -> Arc<dyn PodApi> {
    let services = Arc::clone(&api);
    let services = move || services.services();
    tokio::spawn(sealed::follow(keeper.clone(), pods.clone(), services));
    Arc::new(SealedApi::new(api, keeper.clone()))
}
