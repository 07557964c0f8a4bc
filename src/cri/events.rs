//! Streams the runtime's events: those of CRI if the runtime has them, otherwise those of containerd itself, which come
//! over the same socket.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use holdfast_proto::containerd::events_client::EventsClient;
use holdfast_proto::containerd::{SubscribeRequest, TaskExit};
use holdfast_proto::cri as pb;
use pb::runtime_service_client::RuntimeServiceClient;
use prost::Message as _;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::RuntimeError;
use super::RuntimeErrorKind;
use super::measured::Measured;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod::cri_config::label;
use holdfast_core::pod::observed::{EventKind, RuntimeEvent};

/// How long to wait for a refusal. A runtime may answer only with its first event, so silence counts as acceptance.
const REFUSAL: Duration = Duration::from_millis(500);
/// Initial and maximum interval between two queries whether CRI shows an exit.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));
/// After this time the pod is observed in any case.
const AUDIT: Duration = Duration::from_secs(30);
/// Timeout of one query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of exits that are queried concurrently. Further events stay in the stream: a runtime that hangs emits
/// none.
const MAX_CONCURRENT_QUERIES: usize = 256;
/// containerd's namespace for objects that were created over CRI.
pub(super) const NAMESPACE: &str = "k8s.io";

/// Fails if a stream is refused.
async fn accepted(refusal: oneshot::Receiver<Status>) -> Result<(), RuntimeError> {
    match tokio::time::timeout(REFUSAL, refusal).await {
        Ok(Ok(status)) => Err(status.into()),
        _ => Ok(()),
    }
}

/// Streams the events of pods' sandboxes and containers.
pub(super) async fn follow(
    channel: &Channel,
    runtime: &RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError> {
    match of_cri(runtime.clone()).await {
        Err(error) if error.kind == RuntimeErrorKind::Unimplemented => {
            of_containerd(EventsClient::new(channel.clone()), runtime.clone()).await
        }
        other => other,
    }
}

async fn of_cri(
    mut client: RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError> {
    let (sender, receiver) = mpsc::channel(256);
    let (refused, refusal) = oneshot::channel();
    tokio::spawn(async move {
        let mut stream = match client
            .get_container_events(Request::new(pb::GetEventsRequest {}))
            .await
        {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                // After `REFUSAL` the receiver no longer exists; the closed event channel then reports the failure.
                let _ = refused.send(status);
                return;
            }
        };
        while let Ok(Some(event)) = stream.message().await {
            if let Some(event) = event_of(event)
                && sender.send(event).await.is_err()
            {
                return;
            }
        }
    });
    accepted(refusal).await.map(|()| receiver)
}

/// Converts an event to our own type; `None` if it names no pod.
fn event_of(event: pb::ContainerEventResponse) -> Option<RuntimeEvent> {
    let kind = match pb::ContainerEventType::try_from(event.container_event_type) {
        Ok(pb::ContainerEventType::ContainerCreatedEvent) => EventKind::Created,
        Ok(pb::ContainerEventType::ContainerStartedEvent) => EventKind::Started,
        Ok(pb::ContainerEventType::ContainerDeletedEvent) => EventKind::Deleted,
        // An unknown event of a newer runtime leads to an observation, as an exit does.
        Ok(pb::ContainerEventType::ContainerStoppedEvent) | Err(_) => EventKind::Stopped,
    };
    let labelled = event
        .containers_statuses
        .first()
        .and_then(|c| c.labels.get(label::POD_UID).cloned());
    let pod = event
        .pod_sandbox_status
        .and_then(|s| s.metadata)
        .map(|m| m.uid)
        .or(labelled)?;
    Some(RuntimeEvent {
        pod,
        id: event.container_id,
        kind,
    })
}

async fn of_containerd(
    mut client: EventsClient<Channel>,
    runtime: RuntimeServiceClient<Measured>,
) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError> {
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
        let queries = Arc::new(Semaphore::new(MAX_CONCURRENT_QUERIES));
        while let Ok(Some(envelope)) = stream.message().await {
            let Some(exit) = envelope
                .event
                .and_then(|event| TaskExit::decode(event.value.as_slice()).ok())
            else {
                continue;
            };
            if exit.container_id != exit.id {
                // A command in a container has exited, not the container.
                continue;
            }
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&queries).acquire_owned().await else {
                return;
            };
            // Queries run concurrently, so that a slow one does not delay the others.
            let (runtime, sender) = (runtime.clone(), sender.clone());
            tokio::spawn(async move {
                let _permit = permit;
                let query = || query_view(runtime.clone(), exit.container_id.clone());
                let pod = pod_of_exited(query).await;
                if let Some(pod) = pod {
                    let event = RuntimeEvent {
                        pod,
                        id: exit.container_id,
                        kind: EventKind::Stopped,
                    };
                    // If the receiver was dropped, the event is not needed.
                    let _ = sender.send(event).await;
                }
            });
        }
    });
    accepted(refusal).await.map(|()| receiver)
}

/// CRI's view of a container or a sandbox.
struct ContainerView {
    /// The uid of its pod.
    uid: Option<String>,
    has_exited: bool,
}

