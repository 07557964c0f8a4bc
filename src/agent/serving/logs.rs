//! `/containerLogs`, and the node's own log files (kubelet spec, 13.5).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::{Response, StatusCode};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Known;
use super::Refusal;
use super::Server;
use crate::agent::Context;
use crate::core::pod;
use crate::core::pod::observed::{Container, ContainerState, ObservedPod};
use crate::core::serving::logs::Decoder;
use crate::core::serving::{LogOptions, Place};
use crate::host::blocking;
use crate::host::serving::logfile::{LogFile, Next};
use crate::https::{Body, BoxError, text};
use crate::sys::watch::Changes;

/// How many pieces wait for a reader who is slow.
const AHEAD: usize = 2;
/// How often a log that does not change is looked at in any case, and how often it is asked whether its container runs.
const LOOK: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(500));
/// How long it is waited for what a runtime still writes to a file that was rotated.
const REST: Duration = Duration::from_millis(50);
/// What a container writes in so short a time is sent together.
const TOGETHER: Duration = Duration::from_millis(10);

/// The instance whose log is meant.
#[derive(Debug, PartialEq, Eq)]
struct Instance {
    attempt: u32,
    /// The runtime's id, while it runs.
    running: Option<String>,
}

pub(super) fn status<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let all = [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ];
    all.into_iter()
        .flatten()
        .flatten()
        .find(|s| s.name == container)
}

/// The instance that a status tells as the last one. While a container waits to be started again, that is the newest,
/// and the runtime may have no other.
fn last<'a>(
    told: Option<&ContainerStatus>,
    observed: &'a ObservedPod,
    newest: Option<&'a Container>,
) -> Option<&'a Container> {
    let told = told?;
    let ended = told.last_state.as_ref().and_then(|s| s.terminated.as_ref());
    let id = ended
        .and_then(|t| t.container_id.as_deref())
        .and_then(|id| id.split_once("://"));
    let named = id.and_then(|(_, id)| observed.containers.iter().find(|c| c.id == id));
    let waits = told.state.as_ref().is_some_and(|s| s.waiting.is_some());
    named.or(newest.filter(|c| waits && c.state == ContainerState::Exited))
}

/// Why a container has not started yet.
fn why_it_waits(told: Option<&ContainerStatus>) -> String {
    let reason = told.and_then(|s| s.state.as_ref()?.waiting.as_ref()?.reason.clone());
    match reason.as_deref() {
        Some("ErrImagePull") => "image can't be pulled".to_owned(),
        Some("ImagePullBackOff") => "trying and failing to pull image".to_owned(),
        Some(reason) => reason.to_owned(),
        None => "ContainerCreating".to_owned(),
    }
}

/// Chooses the instance. Pure.
fn instance(
    known: &Known,
    observed: &ObservedPod,
    container: &str,
    previous: bool,
) -> Result<Instance, Refusal> {
    let name = known.pod.metadata.name.clone().unwrap_or_default();
    if !pod::containers(&known.pod)
        .iter()
        .any(|(_, c)| c.name == container)
    {
        return Err(Refusal(
            StatusCode::NOT_FOUND,
            format!("container {container:?} not found in pod {name:?}"),
        ));
    }
    let (newest, before) = observed.latest_two(container);
    if previous {
        let missing = || {
            Refusal(
                StatusCode::BAD_REQUEST,
                format!("previous terminated container {container:?} in pod {name:?} not found"),
            )
        };
        return last(status(known.told(), container), observed, newest)
            .or(before)
            .map(|c| Instance {
                attempt: c.attempt,
                running: None,
            })
            .ok_or_else(missing);
    }
    let begun = newest
        .filter(|c| c.state != ContainerState::Created)
        .or(before);
    if let Some(c) = begun {
        return Ok(Instance {
            attempt: c.attempt,
            running: (c.state == ContainerState::Running).then(|| c.id.clone()),
        });
    }
    let told = status(known.told(), container);
    if let Some(told) = told.filter(|s| s.state.as_ref().is_some_and(|s| s.terminated.is_some())) {
        // The runtime has forgotten it; its log is here as long as its pod is.
        return Ok(Instance {
            attempt: u32::try_from(told.restart_count).unwrap_or(0),
            running: None,
        });
    }
    let why = why_it_waits(told);
    Err(Refusal(
        StatusCode::BAD_REQUEST,
        format!("container {container:?} in pod {name:?} is waiting to start: {why}"),
    ))
}

