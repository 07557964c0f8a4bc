//! `/containerLogs`, and the node's own log files
//! (`pkg/kubelet/kuberuntime/kuberuntime_logs.go`, `pkg/kubelet/server/server.go`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::{Response, StatusCode};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Refusal;
use super::Server;
use crate::pod::table::Known;
use holdfast_core::pod;
use holdfast_core::pod::observed::{Container, ContainerState, ObservedPod};
use holdfast_core::serving::logs::Decoder;
use holdfast_core::serving::{LogOptions, PodTarget};
use holdfast_cri::Runtime;
use holdfast_host::blocking;
use holdfast_host::serving::logfile::{LogFile, Next};
use holdfast_https::{Body, BoxError, text};
use holdfast_sys::watch::Changes;

/// Limit for pieces that wait for a slow client.
const MAX_QUEUED_PIECES: usize = 2;
/// Maximum time between reads of a log without changes, and between checks whether its container is running.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(500));
/// How long to wait for writes of the runtime to a log that was rotated.
const ROTATION_DELAY: Duration = Duration::from_millis(50);
/// Output of a container within this time is sent together.
const COALESCE_TIME: Duration = Duration::from_millis(10);

/// The container instance of a log.
#[derive(Debug, PartialEq, Eq)]
struct Instance {
    attempt: u32,
    /// The runtime's id, if the instance is running.
    running: Option<String>,
    /// For an instance that the runtime does not have: the error message if its log does not exist either.
    forgotten: Option<String>,
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

/// The instance that a status reports as the last one. While a container waits for its restart this is the
/// newest one, and the runtime may have no other.
fn last<'a>(
    container_status: Option<&ContainerStatus>,
    observed: &'a ObservedPod,
    newest: Option<&'a Container>,
) -> Option<&'a Container> {
    let container_status = container_status?;
    let ended = container_status
        .last_state
        .as_ref()
        .and_then(|s| s.terminated.as_ref());
    let id = ended
        .and_then(|t| t.container_id.as_deref())
        .and_then(|id| id.split_once("://"));
    let named = id.and_then(|(_, id)| observed.containers.iter().find(|c| c.id == id));
    let waits = container_status
        .state
        .as_ref()
        .is_some_and(|s| s.waiting.is_some());
    named.or(newest.filter(|c| waits && c.state == ContainerState::Exited))
}

/// The id of the log's instance, from the status alone, in the kubelet's order and words
/// (`validateContainerLogStatus`). `None` for a terminated instance with an unknown id.
fn published_id(
    container_status: Option<&ContainerStatus>,
    name: &str,
    container: &str,
    previous: bool,
) -> Result<Option<String>, String> {
    let about = format!("container {container:?} in pod {name:?}");
    let container_status = container_status.ok_or_else(|| format!("{about} is not available"))?;
    let id = |id: Option<&String>| id.filter(|id| !id.is_empty()).cloned();
    let of_last = container_status
        .last_state
        .as_ref()
        .and_then(|s| s.terminated.as_ref());
    let last = id(of_last.and_then(|t| t.container_id.as_ref()));
    let state = container_status.state.as_ref();
    let ended = state.and_then(|s| s.terminated.as_ref());
    if previous {
        let missing = || format!("previous terminated {about} not found");
        return last.map(Some).ok_or_else(missing);
    }
    if state.is_some_and(|s| s.running.is_some()) {
        return Ok(id(container_status.container_id.as_ref()));
    }
    if let Some(ended) = ended {
        return Ok(id(ended.container_id.as_ref()).or(last));
    }
    if of_last.is_some() {
        return Ok(last);
    }
    let Some(waiting) = state.and_then(|s| s.waiting.as_ref()) else {
        return Err(format!("{about} is waiting to start - no logs yet"));
    };
    let why = match waiting.reason.as_deref().unwrap_or("ContainerCreating") {
        "ErrImagePull" => "image can't be pulled",
        "ImagePullBackOff" => "trying and failing to pull image",
        reason => reason,
    };
    Err(format!("{about} is waiting to start: {why}"))
}

