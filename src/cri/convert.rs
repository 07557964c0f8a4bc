//! From the runtime's messages to our own types.

use holdfast_proto::cri as pb;
use jiff::Timestamp;

use super::Features;
use super::Handler;
use crate::core::pod::cri_config::{annotation, label, signal_name};
use crate::core::pod::observed::{Container, ContainerState, Sandbox, User};

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

/// A listed container; what only its status has is filled in by [`complete`].
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
    })
}

/// Adds what the status of a container has over its listing.
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

pub(super) fn features(answer: &pb::StatusResponse) -> Features {
    let handler = |h: &pb::RuntimeHandler| {
        let features = h.features.unwrap_or_default();
        Handler {
            name: h.name.clone(),
            recursive_read_only: features.recursive_read_only_mounts,
            user_namespaces: features.user_namespaces,
        }
    };
    Features {
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
    })
}

/// The addresses of a sandbox and whether it is on the host network.
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
