//! What happens in the runtime, as it happens: the events of CRI where the runtime has them, else those of
//! containerd itself, which come over the same socket.

use std::collections::HashMap;

use holdfast_proto::containerd::events_client::EventsClient;
use holdfast_proto::containerd::{SubscribeRequest, TaskExit};
use holdfast_proto::cri as pb;
use pb::runtime_service_client::RuntimeServiceClient;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::RuntimeError;
use super::RuntimeErrorKind;
use super::measured::Measured;
use crate::core::pod::cri_config::label;

/// How long a refusal may take. A runtime may answer only with its first event: no refusal within this time
/// is a yes.
const REFUSAL: std::time::Duration = std::time::Duration::from_millis(500);
/// The namespace in which containerd keeps what came over CRI.
pub(super) const NAMESPACE: &str = "k8s.io";

/// Waits whether a stream is refused.
async fn accepted(refusal: oneshot::Receiver<Status>) -> Result<(), RuntimeError> {
    match tokio::time::timeout(REFUSAL, refusal).await {
        Ok(Ok(status)) => Err(status.into()),
        _ => Ok(()),
    }
}

/// The uids of pods in which something happened.
pub(super) async fn follow(
    channel: &Channel,
    runtime: &RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<String>, RuntimeError> {
    match of_cri(runtime.clone()).await {
        Err(error) if error.kind == RuntimeErrorKind::Unimplemented => {
            of_containerd(EventsClient::new(channel.clone()), runtime.clone()).await
        }
        other => other,
    }
}

async fn of_cri(
    mut client: RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<String>, RuntimeError> {
    let (sender, receiver) = mpsc::channel(256);
    let (refused, refusal) = oneshot::channel();
    tokio::spawn(async move {
        let mut stream = match client
            .get_container_events(Request::new(pb::GetEventsRequest {}))
            .await
        {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                // Nobody waits for it any more if it comes late; the closed channel says enough then.
                let _ = refused.send(status);
                return;
            }
        };
        while let Ok(Some(event)) = stream.message().await {
            let labelled = event
                .containers_statuses
                .first()
                .and_then(|c| c.labels.get(label::POD_UID).cloned());
            let uid = event
                .pod_sandbox_status
                .and_then(|s| s.metadata)
                .map(|m| m.uid)
                .or(labelled);
            if let Some(uid) = uid
                && sender.send(uid).await.is_err()
            {
                return;
            }
        }
    });
    accepted(refusal).await.map(|()| receiver)
}

async fn of_containerd(
    mut client: EventsClient<Channel>,
    runtime: RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<String>, RuntimeError> {
    let (sender, receiver) = mpsc::channel(256);
    let (refused, refusal) = oneshot::channel();
    tokio::spawn(async move {
        let filters = vec![format!("namespace=={NAMESPACE},topic==\"/tasks/exit\"")];
        let mut stream = match client
            .subscribe(Request::new(SubscribeRequest { filters }))
            .await
        {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                let _ = refused.send(status);
                return;
            }
        };
        while let Ok(Some(envelope)) = stream.message().await {
            let Some(exit) = envelope
                .event
                .and_then(|event| TaskExit::decode(event.value.as_slice()).ok())
            else {
                continue;
            };
            if exit.container_id != exit.id {
                // A command in a container has ended, not the container.
                continue;
            }
            // Each on its own: one that is slow to be seen holds up no other.
            let (runtime, sender) = (runtime.clone(), sender.clone());
            tokio::spawn(async move {
                if let Some(uid) = uid_of(&runtime, &exit.container_id).await {
                    // The receiver has gone with the stream's reader; then nobody wants to know.
                    let _ = sender.send(uid).await;
                }
            });
        }
    });
    accepted(refusal).await.map(|()| receiver)
}

/// The pod to which a container or sandbox belongs. CRI must have seen the end itself before it is worth
/// looking, and it listens to the same events: it is waited for, a second at most.
async fn uid_of(runtime: &RuntimeServiceClient<Measured>, id: &str) -> Option<String> {
    let uid = |labels: &HashMap<String, String>| labels.get(label::POD_UID).cloned();
    let mut found = None;
    for pause in [0, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        let filter = Some(pb::ContainerFilter {
            id: id.into(),
            ..pb::ContainerFilter::default()
        });
        let listed = runtime
            .clone()
            .list_containers(Request::new(pb::ListContainersRequest { filter }))
            .await
            .ok()?
            .into_inner()
            .containers;
        let Some(container) = listed.first() else {
            break;
        };
        found = uid(&container.labels);
        if container.state != pb::ContainerState::ContainerRunning as i32 {
            break;
        }
    }
    if found.is_some() {
        return found;
    }
    let filter = Some(pb::PodSandboxFilter {
        id: id.into(),
        ..pb::PodSandboxFilter::default()
    });
    let listed = runtime
        .clone()
        .list_pod_sandbox(Request::new(pb::ListPodSandboxRequest { filter }))
        .await
        .ok()?
        .into_inner()
        .items;
    listed.first().and_then(|sandbox| uid(&sandbox.labels))
}
