//! The calls of the CRI v1 client, as the trait of a runtime.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use holdfast_proto::cri as pb;
use tokio::sync::mpsc;
use tonic::{Code, Request, Status};

use super::client::{CriClient, ignore_not_found};
use super::images::pull_request;
use super::{
    Credentials, Exec, Image, ImageFilesystem, ImageInventory, Layer, ListedPod, RunningContainer,
    Runtime, RuntimeError, RuntimeErrorKind, RuntimeStatus, Tasks, convert, tasks,
};
use holdfast_core::node::collection::DeadContainer;
use holdfast_core::node::leases::{self, Attachments};
use holdfast_core::pod::explain::Fetching;
use holdfast_core::pod::observed::{Container, ObservedPod, RuntimeEvent};
use holdfast_core::serving::Streams;
use holdfast_core::time;

impl CriClient {
    /// Removes a container or a sandbox. If orphaned tasks prevent the removal, they are killed first, because removal
    /// is forced.
    async fn removing<F>(&self, id: &str, remove: impl Fn() -> F) -> Result<(), RuntimeError>
    where
        F: Future<Output = Result<(), Status>>,
    {
        let refused = match remove().await {
            left if tasks::has_leftover_task(&left) => left,
            other => return ignore_not_found(other),
        };
        // A sandbox is removed together with its containers.
        let of_sandbox = pb::ContainerFilter {
            pod_sandbox_id: id.into(),
            ..pb::ContainerFilter::default()
        };
        let containers = self.containers(Some(of_sandbox)).await?;
        for id in containers.iter().map(|c| c.id.as_str()).chain([id]) {
            match tasks::end(&self.channel, id).await {
                // A runtime without containerd's tasks has refused for another reason.
                Err(e) if e.kind == RuntimeErrorKind::Unimplemented => {
                    return ignore_not_found(refused);
                }
                ended => ended?,
            }
        }
        ignore_not_found(remove().await)
    }
}

fn condition(conditions: &[pb::RuntimeCondition], kind: &str) -> Option<String> {
    match conditions.iter().find(|c| c.r#type == kind) {
        Some(c) if c.status => None,
        Some(c) => Some(format!(
            "{kind}=false reason:{} message:{}",
            c.reason, c.message
        )),
        None => Some(format!("{kind} condition is missing")),
    }
}

#[async_trait]
impl Runtime for CriClient {
    async fn status(&self) -> Result<RuntimeStatus, RuntimeError> {
        // First, because this call gives the best error message.
        let version = self.version().await?;
        let request = Self::within(
            Duration::from_secs(10),
            pb::StatusRequest { verbose: false },
        );
        let answer = self.runtime.clone().status(request).await?.into_inner();
        let name = version.split("://").next().unwrap_or_default();
        let features = convert::features(&answer, name);
        let status = answer.status.unwrap_or_default();
        Ok(RuntimeStatus {
            version,
            not_ready: condition(&status.conditions, "RuntimeReady"),
            network_not_ready: condition(&status.conditions, "NetworkReady"),
            features,
        })
    }

    async fn systemd_cgroups(&self) -> Result<Option<bool>, RuntimeError> {
        match self
            .runtime
            .clone()
            .runtime_config(self.request(pb::RuntimeConfigRequest {}))
            .await
        {
            Ok(answer) => Ok(answer
                .into_inner()
                .linux
                .map(|l| l.cgroup_driver == pb::CgroupDriver::Systemd as i32)),
            Err(status) if status.code() == Code::Unimplemented => Ok(None),
            Err(status) => Err(status.into()),
        }
    }

    async fn set_pod_cidrs(&self, cidrs: &str) -> Result<(), RuntimeError> {
        let network_config = Some(pb::NetworkConfig {
            pod_cidr: cidrs.to_owned(),
        });
        let request = self.request(pb::UpdateRuntimeConfigRequest {
            runtime_config: Some(pb::RuntimeConfig { network_config }),
        });
        self.runtime.clone().update_runtime_config(request).await?;
        Ok(())
    }

    async fn attachments(&self) -> Result<Attachments, RuntimeError> {
        let networks = leases::networks(&self.configuration().await?);
        let sandboxes = self.sandboxes(None).await?.into_iter().map(|s| s.id);
        Ok(Attachments {
            networks,
            sandboxes: sandboxes.collect(),
        })
    }

    async fn list(&self) -> Result<Vec<ListedPod>, RuntimeError> {
        self.list_pods().await
    }

