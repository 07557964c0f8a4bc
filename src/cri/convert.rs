//! Converts the runtime's messages to our own types.

use std::path::Path;

use holdfast_proto::cri as pb;
use jiff::Timestamp;

use super::Features;
use super::Handler;
use holdfast_core::pod::cri_config::{annotation, label, signal_name};
use holdfast_core::pod::observed::{Container, ContainerState, Sandbox, User};

fn time(nanos: i64) -> Option<Timestamp> {
    (nanos > 0)
        .then(|| Timestamp::from_nanosecond(i128::from(nanos)).ok())
        .flatten()
}

pub(super) fn state(value: i32) -> ContainerState {
    match pb::ContainerState::try_from(value) {
        Ok(pb::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(pb::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(pb::ContainerState::ContainerExited) => ContainerState::Exited,
        _ => ContainerState::Unknown,
    }
}

/// Converts a listed container; [`complete`] adds the fields that only its status has.
pub(super) fn container(listed: &pb::Container) -> Option<Container> {
    let metadata = listed.metadata.as_ref()?;
    let attempt = listed
        .annotations
        .get(annotation::RESTARTS)
        .and_then(|r| r.parse().ok())
        .unwrap_or(metadata.attempt);
    Some(Container {
        id: listed.id.clone(),
        name: listed.labels.get(label::CONTAINER)?.clone(),
        sandbox: listed.pod_sandbox_id.clone(),
        attempt,
        state: state(listed.state),
        created_at: time(listed.created_at).unwrap_or(Timestamp::UNIX_EPOCH),
        started_at: None,
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: listed
            .image
            .as_ref()
            .map(|i| i.image.clone())
            .unwrap_or_default(),
        image_ref: listed.image_ref.clone(),
        hash: listed.annotations.get(annotation::HASH).cloned(),
        user: None,
        stop_signal: None,
        message_file: None,
    })
}

/// Returns the name of the file with a container's termination message. The file is mounted at the message's path and
/// lies in the pod's own directory for the container. A volume may be mounted at the same path, so files in other
/// directories are not read.
fn message_file(status: &pb::ContainerStatus) -> Option<String> {
    let get = |key: &str| status.labels.get(key);
    let place = Path::new("pods")
        .join(get(label::POD_UID)?)
        .join("containers")
        .join(get(label::CONTAINER)?);
    let inside = Path::new("/").join(status.annotations.get(annotation::MESSAGE_PATH)?);
    let mounts = status.mounts.iter();
    let mut files = mounts
        .filter(|mount| Path::new(&mount.container_path) == inside)
        .map(|mount| Path::new(&mount.host_path));
    let file = files.find(|file| file.parent().is_some_and(|dir| dir.ends_with(&place)))?;
    Some(file.file_name()?.to_str()?.to_owned())
}

/// Converts a container from its status alone, which does not name the sandbox.
pub(super) fn container_of(status: &pb::ContainerStatus, sandbox: &str) -> Option<Container> {
    let mut container = container(&pb::Container {
        id: status.id.clone(),
        pod_sandbox_id: sandbox.to_owned(),
        metadata: status.metadata.clone(),
        image: status.image.clone(),
        image_ref: status.image_ref.clone(),
        state: status.state,
        created_at: status.created_at,
        labels: status.labels.clone(),
        annotations: status.annotations.clone(),
        ..pb::Container::default()
    })?;
    complete(&mut container, status);
    Some(container)
}

/// Adds the fields that a container's status has and its listing lacks.
pub(super) fn complete(container: &mut Container, status: &pb::ContainerStatus) {
    container.state = state(status.state);
    container.started_at = time(status.started_at);
    container.finished_at = time(status.finished_at);
    container.user = status
        .user
        .as_ref()
        .and_then(|u| u.linux.as_ref())
        .map(|u| User {
            uid: u.uid,
            gid: u.gid,
            groups: u.supplemental_groups.clone(),
        });
    container.stop_signal = pb::Signal::try_from(status.stop_signal)
        .ok()
        .and_then(signal_name);
    if container.state == ContainerState::Exited {
        container.message_file = message_file(status);
    }
    container.exit_code = status.exit_code;
    container.reason.clone_from(&status.reason);
    container.message.clone_from(&status.message);
    if let Some(image) = status.image.as_ref().filter(|i| !i.image.is_empty()) {
        container.image.clone_from(&image.image);
    }
    if !status.image_ref.is_empty() {
        container.image_ref.clone_from(&status.image_ref);
    }
}

pub(super) fn features(answer: &pb::StatusResponse, runtime: &str) -> Features {
    let handler = |h: &pb::RuntimeHandler| {
        let features = h.features.unwrap_or_default();
        Handler {
            name: h.name.clone(),
            recursive_read_only: features.recursive_read_only_mounts,
            user_namespaces: features.user_namespaces,
        }
    };
    Features {
        runtime: runtime.to_owned(),
        handlers: answer.runtime_handlers.iter().map(handler).collect(),
        strict_groups: answer
            .features
            .is_some_and(|f| f.supplemental_groups_policy),
    }
}

pub(super) fn sandbox(listed: &pb::PodSandbox) -> Option<Sandbox> {
    Some(Sandbox {
        id: listed.id.clone(),
        attempt: listed.metadata.as_ref()?.attempt,
        ready: listed.state == pb::PodSandboxState::SandboxReady as i32,
        created_at: time(listed.created_at).unwrap_or(Timestamp::UNIX_EPOCH),
        ips: vec![],
        host_network: false,
        handler: listed.runtime_handler.clone(),
    })
}

/// Returns the addresses of a sandbox, and whether it is on the host network.
pub(super) fn network(status: &pb::PodSandboxStatus) -> (Vec<String>, bool) {
    let options = status
        .linux
        .as_ref()
        .and_then(|l| l.namespaces.as_ref())
        .and_then(|n| n.options.as_ref());
    let host = options.is_some_and(|o| o.network == pb::NamespaceMode::Node as i32);
    let network = status.network.clone().unwrap_or_default();
    let ips = std::iter::once(network.ip)
        .chain(network.additional_ips.into_iter().map(|i| i.ip))
        .filter(|ip| !ip.is_empty());
    (if host { vec![] } else { ips.collect() }, host)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSIDE: &str = "/dev/termination-log";
    const OWN: &str = "/var/lib/kubelet/pods/u/containers/c/1a2b3c4d";

    /// The message's path, the mounts as (path in the container, path on the host), and the file that is found.
    type Case = (
        &'static str,
        &'static [(&'static str, &'static str)],
        Option<&'static str>,
    );
    const CASES: [Case; 9] = [
        (
            INSIDE,
            &[("/data", "/srv"), (INSIDE, OWN)],
            Some("1a2b3c4d"),
        ),
        ("dev/termination-log", &[(INSIDE, OWN)], Some("1a2b3c4d")),
        (
            INSIDE,
            &[(INSIDE, "/etc/shadow"), (INSIDE, OWN)],
            Some("1a2b3c4d"),
        ),
        (INSIDE, &[(INSIDE, "/etc/shadow")], None),
        (INSIDE, &[(INSIDE, "/k/pods/other/containers/c/1a")], None),
        (INSIDE, &[(INSIDE, "/k/pods/u/containers/c/..")], None),
        (
            INSIDE,
            &[(INSIDE, "/k/pods/u/containers/c/x/../../y")],
            None,
        ),
        (INSIDE, &[("/elsewhere", OWN)], None),
        ("", &[(INSIDE, OWN)], None),
    ];

    #[test]
    fn the_termination_message_of_an_exited_container_is_in_the_mounted_file() {
        for (path, mounts, expected) in CASES {
            let mounts = mounts.iter().map(|(inside, here)| pb::Mount {
                container_path: (*inside).into(),
                host_path: (*here).into(),
                ..pb::Mount::default()
            });
            let mut status = pb::ContainerStatus {
                state: pb::ContainerState::ContainerExited as i32,
                labels: [(label::POD_UID, "u"), (label::CONTAINER, "c")]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
                annotations: [(annotation::MESSAGE_PATH.to_owned(), path.to_owned())].into(),
                mounts: mounts.collect(),
                ..pb::ContainerStatus::default()
            };
            let listed = pb::Container {
                labels: status.labels.clone(),
                metadata: Some(pb::ContainerMetadata::default()),
                ..pb::Container::default()
            };
            let mut found = container(&listed).expect("a container");
            complete(&mut found, &status);
            assert_eq!(found.message_file.as_deref(), expected, "{path} {status:?}");
            status.state = pb::ContainerState::ContainerRunning as i32;
            found.message_file = None;
            complete(&mut found, &status);
            assert_eq!(
                found.message_file, None,
                "a running container has no termination message"
            );
        }
    }
}