/// Returns the uid of the pod whose container or sandbox has exited. CRI handles the same exit event, and answers a
/// pending start of the container first. Until CRI shows the exit, an observation of the pod finds no change, and no
/// later event would cause another one. So this function waits until CRI shows the exit, or until the next audit, which
/// observes all pods. A query that fails proves nothing about the container, and is repeated.
async fn pod_of_exited<F>(query: impl Fn() -> F) -> Option<String>
where
    F: Future<Output = Result<Option<ContainerView>, RuntimeError>>,
{
    let begun = Instant::now();
    let mut pauses = Doubling::new(PAUSES.0, PAUSES.1);
    let mut uid = None;
    loop {
        let has_exited = match tokio::time::timeout(QUERY_TIMEOUT, query()).await {
            // The container or sandbox has been removed since.
            Ok(Ok(None)) => true,
            Ok(Ok(Some(view))) => {
                uid = view.uid;
                view.has_exited
            }
            Ok(Err(_)) | Err(_) => false,
        };
        if has_exited || begun.elapsed() >= AUDIT {
            return uid;
        }
        tokio::time::sleep(pauses.pause()).await;
    }
}

async fn query_view(
    mut runtime: RuntimeServiceClient<Measured>,
    id: String,
) -> Result<Option<ContainerView>, RuntimeError> {
    let uid = |labels: &HashMap<String, String>| labels.get(label::POD_UID).cloned();
    let filter = Some(pb::ContainerFilter {
        id: id.clone(),
        ..pb::ContainerFilter::default()
    });
    let request = Request::new(pb::ListContainersRequest { filter });
    let listed = runtime.list_containers(request).await?;
    if let Some(container) = listed.into_inner().containers.first() {
        return Ok(Some(ContainerView {
            uid: uid(&container.labels),
            has_exited: container.state() == pb::ContainerState::ContainerExited,
        }));
    }
    let filter = Some(pb::PodSandboxFilter {
        id,
        ..pb::PodSandboxFilter::default()
    });
    let request = Request::new(pb::ListPodSandboxRequest { filter });
    let listed = runtime.list_pod_sandbox(request).await?;
    let listed = listed.into_inner().items;
    Ok(listed.first().map(|sandbox| ContainerView {
        uid: uid(&sandbox.labels),
        has_exited: sandbox.state() == pb::PodSandboxState::SandboxNotready,
    }))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The pod, and the delay of its event, if CRI shows the exit after `late`.
    async fn time_query(late: Duration) -> (Option<String>, Duration) {
        let begun = Instant::now();
        let query = || async {
            Ok(Some(ContainerView {
                uid: Some("p".to_owned()),
                has_exited: begun.elapsed() >= late,
            }))
        };
        (pod_of_exited(query).await, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn an_exit_event_is_sent_when_cri_shows_the_exit() {
        for late in [0, 1, 20, 700, 5000] {
            let late = Duration::from_millis(late);
            let (uid, after) = time_query(late).await;
            assert_eq!(uid.as_deref(), Some("p"));
            assert!(after >= late && after <= late * 2 + PAUSES.0, "{after:?}");
            assert!(after <= late + PAUSES.1, "{after:?}");
        }
        // If CRI never shows the exit, the event comes with the audit.
        let (uid, after) = time_query(Duration::MAX).await;
        assert_eq!(uid.as_deref(), Some("p"));
        assert!(after < AUDIT + PAUSES.1, "{after:?}");
    }

    #[test]
    fn events_are_converted_and_unknown_types_count_as_stopped() {
        let kinds = [
            (0, EventKind::Created),
            (1, EventKind::Started),
            (2, EventKind::Stopped),
            (3, EventKind::Deleted),
            (77, EventKind::Stopped),
        ];
        for (number, kind) in kinds {
            let labels = [(label::POD_UID.to_owned(), "p".to_owned())].into();
            let event = pb::ContainerEventResponse {
                container_id: "c".into(),
                container_event_type: number,
                containers_statuses: vec![pb::ContainerStatus {
                    labels,
                    ..pb::ContainerStatus::default()
                }],
                ..pb::ContainerEventResponse::default()
            };
            let expected = RuntimeEvent {
                pod: "p".into(),
                id: "c".into(),
                kind,
            };
            assert_eq!(event_of(event), Some(expected));
        }
        assert_eq!(event_of(pb::ContainerEventResponse::default()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_exit_of_a_removed_container_is_not_awaited() {
        let queries = Cell::new(0);
        let query = || async {
            queries.set(queries.get() + 1);
            Ok((queries.get() < 3).then(|| ContainerView {
                uid: Some("p".to_owned()),
                has_exited: false,
            }))
        };
        assert_eq!(pod_of_exited(query).await.as_deref(), Some("p"));
        assert_eq!(queries.get(), 3);
    }

    /// A runtime that answers with errors, or not at all, has not removed the container.
    #[tokio::test(start_paused = true)]
    async fn failed_status_requests_are_repeated_until_the_audit() {
        for (failures, hangs) in [(1, false), (5, false), (1, true), (2, true)] {
            let queries = Cell::new(0);
            let query = || async {
                queries.set(queries.get() + 1);
                if queries.get() <= failures {
                    if hangs {
                        std::future::pending::<()>().await;
                    }
                    return Err(Status::unavailable("no answer").into());
                }
                Ok(Some(ContainerView {
                    uid: Some("p".to_owned()),
                    has_exited: true,
                }))
            };
            assert_eq!(
                pod_of_exited(query).await.as_deref(),
                Some("p"),
                "{failures} {hangs}"
            );
        }
        let begun = Instant::now();
        let hung = || std::future::pending::<Result<Option<ContainerView>, RuntimeError>>();
        assert_eq!(pod_of_exited(hung).await, None);
        assert!(
            begun.elapsed() < AUDIT + QUERY_TIMEOUT * 2,
            "{:?}",
            begun.elapsed()
        );
    }
}