    async fn observe(&self, uid: &str) -> Result<ObservedPod, RuntimeError> {
        self.observe_pod(uid).await
    }

    async fn container(&self, id: &str, sandbox: &str) -> Result<Option<Container>, RuntimeError> {
        self.container_status(id, sandbox).await
    }

    async fn run_sandbox(
        &self,
        config: pb::PodSandboxConfig,
        handler: &str,
    ) -> Result<String, RuntimeError> {
        let request = pb::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: handler.into(),
        };
        Ok(self
            .runtime
            .clone()
            .run_pod_sandbox(Self::within(self.deadline * 2, request))
            .await?
            .into_inner()
            .pod_sandbox_id)
    }

    async fn sandbox_ips(&self, id: &str) -> Result<Vec<String>, RuntimeError> {
        Ok(self
            .network(id)
            .await?
            .map(|(ips, _)| ips)
            .unwrap_or_default())
    }

    async fn stop_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        ignore_not_found(
            self.runtime
                .clone()
                .stop_pod_sandbox(self.request(pb::StopPodSandboxRequest {
                    pod_sandbox_id: id.into(),
                }))
                .await,
        )
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        let result = self
            .removing(id, || async {
                let request = self.request(pb::RemovePodSandboxRequest {
                    pod_sandbox_id: id.into(),
                });
                self.runtime.clone().remove_pod_sandbox(request).await?;
                Ok(())
            })
            .await;
        self.forget(id);
        result
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: pb::ContainerConfig,
        sandbox_config: pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError> {
        let request = pb::CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        Ok(self
            .runtime
            .clone()
            .create_container(self.request(request))
            .await?
            .into_inner()
            .container_id)
    }

    async fn start_container(&self, id: &str) -> Result<(), RuntimeError> {
        self.runtime
            .clone()
            .start_container(self.request(pb::StartContainerRequest {
                container_id: id.into(),
            }))
            .await?;
        Ok(())
    }

    async fn stop_container(&self, id: &str, grace: i64) -> Result<(), RuntimeError> {
        let deadline = self.deadline.saturating_add(time::span(grace));
        let request = Self::within(
            deadline,
            pb::StopContainerRequest {
                container_id: id.into(),
                timeout: grace,
            },
        );
        ignore_not_found(self.runtime.clone().stop_container(request).await)
    }

    async fn update_container(
        &self,
        id: &str,
        resources: pb::LinuxContainerResources,
    ) -> Result<(), RuntimeError> {
        let message = pb::UpdateContainerResourcesRequest {
            container_id: id.into(),
            linux: Some(resources),
            ..Default::default()
        };
        self.runtime
            .clone()
            .update_container_resources(self.request(message))
            .await?;
        Ok(())
    }

    async fn update_sandbox(
        &self,
        id: &str,
        sizes: pb::LinuxPodSandboxConfig,
    ) -> Result<(), RuntimeError> {
        let (overhead, resources) = (sizes.overhead, sizes.resources);
        let message = pb::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: id.into(),
            overhead,
            resources,
        };
        self.runtime
            .clone()
            .update_pod_sandbox_resources(self.request(message))
            .await?;
        Ok(())
    }

    async fn memory_in_use(&self, id: &str) -> Result<u64, RuntimeError> {
        let stats = self
            .runtime
            .clone()
            .container_stats(self.request(pb::ContainerStatsRequest {
                container_id: id.into(),
            }))
            .await?
            .into_inner()
            .stats;
        let memory = stats
            .and_then(|s| s.memory)
            .and_then(|m| m.usage_bytes.or(m.working_set_bytes));
        Ok(memory.map_or(0, |m| m.value))
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Option<Duration>,
    ) -> Result<Exec, RuntimeError> {
        // The runtime counts whole seconds, and stops the command itself after them.
        let seconds = timeout.map_or(0, |t| {
            i64::try_from(t.as_secs_f64().ceil() as u64).unwrap_or(i64::MAX)
        });
        let message = pb::ExecSyncRequest {
            container_id: id.into(),
            cmd: command.to_vec(),
            timeout: seconds,
        };
        let request = match timeout {
            Some(timeout) => Self::within(self.deadline + timeout, message),
            None => Request::new(message),
        };
        let answer = self.runtime.clone().exec_sync(request).await?.into_inner();
        let output = [answer.stdout, answer.stderr].concat();
        Ok(Exec {
            code: answer.exit_code,
            output: String::from_utf8_lossy(&output).into_owned(),
        })
    }

    fn tasks(&self) -> Option<Tasks> {
        Some(Tasks::new(self.channel.clone()))
    }

    async fn exec_url(
        &self,
        id: &str,
        command: &[String],
        streams: Streams,
    ) -> Result<String, RuntimeError> {
        let Streams {
            stdin,
            stdout,
            stderr,
            tty,
        } = streams;
        let message = pb::ExecRequest {
            container_id: id.into(),
            cmd: command.to_vec(),
            tty,
            stdin,
            stdout,
            stderr,
        };
        Ok(self
            .runtime
            .clone()
            .exec(self.request(message))
            .await?
            .into_inner()
            .url)
    }

    async fn attach_url(&self, id: &str, streams: Streams) -> Result<String, RuntimeError> {
        let Streams {
            stdin,
            stdout,
            stderr,
            tty,
        } = streams;
        let message = pb::AttachRequest {
            container_id: id.into(),
            stdin,
            tty,
            stdout,
            stderr,
        };
        Ok(self
            .runtime
            .clone()
            .attach(self.request(message))
            .await?
            .into_inner()
            .url)
    }

    async fn forward_url(&self, sandbox: &str, ports: &[i32]) -> Result<String, RuntimeError> {
        let message = pb::PortForwardRequest {
            pod_sandbox_id: sandbox.into(),
            port: ports.to_vec(),
        };
        Ok(self
            .runtime
            .clone()
            .port_forward(self.request(message))
            .await?
            .into_inner()
            .url)
    }

    async fn layers(&self) -> Result<BTreeMap<(String, String), Layer>, RuntimeError> {
        self.writable_layers().await
    }

    async fn running(&self) -> Result<Vec<RunningContainer>, RuntimeError> {
        self.list_running().await
    }

    async fn reopen_log(&self, id: &str) -> Result<(), RuntimeError> {
        self.runtime
            .clone()
            .reopen_container_log(self.request(pb::ReopenContainerLogRequest {
                container_id: id.into(),
            }))
            .await?;
        Ok(())
    }

    async fn checkpoint(
        &self,
        id: &str,
        path: &str,
        timeout: Duration,
    ) -> Result<(), RuntimeError> {
        let seconds = i64::try_from(timeout.as_secs()).unwrap_or(0);
        let request = pb::CheckpointContainerRequest {
            container_id: id.into(),
            location: path.into(),
            timeout: seconds,
        };
        // The call takes as long as writing the container's memory.
        let request = if seconds > 0 {
            Self::within(timeout + self.deadline, request)
        } else {
            Request::new(request)
        };
        self.runtime.clone().checkpoint_container(request).await?;
        Ok(())
    }

    async fn dead_containers(&self) -> Result<Vec<DeadContainer>, RuntimeError> {
        self.list_dead_containers().await
    }

    async fn remove_container(&self, id: &str) -> Result<(), RuntimeError> {
        self.removing(id, || async {
            let request = self.request(pb::RemoveContainerRequest {
                container_id: id.into(),
            });
            self.runtime.clone().remove_container(request).await?;
            Ok(())
        })
        .await
    }

    async fn image(&self, name: &str) -> Result<Option<Image>, RuntimeError> {
        self.image_status(name).await
    }

    async fn images(&self) -> Result<Vec<Image>, RuntimeError> {
        self.list_images().await
    }

    async fn image_inventory(&self) -> Result<ImageInventory, RuntimeError> {
        self.list_image_inventory().await
    }

    async fn image_filesystem(&self) -> Result<ImageFilesystem, RuntimeError> {
        self.image_filesystem_info().await
    }

    async fn remove_image(&self, id: &str) -> Result<(), RuntimeError> {
        self.delete_image(id).await
    }

    async fn fetching(&self) -> Result<Fetching, RuntimeError> {
        self.fetch_progress().await
    }

    async fn pull(
        &self,
        name: &str,
        credentials: Option<Credentials>,
        sandbox: &pb::PodSandboxConfig,
    ) -> Result<String, RuntimeError> {
        self.pull_image(pull_request(name, credentials, sandbox))
            .await
    }

    async fn events(&self) -> Result<mpsc::Receiver<RuntimeEvent>, RuntimeError> {
        super::events::follow(&self.channel, &self.runtime).await
    }
}