/// The error message when an instance's log is not available; `id` is the one in the status.
fn unavailable(id: Option<&str>, name: &str, container: &str) -> String {
    match id {
        Some(id) => format!("unable to retrieve container logs for {id}"),
        None => format!("container {container:?} in pod {name:?} is terminated"),
    }
}

fn bad_request(why: String) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, why)
}

/// Chooses the instance. Pure. If the runtime does not have it, its log may still exist as long as the pod does.
fn instance(
    known: &Known,
    observed: &ObservedPod,
    container: &str,
    previous: bool,
) -> Result<Instance, Refusal> {
    let (newest, before) = observed.latest_two(container);
    let container_status = status(known.status_object(), container);
    let begun = match previous {
        true => last(container_status, observed, newest).or(before),
        false => newest
            .filter(|c| c.state != ContainerState::Created)
            .or(before),
    };
    if let Some(c) = begun {
        let runs = !previous && c.state == ContainerState::Running;
        return Ok(Instance {
            attempt: c.attempt,
            running: runs.then(|| c.id.clone()),
            forgotten: None,
        });
    }
    let name = known.pod.name_any();
    // The status may be older than the runtime's answer.
    let nothing = ContainerStatus::default();
    let container_status = container_status.or(newest.map(|_| &nothing));
    let id = published_id(container_status, &name, container, previous).map_err(bad_request)?;
    let why = unavailable(id.as_deref(), &name, container);
    if previous {
        return Err(bad_request(why));
    }
    let count = container_status.map_or(0, |container_status| container_status.restart_count);
    Ok(Instance {
        attempt: u32::try_from(count).unwrap_or(0),
        running: None,
        forgotten: Some(why),
    })
}

/// Finds the pod of the request's container.
fn find(server: &Server, place: &PodTarget) -> Result<Known, Refusal> {
    let known = server.find(place).ok_or_else(|| {
        Refusal(
            StatusCode::NOT_FOUND,
            format!("pod {:?} does not exist", place.pod),
        )
    })?;
    let mut containers = pod::containers(&known.pod).into_iter();
    if containers.any(|(_, c)| c.name == place.container) {
        return Ok(known);
    }
    let why = format!(
        "container {:?} not found in pod {:?}",
        place.container, place.pod
    );
    Err(Refusal(StatusCode::NOT_FOUND, why))
}

