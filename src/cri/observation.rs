//! Observes pods, sandboxes and containers in the runtime. Details that cannot change any more are cached.

use std::collections::{BTreeMap, HashMap};
use std::sync::MutexGuard;

use holdfast_proto::cri as pb;
use tonic::Code;

use super::cache::{Detail, Remembered};
use super::client::CriClient;
use super::{Layer, ListedPod, RunningContainer, RuntimeError, convert};
use holdfast_core::lock::lock;
use holdfast_core::node::collection::DeadContainer;
use holdfast_core::pod::cri_config::label;
use holdfast_core::pod::observed::{Container, ContainerState, ObservedPod, fingerprint};

impl CriClient {
    pub(super) async fn sandboxes(
        &self,
        filter: Option<HashMap<String, String>>,
    ) -> Result<Vec<pb::PodSandbox>, RuntimeError> {
        let filter = filter.map(|label_selector| pb::PodSandboxFilter {
            label_selector,
            ..pb::PodSandboxFilter::default()
        });
        Ok(self
            .runtime
            .clone()
            .list_pod_sandbox(self.request(pb::ListPodSandboxRequest { filter }))
            .await?
            .into_inner()
            .items)
    }

    pub(super) async fn containers(
        &self,
        filter: Option<pb::ContainerFilter>,
    ) -> Result<Vec<pb::Container>, RuntimeError> {
        Ok(self
            .runtime
            .clone()
            .list_containers(self.request(pb::ListContainersRequest { filter }))
            .await?
            .into_inner()
            .containers)
    }

    /// Lists the exited containers of pods.
    pub(super) async fn list_dead_containers(&self) -> Result<Vec<DeadContainer>, RuntimeError> {
        let ended = pb::ContainerStateValue {
            state: pb::ContainerState::ContainerExited as i32,
        };
        let filter = pb::ContainerFilter {
            state: Some(ended),
            ..pb::ContainerFilter::default()
        };
        let of = |listed: &pb::Container| {
            let get = |key: &str| listed.labels.get(key).cloned();
            let container = convert::container(listed)?;
            Some(DeadContainer {
                namespace: get(label::POD_NAMESPACE)?,
                pod: get(label::POD_NAME)?,
                uid: get(label::POD_UID)?,
                id: container.id,
                name: container.name,
                attempt: container.attempt,
                created_at: container.created_at,
            })
        };
        let listed = self.containers(Some(filter)).await?;
        Ok(listed.iter().filter_map(of).collect())
    }