/// `GET /containerLogs/…`.
pub async fn of_container(
    server: &Arc<Server>,
    place: &Place,
    query: &str,
) -> Result<Response<Body>, Refusal> {
    let context = &server.context;
    let options = LogOptions::parse(query, context.clock.now()).map_err(Refusal::of)?;
    let known = server.find(place).ok_or_else(|| {
        Refusal(
            StatusCode::NOT_FOUND,
            format!("pod {:?} does not exist", place.pod),
        )
    })?;
    let observed = context
        .runtime
        .observe(pod::uid(&known.pod))
        .await
        .map_err(|e| Refusal(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?;
    let instance = instance(&known, &observed, &place.container, options.previous)?;
    let dir = context.host.log_directory(&known.pod);
    let name = PathBuf::from(&place.container).join(format!("{}.log", instance.attempt));
    let (whole, tail) = (dir.clone(), options.tail);
    let opened =
        blocking(move || LogFile::open(&whole, &name, tail).map_err(|e| e.to_string())).await;
    let log = opened.map_err(|e| {
        Refusal(
            StatusCode::BAD_REQUEST,
            format!(
                "failed to open the log of container {:?}: {e}",
                place.container
            ),
        )
    })?;
    let (sender, pieces) = mpsc::channel(AHEAD);
    let decoder = Decoder::new(&options);
    let follow = options.follow.then(|| Following {
        context: Arc::clone(context),
        dir: dir.join(&place.container),
        uid: pod::uid(&known.pod).to_owned(),
        id: instance.running,
    });
    tokio::spawn(read(log, decoder, follow, sender));
    Ok(stream(pieces))
}

pub(super) fn stream(pieces: mpsc::Receiver<Bytes>) -> Response<Body> {
    let pieces = futures::stream::unfold(pieces, |mut pieces| async move {
        pieces.recv().await.map(|piece| (piece, pieces))
    });
    let body =
        StreamBody::new(pieces.map(|piece| Ok::<_, BoxError>(Frame::data(piece)))).boxed_unsync();
    let mut response = text(StatusCode::OK, "");
    *response.body_mut() = body;
    response
}

/// A log that is followed while its container runs.
struct Following {
    context: Arc<Context>,
    dir: PathBuf,
    uid: String,
    id: Option<String>,
}

impl Following {
    /// Whether more may come. What cannot be told is taken for running.
    async fn goes_on(&self) -> bool {
        let Some(id) = &self.id else { return false };
        match self.context.runtime.observe(&self.uid).await {
            Ok(pod) => pod
                .containers
                .iter()
                .any(|c| c.id == *id && c.state == ContainerState::Running),
            Err(_) => true,
        }
    }
}

/// Reads to the present end of a log; none if nobody wants more, or no more can be read.
async fn read_to_end(
    mut log: LogFile,
    decoder: &mut Decoder,
    to: &mpsc::Sender<Bytes>,
) -> Option<LogFile> {
    loop {
        let took = blocking(move || {
            let piece = log.read().map_err(|e| e.to_string())?;
            let next = match piece.is_empty() {
                true => log.follow().map_err(|e| e.to_string())?,
                false => Next::Same,
            };
            Ok((log, piece, next))
        });
        let (piece, next) = match took.await {
            Ok((back, piece, next)) => {
                log = back;
                (piece, next)
            }
            Err(error) => {
                tracing::debug!(error, "a log cannot be read any further");
                return None;
            }
        };
        let out = decoder.push(&piece);
        if !out.is_empty() && to.send(out.into()).await.is_err() {
            return None;
        }
        if decoder.is_full() {
            return None;
        }
        match next {
            Next::Same if piece.is_empty() => return Some(log),
            Next::Ending => tokio::time::sleep(REST).await,
            Next::Same | Next::Another => {}
        }
    }
}

/// Reads until nothing more comes or nobody listens any more.
async fn read(
    mut log: LogFile,
    mut decoder: Decoder,
    follow: Option<Following>,
    to: mpsc::Sender<Bytes>,
) {
    let mut asked: Option<Instant> = None;
    // Whether something has come since it was asked: it may have been the last.
    let mut news = true;
    let mut ended = false;
    // Before reading: what is written from now on ends the wait below.
    let mut changes = follow.as_ref().map(|f| Changes::with_writes(&f.dir));
    loop {
        let Some(back) = read_to_end(log, &mut decoder, &to).await else {
            return;
        };
        log = back;
        let (Some(follow), Some(changes), false) = (&follow, &mut changes, ended) else {
            let out = decoder.finish();
            if !out.is_empty() {
                // Whoever has gone does not miss it.
                let _ = to.send(out.into()).await;
            }
            return;
        };
        let soon = asked
            .map(|at| LOOK.1.saturating_sub(at.elapsed()))
            .filter(|left| !left.is_zero());
        let limit = soon.unwrap_or(if news { LOOK.1 } else { LOOK.0 });
        if soon.is_none() {
            news = false;
            asked = Some(Instant::now());
            if !follow.goes_on().await {
                // Once more: it may have written between the reading and the asking.
                ended = true;
                continue;
            }
        }
        let begun = Instant::now();
        tokio::select! {
            () = changes.next(limit) => {
                news |= begun.elapsed() < limit;
                tokio::time::sleep(TOGETHER).await;
            }
            () = to.closed() => return,
        }
    }
}

/// `GET /logs/…`: a file of the node's log directory, or what is in a directory.
pub async fn of_node(path: &str) -> Result<Response<Body>, Refusal> {
    below(path, true).await
}

/// A file alone.
pub async fn of_file(path: &str) -> Result<Response<Body>, Refusal> {
    below(path, false).await
}

async fn below(path: &str, lists: bool) -> Result<Response<Body>, Refusal> {
    let root = Path::new("/var/log");
    let path = PathBuf::from(if path.is_empty() { "." } else { path });
    let found = blocking(move || {
        let dir = crate::sys::beneath::Dir::open(root).map_err(|e| e.to_string())?;
        Ok(match dir.list(&path) {
            Ok(names) => lists.then_some(Err(names)),
            // The links to logs in `containers` have absolute paths.
            Err(_) => dir.open_linked(root, &path).ok().map(Ok),
        })
    });
    let missing = || Refusal(StatusCode::NOT_FOUND, "404 page not found".into());
    match found
        .await
        .map_err(|e| Refusal(StatusCode::INTERNAL_SERVER_ERROR, e))?
        .ok_or_else(missing)?
    {
        Err(names) => Ok(text(
            StatusCode::OK,
            names
                .iter()
                .map(|name| format!("{name}\n"))
                .collect::<String>(),
        )),
        Ok(mut file) => {
            let (sender, pieces) = mpsc::channel(AHEAD);
            tokio::spawn(async move {
                loop {
                    let took = blocking(move || {
                        let mut piece = vec![0; 64 << 10];
                        let length = std::io::Read::read(&mut file, &mut piece)
                            .map_err(|e| e.to_string())?;
                        piece.truncate(length);
                        Ok((file, piece))
                    });
                    let Ok((back, piece)) = took.await else {
                        return;
                    };
                    file = back;
                    if piece.is_empty() || sender.send(piece.into()).await.is_err() {
                        return;
                    }
                }
            });
            Ok(stream(pieces))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn known(status: Value) -> Known {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}, "status": status});
        Known {
            pod: Arc::new(serde_json::from_value(pod).expect("a pod")),
            object: None,
        }
    }

    fn observed(states: &[(u32, ContainerState)]) -> ObservedPod {
        let at = jiff::Timestamp::UNIX_EPOCH;
        let of = |(attempt, state): &(u32, ContainerState)| crate::core::pod::observed::Container {
            id: format!("id{attempt}"),
            name: "c".into(),
            sandbox: String::new(),
            attempt: *attempt,
            state: *state,
            created_at: at,
            started_at: None,
            finished_at: None,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            hash: None,
            user: None,
            stop_signal: None,
            message_file: None,
        };
        ObservedPod {
            sandboxes: vec![],
            containers: states.iter().map(of).collect(),
        }
    }

    #[test]
    fn the_previous_instance_is_the_one_that_the_status_tells() {
        use ContainerState::{Exited, Running};
        let told = |state: Value, last: Value| {
            known(
                json!({"containerStatuses": [{"name": "c", "ready": false, "restartCount": 2, "image": "", "imageID": "", "state": state, "lastState": last}]}),
            )
        };
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let ended = |id: &str| json!({"terminated": {"exitCode": 1, "containerID": id}});
        for (state, last, observed_, expected) in [
            (
                &waiting,
                ended("containerd://id2"),
                &[(2, Exited)][..],
                Some(2),
            ),
            // The status comes after the runtime.
            (&waiting, ended("containerd://id1"), &[(2, Exited)], Some(2)),
            (&waiting, json!({}), &[(2, Exited)], Some(2)),
            (
                &json!({"running": {}}),
                ended("containerd://id1"),
                &[(2, Running), (1, Exited)],
                Some(1),
            ),
            (&ended("containerd://id0"), json!({}), &[(0, Exited)], None),
            (&waiting, json!({}), &[], None),
        ] {
            let chosen = instance(&told(state.clone(), last), &observed(observed_), "c", true);
            assert_eq!(chosen.ok().map(|i| i.attempt), expected, "{state}");
        }
    }

    #[test]
    fn the_right_instance_is_read() {
        use ContainerState::{Created, Exited, Running};
        let none = known(Value::Null);
        let choose = |states: &[(u32, ContainerState)], previous| {
            instance(&none, &observed(states), "c", previous)
                .map(|i| (i.attempt, i.running.is_some()))
        };
        assert_eq!(choose(&[(1, Running), (0, Exited)], false), Ok((1, true)));
        assert_eq!(choose(&[(1, Running), (0, Exited)], true), Ok((0, false)));
        assert_eq!(
            choose(&[(1, Created), (0, Exited)], false),
            Ok((0, false)),
            "one that has not begun has said nothing"
        );
        assert_eq!(choose(&[(0, Exited)], false), Ok((0, false)));
        assert!(choose(&[(0, Running)], true).is_err_and(|r| r.1 == "previous terminated container \"c\" in pod \"p\" not found"));
        assert!(
            choose(&[], false)
                .is_err_and(|r| r.1.ends_with("is waiting to start: ContainerCreating"))
        );
        let waiting = known(
            json!({"containerStatuses": [{"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}),
        );
        assert!(
            instance(&waiting, &observed(&[]), "c", false)
                .is_err_and(|r| r.0 == StatusCode::BAD_REQUEST
                    && r.1.ends_with("trying and failing to pull image"))
        );
        let over = known(
            json!({"containerStatuses": [{"name": "c", "ready": false, "restartCount": 3, "image": "", "imageID": "", "state": {"terminated": {"exitCode": 0}}}]}),
        );
        assert_eq!(
            instance(&over, &observed(&[]), "c", false).map(|i| i.attempt),
            Ok(3)
        );
        assert!(
            instance(&none, &observed(&[]), "d", false)
                .is_err_and(|r| r.0 == StatusCode::NOT_FOUND)
        );
    }
}