/// `GET /containerLogs/…`.
pub(crate) async fn serve_container_log(
    server: &Arc<Server>,
    place: &PodTarget,
    query: &str,
) -> Result<Response<Body>, Refusal> {
    let parts = &server.parts;
    let options = LogOptions::parse(query, parts.clock.now()).map_err(Refusal::of)?;
    let known = find(server, place)?;
    let container = &place.container;
    let observed = match parts.runtime.observe(pod::uid(&known.pod)).await {
        Ok(observed) => observed,
        Err(error) => {
            tracing::debug!(%error, container, "cannot read a log: the runtime does not answer");
            let container_status = status(known.status_object(), container);
            let id = published_id(container_status, &place.pod, container, options.previous)
                .map_err(bad_request)?;
            return Err(bad_request(unavailable(
                id.as_deref(),
                &place.pod,
                container,
            )));
        }
    };
    let instance = instance(&known, &observed, container, options.previous)?;
    let dir = parts.host.log_directory(&known.pod);
    let name = PathBuf::from(container).join(format!("{}.log", instance.attempt));
    let (whole, tail, path) = (dir.clone(), options.tail, dir.join(&name));
    let opened = blocking(move || Ok(LogFile::open(&whole, &name, tail)?)).await;
    let log = opened.map_err(|e| {
        let open = || format!("failed to open log file {path:?}: {e}");
        bad_request(instance.forgotten.unwrap_or_else(open))
    })?;
    let (sender, pieces) = mpsc::channel(MAX_QUEUED_PIECES);
    let decoder = Decoder::new(&options);
    let decoder = match log.tail() {
        Some(start) => decoder.starting_at(start),
        None => decoder,
    };
    let follow = options.follow.then(|| Following {
        runtime: Arc::clone(&parts.runtime),
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

/// A log that is followed while its container is running.
struct Following {
    runtime: Arc<dyn Runtime>,
    dir: PathBuf,
    uid: String,
    id: Option<String>,
}

impl Following {
    /// Whether more output may follow. An unknown state counts as running.
    async fn may_continue(&self) -> bool {
        let Some(id) = &self.id else { return false };
        match self.runtime.observe(&self.uid).await {
            Ok(pod) => pod
                .containers
                .iter()
                .any(|c| c.id == *id && c.state == ContainerState::Running),
            Err(_) => true,
        }
    }
}

/// Reads to the current end of a log. `None` if the client has
/// disconnected, has enough lines, or the log cannot be read.
async fn read_to_end(
    mut log: LogFile,
    decoder: &mut Decoder,
    to: &mpsc::Sender<Bytes>,
) -> Option<LogFile> {
    loop {
        let took = blocking(move || {
            let piece = log.read()?;
            let next = match piece.is_empty() {
                true => log.follow()?,
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
                tracing::debug!(%error, "reading a log failed");
                return None;
            }
        };
        let out = decoder.push(&piece);
        if !out.is_empty() && to.send(out.into()).await.is_err() {
            return None;
        }
        if decoder.is_complete() {
            return None;
        }
        match next {
            Next::Same if piece.is_empty() => return Some(log),
            Next::Ending => tokio::time::sleep(ROTATION_DELAY).await,
            Next::Same | Next::Another => {}
        }
    }
}

/// Reads until the log is complete or the client disconnects.
async fn read(
    mut log: LogFile,
    mut decoder: Decoder,
    follow: Option<Following>,
    to: mpsc::Sender<Bytes>,
) {
    let mut last_check: Option<Instant> = None;
    // Whether there was output since the last check of the container.
    let mut has_new_output = true;
    let mut ended = false;
    // Watched before reading: later writes end the wait below.
    let mut changes = follow.as_ref().map(|f| Changes::with_writes(&f.dir));
    loop {
        let Some(back) = read_to_end(log, &mut decoder, &to).await else {
            return;
        };
        log = back;
        let (Some(follow), Some(changes), false) = (&follow, &mut changes, ended) else {
            let out = decoder.finish();
            if !out.is_empty() {
                // The client may have disconnected.
                let _ = to.send(out.into()).await;
            }
            return;
        };
        let soon = last_check
            .map(|at| POLL_INTERVALS.1.saturating_sub(at.elapsed()))
            .filter(|left| !left.is_zero());
        let limit = soon.unwrap_or(if has_new_output {
            POLL_INTERVALS.1
        } else {
            POLL_INTERVALS.0
        });
        if soon.is_none() {
            has_new_output = false;
            last_check = Some(Instant::now());
            if !follow.may_continue().await {
                // Read again: the container may have written after the last read.
                ended = true;
                continue;
            }
        }
        let begun = Instant::now();
        tokio::select! {
            () = changes.next(limit) => {
                has_new_output |= begun.elapsed() < limit;
                tokio::time::sleep(COALESCE_TIME).await;
            }
            () = to.closed() => return,
        }
    }
}

/// `GET /logs/…`: a file of the node's log directory, or the list of a directory.
pub(crate) async fn serve_node_log(path: &str) -> Result<Response<Body>, Refusal> {
    below(path, true).await
}

/// Serves a file, but no directories.
pub(crate) async fn serve_file(path: &str) -> Result<Response<Body>, Refusal> {
    below(path, false).await
}

async fn below(path: &str, lists: bool) -> Result<Response<Body>, Refusal> {
    let root = Path::new("/var/log");
    let path = PathBuf::from(if path.is_empty() { "." } else { path });
    let found = blocking(move || {
        let dir = holdfast_sys::beneath::Dir::open(root)?;
        Ok(match dir.list(&path) {
            Ok(names) => lists.then_some(Err(names)),
            // The links in `containers` are absolute.
            Err(_) => dir.open_linked(root, &path).ok().map(Ok),
        })
    });
    let missing = || Refusal(StatusCode::NOT_FOUND, "404 page not found".into());
    match found
        .await
        .map_err(|e| Refusal(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?
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
            let (sender, pieces) = mpsc::channel(MAX_QUEUED_PIECES);
            tokio::spawn(async move {
                loop {
                    let took = blocking(move || {
                        let mut piece = vec![0; 64 << 10];
                        let length = std::io::Read::read(&mut file, &mut piece)?;
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
            seen: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    fn observed(states: &[(u32, ContainerState)]) -> ObservedPod {
        let at = jiff::Timestamp::UNIX_EPOCH;
        let of =
            |(attempt, state): &(u32, ContainerState)| holdfast_core::pod::observed::Container {
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
    fn the_previous_instance_is_the_one_in_the_status() {
        use ContainerState::{Exited, Running};
        let with_status = |state: Value, last: Value| {
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
            // The status is older than the runtime's answer.
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
            let chosen = instance(
                &with_status(state.clone(), last),
                &observed(observed_),
                "c",
                true,
            );
            assert_eq!(chosen.ok().map(|i| i.attempt), expected, "{state}");
        }
    }

    #[test]
    fn the_requested_instance_is_read() {
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
            "a created container has no log yet"
        );
        assert_eq!(choose(&[(0, Exited)], false), Ok((0, false)));
        assert!(choose(&[(0, Running)], true).is_err_and(|r| r.1 == "previous terminated container \"c\" in pod \"p\" not found"));
    }

    /// A container state from one word: a waiting reason, `runs`, or the id of
    /// a terminated instance (`-` for an unknown id).
    fn state(word: &str) -> Value {
        match word {
            "" => json!({}),
            "runs" => json!({"running": {}}),
            "-" => json!({"terminated": {"exitCode": 137}}),
            id if id.starts_with("x:") => {
                json!({"terminated": {"exitCode": 1, "containerID": id}})
            }
            reason => json!({"waiting": {"reason": reason}}),
        }
    }

    /// Current and last state, the requested instance, whether its log is opened, and the message.
    const WITHOUT_LOGS: &str = "
/ now no # is waiting to start - no logs yet
ErrImagePull/ now no # is waiting to start: image can't be pulled
ImagePullBackOff/ now no # is waiting to start: trying and failing to pull image
PodInitializing/ now no # is waiting to start: PodInitializing
CrashLoopBackOff/x:1 now yes unable to retrieve container logs for x:1
CrashLoopBackOff/- now yes # is terminated
runs/x:1 now yes unable to retrieve container logs for x:own
x:2/x:1 now yes unable to retrieve container logs for x:2
-/x:1 now yes unable to retrieve container logs for x:1
-/ now yes # is terminated
runs/ previous no previous terminated # not found
runs/- previous no previous terminated # not found
runs/x:1 previous no unable to retrieve container logs for x:1";

    #[test]
    fn a_missing_log_has_the_kubelets_message() {
        let about = "container \"c\" in pod \"p\"";
        for case in WITHOUT_LOGS.lines().skip(1) {
            let words: Vec<&str> = case.splitn(4, ' ').collect();
            let (now, last) = words[0].split_once('/').expect("two states");
            let container_status = json!({"name": "c", "ready": false, "restartCount": 3, "image": "", "imageID": "", "containerID": "x:own", "state": state(now), "lastState": state(last)});
            let pod = known(json!({"containerStatuses": [container_status]}));
            let why = words[3].replace('#', about);
            let expected = match words[2] {
                "yes" => Ok((3, Some(why))),
                _ => Err(bad_request(why)),
            };
            let chosen = instance(&pod, &observed(&[]), "c", words[1] == "previous");
            let chosen = chosen.map(|i| (i.attempt, i.forgotten));
            assert_eq!(chosen, expected, "{case}");
        }
        let unknown = instance(&known(Value::Null), &observed(&[]), "c", false);
        assert_eq!(
            unknown,
            Err(bad_request(format!("{about} is not available")))
        );
    }
}