    fn details(&self) -> MutexGuard<'_, Remembered<(String, ContainerState), Detail>> {
        lock(&self.details)
    }

    /// Adds the details of a container, from the cache if they cannot have changed. `None` if the container does not
    /// exist.
    async fn detail(&self, mut container: Container) -> Result<Option<Container>, RuntimeError> {
        let key = (container.id.clone(), container.state);
        let known = self.details().get(&key).cloned();
        if let Some(known) = known.as_ref().filter(|known| known.is_final) {
            return Ok(Some(known.container.clone()));
        }
        let Some(answer) = self.ask_status(&container.id).await? else {
            return Ok(None);
        };
        if let Some(status) = answer.status {
            convert::complete(&mut container, &status);
            self.remember(key, &container, known.as_ref());
        }
        Ok(Some(container))
    }

    /// Queries the status of a container; `None` if it does not exist.
    async fn ask_status(
        &self,
        id: &str,
    ) -> Result<Option<pb::ContainerStatusResponse>, RuntimeError> {
        let request = self.request(pb::ContainerStatusRequest {
            container_id: id.to_owned(),
            verbose: false,
        });
        match self.runtime.clone().container_status(request).await {
            Ok(answer) => Ok(Some(answer.into_inner())),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status.into()),
        }
    }

    fn remember(
        &self,
        key: (String, ContainerState),
        container: &Container,
        before: Option<&Detail>,
    ) {
        let Some(detail) = Detail::of(container, before) else {
            return;
        };
        self.details().insert(key, detail);
    }

    /// Queries one container of a sandbox without the cache; `None` if it does not exist.
    pub(super) async fn container_status(
        &self,
        id: &str,
        sandbox: &str,
    ) -> Result<Option<Container>, RuntimeError> {
        let status = self.ask_status(id).await?.and_then(|answer| answer.status);
        let container = status.and_then(|s| convert::container_of(&s, sandbox));
        if let Some(container) = &container {
            let key = (container.id.clone(), container.state);
            self.remember(key, container, None);
        }
        Ok(container)
    }

    /// Returns the addresses of a sandbox, and whether it is on the host network; `None` if it does not exist.
    pub(super) async fn network(
        &self,
        id: &str,
    ) -> Result<Option<(Vec<String>, bool)>, RuntimeError> {
        if let Some(known) = lock(&self.networks).get(id) {
            return Ok(Some(known.clone()));
        }
        let request = self.request(pb::PodSandboxStatusRequest {
            pod_sandbox_id: id.into(),
            verbose: false,
        });
        let status = match self.runtime.clone().pod_sandbox_status(request).await {
            Ok(answer) => answer.into_inner().status,
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(status.into()),
        };
        let Some(status) = status else {
            return Ok(None);
        };
        let network = convert::network(&status);
        lock(&self.networks).insert(id.into(), network.clone());
        Ok(Some(network))
    }

    /// Drops the cached details of a sandbox.
    pub(super) fn forget(&self, sandbox: &str) {
        lock(&self.networks).remove(sandbox);
        self.details()
            .retain(|detail| detail.container.sandbox != sandbox);
    }

    /// Lists the pods in the runtime, with a fingerprint of their state.
    pub(super) async fn list_pods(&self) -> Result<Vec<ListedPod>, RuntimeError> {
        let (sandboxes, containers) = (self.sandboxes(None).await?, self.containers(None).await?);
        let mut pods: HashMap<String, ListedPod> = HashMap::new();
        let mut add = |labels: &HashMap<String, String>, id: &str, state: u8, is_live: bool| {
            let get = |key: &str| labels.get(key).cloned();
            // Other programs may use the runtime: objects without a pod's labels are ignored.
            let (Some(uid), Some(name), Some(namespace)) = (
                get(label::POD_UID),
                get(label::POD_NAME),
                get(label::POD_NAMESPACE),
            ) else {
                return;
            };
            let pod = pods.entry(uid.clone()).or_insert(ListedPod {
                uid,
                name,
                namespace,
                fingerprint: 0,
                is_live: false,
            });
            pod.is_live |= is_live;
            pod.fingerprint = pod
                .fingerprint
                .wrapping_add(fingerprint(std::iter::once((id, state))));
        };
        for sandbox in &sandboxes {
            let is_ready = sandbox.state == pb::PodSandboxState::SandboxReady as i32;
            add(&sandbox.labels, &sandbox.id, u8::from(is_ready), is_ready);
        }
        for container in &containers {
            let state = convert::state(container.state);
            let is_live = matches!(state, ContainerState::Running | ContainerState::Unknown);
            add(&container.labels, &container.id, 10 + state as u8, is_live);
        }
        Ok(pods.into_values().collect())
    }

    /// Observes one pod in full.
    pub(super) async fn observe_pod(&self, uid: &str) -> Result<ObservedPod, RuntimeError> {
        let labels = HashMap::from([(label::POD_UID.to_owned(), uid.to_owned())]);
        let of_pod = pb::ContainerFilter {
            label_selector: labels.clone(),
            ..pb::ContainerFilter::default()
        };
        let (sandboxes, containers) =
            tokio::try_join!(self.sandboxes(Some(labels)), self.containers(Some(of_pod)))?;
        let mut observed = ObservedPod::default();
        for listed in &sandboxes {
            let Some(mut sandbox) = convert::sandbox(listed) else {
                continue;
            };
            if let Some((ips, host)) = self.network(&sandbox.id).await? {
                (sandbox.ips, sandbox.host_network) = (ips, host);
            }
            observed.sandboxes.push(sandbox);
        }
        for listed in &containers {
            let Some(container) = convert::container(listed) else {
                continue;
            };
            observed.containers.extend(self.detail(container).await?);
        }
        observed.sort();
        Ok(observed)
    }

    /// Returns the writable layers, by pod uid and container.
    pub(super) async fn writable_layers(
        &self,
    ) -> Result<BTreeMap<(String, String), Layer>, RuntimeError> {
        let all = self
            .runtime
            .clone()
            .list_container_stats(self.request(pb::ListContainerStatsRequest { filter: None }))
            .await?
            .into_inner()
            .stats;
        let of = |stats: pb::ContainerStats| {
            let labels = stats.attributes?.labels;
            let key = (
                labels.get(label::POD_UID)?.clone(),
                labels.get(label::CONTAINER)?.clone(),
            );
            let written = stats.writable_layer?;
            let layer = Layer {
                bytes: written.used_bytes?.value,
                inodes: written.inodes_used.map_or(0, |count| count.value),
                mountpoint: written.fs_id.unwrap_or_default().mountpoint.into(),
            };
            Some((key, layer))
        };
        Ok(all.into_iter().filter_map(of).collect())
    }

    /// Lists the running containers.
    pub(super) async fn list_running(&self) -> Result<Vec<RunningContainer>, RuntimeError> {
        let state = Some(pb::ContainerStateValue {
            state: pb::ContainerState::ContainerRunning as i32,
        });
        let filter = Some(pb::ContainerFilter {
            state,
            ..pb::ContainerFilter::default()
        });
        let listed = self.containers(filter).await?;
        let of = |c: &pb::Container| {
            let get = |key: &str| c.labels.get(key).cloned();
            let container = convert::container(c)?;
            Some(RunningContainer {
                id: container.id,
                namespace: get(label::POD_NAMESPACE)?,
                pod: get(label::POD_NAME)?,
                uid: get(label::POD_UID)?,
                name: container.name,
                attempt: container.attempt,
                sandbox: c.pod_sandbox_id.clone(),
            })
        };
        Ok(listed.iter().filter_map(of).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::pod::cri_config::annotation;

    /// A container's status alone gives the same container as its listing completed with the status.
    #[test]
    fn a_status_contains_all_fields_of_a_listing_except_the_sandbox() {
        let labels = || HashMap::from([(label::CONTAINER.to_owned(), "c".to_owned())]);
        let annotations = || HashMap::from([(annotation::RESTARTS.to_owned(), "4".to_owned())]);
        let image = |name: &str| {
            Some(pb::ImageSpec {
                image: name.into(),
                ..pb::ImageSpec::default()
            })
        };
        let listed = pb::Container {
            id: "c".into(),
            pod_sandbox_id: "box".into(),
            labels: labels(),
            annotations: annotations(),
            metadata: Some(pb::ContainerMetadata::default()),
            image: image("sha256:i"),
            image_ref: "sha256:i".into(),
            state: pb::ContainerState::ContainerRunning as i32,
            created_at: 7,
            ..pb::Container::default()
        };
        let status = pb::ContainerStatus {
            id: "c".into(),
            labels: labels(),
            annotations: annotations(),
            metadata: Some(pb::ContainerMetadata::default()),
            image: image("i:1"),
            image_ref: "i@sha256:d".into(),
            state: pb::ContainerState::ContainerRunning as i32,
            created_at: 7,
            started_at: 9,
            ..pb::ContainerStatus::default()
        };
        let mut expected = convert::container(&listed).expect("a container");
        convert::complete(&mut expected, &status);
        assert_eq!(convert::container_of(&status, "box"), Some(expected));
    }

    #[test]
    fn an_exited_status_is_final_when_it_was_read_twice_unchanged() {
        let listed = pb::Container {
            id: "c".into(),
            labels: [(label::CONTAINER.to_owned(), "c".to_owned())].into(),
            metadata: Some(pb::ContainerMetadata::default()),
            state: pb::ContainerState::ContainerExited as i32,
            ..pb::Container::default()
        };
        let mut ended = convert::container(&listed).expect("a container");
        let first = Detail::of(&ended, None).expect("a detail");
        assert!(!first.is_final, "an OOM event may still arrive");
        ended.reason = "OOMKilled".into();
        let second = Detail::of(&ended, Some(&first)).expect("a detail");
        assert!(!second.is_final, "the reason has changed");
        assert!(Detail::of(&ended, Some(&second)).is_some_and(|d| d.is_final));
        ended.state = ContainerState::Running;
        assert!(Detail::of(&ended, None).expect("a detail").is_final);
        ended.state = ContainerState::Created;
        assert!(Detail::of(&ended, None).is_none());
    }
}
